"""``Data`` that is changed while a call is prepared, waits or runs: each call sees the rows that it was given."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.beside import beside
from support.gates import Gate
from support.saboteurs import AtPickle
from support.tables import combinations

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
WRITERS: dict[str, Callable[[Any], Any]] = {
    "+=": lambda d: operator.iadd(d, 1),
    "[...] =": lambda d: operator.setitem(d, ..., 9),
    "out=": lambda d: np.add(d, 1, out=d),
    "at": lambda d: np.add.at(d, 0, 1),
    "reduce": lambda d: np.add.reduce(np.ones((2, 6, 2)), out=d),
}


def test_a_call_works_on_the_rows_that_it_was_given(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    verbs: dict[str, Callable[..., Any]] = {
        "call": lambda f, *args: f(*args),
        "serial": lambda f, *args: f.serial(*args),
        "submit": lambda f, *args: f.submit(*args).result(),
        "submit behind another": lambda f, *args: (f.submit(OLD, 0), f.submit(*args))[1].result(),
    }
    for where, change, verb in combinations(28, (1, 3, 0), CHANGES, verbs):
        rt, (act, new), run = shared_runtimes[where], CHANGES[change], verbs[verb]
        f = rt.function(lambda x, hook: x, outputs="gather", bcast_inputs="hook")
        with subtests.test(where=where, change=change, verb=verb):
            d = rt.data(OLD)
            for _ in range(
                2
            ):  # also where the function knows such rows: they are bound when the other input is pickled
                d.set_shape(OLD.shape)
                d.set_value(OLD)
                np.testing.assert_array_equal(run(f, d, AtPickle(lambda act=act, d=d: act(d))), OLD)
                if change != "narrow":  # its contents are undefined
                    np.testing.assert_array_equal(d.data, new)
                    np.testing.assert_array_equal(run(f, d, 0), new)


def test_submitted_calls_keep_their_rows_and_writers_wait_for_them(
    subtests: pytest.Subtests, reused: Any, tmp_path: Path
) -> None:
    """What gives ``Data`` other memory need not wait; what writes to the memory that is read must."""
    rt, gate = reused(2), Gate(tmp_path)

    def read(x: np.ndarray) -> float:
        gate.wait()
        return float(x.sum())

    total = rt.function(read, outputs="sum")
    others = {"drop": lambda d: None, **{name: act for name, (act, _) in CHANGES.items()}}
    for name, act in [*others.items(), *WRITERS.items()]:
        with subtests.test(name):
            gate.close()
            d, unread = rt.data(OLD), rt.data(np.zeros(2))
            pending = [total.submit(d) for _ in range(3)]
            np.testing.assert_array_equal(d + 1, OLD + 1)  # readers do not wait
            unread[:] = 1
            assert not gate.is_open(), "nor does a writer of what no call reads"
            with gate.opened_meanwhile():
                act(d)
                assert gate.is_open() or name in others
                assert name not in WRITERS or (d.data != OLD).any()
                del d
                kept = [rt.data(np.full((6, 2), -2.0)) for _ in range(3)]  # takes memory that was given back
            assert [call.result() for call in pending] == [OLD.sum()] * 3
            assert [each.sum() for each in kept] == [-24.0] * 3


def test_no_call_sees_a_mixture_while_another_thread_replaces_the_rows(shared_runtimes: Any) -> None:
    """Each value has as many rows as its elements say. The other thread makes them longer, shorter and as long."""
    rt, rng = shared_runtimes[2], np.random.default_rng(0)
    f = rt.function(lambda x: (len(x), x.min(), x.max()), outputs=("sum", "min", "max"))
    d = rt.data(np.full(500, 500), oversize=2.0)

    def change() -> None:
        count = int(rng.integers(400, 1200))
        d.set_value(np.full(count, count))
        if rng.random() < 0.2:
            d.set_length(count)

    with beside(change):
        seen = [f.submit(d).result() if k % 2 else f(d) for k in range(60)]
    assert all(count == low == high for count, low, high in seen)
    with beside(lambda: d.set_length(len(d) * 7919 % 5000)):
        for count in rng.integers(1, 5000, 200):
            d.set_value(np.ones(count, int))
    d.set_value(np.full(7, 7))
    d.set_length(7)
    assert f(d) == (7, 7, 7), "neither thread is left with memory that was given back"


def test_memory_is_not_reclaimed_under_a_call_that_another_thread_submits(shared_runtimes: Any) -> None:
    """Whether a call is in flight is asked when no other thread can submit one any more."""
    rt = shared_runtimes[2]
    total = rt.function(lambda x: x.sum(), outputs="sum")

    def take() -> None:
        """Reclaim what was dropped and take it, and leave the runtime to the other thread for a moment."""
        rt.data(np.full(500, -1.0))
        time.sleep(0.001)

    with beside(take):
        for k in range(100):
            d = rt.data(np.full(500, float(k)))
            pending = total.submit(d)
            del d  # the call in flight reads it
            assert pending.result() == 500.0 * k


def test_functions_are_sent_while_another_thread_makes_some(shared_runtimes: Any) -> None:
    rt, other = shared_runtimes[1], shared_runtimes[0]
    with beside(lambda: [other.function(lambda x: x, outputs="gather") for _ in range(500)], switch_s=1e-6):
        for _ in range(20):
            kept = rt.function(lambda x: x, outputs="gather")
            rt.distribute()
            assert kept
