"""The other ranks of a call, as this one reaches them without the master: how far each is, and collectives."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from synk._pure.cores import num_cores
from synk._wire.control import Down
from synk._wire.memory import Fence, Segment
from synk._wire.messages import JoinOrder
from synk._worker.call.execute import WorkerLane
from synk._worker.comm.collectives import Collectives
from synk._worker.held.plans import LoadedFunction
from synk.backends import Backend, DeviceBackend
from synk.communicators._shm import Aborted, ShmCommunicator
from synk.communicators._short_path import ShortPath
from synk.errors import CollectiveMismatch

if TYPE_CHECKING:
    from synk._worker.comm.nccl_group import WorkerGroup

# The longest wait for another rank that is spent awake: longer ones gained nothing more.
_AWAKE_S = 200e-6


class Peers:
    """The other ranks.

    Parameters
    ----------
    rank, world_size : int
    backend : Backend
    down, up : ndarray
        The numbers of lane 0.
    eventfds : sequence of int
        One per rank, to wake one another in collectives inside functions.

    Attributes
    ----------
    patience_s : float
        How long this rank waits for the others' outputs before it replies without them.
    group : WorkerGroup or None
        That of NCCL.
    is_communicating : bool
        Whether the call under way has used ``synk.comm``.
    short_path : ShortPath or None
        Through which messages of plain arrays go, as soon as the call under way communicates.
    """

    def __init__(
        self, rank: int, world_size: int, backend: Backend, down: np.ndarray, up: np.ndarray, eventfds: Sequence[int]
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._backend = backend
        self._down, self._up = down, up
        self._eventfds = eventfds
        self._fence = Fence()
        self.patience_s = 0.0
        self.group: WorkerGroup | None = None
        self.is_communicating = False
        self.short_path: ShortPath | None = None
        self._collectives: Collectives | None = None  # of the call under way

    def close(self) -> None:
        if self.group is not None:
            self.group.leave()

    # -- how far each is ----------------------------------------------------------------------------------------------

    def meet(self, lane: WorkerLane) -> bool:
        """Tell the others that this rank's outputs are in its slot and look as before; return whether all say so.

        Waits awake and not for long: a rank that was too early is asked again by the master when all have replied.
        """
        call = lane.first_down[Down.CALL]
        published = lane.published
        self._fence()  # the outputs come before the word that tells of them
        published[self._rank] = call
        ranks = lane.executor.outputs.slots.participants
        end = time.monotonic() + self.patience_s
        while (words := {published[rank] for rank in ranks}) != {call}:
            if -call in words or time.monotonic() >= end:
                return False
            os.sched_yield()
        self._fence()
        return True

    def complete(self, lane: WorkerLane) -> None:
        """Bring what the function has started by ``synk.comm`` to its end, now that it has returned."""
        if self.is_communicating:
            assert lane.communicator is not None
            lane.communicator.complete()
            self.give_up_started(lane)  # the function has got over an error
            if self._collectives is not None:
                self._collectives.join_communication()

    def give_up_started(self, lane: WorkerLane) -> None:
        """Before this rank leaves with collectives that it has started: others may have given them to NCCL already."""
        has_started = self.is_communicating and lane.communicator is not None and lane.communicator.has_started
        if has_started and self.group is not None and lane.executor.outputs.slots.has_group:
            self.group.give_up()

    def leave_call(self, lane: WorkerLane) -> None:
        """Let nobody wait for this rank any longer."""
        call = lane.first_down[Down.CALL]
        if lane.published[self._rank] != call:
            lane.published[self._rank] = -call
        if lane.communicator is not None:
            if self.is_communicating:
                self.is_communicating = False
                self.short_path = self._collectives = None
                lane.communicator.end()
            else:
                lane.communicator.skip(call)

    # -- collectives --------------------------------------------------------------------------------------------------

    def connect(self, lane: WorkerLane, segment: Segment) -> None:
        """Have the functions of a lane communicate through a segment from now on."""
        # A rank that waits awake would keep its core from the very one that it waits for, where there are fewer cores.
        patience_s = min(self.patience_s, _AWAKE_S) if self._world_size <= num_cores() else 0.0
        lane.collective = segment
        lane.communicator = ShmCommunicator(segment, self._rank, self._world_size, self._eventfds, patience_s)

    def collectives(self, lane: WorkerLane, function: LoadedFunction) -> Collectives:
        """Return the collectives of the call under way; the first use in a call joins its group."""
        if self._collectives is not None:
            return self._collectives
        communicator = lane.communicator
        assert communicator is not None
        slots, ranks = lane.executor.outputs.slots, lane.ranks
        communicator.begin(ranks, lane.first_down[Down.CALL])
        self.is_communicating = True
        framework = (function.to_framework, function.from_framework)
        if self._backend.is_device:
            from synk._worker.comm.nccl_group import device_collectives

            group = self.group if slots.has_group else None
            self._collectives = device_collectives(self._backend, communicator, group, framework)
        else:
            self._collectives = Collectives(communicator, self._backend, len(ranks), framework, host=communicator)
            self.short_path = communicator.short_path if framework == (None, None) else None
        return self._collectives

    def join(self, order: JoinOrder, lanes: Sequence[WorkerLane]) -> dict[str, Any]:
        """Make the id of a group of NCCL, or join one, and have all lanes reduce by it."""
        backend = cast(DeviceBackend, self._backend)
        if self.group is None:
            from synk._worker.comm.nccl_group import WorkerGroup  # CPU workers need none of it

            self.group = WorkerGroup(self._rank, self._world_size, self._down, self._up, backend)
        if order.unique_id is None:
            return {"unique_id": self.group.new_id()}
        with backend.running():
            library = self.group.join(order.number, order.unique_id)
        for lane in lanes:
            lane.executor.outputs.large.collectives = self.group.collectives()
        return {"library": library}

    def check_group(self, lane: WorkerLane) -> None:
        """Raise where the group broke in a call that has used it."""
        if self.group is not None and lane.executor.outputs.slots.has_group:
            self.group.check()

    def is_collateral(self, error: BaseException) -> bool:
        """Whether this rank failed only because another one did."""
        if isinstance(error, (Aborted, CollectiveMismatch)):
            return True
        return self.group is not None and self.group.is_lost_peer(error)
