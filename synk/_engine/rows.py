"""Which rows a call uses, which ranks run it, and what the orders say about them; the options of one call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from synk._engine.argument import Argument
from synk._pure.ops import EACH
from synk._pure.output_ops import each_op
from synk._pure.shards import (
    Assignment,
    Selection,
    assign_owned,
    bounds_of,
    select_common,
    shard_bounds,
)
from synk._wire import orders as wire


@dataclass
class CallOptions:
    """The options of one call; see :class:`synk.Function`."""

    batch: Any = None
    num_slices: int = 1
    output_subset: tuple[Any, ...] | None = None
    timeout: float | None = None
    num_ranks: int | None = None  # among how many ranks, the first ones, the rows are divided; None for all
    is_submitted: bool = False

    @property
    def of_user(self) -> dict[str, Any]:
        """The four that a user can give, to be passed on by name."""
        return {
            "batch": self.batch,
            "num_slices": self.num_slices,
            "output_subset": self.output_subset,
            "timeout": self.timeout,
        }


class Shares(NamedTuple):
    """Who runs a call, and on how many of its rows. Calls with as many rows have one object; nobody changes its lists.

    Attributes
    ----------
    bounds : list of (low, high)
        The rows of each rank, as positions in the selection.
    ranks : list of int
        Who runs the call.
    rows : list of int
        How many rows the outputs of each of them stand for.
    packed : list of bytes
        By rank, what its order says.
    """

    bounds: list[tuple[int, int]]
    ranks: list[int]
    rows: list[int]
    packed: list[bytes]


class Division:
    """The rows of a call.

    Attributes
    ----------
    selection : Selection or None
        None: no argument has rows.
    shares : Shares
        Its attributes are also those of the division.
    count : int
        How many rows are selected.
    owned : Assignment or None
        Where the rows lie in the ranks' own shards, if some arguments are sharded variables.
    is_whole : bool
        Whether the selection begins with the first row and leaves none out between.
    indices, local_indices : ndarray of int64 or None
        The selected rows, and where they lie in the ranks' own shards, if these are no ranges.
    unequal : str
        Why the rows of closed-over shards cannot weight an average.
    """

    def __init__(self, selection: Selection | None, shares: Shares, owned: Assignment | None, unequal: str) -> None:
        self.selection, self.shares, self.owned, self.unequal = selection, shares, owned, unequal
        self.bounds, self.ranks, self.rows, self.packed = shares
        self.count = 0 if selection is None else selection.count
        self.indices = None if selection is None else selection.indices
        self.local_indices = None if owned is None else owned.local_indices
        self.is_whole = selection is None or (selection.indices is None and (selection.start, selection.step) == (0, 1))


@functools.lru_cache(maxsize=256)
def even_shares(count: int, start: int, step: int, world_size: int, num_ranks: int) -> Shares:
    """Return the shares of a call whose rows are divided evenly among the first ``num_ranks`` ranks.

    Row k of ``count`` is ``start + k * step``. Without rows rank 0 runs the call.
    """
    bounds = even_bounds(count, world_size, num_ranks)
    ranks = [rank for rank, (low, high) in enumerate(bounds) if high > low] or [0]
    packed = [wire.ROWS.pack(low, high, start, step, 0, 1) for low, high in bounds]
    return Shares(bounds, ranks, [bounds[rank][1] - bounds[rank][0] for rank in ranks], packed)


def even_bounds(num_rows: int, world_size: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return the bounds of each rank, if the first ``num_ranks`` share the rows."""
    return shard_bounds(num_rows, num_ranks) + [(num_rows, num_rows)] * (world_size - num_ranks)


def select(lengths: Sequence[tuple[str, int]], batch: Any, function_name: str) -> Selection | None:
    """Return the rows of a call with scattered arguments ``(label, rows)``, or None if there are none."""
    if not lengths:
        if batch is not None:
            raise ValueError(f"cannot select rows of {function_name!r}: batch was given, but no argument is scattered.")
        return None
    return select_common(batch, lengths, repr(function_name))


def divided(session: Any, callee: Any, arguments: Sequence[Argument], options: CallOptions) -> Division:
    """Divide the rows of a call with these arguments."""
    lengths = [(a.label, a.num_rows) for a in arguments if a.num_rows is not None]
    shards = [(a.label, a.value) for a in arguments if a.kind == "shard"]
    return divide(session, callee, lengths, shards, options.batch, options.num_ranks)


def divide(
    session: Any,
    callee: Any,
    lengths: Sequence[tuple[str, int]],
    shards: Sequence[tuple[str, Any]],
    batch: Any,
    num_ranks: int | None,
) -> Division:
    """Divide the rows of a call.

    Parameters
    ----------
    lengths : sequence of (label, rows)
        Of the scattered arguments.
    shards : sequence of (label, variable)
        The sharded variables among the arguments.
    num_ranks : int or None
        Among how many ranks, the first ones, rows are divided; None for all.

    Raises
    ------
    ValueError, IndexError, TypeError
        If the batch does not fit, or the ops have no value for so many rows.
    """
    name, world_size = callee.name, session.world_size
    sources: Sequence[Any] = ()
    unequal = ""
    owned: Assignment | None = None
    selection: Selection | None
    if shards:
        owned = assign(lengths, shards, batch, name)
        selection, bounds = owned.selection, owned.bounds
    elif (selection := select(lengths, batch, name)) is not None:
        start, step = (0, 1) if selection.indices is not None else (selection.start, selection.step)
        if not selection.count:
            check_no_rows(callee.ops, name, ())
        shares = even_shares(selection.count, start, step, world_size, num_ranks or world_size)
        return Division(selection, shares, None, "")
    else:
        if not callee.per_rank:
            sources = closed_over_shards(session, callee)
            if not sources:
                check_rowless(callee.ops, name)
        bounds, unequal = own_rows(sources, world_size, name)
        if num_ranks is not None and num_ranks < world_size:
            bounds, unequal = even_bounds(bounds[-1][1], world_size, num_ranks), ""
    ranks = list(range(num_ranks or world_size))
    has_rows = selection is not None or bool(sources)
    # If outputs are not combined, a rank without rows may still have something to return.
    if selection is not None or (sources and any(op is not EACH for op in each_op(callee.ops))):
        ranks = [rank for rank, (low, high) in enumerate(bounds) if high > low]
        if not ranks:
            check_no_rows(callee.ops, name, sources)
            ranks = [0]
    rows = [bounds[rank][1] - bounds[rank][0] if has_rows else 1 for rank in ranks]
    start, step = (0, 1) if selection is None or selection.indices is not None else (selection.start, selection.step)
    local = [(0, 1)] * len(bounds) if owned is None else owned.local_ranges
    packed = [wire.ROWS.pack(low, high, start, step, *own) for (low, high), own in zip(bounds, local)]
    return Division(selection, Shares(bounds, ranks, rows, packed), owned, unequal)


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


def assign(
    rows: Sequence[tuple[str, int]], shards: Sequence[tuple[str, Any]], batch: Any, function_name: str
) -> Assignment:
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


def closed_over_shards(session: Any, function: Any) -> list[Any]:
    """Return the sharded variables that a function closes over. They are known once it has been sent."""
    function.load(session)
    return sorted((v for v in function.variables if v.is_sharded), key=lambda variable: variable.number)


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
