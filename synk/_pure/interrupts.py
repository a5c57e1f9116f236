"""The program's signal handlers and the runtime: where they may run while it works, and what they raise there.

Python runs handlers in the main thread, between any two steps of it, and what they raise comes out there: Ctrl-C, and
likewise a time limit by SIGALRM. No code can be guarded against that at every step. So in an operation of the runtime
handlers are held back, but for its safe points: where it waits, and where it calls the user's own code. What they raise
there passes everything that catches an ``Exception``, and comes out of the operation as itself.
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
"""No operation; at a safe point of one; elsewhere in it; in a step that has no safe points."""


class HandlerRaised(BaseException):
    """What a signal handler has raised at a safe point, on its way out of the operation.

    Attributes
    ----------
    error : BaseException
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class _StandIn:
    """What is in place of a handler while an operation runs.

    A handler that raises while they are being exchanged leaves some, and so does whoever puts back what he has met in
    an operation: with no operation it lets the signal through and puts its handler back.
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
    """Whether handlers run now, and which of them are to run later. One store opens it, and one closes it."""

    def __init__(self) -> None:
        self.state = _OUT
        self.raised: BaseException | None = None  # by the last handler that has run at a safe point
        self.came: dict[int, Any] = {}  # handlers that are to run, by signal
        self.has_run = False  # whether one has run, and may have set others, at a safe point that is a wait
        self.on_interrupt: Callable[[], None] | None = None
        self.main_thread = threading.main_thread().ident
        self._found: list[Any] = []  # in place of all signals, when handlers were looked for last
        self._placed: list[Any] = []  # the same, with stand-ins for handlers
        self._signals: list[tuple[int, Any]] = []  # that have one, with what stands for it

    def place(self) -> None:
        """Take the place of all handlers that are Python's: all signals are asked, which rarely have others."""
        found = list(map(_signal.getsignal, _NUMBERS))
        if found == self._placed:
            return
        if found != self._found:
            is_new = [callable(each) and type(each) is not _StandIn for each in found]
            self._placed = [_StandIn(each) if new else each for each, new in zip(found, is_new)]
            self._signals = [pair for pair in zip(_NUMBERS, self._placed) if type(pair[1]) is _StandIn]
            self._found = found
        for signum, stand_in in self._signals:
            _signal.signal(signum, stand_in)

    def leave(self) -> None:
        """Put the handlers back."""
        self.state = _OUT
        self.raised = None
        for signum, _ in self._signals:
            found = _signal.getsignal(signum)
            if type(found) is _StandIn:
                _signal.signal(signum, found.handler)

    def run_late(self) -> None:
        """Run the handlers of signals that have come, all of them, whatever they raise."""
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
        """In a forked child, where another thread may be the main one: then nobody is in an operation."""
        if self.main_thread != threading.get_ident():
            self.main_thread = threading.get_ident()
            self.came.clear()
            self.leave()


_gate = _Gate()
os.register_at_fork(after_in_child=_gate.begin_anew)


class operation:
    """Hold back the program's signal handlers while the body runs, but at its safe points.

    Those of signals that come meanwhile run at the next safe point, or after the body, and may raise there. Inside
    another operation it is part of that one. Only the main thread has handlers, so in others it does nothing.
    """

    _state: ClassVar[int] = _CLOSED
    _before = _LOCKED  # it holds nothing back

    def __enter__(self) -> None:
        before = _gate.state
        if before < self._state and threading.get_ident() == _gate.main_thread:
            if before <= _OPEN:  # else no code of the user's has run since the last look
                _gate.place()
            self._before = before
            _gate.state = self._state

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        before = self._before
        if before == _LOCKED:
            return
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
    """Raise ``error`` once more, as if nothing had been between."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context


class deferred(operation):
    """Hold back the program's signal handlers while the body runs, without safe points: it must be short.

    Parameters
    ----------
    on_interrupt : callable, optional
        Called at each Ctrl-C while the body runs, where that ends what the main thread does.
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
    """Return ``fn(*args, **kwargs)``, which is the user's code: handlers run in it, and before it.

    Raises
    ------
    HandlerRaised
        If a handler has raised what comes out of ``fn``. The operation ends with what it has raised.
    """
    gate = _gate
    if gate.state != _CLOSED or threading.get_ident() != gate.main_thread:
        return fn(*args, **kwargs)
    try:
        return waiting(fn, *args, **kwargs)
    finally:
        gate.place()  # it may have set others


def waiting(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Do as :func:`safe_point` with a function that waits, and runs no code of the user's but handlers."""
    gate = _gate
    if gate.state != _CLOSED or threading.get_ident() != gate.main_thread:
        return fn(*args, **kwargs)
    try:
        try:
            gate.state = _OPEN
            if gate.came:
                gate.run_late()
            return fn(*args, **kwargs)
        finally:
            gate.state = _CLOSED
    except BaseException as error:
        gate.state = _CLOSED  # a handler may have come before the store above
        if error is gate.raised:
            raise HandlerRaised(error) from None
        raise
    finally:
        if gate.has_run:
            gate.has_run = False
            gate.place()


def await_lock(lock: Any) -> None:
    """Wait for a lock (``threading.RLock``) that another thread has."""
    try:
        waiting(lock.acquire)
    except BaseException:  # by a handler, which may come when the lock has just been taken
        if lock._is_owned():
            lock.release()
        raise


class holding(operation):
    """An operation that holds a lock."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __enter__(self) -> None:
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
    """Have a verb of the user's run as an operation."""

    @functools.wraps(fn)
    def held(*args: P.args, **kwargs: P.kwargs) -> R:
        with operation():
            return fn(*args, **kwargs)

    return held


def raised_by_handler(error: BaseException) -> BaseException:
    """Return what a handler has raised, where ``error`` brings that; else ``error``."""
    return error.error if isinstance(error, HandlerRaised) else error


def is_from_handler(error: BaseException) -> bool:
    """Whether a signal handler has raised ``error``: then it is no answer to what was being tried.

    A handler is the one function that gets a number and, behind it, the frame which it interrupts.
    """
    if isinstance(error, KeyboardInterrupt):  # Python's own handler has no frame
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
    """Return the positional arguments of a function, as far as it has not dropped them."""
    code, found = frame.f_code, frame.f_locals
    arguments = [found.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & 0x04:  # *args come behind those that can be named only
        arguments += found.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return arguments


# -- asyncio ----------------------------------------------------------------------------------------------------------


def _ends_calls(handler: Any) -> bool:
    """Whether a SIGINT that ``handler`` takes ends what the main thread does: it is not the user's own.

    The one of ``asyncio.run`` would only cancel its main task, which is blocked here and would not hear of it.
    """
    if handler is _default:
        return True
    runner = getattr(sys.modules.get("asyncio"), "Runner", None)  # since Python 3.11
    return runner is not None and isinstance(getattr(getattr(handler, "func", None), "__self__", None), runner)
