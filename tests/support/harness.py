"""Tools of the fault tests: the census of what a process holds, failpoints, scenario scripts.

A *census* lists everything that a runtime could leave behind. A *scenario* is a program in a process, a session and a
hang dump of its own: for faults that would end the test process, and for everything about the end of a program.
Reads only /proc; imports neither pytest nor anything heavy, so that scenarios may import it too.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import uuid
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import synk
from support.nursery_process import NAME as NURSERY
from synk._processes.program import ARMED
from synk._wire.cell import WORKER_ARGUMENT

TESTS_FOLDER = Path(__file__).resolve().parents[1]
PACKAGE_FOLDER = Path(synk.__file__).resolve().parents[1]

FAILPOINTS = (
    "start.import",
    "start.ready",
    "call.received",
    "call.before_function",
    "call.after_function",
    "call.published",
    "call.before_reply",
    "call.after_header",
    "call.after_reply",
    "collective.before",
    "collective.after",
    "reduce.before",
    "reduce.after",
    "distribute.loading",
    "close.received",
)
ACTIONS = ("kill", "segv", "exit", "raise", "sleep", "stop")
EVERY_TIME = 0

# How long to wait for what happens at once on an idle machine: other programs may have the processor meanwhile.
PATIENCE_S = 30.0


Failpoint = tuple[str, int, int, str]


def failpoint(name: str, rank: int, nth: int = 1, action: str = "kill") -> Failpoint:
    """Return a failpoint for ``runtime(n, failpoint(...))``.

    Parameters
    ----------
    name : str
        A step of the worker, one of ``FAILPOINTS``.
    rank : int
        The worker that fails.
    nth : int
        The visit of that step at which it fails, counted from 1 in the rank's first process; a worker that was
        started in its place does not fail again. ``EVERY_TIME``: at each visit, in replacements too.
    action : str
        One of ``ACTIONS``. ``exit`` is ``os._exit(3)``, ``sleep`` lasts longer than any test.
    """
    if name not in FAILPOINTS or action not in ACTIONS:
        raise ValueError(f"cannot arm failpoint {name!r}, action {action!r}: unknown.")
    return (name, rank, nth, action)


@contextlib.contextmanager
def armed(*failpoints: Failpoint) -> Iterator[None]:
    """Have runtimes that are made in the body start workers with failpoints."""
    token = ARMED.set(failpoints)
    try:
        yield
    finally:
        ARMED.reset(token)


def arm(runtime: Any, *failpoints: Failpoint) -> None:
    """Arm failpoints in the living workers, in the place of those that they have.

    Visits count from the next message on. A worker that is started again has none, so ``EVERY_TIME`` and the steps of
    a start need a runtime of their own.
    """

    def rearm(row: np.ndarray) -> None:
        from synk._rank import failpoints as _failpoints
        from synk._wire.cell import cell

        reach = _failpoints.arm(failpoints, int(row[0]))
        is_over = False

        def reach_after_this_call(step: str) -> None:
            nonlocal is_over
            if is_over:
                reach(step)
            is_over = is_over or step == "call.after_reply"

        cell.worker.failpoint = reach_after_this_call if failpoints else _failpoints.nothing

    _armed_runtimes.add(runtime)
    runtime.function(rearm, outputs=None)(np.arange(runtime.world_size))
    if not failpoints:
        _armed_runtimes.discard(runtime)


def disarm(runtime: Any) -> None:
    """Take away the failpoints of workers that were armed."""
    if runtime in _armed_runtimes:
        arm(runtime)


_armed_runtimes: weakref.WeakSet[Any] = weakref.WeakSet()


# ----- the census


@dataclass(frozen=True)
class Census:
    """What this process holds. ``fds``: targets with their count; ``threads``: Python threads; ``descendants``:
    (pid, start time, command); ``memfds``: inodes of the mapped segments. Nothing in it is another program's. That no
    memory ever has a name is shown by ``test_harness.py``, in a mount where nobody else can make one.
    """

    fds: Counter[str]
    threads: frozenset[tuple[int | None, str]]
    descendants: frozenset[tuple[int, int, str]]
    memfds: frozenset[int]

    def leftovers(self, before: Census) -> list[str]:
        """Return what is here and was not in ``before``, one line each."""
        lines = [f"descriptor {target} x{count}" for target, count in (self.fds - before.fds).items()]
        lines += [f"thread {name}" for _, name in self.threads - before.threads]
        lines += [f"process {pid} ({command})" for pid, _, command in self.descendants - before.descendants]
        lines += [f"mapped segment {inode}" for inode in self.memfds - before.memfds]
        return lines


def census() -> Census:
    """Count what this process holds now."""
    return Census(
        fds=descriptors(),
        threads=frozenset((thread.ident, thread.name) for thread in threading.enumerate()),
        descendants=frozenset(descendants(os.getpid())),
        memfds=mapped_memfds(),
    )


def start_polars() -> None:
    """Have polars, where it is installed, open what it keeps from its first query on, before a census is taken."""
    if WORKER_ARGUMENT in sys.argv:  # a worker takes none
        return
    try:
        import polars
    except ModuleNotFoundError:
        return

    polars.DataFrame({"a": [1]}).filter(polars.col("a") > 0)


def settled_census(before: Census) -> Census:
    """Return the census, taken again after a garbage collection where something is left."""
    now = census()
    if now.leftovers(before):
        gc.collect()
        now = census()
    return now


def descriptors(pid: int | str = "self") -> Counter[str]:
    """Return the targets of a process's open descriptors; memory files carry their inode."""
    targets: Counter[str] = Counter()
    folder = f"/proc/{pid}/fd"
    for fd in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{fd}")
            if target.startswith("/memfd:"):
                target = f"{target.removesuffix(' (deleted)')}#{os.stat(f'{folder}/{fd}').st_ino}"
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        targets[target] += 1
    return targets


def mapped_memfds(pid: int | str = "self") -> frozenset[int]:
    """Return the inodes of the memory files that a process has mapped."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        text = file.read()
    return frozenset(int(line.split()[4]) for line in text.splitlines() if "/memfd:synk" in line)


def process_stat(pid: int) -> tuple[str, str, int, int] | None:
    """Return (command, state, parent, start time) of a process, ``None`` where there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    command, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    return command, fields[0], int(fields[1]), int(fields[19])


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, of all its threads, without the nursery that forks its workers."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += [int(word) for word in file.read().split()]
    return [child for child in found if not is_nursery(child)]


def is_nursery(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/comm", "rb") as file:
        return file.read() == f"{NURSERY}\n".encode()
    return False


lasting_processes: set[int] = set()
"""Children that live as long as this process, and are nobody's leftover."""


def descendants(pid: int) -> Iterator[tuple[int, int, str]]:
    """Yield (pid, start time, command) of all descendants, dead ones that were not reaped included."""
    for child in children(pid):
        found = process_stat(child)
        if found is not None and child != _resource_tracker_pid() and child not in lasting_processes:
            yield child, found[3], found[0]
            yield from descendants(child)


def _resource_tracker_pid() -> int | None:
    """The standard library's tracker lives as long as the program; it is nobody's leftover."""
    module: Any = sys.modules.get("multiprocessing.resource_tracker")
    return None if module is None else module._resource_tracker._pid


def wait_until_dead(pid: int, timeout_s: float = PATIENCE_S) -> bool:
    """Wait for a process to end (it may stay a zombie); whether it did."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(pidfd)


def kill_and_wait(*pids: int, signal_number: int = signal.SIGKILL) -> None:
    """End processes of this test's own and wait until they are dead."""
    for pid in pids:
        os.kill(pid, signal_number)
    for pid in pids:
        assert wait_until_dead(pid), f"process {pid} survived signal {signal_number}"


def kill_in(seconds: float, pid: int, signal_number: int = signal.SIGKILL) -> threading.Timer:
    """Return a timer that sends a signal to a descendant, unless it has ended by then: its number may be another's."""
    pidfd = os.pidfd_open(pid) if pid in {each for each, *_ in descendants(os.getpid())} else None

    def kill() -> None:
        if pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal_number)
            os.close(pidfd)

    return threading.Timer(seconds, kill)


def wait_for(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> bool:
    """Wait until ``condition()`` holds, for what only /proc can tell; whether it did."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def waits_in_synk(*but_not_in: str) -> bool:
    """Whether the main thread is inside of the package, and in none of those verbs, which return while calls run."""
    frame, names = sys._current_frames()[threading.main_thread().ident or 0], set()
    while frame is not None:
        if frame.f_code.co_filename.startswith(str(PACKAGE_FOLDER / "synk")):
            names.add(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return bool(names) and names.isdisjoint(but_not_in)


@contextlib.contextmanager
def ctrl_c_when(condition: Callable[[], object], *, is_told_to_main: bool = True) -> Iterator[None]:
    """Press Ctrl-C as soon as ``condition()`` holds, which must not be before the body has begun to wait.

    The KeyboardInterrupt leaves the block: ``pytest.raises`` belongs around it. Where it is not told to the main
    thread, another one gets the signal, and no system call of the main thread is interrupted.
    """
    waited: list[bool] = []

    def press() -> None:
        waited.append(wait_for(condition))
        if not waited[0]:
            return
        if is_told_to_main:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=press)
    try:
        thread.start()
        yield
    finally:
        thread.join()
        assert waited == [True], "what Ctrl-C was to wait for did not happen"


# ----- the after-state


def pids(runtime: Any) -> list[int]:
    """Return the pid of each rank, asked of the workers themselves."""
    return runtime.function(lambda row: os.getpid(), outputs=None)(np.arange(runtime.world_size))


def assert_right(runtime: Any, rows: int = 11) -> None:
    """Assert that the next calls equal NumPy: an average, a sum and a gather, over rows that do not divide evenly."""
    matrix = np.arange(rows * 3, dtype=np.float64).reshape(rows, 3)
    total = runtime.function(lambda x: (x.mean(axis=0), x.sum(axis=0), x * 2), outputs=("avg", "sum", "gather"))
    mean, summed, doubled = total(matrix)
    np.testing.assert_allclose(mean, matrix.mean(axis=0), rtol=1e-12)
    np.testing.assert_array_equal(summed, matrix.sum(axis=0))
    np.testing.assert_array_equal(doubled, matrix * 2)


@contextlib.contextmanager
def nothing_sent(runtime: Any) -> Iterator[None]:
    """Assert that the body sends no message to any worker: what it does is refused before."""
    before = runtime.counters["messages_down"]
    yield
    assert runtime.counters["messages_down"] == before, "workers were told of what is refused"


@contextlib.contextmanager
def same_workers(runtime: Any) -> Iterator[list[int]]:
    """After-state *usable*: the same pids answer after the body, and right."""
    before = pids(runtime)
    yield before
    assert pids(runtime) == before
    assert_right(runtime)


@contextlib.contextmanager
def replaced_workers(runtime: Any, ranks: Iterable[int]) -> Iterator[list[int]]:
    """After-state *replaced*: ``ranks`` were started again, the others live on, and the next call is right."""
    before = pids(runtime)
    dead = set(ranks)
    yield before
    assert_right(runtime)
    after = pids(runtime)
    assert {rank for rank in range(len(before)) if before[rank] != after[rank]} == dead
    assert not {before[rank] for rank in dead}.intersection(children(os.getpid())), "a dead worker was not reaped"


# ----- forked children


class Child:
    """A forked copy of this process that calls ``act()`` when it is told, and ends.

    Use as a context manager: the child acts when the body ends, and the test fails if it did not end with ``status``.
    """

    def __init__(self, act: Callable[[], object], status: int = 0) -> None:
        self._status = status
        there, self._told = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads, Python 3.12
            self.pid = os.fork()
        if self.pid:
            os.close(there)
            return
        status = 1
        try:
            os.close(self._told)
            os.read(there, 1)
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._told)
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == self._status, "the child failed"


# ----- scenario scripts

_MARK = "SYNK_TEST_SCENARIO"
_PRELUDE = """\
import faulthandler, os, signal, sys, threading, time
faulthandler.register(signal.SIGUSR2)
import numpy as np
from support.tables import named
import synk
"""
# The dump is asked for by a signal: faulthandler's own timer deadlocks the exit of a child made by os.fork.

_FORKING = "import numpy; from support.nursery_process import raise_own_workers; raise_own_workers(); "
forks_workers = False
"""Whether the programs of scenarios fork their workers (``support.nursery``) instead of starting them."""


@dataclass(frozen=True)
class Result:
    """How a scenario ended. ``leftovers``: processes that outlived it by ``grace_s``."""

    returncode: int
    stdout: str
    stderr: str
    leftovers: tuple[str, ...]

    def check(self, stdout: str | None = None, *, returncode: int = 0, stderr: str | None = "") -> Result:
        """Assert the exit status, the output where given, and that nothing is left."""
        assert self.returncode == returncode, f"exit status {self.returncode}\n{self.stdout}\n{self.stderr}"
        assert not self.leftovers, self.leftovers
        if stderr is not None:
            assert self.stderr == stderr, self.stderr
        if stdout is not None:
            assert self.stdout == stdout, self.stdout
        return self


class Scenario:
    """A running script. Use as a context manager; ``wait_for_line`` and signals in the body, then ``finish()``.

    Parameters
    ----------
    code : str
        The program; ``os signal sys threading time np synk`` are imported, the modules of ``support`` importable.
    timeout : float
        Seconds after which the program dumps its stacks and everything that it started is killed.
    flags : sequence of str
        Options of the interpreter.
    env : mapping
        Added to the environment.
    has_prelude : bool
        Whether the imports and the hang dump are put before ``code``.
    """

    def __init__(
        self,
        code: str,
        *,
        timeout: float = 90.0,
        flags: Sequence[str] = ("-W", "error"),
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | None = subprocess.DEVNULL,
        has_prelude: bool = True,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self._deadline = time.monotonic() + timeout
        self._folder = tempfile.TemporaryDirectory(prefix="synk-test-")
        path = Path(self._folder.name, "scenario.py")
        prelude = _PRELUDE if has_prelude else ""
        if has_prelude and forks_workers and tuple(flags) == ("-W", "error"):
            prelude = _FORKING + prelude
        path.write_text(prelude + textwrap.dedent(code), encoding="utf-8")
        search_path = os.pathsep.join([str(PACKAGE_FOLDER), str(TESTS_FOLDER)])
        self._output = {name: Path(self._folder.name, name) for name in ("stdout", "stderr")}
        with open(self._output["stdout"], "wb") as stdout, open(self._output["stderr"], "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *flags, str(path)],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                cwd=cwd,
                env={**os.environ, "PYTHONPATH": search_path, _MARK: self.mark, **(env or {})},
            )
        self.pid = self.process.pid

    def __enter__(self) -> Scenario:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._kill()
        self._folder.cleanup()

    def send_signal(self, signal_number: int) -> None:
        """Signal the program alone."""
        self.process.send_signal(signal_number)

    def wait_for_line(self, start: str) -> str:
        """Return the first line of standard output that begins with ``start``, waiting for it."""
        line = None
        while line is None:
            is_over = self.process.poll() is not None or time.monotonic() > self._deadline
            lines = self._text("stdout").splitlines(keepends=True)
            line = next((each for each in lines if each.startswith(start) and each.endswith("\n")), None)
            if line is None:
                assert not is_over, f"never printed {start!r}\n{self._text('stdout')}{self._text('stderr')}"
                time.sleep(0.005)
        return line.rstrip("\n")

    def finish(self, grace_s: float = 10.0) -> Result:
        """Wait for the end; return the result with what is left ``grace_s`` after it."""
        wait_until_dead(self.pid, max(self._deadline - time.monotonic(), 0.0))
        is_hung = self.process.poll() is None
        if is_hung:
            self.send_signal(signal.SIGUSR2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
        deadline = time.monotonic() + grace_s
        left = [pid for pid in self.processes() if not wait_until_dead(pid, max(deadline - time.monotonic(), 0.0))]
        leftovers = [] if is_hung else [f"process {pid} {process_stat(pid)}" for pid in left]
        self._kill()
        stdout, stderr = self._text("stdout"), self._text("stderr")
        assert not is_hung, f"the scenario hung\n{stdout}\n{stderr}"
        return Result(self.process.returncode, stdout, stderr, tuple(leftovers))

    def processes(self) -> list[int]:
        """Return the living processes of this scenario, wherever they were moved: they carry its mark."""
        return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and self._is_marked(int(entry))]

    def _is_marked(self, pid: int) -> bool:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            return f"{_MARK}={self.mark}".encode() in file.read()
        return False

    def _kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                with contextlib.suppress(ProcessLookupError):
                    if self._is_marked(pid):  # still: the number may be another program's by now
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
        self.process.wait()

    def _text(self, name: str) -> str:
        return self._output[name].read_bytes().decode(errors="replace")


def script(code: str, *, timeout: float = 90.0, grace_s: float = 10.0, **options: Any) -> Result:
    """Run a scenario to its end. Options as for ``Scenario``."""
    with Scenario(code, timeout=timeout, **options) as scenario:
        return scenario.finish(grace_s)


def outcomes(code: str, cases: Sequence[tuple[Any, ...]], **options: Any) -> dict[tuple[Any, ...], str]:
    """Run one program for many cases, which differ in what they do and not in their surroundings.

    Parameters
    ----------
    code : str
        Defines a context manager ``surroundings()``, or not, and ``case(*values)``, which is called inside of it.
    cases : sequence of tuple
        Values whose ``repr`` is Python.

    Returns
    -------
    dict
        For each case its traceback, "" where it ended well. The program itself printed nothing and left nothing.
    """
    ask = textwrap.dedent(_ASK_EACH).replace("CASES", repr(list(cases)))
    answer = script(f"{textwrap.dedent(code)}\n{ask}", **options).check().stdout
    return dict(zip(cases, ast.literal_eval(answer), strict=True))


_ASK_EACH = """
    import contextlib, traceback

    outcomes = []
    with globals().get("surroundings", contextlib.nullcontext)():
        for values in CASES:
            try:
                case(*values)
                outcomes.append("")
            except BaseException:
                outcomes.append(traceback.format_exc())
    print(outcomes)
"""
