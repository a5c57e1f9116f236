"""``reproducible=ROWS``: calls under op None of which each gives the values of blocks, combined here in their order.

The blocks do not depend on the number of workers, and neither does the order in which their values are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from synk._api.options import check_subset
from synk._api.plain import ScatteredArguments
from synk._master.calls.binding import bind
from synk._master.calls.call import CallOptions
from synk._master.calls.signature import OPTION_NAMES
from synk._master.objects.shared import Shared
from synk._master.state.variable import Variable
from synk._pure.comparison import MISSING, combine
from synk._pure.limits import check_timeout
from synk._pure.ops import EACH, Op, Reduction, is_int
from synk._pure.output_ops import ops_of
from synk._pure.shards import Selection
from synk._pure.tables import is_table
from synk._pure.tensors import array_of, is_tensor, tensor_of

Call = Callable[..., Any]


def in_blocks(blocks: Any, otherwise: Call, function: Any, num_ranks: Callable[[], int], block_rows: int) -> Call:
    """Return a call of ``function`` that has the same bits for any number of ranks.

    Parameters
    ----------
    blocks : Function
        The same under op None.
    otherwise : callable
        The call of the function itself, for a call that has no rows.
    num_ranks : callable
        Returns among how many ranks the blocks are divided.
    """
    callee = function._callee

    def call(*args: Any, batch: Any = None, timeout: Any = None, **options: Any) -> Any:
        subset = check_subset(options.pop("output_subset", None))
        given = {key: value for key, value in options.items() if key not in OPTION_NAMES}
        _check_no_shards(callee.variables, callee.name)
        try:
            scattered = ScatteredArguments(callee, args, given)
            selection = scattered.select(batch)
        except Exception:
            _check_as_a_call(function, args, given, batch)  # it says better what is wrong
            raise
        _check_no_shards(scattered.leaves, callee.name)
        if selection is None or not selection.count:
            return otherwise(*args, batch=batch, timeout=timeout, output_subset=subset, **options)
        count, ranks = selection.count, num_ranks()
        num_whole = count // block_rows
        each, left = divmod(num_whole, ranks)
        values: list[Any] = []
        # As many blocks on each rank, then one on each of some, then the rows that make no whole block.
        for low, num_blocks, among in (
            (0, each, ranks), ((num_whole - left) * block_rows, 1, left), (num_whole * block_rows, 1, 1),
        ):  # fmt: skip
            high = min(low + num_blocks * among * block_rows, count)
            if high > low:
                part = _part(selection, low, high)
                own = CallOptions(part, num_blocks, None, check_timeout(timeout), num_ranks=among)
                by_rank = blocks._run(args, given, own)[:among]
                values += [value for parts in by_rank for value in parts] if num_blocks > 1 else by_rank
        rows = [min(block_rows, count - low) for low in range(0, count, block_rows)]
        if subset is not None:
            values = [_chosen(value, subset) for value in values]
        outputs = callee.outputs if subset is None else _chosen(callee.outputs, subset)
        return combined(outputs, values, rows, repr(callee.name))

    return call


def _check_as_a_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> None:
    """Raise what an ordinary call with these arguments raises before it is sent."""
    session, verb = function._bound_session(), function._verb
    with session.entered(verb):
        deadline = session.deadline(None)
        session.begin(verb, deadline)
        bind(session, function._callee, args, kwargs, CallOptions(batch), deadline)


def _check_no_shards(leaves: Iterable[Any], name: str) -> None:
    for leaf in leaves:
        if isinstance(leaf, (Shared, Variable)) and leaf.is_sharded:
            raise ValueError(
                f"cannot call {name!r}: got the sharded variable {leaf.name!r}, expected none: it is built with "
                "reproducible=, and ranks hold other rows of a variable than those of whole blocks. Pass an array."
            )


def _part(selection: Selection, low: int, high: int) -> Any:
    """Return the ``batch`` that picks some of the selected rows."""
    if selection.indices is not None or selection.step < 0:
        return selection.positions()[low:high]
    start, step = selection.start, selection.step
    return slice(start + low * step, start + high * step, step)


def _chosen(nest: Any, keys: tuple[Any, ...]) -> Any:
    """Return some of the outputs, or of their ops, in the form in which a call returns a subset."""
    if isinstance(nest, dict):
        return {key: nest[key] for key in keys}
    if not isinstance(nest, (tuple, list)):
        return nest
    chosen = [nest[key] for key in keys]
    return chosen if type(nest) is list else tuple(chosen)


def combined(outputs: Any, values: Sequence[Any], rows: Sequence[int], what: str) -> Any:
    """Return the values of blocks combined, each output by its op."""
    first = values[0]
    op = None if isinstance(outputs, (dict, tuple, list)) else ops_of(outputs, what)
    if op is EACH:
        return list(values)
    if op is None or isinstance(first, (dict, tuple)) or (type(first) is list and not op.concatenates):
        keys = first.keys() if isinstance(first, dict) else range(len(first))
        ops = {key: outputs[key] if op is None else op for key in keys}
        if any(type(value) is not type(first) or len(value) != len(first) for value in values):
            raise ValueError(f"cannot combine the blocks of {what}: got other structures, expected the same from each.")
        made = {key: combined(ops[key], [value[key] for value in values], rows, what) for key in keys}
        if isinstance(first, dict):
            return made
        return type(first)(*made.values()) if hasattr(first, "_fields") else type(first)(made.values())
    if first is None:
        return None
    if not is_tensor(first):
        return _by_op(op, values, rows, what)
    return tensor_of(np.asarray(_by_op(op, [array_of(value) for value in values], rows, what)))


def _by_op(op: Op, values: Sequence[Any], rows: Sequence[int], what: str) -> Any:
    if isinstance(op, Reduction) and not any(map(is_table, values)):
        return in_tree(op, values, rows, what)
    value = combine(op, values, rows)
    if value is MISSING:
        raise ValueError(f"cannot combine blocks of {what} with op {op!r}: got {type(values[0]).__name__}.")
    return value


def in_tree(op: Reduction, values: Sequence[Any], rows: Sequence[int], what: str) -> Any:
    """Return a reduction of the values of blocks, in a tree that depends only on their number."""
    if any(map(is_int, values)):
        return op.combine_ints(values, f"the values of blocks of {what}")
    arrays = [np.asarray(value) for value in values]
    op.check(arrays[0].dtype, what)
    if len({(array.dtype, array.shape) for array in arrays}) > 1:
        raise ValueError(
            f"cannot combine blocks with op {op!r}: got shapes and dtypes "
            f"{sorted({f'{array.shape} {array.dtype}' for array in arrays})}, expected the same from every block."
        )
    with np.errstate(all="ignore"):
        level = [op.lift(array, count) for array, count in zip(arrays, rows)]
        while len(level) > 1:
            pairs = zip(level[::2], level[1::2])
            level = [op.merge(one, other) for one, other in pairs] + level[len(level) // 2 * 2 :]
        return op.finished(np.array(level[0]), sum(rows), arrays[0].dtype)[()]
