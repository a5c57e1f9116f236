"""``reproducible=ROWS``: the result of a serial call with one slice for each block, whatever the number of workers.

The workers compute the blocks, under op None. One of them then gets what was returned for each block, and an ordinary
call combines it in the order of the blocks. So everything that a call checks is checked, and combined as by a call.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import numpy as np

from synk._api.function import Function
from synk._engine.arguments import classified
from synk._engine.rows import divided
from synk._pure.call_options import CallOptions
from synk._pure.shards import Selection
from synk._wire.apart import BlockValues, Silent, next_block

BLOCK_ROWS = 1024
"""The most rows of a block under ``reproducible=True``."""


def call_in_blocks(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Any:
    """Return the result of a call, whose bits are the same for any number of ranks, or for one rank alone."""
    function = function._renewed()
    if not function._options.reproducible:  # the user has edited its module
        return function._run(args, kwargs, options)
    rows_of_block = function._options.reproducible
    block_rows = BLOCK_ROWS if rows_of_block is True else int(rows_of_block)
    whole, blocks, combined = function._made_once(Silent, functools.partial(_made_of, function))
    selection, deadline = _begun(whole, args, kwargs, options)
    count = 0 if selection is None else selection.count
    num_blocks, num_ranks = max(-(-count // block_rows), 1), whole._bound_session().world_size
    if selection is None or 1 in (num_blocks, num_ranks, options.num_ranks):
        return whole._run(args, kwargs, _on_first(options, num_blocks, deadline))
    values: list[Any] = []
    low, (size, num_larger) = 0, divmod(count, num_blocks)
    for same, rows in ((num_larger, size + 1), (num_blocks - num_larger, size)):
        # As many of these blocks on each rank, then one on each of some.
        each, left = divmod(same, num_ranks)
        for slices, among in ((each, num_ranks), (1, left)):
            if slices * among:
                part = _part(selection, low, low := low + slices * among * rows)
                own = CallOptions(part, slices, None, _left_s(deadline), among)
                by_rank = blocks._run(args, kwargs, own)[:among]
                values += by_rank if slices == 1 else [value for parts in by_rank for value in parts]
    weights = np.broadcast_to(False, count)  # a row for each row, cut into slices as the rows were into blocks
    options = replace(options, batch=None)
    return combined._run((BlockValues(values), weights), {}, _on_first(options, num_blocks, deadline))


def _made_of(function: Any) -> tuple[Function[..., Any], ...]:
    """Return the functions that it is called as: of one rank's rows, of each block, and of the values of all blocks."""
    options, session = function._options, function._bound_session()
    silent = Silent(function._callee.fn)
    return (
        Function(silent, options, session),
        Function(silent, replace(options, outputs=None, reproducible=False), session),
        Function(Silent(next_block), replace(options, bcast_inputs="values"), session),
    )


def _begun(function: Any, args: Any, kwargs: Any, options: CallOptions) -> tuple[Selection | None, float | None]:
    """Check the arguments of a call as any call does. Return the rows that it uses, and when it must have ended."""
    session, callee = function._bound_session(), function._callee
    with session.entered(function._verb):
        deadline = session.deadline(options.timeout)
        session.begin(function._verb, deadline)
        arguments = classified(callee, args, kwargs, session, options.is_submitted)
        callee.load(session, deadline)
        division = divided(session, callee, arguments, options)
        passed = [argument.value for argument in arguments if argument.kind in ("shard", "resident")]
        shards = [variable for variable in callee.variables if variable.is_sharded]
        for held in (*passed, *shards, *callee.residents):
            raise ValueError(
                f"cannot call {callee.name!r}: got {held.name!r}, which each rank holds for itself, expected neither a "
                "sharded variable nor a resident object with reproducible=. Pass an array, or the object itself."
            )
        return division.selection, deadline


def _on_first(options: CallOptions, num_slices: int, deadline: float | None) -> CallOptions:
    return replace(options, num_slices=num_slices, timeout=_left_s(deadline), num_ranks=1)


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 1e-3)


def _part(selection: Selection, low: int, high: int) -> Any:
    """Return the ``batch`` that picks some of the selected rows."""
    if selection.indices is not None or selection.step < 0:
        return selection.positions()[low:high]
    start, step = selection.start, selection.step
    return slice(start + low * step, start + high * step, step)
