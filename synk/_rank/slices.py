"""A call in several slices on one rank: the function runs once for each slice, and its outputs are accumulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from synk._pure.ops import EACH, Folded, Op, Reduction, is_int
from synk._pure.output_ops import match_ops
from synk._pure.partials import Accumulator, SliceValues
from synk._pure.tables import is_table
from synk._pure.trees import flatten, output_names, skeleton_of, unflatten
from synk._rank.functions import LoadedFunction
from synk._rank.values import Object, Partial, array_or_object, as_object, as_returned, on_host, snapshot, take_whole
from synk.backends import Backend


def run_slices(
    function: LoadedFunction,
    backend: Backend,
    slices: Sequence[Any],
    call: Callable[[Any], Any],
) -> Any:
    """Return the result of ``function`` over all slices of this rank's rows.

    Parameters
    ----------
    slices : sequence
    call : callable
        Runs the function on a slice.
    """
    accumulators: list[Accumulator] = []
    structure: Any = None
    ops: list[Op] = []
    names: list[str] = []
    were_tensors: list[list[bool]] = []  # by output, in each slice
    are_tables: list[bool] = []
    for part in slices:
        result = call(part)
        if function.whole is not None:
            result = take_whole(result, function.whole, has_arrays=True)
        values, got_structure = flatten(result)
        if structure is None:
            structure = got_structure
            skeleton = skeleton_of(structure, len(values))
            were_tensors = [[] for _ in values]
            ops = match_ops(function.ops, skeleton, len(values), repr(function.name))
            names = output_names(skeleton)
            are_tables = [_joins(value, op) for value, op in zip(values, ops)]
            accumulators = [
                Accumulator(EACH if is_kept else op, f"{name} of {function.name!r}", backend.xp)
                for op, name, is_kept in zip(ops, names, are_tables)
            ]
        elif got_structure != structure:
            raise ValueError(
                f"cannot accumulate the outputs of {function.name!r} over slices: got structure {got_structure}, "
                f"expected {structure} as in the first slice."
            )
        for position, (accumulator, value) in enumerate(zip(accumulators, values)):
            if _joins(value, ops[position]) != are_tables[position]:
                raise ValueError(
                    f"cannot accumulate {names[position]} of {function.name!r} over slices: got "
                    f"{type(value).__name__}, and {'a' if are_tables[position] else 'no'} table in the first slice."
                )
            if ops[position] is EACH and isinstance(value, Object):
                value = Object(on_host(function, backend, value.value, names[position]))
            were_tensors[position].append(function.is_tensor(value))
            value = array_or_object(backend, value, ops[position], names[position], function)
            value = snapshot(backend, value, names[position], function)
            if isinstance(ops[position], Folded):
                value = as_returned(as_object(backend, value), were_tensors[position][-1])
            is_one = isinstance(value, Object) and (ops[position].concatenates or are_tables[position])
            accumulator.add(value.value if is_one else value, part.high - part.low)
    rows = [part.high - part.low for part in slices]
    totals = [
        Object(SliceValues(accumulator.result(), rows))
        if is_kept  # the program combines the tables of all ranks at once
        else _total(function, backend, accumulator, rows, own)
        for accumulator, own, is_kept in zip(accumulators, were_tensors, are_tables)
    ]
    return unflatten(structure, totals)


def _total(
    function: LoadedFunction, backend: Backend, accumulator: Accumulator, rows: list[int], were_tensors: list[bool]
) -> Any:
    """Return one output over all slices."""
    op = accumulator.op
    is_partial = isinstance(op, Reduction)
    total = accumulator.partial() if is_partial else accumulator.result()
    if op.concatenates and isinstance(total, list):
        total = Object(total)
    elif op.keeps_slices and not op.is_of_arrays:
        values = [as_returned(as_object(backend, part), was) for part, was in zip(total, were_tensors)]
        total = Object(values if op is EACH else SliceValues(values, rows))
    elif were_tensors[0] and function.to_framework is not None and not isinstance(op, Folded):
        total = function.to_framework(total)
    return Partial(total, accumulator.dtype) if is_partial and not is_int(total) else total


def _joins(value: Any, op: Op) -> bool:
    """Whether a value is a table, under an op that combines it with the tables of other slices."""
    return is_table(value) and op.is_of_arrays
