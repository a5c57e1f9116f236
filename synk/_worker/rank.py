"""A rank: acts on one message after the other. All of its state is in one object.

The path of a call here: doorbell -> (body: new segments, the plan) -> ``Executor.run`` -> ``Outputs.publish`` ->
(large outputs, where all ranks are as far: ``Outputs.assemble``) -> doorbell. A worker learns everything from its
messages; it never asks. It ends when the master says so, and when the master ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from synk._wire.cell import cell
from synk._wire.control import NUM_LANES, Down, Phase, Traits, Up, control_blocks, is_interrupted
from synk._wire.failures import Failure
from synk._wire.memory import Fence, Segment
from synk._wire.messages import (
    HAS_BODY,
    IS_ALONE,
    IS_ASSEMBLED,
    IS_COLLATERAL,
    LANE_SHIFT,
    Body,
    DeviceCollective,
    Fetch,
    JoinOrder,
    Kind,
    Plan,
    Status,
)
from synk._wire.steps import run_steps
from synk._worker import failpoints as _failpoints
from synk._worker.comm import HostCollectives
from synk._worker.execute import Executor
from synk._worker.failures import pack_failure
from synk._worker.pages import give_back, is_written
from synk._worker.plans import LoadedFunction, PreparedPlan
from synk._worker.received import Received
from synk._worker.variables import Replica, VariableStore
from synk.backends import Backend, DeviceBackend, open_backend
from synk.communicators._shm import Aborted, ShmCommunicator
from synk.errors import CollectiveMismatch, SerializationError, SharedMemoryError, SynkError

if TYPE_CHECKING:
    from synk._worker.device_collectives import DeviceCollectives
    from synk._worker.nccl_group import WorkerGroup

Reply = tuple[Status, int, Any]
Doorbell = tuple[int, int, int, int]
"""kind, flags, sequence, value"""


RSS_INTERVAL_NS = 1_000_000_000


class Interrupted(KeyboardInterrupt):
    """The master asked this worker to end its call."""


class DeviceLost(SynkError):
    """The device failed in a way that only a new process can get over."""


def _replica_type(backend: Backend) -> type[Replica]:
    if not backend.is_device:
        return Replica
    from synk._worker.device_variables import DeviceReplica

    return DeviceReplica


class Outcome:
    """What a function returned or raised that the quiet way has run (``synk._worker.quiet``)."""

    def __init__(self, result: Any, failure: BaseException | None, function_ns: int) -> None:
        self._result = result
        self._failure = failure
        self.function_ns = function_ns

    def take(self) -> Any:
        """Return the result, of which nothing is held any more, or raise."""
        result, failure, self._result, self._failure = self._result, self._failure, None, None
        if failure is not None:
            raise failure
        return result


class WorkerLane:
    """What a call has to itself on its rank; see ``synk._master.lanes``."""

    def __init__(self, index: int, rank: int, world_size: int, control: Segment, backend: Backend) -> None:
        self.index = index
        self.down, self.up = control_blocks(control.buffer, world_size, index)
        self.executor = Executor(rank, backend, self.down)
        self.first_down = memoryview(self.down[0])
        self.own_up = memoryview(self.up[rank])  # stores through it cost a third of NumPy's
        self.published = memoryview(self.up.T[Up.PUBLISHED])
        self.communicator: ShmCommunicator | None = None
        self.called: PreparedPlan | None = None  # the plan of the last call


class Worker:
    """Everything a rank knows.

    Parameters
    ----------
    rank, world_size : int
    backend_name, device : str
    control : Segment
        The numbers of all ranks; see ``synk._wire.messages``.
    eventfds : sequence of int
        One per rank, to wake one another in collectives inside functions.
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
        self._control = control  # keeps the mapping alive
        self.backend = open_backend(backend_name, device)
        self.lanes = [WorkerLane(index, rank, world_size, control, self.backend) for index in range(NUM_LANES)]
        self.lane = self.lanes[0]  # that of the message under way
        self.down, self.up = self.lane.down, self.lane.up
        self.segments: dict[int, Segment] = {}
        self.functions: dict[int, LoadedFunction] = {}
        self.received = Received()
        self.plans: dict[int, PreparedPlan] = {}
        self.quiet: dict[int, Any] = {}  # by plan, those whose next call can be quiet
        self.failpoint: Callable[[str], None] = _failpoints.nothing
        self.peek: Callable[[], Doorbell | None] = _see_nothing
        if self.backend.is_device:
            for lane in self.lanes:
                lane.executor.inputs.look_ahead = self._look_ahead
        self.sequence = -1
        self.pid = os.getpid()  # a function may fork; what it makes so is no worker
        self.is_interruptible = False
        self.variables = VariableStore(rank, self.segments, self.down, self.backend, _replica_type(self.backend))
        self._eventfds = eventfds
        self._own_down = memoryview(self.down[rank])
        self._own_up = self.lane.own_up
        self._fence = Fence()
        self.patience_s = 0.0
        self.rss_measured = 0
        self.group: WorkerGroup | None = None
        self.is_communicating = False
        self.used_lanes: set[int] = set()  # in which something may be remembered of a call
        self.function: LoadedFunction | None = None
        self.kept_data: set[tuple[int, int, int]] = set()  # of which functions keep tensors; see Loans

    def close(self) -> None:
        """Let go of the device and of all memory; where the process ends anyway nobody needs to."""
        if self.group is not None:
            self.group.leave()
        self.variables.close()
        self.backend.close()
        self.segments.clear()

    # -- messages -----------------------------------------------------------------------------------------------------

    def map_segment(self, fd: int, segment_id: int, nbytes: int, is_writable: bool, is_staging: bool) -> Segment:
        """Return a segment that has arrived; what is only read is mapped so that nobody else sees what is written.

        Devices read such memory past the page tables of this process, so it is mapped as it is there.
        """
        is_private = not (is_writable or self.backend.is_device)
        segment = Segment(fd, nbytes, is_writable=is_writable, segment_id=segment_id, is_private=is_private)
        segment.is_staging = is_staging
        if not is_staging:  # which may have to be mapped again
            segment.close_fd()
        return segment

    def add_segment(self, segment: Segment) -> None:
        """Take in a segment that has arrived."""
        self.segments[segment.id] = segment
        if not segment.is_arena:  # arrays are copied from and to its parts, which come and go
            self.backend.note_segment(segment)

    @property
    def executor(self) -> Executor:
        return self.lane.executor

    def handle(
        self, kind: int, flags: int, sequence: int, value: int, body: Body | None
    ) -> tuple[Status, int, bytes | None]:
        """Act on one message; return ``(status, flags, body)`` of the reply. Never raises but what ends the process."""
        return self._finished(kind, self._act(kind, flags, sequence, value, body))

    def go_on(self, plan_id: int, sequence: int, outcome: Outcome) -> tuple[Status, int, bytes | None]:
        """Go on with a call whose function has been run, but has not done what it did the last time; as ``handle``."""
        return self._finished(Kind.CALL, self._call(plan_id, sequence, None, outcome))

    def _finished(self, kind: int, reply: Reply) -> tuple[Status, int, bytes | None]:
        """Return a reply as it is sent; what the function keeps of its inputs is seen to before."""
        status, reply_flags, content = reply
        del reply
        body = None
        if content is not None:
            status, reply_flags, body = pickle_reply(self, status, reply_flags, content)
            del content  # it may hold the function's inputs
        called = self.lane.called
        if kind == Kind.CALL and called is not None and called.loans.are_open():
            try:
                self._settle_inputs(called)  # before the reply: when the master has it, it may write the next inputs
            except Exception as error:
                status, reply_flags, content = self._failed(error)
                body = pickle_reply(self, status, reply_flags, content)[2]
        return status, reply_flags, body

    def _act(self, kind: int, flags: int, sequence: int, value: int, body: Body | None) -> Reply:
        self.sequence = sequence
        self._enter_lane(flags >> LANE_SHIFT, kind, is_alone=bool(flags & IS_ALONE))
        outer, cell.worker = cell.worker, self
        try:
            if kind not in (Kind.PUBLISH, Kind.ASSEMBLE, Kind.SUPPLY):  # those belong to the call before
                self.variables.resolve()
            if body is not None:
                self._take_in(body)
            return self._do(kind, sequence, value, body)
        finally:
            cell.worker = outer

    def _do(self, kind: int, sequence: int, value: int, body: Body | None) -> Reply:
        if kind == Kind.CALL:
            return self._call(value, sequence, body)
        if kind == Kind.LOAD:
            return self._load(body)
        if kind == Kind.PUBLISH:
            return self._publish_again()
        if kind == Kind.ASSEMBLE:
            return self._assemble(value, body)
        if kind == Kind.VARIABLE:
            return self._move(body)
        if kind == Kind.GROUP:
            return self._join(body)
        if kind == Kind.SUPPLY:
            return Status.DONE, 0, None
        if kind == Kind.PING:
            self._forget_lanes(set(self.used_lanes))
            self._recover("")
            return Status.PONG, 0, None
        return Status.BYE, 0, None

    def _enter_lane(self, lane: int, kind: int, *, is_alone: bool) -> None:
        self.lane = self.lanes[lane]
        if self.used_lanes != {lane}:
            others = self.used_lanes - {lane}
            if is_alone:
                self._forget_lanes(others)
            elif kind == Kind.CALL:
                self._detach_outputs(others)
            self.used_lanes.add(lane)

    def _settle_inputs(self, prepared: PreparedPlan) -> None:
        """See to what a function keeps of its inputs, so that later calls do not change it, nor it them."""
        is_kept = self.lane.executor.settle_inputs(prepared)
        if prepared.function.to_framework is not None:
            self.kept_data |= prepared.loans.kept_data()
        if is_kept:
            segment = prepared.loans.staging
            segment.map_again()
            self.backend.note_segment(segment)
            for other in self.plans.values():
                if segment.id in other.segment_ids:
                    other.map(self.segments)
            self.quiet.clear()  # they have views of the old mapping

    def _renew_data(self, prepared: PreparedPlan) -> None:
        """Before a call: drop what functions have written into ``Data`` by way of tensors that they have kept."""
        for segment_id, address, nbytes in self.kept_data:
            if segment_id in prepared.segment_ids and is_written(address, nbytes):
                give_back(address, nbytes)

    def _forget_lanes(self, lanes: set[int]) -> None:
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

    def _take_in(self, body: Body) -> None:
        self.quiet.clear()
        self._drop(body)
        for segment_id, arena_id, offset, nbytes in body.parts:  # after those that may have lain in their places
            arena = self.segments.get(arena_id)  # None: the message that brought it could not be taken in
            if arena is not None and segment_id not in self.segments:
                self.add_segment(arena.part(segment_id, offset, nbytes))
        if body.slots is not None:
            lane, segment_id, slot_nbytes = body.slots
            slots = self.lanes[lane].executor.outputs.slots
            slots.segment, slots.nbytes = self.segments[segment_id], slot_nbytes
            for prepared in self.plans.values():  # views of the old slots would keep their memory
                prepared.slot_views, prepared.slot_key, prepared.slots = [], None, None
        if body.collective is not None:
            lane, segment_id = body.collective
            segment = self.segments[segment_id]
            self.lanes[lane].communicator = ShmCommunicator(segment, self.rank, self.world_size, self._eventfds)
        self.variables.forget(body.dropped_variables)
        self.variables.declare(body.declarations)

    def _drop(self, body: Body) -> None:
        """Let go of what the master has dropped."""
        for plan_id in body.dropped_plans:
            self.plans.pop(plan_id, None)
        for function_id in body.dropped_functions:
            if self.functions.pop(function_id, None) is self.function:
                self.function = None
        for number, unbound in body.dropped_parcels:
            self.received.drop(number, unbound)
        dropped = set(body.dropped_segments)
        if dropped:
            for plan_id in [p for p, prepared in self.plans.items() if prepared.segment_ids & dropped]:
                del self.plans[plan_id]
            self.kept_data = {kept for kept in self.kept_data if kept[0] not in dropped}
            for segment_id in dropped:
                segment = self.segments.pop(segment_id, None)
                if segment is not None:
                    self.backend.forget_segment(segment)
                    segment.close()

    def _guarded(self, action: Callable[[], Any]) -> Reply:
        """Run code that may be the user's: an exception or an interrupt becomes a reply."""
        try:
            try:
                self.is_interruptible = True
                body = action()
            except Interrupted:
                raise
            except BaseException as error:  # SystemExit and the like must not end a worker
                return self._failed(error)
            finally:
                self.is_interruptible = False
        except Interrupted:
            self.is_interruptible = False
            self._recover("")
            return Status.INTERRUPTED, 0, None
        return Status.DONE, 0, body

    def _failed(self, error: BaseException) -> Reply:
        # A rank that waits for one that failed fails too; only if nobody failed otherwise is it the cause.
        is_collateral = isinstance(error, (Aborted, CollectiveMismatch))
        if self.group is not None:
            is_collateral = is_collateral or self.group.is_lost_peer(error)
        error = self.backend.explain(error, repr(self.function_name))
        failure = pack_failure(error, self.rank, self.device, is_collateral=is_collateral)
        _drop_frames(error)
        self._recover(failure.traceback_text)
        return Status.ERROR, IS_COLLATERAL if is_collateral else 0, failure

    def _recover(self, text: str) -> None:
        """After a call that did not end well: nothing of it is left on the device."""
        self.executor.forget()
        if not self.backend.recover():
            raise DeviceLost(f"{text}{self.device} reports errors to every call from now on: this worker ends.")

    def _load(self, body: Body | None) -> Reply:
        assert body is not None

        def load() -> None:
            self.failpoint("distribute.loading")
            self._own_up[Up.PHASE] = Phase.LOADING
            self.received.load(body.content, self._load_function)
            if body.content.prepare is not None:
                self._prepare(self.functions[body.content.prepare])

        return self._guarded(load)

    def _load_function(self, function_id: int, options: dict[str, Any]) -> None:
        self.functions[function_id] = LoadedFunction(**options, backend=self.backend)

    def _prepare(self, function: LoadedFunction) -> None:
        """Run what a worker that was started in the place of another is to run before its first call."""
        try:
            with self.backend.running():
                function.fn()
            if self.variables.assigned:
                raise TypeError("on_restart cannot assign a shared variable: it is not a call, and changes one rank.")
        finally:
            self.variables.abandon()

    def _call(self, plan_id: int, sequence: int, body: Body | None, outcome: Outcome | None = None) -> Reply:
        started = time.monotonic_ns()
        self.failpoint("call.received")
        self.quiet.pop(plan_id, None)  # it relies on what the call before has told the master
        lane, up = self.lane, self._own_up
        lane.own_up[Up.FUNCTION_NS] = 0
        try:
            try:
                self.is_interruptible = True
                interrupt = self._own_down[Down.INTERRUPT]
                if interrupt >= 0 and is_interrupted(interrupt, sequence):
                    raise Interrupted  # the signal came before this call could take it
                reply = self._run(self._prepared(plan_id, body), outcome)
            except Interrupted:
                raise
            except BaseException as error:  # whatever the user's function raises is an answer
                reply = self._failed(error)
            finally:
                self.is_interruptible = False
        except Interrupted:
            self.is_interruptible = False
            self._recover("")
            reply = (Status.INTERRUPTED, 0, None)
        self.leave_call()
        ended = time.monotonic_ns()
        up[Up.PHASE] = Phase.IDLE
        up[Up.OUTPUT_NBYTES] += lane.executor.outputs.nbytes
        lane.own_up[Up.WORKER_NS] = ended - started
        if ended - self.rss_measured > RSS_INTERVAL_NS:
            self.measure(ended)
        return reply

    def measure(self, now_ns: int) -> None:
        """Note how much memory this process holds."""
        self.rss_measured = now_ns
        self._own_up[Up.RSS] = _resident_nbytes()

    def _run(self, prepared: PreparedPlan, outcome: Outcome | None) -> Reply:
        """Call the function, publish its outputs, and bring large ones into place where all ranks are as far."""
        lane, up = self.lane, self._own_up
        executor = lane.executor
        self.failpoint("call.before_function")
        if self.kept_data:
            self._renew_data(prepared)
        with self.backend.running():
            up[Up.PHASE] = Phase.FUNCTION
            if outcome is None:
                started = time.monotonic_ns()
                result = self._try(prepared) if prepared.plan.is_trial else executor.run(prepared, self.variables)
                function_ns = time.monotonic_ns() - started
            else:
                result, function_ns = outcome.take(), outcome.function_ns
                self.variables.check_given()
            lane.own_up[Up.FUNCTION_NS] = function_ns
            up[Up.PHASE] = Phase.PUBLISHING
            self.failpoint("call.after_function")
            status, body = executor.outputs.publish(prepared, result, self.variables)
            self._check_group()
            self.failpoint("call.published")
            result_id = lane.first_down[Down.RESULT]
            looks_as_before = status == Status.DONE and (body is None or body[0] is None)
            if not (result_id and looks_as_before and self._meet()):
                return status, 0, body
            self.failpoint("reduce.before")
            up[Up.PHASE] = Phase.REDUCING
            executor.outputs.assemble(prepared.moves, self.segments[result_id])
            self.failpoint("reduce.after")
            return status, IS_ASSEMBLED, body

    def _try(self, prepared: PreparedPlan) -> Any:
        """Call a copy of the function, and undo what it does to this process."""
        from synk._worker.trial import Trial

        plan = prepared.plan
        trial = Trial(self.functions[plan.function_id], is_apart=plan.is_apart)
        prepared.function = trial.function
        self.lane.own_up[Up.TRAITS] = 0
        with trial.running():
            result = self.executor.run(prepared, self.variables)
        self.lane.own_up[Up.TRAITS] = trial.traits | (Traits.COMMUNICATES if self.is_communicating else 0)
        return result

    def _meet(self) -> bool:
        """Tell the others that this rank's outputs are in its slot and look as before; return whether all say so.

        Waits awake and not for long: a rank that was too early is asked again by the master when all have replied.
        """
        call = self.lane.first_down[Down.CALL]
        published = self.lane.published
        self._fence()  # the outputs come before the word that tells of them
        published[self.rank] = call
        ranks = self.executor.outputs.slots.participants
        end = time.monotonic() + self.patience_s
        while (words := {published[rank] for rank in ranks}) != {call}:
            if -call in words or time.monotonic() >= end:
                return False
            os.sched_yield()
        self._fence()
        return True

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Hold back an interrupt of the call under way while the body runs."""
        was_interruptible, self.is_interruptible = self.is_interruptible, False
        try:
            yield
        finally:
            self.is_interruptible = was_interruptible
        if was_interruptible and is_interrupted(self._own_down[Down.INTERRUPT], self.sequence):
            raise Interrupted  # the signal came meanwhile

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
        prepared = self.plans.get(plan_id)
        if prepared is not None:
            self.used_lanes.add(lane)
            self.lanes[lane].executor.inputs.prefetch(prepared, is_hurried=is_hurried)

    def leave_call(self) -> None:
        """Let nobody wait for this rank any longer."""
        lane = self.lane
        call = lane.first_down[Down.CALL]
        if lane.published[self.rank] != call:
            lane.published[self.rank] = -call
        if lane.communicator is not None:
            if self.is_communicating:
                self.is_communicating = False
                lane.communicator.end()
            else:
                lane.communicator.skip(call)

    def _prepared(self, plan_id: int, body: Body | None) -> PreparedPlan:
        """Return the plan of a call, which its first message brings."""
        if body is not None and isinstance(body.content, Plan):
            plan = body.content
            try:
                self.plans[plan_id] = PreparedPlan(plan, self.functions[plan.function_id], self.segments)
            except KeyError as error:
                raise SharedMemoryError(
                    f"cannot find shared segment {error}: it came with an earlier call, which this process could not "
                    "take in. Call again."
                ) from error
        prepared = self.lane.called = self.plans[plan_id]
        self.function = prepared.function
        return prepared

    def collectives(self) -> HostCollectives | DeviceCollectives:
        """Return the collectives of the call under way; the first use in a call joins its group."""
        function = self.function
        if self.variables.is_sliced:
            raise ValueError(
                f"cannot communicate in {self.function_name!r}: the call has num_slices above 1, so each rank runs the "
                "function several times, and not all of them equally often. Call it with num_slices=1."
            )
        lane = self.lane
        communicator = lane.communicator
        assert communicator is not None and function is not None
        ranks = tuple(lane.executor.outputs.slots.participants)
        if not self.is_communicating:
            communicator.begin(ranks, lane.first_down[Down.CALL])
            self.is_communicating = True
        framework = (function.to_framework, function.from_framework)
        if self.backend.is_device:
            from synk._worker.nccl_group import device_collectives

            has_group = lane.executor.outputs.slots.has_group
            return device_collectives(self.backend, communicator, self.group if has_group else None, framework)
        return HostCollectives(communicator, len(ranks), framework)

    @property
    def function_name(self) -> str:
        return self.function.name if self.function is not None else ""

    def _move(self, body: Body | None) -> Reply:
        """Do this rank's share of a collective over shared variables."""
        assert body is not None

        def move() -> None:
            self.failpoint("collective.before")
            content = body.content
            if isinstance(content, Fetch):
                self.variables.fetch(content.variable_id)
            elif isinstance(content, DeviceCollective):
                self.variables.collective(
                    content.variable_id, content.kind, content.op, self.executor.outputs.large.collectives
                )
                assert self.group is not None
                self.group.check()
            else:
                run_steps(content, self.segments)
            self.failpoint("collective.after")

        return self._guarded(move)

    def _assemble(self, result_id: int, body: Body | None) -> Reply:
        self.failpoint("reduce.before")
        prepared = self.lane.called
        assert prepared is not None
        if body is not None and body.content is not None:
            prepared.moves = body.content

        def assemble() -> None:
            with self.backend.running():
                self.executor.outputs.assemble(prepared.moves, self.segments[result_id])
            self._check_group()
            self.failpoint("reduce.after")

        return self._guarded(assemble)

    def tidy(self, kind: int, status: Status) -> None:
        """After the reply: drop outputs that nobody needs any more. Finalizers of the user's objects run here."""
        is_call = kind in (Kind.CALL, Kind.PUBLISH, Kind.ASSEMBLE)
        executor = self.lane.executor
        if is_call and status == Status.DONE and not executor.outputs.is_waiting:
            executor.forget()

    def _publish_again(self) -> Reply:
        def publish() -> Status:
            with self.backend.running():
                return self.executor.outputs.republish(self.variables)

        status, flags, body = self._guarded(publish)
        return (body, 0, None) if status == Status.DONE else (status, flags, body)

    # -- NCCL ---------------------------------------------------------------------------------------------------------

    def _join(self, body: Body | None) -> Reply:
        """Make the id of a group, or join one."""
        assert body is not None
        order: JoinOrder = body.content

        def join() -> dict[str, Any]:
            if self.group is None:
                from synk._worker.nccl_group import WorkerGroup  # CPU workers need none of it

                backend = cast(DeviceBackend, self.backend)
                self.group = WorkerGroup(self.rank, self.world_size, self.down, self.up, backend)
            if order.unique_id is None:
                return {"unique_id": self.group.new_id()}
            with self.backend.running():
                library = self.group.join(order.number, order.unique_id)
            for lane in self.lanes:
                lane.executor.outputs.large.collectives = self.group.collectives()
            return {"library": library}

        return self._guarded(join)

    def _check_group(self) -> None:
        if self.group is not None and self.executor.outputs.slots.has_group:
            self.group.check()


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


def pickle_reply(worker: Worker | None, status: Status, flags: int, body: Any) -> tuple[Status, int, bytes]:
    """Pickle a reply's body; what of the user's cannot be pickled becomes an error reply."""
    if isinstance(body, (dict, Failure)) or worker is None:
        return status, flags, pickle.dumps(body, protocol=5)
    what = "the structure of its result"
    try:
        try:
            from synk._worker.pickling import dumps

            worker.is_interruptible = True
            layout, objects = body
            # Each object on its own, so that the one that cannot be pickled or loaded can be named.
            packed = []
            for position, item in enumerate(objects):
                what = f"object {position} of its result"
                packed.append(dumps(item))
            data = dumps((layout, packed))
        finally:
            worker.is_interruptible = False
    except Interrupted:
        worker.is_interruptible = False
        return Status.INTERRUPTED, 0, pickle.dumps(None)
    except BaseException as error:  # __reduce__ of a result is the user's code
        worker.executor.forget()
        problem = SerializationError(
            f"cannot send the result of {worker.function_name!r} from rank {worker.rank} ({what}): "
            f"{type(error).__name__}: {error}. "
            "Return arrays, numbers or picklable objects (a generator: return list(...))."
        )
        problem.__cause__ = error
        return Status.ERROR, 0, pickle.dumps(pack_failure(problem, worker.rank, worker.device), protocol=5)
    return status, flags, data


def _resident_nbytes() -> int:
    """Resident memory of this process, for the report of one that is killed."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # out of descriptors: a report is not worth a failed call
        return 0
