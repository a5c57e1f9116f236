"""The gate for the program's signal handlers: closed in an operation, open at its safe points."""

from __future__ import annotations

import contextlib
import io
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from synk._pure import interrupts
from synk._pure.interrupts import HandlerRaised, as_operation, deferred, operation, raised_by_handler, safe_point


class Limit(Exception):
    """What the handlers below raise, where the test does not care."""


class Handler:
    """A handler that raises an error of ``kind`` and keeps it; with None it does no more than note the signal."""

    def __init__(self) -> None:
        self.kind: type[BaseException] | None = Limit
        self.raised: list[BaseException] = []
        self.num_run = 0

    def __call__(self, signum: int, frame: Any) -> None:
        self.num_run += 1
        if self.kind is not None:
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


def catch(error: BaseException, handler: Handler) -> None:
    """Check that what came out is what the handler has raised, as if nothing had been between."""
    assert error is handler.raised[-1]
    assert error.__context__ is None


# -- closed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [operation, deferred])
def test_handlers_run_after_the_body(handler: Handler, section: Any) -> None:
    steps = []
    with pytest.raises(Limit) as caught, section():
        ring()
        steps.append(handler.num_run)
        with section():
            ring()
        steps.append(handler.num_run)
    assert steps == [0, 0]
    assert handler.num_run == 1  # as where a signal comes twice before Python looks
    catch(caught.value, handler)


def test_all_handlers_run_where_several_signals_came(handler: Handler) -> None:
    with pytest.raises((Limit, KeyboardInterrupt)) as caught, operation():
        ring()
        signal.raise_signal(signal.SIGINT)
    assert {type(caught.value), type(caught.value.__context__)} == {Limit, KeyboardInterrupt}


def test_a_handler_that_was_set_in_the_body_stays_set(handler: Handler) -> None:
    other = Handler()
    with operation():
        signal.signal(signal.SIGALRM, other)
    assert signal.getsignal(signal.SIGALRM) is other
    signal.signal(signal.SIGALRM, handler)


def test_every_signal_with_a_handler_is_held_back(handler: Handler) -> None:
    """Also one that is not among those that programs use, and that had none before."""
    with operation():
        pass
    before = signal.signal(signal.SIGRTMIN + 7, handler)
    try:
        with pytest.raises(Limit), operation():
            signal.raise_signal(signal.SIGRTMIN + 7)
            assert handler.num_run == 0
    finally:
        signal.signal(signal.SIGRTMIN + 7, before)


# -- safe points ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Limit, TimeoutError, StopIteration, SystemExit, KeyboardInterrupt])
def test_what_a_handler_raises_at_a_safe_point_passes_what_catches_errors(
    handler: Handler, kind: type[BaseException]
) -> None:
    handler.kind = kind

    def attempt() -> str:
        try:
            safe_point(ring)
        except Exception:
            return "swallowed"
        return "no error"

    with pytest.raises(kind) as caught, operation():
        attempt()
    catch(caught.value, handler)


def test_handlers_of_signals_that_came_before_run_at_the_safe_point(handler: Handler) -> None:
    with pytest.raises(Limit) as caught, operation():
        ring()
        assert not handler.raised
        safe_point(pytest.fail, "not called")
    catch(caught.value, handler)


def test_what_the_code_raises_itself_is_an_error_like_others(handler: Handler) -> None:
    handler.kind = None

    def fail() -> None:
        ring()
        raise Limit

    with operation():
        with pytest.raises(Limit):
            safe_point(fail)
        assert handler.num_run == 1


def test_code_that_catches_its_own_time_limit_has_none(handler: Handler) -> None:
    def limited() -> str:
        with contextlib.suppress(Limit):
            ring()
        return "went on"

    def limited_and_failed() -> None:
        limited()
        raise LookupError

    with operation():
        assert safe_point(limited) == "went on"
        with pytest.raises(LookupError):
            safe_point(limited_and_failed)


def missing_attribute() -> None:
    """The interpreter takes what is raised in ``x`` for a missing attribute."""

    class Owner:
        @property
        def x(self) -> None:
            ring()

    getattr(Owner(), "x", None)
    raise TypeError("no x")


def missing_rule() -> None:
    """The pickler takes what is raised in its table for a missing rule."""

    class Rules(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: type) -> Any:
            ring()

    pickler = pickle.Pickler(io.BytesIO())
    pickler.dispatch_table = Rules()
    pickler.dump(sys._getframe().f_code)


@pytest.mark.parametrize(("kind", "fn"), [(AttributeError, missing_attribute), (KeyError, missing_rule)])
def test_what_the_interpreter_takes_for_an_answer_of_its_own_comes_out(handler: Handler, kind: Any, fn: Any) -> None:
    handler.kind = kind
    with pytest.raises(kind) as caught, operation():
        safe_point(fn)
    catch(caught.value, handler)


@pytest.mark.parametrize("kind", [AttributeError, KeyError])
def test_code_that_turns_a_handlers_exception_into_another_one_has_its_own(handler: Handler, kind: Any) -> None:
    handler.kind = kind

    def translate() -> None:
        try:
            ring()
        except kind:
            raise TypeError("too late") from None

    with operation(), pytest.raises(TypeError):
        safe_point(translate)


def test_safe_points_are_closed_in_a_step_that_has_none(handler: Handler) -> None:
    with pytest.raises(Limit), operation():
        with deferred():
            safe_point(ring)
        assert handler.num_run == 0
        safe_point(int)


def test_an_operation_in_the_users_code(handler: Handler) -> None:
    """It is closed, opens at its own safe points, and gives the user's code what the handler has raised."""
    steps: list[Any] = []

    def inner() -> None:
        with operation():
            ring()
            steps.append(handler.num_run)
            safe_point(int)

    def users() -> None:
        try:
            inner()
        except Limit as error:
            steps.append(error)
            raise

    with pytest.raises(Limit) as caught, operation():
        with pytest.raises(HandlerRaised) as inside:
            safe_point(users)
        assert raised_by_handler(inside.value) is handler.raised[0]
        raise inside.value
    assert steps == [0, caught.value]
    catch(caught.value, handler)


def test_a_handler_that_the_users_code_sets_is_held_back_from_then_on(handler: Handler) -> None:
    other = Handler()
    with pytest.raises(Limit), operation():
        safe_point(signal.signal, signal.SIGALRM, other)
        ring()
        assert other.num_run == 0
    assert other.num_run == 1
    assert signal.getsignal(signal.SIGALRM) is other
    signal.signal(signal.SIGALRM, handler)


def test_users_code_that_puts_back_what_it_has_met(handler: Handler) -> None:
    """After the operation as well: an iterable may end later."""
    with operation():
        met = safe_point(signal.signal, signal.SIGALRM, Handler())
    signal.signal(signal.SIGALRM, met)
    with pytest.raises(Limit):
        ring()
    assert handler.num_run == 1
    assert signal.getsignal(signal.SIGALRM) is handler
    signal.signal(signal.SIGALRM, met)
    with operation():
        pass


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
        assert handler.num_run == 1
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

    def at(nth: int) -> None:
        met = 0

        def look(frame: Any, event: str, argument: Any) -> Any:
            nonlocal met
            if frame.f_code.co_filename != interrupts.__file__:
                return None
            if event == "line":
                met += 1
                if met == nth:
                    sys.settrace(None)
                    ring()
            return look

        sys.settrace(look)

    for nth in range(1, 1000):
        handler.raised.clear()
        try:
            at(nth)
            work()
        except Limit as error:
            sys.settrace(None)
            assert error is handler.raised[0]
        finally:
            sys.settrace(None)
        work()
        assert interrupts._gate.state == 0
        if not handler.raised:
            break
        assert len(handler.raised) == 1
    assert 50 < nth < 999
