"""Ctrl-C at any point of an operation on shared variables: all ranks hold the old values, or all the new ones."""

from __future__ import annotations

import dis
import inspect
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import PACKAGE_FOLDER
from support.rank_arrays import assert_same, everywhere

import synk
from synk._wire.control import Down
from synk._worker.rank import Interrupted

Fork = Callable[..., Any]
BIG = 700_000
"""Elements of a variable that workers move: 5.6 MB."""


class Interrupting(np.ndarray):
    """The numbers that the master writes; Ctrl-C comes at the store that decides a call."""

    when = "after"

    def __setitem__(self, key: Any, value: Any) -> None:
        is_decision = isinstance(key, tuple) and key[-1] == Down.COMMITTED
        if is_decision and self.when == "before":
            raise KeyboardInterrupt
        super().__setitem__(key, value)
        if is_decision:
            raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("rows", [6, 1])
def test_ctrl_c_at_the_deciding_store_leaves_all_ranks_old_or_all_new(
    shared_runtimes: Any, when: str, rows: int
) -> None:
    """With one row rank 1 does not run and follows: it must not be left behind."""
    rt = shared_runtimes[2]
    w = rt.shared(np.zeros(2))

    def add(x: np.ndarray) -> float:
        w.value = w.value + x.sum()
        return 0.0

    f = rt.function(add)
    x = np.ones(rows)
    f(x)
    before = everywhere(rt, w)
    numbers_down = rt._session.workers.processes.down
    Interrupting.when = when
    rt._session.workers.processes.down = numbers_down.view(Interrupting)
    try:
        with pytest.raises(KeyboardInterrupt):
            f(x)
    finally:
        rt._session.workers.processes.down = numbers_down
    sums = [part.sum() for part in np.array_split(x, 2)]
    new = [value + total for value, total in zip(before, sums, strict=True)]
    new = [new[0]] * 2 if rows == 1 else new
    left = before if when == "before" else new
    assert_same(everywhere(rt, w), left)
    f(x)
    again = [value + total for value, total in zip(left, sums, strict=True)]
    assert_same(everywhere(rt, w), [again[0]] * 2 if rows == 1 else again)


def test_ctrl_c_during_a_large_collective_leaves_all_old_or_all_new(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w = rt.shared(np.zeros(BIG))
    values = [np.full(BIG, 1.0), np.full(BIG, 2.0)]
    for rank, value in enumerate(values):
        rt.set_value(w, value, rank=rank)
    ask = rt._session.workers.ask

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return ask(*args, **kwargs)

    rt._session.workers.ask = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            rt.all_reduce(w, "sum")
    finally:
        del rt._session.workers.ask
    assert_same(everywhere(rt, w), values)
    rt.all_reduce(w, "sum")
    assert_same(everywhere(rt, w), [np.full(BIG, 3.0)] * 2)


class InterruptAt:
    """Ctrl-C at the n-th point inside the package where the interpreter looks for signals: calls and their ends."""

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.count = 0

    def __enter__(self) -> InterruptAt:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(str(PACKAGE_FOLDER / "synk")):
            self.count += not is_finalizing(frame)
            if self.count == self.nth:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)


def is_finalizing(frame: Any) -> bool:
    """Whether a finalizer runs, or a generator, which may be closing: what they raise is printed and lost."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return True
        frame = frame.f_back
    return False


OPERATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "call": lambda rt, w, f: f(np.ones(4)),
    "call of one rank": lambda rt, w, f: f(np.ones(1)),
    "set_value": lambda rt, w, f: rt.set_value(w, np.full(4, 7.0)),
    "broadcast": lambda rt, w, f: rt.broadcast(w),
    "scatter": lambda rt, w, f: rt.scatter(w, np.arange(5.0), batch=[4, 0, 1]),
    "all_gather": lambda rt, w, f: rt.all_gather(w),
    "all_reduce": lambda rt, w, f: rt.all_reduce(w, "sum"),
}


def interrupt_everywhere(rt: Any, name: str, points: Callable[[int], list[int]]) -> None:
    """Interrupt an operation at some of its points: all ranks must hold the old values, or all the new ones."""
    old = [np.zeros(3), np.full(3, 10.0)]
    new = {
        "call": [np.array([0.0, 0, 0, 2]), np.array([10.0, 10, 10, 2])],
        "call of one rank": [np.array([0.0, 0, 0, 1])] * 2,
        "set_value": [np.full(4, 7.0)] * 2,
        "broadcast": [old[0]] * 2,
        "scatter": [np.array([4.0, 0]), np.array([1.0])],
        "all_gather": [np.concatenate(old)] * 2,
        "all_reduce": [old[0] + old[1]] * 2,
    }[name]

    def prepare() -> tuple[Any, Any]:
        w = rt.shared(old[0])
        rt.set_value(w, old[1], rank=1)

        def append(x: np.ndarray) -> float:
            w.value = np.concatenate([w.value, [x.sum()]])
            return 0.0

        f = rt.function(append)
        f(np.ones(2))  # the function is there; new buffers are handed out in the call itself
        rt.set_value(w, old[0], rank=0)
        rt.set_value(w, old[1], rank=1)
        assert_same(everywhere(rt, w), old)
        return w, f

    w, f = prepare()
    with InterruptAt(0) as counting:
        OPERATIONS[name](rt, w, f)
    assert_same(everywhere(rt, w), new)
    for nth in points(counting.count):
        w, f = prepare()
        was_interrupted = False
        try:
            with InterruptAt(nth):
                OPERATIONS[name](rt, w, f)
        except KeyboardInterrupt:
            was_interrupted = True
        values = everywhere(rt, w)
        is_new = [np.array_equal(got, value) for got, value in zip(values, new, strict=True)]
        is_old = [np.array_equal(got, value) for got, value in zip(values, old, strict=True)]
        assert all(is_new) or (was_interrupted and all(is_old)), f"{name} interrupted at {nth}: {values}"
        for rank, value in enumerate(old):
            rt.set_value(w, value, rank=rank)
        OPERATIONS[name](rt, w, f)
        assert_same(everywhere(rt, w), new)


def test_ctrl_c_at_any_point_of_an_operation_leaves_all_ranks_old_or_all_new(reused: Fork) -> None:
    rt, chance = reused(2), random.Random(0)
    for name in OPERATIONS:
        interrupt_everywhere(rt, name, lambda count: chance.sample(range(1, count + 1), 5))


@pytest.mark.storm
@pytest.mark.parametrize("name", OPERATIONS)
def test_ctrl_c_at_every_point_of_an_operation(reused: Fork, name: str) -> None:
    interrupt_everywhere(reused(2), name, lambda count: list(range(1, count + 1)))


def test_message_numbers_that_come_round_again_decide_nothing(shared_runtimes: Any) -> None:
    """Messages are numbered with 16 bits: a failed call must not pass for the one 65536 messages before."""
    rt = shared_runtimes[2]
    w = rt.shared(np.zeros(2))

    def add(fail: bool, x: np.ndarray) -> float:
        w.value = w.value + 1
        synk.comm.barrier()
        if fail and synk.comm.rank:
            raise LookupError
        return 0.0

    f = rt.function(add, bcast_inputs="fail")
    f(False, np.ones(2))
    f(False, np.ones(2))
    rt._session.workers.requests.sequence = (rt._session.workers.requests.sequence - 1) & 0xFFFF
    with pytest.raises(LookupError):
        f(True, np.ones(2))
    assert_same(everywhere(rt, w), [np.full(2, 2.0)] * 2)


class InterruptWorkerAt:
    """The signal that ends a call, at the n-th instruction of a worker (here, in this process) that it can hit."""

    def __init__(self, worker: Any, nth: int) -> None:
        self.worker = worker
        self.nth = nth
        self.count = 0

    def __enter__(self) -> InterruptWorkerAt:
        self._outer = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(self._outer)

    def _enter(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith((str(PACKAGE_FOLDER / "synk"), __file__)):
            return None
        frame.f_trace_opcodes = True
        return self._look

    def _look(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "opcode" and self.worker.is_interruptible:
            self.count += 1
            # No signal is taken before a NOP, which stands for a line without code: a try may not cover it.
            is_nop = frame.f_code.co_code[frame.f_lasti] == dis.opmap["NOP"]
            if self.count >= self.nth and not is_nop and not is_finalizing(frame):
                self.nth = sys.maxsize
                raise Interrupted
        return self._look


def assigning(rt: Any, w: Any) -> Any:
    """Return a function that shows the value it found and adds to it, by assignment."""

    def add(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        before = w.value + 0
        w.value = before + synk.comm.all_reduce(x.sum(axis=0), "sum")
        return before, x.sum(axis=0)

    return rt.function(add, outputs=("first", "sum"))


def updating(rt: Any, w: Any) -> Any:
    """Return the same with ``updates=``."""
    return rt.function(
        lambda x: ((w.value + 0, x.sum(axis=0)), w.value + x.sum(axis=0)),
        outputs=("first", "sum"),
        updates=[(w, "sum")],
    )


@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.storm)])
@pytest.mark.parametrize("size", [2, 40_000])
@pytest.mark.parametrize("make", [assigning, updating])
@pytest.mark.sampled(90)
def test_D1_a_worker_that_is_interrupted_at_any_instruction_holds_the_old_values(
    make: Callable[[Any, Any], Any], size: int, every: int
) -> None:
    """Small outputs lie in the slot, large ones are assembled; one of ``every`` instructions is interrupted."""
    with synk.fork(1, backend="numpy", inline=True) as rt:
        w = rt.shared(np.zeros(size))
        f = make(rt, w)
        x = np.ones((2, size))
        f(x)
        worker = rt._session.workers.by_rank[0].process._worker
        expected, nth, was_interrupted = 2.0, 1, True
        while was_interrupted:
            was_interrupted = False
            try:
                with InterruptWorkerAt(worker, nth):
                    f(x)
            except synk.errors.RemoteError:
                was_interrupted = True
            except Interrupted as error:
                raise AssertionError(f"the worker has lost an interrupt at instruction {nth}") from error
            expected += 0 if was_interrupted else 2
            for _ in range(2):
                before, total = f(x)
                assert_same([before, total], [np.full(size, expected), np.full(size, 2.0)])
                expected += 2
                assert_same([w.value], [np.full(size, expected)])
            nth += every
        assert nth > 100  # newer versions of Python have fewer instructions
