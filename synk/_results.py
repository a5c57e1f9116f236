"""Large results: views on shared buffers that are used again once nobody holds them."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

from synk._memory import Segment

_MAX_IDLE = 4


class ResultPool:
    """Buffers that workers write results into.

    A buffer is leased as a fresh root array; all views of a result keep their root alive, and its end, seen by a weak
    reference, brings the buffer back. So a result is never overwritten while somebody holds it, and a loop that drops
    its results touches the same pages again and again.
    """

    def __init__(self) -> None:
        self._leases: dict[int, tuple[weakref.ref[np.ndarray], Segment]] = {}
        self._returned: deque[int] = deque()  # filled by weak references, in any thread and at any time
        self._idle: list[Segment] = []

    def take(self, nbytes: int) -> tuple[Segment, np.ndarray, list[Segment]]:
        """Lease a buffer of at least ``nbytes`` bytes.

        Returns
        -------
        segment : Segment
        root : ndarray of uint8, shape (segment.nbytes,)
            Every view of the result must come from it.
        dropped : list of Segment
            Idle buffers given up; the caller tells the workers.

        Raises
        ------
        SharedMemoryError
            If a new buffer cannot be had.
        """
        while self._returned:
            lease = self._leases.pop(self._returned.popleft(), None)
            if lease is not None:
                self._idle.append(lease[1])
        fitting = [segment for segment in self._idle if nbytes <= segment.nbytes <= 2 * nbytes + (1 << 20)]
        if fitting:
            segment = min(fitting, key=lambda candidate: candidate.nbytes)
            self._idle.remove(segment)
        else:
            segment = Segment.create(nbytes, is_worker_writable=True)
        dropped = self._idle[:-_MAX_IDLE]
        del self._idle[:-_MAX_IDLE]
        root = segment.root()
        returned = self._returned
        segment_id = segment.id
        self._leases[segment_id] = (weakref.ref(root, lambda _: returned.append(segment_id)), segment)
        return segment, root, dropped

    def close(self) -> None:
        """Drop everything; leased buffers live on in the views that the user holds."""
        for _, segment in self._leases.values():
            segment.close()
        for segment in self._idle:
            segment.close()
        self._leases.clear()
        self._idle.clear()
