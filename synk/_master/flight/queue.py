"""Submitted calls: they are sent without waiting for the ones before, and collected in the same order.

At most ``NUM_LANES`` are in flight. Every other operation of a runtime begins when none is.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import Any

from synk._master.calls.call import abandon, launch, send
from synk._master.calls.callee import Callee
from synk._master.calls.compiled import compile_call
from synk._master.calls.launched import Launched
from synk._master.calls.replies import collecting, conclude
from synk._master.calls.staging import stage
from synk._master.flight.pending import PendingCall, cancelled, is_foreign, outcome
from synk._master.objects.shared import Shared
from synk._master.session import Session
from synk._master.state.in_flight import ChunksInFlight
from synk._master.workers.requests import Request
from synk._pure.call_options import CallOptions
from synk._pure.interrupts import holding
from synk._pure.limits import as_seconds
from synk._pure.nested import holds
from synk._wire.cell import cell
from synk._wire.control import NUM_LANES
from synk._wire.memory import Segment
from synk.errors import CallCancelled, CallTimeout, ClosedError


class Queue:
    """The submitted calls of one runtime that have no outcome yet.

    Attributes
    ----------
    calls : deque of PendingCall
        Oldest first.
    chunks : ChunksInFlight or None
        The chunks in flight, if a map is running. Never set while ``calls`` is not empty.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.calls: deque[PendingCall[Any]] = deque()
        self.chunks: ChunksInFlight | None = None
        # the last failed call that would have changed resident objects
        self._failed_step: weakref.ref[PendingCall[Any]] | None = None

    def submit(
        self,
        function: Callee,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        deadline: float | None,
    ) -> PendingCall[Any]:
        """Send a call. Returns at once, or when fewer than ``NUM_LANES`` are in flight. The caller holds the lock."""
        session, verb = self._session, f"submit {function.name!r}"
        # The rows that a rank holds of a sharded variable may depend on what earlier calls assign.
        has_variables = any(holds(value, Shared) for value in (*args, *kwargs.values())) or any(
            variable.is_sharded for variable in function.variables
        )
        if has_variables or not self._can_join(function):
            session.begin(verb, deadline)
        has_state = bool(function.variables or function.changes)
        is_alone = has_variables or has_state or (bool(self.calls) and self.calls[-1]._is_alone)
        self._make_room(verb, deadline)
        newest = self.calls[-1]._launched if self.calls else None
        lane = session.lanes.first if newest is None else session.lanes.after(newest.cached.lane)
        pending: PendingCall[Any] = PendingCall(self, function.name)
        try:
            launched = launch(session, function, args, kwargs, options, deadline, lane, is_alone=is_alone)
        except BaseException as error:
            self._end_lost(error)
            if isinstance(error, CallCancelled):  # an earlier step failed
                pending._end(None, error)
                return pending
            raise
        # Some variables become known only when the function is sent.
        self._append(pending, launched, has_variables or bool(function.variables or function.changes))
        return pending

    def submit_again(
        self, function: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any
    ) -> PendingCall[Any] | None:
        """Submit a call that fits a compiled one. If it does not fit, return None; nothing has been done then."""
        session, calls = self._session, self.calls
        if session.is_mine() or cell.worker is not None:
            return None
        started = time.monotonic_ns()
        with session._lock:
            if len(calls) >= NUM_LANES:
                self._make_room(f"submit {function.name!r}", None)
            newest = calls[-1]._launched if calls else None
            is_step = bool(function.changes)
            # What it reads of variables may depend on what calls in flight assign, so such a call begins an operation.
            if function.variables or (calls and (newest is None or (calls[-1]._is_alone and not is_step))):
                return None
            compiled = function.plans.compiled[(newest.cached.lane.index + 1) % NUM_LANES if newest is not None else 0]
            # If there are more requests than calls, an interrupt has left one without an owner.
            if compiled is None:
                return None
            if compiled.pattern.has_variables or len(session.workers.requests) != len(calls):
                return None
            launched = compiled.fits(session, function, args, kwargs, batch, started)
            if launched is None:
                return None
            pending: PendingCall[Any] = PendingCall(self, function.name)
            try:
                stage(session, launched)
                if is_step and not self._steps_end(function, launched):
                    launched.lease = None  # the end of its array brings the buffer back
                    return None
                send(session, launched)
            except BaseException as error:
                abandon(session, launched, error)
                self._end_lost(error)
                raise
            self._append(pending, launched, is_step)
        return pending

    def _append(self, pending: PendingCall[Any], launched: Launched, is_alone: bool) -> None:
        """Add a call that was sent."""
        launched.is_submitted = True
        pending._begin(launched, is_alone)
        self.calls.append(pending)
        if self._session.workers.is_inline:  # it has run already
            self._collect_oldest(f"submit {pending.name!r}", None)

    def _make_room(self, verb: str, deadline: float | None) -> None:
        """Wait until another call can be sent."""
        while len(self.calls) >= NUM_LANES:
            self._collect_oldest(verb, deadline)

    def _steps_end(self, function: Callee, launched: Launched) -> bool:
        """Collect the calls in flight, because a call that changes resident objects starts from the state they leave.

        Return False if one has failed, which a new call then reports, or if the call no longer fits.
        """
        self.drain(f"submit {function.name!r}", self._session.deadline(None))
        return self._failed_before(function) is None and launched.log_state == self._session.workers.log.state

    def _can_join(self, function: Callee) -> bool:
        """Whether a call can be sent behind the calls in flight: nothing else must be done before it."""
        session, workers = self._session, self._session.workers
        return (
            bool(self.calls)
            and not workers.is_inline
            and function in session.functions.bound
            and not function.is_stale
            and not session.has_dropped
            and session.group.is_settled
            and not workers.processes.has_dead
            and len(workers.requests) == len(self.calls)  # otherwise an interrupt has left one without an owner
        )

    def note_failed(self, pending: PendingCall[Any]) -> None:
        """Remember a failed call if it would have changed resident objects."""
        if pending._changes:
            self._failed_step = weakref.ref(pending)

    def check_step(self, function: Callee) -> None:
        """Raise if a submitted call that changes the same objects has failed and its result was not asked for.

        The caller does not know of the failure, and would take the new call for the next step.

        Raises
        ------
        CallCancelled
        """
        failed = self._failed_before(function)
        if failed is not None and failed._unasked is not None:
            raise CallCancelled(
                f"the call of {function.name!r} was not begun: one of {failed.name!r} that was submitted before it has "
                f"failed, and both change the same resident objects. Ask for the result of that one, then submit again."
            ) from failed._unasked.error

    def _failed_before(self, function: Callee) -> PendingCall[Any] | None:
        """Return the last call that failed to change an object of ``function``, if its error was not seen yet."""
        failed = self._failed_step() if self._failed_step is not None else None
        if failed is None or failed._unasked is None or failed._unasked.error is None:
            return None
        return failed if failed._changes & set(function.changes) else None

    # -- outcomes -----------------------------------------------------------------------------------------------------

    def drain(self, verb: str, deadline: float | None) -> None:
        """Wait for all calls, or for the items of a map. Their errors are kept for whoever asks for the results.

        Raises
        ------
        CallTimeout
            If they have not ended by ``deadline``. They keep running.
        """
        while self.calls:
            self._collect_oldest(verb, deadline)
        if self.chunks is not None:
            self.chunks.settle(verb, deadline)

    def wait(self, pending: PendingCall[Any], timeout: float | None) -> None:
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
        session.entered(verb)  # only for its checks
        seconds = max(as_seconds(timeout), 0.0)
        until = time.monotonic() + seconds
        session.if_free(lambda: self._wait(pending, until), seconds)
        if pending._launched is not None:
            raise TimeoutError(
                f"cannot {verb} any longer: got no result in {seconds:g} s. The call goes on; ask again."
            )

    def _wait(self, pending: PendingCall[Any], until: float | None) -> None:
        while pending._launched is not None and self.calls:
            if not self._step_oldest(until):
                return
        if pending._launched is not None:
            pending._end(None, cancelled(pending, None))

    def poll(self) -> None:
        """Take in what has ended, without waiting."""
        self._session.check_process("look at a call")
        self._session.if_free(self._poll)

    def _poll(self) -> None:
        if not self.calls:
            return
        if self._session.is_closed:  # it closed itself: workers died too often
            self.close()
            return
        try:
            self._session.workers.pump()
        except BaseException as error:
            self._end_lost(error)
            if is_foreign(error):
                raise
        while self.calls and ((request := self.calls[0]._request) is None or not request.pending):
            self._step_oldest(None)

    def descriptors(self) -> list[int]:
        """Return the descriptors that report answers and deaths of workers."""
        watched = [each for worker in self._session.workers.by_rank for each in worker.process.watched()]
        return [int(fd) for fd, kind in watched if kind != "output" and fd >= 0]  # a dead worker has none

    def release(self, segment: Segment) -> None:
        """Wait for the calls that read ``segment``, because it is about to change."""
        if not self.reads(segment) or self._session.is_mine():
            return
        with holding(), self._session.entered("change Data"):
            while self.reads(segment):
                self._step_oldest(None)

    def reads(self, segment: Segment) -> bool:
        """Whether a call that has not ended reads ``segment``."""
        launched = [pending._launched for pending in list(self.calls)]
        return any(segment in each.cached.segments for each in launched if each is not None)

    def cancel(self, error: Exception) -> None:
        """End the calls that were not answered, with ``error``. No thread waits for one now."""
        self._session.workers.recovery.settle_after(error)
        self._end_lost(error)
        if self.chunks is not None:
            self.chunks.cancel(error)

    def close(self) -> None:
        """End all calls: the runtime is closed."""
        while self.calls:
            pending = self.calls.popleft()
            pending._end(None, ClosedError(f"the call of {pending.name!r} was ended: the runtime was closed."))
        if self.chunks is not None:
            self.chunks.cancel(ClosedError("the map was ended: the runtime was closed."))

    def _collect_oldest(self, verb: str, deadline: float | None) -> None:
        oldest = self.calls[0] if self.calls else None  # None: another thread closed the runtime
        while self.calls and self.calls[0] is oldest:
            if not self._step_oldest(deadline):
                raise CallTimeout(
                    f"cannot {verb} in time: submitted calls are still in flight. Raise timeout=, or "
                    "wait for their results first."
                )

    def _step_oldest(self, until: float | None) -> bool:
        """Wait for what the oldest call waits for, and take its next step. Return False if ``until`` came first."""
        if not self.calls:  # another thread closed the runtime
            return True
        pending, session = self.calls[0], self._session
        launched, request = pending._launched, pending._request
        if launched is None or request is None or pending._is_stepping or request.is_lost:
            if launched is not None:  # an interrupt, or an error in the middle of an answer, broke this off
                pending._end(None, outcome(pending, None if request is None else request.lost_to))
            self.calls.popleft()
            return True
        steps = pending._steps
        try:
            doorbells = None if steps is not None or until is not None else launched.doorbells
            if doorbells is not None and doorbells.hear(launched, is_assembled=launched.lease is not None):
                pending._is_stepping = True
                pending._end(conclude(session, launched, (), launched.lease), None)
                self.calls.popleft()
                return True
            if steps is None:
                steps = pending._steps = collecting(session, launched)
                next(steps)
            if not session.workers.wait_until(request, until):
                return False
            # The replies are taken out of the request now. If an interrupt breaks this off, nobody can take them again.
            pending._is_stepping = True
            pending._request = steps.send(session.workers.wait(request))
            pending._is_stepping = False
        except BaseException as error:
            if steps is not None and isinstance(error, StopIteration):
                pending._end(error.value, None)
                compile_call(session, launched)
            else:
                request.lost_to = error  # if the lines below fail, too, the next step says what has ended the call
                is_own = pending._is_stepping and isinstance(error, Exception)
                self._on_error(pending, launched, request, error)
                if is_foreign(error) and not is_own:
                    raise
        if pending._launched is None and self.calls and self.calls[0] is pending:
            self.calls.popleft()
        return True

    def _on_error(self, pending: PendingCall[Any], launched: Launched, request: Request, error: BaseException) -> None:
        """After ``error`` in a step of ``pending``: end the call, unless the error is not about it."""
        # all ranks have answered it, so the error is about another call
        if request.is_forgotten and not pending._is_stepping:
            self._end_lost(error)
            return
        if pending._steps is not None:
            pending._steps.close()
        closed_by = None
        try:
            abandon(self._session, launched, error)  # first, for it notes on the error what has become of the call
        # Another thread closed the runtime. What that broke inside means nothing to the user.
        except ClosedError as closed:
            closed_by = closed
        finally:
            self._end_lost(error)
        if pending._launched is not None:
            pending._end(None, closed_by or outcome(pending, error))

    def _end_lost(self, error: BaseException) -> None:
        """After ``error``: end the calls that were lost with it."""
        for pending in list(self.calls):
            if pending._request is not None and pending._request.is_lost:
                pending._end(None, outcome(pending, error))
            elif pending._request is not None and pending._request.is_forgotten:
                pending._trouble = pending._trouble or error
        self.calls = deque(pending for pending in self.calls if pending._launched is not None)
