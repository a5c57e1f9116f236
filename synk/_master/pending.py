"""What the user holds of a call that was submitted, and how far the call has come."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any, Protocol

from synk._master.launched import Launched
from synk._master.quiet import QuietCall
from synk._master.replies import collecting
from synk._master.session import Session
from synk._master.workers import Request
from synk._pure.show import table
from synk._wire.messages import Reply
from synk.errors import CallCancelled, ClosedError

Steps = Generator["Request", dict[int, Reply], Any]

_logger = logging.getLogger("synk")


class Collector(Protocol):
    """What a call that was submitted needs of the queue that it is in."""

    def wait(self, pending: PendingCall, timeout: float | None) -> None:
        """Wait until it has an outcome."""

    def look(self) -> None:
        """Take in what has ended, without waiting for anything."""

    def note_failed(self, pending: PendingCall) -> None:
        """Remember it where later calls must not be taken for the next step."""


class PendingCall:
    """A call that was submitted, and its result once it is there. Made by :meth:`synk.Function.submit`.

    Attributes
    ----------
    name : str
        Of the function.
    ranks : tuple of int
        Those that run the call; a rank without rows does not.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     total = synk.function(lambda x: x.sum(), outputs="sum")
    ...     calls = [total.submit(np.full(4, k)) for k in range(3)]
    ...     [int(call.result()) for call in calls]
    [0, 4, 8]
    """

    def __init__(self, queue: Collector, name: str) -> None:
        self.name = name
        self.ranks: tuple[int, ...] = ()
        self._queue = queue
        self._launched: Launched | None = None  # None: it has an outcome
        self._quiet: QuietCall | None = None  # as long as nothing but the replies of a repeated call has come
        self._steps: Steps | None = None
        self._request: Request | None = None  # what it waits for
        self._is_alone = True  # whether no other call may be under way with it
        self._is_stepping = False
        self._trouble: BaseException | None = None  # after which the workers remember nothing of it
        self._value: Any = None
        self._error: BaseException | None = None
        self._unasked: _Unasked | None = None
        self._changes: frozenset[Any] = frozenset()  # resident objects

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call to end and return its result.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait. The call goes on after that, unlike with the ``timeout`` of ``submit``.

        Raises
        ------
        TimeoutError
            If the call has not ended in that time, or another thread uses the runtime as long; ask again.
        CallCancelled
            If it was ended because of something else: another call that timed out, or Ctrl-C.
        Exception
            What the call raised; see :class:`synk.Function`.
        """
        if self._launched is not None:
            self._queue.wait(self, timeout)
        error = self._error
        if error is None:
            return self._value
        if self._unasked is not None:
            self._unasked.error = None
        try:
            raise BaseException.with_traceback(error, None)  # not those of earlier times
        finally:
            del self, error  # the traceback holds this frame

    def done(self) -> bool:
        """Return whether the call has ended, well or not; never waits for it."""
        if self._launched is not None:
            self._queue.look()
        return self._launched is None

    def _begin(self, launched: Launched, steps: Steps, is_alone: bool) -> None:
        self._launched, self._steps, self._is_alone = launched, steps, is_alone
        self.ranks = tuple(launched.call.ranks)
        self._changes = frozenset(launched.function.changes)
        self._request = next(steps)

    def _begin_quietly(self, launched: Launched, quiet: QuietCall) -> None:
        self._launched, self._quiet, self._request = launched, quiet, quiet
        self._changes = frozenset(launched.function.changes)
        self._is_alone = bool(self._changes)
        self.ranks = tuple(launched.call.ranks)

    def _leave_quiet_way(self, session: Session) -> None:
        """Go on the ordinary way, whatever has come of the replies."""
        assert self._quiet is not None and self._launched is not None
        launched = self._quiet.hand_over(self._launched.function)
        launched.deadline = None
        self._begin(launched, collecting(session, launched), self._is_alone)
        self._quiet = None

    def _end(self, value: Any, error: BaseException | None) -> None:
        if error is not None:  # its frames hold this object, and arrays
            BaseException.with_traceback(error, None)
            if not isinstance(error, (CallCancelled, ClosedError)):
                self._unasked = _Unasked(self.name, error)
                self._queue.note_failed(self)
        self._value, self._error = value, error
        self._launched = self._quiet = self._steps = self._request = None

    @property
    def _state(self) -> str:
        return "under way" if self._launched is not None else "failed" if self._error is not None else "done"

    def __repr__(self) -> str:
        return f"<synk.PendingCall of {self.name!r}, {self._state}>"

    def _repr_html_(self) -> str:
        rows = [("function", self.name), ("state", self._state), ("ranks", ", ".join(map(str, self.ranks)))]
        return table("synk.PendingCall", rows)


class _Unasked:
    """An error of a call that nobody has asked for yet; says so when it is dropped.

    Calls that end well have no finalizer: Ctrl-C, where it falls into one, is lost.
    """

    def __init__(self, name: str, error: BaseException) -> None:
        self.name = name
        self.error: BaseException | None = error

    def __del__(self) -> None:
        if self.error is not None:
            _logger.error("a submitted call of %r failed, and nobody asked for its result: %r", self.name, self.error)
