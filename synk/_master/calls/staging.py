"""Prepares a call in shared memory: its plan, its arguments, its numbers."""

from __future__ import annotations

import time

import numpy as np

from synk._master.calls.arguments import aligned, capacity_for, input_of, padded, pickle_nests, transfers_in
from synk._master.calls.callee import Callee
from synk._master.calls.launched import Launched
from synk._master.calls.plans import CachedPlan, Call, CallOptions
from synk._master.session import Session
from synk._master.state.guard import GUARDED_NBYTES
from synk._master.state.lanes import Lane
from synk._pure.arrays import copy_into
from synk._wire.control import Down
from synk._wire.messages import Plan


def plan_call(session: Session, function: Callee, call: Call, options: CallOptions, lane: Lane) -> CachedPlan:
    """Return the plan for this call's signature, from the cache if it is there."""
    plans = function.plans
    index_arrays = call.index_arrays
    buffer_sizes: tuple[int, ...] = ()
    capacity = 0
    if call.objects is not None:
        capacity = capacity_for(len(call.objects[0]))
        buffer_sizes = tuple(view.nbytes for view in call.objects[1])
    key = (
        function.id,
        tuple([(argument.keyword, argument.key, argument.nest) for argument in call.arguments]),
        options.num_slices,
        options.num_repeats,
        options.output_subset,
        options.is_trial,
        options.is_apart,
        tuple([-1 if indices is None else len(indices) for indices in index_arrays]),
        capacity,
        buffer_sizes,
        call.nests,
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
        next(session.plan_ids),
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
        nests=pickle_nests(call.arguments, function.name) if call.nests is None else call.nests,
        block_rows=0 if options.is_trial else function.block_rows,
        num_repeats=options.num_repeats,
    )
    contents = [argument.contents for argument in call.arguments if argument.contents is not None]
    segments = [each.segment for each in contents if each.segment is not None]
    if offset:
        segments.append(staging)
    cached = CachedPlan(
        plan,
        lane,
        segments,
        staged,
        [
            argument.label if argument.array.nbytes >= GUARDED_NBYTES else ""
            for argument in call.arguments
            if argument.array is not None
        ],
        staging.buffer[pickle_at : pickle_at + capacity] if capacity else None,
        [staging.buffer[at : at + size] for at, size in zip(buffers_at, buffer_sizes)],
        [
            (position, staging.view(at, indices.shape, indices.dtype))
            for position, (at, indices) in enumerate(zip(indices_at, index_arrays))
            if indices is not None
        ],
        transfers_in(call.arguments, call.objects),
    )
    plans.put(key, cached, session.workers.log)
    return cached


def values_of(call: Call, cached: CachedPlan) -> list[np.ndarray]:
    """Return the arrays that are copied to the targets of a plan."""
    values = [argument.array for argument in call.arguments if argument.array is not None]
    if call.objects is not None and cached.pickle_place is not None:
        values.append(padded(call.objects[0], cached.pickle_place.nbytes))
    return values


def stage(session: Session, launched: Launched) -> None:
    """Copy plain arrays, pickles and indices into shared memory. This is the only copy that the master makes."""
    cached, call = launched.cached, launched.call
    # No rank reads these places now: all ranks have answered the last call in this lane, and this one's doorbell has
    # not rung.
    for target, value, label in zip(cached.targets, launched.values, cached.labels):
        if not label:
            target[...] = value
            continue
        record = launched.function.record
        if not call.options.is_trial:
            launched.function.copies.compare(session.guard, record.unchanged, label, value)
        began = time.monotonic_ns()
        copy_into(target, value)
        record.staged_ns += time.monotonic_ns() - began
    if cached.buffers and call.objects is not None:
        for target, view in zip(cached.buffers, call.objects[1]):
            copy_into(target, np.frombuffer(view, np.uint8))
    for position, place in cached.index_places:
        place[...] = call.index_arrays[position]
    session.counters["bytes_staged"] += cached.staged_nbytes


def write_bounds(lane: Lane, call: Call) -> None:
    """Write each rank's bounds, and whether the call is timed, into the control segment, unless they are there."""
    if call.block is None:
        call.block = _block(call)
    if lane.written is not call.block:
        lane.written = None  # until all of them are written
        lane.down[:, Down.PARTICIPATES : Down.TIMED + 1] = call.block
        lane.written = call.block


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
