"""Which outputs count as equal, how far they differ, and which ops make parts the whole. The oracle is NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from support.rank_arrays import numbers

from synk._api.comparison import MISSING, Tolerance, difference, fitting_ops, is_same

ROUNDING = Tolerance(None, None)
EPS = float(np.finfo(float).eps)


class Refusing:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


NAN, INF = float("nan"), float("inf")
NAT = np.array(["NaT", "2020-01-01"], "M8[s]")
RECORDS = np.array([(1, NAN), (2, 3.0)], [("a", int), ("b", float)])
SAME: list[tuple[Any, Any]] = [
    (1.0, 1.0), (1.0, 1.0 + 4 * EPS), (1, 1.0), (NAN, NAN), (INF, INF), (1 + 2j, 1 + 2j + 1e-12), (None, None),
    ("a", "a"), (np.array([1e-20, 1e10]), np.array([0.0, 1e10])), (np.array([1e-20]), np.array([0.0])),
    (np.float32(1.0), np.float32(1.0001)), (np.float64(1.0), np.float32(1.0001)),
    (np.array(["a", "b"]), np.array(["a", "b"])), ([1.0, "x"], [1.0 + EPS, "x"]), ({"a": 1}, {"a": 1}),
    (np.zeros((0, 3)), np.zeros((0, 3))), (NAT, NAT), (NAT[0], NAT[0]), (RECORDS, RECORDS.copy()),
    ([{"a": (NAN, 1.0)}], [{"a": (NAN, 1.0 + EPS)}]), (np.array([NAN, "a"], object), np.array([NAN, "a"], object)),
]  # fmt: skip
"""Judged by the size of the whole output, and by the precision of the less precise one."""
OTHER: list[tuple[Any, Any]] = [
    (1.0, 1.001), (NAN, 1.0), (INF, -INF), (1e300, INF), (1 + 2j, 1 - 2j), ("a", "b"), (None, 0), (Refusing(), 1),
    (MISSING, MISSING), (np.array([1.0, 2.0]), np.array([[1.0, 2.0]])), (np.float64(1.0), np.float64(1.0001)),
    (np.array([True]), np.array([False])), (np.array([3]), np.array([4])), ([1.0], [1.0, 2.0]),
    (np.array(["a", "b"]), np.array(["a", "c"])), (np.zeros((0, 3)), np.zeros((0, 2))),
    (NAT, NAT.astype("M8[D]") + 1), (NAT[:1], np.array(["2020"], "M8[s]")), (RECORDS, RECORDS[["a"]]),
    ([{"a": (NAN, 1.0)}], [{"a": (NAN, 2.0)}]), ((1.0,), [1.0]), (np.dtype(float), None), (None, np.dtype(float)),
]  # fmt: skip


def test_equal_outputs(subtests: Any) -> None:
    for pairs, expected in ((SAME, True), (OTHER, False)):
        for one, other in pairs:
            with subtests.test(one=repr(one), other=str(other)):
                assert is_same(one, other, ROUNDING) is expected


def test_a_given_tolerance_is_that_of_allclose(subtests: Any) -> None:
    dtypes = ("float32", "float64", "int64", "complex128")
    for rtol, atol, dtype, by in itertools.product((0.0, 1e-3, 0.5), (0.0, 1e-2), dtypes, (0, 1e-4, 5e-3, 1)):
        serial = numbers(dtype, (20,), 0)
        value = (serial + by).astype(dtype)
        with subtests.test(rtol=rtol, atol=atol, dtype=dtype, by=by):
            assert is_same(value, serial, Tolerance(rtol, atol)) == np.allclose(value, serial, rtol=rtol, atol=atol)


def test_the_largest_difference(subtests: Any) -> None:
    """NaN on one side alone is no difference of zero."""
    for dtype in ("float16", "float64", "int8", "uint64", "complex64", "bool"):
        one, other = numbers(dtype, (3, 4), 0), numbers(dtype, (3, 4), 1)
        wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
        with subtests.test(dtype=dtype):
            assert difference(one, other) == np.abs(one.astype(wide) - other.astype(wide)).max()
            for value, serial in ((one, other[:2]), ("a", one), (MISSING, one)):
                assert np.isnan(difference(value, serial))
    nan, plain = np.array([1.0, np.nan]), np.array([1.0, 2.0])
    assert difference(np.zeros(0), np.zeros(0)) == difference(nan, nan.copy()) == 0
    assert difference(nan, plain) == difference(plain, nan) == np.inf


FITTING: list[tuple[Any, Any, Any, set[str]]] = [
    ([3.0, 12.0], [2, 3], 15.0, {"sum"}),
    ([3.0, 13.0], [2, 3], 9.0, {"avg"}),
    ([1.0, 2.0], [1, 1], 2.0, {"max", "prod"}),
    ([1.0, 2.0], [1, 1], 1.0, {"min", "first"}),
    ([2.0, 2.0], [1, 1], 2.0, {"avg", "min", "max", "first"}),
    ([3, 5], [1, 1], 4, set()),  # integers have no average, bools no sum, complex numbers no order
    ([np.array([True]), np.array([False])], [1, 1], np.array([True]), {"max", "first"}),
    ([1j, 1j], [1, 1], 1j, {"avg", "first"}),
    ([np.arange(2), np.arange(1)], [2, 1], np.array([0, 1, 0]), {"gather"}),
    ([["a"], ["b", "c"]], [1, 2], ["a", "b", "c"], {"gather"}),
    (["a", "a"], [1, 1], "a", {"first"}),
    ([np.zeros(2), np.zeros(3)], [1, 1], np.zeros(2), {"first"}),
    ([], [], 1.0, set()),
]


def test_the_ops_that_fit(subtests: Any) -> None:
    told = {"avg", "sum", "prod", "min", "max", "gather", "first"}
    for parts, rows, whole, ops in FITTING:
        with subtests.test(parts=str(parts), whole=str(whole)):
            assert told.intersection(fitting_ops(parts, rows, whole, ROUNDING)) == ops
