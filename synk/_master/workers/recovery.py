"""Recovery after deaths, time limits and interrupts, until the workers are in a known state again.

The steps have this order. If a signal handler breaks them off, the next operation starts again at the first:

1. *bury*: everything that belonged to dead workers is released, and they owe no reply any more;
2. *interrupt*: living workers that still owe a reply are made idle. Those that do not answer in time are killed and
   buried;
3. every request that some rank did not answer is lost, and the calls that wait for one raise an error;
4. *restart*, at the beginning of the next operation: dead workers are replaced.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from synk._master.processes.output import warn_at_users_line
from synk._master.processes.processes import Processes, WorkerState
from synk._master.processes.reports import DeathReports
from synk._master.workers.requests import Request, Requests
from synk._pure.interrupts import deferred
from synk._pure.limits import poll_ms
from synk._wire.control import Down, interrupt_word
from synk._wire.messages import Kind
from synk.errors import CallTimeout, ClosedError, WorkerDied

GRACE_S = 2.0
"""How long a worker may take to answer an interrupt before it is killed."""

NCCL_GRACE_S = 5.0
"""The same time with NCCL: aborting NCCL can take seconds, and killing a process loses the values on its device."""

RESTART_WINDOW_S = 60.0


class Recovery:
    """Knows what has gone wrong with the workers of one runtime, and brings them back to a known state.

    Parameters
    ----------
    processes : Processes
    requests : Requests
    max_restarts : int
    counters : dict of str to int
    on_trouble : callable
        Called before workers are interrupted, so that ranks that wait for each other give up.
    on_idle : callable
        Called when workers were made idle after a failure, before anything else is sent.

    Attributes
    ----------
    restarted : list of int
        Ranks with a new process. Code that has dealt with one removes it from the list.
    unreported : dict of int to str
        By rank, how workers ended whose death no call has reported.
    cause : BaseException or None
        The error that closed the runtime.
    grace_s : float
        How long a worker may take to answer an interrupt before it is killed.
    reports : DeathReports
    """

    def __init__(
        self,
        processes: Processes,
        requests: Requests,
        *,
        max_restarts: int,
        counters: dict[str, int],
        on_trouble: Callable[[], None],
        on_idle: Callable[[], None],
    ) -> None:
        self.max_restarts = max_restarts
        self.grace_s = NCCL_GRACE_S if processes.placement.assignment.can_use_nccl else GRACE_S
        self.cause: BaseException | None = None
        self.restarted: list[int] = []
        self.unreported: dict[int, str] = {}
        self._processes = processes
        self._requests = requests
        self._counters = counters
        self._on_trouble = on_trouble
        self._on_idle = on_idle
        self.reports = DeathReports(processes)
        self._restarts: deque[float] = deque()
        self._last_death: WorkerDied | None = None  # the death of the workers that are dead now
        self._news: list[str] = []  # deaths to tell the user about when the replacements are up
        self._kill_at = 0.0  # when workers that were interrupted and do not answer are killed

    @property
    def has_restarted(self) -> bool:
        """Whether a worker was replaced recently, within ``RESTART_WINDOW_S``."""
        return bool(self._restarts)

    # -- deaths -------------------------------------------------------------------------------------------------------

    def on_deaths(self, dead: list[int]) -> None:
        """Take the last replies of dead ranks. Raise WorkerDied if a request was not over for one of them."""
        processes, requests = self._processes, self._requests
        for rank in dead:  # Before the burial closes the pipe: a worker that answered and then died has answered.
            requests.take_late_replies(rank)
        owed = [request for request in requests.values() if any(map(request.concerns, dead))]
        owing = [rank for rank in dead if any(request.concerns(rank) for request in owed)]
        for rank in dead:
            how = processes.bury(processes.by_rank[rank])
            if rank not in owing:
                self.unreported[rank] = f"ended with {how} while idle"
        if not owing:
            return
        request = owed[0]  # the oldest one is what they were working on
        # More ranks may die below: those that do not answer the interrupt. One error names all of them.
        fallen = set(owing)
        if request.phase != "start":  # A worker that is still starting cannot be interrupted. The teardown ends it.
            survivors = requests.debtors() - fallen
            self.end_calls(survivors)
            fallen |= {rank for rank in survivors if processes.by_rank[rank].is_dead}
        error = self.died(sorted(fallen), request.phase, request.what, request.began)
        self._last_death = copy.copy(error)  # without the traceback, which will hold the caller's frames
        raise error

    def died(self, ranks: Iterable[int], phase: str, what: str, began: float) -> WorkerDied:
        """Return the error that reports the deaths of ``ranks``. No other error needs to report them."""
        ranks = list(ranks)
        for rank in ranks:
            self.unreported.pop(rank, None)
        return self.reports.died(ranks, phase, what, began)

    def bury_idle(self, ranks: Iterable[int]) -> None:
        """Bury workers that died while nothing was in flight."""
        for rank in ranks:
            self.unreported[rank] = f"ended with {self._processes.bury(self._processes.by_rank[rank])} while idle"

    # -- time limits --------------------------------------------------------------------------------------------------

    def on_timeout(self, request: Request) -> None:
        """End all requests because the time of one is over.

        Raises
        ------
        CallTimeout
            Or what else the request says.
        """
        ranks = self._processes.placement.among_all(sorted(request.pending))
        if request.phase == "start":
            raise CallTimeout(
                f"the workers were not up in time: {ranks} is still starting. Raise timeout=, or call again."
            )
        request.error = request.late(ranks)
        self._settle(is_interrupted=False)
        raise request.error

    # -- making idle --------------------------------------------------------------------------------------------------

    def settle_after(self, error: BaseException) -> None:
        """After an error in the middle of a message, make the workers that still owe a reply idle."""
        self._requests.lose(error)  # First: if the rest fails, nobody waits for an answer that was read and dropped.
        if self._requests.debtors() and not self._processes.is_closed:
            self._settle(is_interrupted=isinstance(error, KeyboardInterrupt))

    def settle(self) -> None:
        """Settle what a signal handler broke off: every rank is idle or dead, and nothing is in flight."""
        if self._requests:
            self._settle(is_interrupted=False)
            self._requests.clear()

    def _settle(self, *, is_interrupted: bool) -> None:
        """Make every rank idle or dead again, after an exception in the middle of a message. All requests are lost.

        A Ctrl-C during this ends the wait for workers that do not answer: they are killed. A second Ctrl-C closes the
        runtime; if ``is_interrupted``, a Ctrl-C has led here and counts as the first.
        """
        num_interrupts = int(is_interrupted)

        def on_interrupt() -> None:
            nonlocal num_interrupts
            num_interrupts += 1
            self._kill_at = 0.0
            self._processes.poll_set.wake()

        with deferred(on_interrupt):
            self.end_calls(sorted(self._requests.debtors()))
            if num_interrupts > 1:
                self.fail(ClosedError("the runtime was closed by a second Ctrl-C while it ended a call."))

    def end_calls(self, ranks: Iterable[int]) -> None:
        """End all requests. Only ``ranks`` still work on them. Requests that all ranks answered stay.

        The ranks get SIGINT, then a ping whose answer proves that they are idle, and at ``_kill_at`` SIGKILL.
        """
        self._kill_at = time.monotonic() + self.grace_s
        ranks = [rank for rank in ranks if not self._processes.by_rank[rank].is_dead]
        if ranks:
            self._interrupt(ranks)
        self._requests.give_up()  # Last, because until then the interrupt must know which messages it is meant for.

    def _interrupt(self, ranks: list[int]) -> None:
        """Make ``ranks``, which are alive, idle. Ranks that do not answer in time are killed and buried."""
        processes, requests = self._processes, self._requests
        interrupted = interrupt_word(next(iter(requests)), requests.sequence)
        processes.log.note()
        self._on_trouble()  # First, because a rank that waits for another in a collective would not return to its pipe.
        for rank in ranks:
            # Before the signal: the worker's handler reads this to see which messages are meant.
            processes.down[rank, Down.INTERRUPT] = interrupted
            processes.by_rank[rank].process.interrupt()
        # The pipe keeps the order of messages. So whatever a rank had in its pipe is answered, or given up, before the
        # ping.
        ping = requests.next_sequence()
        for rank in ranks:
            processes.by_rank[rank].process.channel.ring(Kind.PING, 0, ping, 0)
        silent = set(ranks)
        repeat_at = time.monotonic() + self.grace_s / 2
        while silent and (remaining := self._kill_at - time.monotonic()) > 0:
            events = processes.wait(poll_ms(min(remaining, max(repeat_at - time.monotonic(), 0.0))))
            for rank in events.doorbells:
                message = requests.read(processes.by_rank[rank])  # any other reply answers a message that is lost
                if message is not None and message[0] == ping:
                    silent.discard(rank)
            for rank in events.deaths:
                processes.bury(processes.by_rank[rank])
                silent.discard(rank)
            if events.is_woken:
                processes.poll_set.drain_wake()
            if time.monotonic() >= repeat_at:
                # The user's code may have swallowed the first signal. A second one reaches a rank that is to finish its
                # step.
                repeat_at = math.inf
                for rank in silent:
                    processes.by_rank[rank].process.interrupt()
        for rank in silent:
            processes.by_rank[rank].process.kill()
            processes.bury(processes.by_rank[rank])
        # Every rank has answered the ping or is dead. A signal that is still on its way finds no message to end.
        for rank in ranks:
            processes.down[rank, Down.INTERRUPT] = -1
        self._on_idle()  # Last: now that no rank waits in a collective, its words may be reset.

    # -- starting again -----------------------------------------------------------------------------------------------

    def restart_dead(self) -> None:
        """Replace dead workers. They get functions with the next load, and segments and plans with the next call.

        Raises
        ------
        ClosedError
            If workers died too often.
        StartupError
        """
        dead = [worker for worker in self._processes.by_rank if worker.is_dead]
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        named = self._processes.placement.named
        news = [
            f"{named([rank])} (pid {self._processes.by_rank[rank].process.pid}) {what_happened}"
            for rank, what_happened in sorted(self.unreported.items())
        ]
        self.unreported.clear()
        if len(self._restarts) >= self.max_restarts:
            ended = ", ".join(f"{named([worker.rank])} ({worker.process.exit_text})" for worker in dead)
            error = ClosedError(
                f"the runtime closed itself: workers died {len(self._restarts) + 1} times within "
                f"{RESTART_WINDOW_S:.0f} s, last {ended}; max_restarts is {self.max_restarts}. Call synk.fork() again."
            )
            error.__cause__ = self._last_death
            self.fail(error)
            raise error
        self._last_death = None
        self._restarts.append(now)
        self._start_again(dead)
        self._news += news

    def _start_again(self, workers: Sequence[WorkerState]) -> None:
        self._on_idle()
        for worker in workers:
            self._counters["restarts"] += 1
            worker.is_prepared = False
            self.restarted.append(worker.rank)  # before it is started: who uses it is sure to see that it is another
            self._processes.start_again(worker)

    def replace_all(self) -> None:
        """End all workers, which must be idle, and start others in their place. The new ones are not up yet."""
        try:
            self.say_goodbye()
        finally:  # Whatever breaks the goodbye off: workers that were asked to end must get no more messages.
            for worker in self._processes.by_rank:
                if not worker.is_dead:
                    worker.process.kill()
                    self._processes.bury(worker)
            self.unreported.clear()
            self._start_again(self._processes.by_rank)

    def tell_news(self) -> None:
        """Warn the user about workers that died while nothing ran: what functions kept there is gone."""
        if self._news:
            news, self._news = self._news, []
            warn_at_users_line(
                f"{'; '.join(news)} and was started again. What functions kept there, in closures or globals, is gone.",
                RuntimeWarning,
            )

    # -- ending -------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Close the runtime at once because of ``error``."""
        self.cause = self.cause or error
        self._processes.tear_down()

    def say_goodbye(self) -> None:
        """Ask idle workers to end. The teardown kills those that do not."""
        processes, requests = self._processes, self._requests
        if processes.is_closed or requests.debtors():
            return
        sequence = requests.next_sequence()
        waiting = set()
        for worker in processes.by_rank:
            if worker.is_ready and not worker.is_dead:
                worker.process.channel.ring(Kind.CLOSE, 0, sequence, 0)
                waiting.add(worker.rank)
        deadline = time.monotonic() + self.grace_s
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            events = processes.wait(poll_ms(remaining))
            for rank in events.doorbells:
                requests.read(processes.by_rank[rank])  # the answer to the request; the death follows
            for rank in events.deaths:
                processes.bury(processes.by_rank[rank])
                waiting.discard(rank)
            if events.is_woken:
                processes.poll_set.drain_wake()
