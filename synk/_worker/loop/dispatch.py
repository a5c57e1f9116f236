"""A message on its rank: what its body brings is taken in, whoever it is for acts on it, and the reply is packed.

Never raises but what ends the process.
"""

from __future__ import annotations

import pickle
from typing import Any

from synk._pure.nested import is_plain_object
from synk._wire.cell import cell
from synk._wire.control import Phase, Up
from synk._wire.failures import Failure
from synk._wire.items import ItemsDone
from synk._wire.logs import set_levels
from synk._wire.messages import IS_ALONE, LANE_SHIFT, Body, DeviceCollective, Fetch, JoinOrder, Kind, LoadOrder, Status
from synk._wire.steps import run_steps
from synk._worker.failures import pack_failure
from synk._worker.held.plans import LoadedFunction, PreparedPlan
from synk._worker.loop.calls import Outcome, assemble, publish_again, run_call
from synk._worker.loop.items import run_items
from synk._worker.rank import Interrupted, Reply, Worker
from synk.errors import SerializationError


def handle(
    worker: Worker, kind: int, flags: int, sequence: int, value: int, body: Body | None
) -> tuple[Status, int, bytes | None]:
    """Act on one message; return ``(status, flags, data)`` of the reply."""
    return _finished(worker, kind, _act(worker, kind, flags, sequence, value, body))


def go_on(worker: Worker, plan_id: int, sequence: int, outcome: Outcome) -> tuple[Status, int, bytes | None]:
    """Go on with a call whose function has been run, but has not done what it did the last time; as ``handle``."""
    try:
        return _finished(worker, Kind.CALL, run_call(worker, plan_id, sequence, None, outcome))
    finally:
        cell.worker = None


def _finished(worker: Worker, kind: int, reply: Reply) -> tuple[Status, int, bytes | None]:
    """Return a reply as it is sent; what the function keeps of its inputs is seen to before."""
    status, reply_flags, content = reply
    del reply
    data = None
    if content is not None:
        status, reply_flags, data = _pickle_reply(worker, status, reply_flags, content)
        del content  # it may hold the function's inputs
    called = worker.lane.called
    if kind in (Kind.CALL, Kind.CHECK) and called is not None and called.loans.are_open():
        return settle_inputs(worker, called) or (status, reply_flags, data)
    return status, reply_flags, data


def settle_inputs(worker: Worker, called: PreparedPlan) -> tuple[Status, int, bytes | None] | None:
    """See to what a function keeps of its inputs, before the reply: when the master has it, it may write the next ones.

    Return the reply where that fails.
    """
    try:
        worker.settle_inputs(called)
    except Exception as error:
        status, flags, content = worker.failed(error)
        return _pickle_reply(worker, status, flags, content)
    return None


def _act(worker: Worker, kind: int, flags: int, sequence: int, value: int, body: Body | None) -> Reply:
    worker.sequence = sequence
    worker.enter_lane(flags >> LANE_SHIFT, kind, is_alone=bool(flags & IS_ALONE))
    outer, cell.worker = cell.worker, worker
    try:
        if kind not in (Kind.PUBLISH, Kind.ASSEMBLE, Kind.CHECK, Kind.SUPPLY):  # those belong to the call before
            worker.variables.resolve()
        if body is not None:
            _take_in(worker, body)
        return _do(worker, kind, sequence, value, body)
    finally:
        cell.worker = outer


def _do(worker: Worker, kind: int, sequence: int, value: int, body: Body | None) -> Reply:
    if kind == Kind.CALL:
        return run_call(worker, value, sequence, body)
    if kind == Kind.LOAD:
        return _load(worker, body)
    if kind == Kind.ITEMS:
        return run_items(worker, body)
    if kind == Kind.PUBLISH:
        return publish_again(worker)
    if kind == Kind.ASSEMBLE:
        return assemble(worker, value, body)
    if kind == Kind.CHECK:
        return _check(worker)
    if kind == Kind.VARIABLE:
        return _move(worker, body)
    if kind == Kind.RESIDENT:
        return _act_on_resident(worker, body)
    if kind == Kind.GROUP:
        return _join(worker, body)
    if kind == Kind.SUPPLY:
        return Status.DONE, 0, None
    if kind == Kind.PING:
        worker.forget_lanes(set(worker.used_lanes))
        worker.recover("")
        return Status.PONG, 0, None
    return Status.BYE, 0, None


def _take_in(worker: Worker, body: Body) -> None:
    """Take in what a body brings, before what it asks for."""
    worker.held.take_in(body)
    worker.variables.forget(body.dropped.get("variable", ()))
    worker.residents.forget(body.dropped.get("resident", ()))
    for kind, number, value in body.news:
        if kind == "variable":
            worker.variables.declare(value)
        elif kind == "lane":
            _set_lane(worker, number, *value)
        else:
            worker.settings.take_in(value)


def _set_lane(worker: Worker, index: int, slots_id: int, slot_nbytes: int, collective_id: int) -> None:
    """Use the memory that a lane has now."""
    lane, segments = worker.lanes[index], worker.held.segments
    slots = lane.executor.outputs.slots
    if slots.segment is not segments[slots_id]:
        slots.segment, slots.nbytes = segments[slots_id], slot_nbytes
        worker.held.forget_slots()
    if collective_id and lane.collective is not segments[collective_id]:
        worker.peers.connect(lane, segments[collective_id])


def _load(worker: Worker, body: Body | None) -> Reply:
    """Take in functions; on a worker that was started in the place of another, run what prepares it."""
    assert body is not None
    order: LoadOrder = body.content

    def load() -> None:
        worker.failpoint("distribute.loading")
        worker.own_up[Up.PHASE] = Phase.LOADING
        set_levels(order.levels)
        with worker.settings.importing():
            worker.held.load(order)
        if order.prepare is not None:
            _prepare(worker, worker.held.functions[order.prepare])

    return worker.guarded(load)


def _prepare(worker: Worker, function: LoadedFunction) -> None:
    """Run what a worker that was started in the place of another is to run before its first call."""
    try:
        with worker.backend.running():
            function.fn()
        if worker.variables.assigned:
            raise TypeError(
                "cannot assign a shared variable in on_restart: it runs on one rank, and all ranks must hold the same. "
                "Assign it in a call."
            )
    finally:
        worker.variables.abandon()


def _move(worker: Worker, body: Body | None) -> Reply:
    """Do this rank's share of a collective over shared variables."""
    assert body is not None

    def move() -> None:
        worker.failpoint("collective.before")
        content = body.content
        if isinstance(content, Fetch):
            worker.variables.fetch(content.variable_id)
        elif isinstance(content, DeviceCollective):
            worker.variables.collective(
                content.variable_id, content.kind, content.op, worker.executor.outputs.large.collectives
            )
            assert worker.peers.group is not None
            worker.peers.group.check()
        else:
            run_steps(content, worker.held.segments)
        worker.failpoint("collective.after")

    return worker.guarded(move)


def _check(worker: Worker) -> Reply:
    """See on trial whether the average fits the function of the last call."""
    from synk._worker.loop.halves import find_misfits

    return worker.guarded(lambda: {"misfits": find_misfits(worker)})


def _act_on_resident(worker: Worker, body: Body | None) -> Reply:
    assert body is not None
    return worker.guarded(lambda: worker.residents.act(body.content))


def _join(worker: Worker, body: Body | None) -> Reply:
    """Make the id of a group of NCCL, or join one."""
    assert body is not None
    order: JoinOrder = body.content
    return worker.guarded(lambda: worker.peers.join(order, worker.lanes))


def _pickle_reply(worker: Worker, status: Status, flags: int, content: Any) -> tuple[Status, int, bytes]:
    """Pickle a reply's body; what of the user's cannot be pickled becomes an error reply."""
    if isinstance(content, (dict, Failure, ItemsDone)):
        return status, flags, pickle.dumps(content, protocol=5)
    what = "the structure of its result"
    try:
        try:
            from synk._worker.held.pickling import dumps

            worker.is_interruptible = True
            layout, objects = content
            # Each object on its own, so that the one that cannot be pickled or loaded can be named.
            packed = []
            for position, item in enumerate(objects):
                what = f"object {position} of its result"
                packed.append(pickle.dumps(item, protocol=5) if is_plain_object(item) else dumps(item))
            data = pickle.dumps((None, packed), protocol=5) if layout is None else dumps((layout, packed))
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
