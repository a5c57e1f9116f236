"""The future of a submitted call: how a user asks for its outcome, whatever way the call goes."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from synk._pure.arrivals import wait_readable
from synk._pure.tracebacks import verb
from synk._pure.words import Hinting
from synk.errors import CallCancelled, ClosedError

R = TypeVar("R")
"""What the function returns."""

_logger = logging.getLogger("synk")

_PAUSE_S = 0.001


class Future(Hinting, Generic[R]):
    """The future of a submitted call. A subclass waits for the call, and says when it has ended.

    Attributes
    ----------
    name : str
        Name of the function.
    ranks : tuple of int
        The ranks that run the call; a rank without rows does not.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ranks: tuple[int, ...] = ()
        self._launched: Any = None  # the call, as long as it is in flight
        self._value: Any = None
        self._error: BaseException | None = None
        self._unasked: _Unasked | None = None
        self._changes: frozenset[Any] = frozenset()  # the resident objects it changes
        self._callbacks: list[Callable[[Any], Any]] = []
        self._release: Callable[[Any], None] | None = None  # what is to be done with the result first

    def _wait(self, timeout: float | None) -> None:
        """Wait until the call has ended.

        Raises
        ------
        TimeoutError
        """
        raise NotImplementedError

    def _poll(self) -> None:
        """Take in what has ended, without waiting."""
        raise NotImplementedError

    def _descriptors(self) -> list[int]:
        """Return the descriptors that report answers and deaths."""
        raise NotImplementedError

    def _note_failed(self) -> None:
        """Called when the call has failed by itself."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """Drop the call, which has ended."""
        self._launched = None

    @verb
    def result(self, timeout: float | None = None) -> R:
        """Wait for the call to end and return its result.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait. After that the call keeps running, unlike with the ``timeout`` of ``submit``.

        Raises
        ------
        TimeoutError
            If the call has not ended in that time, or another thread uses the runtime for that long. Ask again later.
        CallCancelled
            If something else ended it: another call that timed out, or Ctrl-C.
        Exception
            Whatever the call raised, each time you ask; see :class:`synk.Function`.
        """
        if self._launched is not None:
            self._wait(timeout)
        if self._release is not None:
            self._give_out()
        error = self._error
        if error is None:
            return self._value
        if self._unasked is not None:
            self._unasked.error = None
        try:
            raise BaseException.with_traceback(error, None)  # without the frames of earlier times
        finally:
            del self, error  # the traceback holds this frame

    @verb
    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call to end and return its exception, or None if it succeeded.

        Raises
        ------
        TimeoutError
            As for :meth:`result`: the call has not ended.
        """
        if self._launched is not None:
            self._wait(timeout)
        if self._release is not None:
            self._give_out()
        if self._unasked is not None:
            self._unasked.error = None
        return self._error

    def _give_out(self) -> None:
        """Do what is to be done with the result. If that raises, the call has failed."""
        release, self._release = self._release, None
        if release is not None and self._error is None:
            try:
                release(self._value)
            except Exception as error:
                self._value, self._error = None, error

    def __await__(self) -> Generator[Any, None, R]:
        return self._arrive().__await__()

    async def _arrive(self) -> R:
        """Return the result as soon as it is there. Other tasks of the event loop run in the meantime."""
        import asyncio  # takes 30 ms, and the caller already has it

        while not self.done():
            await wait_readable(self._descriptors)
            if not self.done():  # another call was answered, or another thread holds the runtime
                await asyncio.sleep(_PAUSE_S)
        return self.result()

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        """Call ``fn(call)`` when the call has ended, or at once if it has.

        No thread waits for calls. So ``fn`` is called by whatever notices the end: ``result``, ``done``, ``await``, or
        the next operation of the runtime. That operation is not over, so ``fn`` cannot use the runtime itself: let it
        set an event or fill a queue. What it raises is logged.
        """
        self._callbacks.append(fn)  # first, since another thread may end the call now
        if self._launched is None:
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                fn = self._callbacks.pop(0)  # each callback once, whichever thread takes it
            except IndexError:
                return
            try:
                fn(self)
            except Exception:
                # As text: a handler may keep the record, and frames would keep the call's memory.
                _logger.error("a callback of the call of %r failed\n%s", self.name, traceback.format_exc())

    def done(self) -> bool:
        """Return whether the call has ended, with or without an error. Never waits for it."""
        if self._launched is not None:
            self._poll()
        return self._launched is None

    def _end(self, value: Any, error: BaseException | None) -> None:
        if error is not None:  # its frames hold this object, and arrays
            BaseException.with_traceback(error, None)
            if not isinstance(error, (CallCancelled, ClosedError)):
                self._unasked = _Unasked(self.name, error)
                self._note_failed()
        # In this order: another thread that finds ``_launched`` gone reads the outcome without any lock.
        self._value, self._error = value, error
        self._let_go()
        if self._callbacks:
            self._call_back()

    @property
    def _state(self) -> str:
        return "in flight" if self._launched is not None else "failed" if self._error is not None else "done"

    def __repr__(self) -> str:
        return f"<synk.PendingCall of {self.name!r}, {self._state}>"


class _Unasked:
    """An error that no caller has seen yet. It is logged if it is dropped.

    Successful calls have no finalizer, because a Ctrl-C during a finalizer is lost.
    """

    def __init__(self, name: str, error: BaseException) -> None:
        self.name = name
        self.error: BaseException | None = error

    def __del__(self) -> None:
        if self.error is not None:
            _logger.error("a submitted call of %r failed, and nobody asked for its result: %r", self.name, self.error)
