"""Accumulates an output over the slices of a rank, and joins parts to a whole. Pure NumPy, no process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk._pure.dtypes import describe_dtype
from synk._pure.ops import Op, Reduction, int_as, is_int


@dataclass(frozen=True)
class SliceValues:
    """The values that a rank returned on its slices.

    The slices of all ranks are combined at once, so nothing is rounded twice.

    Attributes
    ----------
    values : list
    rows : list of int
        How many rows each value stands for.
    """

    values: list[Any]
    rows: list[int]

    def __len__(self) -> int:
        return sum(map(len, self.values))


class Accumulator:
    """The running value of one output over the slices of one rank.

    Parameters
    ----------
    op : Op
    what : str
        Names the output in errors.
    xp : module
        NumPy, or the namespace of the array library that the values belong to.
    """

    def __init__(self, op: Op, what: str, xp: Any = np) -> None:
        self.op = op
        self.what = what
        self._xp = xp
        self._parts: list[Any] = []
        self._rows: list[int] = []
        self._sum: Any = None

    def add(self, value: Any, num_rows: int) -> None:
        """Add the value of one slice of ``num_rows`` rows: an array, or any object if the op accepts it."""
        op = self.op
        self._rows.append(num_rows)
        is_object = isinstance(value, np.ndarray) and type(value) is not np.ndarray  # a copy; its class counts
        if not is_object and (_is_on_host(value) or isinstance(value, self._xp.ndarray)):
            # The function may return the same buffer again, filled for the next slice.
            value = self._library_of(value).array(value)
        if not isinstance(op, Reduction):
            op.accumulate(self._parts, value)
        elif not self._parts:
            self._parts = [value]  # a single slice is kept as it is: nothing is computed
        else:
            self._combine(op, value, num_rows)

    def _combine(self, op: Reduction, value: Any, num_rows: int) -> None:
        first = self._parts[0]
        if is_int(first) and is_int(value):
            self._parts[0] = op.of_ints(first, value)
            return
        if is_int(first):
            first = self._parts[0] = int_as(first, value.dtype, self.what)
        if is_int(value):
            value = int_as(value, first.dtype, self.what)
        if self._sum is None:
            op.check(first.dtype, self.what)
            self._sum = self._library_of(first).array(self._lift(op, first, self._rows[0]), order="C")
        if value.shape != first.shape or value.dtype != first.dtype:
            raise ValueError(
                f"cannot accumulate {self.what} over slices: got shape {value.shape} and dtype "
                f"{describe_dtype(value.dtype)} after shape {first.shape} and dtype {describe_dtype(first.dtype)}, "
                "expected the same for every slice. "
                "Use op 'gather' where the length follows the rows."
            )
        lifted = self._lift(op, value, num_rows)
        xp = self._library_of(self._sum, lifted)
        out = self._sum if xp is np else None  # not every library can compute a minimum in place
        with np.errstate(all="ignore"):  # overflow and NaN are the caller's business, as in a NumPy reduction
            self._sum = op.merge(xp.asarray(self._sum), xp.asarray(lifted), xp=xp, out=out)

    def _lift(self, op: Reduction, value: Any, num_rows: int) -> Any:
        xp = self._library_of(value)
        with np.errstate(all="ignore"):
            return op.lift(xp.asarray(value), num_rows, xp=xp)

    def _library_of(self, *values: Any) -> Any:
        """Return NumPy if all values lie on the host, as numbers may on any backend, else the backend's library."""
        return np if all(map(_is_on_host, values)) else self._xp

    def partial(self) -> Any:
        """Return the partial result that ``combine`` takes: neither rounded nor, for an average, divided."""
        if self._sum is not None:
            return self._sum
        assert isinstance(self.op, Reduction)
        if is_int(self._parts[0]):
            return self._parts[0]
        self.op.check(self._parts[0].dtype, self.what)
        return self._lift(self.op, self._parts[0], self._rows[0])

    def result(self) -> Any:
        """Return the value over all slices; call it once. An op that keeps slices apart gets a list of values."""
        op = self.op
        if op.concatenates:
            if all(isinstance(part, list) for part in self._parts):
                return join(self._parts, None)
            if all(_is_on_host(part) for part in self._parts):
                return concatenate(self._parts)
            return self._xp.concatenate([self._xp.asarray(part) for part in self._parts])
        if not isinstance(op, Reduction):
            return self._parts if op.keeps_slices else self._parts[0]
        if self._sum is None:
            return self._parts[0]
        with np.errstate(all="ignore"):
            xp = self._library_of(self._sum)
            result = xp.empty(self._sum.shape, dtype=self._parts[0].dtype)
            op.finish_into(self._sum, sum(self._rows), result, xp=xp)
            return result

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self._parts[0].dtype


def concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join host arrays along axis 0. A dtype that they share is kept: ``np.concatenate`` would repack records."""
    dtype = parts[0].dtype
    if any(part.dtype != dtype for part in parts):
        return np.concatenate(parts)
    out = np.empty((sum([len(part) for part in parts]), *parts[0].shape[1:]), dtype)
    return np.concatenate(parts, out=out)


def join(parts: Sequence[list[Any]], order: np.ndarray | None) -> list[Any]:
    """Join lists. Row k goes to position ``order[k]``; None means that they are in order.

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
    """Whether ``value`` belongs to NumPy. A function on a device may still return text or numbers on the host."""
    return isinstance(value, (np.ndarray, np.generic))
