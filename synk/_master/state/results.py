"""Large results: views on shared buffers that are used again once nobody holds them."""

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
"""All that are open, by id."""

_outlived: weakref.WeakValueDictionary[int, MappedFile] = weakref.WeakValueDictionary()
"""The memory of results whose pool was closed, by id."""


@dataclass(eq=False)
class _Record:
    """What a pool remembers of a buffer that it has leased: nothing that keeps the result alive."""

    reference: weakref.ref[np.ndarray]
    segment: Segment
    delivered_at: int | None = None  # forks.count when it became the user's; None: workers may still write into it


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
    _record: _Record

    def deliver(self) -> np.ndarray:
        """Return the root, when all workers have written their parts: the user may hold views of it from now on."""
        self._record.delivered_at = forks.count
        return self.root


class ResultPool:
    """Buffers that workers write results into.

    A buffer is leased as a fresh root array; all views of a result keep their root alive, and its end, seen by a weak
    reference, brings the buffer back. So a result is never overwritten while somebody holds it, and a loop that drops
    its results touches the same pages again and again.

    The child of a fork holds the results that were alive, too, and nobody sees when it lets go of them: their buffers
    are made private before the fork, and do not come back.

    Parameters
    ----------
    ids : iterator of int
        For new buffers: those of the runtime's segments.
    """

    def __init__(self, ids: Iterator[int]) -> None:
        self._ids = ids
        self._leases: dict[int, _Record] = {}  # by the id of the reference
        # Filled by the references, in any thread and at any time, and in C: a callback in Python could be interrupted,
        # and what it raises would be lost.
        self._ended: deque[weakref.ref[np.ndarray]] = deque()
        self._idle: list[Segment] = []
        self._retired: deque[Segment] = deque()
        _pools[id(self)] = self

    def take(self, nbytes: int) -> tuple[Lease, list[Segment]]:
        """Lease a buffer of at least ``nbytes`` bytes.

        Returns
        -------
        lease : Lease
        dropped : list of Segment
            Buffers given up; the caller tells the workers.

        Raises
        ------
        SharedMemoryError
            If a new buffer cannot be had.
        """
        while self._ended:
            ended = self._leases.pop(id(self._ended.popleft()), None)
            if ended is not None:
                self._take_back(ended)
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
        root = segment.root()
        record = _Record(weakref.ref(root, self._ended.append), segment)
        self._leases[id(record.reference)] = record
        return Lease(segment, root, record), dropped

    def _take_back(self, record: _Record) -> None:
        is_forked = record.delivered_at not in (None, forks.count)
        (self._retired if is_forked else self._idle).append(record.segment)

    def give_back(self, lease: Lease) -> None:
        """Take a buffer back whose call has failed: a traceback may keep the root. Safe to repeat."""
        for key, record in list(self._leases.items()):
            if record.reference() is lease.root:
                del self._leases[key]
                self._take_back(record)

    def prepare_fork(self) -> list[MappedFile]:
        """Return the memory of the results that the child will hold; ``forks.count`` counts the fork already."""
        mappings = []
        for record in list(self._leases.values()):
            mapping = record.segment.mapping
            if record.reference() is not None:
                if record.delivered_at is not None and mapping is not None:
                    mappings.append(mapping)
            elif record.delivered_at == forks.count - 1:  # it has ended, and no child has seen it
                record.delivered_at = forks.count
        return mappings

    def close(self) -> None:
        """Drop everything; leased buffers live on in the views that the user holds."""
        for record in self._leases.values():
            mapping = record.segment.release()
            if mapping is not None:
                _outlived[id(mapping)] = mapping
        _pools.pop(id(self), None)
        for segment in (*self._idle, *self._retired):
            segment.close()
        self._leases.clear()
        self._idle.clear()
        self._retired.clear()


def before_fork() -> None:
    """Keep what the parent and the child will write into living results from one another; copies nothing.

    Workers are done with them, so each result's own pages can be mapped again in their place, now privately.
    """
    forks.count += 1  # first: whatever breaks this off, no buffer is used again that a child may hold
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
