"""Ctrl-C is held back while a verb is at work: until it waits, ends, or for a second. Other handlers run anywhere."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from synk._pure import interrupts
from synk._pure.interrupts import deferred, holding, waiting


class Limit(Exception):
    """What the handler of SIGALRM raises."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    def over(signum: int, frame: Any) -> None:
        raise Limit

    before = signal.signal(signal.SIGALRM, over)
    yield
    sys.settrace(None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGALRM, before)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("section", [holding, deferred])
def test_it_comes_once_after_the_body(section: Callable[[], Any]) -> None:
    passed = []
    with pytest.raises(KeyboardInterrupt) as caught, section():
        press()
        with section():
            press()
        passed.append(1)
    assert passed and caught.value.__context__ is None
    with section():
        pass


def test_it_comes_where_the_verb_waits() -> None:
    """Before the wait and in it, and not in a step that must not be broken off."""
    for before, meanwhile in ((press, int), (int, press)):
        passed = []
        with pytest.raises(KeyboardInterrupt), holding():
            before()
            with deferred():
                waiting(before)
            passed.append(1)
            waiting(meanwhile)
            passed.append(2)
        assert passed == [1]


def test_it_comes_late_where_the_verb_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, if what it breaks off goes on: it leaves the verb in any case."""
    monkeypatch.setattr(interrupts, "HOLD_S", 0.02)
    with pytest.raises(KeyboardInterrupt), holding():
        press()
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    pass
    with holding():
        pass


def test_the_programs_own_handler_is_held_back_and_comes_back() -> None:
    """Also where the body has put another in its place, and then the one that it found."""
    came: list[int] = []

    def mine(signum: int, frame: Any) -> None:
        came.append(signum)

    before = signal.signal(signal.SIGINT, mine)
    try:
        with holding():
            press()
            assert not came
            found = signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert len(came) == 1
        signal.signal(signal.SIGINT, found)
        press()
        assert len(came) == 2 and signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_a_signal_at_any_line_leaves_nothing_behind(number: int) -> None:
    """Ctrl-C comes out of the verb, once; after either the next one is held back, and an idle program gets its own."""

    def work() -> None:
        with holding():
            waiting(int)
            with deferred():
                pass
            waiting(int)

    def ring_at(nth: int) -> Callable[[], bool]:
        met = 0

        def look(frame: Any, event: str, argument: Any) -> Any:
            nonlocal met
            if frame.f_code.co_filename != interrupts.__file__:
                return None
            met += event == "line"
            if event == "line" and met == nth:
                sys.settrace(None)
                signal.raise_signal(number)
            return look

        sys.settrace(look)
        return lambda: met >= nth

    for nth in range(1, 1000):
        raised = []
        has_rung = ring_at(nth)
        try:
            work()
        except (KeyboardInterrupt, Limit) as error:
            raised.append(type(error))
        finally:
            sys.settrace(None)
        assert raised == [KeyboardInterrupt if number == signal.SIGINT else Limit] * has_rung(), nth
        if nth % 2:  # the next verb puts it right, or the next signal
            work()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, nth
        with pytest.raises(KeyboardInterrupt):
            press()
        work()
        passed = []
        with pytest.raises(KeyboardInterrupt), holding():
            press()
            passed.append(1)
        assert passed, nth
        if not has_rung():
            break
    assert 30 < nth < 999
