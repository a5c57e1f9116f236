"""The gate for Ctrl-C: closed in an operation, open at its safe points. That of other signals is leaving."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from synk._pure import interrupts
from synk._pure.interrupts import deferred, operation, safe_point


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Assert that the handler of Ctrl-C is the program's own afterwards."""
    yield
    sys.settrace(None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def ring() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_comes_once_after_the_body() -> None:
    """As where it comes twice before Python looks."""
    for section in (operation, deferred):
        over = 0
        with pytest.raises(KeyboardInterrupt) as caught, section():
            ring()
            with section():
                ring()
            over += 1
        assert over == 1 and caught.value.__context__ is None


def test_at_a_safe_point_it_passes_what_catches_errors() -> None:
    """Also that which came before it."""

    def attempt(fn: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception):
            safe_point(fn)

    def before() -> None:
        ring()
        attempt(pytest.fail)

    for body in (lambda: attempt(ring), before):
        with pytest.raises(KeyboardInterrupt), operation():
            body()
            pytest.fail("it was caught")


def test_at_any_line_it_comes_once() -> None:
    """Wherever in the gate itself it comes, and the next operation finds all as it was."""

    def work() -> None:
        with operation():
            safe_point(int)
            with deferred():
                pass
            safe_point(int)

    def ring_at(nth: int) -> None:
        met = 0

        def look(frame: Any, event: str, argument: Any) -> Any:
            nonlocal met
            if frame.f_code.co_filename != interrupts.__file__:
                return None
            met += event == "line"
            if event == "line" and met == nth:
                sys.settrace(None)
                ring()
            return look

        sys.settrace(look)

    for nth in range(1, 1000):
        try:
            ring_at(nth)
            work()
            is_over = True
        except KeyboardInterrupt:
            is_over = False
        sys.settrace(None)
        work()
        with pytest.raises(KeyboardInterrupt):  # none is held back any more
            ring()
        if is_over:
            break
    assert 50 < nth < 999
