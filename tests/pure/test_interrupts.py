"""The gate for the program's signal handlers: closed in an operation, open at its safe points."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from synk._pure import interrupts
from synk._pure.interrupts import HandlerRaised, as_operation, deferred, operation, raised_by_handler, safe_point


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


def test_what_a_handler_raises_at_a_safe_point_passes_what_catches_errors(handler: Handler, subtests: Any) -> None:
    """Also what came before it. The interpreter takes an AttributeError for an answer of its own in some places."""

    def attempt(fn: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception):
            safe_point(fn)

    def missing_attribute() -> None:
        class Owner:
            @property
            def x(self) -> None:
                ring()

        getattr(Owner(), "x", None)
        raise TypeError("no x")

    for kind in (Limit, TimeoutError, StopIteration, SystemExit, KeyboardInterrupt, AttributeError):
        for is_before, fn in ((False, ring), (True, ring), (False, missing_attribute)):
            if fn is missing_attribute and kind is not AttributeError:
                continue
            handler.kind = kind
            with subtests.test(kind=kind.__name__, is_before=is_before, fn=fn.__name__):
                with pytest.raises(kind) as caught, operation():
                    if is_before:
                        ring()
                    attempt(pytest.fail if is_before else fn)
                assert caught.value is handler.raised[-1] and caught.value.__context__ is None


def test_what_the_code_raises_or_catches_itself_is_its_own(handler: Handler) -> None:
    def limited() -> str:
        with contextlib.suppress(Limit):
            ring()
        return "went on"

    def failing() -> None:
        limited()
        raise LookupError

    def translate() -> None:
        try:
            ring()
        except Limit:
            raise TypeError("too late") from None

    with operation():
        assert safe_point(limited) == "went on"
        for fn, error in ((failing, LookupError), (translate, TypeError)):
            with pytest.raises(error):
                safe_point(fn)
    with pytest.raises(Limit), operation():
        handler.raised.clear()
        with deferred():  # a step without safe points
            safe_point(ring)
        assert not handler.raised
        safe_point(int)


def test_an_operation_in_the_users_code(handler: Handler) -> None:
    """It is closed, opens at its own safe points, and gives the user's code what the handler has raised."""
    caught_inside: list[BaseException] = []

    def users() -> None:
        try:
            with operation():
                ring()
                assert not handler.raised
                safe_point(int)
        except Limit as error:
            caught_inside.append(error)
            raise

    with pytest.raises(Limit) as caught, operation():
        with pytest.raises(HandlerRaised) as inside:
            safe_point(users)
        assert raised_by_handler(inside.value) is handler.raised[0]
        raise inside.value
    assert caught_inside == [caught.value] == handler.raised


def test_handlers_that_are_set_stay_set(handler: Handler) -> None:
    """In the body, by the user's code, which may put back what it has met, and of any signal."""
    other = Handler()
    with operation():
        signal.signal(signal.SIGALRM, other)
    assert signal.getsignal(signal.SIGALRM) is other
    with pytest.raises(Limit), operation():
        met = safe_point(signal.signal, signal.SIGALRM, handler)
        ring()
        assert not handler.raised
    signal.signal(signal.SIGALRM, met)
    with pytest.raises(Limit):
        ring()
    assert (len(handler.raised), len(other.raised)) == (1, 1)
    assert signal.getsignal(signal.SIGALRM) is other
    signal.signal(signal.SIGALRM, handler)
    before = signal.signal(signal.SIGRTMIN + 7, handler)
    try:
        with pytest.raises(Limit), operation():
            signal.raise_signal(signal.SIGRTMIN + 7)
            assert len(handler.raised) == 1
    finally:
        signal.signal(signal.SIGRTMIN + 7, before)


def test_other_threads_hold_nothing_back_and_open_nothing(handler: Handler) -> None:
    entered, leave = threading.Event(), threading.Event()

    @as_operation
    def hold() -> None:
        safe_point(entered.set)
        leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    with pytest.raises(Limit):
        ring()
    with pytest.raises(Limit), operation():
        other = threading.Thread(target=safe_point, args=(int,))
        other.start()
        other.join()
        ring()
        assert len(handler.raised) == 1
    leave.set()
    thread.join()


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
