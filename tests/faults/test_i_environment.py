"""I: where a program runs, and who else is on the machine."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import zipapp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import (
    PACKAGE_FOLDER,
    TESTS_FOLDER,
    assert_right,
    descriptors,
    pids,
    script,
)

from synk._wire.channel import HEADER, ProtocolError, decode_header, encode_header
from synk.errors import StartupError, SynkError, WorkerDied

Fork = Callable[..., Any]
PROGRAM = """
from support.harness import assert_right
with synk.fork(1, backend="numpy") as rt:
    assert_right(rt)
    try:
        rt.function(lambda row: 1 / 0)(np.arange(1))
    except ZeroDivisionError:
        print("works")
"""


@pytest.mark.own_start
def test_I1_folders_with_odd_names(tmp_path: Path) -> None:
    """With spaces and quotes, with a line break, not in UTF-8, and long."""
    folder = os.path.join(os.fsencode(tmp_path), b"a 'folder'\nnot-utf8-\xff\xfe" + b"d" * 200)
    os.mkdir(folder)
    script(PROGRAM, cwd=os.fsdecode(folder)).check("works\n")
    shutil.rmtree(folder)


@pytest.mark.parametrize("locale", ["C", "de_DE.ISO-8859-1", "no such locale"])
@pytest.mark.own_start
def test_I1_locales(locale: str) -> None:
    code = PROGRAM.replace("1 / 0", "[print('gr\\u00fc\\u00dfe'), 1 / 0]").replace("works", "w\\u00f6rks")
    result = script(code, env={"LANG": locale, "LC_ALL": locale, "PYTHONIOENCODING": ""}, flags=()).check(None)
    assert "rks\n" in result.stdout


@pytest.mark.own_start
def test_I2_the_current_folder_was_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    script("import shutil; shutil.rmtree(os.getcwd())\n" + PROGRAM, cwd=folder).check("works\n")


@pytest.mark.own_start
def test_I3_modules_planted_in_the_current_folder(tmp_path: Path) -> None:
    """None of them runs, neither while a worker starts nor while it loads a function."""
    for module in ("pickle", "numpy", "synk", "json", "socket", "struct", "signal", "cloudpickle", "optree"):
        text = f"open({str(tmp_path / 'ran')!r}, 'a').write({module!r})"
        (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
    script(PROGRAM, cwd=tmp_path).check("works\n")
    assert not (tmp_path / "ran").exists()


def run(command: list[str], *, text: str | None = None, cwd: Path | None = None, flags: tuple[str, ...] = ()) -> str:
    """Run a Python program in some way of starting one; return its output, and expect nothing on standard error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE_FOLDER), str(TESTS_FOLDER)])}
    done = subprocess.run(
        [sys.executable, *flags, *command],
        input=text,
        cwd=cwd,
        env=environment,
        capture_output=True,
        timeout=60,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


# No guard around the main program: its first line would be printed twice if it ran again in the workers.
SAME_PATH = f"""
print("main")
import sys
sys.path.append({str(PACKAGE_FOLDER)!r})
import numpy as np, synk
sys.path.insert(0, "/a/path/of/my/own")
def of_main(row):
    import sys
    return repr([sys.path, sys.flags.dev_mode, sys.flags.isolated, sys.warnoptions, sys.flags.optimize])
with synk.fork(1, backend="numpy") as rt:
    found = rt.function(of_main, outputs=None)(np.arange(1))
    if found != [of_main(None)]:
        sys.exit(chr(10).join([*found, of_main(None)]))
print("same")
"""


@pytest.mark.parametrize("flags", [(), ("-I",), ("-E", "-s", "-O", "-X", "dev", "-W", "error::UserWarning")], ids=str)
def test_I4_the_interpreters_options_hold_in_workers(tmp_path: Path, flags: tuple[str, ...]) -> None:
    path = tmp_path / "program.py"
    path.write_text(SAME_PATH, encoding="utf-8")
    assert run([str(path)], flags=flags) == "main\nsame\n"


@pytest.mark.parametrize("way", ["-c", "stdin", "-m", "zipapp", "folder"])
def test_I4_ways_to_start_a_program(tmp_path: Path, way: str) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text(SAME_PATH, encoding="utf-8")
    if way == "-c":
        output = run(["-c", SAME_PATH], cwd=tmp_path)
    elif way == "stdin":
        output = run(["-"], text=SAME_PATH, cwd=tmp_path)
    elif way == "-m":
        output = run(["-m", "package"], cwd=tmp_path)
    elif way == "zipapp":
        zipapp.create_archive(package, tmp_path / "app.pyz")
        output = run([str(tmp_path / "app.pyz")])
    else:
        output = run([str(package)])
    assert output == "main\nsame\n"


@pytest.mark.parametrize(
    "value", [None, "1,0", *(pytest.param(each, marks=pytest.mark.storm) for each in ("", "-1", "0,0", "GPU-8932f937"))]
)
@pytest.mark.own_start
def test_I5_the_choice_of_devices_is_the_users(
    value: str | None, monkeypatch: pytest.MonkeyPatch, runtime: Fork
) -> None:
    """CPU workers leave it alone, the environment of the master stays as it is. The mapping: tests/backends."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    before = dict(os.environ)
    rt = runtime(1)
    assert rt.function(lambda row: {os.environ.get("CUDA_VISIBLE_DEVICES")}, outputs=None)(np.arange(1)) == [{value}]
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "case", ["missing", "file", *(pytest.param(case, marks=pytest.mark.storm) for case in ("read-only", "link"))]
)
@pytest.mark.own_start
def test_I6_no_temporary_files_are_needed(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "tmp"
    if case == "file":
        folder.write_text("", encoding="utf-8")
    elif case == "link":
        folder.symlink_to(tmp_path / "nowhere")
    elif case == "read-only":
        folder.mkdir(mode=0o500)
    script(PROGRAM, env={"TMPDIR": str(folder), "TMP": str(folder), "TEMP": str(folder)}).check("works\n")
    assert [path.name for path in tmp_path.iterdir()] == ([] if case == "missing" else ["tmp"])


@pytest.mark.parametrize("umask", ["0o000", "0o777"])
@pytest.mark.own_start
def test_I7_memory_is_its_owners_alone(umask: str) -> None:
    script(f"""
        import stat
        os.umask({umask})
        with synk.fork(2, backend="numpy") as rt:
            data = rt.data(np.ones(1 << 16))
            assert rt.function(lambda x: x.sum(), outputs="sum")(data) == 1 << 16
            modes = set()
            for fd in os.listdir("/proc/self/fd"):
                try:
                    if "memfd:synk" in os.readlink("/proc/self/fd/" + fd):
                        modes.add(stat.S_IMODE(os.fstat(int(fd)).st_mode))
                except OSError:
                    continue
            print([oct(mode) for mode in modes])
    """).check("['0o600']\n")


def sockets_of(*processes: int) -> list[str]:
    """Return the kernel's lines of the sockets that processes hold: tcp, udp and unix, listening or not."""
    inodes = set()
    for pid in processes:
        for target in descriptors(pid):
            match = re.match(r"socket:\[(\d+)\]", target)
            if match:
                inodes.add(match.group(1))
    lines = []
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "unix"):
        path = Path("/proc/net", table)
        for line in path.read_text(encoding="ascii").splitlines()[1:] if path.exists() else []:
            if inodes & set(line.split()):
                lines.append(f"{table} {line}")
    return lines


@pytest.mark.own_start
def test_I8_nothing_to_connect_to(runtime: Fork) -> None:
    """Only nameless socket pairs: no port, no path, no abstract name, nothing that listens."""
    before = set(sockets_of(os.getpid()))
    rt = runtime(2)
    data = rt.data(np.ones(1 << 16))
    assert rt.function(lambda x: x.sum(), outputs="sum")(data) == 1 << 16
    own = set(sockets_of(os.getpid(), *pids(rt))) - before
    assert own, "the pairs themselves must be seen, or this test looks in the wrong place"
    for line in own:
        fields = line.split()
        assert fields[0] == "unix"
        assert fields[4] == "00000000", f"flags: accepting connections: {line}"
        assert len(fields) == 8, f"a name: {line}"


def test_I9_damaged_packets_are_refused() -> None:
    """Every bit of the header counts; 100000 packets of which none may be taken for the true one."""
    token = os.urandom(32)
    body = b"body"
    true = encode_header(7, len(body), token) + body
    assert decode_header(true, token)[1:] == (7, len(body))
    rng = random.Random(9)
    sequence_at = range(struct.calcsize("<4sHH"), struct.calcsize("<4sHHI"))  # compared by its reader
    for _ in range(100_000):
        packet = bytearray(true)
        kind = rng.randrange(4)
        if kind == 0:
            at = rng.choice([n for n in range(HEADER.size) if n not in sequence_at])
            packet[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del packet[rng.randrange(len(packet)) :]
        elif kind == 2:
            packet += bytes(rng.randrange(1, 9))
        else:
            packet[: HEADER.size] = rng.randbytes(HEADER.size)
        try:
            flags, _, _ = decode_header(bytes(packet), token)
        except ProtocolError:
            continue
        assert flags, "a damaged packet was accepted"


@pytest.mark.parametrize("junk", [b"", b"x", b"junk" * 20, bytes(64), b"\xff" * 128], ids=len)
@pytest.mark.parametrize("to", ["socket", "pipe"])
@pytest.mark.sampled(90)
def test_I9_junk_on_the_channel_of_a_worker(runtime: Fork, junk: bytes, to: str) -> None:
    """Written by code inside the worker, to every descriptor it has: that worker counts as dead, or nothing happens."""
    rt = runtime(2)

    def write_junk(row: np.ndarray) -> None:
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
                if fd > 2 and row[0] == 1 and target.startswith(to):
                    os.set_blocking(fd, False)
                    os.write(fd, junk)
                    os.set_blocking(fd, True)
            except OSError:
                continue

    try:
        rt.function(write_junk, outputs=None)(np.arange(2))  # no time limit: it must not be needed
    except SynkError as error:
        assert isinstance(error, WorkerDied), error
    for _ in range(3):
        try:
            assert_right(rt)
            break
        except (WorkerDied, RuntimeWarning):
            continue
    assert_right(rt)


def test_I10_the_secret_is_nowhere_to_be_read(runtime: Fork) -> None:
    """Not in the argument lists, the environments, the words of an object or an error."""
    rt = runtime(2)
    assert_right(rt)
    secrets = [value for value in secrets_of(rt) if len(value) >= 16]
    assert secrets, "the token must be found in the runtime, or this test looks for nothing"
    try:
        rt.function(lambda row: saboteurs.kill_self())(np.arange(2))
    except WorkerDied as error:
        died = f"{error!r} {error}"
    assert_right(rt)
    shown = " ".join([repr(rt), str(rt), rt.info(), died, repr(rt.data(np.ones(3)))]).encode()
    for pid in (os.getpid(), *pids(rt)):
        shown += Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    for secret in secrets:
        assert secret not in shown
        assert secret.hex().encode() not in shown


def secrets_of(thing: Any, depth: int = 3, seen: set[int] | None = None) -> list[bytes]:
    """Return the values of attributes named like a token, of an object and what it holds."""
    seen = set() if seen is None else seen
    if depth < 0 or id(thing) in seen:
        return []
    seen.add(id(thing))
    found = []
    if isinstance(thing, (list, tuple)):
        names = {str(number): value for number, value in enumerate(thing)}
    else:
        names = getattr(thing, "__dict__", {})
    for name, value in names.items():
        if "token" in name:
            found.append(value if isinstance(value, bytes) else bytes.fromhex(value))
        elif type(value).__module__.startswith("synk") or isinstance(value, (list, tuple)):
            found += secrets_of(value, depth - 1, seen)
    return found


@pytest.mark.own_start
def test_I11_workers_inherit_none_of_the_users_descriptors(runtime: Fork, tmp_path: Path) -> None:
    opened = [os.open(tmp_path / f"file{number}", os.O_CREAT | os.O_WRONLY) for number in range(50)]
    left, right = socket.socketpair()
    reader, writer = os.pipe()
    for fd in (left.fileno(), right.fileno(), reader, writer, *opened):
        os.set_inheritable(fd, True)
    users = {os.readlink(f"/proc/self/fd/{fd}") for fd in (left.fileno(), right.fileno(), reader, writer)}
    try:
        rt = runtime(2)
        for targets in rt.function(lambda row: saboteurs.open_targets(), outputs=None)(np.arange(2)):
            assert not users & set(targets)
            assert not [target for target in targets if "file" in target and str(tmp_path) in target]
            kinds = {re.sub(r"[:\[].*", "", target) for target in targets}
            assert kinds <= {"/dev/null", "pipe", "socket", "anon_inode", f"/proc/{os.getpid()}/fd"} | {
                kind for kind in kinds if kind.startswith(("/proc/", "/memfd"))
            }
    finally:
        left.close()
        right.close()
        for fd in (reader, writer, *opened):
            os.close(fd)


@pytest.mark.own_start
def test_I12_nothing_is_unpickled_from_a_file() -> None:
    """Neither the master nor a worker opens a file while it loads a pickle, modules aside."""
    script("""
        from support import saboteurs
        opened = []
        rt = synk.fork(2, backend="numpy")
        rt.function(lambda row: saboteurs.watch_files(), outputs=None)(np.arange(2))
        saboteurs.watch_files()
        f = rt.function(lambda w, x: x.sum() + w["a"].sum(), bcast_inputs="w", outputs="sum")
        data = rt.data(np.ones(100_000))
        for _ in range(3):
            f({"a": np.ones(100_000)}, data)
        print(rt.function(lambda row: repr(saboteurs.watched_files()), outputs=None)(np.arange(2)))
        print(saboteurs.watched_files())
        rt.close()
    """).check("['[]', '[]']\n[]\n")


@pytest.mark.own_start
def test_I_startup_errors_show_the_workers_words(runtime: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that cannot start says why, through the error."""
    monkeypatch.setenv("PYTHONHOME", "/does/not/exist")
    with pytest.raises(StartupError, match=r"(?i)home|encodings|init"):
        runtime(1).distribute()
