"""Calls in slices: what the ranks have of an output is combined as it is, and finished once, by the master."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

ROWS = {False: ((2, 2, 2, 1), 2), True: ((4, 3), 1)}
"""Of seven rows, by whether the call is serial: those of each slice, and on how many ranks these lie."""


def combined(op: str, values: list[Any], rows: tuple[int, ...], num_ranks: int) -> Any:
    """Return the values of all slices combined as float32: on each rank, then over the ranks."""
    weighted = [value * (count if op == "avg" else 1) for value, count in zip(values, rows)]
    length = len(values) // num_ranks
    ranks = [sum(weighted[start + 1 : start + length], weighted[start]) for start in range(0, len(values), length)]
    total = sum(ranks[1:], ranks[0])
    return total / sum(rows) if op == "avg" else total


@pytest.mark.sampled(20)
@pytest.mark.parametrize("is_serial", ROWS)
@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_slices_and_ranks_round_once(shared_runtimes: Any, dtype: str, op: str, size: int, is_serial: bool) -> None:
    """16-bit floats rounded on each rank and again over the ranks would be another number in a quarter of the cases."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(7, size)).astype(np.float32)).to(getattr(torch, dtype))

    def half(x: Any) -> Any:
        return x.float().mean(0).to(x.dtype)

    f = shared_runtimes[2].function(half, outputs=op, framework="torch")
    rows, num_ranks = ROWS[is_serial]
    values = [half(part).float() for part in torch.split(x, rows)]
    expected = combined(op, values, rows, num_ranks).to(x.dtype)
    for _ in range(2):
        result = (f.serial if is_serial else f)(x, num_slices=2)
        assert result.dtype == x.dtype
        assert torch.equal(result, expected)


def test_numbers_and_integers_in_slices_stay_what_they_are(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(
        lambda x: (x.sum(), len(x), np.float16(x.max()), x.min()), outputs=("sum", "sum", "max", "avg")
    )
    total, count, largest, mean = f(np.arange(7.0), num_slices=2)
    assert (total, count, largest) == (21.0, 7, 6.0)
    assert mean == (0 * 2 + 2 * 2 + 4 * 2 + 6) / 7
    assert [type(each) for each in (total, count, largest, mean)] == [np.float64, int, np.float16, np.float64]
