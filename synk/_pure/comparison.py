"""Compares outputs, and finds the ops that make the values of parts the value of the whole. Pure NumPy, no process."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk._pure.dtypes import as_numbers, is_bfloat16
from synk._pure.ops import OPS, Op, Reduction, is_int
from synk._pure.partials import concatenate, join
from synk._pure.table_outputs import check_table, combined, compared
from synk._pure.tables import is_table
from synk.errors import CollectiveMismatch

MISSING: Any = object()
"""Stands for an output that is missing or has no meaning. It equals nothing."""


@dataclass(frozen=True)
class Tolerance:
    """How far a value may be from the serial one, as in ``numpy.allclose``; None allows only for rounding.

    By default ``rtol`` is the square root of the dtype's precision (1.5e-8 for float64), and ``atol`` is ``rtol`` times
    the largest serial value. So a sum of numbers that cancel out is judged by the size of the whole output.
    """

    rtol: float | None
    atol: float | None

    def allows(self, value: np.ndarray, serial: np.ndarray) -> bool:
        """Whether two arrays of numbers are equal except for rounding."""
        dtypes = [array.dtype for array in (value, serial) if array.dtype.kind in "fc" or is_bfloat16(array.dtype)]
        eps = max([precision(dtype) for dtype in dtypes], default=0.0)
        value, serial = as_numbers(value), as_numbers(serial)
        if not dtypes and self.rtol is None and self.atol is None:
            return np.array_equal(value, serial)
        rtol = eps**0.5 if self.rtol is None else self.rtol
        finite = np.abs(serial)[np.isfinite(serial)]
        atol = eps + eps**0.5 * float(finite.max(initial=0)) if self.atol is None else self.atol
        return bool(np.allclose(value, serial, rtol=rtol, atol=atol, equal_nan=True))


def precision(dtype: np.dtype) -> float:
    return 2.0**-7 if is_bfloat16(dtype) else float(np.finfo(dtype).eps)


def _is_number(value: Any) -> bool:
    array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic, int, float, complex)) else None
    return array is not None and (array.dtype.kind in "biufc" or is_bfloat16(array.dtype))


def is_same(value: Any, serial: Any, tolerance: Tolerance) -> bool:
    """Whether two outputs are equal: numbers except for rounding, everything else by ``==``."""
    if value is MISSING:
        return False
    if is_table(value) or is_table(serial):
        return compared(value, serial, lambda a, b: is_same(a, b, tolerance), difference)[0]
    if type(value) is list and type(serial) is list:  # one object for each row
        return len(value) == len(serial) and all(map(lambda a, b: is_same(a, b, tolerance), value, serial))
    if _is_number(value) and _is_number(serial):
        a, b = np.asarray(value), np.asarray(serial)
        return a.shape == b.shape and tolerance.allows(a, b)
    if isinstance(value, np.ndarray) or isinstance(serial, np.ndarray):
        return np.shape(value) == np.shape(serial) and bool(np.all(np.asarray(value) == np.asarray(serial)))
    try:
        return bool(operator.eq(value, serial))
    except Exception:  # the user's ``==`` may raise anything
        return False


def difference(value: Any, serial: Any) -> float:
    """Return the largest absolute difference of two outputs; NaN where there is none to measure.

    It is infinite where one of two numbers is NaN.
    """
    if is_table(value):
        return compared(value, serial, lambda a, b: True, difference)[1]
    if value is MISSING or not (_is_number(value) and _is_number(serial)) or np.shape(value) != np.shape(serial):
        return float("nan")
    a, b = as_numbers(np.asarray(value)), as_numbers(np.asarray(serial))
    if np.any(np.isnan(a) != np.isnan(b)):
        return float("inf")
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        distance = np.abs(a.astype(wide) - b.astype(wide))
    return float(distance[~np.isnan(distance)].max(initial=0.0))


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an array, a number or a table, and the length of a list; None for anything else."""
    if type(value) is list:
        return (len(value),)
    if isinstance(value, np.ndarray) or _is_number(value):
        return np.shape(value)
    return tuple(value.shape) if is_table(value) else None


def combine(op: Op, parts: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return the values of all ranks combined by ``op``, or ``MISSING``, which equals nothing, if it cannot."""
    value = _combined(op, parts, rows)
    return value if value is MISSING else op.finish(value)


def _combined(op: Op, parts: Sequence[Any], rows: Sequence[int]) -> Any:
    if not op.is_of_arrays:
        return op.combine(list(parts), list(rows))
    if op.concatenates and all(type(part) is list for part in parts):
        return join(parts, None)
    if any(map(is_table, parts)):
        try:
            for part in parts:
                check_table(op, part, "")
            return combined(op, parts, rows, "", ranks=range(len(parts)))
        except (TypeError, CollectiveMismatch):
            return MISSING
    if isinstance(op, Reduction) and all(map(is_int, parts)):
        return MISSING if op.is_weighted else op.combine_ints(parts, "")
    if not all(isinstance(part, (np.ndarray, np.generic, int, float, complex)) for part in parts):
        return MISSING
    arrays = [np.ascontiguousarray(part) if np.ndim(part) else np.asarray(part) for part in parts]
    alike = len({(array.dtype, array.shape[1:] if op.concatenates else array.shape) for array in arrays}) == 1
    if not alike or (op.concatenates and arrays[0].ndim == 0):
        return MISSING
    if op.concatenates:
        return concatenate(arrays)
    try:
        op.check(arrays[0].dtype, "")
    except TypeError:
        return MISSING
    return op.combine(arrays, list(rows))


def fitting_ops(parts: Sequence[Any], rows: Sequence[int], whole: Any, tolerance: Tolerance) -> tuple[str, ...]:
    """Return the ops that combine the values of parts, with their numbers of rows, to the value of the whole.

    Examples
    --------
    >>> fitting_ops([3.0, 12.0], [2, 3], 15.0, Tolerance(None, None))
    ('sum',)
    """
    return tuple(word for word, op in OPS.items() if parts and is_same(combine(op, parts, rows), whole, tolerance))
