"""Decides when the program's signal handlers run during an operation of the runtime, and where their exceptions go.

Python runs handlers in the main thread, between any two steps, and an exception of a handler is raised there: Ctrl-C,
or a time limit by SIGALRM. No code can be guarded against that at every step. So an operation of the runtime holds
handlers back except at its safe points: where it waits, and where it calls the user's own code. The exception of a
handler at a safe point passes every ``except Exception`` and leaves the operation as itself.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the public functions make an enum of each handler: ten times the rest
import functools
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_NUMBERS = tuple(map(int, sorted(signal.valid_signals())))
_default = signal.default_int_handler

_OUT, _OPEN, _CLOSED, _LOCKED = range(4)
"""The states of the gate: no operation; at a safe point; elsewhere in an operation; in a step without safe points."""


LOOK_S = 0.5
"""The longest wait. A signal does not end one if it comes just before, or to another thread of the program."""


class HandlerRaised(BaseException):
    """Carries the exception of a signal handler from a safe point out of the operation.

    Attributes
    ----------
    error : BaseException
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class _StandIn:
    """Takes the place of a signal handler while an operation runs.

    One may be left behind: by a handler that raises during the exchange, or by user code that puts back the handler it
    found during an operation. Outside of an operation it lets the signal through and puts its handler back.
    """

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        gate = _gate
        if gate.state == _OUT:
            try:
                _signal.signal(signum, self.handler)
            finally:
                self.handler(signum, frame)
        elif gate.state == _OPEN:
            gate.has_run = True
            gate.run(signum, self.handler, frame)
        else:
            gate.came[signum] = self.handler
            if gate.on_interrupt is not None and signum == signal.SIGINT and _ends_calls(self.handler):
                gate.on_interrupt()


class _Gate:
    """Knows whether handlers may run now, and which ones must run later. One store opens it and one store closes it."""

    def __init__(self) -> None:
        self.state = _OUT
        self.raised: BaseException | None = None  # by the last handler that ran at a safe point
        self.came: dict[int, Any] = {}  # handlers that have yet to run, by signal
        self.has_run = False  # whether a handler ran during a wait: it may have installed others
        self.on_interrupt: Callable[[], None] | None = None
        self.main_thread = threading.main_thread().ident
        self._found: list[Any] = []  # what the signals had when handlers were last looked up
        self._placed: list[Any] = []  # the same list, with stand-ins in place of handlers
        self._signals: list[tuple[int, Any]] = []  # the signals with handlers, each with its stand-in

    def place(self) -> None:
        """Put a stand-in in the place of each Python handler. Every signal is asked, but few have a handler."""
        found = list(map(_signal.getsignal, _NUMBERS))
        if found == self._placed:
            return
        if found != self._found:
            is_new = [callable(each) and type(each) is not _StandIn for each in found]
            self._placed = [_StandIn(each) if new else each for each, new in zip(found, is_new)]
            self._signals = [pair for pair in zip(_NUMBERS, self._placed) if type(pair[1]) is _StandIn]
            self._found = found
        # A handler that is still in place may raise in this loop, and the operation never begins. The stand-ins that
        # are placed by then let their signals through, and put their handlers back.
        for signum, stand_in in self._signals:
            _signal.signal(signum, stand_in)

    def leave(self) -> None:
        """Put the original handlers back."""
        self.state = _OUT
        self.raised = None
        for signum, _ in self._signals:
            found = _signal.getsignal(signum)
            if type(found) is _StandIn:
                _signal.signal(signum, found.handler)

    def run_late(self) -> None:
        """Run the handlers of all signals that came in the meantime, even if some of them raise."""
        if self.came:
            signum, handler = self.came.popitem()
            try:
                self.run(signum, handler, sys._getframe())
            finally:
                self.run_late()

    def run(self, signum: int, handler: Any, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and _ends_calls(handler):
            handler = _default
        try:
            handler(signum, frame)
        except BaseException as error:
            self.raised = error if self.state == _OPEN else None
            raise

    def begin_anew(self) -> None:
        """Reset the gate in a forked child: its main thread may be another one, and that one is in no operation."""
        if self.main_thread != threading.get_ident():
            self.main_thread = threading.get_ident()
            self.came.clear()
            self.leave()


_gate = _Gate()
os.register_at_fork(after_in_child=_gate.begin_anew)


class operation:
    """Hold back the program's signal handlers while the body runs, except at its safe points.

    The handler of a signal that comes in the meantime runs at the next safe point or after the body, and may raise
    there. An operation inside another one is part of it. Handlers run only in the main thread, so in other threads this
    does nothing.
    """

    _state: ClassVar[int] = _CLOSED
    _before = _LOCKED  # this operation holds nothing back

    def __enter__(self) -> None:
        before = _gate.state
        if before < self._state and threading.get_ident() == _gate.main_thread:
            if before <= _OPEN:  # otherwise no user code has run since the handlers were last looked up
                _gate.place()
            # The store below closes the gate. From then on only stand-ins run, and they raise nothing.
            self._before = before
            _gate.state = self._state

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        before = self._before
        if before == _LOCKED:
            return
        # The gate opens first. A signal that comes from here on runs its handler at once, and those that came before
        # run below, whatever is raised in between.
        _gate.state = before
        if before == _CLOSED:
            return
        try:
            if before == _OUT:
                _gate.leave()
        finally:
            try:
                if _gate.came:
                    _gate.run_late()
            finally:
                if error is not None and type(error) is HandlerRaised:
                    _raise(error.error)


def _raise(error: BaseException) -> None:
    """Raise ``error`` again without adding to its ``__context__``."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context


class deferred(operation):
    """Hold back the program's signal handlers while the body runs, without safe points. The body must be short.

    Parameters
    ----------
    on_interrupt : callable, optional
        Called at each Ctrl-C while the body runs, if Ctrl-C would end what the main thread does.
    """

    _state = _LOCKED

    def __init__(self, on_interrupt: Callable[[], None] | None = None) -> None:
        self._on_interrupt = on_interrupt

    def __enter__(self) -> None:
        super().__enter__()
        if self._before != _LOCKED:
            _gate.on_interrupt = self._on_interrupt

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._before != _LOCKED:
            _gate.on_interrupt = None
        super().__exit__(kind, error, traceback)


def safe_point(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return ``fn(*args, **kwargs)`` for a function of the user's. Handlers may run before it and in it.

    Raises
    ------
    HandlerRaised
        If a handler raised the exception that leaves ``fn``. The operation then ends with that exception.
    """
    gate = _gate
    if gate.state != _CLOSED or threading.get_ident() != gate.main_thread:
        return fn(*args, **kwargs)
    try:
        return waiting(fn, *args, **kwargs)
    finally:
        gate.place()  # the function may have installed other handlers


def look_again() -> None:
    """Hold back the handlers that the user's code has installed in the operation, too."""
    if _gate.state == _CLOSED and threading.get_ident() == _gate.main_thread:
        _gate.place()


def waiting(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function that waits, as :func:`safe_point` does. It runs no user code except handlers.

    A short function of the user's may be called again and again in this way if :func:`look_again` follows at last.
    """
    gate = _gate
    if gate.state != _CLOSED or threading.get_ident() != gate.main_thread:
        return fn(*args, **kwargs)
    try:
        try:
            gate.raised = None
            gate.state = _OPEN
            if gate.came:
                gate.run_late()
            return fn(*args, **kwargs)
        finally:
            gate.state = _CLOSED
    except BaseException as error:
        gate.state = _CLOSED  # a handler may have run before the store above
        raised = gate.raised
        if raised is not None and (error is raised or _is_lost(raised, error)):
            raise HandlerRaised(raised) from None
        raise
    finally:
        if gate.has_run:
            gate.has_run = False
            gate.place()


def _is_lost(raised: BaseException, error: BaseException) -> bool:
    """Whether the interpreter took a handler's exception for the answer to a look-up of its own, and went on.

    An ``AttributeError`` in a property looks like a missing attribute to ``getattr``, and a ``KeyError`` in the table
    of a pickler like a missing rule. Python code that catches an exception and raises another one keeps the first as
    the context of the second.
    """
    context: BaseException | None = error
    while context is not None and context is not raised:
        context = context.__context__
    return context is None and isinstance(raised, (AttributeError, LookupError, StopIteration))


def await_lock(lock: Any) -> None:
    """Wait for a lock (``threading.RLock``) that another thread holds."""
    try:
        while not waiting(lock.acquire, timeout=LOOK_S):
            pass
    except BaseException:  # a handler may raise when the lock has just been acquired
        if lock._is_owned():
            lock.release()
        raise


class holding(operation):
    """An operation that also holds a lock."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        # The gate is closed before the lock is taken. So no handler can raise in the moment in which this thread holds
        # the lock and the body of the ``with`` has not begun.
        super().__enter__()
        try:
            if not self._lock.acquire(blocking=False):
                await_lock(self._lock)
        except BaseException as error:
            super().__exit__(type(error), error, None)
            raise

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._lock.release()
        super().__exit__(kind, error, traceback)


def as_operation(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public verb so that it runs as an operation."""

    @functools.wraps(fn)
    def held(*args: P.args, **kwargs: P.kwargs) -> R:
        with operation():
            return fn(*args, **kwargs)

    return held


def raised_by_handler(error: BaseException) -> BaseException:
    """Return the handler's own exception if ``error`` carries one, else ``error``."""
    return error.error if isinstance(error, HandlerRaised) else error


def is_from_handler(error: BaseException) -> bool:
    """Whether a signal handler raised ``error``, so that ``error`` says nothing about what was tried.

    A handler is recognised by its arguments: a signal number, followed by the frame that it interrupts.
    """
    if isinstance(error, KeyboardInterrupt):  # Python's own handler has no Python frame
        return True
    traceback = error.__traceback__
    outer: list[FrameType] = []
    while traceback is not None and traceback.tb_next is not None:
        outer.append(traceback.tb_frame)
        traceback = traceback.tb_next
        arguments = _positional(traceback.tb_frame)
        for first, second in itertools.pairwise(arguments):
            if isinstance(first, int) and any(second is frame for frame in outer):
                return True
    return False


def _positional(frame: FrameType) -> list[Any]:
    """Return the positional arguments of a function, as far as it still holds them."""
    code, found = frame.f_code, frame.f_locals
    arguments = [found.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & 0x04:  # ``*args`` lies behind the keyword-only arguments
        arguments += found.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return arguments


# -- asyncio ----------------------------------------------------------------------------------------------------------


def _ends_calls(handler: Any) -> bool:
    """Whether ``handler`` is one whose SIGINT must end what the main thread does: Python's, or asyncio's.

    The handler of ``asyncio.run`` only cancels the main task. That task is blocked here and would not notice.
    """
    if handler is _default:
        return True
    runner = getattr(sys.modules.get("asyncio"), "Runner", None)  # since Python 3.11
    return runner is not None and isinstance(getattr(getattr(handler, "func", None), "__self__", None), runner)
