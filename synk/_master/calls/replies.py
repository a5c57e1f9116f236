"""From the replies to a call to its result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from synk._master.calls.assembly import Assembly
from synk._master.calls.launched import Launched, Steps
from synk._master.calls.plans import CachedPlan
from synk._master.session import Session
from synk._master.state.ledger import Transfer
from synk._master.state.results import Lease
from synk._master.workers.failures import raise_failures
from synk._master.workers.requests import Request
from synk._pure.output_ops import match_ops
from synk._pure.trees import flatten
from synk._wire.combining import loaded, loaded_objects
from synk._wire.memory import Segment
from synk._wire.messages import ASSEMBLED, DONE, IS_ASSEMBLED, Kind, Layout, PickledOutput, Reply, Status, slot_offsets
from synk.errors import CallCancelled

R = TypeVar("R")


def carry_out(session: Session, steps: Steps[R]) -> R:
    """Wait for each request of ``steps`` in turn, and return what they return."""
    try:
        request = next(steps)
        while True:
            request = steps.send(session.workers.wait(request))
    except StopIteration as ended:
        result: R = ended.value
        return result
    finally:
        steps.close()


def collecting(session: Session, launched: Launched) -> Steps[Any]:
    """Turn replies into the result: errors first, then agreement, then the large outputs, then the values.

    A generator: it yields each request whose replies it needs (first the call, which is a request itself), is sent the
    replies, and returns the result. ``done`` and ``result(timeout)`` of a submitted call must be able to return while a
    later request of the call is unanswered, because that request waits behind the calls that were submitted after this
    one. A call that is waited for uses :func:`carry_out`.
    """
    if session.nodes is not None:
        return (yield from session.nodes.collecting(launched))
    call, cached, name = launched.call, launched.cached, launched.function.name
    replies = yield launched
    is_repeated = all(reply is DONE or reply is ASSEMBLED for reply in replies.values())
    if not is_repeated:
        raise_failures(replies, session.total_ranks, name)
    packed = take_layouts(name, cached, call.ranks, replies)
    objects = [] if is_repeated else [loaded_objects(parts, name, rank) for rank, parts in zip(call.ranks, packed)]
    _, lease = yield from publishing(session, launched, replies)
    result = conclude(session, launched, objects, lease)
    if any(packed):
        launched.function.record.add_objects(sum(len(each) for parts in packed for _, each in parts))
    return result


def publishing(session: Session, launched: Launched, replies: dict[int, Reply]) -> Steps[tuple[Assembly, Lease | None]]:
    """Have all outputs published, and the large ones put in place.

    Returns how they are put together, and the buffer of the large ones.
    """
    call, cached, name = launched.call, launched.cached, launched.function.name
    layouts = [cached.layouts[rank] for rank in call.ranks]
    for rank, layout in zip(call.ranks, layouts):
        # later messages of this call declare the variables with these shapes
        for variable_id, shapes in layout.assigned:
            session.variables[variable_id].note_back(rank, shapes)
    waiting = [rank for rank in call.ranks if replies[rank].status == Status.UNPUBLISHED]
    if waiting:
        raise_failures((yield _republish(session, launched, layouts, waiting)), session.total_ranks, name)
    before = cached.assembly
    assembly = launched.assembly = _agree(session, launched, layouts)
    if not assembly.result_nbytes:
        return assembly, None
    # A buffer that was leased when the call was sent is laid out as the ranks knew it then.
    known = launched.lease if assembly is before else None
    return assembly, (yield from _large_outputs(session, launched, assembly, replies, known))


def conclude(
    session: Session, launched: Launched, objects: Sequence[list[Any]], lease: Lease | None, words: Any = None
) -> Any:
    """Put the outputs of all ranks together, and commit what the call assigned and changed.

    ``objects`` are the outputs that are not arrays. ``lease`` is the buffer in which the large outputs lie. ``words``
    are the numbers that the ranks have reported, by rank; by default those in the lane.
    """
    call, cached, assembly = launched.call, launched.cached, launched.assembly
    assert assembly is not None
    if words is None:
        words = cached.lane.up_words
    tracer = session.tracer
    heard_ns = time.monotonic_ns() if tracer is not None else 0
    # All workers have written their parts of the large outputs, so the buffer may become the user's. The commit comes
    # after everything that can fail.
    root = None if lease is None else lease.deliver()
    result = assembly.build(call.rows, objects, root, None if call.owned is None else call.owned.order)
    if assembly.has_assignments:
        session.variables.commit(call.ranks, assembly.layouts, launched.number)
    # Until here the call counts as in flight. If a signal handler breaks it off, the next operation settles it, and
    # finishes a commit whose store has been made.
    session.workers.requests.pop(launched.sequence, None)
    if launched.function.changes:
        session.residents.note_changed(launched.function.changes, launched.number, call.ranks)
    cached.is_agreed = True
    ended_ns = time.monotonic_ns()
    wall_ns = ended_ns - launched.started_ns
    launched.function.record.add(cached.transfers, call.ranks, call.rows, words, wall_ns)
    if call.is_timed:
        launched.function.record.add_copies(call.ranks, words)
    if tracer is not None:
        tracer.note(launched, heard_ns, ended_ns)
    return result


def _agree(session: Session, launched: Launched, layouts: list[Layout]) -> Assembly:
    """Return how the outputs of all ranks are put together. Raise if they do not fit."""
    call, cached, lane = launched.call, launched.cached, launched.cached.lane
    assembly = cached.assembly
    if assembly is None or not assembly.fits(call.ranks, layouts, lane.slots, call.has_group):
        assembly = cached.assembly = Assembly(
            launched.function.name, launched.function.ops, cached.plan.output_subset, call.ranks, layouts,
            lane.slots, lane.slot_nbytes, session.world_size, call.has_group, launched.function.is_partial,
        )  # fmt: skip
        launched.function.plans.forget_outputs(cached)
        outputs = Transfer("outputs", "output", sum(leaf.nbytes for layout in layouts for leaf in layout.leaves))
        cached.transfers = launched.function.record.known((*cached.inputs, outputs))
    if call.unequal and assembly.has_weights:
        raise ValueError(call.unequal)
    return assembly


def _large_outputs(
    session: Session, launched: Launched, assembly: Assembly, replies: dict[int, Reply], lease: Lease | None
) -> Steps[Lease]:
    """Have the ranks that have not done so put their parts of the large outputs in place. Return the leased buffer."""
    waiting = [rank for rank in launched.call.ranks if not replies[rank].flags & IS_ASSEMBLED]
    lease = lease or session.memory.lease_result(assembly.result_nbytes)
    if waiting:
        moves = {rank: assembly.moves[rank] for rank in waiting if rank not in assembly.told}
        try:
            assembled = yield _ask(
                session, launched, Kind.ASSEMBLE, waiting, lease.segment.id, moves, [lease.segment], "reduce"
            )
            raise_failures(assembled, session.total_ranks, launched.function.name)
        except BaseException:
            session.memory.results.give_back(lease)  # the exception may be kept, and this frame with it
            raise
        # Only after the replies: a rank that was interrupted may not have kept its part for later calls.
        assembly.told.update(waiting)
    return lease


def take_layouts(
    name: str, cached: CachedPlan, ranks: Sequence[int], replies: dict[int, Reply]
) -> list[list[PickledOutput]]:
    """Note new layouts, and return the outputs that each rank has pickled into its reply."""
    found: list[list[PickledOutput]] = []
    for rank in ranks:
        body = replies[rank].body
        packed: list[PickledOutput] = []
        if body:
            layout, packed = loaded(body, name, rank)
            if layout is not None:
                cached.layouts[rank] = layout
        found.append(packed)
    return found


def _ask(
    session: Session,
    launched: Launched,
    kind: Kind,
    ranks: list[int],
    value: int,
    contents: dict[int, Any],
    segments: Sequence[Segment],
    phase: str,
) -> Request:
    """Send ranks a message about the outputs of a call that they have run."""
    if launched.is_forgotten:
        raise CallCancelled(
            f"the outputs of {launched.function.name!r} were lost before they were collected: another call in "
            "flight was ended. Submit it again."
        )
    name, lane = repr(launched.function.name), launched.cached.lane.index
    return session.workers.send(kind, ranks, value, contents, segments, launched.later_deadline, phase, name, lane)


def _republish(session: Session, launched: Launched, layouts: list[Layout], waiting: list[int]) -> Request:
    """Make room for outputs and new values of variables. The ranks in ``waiting``, which lacked it, publish again."""
    call, lane = launched.call, launched.cached.lane
    function, ranks = launched.function, call.ranks
    for rank, layout in zip(ranks, layouts):
        if rank not in waiting:
            continue
        for variable_id, shapes in layout.assigned:
            session.variables[variable_id].reserve(rank, shapes)
    needed = 0
    for layout in layouts:
        leaves, _ = flatten(layout.skeleton)
        ops = match_ops(function.ops, layout.skeleton, len(leaves), repr(function.name))
        needed = max(needed, slot_offsets(layout.leaves, ops, len(ranks), call.has_group)[1])
    if needed > lane.slot_nbytes:
        session.grow_slots(lane, needed, [rank for rank in ranks if rank not in waiting])
    return _ask(session, launched, Kind.PUBLISH, waiting, 0, {}, [], "publish")
