"""The memory of calls: lanes, which are what a call in flight has to itself, and large results.

A large result is a view on a shared buffer, which is used again when the last view is gone.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk._engine.rows import Shares
from synk._engine.things import Thing
from synk._wire.mapping import MappedFile
from synk._wire.memory import Segment, forks
from synk._wire.orders import Down
from synk.communicators._layout import required_nbytes
from synk.communicators._rendezvous import reset, set_abort

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


_SLACK_NBYTES = 1 << 24
_COLLECTIVE_RANK_NBYTES = 1 << 22


class Joint(Thing):
    """The memory in which the functions of one lane communicate."""

    kind = "lane"
    is_arena = False
    """Whether the program only reserves the memory, because each node has its own."""

    def __init__(self, engine: Any, index: int) -> None:
        nbytes, number = required_nbytes(engine.world_size, _COLLECTIVE_RANK_NBYTES), next(engine.numbers)
        self.segment = Segment.create(nbytes, is_worker_writable=True, is_arena=self.is_arena, segment_id=number)
        self._index, self._engine = index, engine
        super().__init__(engine, [self.segment])

    def told(self, rank: int) -> tuple[Any, Sequence[Segment]]:
        return (self._index, self.segment.id), ()

    def abort(self) -> None:
        """Have ranks that wait for others give up."""
        set_abort(self.segment, self._engine.processes.eventfds)

    def reset(self) -> None:
        """Let ranks communicate again."""
        reset(self.segment, self._engine.world_size)


class Lane:
    """What a call in flight has to itself: the memory of its arguments, and on each rank the slot of its outputs.

    Attributes
    ----------
    call : Call or None
        The last call that took the lane, until it has ended.
    staging : Segment or None
    slots : dict of int to Segment
        By rank: memory that the rank has made.
    """

    def __init__(self, engine: Any, index: int) -> None:
        self._engine, self.index = engine, index
        self.call: Any = None
        self.staging: Segment | None = None
        self.slots: dict[int, Segment] = {}
        self.shares: Shares | None = None
        self.joint: Joint | None = None
        self.down, self.up = engine.processes.blocks(index)
        self.first_down = self.down[0]

    def staged(self, nbytes: int) -> Segment:
        """Return staging memory of at least ``nbytes`` bytes."""
        old = self.staging
        if old is None or old.nbytes < nbytes:
            wanted = max(nbytes, 1 << 16) if old is None else max(nbytes, min(2 * old.nbytes, nbytes + _SLACK_NBYTES))
            self.staging = Segment.create(wanted, segment_id=next(self._engine.numbers))
            self.staging.is_staging = True
            if old is not None:
                self._engine.free(old)
        assert self.staging is not None
        return self.staging

    def joined(self) -> Joint:
        """Return what ranks must know of the lane for ``synk.comm``."""
        if self.joint is None:
            self.joint = self._engine.joint_type(self._engine, self.index)
        return self.joint

    def abort(self) -> None:
        """Have ranks that wait for others in the lane give up, until :meth:`begin_anew`."""
        if self.joint is not None:
            self.joint.abort()

    def begin_anew(self) -> None:
        """Let ranks communicate as in a new lane. None of them is in a call of the lane."""
        if self.joint is not None:
            self.joint.reset()

    def show(self, shares: Shares) -> None:
        """Write the rows of all ranks where ``synk.comm`` looks for them."""
        running = dict(zip(shares.ranks, shares.rows))
        world_size = len(shares.bounds)
        self.down[:, Down.PARTICIPATES] = [rank in running for rank in range(world_size)]
        self.down[:, Down.ROWS] = [running.get(rank, 0) for rank in range(world_size)]
        self.shares = shares
