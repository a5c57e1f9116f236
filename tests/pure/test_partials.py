"""Partial results: combined in two levels they give what one level gives."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from support.rank_arrays import FLOATS, INTEGERS, REDUCIBLE, assert_same, numbers, reduced

from synk._pure.ops import REDUCTIONS
from synk._pure.partials import Accumulator

ROWS = ((5, 1, 7), (2,), (11, 3), (4, 4, 4, 4))
"""Of the slices of each of four ranks."""
FLAT = tuple(num_rows for rank in ROWS for num_rows in rank)
Shape = tuple[int, ...]


def partial_of(op: str, values: Sequence[np.ndarray], rows: Sequence[int]) -> np.ndarray:
    lifted = [REDUCTIONS[op].lift(value, num_rows) for value, num_rows in zip(values, rows, strict=True)]
    return functools.reduce(lambda first, second: np.asarray(REDUCTIONS[op].merge(first, second)), lifted)


def finished(op: str, partial: np.ndarray, rows: int, dtype: np.dtype) -> np.ndarray:
    out = np.empty(partial.shape, dtype)
    REDUCTIONS[op].finish_into(partial.copy(), rows, out)
    return out


def one_level(op: str, values: Sequence[np.ndarray]) -> np.ndarray:
    return finished(op, partial_of(op, values, FLAT), sum(FLAT), values[0].dtype)


def by_rank(values: Sequence[np.ndarray]) -> list[tuple[list[np.ndarray], tuple[int, ...]]]:
    remaining = iter(values)
    return [([next(remaining) for _ in rows], rows) for rows in ROWS]


def two_levels(op: str, values: Sequence[np.ndarray]) -> np.ndarray:
    partials = [partial_of(op, *rank) for rank in by_rank(values)]
    total = functools.reduce(lambda first, second: np.asarray(REDUCTIONS[op].merge(first, second)), partials)
    return finished(op, total, sum(FLAT), values[0].dtype)


def arrays(dtype: str, shape: Shape, make: Callable[..., np.ndarray] = numbers) -> list[np.ndarray]:
    return [make(dtype, shape, seed) for seed in range(len(FLAT))]


def normal(dtype: str, shape: Shape, seed: int) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def test_two_levels_are_one(subtests: Any) -> None:
    """Of whole numbers, of which no sum is rounded; integers wrap around the same, too. Slices are added up alike."""
    for (op, dtype), shape in itertools.product(REDUCIBLE, ((), (0, 3), (6, 5))):
        values = arrays(dtype, shape)
        if op == "prod":
            values = [np.where(value == 0, np.ones_like(value), value) for value in values]
        with subtests.test(op=op, dtype=dtype, shape=shape):
            got, expected = two_levels(op, values), one_level(op, values)
            assert_same(got, expected)
            assert_same(got, reduced(op, values, FLAT), is_rounded=op == "avg")
            accumulator = Accumulator(REDUCTIONS[op], "a value")
            for value, num_rows in zip(values, FLAT, strict=True):
                accumulator.add(value, num_rows)
            assert_same(accumulator.result(), expected)
    for dtype in INTEGERS:
        values = [np.full(3, np.iinfo(dtype).max - k, dtype) for k in range(len(FLAT))]
        assert_same(two_levels("sum", values), reduced("sum", values))


def test_partials_of_float16_are_rounded_once() -> None:
    values = arrays("float16", (10_000,), normal)
    assert_same(two_levels("sum", values), one_level("sum", values))
    assert_same(two_levels("avg", values), reduced("avg", values, FLAT))


def test_what_is_no_number_stays_none(subtests: Any) -> None:
    """And rounding is that of another order."""
    for op, dtype in itertools.product(("avg", "sum", "prod", "min", "max"), FLOATS):
        values = arrays(dtype, (8,), normal)
        values[3][0], values[9][1], values[0][2], values[1][2] = np.nan, np.inf, np.inf, -np.inf
        with subtests.test(op=op, dtype=dtype), np.errstate(all="ignore"):
            got = two_levels(op, values)
            assert_same(got, one_level(op, values), is_rounded=True)
            assert_same(got, reduced(op, values, FLAT), is_rounded=True)
            assert np.isnan(got[0])
