"""One call, in the master: arguments -> rows -> plan and numbers -> exchange -> assembly.

Reads top to bottom in :func:`launch` and :func:`collect`. The runtime is held and all workers are alive.
"""

from __future__ import annotations

import functools
import itertools
import operator
import pickle
import time
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from synk._master import collectives
from synk._master.arguments import (
    Argument,
    Signature,
    aligned,
    assign,
    capacity_for,
    check_argument,
    input_of,
    own_rows,
    pickle_objects,
    select,
)
from synk._master.assembly import Assembly
from synk._master.device_values import check_not_lost
from synk._master.failures import raise_failures
from synk._master.lanes import Lane
from synk._master.plans import CachedPlan, Call, CallOptions, Places, PlanCache, RepeatedCall
from synk._master.results import Lease
from synk._master.row_shapes import RowShapes, tell
from synk._master.session import Session
from synk._master.variable import Variable
from synk._master.workers import Flight
from synk._pure.arrays import copy_into
from synk._pure.interrupts import is_from_handler
from synk._pure.ops import each_op, match_ops
from synk._pure.shards import Assignment, Selection, shard_bounds
from synk._pure.trees import flatten, leaves_of
from synk._wire.control import BLOCK_LENGTH, Down, Traits, Up
from synk._wire.memory import Segment
from synk._wire.messages import ASSEMBLED, DONE, IS_ASSEMBLED, Kind, Layout, Plan, Reply, Status, slot_offsets
from synk.errors import (
    CallCancelled,
    CallTimeout,
    ClosedError,
    SerializationError,
    SharedMemoryError,
    SynkError,
    WorkerDied,
)

_even_bounds = functools.lru_cache(maxsize=256)(shard_bounds)

_plan_ids = itertools.count(1)

_TRIAL_NS, _TRIAL_NBYTES = 1_000_000_000, 1 << 26
"""The longest run of a function, and the largest one, that is run again to learn of its outputs."""


class Callee(Protocol):
    """What a call needs of the function that is called."""

    name: str
    id: int
    signature: Signature
    outputs: Any
    per_rank: bool
    row_shapes: RowShapes
    plans: PlanCache
    variables: set[Variable]
    is_stale: bool

    def load(self, session: Session, deadline: float | None) -> None:
        """See that the workers have it."""


@dataclass(slots=True)
class Launched:
    """A call that was sent to the workers."""

    function: Callee
    call: Call
    cached: CachedPlan
    number: int
    flight: Flight
    lease: Lease | None
    deadline: float | None
    started_ns: int = 0
    staged_nbytes: int = 0
    pickled_nbytes: int = 0


@dataclass
class Tried:
    """What a call on trial showed.

    Attributes
    ----------
    leaves : list
        The outputs; where they were not combined, each a list with one entry per rank.
    skeleton
        The nesting of the outputs, with leaf positions as leaves.
    ranks, rows : list of int
        Who ran, and the rows of each.
    traits : Traits
    assigned : dict of Variable to list of lists of ndarray
        New values of variables by rank that ran, each as its arrays. None of them holds.
    """

    leaves: list[Any]
    skeleton: Any
    ranks: list[int]
    rows: list[int]
    traits: Traits
    assigned: dict[Variable, list[list[np.ndarray]]]


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
    started = time.monotonic_ns()
    counters = session.counters
    staged, pickled = counters["bytes_staged"], counters["bytes_pickled"]
    repeat = function.plans.repeats.get(lane.index) if options.is_plain and not kwargs else None
    if repeat is not None and repeat.stage(session.counters, args):
        call, cached = repeat.call, repeat.cached
        _load(session, function, call, deadline)
    else:
        call, cached = _prepare(session, function, args, kwargs, options, deadline, lane)
    staged, pickled = counters["bytes_staged"] - staged, counters["bytes_pickled"] - pickled
    counters["calls"] += 1
    number = next(session.numbers)
    if is_alone and session.queue.calls:
        lane.down[0, Down.CALL] = number
        if session.has_devices:
            session.team.prefetch(call.ranks, cached.plan.plan_id, lane.index)
        session.resume(f"submit {function.name!r}", deadline)
        _load(session, function, call, deadline)
    launched = _send(session, function, call, cached, number, deadline)
    launched.started_ns, launched.staged_nbytes, launched.pickled_nbytes = started, staged, pickled
    return launched


def _send(
    session: Session, function: Callee, call: Call, cached: CachedPlan, number: int, deadline: float | None
) -> Launched:
    """Send call ``number``, whose arguments and bounds are in place."""
    team, lane, plan_id, name = session.team, cached.lane, cached.plan.plan_id, repr(function.name)
    lease = None
    try:
        call.has_group = session.group.announce(team, lane, len(call.ranks))
        contents = {rank: cached.plan for rank in call.ranks if plan_id not in team.links[rank].plans}
        lease = _lease(session, cached, call)
        segments = cached.segments if lease is None else [*cached.segments, lease.segment]
        cached.is_agreed = False  # until the call has ended well: a worker may tell of a layout that is not taken in
        for rank in contents:
            team.links[rank].plans.add(plan_id)
        lane.down[0, Down.CALL] = number
        lane.down[0, Down.RESULT] = 0 if lease is None else lease.segment.id
        flight = team.launch(Kind.CALL, call.ranks, plan_id, contents, segments, deadline, "call", name, lane.index)
    except BaseException as error:
        _forget(session, function, cached, lease, error)
        raise
    return Launched(function, call, cached, number, flight, lease, deadline)


def collect(session: Session, launched: Launched) -> Any:
    """Wait for the replies to a call and return its result."""
    steps = collecting(session, launched)
    try:
        flight = next(steps)
        while True:
            flight = steps.send(session.team.finish(flight))
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
    function.plans.discard(cached, session.team)
    if lease is not None:
        session.memory.results.give_back(lease)
    is_known = not isinstance(error, Exception) or isinstance(error, SynkError)
    if session.is_closed and not is_known and not is_from_handler(error):
        raise ClosedError("the call was ended: the runtime was closed by another thread.") from error


def _prepare(
    session: Session,
    function: Callee,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CallOptions,
    deadline: float | None,
    lane: Lane,
) -> tuple[Call, CachedPlan]:
    """Check, plan and stage a call; return it with its plan."""
    call = _bind(session, function, args, kwargs, options, deadline)
    _load(session, function, call, deadline)
    cached = _plan(session, function, call, options, lane)
    _stage(session, cached, call)
    _write_numbers(lane, call)
    if options.is_plain and not kwargs and RepeatedCall.fits(call):
        function.plans.repeats[lane.index] = RepeatedCall(cached, call)
    else:
        function.plans.repeats.pop(lane.index, None)
    return call, cached


def _load(session: Session, function: Callee, call: Call, deadline: float | None) -> None:
    """See that all workers live, have the function, and hold the values that it reads."""
    function.load(session, deadline)
    while session.team.has_dead:  # one that died after it had loaded the function
        session.resume(f"call {function.name!r}", deadline)
        function.load(session, deadline)
    if session.has_devices:  # a value there ends with its worker
        used = [argument.value for argument in call.arguments if argument.kind in ("shard", "replica")]
        check_not_lost([*function.variables, *used], None, f"call {function.name!r}")


# -- arguments and rows -----------------------------------------------------------------------------------------------


def _bind(
    session: Session,
    function: Callee,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CallOptions,
    deadline: float | None,
) -> Call:
    """Check the arguments and decide which rank works on which rows. Nothing is sent before this is done."""
    name = function.name
    arguments = [
        check_argument(label, keyword, is_broadcast, value, name, session)
        for label, keyword, is_broadcast, value in function.signature.bind(args, kwargs)
    ]
    if options.is_serial:
        _bring_together(session, function, arguments, deadline)
    call = _divide(session, function, arguments, options, deadline)
    values = [argument for argument in arguments if argument.kind == "object"]
    if values:
        call.objects = pickle_objects([a.value for a in values], [a.label for a in values], name)
        session.counters["bytes_pickled"] += len(call.objects[0])
    return call


def _bring_together(session: Session, function: Callee, arguments: list[Argument], deadline: float | None) -> None:
    """Give a serial call all rows of the sharded variables, for one rank cannot read another's shard."""
    for argument in arguments:
        if argument.kind != "shard":
            continue
        if argument.value.is_nested:
            raise TypeError(
                f"cannot call {function.name!r} serially: {argument.label} is a nested sharded variable, whose rows "
                "would have to be passed as several inputs. Call it in parallel, or share its arrays one by one."
            )
        argument.kind, argument.array = "rows", collectives.gather(session, argument.value, 0)
        argument.dtype = argument.array.dtype
    for variable in _closed_over_shards(session, function, deadline):
        for leaf in flatten(collectives.gather(session, variable, 0))[0]:
            arguments.append(Argument(variable.name, "", "closed over", array=leaf, value=variable, dtype=leaf.dtype))


def _divide(
    session: Session, function: Callee, arguments: list[Argument], options: CallOptions, deadline: float | None
) -> Call:
    """Decide which rows a call works on, which ranks run it, and on which of the rows each."""
    name, world_size = function.name, session.world_size
    shards = [argument for argument in arguments if argument.kind == "shard"]
    owned: Assignment | None = None
    sources: Sequence[Variable] = ()
    unequal = ""
    selection: Selection | None
    if shards:
        owned = assign(arguments, shards, options.batch, options.shard_batch, name)
        selection, bounds = owned.selection, owned.bounds
    elif options.shard_batch is not None:
        raise ValueError(f"cannot call {name!r}: shard_batch was given, but no argument is a sharded variable.")
    else:
        selection = select(arguments, options.batch, name)
        if selection is not None:
            bounds = _even_bounds(selection.count, 1 if options.is_serial else world_size)
        else:
            if not function.per_rank:
                sources = _closed_over_shards(session, function, deadline)
                if not sources:
                    _check_rowless(function.outputs, name)
            bounds, unequal = own_rows(sources, world_size, name)
    if options.is_serial:
        count = bounds[-1][1]
        bounds, unequal = [(0, count)] + [(count, count)] * (world_size - 1), ""
    ranks = [0] if options.is_serial else list(range(world_size))
    has_rows = selection is not None or bool(sources)
    # Of a function whose outputs are not combined, a rank without rows shows what else it has.
    if selection is not None or (sources and any(op is not None for op in each_op(function.outputs))):
        ranks = [rank for rank, (low, high) in enumerate(bounds) if high > low]
        if not ranks:
            _check_no_rows(function.outputs, name, sources)
            ranks = [0]
    rows = [bounds[rank][1] - bounds[rank][0] if has_rows else 1 for rank in ranks]
    return Call(arguments, selection, bounds, ranks, rows, None, options, owned, sources, unequal)


def _closed_over_shards(session: Session, function: Callee, deadline: float | None) -> list[Variable]:
    """Return the sharded variables that a function closes over, which is known when it has been sent."""
    function.load(session, deadline)
    return sorted((v for v in function.variables if v.is_sharded), key=lambda variable: variable.id)


def _check_no_rows(outputs: Any, name: str, sources: Sequence[Variable]) -> None:
    """With no rows at all only sums and gathers have a value."""
    step = "Build it with per_rank=True if it fills sharded variables that are empty" if sources else "Check the batch"
    for op in each_op(outputs):
        if op not in ("sum", "gather"):
            raise ValueError(
                f"cannot call {name!r} with no rows: op {op!r} has no value there, expected 'sum' or 'gather'. "
                f"{step}, or skip the call."
            )


def _check_rowless(outputs: Any, name: str) -> None:
    """Where no rows are divided every rank computes the same: a sum or gather would depend on how many they are."""
    for op in each_op(outputs):
        if callable(op) or op in ("sum", "prod", "gather"):
            raise ValueError(
                f"cannot call {name!r}: got op {op!r} and no rows to divide, expected a scattered argument or a "
                "sharded variable that the function closes over. Use op 'first' if all ranks compute the same value, "
                "or build it with per_rank=True if each rank contributes its own."
            )


# -- the plan ---------------------------------------------------------------------------------------------------------


def _plan(session: Session, function: Callee, call: Call, options: CallOptions, lane: Lane) -> CachedPlan:
    """Return the plan for this call's signature, from the cache where it was seen before."""
    plans = function.plans
    index_arrays = call.index_arrays
    buffer_sizes: tuple[int, ...] = ()
    capacity = 0
    if call.objects is not None:
        capacity = capacity_for(len(call.objects[0]))
        buffer_sizes = tuple(view.nbytes for view in call.objects[1])
    key = (
        function.id,
        tuple([(argument.keyword, argument.key) for argument in call.arguments]),
        options.num_slices,
        options.output_subset,
        options.is_trial,
        options.is_apart,
        tuple([-1 if indices is None else len(indices) for indices in index_arrays]),
        capacity,
        buffer_sizes,
        lane.index,
        lane.staging.id if lane.staging is not None else 0,
    )
    cached = plans.get(key)
    if cached is not None:
        return cached
    offset = 0
    offsets: list[int] = []

    def reserve(nbytes: int) -> int:
        nonlocal offset
        start = aligned(offset, nbytes)
        offset = start + nbytes
        offsets.append(start)
        return start

    array_places = [reserve(a.array.size * a.dtype.itemsize) if a.array is not None else 0 for a in call.arguments]
    pickle_at = reserve(capacity) if capacity else 0
    buffers_at = [reserve(size) for size in buffer_sizes]
    indices_at = [reserve(indices.nbytes) if indices is not None else 0 for indices in index_arrays]
    staging = session.grow_staging(lane, offset)
    key = (*key[:-1], staging.id)
    staged: list[np.ndarray] = []
    inputs = []
    num_objects = 0
    for argument, place in zip(call.arguments, array_places):
        inputs.append(input_of(argument, staging.id, num_objects if argument.kind == "object" else place))
        num_objects += argument.kind == "object"
        if argument.array is not None:
            staged.append(staging.view(place, argument.array.shape, argument.dtype))
    index_places = [
        (staging.id, at, len(indices)) if indices is not None else None for at, indices in zip(indices_at, index_arrays)
    ]
    plan = Plan(
        next(_plan_ids),
        function.id,
        tuple(inputs),
        options.num_slices,
        options.output_subset,
        (staging.id, pickle_at, capacity) if capacity else None,
        tuple((staging.id, at, size) for at, size in zip(buffers_at, buffer_sizes)),
        is_rowless=call.selection is None,
        indices_place=index_places[0],
        local_indices_place=index_places[1],
        order_place=index_places[2],
        is_trial=options.is_trial,
        is_apart=options.is_apart,
    )
    contents = [argument.contents for argument in call.arguments if argument.contents is not None]
    segments = [each.segment for each in contents if each.segment is not None]
    if offset:
        segments.append(staging)
    places = Places(
        staging.buffer[pickle_at : pickle_at + capacity] if capacity else None,
        [staging.buffer[at : at + size] for at, size in zip(buffers_at, buffer_sizes)],
        [
            staging.view(at, indices.shape, indices.dtype) if indices is not None else None
            for at, indices in zip(indices_at, index_arrays)
        ],
    )
    cached = CachedPlan(plan, lane, segments, staged, places)
    plans.put(key, cached, session.team)
    return cached


def _stage(session: Session, cached: CachedPlan, call: Call) -> None:
    """Copy plain arrays, pickles and indices into shared memory: the one copy that the master makes."""
    nbytes = 0
    arrays = (argument.array for argument in call.arguments if argument.array is not None)
    for target, source in zip(cached.staged, arrays):
        copy_into(target, source)
        nbytes += target.nbytes
    places = cached.places
    if call.objects is not None and places.pickle is not None:
        data, buffers = call.objects
        places.pickle[: len(data)] = np.frombuffer(data, np.uint8)
        for target, view in zip(places.buffers, buffers):
            copy_into(target, np.frombuffer(view, np.uint8))
            nbytes += view.nbytes
    for place, indices in zip(places.indices, call.index_arrays):
        if place is not None:
            place[...] = indices
            nbytes += place.nbytes
    session.counters["bytes_staged"] += nbytes


def _write_numbers(lane: Lane, call: Call) -> None:
    """Write each rank's bounds into the control segment, where they differ from those of the call before."""
    selection = call.selection
    rows = dict(zip(call.ranks, call.rows))
    start, step, count = (0, 1, 0) if selection is None else (selection.start, selection.step, selection.count)
    local = call.owned.local_ranges if call.owned is not None else None
    key = (call.bounds, call.ranks, call.rows, start, step, count, local)
    if lane.last_numbers != key:
        lane.last_numbers = None  # until all of them are written
        running = set(call.ranks)
        lane.down[:, Down.PARTICIPATES : Down.LOCAL_STEP + 1] = [
            (
                rank in running,
                low,
                high,
                start,
                step,
                count,
                rows.get(rank, 0),
                *(local[rank] if local else (0, 1)),
            )
            for rank, (low, high) in enumerate(call.bounds)
        ]
        lane.last_numbers = key


assert max(Down) < BLOCK_LENGTH

# -- replies ----------------------------------------------------------------------------------------------------------


def collecting(session: Session, launched: Launched) -> Generator[Flight, dict[int, Reply], Any]:
    """Turn replies into the result: errors first, then agreement, then the large outputs, then the values.

    A generator: it yields each message whose replies it needs, is sent these, and returns the result.
    """
    call, cached, lease = launched.call, launched.cached, launched.lease
    name, outputs = launched.function.name, None if call.options.is_apart else launched.function.outputs
    lane = cached.lane
    replies = yield launched.flight
    is_plain = all(reply is DONE or reply is ASSEMBLED for reply in replies.values())
    if not is_plain:
        raise_failures(replies, session.world_size, name)
    objects = None if is_plain else _take_layouts(name, cached, call.ranks, replies)
    layouts = [cached.layouts[rank] for rank in call.ranks]
    for rank, layout in zip(call.ranks, layouts):
        for variable_id, shapes in layout.assigned:  # what later messages of this call declare must say so
            session.variables[variable_id].note_back(rank, shapes)
    if not is_plain and any(reply.status == Status.UNPUBLISHED for reply in replies.values()):
        waiting = [rank for rank in call.ranks if replies[rank].status == Status.UNPUBLISHED]
        raise_failures((yield _republish(session, launched, layouts, waiting)), session.world_size, name)
    assembly = cached.assembly
    is_new = assembly is None or not assembly.fits(call.ranks, layouts, lane.exchange, call.has_group)
    if assembly is None or is_new:
        assembly = cached.assembly = Assembly(
            name, outputs, cached.plan.output_subset, call.ranks, layouts,
            lane.exchange, lane.slot_nbytes, session.world_size, call.has_group,
        )  # fmt: skip
        cached.output_nbytes = sum(leaf.nbytes for layout in layouts for leaf in layout.leaves)
        lease = None
    if call.unequal and assembly.has_averages:
        raise ValueError(call.unequal)
    root = None
    if assembly.result_nbytes:
        waiting = [rank for rank in call.ranks if not replies[rank].flags & IS_ASSEMBLED]
        lease = lease or session.memory.lease_result(assembly.result_nbytes)
        if waiting:
            try:
                assembled = yield _assemble_large(session, launched, assembly, waiting, lease)
                raise_failures(assembled, session.world_size, name)
            except BaseException:
                session.memory.results.give_back(lease)  # the exception may be kept, and this frame with it
                raise
            for rank in waiting:
                session.team.links[rank].assemblies[cached.plan.plan_id] = assembly.number
        root = lease.deliver()
    result = assembly.build(call.rows, objects, root, call.owned.order if call.owned is not None else None)
    if call.options.is_trial:
        cached.is_agreed = True
        return _tried(session, launched, assembly, layouts, result)
    if assembly.has_assignments:
        if call.options.is_serial:
            _check_serial_assignments(session, layouts[0], name)
        session.variables.commit(call.ranks, layouts, launched.number)
    cached.is_agreed = True
    up_words = lane.up_words
    record = session.profile.record(name)
    record.num_calls += 1
    record.function_ns += max([up_words[rank][Up.FUNCTION_NS] for rank in call.ranks])
    record.output_nbytes += cached.output_nbytes
    record.staged_nbytes += launched.staged_nbytes
    record.pickled_nbytes += launched.pickled_nbytes
    record.wall_ns += time.monotonic_ns() - launched.started_ns
    if is_new and launched.function.row_shapes.is_open:
        _look_at_shapes(launched, assembly)
    return result


def _look_at_shapes(launched: Launched, assembly: Assembly) -> None:
    """See whether outputs that were reduced look as if they had a value for each row."""
    function, call = launched.function, launched.call
    has_rows = call.selection is not None or bool(call.sources)
    if not has_rows or len(call.ranks) == 1 or call.options.output_subset is not None or function.per_rank:
        return
    inputs = [(a, a.array if a.contents is None else a.contents.array) for a in call.arguments]
    others = None
    if inputs and not function.variables and all(array is not None for _, array in inputs):
        others = tuple((a.keyword, array.shape[a.kind == "rows" :]) for a, array in inputs)  # type: ignore[union-attr]
    leaves = assembly.layouts[0].leaves
    tell(function.row_shapes.look(assembly.ops, leaves, call.rows, call.options.num_slices, others))


def try_shorter(session: Session, launched: Launched) -> None:
    """Have one rank run a function again, on trial and without its last row, and see whether the outputs are shorter.

    Once in the life of a function, after a call whose outputs were as long as a rank's rows; and only where it costs
    little. Whatever this call meets says nothing about the one before.
    """
    function, call, lane = launched.function, launched.call, launched.cached.lane
    shapes, assembly = function.row_shapes, launched.cached.assembly
    shapes.wants_trial = False
    rank = call.ranks[0]
    low, high = call.bounds[rank]
    function_ns = lane.up_words[rank][Up.FUNCTION_NS]
    is_cheap = function_ns < _TRIAL_NS and session.functions.sent_nbytes(function.id) < _TRIAL_NBYTES
    if launched.deadline is not None:  # the time limit is the call's: it must not end a worker here
        is_cheap = is_cheap and time.monotonic() + 10 * (function_ns * 1e-9 + 0.1) < launched.deadline
    is_repeated = not call.arguments and not call.sources
    if high - low < 2 or is_repeated or not is_cheap or assembly is None:
        return
    bounds = [(low, high - 1) if each == rank else pair for each, pair in enumerate(call.bounds)]
    options = replace(call.options, num_slices=1, is_trial=True, is_apart=True)
    try:
        arguments = [*call.arguments, *_shorter_variables(session, call, rank)]
        shorter = replace(
            call, arguments=arguments, bounds=bounds, ranks=[rank], rows=[high - low - 1], options=options
        )
        cached = _plan(session, function, shorter, options, lane)
        _stage(session, cached, shorter)
        _write_numbers(lane, shorter)
        number = next(session.numbers)
        tried = collect(session, _send(session, function, shorter, cached, number, launched.deadline))
        function.plans.discard(cached, session.team)
    except Exception as error:
        if is_from_handler(error):
            raise
        if isinstance(error, (WorkerDied, CallTimeout, ClosedError)):  # the call is over, and has its result
            warnings.warn(
                f"a second run of {function.name!r} on rank {rank}, with one row less, which was to tell whether its "
                f"outputs follow the rows, ended its worker: {error}",
                RuntimeWarning,
                stacklevel=5,
            )
        return
    follow = [
        k for k in shapes.suspects if k < len(tried.leaves) and np.shape(tried.leaves[k][rank])[:1] == (high - low - 1,)
    ]
    tell(shapes.convict(follow, assembly.ops, high - low))


def _shorter_variables(session: Session, call: Call, rank: int) -> list[Argument]:
    """Return the shards of ``rank`` without their last row as inputs, where they are the rows of the call."""
    return [
        Argument("", "", "closed over", array=leaf[:-1], value=variable, dtype=leaf.dtype)
        for variable in call.sources
        for leaf in flatten(collectives.get_value(session, variable, rank))[0]
    ]


def _tried(session: Session, launched: Launched, assembly: Assembly, layouts: list[Layout], result: Any) -> Tried:
    """Return what a call on trial showed; its assignments are not committed, so they never happened."""
    call, up_words = launched.call, launched.cached.lane.up_words
    assigned = {}
    for variable_id, _ in () if session.has_devices else layouts[0].assigned:
        variable = session.variables[variable_id]
        assigned[variable] = [[leaf.copy() for leaf in variable.assigned_leaves(rank)] for rank in call.ranks]
    traits = functools.reduce(operator.or_, [up_words[rank][Up.TRAITS] for rank in call.ranks])
    return Tried(
        leaves_of(assembly.structure, result), assembly.skeleton, call.ranks, call.rows, Traits(traits), assigned
    )


def _check_serial_assignments(session: Session, layout: Layout, name: str) -> None:
    for variable_id, _ in layout.assigned:
        variable = session.variables[variable_id]
        if variable.is_sharded:
            raise ValueError(
                f"cannot assign variable {variable.name!r} in a serial call of {name!r}: it is sharded, expected a "
                "parallel call, in which each rank assigns its own rows. The call has changed nothing."
            )


def _take_layouts(name: str, cached: CachedPlan, ranks: Sequence[int], replies: dict[int, Reply]) -> list[list[Any]]:
    """Note new layouts and return each rank's outputs that are no arrays."""
    objects: list[list[Any]] = []
    for rank in ranks:
        body = replies[rank].body
        values: list[Any] = []
        if body:
            layout, packed = _unpickle(body, name, rank, "its structure")
            if layout is not None:
                cached.layouts[rank] = layout
            values = [_unpickle(item, name, rank, f"object {k}") for k, item in enumerate(packed)]
        objects.append(values)
    return objects


def _unpickle(data: bytes, name: str, rank: int, what: str) -> Any:
    try:
        return pickle.loads(data)
    except BaseException as error:  # the user's classes are built here: whatever they do must not end the session
        if is_from_handler(error):
            raise
        raise SerializationError(
            f"cannot load a result of {name!r} from rank {rank} ({what}): {type(error).__name__}: {error}. "
            "Return arrays, numbers or objects whose class can be loaded in the master."
        ) from error


def _ask(
    session: Session,
    launched: Launched,
    kind: Kind,
    ranks: list[int],
    value: int,
    contents: dict[int, Any],
    segments: Sequence[Segment],
    phase: str,
) -> Flight:
    """Send ranks a message about the outputs of a call that they have run."""
    if launched.flight.is_cut:
        raise CallCancelled(
            f"the outputs of {launched.function.name!r} were lost before they were collected: another call that was "
            "under way was ended. Submit it again."
        )
    name, lane = repr(launched.function.name), launched.cached.lane.index
    return session.team.launch(kind, ranks, value, contents, segments, launched.deadline, phase, name, lane)


def _republish(session: Session, launched: Launched, layouts: list[Layout], waiting: list[int]) -> Flight:
    """Make room for the outputs and new values of shared variables; the ranks ``waiting`` for it publish again."""
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
        outputs = None if call.options.is_apart else function.outputs
        ops = match_ops(outputs, layout.skeleton, len(leaves), repr(function.name))
        needed = max(needed, slot_offsets(layout.leaves, ops, len(ranks), call.has_group)[1])
    if needed > lane.slot_nbytes:
        session.grow_exchange(lane, needed, [rank for rank in ranks if rank not in waiting])
    return _ask(session, launched, Kind.PUBLISH, waiting, 0, {}, [], "publish")


def _lease(session: Session, cached: CachedPlan, call: Call) -> Lease | None:
    """Lease a buffer for the large outputs of a call, where all ranks know their parts from an earlier one.

    They fill it without being asked once all of their outputs are there, if those look as before. No call needs it.
    """
    assembly = cached.assembly
    if assembly is None or not assembly.result_nbytes or call.has_group:
        return None
    links = session.team.links
    plan_id = cached.plan.plan_id
    if any(links[rank].assemblies.get(plan_id) != assembly.number for rank in call.ranks):
        return None
    layouts = [cached.layouts[rank] for rank in call.ranks]
    if not assembly.fits(call.ranks, layouts, cached.lane.exchange, False):
        return None
    try:
        return session.memory.lease_result(assembly.result_nbytes)
    except SharedMemoryError:  # if the outputs need it after all, the call says so
        return None


def _assemble_large(session: Session, launched: Launched, assembly: Assembly, ranks: list[int], lease: Lease) -> Flight:
    """Have ``ranks`` bring their parts of the large outputs into a leased buffer."""
    links, plan_id = session.team.links, launched.cached.plan.plan_id
    contents = {rank: assembly.moves[rank] for rank in ranks if links[rank].assemblies.get(plan_id) != assembly.number}
    return _ask(session, launched, Kind.ASSEMBLE, ranks, lease.segment.id, contents, [lease.segment], "reduce")
