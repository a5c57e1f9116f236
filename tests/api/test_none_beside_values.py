"""Under op None a rank may return None where others return a value: the list has None there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import synk
from synk.errors import CollectiveMismatch


class Pair(NamedTuple):
    """A named tuple."""

    a: Any
    b: Any


BIG = 40_000
"""Rows of 8 bytes, more than goes through the slots."""


def only(rank: int, value: Callable[[], Any]) -> Any:
    """Return a value on one rank, None on the others."""
    return value() if synk.comm.rank == rank else None


CASES: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "first": (lambda x: only(0, lambda: len(x)), None, [2, None, None]),
    "last": (lambda x: only(2, lambda: len(x)), None, [None, None, 2]),
    "object": (lambda x: only(1, lambda: {1, 2}), None, [None, {1, 2}, None]),
    "array": (lambda x: only(1, lambda: x.tolist()[0]), None, [None, 2.0, None]),
    "dict": (lambda x: only(1, lambda: {"b": 1, "a": 2}), None, {"b": [None, 1, None], "a": [None, 2, None]}),
    "tuple": (lambda x: (x.sum(), only(0, lambda: "r")), ("sum", None), (15.0, ["r", None, None])),
    "before": (lambda x: (only(1, lambda: "r"), x.sum()), (None, "sum"), ([None, "r", None], 15.0)),
    "named": (lambda x: Pair(only(1, lambda: 1), x.sum()), (None, "sum"), Pair([None, 1, None], 15.0)),
    "two": (
        lambda x: [only(0, lambda: 1), only(1, lambda: 2), x.sum(), None],
        [None, None, "sum", None],
        [[1, None, None], [None, 2, None], 15.0, None],
    ),
    "deep": (
        lambda x: {"s": x.sum(), "r": (1, only(2, lambda: {"k": [3, 4]}))},
        {"s": "sum", "r": None},
        {"s": 15.0, "r": ([1, 1, 1], {"k": [[None, None, 3], [None, None, 4]]})},
    ),
    "nobody": (lambda x: (x.sum(), None), ("sum", None), (15.0, None)),
}


@pytest.mark.parametrize("case", CASES)
def test_none_beside_values(shared_runtimes: Any, case: str) -> None:
    rt = shared_runtimes[3]
    fn, outputs, expected = CASES[case]
    f = rt.function(fn, outputs=outputs)
    x = np.arange(6.0)
    for call in (f, f, f, f, lambda x: f.submit(x).result()):
        result = call(x)
        assert type(result) is type(expected)
        assert result == expected


@pytest.mark.parametrize("op", ["sum", "gather", "first"])
@pytest.mark.parametrize("before", [False, True])
def test_large_outputs_beside_them(shared_runtimes: Any, op: str, before: bool) -> None:
    rt = shared_runtimes[3]

    def fn(x: Any) -> Any:
        mine = only(1, lambda: x * 2)
        return (mine, x) if before else (x, mine)

    f = rt.function(fn, outputs=(None, op) if before else (op, None))
    x = np.random.default_rng(0).normal(size=(3, BIG))
    for number in range(3):
        values = x + number
        result = f(values)
        parts, combined = result if before else result[::-1]
        np.testing.assert_array_equal(parts[1], values[1:2] * 2)
        assert parts[0] is parts[2] is None
        expected = {"sum": values.sum(0, keepdims=True), "gather": values, "first": values[:1]}[op]
        np.testing.assert_allclose(combined, expected)


def test_who_returns_none_may_change_from_call_to_call(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    f = rt.function(lambda k, x: (only(k, lambda: x.sum()), x.sum()), bcast_inputs="k", outputs=(None, "sum"))
    for _ in range(2):
        for rank in (0, 1, 2, 5, 1):
            parts, total = f(rank, np.arange(6.0))
            assert total == 15.0
            expected = [value if each == rank else None for each, value in enumerate([1.0, 5.0, 9.0])]
            assert parts == (expected if rank < 3 else None)


def test_verify_pairs_outputs_by_their_place(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    f = rt.function(lambda x: (only(1, lambda: "r"), x.sum(), x.sum()), outputs=(None, "sum", "avg"))
    report = f.verify(np.arange(7.0))
    assert {output.name: output.matching for output in report.outputs} == {"[1]": (), "[2]": ("sum",)}


@pytest.mark.parametrize(
    ("fn", "outputs"),
    [
        (lambda x: only(0, lambda: x.sum()), "sum"),
        (lambda x: (x, only(0, lambda: x)), "gather"),
        (lambda x: (only(0, lambda: (1, x.sum())), 1.0), ((None, "sum"), "sum")),
        (lambda x: only(0, lambda: 1) or "a" if synk.comm.rank else {"a": 1}, None),
        (lambda x: {"a": 1} if synk.comm.rank else {"b": None}, None),
        (lambda x: [1] * synk.comm.rank, None),
    ],
)
def test_other_differences_are_refused(shared_runtimes: Any, fn: Any, outputs: Any) -> None:
    with pytest.raises(CollectiveMismatch, match="expected one structure on all ranks"):
        shared_runtimes[2].function(fn, outputs=outputs)(np.arange(4.0))
