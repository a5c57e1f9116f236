"""Holding back Ctrl-C while the runtime brings its workers to a known state."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def held_back(on_interrupt: Callable[[int], None]) -> Iterator[None]:
    """While the body runs, call ``on_interrupt(count)`` for each SIGINT instead of raising KeyboardInterrupt.

    Only in the main thread and only where Python's own handler is installed: a handler of the user keeps its meaning.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours:
        yield
        return
    count = 0

    def handler(signum: int, frame: object) -> None:
        nonlocal count
        count += 1
        on_interrupt(count)

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def deferred(on_interrupt: Callable[[int], None] | None = None) -> Iterator[None]:
    """Hold Ctrl-C back while the body runs, calling ``on_interrupt``, and raise KeyboardInterrupt after it."""
    was_interrupted = False

    def note(count: int) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        if on_interrupt is not None:
            on_interrupt(count)

    with held_back(note):
        yield
    if was_interrupted:
        raise KeyboardInterrupt
