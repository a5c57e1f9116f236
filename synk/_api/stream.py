"""Calls over an iterable of batches: submitted ahead, with results in order.

At most ``NUM_LANES`` calls are in flight. The iterable is the user's code: it runs in the caller's thread, between
operations, at a safe point.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from synk._api.options import is_integer
from synk._master.flight.pending import PendingCall
from synk._master.objects.data import Data
from synk._master.objects.shared import Shared
from synk._pure.interrupts import deferred, operation, safe_point
from synk._pure.nested import SINGLE_VALUES, build, check_no_list, is_nested, paths, take_apart
from synk._pure.tables import is_table, taken_rows
from synk._wire.control import NUM_LANES
from synk.errors import add_note

BoundArguments = Sequence[tuple[str, str, bool, Any]]
"""Label, keyword, whether it is broadcast, and value of each argument."""

Block = tuple[tuple[Any, ...], dict[str, Any], slice | None]
"""Arguments, keywords and ``batch`` of a call."""


def stream(submit: Callable[[Any], PendingCall[Any]], name: str, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the result for each of ``batches``; see :meth:`synk.Function.stream`."""
    calls: deque[PendingCall[Any]] = deque()
    error: Exception | None = None
    number = 0  # the number of the batch whose result comes next
    is_at_end = False
    while calls or not is_at_end:
        if not is_at_end:
            with operation():
                try:
                    calls.append(submit(safe_point(next, batches)))
                except StopIteration:
                    is_at_end = True
                except Exception as raised:  # from the iterable, or for bad input: raised after the results before it
                    add_note(raised, f"for batch {number + len(calls)} of the stream of {name!r}")
                    is_at_end, error = True, raised
        while calls and (is_at_end or len(calls) == NUM_LANES or calls[0].done()):
            yield _result(calls, name, number)
            number += 1
    if error is not None:
        raise error


def arguments(batch: Any) -> tuple[Any, ...]:
    """Return the arguments of the call for a batch. A tuple or list, as a data loader returns it, holds all of them."""
    return tuple(batch) if type(batch) in (tuple, list) else (batch,)


def _result(calls: deque[PendingCall[Any]], name: str, number: int) -> Any:
    """Return the result of the oldest call. If it has failed, wait for the others before the error is raised.

    The iterator ends with the error, so nobody else would take the others' results, or see their errors.
    """
    with operation():
        try:
            return calls.popleft().result()
        except Exception as error:
            add_note(error, f"for batch {number} of the stream of {name!r}")
            for call in calls:
                with contextlib.suppress(Exception):
                    call.result()
            raise


# -- rows -------------------------------------------------------------------------------------------------------------


def check_batch_size(batch_size: Any, name: str) -> int:
    if not is_integer(batch_size, 1):
        raise ValueError(
            f"cannot go through the rows for {name!r}: got batch_size={batch_size!r}, expected an integer above 0."
        )
    return int(batch_size)


def blocks(bound: BoundArguments, batch_size: int, name: str) -> tuple[int, Iterator[Block]]:
    """Return the number of blocks of rows, and an iterator over the arguments of the call for each block.

    If all scattered arguments are ``Data`` or sharded variables, the workers take the rows themselves, by ``batch``.
    Otherwise they are sliced here.

    Raises
    ------
    ValueError
        If there are no rows, or the inputs differ in their number of rows.
    """
    leaves = [
        (f"{label}{path}", leaf)
        for label, _, is_broadcast, value in bound
        if not is_broadcast
        for path, leaf in _leaves(value)
    ]
    for label, leaf in leaves:
        check_no_list(leaf, "go through the rows of", f"{label} of {name!r}", label)
    lengths = {label: _num_rows(leaf, label, name) for label, leaf in leaves}
    if len(set(lengths.values())) != 1:
        got = ", ".join(f"{label} with {length} rows" for label, length in lengths.items()) or "no scattered argument"
        raise ValueError(f"cannot go through the rows for {name!r}: got {got}, expected one number of rows for all.")
    num_rows = next(iter(lengths.values()))
    is_held = all(isinstance(leaf, (Data, Shared)) for _, leaf in leaves)
    starts = range(0, num_rows, batch_size)
    return len(starts), _blocks(bound, starts, batch_size, is_held)


def _blocks(bound: BoundArguments, starts: range, batch_size: int, is_held: bool) -> Iterator[Block]:
    for start in starts:
        rows = slice(start, min(start + batch_size, starts.stop))
        values = [
            (keyword, value if is_broadcast or is_held else _cut(value, rows))
            for _, keyword, is_broadcast, value in bound
        ]
        args = tuple(value for keyword, value in values if not keyword)
        yield args, {keyword: value for keyword, value in values if keyword}, rows if is_held else None


def _leaves(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the leaves that have rows, with their paths. Single values in a nested argument go to all blocks."""
    if not is_nested(value):
        return [("", value)]
    leaves, structure = take_apart(value)
    return [(path, leaf) for path, leaf in zip(paths(structure), leaves) if not isinstance(leaf, SINGLE_VALUES)]


def _num_rows(value: Any, label: str, name: str) -> int:
    length = sum(value.lengths) if isinstance(value, Shared) and value.is_sharded else getattr(value, "shape", None)
    if isinstance(length, tuple):
        length = length[0] if length else None
    if length is None:
        try:
            length = len(value)
        except TypeError:
            raise TypeError(
                f"cannot go through the rows for {name!r}: got {label} of type {type(value).__name__}, expected an "
                "array. Name what every rank gets whole in bcast_inputs."
            ) from None
    return int(length)


def _cut(value: Any, rows: slice) -> Any:
    if is_nested(value):
        leaves, structure = take_apart(value)
        return build(
            structure, iter([leaf if isinstance(leaf, SINGLE_VALUES) else _cut(leaf, rows) for leaf in leaves])
        )
    return taken_rows(value, rows) if is_table(value) else value[rows]


def with_progress(results: Iterator[Any], name: str, length: int) -> Iterator[Any]:
    """Return an iterator over the same results with a progress bar. ``length`` is 0 if the number is unknown.

    Raises
    ------
    ModuleNotFoundError
        If tqdm is not installed.
    """
    try:
        with deferred():  # an import that is broken off leaves half a module behind
            from tqdm.auto import tqdm
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"cannot show the progress of {name!r}: got no module {error.name!r}, expected tqdm. Install it by "
            'pip install "synkhronos[progress]", or pass progress=False.',
            name=error.name,
        ) from None
    return iter(tqdm(results, desc=name, total=length or None))
