"""Calls over an iterable of batches: submitted ahead, with results in order.

At most ``NUM_LANES`` calls are in flight. The iterable is the user's code: it runs in the caller's thread, between
operations.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from synk._engine.pending import PendingCall
from synk._wire.orders import NUM_LANES
from synk.errors import add_note


def stream(submit: Callable[[Any], PendingCall[Any]], name: str, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the result for each of ``batches``; see :meth:`synk.Function.stream`."""
    calls: deque[PendingCall[Any]] = deque()
    error: Exception | None = None
    number = 0  # the number of the batch whose result comes next
    is_at_end = False
    while calls or not is_at_end:
        if not is_at_end:
            try:
                calls.append(submit(next(batches)))
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
    try:
        return calls.popleft().result()
    except Exception as error:
        add_note(error, f"for batch {number} of the stream of {name!r}")
        for call in calls:
            with contextlib.suppress(Exception):
                call.result()
        raise
