"""The wait for replies: what has happened is taken in, and ends the wait where it is trouble."""

from __future__ import annotations

import math
import time

from synk._master.processes.output import report
from synk._master.processes.processes import PollSet, Processes
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
    poll_set : PollSet

    Attributes
    ----------
    is_closing, is_exiting : bool
        Whether the runtime is being closed, by another thread or because the program ends: a wait ends at once.
    is_interrupted : bool
        Whether the operation under way is to end, likewise; an operation that begins takes it back.
    num_interrupts : int
        How many waits were ended so.
    """

    def __init__(self, processes: Processes, requests: Requests, recovery: Recovery, poll_set: PollSet) -> None:
        self._processes = processes
        self._requests = requests
        self._recovery = recovery
        self._poll_set = poll_set
        self._stuck_after_s = stuck_after_s()
        self.is_closing = self.is_exiting = self.is_interrupted = False
        self.num_interrupts = 0

    def until(self, request: Request, until: float | None = None) -> bool:
        """Wait until no rank owes ``request`` a reply, or until ``until``; return whether it is so.

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
                continue  # what came in time but was not looked at before the deadline still counts
            if urgent.deadline is not None and now >= urgent.deadline:
                self._recovery.on_timeout(urgent)
            if until is not None and now >= until:
                return False
        return True

    def _report(self, request: Request) -> None:
        what = request.what or request.phase
        ranks = [] if request.replies else request.pending  # where some have ended, the others wait or are slow
        report("%s has run for more than %g s:%s", what, self._stuck_after_s, at_work(self._processes, ranks))

    def take_events(self, timeout_ms: int | None) -> bool:
        """Handle what happens within a time limit; return whether replies came.

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
        """Have a wait in another thread end with ``ClosedError``: the runtime is closing."""
        self.is_closing = True
        self._processes.log.note()
        self._poll_set.wake()

    def interrupt(self) -> None:
        """Have a wait in another thread end with ``CallCancelled``, or the next one of the operation under way."""
        self.is_interrupted = True  # first: whoever is woken looks at it
        self._poll_set.wake()

    def on_wake(self) -> None:
        """End the operation under way where another thread wants that."""
        self._poll_set.drain_wake()
        if self.is_exiting:
            raise SystemExit  # ends a daemon thread without a word: the program is over
        if self.is_closing:
            raise ClosedError("the call was ended: the runtime is being closed by another thread.")
        if self.is_interrupted:
            self.is_interrupted = False  # one wait for each: the operation may go on to settle what it has begun
            self.num_interrupts += 1
            raise interrupted()


def interrupted() -> CallCancelled:
    """Return what a call raises that was interrupted."""
    return CallCancelled("the call was ended by Runtime.interrupt(). Call it again.")
