"""The future of a submitted call, and how far the call has come."""

from __future__ import annotations

import copy
from typing import Any

from synk._master.calls.launched import Launched, Steps
from synk._master.state.in_flight import SubmittedCalls
from synk._master.workers.requests import Request
from synk._pure.futures import Future, R
from synk.errors import CallCancelled, CallTimeout, ClosedError, SynkError, WorkerDied


class PendingCall(Future[R]):
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
        super().__init__(name)
        self._queue = queue
        # How far it has come. In flight: ``_launched``, which is also the request that it waits for. When its replies
        # are taken in: also ``_steps``, and ``_request`` is what they wait for next. While a step runs: also
        # ``_is_stepping``; whoever finds it set knows that the step was broken off, and that its replies are gone.
        # Over: ``_launched`` is None again, and there is ``_value`` or ``_error``.
        self._launched: Launched | None
        self._steps: Steps[Any] | None = None
        self._request: Request | None = None
        self._is_stepping = False
        self._is_alone = True  # whether it must be the only call in flight
        self._trouble: BaseException | None = None  # an error after which the workers no longer remember the call

    def _wait(self, timeout: float | None) -> None:
        self._queue.wait(self, timeout)

    def _poll(self) -> None:
        self._queue.poll()

    def _descriptors(self) -> list[int]:
        return self._queue.descriptors()

    def _note_failed(self) -> None:
        self._queue.note_failed(self)

    def _begin(self, launched: Launched, is_alone: bool) -> None:
        self._launched = self._request = launched
        self._is_alone = is_alone
        self.ranks = tuple(launched.call.ranks)
        self._changes = frozenset(launched.function.changes)

    def _let_go(self) -> None:
        self._launched = self._steps = self._request = None


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
