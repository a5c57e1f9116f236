"""What the ranks of a call do among themselves, without the program: they run collectives, and leave.

Each call in flight has words in shared memory and a communicator to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from synk._pure.environment import num_cores
from synk._rank.functions import LoadedFunction
from synk._wire.memory import Segment
from synk._wire.orders import Down, control_blocks
from synk.backends import Backend
from synk.communicators._collectives import Collectives
from synk.communicators._host import HostCommunicator
from synk.communicators._rendezvous import Aborted
from synk.communicators._shm import ShmCommunicator, ShortPath
from synk.communicators._user_arrays import StagedArrays, UserArrays
from synk.errors import CollectiveMismatch

if TYPE_CHECKING:
    from synk.cuda._collectives import NcclCollectives
    from synk.cuda._cupy import CupyBackend
    from synk.cuda._group import WorkerGroup


_CALL, _GROUP = int(Down.CALL), int(Down.GROUP)  # members of an enumeration are slow to look up


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

    def wake_sleepers(self) -> None:
        """Wake peers that may wait for this rank, which has left the call."""
        if reduce(or_, self.sleeps, 0) & 1:
            self.communicator.wake_sleepers()


# How long a rank waits awake for another one at most. Longer times gained nothing more.
AWAKE_S = 200e-6


class Peers:
    """The other ranks, as this one sees them.

    Parameters
    ----------
    rank, world_size : int
    backend : Backend
    down, up : ndarray
        The control blocks of lane 0.
    eventfds : sequence of int
        One for each rank, by which ranks wake each other in collectives inside functions.

    Attributes
    ----------
    patience_s : float
        How long this rank waits awake for orders.
    group : WorkerGroup or None
        The NCCL group.
    is_communicating : bool
        Whether the current call has used ``synk.comm``.
    current : Collectives or None
        Of the current call, once it communicates.
    short_path : ShortPath or None
        The quick way for messages of plain arrays, once the current call communicates.
    """

    def __init__(
        self, rank: int, world_size: int, backend: Backend, down: np.ndarray, up: np.ndarray, eventfds: Sequence[int]
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._backend = backend
        self._down, self._up = down, up
        self._eventfds = eventfds
        self.patience_s = 0.0
        self.group: WorkerGroup | None = None
        self.is_communicating = False
        self.short_path: ShortPath | None = None
        self.current: Collectives | None = None

    def close(self) -> None:
        if self.group is not None:
            self.group.leave()

    def complete(self, lane: Any) -> None:
        """Finish what the function, which has communicated and returned, has started with ``synk.comm``."""
        assert lane.communicator is not None
        lane.communicator.complete()
        self.give_up_started(lane)  # some may be left if the function caught an error
        if self.current is not None:
            self.current.join_communication()

    def give_up_started(self, lane: Any) -> None:
        """Give the NCCL group up if this rank leaves with collectives in flight.

        Other ranks may have launched their part of one already, and their devices would wait for this rank for ever.
        """
        has_started = self.is_communicating and lane.communicator is not None and lane.communicator.has_started
        if has_started and self.group is not None and lane.has_group:
            self.group.give_up()

    def leave_call(self, lane: Any) -> None:
        """Say that this rank has left the call, so that no rank waits for it. Sleepers are woken after the reply."""
        rank, call, lane.waited_ns = self._rank, lane.first_down[_CALL], 0
        if self.is_communicating:
            assert lane.communicator is not None
            self.is_communicating = False
            self.short_path = self.current = None
            lane.communicator.end()
            patience = lane.communicator.patience
            lane.waited_ns, patience.waited_ns = patience.waited_ns, 0
        lane.left[rank] = call  # last: from here on no other rank counts on this one

    # -- collectives --------------------------------------------------------------------------------------------------

    def connect(self, lane: Any, segment: Segment) -> None:
        """Have the functions of a lane communicate through a segment from now on."""
        lane.collective = segment
        lane.communicator = ShmCommunicator(segment, self._rank, self._world_size, self._eventfds, self._awake_s())
        lane.left, lane.sleeps = lane.communicator.skip_words()

    def _awake_s(self) -> float:
        """Return how long this rank waits awake for another one at most."""
        # With fewer cores than ranks, a rank that waits awake would keep its core from the very rank it waits for.
        return min(self.patience_s, AWAKE_S) if self._world_size <= num_cores() else 0.0

    def collectives(self, lane: Any, function: LoadedFunction) -> Collectives:
        """Return the collectives of the current call. The first use in a call joins it."""
        if self.current is not None:
            return self.current
        communicator = lane.communicator
        assert communicator is not None
        ranks = lane.ranks
        communicator.begin(ranks, lane.first_down[Down.CALL])
        if lane.has_group and self.group is not None and self.group.communicator is not None:
            self.is_communicating = True
            framework = (function.to_framework, function.from_framework)
            self.current = self._by_nccl(self.group, framework, communicator)
            return self.current
        return self._opened(communicator, ranks, function)

    def _opened(self, communicator: HostCommunicator, ranks: tuple[int, ...], function: LoadedFunction) -> Collectives:
        """Return the collectives of a call that a communicator of host memory has begun."""
        self.is_communicating = True
        framework = (function.to_framework, function.from_framework)
        if self._backend.is_device:
            arrays: UserArrays = StagedArrays(self._backend, framework)
        else:
            arrays = UserArrays(self._backend, framework, communicator.results)
        current = self.current = Collectives(communicator, arrays, len(ranks))
        is_plain = not self._backend.is_device and framework == (None, None)
        if is_plain and isinstance(communicator, ShmCommunicator):
            self.short_path, current.at_once = communicator.short_path, communicator.at_once
        return current

    def _by_nccl(self, group: WorkerGroup, *of_call: Any) -> NcclCollectives:
        from synk.cuda._collectives import NcclCollectives

        return NcclCollectives(group, cast("CupyBackend", self._backend), *of_call)

    def check_group(self, lane: Any) -> None:
        """Raise if the group broke in a call that used it."""
        if self.group is not None and lane.has_group:
            self.group.check()

    def is_collateral(self, error: BaseException) -> bool:
        """Whether an error means that this rank failed only because another one did."""
        if isinstance(error, (Aborted, CollectiveMismatch)):
            return True
        return self.group is not None and self.group.is_lost_peer(error)
