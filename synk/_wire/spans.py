"""Spans: named parts of the program, or of a function on a rank, with the times of their beginning and end.

Each process keeps its last spans. A trace collects the spans of the program and of all ranks. With ``SYNK_NVTX=1``
in the environment each span is an NVTX range as well, if the package ``nvtx`` is installed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

MOST = 10_000


class Span(NamedTuple):
    """One span, with times of the monotonic clock, which all processes of a machine share."""

    name: str
    thread: str
    began_ns: int
    ended_ns: int


spans: deque[Span] = deque(maxlen=MOST)
"""The spans of this process."""


@functools.lru_cache(maxsize=1)
def nvtx() -> Any:
    """Return the package nvtx, or None if ``SYNK_NVTX`` is not set.

    Raises
    ------
    ImportError
        If it is set and the package is not installed.
    """
    if os.environ.get("SYNK_NVTX", "0") in ("", "0"):
        return None
    try:
        import nvtx as package
    except ImportError as error:
        raise ImportError(
            "cannot mark NVTX ranges: got SYNK_NVTX without the package nvtx, expected it to be installed. "
            "pip install nvtx, or unset the variable."
        ) from error
    return package


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Record the body under a name; see :func:`synk.profiler.span`."""
    if not isinstance(name, str):
        raise TypeError(f"cannot begin a span: got the name {name!r}, expected a text.")
    package = nvtx()
    if package is not None:
        package.push_range(name)
    began = time.monotonic_ns()
    try:
        yield
    finally:
        spans.append(Span(name, threading.current_thread().name, began, time.monotonic_ns()))
        if package is not None:
            package.pop_range()


def take_spans() -> list[Span]:
    """Return the spans of this process, and forget them."""
    taken = []
    while spans:
        taken.append(spans.popleft())
    return taken


def pickled_spans() -> bytes:
    """Return the spans of this process as one pickle, and forget them."""
    return pickle.dumps(take_spans(), protocol=5)


def as_nvtx_range(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a function so that a GPU profiler shows each of its calls as an NVTX range called ``name``.

    Without ``SYNK_NVTX`` in the environment it returns ``fn`` itself, so calls pay nothing for it.
    """
    package = nvtx()
    return fn if package is None else package.annotate(name)(fn)
