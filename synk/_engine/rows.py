"""Which rows a call uses, which ranks run it, and what the orders say about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._engine.argument import Argument
from synk._engine.binding import (
    assign,
    check_no_rows,
    check_rowless,
    closed_over_shards,
    even_bounds,
    own_rows,
    ranks_with_rows,
    select,
)
from synk._pure.call_options import CallOptions
from synk._pure.ops import EACH
from synk._pure.output_ops import each_op
from synk._pure.shards import Assignment, Selection
from synk._wire import orders as wire


class Division:
    """The rows of a call.

    Attributes
    ----------
    selection : Selection or None
        None: no argument has rows.
    bounds : list of (low, high)
        The rows of each rank, as positions in the selection.
    ranks : list of int
        Who runs the call.
    rows : list of int
        How many rows the outputs of each of them stand for.
    packed : list of bytes
        By rank, what its order says.
    owned : Assignment or None
        Where the rows lie in the ranks' own shards, if some arguments are sharded variables.
    is_whole : bool
        Whether the selection begins with the first row and leaves none out between.
    unequal : str
        Why the rows of closed-over shards cannot weight an average.
    """

    def __init__(
        self,
        selection: Selection | None,
        bounds: list[tuple[int, int]],
        ranks: list[int],
        rows: list[int],
        owned: Assignment | None,
        unequal: str,
    ) -> None:
        self.selection, self.bounds, self.ranks, self.rows = selection, bounds, ranks, rows
        self.owned, self.unequal = owned, unequal
        start, step = (
            (0, 1) if selection is None or selection.indices is not None else (selection.start, selection.step)
        )
        local = [(0, 1)] * len(bounds) if owned is None else owned.local_ranges
        self.packed = [wire.ROWS.pack(low, high, start, step, *own) for (low, high), own in zip(bounds, local)]
        self.count = 0 if selection is None else selection.count
        self.is_whole = (start, step) == (0, 1) and (selection is None or selection.indices is None)

    @property
    def indices(self) -> np.ndarray | None:
        return None if self.selection is None else self.selection.indices

    @property
    def local_indices(self) -> np.ndarray | None:
        return None if self.owned is None else self.owned.local_indices


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
        owned = assign(lengths, shards, batch, name)  # type: ignore[arg-type]
        selection, bounds = owned.selection, owned.bounds
    elif (selection := select(lengths, batch, name)) is not None:  # type: ignore[arg-type]
        bounds = even_bounds(selection.count, world_size, num_ranks or world_size)
    else:
        if not callee.per_rank:
            sources = closed_over_shards(session, callee, None)
            if not sources:
                check_rowless(callee.ops, name)
        bounds, unequal = own_rows(sources, world_size, name)
        if num_ranks is not None and num_ranks < world_size:
            bounds, unequal = even_bounds(bounds[-1][1], world_size, num_ranks), ""
    ranks = list(range(num_ranks or world_size))
    has_rows = selection is not None or bool(sources)
    # If outputs are not combined, a rank without rows may still have something to return.
    if selection is not None or (sources and any(op is not EACH for op in each_op(callee.ops))):
        ranks = ranks_with_rows(bounds)
        if not ranks:
            check_no_rows(callee.ops, name, sources)
            ranks = [0]
    rows = [bounds[rank][1] - bounds[rank][0] if has_rows else 1 for rank in ranks]
    return Division(selection, bounds, ranks, rows, owned, unequal)
