"""What a call in flight has to itself on its rank, for ``synk.comm``: words in shared memory, and a communicator."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from synk._wire.control import Down, control_blocks
from synk._wire.memory import Segment

_CALL, _GROUP = int(Down.CALL), int(Down.GROUP)


class RankLane:
    """One lane.

    Attributes
    ----------
    called : RankPlan or None
        The plan of the last call.
    left, sleeps : memoryview of int64
        The words by which a rank goes through a call without communicating; see ``Rendezvous.skip_words``.
    kept : dict of int to array
        The large outputs of the last call that are still on the device, by position; an exception where that cannot be.
    is_own : bool
        Whether nobody else refers to them.
    """

    def __init__(self, index: int, rank: int, world_size: int, control: Segment) -> None:
        self.index, self._rank = index, rank
        self.down, self.up = control_blocks(control.buffer, world_size, index)
        self.first_down = memoryview(self.down[0])
        self.own_up = memoryview(self.up[rank])
        self.collective: Segment | None = None
        self.communicator: Any = None
        self.has_waited = False
        self.left, self.sleeps = (memoryview(np.zeros(count, np.int64).data) for count in (world_size, 0))
        self.called: Any = None
        self.waited_ns = 0
        self.kept: dict[int, Any] = {}
        self.is_own = False
        self._ranks: tuple[int, tuple[int, ...]] = -1, ()

    @property
    def has_group(self) -> bool:
        """Whether NCCL joins the ranks of the current call."""
        return bool(self.first_down[_GROUP])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run the current call, ascending."""
        call = self.first_down[_CALL]
        if self._ranks[0] != call:
            self._ranks = call, tuple(self.rows())
        return self._ranks[1]

    def rows(self) -> dict[int, int]:
        """Return the number of rows of each rank that runs the current call."""
        return {rank: row[Down.ROWS] for rank, row in enumerate(self.down.tolist()) if row[Down.PARTICIPATES]}

    def note_waits(self, waited_ns: int) -> None:
        """Note how long this rank has waited for others in the call."""
        self.has_waited = waited_ns > 0
        self.waited_ns = waited_ns

    def wake_sleepers(self) -> None:
        """Wake peers that may wait for this rank, which has left the call."""
        if reduce(or_, self.sleeps, 0) & 1:
            self.communicator.wake_sleepers()
