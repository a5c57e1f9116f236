"""``Runtime.interrupt()``: what Ctrl-C does, from another thread."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gates import Gate
from support.harness import same_workers, wait_for, waits_in_synk

import synk
from synk.errors import CallCancelled, ClosedError, UnsupportedError

X = np.arange(6.0)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def staying(rt: synk.Runtime, gate: Gate) -> Any:
    """Return a function that stays until it is interrupted. ``gate.has(0, 1)`` while both ranks are in it."""
    return rt.function(lambda x: gate.wait(synk.comm.rank), outputs=None)


@pytest.fixture
def later() -> Iterator[Callable[..., None]]:
    """``later(condition, act)``: a thread does ``act()`` as soon as ``condition()`` holds."""
    threads: list[threading.Thread] = []

    def start(condition: Callable[[], object], act: Callable[[], object]) -> None:
        def run() -> None:
            assert wait_for(condition)
            act()

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


def test_a_call_that_is_interrupted_from_another_thread(reused: Any, gate: Gate, later: Any) -> None:
    """It has assigned nothing."""
    rt = reused(2)
    w = rt.shared(np.zeros(3))

    def assign(x: Any) -> Any:
        w.value = w.value + 1
        gate.wait(synk.comm.rank)
        return 0.0

    with same_workers(rt):
        later(lambda: gate.has(0, 1), rt.interrupt)
        with pytest.raises(CallCancelled, match=r"the call was ended by Runtime.interrupt\(\)"):
            rt.function(assign, outputs="sum")(X)
    assert all((w[rank] == 0).all() for rank in range(2))


def test_an_interrupt_that_comes_between_calls_or_as_one_ends_is_not_meant_for_the_next(reused: Any) -> None:
    rt = reused(2)
    total = rt.function(lambda x: x.sum(), outputs="sum")
    with same_workers(rt):
        kept = total.submit(X)
        assert wait_for(kept.done)
        for number in range(100):
            thread = threading.Thread(target=rt.interrupt)
            thread.start()
            with contextlib.suppress(CallCancelled):
                total(X)
            thread.join()
            assert total(X + number) == (X + number).sum()
        assert kept.result() == X.sum()


@pytest.mark.parametrize("waits_for", ["nothing", "the last", "the last, with a limit", "a call behind them"])
def test_submitted_calls_are_interrupted(reused: Any, gate: Gate, later: Any, waits_for: str) -> None:
    rt = reused(2)
    total = rt.function(lambda x: x.sum(), outputs="sum")
    stay = staying(rt, gate)
    with same_workers(rt):
        gc.collect()
        total(X)  # a call can be sent behind one in flight if the workers have its function, and none is to be dropped
        calls = [stay.submit(X), total.submit(X)]
        if waits_for == "nothing":
            assert wait_for(lambda: gate.has(0, 1))
            rt.interrupt()
            assert all(call.done() for call in calls)
        else:
            later(lambda: gate.has(0, 1) and waits_in_synk("submit"), rt.interrupt)
        if waits_for == "a call behind them":
            with pytest.raises(CallCancelled):
                total(X)
        for call in reversed(calls):
            with pytest.raises(CallCancelled, match=r"Runtime.interrupt\(\)"):
                call.result(timeout=60.0 if "limit" in waits_for else None)


def test_a_signal_handler_may_interrupt_the_call_that_it_came_into(reused: Any, gate: Gate, later: Any) -> None:
    rt = reused(2)
    before = signal.signal(signal.SIGUSR1, lambda *_: rt.interrupt())
    try:
        with same_workers(rt):
            later(lambda: gate.has(0, 1), lambda: os.kill(os.getpid(), signal.SIGUSR1))
            with pytest.raises(CallCancelled):
                staying(rt, gate)(X)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_where_it_cannot_work_it_says_so(shared_runtimes: Any, runtime: Any) -> None:
    with pytest.raises(UnsupportedError, match="cannot interrupt a runtime with num_workers=0"):
        shared_runtimes[0].interrupt()
    rt = runtime(1)
    rt.close()
    with pytest.raises(ClosedError):
        rt.interrupt()
