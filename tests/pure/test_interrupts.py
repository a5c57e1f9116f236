"""The gate for the program's signal handlers: closed in an operation, open at its safe points."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from synk._pure import interrupts
from synk._pure.interrupts import deferred, operation, safe_point


class Limit(Exception):
    """What the handlers below raise, where the test does not care."""


class Handler:
    """A handler that raises an error of ``kind`` and keeps it."""

    def __init__(self) -> None:
        self.kind: type[BaseException] = Limit
        self.raised: list[BaseException] = []

    def __call__(self, signum: int, frame: Any) -> None:
        self.raised.append(self.kind("the time is over"))
        raise self.raised[-1]


@pytest.fixture
def handler() -> Iterator[Handler]:
    """Return the handler of SIGALRM."""
    made = Handler()
    before = signal.signal(signal.SIGALRM, made)
    yield made
    sys.settrace(None)
    assert signal.getsignal(signal.SIGALRM) is made
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGALRM, before)


def ring() -> None:
    signal.raise_signal(signal.SIGALRM)


def test_handlers_run_once_after_the_body(handler: Handler) -> None:
    """As where a signal comes twice before Python looks; all of them where several signals came."""
    for section in (operation, deferred):
        handler.raised.clear()
        with pytest.raises(Limit) as caught, section():
            ring()
            with section():
                ring()
            assert not handler.raised
        assert handler.raised == [caught.value] and caught.value.__context__ is None
    with pytest.raises((Limit, KeyboardInterrupt)) as both, operation():
        ring()
        signal.raise_signal(signal.SIGINT)
    assert {type(both.value), type(both.value.__context__)} == {Limit, KeyboardInterrupt}


def test_a_signal_at_any_line_comes_once_and_as_itself(handler: Handler) -> None:
    """Wherever in the gate itself it comes, and the next operation finds all as it was."""

    def work() -> None:
        with operation():
            try:
                safe_point(int)
                with deferred():
                    pass
                safe_point(int)
            except Exception as error:
                raise AssertionError("taken for an error") from error

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
        handler.raised.clear()
        try:
            ring_at(nth)
            work()
        except Limit as error:
            sys.settrace(None)
            assert handler.raised == [error]
        finally:
            sys.settrace(None)
        work()
        with pytest.raises(Limit):  # none is held back any more
            ring()
        if len(handler.raised) == 1:
            break
    assert 50 < nth < 999
