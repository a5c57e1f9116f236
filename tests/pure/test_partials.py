"""Partial results: combined in two levels they give what one level gives; finished values do not."""

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


def finished_between(op: str, values: Sequence[np.ndarray]) -> np.ndarray:
    """What is got where each rank rounds and divides, and the others see its result only."""
    dtype = values[0].dtype
    results = [finished(op, partial_of(op, slices, rows), sum(rows), dtype) for slices, rows in by_rank(values)]
    weights = [sum(rows) for rows in ROWS]
    return finished(op, partial_of(op, results, weights), sum(weights), dtype)


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


def test_partials_change_no_float16_and_finished_values_change_many() -> None:
    for op in ("avg", "sum"):
        values = arrays("float16", (10_000,), normal)
        expected = one_level(op, values)
        assert_same(two_levels(op, values), expected)
        assert_same(expected, reduced("avg", values, FLAT) if op == "avg" else expected)
        assert 0.1 < np.mean(finished_between(op, values) != expected) < 0.6


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


def test_ranks_are_reduced_so(subtests: Any) -> None:
    for (op, dtype), is_weighted in itertools.product(REDUCIBLE, (False, True)):
        values, rows = arrays(dtype, (50,)), FLAT if is_weighted else (1,) * len(FLAT)
        with subtests.test(op=op, dtype=dtype, is_weighted=is_weighted):
            out = np.empty_like(values[0])
            REDUCTIONS[op].reduce_into(values, FLAT if is_weighted else None, out)
            assert_same(out, finished(op, partial_of(op, values, rows), sum(rows), out.dtype))
            reduction = REDUCTIONS[op].equal_reduction(values)
            assert (reduction is None) == (dtype == "float16")
            if reduction is not None and not is_weighted:
                combine_two, parts, divisor = reduction
                partial = functools.reduce(combine_two, parts)
                assert_same(partial / divisor if divisor > 1 else partial, out)
