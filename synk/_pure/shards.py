"""From rows to bounds: which rows a call uses, and which rank works on which. Pure arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


def shard_bounds(num_rows: int, world_size: int) -> list[tuple[int, int]]:
    """Return ``(start, stop)`` of each rank's rows, as ``numpy.array_split`` splits them.

    Examples
    --------
    >>> shard_bounds(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    quotient, remainder = divmod(num_rows, world_size)
    return bounds_of([quotient + (rank < remainder) for rank in range(world_size)])


@dataclass(frozen=True)
class Selection:
    """The rows of a call, as positions on axis 0 of its scattered inputs, in the order they are used.

    Attributes
    ----------
    count : int
        How many rows.
    start, step : int
        Row ``k`` is ``start + k * step`` where ``indices`` is None.
    indices : ndarray of int64, shape (count,), or None
    """

    count: int
    start: int = 0
    step: int = 1
    indices: npt.NDArray[np.int64] | None = None

    def positions(self) -> npt.NDArray[np.int64]:
        """All selected rows, as an int64 array of shape ``(count,)``."""
        if self.indices is not None:
            return self.indices
        return self.start + self.step * np.arange(self.count, dtype=np.int64)

    def between(self, low: int, high: int) -> slice | npt.NDArray[np.int64]:
        """Return where the selected rows ``low`` to ``high`` lie, in their order.

        Examples
        --------
        >>> np.arange(10)[Selection(5, start=9, step=-2).between(1, 4)]
        array([7, 5, 3])
        """
        if self.indices is not None:
            return self.indices[low:high]
        if low == high:  # if the selection goes backwards, its first row may lie before the array
            return slice(0, 0)
        first, stop = self.start + low * self.step, self.start + high * self.step
        return slice(first, None if stop < 0 else stop, self.step)

    def same_rows(self, other: Selection) -> bool:
        """Whether both select the same rows in the same order."""
        if self.indices is None and other.indices is None:
            return (self.count, self.start, self.step) == (other.count, other.start, other.step)
        return np.array_equal(self.positions(), other.positions())


def select_rows(batch: Any, num_rows: int, what: str) -> Selection:
    """Resolve a ``batch`` argument against an axis of ``num_rows`` rows.

    Parameters
    ----------
    batch : None, int, slice, sequence of int, or bool mask
        ``None``: all rows. An int n: the first n rows. A slice has its Python meaning. A list or 1-d integer array
        picks rows in its order, duplicates and negative values allowed. A bool mask needs one value for each row.
    num_rows : int
    what : str
        Names the call in errors.

    Raises
    ------
    IndexError
        If a row is out of range, or the mask's length differs.
    TypeError
        If ``batch`` is of another type or dtype.
    """
    if batch is None:
        return Selection(num_rows)
    if isinstance(batch, (bool, np.bool_)):
        raise TypeError(
            f"cannot select rows of {what}: got batch={batch!r}, expected an int, slice, index list or mask."
        )
    if isinstance(batch, (int, np.integer)):
        if not 0 <= batch <= num_rows:
            raise IndexError(
                f"cannot select rows of {what}: got batch={batch}, expected 0 to {num_rows} (the first rows). "
                "Pass a slice or a list for other rows."
            )
        return Selection(int(batch))
    if isinstance(batch, slice):
        rows = range(num_rows)[batch]
        return Selection(len(rows), rows.start, rows.step) if len(rows) else Selection(0)
    indices = _index_array(batch, num_rows, what)
    if indices.size:
        low, high = int(indices.min()), int(indices.max())
        if low < -num_rows or high >= num_rows:
            bad = low if low < -num_rows else high
            expected = f"{-num_rows} to {num_rows - 1}" if num_rows else "no index, as the input has no rows"
            raise IndexError(f"cannot select rows of {what}: got index {bad} in batch, expected {expected}.")
        if low < 0:
            indices = np.where(indices < 0, indices.astype(np.int64) + num_rows, indices)
    return Selection(indices.size, indices=indices.astype(np.int64))


def _index_array(batch: Any, num_rows: int, what: str) -> np.ndarray:
    """Return ``batch`` as a 1-d array of integers; a mask becomes the positions of its True values."""
    indices = _as_array(batch, what)
    if indices.size == 0 and indices.ndim == 1 and not isinstance(batch, np.ndarray):
        return np.empty(0, np.int64)
    if indices.ndim != 1 or indices.dtype.kind not in "biu":
        raise IndexError(
            f"cannot select rows of {what}: got a batch of dtype {indices.dtype} and shape {indices.shape}, "
            "expected a 1-d list or array of integers, or a bool mask."
        )
    if indices.dtype.kind == "b":
        if indices.size != num_rows:
            raise IndexError(
                f"cannot select rows of {what}: got a mask of {indices.size} values, expected one for each of the "
                f"{num_rows} rows."
            )
        return np.flatnonzero(indices)
    return indices


def _as_array(batch: Any, what: str) -> np.ndarray:
    try:
        return np.asarray(batch)
    except Exception as error:
        raise TypeError(
            f"cannot select rows of {what}: got a batch of type {type(batch).__name__} ({error})."
        ) from error


def select_common(batch: Any, lengths: Sequence[tuple[str, int]], what: str) -> Selection:
    """Resolve ``batch`` for all scattered inputs of a call at once.

    Parameters
    ----------
    batch
        As for :func:`select_rows`.
    lengths : sequence of (name, rows)
        The inputs. They may differ in length only if ``batch`` selects the same rows of all.
    what : str

    Raises
    ------
    ValueError
        If the inputs differ in length and ``batch`` does not say which rows are meant.
    IndexError, TypeError
        As for :func:`select_rows`.
    """
    first_name, first_rows = lengths[0]
    if batch is None:
        for name, rows in lengths[1:]:
            if rows != first_rows:
                shorter = (name if rows < first_rows else first_name).partition("[")[0]
                raise ValueError(
                    f"cannot scatter inputs of {what}: got {first_name} with {first_rows} rows and {name} with {rows}, "
                    f"expected equal axis-0 lengths. If {shorter} goes whole to every rank, build the function with "
                    f"bcast_inputs={shorter!r}; to use the common rows pass batch={min(first_rows, rows)}."
                )
        return Selection(first_rows)
    selection = select_rows(batch, first_rows, what)
    for name, rows in lengths[1:]:
        if rows != first_rows and not select_rows(batch, rows, what).same_rows(selection):
            raise ValueError(
                f"cannot select rows of {what}: batch means different rows of {first_name} ({first_rows} "
                f"rows) and {name} ({rows} rows). Pass inputs of equal length, or non-negative indices."
            )
    return selection


@dataclass(frozen=True)
class Assignment:
    """Which rank works on which rows if the ranks own the rows (sharded variables).

    Attributes
    ----------
    selection : Selection
        All selected rows, rank by rank; those of rank r lie at ``bounds[r]``.
    bounds : list of (low, high)
    local_ranges : list of (start, step)
        The rows of rank r in its own shard, if ``local_indices`` is None.
    local_indices : ndarray of int64, shape (count,), or None
        The position of each selected row in its owner's shard.
    order : ndarray of int64, shape (count,), or None
        The position of each selected row in the caller's order; None if the orders are the same.
    """

    selection: Selection
    bounds: list[tuple[int, int]]
    local_ranges: list[tuple[int, int]]
    local_indices: npt.NDArray[np.int64] | None = None
    order: npt.NDArray[np.int64] | None = None


def bounds_of(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return ``(low, high)`` for each of ``counts``, as consecutive ranges."""
    return list(itertools.pairwise(itertools.accumulate(counts, initial=0)))


def assign_owned(batch: Any, lengths: Sequence[int], what: str) -> Assignment:
    """Divide the rows that ``batch`` selects from a whole data set among the ranks that own them.

    Parameters
    ----------
    batch
        As for :func:`select_rows`. It counts through the shards in rank order.
    lengths : sequence of int
        How many rows each rank owns.
    what : str
    """
    owned = bounds_of(lengths)
    selection = select_rows(batch, owned[-1][1], what)
    if batch is None:
        return Assignment(selection, owned, [(0, 1)] * len(owned))
    positions = selection.positions()
    owner = np.searchsorted([high for _, high in owned], positions, side="right")
    counts = np.bincount(owner, minlength=len(owned)).tolist()
    bounds = bounds_of(counts)
    if selection.indices is None and selection.step > 0:
        # Ascending rows stay a range on every rank, so no rank has to gather rows.
        ranges = [
            (int(positions[low]) - first if high > low else 0, selection.step)
            for (low, high), (first, _) in zip(bounds, owned)
        ]
        return Assignment(selection, bounds, ranges)
    order = np.argsort(owner, kind="stable")
    positions = positions[order]
    local = positions - np.array([low for low, _ in owned], np.int64)[owner[order]]
    is_same = bool((order == np.arange(len(order))).all())
    return Assignment(
        Selection(len(positions), indices=positions), bounds, [(0, 1)] * len(owned), local, None if is_same else order
    )
