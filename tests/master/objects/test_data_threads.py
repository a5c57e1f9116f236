"""``Data`` whose contents are replaced while a call is being planned, or runs: the old rows or the new ones."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

OLD = np.arange(12.0).reshape(6, 2) + 1
CHANGES: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
    "same shape": (lambda d: d.set_value(OLD * 10), OLD * 10),
    "shorter": (lambda d: d.set_value(OLD[:2] * 10), OLD[:2] * 10),
    "longer": (lambda d: d.set_value(np.ones((2000, 2))), np.ones((2000, 2))),
    "shrink": (lambda d: d.set_length(3), OLD[:3]),
    "grow": (lambda d: d.set_length(6000), np.append(OLD, np.zeros((5994, 2)), axis=0)),
    "narrow": (lambda d: d.set_shape((4, 3)), np.zeros(0)),
    "free": (lambda d: d.free_memory(), np.zeros((0, 2))),
}


class Hook:
    """A broadcast input that acts while it is pickled: the rows are bound by then, and the call is not planned yet."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action

    def __reduce__(self) -> Any:
        self.action()
        return int, (0,)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("verb", ["call", "serial", "submit"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", [1, 3, "inline"])
def test_a_call_works_on_the_rows_that_it_was_given(shared_runtimes: Any, where: Any, change: str, verb: str) -> None:
    rt = shared_runtimes[where]
    act, new = CHANGES[change]
    f = rt.function(lambda x, hook: (x, x.sum()), outputs=("gather", "sum"), bcast_inputs="hook")

    def run(data: Any, hook: Hook) -> Any:
        if verb == "submit":
            return f.submit(data, hook).result()
        return f.serial(data, hook) if verb == "serial" else f(data, hook)

    d = rt.data(OLD)
    for _ in range(2):  # also where the function knows a plan for such rows
        d.set_value(OLD)
        rows, total = run(d, Hook(lambda d=d: act(d)))
        np.testing.assert_array_equal(rows, OLD)
        assert total == OLD.sum()
        if change != "narrow":  # its contents are undefined
            np.testing.assert_array_equal(d.data, new)
            rows, total = run(d, Hook(lambda: None))
            np.testing.assert_array_equal(rows, new)
            assert total == new.sum()
        else:
            d = rt.data(OLD)


@pytest.mark.parametrize("change", ["longer", "grow", "free"])
def test_old_memory_is_not_freed_while_a_call_waits_for_another(shared_runtimes: Any, change: str) -> None:
    """The call has been planned; it waits for the one before, and what is done then must leave its rows alone."""
    rt = shared_runtimes[2]
    w = rt.shared(np.zeros(1))
    first = rt.function(lambda x: x.sum(), outputs="sum")
    second = rt.function(lambda x, hook: (x + w.value, x.sum()), outputs=("gather", "sum"), bcast_inputs="hook")
    second(OLD, 0)  # known by now to use a variable
    for _ in range(3):
        d = rt.data(OLD)
        before = first.submit(np.ones(4))
        pending = second.submit(d, Hook(lambda d=d: CHANGES[change][0](d)))
        rows, total = pending.result()
        np.testing.assert_array_equal(rows, OLD)
        assert total == OLD.sum()
        assert before.result() == 4


@pytest.mark.parametrize("is_submitted", [False, True])
def test_no_call_sees_a_mixture_while_another_thread_replaces_the_rows(
    shared_runtimes: Any, is_submitted: bool
) -> None:
    """Each value has as many rows as its elements say. The other thread makes them longer, shorter and as long."""
    rt = shared_runtimes[2]
    f = rt.function(lambda x: (len(x), x.min(), x.max()), outputs=("sum", "min", "max"))
    d = rt.data(np.full(500, 500), oversize=2.0)
    is_over = threading.Event()
    failures: list[BaseException] = []

    def change() -> None:
        rng = np.random.default_rng(0)
        try:
            while not is_over.is_set():
                count = int(rng.integers(400, 1200))
                d.set_value(np.full(count, count))
                if rng.random() < 0.2:
                    d.set_length(count)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        seen = {f.submit(d).result() if is_submitted else f(d) for _ in range(30)}
    finally:
        is_over.set()
        thread.join()
    assert not failures
    assert all(count == low == high for count, low, high in seen)
    assert len(seen) > 1


def test_two_threads_may_replace_the_rows_of_one_object(shared_runtimes: Any) -> None:
    """One grows what the other sets: none of them is left with memory that was given back."""
    rt = shared_runtimes[2]
    d = rt.data(np.ones(10))
    failures: list[BaseException] = []

    def change(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(200):
                count = int(rng.integers(1, 5000))
                if seed:
                    d.set_length(count)
                else:
                    d.set_value(np.ones(count))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=change, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    d.set_value(np.ones(7))
    d.set_length(7)
    assert rt.function(lambda x: x.sum(), outputs="sum")(d) == d.data.sum() == 7


def test_memory_is_not_reclaimed_under_a_call_that_another_thread_submits(runtime: Any) -> None:
    """Whether a call is in flight is asked when no other thread can submit one any more."""
    rt = runtime(2)
    session = rt._session

    def slow_sum(x: np.ndarray) -> float:
        time.sleep(0.1)
        return float(x.sum())

    f = rt.function(slow_sum, outputs="sum")
    x = rt.data(np.ones(4))
    if_free, is_at_gate, go_on = session.if_free, threading.Event(), threading.Event()

    def late(action: Callable[[], Any], timeout: float = 0.0) -> bool:
        if threading.current_thread() is not threading.main_thread():
            is_at_gate.set()
            assert go_on.wait(10)
        return bool(if_free(action, timeout))

    y = rt.data(np.ones(8))
    del y  # so that there is something to reclaim
    session.if_free = late
    other = threading.Thread(target=lambda: rt.data(np.full(4, 7.0)))
    other.start()
    try:
        assert is_at_gate.wait(10)
        for _ in range(4):
            assert f.submit(x).result() == 4.0  # the last fits a compiled call, which holds no view of x
        assert f.plan(x).is_compiled
        call = f.submit(x)
        del x  # the call in flight reads it
    finally:
        go_on.set()
        other.join()
        del session.if_free
    assert call.result() == 4.0


def test_functions_are_sent_while_other_threads_make_some(shared_runtimes: Any) -> None:
    rt, other = shared_runtimes[1], shared_runtimes["inline"]
    is_over = threading.Event()

    def make() -> None:
        while not is_over.is_set():
            [other.function(lambda x: x, outputs="gather") for _ in range(500)]

    threads = [threading.Thread(target=make) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(100):
            kept = [rt.function(lambda x: x, outputs="gather")]
            rt.distribute()
            assert kept
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
