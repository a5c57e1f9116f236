"""NumPy on a list of one array per rank: what shared variables, collectives and ``comm`` must give.

What there is to tell of a value, down to classes and dtypes, so that two values may be compared on any process.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import synk


def told(value: Any) -> Any:
    """Return plain tuples that are equal where two values are: class, dtype, shape and numbers of all their parts.

    The order of keys and the sign of a zero count, and NaN is like itself. A tensor's memory does not: two of one
    dtype and shape that hold the same numbers are told alike.
    """
    kind = type(value).__name__
    if isinstance(value, (np.ndarray, np.generic)):
        numbers = repr(value.tolist()) if value.size < 1000 or value.dtype.hasobject else value.tobytes()
        return kind, value.dtype.str, value.shape, numbers
    if hasattr(value, "resolve_conj"):
        return kind, str(value.dtype), tuple(value.shape), repr(value.detach().tolist())
    if isinstance(value, Mapping):
        return kind, *((told(key), told(part)) for key, part in value.items())
    if isinstance(value, (list, tuple, deque)):
        return kind, *map(told, value)
    if isinstance(value, (set, frozenset)):
        return kind, *sorted(map(repr, value))
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return kind, *((name, told(part)) for name, part in {**fields, **getattr(value, "__dict__", {})}.items())
    return kind, repr(value)


DEFINED_FOR = {"avg": "fc", "sum": "iufc", "prod": "iufc", "min": "biuf", "max": "biuf"}
"""The reductions, and the kinds of dtypes for which each has a meaning."""

UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
"""What each is in NumPy; an average is no ufunc."""

OPS = tuple(DEFINED_FOR)
FLOATS = ("float16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int32", "int64", "uint64")
COMPLEX = ("complex64", "complex128")
REDUCIBLE = [
    (op, dtype)
    for op in OPS
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, "bool")
    if np.dtype(dtype).kind in DEFINED_FOR[op]
]
"""All pairs of an op and a dtype that have a meaning."""


def is_reducible(op: str, dtype: Any) -> bool:
    """Whether ``op`` has a meaning for ``dtype``."""
    return (op, np.dtype(dtype).name) in REDUCIBLE


def reduced(op: str, parts: Sequence[np.ndarray], weights: Sequence[float] | None = None) -> np.ndarray:
    """Return the reduction of the ranks' arrays, in rank order; averages in the widest dtype.

    Parameters
    ----------
    weights : sequence of float, optional
        What each rank's array counts in an average; all alike where not given.
    """
    dtype = parts[0].dtype
    with np.errstate(all="ignore"):
        if op == "avg":
            wide = np.complex256 if dtype.kind == "c" else np.longdouble
            shares = [1] * len(parts) if weights is None else weights
            total = sum(part.astype(wide) * wide(share) for part, share in zip(parts, shares, strict=True))
            return np.asarray(total / wide(sum(shares))).astype(dtype)
        wide = np.float32 if dtype == np.float16 else dtype
        total = parts[0].astype(wide)
        for part in parts[1:]:
            total = np.asarray(UFUNCS[op](total, part.astype(wide)))
        return total.astype(dtype)


def assert_same(got: Any, expected: Any, *, is_rounded: bool = False) -> None:
    """Assert equal dtype, shape and values; of nestings leaf by leaf. ``is_rounded``: to the last bits."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(got[key], value, is_rounded=is_rounded)
        return
    if isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other, is_rounded=is_rounded)
        return
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if is_rounded and expected.dtype.kind in "fc":
        tolerance = {"e": 4e-3, "f": 1e-6, "F": 1e-6}.get(expected.dtype.char, 1e-14)
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(got, expected)


def numbers(dtype: Any, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return an array of small whole numbers of any dtype (text, dates and records too)."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.names:
        array = np.zeros(shape, dtype)
        for name in dtype.names:
            array[name] = numbers(dtype[name], shape, seed)
        return array
    low = 0 if dtype.kind in "bu" else -3
    high = 2 if dtype.kind == "b" else 4
    array = rng.integers(low, high, shape)
    if dtype.kind == "c":
        return (array + 1j * rng.integers(low, high, shape)).astype(dtype)
    return np.asarray(array).astype(dtype)


def picked(batch: Any, array: np.ndarray) -> np.ndarray:
    """Return the rows that ``batch`` stands for: none are left out by None, a number takes the first ones."""
    if batch is None or isinstance(batch, int):
        return array[:batch]
    return array[np.array(batch, int) if isinstance(batch, list) else batch]


def from_all_ranks(rt: Any, variable: Any) -> list[Any]:
    """Return each rank's value as its worker sees it."""
    return [value for (value,) in watcher(rt, variable)()]


def watcher(rt: Any, variable: Any) -> Any:
    return rt.function(lambda: deque([variable.value]), outputs=None)  # a deque is one object


def looker(rt: Any, variable: Any) -> Callable[[], list[Any]]:
    """Return what returns each rank's value as the master reads it, after checking that the workers see the same."""
    watch = watcher(rt, variable)

    def look() -> list[Any]:
        values = [variable[rank] for rank in range(rt.world_size)]
        assert_same([value for (value,) in watch()], values)
        return values

    return look


def everywhere(rt: Any, variable: Any) -> list[Any]:
    """Return each rank's value once."""
    return looker(rt, variable)()


def assigner(rt: Any, w: Any, new: Callable[[Any, Any], Any], **options: Any) -> Any:
    """Return a function that assigns ``new(old value, its rows)``."""

    def assign(x: Any) -> float:
        w.value = new(w.value, x)
        return 0.0

    return rt.function(assign, **options)


class Median(synk.Op):
    """An op of a user's own, of all rows: it needs them."""

    concatenates = True

    def check(self, dtype: np.dtype, what: str) -> None:
        if dtype.kind not in "iuf":
            raise TypeError(f"cannot take the median of {what}: got dtype {dtype}, expected a real number.")

    def finish(self, value: Any) -> Any:
        return np.median(value, axis=0)
