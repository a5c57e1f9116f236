"""Loans: the shared memory that a call lends to the user's function, whose views are the function's inputs.

A function may keep such a view, and if it is a tensor, write into it. But the master writes the inputs of the next call
to the same place. So after the function has returned, and before the reply says so, the rank checks

- whether anybody still refers to plain arrays (not ``Data``). If so, their pages become this process's own, at the same
  address, and later calls use another mapping of the segment;
- whether the function wrote into a tensor. If so, it has changed copies of the pages, because the mapping is private.
  They are dropped: they would hide what the next call is given.

A function that does neither pays only for the checks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from synk._pure.arrays import address_of
from synk._pure.exact import as_recarray
from synk._wire.memory import Segment
from synk._wire.messages import IN_SEGMENTS, Plan
from synk._worker.held import pages as _pages
from synk._worker.held.rows import Rows


class Loan(NamedTuple):
    """One array. Every view of it, no matter who makes it, refers to ``root``."""

    array: np.ndarray
    root: np.ndarray
    segment: Segment
    address: int
    position: int | None
    """The position of the input; None for a buffer of the broadcast objects."""


class Loans:
    """The loans of one plan.

    Parameters
    ----------
    plan : Plan
    segments : mapping of int to Segment
        The segments that the worker holds.
    is_writable : bool
        Whether the function gets tensors, which cannot be made read-only.

    Attributes
    ----------
    arrays : list of (ndarray or None)
        One for each input of the plan; None if the input is not an array.
    buffers : list of ndarray of uint8
        The out-of-band buffers of the broadcast objects.
    """

    def __init__(self, plan: Plan, segments: Mapping[int, Segment], *, is_writable: bool) -> None:
        self.arrays: list[np.ndarray | None] = []
        self.buffers: list[np.ndarray] = []
        self._loans: list[Loan] = []
        for position, item in enumerate(plan.inputs):
            if item.kind not in IN_SEGMENTS:
                self.arrays.append(None)
            elif 0 in item.shape or item.dtype.itemsize == 0:  # no bytes, so no segment
                array = as_recarray(np.empty(item.shape, item.dtype))
                array.flags.writeable = False
                self.arrays.append(array)
            else:
                segment = segments[item.segment_id]
                self.arrays.append(self._lend(segment, item.offset, item.shape, item.dtype, position))
        for segment_id, offset, nbytes in plan.buffers:
            self.buffers.append(self._lend(segments[segment_id], offset, (nbytes,), np.dtype(np.uint8), None))
        self._writable = [
            loan for loan in self._loans if is_writable and loan.segment.is_private and loan.position is not None
        ]
        self._data = [(loan, self._references(loan)) for loan in self._writable if not loan.segment.is_staging]
        for loan in self._writable:
            _pages.let_write(loan.address, loan.array.nbytes)
        self._staged = [array for loan in self._loans if loan.segment.is_staging for array in (loan.array, loan.root)]
        self._num_references = sum(map(sys.getrefcount, self._staged))

    def _lend(
        self, segment: Segment, offset: int, shape: tuple[int, ...], dtype: np.dtype, position: int | None
    ) -> np.ndarray:
        count = math.prod(shape)
        # From a memoryview, because views would otherwise refer to the segment's own array, which many plans share.
        root = np.frombuffer(segment.buffer.data, dtype, count, offset)
        array = as_recarray(root.reshape(shape))
        if count:
            self._loans.append(Loan(array, root, segment, address_of(root), position))
        return array

    @staticmethod
    def _references(loan: Loan) -> int:
        return sys.getrefcount(loan.array) + sys.getrefcount(loan.root)

    # -- views that a function keeps ----------------------------------------------------------------------------------

    def are_touched(self, spans: Sequence[tuple[int, int]], known: Collection[tuple[int, int, int]]) -> bool:
        """Whether a call kept views other than the ``Data`` in ``known``, or wrote into the memory of ``spans``."""
        if sum(map(sys.getrefcount, self._staged)) != self._num_references:
            return True
        for address, nbytes in spans:
            if _pages.is_written(address, nbytes):
                return True
        return bool(self._data) and not self.kept_data().issubset(known)

    def is_kept(self) -> bool:
        """Whether anybody still refers to arrays that the next call may overwrite."""
        return sum(map(sys.getrefcount, self._staged)) != self._num_references

    @property
    def staging(self) -> Segment:
        """The segment of the plain arrays. There must be at least one."""
        return next(loan.segment for loan in self._loans if loan.segment.is_staging)

    def make_own(self, rows: Rows) -> None:
        """Turn the pages of the plain arrays that the function got into this process's own.

        The caller then maps the segment again, for later calls.
        """
        segment = self.staging
        # The master writes to this segment again only after the reply, so the pages still hold what the function got.
        # On a device the mapping is shared, see ``Held.map_segment``. It must be private before any page is written.
        if not segment.is_private:
            _pages.map_privately(int(segment.buffer.ctypes.data), segment.nbytes, segment.fd)
        for loan in self._loans:
            address, nbytes = _span(loan, rows)
            if loan.segment is segment and nbytes:
                _pages.make_own(address, nbytes)

    # -- memory that a function writes into ---------------------------------------------------------------------------

    def spans(self, rows: Rows) -> list[tuple[int, int]]:
        """Return ``(address, nbytes)`` of the memory that the function can write into. Spans on one page are joined."""
        spans = [_span(loan, rows) for loan in self._writable]
        return _pages.joined([(address, nbytes) for address, nbytes in spans if nbytes])

    def kept_data(self) -> set[tuple[int, int, int]]:
        """Return ``(segment_id, address, nbytes)`` of each ``Data`` whose tensors somebody still holds."""
        return {
            (loan.segment.id, loan.address, loan.array.nbytes)
            for loan, num_references in self._data
            if self._references(loan) != num_references
        }


def _span(loan: Loan, rows: Rows) -> tuple[int, int]:
    """Return the address and size of the part of an array that the function got."""
    position = loan.position
    if position in rows.picked:  # the function got a copy
        return loan.address, 0
    part = ... if position is None else rows.views.get(position, ...)
    if part is ...:
        return loan.address, loan.array.nbytes
    view = loan.array[part]
    if not len(view):
        return loan.address, 0
    length = (len(view) - 1) * view.strides[0]
    start = address_of(view) + min(length, 0)
    return start, abs(length) + loan.array.nbytes // len(loan.array)
