"""Prepares a call in shared memory: its plan, its arguments, its numbers."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from synk._master.calls.arguments import Argument, padded, pickle_nests, transfers_in
from synk._master.calls.callee import Callee
from synk._master.calls.launched import Launched
from synk._master.calls.plans import CachedPlan, Call
from synk._master.session import Session
from synk._master.state.lanes import Lane
from synk._master.state.repeated import TIMED_NBYTES
from synk._pure.arrays import copy_into
from synk._pure.call_options import CallOptions
from synk._pure.ranges import LINE_NBYTES
from synk._wire.control import Down
from synk._wire.memory import Segment
from synk._wire.messages import Input, Plan

_PAGE = 4096
_CALL = int(Down.CALL)


class _Places(NamedTuple):
    """Where in the staging segment the values of a call go, in bytes from its start.

    ``capacity`` is the room for the pickle of broadcast objects, and ``nbytes`` the room for everything.
    """

    arrays: list[int]
    pickle: int
    buffers: list[int]
    indices: list[int]
    capacity: int
    nbytes: int


def plan_call(session: Session, function: Callee, call: Call, options: CallOptions, lane: Lane) -> CachedPlan:
    """Return the plan for calls like this one, from the cache if it is there."""
    key = _key(function, call, options, lane)
    cached = function.plans.get((*key, 0 if lane.staging is None else lane.staging.id))
    if cached is not None:
        return cached
    places = _places(call)
    staging = session.grow_staging(lane, places.nbytes)
    plan = _plan(next(session.plan_ids), function, call, options, staging.id, places)
    cached = _cached_plan(plan, call, lane, staging, places)
    function.plans.put((*key, staging.id), cached, session.workers.log)
    return cached


def _key(function: Callee, call: Call, options: CallOptions, lane: Lane) -> tuple[Any, ...]:
    """Return what calls must have in common to have one plan, apart from the staging segment."""
    return (
        function.id,
        tuple([(argument.keyword, argument.key, argument.nest) for argument in call.arguments]),
        options.num_slices,
        options.output_subset,
        tuple([-1 if indices is None else len(indices) for indices in call.index_arrays]),
        _capacity_of(call),
        tuple([view.nbytes for view in call.objects[1]]),
        call.nests,
        call.all_ranks,
        lane.index,
    )


def _places(call: Call) -> _Places:
    """Lay the values of a call out one after the other."""
    end = 0

    def reserve(nbytes: int) -> int:
        nonlocal end
        start = aligned(end, nbytes)
        end = start + nbytes
        return start

    arrays = [reserve(a.array.size * a.dtype.itemsize) if a.array is not None else 0 for a in call.arguments]
    capacity = _capacity_of(call)
    pickle = reserve(capacity) if capacity else 0
    buffers = [reserve(view.nbytes) for view in call.objects[1]]
    indices = [0 if indices is None else reserve(indices.nbytes) for indices in call.index_arrays]
    return _Places(arrays, pickle, buffers, indices, capacity, end)


def aligned(offset: int, nbytes: int) -> int:
    """Return the next offset at which ``nbytes`` bytes should start: on a cache line or, if large, on a page."""
    alignment = _PAGE if nbytes >= (1 << 20) else LINE_NBYTES
    return -(-offset // alignment) * alignment


def capacity_for(nbytes: int) -> int:
    """Return the room for a pickle of ``nbytes`` bytes: a power of two, so that small changes keep the plan."""
    return 256 if nbytes <= 256 else 1 << (nbytes - 1).bit_length()


def _capacity_of(call: Call) -> int:
    """Return the room for the pickle of a call's broadcast objects; 0 if it has none."""
    return capacity_for(len(call.objects[0])) if call.objects[0] else 0


def _plan(plan_id: int, function: Callee, call: Call, options: CallOptions, staging_id: int, places: _Places) -> Plan:
    """Return what the workers are told of a call."""
    inputs = []
    num_objects = 0
    for argument, place in zip(call.arguments, places.arrays):
        inputs.append(input_of(argument, staging_id, num_objects if argument.kind == "object" else place))
        num_objects += argument.kind == "object"
    rows_place, local_place = [
        None if indices is None else (staging_id, at, len(indices))
        for at, indices in zip(places.indices, call.index_arrays)
    ]
    return Plan(
        plan_id,
        function.id,
        tuple(inputs),
        options.num_slices,
        options.output_subset,
        (staging_id, places.pickle, places.capacity) if places.capacity else None,
        tuple((staging_id, at, view.nbytes) for at, view in zip(places.buffers, call.objects[1])),
        is_rowless=call.selection is None,
        indices_place=rows_place,
        local_indices_place=local_place,
        nests=pickle_nests(call.arguments, function.name) if call.nests is None else call.nests,
        all_ranks=call.all_ranks,
    )


def input_of(argument: Argument, segment_id: int, offset: int) -> Input:
    """Return the worker's description of an argument that lies at this place."""
    if argument.kind == "object":
        return Input(argument.keyword, "object", 0, offset)
    if argument.kind in ("shard", "replica", "resident"):
        return Input(argument.keyword, argument.kind, argument.value.id)
    if argument.contents is not None:
        array, number = argument.contents.array, argument.contents.segment_id
        return Input(argument.keyword, argument.kind, number, 0, array.shape, array.dtype, file=argument.file)
    assert argument.array is not None
    shape, dtype = argument.array.shape, argument.dtype
    return Input(argument.keyword, argument.kind, segment_id, offset, shape, dtype, tensor_dtype=argument.tensor_dtype)


def _cached_plan(plan: Plan, call: Call, lane: Lane, staging: Segment, places: _Places) -> CachedPlan:
    """Return a plan with the master's views of the places that its calls copy to."""
    arrays = [(a, a.array, at) for a, at in zip(call.arguments, places.arrays) if a.array is not None]
    files = [argument.contents.segment for argument in call.arguments if argument.contents is not None]
    segments = [segment for segment in files if segment is not None]
    return CachedPlan(
        plan,
        lane,
        [*segments, staging] if places.nbytes else segments,
        [staging.view(at, array.shape, argument.dtype) for argument, array, at in arrays],
        [a.label if array.nbytes >= TIMED_NBYTES and a.kind != "table" else "" for a, array, _ in arrays],
        staging.buffer[places.pickle : places.pickle + places.capacity] if places.capacity else None,
        [staging.buffer[at : at + view.nbytes] for at, view in zip(places.buffers, call.objects[1])],
        [
            (position, staging.view(at, indices.shape, indices.dtype))
            for position, (at, indices) in enumerate(zip(places.indices, call.index_arrays))
            if indices is not None
        ],
        transfers_in(call.arguments, call.objects),
    )


def values_of(call: Call, cached: CachedPlan) -> list[np.ndarray]:
    """Return the arrays that are copied to the targets of a plan."""
    values = [argument.array for argument in call.arguments if argument.array is not None]
    if cached.pickle_place is not None:
        values.append(padded(call.objects[0], cached.pickle_place.nbytes))
    return values


def stage(session: Session, launched: Launched) -> None:
    """Write what a call brings into shared memory: plain arrays, pickles, indices, bounds, and its number.

    This is the only copy of an array that the master makes.
    """
    cached, call, lane = launched.cached, launched.call, launched.cached.lane
    # No rank reads these places now: all ranks have answered the last call in this lane, and this one's doorbell has
    # not rung.
    for target, value, label in zip(cached.targets, launched.values, cached.labels):
        if not label:
            target[...] = value
            continue
        record = launched.function.record
        launched.function.repeated.note(label, value)
        began = time.monotonic_ns()
        copy_into(target, value)
        record.staged_ns += time.monotonic_ns() - began
    if cached.buffers:
        for target, view in zip(cached.buffers, call.objects[1]):
            copy_into(target, np.frombuffer(view, np.uint8))
    for position, place in cached.index_places:
        place[...] = call.index_arrays[position]
    session.counters["bytes_staged"] += cached.staged_nbytes
    write_bounds(lane, call)
    launched.number = lane.first_down[_CALL] = next(session.numbers)


def write_bounds(lane: Lane, call: Call) -> None:
    """Write each rank's bounds, and whether the call is timed, into the control segment."""
    if call.block is None:
        call.block = _block(call)
    lane.bounds[...] = call.block


def _block(call: Call) -> np.ndarray:
    selection = call.selection
    rows = dict(zip(call.ranks, call.rows))
    start, step = (0, 1) if selection is None else (selection.start, selection.step)
    local = call.owned.local_ranges if call.owned is not None else None
    running = set(call.ranks)
    return np.array(
        [
            (
                rank in running,
                low,
                high,
                start,
                step,
                rows.get(rank, 0),
                *(local[rank] if local else (0, 1)),
                call.is_timed,
            )
            for rank, (low, high) in enumerate(call.bounds)
        ],
        np.int64,
    )
