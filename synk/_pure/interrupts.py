"""The program's signal handlers and the runtime: held back where a step must be whole, told apart by what they raise.

Python runs handlers in the main thread, between any two steps of it, and what they raise comes out there: Ctrl-C, and
likewise a time limit by SIGALRM. No code can be guarded against that at every step. What must not be torn runs with the
handlers held back; everything else leaves a state that the next operation settles.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the public functions make an enum of each handler: ten times the rest
import itertools
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_NUMBERS = tuple(sorted(signal.valid_signals()))
_default = signal.default_int_handler


class _Gate:
    """What is in place of all handlers while a section runs, and notes which of them were to run.

    One store closes it and one opens it. A handler that raises while they are being exchanged leaves an open gate in
    the place of some others: it lets signals through and puts their handler back.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self.on_interrupt: Callable[[], None] | None = None
        self._handlers: dict[int, Any] = {}
        self._came: dict[int, Any] = {}

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        handler = self._handlers[signum]
        if not self.is_closed:
            try:
                _signal.signal(signum, handler)
            finally:
                handler(signum, frame)
            return
        self._came[signum] = handler
        if self.on_interrupt is not None and signum == signal.SIGINT and _ends_calls(handler):
            self.on_interrupt()

    def close(self, on_interrupt: Callable[[], None] | None) -> None:
        handlers = list(map(_signal.getsignal, _NUMBERS))
        for signum, handler in itertools.compress(zip(_NUMBERS, handlers), map(callable, handlers)):
            if handler is not self:  # left from before
                self._handlers[signum] = handler
                _signal.signal(signum, self)
        self.on_interrupt = on_interrupt
        self.is_closed = True

    def open(self) -> None:
        self.is_closed = False
        try:
            self.on_interrupt = None
            for signum, handler in list(self._handlers.items()):
                if _signal.getsignal(signum) is self:
                    _signal.signal(signum, handler)
            self._handlers.clear()
        finally:
            self._run_late()

    def _run_late(self) -> None:
        """Run the handlers of signals that have come, all of them, whatever they raise."""
        if self._came:
            signum, handler = self._came.popitem()
            if signum == signal.SIGINT and _ends_calls(handler):
                handler = _default
            try:
                handler(signum, sys._getframe())
            finally:
                self._run_late()


_gate = _Gate()


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


class deferred:
    """Hold back the program's signal handlers while the body runs; they run after it, and may raise there.

    What the body does is whole then, as far as exceptions from outside go. It must be short. Inside another section it
    is part of that one.

    Parameters
    ----------
    on_interrupt : callable, optional
        Called at each Ctrl-C while the body runs, where that ends what the main thread does.
    """

    __slots__ = ("_is_outermost", "_on_interrupt")

    def __init__(self, on_interrupt: Callable[[], None] | None = None) -> None:
        self._on_interrupt = on_interrupt
        self._is_outermost = False

    def __enter__(self) -> None:
        if not _gate.is_closed and _is_main_thread():
            self._is_outermost = True
            _gate.close(self._on_interrupt)

    def __exit__(self, *exc_info: object) -> None:
        if self._is_outermost:
            _gate.open()


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


def _is_asyncios(handler: Any) -> bool:
    """Whether Ctrl-C does no more than cancel the main task of ``asyncio.run``, which is heard at its next await."""
    runner = getattr(sys.modules.get("asyncio"), "Runner", None)  # since Python 3.11
    return runner is not None and isinstance(getattr(getattr(handler, "func", None), "__self__", None), runner)


def _ends_calls(handler: Any) -> bool:
    """Whether a SIGINT that ``handler`` takes ends what the main thread does: it is not the user's own."""
    return handler is _default or isinstance(handler, plain_interrupts) or _is_asyncios(handler)


def num_cancels() -> int:
    """Return how often the task of asyncio that runs was cancelled; -1 where Ctrl-C raises KeyboardInterrupt anyway."""
    handler = _signal.getsignal(signal.SIGINT)
    if handler is _default or not _is_asyncios(handler) or not _is_main_thread():
        return -1
    return _num_cancels()


def _num_cancels() -> int:
    import asyncio

    try:
        task: Any = asyncio.current_task()
    except RuntimeError:  # no loop runs
        task = None
    return task.cancelling() if task is not None else 0


class plain_interrupts:
    """Have Ctrl-C raise KeyboardInterrupt while the body runs, where it would only cancel a task of asyncio.

    Parameters
    ----------
    num_cancels : int
        How often the task was cancelled when the operation began. More now: Ctrl-C came before the body.
    """

    def __init__(self, num_cancels: int) -> None:
        self._num_cancels = num_cancels
        self._theirs: Any = _signal.getsignal(signal.SIGINT)
        self._is_on = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        handler = _default if self._is_on else self._theirs
        try:
            _signal.signal(signum, self._theirs)  # before it raises: nothing is left to be put back then
        finally:
            handler(signum, frame)

    def __enter__(self) -> None:
        _signal.signal(signal.SIGINT, self)
        self._is_on = True
        if _num_cancels() > self._num_cancels:
            self.__exit__()
            raise KeyboardInterrupt

    def __exit__(self, *exc_info: object) -> None:
        self._is_on = False
        if _signal.getsignal(signal.SIGINT) is self:
            _signal.signal(signal.SIGINT, self._theirs)
