"""The future of a submitted call."""

from __future__ import annotations

import time
import weakref
from typing import Any

from synk._engine.engine import Call
from synk._pure.futures import Future, R
from synk._pure.limits import as_seconds
from synk.errors import CallCancelled


class PendingCall(Future[R]):
    """The future of a submitted call. Made by :meth:`synk.Function.submit`.

    In an asyncio coroutine ``await call`` gives its result; other tasks run in the meantime.
    """

    def __init__(self, session: Any, name: str, call: Call | None = None) -> None:
        super().__init__(name)
        self._session = session
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

    def _note_failed(self) -> None:
        self._session.note_failed_step(self)

    def _wait(self, timeout: float | None) -> None:
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
        self._session.check_process("look at a call")
        self._session.if_free(lambda: self._settle(time.monotonic(), is_polled=True))

    def _descriptors(self) -> list[int]:
        found: list[int] = self._session.processes.descriptors()
        return found
