"""Collectives over shared variables on CPU workers, called by the master.

Values lie in shared memory, so a collective is a set of copies and reductions between segments. No array byte passes
through the master's pipes. The master carries out small collectives itself, since a message would cost more than the
arithmetic. Large ones are divided among the workers, by rows or by elements. Over nodes, which share no memory, the
master carries out the large ones as well. Results go to the second buffers of the variables and take effect together,
so a failure in the middle changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._master.session import Session
from synk._master.state.variable import Variable
from synk._master.workers.failures import raise_failures
from synk._pure.arrays import copy_into
from synk._pure.ops import REDUCE_OPS, REDUCTIONS
from synk._pure.ranges import chunk_bounds
from synk._pure.shards import Selection, select_rows, shard_bounds
from synk._wire.memory import Segment
from synk._wire.messages import LARGE_NBYTES, Kind
from synk._wire.steps import Copy, Reduce, Step, run_steps
from synk._wire.variables import Shapes, dtype_runs, leaf_offsets

_MASTER_NBYTES = 8 << 20
"""If a collective reads no more than this, the master is faster than the workers; benchmarks/collectives.py."""


def pair(variables: Any, listed: Sequence[Variable], values: Any) -> list[tuple[Variable, Any]]:
    """Return each variable with its value: one of each, or two sequences of equal length.

    All values are checked here, so that a collective over several variables moves all of them or none.
    """
    if values is None:
        return [(variable, None) for variable in listed]
    pairs = _paired(variables, listed, values)
    for variable, value in pairs:
        variable.check(value)
    return pairs


def _paired(variables: Any, listed: Sequence[Variable], values: Any) -> list[tuple[Variable, Any]]:
    if not isinstance(variables, (list, tuple)):
        return [(listed[0], values)]
    if not isinstance(values, (list, tuple)) or len(values) != len(listed):
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
        raise ValueError(f"cannot set {len(listed)} variables: got {got}, expected one value for each.")
    return list(zip(listed, values))


def _do(session: Session, variable: Variable, steps: dict[int, list[Step]], extra: Sequence[Segment] = ()) -> None:
    """Carry out the steps of each rank: in the master if they are small, else on the workers."""
    # The targets are second buffers, or a leased one. A worker that dies in the middle leaves them torn, and the caller
    # raises before anything of them becomes a value.
    segments = [segment for rank in range(session.world_size) for segment in variable.segments(rank)] + list(extra)
    nbytes = sum(_step_nbytes(step) for own in steps.values() for step in own)
    if nbytes <= _MASTER_NBYTES or session.world_size == 1 or not session.workers.has_shared_memory:
        by_id = {segment.id: segment for segment in segments}
        for own in steps.values():
            run_steps(own, by_id)
        return
    ranks = [rank for rank, own in steps.items() if own]
    replies = session.workers.ask(
        Kind.VARIABLE, ranks, 0, steps, segments, session.deadline(None), "collective", f"variable {variable.name!r}"
    )
    raise_failures(replies, session.world_size, variable.name)


def _step_nbytes(step: Step) -> int:
    """Return how many bytes a step reads."""
    return step.count * step.dtype.itemsize * len(step.sources) if isinstance(step, Reduce) else step.nbytes


def _front(variable: Variable, rank: int) -> int:
    segment = variable.buffers[rank][variable.front[rank]]
    assert segment is not None
    return segment.id


def broadcast(session: Session, variable: Variable, value: Any = None) -> None:
    """Give every rank ``value``, or without one the value of rank 0."""
    if value is not None:
        arrays = variable.check(value)
        variable.fill_back(0, arrays)
    else:
        if session.device_values.collective(variable, session.deadline(None), "broadcast", variable.value_shapes[0]):
            return
        session.device_values.refresh(variable, session.deadline(None), [0])
    variable.unite(is_new=value is not None)


def assign(session: Session, variable: Variable, value: Any) -> None:
    """Set the value of all ranks, or divide its rows among them."""
    if variable.is_sharded:
        scatter(session, variable, *check_scatter(variable, value, None))
    else:
        variable.fill_back(0, variable.check(value))
        variable.unite(is_new=True)


def set_value(session: Session, variable: Variable, value: Any, rank: Any) -> None:
    """Set the value of one rank."""
    check_rank(session, variable, rank)
    variable.fill_back(rank, variable.check(value, rank))
    variable.flip([rank])


def check_rank(session: Session, variable: Variable, rank: Any) -> None:
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
        raise TypeError(
            f"cannot use {rank!r} as a rank of variable {variable.name!r}: expected an integer. w[rank] is the value "
            "on one rank; the rows are w.value[...]."
        )
    if not 0 <= rank < session.world_size:
        raise IndexError(
            f"cannot use rank {rank} of variable {variable.name!r}: expected 0 to {session.world_size - 1}."
        )


def get_value(session: Session, variable: Variable, rank: Any) -> Any:
    """Return a copy of the value on ``rank``."""
    check_rank(session, variable, rank)
    session.device_values.refresh(variable, session.deadline(None), [rank])
    return variable.build([copied(leaf) for leaf in variable.leaves(rank)])


def copied(leaf: np.ndarray) -> np.ndarray:
    out = np.empty(leaf.shape, leaf.dtype)
    copy_into(out, leaf)
    return out


def check_scatter(variable: Variable, value: Any, batch: Any) -> tuple[list[np.ndarray], Selection]:
    """Return the arrays to scatter, and which of their rows ``batch`` selects."""
    arrays = variable.check(value)
    if any(array.ndim == 0 for array in arrays) or len({len(array) for array in arrays}) > 1:
        raise ValueError(
            f"cannot scatter to variable {variable.name!r}: got shapes {[array.shape for array in arrays]}, "
            "expected equal axis-0 lengths."
        )
    return arrays, select_rows(batch, len(arrays[0]), f"the value of {variable.name!r}")


def scatter(session: Session, variable: Variable, arrays: Sequence[np.ndarray], selection: Selection) -> None:
    """Give each rank its part of the selected rows of ``arrays``."""
    is_range = selection.indices is None and selection.step == 1
    rows = None if is_range else selection.positions()
    for rank, (low, high) in enumerate(shard_bounds(selection.count, session.world_size)):
        shapes = tuple((high - low, *array.shape[1:]) for array in arrays)
        for target, source in zip(variable.back(rank, shapes), arrays):
            if rows is None:
                copy_into(target, source[selection.start + low : selection.start + high])
            elif high > low:
                np.take(source, rows[low:high], axis=0, out=target, mode="clip")  # the positions were checked
    variable.flip(range(session.world_size))


def gather(session: Session, variable: Variable, nd_up: int) -> Any:
    """Return the values of all ranks: concatenated along axis 0 (``nd_up=0``), or stacked on a new one (1)."""
    if nd_up not in (0, 1):
        raise ValueError(f"cannot gather variable {variable.name!r}: got nd_up={nd_up!r}, expected 0 or 1.")
    session.device_values.refresh(variable, session.deadline(None))
    results = []
    for leaf, dtype in enumerate(variable.dtypes):
        parts = [variable.leaves(rank)[leaf] for rank in range(session.world_size)]
        if nd_up == 1 and len({part.shape for part in parts}) > 1:
            raise ValueError(
                f"cannot stack variable {variable.name!r}: got shapes {[part.shape for part in parts]}, expected "
                "equal ones. Use nd_up=0 to concatenate shards of different length."
            )
        if nd_up == 0 and parts[0].ndim == 0:
            raise ValueError(f"cannot concatenate variable {variable.name!r}: it has no axis 0. Use nd_up=1.")
        if nd_up == 1:
            parts = [part[np.newaxis] for part in parts]
        out = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype)
        start = 0
        for part in parts:
            copy_into(out[start : start + len(part)], part)
            start += len(part)
        results.append(out)
    return variable.build(results)


def check_rows(variable: Variable) -> None:
    """Raise ValueError if a variable has no axis 0."""
    if any(not shape for shape in variable.value_shapes[0]):
        raise ValueError(f"cannot concatenate variable {variable.name!r}: it has no axis 0.")


def all_gather(session: Session, variable: Variable) -> None:
    """Make every rank's value the concatenation of the values of all ranks, along axis 0."""
    world_size = session.world_size
    fronts = variable.value_shapes
    shapes: Shapes = tuple(
        (sum(front[leaf][0] for front in fronts), *fronts[0][leaf][1:]) for leaf in range(len(fronts[0]))
    )
    if session.device_values.collective(variable, session.deadline(None), "all_gather", shapes):
        return
    session.device_values.refresh(variable, session.deadline(None))
    source_offsets = [leaf_offsets(variable.dtypes, front)[0] for front in fronts]
    target_offsets, _ = leaf_offsets(variable.dtypes, shapes)
    variable.back(0, shapes)
    target_id = variable.reserve(0, shapes).id
    steps: dict[int, list[Step]] = {rank: [] for rank in range(world_size)}
    for leaf, dtype in enumerate(variable.dtypes):
        at = target_offsets[leaf]
        for rank in range(world_size):
            nbytes = int(np.prod(fronts[rank][leaf], dtype=np.int64)) * dtype.itemsize
            steps[rank].append(Copy((_front(variable, rank), source_offsets[rank][leaf]), (target_id, at), nbytes))
            at += nbytes
    _do(session, variable, steps)
    variable.unite(is_new=True)


def check_reduction(session: Session, variable: Variable, op: str) -> Shapes:
    """Return the shapes that all ranks have in common."""
    if op not in REDUCE_OPS:
        raise ValueError(
            f"cannot reduce variable {variable.name!r}: got op {op!r}, expected one of "
            f"{', '.join(map(repr, REDUCE_OPS))}."
        )
    for dtype in variable.dtypes:
        REDUCTIONS[op].check(dtype, f"variable {variable.name!r}")
    fronts = variable.value_shapes
    if len(set(fronts)) > 1:
        raise ValueError(
            f"cannot reduce variable {variable.name!r}: got shapes {shapes(variable)}, expected the same on all ranks."
        )
    return fronts[0]


def _reduce_steps(
    session: Session, variable: Variable, op: str, common: Shapes, target: Segment
) -> dict[int, list[Step]]:
    """Divide the elements among the ranks: each reduces its own part of all values."""
    world_size = session.world_size
    sources = [_front(variable, rank) for rank in range(world_size)]
    steps: dict[int, list[Step]] = {rank: [] for rank in range(world_size)}
    for dtype, start, stop in dtype_runs(variable.dtypes, common):
        bounds = chunk_bounds((stop - start) // dtype.itemsize, dtype.itemsize, world_size)
        for rank, (low, high) in enumerate(bounds):
            if high > low:
                at = start + low * dtype.itemsize
                steps[rank].append(Reduce(op, dtype, high - low, tuple((s, at) for s in sources), (target.id, at)))
    return steps


def all_reduce(session: Session, variable: Variable, op: str) -> None:
    """Reduce the values of all ranks, and give the result to every rank."""
    common = check_reduction(session, variable, op)
    if session.device_values.collective(variable, session.deadline(None), "all_reduce", common, op):
        return
    session.device_values.refresh(variable, session.deadline(None))
    variable.back(0, common)
    target = variable.reserve(0, common)
    _do(session, variable, _reduce_steps(session, variable, op, common, target))
    variable.unite(is_new=True)


def reduce(session: Session, variable: Variable, op: str, in_place: bool) -> Any:
    """Reduce the values of all ranks into rank 0's value, or into new arrays for the caller."""
    common = check_reduction(session, variable, op)
    session.device_values.refresh(variable, session.deadline(None))
    if in_place:
        variable.back(0, common)
        target = variable.reserve(0, common)
        _do(session, variable, _reduce_steps(session, variable, op, common, target))
        variable.flip([0])
        return None
    offsets, nbytes = leaf_offsets(variable.dtypes, common)
    lease = session.memory.lease_result(max(nbytes, 1))
    segment = lease.segment
    # If a rank fails, nobody gives the lease back: the pool takes the buffer when the traceback with this frame ends.
    _do(session, variable, _reduce_steps(session, variable, op, common, segment), [segment])
    root = lease.deliver()
    arrays = []
    for at, shape, dtype in zip(offsets, common, variable.dtypes):
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        view = root[at : at + size].view(dtype).reshape(shape)
        arrays.append(view if size >= LARGE_NBYTES else view.copy())
    return variable.build(arrays)


def shapes(variable: Variable) -> list[Any]:
    """Return the shape on each rank; for a nested variable, a nesting of shapes."""
    return [variable.build(each) if variable.is_nested else each[0] for each in variable.value_shapes]
