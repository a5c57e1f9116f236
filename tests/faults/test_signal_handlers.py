"""D: signal handlers that raise, a time limit by SIGALRM for instance. They do no more than Ctrl-C does."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.harness import Scenario, pids, same_workers, script

from synk._master.code import book
from synk._wire.descriptors import orphans
from synk._wire.memory import Segment
from synk.errors import CallCancelled

Fork = Callable[..., Any]


class Limit(Exception):
    """What the handler raises, where the test does not care."""


class Alarm:
    """SIGALRM, whose handler raises an error of ``kind`` and keeps it."""

    def __init__(self) -> None:
        self.kind: type[BaseException] = Limit
        self.raised: list[BaseException] = []

    def handle(self, signum: int, frame: Any) -> None:
        self.raised.append(self.kind("the time is over"))
        raise self.raised[-1]

    def ring(self) -> None:
        signal.raise_signal(signal.SIGALRM)

    def ring_in(self, name: str) -> None:
        """Ring when the next function of that name begins."""

        def look(frame: Any, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code.co_name == name:
                sys.setprofile(None)
                self.ring()

        sys.setprofile(look)

    def ring_at(self, file: str, nth: int) -> None:
        """Ring at the n-th line of a file that is run from now on; repetitions of a line are one."""
        met: set[int] = set()

        def enter(frame: Any, event: str, argument: Any) -> Any:
            return look if frame.f_code.co_filename == file else None

        def look(frame: Any, event: str, argument: Any) -> Any:
            if event == "line":
                met.add(frame.f_lineno)
            if len(met) == nth:
                sys.settrace(None)
                self.ring()
            return look

        sys.settrace(enter)


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    """Return an :class:`Alarm`."""
    made = Alarm()
    before = signal.signal(signal.SIGALRM, made.handle)
    yield made
    sys.setprofile(None)
    sys.settrace(None)
    made.raised.clear()  # their frames hold what the census would count
    signal.signal(signal.SIGALRM, before)


# -- what it comes out as ---------------------------------------------------------------------------------------------


class Ringing:
    """Rings while it is pickled, unpickled in the master, or made an array."""

    def __init__(self, when: str) -> None:
        self.when = when
        self.pid = os.getpid()

    def ring(self, when: str) -> None:
        if when == self.when and os.getpid() == self.pid:
            signal.raise_signal(signal.SIGALRM)

    def __getstate__(self) -> dict[str, Any]:
        self.ring("pickled")
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.ring("unpickled")

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.ring("made an array")
        return np.arange(4.0)


class RingingError(Exception):
    """Rings while it is rebuilt in the master."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        if os.getpid() == pid:
            signal.raise_signal(signal.SIGALRM)


def fail_with(error: type[Exception], pid: int) -> None:
    raise error(pid)


SITES: dict[str, Callable[[Any], Any]] = {
    "an argument is pickled": lambda rt: rt.function(lambda x, y: 0.0, bcast_inputs="x", outputs="first")(
        Ringing("pickled"), np.ones(2)
    ),
    "a closure is pickled": lambda rt: rt.function(functools.partial(lambda a, x: x, Ringing("pickled"))),
    "a result is unpickled": lambda rt: rt.function(lambda x, y: x, bcast_inputs="x", outputs=None)(
        Ringing("unpickled"), np.ones(2)
    ),
    "a batch is made an array": lambda rt: rt.function(lambda x: x.sum(), outputs="sum")(
        np.ones(5), batch=Ringing("made an array")
    ),
}


@pytest.mark.parametrize("kind", [Limit, TimeoutError, SystemExit])
@pytest.mark.parametrize("site", SITES)
def test_what_a_handler_raises_comes_out_as_itself(
    shared_runtimes: Any, alarm: Alarm, site: str, kind: type[BaseException]
) -> None:
    rt = shared_runtimes[2]
    alarm.kind = kind
    with same_workers(rt):
        with pytest.raises(kind) as caught:
            SITES[site](rt)
        assert alarm.raised == [caught.value]


def test_what_a_handler_raises_while_the_error_of_a_call_is_rebuilt(shared_runtimes: Any, alarm: Alarm) -> None:
    rt, pid = shared_runtimes[2], os.getpid()
    failing = rt.function(lambda x: fail_with(RingingError, pid), outputs=None)
    with same_workers(rt):
        with pytest.raises(Limit) as caught:
            failing(np.ones(2))
        assert alarm.raised == [caught.value]


@pytest.mark.parametrize("kind", [Limit, StopIteration])
def test_a_handler_that_raises_in_the_wait_for_a_call(
    shared_runtimes: Any, alarm: Alarm, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """StopIteration included, by which the steps of a call tell that they are done."""
    rt = shared_runtimes[2]
    double = rt.function(lambda x: 2 * x, outputs="gather")
    double(np.ones(2))
    alarm.kind = kind
    with same_workers(rt):
        alarm.ring_in("wait")
        with pytest.raises(kind) as caught:
            double(np.ones(2))
        assert alarm.raised == [caught.value]


def test_a_handler_that_raises_while_an_earlier_call_is_awaited(shared_runtimes: Any, alarm: Alarm) -> None:
    """It belongs to the call that the main thread makes, and is no outcome of the one that was submitted."""
    rt = shared_runtimes[2]
    double = rt.function(lambda x: 2 * x, outputs="gather")
    with same_workers(rt):
        submitted = double.submit(np.ones(4))
        alarm.ring_in("wait_until")
        with pytest.raises(Limit) as caught:
            double(np.ones(2))
        assert alarm.raised == [caught.value]
        with pytest.raises(CallCancelled):
            submitted.result()


def test_a_handler_that_raises_while_all_workers_are_replaced(runtime: Fork, alarm: Alarm) -> None:
    """No worker that was asked to end gets a call, and none of them counts as a death."""
    rt = runtime(2, backend="numpy", max_restarts=0)
    double = rt.function(lambda x: 2 * x, outputs="gather")
    double(np.ones(2))
    before = pids(rt)
    alarm.ring_in("say_goodbye")
    with pytest.raises(Limit):
        rt.restart()
    np.testing.assert_array_equal(double(np.ones(2)), np.full(2, 2.0))
    assert not set(pids(rt)) & set(before)


# -- what is left -----------------------------------------------------------------------------------------------------


def test_a_descriptor_whose_finalizer_was_broken_off_is_closed_by_the_next_operation(
    shared_runtimes: Any, alarm: Alarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt = shared_runtimes[2]
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: dropped.append(unraisable.exc_value))
    segment = Segment.create(4096)
    fd = segment.fd
    inode = os.fstat(fd).st_ino
    alarm.ring_in("__del__")
    del segment
    assert dropped == alarm.raised
    assert os.fstat(fd).st_ino == inode
    dropped[0].__traceback__ = None  # it holds the finalizer's frame, and this the segment
    assert orphans.ended
    rt.data(np.ones(3))
    assert not orphans.ended
    assert inode not in {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in os.listdir("/proc/self/fd") if is_open(fd)}


class Captured:
    """What functions of the test below share."""

    def __init__(self, value: float) -> None:
        self.value = value


def capturing(step: int) -> dict[str, Any]:
    """Return globals with two functions that share objects and a helper."""
    table: dict[str, Any] = {"__name__": "__main__", "np": np, "shared": Captured(step), "table": np.full(3, step)}
    exec(
        "def helper(x): return x + table[0] + shared.value\n"
        "def make(y): return lambda x: helper(x) * y\n"
        "f, g = make(2), make(3)",
        table,
    )
    return table


@pytest.mark.parametrize("is_bound_anew", [False, True])
@pytest.mark.parametrize("apart", [8, pytest.param(1, marks=pytest.mark.storm)])
def test_a_handler_that_raises_at_any_line_while_functions_are_packed(
    shared_runtimes: Any, alarm: Alarm, is_bound_anew: bool, apart: int
) -> None:
    """The next calls work with what the master holds, also of functions that share objects with the one broken off.

    One line in eight, and others with names bound anew than without; each with both in the storm.
    """
    rt = shared_runtimes[1]
    x = np.arange(4.0)
    for nth in itertools.count(1 + is_bound_anew * (apart // 2), apart):
        main = capturing(nth)
        f, g = (rt.function(main[name], outputs="gather") for name in "fg")
        if is_bound_anew:
            np.testing.assert_array_equal(f(x), main["f"](x))
            main["shared"].value, main["table"] = Captured(0.5).value, np.full(3, -1.0)
        num_raised = len(alarm.raised)
        with contextlib.suppress(Limit):
            try:
                alarm.ring_at(book.__file__, nth)
                f(x)
            finally:
                sys.settrace(None)
        for each, name in ((g, "g"), (f, "f")):
            np.testing.assert_array_equal(each(x), main[name](x))
        if len(alarm.raised) == num_raised:
            break
    assert nth > 100


def is_open(fd: str) -> bool:
    """Whether a number is still a descriptor: that of the listing itself is not."""
    return os.path.exists(f"/proc/self/fd/{fd}")


def test_a_call_that_gets_a_larger_buffer_for_a_new_value_can_be_repeated(shared_runtimes: Any, alarm: Alarm) -> None:
    """The worker knows of the buffer whenever the master does."""
    rt = shared_runtimes[2]
    w = rt.shared(np.zeros(2))

    def grow(x: np.ndarray) -> float:
        w.value = np.full(2000, w.value[0] + 1)
        return float(w.value[0])

    f = rt.function(grow, outputs="first")
    rt.function(lambda x: w.value.sum(), outputs="first")(np.ones(2))  # the workers know the variable
    alarm.ring_in("_note_change")
    with pytest.raises(Limit):
        f(np.ones(2))
    np.testing.assert_array_equal(rt.gather(w), np.zeros((2, 2)))
    assert f(np.ones(2)) == 1.0
    np.testing.assert_array_equal(rt.gather(w), np.ones((2, 2000)))


STORM = """
    import collections, gc, random
    from support.harness import census, settled_census
    COUNT, SEED = {count}, {seed}
    rng = random.Random(SEED)

    class Mine(Exception): pass
    class Base(BaseException): pass
    KINDS = [Mine, Base, TimeoutError, RuntimeError, ValueError, KeyError, SystemExit, GeneratorExit]
    raised, unraisable = [], []
    sys.unraisablehook = lambda dropped: unraisable.append(dropped.exc_value)  # Python drops those in finalizers

    def handler(signum, frame):
        raised.append(KINDS[len(raised) % len(KINDS)](f"limit {{len(raised)}}"))
        raise raised[-1]

    class Point:
        def __init__(self, x): self.x = x
        def __getstate__(self): return {{name: value for name, value in self.__dict__.items()}}
        def __setstate__(self, state):
            for name in state: setattr(self, name, state[name])

    x = np.arange(10.0)

    class Subject:
        '''A runtime with what is done on it; each operation checks its own result.'''

        def __init__(self):
            self.rt = rt = synk.Runtime(2, backend="numpy", max_restarts=1000)
            self.w = w = rt.shared(np.zeros(3))
            self.double = rt.function(lambda x: 2 * x, outputs="gather")
            self.objects = rt.function(lambda x: Point([Point(k) for k in range(20)]), outputs=None)
            self.large = rt.function(lambda x: np.full(100_000, x.sum()), outputs="sum")
            self.blob = rt.function(lambda b, x: len(b.x) * len(x), bcast_inputs="b", outputs="sum")

            def add(x):
                size = int(x[0]) or 3
                w.value = np.full(size, w.value[0] + 1)
                return x.sum()

            self.add = rt.function(add, outputs="sum")
            self.check()

        def call(self):
            assert (self.double(x) == 2 * x).all()
            assert self.objects(x)[1].x[7].x == 7
            assert self.blob(Point(b"x" * 1000), x) == 1000 * len(x)

        def large_output(self):
            assert self.large(x)[77] == x.sum()

        def assignment(self):
            y = np.full(4, float(rng.choice([0, 10, 1000])))
            assert self.add(y) == y.sum()

        def submits(self):
            calls = [self.double.submit(x + k) for k in range(4)]
            for k, call in enumerate(calls):
                assert (call.result() == 2 * (x + k)).all()

        def submits_and_calls(self):
            calls = [self.double.submit(x), self.add.submit(np.full(4, 3.0)), self.large.submit(x)]
            assert (self.double(x) == 2 * x).all()
            assert calls[1].result() == 12.0 and calls[2].result()[5] == x.sum()

        def data(self):
            data = self.rt.data(np.ones(1000))
            data.set_length(3000)
            data[:] = 3.0
            assert self.double(data).sum() == 18000
            data.free_memory()

        def variables(self):
            v = self.rt.shared(np.ones(5))
            self.rt.set_value(v, np.full(6, 2.0))
            self.rt.all_reduce(v, "sum")
            assert (v.value == 4).all()
            self.rt.scatter(self.rt.shared(x, sharded=True), x[:8])

        def new_function(self):
            n = rng.choice([3, 300, 30000])
            assert self.rt.function(lambda x: np.full(n, len(x)), outputs="sum")(x)[0] == len(x)

        def close(self):
            self.rt.close()

        def check(self):
            '''What the next operations find: right results, and variables that are equal on all ranks.'''
            assert (self.double(x) == 2 * x).all() and self.large(x)[5] == x.sum()
            first, second = self.rt.get_value(self.w, 0), self.rt.get_value(self.w, 1)
            assert np.array_equal(first, second) and (first == first[0]).all(), (first, second)
            return first[0]

    OPERATIONS = ["call", "large_output", "assignment", "submits", "submits_and_calls", "data", "variables",
                  "new_function"]
    subject = Subject()
    subject.rt.close()
    del subject
    gc.collect()
    before = census()
    signal.signal(signal.SIGALRM, handler)
    subject, took, counts, num_fds = Subject(), {{"close": 0.02}}, collections.Counter(), 0
    for name in OPERATIONS * 3:
        began = time.monotonic()
        getattr(subject, name)()
        took[name] = time.monotonic() - began
    allowed = len(os.listdir("/proc/self/fd")) + 24  # lanes and idle buffers
    while len(raised) < COUNT:
        name = "close" if rng.random() < {close_share} else rng.choice(OPERATIONS)
        known, number, error = subject.check(), len(raised), None
        gc.disable()
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1.3 * took[name]))
                getattr(subject, name)()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as caught:
            error = caught
        gc.enable()
        came = raised[number:]
        assert error is None or any(error is each for each in came), (name, repr(error), came)
        assert error is not None or all(any(each is one for one in unraisable) for each in came), (name, came)
        for each in [*raised, *unraisable]:
            each.__traceback__ = each.__context__ = None
        error = came = None
        counts[name] += len(raised) - number
        if name == "close":
            subject.rt.close()
            del subject
            gc.collect()
            left = settled_census(before).leftovers(before)
            assert not left, (name, left)
            subject = Subject()
            continue
        now = subject.check()
        assert now - known in ((0, 1) if name in ("assignment", "submits_and_calls") else (0,)), (name, known, now)
        assert len(os.listdir("/proc/self/fd")) <= allowed, name
    subject.close()
    del subject
    gc.collect()
    left = settled_census(before).leftovers(before)
    assert not left, left
    print(len(raised), "raised,", len(unraisable), "in finalizers,", dict(counts), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("count", "close_share", "timeout"),
    [(120, 0.01, 120), pytest.param(10_000, 0.005, 6000, marks=[pytest.mark.storm, pytest.mark.timeout(6100)])],
)
def test_D11_exceptions_of_a_handler_at_random_moments(count: int, close_share: float, timeout: float) -> None:
    """Each comes out as itself; what follows is right; variables are equal on all ranks; nothing stays open."""
    result = script(STORM.format(count=count, seed=count, close_share=close_share), timeout=timeout)
    result.check("", stderr=None)
    assert result.stderr.splitlines()[-1].startswith(f"{count} raised"), result.stderr


# -- asyncio ----------------------------------------------------------------------------------------------------------

ASYNCIO = """
    import asyncio
    from support.harness import assert_right, pids
    rt = synk.fork(2, backend="numpy")
    double = rt.function(lambda x: 2 * x, outputs="gather")

    def work(x):
        print("busy" if x[0] else "", flush=True)
        while True:
            time.sleep(0.01)

    endless = rt.function(work, outputs=None)
    rt.distribute()
    before = pids(rt)

    async def main():
        handler = signal.getsignal(signal.SIGINT)
        try:
            {body}
        finally:
            assert signal.getsignal(signal.SIGINT) is handler
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert pids(rt) == before
    assert_right(rt)
    rt.close()
    print("closed")
"""


def test_one_ctrl_c_ends_a_call_under_asyncio_run() -> None:
    """Where asyncio's own handler would only cancel the task, which the blocked loop does not notice."""
    with Scenario(ASYNCIO.format(body="endless(np.arange(2.0))")) as scenario:
        scenario.wait_for_line("[rank 1] busy")
        scenario.send_signal(signal.SIGINT)
        scenario.wait_for_line("interrupted")
        result = scenario.finish().check(stderr="")
    assert result.stdout.endswith("interrupted\nclosed\n")


def test_ctrl_c_before_the_wait_of_a_call_under_asyncio_run() -> None:
    body = """send = rt._session.workers.send
            def send_and_interrupt(*args, **kwargs):
                del rt._session.workers.send
                signal.raise_signal(signal.SIGINT)
                return send(*args, **kwargs)
            rt._session.workers.send = send_and_interrupt
            endless(np.zeros(2))"""
    result = script(ASYNCIO.format(body=body)).check(stderr="")
    assert result.stdout.endswith("interrupted\nclosed\n")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Ctrl-C does not cancel the task before Python 3.11")
def test_a_task_that_was_cancelled_can_still_call() -> None:
    """What a coroutine does as it ends is not interrupted once more."""
    body = """signal.raise_signal(signal.SIGINT)
            try:
                await asyncio.sleep(20)
            finally:
                print((double(np.arange(3.0)) == 2 * np.arange(3.0)).all(), flush=True)"""
    result = script(ASYNCIO.format(body=body)).check(stderr="")
    assert result.stdout.endswith("True\ninterrupted\nclosed\n")


def test_a_handler_of_the_users_own_keeps_its_meaning_under_asyncio() -> None:
    """One that notes the signal and returns does not end the call."""
    script("""
        import asyncio
        noted = []
        signal.signal(signal.SIGINT, lambda *_: noted.append(1))
        rt = synk.fork(2, backend="numpy")
        double = rt.function(lambda x: 2 * x, outputs="gather")

        async def main():
            wait_until = rt._session.workers.wait_until
            def interrupt_and_wait(*args):
                signal.raise_signal(signal.SIGINT)
                return wait_until(*args)
            rt._session.workers.wait_until = interrupt_and_wait
            print((double(np.arange(3.0)) == 2 * np.arange(3.0)).all(), len(noted) > 0)
            del rt._session.workers.wait_until
        asyncio.run(main())
        rt.close()
    """).check("True True\n")
