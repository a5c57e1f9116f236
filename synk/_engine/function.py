"""From the arguments of a call to its result: how ``synk.Function`` runs and submits calls."""

from __future__ import annotations

import time
from typing import Any

from synk._engine.argument import HELD, Argument, classes_in, pack_tables, pickle_objects
from synk._engine.arguments import classified, look
from synk._engine.callee import Callee
from synk._engine.engine import Call
from synk._engine.pending import PendingCall
from synk._engine.plan import Plan, keep
from synk._engine.residents import ResidentObject
from synk._engine.rows import CallOptions, divided
from synk._engine.session import Session
from synk._pure.ops import EACH
from synk._pure.ranges import nbytes_in_place, round_up

PLAIN = CallOptions()


def run(function: Any, args: Any, kwargs: dict[str, Any], options: CallOptions) -> Any:
    """Run a call and return its result: what ``Function._run`` does, for calls and for what is made of calls."""
    made = _begin(function, function._verb, args, kwargs, options)
    if made.error is not None and _can_try_again(made.error):
        made = _begin(function, function._verb, args, kwargs, options)
    error = made.error
    if error is None:
        return made.value
    try:
        raise error
    finally:
        del made, error


def _can_try_again(error: BaseException) -> bool:
    """Whether a call that failed is run once more: memory ran out on a device, and the call has left nothing behind.

    The libraries on the device have given back by then what they held and did not use; see ``Backend.recover``.
    """
    return bool(getattr(error, "is_of_device", False) and getattr(error, "_is_put_back", True))


def submit(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions, release: Any
) -> PendingCall[Any]:
    """Send a call and return its future."""
    made = _begin(function, f"submit {function.__name__!r}", args, kwargs, options)
    pending: PendingCall[Any] = PendingCall(made.engine, made.callee.name, made)
    pending._release = release
    return pending


def _begin(function: Any, verb: str, args: Any, kwargs: dict[str, Any], options: CallOptions) -> Call:
    """Begin a call, and end it unless it was submitted. What is broken off before it is the caller's is ended."""
    started_ns = time.monotonic_ns()
    callee: Callee = function._callee
    if callee.capture is None or not callee.capture.is_current():
        function = function._renewed()
        callee = function._callee
    session: Any = callee.fixed_session or callee.session
    if session is None or session.processes.is_closed:
        session = function._bound_session()
    made: Call | None = None
    with session.entered(verb):
        try:
            deadline = session.deadline(options.timeout)
            session.enter_call(verb, deadline)
            made = _sent(session, callee, verb, tuple(args), kwargs, options, deadline, started_ns)
            if not options.is_submitted or session.is_inline:
                if len(session.flight) == 1:
                    made.settle()
                else:
                    made.note_begun()
                    session.settle_to(made)
            else:
                made.note_begun()
        except BaseException as error:
            if not session.is_closed and (not session.is_sure or (made is not None and not made.has_ended)):
                session.recover(error)
            raise
    return made


def _sent(
    session: Session,
    callee: Callee,
    verb: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CallOptions,
    deadline: float | None,
    started_ns: int,
) -> Call:
    """Find or make the plan of a call, and send it."""
    face, values, arguments = look(callee, args, kwargs, session, options.is_submitted)
    if callee.capture is None or callee.session is not session:
        callee.load(session)
    if session.flight and _uses_state(callee, values, arguments):
        session.settle_state(verb, deadline)  # what comes next depends on whether the calls before are committed
    lane = session.next_lane(verb, deadline)
    if session.has_dead:  # a call before has ended with a death
        session.enter_call(verb, deadline)
    key = lane.index, face, options.num_slices, options.output_subset
    plan: Plan | None = callee.plans_by_key.get(key)
    if plan is not None and (plan.is_outgrown or (plan.staging is not None and plan.staging is not lane.staging)):
        plan = None
    before, objects = plan, None
    if plan is not None:
        division = plan.choose(session, callee, values, options.batch, options.num_ranks)
        if plan.objects:
            objects = _objects(session, callee, [values[k] for k in plan.objects], plan.object_labels)
            callee.load(session)  # a class may have been met that the ranks lack
        if plan.table_rooms and arguments is not None:
            _pack_again(plan, values, arguments, division, callee.name)
        is_too_small = objects is not None and callee.object_room > len(plan.object_place)
        if plan.is_outgrown or is_too_small or not plan.fits:
            plan = None
    if plan is None:
        plan, division, objects, values = _made(session, callee, args, kwargs, options, key, arguments, lane, before)
    if plan.residents or plan.changes:
        session.residents.bring_into_line([*plan.residents, *plan.changes], f"call {callee.name!r}")
    made = Call(session, callee, plan, values, division, objects, deadline, started_ns)
    refused = session.after_failed_step(callee) if options.is_submitted and plan.changes else None
    if refused is None:
        made.begin()
    else:
        made.end(refused)
    return made


def _made(
    session: Session,
    callee: Callee,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CallOptions,
    key: Any,
    arguments: list[Argument] | None,
    lane: Any,
    before: Plan | None,
) -> tuple[Plan, Any, list[Any] | None, list[Any]]:
    """Make the plan of a call, and keep it."""
    _check_options(callee, options)
    if arguments is None:
        arguments = classified(callee, args, kwargs, session, options.is_submitted)
    division = divided(session, callee, arguments, options)
    pack_tables(arguments, division, callee.name)
    for argument in arguments:
        if argument.nest is not None:
            callee.meet_classes(classes_in(argument.nest.structure))
        elif argument.kind == "resident":
            callee.meet_classes(argument.value.classes)
    objects: list[Any] | None = None
    listed = [argument for argument in arguments if argument.kind == "object"]
    if listed:
        objects = _objects(session, callee, [a.value for a in listed], [a.label for a in listed])
    callee.load(session)
    plan = Plan(session, callee, lane, arguments, division, options, callee.object_room, before)
    keep(callee, key, plan)
    values = [a.contents if a.contents is not None else a.value if a.array is None else a.array for a in arguments]
    return plan, division, objects, values


def _pack_again(plan: Plan, values: list[Any], arguments: list[Argument], division: Any, name: str) -> None:
    """Put the rows of tables in the place of their values."""
    pack_tables(arguments, division, name)
    for k, room in plan.table_rooms.items():
        values[k] = arguments[k].array
        if values[k].shape[1] > room:
            plan.is_outgrown = True


def _check_options(callee: Callee, options: CallOptions) -> None:
    if options.num_slices > 1 and callee.changes:
        raise ValueError(
            f"cannot call {callee.name!r}: got num_slices={options.num_slices}, expected 1, because it changes "
            "resident objects: each rank runs it once. Divide the rows inside the function."
        )
    without_op = [variable.name for variable, op in callee.updates if op is None]
    if options.num_slices > 1 and without_op:
        raise ValueError(
            f"cannot call {callee.name!r}: got num_slices={options.num_slices}, expected 1, because updates= names "
            f"sharded variable {without_op[0]!r} without an op: the new values of its slices could be rows, or parts "
            "of one value. If they are parts, name the op, as in updates=[(variable, 'sum')]."
        )
    if options.output_subset is not None and callee.ops is EACH:
        raise TypeError(
            f"cannot select outputs of {callee.name!r}: got output_subset and op None, which takes nothing apart, "
            "expected an op for each output. Build it with outputs=(None, None) or the like."
        )


def _uses_state(callee: Callee, values: list[Any], arguments: list[Argument] | None) -> bool:
    """Whether a call reads or changes variables or resident objects."""
    if callee.variables or callee.residents or callee.changes:
        return True
    if any(isinstance(value, ResidentObject) for value in values):
        return True
    return arguments is not None and any(argument.kind in HELD for argument in arguments)


def _objects(session: Session, callee: Callee, values: list[Any], labels: list[str]) -> list[Any]:
    """Pickle the objects of a call. Their classes count as captured."""
    parts, classes = pickle_objects(values, labels, callee.name)
    if classes:
        callee.meet_classes(classes)
    session.counters["bytes_pickled"] += len(parts[0])
    needed = nbytes_in_place(parts)
    if needed > callee.object_room:  # the next ones may be longer
        callee.object_room = round_up(needed + needed // 4, 1 << 10)
    return parts
