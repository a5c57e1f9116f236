"""A map of a plain function over items."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from synk._api.options import is_integer, name_of
from synk._api.stream import with_progress
from synk._engine.callee import Callee, FunctionHandle
from synk._engine.chunks import PoolStats, Rules
from synk._pure.limits import check_timeout
from synk._pure.tracebacks import Results
from synk._wire.cell import refuse_inside_worker
from synk._wire.items import call_with
from synk.errors import UnsupportedError


def map_items(
    session: Any,
    fn: Callable[..., Any],
    iterables: tuple[Iterable[Any], ...],
    *,
    progress: bool = False,
    **options: Any,
) -> Iterator[Any]:
    """Return an iterator over the results of ``fn`` for the items of one or more iterables; see :func:`synk.map`.

    Nothing is sent here. ``ItemMap`` begins when the first result is asked for, and takes items from the iterables
    outside of the session's lock.
    """
    refuse_inside_worker("map")
    name = _check_function(fn)
    rules = rules_of(f"map {name!r}", **options)
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
    results = ItemMap(session, function, iterator, rules.batch_size, rules.is_ordered).results()
    if progress:
        length = min(filter(None, map(operator.length_hint, iterables)), default=0)
        results = with_progress(results, name, length)
    return Results(results, "synk.map", name)


def numbered_results(
    session: Any,
    fn: Callable[..., Any],
    pairs: Iterable[tuple[int, Any]],
    rules: Rules,
    *,
    name: str,
    is_spread: bool = False,
    stats: PoolStats | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yield ``(number, result)`` for ``(number, item)`` pairs, the result of a failed item as ``rules`` say.

    An item's number is that in the whole map: errors name it, and it seeds the item's random numbers. An error of
    ``pairs``, or an item that cannot be sent, comes after all results of the items before it, in any order of results.

    Parameters
    ----------
    is_spread : bool
        Whether an item is a tuple of arguments.
    stats : PoolStats, optional
        Is kept up to date.
    """
    raise UnsupportedError(f"cannot map {name!r} by the numbers of items: the pool is not there yet.")


def rules_of(verb: str, **options: Any) -> Rules:
    """Return the checked options of a map; ``verb`` is for errors."""
    on_error, item_timeout = options.get("on_error", "raise"), options.get("item_timeout")
    if on_error not in ("raise", "return"):
        raise ValueError(f"cannot {verb}: got on_error={on_error!r}, expected 'raise' or 'return'.")
    for name in ("batch_size", "max_tasks_per_worker", "max_worker_memory"):
        value = options.get(name)
        if value is not None and not is_integer(value, 1):
            raise ValueError(f"cannot {verb}: got {name}={value!r}, expected an integer above 0 or None.")
    rules = Rules(
        batch_size=options.get("batch_size"),
        is_ordered=bool(options.get("ordered", True)),
        returns_errors=on_error == "return",
        item_s=check_timeout(item_timeout),
        max_tasks=options.get("max_tasks_per_worker"),
        max_memory=options.get("max_worker_memory"),
    )
    if not IS_NEXT and rules != Rules(rules.batch_size, rules.is_ordered):
        raise UnsupportedError(
            f"cannot {verb}: got on_error=, item_timeout=, max_tasks_per_worker= or max_worker_memory=, which need the "
            "new engine. Set SYNK_ENGINE=next before synk is imported."
        )
    return rules


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
