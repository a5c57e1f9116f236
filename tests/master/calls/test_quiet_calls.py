"""Quiet calls: what must leave the short way of a repeated call, and what must be right on it.

A call is quiet in the master where it does not go through ``launch``; its ranks have compiled it by then
(``is_compiled``). The third call of a function is the first that can be.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import harness
from support.compiled import is_compiled
from support.harness import Child, assert_right, pids, wait_for

import synk
from synk._api import inline as _inline
from synk._master.calls import call as _call
from synk._master.calls import compiled as _compiled
from synk._master.calls import pattern as _pattern
from synk._master.flight import pending as _pending
from synk._master.flight import queue as _queue
from synk._master.workers import doorbells as _doorbells
from synk._pure.read_only import ReadOnlyArray
from synk._worker import rank as _rank
from synk._worker.call import execute as _execute
from synk._worker.loop import calls as _calls_on_rank
from synk._worker.loop import dispatch as _dispatch
from synk.errors import (
    CallCancelled,
    CallTimeout,
    ClosedError,
    CollectiveMismatch,
    ReentrancyError,
    RemoteError,
    WorkerDied,
)

Fork = Callable[..., Any]

X = np.arange(24.0).reshape(8, 3)
W = np.array([1.0, -2.0, 0.5])


class Ordinary(list[Any]):
    """The calls that took the ordinary way, from the beginning or, of submitted ones, from the middle."""

    def in_(self, act: Callable[[], Any]) -> int:
        """Return how many calls took the ordinary way in ``act``."""
        before = len(self)
        act()
        return len(self) - before


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ordinary]:
    """No garbage is collected between two calls: a function that is dropped there makes the next one new."""
    seen = Ordinary()
    launch, collecting = _call.launch, _queue.collecting

    def count(*args: Any, **options: Any) -> Any:
        seen.append(args[1].name)
        return launch(*args, **options)

    def count_later(session: Any, launched: Any) -> Any:
        if launched.doorbells is not None:
            seen.append(launched.function.name)
        return collecting(session, launched)

    monkeypatch.setattr(_call, "launch", count)
    monkeypatch.setattr(_queue, "launch", count)
    monkeypatch.setattr(_queue, "collecting", count_later)
    gc.disable()
    yield seen
    gc.enable()


def warm(call: Callable[..., Any], *args: Any) -> Any:
    """Call until the next call is a quiet one; return the last result."""
    return [call(*args) for _ in range(4)][-1]


def tidy(rt: Any) -> None:
    """Have all dropped that other tests have left, or it would be between two calls of this one; that takes two."""
    gc.collect()
    assert_right(rt)
    assert_right(rt)
    gc.collect()


def make(rt: Any, outputs: Any = ("avg", "sum"), **options: Any) -> Any:
    """Return a function whose results NumPy can check."""

    def scores(w: np.ndarray, x: np.ndarray) -> tuple[Any, Any]:
        return (x * w).mean(axis=0), (x * w).sum()

    return rt.function(scores, bcast_inputs="w", outputs=outputs, **options)


def check(result: Any, w: Any = W, x: Any = X) -> None:
    np.testing.assert_allclose(result[0], (np.asarray(x) * w).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(result[1], (np.asarray(x) * w).sum(), rtol=1e-12)


def watched(rt: Any) -> Any:
    """Return a function that tells whether all ranks know the call, and a sum."""

    def look(w: np.ndarray, x: np.ndarray) -> tuple[float, Any]:
        return is_compiled(), (x * w).sum()

    return rt.function(look, bcast_inputs="w", outputs=("min", "sum"))


# -- when it is quiet -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(20)
@pytest.mark.parametrize("num_workers", [1, 2, 3, "inline"])
@pytest.mark.parametrize("as_data", [True, False])
def test_the_third_call_is_known_on_both_sides(
    shared_runtimes: Any, ordinary: Ordinary, num_workers: Any, as_data: bool
) -> None:
    rt = shared_runtimes[num_workers]
    tidy(rt)
    f, x = watched(rt), rt.data(X) if as_data else X
    seen = []
    for k in range(6):
        before = len(ordinary)
        is_known, total = f(W * k, x)
        seen.append((len(ordinary) - before, is_known))
        np.testing.assert_allclose(total, (X * W * k).sum())
    assert seen[2:] == [(0, 1.0)] * 4


def submit_all(f: Any, *calls: tuple[Any, ...]) -> list[Any]:
    """Submit calls, never more than three in flight, and return their results."""
    results: list[Any] = []
    pending: deque[Any] = deque()
    for args in calls:
        if len(pending) == 3:
            results.append(pending.popleft().result())
        pending.append(f.submit(*args))
    return results + [each.result() for each in pending]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("num_workers", [1, 2, 3, "inline"])
@pytest.mark.parametrize("as_data", [True, False])
def test_submitted_calls_are_quiet_on_both_sides(
    shared_runtimes: Any, ordinary: Ordinary, num_workers: Any, as_data: bool
) -> None:
    """From the third one in each lane on; those that are waited for use what was prepared for the first lane."""
    rt = shared_runtimes[num_workers]
    f, x = watched(rt), rt.data(X) if as_data else X
    submit_all(f, *[(W, x)] * 12)
    before = len(ordinary)
    for k, (is_known, total) in enumerate(submit_all(f, *[(W * k, x) for k in range(9)])):
        assert is_known
        np.testing.assert_allclose(total, (X * W * k).sum())
    pending = [f.submit(W, x) for _ in range(5)]  # the fourth waits for the first
    assert [each.result()[0] for each in reversed(pending)] == [1.0] * 5
    assert f(W, x)[0]
    assert len(ordinary) == before


def test_what_a_function_captured_is_that_of_the_submit(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    namespace: dict[str, Any] = {"SCALE": 1.0}
    exec("def scaled(x):\n    return x.sum() * SCALE", namespace)
    f = rt.function(namespace["scaled"], outputs="sum")
    expected, pending = [], []
    for k in range(30):
        namespace["SCALE"] = float(k // 6)
        pending.append(f.submit(X))
        expected.append(X.sum() * (k // 6))
    np.testing.assert_allclose([each.result() for each in pending], expected)


def test_large_outputs_are_quiet_in_the_master(shared_runtimes: Any, ordinary: Ordinary) -> None:
    """As long as the results are dropped; one that is kept takes its buffer along."""
    rt = shared_runtimes[2]
    tidy(rt)
    f = rt.function(lambda k, x: (np.full(100_000, k), x.sum()), bcast_inputs="k", outputs=("max", "sum"))
    for k in range(6):
        f(np.float64(k) + np.zeros(1), X)
    begun = ordinary.count(f.name)
    for k in range(6):
        large, total = f(np.full(1, float(k)), X)
        assert large[0] == large[-1] == k and total == X.sum()
        del large
    assert ordinary.count(f.name) == begun
    kept = [f(np.full(1, float(k)), X)[0] for k in range(6)]
    kept += [large for large, _ in submit_all(f, *[(np.full(1, float(k)), X) for k in range(6, 20)])]
    assert [each[0] for each in kept] == [each[-1] for each in kept] == list(range(20))


def test_an_array_that_is_changed_in_place_after_it_was_submitted(shared_runtimes: Any) -> None:
    """What the next call is compared with is what was sent."""
    f = shared_runtimes[2].function(lambda x: x.sum(), outputs="sum")
    for _ in range(4):
        arrays = [np.arange(8.0) for _ in range(3)]
        pending = [f.submit(array) for array in arrays]
        for array in arrays:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                array.dtype = np.int64
        assert [each.result() for each in pending] == [28.0] * 3
        assert f(np.arange(8)) == 28 and f(np.arange(8.0)) == 28.0
        pending = [f.submit(np.arange(8)) for _ in range(3)]
        assert [each.result() for each in pending] == [28] * 3


@pytest.mark.parametrize("outputs", ["avg", "sum", "prod", "min", "max", "gather", "first", None])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "complex64"])
@pytest.mark.parametrize("rows", [6, 7, 1])
@pytest.mark.sampled(20, together=2)
def test_a_quiet_call_gives_the_same_bits_as_an_ordinary_one(
    shared_runtimes: Any, ordinary: Ordinary, outputs: Any, dtype: str, rows: int
) -> None:
    if np.dtype(dtype).kind == "c" and outputs in ("min", "max"):
        pytest.skip("complex numbers have no order")
    rt = shared_runtimes[3]
    tidy(rt)
    rng = np.random.default_rng(rows)
    x = (rng.normal(size=(rows, 5)) * 10).astype(dtype)
    f = rt.function(lambda x: x[:1] * x[:1] + x.mean(axis=0), outputs=outputs)
    expected = f(x)
    f(x)
    before = len(ordinary)
    for _ in range(3):
        got = f(x)
        assert type(got) is type(expected)
        for one, other in zip(got if outputs is None else [got], expected if outputs is None else [expected]):
            if one is None or other is None:  # a rank without rows
                assert one is other
                continue
            assert one.dtype == other.dtype and one.shape == other.shape
            assert one.tobytes() == other.tobytes()
            assert one.flags.writeable
    assert len(ordinary) == before


def test_results_of_quiet_calls_are_the_callers_own(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda k: (np.full(4, float(k[0])), k[0] * 2), bcast_inputs="k", outputs=("avg", "max"))
    kept = [f(np.array([float(k)])) for k in range(8)]
    for k, (rows, double) in enumerate(kept):
        np.testing.assert_array_equal(rows, np.full(4, float(k)))
        assert double == 2.0 * k
        rows[:] = -1.0
    assert f(np.array([9.0]))[1] == 18.0


def test_nested_results_keep_their_nesting(shared_runtimes: Any, ordinary: Ordinary) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: {"a": x.sum(), "b": (x.mean(), [x.max()])}, outputs={"a": "sum", "b": "max"})
    first = f(X)
    for _ in range(4):
        assert f(X) == first
    assert isinstance(f(X)["b"], tuple) and isinstance(f(X)["b"][1], list)


def test_nothing_warns_of_overflow_and_nan(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.max(), outputs="sum")
    x = np.full(4, np.finfo(np.float64).max)
    with np.errstate(all="raise"):
        for _ in range(5):
            assert f(x) == np.inf
        with pytest.raises(FloatingPointError):  # the caller's own settings are in place
            np.float64(1.0) / np.zeros(1)
    g = rt.function(lambda x: np.float64(np.nan) if x[0] else np.float64(np.inf), outputs="min")
    assert all(np.isnan(g(np.array([0.0, 1.0]))) for _ in range(5))


# -- arguments --------------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, Callable[[np.ndarray], Any]] = {
    "another dtype": lambda x: x.astype(np.float32),
    "integers": lambda x: x.astype(np.int64),
    "foreign byte order": lambda x: x.astype(">f8"),
    "more rows": lambda x: np.concatenate([x, x]),
    "fewer rows": lambda x: x[:3],
    "one row": lambda x: x[:1],
    "Fortran order": np.asfortranarray,
    "strided": lambda x: np.repeat(x, 2, axis=0)[::2],
    "reversed": lambda x: x[::-1],
    "read-only": lambda x: _frozen(x),
    "a list": lambda x: x.tolist(),
    "a variable's value": lambda x: x.view(ReadOnlyArray),
    "bools": lambda x: x > 3,
}


def _frozen(x: np.ndarray) -> np.ndarray:
    copy = x.copy()
    copy.flags.writeable = False
    return copy


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_other_arguments_after_a_quiet_call(shared_runtimes: Any, kind: str) -> None:
    f = make(shared_runtimes[2])
    check(warm(f, W, X))
    other = ARGUMENTS[kind](X + 1)
    for x in (other, X, other, other, other, X):
        check(f(W, x), W, np.asarray(x))
    for w in (ARGUMENTS[kind](np.stack([W] * 3))[0] if kind != "one row" else W, W):
        check(f(np.asarray(w), X), np.asarray(w), X)


def test_wrong_arguments_after_a_quiet_call_raise_as_before_it(shared_runtimes: Any) -> None:
    f = make(shared_runtimes[2])
    bad: list[tuple[Any, ...]] = [(), (W,), (W, X, X), (W, 3.0), (W, np.array([None, {}]))]
    errors = []
    for _ in range(2):
        found = []
        for args in bad:
            with pytest.raises((TypeError, ValueError)) as caught:
                f(*args)
            found.append((caught.type, str(caught.value)))
        errors.append(found)
        check(warm(f, W, X))
    assert errors[0] == errors[1]


def test_keywords_and_options_after_a_quiet_call(shared_runtimes: Any) -> None:
    f = make(shared_runtimes[2])
    for _ in range(3):
        check(warm(f, W, X))
        check(f(W, x=X))
        check(f(W, X, batch=3), W, X[:3])
        check(f(W, X, batch=slice(2, 7)), W, X[2:7])
        check(f(W, X, batch=[5, 1, 1]), W, X[[5, 1, 1]])
        check(f(W, X, num_slices=2))
        check(f.serial(W, X))
        assert f(W, X, output_subset=[1]) == pytest.approx(((X * W).sum(),))
        check(f(W, X, timeout=20.0))
        check(f(W, X))


BATCHES: list[Any] = [
    5, 5, 6, 8, 3, None, slice(2, 7), slice(1, 8, 3), slice(None, None, -1), slice(6, 1, -2), [5, 1, 1, 0],
    np.array([7, -1, 2, 2]), np.arange(8)[::-1], X[:, 0] > 9, 5, None,
]  # fmt: skip


@pytest.mark.sampled(20)
@pytest.mark.parametrize("num_workers", [1, 2, 3, "inline"])
@pytest.mark.parametrize("as_data", [True, False])
def test_batches_are_quiet(shared_runtimes: Any, ordinary: Ordinary, num_workers: Any, as_data: bool) -> None:
    """From the third call of a plan on: lists of one length are one, and all ranges and numbers of rows together."""
    rt = shared_runtimes[num_workers]

    def look(w: np.ndarray, x: np.ndarray) -> tuple[Any, Any, Any]:
        return is_compiled(), (x * w).sum(), x.mean(axis=0)

    f = rt.function(look, bcast_inputs="w", outputs=("min", "sum", "avg"))
    x = rt.data(X) if as_data else X
    for k, batch in enumerate(BATCHES):
        if num_workers == 3 and isinstance(batch, list):
            continue
        rows = X[:batch] if isinstance(batch, int) else X if batch is None else X[batch]
        for _ in range(3):
            f(W, x=x, batch=batch)
        before = len(ordinary)
        for scale in (k, k + 1):
            is_known, total, mean = f(W * scale, x=x, batch=batch)
            assert is_known
            np.testing.assert_allclose(total, (rows * W * scale).sum())
            np.testing.assert_allclose(mean, rows.mean(axis=0))
        assert len(ordinary) == before
    before = len(ordinary)
    for batch in (4, 6, slice(1, 8), 7, slice(None, None, -1), None, 5):
        f(W, x=x, batch=batch)
    assert len(ordinary) - before <= 1, "one of them comes after a list"


def test_indices_of_a_batch_lie_where_those_before_lay(shared_runtimes: Any, ordinary: Ordinary) -> None:
    rt = shared_runtimes[2]
    rng = np.random.default_rng(0)
    data = rt.data(X)
    small = rt.data(X[:4], minibatch=True)
    f = rt.function(lambda x, y: (x[:, 0] @ y[:, 1], x.copy()), outputs=("sum", "gather"))
    for k in range(12):
        indices = rng.integers(8, size=4)
        small[...] = X[indices] + k
        before = len(ordinary)
        total, rows = f(data, y=small, batch=indices)
        np.testing.assert_allclose(total, X[indices, 0] @ (X[indices, 1] + k))
        np.testing.assert_array_equal(rows, X[indices])
        assert len(ordinary) == before or k < 3
    small.minibatch = False
    total, rows = f(data, y=small, batch=[0, 1, 2, 1])
    np.testing.assert_allclose(total, X[[0, 1, 2, 1], 0] @ small.data[[0, 1, 2, 1], 1])


def test_a_batch_without_rows_and_wrong_ones_after_a_quiet_call(shared_runtimes: Any) -> None:
    """They give what they give to a function that is called for the first time, and nothing is sent before an error."""
    rt = shared_runtimes[2]
    total = rt.function(lambda x: x.sum(), outputs="sum")
    f = make(rt)
    for batch in (5, [1, 2, 3], slice(1, 4)):
        for _ in range(4):
            f(W, X, batch=batch)
            total(X, batch=batch)
        for nothing in (0, [], slice(3, 3), np.zeros(8, bool)):
            assert total(X, batch=nothing) == 0.0
            with pytest.raises(ValueError, match="no rows"):
                f(W, X, batch=nothing)
        for _ in range(4):
            f(W, X, batch=batch)
        for wrong in (9, -1, [8], [-9, 0, 1], np.zeros(7, bool), "ab", [0.5, 1.0, 2.0], True, object()):
            messages = []
            for function in (f, make(rt)):
                sent = rt.counters["messages_down"]
                with pytest.raises((IndexError, TypeError)) as caught:
                    function(W, X, batch=wrong)
                messages.append((caught.type, str(caught.value)))
                assert function is not f or rt.counters["messages_down"] == sent
            assert messages[0] == messages[1]
        check(f(W, X, batch=batch), W, X[:batch] if isinstance(batch, int) else X[batch])


def test_shared_variables_as_arguments_are_quiet(shared_runtimes: Any, ordinary: Ordinary) -> None:
    """Replicas and shards, whose values and lengths change between the calls, from the master's side and in calls."""
    rt = shared_runtimes[2]
    one, two = rt.shared(W), rt.shared(W * 2)
    shard = rt.shared(X, sharded=True)

    def look(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
        return is_compiled(), (x * w).sum() + y.sum()

    f = rt.function(look, bcast_inputs="w", outputs=("min", "sum"))
    grow = rt.function(lambda: setattr(shard, "value", np.concatenate([shard.value, shard.value[:1]])), outputs=None)
    for _ in range(3):
        for w, scale in ((one, 1.0), (two, 2.0), (W * 3, 3.0)):
            rows = np.asarray(rt.gather(shard)).reshape(-1, 3)
            y = rt.data(rows)
            for batch in (None, slice(1, 7), [0, 7, 3], None):
                part = rows if batch is None else rows[batch]
                for k in range(6):  # what was dropped before has to be told to the ranks
                    before = len(ordinary)
                    is_known, total = f(w, shard, y=y, batch=batch)
                    np.testing.assert_allclose(total, (part * W * scale).sum() + part.sum())
                    assert k < 4 or (is_known and len(ordinary) == before)
        grow()
        two.value = W * 2
    y = rt.data(np.asarray(rt.gather(shard)).reshape(-1, 3))
    pending = f.submit(one, shard, y=y)
    np.testing.assert_allclose(pending.result()[1], f(one, shard, y=y)[1])


def test_nested_arguments_are_quiet(shared_runtimes: Any, ordinary: Ordinary) -> None:
    rt = shared_runtimes[2]
    data = rt.data(X)

    def look(both: dict[str, Any], w: np.ndarray) -> tuple[float, Any]:
        first, nothing = both["pair"]
        assert nothing is None
        return is_compiled(), (both["x"] * w).sum() + first.sum()

    f = rt.function(look, bcast_inputs="w", outputs=("min", "sum"))
    for k in range(8):
        before = len(ordinary)
        is_known, total = f({"x": data, "pair": (X[:, 0] + k, None)}, w=W, batch=7)
        np.testing.assert_allclose(total, (X[:7] * W).sum() + (X[:7, 0] + k).sum())
        assert k < 3 or (is_known and len(ordinary) == before)
    _, total = f({"pair": (X[:, 0], None), "x": data}, w=W, batch=7)  # another structure
    np.testing.assert_allclose(total, (X[:7] * W).sum() + X[:7, 0].sum())
    for wrong in ({"x": data, "pair": 3}, {"x": data, "pair": (X[:5, 0], None)}, X, 3.0):
        with pytest.raises((TypeError, ValueError, IndexError)):
            f(wrong, w=W)


PLAIN_OBJECTS: list[Any] = [
    0.5, 3, 10**30, True, None, "text", "\ud800", b"bytes", 2j, float("inf"), np.float32(0.25), np.int8(-7),
    np.bool_(True), np.str_("numpy"), (1, 2.0), [1, "a", [None]], {"lr": 0.1, "betas": (0.9, 0.99)}, {}, "x" * 150,
]  # fmt: skip


class Number(int):
    """A number of another class."""


def told(value: Any) -> Any:
    """Return an array, of one size, from which one can tell what a rank was given."""
    return np.frombuffer(f"{type(value).__name__} {value!r}".encode(errors="replace").ljust(400)[:400], np.uint8)


@pytest.mark.parametrize("num_workers", [1, 2, "inline"])
def test_broadcast_numbers_and_texts_are_quiet(shared_runtimes: Any, ordinary: Ordinary, num_workers: Any) -> None:
    rt = shared_runtimes[num_workers]

    def look(value: Any, x: np.ndarray, other: Any) -> tuple[Any, ...]:
        seen = told(value)
        if type(value) is dict:
            value["mine"] = 1  # it is this call's own
        return is_compiled(), x.sum() * other, seen

    f = rt.function(look, bcast_inputs=("value", "other"), outputs=("min", "sum", "first"))
    for _ in range(2):
        f(1.5, X, other=2)
    for k, value in enumerate(PLAIN_OBJECTS * 2):
        before = len(ordinary)
        is_known, total, seen = f(value, X + k, other=k)
        assert is_known and len(ordinary) == before
        np.testing.assert_allclose(total, (X + k).sum() * k)
        np.testing.assert_array_equal(seen, told(value))
    pending = [f.submit(float(k), X, other=k) for k in range(12)]
    for k, each in enumerate(pending):
        _, total, seen = each.result()
        np.testing.assert_allclose(total, X.sum() * k)
        np.testing.assert_array_equal(seen, told(float(k)))


def test_broadcast_objects_that_are_more_than_that(shared_runtimes: Any) -> None:
    """They may hold arrays or the user's code, or take more room than there is."""
    rt = shared_runtimes[2]
    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)

    def look(value: Any, x: np.ndarray) -> Any:
        if isinstance(value, dict) and "array" in value:
            return x.sum() + np.asarray(value["array"]).sum()
        if isinstance(value, list) and value and value[0] is value:
            return x.sum() + 5.0
        return x.sum() + (len(value) if isinstance(value, str) else float(value))

    f = rt.function(look, bcast_inputs="value", outputs="max")
    expected = X[4:].sum()
    calls: list[tuple[Any, float]] = [
        (1.0, 1.0), (2, 2.0), ("x" * 1000, 1000.0), ("x" * 1001, 1001.0), ({"array": W}, W.sum()), (Number(3), 3.0),
        (np.array(4.0), 4.0), (holds_itself, 5.0), ({"array": [1.0, 2.0]}, 3.0), (7.0, 7.0),
    ]  # fmt: skip
    for value, number in [*calls, *[each for each in calls for _ in range(4)], *calls]:
        np.testing.assert_allclose(f(value, X), expected + number)
        np.testing.assert_allclose(f.submit(value, X).result(), expected + number)
    for wrong in (lambda: 1, threading.Lock()):
        warm(f, 1.0, X)
        with pytest.raises((TypeError, synk.errors.SerializationError)):
            f(wrong, X)
    np.testing.assert_allclose(f(1.0, X), expected + 1)


def test_single_values_in_a_nested_argument_are_quiet(shared_runtimes: Any, ordinary: Ordinary) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda both: (both["x"] * both["scale"]).sum(), outputs="sum")
    for k in range(8):
        before = len(ordinary)
        np.testing.assert_allclose(f({"x": X, "scale": k * 0.5}), X.sum() * k * 0.5)
        assert k < 2 or len(ordinary) == before
    rows = list(range(8))
    np.testing.assert_allclose(f({"x": X[:, 0], "scale": rows}), (X[:, 0] * rows).sum())  # a list is rows there
    np.testing.assert_allclose(f({"x": X[:, 0], "scale": tuple(rows)}), (X[:, 0] * rows).sum())
    np.testing.assert_allclose(f({"x": X, "scale": np.float32(2)}), X.sum() * 2)


def test_data_that_changes_between_calls(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = make(rt)
    data = rt.data(X)
    check(warm(f, W, data))
    changes: list[Callable[[], Any]] = [
        lambda: data.__setitem__(slice(None), X + 1),
        lambda: data.__setitem__(3, -1.0),
        lambda: data.set_value(X * 3),
        lambda: data.set_value(X[:5]),
        lambda: data.set_length(7),
        lambda: data.set_length(3),
        lambda: data.set_value(np.concatenate([X] * 4)),
        lambda: (data.free_memory(), data.set_value(X + 2)),
        lambda: np.add(data, 1.0, out=data),
        lambda: data.data.__setitem__(0, 5.0),
    ]
    for change in changes:
        for _ in range(2):
            change()
            for _ in range(3):
                check(f(W, data), W, data.data.copy())
    view = data.data
    for k in range(4):
        view[...] = k
        check(f(W, data), W, np.full(view.shape, float(k)))


def test_another_data_of_the_same_look(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = make(rt)
    one, two = rt.data(X), rt.data(X * 2)
    for _ in range(4):
        check(f(W, one), W, X)
        check(f(W, two), W, X * 2)
    for k in range(6):  # each in the place of the one before, perhaps at its address
        del one
        one = rt.data(X + k)
        check(f(W, one), W, X + k)
        check(f(W, one), W, X + k)
        check(f(W, one), W, X + k)


def test_data_that_is_dropped_is_freed(shared_runtimes: Any, ordinary: Ordinary) -> None:
    rt = shared_runtimes[2]
    f = make(rt)
    data, other = rt.data(X), rt.data(np.ones(1 << 20))
    warm(f, W, data)
    segment = other._contents.segment
    assert ordinary.in_(lambda: check(f(W, data))) == 0
    del other
    gc.collect()
    assert ordinary.in_(lambda: check(f(W, data))) == 1
    assert segment.mapping is None


def test_data_of_another_runtime(shared_runtimes: Any) -> None:
    one, two = shared_runtimes[2], shared_runtimes[3]
    f = make(one)
    mine, theirs = one.data(X), two.data(X)
    warm(f, W, mine)
    with pytest.raises(ValueError, match="another runtime"):
        f(W, theirs)
    check(f(W, mine))


def test_two_functions_and_two_runtimes_in_turn(shared_runtimes: Any, ordinary: Ordinary) -> None:
    rt, other = shared_runtimes[2], shared_runtimes[3]
    f, g, h = make(rt), make(rt), make(other)
    data, few = rt.data(X), X[:2]

    def turn() -> None:
        check(f(W, data))
        check(g(W * 2, few), W * 2, few)
        check(h(W, X))
        check(f(W * 3, data), W * 3)

    for _ in range(4):
        turn()
    assert ordinary.in_(turn) == 0


# -- what the function does -------------------------------------------------------------------------------------------


def test_an_output_that_changes_in_one_call(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def moody(k: np.ndarray) -> Any:
        step = int(k[0])
        if step == 1:
            return np.ones((2, 2)), 1.5
        if step == 2:
            return np.ones(3, np.float32), 1.5
        if step == 3:
            return np.ones(3), np.float32(1.5)
        if step == 4:
            return [np.ones(3), 1.5]
        if step == 5:
            return np.ones(3)
        if step == 6:
            return np.ones(3), np.ones(1 << 16)
        return np.full(3, float(step)), 1.5 + step

    f = rt.function(moody, bcast_inputs="k", outputs="avg")
    for step in (0, 0, 0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 6, 6, 6, 6, 7):
        got = f(np.array([step]))
        expected = moody(np.array([step]))
        assert type(got) is type(expected)
        pairs = zip(got, expected) if isinstance(got, (tuple, list)) else [(got, expected)]
        for one, other in pairs:
            assert np.asarray(one).dtype == np.asarray(other).dtype
            np.testing.assert_array_equal(one, other)


def test_an_object_in_place_of_a_number(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda k: "text" if k[0] == 2 else float(k[0]), bcast_inputs="k", outputs="first")
    for step in (0, 1, 0, 2, 2, 0, 1, 2, 0):
        assert f(np.array([step])) == ("text" if step == 2 else float(step))


def test_a_function_that_returns_the_same_buffer(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    buffer = np.zeros(3)

    def fill(k: np.ndarray) -> np.ndarray:
        buffer[:] = k[0]
        return buffer

    f = rt.function(fill, bcast_inputs="k", outputs="avg")
    kept = [f(np.array([float(k)])) for k in range(6)]
    for k, value in enumerate(kept):
        np.testing.assert_array_equal(value, np.full(3, float(k)))


@pytest.mark.parametrize("as_data", [True, False])
def test_a_function_that_changes_the_shape_of_its_inputs(shared_runtimes: Any, as_data: bool) -> None:
    rt = shared_runtimes[2]

    def reshape(w: np.ndarray, x: np.ndarray) -> tuple[Any, Any]:
        shapes = w.shape, x.shape
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            w.shape = (3, 1)
            x.shape = (-1,)
        return x.sum(), float(shapes == ((3,), (4, 3)))

    f = rt.function(reshape, bcast_inputs="w", outputs=("sum", "min"))
    x = rt.data(X) if as_data else X
    w = rt.data(W) if as_data else W
    for _ in range(5):
        assert f(w, x) == (X.sum(), 1.0)


@pytest.mark.parametrize("what", ["rows", "whole", "view", "result"])
def test_what_a_function_keeps_of_its_inputs(shared_runtimes: Any, what: str) -> None:
    rt = shared_runtimes[2]
    kept: list[Any] = []

    def keep(w: np.ndarray, x: np.ndarray) -> Any:
        is_right = all(array[0] == number for array, number in kept)
        if w[0] % 3 == 0:
            kept.append({"rows": (x[:, 0], x[0, 0]), "whole": (w, w[0]), "view": (w[:1], w[0])}.get(what, (w, w[0])))
        return (x[:1, 0] + w[0]) if what != "result" else w, float(is_right)

    f = rt.function(keep, bcast_inputs="w", outputs=("max", "min"))
    for k in range(12):
        value, is_right = f(W + k, X + k)
        assert is_right == 1.0
        expected = W + k if what == "result" else np.array([X[4, 0] + W[0] + 2 * k])
        np.testing.assert_array_equal(value, expected)


def test_inputs_stay_read_only(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def write(x: np.ndarray) -> float:
        try:
            x[0] = 7.0
        except ValueError:
            return x.sum()
        return -1.0

    f = rt.function(write, outputs="sum")
    data = rt.data(X)
    assert [f(data) for _ in range(5)] == [X.sum()] * 5


def test_exceptions_in_between(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def fail(k: np.ndarray, x: np.ndarray) -> float:
        if k[0] == 3 and x[0] == 0:
            raise LookupError("three")
        return x.sum() + k[0]

    f = rt.function(fail, bcast_inputs="k", outputs="max")
    x = np.arange(4.0)
    before = pids(rt)
    for k in (0, 1, 2, 3, 4, 3, 3, 5, 6, 7, 3, 8):
        if k == 3:
            with pytest.raises(LookupError, match="three") as caught:
                f(np.array([k]), x)
            assert isinstance(caught.value.__cause__, RemoteError)
        else:
            assert f(np.array([k]), x) == 5.0 + k
    assert pids(rt) == before


def test_the_objects_of_a_result_are_dropped_after_the_call(shared_runtimes: Any) -> None:
    """A rank holds no more of a quiet call than of an ordinary one."""
    rt = shared_runtimes[2]
    log: list[Any] = []

    class Tracked(np.ndarray):
        pass

    def track(x: np.ndarray) -> float:
        import gc
        import weakref

        alive = sum(reference() is not None for reference in log)
        array = np.ones(3).view(Tracked)
        log.append(weakref.ref(array))
        gc.collect()
        return float(alive)

    f = rt.function(track, outputs="max")
    assert [f(np.ones(2)) for _ in range(5)] == [0.0] * 5


def test_what_is_printed_comes_before_the_result(shared_runtimes: Any, capfd: pytest.CaptureFixture[str]) -> None:
    rt = shared_runtimes[2]

    def say(k: np.ndarray) -> float:
        if k[0] % 2:
            print("number", int(k[0]))
            sys.stdout.write(f"half {int(k[0])}")
            print("", file=sys.stdout)
        return float(k[0])

    f = rt.function(say, bcast_inputs="k", outputs="max")
    for k in range(9):
        f(np.array([k]))
        out = capfd.readouterr().out
        lines = [f"[rank {rank}] {text} {k}" for rank in range(2) for text in ("number", "half")] if k % 2 else []
        assert sorted(out.splitlines()) == sorted(lines)


def test_a_function_that_forks(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def fork(k: np.ndarray) -> float:
        if k[0] == 4:
            os.fork()  # and both go on
        return float(k[0])

    f = rt.function(fork, bcast_inputs="k", outputs="max")
    for k in range(8):
        assert f(np.array([k])) == float(k)


# -- what it captured -------------------------------------------------------------------------------------------------

SCALE = 1.0


def test_a_global_that_is_bound_anew(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = shared_runtimes[2]
    namespace: dict[str, Any] = {"SCALE": 1.0}
    exec("def scaled(x):\n    return (x * SCALE).sum()", namespace)
    f = rt.function(namespace["scaled"], outputs="sum")
    for scale in (1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 1.0, 1.0, 1.0):
        namespace["SCALE"] = scale
        assert f(X) == X.sum() * scale


def test_a_variable_that_is_read(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w = rt.shared(np.ones(3))
    f = rt.function(lambda x: (x * w.value).sum(), outputs="sum")
    step = rt.function(lambda x: setattr(w, "value", w.value + 1), outputs=None)
    expected = 1.0
    for k in range(12):
        if k % 4 == 3:
            w.value = np.full(3, expected := float(k))
        if k % 5 == 4:
            step(X)
            expected += 1.0
        assert f(X) == X.sum() * expected
    rt.all_reduce(w, "sum")
    assert f(X) == X.sum() * expected * 2


def test_a_variable_that_is_assigned_in_each_call(shared_runtimes: Any, ordinary: Ordinary) -> None:
    """Its calls are quiet on both sides; another shape, a value of the master's and an error are not."""
    rt = shared_runtimes[2]
    w = rt.shared(np.zeros(3))

    def step(x: np.ndarray) -> tuple[float, Any]:
        if x[0, 0] < 0:
            w.value = w.value * 100
            raise ZeroDivisionError
        w.value = w.value + 1
        return is_compiled(), w.value.sum() + x.sum()

    f = rt.function(step, outputs=("min", "max"))
    x = X * 0 + 1
    for _ in range(4):
        f(x)
    before = len(ordinary)
    for k in range(5, 9):
        is_known, total = f(x)
        assert is_known and total == 3 * k + x[:4].sum()
        np.testing.assert_array_equal(w.value, np.full(3, float(k)))
    assert len(ordinary) == before
    for k in range(3):
        with pytest.raises(ZeroDivisionError):
            f(-x)
        np.testing.assert_array_equal(w.value, np.full(3, 8.0 + k))
        assert f(x)[1] == 3 * (9.0 + k) + x[:4].sum()
    for k in range(3):
        w.value = np.full(3, float(k))
        for _ in range(3):
            f(x)
        np.testing.assert_array_equal(w.value, np.full(3, k + 3.0))


def test_a_variable_that_is_assigned_in_some_calls(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w = rt.shared(np.zeros(()))

    def count(k: np.ndarray) -> float:
        if k[0] % 3 == 2:
            w.value = w.value + 1
        return float(w.value)

    f = rt.function(count, bcast_inputs="k", outputs="first")
    expected = 0
    for k in (0, 0, 0, 0, 2, 0, 0, 0, 2, 2, 2, 0, 0, 0, 5, 0):
        expected += k % 3 == 2
        assert f(np.array([k])) == expected
        if k % 3 == 2:
            assert w.value == expected
    assert w.value == expected


# -- communication ----------------------------------------------------------------------------------------------------


def test_collectives_inside(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: synk.comm.all_reduce(x.sum(), "sum"), outputs="max")
    for k in range(6):
        assert f(X + k) == (X + k).sum()


def test_a_collective_that_one_rank_leaves_out(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def lonely(k: np.ndarray, x: np.ndarray) -> float:
        if k[0] == 1 or (k[0] == 2 and x[0] == 0):
            return float(synk.comm.all_reduce(x.sum(), "sum"))
        return x.sum()

    f = rt.function(lonely, bcast_inputs="k", outputs="max")
    x = np.arange(4.0)
    for k in (0, 0, 0, 0, 2, 0, 0, 0, 1, 2, 1, 1, 0, 0, 0, 2, 2, 0):
        if k == 2:
            with pytest.raises(CollectiveMismatch, match="left the function without joining it"):
                f(np.array([k]), x)
        else:
            assert f(np.array([k]), x) == (6.0 if k else 5.0)


# -- threads, forks, two owners ---------------------------------------------------------------------------------------


def test_threads_that_call_at_the_same_time(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = make(rt)
    data = rt.data(X)
    wrong: list[Any] = []

    def work(scale: float) -> None:
        try:
            for _ in range(60):
                check(f(W * scale, data), W * scale)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(float(k),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_cannot_call(runtime: Fork) -> None:
    rt = runtime(2)
    f = make(rt)
    warm(f, W, X)

    def act() -> None:
        with pytest.raises((ReentrancyError, ClosedError)):
            f(W, X)

    for _ in range(2):
        with Child(act):
            check(f(W, X))
        for _ in range(3):
            check(f(W, X))


def test_submitted_calls_between_quiet_ones(shared_runtimes: Any) -> None:
    f = make(shared_runtimes[2])
    for _ in range(3):
        check(warm(f, W, X))
        pending = [f.submit(W * k, X) for k in range(4)]
        check(f(W * 7, X), W * 7)
        for k, call in enumerate(pending):
            check(call.result(), W * k)


def test_a_call_from_a_signal_handler_is_refused(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x, signum: (synk.comm.rank or os.kill(os.getppid(), signum), x.sum())[1],
                    bcast_inputs="signum", outputs="sum")  # fmt: skip
    g = make(rt)
    warm(g, W, X)
    warm(f, X, 0)
    seen: list[BaseException] = []

    def handle(signum: int, frame: Any) -> None:
        try:
            g(W, X)
        except ReentrancyError as error:
            seen.append(error)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        assert f(X, int(signal.SIGALRM)) == X.sum()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(seen) == 1
    seen.clear()
    check(g(W, X))


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_while_idle(runtime: Fork) -> None:
    rt = runtime(2)
    f = make(rt)
    warm(f, W, X)
    victim = rt._session.workers.by_rank[1].process.pid
    os.kill(victim, signal.SIGKILL)
    stat = Path(f"/proc/{victim}/stat")
    assert wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    with pytest.warns(RuntimeWarning, match="was started again") as told:
        check(f(W, X))
    assert [each.filename for each in told] == [__file__]
    check(warm(f, W, X))


def test_a_worker_that_dies_in_a_quiet_call(runtime: Fork) -> None:
    rt = runtime(2)

    def die(k: np.ndarray, x: np.ndarray) -> float:
        if k[0] == 5 and x[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return x.sum()

    f = rt.function(die, bcast_inputs="k", outputs="sum", name="die")
    x = np.arange(4.0)
    for k in range(5):
        assert f(np.array([k]), x) == 6.0
    with pytest.raises(WorkerDied, match="SIGKILL during 'die'") as caught:
        f(np.array([5]), x)
    assert caught.value.ranks == (1,)
    for k in range(5):
        assert f(np.array([k]), x) == 6.0


def test_a_time_limit_in_a_quiet_call(runtime: Fork) -> None:
    rt = runtime(2, timeout=30.0)
    f = rt.function(lambda k, x: (time.sleep(float(k[0])), x.sum())[1], bcast_inputs="k", outputs="sum", name="slow")
    warm(f, np.zeros(1), X)
    before = pids(rt)
    for _ in range(2):
        rt.timeout = 0.3
        with pytest.raises(CallTimeout, match="'slow' did not end in time"):
            f(np.full(1, 60.0), X)
        rt.timeout = 30.0
        for _ in range(4):
            assert f(np.zeros(1), X) == X.sum()
    assert pids(rt) == before


def test_a_call_that_takes_longer_than_the_quiet_wait(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda k, x: (time.sleep(float(k[0])), x.sum())[1], bcast_inputs="k", outputs="sum")
    warm(f, np.zeros(1), X)
    for seconds in (0.25, 0.0, 0.25, 0.0, 0.0):
        assert f(np.full(1, seconds), X) == X.sum()


def test_ctrl_c_in_a_quiet_call(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda k, x: (time.sleep(float(k[0])), x.sum())[1], bcast_inputs="k", outputs="sum")
    before = pids(rt)
    for _ in range(2):
        warm(f, np.zeros(1), X)
        timer = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            f(np.full(1, 60.0), X)
        timer.join()
    assert pids(rt) == before
    assert warm(f, np.zeros(1), X) == X.sum()


class Late(Exception):
    """What the handler raises."""


@pytest.fixture
def alarm() -> Iterator[Callable[[str, int], None]]:
    """Return ``ring_at(file, n)``: SIGALRM, whose handler raises ``Late``, comes at the n-th line of the file."""

    def handle(signum: int, frame: Any) -> None:
        raise Late

    def ring_at(file: str, nth: int) -> None:
        met: set[int] = set()
        # No handler runs at the instruction of a "try:", which no with statement around it would see either.
        lines = Path(file).read_text(encoding="utf-8").splitlines()

        def enter(frame: Any, event: str, argument: Any) -> Any:
            return look if frame.f_code.co_filename == file else None

        def look(frame: Any, event: str, argument: Any) -> Any:
            if event == "line" and lines[frame.f_lineno - 1].strip() != "try:":
                met.add(frame.f_lineno)
            if len(met) == nth:
                sys.settrace(None)
                signal.raise_signal(signal.SIGALRM)
            return look

        sys.settrace(enter)

    before = signal.signal(signal.SIGALRM, handle)
    yield ring_at
    sys.settrace(None)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("num_workers", "file"),
    [
        (2, _call.__file__),
        (2, _compiled.__file__),
        (2, _doorbells.__file__),
        ("inline", _call.__file__),
        ("inline", _doorbells.__file__),
        ("inline", _dispatch.__file__),
        ("inline", _rank.__file__),
        ("inline", _calls_on_rank.__file__),
        ("inline", _execute.__file__),
        ("inline", _inline.__file__),
    ],
)
def test_an_exception_of_a_handler_at_any_line(
    shared_runtimes: Any, alarm: Callable[[str, int], None], ordinary: Ordinary, num_workers: Any, file: str
) -> None:
    """It comes out as itself, the workers live on, and the next calls are right."""
    rt = shared_runtimes[num_workers]
    f = make(rt)
    data = rt.data(X)
    before = pids(rt)
    num_raised = 0
    for nth in range(1, 200):
        check(warm(f, W, data))
        alarm(file, nth)
        try:
            assert ordinary.in_(lambda: check(f(W * 3, data), W * 3)) == 0
        except Late:
            num_raised += 1
            check(f(W * 5, data), W * 5)
            continue
        finally:
            sys.settrace(None)
        break
    assert 5 < num_raised == nth - 1
    assert pids(rt) == before
    assert_right(rt)


@pytest.mark.parametrize(
    ("num_workers", "file"),
    [
        (2, _pattern.__file__),
        (2, _queue.__file__),
        ("inline", _dispatch.__file__),
        ("inline", _rank.__file__),
        ("inline", _calls_on_rank.__file__),
        ("inline", _execute.__file__),
    ],
)
def test_an_exception_of_a_handler_at_any_line_of_steps(
    shared_runtimes: Any, alarm: Callable[[str, int], None], num_workers: Any, file: str
) -> None:
    """Each changes a resident object, with a number as argument, and is submitted while another is in flight."""
    rt = shared_runtimes[num_workers]
    counter = rt.resident([0])

    def count(scale: float, x: np.ndarray) -> tuple[Any, float]:
        counter.value[0] += 1
        total = synk.comm.all_reduce(x.sum(), "sum")
        return total * scale, float(counter.value[0])

    f = rt.function(count, bcast_inputs="scale", outputs=("max", "min"), changes=[counter])
    before = pids(rt)
    num_raised = 0
    for nth in range(1, 300):
        for _ in range(3):
            last = [f.submit(2.0, X) for _ in range(3)][-1].result()[1]
        alarm(file, nth)
        try:
            pending = [f.submit(3.0, X), f.submit(4, X)]
            assert [each.result() for each in pending] == [(X.sum() * 3, last + 1), (X.sum() * 4, last + 2)]
            break
        except (Late, CallCancelled) as error:
            num_raised += 1
            assert isinstance(error, Late) or isinstance(error.__cause__, Late)
        finally:
            sys.settrace(None)
        total, now = f(5.0, X)
        assert total == X.sum() * 5 and last < now <= last + 3
    assert num_raised == nth - 1
    assert pids(rt) == before
    assert len({f.submit(1.0, X).result()[1] for _ in range(3)}) == 3


@pytest.mark.parametrize(
    "file", [_call.__file__, _compiled.__file__, _doorbells.__file__, _queue.__file__, _pending.__file__]
)
def test_an_exception_of_a_handler_at_any_line_of_submitted_calls(
    shared_runtimes: Any, alarm: Callable[[str, int], None], file: str
) -> None:
    """It comes out as itself, calls in flight end well or are cancelled, and the next ones are right."""
    rt = shared_runtimes[2]
    f = make(rt)
    data = rt.data(X)
    before = pids(rt)
    num_raised = 0
    for nth in range(1, 300):
        for result in submit_all(f, *[(W, data)] * 9):
            check(result)
        pending: list[Any] = []
        alarm(file, nth)
        try:
            pending += [f.submit(W * 3, data)]
            pending += [f.submit(W * 3, data)]
            check(pending[0].result(), W * 3)
            pending += [f.submit(W * 3, data)]
            check(pending[-1].result(), W * 3)
        except (Late, CallCancelled) as error:  # which the handler's own may be behind
            num_raised += 1
            assert isinstance(error, Late) or isinstance(error.__cause__, Late)
        else:
            break
        finally:
            sys.settrace(None)
        for call in pending:
            with contextlib.suppress(CallCancelled):
                check(call.result(), W * 3)
        for result in submit_all(f, *[(W * 5, data)] * 4):
            check(result, W * 5)
    assert 5 < num_raised == nth - 1
    assert pids(rt) == before
    assert_right(rt)


def test_close_between_and_meanwhile(runtime: Fork) -> None:
    rt = runtime(2)
    f = rt.function(lambda k, x: (time.sleep(float(k[0])), x.sum())[1], bcast_inputs="k", outputs="sum")
    warm(f, np.zeros(1), X)
    closer = threading.Timer(0.3, rt.close)
    closer.start()
    with pytest.raises(ClosedError):
        f(np.full(1, 60.0), X)
    closer.join()
    with pytest.raises(ClosedError):
        f(np.zeros(1), X)


def test_a_copy_of_the_master_made_without_hooks_rings_at_no_worker() -> None:
    """By a C library, say: Python's hooks, which are noted in the log, do not run there."""
    harness.script("""
        import ctypes
        rt = synk.fork(2, backend="numpy")
        total = rt.function(lambda x: x.sum(), outputs="sum")
        x = np.arange(6.0)
        assert [total(x) for _ in range(4)] == [15.0] * 4
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            try:
                total(10 * x)
            except synk.errors.ReentrancyError as error:
                print("refused" if "forked copy" in str(error) else error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        assert [total(x + k) for k in range(4)] == [15.0 + 6 * k for k in range(4)]
        rt.close()
    """).check("refused\n")


def test_restart_between(runtime: Fork, ordinary: Ordinary) -> None:
    rt = runtime(2)
    f = make(rt)
    warm(f, W, X)
    rt.restart()
    assert ordinary.in_(lambda: check(f(W, X))) == 1
    check(warm(f, W, X))
    assert ordinary.in_(lambda: check(f(W, X))) == 0


def test_a_closed_runtime_leaves_nothing_behind_for_a_function_that_lives_on(runtime: Fork) -> None:
    rt = runtime(2)
    f = make(rt)
    warm(f, W, rt.data(X))
    rt.close()  # the fixture's census sees what is still mapped
    with pytest.raises(ClosedError):
        f(W, X)


def test_a_time_limit_is_that_of_the_call_and_not_of_each_answer(shared_runtimes: Any) -> None:
    """The ranks answer one after the other, each in time after the one before."""
    rt = shared_runtimes[4]
    f = rt.function(lambda x: time.sleep(float(x[0])), outputs=None)
    x = rt.data(np.zeros(4))
    for _ in range(5):
        f(x)
    x[:] = np.arange(1, 5) * 0.08
    rt.timeout = 0.2
    try:
        with pytest.raises(CallTimeout):
            f(x)
    finally:
        rt.timeout = None


# -- any sequence -----------------------------------------------------------------------------------------------------


class Fuzz:
    """Functions, data, arrays and a variable of one runtime, and what NumPy says that each call returns."""

    def __init__(self, rt: Any, seed: int) -> None:
        self.rt = rt
        self.rng = np.random.default_rng(seed)
        self.namespace: dict[str, Any] = {"SCALE": 2.0}
        self.variable = rt.shared(np.ones(3))
        self.value = np.ones(3)
        self.data = [rt.data(X), rt.data(X[:5] * 2)]
        self.arrays = [X * 3, X[:4] - 1, X.astype(np.float32), np.asfortranarray(X), X[:1]]
        exec("def scaled(w, x):\n    return (x * SCALE * w).sum(), x.max(axis=0) * SCALE", self.namespace)
        variable = self.variable

        def read(w: np.ndarray, x: np.ndarray) -> tuple[Any, Any]:
            return (x * variable.value * w).sum(), x.max(axis=0) * 1.0

        def assign(w: np.ndarray, x: np.ndarray) -> tuple[Any, Any]:
            if w[0] > 0:
                variable.value = variable.value + 1
            return (x * w).sum(), x.max(axis=0) * 1.0

        def grow(w: np.ndarray, x: np.ndarray) -> tuple[Any, Any]:
            total = (x * w).sum()
            return (total, x.max(axis=0) * 1.0) if w[1] < 0.5 else (np.array([total]), x.max(axis=0) * 1.0)

        def times(w: Any, x: np.ndarray) -> tuple[Any, Any]:
            return (x * w).sum(), x.max(axis=0) * 1.0

        options = {"bcast_inputs": "w", "outputs": ("sum", "max")}
        self.functions = {
            "scaled": rt.function(self.namespace["scaled"], **options),
            "read": rt.function(read, **options),
            "assign": rt.function(assign, **options),
            "grow": rt.function(grow, **options),
            "times": rt.function(times, **options),
        }

    def weights(self, name: str) -> Any:
        """Return what is broadcast: for one of the functions a number, a list or an array."""
        w = self.rng.normal(size=3)
        kinds = [w, float(w[0]), int(10 * w[0]), np.float64(w[0]), w.tolist(), w.tolist() * 1, np.array(w[0])]
        return kinds[self.rng.integers(len(kinds))] if name == "times" else w

    def expected(self, name: str, w: Any, x: np.ndarray) -> tuple[Any, Any]:
        scale = self.namespace["SCALE"] if name == "scaled" else 1.0
        total = (x * scale * w * (self.value if name == "read" else 1.0)).sum()
        return np.array([total]) if name == "grow" and w[1] >= 0.5 else total, x.max(axis=0) * scale

    def call(self) -> None:
        name = str(self.rng.choice(list(self.functions)))
        source: Any = [*self.data, *self.arrays][self.rng.integers(len(self.data) + len(self.arrays))]
        for _ in range(self.rng.integers(1, 6)):
            w = self.weights(name)
            x = np.array(source)
            how = self.rng.integers(16)
            function = self.functions[name]
            if how in (0, 12, 13, 14):
                rows = self.batch(len(x))
                x = x[:rows] if isinstance(rows, int) else x[rows]
                if how == 0:
                    got = function(w, source, batch=rows)
                elif how == 12:
                    got = function(w, batch=rows, x=source)
                elif how == 13 or name == "assign":
                    got = function(x=source, w=w, batch=rows)
                else:
                    got = [function.submit(w, x=source, batch=rows) for _ in range(4)][-1].result()
            elif how == 15:
                with pytest.raises(IndexError, match="batch"):
                    function(w, source, batch=[len(x)])
                continue
            elif how == 1 and name != "assign":
                got = function.serial(w, source)
            elif how in (2, 5, 6):
                pending = [
                    function.submit(w, source) for _ in range(self.rng.integers(1, 5) if name != "assign" else 1)
                ]
                got = [each.result() for each in pending][-1]
            elif how == 3:
                got = function(w, x=source)
            else:
                got = function(w, source)
            for one, other in zip(got, self.expected(name, w, x)):
                assert np.shape(one) == np.shape(other)
                np.testing.assert_allclose(one, other, rtol=1e-4 if x.dtype == np.float32 else 1e-9)
            if name == "assign" and w[0] > 0:
                self.value = self.value + 1

    def batch(self, num_rows: int) -> Any:
        """Return any batch of one row or more."""
        count = int(self.rng.integers(1, num_rows + 1))
        indices = self.rng.integers(-num_rows, num_rows, size=count)
        start = int(self.rng.integers(num_rows))
        mask = self.rng.random(num_rows) < 0.6
        mask[start] = True
        batches = [
            count, slice(start, None), slice(None, None, -1), slice(start, None, 2), indices, indices.tolist(), mask,
            np.arange(num_rows)[::-1],
        ]  # fmt: skip
        return batches[self.rng.integers(len(batches))]

    def change(self) -> None:
        data = self.data[self.rng.integers(len(self.data))]
        match = self.rng.integers(8)
        if match == 0:
            data.set_value(self.rng.normal(size=(self.rng.integers(1, 20), 3)))
        elif match == 1:
            data.set_length(int(self.rng.integers(1, 20)))
            data[...] = 1.5
        elif match == 2:
            data[0] = self.rng.normal()
        elif match == 3:
            self.data[0] = self.rt.data(self.rng.normal(size=(8, 3)))
        elif match == 4:
            self.namespace["SCALE"] = float(self.rng.integers(1, 4))
        elif match == 5:
            self.value = self.rng.normal(size=3)
            self.variable.value = self.value
        elif match == 6:
            with pytest.raises(ZeroDivisionError):
                self.rt.function(lambda x: 1 / 0)(X)
        else:
            self.rt.function(lambda x: x.sum(), outputs="sum")(self.rng.normal(size=(3, 2)))


@pytest.mark.parametrize("num_workers", [1, 2, 3, "inline"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(20)
def test_any_sequence_of_calls_equals_numpy(shared_runtimes: Any, num_workers: Any, seed: int) -> None:
    fuzz = Fuzz(shared_runtimes[num_workers], 10 * (0 if num_workers == "inline" else num_workers) + seed)
    for _ in range(40):
        fuzz.call()
        if fuzz.rng.random() < 0.4:
            fuzz.change()


# -- what is counted --------------------------------------------------------------------------------------------------


def test_quiet_calls_are_counted_like_others(shared_runtimes: Any, ordinary: Ordinary) -> None:
    rt = shared_runtimes[2]
    f = make(rt, name="counted")
    data = rt.data(X)
    spent = []
    gc.collect()  # what earlier tests have left would be dropped with one of the calls that are counted
    for _ in range(3):
        rt.function(len, outputs="sum")(X)
    numbers = ("num_calls", "wall_ns", "function_ns", "staged_nbytes", "pickled_nbytes", "output_nbytes")
    rt.distribute()
    for _ in range(6):
        record = f._callee.record
        counters, before = rt.counters, [getattr(record, name) for name in numbers]
        f(W, data)
        num_calls, wall_ns, function_ns, *sizes = (getattr(record, k) - old for k, old in zip(numbers, before))
        assert num_calls == 1 and wall_ns > 0 and function_ns > 0
        spent.append(({name: rt.counters[name] - counters[name] for name in counters}, sizes))
    assert spent[1] == spent[3] == spent[5]
    assert ordinary.count("counted") == 2


# -- the state of the log ----------------------------------------------------------------------------------------------


def test_what_changes_the_state_of_the_log(runtime: Fork) -> None:
    rt = runtime(2)
    f = make(rt)
    data = rt.data(X)
    warm(f, W, data)
    w = rt.shared(np.zeros(3))
    add = rt.function(lambda x: w.value.sum() + x.sum(), outputs="sum")

    def time_out() -> None:
        with pytest.raises(CallTimeout):
            rt.function(lambda x: time.sleep(60))(X, timeout=0.2)

    acts: dict[str, Callable[[], Any]] = {
        "a new function": lambda: rt.function(lambda x: x.sum(), outputs="sum")(X),
        "a variable": lambda: rt.shared(np.ones(2)),
        "a value": lambda: setattr(w, "value", np.ones(3)),
        "a reader": lambda: add(X),
        "a lane": lambda: [call.result() for call in [f.submit(W, data), f.submit(W, data)]],
        "staging": lambda: f(W, np.ones((1 << 18, 3))),
        "slots": lambda: rt.function(lambda x: tuple(np.ones(1 << 13) for _ in range(40)))(X),
        "another signature": lambda: f(W, X[:5]),
        "a fork": lambda: Child(lambda: None).__exit__(),
        "a restart": rt.restart,
        "an interrupt": time_out,
        "close": rt.close,
    }
    for what, act in acts.items():
        number = rt._session.workers.log.state
        act()
        assert rt._session.workers.log.state != number, what
        if what != "close":
            check(f(W, data))


def test_calls_that_fit_leave_the_log_as_it_is(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = make(rt)
    data = rt.data(X)
    warm(f, W, data)
    number = rt._session.workers.log.state
    for k in range(5):
        data[0] = k
        f(W * k, data)
    assert rt._session.workers.log.state == number


@pytest.mark.sampled(20)
@pytest.mark.parametrize("kind", [1, 2, "inline"])
@pytest.mark.parametrize("way", ["communicates", "keeps an input", "both"])
def test_no_assignment_is_lost_where_a_quiet_call_goes_on_the_ordinary_way(
    shared_runtimes: Any, kind: Any, way: str
) -> None:
    """The function has run, and its variables are written, when it shows that the call is no quiet one."""
    rt = shared_runtimes[kind]
    w = rt.shared(np.zeros(2))
    kept: list[Any] = []

    def step(x: np.ndarray) -> float:
        total = x.sum()
        if way != "keeps an input":
            total = synk.comm.all_reduce(total, "sum")
        if way != "communicates":
            kept[:] = [x]
        w.value = w.value + 1.0
        return float(total)

    f = rt.function(step, outputs="max")
    for number in range(1, 9):
        f(np.full(4, float(number)))
        assert np.array_equal(w.value, [number, number])
        assert all(np.array_equal(rt.get_value(w, rank), [number, number]) for rank in range(rt.world_size))


@pytest.mark.parametrize("outputs", ["as before", "others"])
def test_what_a_quiet_call_has_started_to_communicate_is_brought_to_its_end(shared_runtimes: Any, outputs: str) -> None:
    """The function returns before the values are there."""
    rt = shared_runtimes[2]

    def step(x: np.ndarray, k: int) -> tuple[float, np.ndarray]:
        total = np.empty(2 if outputs == "others" and k % 2 else 1)
        synk.comm.iall_reduce(np.full(total.shape, x.sum()), "sum", out=total)
        if k == 9 and synk.comm.rank == 0:
            synk.comm.send(x, 1)
        return is_compiled(), total

    f = rt.function(step, bcast_inputs="k", outputs=("min", "max"))
    for k in range(9):
        is_known, total = f(X + k, k)
        np.testing.assert_allclose(total, (X + k).sum())
        assert k < 3 or is_known or outputs == "others"
    with pytest.raises(CollectiveMismatch, match="without receiving it"):
        f(X, 9)
    np.testing.assert_allclose(f(X, 0)[1], X.sum())
