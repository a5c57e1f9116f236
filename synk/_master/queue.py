"""Calls that were submitted: sent one after the other without waiting for the one before, collected in the same order.

At most ``NUM_LANES`` are under way. Everything else that a runtime does begins when none is.
"""

from __future__ import annotations

import copy
import logging
import time
import weakref
from collections import deque
from collections.abc import Generator
from typing import Any

from synk._master.call import CallOptions, abandon, launch
from synk._master.launched import Callee, Launched
from synk._master.replies import collecting
from synk._master.session import Session
from synk._master.variable import VariableHandle
from synk._master.workers import Request
from synk._pure.interrupts import is_from_handler, num_cancels
from synk._pure.limits import as_seconds
from synk._pure.nested import holds
from synk._wire.control import NUM_LANES
from synk._wire.memory import Segment
from synk._wire.messages import Reply
from synk.errors import CallCancelled, CallTimeout, ClosedError, WorkerDied

Steps = Generator["Request", dict[int, Reply], Any]

_logger = logging.getLogger("synk")


class PendingCall:
    """A call that was submitted, and its result once it is there. Made by :meth:`synk.Function.submit`.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     total = synk.function(lambda x: x.sum(), outputs="sum")
    ...     calls = [total.submit(np.full(4, k)) for k in range(3)]
    ...     [int(call.result()) for call in calls]
    [0, 4, 8]
    """

    def __init__(self, queue: Queue, name: str) -> None:
        self.name = name
        self._queue = queue
        self._launched: Launched | None = None  # None: it has an outcome
        self._steps: Steps | None = None
        self._request: Request | None = None  # what it waits for
        self._is_alone = True  # whether no other call may be under way with it
        self._is_stepping = False
        self._trouble: BaseException | None = None  # after which the workers remember nothing of it
        self._value: Any = None
        self._error: BaseException | None = None
        self._unasked: _Unasked | None = None
        self._changes: frozenset[Any] = frozenset()

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
        self._changes = frozenset(launched.function.changes)
        self._request = next(steps)

    def _end(self, value: Any, error: BaseException | None) -> None:
        if error is not None:  # its frames hold this object, and arrays
            BaseException.with_traceback(error, None)
            if not isinstance(error, (CallCancelled, ClosedError)):
                self._unasked = _Unasked(self.name, error)
                self._queue.note_failed(self)
        self._value, self._error = value, error
        self._launched = self._steps = self._request = None

    def __repr__(self) -> str:
        state = "under way" if self._launched is not None else "failed" if self._error is not None else "done"
        return f"<synk.PendingCall of {self.name!r}, {state}>"


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


class Queue:
    """The submitted calls of one runtime that have no outcome yet.

    Attributes
    ----------
    calls : deque of PendingCall
        Oldest first.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.calls: deque[PendingCall] = deque()
        self._failed_step: weakref.ref[PendingCall] | None = None  # the last one that was to change resident objects

    def submit(
        self,
        function: Callee,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        deadline: float | None,
    ) -> PendingCall:
        """Send a call and return at once, or as soon as fewer than ``NUM_LANES`` are under way. The runtime is held."""
        session, verb = self._session, f"submit {function.name!r}"
        # What rows a rank has of a sharded variable can depend on what the calls before assign.
        has_variables = any(holds(value, VariableHandle) for value in (*args, *kwargs.values())) or any(
            variable.is_sharded for variable in function.variables
        )
        if has_variables or not self._can_join(function):
            session.begin(verb, deadline)
        has_state = bool(function.variables or function.changes)
        is_alone = has_variables or has_state or (bool(self.calls) and self.calls[-1]._is_alone)
        while len(self.calls) >= NUM_LANES:
            self._collect_oldest(verb, deadline)
        newest = self.calls[-1]._launched if self.calls else None
        lane = session.lanes.first if newest is None else session.lanes.after(newest.cached.lane)
        pending = PendingCall(self, function.name)
        try:
            launched = launch(session, function, args, kwargs, options, deadline, lane, is_alone=is_alone)
        except BaseException as error:
            self._end_lost(error)
            if isinstance(error, CallCancelled) and not is_from_handler(error):  # by a step before it that failed
                pending._end(None, error)
                return pending
            raise
        # The rest is up to synk, and its messages wait behind the calls that come after this one.
        launched.deadline = None
        # Some variables are known only when the function has been sent.
        pending._begin(
            launched, collecting(session, launched), has_variables or bool(function.variables or function.changes)
        )
        self.calls.append(pending)
        if session.workers.is_inline:  # it has run already
            self._collect_oldest(verb, None)
        return pending

    def _can_join(self, function: Callee) -> bool:
        """Whether a call can be sent behind those under way: nothing else is to be done before it."""
        session, workers = self._session, self._session.workers
        return (
            bool(self.calls)
            and not workers.is_inline
            and function in session.functions.bound
            and not function.is_stale
            and not session.has_dropped
            and not workers.has_dead
            and len(workers.requests) == len(self.calls)  # else one of them has no owner: an interrupt came
        )

    def note_failed(self, pending: PendingCall) -> None:
        """Remember a call that has failed, if it was to change resident objects."""
        if pending._changes:
            self._failed_step = weakref.ref(pending)

    def check_step(self, function: Callee) -> None:
        """Raise where a submitted call that changes the same objects has failed, and nobody has asked for its result.

        The caller could not know of it, and takes the one about to begin for the next step.

        Raises
        ------
        CallCancelled
        """
        failed = self._failed_step() if self._failed_step is not None else None
        if failed is None or failed._unasked is None or (error := failed._unasked.error) is None:
            return
        if failed._changes & set(function.changes):
            raise CallCancelled(
                f"the call of {function.name!r} was not begun: one of {failed.name!r} that was submitted before it has "
                f"failed, and both change the same resident objects. Ask for the result of that one, then submit again."
            ) from error

    # -- outcomes -----------------------------------------------------------------------------------------------------

    def drain(self, verb: str, deadline: float | None) -> None:
        """Wait for all calls. What they raise is kept for whoever asks for their results.

        Raises
        ------
        CallTimeout
            If they have not ended at ``deadline``; they go on.
        """
        while self.calls:
            self._collect_oldest(verb, deadline)

    def wait(self, pending: PendingCall, timeout: float | None) -> None:
        """Wait until ``pending`` has an outcome.

        Raises
        ------
        TimeoutError
        """
        session, verb = self._session, f"wait for {pending.name!r}"
        if timeout is None:
            with session.entered(verb):
                self._wait(pending, None)
            return
        session.entered(verb)  # only what it checks
        seconds = max(as_seconds(timeout), 0.0)
        until = time.monotonic() + seconds
        session.if_free(lambda: self._wait(pending, until), seconds)
        if pending._launched is not None:
            raise TimeoutError(f"{pending.name!r} has not ended within {seconds:g} s; it goes on.")

    def _wait(self, pending: PendingCall, until: float | None) -> None:
        self._session.workers.num_cancels = num_cancels()
        while pending._launched is not None and self.calls:
            if not self._step_oldest(until):
                return
        if pending._launched is not None:
            pending._end(None, _cancelled(pending, None))

    def look(self) -> None:
        """Take in what has ended, without waiting for anything."""
        self._session.check_process("look at a call")
        self._session.if_free(self._look)

    def _look(self) -> None:
        if not self.calls:
            return
        if self._session.is_closed:  # by itself: workers died too often
            self.close()
            return
        try:
            self._session.workers.pump()
        except BaseException as error:
            self._end_lost(error)
            if _is_foreign(error):
                raise
        while self.calls and ((request := self.calls[0]._request) is None or not request.pending):
            self._step_oldest(None)

    def release(self, segment: Segment) -> None:
        """Wait for the calls that read ``segment``, which is about to be changed."""
        if not self.reads(segment) or self._session.is_mine():
            return
        with self._session.entered("change Data"):
            while self.reads(segment):
                self._step_oldest(None)

    def reads(self, segment: Segment) -> bool:
        """Whether a call that has not ended reads ``segment``."""
        launched = [pending._launched for pending in list(self.calls)]
        return any(segment in each.cached.segments for each in launched if each is not None)

    def close(self) -> None:
        """End all calls: the runtime is closed."""
        while self.calls:
            pending = self.calls.popleft()
            pending._end(None, ClosedError(f"the call of {pending.name!r} was ended: the runtime was closed."))

    def _collect_oldest(self, verb: str, deadline: float | None) -> None:
        oldest = self.calls[0] if self.calls else None  # None: closed meanwhile
        while self.calls and self.calls[0] is oldest:
            if not self._step_oldest(deadline):
                raise CallTimeout(
                    f"cannot {verb} in time: calls that were submitted before are still under way. Raise timeout=, or "
                    "wait for their results first."
                )

    def _step_oldest(self, until: float | None) -> bool:
        """Wait for what the oldest call waits for, and go on with it; return False if it was not there at ``until``."""
        if not self.calls:  # closed meanwhile
            return True
        pending, session = self.calls[0], self._session
        launched, steps, request = pending._launched, pending._steps, pending._request
        if launched is None or steps is None or request is None or pending._is_stepping or request.is_lost:
            if launched is not None:  # an interrupt has broken this off
                pending._end(None, _cancelled(pending, None))
            self.calls.popleft()
            return True
        try:
            if not session.workers.wait_until(request, until):
                return False
            pending._is_stepping = True
            pending._request = steps.send(session.workers.wait(request))
            pending._is_stepping = False
        except BaseException as error:
            if isinstance(error, StopIteration) and not is_from_handler(error):
                pending._end(error.value, None)
            else:
                self._on_error(pending, launched, steps, request, error)
                if _is_foreign(error):
                    raise
        if pending._launched is None and self.calls and self.calls[0] is pending:
            self.calls.popleft()
        return True

    def _on_error(
        self, pending: PendingCall, launched: Launched, steps: Steps, request: Request, error: BaseException
    ) -> None:
        """After ``error`` in a step of ``pending``: give it an outcome, unless the error is not about it."""
        self._end_lost(error)
        if request.is_cut and not pending._is_stepping:  # answered by all: what came is not about this call
            return
        steps.close()
        outcome = _outcome(pending, error)
        try:
            abandon(self._session, launched, error)
        except ClosedError as closed:  # by another thread: what it broke inside says nothing to the user
            outcome = closed
        if pending._launched is not None:
            pending._end(None, outcome)

    def _end_lost(self, error: BaseException) -> None:
        """After ``error``: end the calls that it has taken along."""
        for pending in list(self.calls):
            if pending._request is not None and pending._request.is_lost:
                pending._end(None, _outcome(pending, error))
            elif pending._request is not None and pending._request.is_cut:
                pending._trouble = pending._trouble or error
        self.calls = deque(pending for pending in self.calls if pending._launched is not None)


def _is_foreign(error: BaseException) -> bool:
    """Whether ``error`` is about no call: it comes from a signal handler, and belongs to what the main thread does."""
    return not isinstance(error, Exception) or is_from_handler(error)


def _outcome(pending: PendingCall, error: BaseException) -> BaseException:
    """Return what a call raises that ``error`` has ended."""
    request = pending._request
    if request is not None and request.error is not None:
        return request.error
    if isinstance(error, CallCancelled):
        error = pending._trouble or error
    if isinstance(error, (WorkerDied, ClosedError)):
        return copy.copy(error)
    if isinstance(error, CallTimeout) or _is_foreign(error):
        return _cancelled(pending, error)
    return error


def _cancelled(pending: PendingCall, error: BaseException | None) -> CallCancelled:
    why = f"together with another: {error}" if isinstance(error, Exception) else "by an interrupt."
    cancelled = CallCancelled(f"the call of {pending.name!r} was ended {why} Submit it again.")
    cancelled.__cause__ = error
    return cancelled
