"""Large results: views on shared buffers that are used again once nobody holds them."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np

from synk._interrupts import deferred
from synk._memory import Segment

_MAX_IDLE = 4


@dataclass(frozen=True, eq=False)
class Lease:
    """A buffer for one result.

    Attributes
    ----------
    segment : Segment
    root : ndarray of uint8, shape (segment.nbytes,)
        Every view of the result must come from it.
    """

    segment: Segment
    root: np.ndarray


class ResultPool:
    """Buffers that workers write results into.

    A buffer is leased as a fresh root array; all views of a result keep their root alive, and its end, seen by a weak
    reference, brings the buffer back. So a result is never overwritten while somebody holds it, and a loop that drops
    its results touches the same pages again and again.
    """

    def __init__(self) -> None:
        self._leases: dict[int, tuple[weakref.ref[np.ndarray], Segment]] = {}  # by the id of the reference
        # Filled by the references, in any thread and at any time, and in C: a callback in Python could be interrupted,
        # and what it raises would be lost.
        self._ended: deque[weakref.ref[np.ndarray]] = deque()
        self._idle: list[Segment] = []

    def take(self, nbytes: int) -> tuple[Lease, list[Segment]]:
        """Lease a buffer of at least ``nbytes`` bytes.

        Returns
        -------
        lease : Lease
        dropped : list of Segment
            Idle buffers given up; the caller tells the workers.

        Raises
        ------
        SharedMemoryError
            If a new buffer cannot be had.
        """
        while self._ended:
            ended = self._leases.pop(id(self._ended.popleft()), None)
            if ended is not None:
                self._idle.append(ended[1])
        fitting = [segment for segment in self._idle if nbytes <= segment.nbytes <= 2 * nbytes + (1 << 20)]
        if fitting:
            segment = min(fitting, key=lambda candidate: candidate.nbytes)
            self._idle.remove(segment)
        else:
            segment = Segment.create(nbytes, is_worker_writable=True)
        dropped = self._idle[:-_MAX_IDLE]
        del self._idle[:-_MAX_IDLE]
        lease = Lease(segment, segment.root())
        reference = weakref.ref(lease.root, self._ended.append)
        self._leases[id(reference)] = (reference, segment)
        return lease, dropped

    def give_back(self, lease: Lease) -> None:
        """Take a buffer back whose call has failed: a traceback may keep the root. Safe to repeat."""
        with deferred():
            for key, (reference, segment) in list(self._leases.items()):
                if reference() is lease.root:
                    del self._leases[key]
                    self._idle.append(segment)

    def close(self) -> None:
        """Drop everything; leased buffers live on in the views that the user holds."""
        for _, segment in self._leases.values():
            segment.close()
        for segment in self._idle:
            segment.close()
        self._leases.clear()
        self._idle.clear()
