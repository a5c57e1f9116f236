"""The future of a submitted call: how a user, or asyncio, waits for its outcome."""

from __future__ import annotations

import contextlib
import logging
import select
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, TypeVar

from synk._engine.engine import Call
from synk._pure.limits import as_seconds
from synk._pure.tracebacks import verb
from synk._pure.words import Hinting
from synk.errors import CallCancelled, ClosedError

_LONGEST_S = 0.1


async def wait_readable(descriptors: Callable[[], Iterable[int]]) -> None:
    """Return when one of some descriptors is readable, or after a short time, since descriptors may be replaced.

    An event loop knows each descriptor once, but several tasks may wait for the same ones. So each task gives the loop
    an ``epoll`` of its own.
    """
    import asyncio  # takes 30 ms, and the caller already has it

    loop = asyncio.get_running_loop()
    arrived = loop.create_future()
    with contextlib.closing(select.epoll()) as waiting:
        for fd in descriptors():
            with contextlib.suppress(OSError):  # another thread closed it: its worker is replaced
                waiting.register(fd, select.EPOLLIN)
        loop.add_reader(waiting.fileno(), _note, arrived)
        try:
            await asyncio.wait([arrived], timeout=_LONGEST_S)
        finally:
            loop.remove_reader(waiting.fileno())


def _note(arrived: Any) -> None:
    if not arrived.done():
        arrived.set_result(None)


R = TypeVar("R")
"""What the function returns."""

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
    """

    def __init__(self, session: Any, name: str, call: Call | None = None) -> None:
        self._session = session
        self.name = name
        self.ranks: tuple[int, ...] = ()
        self._launched: Call | None = None  # as long as it is in flight
        self._value: Any = None
        self._error: BaseException | None = None
        self._unasked: _Unasked | None = None
        self._changes: frozenset[Any] = frozenset()  # the resident objects it changes
        self._callbacks: list[Callable[[Any], Any]] = []
        self._release: Callable[[Any], None] | None = None  # what is to be done with the result first
        if call is None:  # whoever has made it says how it has ended
            return
        self.ranks = tuple(call.ranks)
        self._launched = call
        self._changes = frozenset(call.callee.changes)
        call.future = weakref.ref(self)
        if call.has_ended:
            self._note_end()

    def _note_end(self) -> None:
        """Note that the call has ended. Called by whoever ends it."""
        call = self._launched
        if call is None:
            return
        error = call.error
        if error is not None and not isinstance(error, Exception):
            error = CallCancelled(f"the call of {self.name!r} was ended by an interrupt. Submit it again.")
        self._end(call.value, error)

    def _wait(self, timeout: float | None) -> None:
        """Wait until the call has ended.

        Raises
        ------
        TimeoutError
        """
        session, what = self._session, f"wait for {self.name!r}"
        if timeout is None:
            with session.entered(what):
                self._settle(None)
            return
        session.entered(what)  # only for its checks
        seconds = max(as_seconds(timeout), 0.0)
        until = time.monotonic() + seconds
        session.if_free(lambda: self._settle(until), seconds)
        if self._launched is not None:
            raise TimeoutError(
                f"cannot {what} any longer: got no result in {seconds:g} s. The call goes on; ask again."
            )

    def _settle(self, until: float | None, *, is_polled: bool = False) -> None:
        call = self._launched
        if call is not None:
            self._session.settle_torn()
            self._session.settle_to(call, until, is_polled=is_polled)

    def _poll(self) -> None:
        """Take in what has ended, without waiting."""
        self._session.check_process("look at a call")
        self._session.if_free(lambda: self._settle(time.monotonic(), is_polled=True))

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
        error = self._awaited_error(timeout)
        if error is None:
            return self._value
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
        return self._awaited_error(timeout)

    def _awaited_error(self, timeout: float | None) -> BaseException | None:
        """Wait for the call to end, and do what is to be done with its result. If that raises, the call has failed."""
        if self._launched is not None:
            self._wait(timeout)
        release, self._release = self._release, None
        if release is not None and self._error is None:
            try:
                release(self._value)
            except Exception as error:
                self._value, self._error = None, error
        if self._unasked is not None:
            self._unasked.error = None
        return self._error

    def __await__(self) -> Generator[Any, None, R]:
        return self._arrive().__await__()

    async def _arrive(self) -> R:
        """Return the result as soon as it is there. Other tasks of the event loop run in the meantime."""
        import asyncio  # takes 30 ms, and the caller already has it

        while not self.done():
            await wait_readable(self._session.processes.descriptors)
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
                self._session.note_failed_step(self)
        # In this order: another thread that finds ``_launched`` gone reads the outcome without any lock.
        self._value, self._error = value, error
        self._launched = None
        if self._callbacks:
            self._call_back()

    def __repr__(self) -> str:
        state = "in flight" if self._launched is not None else "failed" if self._error is not None else "done"
        return f"<synk.PendingCall of {self.name!r}, {state}>"


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
