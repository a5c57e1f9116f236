"""Outputs that are not arrays: what is plain and short lies in the rank's slot, all else comes in the reply."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from typing import Any

import numpy as np
import pytest

import synk
from synk.errors import WorkerDied


class Joined(synk.Op):
    """Joins texts."""

    def combine(self, values: list[Any], rows: list[int]) -> str:
        return "+".join(values)


class Fit:
    """Something that only a pickler of classes can send."""

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fit) and other.slope == self.slope

    __hash__ = None  # type: ignore[assignment]


LONG = "x" * 200_000  # more than there is a place for
VALUES = [
    *("", "text", "a longer text than the one before" * 3, "text", "grün", b"\x00.\xff", True, 0, -1, 1 << 80, 1 << 63),
    *(1.5, math.inf, 2 - 1j, "text", LONG, "short", LONG, LONG + "y", "y" * 90_000, "y" * 130_000, ""),
    *(Fit(2.0), "text", Fit(3.0), Fit(3.0), np.float32(1.5), np.int64(3), np.array(["a", "bc"], dtype=object)),
    *(np.arange(3), "text", range(3), {1, 2}),
]
NESTED = [
    *([1, "two", [3.0, "four"]], [1, "two"], {"a": "text", "n": 1}, {"a": "other", "n": 1 << 70}, ("one", 2)),
    *([["one", 2], ["three"]], {"b": {"c": ["d"] * 40}}, {"a": "text", "n": 1}, {"a": LONG, "n": True}, ("one", 2)),
    [f"{number} " * 20_000 for number in range(30)],  # more together than there is room for
]


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of one type, down to their parts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tolist() == other.tolist()
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and is_same(list(one.values()), list(other.values()))
    return bool(one == other)


def of_rank(values: Any, number: int, rank: int) -> Any:
    """What a rank returns: each begins at another place of the list."""
    return values[(number + 5 * rank) % len(values)]


@pytest.mark.parametrize("where", [1, 2, 3, "inline"])
def test_each_rank_returns_what_it_likes_from_call_to_call(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]

    def f(x: Any, number: Any) -> Any:
        return of_rank(VALUES, int(number[0]), synk.comm.rank)

    each = rt.function(f, bcast_inputs="number", outputs=None)
    first = rt.function(f, bcast_inputs="number", outputs="first")
    kept = []
    for number in range(2 * len(VALUES)):
        args = np.ones(rt.world_size), np.array([number])
        expected = [of_rank(VALUES, number, rank) for rank in range(rt.world_size)]
        for _ in range(2):  # the second is like the one before
            got = each(*args)
            assert is_same(got, expected), (number, got, expected)
        assert is_same(first(*args), expected[0])
        kept.append((got, expected))
    assert all(is_same(got, expected) for got, expected in kept)


@pytest.mark.parametrize("where", [2, 3, "inline"])
def test_structures_of_texts_and_arrays(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    size = rt.world_size

    def f(x: Any, text: Any, number: Any) -> Any:
        word = text * (synk.comm.rank + 1)
        return {"word": word, "sum": x.sum(), "more": (number, [word, None], x), "none": None}

    ops = {"word": None, "sum": "sum", "more": (None, None, "gather"), "none": "first"}
    call = rt.function(f, bcast_inputs=["text", "number"], outputs=ops)
    x = np.arange(2.0 * size)
    for text in ("a", "bc", "d" * 300, "e", "f" * 150_000, "g"):
        for number in (1, 2.5, "three"):
            got = call(x, text, number)
            words = [text * (rank + 1) for rank in range(size)]
            assert got["word"] == words and got["sum"] == x.sum() and got["none"] is None
            numbers, listed, rows = got["more"]
            assert is_same(numbers, [number] * size)
            assert listed == [[word, None] for word in words]
            np.testing.assert_array_equal(rows, x)
            got["more"][1][0].clear()  # it is the caller's


def test_a_list_has_an_object_for_each_row(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    call = rt.function(lambda x: [f"row {value:g}" * int(value + 1) for value in x], outputs="gather")
    for num_rows in (7, 3, 30, 7):
        x = np.arange(float(num_rows))
        for _ in range(2):
            assert call(x) == [f"row {value:g}" * int(value + 1) for value in x]


@pytest.mark.parametrize("num_slices", [1, 3])
def test_with_slices_submitted_and_on_some_ranks(shared_runtimes: Any, num_slices: int) -> None:
    rt = shared_runtimes[3]
    call = rt.function(lambda x: f"{x.sum():g}", outputs=Joined())
    f = rt.function(lambda x: f"{x.sum():g}" * 3, outputs=None)
    x = np.arange(9.0)
    expected = [f"{part.sum():g}" * 3 for part in np.split(x, 3)]
    pending = [f.submit(x) for _ in range(6)]
    assert [each.result() for each in pending] == [expected] * 6
    assert f(x[:2]) == ["000", "111", None]
    assert f(x) == expected
    for _ in range(3):
        parts = [f"{part.sum():g}" for part in np.split(x, 3 * num_slices)]
        assert call(x, num_slices=num_slices) == "+".join(parts)


def test_what_is_simple_and_short_takes_no_message(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    texts = ["a first text", "another", "", "a third one, longer"]
    call = rt.function(lambda x: (texts[int(x[0])], {"n": [1, (texts[int(x[0])], 0.5)]}), outputs=None)
    call(np.zeros(4))
    call(np.zeros(4))
    before = dict(rt.counters)
    for number, text in enumerate(texts):
        assert call(np.full(4, float(number))) == [(text, {"n": [1, (text, 0.5)]})] * 2
    assert rt.counters["bytes_up"] - before["bytes_up"] == 8 * rt.world_size * len(texts)  # doorbells


@pytest.mark.parametrize("where", [2, "inline"])
def test_nested_values_change_from_call_to_call(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    f = rt.function(lambda x, number: NESTED[int(number[0]) % len(NESTED)], bcast_inputs="number", outputs="first")
    for number in (*range(2 * len(NESTED)), *(0, 0, 2, 2, 3, 3)):
        assert is_same(f(np.ones(2), np.array([number])), NESTED[number % len(NESTED)])


class Small(synk.Op):
    """Accepts few dtypes."""

    def check(self, dtype: np.dtype, what: str) -> None:
        if dtype != np.int64:
            raise TypeError(f"{what} has dtype {dtype}")

    def combine(self, values: list[Any], rows: list[int]) -> Any:
        return values


@pytest.mark.parametrize("numbers", [(1, 1, 2.5), (1, 1, True), (1, 1 << 80, 0.5)])
def test_each_number_is_checked(shared_runtimes: Any, numbers: Any) -> None:
    f = shared_runtimes[2].function(lambda x: numbers[int(x[0])], outputs=Small())
    for number, value in enumerate(numbers[:2]):
        assert f(np.full(2, number)) == [value] * 2
    with pytest.raises(TypeError, match=r"the output of .* has dtype"):
        f(np.full(2, 2))


def test_one_rank_returns_more_than_before(shared_runtimes: Any) -> None:
    """Its place must grow while the other's stays, and the slot with it."""
    f = shared_runtimes[2].function(lambda x: "t" * int(x[0]), outputs=None)
    for length in (10, 10, 100, 10, 50_000, 100_000, 10):
        assert f(np.array([10, length])) == ["t" * 10, "t" * length]
        assert f(np.array([length, 10])) == ["t" * length, "t" * 10]


def test_only_some_outputs_and_verified(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(
        lambda x: {"a": "text", "b": x.sum(), "c": [1, "more"]}, outputs=dict.fromkeys("abc")
    )
    x = np.ones(4)
    f.verify(x)
    for subset in (["a"], ["c", "a"], ["b"], ["a"]):
        full = {"a": ["text"] * 2, "b": [2.0, 2.0], "c": [[1, "more"]] * 2}
        for _ in range(2):
            assert f(x, output_subset=subset) == {key: full[key] for key in subset}
        assert f(x) == full


def test_a_worker_dies_between_two_texts(reused: Any) -> None:
    rt = reused(2)
    f = rt.function(lambda x: f"text {x[0]:g}", outputs=None)
    for victim in (0, 1):
        assert f(np.arange(2.0)) == ["text 0", "text 1"]
        os.kill(rt._session.workers.by_rank[victim].process.pid, signal.SIGKILL)
        with contextlib.suppress(WorkerDied):  # unless it is missed before the call
            f(np.arange(2.0))
        assert f(np.arange(2.0)) == ["text 0", "text 1"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_over_nodes_and_where_a_rank_returns_none(nodes: int) -> None:
    with synk.Runtime(2, cluster="here", nodes=nodes) as rt:
        f = rt.function(
            lambda x: (None if x[0] % 2 else "even", x.sum(), 3, "same"), outputs=(None, "sum", None, "first")
        )
        g = rt.function(lambda x: (None if x[0] % 2 else "even", x.copy()), outputs=(None, None))
        for _ in range(3):
            x = np.arange(float(rt.world_size))
            words = ["even", None] * nodes
            assert f(x) == (words, x.sum(), [3] * len(x), "same")
            texts, arrays = g(x)
            assert texts == words
            np.testing.assert_array_equal(arrays, x[:, None])


def test_what_cannot_be_pickled_is_named(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x: ("name", 3, (each for each in x)), outputs=(None, None, None))
    with pytest.raises(synk.errors.SerializationError, match=r"\(output 2\): TypeError: cannot pickle 'generator'"):
        f(np.ones(2))


def test_a_class_of_ones_own_is_pickled_as_before(shared_runtimes: Any) -> None:
    """Only pickles of plain types may lie in a slot: loading them runs nobody's code."""

    class Loud(str):
        def __reduce__(self) -> Any:
            raise ValueError("not me")

    call = shared_runtimes[2].function(lambda x: Loud("text") if x[0] else "text", outputs=None)
    for _ in range(3):
        assert call(np.zeros(2)) == ["text"] * 2
    with pytest.raises(synk.errors.SerializationError, match=r"\(the output\): ValueError: not me"):
        call(np.ones(2))
    assert call(np.zeros(2)) == ["text"] * 2
