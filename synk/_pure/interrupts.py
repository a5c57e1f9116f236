"""Holds Ctrl-C back while the runtime is at work, to a point where nothing tears.

Python runs the handler of SIGINT in the main thread between any two steps, and ``KeyboardInterrupt`` is raised there.
So a public verb holds it back (:class:`holding`). It is raised where the verb waits, at the end of the verb, and in any
case after ``HOLD_S``, wherever that is: in a hook of the user's, or at a lock that another thread holds. Handlers of
other signals run at any step. What they break off, and a late Ctrl-C, is settled by the next operation of the runtime.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the public functions make an enum of each handler: ten times the rest
import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_SIGINT = int(signal.SIGINT)
_default = signal.default_int_handler

_OUT, _OPEN, _CLOSED, _LOCKED = range(4)
"""The states of the gate: no verb; a verb waits; a verb is at work; in a step that must not be broken off."""

HOLD_S = 1.0
"""How long a verb that does not come to a wait may hold Ctrl-C back."""

LOOK_S = 0.5
"""The longest wait. A signal does not end one if it comes just before, or to another thread of the program."""


class _Gate:
    """Knows whether Ctrl-C may be raised now, or must be later."""

    def __init__(self) -> None:
        self.state = _OUT
        self.frame: FrameType | None = None  # whose body holds Ctrl-C back
        self.came: object | None = None  # a Ctrl-C that was not raised yet
        self.is_late = False  # whether the signal on its way is no new one, but says that one was held for ``HOLD_S``
        self.handler: Any = _default  # the program's, while the stand-in has its place
        self.on_interrupt: Callable[[], None] | None = None
        self.main_thread = threading.main_thread().ident

    def place(self) -> None:
        """Put the stand-in in the place of the program's handler, if it has one in Python."""
        handler = _signal.getsignal(_SIGINT)
        if handler is not _stand_in and callable(handler):
            self.handler = handler
            _signal.signal(_SIGINT, _stand_in)

    def leave(self) -> None:
        """Put the program's handler back."""
        self.state, self.frame = _OUT, None
        if _signal.getsignal(_SIGINT) is _stand_in:
            _signal.signal(_SIGINT, self.handler)

    def is_stale(self, frame: FrameType | None) -> bool:
        """Whether the body that held Ctrl-C back is over, because another handler raised as it was left."""
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is None

    def hold(self) -> None:
        """Note a Ctrl-C that cannot be raised now."""
        if self.came is None:
            self.came = object()
            _thread.start_new_thread(self._strike, (self.came,))

    def _strike(self, came: object) -> None:
        """Raise a Ctrl-C that is held too long. Runs in a thread of its own."""
        while self.came is came:
            time.sleep(HOLD_S)
            if self.came is came:  # and until the signal is sent no other thread runs
                self.is_late = True
                _signal.pthread_kill(self.main_thread, _SIGINT)

    def raise_held(self) -> None:
        """Raise the Ctrl-C that was held back, if one was."""
        if self.came is not None:
            self.came = None
            self.run(sys._getframe())

    def run(self, frame: FrameType | None) -> None:
        handler = _default if _ends_calls(self.handler) else self.handler
        handler(_SIGINT, frame)

    def begin_anew(self) -> None:
        """Reset the gate in a forked child: its main thread may be another one, and that one is in no verb."""
        if self.main_thread != threading.get_ident():
            self.main_thread = threading.get_ident()
            self.came = None
            self.leave()


_gate = _Gate()
os.register_at_fork(after_in_child=_gate.begin_anew)


def _stand_in(signum: int, frame: FrameType | None) -> None:
    """Take the place of the program's handler of SIGINT while a verb runs.

    It may be left behind, by user code that puts back the handler that it found in a verb. Outside of a verb it puts
    the program's handler back, and lets the signal through.
    """
    gate = _gate
    is_late, gate.is_late = gate.is_late, False
    if is_late and gate.came is None:  # it was raised just before
        return
    if gate.state == _OUT or gate.is_stale(frame):
        gate.came = None
        gate.leave()
        gate.run(frame)
    elif gate.state == _OPEN:
        gate.came = None
        gate.run(frame)
    elif gate.state == _LOCKED:
        gate.hold()
        if gate.on_interrupt is not None and not is_late and _ends_calls(gate.handler):
            gate.on_interrupt()
    elif is_late:  # it is still held: user code may catch it, as it must not
        gate.run(frame)
    else:
        gate.hold()


def raise_if_of_handler(raised: BaseException) -> None:
    """Raise an exception again, or what has caused it, if a handler of a signal has raised that, as of Ctrl-C.

    Asked before an object is blamed for it: the code that a signal has broken off, such as a pickling rule, is not at
    fault.
    """
    error: BaseException | None = raised
    codes = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    while error is not None:
        if isinstance(error, KeyboardInterrupt) and threading.get_ident() == _gate.main_thread:
            raise error
        at = error.__traceback__
        while at is not None:
            if at.tb_frame.f_code in codes:
                raise error
            at = at.tb_next
        error = error.__cause__


class holding:
    """Hold Ctrl-C back while the body runs, but not where it waits (:func:`waiting`).

    It is raised at the end of the outermost body at the latest. Other threads than the main thread have no handlers, so
    there this does nothing.
    """

    _state: ClassVar[int] = _CLOSED
    _before = _LOCKED  # this one holds nothing back
    _frame: FrameType | None = None

    def __enter__(self) -> None:
        gate = _gate
        before = gate.state
        if before >= self._state and threading.get_ident() == gate.main_thread and gate.is_stale(sys._getframe(1)):
            before = gate.state = _OUT
        if before < self._state and threading.get_ident() == gate.main_thread:
            if before <= _OPEN:  # otherwise no user code has run since the stand-in was placed
                gate.place()
            self._before, self._frame = before, gate.frame
            if before == _OUT:
                gate.came = None
            gate.frame = sys._getframe(1)
            gate.state = self._state

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        before = self._before
        if before == _LOCKED:
            return
        gate = _gate
        gate.state, gate.frame = before, self._frame
        if before == _CLOSED:
            return
        if before == _OUT:
            gate.leave()
        if isinstance(error, KeyboardInterrupt):
            gate.came = None
        else:
            gate.raise_held()


class deferred(holding):
    """Hold Ctrl-C back while the body runs, and where it waits, however long it takes. The body must be short.

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
            _gate.frame = sys._getframe(1)
            _gate.on_interrupt = self._on_interrupt

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._before != _LOCKED:
            _gate.on_interrupt = None
        super().__exit__(kind, error, traceback)


def waiting(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function that waits, or one of the user's. Ctrl-C may be raised before it and in it."""
    gate = _gate
    if gate.state != _CLOSED or threading.get_ident() != gate.main_thread:
        return fn(*args, **kwargs)
    try:
        gate.state = _OPEN
        gate.raise_held()
        return fn(*args, **kwargs)
    finally:
        gate.state = _CLOSED


# -- asyncio ----------------------------------------------------------------------------------------------------------


def _ends_calls(handler: Any) -> bool:
    """Whether ``handler`` is one whose SIGINT must end what the main thread does: Python's, or asyncio's.

    The handler of ``asyncio.run`` only cancels the main task. That task is blocked here and would not notice.
    """
    if handler is _default:
        return True
    runner = getattr(sys.modules.get("asyncio"), "Runner", None)  # since Python 3.11
    return runner is not None and isinstance(getattr(getattr(handler, "func", None), "__self__", None), runner)
