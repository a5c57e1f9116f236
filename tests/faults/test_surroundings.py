"""What surrounds a program: its command line, search path, interpreter, standard streams, folder; frozen programs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import PACKAGE_FOLDER, TESTS_FOLDER, script

pytestmark = pytest.mark.own_start

WORKS = """
import os, sys
import numpy as np
import synk

with synk.fork(2, backend="numpy") as rt:
    total = rt.function(lambda x: (x[0] and print("words"), x.sum())[1], outputs="sum")
    data = rt.data(np.arange(100.0))
    assert total(data) == 4950
    assert total.submit(np.arange(4.0)).result() == 6
    {more}
with open({path!r}, "a") as file:
    file.write("works")
"""


def run_closed(
    tmp_path: Path, code: str, closed: tuple[int, ...] = (), arguments: tuple[str, ...] = (), stderr: bytes = b""
) -> None:
    """Run a program whose descriptors ``closed`` are closed from the start; its word of success is in a file."""
    program, said = tmp_path / "program.py", tmp_path / "said"
    program.write_text(code, encoding="utf-8")
    close = " ".join(f"{fd}{'<' if fd == 0 else '>'}&-" for fd in closed)
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {close}', sys.executable, "-W", "error", str(program), *arguments],
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE_FOLDER), str(TESTS_FOLDER)])},
    )
    assert done.returncode == 0 and done.stderr == stderr, done.stderr.decode()
    assert said.read_text(encoding="utf-8") == "works"


# ----- the first message to a worker


@pytest.mark.parametrize("nbytes", [pytest.param(109_000, marks=pytest.mark.storm), 131_072, 1_000_000])
def test_I4_long_command_lines(tmp_path: Path, nbytes: int) -> None:
    """As of ``train.py data/*.npy``; the workers see them, too."""
    files = tuple(f"data/part-{number:06}.npy" for number in range(nbytes // 20))
    more = "assert rt.function(lambda x: repr(sys.argv), outputs=None)(np.ones(1))[0] == repr(sys.argv)"
    run_closed(tmp_path, WORKS.format(path=str(tmp_path / "said"), more=more), (), files)


def test_I4_odd_entries_of_the_search_path_and_of_the_arguments() -> None:
    """Only strings count in a search path, as for Python's own imports; a path of 10 MB is no limit."""
    script("""
        import pathlib
        sys.path += [pathlib.Path("/some/where"), None, 3, b"/bytes"]
        sys.path += [f"/no/such/folder/{number}" for number in range(100)] + ["/" + "x" * 10_000_000]
        sys.argv = ["program", pathlib.Path("/data/file"), 7]
        with synk.fork(1, backend="numpy") as rt:
            seen = rt.function(lambda row: repr((sys.path, sys.argv)), outputs=None)(np.ones(1))[0]
        strings = [entry for entry in sys.path if type(entry) is str]
        assert seen == repr((strings, ["program", "/data/file", "7"])), seen[:1000]
        del sys.argv
        with synk.fork(1, backend="numpy") as rt:
            assert rt.function(lambda x: x.sum())(np.ones(1)) == 1
    """).check("")


# ----- the interpreter


@pytest.mark.parametrize("executable", [None, ""])
@pytest.mark.parametrize("base", ["set", "not set"])
@pytest.mark.sampled(90)
def test_I4_without_sys_executable(executable: str | None, base: str) -> None:
    """The interpreter is found where this one was installed, or is the program that runs."""
    script(f"""
        sys.executable = {executable!r}
        if {base!r} == "not set":
            del sys._base_executable
        with synk.fork(1, backend="numpy") as rt:
            assert rt.function(lambda x: x.sum(), outputs="sum")(np.arange(4.0)) == 6
            assert rt.function(lambda x: sys.version, outputs=None)(np.ones(1))[0] == sys.version
    """).check("")


# ----- standard streams

SUBSETS = [
    *((fd,) for fd in range(3)),
    *(pytest.param(pair, marks=pytest.mark.storm) for pair in itertools.combinations(range(3), 2)),
    (0, 1, 2),
]
OURS = """for fd in range(3):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        is_closed = fd in CLOSED
        assert not target.startswith(("socket", "anon_inode", "/memfd")), (fd, target)
        assert not (is_closed and target.startswith("pipe")), (fd, target)
"""


@pytest.mark.parametrize("closed", SUBSETS, ids=str)
def test_I4_standard_streams_that_are_closed(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """From the start, as of a daemon: nothing of synk takes their numbers, where C code and children would write."""
    more = OURS.replace("CLOSED", repr(closed))
    run_closed(tmp_path, WORKS.format(path=str(tmp_path / "said"), more=more), closed)


@pytest.mark.parametrize("closed", [(0, 1), (0, 1, 2)], ids=str)
def test_I4_standard_streams_that_the_program_closes(tmp_path: Path, closed: tuple[int, ...]) -> None:
    code = WORKS.format(path=str(tmp_path / "said"), more=OURS.replace("CLOSED", repr(closed)))
    code = code.replace("with synk.fork", f"for fd in {closed}:\n    os.close(fd)\nwith synk.fork", 1)
    code += "\nos._exit(0)\n"  # Python itself complains of streams that it cannot flush
    said = b"what workers print to stdout is dropped: sys.stdout raised OSError: [Errno 9] Bad file descriptor\n"
    run_closed(tmp_path, code, stderr=b"" if 2 in closed else said)


# ----- frozen programs

FROZEN = """#!{python}
import os, sys
sys.path[:0] = {search_path!r}
sys.frozen, sys.executable = True, os.path.abspath(__file__)
with open({starts!r}, "a") as file:
    file.write("started ")
import synk
{support}
with open({starts!r}, "a") as file:
    file.write("main ")
import numpy as np

class Local:
    def __init__(self, value):
        self.value = value

def work(x):
    return Local(float(x.sum()))

if {is_started}:
    with synk.fork(2, backend="numpy") as rt:
        parts = rt.function(work, outputs=None)(np.arange(4.0))
        print(sum(part.value for part in parts))
        rt.function(work, outputs=None).submit(np.arange(4.0)).result()
else:
    with synk.fork(backend="numpy", inline=True) as rt:
        print(rt.function(lambda x: x.sum(), outputs="sum")(np.arange(4.0)))
    try:
        synk.fork(2, backend="numpy")
    except synk.errors.StartupError as error:
        print("refused", "synk.freeze_support()" in str(error))
"""


@pytest.mark.parametrize("is_supported", [True, False])
def test_I4_a_frozen_program(tmp_path: Path, is_supported: bool) -> None:
    """A script that is its own interpreter plays it: whatever starts it runs all of it, or becomes a worker."""
    program, starts = tmp_path / "program", tmp_path / "starts"
    text = FROZEN.format(
        python=sys.executable,
        search_path=[str(PACKAGE_FOLDER)],
        starts=str(starts),
        support="synk.freeze_support()" if is_supported else "",
        is_started=is_supported,
    )
    program.write_text(text, encoding="utf-8")
    program.chmod(0o700)
    done = subprocess.run([str(program), "an argument"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    if is_supported:
        assert done.stdout == "6.0\n"
        assert starts.read_text(encoding="utf-8").count("started") == 3  # the program, and two that became workers
    else:
        assert done.stdout == "6.0\nrefused True\n"
        assert starts.read_text(encoding="utf-8").count("started") == 1
    assert starts.read_text(encoding="utf-8").count("main") == 1


# ----- files that lie in the current folder

CHDIR = """
        import signal, threading, time, warnings, logging
        from support import saboteurs
        from support.harness import kill_and_wait, pids

        os.chdir({folder!r})
        sys.path.insert(0, "")
        before = set(sys.modules)

        rt = synk.fork(2, backend="numpy")
        total = rt.function(lambda x: x.sum(), outputs="sum")
        assert total(np.arange(4.0)) == 6

        class Local:
            pass

        nested = rt.function(lambda box, x: {{"a": (x.sum(), [x.sum(), None]), "b": x.max()}}, bcast_inputs="box",
                             outputs="max")
        assert nested(Local(), np.arange(4.0))["b"] == 3
        assert nested({{"key": [np.ones(3), Local]}}, np.arange(4.0))["b"] == 3
        w = rt.shared({{"a": np.ones(3), "b": [np.zeros(2)]}})
        rows = rt.shared(np.arange(5.0), sharded=True)

        def assign(x):
            w.value = {{"a": w.value["a"] + 1, "b": w.value["b"]}}
            return 0.0

        rt.function(assign, outputs="first")(np.ones(2))
        assert w.value["a"][0] == 2
        rt.all_reduce(w, "avg")
        rt.broadcast(w)
        assert rt.gather(rows, nd_up=0).shape == (5,)
        assert total.submit(rt.data(np.ones(100_000))).result() == 100_000
        large = rt.function(lambda x: np.full(1 << 17, x.sum()), outputs="sum")
        assert large(np.ones(4))[0] == 4
        for kind, fail in (
            (ZeroDivisionError, lambda row: 1 / 0),
            (ValueError, lambda row: saboteurs.raise_value_error()),
        ):
            try:
                rt.function(fail)(np.arange(2))
            except kind:
                pass
            else:
                raise AssertionError("it did not fail")
        try:
            rt.function(lambda row: threading.Lock(), outputs=None)(np.arange(2))
        except synk.errors.SerializationError:
            pass
        lock = threading.Lock()
        try:
            rt.function(lambda row: lock)
        except synk.errors.SerializationError:
            pass
        try:
            rt.function(lambda row: [time.sleep(0.01) for _ in range(10**6)])(np.arange(2), timeout=0.3)
        except synk.errors.CallTimeout:
            pass
        try:
            rt.function(lambda row: os.kill(os.getpid(), 9))(np.arange(2))
        except synk.errors.WorkerDied:
            pass
        with warnings.catch_warnings(record=True):
            assert total(np.arange(4.0)) == 6
        kill_and_wait(rt._session.workers.by_rank[0].process.pid)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            assert total(np.arange(4.0)) == 6
        total.serial(np.arange(4.0))
        import synk._api.plain, synk._api.verify  # not called: on a rank NumPy itself would look for its random numbers
        assert total.plan(np.ones(4)).ranks
        assert len(total.cprofile(np.ones(4))) == 2
        assert list(total.stream([np.ones(2)])) == list(total.rows(np.ones(2), batch_size=2)) == [2.0]
        assert list(rt.map(abs, [-1])) == [1]
        with synk.Executor(runtime=rt) as executor:
            assert executor.submit(abs, -1).result() == 1
        assert "total" in total._repr_html_() + rt.profile._repr_html_()
        assert synk.Program and synk.FunctionWrapper(total)
        assert rt.function(lambda x: x.sum(), outputs="sum", on_oom="slices")(np.ones(2)) == 2
        assert total.on(rt)(np.ones(2)) == 2
        str(rt.profile), rt.info(), synk.info(), rt.where(), repr(rt)
        logging.getLogger("synk").warning("something")
        rt.close()
        print(sorted(name for name in set(sys.modules) - before if "." not in name))
"""


def test_I3_files_in_a_folder_that_the_master_goes_to(tmp_path: Path) -> None:
    """With "" on the search path, as in a session: no module is first looked for when a verb needs it."""
    folder, ran = tmp_path / "folder", tmp_path / "ran"
    folder.mkdir()
    for name in {*sys.stdlib_module_names, "cloudpickle", "optree", "typing_extensions", "synk", "numpy"}:
        text = f"import os\nopen({str(ran)!r}, 'a').write(f'{{os.getpid()}} {name}\\n')\nraise ImportError({name!r})\n"
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    result = script(
        "print(os.getpid(), flush=True)\n" + CHDIR.format(folder=str(folder)).replace("\n        ", "\n"), timeout=60
    )
    pid = result.stdout.split()[0]
    planted = ran.read_text(encoding="utf-8").splitlines() if ran.exists() else []
    assert [line for line in planted if line.startswith(pid)] == [], result.stderr
    result.check(stderr=None)
    assert [line for line in planted if not line.endswith(("optree",))] == []
