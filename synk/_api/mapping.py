"""A map of a plain function over items."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from synk._api.engine import Session
from synk._api.options import is_integer, name_of
from synk._api.stream import with_progress
from synk._master.calls.callee import Callee, FunctionHandle
from synk._master.flight.chunks import check_mapped
from synk._master.flight.item_map import ItemMap
from synk._pure.tracebacks import Results
from synk._wire.cell import refuse_inside_worker
from synk._wire.items import call_with


def map_items(
    session: Session,
    fn: Callable[..., Any],
    iterables: tuple[Iterable[Any], ...],
    batch_size: int | None,
    is_ordered: bool,
    has_progress: bool,
) -> Iterator[Any]:
    """Return an iterator over the results of ``fn`` for the items of one or more iterables; see :func:`synk.map`.

    Nothing is sent here. ``ItemMap`` begins when the first result is asked for, and takes items from the iterables
    outside of the session's lock.
    """
    refuse_inside_worker("map")
    name = _check_function(fn)
    if batch_size is not None and not is_integer(batch_size, 1):
        raise ValueError(f"cannot map {name!r}: got batch_size={batch_size!r}, expected an integer above 0 or None.")
    if not iterables:
        raise TypeError(f"cannot map {name!r}: got no items, expected an iterable, or one for each parameter.")
    iterators = [_iterator(name, items) for items in iterables]
    is_one = len(iterators) == 1
    iterator = iterators[0] if is_one else zip(*iterators)
    session.check_open(f"map {name!r}")
    mapped = fn if is_one else functools.partial(call_with, fn)
    function = session.functions.mapped.get(
        fn, lambda: Callee(mapped, name, outputs=None, session=session), is_spread=not is_one
    )
    check_mapped(function)
    size = None if batch_size is None else int(batch_size)
    results = ItemMap(session, function, iterator, size, bool(is_ordered)).results()
    if has_progress:
        length = min(filter(None, map(operator.length_hint, iterables)), default=0)
        results = with_progress(results, name, length)
    return Results(results, "synk.map", name)


def _iterator(name: str, items: Any) -> Iterator[Any]:
    try:
        return iter(items)
    except TypeError:
        raise TypeError(
            f"cannot map {name!r}: got items of type {type(items).__name__}, expected an iterable."
        ) from None


def _check_function(fn: Any) -> str:
    """Return the name of a function to be mapped."""
    if isinstance(fn, FunctionHandle):
        name = fn._callee.name
        raise TypeError(
            f"cannot map {name!r}: got a synk function, which all workers run together, expected a plain one, which a "
            f"worker runs for each item. Map the function that it was made from ({name}.__wrapped__), or use "
            f"{name}.stream(batches)."
        )
    if not callable(fn):
        raise TypeError(f"cannot map over items: got {type(fn).__name__}, expected a function of one item.")
    return name_of(fn)
