"""Partial results of reductions: what is known when a part of the values has been taken in. Pure NumPy, no process.

A value is lifted to a partial result: in the accumulator dtype, and for an average times its rows. Partial results are
combined in any number of levels (slices, ranks). The last one is finished: divided and rounded to the dtype of the
values. Whoever finishes in between rounds twice, which changes about a quarter of the elements of a float16 average.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.dtypes import as_numbers, assign, describe_dtype, is_bfloat16
from synk._pure.interrupts import safe_point
from synk._pure.ops import Op, check_op, is_reducible

# An accumulator block of this size stays in the second-level cache while every rank's part streams through it.
BLOCK_NBYTES = 1 << 18

_UFUNC_NAMES = {"avg": "add", "sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum"}
_UFUNCS = {op: getattr(np, name) for op, name in _UFUNC_NAMES.items()}

Reduction = tuple[np.ufunc, Sequence[np.ndarray], int]
"""What combines, the values, the divisor"""


@functools.cache
def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which values of ``dtype`` are combined: float32 for the 16-bit floats, else ``dtype``."""
    return np.dtype(np.float32) if dtype.name == "float16" or is_bfloat16(dtype) else dtype


def lift(op: str, value: Any, rows: float = 1, *, xp: Any = np, out: Any = None) -> Any:
    """Return the partial result of a value that stands for ``rows`` rows; the value itself where nothing is to be done.

    Parameters
    ----------
    op : str
        One of ``REDUCE_OPS``.
    value : array
    rows : float
        Its weight in an average; 1 where all weigh the same.
    xp : module
        NumPy, or the namespace of the array library that the value belongs to.
    out : array, optional
        Where it may be written, of the accumulator dtype.
    """
    wide = accumulator_dtype(value.dtype)
    if wide != value.dtype:
        value = as_numbers(value)
    if op == "avg" and rows != 1:
        return xp.multiply(value, wide.type(rows), out=out, dtype=wide)
    if out is None or wide == value.dtype:
        return value.astype(wide, copy=False)
    out[...] = value
    return out


def combine(op: str, first: Any, second: Any, *, xp: Any = np, out: Any = None) -> Any:
    """Return the partial result of what two of them stand for; ``out`` may be one of them."""
    return getattr(xp, _UFUNC_NAMES[op])(first, second, out=out)


def finish(op: str, partial: Any, rows: float, out: Any, *, xp: Any = np) -> None:
    """Write the result to ``out``: of an average over ``rows`` rows the quotient. ``partial`` is overwritten."""
    if op == "avg":
        xp.divide(partial, partial.dtype.type(rows), out=partial)
    if partial is not out:
        assign(out, partial)


def finished(op: str, partial: Any, rows: float, dtype: np.dtype) -> Any:
    """Return the result of a partial one of the host, which is overwritten, as ``dtype``; a scalar where it is one."""
    partial = np.asarray(partial)
    out = partial if partial.dtype == dtype else np.empty(partial.shape, dtype)
    finish(op, partial, rows, out)
    return out if out.ndim else out[()]


def _reduce_block(op: str, blocks: Sequence[np.ndarray], rows: Sequence[float] | None, out: np.ndarray) -> None:
    """Reduce equally long 1-d blocks into ``out``, in order."""
    if len(blocks) == 1:
        out[...] = blocks[0]
        return
    wide = accumulator_dtype(out.dtype)
    total = out if wide == out.dtype else np.empty(out.shape, wide)
    # The rows multiply before the one division, so that an average of equal values is that value.
    is_weighted = op == "avg" and rows is not None and len(set(rows)) > 1
    weights: Sequence[float] = rows if is_weighted and rows is not None else [1] * len(blocks)
    term = np.empty(out.shape, wide) if is_weighted or total is not out else None
    partial = lift(op, blocks[0], weights[0], out=total)
    for block, weight in zip(blocks[1:], weights[1:]):
        partial = combine(op, partial, lift(op, block, weight, out=term), out=total)
    finish(op, partial, sum(weights), out)


def equal_reduction(op: Op, values: Sequence[np.ndarray]) -> Reduction | None:
    """Return what reduces values that weigh the same, where they are lifted as they are and nothing is rounded.

    Whoever reduces the same places again and again does no more than combine them, in order, and divide.
    """
    if not (is_reducible(op) and values) or any(value.dtype != accumulator_dtype(value.dtype) for value in values):
        return None
    return _UFUNCS[str(op)], values, len(values) if op == "avg" else 1


def reduce_into(op: str, values: Sequence[np.ndarray], rows: Sequence[float] | None, out: np.ndarray) -> None:
    """Reduce ``values`` (all of the shape and dtype of ``out``, C-contiguous) into ``out``, in the order given.

    Parameters
    ----------
    op : str
        One of ``REDUCE_OPS``.
    values : sequence of ndarray
        One per rank that votes; none of them may overlap ``out``.
    rows : sequence of float or None
        How many rows stand behind each value: the weights of ``avg``. ``None``: all alike.

    Overflow and NaN are the caller's numbers, as in a NumPy reduction: callers run this under ``np.errstate``.
    """
    if out.nbytes <= BLOCK_NBYTES:
        _reduce_block(op, values, rows, out)
        return
    flat_out = out.reshape(-1)
    flat = [value.reshape(-1) for value in values]
    length = max(BLOCK_NBYTES // out.itemsize, 1)
    for start in range(0, flat_out.size, length):
        stop = start + length
        _reduce_block(op, [value[start:stop] for value in flat], rows, flat_out[start:stop])


class Accumulator:
    """The running value of one output over the slices of one rank.

    Parameters
    ----------
    op : Op
    what : str
        Names the output in errors.
    xp : module
        NumPy, or the namespace of the array library that the values belong to.
    is_single : bool
        There will be one slice only: its value is taken without a copy.
    """

    def __init__(self, op: Op, what: str, xp: Any = np, *, is_single: bool = False) -> None:
        self.op = op
        self._is_single = is_single
        self.what = what
        self._xp = xp
        self._parts: list[Any] = []
        self._rows: list[int] = []
        self._sum: Any = None

    def add(self, value: Any, num_rows: int) -> None:
        """Take in the value of one slice of ``num_rows`` rows (an array, or any object where the op allows it)."""
        op = self.op
        self._rows.append(num_rows)
        if not self._is_single and (_is_on_host(value) or isinstance(value, self._xp.ndarray)):
            # A function may return a buffer that it fills again for the next slice.
            value = (np if _is_on_host(value) else self._xp).array(value)
        if op is None or op == "gather":
            self._parts.append(value)
        elif not self._parts:
            self._parts = [value]  # as it is: with one slice nothing is computed
        elif callable(op):
            self._parts = [safe_point(op, self._parts[0], value)]
        elif op != "first":
            self._combine(op, value, num_rows)

    def _combine(self, op: str, value: Any, num_rows: int) -> None:
        first = self._parts[0]
        if self._sum is None:
            check_op(op, first.dtype, self.what)
            self._sum = self._xp.array(self._lift(op, first, self._rows[0]), order="C")
        if value.shape != first.shape or value.dtype != first.dtype:
            raise ValueError(
                f"cannot accumulate {self.what} over slices: got shape {value.shape} and dtype "
                f"{describe_dtype(value.dtype)} after shape {first.shape} and dtype {describe_dtype(first.dtype)}, "
                "expected the same for every slice. "
                "Use op 'gather' where the length follows the rows."
            )
        with np.errstate(all="ignore"):  # overflow and NaN are the caller's numbers, as in a NumPy reduction
            combine(op, self._sum, self._lift(op, value, num_rows), xp=self._xp, out=self._sum)

    def _lift(self, op: str, value: Any, num_rows: int) -> Any:
        with np.errstate(all="ignore"):
            return lift(op, self._xp.asarray(value), num_rows, xp=self._xp)  # a number may still be on the host

    def partial(self) -> Any:
        """Return what ``combine`` takes of an output that is reduced: not rounded, and of an average not divided."""
        if self._sum is not None:
            return self._sum
        check_op(str(self.op), self._parts[0].dtype, self.what)
        return self._lift(str(self.op), self._parts[0], self._rows[0])

    def result(self) -> Any:
        """Return the value over all slices, once."""
        if self.op is None:
            return self._parts
        if self.op == "gather":
            if all(isinstance(part, list) for part in self._parts):
                return join(self._parts, None)
            if all(_is_on_host(part) for part in self._parts):
                return concatenate(self._parts)
            return self._xp.concatenate([self._xp.asarray(part) for part in self._parts])
        if self._sum is None:
            return self._parts[0]
        with np.errstate(all="ignore"):
            result = self._xp.empty(self._sum.shape, dtype=self._parts[0].dtype)
            finish(str(self.op), self._sum, sum(self._rows), result, xp=self._xp)
            return result

    @property
    def dtype(self) -> Any:
        """That of the values."""
        return self._parts[0].dtype


def concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join host arrays along axis 0. Where they agree on a dtype it is kept: ``np.concatenate`` would pack records."""
    dtype = parts[0].dtype
    if any(part.dtype != dtype for part in parts):
        return np.concatenate(parts)
    out = np.empty((sum([len(part) for part in parts]), *parts[0].shape[1:]), dtype)
    return np.concatenate(parts, out=out)


def join(parts: Sequence[list[Any]], order: np.ndarray | None) -> list[Any]:
    """Join lists. Row k goes to position ``order[k]``; None: they are in order.

    Examples
    --------
    >>> join([["a", "b"], ["c"]], np.array([2, 0, 1]))
    ['b', 'c', 'a']
    """
    rows = [row for part in parts for row in part]
    if order is None:
        return rows
    ordered: list[Any] = [None] * len(rows)
    for position, row in zip(order, rows):
        ordered[position] = row
    return ordered


def _is_on_host(value: Any) -> bool:
    """Whether ``value`` is NumPy's, as text and numbers of a function on a device may be."""
    return isinstance(value, (np.ndarray, np.generic))
