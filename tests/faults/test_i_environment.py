"""I: where a program runs, what surrounds it, and who else is on the machine."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import subprocess
import sys
import zipapp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import PACKAGE_FOLDER, TESTS_FOLDER, assert_right, pids, script

from synk.errors import StartupError, SynkError, WorkerDied

Fork = Callable[..., Any]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE_FOLDER), str(TESTS_FOLDER)])}


# ----- folders, locales, variables

PROGRAM = """
import shutil
from support.harness import assert_right
folder = os.getcwd()
for locale in ("no such locale", "C"):
    os.environ["LC_ALL"] = locale
    with synk.fork(1, backend="numpy") as rt:
        assert_right(rt)
        try:
            rt.function(lambda row: [print("gr\u00fc\u00dfe"), 1 / 0])(np.arange(1))
        except ZeroDivisionError:
            print("works")
    shutil.rmtree(folder, ignore_errors=True)
"""


@pytest.mark.own_start
def test_I1_I2_I6_a_program_works_in_any_folder_and_locale(tmp_path: Path) -> None:
    """In one with spaces, quotes, a line break and a long name that is not UTF-8, and in one that is deleted.

    It needs no temporary files: their folder is not there.
    """
    folder = os.path.join(os.fsencode(tmp_path), b"a 'folder'\nnot-utf8-\xff\xfe" + b"d" * 200)
    os.mkdir(folder)
    variables = dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(tmp_path / "missing"))
    variables |= {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": ""}
    result = script(PROGRAM, cwd=os.fsdecode(folder), env=variables, flags=()).check(None)
    assert re.fullmatch("(\\[rank 0\\] gr.*\nworks\n){2}", result.stdout)
    assert not [*tmp_path.iterdir()]


CHDIR = """
import logging
from support import saboteurs

os.chdir(FOLDER)
sys.path.insert(0, "")
rt = synk.fork(2, backend="numpy")
total = rt.function(lambda x: x.sum(), outputs="sum")
nested = rt.function(lambda box, x: {"a": (x.sum(), [x.sum(), None])}, bcast_inputs="box", outputs="max")
assert nested({"key": [np.ones(3)]}, np.arange(4.0))["a"] == (5, [5, None])
synk.all_reduce(rt.shared({"a": np.ones(3)}), "avg")
assert total.submit(rt.data(np.ones(100_000))).result() == 100_000
lock = threading.Lock()
for error, fail in (
    (ValueError, lambda row: saboteurs.raise_value_error()),
    (synk.errors.SerializationError, lambda row: lock),
    (synk.errors.CallTimeout, lambda row: saboteurs.loop_for_ever()),
    (synk.errors.WorkerDied, lambda row: saboteurs.kill_self()),
):
    try:
        rt.function(fail)(np.arange(2), timeout=0.5 if error is synk.errors.CallTimeout else None)
        raise AssertionError("it did not fail")
    except error:
        pass
assert total(np.arange(4.0)) == total.serial(np.arange(4.0)) == 6
assert list(total.stream([np.ones(2)])) == [2.0] and list(rt.map(abs, [-1])) == [1]
str(rt.profile), rt.info(), synk.info(), rt.where(), repr(rt)
logging.getLogger("synk").warning("something")
rt.close()
"""


@pytest.mark.own_start
def test_I3_files_in_a_folder_that_the_master_goes_to(tmp_path: Path) -> None:
    """With "" on the search path, as in a session: no module is first looked for when a verb needs it.

    None of them runs while a worker starts there, nor as it loads a function.
    """
    folder, ran = tmp_path / "folder", tmp_path / "ran"
    folder.mkdir()
    for name in {*sys.stdlib_module_names, "cloudpickle", "typing_extensions", "synk", "numpy"}:
        text = f"open({str(ran)!r}, 'a').write('{name} ')\nraise ImportError({name!r})\n"
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    result = script(f"FOLDER = {str(folder)!r}\n{CHDIR}", timeout=60)
    assert not ran.exists(), ran.read_text(encoding="utf-8")
    result.check(stderr=None)


# ----- how a program is started


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


@pytest.mark.own_start
def test_I4_ways_to_start_a_program(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """The interpreter's options hold in the workers."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text(SAME_PATH, encoding="utf-8")
    zipapp.create_archive(package, tmp_path / "app.pyz")
    ways = {
        "-I and -c": ["-I", "-c", SAME_PATH],
        "flags and -m": ["-E", "-s", "-O", "-X", "dev", "-W", "error::UserWarning", "-m", "package"],
        "stdin": ["-"],
        "zipapp": ["app.pyz"],
    }
    for way, command in ways.items():
        with subtests.test(way):
            done = subprocess.run(
                [sys.executable, *command],
                input=SAME_PATH,
                cwd=tmp_path,
                env=ENVIRONMENT,
                capture_output=True,
                timeout=60,
                text=True,
            )
            assert (done.stdout, done.stderr, done.returncode) == ("main\nsame\n", "", 0)


@pytest.mark.own_start
def test_I4_odd_arguments_and_interpreters() -> None:
    """Only strings count in a search path, as for Python's own imports; paths and command lines of 10 MB are no limit.

    An interpreter that ``sys.executable`` does not name is found where this one was installed.
    """
    script("""
        import pathlib
        sys.path += [pathlib.Path("/some/where"), None, 3, b"/bytes"]
        sys.path += [f"/no/such/folder/{number}" for number in range(100)] + ["/" + "x" * 10_000_000]
        parts = [f"data/{number}" + "x" * 100_000 for number in range(100)]
        sys.argv = ["program", pathlib.Path("/data/file"), 7, *parts]
        with synk.fork(1, backend="numpy") as rt:
            seen = rt.function(lambda row: repr((sys.path, sys.argv)), outputs=None)(np.ones(1))[0]
        strings = [entry for entry in sys.path if type(entry) is str]
        assert seen == repr((strings, ["program", "/data/file", "7", *parts])), seen[:1000]
        sys.executable = None
        del sys.argv
        with synk.fork(1, backend="numpy") as rt:
            assert rt.function(lambda row: sys.version, outputs=None)(np.ones(1)) == [sys.version]
    """).check("")


FROZEN = """#!{python}
import os, sys
sys.frozen, sys.executable = True, os.path.abspath(__file__)
import synk
with open({starts!r}, "a") as file:
    file.write("start ")
if {is_supported}:
    synk.freeze_support()
with open({starts!r}, "a") as file:
    file.write("main ")
import numpy as np

class Local:
    def __init__(self, value):
        self.value = value

try:
    with synk.fork(1, backend="numpy") as rt:
        print(rt.function(lambda x: Local(float(x.sum())), outputs=None)(np.arange(4.0))[0].value)
except synk.errors.StartupError as error:
    print("refused", "synk.freeze_support()" in str(error))
"""


@pytest.mark.own_start
@pytest.mark.parametrize("is_supported", [True, False])
def test_I4_a_frozen_program(tmp_path: Path, is_supported: bool) -> None:
    """A script that is its own interpreter plays it: whatever starts it runs all of it, or becomes a worker."""
    program, starts = tmp_path / "program", tmp_path / "starts"
    code = FROZEN.format(is_supported=is_supported, python=sys.executable, starts=str(starts))
    program.write_text(code, encoding="utf-8")
    program.chmod(0o700)
    command = [str(program), "an argument"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout == ("6.0\n" if is_supported else "refused True\n")
    assert starts.read_text(encoding="utf-8").split().count("start") == (2 if is_supported else 1)
    assert starts.read_text(encoding="utf-8").count("main") == 1


# ----- standard streams

STREAMLESS = """
import os, sys
import numpy as np
import synk

for fd in {closed_later}:
    os.close(fd)
with synk.fork(1, backend="numpy") as rt:
    total = rt.function(lambda x: (print("words"), x.sum())[1], outputs="sum")
    assert total(rt.data(np.arange(100.0))) == 4950
    assert total.submit(np.arange(4.0)).result() == 6
    for fd in range(3):
        try:
            target = os.readlink(f"/proc/self/fd/{{fd}}")
        except OSError:
            continue
        assert not target.startswith(("socket", "anon_inode", "/memfd")), (fd, target)
        assert not (fd in {closed} and target.startswith("pipe")), (fd, target)
with open({said!r}, "a") as file:
    file.write("works")
os._exit(0)  # Python itself complains of streams that it cannot flush
"""


@pytest.mark.own_start
@pytest.mark.parametrize(("from_the_start", "later"), [((0, 1, 2), ()), ((), (0, 1)), ((0,), (2,))])
def test_I4_standard_streams_that_are_closed(tmp_path: Path, from_the_start: Any, later: Any) -> None:
    """As of a daemon: nothing of synk takes their numbers, where C code and children would write."""
    program, said = tmp_path / "program.py", tmp_path / "said"
    code = STREAMLESS.format(closed_later=later, closed=(*from_the_start, *later), said=str(said))
    program.write_text(code, encoding="utf-8")
    close = " ".join(f"{fd}{'<' if fd == 0 else '>'}&-" for fd in from_the_start)
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -W error "$@" {close}', sys.executable, str(program)],
        capture_output=True,
        timeout=60,
        env=ENVIRONMENT,
    )
    dropped = b"what workers print to stdout is dropped: sys.stdout raised OSError: [Errno 9] Bad file descriptor\n"
    assert done.returncode == 0 and done.stderr == (dropped if 1 in later else b""), done.stderr.decode()
    assert said.read_text(encoding="utf-8") == "works"


# ----- who else is on the machine


def test_I5_the_choice_of_devices_is_the_users(monkeypatch: pytest.MonkeyPatch, runtime: Fork) -> None:
    """CPU workers leave it alone, the environment of the master stays as it is. The mapping: tests/backends."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    before = dict(os.environ)
    rt = runtime(1)
    assert rt.function(lambda row: os.environ["CUDA_VISIBLE_DEVICES"], outputs=None)(np.arange(1)) == ["1,0"]
    assert dict(os.environ) == before


def test_I7_memory_is_its_owners_alone(runtime: Fork) -> None:
    for umask in (0o000, 0o777):
        before = os.umask(umask)
        try:
            rt = runtime(2)
            data = rt.data(np.ones(1 << 16))
            assert rt.function(lambda x: x.sum(), outputs="sum")(data) == 1 << 16
        finally:
            os.umask(before)
        modes = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the listing itself
                if "memfd:synk" in os.readlink(f"/proc/self/fd/{fd}"):
                    modes.add(stat.S_IMODE(os.fstat(int(fd)).st_mode))
        assert modes == {0o600}


def test_I8_nothing_to_connect_to(runtime: Fork) -> None:
    """Only nameless socket pairs: no port, no path, no abstract name, nothing that listens; on a rank neither."""

    def named_sockets(row: object = None) -> list[str]:
        found = []
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                    with socket.socket(fileno=os.dup(fd)) as each:
                        listens = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                        if each.family != socket.AF_UNIX or each.getsockname() or listens:
                            found.append(f"{each}")
        return found

    before = named_sockets()
    assert runtime(2).function(named_sockets, outputs=None)(np.arange(2)) == [[], []]
    assert named_sockets() == before


def test_I9_junk_on_the_channel_of_a_worker(rt: Any, subtests: pytest.Subtests) -> None:
    """Written by code inside the worker, to every descriptor it has: that worker counts as dead, or nothing happens."""

    def write_junk(row: np.ndarray, junk: bytes, to: str) -> None:
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
                if fd > 2 and row[0] == 1 and target.startswith(to):
                    os.set_blocking(fd, False)
                    os.write(fd, junk)
                    os.set_blocking(fd, True)
            except OSError:
                continue

    f = rt.function(write_junk, bcast_inputs=("junk", "to"), outputs=None)
    for junk, to in ((b"x", "socket"), (b"junk" * 20, "pipe"), (bytes(64), "socket"), (b"\xff" * 128, "pipe")):
        with subtests.test(junk=junk, to=to):
            try:
                f(np.arange(2), junk, to)  # no time limit: it must not be needed
            except SynkError as error:
                assert isinstance(error, WorkerDied), error
            for _ in range(3):
                try:
                    assert_right(rt)
                    break
                except (WorkerDied, RuntimeWarning):
                    continue
            assert_right(rt)


@pytest.mark.own_start
def test_I10_no_secret_is_to_be_read(runtime: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's not in the words of an error; a runtime's not in those either, nor in what the system shows."""
    monkeypatch.setenv("MY_PASSWORD", "correct horse battery staple")
    rt = runtime(2)
    assert_right(rt)
    shown = [repr(rt), str(rt.info()), repr(rt.data(np.ones(3)))]
    shown += [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids(rt)]
    for fail in (saboteurs.raise_value_error, saboteurs.segfault):
        with pytest.raises((ValueError, WorkerDied)) as caught:
            rt.function(lambda row, fail=fail: fail())(np.arange(2))
        shown += [
            f"{caught.value!r} {caught.value} {caught.value.__cause__!r} {getattr(caught.value, '__notes__', '')}"
        ]
    assert not re.search(r"battery|[0-9a-fA-F]{24}", " ".join(shown))


@pytest.mark.own_start
def test_I11_workers_inherit_none_of_the_users_descriptors(runtime: Fork, tmp_path: Path) -> None:
    with open(tmp_path / "mine", "w", encoding="utf-8") as file:
        reader, writer = os.pipe()
        for fd in (file.fileno(), reader, writer):
            os.set_inheritable(fd, True)
        users = {os.readlink(f"/proc/self/fd/{fd}") for fd in (file.fileno(), reader)}
        for targets in runtime(2).function(lambda row: saboteurs.open_targets(), outputs=None)(np.arange(2)):
            assert not users & set(targets)
        os.close(reader)
        os.close(writer)


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
