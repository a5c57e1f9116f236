"""Ints of Python have any size, also where the values of ranks and slices are combined. NumPy's integers wrap."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support.names import named
from support.seeds import WHOLE_OR_SAMPLE
from support.tables import combinations

import synk


class Total(synk.Op):
    """Adds up."""

    def combine(self, values: list[Any], rows: list[int]) -> Any:
        return sum(values)


X, LARGE = np.ones(2), np.ones(60_000)
OPS: dict[str, tuple[Any, Callable[[Sequence[int]], int]]] = {
    "sum": ("sum", sum),
    "prod": ("prod", math.prod),
    "min": ("min", min),
    "max": ("max", max),
    "a callable": (operator.add, sum),
    "a synk.Op": (Total(), sum),
}
VALUES: dict[str, list[int]] = {
    "small": [3, -1, 4, 1, -5, 9, 2],
    "squares of 2**31": [2**62] * 4,
    "beyond 64 bits": [2**64 + 1, -(2**70), 3, 2**64],
    "unsigned": [2**63, 2**63 - 1, 5],
    "long": [10**400, 1, -(10**300)],
    "one row": [2**80],
}
FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "alone": (lambda value: value, lambda op: op, lambda got: got),
    "in a tuple": (lambda value: (0.5, value), lambda op: ("avg", op), lambda got: got[1]),
    "in a dict": (lambda value: {"b": value, "a": X}, lambda op: {"a": "sum", "b": op}, lambda got: got["b"]),
    "beside a large array": (lambda value: [value, LARGE], lambda op: [op, "sum"], lambda got: got[0]),
}
"""What a function returns, its ops, and where the value is in the result."""
WAYS: dict[str, Callable[..., Any]] = {
    "call": lambda f, *args, **options: f(*args, **options),
    "submit": lambda f, *args, **options: f.submit(*args, **options).result(),
    "repeated": lambda f, *args, **options: [f(*args, **options) for _ in range(4)][-1],
}
WHERE = (1, 2, 3, 0, "1+3")


def combine(rows: Any, of_values: Callable[[Sequence[int]], int], table: list[int]) -> int:
    return of_values([table[row] for row in rows])


@pytest.mark.parametrize("is_whole", WHOLE_OR_SAMPLE)
def test_they_are_combined_exactly(shared_runtimes: Any, subtests: Any, is_whole: bool) -> None:
    def run(rows: Any, name: str, values: str, form: str) -> Any:
        return FORMS[form][0](combine(rows, OPS[name][1], VALUES[values]))

    cases = combinations(10**6 if is_whole else 50, WHERE, OPS, VALUES, FORMS, WAYS, (1, 3))
    functions = {
        (where, name, form): shared_runtimes[where].function(
            run, bcast_inputs=("name", "values", "form"), outputs=FORMS[form][1](OPS[name][0])
        )
        for where, name, _, form, *_ in cases
    }
    for case in cases:
        where, name, values, form, way, num_slices = case
        with subtests.test(case=str(case)):
            rows = np.arange(len(VALUES[values]))
            got = WAYS[way](functions[where, name, form], rows, name, values, form, num_slices=num_slices)
            found = FORMS[form][2](got)
            assert (type(found), found) == (int, OPS[name][1](VALUES[values]))


def test_a_reproducible_sum_is_exact(shared_runtimes: Any) -> None:
    values, rows = VALUES["beyond 64 bits"], np.arange(3000) % 4
    for op in ("sum", "prod", "max"):
        of_values = OPS[op][1]
        f = shared_runtimes[2].function(
            lambda rows, of=of_values: combine(rows, of, values), bcast_inputs="of", outputs=op, reproducible=True
        )
        assert f(rows) == combine(rows, of_values, values)


def test_subclasses_count_as_ints_and_numpys_integers_wrap(shared_runtimes: Any) -> None:
    class Count(int):
        pass

    found = shared_runtimes[2].function(lambda rows: Count(2**63), outputs="sum")(np.arange(2))
    assert (type(found), found) == (int, 2**64)
    values = np.array([2**62, 2**62, 2**62, 2**62, 5])
    found = shared_runtimes[2].function(lambda x: x.sum(), outputs="sum")(values, num_slices=2)
    assert (type(found), found) == (np.int64, values.sum())


def test_ints_beside_integers_of_numpy(shared_runtimes: Any, subtests: Any) -> None:
    """As ``sum([])`` is beside ``sum(array)``: they count as NumPy's where they fit, else the error says so."""
    rows = np.array([0, 0, 1, 1])
    for first, dtype, num_slices in itertools.product((True, False), ("int8", "int64", "uint64"), (1, 2)):
        f = shared_runtimes[2].function(
            lambda x, large, first=first, dtype=dtype: large if bool(x[0] == 0) == first else x.sum(dtype=dtype),
            bcast_inputs=("large", "first", "dtype"), outputs="sum",
        )  # fmt: skip
        with subtests.test(first=first, dtype=dtype, num_slices=num_slices):
            found = f(rows, 3, num_slices=num_slices)
            assert (found.dtype, found) == (np.dtype(dtype), num_slices * 3 + (2 if first else 0))
            with pytest.raises(
                OverflowError, match=rf"the output of '<lambda>': got an int of 71 bits beside .* {dtype}"
            ):
                f(rows, 2**70 // num_slices, num_slices=num_slices)


def test_other_mixtures_are_told_and_verify_compares_exactly(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(named("f", lambda x: 1 if x[0] == 0 else 0.5), outputs="sum")
    with pytest.raises(synk.errors.CollectiveMismatch, match=r"rank 0: int \(\); rank 1: float64 \(\)"):
        f(np.arange(2.0))
    assert rt.function(lambda rows: sum(2**63 + int(r) for r in rows), outputs="sum").verify(np.arange(5))
    assert not rt.function(lambda rows: sum(2**60 for _ in rows) + 1, outputs="sum").verify(np.arange(4))
