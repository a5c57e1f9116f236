"""Compares outputs, and finds the ops that make the values of parts the value of the whole. Pure NumPy, no process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk._pure.dtypes import as_numbers, is_bfloat16
from synk._pure.ops import OPS, Op, is_int
from synk._pure.partials import Accumulator
from synk._pure.table_outputs import check_table, combined, compared
from synk._pure.tables import is_table
from synk._pure.tensors import array_of, is_plain, is_tensor
from synk.errors import CollectiveMismatch

MISSING: Any = object()
"""Stands for an output that is missing or has no meaning. It equals nothing."""

SINGLE = 2.0**-23
"""The precision of float32."""


@dataclass(frozen=True)
class Tolerance:
    """How far a value may be from the serial one, as in ``numpy.allclose``; None allows only for rounding.

    By default ``rtol`` is the square root of the dtype's precision (1.5e-8 for float64), and ``atol`` is ``rtol`` times
    the largest serial value. So a sum of numbers that cancel out is judged by the size of the whole output.
    ``least`` is the least ``rtol`` by default.
    """

    rtol: float | None
    atol: float | None
    least: float = 0.0

    def allows(self, value: Any, serial: Any) -> bool:
        """Whether two arrays of numbers, or two numbers, are equal except for rounding."""
        eps = measured([value, serial])[1]
        if not eps and self.rtol is None and self.atol is None:
            return np.array_equal(value, serial)
        by_dtype = max(eps**0.5, self.least)
        rtol = by_dtype if self.rtol is None else self.rtol
        atol = eps + by_dtype * measured([serial])[0] if self.atol is None else self.atol
        value, serial = as_numbers(np.asarray(value)), as_numbers(np.asarray(serial))
        return bool(np.allclose(value, serial, rtol=rtol, atol=atol, equal_nan=True))


def measured(values: Iterable[Any]) -> tuple[float, float]:
    """Return the largest of the floats among some values, and the precision of the least precise; 0 without floats."""
    largest = eps = 0.0
    for value in map(as_array, values):
        array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic, float, complex)) else np.zeros(0, int)
        if array.dtype.kind in "fc" or is_bfloat16(array.dtype):
            eps = max(eps, 2.0**-7 if is_bfloat16(array.dtype) else float(np.finfo(array.dtype).eps))
            with np.errstate(all="ignore"):
                sizes = np.abs(as_numbers(array)).astype(np.float64)
            largest = max(largest, float(sizes[np.isfinite(sizes)].max(initial=0.0)))
    return largest, eps


def are_single(values: Sequence[Any]) -> bool:
    """Whether doubles were computed in single precision, as ``loss.item()`` is: it holds them exactly.

    Whole numbers do not count, which it always holds.
    """
    arrays = [np.asarray(value) for value in map(as_array, values) if isinstance(value, (float, np.ndarray))]
    if len(arrays) < len(values) or any(array.dtype.kind != "f" for array in arrays):
        return False
    with np.errstate(all="ignore"):
        is_exact = all(np.array_equal(array.astype(np.float32), array, equal_nan=True) for array in arrays)
        return is_exact and any(np.any(array % 1 != 0) for array in arrays)


def _is_number(value: Any) -> bool:
    array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic, int, float, complex)) else None
    return array is not None and (array.dtype.kind in "biufc" or is_bfloat16(array.dtype))


def as_array(value: Any) -> Any:
    """Return a tensor as an array that can be compared, and anything else as it is."""
    return array_of(value.detach().cpu()) if is_tensor(value) and is_plain(value) else value


def is_same(value: Any, serial: Any, tolerance: Tolerance) -> bool:
    """Whether two outputs are equal: numbers except for rounding, everything else by ``==``. NaN equals NaN."""
    if value is MISSING or serial is MISSING:
        return False
    value, serial = as_array(value), as_array(serial)
    if is_table(value) or is_table(serial):
        return compared(value, serial, lambda a, b: is_same(a, b, tolerance), difference)[0]
    if isinstance(value, dict) and type(value) is type(serial):
        return value.keys() == serial.keys() and all(is_same(value[key], serial[key], tolerance) for key in value)
    if isinstance(value, (list, tuple)) and type(value) is type(serial):
        return len(value) == len(serial) and all(map(lambda a, b: is_same(a, b, tolerance), value, serial))
    if _is_number(value) and _is_number(serial):
        return np.shape(value) == np.shape(serial) and tolerance.allows(value, serial)
    if value is serial:
        return True
    if isinstance(value, np.dtype) is not isinstance(serial, np.dtype):
        return False  # that of float64 equals None, and float
    try:
        if isinstance(value, (np.ndarray, np.generic)) or isinstance(serial, np.ndarray):
            one, other = np.asarray(value), np.asarray(serial)
            if one.dtype.names:
                names, is_like = one.dtype.names, one.dtype.names == other.dtype.names and one.shape == other.shape
                return is_like and all(is_same(one[name], other[name], tolerance) for name in names)
            return one.shape == other.shape and bool(np.all((one == other) | (one != one) & (other != other)))
        return bool(value == serial or (value != value and serial != serial))
    except Exception:  # the user's ``==`` may raise anything
        return False


def difference(value: Any, serial: Any) -> float:
    """Return the largest absolute difference of two outputs; NaN where there is none to measure.

    It is infinite where one of two numbers is NaN.
    """
    value, serial = as_array(value), as_array(serial)
    if is_table(value):
        return compared(value, serial, lambda a, b: True, difference)[1]
    if type(value) is list and type(serial) is list and len(value) == len(serial):
        return max(map(difference, value, serial), key=lambda found: -1 if found != found else found, default=0.0)
    if not (_is_number(value) and _is_number(serial)) or np.shape(value) != np.shape(serial):
        return float("nan")
    a, b = as_numbers(np.asarray(value)), as_numbers(np.asarray(serial))
    if np.any(np.isnan(a) != np.isnan(b)):
        return float("inf")
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        distance = np.abs(a.astype(wide) - b.astype(wide))
    return float(distance[~np.isnan(distance)].max(initial=0.0))


def combine(op: Op, parts: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return the values of all ranks combined by ``op``, or ``MISSING``, which equals nothing, if it cannot."""
    if not op.is_of_arrays:
        return op.finish(op.combine(list(parts), list(rows)))
    try:
        if any(map(is_table, parts)):
            for part in parts:
                check_table(op, part, "")
            return op.finish(combined(op, parts, rows, "", ranks=range(len(parts))))
        whole = Accumulator(op, "")
        for part, count in zip(parts, rows):
            value = part if is_int(part) or (op.concatenates and type(part) is list) else np.asarray(as_array(part))
            op.check(getattr(value, "dtype", np.dtype(np.int64)), "")
            whole.add(value, count)
        value = whole.result()
    except (TypeError, ValueError, OverflowError, CollectiveMismatch):
        return MISSING
    return op.finish(value)


def fitting_ops(parts: Sequence[Any], rows: Sequence[int], whole: Any, tolerance: Tolerance) -> tuple[str, ...]:
    """Return the ops that combine the values of parts, with their numbers of rows, to the value of the whole.

    Examples
    --------
    >>> fitting_ops([3.0, 12.0], [2, 3], 15.0, Tolerance(None, None))
    ('sum',)
    """
    return tuple(word for word, op in OPS.items() if parts and is_same(combine(op, parts, rows), whole, tolerance))
