"""One call in the master, from the arguments to the result.

:func:`launch` makes a new call: arguments and rows (``binding``), plan and places (``staging``). A call that fits a
compiled one (``compiled``) needs none of that. From then on there is one path: ``staging.stage`` copies, :func:`send`
rings, :func:`complete` waits and combines (``replies``), or cleans up after a failure. The caller holds the session.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from synk._master.calls.arguments import Argument
from synk._master.calls.binding import bind
from synk._master.calls.callee import Callee
from synk._master.calls.compiled import CompiledCall, compile_call
from synk._master.calls.launched import Launched
from synk._master.calls.plans import CachedPlan, Call
from synk._master.calls.replies import carry_out, collecting, conclude
from synk._master.calls.staging import plan_call, stage, values_of
from synk._master.session import Session
from synk._master.state.device_values import check_not_lost
from synk._master.state.lanes import Lane
from synk._master.state.resident import ResidentObject
from synk._master.state.results import Lease
from synk._pure.call_options import CallOptions
from synk._pure.interrupts import holding
from synk._wire.cell import cell
from synk._wire.control import Down
from synk._wire.messages import Kind
from synk.errors import ClosedError, SharedMemoryError, SynkError

UNFIT: Any = object()
"""Returned instead of a result when a call does not fit the compiled one. Nothing has been done then."""

_CALL, _RESULT, _TIMED = Kind.CALL, int(Down.RESULT), int(Down.TIMED)


def run_call(
    session: Session,
    function: Callee,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CallOptions,
    deadline: float | None,
) -> Any:
    """Run a new call, compile it for calls like it, and return its result. All workers must be alive."""
    return complete(session, launch(session, function, args, kwargs, options, deadline, session.lanes.first))


def call_again(
    session: Session,
    function: Callee,
    compiled: CompiledCall,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: Any,
) -> Any:
    """Run a call that fits a compiled one and return its result, else ``UNFIT``. What it captured must be current.

    Ctrl-C is not held back here. The next operation settles what it broke off.
    """
    # A finalizer or a signal handler may call in the middle of an operation of this thread; the lock would let it in.
    if session._lock._is_owned() or cell.worker is not None:  # type: ignore[attr-defined]
        return UNFIT
    started = time.monotonic_ns()
    with session._lock:
        if session.workers.requests or session.queue.calls:
            return UNFIT
        launched = compiled.fits(session, function, args, kwargs, batch, started)
        if launched is None:
            return UNFIT
        try:
            stage(session, launched)
            send(session, launched)
        except BaseException as error:
            abandon(session, launched, error)
            raise
        return complete(session, launched)


def launch(
    session: Session,
    function: Callee,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CallOptions,
    deadline: float | None,
    lane: Lane,
    *,
    is_alone: bool = False,
) -> Launched:
    """Send a new call in ``lane``, which must be free. With ``is_alone``, wait first until no call is in flight."""
    if options.num_slices > 1 and function.changes:
        raise ValueError(
            f"cannot call {function.name!r}: got num_slices={options.num_slices}, expected 1, because it changes "
            "resident objects: each rank runs it once. Divide the rows inside the function."
        )
    started, state = time.monotonic_ns(), session.workers.log.state
    pickled = session.counters["bytes_pickled"]
    call = bind(session, function, args, kwargs, options, deadline)
    load(session, function, call.arguments, deadline, f"call {function.name!r}")
    pickled = session.counters["bytes_pickled"] - pickled
    if session.nodes is not None:
        launched = session.nodes.launched(function, call, lane, deadline, started, pickled, state)
        return _launch_on_nodes(session, launched, is_alone=is_alone)
    cached = plan_call(session, function, call, options, lane)
    launched = Launched(function, call, cached, values_of(call, cached), deadline, started, pickled, state)
    try:
        stage(session, launched)
        if is_alone:
            _wait_alone(session, launched)
        send(session, launched)
    except BaseException as error:
        abandon(session, launched, error)
        raise
    return launched


def _launch_on_nodes(session: Session, launched: Launched, *, is_alone: bool) -> Launched:
    """Send a call to the nodes that run it, in the same steps."""
    try:
        session.nodes.stage(launched)
        if is_alone:
            _wait_alone(session, launched)
        session.nodes.send(launched)
    except BaseException as error:
        abandon(session, launched, error)
        raise
    return launched


def _wait_alone(session: Session, launched: Launched) -> None:
    """Wait for the calls in flight, on whose outcomes this one depends. Meanwhile the ranks fetch its inputs."""
    function, call, cached = launched.function, launched.call, launched.cached
    if session.queue.calls:
        if session.has_devices:
            session.workers.prefetch(call.ranks, cached.plan.plan_id, cached.lane.index)
        session.resume(f"submit {function.name!r}", launched.deadline)
        load(session, function, call.arguments, launched.deadline, f"call {function.name!r}")
    session.queue.check_step(function)


def send(session: Session, launched: Launched) -> None:
    """Tell the workers of a call that was staged."""
    cached, lane, doorbells = launched.cached, launched.cached.lane, launched.doorbells
    session.counters["calls"] += 1
    if session.tracer is not None:
        lane.first_down[_TIMED] = 1
        launched.sent_ns = time.monotonic_ns()
    if doorbells is None:
        _send_new(session, launched)
        return
    # The numbers and arguments lie in shared memory before the doorbell rings. No rank can still be reading the lane:
    # its last call has been answered by all.
    lane.first_down[_RESULT] = 0 if launched.lease is None else launched.lease.segment.id
    launched.began = session.workers.began = launched.started_ns * 1e-9
    # Until the call has succeeded: a worker may report a layout that the master never takes in.
    cached.is_agreed = False
    if launched.pickled_nbytes:
        session.counters["bytes_pickled"] += launched.pickled_nbytes
    doorbells.ring(launched, _CALL, cached.plan.plan_id, lane.index)


def _send_new(session: Session, launched: Launched) -> None:
    """Send a call that may bring the workers something that they do not have: the function, a plan, a segment."""
    workers, call, cached, lane = session.workers, launched.call, launched.cached, launched.cached.lane
    plan_id = cached.plan.plan_id
    call.has_group = session.group.announce(workers, lane, len(call.ranks))
    contents = {rank: cached.plan for rank in call.ranks if plan_id not in workers.by_rank[rank].known.held["plan"]}
    if cached.assembly is not None:
        cached.assembly.told.difference_update(contents)  # a rank keeps its part with the plan
    lease = launched.lease = _lease(session, cached, call)
    segments = cached.segments if lease is None else [*cached.segments, lease.segment]
    cached.is_agreed = False
    # Noted before the plan is sent: if the sending is broken off, each rank counts as having it, and abandon() has all
    # of them drop it.
    for rank in contents:
        workers.by_rank[rank].known.held["plan"].add(plan_id)
    lane.first_down[_RESULT] = 0 if lease is None else lease.segment.id
    workers.send(
        _CALL, call.ranks, plan_id, contents, segments, launched.deadline, "call", launched.what, lane.index, launched
    )


def complete(session: Session, launched: Launched) -> Any:
    """Wait for the replies to a call and return its result."""
    doorbells = launched.doorbells
    try:
        if doorbells is not None and doorbells.hear(launched, is_assembled=launched.lease is not None):
            return conclude(session, launched, (), launched.lease)
        with holding():
            result = carry_out(session, collecting(session, launched))
            compile_call(session, launched)
            return result
    except BaseException as error:
        abandon(session, launched, error)
        raise


def abandon(session: Session, launched: Launched, error: BaseException) -> None:
    """Clean up after a call that failed: forget its plan and take its buffer back."""
    # No rank works on this call any more. What ranks have assigned lies in second buffers and was not committed. What
    # they remember of the plan is uncertain, so no later call may use it.
    function, cached = launched.function, launched.cached
    function.plans.discard(cached, session.workers.log)
    if launched.lease is not None:
        session.memory.results.give_back(launched.lease)
    if session.tracer is not None and not session.is_closed:  # else the lane has no words any more
        now = time.monotonic_ns()
        session.tracer.note(launched, now, now, type(error).__name__)
    is_known = not isinstance(error, Exception) or isinstance(error, SynkError)
    if session.is_closed and not is_known:
        raise ClosedError("the call was ended: the runtime was closed by another thread.") from error
    if launched.sequence and function.changes:
        session.residents.note_failed(function.changes, error)


def load(session: Session, function: Callee, arguments: Sequence[Argument], deadline: float | None, verb: str) -> None:
    """See that all workers live, have the function, and hold the values that it reads."""
    passed = [argument.value for argument in arguments if argument.kind == "resident"]
    _check_residents((*function.residents, *passed), verb)  # a worker that lacks one could not load the function
    function.load(session, deadline)
    while session.workers.processes.has_dead:  # a worker may die after it has loaded the function
        session.resume(verb, deadline)
        function.load(session, deadline)
    _check_residents((*function.residents, *passed), verb)  # the load may have found others
    if session.has_devices:  # a value on a device is lost with its worker
        used = [argument.value for argument in arguments if argument.kind in ("shard", "replica")]
        check_not_lost([*function.variables, *used], None, verb)


def _check_residents(residents: Iterable[ResidentObject], verb: str) -> None:
    for resident in residents:
        resident.check(verb)


def _lease(session: Session, cached: CachedPlan, call: Call) -> Lease | None:
    """Lease a buffer for a call's large outputs if all ranks know their parts from an earlier call.

    The ranks fill it without being asked, once all of their outputs are there and have the known layout. The call also
    works without it.
    """
    assembly = cached.assembly
    if assembly is None or not assembly.result_nbytes or call.has_group:
        return None
    if not assembly.told.issuperset(call.ranks):
        return None
    layouts = [cached.layouts[rank] for rank in call.ranks]
    if not assembly.fits(call.ranks, layouts, cached.lane.slots, False):
        return None
    try:
        return session.memory.lease_result(assembly.result_nbytes)
    except SharedMemoryError:  # if the outputs need the memory, the call will raise this
        return None
