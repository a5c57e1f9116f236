"""From the arguments of a call to the rows of each rank.

Errors in the arguments are raised here, before the call is sent. By then functions may have been loaded and values
fetched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from synk._master.calls.arguments import NEW_NBYTES, NO_OBJECTS, Argument, pack_tables, pickle_objects
from synk._master.calls.callee import Callee
from synk._master.calls.checked import Checks
from synk._master.calls.plans import Call, IndexArrays
from synk._master.session import Session
from synk._master.state.variable import Variable
from synk._pure.call_options import CallOptions
from synk._pure.nested import Container, Restored
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


@functools.lru_cache(maxsize=256)
def even_bounds(num_rows: int, world_size: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return the bounds of each rank, if the first ``num_ranks`` share the rows."""
    return shard_bounds(num_rows, num_ranks) + [(num_rows, num_rows)] * (world_size - num_ranks)


Divider = Callable[[int], list[tuple[int, int]]]
"""Maps a number of rows to the bounds of each rank."""


class RowCount(NamedTuple):
    """The number of rows of a scattered array, for the division of rows among ranks."""

    label: str
    num_rows: int


def bind(
    session: Session,
    function: Callee,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CallOptions,
    deadline: float | None,
) -> Call:
    """Check the arguments and decide which rank works on which rows.

    The call itself is sent later. This may load functions and read values from devices.
    """
    name = function.name
    if options.output_subset is not None and function.ops is EACH:
        raise TypeError(
            f"cannot select outputs of {name!r}: got output_subset and op None, which takes nothing apart, expected an "
            "op for each output. Build it with outputs=(None, None) or the like."
        )
    checks = Checks(name, function.framework, session, is_submitted=options.is_submitted)
    arguments = checks.arguments(function.signature.bind(args, kwargs))
    if function.framework == "torch" or any(argument.is_tensor for argument in arguments):
        session.tell_of_unused_gpus(name)
    call = _divide(session, function, arguments, options, deadline)
    pack_tables(arguments, call.selection, call.bounds, call.ranks, name)
    if call.selection is not None and session.nodes is None:  # nodes get their rows only, in any case
        _pick_rows(arguments, call.selection)
    for argument in arguments:
        if argument.nest is not None:
            function.meet_classes(_classes_in(argument.nest.structure))
        elif argument.kind == "resident":
            function.meet_classes(argument.value.classes)
    values = [argument for argument in arguments if argument.kind == "object"]
    if values:
        call.objects, classes = pickle_objects([a.value for a in values], [a.label for a in values], name)
        function.meet_classes(classes)
        session.counters["bytes_pickled"] += len(call.objects[0])
    return call


def _classes_in(structure: Any) -> Iterator[type]:
    """Yield the classes of which the containers of a nested argument are built. They travel once, with the plan."""
    if isinstance(structure, Container):
        made = structure.make.cls if isinstance(structure.make, Restored) else structure.make
        if isinstance(made, type):
            yield made
        for part in structure.parts:
            yield from _classes_in(part)


def _pick_rows(arguments: Sequence[Argument], selection: Selection) -> None:
    """Replace large arrays of which a call uses some rows by these rows, so that the others are not copied."""
    for argument in arguments:
        array = argument.array
        if argument.kind != "rows" or array is None or array.nbytes < NEW_NBYTES:
            continue
        if not selection.same_rows(Selection(len(array))):
            argument.kind, argument.array = "picked", array[selection.between(0, selection.count)]


def _divide(
    session: Session, function: Callee, arguments: list[Argument], options: CallOptions, deadline: float | None
) -> Call:
    """Decide which rows a call uses, which ranks run it, and which of the rows each rank gets."""
    name, world_size = function.name, session.world_size
    sources: Sequence[Variable] = ()
    unequal = ""
    rows = rows_of(arguments)
    shards = [(argument.label, argument.value) for argument in arguments if argument.kind == "shard"]
    num_ranks = options.num_ranks or world_size
    divide = divider(session, num_ranks)
    selection, bounds, owned = choose_rows(rows, shards, options.batch, divide, name)
    if selection is None:
        if not function.per_rank:
            sources = closed_over_shards(session, function, deadline)
            if not sources:
                check_rowless(function.ops, name)
        bounds, unequal = own_rows(sources, world_size, name)
        if num_ranks < world_size:
            bounds, unequal = divide(bounds[-1][1]), ""
    ranks = list(range(num_ranks))
    has_rows = selection is not None or bool(sources)
    # If outputs are not combined, a rank without rows may still have something to return.
    if selection is not None or (sources and any(op is not EACH for op in each_op(function.ops))):
        ranks = ranks_with_rows(bounds)
        if not ranks:
            check_no_rows(function.ops, name, sources)
            ranks = [0]
    num_rows = [bounds[rank][1] - bounds[rank][0] if has_rows else 1 for rank in ranks]
    return Call(
        arguments,
        selection,
        bounds,
        ranks,
        num_rows,
        NO_OBJECTS,
        options,
        owned=owned,
        sources=sources,
        unequal=unequal,
        index_arrays=index_arrays(selection, owned),
        is_timed=session.has_devices,
    )


def divider(session: Session, num_ranks: int | None = None) -> Divider:
    """Return the function that divides the rows of a call evenly, among the first ranks or all."""
    world_size = session.world_size
    return functools.partial(even_bounds, world_size=world_size, num_ranks=num_ranks or world_size)


def choose_rows(
    rows: Sequence[RowCount],
    shards: Sequence[tuple[str, Variable]],
    batch: Any,
    divide: Divider,
    name: str,
) -> tuple[Selection | None, list[tuple[int, int]], Assignment | None]:
    """Return the rows of a call, the rows of each rank, and how they lie in sharded variables, if there are any.

    Raises
    ------
    ValueError, IndexError, TypeError
        If the batch does not fit.
    """
    if shards:
        owned = assign(rows, shards, batch, name)
        return owned.selection, owned.bounds, owned
    selection = select(rows, batch, name)
    if selection is None:
        return None, [], None
    return selection, divide(selection.count), None


def rows_of(arguments: Sequence[Argument]) -> list[RowCount]:
    """Return the arrays that have rows, in the form that ``select`` and ``assign`` take."""
    return [RowCount(a.label, a.num_rows) for a in arguments if a.num_rows is not None]


def select(rows: Sequence[RowCount], batch: Any, function_name: str) -> Selection | None:
    """Return the rows of a call, or None if no argument is scattered."""
    if not rows:
        if batch is not None:
            raise ValueError(f"cannot select rows of {function_name!r}: batch was given, but no argument is scattered.")
        return None
    return select_common(batch, rows, repr(function_name))


def own_rows(variables: Sequence[Variable], world_size: int, function_name: str) -> tuple[list[tuple[int, int]], str]:
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
    rows: Sequence[RowCount], shards: Sequence[tuple[str, Variable]], batch: Any, function_name: str
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


def ranks_with_rows(bounds: Sequence[tuple[int, int]]) -> list[int]:
    return [rank for rank, (low, high) in enumerate(bounds) if high > low]


def index_arrays(selection: Selection | None, owned: Assignment | None) -> IndexArrays:
    """Return the rows to take of whole inputs, and of the ranks' own shards; None for a range."""
    return None if selection is None else selection.indices, None if owned is None else owned.local_indices


def closed_over_shards(session: Session, function: Callee, deadline: float | None) -> list[Variable]:
    """Return the sharded variables that a function closes over. They are known once it has been sent."""
    function.load(session, deadline)
    return sorted((v for v in function.variables if v.is_sharded), key=lambda variable: variable.id)


def check_no_rows(ops: Any, name: str, sources: Sequence[Variable]) -> None:
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
