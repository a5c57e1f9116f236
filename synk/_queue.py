"""Calls that were submitted: sent one after the other without waiting for the one before, collected in the same order.

At most ``NUM_LANES`` are under way. Everything else that a runtime does begins when none is.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from synk._calls import Callee, CallOptions, Launched, collect, launch
from synk._memory import Segment
from synk._messages import NUM_LANES
from synk.errors import CallCancelled, ClosedError, WorkerDied
from synk.shared import Shared

if TYPE_CHECKING:
    from synk.runtime import Runtime

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
        self._is_alone = True  # whether no other call may be under way with it
        self._queue = queue
        self._launched: Launched | None = None  # None: it has an outcome
        self._is_collecting = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._is_seen = False

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call to end and return its result.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait. The call goes on after that, unlike with the ``timeout`` of ``submit``.

        Raises
        ------
        TimeoutError
            If the call has not ended in that time; ask again.
        CallCancelled
            If it was ended because of something else: another call that timed out, or Ctrl-C.
        Exception
            What the call raised; see :class:`synk.Function`.
        """
        if self._launched is not None:
            self._queue.wait(self, timeout)
        self._is_seen = True
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        """Return whether the call has ended, well or not; never waits for it."""
        if self._launched is not None:
            self._queue.look()
        return self._launched is None

    def _end(self, value: Any, error: BaseException | None) -> None:
        if error is not None:  # its frames hold this object, and arrays
            BaseException.with_traceback(error, None)
        self._value, self._error = value, error
        self._launched = None

    def __repr__(self) -> str:
        state = "under way" if self._launched is not None else "failed" if self._error is not None else "done"
        return f"<synk.PendingCall of {self.name!r}, {state}>"

    def __del__(self) -> None:
        error = getattr(self, "_error", None)
        if error is not None and not self._is_seen and not isinstance(error, (CallCancelled, ClosedError)):
            _logger.error("a submitted call of %r failed, and nobody asked for its result: %r", self.name, error)


class Queue:
    """The submitted calls of one runtime that have no outcome yet.

    Attributes
    ----------
    calls : deque of PendingCall
        Oldest first.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.calls: deque[PendingCall] = deque()

    def submit(
        self,
        function: Callee,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        deadline: float | None,
    ) -> PendingCall:
        """Send a call and return at once, or as soon as fewer than ``NUM_LANES`` are under way. The runtime is held."""
        runtime = self._runtime
        # What rows a rank has of a sharded argument can depend on what the calls before assign.
        has_variables = any(isinstance(value, Shared) for value in (*args, *kwargs.values()))
        if has_variables or not self._can_join(function):
            runtime.begin(f"submit {function.name!r}", deadline)
        is_alone = has_variables or bool(function.variables) or (bool(self.calls) and self.calls[-1]._is_alone)
        while len(self.calls) >= NUM_LANES:
            self._collect_oldest()
        newest = self.calls[-1]._launched if self.calls else None
        lane = runtime.lanes.first if newest is None else runtime.lanes.after(newest.cached.lane)
        pending = PendingCall(self, function.name)
        try:
            pending._launched = launch(runtime, function, args, kwargs, options, deadline, lane, is_alone=is_alone)
        except BaseException as error:
            self._end_lost(error)
            raise
        pending._is_alone = has_variables or bool(function.variables)  # some are known only when it has been sent
        self.calls.append(pending)
        if runtime.team.is_inline:  # it has run already
            self._collect_oldest()
        return pending

    def _can_join(self, function: Callee) -> bool:
        """Whether a call can be sent behind those under way: nothing else is to be done before it."""
        runtime, team = self._runtime, self._runtime.team
        return (
            bool(self.calls)
            and function in runtime.bound
            and not runtime.has_dropped
            and not team.has_dead
            and len(team.flights) == len(self.calls)  # else one of them has no owner: an interrupt came
        )

    # -- outcomes -----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait for all calls. What they raise is kept for whoever asks for their results."""
        while self.calls:
            self._collect_oldest()

    def wait(self, pending: PendingCall, timeout: float | None) -> None:
        """Wait until ``pending`` has an outcome.

        Raises
        ------
        TimeoutError
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._runtime.entered(f"wait for {pending.name!r}"):
            while pending._launched is not None and self.calls:
                if until is not None and not self._has_ended(self.calls[0], until):
                    raise TimeoutError(f"{pending.name!r} has not ended within {timeout:g} s; it goes on.")
                self._collect_oldest()
            if pending._launched is not None:
                pending._end(None, _cancelled(pending, None))

    def _has_ended(self, pending: PendingCall, until: float) -> bool:
        """Wait until a call has ended or reached its own time limit, not beyond ``until``; return whether it did."""
        launched = pending._launched
        if launched is None or (launched.deadline is not None and launched.deadline <= until):
            return True
        try:
            return self._runtime.team.wait_for(launched.flight, until)
        except Exception as error:
            self._end_lost(error)
            return True
        except BaseException as error:
            self._end_lost(error)
            raise

    def look(self) -> None:
        """Take in what has ended, without waiting for anything."""
        runtime = self._runtime
        with runtime.entered_if_free() as is_free:
            if not is_free or not self.calls:
                return
            if runtime.is_closed:  # by itself: workers died too often
                self.close()
                return
            try:
                runtime.team.pump()
            except Exception as error:
                self._end_lost(error)
            except BaseException as error:
                self._end_lost(error)
                raise
            while self.calls and ((launched := self.calls[0]._launched) is None or not launched.flight.pending):
                self._collect_oldest()

    def release(self, segment: Segment) -> None:
        """Wait for the calls that read ``segment``, which is about to be changed."""
        runtime = self._runtime
        if not self.calls or runtime.is_mine():
            return
        with runtime.entered("change Data"):
            while any(segment in pending._launched.cached.segments for pending in self.calls if pending._launched):
                self._collect_oldest()

    def close(self) -> None:
        """End all calls: the runtime is closed."""
        while self.calls:
            pending = self.calls.popleft()
            pending._end(None, ClosedError(f"the call of {pending.name!r} was ended: the runtime was closed."))

    def _collect_oldest(self) -> None:
        if not self.calls:  # closed meanwhile
            return
        pending = self.calls[0]
        launched = pending._launched
        if launched is None or pending._is_collecting or launched.flight.is_lost:  # an interrupt has broken this off
            if launched is not None:
                pending._end(None, _cancelled(pending, None))
            self.calls.popleft()
            return
        pending._is_collecting = True
        try:
            pending._end(collect(self._runtime, launched), None)
        except Exception as error:
            pending._end(None, error)
            self._end_lost(error)
        except BaseException as error:
            pending._end(None, _cancelled(pending, error))
            self._end_lost(error)
            raise
        if self.calls and self.calls[0] is pending:
            self.calls.popleft()

    def _end_lost(self, error: BaseException) -> None:
        """After ``error``: end the calls that it has taken along."""
        kept: deque[PendingCall] = deque()
        for pending in self.calls:
            if pending._launched is None:
                continue
            if not pending._launched.flight.is_lost:
                kept.append(pending)
            elif isinstance(error, (WorkerDied, ClosedError)):
                pending._end(None, copy.copy(error))
            else:
                pending._end(None, _cancelled(pending, error))
        self.calls = kept


def _cancelled(pending: PendingCall, error: BaseException | None) -> CallCancelled:
    why = f"together with another: {error}" if isinstance(error, Exception) else "by an interrupt."
    cancelled = CallCancelled(f"the call of {pending.name!r} was ended {why} Submit it again.")
    cancelled.__cause__ = error
    return cancelled
