"""From the arguments of a call to the rows of each rank.

Errors in the arguments are raised here, before the call is sent. By then functions may have been loaded and values
fetched.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from synk._pure.nested import Container, Restored
from synk._pure.output_ops import each_op
from synk._pure.shards import (
    Assignment,
    Selection,
    assign_owned,
    bounds_of,
    select_common,
    shard_bounds,
)


@functools.lru_cache(maxsize=256)
def even_bounds(num_rows: int, world_size: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return the bounds of each rank, if the first ``num_ranks`` share the rows."""
    return shard_bounds(num_rows, num_ranks) + [(num_rows, num_rows)] * (world_size - num_ranks)


class RowCount(NamedTuple):
    """The number of rows of a scattered array, for the division of rows among ranks."""

    label: str
    num_rows: int


def _classes_in(structure: Any) -> Iterator[type]:
    """Yield the classes of which the containers of a nested argument are built. They travel once, with the plan."""
    if isinstance(structure, Container):
        made = structure.make.cls if isinstance(structure.make, Restored) else structure.make
        if isinstance(made, type):
            yield made
        for part in structure.parts:
            yield from _classes_in(part)


def select(rows: Sequence[RowCount], batch: Any, function_name: str) -> Selection | None:
    """Return the rows of a call, or None if no argument is scattered."""
    if not rows:
        if batch is not None:
            raise ValueError(f"cannot select rows of {function_name!r}: batch was given, but no argument is scattered.")
        return None
    return select_common(batch, rows, repr(function_name))


def own_rows(variables: Sequence[Any], world_size: int, function_name: str) -> tuple[list[tuple[int, int]], str]:
    """Return the bounds of each rank's rows if nothing has rows except a function's sharded ``variables``.

    Returns
    -------
    bounds : list of (low, high)
        All zero if there are no variables. If a rank's shards differ in length, its longest one counts.
    unequal : str
        An error text if the rows cannot weight an average, because the variables are not divided in the same way.
    """
    lengths = [variable.lengths for variable in variables]
    unequal = ""
    for variable, own in zip(variables, lengths):
        if any(a * sum(lengths[0]) != b * sum(own) for a, b in zip(own, lengths[0])):
            unequal = (
                f"cannot average the outputs of {function_name!r}: it closes over the sharded variables "
                f"{variables[0].name!r} with {lengths[0]} rows on the ranks and {variable.name!r} with {own}, expected "
                "one division of rows, which gives the weights. Pass the one that is averaged over as an argument."
            )
    return bounds_of([max(own) for own in zip(*lengths)] or [0] * world_size), unequal


def assign(rows: Sequence[RowCount], shards: Sequence[tuple[str, Any]], batch: Any, function_name: str) -> Assignment:
    """Return which rank works on which rows if some arguments are sharded variables: each rank on the rows it owns.

    ``shards`` are the variables with their labels.

    Raises
    ------
    ValueError
        If the variables' shards differ in length, or other inputs do not have one row for each of theirs.
    """
    (first, variable), *others = shards
    lengths = variable.lengths
    for label, other in others:
        if other.lengths != lengths:
            raise ValueError(
                f"cannot call {function_name!r}: got {first} with {lengths} rows on the ranks and {label} with "
                f"{other.lengths}, expected equal shards."
            )
    for label, count in rows:
        if count != sum(lengths):
            raise ValueError(
                f"cannot scatter {label} of {function_name!r}: got {count} rows, expected {sum(lengths)}, one for each "
                f"row of the sharded variable {first}."
            )
    return assign_owned(batch, lengths, repr(function_name))


def ranks_with_rows(bounds: Sequence[tuple[int, int]]) -> list[int]:
    return [rank for rank, (low, high) in enumerate(bounds) if high > low]


def closed_over_shards(session: Any, function: Any, deadline: float | None) -> list[Any]:
    """Return the sharded variables that a function closes over. They are known once it has been sent."""
    function.load(session, deadline)
    return sorted((v for v in function.variables if v.is_sharded), key=lambda variable: variable.id)


def check_no_rows(ops: Any, name: str, sources: Sequence[Any]) -> None:
    """Raise ValueError for ops that have no value for no rows: only sums and gathers have one."""
    step = "Build it with per_rank=True if it fills sharded variables that are empty" if sources else "Check the batch"
    for op in each_op(ops):
        if not op.has_empty:
            raise ValueError(
                f"cannot call {name!r} with no rows: op {op!r} has no value there, expected 'sum' or 'gather'. "
                f"{step}, or skip the call."
            )


def check_rowless(ops: Any, name: str) -> None:
    """Raise ValueError for ops whose result would depend on the number of ranks: no rows are divided among them."""
    for op in each_op(ops):
        if op.needs_rows:
            raise ValueError(
                f"cannot call {name!r}: got op {op!r} and no rows to divide, expected a scattered argument or a "
                "sharded variable that the function closes over. Use op 'first' if all ranks compute the same value, "
                "or build it with per_rank=True if each rank contributes its own."
            )
