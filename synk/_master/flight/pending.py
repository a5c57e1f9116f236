"""The future of a submitted call, and how far the call has come."""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from synk._master.calls.launched import Launched, Steps
from synk._master.state.in_flight import SubmittedCalls
from synk._master.workers.requests import Request
from synk._pure.arrivals import wait_readable
from synk._pure.show import table
from synk._pure.tracebacks import verb
from synk._pure.words import Hinting
from synk.errors import CallCancelled, CallTimeout, ClosedError, SynkError, WorkerDied

R = TypeVar("R")
"""What the function returns, as for :class:`synk.Function`."""

_logger = logging.getLogger("synk")

_PAUSE_S = 0.001


class PendingCall(Hinting, Generic[R]):
    """The future of a submitted call. Made by :meth:`synk.Function.submit`.

    In an asyncio coroutine ``await call`` gives its result; other tasks run in the meantime.

    Attributes
    ----------
    name : str
        Name of the function.
    ranks : tuple of int
        The ranks that run the call; a rank without rows does not.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     total = synk.function(lambda x: x.sum(), outputs="sum")
    ...     calls = [total.submit(np.full(4, k)) for k in range(3)]
    ...     [int(call.result()) for call in calls]
    [0, 4, 8]
    """

    def __init__(self, queue: SubmittedCalls, name: str) -> None:
        self.name = name
        self.ranks: tuple[int, ...] = ()
        self._queue = queue
        # How far it has come. In flight: ``_launched``, which is also the request that it waits for. When its replies
        # are taken in: also ``_steps``, and ``_request`` is what they wait for next. While a step runs: also
        # ``_is_stepping``; whoever finds it set knows that the step was broken off, and that its replies are gone.
        # Over: ``_launched`` is None again, and there is ``_value`` or ``_error``.
        self._launched: Launched | None = None
        self._steps: Steps[Any] | None = None
        self._request: Request | None = None
        self._is_stepping = False
        self._is_alone = True  # whether it must be the only call in flight
        self._trouble: BaseException | None = None  # an error after which the workers no longer remember the call
        self._value: Any = None
        self._error: BaseException | None = None
        self._unasked: _Unasked | None = None
        self._changes: frozenset[Any] = frozenset()  # the resident objects it changes
        self._callbacks: list[Callable[[PendingCall[R]], Any]] = []
        self._release: Callable[[Any], None] | None = None  # what is to be done with the result first

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
            self._queue.wait(self, timeout)
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
            self._queue.wait(self, timeout)
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
            await wait_readable(self._queue.descriptors)
            if not self.done():  # another call was answered, or another thread holds the runtime
                await asyncio.sleep(_PAUSE_S)
        return self.result()

    def add_done_callback(self, fn: Callable[[PendingCall[R]], Any]) -> None:
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
            self._queue.poll()
        return self._launched is None

    def _begin(self, launched: Launched, is_alone: bool) -> None:
        self._launched = self._request = launched
        self._is_alone = is_alone
        self.ranks = tuple(launched.call.ranks)
        self._changes = frozenset(launched.function.changes)

    def _end(self, value: Any, error: BaseException | None) -> None:
        if error is not None:  # its frames hold this object, and arrays
            BaseException.with_traceback(error, None)
            if not isinstance(error, (CallCancelled, ClosedError)):
                self._unasked = _Unasked(self.name, error)
                self._queue.note_failed(self)
        # In this order: another thread that finds ``_launched`` gone reads the outcome without any lock.
        self._value, self._error = value, error
        self._launched = self._steps = self._request = None
        if self._callbacks:
            self._call_back()

    @property
    def _state(self) -> str:
        return "in flight" if self._launched is not None else "failed" if self._error is not None else "done"

    def __repr__(self) -> str:
        return f"<synk.PendingCall of {self.name!r}, {self._state}>"

    def _repr_html_(self) -> str:
        rows = [("function", self.name), ("state", self._state), ("ranks", ", ".join(map(str, self.ranks)))]
        return table("synk.PendingCall", rows)


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


def is_foreign(error: BaseException) -> bool:
    """Whether ``error``, which ended a wait, belongs to no call: a signal handler has raised it."""
    return not isinstance(error, SynkError)


def outcome(pending: PendingCall[Any], error: BaseException | None) -> BaseException:
    """Return the error of a call that ``error`` has ended, or an interrupt if it is None."""
    request = pending._request
    if request is not None and request.error is not None:
        return request.error
    if isinstance(error, CallCancelled):
        error = pending._trouble or error
    if isinstance(error, (WorkerDied, ClosedError)):
        return copy.copy(error)
    is_own = pending._is_stepping and isinstance(error, Exception)
    if error is None or isinstance(error, CallTimeout) or (is_foreign(error) and not is_own):
        return cancelled(pending, error)
    return error


def cancelled(pending: PendingCall[Any], error: BaseException | None) -> CallCancelled:
    why = f"together with another: {error}" if isinstance(error, SynkError) else "by an interrupt."
    return caused_by(error, CallCancelled(f"the call of {pending.name!r} was ended {why} Submit it again."))


def caused_by(error: BaseException | None, cancelled: CallCancelled) -> CallCancelled:
    cancelled.__cause__ = error
    return cancelled
