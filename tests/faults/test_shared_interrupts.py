"""Ctrl-C at any point of an operation, or another handler that raises there.

All ranks hold the old values of a variable, or all the new ones. Whatever was interrupted, the next calls are right, in
other threads too: no lock is held any more. Descriptors have one owner each, wherever a start is broken off.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import operator
import os
import random
import signal
import socket
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.gates import beside
from support.harness import PACKAGE_FOLDER, assert_right, descriptors, kill_and_wait, pids, script
from support.rank_arrays import assert_same, everywhere
from support.tables import WHOLE_OR_SAMPLE

import synk
from synk._pure.arrays import copy_into
from synk._wire.mapping import NONE
from synk._wire.memory import Segment
from synk._wire.orders import Link
from synk.errors import ClosedError

Fork = Callable[..., Any]


class TimeIsOver(TimeoutError):
    """What the handler of SIGUSR1 raises."""


def raise_time_is_over(signum: int, frame: Any) -> None:
    raise TimeIsOver


class InterruptAt:
    """A signal at the n-th point inside the package where the interpreter looks for them: calls and their ends."""

    def __init__(self, nth: int, number: int, within: str = "synk") -> None:
        self.nth = nth
        self.number = number
        self.within = str(PACKAGE_FOLDER / within)
        self.count = 0

    def __enter__(self) -> InterruptAt:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(self.within):
            self.count += not is_finalizing(frame)
            if self.count == self.nth:
                sys.setprofile(None)
                signal.raise_signal(self.number)


def is_finalizing(frame: Any) -> bool:
    """Whether a finalizer runs, or a generator, which may be closing: what they raise is printed and lost."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return True
        frame = frame.f_back
    return False


class Subject:
    """A variable with other values on each rank, a function that appends to it, and rows in shared memory."""

    OLD = (np.zeros(3), np.full(3, 10.0))

    def __init__(self, rt: Any) -> None:
        self.rt = rt
        self.w = w = rt.shared(self.OLD[0])

        def append(x: np.ndarray) -> float:
            w.value = np.concatenate([w.value, [x.sum()]])
            return 0.0

        self.append = rt.function(append)
        self.append(np.ones(2))  # the function is there; new buffers are handed out in the call itself
        self.total = rt.function(lambda x: x.sum(), outputs="sum")
        self.data = rt.data(np.ones(1000))
        assert self.total(self.data) == 1000
        self.set_back()

    def set_back(self) -> None:
        for rank, value in enumerate(self.OLD):
            self.w[rank] = value

    def submit(self) -> None:
        pending = self.append.submit(np.ones(4))
        while not pending.done():
            pass
        pending.result()

    def call_after_a_death(self) -> None:
        kill_and_wait(pids(self.rt)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert self.total(np.arange(4.0)) == 6.0

    def define(self) -> None:
        factors = [2.0, 3.0]
        scaled = self.rt.function(lambda x: x.sum() * factors[-1], outputs="sum")
        assert scaled(np.ones(4)) == 12.0
        factors.append(5.0)
        assert scaled(np.ones(4)) == 20.0

    def grow(self) -> None:
        self.data.set_length(50_000)
        self.data[:] = 2.0


APPENDED = [np.array([0.0, 0, 0, 2]), np.array([10.0, 10, 10, 2])]
OPERATIONS: dict[str, tuple[Callable[[Subject], Any], Any]] = {
    # what is done, and the values that the ranks hold afterwards
    "call": (lambda at: at.append(np.ones(4)), APPENDED),
    "call of one rank": (lambda at: at.append(np.ones(1)), [np.array([0.0, 0, 0, 1])] * 2),
    "submit": (Subject.submit, APPENDED),
    "assignment to a rank": (lambda at: operator.setitem(at.w, 1, np.full(4, 7.0)), [np.zeros(3), np.full(4, 7.0)]),
    "broadcast": (lambda at: synk.broadcast(at.w), [np.zeros(3)] * 2),
    "scatter": (
        lambda at: synk.scatter(at.w, np.arange(5.0), batch=[4, 0, 1]),
        [np.array([4.0, 0]), np.array([1.0])],
    ),
    "all_gather": (lambda at: synk.all_gather(at.w), [np.concatenate(Subject.OLD)] * 2),
    "all_reduce": (lambda at: synk.all_reduce(at.w, "sum"), [np.full(3, 10.0)] * 2),
    "call after a death": (Subject.call_after_a_death, Subject.OLD),
    "new function": (Subject.define, Subject.OLD),
    "data that grows": (Subject.grow, Subject.OLD),
    "data that is freed": (lambda at: at.data.free_memory(), Subject.OLD),
}


def interrupt(rt: Any, name: str, nth: int, number: int, other_thread: ThreadPoolExecutor) -> int:
    """Interrupt an operation at one of its points; return how many it has passed."""
    act, new = OPERATIONS[name]
    at, was_interrupted = Subject(rt), False
    interrupting = InterruptAt(nth, number)
    try:
        with interrupting:
            act(at)
    except KeyboardInterrupt:
        was_interrupted = True
    except Exception:  # synk may have taken it for something else
        assert number != signal.SIGINT
        was_interrupted = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a death while idle
        values = everywhere(rt, at.w)
    is_new, is_old = (
        all(np.array_equal(got, value) for got, value in zip(values, expected, strict=True))
        for expected in (new, at.OLD)
    )
    assert is_new or (was_interrupted and is_old), f"{name} interrupted at {nth}: {values}"
    at.data.data[:] = 3.0
    assert at.total(at.data) == 3.0 * len(at.data) if len(at.data) else True
    other_thread.submit(assert_right, rt).result(60)
    at.set_back()
    if not name.startswith("data"):
        act(at)
        assert_same(everywhere(rt, at.w), list(new))
    return interrupting.count


@pytest.mark.parametrize("is_whole", WHOLE_OR_SAMPLE)
@pytest.mark.timeout(3600)
def test_a_signal_at_any_point_of_an_operation(
    rt: Any, is_whole: bool, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """Both signals in turn."""
    chance = random.Random(0)
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)  # Python drops what is raised in a finalizer
    before = signal.signal(signal.SIGUSR1, raise_time_is_over)
    try:
        with ThreadPoolExecutor(1) as other_thread:
            for name in OPERATIONS:
                with subtests.test(name):
                    count = interrupt(rt, name, 0, signal.SIGINT, other_thread)
                    points = chance.sample(range(1, count + 1), min(count, 800 if is_whole else 2))
                    for nth, number in zip(points, itertools.cycle((signal.SIGINT, signal.SIGUSR1))):
                        interrupt(rt, name, nth, number, other_thread)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_at_every_point_of_the_first_call_of_its_kind(
    rt: Any, number: int, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """What ranks tell once, with their first reply, is not lost: the next call of this kind is right."""
    before = signal.signal(signal.SIGUSR1, raise_time_is_over)
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)
    calls: dict[str, Callable[[Any], Any]] = {
        "call": lambda f: f(np.ones(4)),
        "submit": lambda f: f.submit(np.ones(4)).result(),
    }
    try:
        for name, call in calls.items():
            at = InterruptAt(0, number, "synk/_engine/engine.py")
            while at.nth <= at.count:
                at = InterruptAt(at.nth + 1, number, at.within)
                f = rt.function(lambda x: x.sum(), outputs="sum")
                f(np.ones(3, np.float32))
                with contextlib.suppress(KeyboardInterrupt, TimeIsOver), at:
                    call(f)
                with subtests.test(name, nth=at.nth):
                    assert f(np.ones(4)) == call(f) == 4.0
            assert at.nth > 10
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_raises_leaves_no_descriptor() -> None:
    """Neither of memory that is made nor of a message that is received."""
    program, rank = (Link(end, NONE, NONE) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    known, before = Segment.create(1), signal.signal(signal.SIGUSR1, raise_time_is_over)
    try:
        opened, at = descriptors(), InterruptAt(0, signal.SIGUSR1, "synk/_wire")
        while at.nth <= at.count:
            at = InterruptAt(at.nth + 1, signal.SIGUSR1, at.within)
            with contextlib.suppress(TimeIsOver), at:
                program.send_body(at.nth, bytes(1 << 16), [known])
                rank.receive_body(at.nth)
            rank.drain()
            if descriptors() - opened:
                gc.collect()
            assert not descriptors() - opened, f"after point {at.nth}"
        assert at.nth > 20
    finally:
        signal.signal(signal.SIGUSR1, before)
        program.close()
        rank.close()


def test_D4_no_copy_outlives_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large arrays are copied by two threads: the other one must not write after the operation was interrupted."""
    source, num_threads = np.arange(1 << 22), threading.active_count()
    target, start = np.zeros_like(source), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        signal.raise_signal(signal.SIGINT)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy_into(target, source)
    assert threading.active_count() == num_threads
    np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize("is_whole", WHOLE_OR_SAMPLE)
def test_a_handler_that_raises_at_any_point_of_a_death_and_a_start_loses_no_rank(rt: Any, is_whole: bool) -> None:
    """One whose death nobody has noted, or whose hello was read and lost, would be waited for."""
    before = signal.signal(signal.SIGUSR1, raise_time_is_over)
    total, step = rt.function(lambda x: x.sum(), outputs="sum"), 1 if is_whole else 3
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for file, is_restart in (("processes", False), ("workers", False), ("processes", True)):
                count = nth = 0
                while nth <= count:
                    at = InterruptAt(nth, signal.SIGUSR1, f"synk/_engine/{file}.py")
                    if not is_restart:
                        kill_and_wait(pids(rt)[nth % 2])
                    with contextlib.suppress(TimeIsOver), at:
                        rt.restart() if is_restart else total(np.ones(4))
                    assert total(np.ones(4), timeout=40) == 4.0, f"after point {nth} of {file}"
                    count, nth = count or at.count, nth + step  # of the first time, in which nothing strikes
    finally:
        signal.signal(signal.SIGUSR1, before)


Count = Callable[[int], int]


# ----- a start that is broken off


INTERRUPTED_START = """
        import gc, contextlib
        from pathlib import Path
        from support.harness import census, settled_census

        package = str(Path(synk.__file__).parent)

        class InterruptAt:
            '''Ctrl-C at the n-th instruction of the package.'''

            def __init__(self, nth):
                self.nth, self.count, self.where = nth, 0, None

            def enter(self, frame, event, argument):
                if not frame.f_code.co_filename.startswith(package):
                    return None
                if NAMES and frame.f_code.co_name not in NAMES:
                    return None
                frame.f_trace_opcodes, frame.f_trace_lines = True, False
                return self.look

            def look(self, frame, event, argument):
                if event == "opcode":
                    self.count += 1
                    if self.count == self.nth:
                        self.where = (Path(frame.f_code.co_filename).name, frame.f_code.co_name, frame.f_lineno)
                        signal.raise_signal(signal.SIGINT)
                return self.look

        def start(nth):
            at = InterruptAt(nth)
            try:
                if IS_CLOSED:
                    rt = synk.fork(2, backend="numpy")
                    rt.distribute()
                    sys.settrace(at.enter)
                    rt.close()
                else:
                    sys.settrace(at.enter)
                    synk.fork(2, backend="numpy")
                sys.settrace(None)
            except KeyboardInterrupt:
                sys.settrace(None)
                assert nth is not None
                try:
                    was_left = synk.current()
                except (synk.errors.ClosedError, synk.errors.NotForkedError):
                    pass
                else:
                    # it was made already: ``fork`` was about to return, or to let Ctrl-C through
                    assert IS_CLOSED or at.where[0] in ("current.py", "interrupts.py", "tracebacks.py"), at.where
            synk.close()
            return at

        start(None)  # it makes what is made once
        count = start(None).count
        gc.collect()
        baseline = census()
        for nth in POINTS(count):
            at = start(nth)
            assert at.where is not None or IS_CLOSED  # it may have fewer instructions than the first one
            left = settled_census(baseline).leftovers(baseline)
            assert not left, (at.where, left)
"""


START = pytest.mark.own_start


@pytest.mark.parametrize(
    "part", [pytest.param("in between", marks=START), pytest.param("at the end", marks=START), "close"]
)
def test_D5_ctrl_c_at_any_instruction_of_a_start_or_of_close_leaves_nothing(part: str, storm_count: Count) -> None:
    """As the workers are complete, and their owner not yet, too."""
    points = {
        "in between": f"range(1, count, max(count // {storm_count(12)}, 1))",
        "at the end": f"range(max(count - {storm_count(50)}, 1), count, 2)",
        "close": f"range(1, count, max(count // {storm_count(5)}, 1))",
    }
    # What is left to do when all processes run: the constructors and their callers give them to one another.
    names = {"__init__", "start", "begin", "fork"} if part == "at the end" else set()
    head = f"POINTS = lambda count: {points[part]}\nNAMES, IS_CLOSED = {names!r}, {part == 'close'}\n"
    script(head + textwrap.dedent(INTERRUPTED_START), timeout=100).check("")


# ----- a runtime that is closed in several threads at once


def use_descriptors() -> None:
    ends = [os.pipe() for _ in range(8)]
    for number, (_, writer) in enumerate(ends):
        os.write(writer, bytes([number]))
    for number, (reader, writer) in enumerate(ends):
        os.close(writer)
        assert os.read(reader, 64) == bytes([number])
        os.close(reader)


def test_E6_E12_many_threads_close_at_once_and_others_call(runtime: Fork, storm_count: Count) -> None:
    """While another thread opens and closes descriptors of its own, which stay what they are."""
    with beside(use_descriptors):
        for number in range(storm_count(2)):
            rt = runtime(2)
            slow = rt.function(lambda x: (time.sleep(0.1), x.sum())[1], outputs="sum")
            results: list[float] = []

            def call(slow: Any = slow, results: list[float] = results) -> None:
                with pytest.raises(ClosedError):
                    while True:
                        results.append(slow(np.arange(4.0)))

            barrier = threading.Barrier(6)
            with ThreadPoolExecutor(7) as pool:
                calling = pool.submit(call)
                while len(results) < number % 2:
                    time.sleep(0.001)
                closing = [pool.submit(lambda rt=rt, barrier=barrier: (barrier.wait(), rt.close())) for _ in range(6)]
                for each in (calling, *closing):
                    each.result(60)
            assert set(results) <= {6.0}
            assert rt.is_closed
