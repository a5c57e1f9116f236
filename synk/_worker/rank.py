"""One rank and its parts: lanes, held objects, variables, peers. The parts find each other through this one object.

A worker learns everything from its messages (``synk._worker.loop.dispatch``). It never asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any

from synk._wire.control import NUM_LANES, Down, Phase, Up
from synk._wire.memory import Segment
from synk._wire.messages import HAS_BODY, LANE_SHIFT, Kind
from synk._worker import failpoints as _failpoints
from synk._worker.call.execute import PlanExecutor, WorkerLane
from synk._worker.call.outputs import Stage
from synk._worker.call.peers import Peers
from synk._worker.held.held import Held
from synk._worker.held.plans import LoadedFunction, PreparedPlan
from synk._worker.held.residents import RankResidents
from synk._worker.held.settings import Settings
from synk._worker.held.variables import Replica, VariableStore
from synk._worker.member import Member
from synk._worker.process import resident_nbytes
from synk.backends import Backend, backend_module

Doorbell = tuple[int, int, int, int]
"""kind, flags, sequence, value"""

_RSS_INTERVAL_NS = 1_000_000_000

# Members of an enumeration are slow to look up.
_PHASE, _FUNCTION = int(Up.PHASE), int(Phase.FUNCTION)
_ALL_ROWS = int(Down.ALL_ROWS)
_CALL = int(Kind.CALL)
_OUTPUTS_DONE = Stage.DONE


def _replica_type(backend: Backend) -> type[Replica]:
    if not backend.is_device:
        return Replica
    from synk._worker.held.device_variables import DeviceReplica

    return DeviceReplica


class Worker(Member):
    """One rank. Its parts know only what lies below them; the code that acts on messages is handed the whole rank.

    It has many attributes, because it is the one object through which code on a rank finds everything else: who the
    rank is, its parts, and the state of the current message.

    Parameters
    ----------
    rank, world_size : int
    backend_name, device : str
    control : Segment
        The numbers of all ranks; see ``synk._wire.control``.
    eventfds : sequence of int
        One for each rank, by which ranks wake each other in collectives inside functions.
    first_rank, total_ranks : int, optional
        On one of several nodes: the rank of the node's first worker, and the number of workers of all nodes.

    Attributes
    ----------
    rank, world_size : int
        Its position among the workers of its session, and their number.
    lanes : list of WorkerLane
    lane : WorkerLane
        The lane of the current message.
    held : Held
    variables : VariableStore
    residents : RankResidents
    settings : Settings
    peers : Peers
    mapped : LoadedFunction or None
        The function of a map, while this rank runs some of its items.
    process_group : object or None
        The ``torch.distributed`` group that functions have asked for; see ``synk.torch._process_group``.
    sequence : int
        The number of the current message. Numbers wrap.
    num_messages : int
        How many messages have come so far, with the current one.
    is_interruptible : bool
        Whether an interrupt of this message may be raised where it arrives, because the user's code is running.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        backend_name: str,
        device: str,
        control: Segment,
        eventfds: Sequence[int],
        first_rank: int = 0,
        total_ranks: int = 0,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.first_rank, self.total_ranks = first_rank, total_ranks or world_size
        self.device = device
        self.is_copy = False  # a function may fork: the child is no worker
        self.backend = backend_module(backend_name).open_device(device)
        self.lanes = [WorkerLane(index, rank, world_size, control, self.backend) for index in range(NUM_LANES)]
        self.lane = self.lanes[0]
        self.used_lanes = 0  # the bits of the lanes that may still hold something of a call
        self.down, self.up = self.lane.down, self.lane.up
        self.own_down, self.own_up = memoryview(self.down[rank]), self.lane.own_up
        self.own_up[Up.PHASE] = Phase.IDLE  # a dead worker that this one replaces may have left another phase
        self.held = Held(rank, self.backend)
        self.variables = VariableStore(rank, self.held.segments, self.down, self.backend, _replica_type(self.backend))
        self.residents = RankResidents()
        self.settings = Settings()
        of_this_node = rank, world_size, self.backend, self.down, self.up, eventfds
        if self.has_other_nodes:
            from synk._worker.call.far_peers import FarPeers

            self.peers: Peers = FarPeers(self.first_rank, self.total_ranks, *of_this_node)
        else:
            self.peers = Peers(*of_this_node)
        self.failpoint = _failpoints.nothing
        self.peek: Callable[[], Doorbell | None] = _see_nothing
        if self.backend.is_device:
            for lane in self.lanes:
                lane.executor.inputs.look_ahead = self._look_ahead
        self.mapped: LoadedFunction | None = None
        self.process_group: Any = None
        self.seed: Sequence[int] = (0,)  # the runtime's seed, then the key of this rank's own stream
        self.sequence = -1
        self.num_messages = 0
        self.is_interruptible = False
        self.num_deferred = 0  # interrupts that came while they could not be raised
        self.is_held = False  # whether a first interrupt waits for the end of a step; see hold_back
        self.is_due = False  # whether one waits now
        self.num_collectives = 0  # rises with each that functions begin
        self.rss_measured = 0

    def close(self) -> None:
        """Release the device and all memory. A process that ends anyway need not call this."""
        if self.process_group is not None:
            self.process_group.close()
        self.peers.close()
        self.variables.close()
        self.backend.close()
        self.held.segments.clear()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that ``synk.comm`` counts: those of the current call or, outside a call and in a map, all."""
        if self.mapped is None and self.own_up[_PHASE] == _FUNCTION:
            return self.peers.ranks(self.lane)
        return tuple(range(self.total_ranks))

    @property
    def number(self) -> int:
        """Its rank as users see it, which counts the workers of all nodes."""
        return self.first_rank + self.rank

    @property
    def has_other_nodes(self) -> bool:
        return self.total_ranks > self.world_size

    @property
    def total_rows(self) -> int:
        """The rows of all ranks in the call."""
        return self.lane.first_down[_ALL_ROWS] if self.has_other_nodes else sum(self.lane.rows().values())

    @property
    def executor(self) -> PlanExecutor:
        return self.lane.executor

    # -- between calls ------------------------------------------------------------------------------------------------

    @property
    def failpoint(self) -> Callable[[str], None]:
        """Called with the name of each step of a message. Does nothing except in tests of faults (``is_armed``)."""
        return self._failpoint

    @failpoint.setter
    def failpoint(self, failpoint: Callable[[str], None]) -> None:
        self._failpoint, self.is_armed = failpoint, failpoint is not _failpoints.nothing

    def enter_lane(self, kind: int, *, is_alone: bool) -> None:
        """Switch to the lane of this message; other lanes may still hold something of earlier calls.

        With ``is_alone``, the calls in the other lanes are over.
        """
        others = [lane for lane in self.lanes if lane.bit & self.used_lanes and lane is not self.lane]
        # Before the call runs: if it is broken off, a later message still finds what it has left in this lane.
        self.used_lanes |= self.lane.bit
        if is_alone:
            self.forget_lanes(others)
        elif kind == _CALL:  # the user's code is about to run again, and may change what it has returned
            for lane in others:
                outputs = lane.executor.outputs
                if outputs.stage:
                    with self.backend.running():
                        outputs.detach()

    def forget_lanes(self, lanes: Iterable[WorkerLane]) -> None:
        """Drop what lanes hold of calls that are over: views, and outputs of a call in which another rank failed."""
        for lane in lanes:
            lane.executor.forget()
            lane.called = None
            self.used_lanes &= ~lane.bit

    def tidy(self, kind: int) -> None:
        """After the reply, wake peers and drop outputs that nobody needs. Finalizers of the user's objects run here."""
        lane = self.lane
        if kind == _CALL:
            if reduce(or_, lane.sleeps, 0) & 1:
                assert lane.communicator is not None
                # After the reply, so that the master does not wait for it. A rank that falls asleep just now and is
                # missed looks again by itself.
                lane.communicator.wake_sleepers()
            ended = lane.executor.ended
            if ended - self.rss_measured > _RSS_INTERVAL_NS:
                self.rss_measured = ended
                self.own_up[Up.RSS] = resident_nbytes()
        if lane.executor.outputs.stage is _OUTPUTS_DONE:
            lane.executor.forget()

    def settle_inputs(self, prepared: PreparedPlan) -> None:
        """Give inputs that the function has kept pages of their own, and have later calls use another mapping."""
        segment = self.executor.settle_inputs(prepared)
        if segment is not None:
            self.held.map_again(segment)

    # -- interrupts, which may come at any line of the user's code ---------------------------------------------------

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Hold back an interrupt of the current call while the body runs."""
        was_interruptible, self.is_interruptible = self.is_interruptible, False
        num_deferred = self.num_deferred
        try:
            yield
        finally:
            self.is_interruptible = was_interruptible
        if was_interruptible and self.num_deferred != num_deferred:
            self.interrupt()  # a signal came during this body, not during an earlier one of the call

    # -- the call that comes next -------------------------------------------------------------------------------------

    def _look_ahead(self, is_hurried: bool) -> None:
        """Bring the inputs of the next call to the device while this one computes, if its message has arrived."""
        with self.uninterrupted():  # a doorbell that was taken from the pipe must not be lost
            doorbell = self.peek()
        if doorbell is None:
            return
        kind, flags, _, plan_id = doorbell
        if kind in (Kind.CALL, Kind.PREFETCH) and not flags & HAS_BODY:
            self.prefetch(flags >> LANE_SHIFT, plan_id, is_hurried=is_hurried)

    def prefetch(self, lane: int, plan_id: int, *, is_hurried: bool = False) -> None:
        """Bring the inputs of a call that will come to the device, if this rank has its plan."""
        prepared = self.held.plans.get(plan_id)
        if prepared is not None:
            # From here on this lane holds arrays of a call that has not begun. ``enter_lane`` must find them if the
            # call never comes.
            self.used_lanes |= self.lanes[lane].bit
            self.lanes[lane].executor.inputs.prefetch(prepared, is_hurried=is_hurried)


def _see_nothing() -> None:
    return None
