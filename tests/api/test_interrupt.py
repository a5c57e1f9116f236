"""``Runtime.interrupt()``: what Ctrl-C does, from another thread."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import assert_right, same_workers, wait_for

import synk
from synk.errors import CallCancelled, ClosedError, UnsupportedError

X = np.arange(6.0)


@pytest.fixture
def busy(tmp_path: Path) -> Callable[..., Any]:
    """``busy(rt)``: a function that stays until it is interrupted; ``busy.is_running()`` while all ranks are in it."""
    made = itertools.count()

    def make(rt: synk.Runtime) -> Any:
        entered = tmp_path / str(next(made))
        entered.mkdir()

        def stay(x: Any) -> Any:
            (entered / str(os.getpid())).touch()
            time.sleep(60)
            return x.sum()

        make.is_running = lambda: len(list(entered.iterdir())) == rt.world_size  # type: ignore[attr-defined]
        return rt.function(stay, outputs="sum")

    return make


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


def test_a_call_that_is_interrupted_from_another_thread(reused: Any, busy: Any, later: Any) -> None:
    rt = reused(2)
    stay = busy(rt)
    with same_workers(rt):
        later(busy.is_running, rt.interrupt)
        with pytest.raises(CallCancelled, match=r"the call was ended by Runtime.interrupt\(\)"):
            stay(X)
        assert_right(rt)


def test_a_call_in_another_thread_is_interrupted_from_this_one(reused: Any, busy: Any) -> None:
    rt = reused(2)
    stay, raised = busy(rt), []

    def call() -> None:
        try:
            stay(X)
        except CallCancelled as error:
            raised.append(error)

    with same_workers(rt):
        thread = threading.Thread(target=call)
        thread.start()
        assert wait_for(busy.is_running)
        rt.interrupt()
        thread.join()
        assert len(raised) == 1
        assert_right(rt)


def test_where_nothing_is_in_flight_nothing_happens(reused: Any) -> None:
    rt = reused(2)
    total = rt.function(lambda x: x.sum(), outputs="sum")
    for _ in range(3):
        total(X)
    with same_workers(rt):
        for number in range(5):
            rt.interrupt()
            assert total(X + number) == (X + number).sum()
        kept = total.submit(X)
        assert wait_for(kept.done)
        rt.interrupt()
        assert kept.result() == X.sum()


def test_an_interrupt_that_comes_as_its_call_ends_is_not_meant_for_the_next(reused: Any) -> None:
    rt = reused(2)
    total = rt.function(lambda x: x.sum(), outputs="sum")
    with same_workers(rt):
        for _ in range(5):
            rt._session.workers.waiting.interrupt()  # the lock was held when it was looked at, and is free by now
            assert total(X) == X.sum()


def test_submitted_calls_that_nobody_waits_for_are_interrupted(reused: Any, busy: Any) -> None:
    rt = reused(2)
    total = rt.function(lambda x: x.sum(), outputs="sum")
    total(X)  # what is on the workers already can be sent behind calls in flight
    stay = busy(rt)
    with same_workers(rt):
        calls = [stay.submit(X), total.submit(X), total.submit(X)]
        assert wait_for(busy.is_running)
        rt.interrupt()
        for call in calls:
            assert call.done()
            with pytest.raises(CallCancelled, match=r"Runtime.interrupt\(\)"):
                call.result()
        assert_right(rt)


def test_submitted_calls_that_a_thread_waits_for_are_interrupted(reused: Any, busy: Any, later: Any) -> None:
    rt = reused(2)
    total = rt.function(lambda x: x.sum(), outputs="sum")
    total(X)
    with same_workers(rt):
        for limit in (None, 30.0):
            calls = [busy(rt).submit(X), total.submit(X)]
            later(lambda: busy.is_running() and not rt._session.if_free(lambda: None), rt.interrupt)
            for call in reversed(calls):
                with pytest.raises(CallCancelled):
                    call.result(timeout=limit)
            assert total(X) == X.sum()


def test_a_call_that_waits_for_submitted_ones_is_interrupted_with_them(reused: Any, busy: Any, later: Any) -> None:
    rt = reused(2)
    total = rt.function(lambda x: x.sum(), outputs="sum")
    with same_workers(rt):
        submitted = busy(rt).submit(X)
        later(lambda: busy.is_running() and not rt._session.if_free(lambda: None), rt.interrupt)
        with pytest.raises(CallCancelled):
            total(X)
        with pytest.raises(CallCancelled):
            submitted.result()
        assert total(X) == X.sum()


def test_an_interrupted_call_has_assigned_nothing(reused: Any, busy: Any, later: Any) -> None:
    rt = reused(2)
    w = rt.shared(np.zeros(3))
    stay = busy(rt).__wrapped__

    def assign(x: Any) -> Any:
        w.value = w.value + 1
        return stay(x)

    f = rt.function(assign, outputs="sum")
    later(busy.is_running, rt.interrupt)
    with pytest.raises(CallCancelled):
        f(X)
    assert all((rt.get_value(w, rank) == 0).all() for rank in range(2))


def test_a_signal_handler_may_interrupt_the_call_that_it_came_into(reused: Any, busy: Any, later: Any) -> None:
    rt = reused(2)
    stay = busy(rt)
    before = signal.signal(signal.SIGUSR1, lambda *_: rt.interrupt())
    try:
        with same_workers(rt):
            later(busy.is_running, lambda: os.kill(os.getpid(), signal.SIGUSR1))
            with pytest.raises(CallCancelled):
                stay(X)
            assert_right(rt)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_where_it_cannot_work_it_says_so(shared_runtimes: Any, runtime: Any) -> None:
    with pytest.raises(UnsupportedError, match="cannot interrupt an inline runtime"):
        shared_runtimes["inline"].interrupt()
    rt = runtime(1)
    rt.close()
    with pytest.raises(ClosedError):
        rt.interrupt()
