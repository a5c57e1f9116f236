"""The inputs of a plan as read-only views of shared memory, which a function may keep.

The master writes the inputs of the next call to the same place. So after the function has returned, and before the
reply says so, the rank checks whether anybody still refers to plain arrays (not ``Data``). If so, their pages become
this process's own, at the same address, and later calls use another mapping of the segment. A function that keeps
nothing pays only for the check. Tensors cannot be read-only, so they are copies; see ``synk._worker.call.inputs``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import numpy as np
from numpy.lib.array_utils import byte_bounds

from synk._pure.exact import as_recarray
from synk._wire.memory import Segment
from synk._wire.messages import IN_SEGMENTS, Plan
from synk._worker.held import pages as _pages
from synk._worker.held.rows import Rows


class InputViews:
    """The views of one plan.

    Parameters
    ----------
    plan : Plan
    segments : mapping of int to Segment
        The segments that the worker holds.
    files : mapping of int to ndarray
        By position, the arrays that lie in files.
    rank : int

    Attributes
    ----------
    arrays : list of (ndarray or None)
        One for each input of the plan; None if the input is not an array.
    buffers : list of ndarray of uint8
        The out-of-band buffers of the broadcast objects.
    staging : Segment or None
        The segment of the plain arrays and the buffers, if there are any.
    """

    def __init__(self, plan: Plan, segments: Mapping[int, Segment], files: Mapping[int, np.ndarray], rank: int) -> None:
        self.arrays: list[np.ndarray | None] = []
        self.buffers: list[np.ndarray] = []
        self.staging: Segment | None = None
        # Plain arrays, each with the position of its input (None: a buffer), and all to which views of them can refer.
        self._staged: list[tuple[np.ndarray, int | None]] = []
        self._roots: list[np.ndarray] = []
        for position, item in enumerate(plan.inputs):
            if item.kind not in IN_SEGMENTS:
                self.arrays.append(None)
            elif item.file is not None:
                self.arrays.append(files[position])
            elif 0 in item.shape or item.dtype.itemsize == 0:  # no bytes, so no segment
                array = as_recarray(np.empty(item.shape, item.dtype))
                array.flags.writeable = False
                self.arrays.append(array)
            else:
                segment, offset, shape = segments[item.segment_id], item.offset, item.shape
                if item.kind == "table":  # one row of bytes for each rank
                    offset, shape = offset + rank * shape[1], shape[1:]
                self.arrays.append(self._view(segment, offset, shape, item.dtype, position))
        for segment_id, offset, nbytes in plan.buffers:
            self.buffers.append(self._view(segments[segment_id], offset, (nbytes,), np.dtype(np.uint8), None))
        self._num_references = self._count()

    def _view(
        self, segment: Segment, offset: int, shape: tuple[int, ...], dtype: np.dtype, position: int | None
    ) -> np.ndarray:
        # From a memoryview, because views would otherwise refer to the segment's own array, which many plans share.
        root = np.frombuffer(segment.buffer.data, dtype, math.prod(shape), offset)
        array = as_recarray(root.reshape(shape))
        if segment.is_staging:
            self.staging = segment
            self._staged.append((array, position))
            self._roots += array, root
        return array

    def _count(self) -> int:
        return sum(map(sys.getrefcount, self._roots))

    def is_kept(self) -> bool:
        """Whether anybody still refers to arrays that the next call may overwrite."""
        return self._count() != self._num_references

    def make_own(self, rows: Rows) -> None:
        """Turn the pages of the plain arrays that the function got into this process's own.

        The caller then maps the segment again, for later calls.
        """
        segment = self.staging
        assert segment is not None
        # The master writes to this segment again only after the reply, so the pages still hold what the function got.
        # On a device the mapping is shared, see ``Held.map_segment``. It must be private before any page is written.
        if not segment.is_private:
            _pages.map_privately(int(segment.buffer.ctypes.data), segment.nbytes, segment.fd)
        for array, position in self._staged:
            if position not in rows.picked:  # of those the function got copies
                low, high = byte_bounds(array[... if position is None else rows.views.get(position, ...)])
                if high > low:
                    _pages.make_own(low, high - low)
