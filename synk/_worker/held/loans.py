"""What a call lends the user's function of shared memory: the arrays whose views are its inputs.

A function may keep such a view and, where it is a tensor, write into it, and the master writes the inputs of the next
call to the same place. So when the function has returned, and before the reply says so, the rank looks

- whether plain arrays (no ``Data``) are still referred to. Their pages then become this process's own, at the same
  address, and later calls use another mapping of the segment;
- whether a tensor was written into. The function has changed copies of the pages, for the mapping is private; they are
  dropped, or they would hide what the next call is given.

A call whose function does neither pays for the questions only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from synk._wire.memory import Segment
from synk._wire.messages import IN_SEGMENTS, Input, Plan
from synk._worker.held import pages as _pages

RowsOf = Callable[[Input, np.ndarray], np.ndarray | None]
"""Returns the view of a scattered array that the function got; None where it got a copy."""


class Loan(NamedTuple):
    """One array. All views of it, whoever makes them, refer to ``root``."""

    array: np.ndarray
    root: np.ndarray
    segment: Segment
    address: int
    item: Input | None
    """The input that it belongs to; None for a buffer of the broadcast objects."""


class Loans:
    """The loans of one plan.

    Parameters
    ----------
    plan : Plan
    segments : mapping of int to Segment
        The worker's own.
    is_writable : bool
        Whether the function gets tensors, which nothing protects from being written into.

    Attributes
    ----------
    arrays : list of (ndarray or None)
        One for each input of the plan; None where it is no array.
    buffers : list of ndarray of uint8
        The out-of-band buffers of the broadcast objects.
    """

    def __init__(self, plan: Plan, segments: Mapping[int, Segment], *, is_writable: bool) -> None:
        self.arrays: list[np.ndarray | None] = []
        self.buffers: list[np.ndarray] = []
        self._loans: list[Loan] = []
        for item in plan.inputs:
            if item.kind not in IN_SEGMENTS:
                self.arrays.append(None)
            elif 0 in item.shape or item.dtype.itemsize == 0:  # no bytes, so no segment
                array = np.empty(item.shape, item.dtype)
                array.flags.writeable = False
                self.arrays.append(array)
            else:
                segment = segments[item.segment_id]
                self.arrays.append(self._lend(segment, item.offset, item.shape, item.dtype, item))
        for segment_id, offset, nbytes in plan.buffers:
            self.buffers.append(self._lend(segments[segment_id], offset, (nbytes,), np.dtype(np.uint8), None))
        self._writable = [loan for loan in self._loans if is_writable and loan.segment.is_private and loan.item]
        self._data = [(loan, self._references(loan)) for loan in self._writable if not loan.segment.is_staging]
        for loan in self._writable:
            _pages.let_write(loan.address, loan.array.nbytes)
        self._staged = [array for loan in self._loans if loan.segment.is_staging for array in (loan.array, loan.root)]
        self._num_references = sum(map(sys.getrefcount, self._staged))

    def _lend(
        self, segment: Segment, offset: int, shape: tuple[int, ...], dtype: np.dtype, item: Input | None
    ) -> np.ndarray:
        count = math.prod(shape)
        # From a memoryview: views of it would refer to the segment's own array otherwise, which many plans share.
        root = np.frombuffer(segment.buffer.data, dtype, count, offset)
        array = root.reshape(shape)
        if count:
            self._loans.append(Loan(array, root, segment, int(root.__array_interface__["data"][0]), item))
        return array

    @staticmethod
    def _references(loan: Loan) -> int:
        return sys.getrefcount(loan.array) + sys.getrefcount(loan.root)

    # -- what is kept -------------------------------------------------------------------------------------------------

    def are_open(self) -> bool:
        """Whether, after a call, anything may have been kept or written into."""
        return bool(self._writable) or sum(map(sys.getrefcount, self._staged)) != self._num_references

    def are_touched(self, spans: Sequence[tuple[int, int]], known: Collection[tuple[int, int, int]]) -> bool:
        """Whether, after a call, anything was kept but the ``Data`` that are known to be, or written into ``spans``."""
        if sum(map(sys.getrefcount, self._staged)) != self._num_references:
            return True
        for address, nbytes in spans:
            if _pages.is_written(address, nbytes):
                return True
        return bool(self._data) and not self.kept_data().issubset(known)

    def is_kept(self) -> bool:
        """Whether somebody refers to arrays that the next call may overwrite."""
        return sum(map(sys.getrefcount, self._staged)) != self._num_references

    @property
    def staging(self) -> Segment:
        """The segment of the plain arrays, where there are any."""
        return next(loan.segment for loan in self._loans if loan.segment.is_staging)

    def make_own(self, rows: RowsOf) -> None:
        """Give this process pages of its own with what the function got of its plain arrays.

        The caller maps their segment anew.
        """
        segment = self.staging
        if not segment.is_private:
            _pages.map_privately(int(segment.buffer.ctypes.data), segment.nbytes, segment.fd)
        for loan in self._loans:
            address, nbytes = _span(loan, rows)
            if loan.segment is segment and nbytes:
                _pages.make_own(address, nbytes)

    # -- what is written into -----------------------------------------------------------------------------------------

    def spans(self, rows: RowsOf) -> list[tuple[int, int]]:
        """Return ``(address, nbytes)`` of what the function can write into; what shares a page is one of them."""
        spans = [_span(loan, rows) for loan in self._writable]
        return _pages.joined([(address, nbytes) for address, nbytes in spans if nbytes])

    def written(self, rows: RowsOf) -> list[tuple[int, int]]:
        """Return those of the spans that the function has written into."""
        return [span for span in self.spans(rows) if _pages.is_written(*span)]

    def kept_data(self) -> set[tuple[int, int, int]]:
        """Return ``(segment_id, address, nbytes)`` of ``Data`` of which somebody still has tensors."""
        return {
            (loan.segment.id, loan.address, loan.array.nbytes)
            for loan, num_references in self._data
            if self._references(loan) != num_references
        }


def _span(loan: Loan, rows: RowsOf) -> tuple[int, int]:
    """Return address and bytes of what the function got of an array."""
    if loan.item is None or loan.item.kind != "rows":
        return loan.address, loan.array.nbytes
    view = rows(loan.item, loan.array)
    if view is None or not len(view):  # it got a copy, or nothing
        return loan.address, 0
    length = (len(view) - 1) * view.strides[0]
    start = int(view.__array_interface__["data"][0]) + min(length, 0)
    return start, abs(length) + loan.array.nbytes // len(loan.array)
