"""What a rank does with a message: take in its body, have the right part act on it, pickle the reply.

The only exceptions that leave this file end the process.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

from synk._wire.cell import cell
from synk._wire.control import Down, Phase, Up
from synk._wire.items import ItemsDone
from synk._wire.logs import set_levels
from synk._wire.messages import IS_ALONE, LANE_SHIFT, Body, Failure, JoinOrder, Kind, LoadOrder, Status
from synk._wire.steps import run_steps
from synk._wire.variables import DeviceCollective, Fetch
from synk._worker.failures import pack_failure
from synk._worker.held.pickling import dumps
from synk._worker.held.plans import LoadedFunction
from synk._worker.loop.calls import Reply, assemble, failed, guarded, publish_again, recover, run_call
from synk._worker.loop.items import run_items
from synk._worker.member import Interrupted
from synk._worker.rank import Worker
from synk.errors import SerializationError

# Members of an enumeration are slow to look up.
_FUNCTION_NS, _PHASE, _IDLE = int(Up.FUNCTION_NS), int(Up.PHASE), int(Phase.IDLE)
_TIMED = int(Down.TIMED)
_CALL = int(Kind.CALL)
_OF_THE_CALL_BEFORE = tuple(map(int, (Kind.PUBLISH, Kind.ASSEMBLE, Kind.SUPPLY)))


def handle(
    worker: Worker, kind: int, flags: int, sequence: int, value: int, body: Body | None
) -> tuple[Status, int, bytes | None]:
    """Act on one message. Return ``(status, flags, data)`` of the reply."""
    worker.sequence = sequence
    worker.num_messages += 1
    lane = worker.lane = worker.lanes[flags >> LANE_SHIFT]
    if worker.used_lanes != lane.bit:  # others may hold something, or this one has not been used
        worker.enter_lane(kind, is_alone=bool(flags & IS_ALONE))
    outer, cell.worker = cell.worker, worker
    try:
        if kind == _CALL:
            # What the last call assigned takes effect, or is dropped, before this call can read it. No interrupt can be
            # raised here, outside of ``guarded``: all variables of the call change, or none.
            if body is not None:
                _bring_in(worker, kind, body)
            elif worker.variables.stored[1]:
                worker.variables.resolve()
            received = time.monotonic_ns() if lane.first_down[_TIMED] else 0
            executor = lane.executor
            executor.function_ns = 0
            status, reply_flags, content = guarded(worker, run_call, value, body)
            # However the call has ended: no other rank may wait for this one any longer.
            worker.peers.leave_call(lane)
            lane.own_up[_FUNCTION_NS] = executor.function_ns
            worker.own_up[_PHASE] = _IDLE
            if received:
                executor.note_times(lane.own_up, received)
        else:
            _bring_in(worker, kind, body)
            status, reply_flags, content = _act(worker, kind, value, body)
    finally:
        cell.worker = outer
    data = None
    if content is not None:
        status, reply_flags, data = _pickle_reply(worker, status, reply_flags, content)
        del content  # it may hold the function's inputs
    called = lane.called
    # This must come before the reply: once the master has that, it may write the inputs of the next call.
    if kind == _CALL and called is not None and called.inputs.is_kept():
        try:
            worker.settle_inputs(called)
        except Exception as error:
            return _pickle_reply(worker, *failed(worker, error))
    return status, reply_flags, data


def _act(worker: Worker, kind: int, value: int, body: Body | None) -> Reply:
    """Handle a message other than a call."""
    action = _ACTIONS.get(kind)
    if action is not None:
        return guarded(worker, action, value, body)
    if kind == Kind.ITEMS:
        return run_items(worker, body)
    if kind == Kind.SUPPLY:
        return Status.DONE, 0, None
    if kind == Kind.PING:
        worker.forget_lanes(worker.lanes)
        recover(worker, "")
        return Status.PONG, 0, None
    return Status.BYE, 0, None


def _bring_in(worker: Worker, kind: int, body: Body | None) -> None:
    """Before a message is acted on, settle the last call and take in what the body brings."""
    # First: a declaration below names the buffer that holds the value by now. Resolved after it, the last call would
    # exchange the buffers once more.
    if kind not in _OF_THE_CALL_BEFORE:
        worker.variables.resolve()
    if body is None:
        return
    worker.held.take_in(body)
    worker.variables.forget(body.dropped.get("variable", ()))
    worker.residents.forget(body.dropped.get("resident", ()))
    for what, number, value in body.news:
        if what == "variable":
            worker.variables.declare(value)
        elif what == "lane":
            _set_lane(worker, number, *value)
        else:
            worker.settings.take_in(value)


def _set_lane(worker: Worker, index: int, slots_id: int, slot_nbytes: int, collective_id: int) -> None:
    """Use the memory that the master has given a lane now."""
    lane, segments = worker.lanes[index], worker.held.segments
    slots = lane.executor.outputs.slots
    # What this rank had published in the old slots, the master has copied into the new ones (``Lane.replace_slots``).
    if slots.segment is not segments[slots_id]:
        slots.segment, slots.nbytes = segments[slots_id], slot_nbytes
        worker.held.forget_slots()
    if collective_id and lane.collective is not segments[collective_id]:
        worker.peers.connect(lane, segments[collective_id])


def _load(worker: Worker, value: int, body: Body | None) -> Reply:
    """Take in functions. On the replacement of a worker that died, also run ``on_restart`` if the order says so."""
    assert body is not None
    order: LoadOrder = body.content
    worker.failpoint("distribute.loading")
    worker.own_up[Up.PHASE] = Phase.LOADING
    try:
        set_levels(order.levels)
        with worker.settings.importing():
            worker.held.load(order)
        if order.prepare is not None:
            _prepare(worker, worker.held.functions[order.prepare])
    finally:  # not the next call, which may have no rows for this rank
        worker.own_up[Up.PHASE] = Phase.IDLE
    return Status.DONE, 0, None


def _prepare(worker: Worker, function: LoadedFunction) -> None:
    """Run ``on_restart``, which the replacement of a worker that died runs before its first call."""
    try:
        function.fn()
        if worker.variables.assigned:
            raise TypeError(
                "cannot assign a shared variable in on_restart: it runs on one rank, and all ranks must hold the same. "
                "Assign it in a call."
            )
    finally:
        worker.variables.abandon()


def _move(worker: Worker, value: int, body: Body | None) -> Reply:
    """Do this rank's share of a collective over shared variables."""
    assert body is not None
    content = body.content
    worker.failpoint("collective.before")
    if isinstance(content, Fetch):
        worker.variables.fetch(content.variable_id)
    elif isinstance(content, DeviceCollective):
        collectives = worker.executor.outputs.large.collectives
        worker.variables.collective(content.variable_id, content.kind, content.op, collectives)
        assert worker.peers.group is not None
        worker.peers.group.check()
    else:
        run_steps(content, worker.held.segments)
    worker.failpoint("collective.after")
    return Status.DONE, 0, None


def _act_on_resident(worker: Worker, value: int, body: Body | None) -> Reply:
    assert body is not None
    return Status.DONE, 0, worker.residents.act(body.content)


def _join(worker: Worker, value: int, body: Body | None) -> Reply:
    """Make the id of an NCCL group, or join one."""
    assert body is not None
    order: JoinOrder = body.content
    return Status.DONE, 0, worker.peers.join(order, worker.lanes)


def _pickle_reply(worker: Worker, status: Status, flags: int, content: Any) -> tuple[Status, int, bytes]:
    """Pickle a reply's body. If an object of the user's cannot be pickled, return an error reply instead."""
    if isinstance(content, (dict, Failure, ItemsDone)):
        return status, flags, pickle.dumps(content, protocol=5)
    what = "the structure of its result"
    try:
        try:
            worker.is_interruptible = True
            layout, objects = content
            # Each on its own, so that the one that cannot be pickled or loaded can be named.
            packed = []
            for what, item in objects:
                packed.append((what, item if type(item) is bytes else dumps(item)))
            data = pickle.dumps((None, packed), protocol=5) if layout is None else dumps((layout, packed))
        finally:
            worker.is_interruptible = False
    except Interrupted:
        worker.is_interruptible = False
        return Status.INTERRUPTED, 0, pickle.dumps(None)
    except BaseException as error:  # __reduce__ of a result is the user's code
        worker.executor.forget()
        problem = SerializationError(
            f"cannot send the result of {worker.function_name!r} from rank {worker.number} ({what}): "
            f"{type(error).__name__}: {error}. "
            "Return arrays, numbers or picklable objects (a generator: return list(...))."
        )
        problem.__cause__ = error
        return Status.ERROR, 0, pickle.dumps(pack_failure(problem, worker.number, worker.device), protocol=5)
    return status, flags, data


_ACTIONS = {
    int(Kind.LOAD): _load,
    int(Kind.PUBLISH): publish_again,
    int(Kind.ASSEMBLE): assemble,
    int(Kind.VARIABLE): _move,
    int(Kind.RESIDENT): _act_on_resident,
    int(Kind.GROUP): _join,
}
"""The actions that may run the user's code, by the kind of the message."""
