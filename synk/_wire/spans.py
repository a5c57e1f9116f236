"""Spans: named parts of the program, or of a function on a rank, with the times of their beginning and end.

Each process keeps its last spans. A trace collects the spans of the program and of all ranks.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

MOST = 10_000


class Span(NamedTuple):
    """One span, with times of the monotonic clock, which all processes of a machine share."""

    name: str
    thread: str
    began_ns: int
    ended_ns: int


spans: deque[Span] = deque(maxlen=MOST)
"""The spans of this process."""


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Record the body under a name; see :func:`synk.profiler.span`."""
    if not isinstance(name, str):
        raise TypeError(f"cannot begin a span: got the name {name!r}, expected a text.")
    began = time.monotonic_ns()
    try:
        yield
    finally:
        spans.append(Span(name, threading.current_thread().name, began, time.monotonic_ns()))


def take_spans() -> list[Span]:
    """Return the spans of this process, and forget them."""
    taken = []
    while spans:
        taken.append(spans.popleft())
    return taken


def pickled_spans() -> bytes:
    """Return the spans of this process as one pickle, and forget them."""
    return pickle.dumps(take_spans(), protocol=5)
