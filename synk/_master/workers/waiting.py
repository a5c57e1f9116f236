"""The wait for replies: takes in what has happened, and ends with an error if something went wrong."""

from __future__ import annotations

import math
import time

from synk._master.processes.output import report
from synk._master.processes.processes import Processes
from synk._master.processes.reports import at_work
from synk._master.workers.recovery import Recovery
from synk._master.workers.requests import Request, Requests
from synk._pure.environment import stuck_after_s
from synk._pure.limits import poll_ms
from synk.errors import CallCancelled, ClosedError


class Waiting:
    """Waits for the replies of the workers of one runtime.

    Parameters
    ----------
    processes : Processes
    requests : Requests
    recovery : Recovery

    Attributes
    ----------
    is_closing, is_exiting : bool
        Whether another thread is closing the runtime, or the program is ending: a wait then ends at once.
    is_interrupted : bool
        Whether another thread wants the current operation to end. The next operation resets it.
    num_interrupts : int
        How many waits were ended by it.
    """

    def __init__(self, processes: Processes, requests: Requests, recovery: Recovery) -> None:
        self._processes = processes
        self._requests = requests
        self._recovery = recovery
        self._stuck_after_s = stuck_after_s()
        self.is_closing = self.is_exiting = self.is_interrupted = False
        self.num_interrupts = 0

    def until(self, request: Request, until: float | None = None) -> bool:
        """Wait until no rank owes ``request`` a reply, at most until ``until``. Return whether all replies came.

        A death, or the time limit of any request, ends the wait with an error.
        """
        report_at = time.monotonic() + self._stuck_after_s
        while request.pending:
            now = time.monotonic()
            if now >= report_at:
                report_at = math.inf
                self._report(request)
            urgent = request if len(self._requests) == 1 else self._requests.most_urgent(request)
            next_event = report_at if urgent.deadline is None else min(report_at, urgent.deadline)
            if until is not None:
                next_event = min(next_event, until)
            timeout_ms = None if next_event == math.inf else poll_ms(next_event - now)
            if self.take_events(timeout_ms):
                continue  # what came in time but was not read before the deadline still counts
            if urgent.deadline is not None and now >= urgent.deadline:
                self._recovery.on_timeout(urgent)
            if until is not None and now >= until:
                return False
        return True

    def _report(self, request: Request) -> None:
        what = request.what or request.phase
        ranks = [] if request.replies else request.pending  # if some ranks have ended, the others wait or are slow
        report("%s has run for more than %g s:%s", what, self._stuck_after_s, at_work(self._processes, ranks))

    def take_events(self, timeout_ms: int | None) -> bool:
        """Handle what happens within a time limit. Return whether replies came.

        Replies are taken before deaths: a worker that answered and then died has answered.
        """
        events = self._processes.wait(timeout_ms)
        self._requests.take_replies(events.doorbells)
        if events.is_woken:
            self.on_wake()
        if events.deaths:
            self._recovery.on_deaths(events.deaths)
        return bool(events.doorbells)

    def wake(self) -> None:
        """Make a wait in another thread raise ``ClosedError``: the runtime is closing."""
        self.is_closing = True
        self._processes.log.note()
        self._processes.poll_set.wake()

    def interrupt(self) -> None:
        """Make a wait in another thread raise ``CallCancelled``, or the next wait of its operation."""
        self.is_interrupted = True  # First, because the woken thread looks at it.
        self._processes.poll_set.wake()

    def on_wake(self) -> None:
        """End the current operation if another thread asked for that."""
        self._processes.poll_set.drain_wake()
        if self.is_exiting:
            raise SystemExit  # ends a daemon thread silently: the program is over
        if self.is_closing:
            raise ClosedError("the call was ended: the runtime is being closed by another thread.")
        if self.is_interrupted:
            # once for each interrupt: the operation may wait again to settle what it has begun
            self.is_interrupted = False
            self.num_interrupts += 1
            raise interrupted()


def interrupted() -> CallCancelled:
    """Return the error of a call that was interrupted."""
    return CallCancelled("the call was ended by Runtime.interrupt(). Call it again.")
