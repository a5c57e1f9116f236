"""The workers as a group: one message to each and its reply, deaths, time limits, interrupts, new starts, goodbye.

Knows nothing of functions, plans and arrays; what a message brings beside its content it asks of ``pack``.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import pickle
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from synk._channel import MAX_FDS, ProtocolError
from synk._crew import Crew
from synk._environment import stuck_after_s
from synk._failures import raise_failures
from synk._inline import InlineProcess
from synk._interrupts import deferred, held_back
from synk._links import ASSEMBLED, DONE, Link, Reply
from synk._memory import Segment
from synk._messages import (
    HAS_BODY,
    IS_ALONE,
    IS_ASSEMBLED,
    IS_UNRECEIVED,
    LANE_SHIFT,
    Down,
    Extras,
    Kind,
    Status,
    interrupt_word,
)
from synk._process import WorkerProcess
from synk.errors import CallTimeout, ClosedError, SerializationError, StartupError, WorkerDied

GRACE_S = 2.0
"""How long a worker may take to answer an interrupt before it is killed."""

NCCL_GRACE_S = 5.0
"""Likewise with NCCL: aborting it can take seconds, and a process that is killed loses its device's values."""

RESTART_WINDOW_S = 60.0
START_TIMEOUT_S = 120.0

_logger = logging.getLogger("synk")


Pack = Callable[[Link, Any, Sequence[Segment], int], tuple["Extras | None", list[Segment]]]
Packed = dict[int, tuple["Extras | None", list[Segment]]]
"""By rank: the body of its message, and the segments whose descriptors ride along."""

_HELLO = 0  # the sequence number of a worker's first word; messages count from 1


class Flight:
    """A message on its way: sent to some ranks, of which not all may have answered.

    Attributes
    ----------
    pending : set of int
        Ranks that owe a reply.
    replies : dict of int to Reply
        By rank.
    deadline : float or None
        Monotonic time by which all must have answered.
    phase, what : str
        For errors.
    is_lost : bool
        Whether it was given up: no reply will come any more.
    is_cut : bool
        Whether all have answered, but the workers remember nothing of it any more.
    error : CallTimeout or None
        What ended it, where it was the cause itself.
    began : float
        Monotonic time at which the operation began that it belongs to.
    """

    is_lost = is_cut = False
    began = 0.0
    error: CallTimeout | None = None

    def __init__(self, sequence: int, ranks: Iterable[int], deadline: float | None, phase: str, what: str) -> None:
        self.sequence = sequence
        self.pending = set(ranks)
        self.replies: dict[int, Reply] = {}
        self.deadline = deadline
        self.phase = phase
        self.what = what


class Team(Crew):
    """The workers of one runtime.

    Parameters
    ----------
    placement : Placement
    is_inline : bool
    max_restarts : int
    failpoints : sequence
        Faults to arm, for tests.
    counters : dict of str to int
    token : bytes
    pack : callable
        ``pack(link, content, segments, lane)`` returns the body of a message for a rank (None if it needs none) and
        the segments whose descriptors ride along.
    on_idle : callable
        Called when workers were made idle after a failure, before anything else is sent.

    Attributes
    ----------
    flights : dict of int to Flight
        Messages that were not answered by all, by sequence number, oldest first.
    restarted : list of int
        Ranks that were started anew; whoever has seen to them takes them out.
    cause : BaseException or None
        The fault that closed the team.
    grace_s : float
        How long a worker may take to answer an interrupt before it is killed.
    """

    def __init__(
        self,
        placement: Any,
        *,
        is_inline: bool,
        max_restarts: int,
        failpoints: Sequence[Sequence[Any]],
        counters: dict[str, int],
        token: bytes,
        pack: Pack,
        on_trouble: Callable[[], None],
        on_idle: Callable[[], None],
    ) -> None:
        self.max_restarts = max_restarts
        self.counters = counters
        self.cause: BaseException | None = None
        self.is_closing = False
        self.is_exiting = False
        self.sequence = 0
        self.grace_s = NCCL_GRACE_S if placement.can_use_nccl else GRACE_S
        self.restarted: list[int] = []
        self._failpoints = failpoints
        self._pack = pack
        self._on_trouble = on_trouble
        self._on_idle = on_idle
        self.flights: dict[int, Flight] = {}
        self._hellos: dict[int, Reply] = {}  # kept here: an interrupt in the wait must not lose one
        self._restarts: deque[float] = deque()
        self._last_death: WorkerDied | None = None  # of the workers that are dead now
        self._began = 0.0  # when the operation under way began
        self._stuck_after_s = stuck_after_s()
        super().__init__(placement, is_inline=is_inline, failpoints=failpoints, token=token)

    # -- starting -----------------------------------------------------------------------------------------------------

    def await_ready(self, deadline: float | None = None) -> None:
        """Wait until every started worker has said hello.

        Raises
        ------
        StartupError
            Naming the ranks that did not, with the end of their stderr. The runtime is closed then.
        WorkerDied
            If one died that was started in the place of another.
        CallTimeout
            If they had not at ``deadline``; they go on starting.
        """
        waiting = {link.rank for link in self.links if not link.is_ready}
        if not waiting:
            return
        limit = time.monotonic() + START_TIMEOUT_S
        is_hurried = deadline is not None and deadline < limit
        try:
            hello = Flight(_HELLO, waiting - self._hellos.keys(), deadline if is_hurried else limit, "start", "")
            hello.replies = self._hellos
            self.flights[_HELLO] = hello
            try:
                self._wait(hello)
            finally:
                self.flights.pop(_HELLO, None)
            for rank in waiting:
                self._greet(self.links[rank], self._hellos[rank])
        except (WorkerDied, CallTimeout, ProtocolError, SerializationError) as error:
            if is_hurried and isinstance(error, CallTimeout):
                raise
            if isinstance(error, WorkerDied) and self._restarts:
                raise  # a replacement: one more death, and the next operation starts another
            died = getattr(error, "ranks", ()) or tuple(sorted(waiting))
            failure = StartupError(
                f"cannot start the workers: rank {', '.join(map(str, died))} of {self.world_size} did not come up. "
                f"{error}"
            )
            self.fail(failure)
            raise failure from error
        except StartupError as error:
            self.fail(error)
            raise

    def _greet(self, link: Link, reply: Reply) -> None:
        hello = pickle.loads(reply.body)
        mine = own_versions()
        if hello["versions"] != mine:
            differing = [f"{k} {v} (master: {mine[k]})" for k, v in hello["versions"].items() if v != mine[k]]
            raise StartupError(f"cannot use worker rank {link.rank}: it runs {', '.join(differing)}.")
        link.description = hello["device"]
        link.is_ready = True

    # -- between messages ---------------------------------------------------------------------------------------------

    def prepare(self, deadline: float | None = None) -> None:
        """Bring the workers to a known state: settle what an interrupt left, note deaths, start the dead again.

        Raises
        ------
        ClosedError
            If workers died too often.
        StartupError
        """
        if self.flights:
            self._settle()
            self.flights.clear()
        if not self.is_inline:
            self._drain_events()
        for link in self.links:
            if link.is_dead:
                self._revive(deadline)
                break
        for link in self.links:
            if not link.is_ready:
                self.await_ready(deadline)
                break
        self._began = time.monotonic()

    def _drain_events(self) -> None:
        """Handle what happened while nobody waited: deaths, and lines printed by threads of workers."""
        for fd, _ in self._poll.poll(0):
            kind, rank = self._fds.get(fd, ("", -1))
            link = self.links[rank]
            if kind == "death":
                how = self._bury(link)
                self._unreported_deaths[rank] = how
            elif kind == "output":
                self._forward(link, fd)
                link.process.note_backlog()
            elif kind == "wake":
                self._on_wake(fd)

    def _revive(self, deadline: float | None) -> None:
        """Start dead ranks again; they get functions with the next load, segments and plans with the next call."""
        dead = [link for link in self.links if link.is_dead]
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        reports = [
            f"rank {rank} (pid {self.links[rank].process.pid}) ended with {how} while idle"
            for rank, how in sorted(self._unreported_deaths.items())
        ]
        self._unreported_deaths.clear()
        if len(self._restarts) >= self.max_restarts:
            ended = ", ".join(f"rank {link.rank} ({link.process.exit_text})" for link in dead)
            error = ClosedError(
                f"the runtime closed itself: workers died {len(self._restarts) + 1} times within "
                f"{RESTART_WINDOW_S:.0f} s, last {ended}; max_restarts is {self.max_restarts}. Call synk.fork() again."
            )
            error.__cause__ = self._last_death
            self.fail(error)
            raise error
        self._last_death = None
        self._restarts.append(now)
        self._start_again(dead, deadline)
        if reports:
            warnings.warn(
                f"{'; '.join(reports)} and was started again. "
                "What functions kept there, in closures or globals, is gone.",
                RuntimeWarning,
                stacklevel=6,
            )

    def _start_again(self, links: Sequence[Link], deadline: float | None) -> None:
        self._on_idle()
        lasting = [point for point in self._failpoints if point[2] == 0]
        with deferred():
            for link in links:
                self.counters["restarts"] += 1
                self._hellos.pop(link.rank, None)
                link.restart(self._start(link.rank, lasting))
                self.restarted.append(link.rank)
                self._watch_link(link)
        self.await_ready(deadline)

    def replace(self, deadline: float | None) -> None:
        """End all workers, which are idle, and start others in their place."""
        self.say_goodbye()
        for link in self.links:
            if isinstance(link.process, WorkerProcess):
                if not link.is_dead:
                    link.process.kill()
                    self._bury(link)
            else:
                link.process.close()
        self._unreported_deaths.clear()
        self._start_again(self.links, deadline)

    # -- exchanging ---------------------------------------------------------------------------------------------------

    def next_sequence(self) -> int:
        self.sequence = self.sequence % 0xFFFF + 1
        return self.sequence

    def exchange(
        self,
        kind: Kind,
        ranks: Sequence[int],
        value: int,
        contents: dict[int, Any],
        segments: Iterable[Segment],
        deadline: float | None,
        phase: str,
        what: str,
        lane: int = 0,
    ) -> dict[int, Reply]:
        """Send one message to each of ``ranks`` and return their replies.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
            The workers that are alive then are idle again, and all flights are lost.
        """
        return self.finish(self.launch(kind, ranks, value, contents, segments, deadline, phase, what, lane))

    def launch(
        self,
        kind: Kind,
        ranks: Sequence[int],
        value: int,
        contents: dict[int, Any],
        segments: Iterable[Segment],
        deadline: float | None,
        phase: str,
        what: str,
        lane: int = 0,
    ) -> Flight:
        """Send one message to each of ``ranks``; :meth:`finish` returns the replies.

        Parameters
        ----------
        contents : dict
            Body of the message for the ranks that need one.
        segments : iterable of Segment
            What the message refers to; ranks that do not hold one yet get it with the message.
        deadline : float or None
            Monotonic time at which the exchange ends with ``CallTimeout``.
        phase, what : str
            For errors.
        lane : int
            That of the call which the message belongs to.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
            As :meth:`exchange`.
        """
        fallen = [rank for rank in ranks if self.links[rank].is_dead]
        if fallen:  # it answered an earlier message of this operation and died then
            for rank in fallen:
                self._unreported_deaths.pop(rank, None)
            raise self._worker_died(fallen, phase, what, self._began)
        needed = list(segments)
        messages = self._packed(ranks, contents, needed, lane)
        # No rank gets the message before all have room for its descriptors: what it answers would be taken for nothing.
        while not self.is_inline and any(len(part) > MAX_FDS for _, part in messages.values()):
            surplus = {rank: part[:MAX_FDS] for rank, (_, part) in messages.items() if len(part) > MAX_FDS}
            supplies: Packed = {rank: (Extras(segments=Link.describe(part)), part) for rank, part in surplus.items()}
            replies = self.finish(self._fly(Kind.SUPPLY, 0, supplies, 0, deadline, phase, what))
            raise_failures(replies, self.world_size, phase)
            messages = self._packed(ranks, contents, needed, lane)
        return self._fly(kind, value, messages, lane, deadline, phase, what)

    def _packed(self, ranks: Sequence[int], contents: dict[int, Any], segments: Sequence[Segment], lane: int) -> Packed:
        return {rank: self._pack(self.links[rank], contents.get(rank), segments, lane) for rank in ranks}

    def prefetch(self, ranks: Sequence[int], plan_id: int, lane: int) -> None:
        """Have ranks bring the inputs of a call to their devices, which follows when those under way have ended."""
        for rank in ranks:
            process = self.links[rank].process
            if isinstance(process, WorkerProcess) and plan_id in self.links[rank].plans:
                self.counters["messages_down"] += 1
                self.counters["bytes_down"] += 8
                process.channel.ring(Kind.PREFETCH, lane << LANE_SHIFT, 0, plan_id)

    def _fly(
        self, kind: Kind, value: int, messages: Packed, lane: int, deadline: float | None, phase: str, what: str
    ) -> Flight:
        """Send each rank its message."""
        sequence = self.next_sequence()
        flags = lane << LANE_SHIFT | (0 if self.flights else IS_ALONE)
        if kind == Kind.CALL and self.flights:  # it was submitted, and joins others
            self._began = time.monotonic()
        flight = self.flights[sequence] = Flight(sequence, messages, deadline, phase, what)
        flight.began = self._began
        try:
            for rank, (extras, missing) in messages.items():
                self._send(self.links[rank], kind, flags, sequence, value, extras, missing)
        except BaseException:
            self._settle_unless_closed()
            raise
        return flight

    def finish(self, flight: Flight) -> dict[int, Reply]:
        """Wait for the replies of all ranks and return them.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
            As :meth:`exchange`; ``CallTimeout`` also for another flight, whose ``error`` it is then.
        """
        if flight.pending:
            self.wait_for(flight, None)
        replies = flight.replies
        for rank, reply in replies.items():
            if reply.flags & IS_UNRECEIVED:
                self.links[rank].forget_sent()
        self.flights.pop(flight.sequence, None)
        return replies

    def wait_for(self, flight: Flight, until: float | None) -> bool:
        """Wait until no rank owes ``flight`` a reply, at most until the monotonic time given; return whether it is so.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
            As :meth:`finish`.
        """
        try:
            return self._wait(flight, until)
        except BaseException:
            self._settle_unless_closed()
            raise

    def pump(self) -> None:
        """Take in, without waiting, what workers have answered; a death or a time limit ends all flights.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
        """
        try:
            while self._take_events(0):
                pass
            for flight in list(self.flights.values()):
                if flight.pending and flight.deadline is not None and time.monotonic() >= flight.deadline:
                    self._on_timeout(flight)
        except BaseException:
            self._settle_unless_closed()
            raise

    def _settle_unless_closed(self) -> None:
        if self._debtors() and not self.is_closed:
            self._settle()

    def _send(
        self,
        link: Link,
        kind: Kind,
        flags: int,
        sequence: int,
        value: int,
        extras: Extras | None,
        missing: list[Segment],
    ) -> None:
        process = link.process
        self.counters["messages_down"] += 1
        self.counters["bytes_down"] += 8
        if isinstance(process, InlineProcess):
            for segment in missing:
                process.give(segment)
            link.note_sent(extras, missing)
            process.handle(kind, sequence, value, extras)
            return
        if extras is None:
            process.channel.ring(kind, flags, sequence, value)
            return
        body = pickle.dumps(extras, protocol=5)
        self.counters["bytes_down"] += len(body)
        with deferred():  # what the rank holds and what is noted must not differ
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is found in the wait
                process.channel.send_body(sequence, body, [segment.fd for segment in missing])
            process.channel.ring(kind, HAS_BODY | flags, sequence, value)
            link.note_sent(extras, missing)

    def _wait(self, flight: Flight, until: float | None = None) -> bool:
        """Wait until no rank owes ``flight`` a reply, or until ``until``; return whether it is so.

        A death, or the time limit of any flight, ends the wait with an error.
        """
        if self.is_inline:
            process = self.links[0].process
            assert isinstance(process, InlineProcess)
            self.counters["messages_up"] += 1
            self.counters["bytes_up"] += 8
            flight.replies[0] = process.reply()
            flight.pending.clear()
            return True
        report_at = time.monotonic() + self._stuck_after_s
        while flight.pending:
            now = time.monotonic()
            if now >= report_at:
                report_at = math.inf
                what = flight.what or flight.phase
                _logger.warning("%s has run for more than %g s:\n%s", what, self._stuck_after_s, self.where())
            urgent = flight if len(self.flights) == 1 else self._most_urgent(flight)
            next_event = report_at if urgent.deadline is None else min(report_at, urgent.deadline)
            if until is not None:
                next_event = min(next_event, until)
            timeout_ms = None if next_event == math.inf else max(math.ceil((next_event - now) * 1000), 0)
            if self._take_events(timeout_ms):
                continue  # what came in time but was not looked at before the deadline still counts
            if urgent.deadline is not None and now >= urgent.deadline:
                self._on_timeout(urgent)
            if until is not None and now >= until:
                return False
        return True

    def _most_urgent(self, flight: Flight) -> Flight:
        """Return the flight whose time limit comes first; ``flight`` if none has one."""
        limited = [each for each in self.flights.values() if each.pending and each.deadline is not None]
        return min(limited, key=lambda each: each.deadline or 0.0, default=flight)

    def _take_events(self, timeout_ms: int | None) -> bool:
        """Handle what happens within a time limit; return whether replies came.

        Replies are taken before deaths: a worker that answered and then died has answered. What a function printed
        lies in its pipe before the doorbell rings, so one poll reports both, and the lines are shown before the call
        returns.
        """
        dead: list[int] = []
        has_replies = False
        for fd, _ in self._poll.poll(timeout_ms):
            kind, rank = self._fds.get(fd, ("", -1))
            if kind == "up":
                has_replies = True
                if _HELLO in self.flights:
                    with deferred():  # a hello comes once
                        self._take_reply(rank)
                else:
                    self._take_reply(rank)
            elif kind == "death":
                dead.append(rank)
            elif kind == "output":
                self._forward(self.links[rank], fd)
            elif kind == "wake":
                self._on_wake(fd)
        if dead:
            self._on_deaths(dead)
        return has_replies

    def _take_reply(self, rank: int) -> bool:
        """Read one doorbell and its body into its flight; return False where there is none."""
        message = self._read_reply(self.links[rank])
        if message is None:
            return False
        sequence, reply = message
        flight = self.flights.get(sequence)  # None: the answer to a message that was given up
        if flight is not None and rank in flight.pending:
            flight.replies[rank] = reply
            flight.pending.discard(rank)
        return True

    def _on_wake(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(fd)
        if self.is_exiting:
            raise SystemExit  # ends a daemon thread without a word: the program is over
        if self.is_closing:
            raise ClosedError("the call was ended: the runtime is being closed by another thread.")

    def _read_reply(self, link: Link) -> tuple[int, Reply] | None:
        """Read one doorbell and its body; return the number of the message that it answers, and the reply."""
        process = link.process
        assert isinstance(process, WorkerProcess)
        message = process.channel.answer()
        if message is None:
            self._unwatch(process.channel.read_fd)  # its end is closed; the pidfd tells of the death
            return None
        status, flags, sequence, _ = message
        self.counters["messages_up"] += 1
        self.counters["bytes_up"] += 8
        if status == Status.DONE and not flags & HAS_BODY:
            return sequence, ASSEMBLED if flags & IS_ASSEMBLED else DONE
        body = b""
        if flags & HAS_BODY:
            try:
                with deferred():  # descriptors have no owner until they are closed
                    body, fds = process.channel.receive_body(sequence)
                    for fd in fds:
                        os.close(fd)
            except (ProtocolError, EOFError, ConnectionResetError):
                process.kill()  # what it sends is not what our worker sends
                return None
            self.counters["bytes_up"] += len(body)
        return sequence, Reply(Status(status), flags, body)

    # -- faults -------------------------------------------------------------------------------------------------------

    def _on_deaths(self, dead: list[int]) -> None:
        """Take late replies of dead ranks; raise WorkerDied if one of them still owed a reply."""
        for rank in dead:
            process = self.links[rank].process
            assert isinstance(process, WorkerProcess)
            os.set_blocking(process.channel.read_fd, False)
            with contextlib.suppress(BlockingIOError):
                while self._take_reply(rank):
                    pass
        owed = [flight for flight in self.flights.values() if not flight.pending.isdisjoint(dead)]
        owing = [rank for rank in dead if any(rank in flight.pending for flight in owed)]
        for rank in dead:
            how = self._bury(self.links[rank])
            if rank not in owing:
                self._unreported_deaths[rank] = how
        if not owing:
            return
        flight = owed[0]  # the oldest: what they were at
        fallen = set(owing)
        if flight.phase != "start":  # a worker that is still coming up cannot be interrupted; the teardown ends it
            survivors = self._debtors() - fallen
            self._end_calls(survivors, kill_at=time.monotonic() + self.grace_s)
            fallen |= {rank for rank in survivors if self.links[rank].is_dead}
        error = self._worker_died(sorted(fallen), flight.phase, flight.what, flight.began)
        self._last_death = copy.copy(error)  # without the traceback that will hold the caller's frames
        raise error

    def _debtors(self) -> set[int]:
        """Return the ranks that owe a reply."""
        return {rank for flight in self.flights.values() for rank in flight.pending}

    def _on_timeout(self, flight: Flight) -> None:
        ranks = f"rank {', '.join(map(str, sorted(flight.pending)))} of {self.world_size}"
        if flight.phase == "start":
            raise CallTimeout(
                f"the workers were not up in time: {ranks} is still starting. Raise timeout=, or call again."
            )
        flight.error = CallTimeout(
            f"{flight.what or flight.phase} did not end in time on {ranks}. "
            "Raise timeout=, or give the function less to do."
        )
        self._settle()
        raise flight.error

    def _end_calls(self, ranks: Iterable[int], kill_at: float) -> None:
        """End all flights, which only ``ranks`` still work on; those that were answered by all stay.

        They get SIGINT, then a ping whose answer proves them idle, then SIGKILL.
        """
        ranks = [rank for rank in ranks if not self.links[rank].is_dead]
        if ranks:
            self._interrupt(ranks, kill_at)
        for flight in self.flights.values():
            flight.is_lost, flight.is_cut = bool(flight.pending), not flight.pending
        self.flights = {sequence: flight for sequence, flight in self.flights.items() if not flight.is_lost}

    def _interrupt(self, ranks: list[int], kill_at: float) -> None:
        interrupted = interrupt_word(next(iter(self.flights)), self.sequence)
        self._on_trouble()
        for rank in ranks:
            self.down[rank, Down.INTERRUPT] = interrupted
            process = self.links[rank].process
            assert isinstance(process, WorkerProcess)
            process.signal(signal.SIGINT)
        ping = self.next_sequence()
        for rank in ranks:
            process = self.links[rank].process
            assert isinstance(process, WorkerProcess)
            process.channel.ring(Kind.PING, 0, ping, 0)
        silent = set(ranks)
        while silent and time.monotonic() < kill_at:
            for fd, _ in self._poll.poll(max(1, math.ceil((kill_at - time.monotonic()) * 1000))):
                kind, rank = self._fds.get(fd, ("", -1))
                if kind == "up":
                    message = self._read_reply(self.links[rank])
                    if message is not None and message[0] == ping:
                        silent.discard(rank)
                elif kind == "death":
                    self._bury(self.links[rank])
                    silent.discard(rank)
                elif kind == "output":
                    self._forward(self.links[rank], fd)
                elif kind == "wake":
                    os.eventfd_read(fd)
        for rank in silent:
            process = self.links[rank].process
            assert isinstance(process, WorkerProcess)
            process.kill()
            self._bury(self.links[rank])
        for rank in ranks:
            self.down[rank, Down.INTERRUPT] = -1
        self._on_idle()

    def _settle(self) -> None:
        """After an exception in the middle of an exchange: every rank idle again, or dead. All flights are lost."""
        ranks = sorted(self._debtors())
        if self.is_inline:
            self.flights.clear()
            return
        kill_at = [time.monotonic() + self.grace_s]
        is_second = False

        def on_interrupt(count: int) -> None:
            nonlocal is_second
            is_second = True
            kill_at[0] = 0.0
            for rank in ranks:
                process = self.links[rank].process
                if isinstance(process, WorkerProcess):
                    process.signal(signal.SIGKILL)

        with held_back(on_interrupt):
            self._end_calls(ranks, kill_at[0])
            if is_second:
                self.fail(ClosedError("the runtime was closed by a second Ctrl-C while it ended a call."))
        if is_second:
            raise KeyboardInterrupt

    def fail(self, error: BaseException) -> None:
        """Close at once, because of ``error``."""
        self.cause = self.cause or error
        self.tear_down()

    # -- ending -------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have a wait in another thread end with ``ClosedError``: the team is closing."""
        self.is_closing = True
        os.eventfd_write(self._wake_fd, 1)

    def say_goodbye(self) -> None:
        """Ask idle workers to end; the teardown kills whoever does not."""
        if self.is_closed or self.is_inline or self._debtors():
            return
        sequence = self.next_sequence()
        waiting = set()
        for link in self.links:
            if link.is_ready and not link.is_dead and isinstance(link.process, WorkerProcess):
                link.process.channel.ring(Kind.CLOSE, 0, sequence, 0)
                waiting.add(link.rank)
        deadline = time.monotonic() + self.grace_s
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for fd, _ in self._poll.poll(math.ceil(remaining * 1000)):
                kind, rank = self._fds.get(fd, ("", -1))
                if kind == "death":
                    self._bury(self.links[rank])
                    waiting.discard(rank)
                elif kind == "output":
                    self._forward(self.links[rank], fd)
                elif kind == "up":
                    self._read_reply(self.links[rank])  # the bye; the death follows
                elif kind == "wake":
                    os.eventfd_read(fd)


def own_versions() -> dict[str, str]:
    """Versions that master and workers must share."""
    import platform

    import synk

    return {"python": platform.python_version(), "numpy": np.__version__, "synk": synk.__version__}
