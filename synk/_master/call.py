"""One call the ordinary way, in the master: :func:`launch` sends it, :func:`collect` waits for it.

Arguments and rows (``binding``), plan and staging (``staging``), the message (``workers``), replies and outputs
(``replies``). The session is held and all workers are alive.
"""

from __future__ import annotations

import time
from typing import Any

from synk._master.binding import bind
from synk._master.callee import Callee
from synk._master.device_values import check_not_lost
from synk._master.lanes import Lane
from synk._master.launched import Launched
from synk._master.plans import CachedPlan, Call, CallOptions
from synk._master.replies import collecting
from synk._master.results import Lease
from synk._master.session import Session
from synk._master.staging import plan_call, stage, write_numbers
from synk._pure.interrupts import is_from_handler
from synk._wire.control import Down
from synk._wire.messages import Kind
from synk.errors import ClosedError, SharedMemoryError, SynkError


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
    """Send a call in ``lane``, which no call under way uses; with ``is_alone``, as soon as none is under way."""
    if function.changes and options.num_slices > 1:
        raise ValueError(
            f"cannot call {function.name!r}: got num_slices={options.num_slices}, expected 1, because it changes "
            "resident objects: each rank runs it once."
        )
    started = time.monotonic_ns()
    counters = session.counters
    staged, pickled = counters["bytes_staged"], counters["bytes_pickled"]
    epoch = session.workers.epoch.number
    call = bind(session, function, args, kwargs, options, deadline)
    _load(session, function, call, deadline)
    cached = plan_call(session, function, call, options, lane)
    stage(session, cached, call)
    write_numbers(lane, call)
    staged, pickled = counters["bytes_staged"] - staged, counters["bytes_pickled"] - pickled
    counters["calls"] += 1
    number = next(session.numbers)
    if is_alone and session.queue.calls:
        lane.down[0, Down.CALL] = number
        if session.has_devices:
            session.workers.prefetch(call.ranks, cached.plan.plan_id, lane.index)
        session.resume(f"submit {function.name!r}", deadline)
        _load(session, function, call, deadline)
    if is_alone:
        session.queue.check_step(function)
    launched = send(session, function, call, cached, number, deadline)
    launched.epoch = epoch
    launched.started_ns, launched.staged_nbytes, launched.pickled_nbytes = started, staged, pickled
    return launched


def send(
    session: Session, function: Callee, call: Call, cached: CachedPlan, number: int, deadline: float | None
) -> Launched:
    """Send call ``number``, whose arguments and bounds are in place."""
    workers, lane, plan_id, name = session.workers, cached.lane, cached.plan.plan_id, repr(function.name)
    lease = None
    try:
        call.has_group = session.group.announce(workers, lane, len(call.ranks))
        contents = {rank: cached.plan for rank in call.ranks if plan_id not in workers.by_rank[rank].known.plans}
        lease = _lease(session, cached, call)
        segments = cached.segments if lease is None else [*cached.segments, lease.segment]
        cached.is_agreed = False  # until the call has ended well: a worker may tell of a layout that is not taken in
        for rank in contents:
            workers.by_rank[rank].known.plans.add(plan_id)
        lane.down[0, Down.CALL] = number
        lane.down[0, Down.RESULT] = 0 if lease is None else lease.segment.id
        request = workers.send(Kind.CALL, call.ranks, plan_id, contents, segments, deadline, "call", name, lane.index)
    except BaseException as error:
        _forget(session, function, cached, lease, error)
        raise
    return Launched(function, call, cached, number, request, lease, deadline)


def collect(session: Session, launched: Launched) -> Any:
    """Wait for the replies to a call and return its result."""
    steps = collecting(session, launched)
    try:
        request = next(steps)
        while True:
            request = steps.send(session.workers.wait(request))
    except BaseException as error:
        if isinstance(error, StopIteration) and not is_from_handler(error):
            return error.value
        steps.close()
        abandon(session, launched, error)
        raise


def abandon(session: Session, launched: Launched, error: BaseException) -> None:
    """Clean up after a call that did not end well."""
    _forget(session, launched.function, launched.cached, launched.lease, error)


def _forget(session: Session, function: Callee, cached: CachedPlan, lease: Lease | None, error: BaseException) -> None:
    """Forget the plan of a call that did not end well, and take its buffer back."""
    function.plans.discard(cached, session.workers)
    if lease is not None:
        session.memory.results.give_back(lease)
    is_known = not isinstance(error, Exception) or isinstance(error, SynkError)
    if session.is_closed and not is_known and not is_from_handler(error):
        raise ClosedError("the call was ended: the runtime was closed by another thread.") from error
    if function.changes and not cached.plan.is_trial:
        session.residents.note_failed(function.changes, error)


def _load(session: Session, function: Callee, call: Call, deadline: float | None) -> None:
    """See that all workers live, have the function, and hold the values that it reads."""
    for resident in (*function.residents, *(each.value for each in call.arguments if each.kind == "resident")):
        resident.check(f"call {function.name!r}")
    function.load(session, deadline)
    while session.workers.processes.has_dead:  # one that died after it had loaded the function
        session.resume(f"call {function.name!r}", deadline)
        function.load(session, deadline)
    if session.has_devices:  # a value there ends with its worker
        used = [argument.value for argument in call.arguments if argument.kind in ("shard", "replica")]
        check_not_lost([*function.variables, *used], None, f"call {function.name!r}")


def _lease(session: Session, cached: CachedPlan, call: Call) -> Lease | None:
    """Lease a buffer for the large outputs of a call, where all ranks know their parts from an earlier one.

    They fill it without being asked once all of their outputs are there, if those look as before. No call needs it.
    """
    assembly = cached.assembly
    if assembly is None or not assembly.result_nbytes or call.has_group:
        return None
    by_rank = session.workers.by_rank
    plan_id = cached.plan.plan_id
    if any(by_rank[rank].known.assemblies.get(plan_id) != assembly.number for rank in call.ranks):
        return None
    layouts = [cached.layouts[rank] for rank in call.ranks]
    if not assembly.fits(call.ranks, layouts, cached.lane.slots, False):
        return None
    try:
        return session.memory.lease_result(assembly.result_nbytes)
    except SharedMemoryError:  # if the outputs need it after all, the call says so
        return None
