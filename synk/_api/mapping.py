"""A map of a plain function over items, with a bar by tqdm and a summary if ``progress=True``."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from synk._api.journal import Journal, Pairs, journaled_items
from synk._api.options import is_integer, name_of
from synk._api.replay import recorded_items, replay_folder
from synk._code.parcels import FunctionHandle
from synk._engine.callee import Callee
from synk._engine.chunks import PoolStats, Rules
from synk._engine.jobs import MapJob, is_failure, length_of
from synk._pure.files import Path
from synk._pure.limits import check_timeout
from synk._pure.tracebacks import Results
from synk._wire.cell import refuse_inside_worker
from synk._wire.messages import call_with


def progress_bar(name: str, length: int) -> Any:
    """Return a bar. ``length`` is 0 if the number of results is unknown.

    Raises
    ------
    ModuleNotFoundError
        If tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"cannot show the progress of {name!r}: got no module {error.name!r}, expected tqdm. Install it by "
            'pip install "synkhronos[progress]", or pass progress=False.',
            name=error.name,
        ) from None
    return tqdm(desc=name, total=length or None)


def with_progress(outcomes: Iterator[Any], bar: Any, stats: PoolStats | None = None) -> Iterator[Any]:
    """Yield the outcomes, each counted by the bar. At the end of a map, which has ``stats``, comes a summary, also if
    an exception ends it.
    """
    failed = 0
    try:
        for outcome in outcomes:
            if is_failure(outcome):
                failed += 1
                bar.set_postfix(failed=failed, refresh=False)
            bar.update()
            yield outcome
    finally:
        bar.close()
        if stats is not None:
            slowest = ", ".join(f"{number} ({seconds:.2g} s)" for seconds, number in stats.slowest)
            bar.write(
                f"{bar.desc}: {bar.n - failed} done, {failed} failed. Workers: {stats.deaths} died, {stats.replaced} "
                "replaced." + (f" Slowest items: {slowest}." if slowest else ""),
                file=sys.stderr,
            )


def map_items(
    session: Any,
    fn: Callable[..., Any],
    iterables: tuple[Iterable[Any], ...],
    *,
    progress: bool = False,
    journal: Path | None = None,
    key: Callable[[Any], Any] | None = None,
    version: str | int | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Return an iterator over the results of ``fn`` for the items of one or more iterables; see :func:`synk.map`.

    Nothing is sent here. The job begins when the first result is asked for, and takes items from the iterables outside
    of the session's lock.
    """
    refuse_inside_worker("map")
    name = check_function(fn)
    ordered = options.get("ordered", True)
    check_kinds(
        name,
        ("progress", progress, isinstance(progress, bool), "True or False"),
        ("ordered", ordered, isinstance(ordered, bool), "True or False"),
        ("journal", journal, journal is None or isinstance(journal, (str, os.PathLike)), "a path, or None"),
        ("key", key, key is None or callable(key), "a function of an item, or None"),
    )
    rules = rules_of(f"map {name!r}", **options)
    if not iterables:
        raise TypeError(f"cannot map {name!r}: got no items, expected an iterable, or one for each parameter.")
    if journal is None and (key is not None or version is not None):
        raise ValueError(f"cannot map {name!r}: got key= or version= without journal=, expected a journal with them.")
    items, is_spread = items_of(name, iterables)
    stats, folder = PoolStats() if progress else None, replay_folder()
    runs: Iterator[list[Any]]
    if journal is not None or folder is not None:
        opened = None if journal is None else Journal(journal, name, fn, key, version)
        run = functools.partial(numbered_results, session, name=name, stats=stats)
        runs = ([outcome] for outcome in _in_layers(run, fn, enumerate(items), rules, opened, folder, is_spread))
    else:
        job = job_of(session, fn, items, rules, name=name, is_spread=is_spread, stats=stats)
        runs = (values for _, values in job.runs())
    if progress:
        length = min(filter(None, map(length_of, iterables)), default=0)
        bar = progress_bar(name, length)
        runs = ([value] for value in with_progress(itertools.chain.from_iterable(runs), bar, stats))
    return Results.of(runs, "synk.map", name)


def _in_layers(
    run: Callable[..., Any],
    fn: Any,
    pairs: Iterator[Any],
    rules: Rules,
    journal: Journal | None,
    folder: str | None,
    is_spread: bool,
) -> Iterator[Any]:
    """Return the outcomes of numbered items that pass through a journal, or are written for a replay if they fail.

    For both, the pool goes on after a failure, which is raised here: after the results of the items before it.
    """
    is_ordered = rules.is_ordered and journal is None  # a journal gets each result as soon as it is there
    layer = functools.partial(run, rules=rules._replace(is_ordered=is_ordered, returns_errors=True))
    if folder is not None:
        layer = functools.partial(recorded_items, layer, folder)
    if journal is not None:
        layer = functools.partial(journaled_items, layer, journal, rules.is_ordered)
    found = layer(fn, pairs, is_spread=is_spread)
    return (outcome for _, outcome in found) if rules.returns_errors else _raising(found)


def _raising(found: Pairs) -> Iterator[Any]:
    """Yield the outcomes up to the first item that has failed, and raise its exception."""
    with contextlib.closing(found):
        for _, outcome in found:
            if is_failure(outcome):
                raise outcome.exception
            yield outcome


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
    numbers: deque[int] = deque()

    def items() -> Iterator[Any]:
        for number, item in pairs:
            numbers.append(number)
            yield item

    job = job_of(session, fn, items(), rules, name=name, is_spread=is_spread, stats=stats, numbers=numbers)
    return (pair for run in job.runs() for pair in zip(*run))


def items_of(name: str, iterables: tuple[Iterable[Any], ...]) -> tuple[Iterator[Any], bool]:
    """Return the items of a map, and whether each is a tuple of arguments."""
    iterators = [_iterator(name, items) for items in iterables]
    return (iterators[0], False) if len(iterators) == 1 else (zip(*iterators), True)


def job_of(
    session: Any,
    fn: Callable[..., Any],
    items: Iterator[Any],
    rules: Rules,
    *,
    name: str,
    is_spread: bool = False,
    **options: Any,
) -> MapJob:
    """Return the job of a map. Nothing is sent here: it begins when the first result is asked for."""
    session.check_open(f"map {name!r}")
    mapped = functools.partial(call_with, fn) if is_spread else fn
    function = session.functions.mapped.get(
        fn, lambda: Callee(mapped, name, outputs=None, session=session), is_spread=is_spread
    )
    return MapJob(session, function, rules, items, **options)


def check_kinds(name: str, *options: tuple[str, Any, bool, str]) -> None:
    """Raise TypeError for the first option of a map that is not right: its name, its value, and what is expected."""
    for option, value, is_right, expected in options:
        if not is_right:
            raise TypeError(f"cannot map {name!r}: got {option}={value!r}, expected {expected}.")


def rules_of(verb: str, **options: Any) -> Rules:
    """Return the checked options of a map; ``verb`` is for errors."""
    on_error, item_timeout = options.get("on_error", "raise"), options.get("item_timeout")
    if on_error not in ("raise", "return"):
        raise ValueError(f"cannot {verb}: got on_error={on_error!r}, expected 'raise' or 'return'.")
    for name in ("batch_size", "max_tasks_per_worker", "max_worker_memory"):
        value = options.get(name)
        if value is not None and not is_integer(value, 1):
            raise ValueError(f"cannot {verb}: got {name}={value!r}, expected an integer above 0 or None.")
    return Rules(
        batch_size=options.get("batch_size"),
        is_ordered=bool(options.get("ordered", True)),
        returns_errors=on_error == "return",
        item_s=check_timeout(item_timeout),
        max_tasks=options.get("max_tasks_per_worker"),
        max_memory=options.get("max_worker_memory"),
    )


def _iterator(name: str, items: Any) -> Iterator[Any]:
    try:
        return iter(items)
    except TypeError:
        raise TypeError(
            f"cannot map {name!r}: got items of type {type(items).__name__}, expected an iterable."
        ) from None


def check_function(fn: Any) -> str:
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
