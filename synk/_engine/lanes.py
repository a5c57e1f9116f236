"""Lanes: what a call in flight has to itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synk._engine.rows import Shares
from synk._engine.things import Thing
from synk._wire.control import Down
from synk._wire.memory import Segment
from synk.communicators._layout import required_nbytes
from synk.communicators._rendezvous import reset, set_abort

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
