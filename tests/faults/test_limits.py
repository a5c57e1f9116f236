"""Time limits: which numbers are one, what a Ctrl-C does while one is enforced, and workers that never come up."""

from __future__ import annotations

import decimal
import fractions
import itertools
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from support.harness import (
    EVERY_TIME,
    assert_right,
    children,
    failpoint,
    kill_and_wait,
    outcomes,
    pids,
    same_workers,
    script,
)

from synk._master.processes.reports import signs_of_life
from synk.errors import CallTimeout, ClosedError, StartupError

Fork = Callable[..., Any]

LIMITS = [
    1e7,
    1e10,
    1e300,
    float("inf"),
    10**400,
    2**31,
    np.float32(1e9),
    np.int64(5_000_000),
    fractions.Fraction(10**9),
    decimal.Decimal("1e12"),
]


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"{type(limit).__name__}-{str(limit)[:8]}")
def test_any_positive_number_is_a_time_limit(shared_runtimes: Any, limit: Any) -> None:
    rt = shared_runtimes[2]
    total = rt.function(lambda x: x.sum(), outputs="sum")
    x = np.arange(5.0)
    with same_workers(rt):
        assert total(x, timeout=limit) == 10
        pending = total.submit(x, timeout=limit)
        assert pending.result(limit) == 10
        assert total.serial(x, timeout=limit) == 10


def test_a_limit_without_end_is_waited_for_while_a_call_is_explained(
    runtime: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after the report of a long call, which is due before the limit."""
    for stuck_after in ("0.05", "0", "1e10"):
        monkeypatch.setenv("SYNK_STUCK_AFTER", stuck_after)
        rt = runtime(1, timeout=float("inf"))
        slow = rt.function(lambda x: (time.sleep(0.15), x.sum())[1], outputs="sum")
        assert slow(np.ones(3)) == 3
        assert slow(np.ones(3), timeout=1e7) == 3
        assert slow.submit(np.ones(3), timeout=1e10).result(float("inf")) == 3


@pytest.mark.parametrize("limit", [0, -1, -1e300, -(10**400), float("nan"), "5", b"5", [1], 1j, object])
def test_what_is_no_time_limit(shared_runtimes: Any, limit: Any) -> None:
    total = shared_runtimes[2].function(lambda x: x.sum(), outputs="sum")
    with pytest.raises(ValueError, match=r"cannot set a timeout: got .*, expected seconds above 0, or None"):
        total(np.ones(3), timeout=limit)


# ----- Ctrl-C while a call that has timed out is ended

TIMED_OUT = """
    from support import saboteurs
    import warnings
    from support.harness import assert_right, pids, wait_for
    from synk._master.workers.recovery import Recovery

    warnings.simplefilter("ignore", RuntimeWarning)
    rt = synk.fork(2, backend="numpy")
    w = rt.shared(np.arange(3.0))
    rows = rt.shared(np.arange(4.0), sharded=True)

    def assign(x):
        w.value = w.value + 1
        rows.value = rows.value * 10
        return 0.0

    rt.function(assign, outputs="first")(np.ones(2))
    stuck = rt.function(lambda row: saboteurs.loop_in_c() if row[0] else w.value.sum(), outputs=None)
    rt.distribute()
    before = pids(rt)
    end_calls = Recovery.end_calls

    def interrupted(*args):
        # The signal comes when the workers have been asked to end the call and the master waits for their answers.
        interrupts = [threading.Timer(1.0 * number, os.kill, (os.getpid(), signal.SIGINT)) for number in NUMBERS]
        for timer in interrupts:
            timer.start()
        try:
            end_calls(*args)
        finally:
            for timer in interrupts:
                timer.join()

    Recovery.end_calls = interrupted
"""


@pytest.mark.parametrize("way", ["call", "submit"])
def test_D3_one_ctrl_c_while_a_call_that_timed_out_is_ended(way: str) -> None:
    """It ends the wait for the worker that does not answer; the runtime stays open and variables keep their values."""
    script(
        "NUMBERS = (1,)\n"
        + TIMED_OUT.replace("\n    ", "\n")
        + f"""
rt._session.workers.recovery.grace_s = 1000.0  # without the signal the wait would outlast the test
try:
    if {way!r} == "call":
        stuck(np.arange(2), timeout=0.2)
    else:
        pending = stuck.submit(np.arange(2), timeout=0.2)
        pending.result()
except KeyboardInterrupt:
    print("interrupted")
Recovery.end_calls = end_calls
if {way!r} == "submit":
    try:
        pending.result()
    except synk.errors.CallTimeout:
        print("timed out")
assert not rt.is_closed
assert (w.value == np.arange(3.0) + 1).all(), w.value
assert (rows.value == np.arange(4.0) * 10).all(), rows.value
after = pids(rt)
assert after[0] == before[0] and after[1] != before[1], (before, after)
assert_right(rt)
rt.close()
"""
    ).check("interrupted\n" + ("timed out\n" if way == "submit" else ""))


def test_D3_the_second_ctrl_c_while_a_call_that_timed_out_is_ended() -> None:
    """Both come before the first one can be acted upon: the runtime is closed."""
    script(
        "NUMBERS = ()\n"
        + TIMED_OUT.replace("\n    ", "\n")
        + """
bury = rt._session.workers.processes.bury

def interrupted_again(worker):  # of the worker that the first Ctrl-C had killed
    os.kill(os.getpid(), signal.SIGINT)
    return bury(worker)

def interrupted_once(*args):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    end_calls(*args)

rt._session.workers.processes.bury, Recovery.end_calls = interrupted_again, interrupted_once
try:
    stuck(np.arange(2), timeout=0.2)
except KeyboardInterrupt:
    print("interrupted")
try:
    assert_right(rt)
except synk.errors.ClosedError as error:
    print("closed", "second Ctrl-C" in str(error.__cause__))
"""
    ).check("interrupted\nclosed True\n")


# ----- workers that are stuck as they start


SIGNS = "synk._master.workers.starting.signs_of_life"


@pytest.fixture
def no_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers that start give no sign of life but their start: one may still be on its way to where it sticks."""
    monkeypatch.setattr(SIGNS, lambda pid: 0)


def age(worker: Any) -> None:
    """Have a worker's process look as if it had been started long ago."""
    worker.process.started -= 1000


def aged(rt: Any, rank: int) -> Callable[..., None]:
    """Return what starts processes that are stuck, and have been for long, in the place of those of ``rank``."""
    processes = rt._session.workers.processes
    start = processes.start_again

    def start_stuck(worker: Any, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as context:
            if worker.rank == rank:
                context.setattr(processes, "_failpoints", [failpoint("start.ready", rank, EVERY_TIME, "stop")])
            start(worker, *args)
        if worker.rank == rank:
            age(worker)

    return start_stuck


def calls_until_it_works(rt: Any, timeout: float | None) -> list[str]:
    """Call until a call ends well; return what was raised and warned before."""
    total = rt.function(lambda x: x.sum(), outputs="sum")
    happened = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while True:
            try:
                assert total(np.arange(4.0), timeout=timeout) == 6
                break
            except CallTimeout as error:
                happened.append(type(error).__name__)
    return happened + [str(warning.message) for warning in caught]


@pytest.mark.parametrize("action", ["sleep", "stop"])
@pytest.mark.parametrize("timeout", [0.2, None])
@pytest.mark.sampled(90)
@pytest.mark.usefixtures("no_signs")
def test_A12_a_worker_that_is_stuck_as_it_starts_is_replaced(runtime: Fork, action: str, timeout: float | None) -> None:
    """The time counts from the start of its process on, however short the limits of the calls are."""
    rt = runtime(2, failpoint("start.ready", 1, 1, action))
    first = [worker.process.pid for worker in rt._session.workers.by_rank]
    if timeout is not None:
        for _ in range(2):
            with pytest.raises(CallTimeout, match="still starting"):
                rt.function(lambda x: x.sum())(np.arange(4.0), timeout=timeout)
    assert rt._session.workers.by_rank[1].process.pid == first[1]
    age(rt._session.workers.by_rank[1])
    assert calls_until_it_works(rt, timeout)[-1] == (
        f"rank 1 (pid {first[1]}) was not up 120 s after its last sign of life, was killed, and was started again. "
        "What functions kept there, in closures or globals, is gone."
    )
    after = pids(rt)
    assert after[0] == first[0] and after[1] != first[1]
    assert first[1] not in children(os.getpid())
    assert_right(rt)


@pytest.mark.usefixtures("no_signs")
def test_A12_a_replacement_that_is_stuck_as_it_starts_is_replaced(
    runtime: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt = runtime(2)
    before = pids(rt)
    kill_and_wait(before[1])
    with monkeypatch.context() as context:
        context.setattr(rt._session.workers.processes, "start_again", aged(rt, 1))
        context.setattr(
            rt._session.workers.starting,
            "_replace_stuck",
            lambda: (context.undo(), rt._session.workers.starting._replace_stuck()),
        )
        happened = calls_until_it_works(rt, None)
    assert (
        "ended with SIGKILL while idle" in happened[-1]
        and "was not up 120 s after its last sign of life" in happened[-1]
    )
    with same_workers(rt) as now:
        assert now[0] == before[0]


@pytest.mark.parametrize("timeout", [0.2, None])
@pytest.mark.parametrize("max_restarts", [0, 3])
@pytest.mark.sampled(90)
@pytest.mark.usefixtures("no_signs")
def test_A12_a_worker_that_never_comes_up_ends_the_runtime(
    runtime: Fork, monkeypatch: pytest.MonkeyPatch, timeout: float | None, max_restarts: int
) -> None:
    rt = runtime(2, failpoint("start.ready", 1, 1, "stop"), max_restarts=max_restarts)
    monkeypatch.setattr(rt._session.workers.processes, "start_again", aged(rt, 1))
    age(rt._session.workers.by_rank[1])
    with pytest.raises(StartupError, match="rank 1 of 2 was not up 120 s after its last sign of life"):
        calls_until_it_works(rt, timeout)
    with pytest.raises(ClosedError):
        rt.function(lambda x: x.sum())(np.ones(2))
    assert rt.is_closed


@pytest.mark.own_start
def test_a_worker_on_a_slow_file_system_has_time(runtime: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it reads, be it for longer than the limit; here no worker can start within it."""
    monkeypatch.setattr("synk._master.workers.starting.START_TIMEOUT_S", 0.01)
    numbers = itertools.count(1)
    monkeypatch.setattr(SIGNS, lambda pid: next(numbers))
    assert_right(runtime(2))
    monkeypatch.setattr(SIGNS, lambda pid: 0)
    with pytest.raises(StartupError, match=r"was not up 0\.01 s after its last sign of life"):
        rt = runtime(2)
        rt.function(lambda x: x.sum())(np.ones(2))


def test_reading_is_a_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(bytes(100_000))
    program = f"print(flush=True); input(); open({str(path)!r}, 'rb').read(); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        before = signs_of_life(child.pid)
        assert before > 0
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        assert signs_of_life(child.pid) >= before + 100_000
        child.stdin.close()
    assert signs_of_life(child.pid) == signs_of_life(-1) == 0


# ----- streams and log handlers that do not take what workers print

STREAMS = {
    "no flush": "Stream.flush = property()",
    "write raises an exception": "Stream.write = fail(RuntimeError)",
    "write ends the program": "Stream.write = fail(SystemExit)",
    "flush raises what is no exception": "Stream.flush = fail(type('Odd', (BaseException,), {}))",
    "fileno raises": "Stream.fileno = fail(LookupError)",
    "an exception without words": "Stream.write = fail(type('Mute', (Exception,), {'__str__': fail(ValueError)}))",
    "no methods": "Stream = object",
    "closed": "Stream.write = lambda self, text: closed.write(text)",
}


@pytest.fixture(scope="module")
def failing_streams() -> dict[tuple[Any, ...], str]:
    """Try each fault of each stream; the workers are started once."""
    return outcomes(
        f"""
        import contextlib, io, logging
        from support.harness import same_workers
        from synk._wire.cell import cell

        def fail(kind):
            def method(self, *args):
                raise kind(*args)
            return method

        closed = io.StringIO()
        closed.close()
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("synk").addHandler(handler)
        logging.getLogger("synk").propagate = False

        @contextlib.contextmanager
        def surroundings():
            global rt
            with synk.fork(2, backend="numpy") as rt:
                yield

        def case(fault, stream):
            class Stream:
                def write(self, text): pass
                def flush(self): pass

            names = dict(globals(), Stream=Stream)
            exec({STREAMS}[fault], names)
            said.clear()
            cell.broken_streams.clear()  # of which it was said in an earlier case

            def talk(x):
                print("some words", file=getattr(sys, stream))
                return x.sum()

            total = rt.function(talk, outputs="sum")
            with same_workers(rt):
                saved = getattr(sys, stream)
                setattr(sys, stream, names["Stream"]())
                try:
                    for _ in range(3):
                        assert total(np.arange(4.0)) == 6
                        assert total.submit(np.arange(4.0)).result() == 6
                finally:
                    setattr(sys, stream, saved)
            assert len(said) == 1, said
            assert said[0].startswith(f"what workers print to {{stream}} is dropped: sys.{{stream}} raised "), said
        """,
        list(itertools.product(STREAMS, ("stdout", "stderr"))),
    )


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("fault", STREAMS)
def test_a_stream_that_fails_does_not_fail_a_call(
    failing_streams: dict[tuple[Any, ...], str], fault: str, stream: str
) -> None:
    """The text is dropped; the log says so once."""
    assert failing_streams[fault, stream] == ""


def test_a_stream_that_does_not_exist() -> None:
    script("""
        with synk.fork(2, backend="numpy") as rt:
            total = rt.function(lambda x: (x[0] and print("words"), x.sum())[1], outputs="sum")
            saved = sys.stdout
            del sys.stdout
            assert total(np.arange(4.0)) == 6
            sys.stdout = None
            assert total(np.arange(4.0)) == 6
            sys.stdout = saved
            assert total(np.arange(4.0)) == 6
    """).check("[rank 1] words\n")


def test_a_log_handler_that_raises_does_not_fail_a_call() -> None:
    """Neither of the report of a long call, nor of that of a stream that failed; and what they say is not lost."""
    result = script(
        """
        import logging

        class Fails(logging.Handler):
            def emit(self, record):
                raise SystemExit("no")

        logging.getLogger("synk").addHandler(Fails())

        class Stream:
            def write(self, text):
                raise ValueError

        with synk.fork(2, backend="numpy") as rt:
            total = rt.function(lambda x: (print("words"), time.sleep(0.3), x.sum())[2], outputs="sum")
            saved, sys.stdout = sys.stdout, Stream()
            assert total(np.arange(4.0)) == 6
            sys.stdout = saved
        """,
        env={"SYNK_STUCK_AFTER": "0.05"},
    ).check("", stderr=None)
    assert "has run for more than 0.05 s" in result.stderr
    assert "what workers print to stdout is dropped: sys.stdout raised ValueError" in result.stderr
    assert result.stderr.count("(a handler of logging raised SystemExit)") >= 2


HANDLERS = ("function", "method", "object", "partial")
KINDS = ("Exception", "BaseException")


@pytest.fixture(scope="module")
def raising_handlers() -> dict[tuple[Any, ...], str]:
    """Try each handler with each kind of exception; the workers are started once."""
    return outcomes(
        """
        import contextlib, functools
        from support.harness import assert_right

        @contextlib.contextmanager
        def surroundings():
            global rt
            with synk.fork(2, backend="numpy") as rt:
                yield

        def case(handler, kind):
            class Mine(getattr(__builtins__, kind)):
                pass

            class Handler:
                def __call__(self, *_):
                    raise Mine
                method = __call__

            def function(*_):
                raise Mine

            signal.signal(signal.SIGUSR1, {
                "function": function, "method": Handler().method, "object": Handler(),
                "partial": functools.partial(function, 1),
            }[handler])

            class Stream:
                def write(self, text):
                    signal.raise_signal(signal.SIGUSR1)
                def flush(self):
                    pass

            total = rt.function(lambda x: (x[0] or print("words"), x.sum())[1], outputs="sum")
            saved, sys.stdout = sys.stdout, Stream()
            came_out = False
            try:
                total(np.arange(4.0))
            except Mine:
                came_out = True
            finally:
                sys.stdout = saved
            assert came_out
            assert_right(rt)
        """,
        list(itertools.product(HANDLERS, KINDS)),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("handler", HANDLERS)
def test_what_a_signal_handler_raises_while_a_stream_is_written_comes_out(
    raising_handlers: dict[tuple[Any, ...], str], kind: str, handler: str
) -> None:
    """It is not taken for the stream's own."""
    assert raising_handlers[handler, kind] == ""


def test_a_ctrl_c_while_a_stream_is_written_comes_out(reused: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = reused(2)

    class Stream:
        def write(self, text: str) -> None:
            if "rank 1" in text:
                signal.raise_signal(signal.SIGINT)

        def flush(self) -> None:
            pass

    total = rt.function(lambda x: (print("words"), x.sum())[1], outputs="sum")
    rt.distribute()
    with monkeypatch.context() as context:
        context.setattr("sys.stdout", Stream())
        with pytest.raises(KeyboardInterrupt):
            total(np.arange(4.0))
    assert_right(rt)
