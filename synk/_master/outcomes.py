"""What becomes of a submitted call that something has ended."""

from __future__ import annotations

import copy

from synk._master.pending import PendingCall
from synk._pure.interrupts import is_from_handler
from synk.errors import CallCancelled, CallTimeout, ClosedError, WorkerDied


def is_foreign(error: BaseException) -> bool:
    """Whether ``error`` is about no call: it comes from a signal handler, and belongs to what the main thread does."""
    return not isinstance(error, Exception) or is_from_handler(error)


def outcome(pending: PendingCall, error: BaseException) -> BaseException:
    """Return what a call raises that ``error`` has ended."""
    request = pending._request
    if request is not None and request.error is not None:
        return request.error
    if isinstance(error, CallCancelled):
        error = pending._trouble or error
    if isinstance(error, (WorkerDied, ClosedError)):
        return copy.copy(error)
    if isinstance(error, CallTimeout) or is_foreign(error):
        return cancelled(pending, error)
    return error


def cancelled(pending: PendingCall, error: BaseException | None) -> CallCancelled:
    why = f"together with another: {error}" if isinstance(error, Exception) else "by an interrupt."
    cancelled = CallCancelled(f"the call of {pending.name!r} was ended {why} Submit it again.")
    cancelled.__cause__ = error
    return cancelled
