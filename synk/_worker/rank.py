"""What a rank is: its lanes, what it holds, its variables, its peers, and how it ends what its functions may do.

A worker learns everything from its messages (``synk._worker.loop.dispatch``); it never asks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from synk._wire.control import NUM_LANES, Phase, Up
from synk._wire.memory import Segment
from synk._wire.messages import HAS_BODY, IS_COLLATERAL, LANE_SHIFT, Kind, Status
from synk._worker import failpoints as _failpoints
from synk._worker.call.execute import Executor, WorkerLane
from synk._worker.call.peers import Peers
from synk._worker.comm.collectives import Collectives
from synk._worker.failures import pack_failure
from synk._worker.held.held import Held
from synk._worker.held.plans import LoadedFunction, PreparedPlan
from synk._worker.held.residents import Residents
from synk._worker.held.settings import Settings
from synk._worker.held.variables import Replica, VariableStore
from synk.backends import Backend, DeviceBackend, backend_module
from synk.errors import SynkError

Reply = tuple[Status, int, Any]
Doorbell = tuple[int, int, int, int]
"""kind, flags, sequence, value"""


RSS_INTERVAL_NS = 1_000_000_000

_PHASE, _FUNCTION = int(Up.PHASE), int(Phase.FUNCTION)  # members of an enumeration are slow to look up


class Interrupted(KeyboardInterrupt):
    """The master asked this worker to end its call."""


class DeviceLost(SynkError):
    """The device failed in a way that only a new process can get over."""


def _replica_type(backend: Backend) -> type[Replica]:
    if not backend.is_device:
        return Replica
    from synk._worker.comm.device_variables import DeviceReplica

    return DeviceReplica


class Worker:
    """One rank. Its parts know only what lies below them; who acts on messages is handed all of it.

    Parameters
    ----------
    rank, world_size : int
    backend_name, device : str
    control : Segment
        The numbers of all ranks; see ``synk._wire.control``.
    eventfds : sequence of int
        One per rank, to wake one another in collectives inside functions.

    Attributes
    ----------
    lanes : list of WorkerLane
    lane : WorkerLane
        That of the message under way.
    held : Held
    variables : VariableStore
    residents : Residents
    settings : Settings
    peers : Peers
    mapped : LoadedFunction or None
        The function of a map, while this rank runs some of its items.
    check : Halves or None
        While the function of a call is checked on trial; see ``synk._worker.loop.halves``.
    sequence : int
        Of the message under way.
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
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.is_inline = False  # whether it lives in the master's process
        self.pid = os.getpid()  # a function may fork; what it makes so is no worker
        self._control = control  # keeps the mapping alive
        self.backend = backend_module(backend_name).open_device(device)
        self.lanes = [WorkerLane(index, rank, world_size, control, self.backend) for index in range(NUM_LANES)]
        self.lane = self.lanes[0]
        self.used_lanes: set[int] = set()  # in which something may be remembered of a call
        self.down, self.up = self.lane.down, self.lane.up
        self.own_down, self.own_up = memoryview(self.down[rank]), self.lane.own_up
        self.own_up[Up.PHASE] = Phase.IDLE  # whatever the one was at in whose place this one was started
        self.held = Held(self.backend)
        self.variables = VariableStore(rank, self.held.segments, self.down, self.backend, _replica_type(self.backend))
        self.residents = Residents()
        self.settings = Settings()
        self.peers = Peers(rank, world_size, self.backend, self.down, self.up, eventfds)
        self.failpoint: Callable[[str], None] = _failpoints.nothing
        self.peek: Callable[[], Doorbell | None] = _see_nothing
        if self.backend.is_device:
            for lane in self.lanes:
                lane.executor.inputs.look_ahead = self._look_ahead
        self.mapped: LoadedFunction | None = None
        self.check: Any = None
        self.seed: Sequence[int] = (0,)  # and the key of this rank's own stream
        self.sequence = -1
        self.is_interruptible = False
        self.num_deferred = 0  # interrupts that came while they could not be raised
        self.is_held = False
        self.num_held = 0
        self.num_collectives = 0  # that functions have begun
        self.rss_measured = 0

    def close(self) -> None:
        """Let go of the device and of all memory; where the process ends anyway nobody needs to."""
        self.peers.close()
        self.variables.close()
        self.backend.close()
        self.held.segments.clear()

    @functools.cached_property
    def rng(self) -> np.random.Generator:
        """This rank's own generator of random numbers."""
        seed, *key = self.seed
        return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(key)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those among which a function counts: of the call under way; all outside of one, and in an item of a map."""
        if self.mapped is None and self.own_up[_PHASE] == _FUNCTION:
            return self.lane.ranks
        return tuple(range(self.world_size))

    @property
    def executor(self) -> Executor:
        return self.lane.executor

    @property
    def function_name(self) -> str:
        if self.mapped is not None:
            return self.mapped.name
        called = self.lane.called
        return called.function.name if called is not None else ""

    def collectives(self) -> Collectives:
        """Return the collectives of the call under way, for ``synk.comm``."""
        self.num_collectives += 1
        self.check_called()
        if self.check is not None:
            raise self.check.refused()
        if self.variables.is_sliced:
            raise ValueError(
                f"cannot communicate in {self.function_name!r}: the call has num_slices above 1, so each rank runs the "
                "function several times, and not all of them equally often. Call it with num_slices=1."
            )
        assert self.lane.called is not None
        if self.backend.is_device:
            cast(DeviceBackend, self.backend).enter_thread()
        return self.peers.collectives(self.lane, self.lane.called.function)

    def check_called(self) -> None:
        """Refuse what has a meaning only in a call, which all ranks run together."""
        if self.mapped is not None:
            raise ValueError(
                f"cannot communicate in {self.function_name!r}: synk.map runs it for each item on one worker, while "
                "the others are at other items, expected a function that needs no other rank. Use synk.function for "
                "one that all ranks run together."
            )

    # -- between calls ------------------------------------------------------------------------------------------------

    def enter_lane(self, lane: int, kind: int, *, is_alone: bool) -> None:
        """Act in a lane from now on. ``is_alone``: calls in the others are over."""
        self.lane = self.lanes[lane]
        if self.used_lanes != {lane}:
            others = self.used_lanes - {lane}
            if is_alone:
                self.forget_lanes(others)
            elif kind in (Kind.CALL, Kind.CHECK):
                self._detach_outputs(others)
            self.used_lanes.add(lane)

    def forget_lanes(self, lanes: set[int]) -> None:
        """Drop what is remembered of calls that are over: outputs of a call that another rank failed in, views."""
        for index in lanes:
            self.lanes[index].executor.forget()
            self.lanes[index].called = None
        self.used_lanes -= lanes

    def _detach_outputs(self, lanes: set[int]) -> None:
        """Before the user's code runs again: let it change nothing of what calls before have returned."""
        with self.backend.running():
            for index in lanes:
                self.lanes[index].executor.outputs.detach()

    def tidy(self, kind: int, status: Status) -> None:
        """After the reply: drop outputs that nobody needs any more. Finalizers of the user's objects run here."""
        is_call = kind in (Kind.CALL, Kind.PUBLISH, Kind.ASSEMBLE)
        executor = self.lane.executor
        if is_call and status == Status.DONE and not executor.outputs.is_waiting:
            executor.forget()

    def settle_inputs(self, prepared: PreparedPlan) -> None:
        """See to what a function keeps of its inputs, so that later calls do not change it, nor it them."""
        is_kept = self.executor.settle_inputs(prepared)
        if prepared.function.to_framework is not None:
            self.held.kept_data |= prepared.loans.kept_data()
        if is_kept:
            self.held.map_again(prepared.loans.staging)

    # -- the user's code, which may raise anything and be interrupted -------------------------------------------------

    def guarded(self, action: Callable[[], Any]) -> Reply:
        """Run code that may be the user's: an exception or an interrupt becomes a reply."""
        try:
            try:
                self.is_interruptible = True
                body = action()
            except Interrupted:
                raise
            except BaseException as error:  # SystemExit and the like must not end a worker
                return self.failed(error)
            finally:
                self.is_interruptible = False
        except Interrupted:
            self.is_interruptible = False
            self.recover("")
            return Status.INTERRUPTED, 0, None
        return Status.DONE, 0, body

    def failed(self, error: BaseException) -> Reply:
        """Return the reply that tells of an exception, and drop what its call has left."""
        # A rank that waits for one that failed fails too; only if nobody failed otherwise is it the cause.
        is_collateral = self.peers.is_collateral(error)
        error = self.backend.explain(error, repr(self.function_name))
        failure = pack_failure(error, self.rank, self.device, is_collateral=is_collateral)
        _drop_frames(error)
        self.recover(failure.traceback_text)
        return Status.ERROR, IS_COLLATERAL if is_collateral else 0, failure

    def recover(self, text: str) -> None:
        """After a call that did not end well: nothing of it is left on the device."""
        self.peers.give_up_started(self.lane)
        self.executor.forget()
        if not self.backend.recover():
            raise DeviceLost(f"{text}{self.device} reports errors to every call from now on: this worker ends.")

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Hold back an interrupt of the call under way while the body runs."""
        was_interruptible, self.is_interruptible = self.is_interruptible, False
        num_deferred = self.num_deferred
        try:
            yield
        finally:
            self.is_interruptible = was_interruptible
        if was_interruptible and self.num_deferred != num_deferred:
            self.interrupt()  # the signal came meanwhile, and not in an earlier body of this call

    def interrupt(self) -> None:
        """End the call under way, unless it is to finish its step first."""
        if self.is_held and not self.num_held:
            self.num_held = 1
            return
        raise Interrupted

    def hold_back(self, is_held: bool) -> None:
        """From now on hold an interrupt back, for the end of a step that this rank can finish by itself, or no longer.

        Weaker than :meth:`uninterrupted`: a second interrupt, which the master sends to a rank that has not answered
        the first one, is heard. So code that never ends can be ended.
        """
        was_interrupted = bool(self.num_held)
        self.is_held, self.num_held = is_held, 0
        if was_interrupted:
            raise Interrupted

    def measure(self, now_ns: int) -> None:
        """Note how much memory this process holds."""
        self.rss_measured = now_ns
        self.own_up[Up.RSS] = _resident_nbytes()

    # -- the call that comes next -------------------------------------------------------------------------------------

    def _look_ahead(self, is_hurried: bool) -> None:
        """Bring the inputs of the next call to the device while this one computes, where it has arrived already."""
        with self.uninterrupted():  # what is taken from the pipe must not be lost
            doorbell = self.peek()
        if doorbell is None:
            return
        kind, flags, _, plan_id = doorbell
        if kind in (Kind.CALL, Kind.PREFETCH) and not flags & HAS_BODY:
            self.prefetch(flags >> LANE_SHIFT, plan_id, is_hurried=is_hurried)

    def prefetch(self, lane: int, plan_id: int, *, is_hurried: bool = False) -> None:
        """Bring the inputs of a call that will come, if it can be done."""
        prepared = self.held.plans.get(plan_id)
        if prepared is not None:
            self.used_lanes.add(lane)
            self.lanes[lane].executor.inputs.prefetch(prepared, is_hurried=is_hurried)


def _see_nothing() -> None:
    return None


def _drop_frames(error: BaseException) -> None:
    """Break the links from an exception to the frames it went through, so that their arrays are freed now."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        item = pending.pop()
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        BaseException.with_traceback(item, None)  # not by assignment: an exception's class may be frozen
        pending += [item.__cause__, item.__context__]


def _resident_nbytes() -> int:
    """Resident memory of this process, for the report of one that is killed."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # out of descriptors: a report is not worth a failed call
        return 0
