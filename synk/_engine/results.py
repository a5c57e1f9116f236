"""Large results: views on shared buffers that are used again when the last view is gone."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from synk._wire.mapping import MappedFile
from synk._wire.memory import Segment, forks

_MAX_IDLE = 4

_logger = logging.getLogger("synk")
_pools: weakref.WeakValueDictionary[int, ResultPool] = weakref.WeakValueDictionary()
"""All open pools, by id."""

_outlived: weakref.WeakValueDictionary[int, MappedFile] = weakref.WeakValueDictionary()
"""The memory of results whose pool was closed, by id."""


@dataclass(eq=False)
class Lease:
    """A pool's record of a buffer that it has leased for one result. It does not keep the result alive."""

    reference: weakref.ref[np.ndarray]
    segment: Segment
    delivered_at: int | None = None  # forks.count when the user got it; None: workers may still write into it

    def deliver(self) -> None:
        """Note that all workers have written their parts. From now on the user may hold views of the result."""
        self.delivered_at = forks.count


class ResultPool:
    """Buffers that workers write results into.

    A buffer is leased with a new root array. All views of a result keep its root alive, and a weak reference to the
    root brings the buffer back when it ends. So a result is never overwritten while a view of it exists, and a loop
    that drops its results uses the same pages again and again.

    The child of a fork also holds the results that are alive at the fork, and the parent cannot see when the child
    drops them. So their buffers are made private before the fork, and never come back.

    Parameters
    ----------
    ids : iterator of int
        Numbers for new buffers, unique among the runtime's segments.
    """

    def __init__(self, ids: Iterator[int]) -> None:
        self._ids = ids
        self._leases: dict[int, Lease] = {}  # by ``id()`` of the reference
        # The references append themselves, in any thread and at any time. This happens in C: a callback in Python could
        # be interrupted, and its exception would be lost.
        self._ended: deque[weakref.ref[np.ndarray]] = deque()
        self._idle: list[Segment] = []
        self._retired: deque[Segment] = deque()
        _pools[id(self)] = self

    def take(self, nbytes: int) -> tuple[Lease, np.ndarray, list[Segment]]:
        """Lease a buffer of at least ``nbytes`` bytes.

        Returns
        -------
        lease : Lease
        root : ndarray of uint8
            The base of every view of the result, as long as the buffer.
        dropped : list of Segment
            Buffers that were given up. The caller tells the workers.

        Raises
        ------
        SharedMemoryError
            If there is no memory for a new buffer.
        """
        while self._ended:
            ended = self._leases.pop(id(self._ended.popleft()), None)
            if ended is not None:
                # A result that the user held at a fork may still be read by the child: its memory is not used again.
                is_forked = ended.delivered_at not in (None, forks.count)
                (self._retired if is_forked else self._idle).append(ended.segment)
        fitting = [segment for segment in self._idle if nbytes <= segment.nbytes <= 2 * nbytes + (1 << 20)]
        if fitting:
            segment = min(fitting, key=lambda candidate: candidate.nbytes)
            self._idle.remove(segment)
        else:
            segment = Segment.create(nbytes, is_worker_writable=True, segment_id=next(self._ids))
        dropped = self._idle[:-_MAX_IDLE]
        del self._idle[:-_MAX_IDLE]
        while self._retired:
            dropped.append(self._retired.popleft())
        # Only the caller holds the root. If it fails and drops the root, the reference brings the buffer back, as it
        # does when the user drops the result.
        root = segment.root()
        lease = Lease(weakref.ref(root, self._ended.append), segment)
        self._leases[id(lease.reference)] = lease
        return lease, root, dropped

    def prepare_fork(self) -> list[MappedFile]:
        """Return the memory of the results that the child will hold. ``forks.count`` must already include the fork."""
        mappings = []
        for lease in list(self._leases.values()):
            mapping = lease.segment.mapping
            if lease.reference() is not None:
                if lease.delivered_at is not None and mapping is not None:
                    mappings.append(mapping)
            elif lease.delivered_at == forks.count - 1:  # the result has ended before the fork, so no child can see it
                lease.delivered_at = forks.count
        return mappings

    def close(self) -> None:
        """Drop everything. Leased buffers live on in the user's views."""
        for lease in self._leases.values():
            mapping = lease.segment.release()
            if mapping is not None:
                _outlived[id(mapping)] = mapping
        _pools.pop(id(self), None)
        for segment in (*self._idle, *self._retired):
            segment.close()
        self._leases.clear()
        self._idle.clear()
        self._retired.clear()


def before_fork() -> None:
    """Before a fork, separate the parent's and the child's view of every living result. Nothing is copied.

    Workers have finished with these results, so each one's own pages can be mapped again in their place, now privately.
    """
    forks.count += 1  # First: if anything breaks this off, no buffer is reused that a child may hold.
    mappings = [mapping for reference in _outlived.valuerefs() if (mapping := reference()) is not None]
    for reference in _pools.valuerefs():
        pool = reference()
        mappings += pool.prepare_fork() if pool is not None else []
    for mapping in mappings:
        try:
            mapping.make_private()
        except OSError as error:  # the fork must go on
            _logger.warning(
                "a large result stays shared with a forked child (%s): each sees what the other writes into it. "
                "Copy it before the fork.",
                error.strerror,
            )
