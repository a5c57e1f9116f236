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
from synk._messages import HAS_BODY, IS_ASSEMBLED, IS_UNRECEIVED, Down, Extras, Kind, Status
from synk._process import WorkerProcess
from synk.errors import CallTimeout, ClosedError, SerializationError, StartupError, WorkerDied

GRACE_S = 2.0
"""How long a worker may take to answer an interrupt before it is killed."""

RESTART_WINDOW_S = 60.0
START_TIMEOUT_S = 120.0

_logger = logging.getLogger("synk")


Pack = Callable[[Link, Any, Sequence[Segment]], tuple["Extras | None", list[Segment]]]
Packed = dict[int, tuple["Extras | None", list[Segment]]]
"""By rank: the body of its message, and the segments whose descriptors ride along."""


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
        ``pack(link, content, segments)`` returns the body of a message for a rank (None if it needs none) and the
        segments whose descriptors ride along.
    on_idle : callable
        Called when workers were made idle after a failure, before anything else is sent.

    Attributes
    ----------
    restarted : list of int
        Ranks that were started anew; whoever has seen to them takes them out.
    cause : BaseException or None
        The first fault that may have closed the team.
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
        self.restarted: list[int] = []
        self._failpoints = failpoints
        self._pack = pack
        self._on_trouble = on_trouble
        self._on_idle = on_idle
        self._unsettled: list[int] = []
        self._hellos: dict[int, Reply] = {}  # kept here: an interrupt in the wait must not lose one
        self._restarts: deque[float] = deque()
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
            pending = waiting - self._hellos.keys()
            self._wait(pending, None, deadline if is_hurried else limit, "start", replies=self._hellos)
            for rank in waiting:
                self._greet(self.links[rank], self._hellos[rank])
        except (WorkerDied, CallTimeout, ProtocolError, SerializationError) as error:
            if is_hurried and isinstance(error, CallTimeout):
                raise
            if isinstance(error, WorkerDied) and self._restarts:
                raise  # a replacement: one more death, and the next operation starts another
            died = getattr(error, "ranks", ()) or tuple(sorted(waiting))
            self.cause = failure = StartupError(
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
        if self._unsettled:
            self._settle()
        if not self.is_inline:
            self._drain_events()
        if any(link.is_dead for link in self.links):
            self._revive(deadline)
        self.await_ready(deadline)

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
            cause = self.cause
            self.fail(error)
            raise error from cause
        self._restarts.append(now)
        self._on_idle()
        lasting = [point for point in self._failpoints if point[2] == 0]
        with deferred():
            for link in dead:
                self.counters["restarts"] += 1
                self._hellos.pop(link.rank, None)
                link.restart(self._start(link.rank, lasting))
                self.restarted.append(link.rank)
                self._watch_link(link)
        self.await_ready(deadline)
        if reports:
            warnings.warn(f"{'; '.join(reports)} and was started again.", RuntimeWarning, stacklevel=6)

    # -- exchanging ---------------------------------------------------------------------------------------------------

    def next_sequence(self) -> int:
        self.sequence = (self.sequence + 1) & 0xFFFF
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
    ) -> dict[int, Reply]:
        """Send one message to each of ``ranks`` and return their replies.

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

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
            The workers that are alive then are idle again.
        """
        fallen = [rank for rank in ranks if self.links[rank].is_dead]
        if fallen:  # it answered an earlier message of this operation and died then
            for rank in fallen:
                self._unreported_deaths.pop(rank, None)
            raise self._worker_died(fallen, phase, what)
        needed = list(segments)

        def packed() -> Packed:
            return {rank: self._pack(self.links[rank], contents.get(rank), needed) for rank in ranks}

        messages = packed()
        # No rank gets the message before all have room for its descriptors: what it answers would be taken for nothing.
        while not self.is_inline and any(len(part) > MAX_FDS for _, part in messages.values()):
            surplus = {rank: part[:MAX_FDS] for rank, (_, part) in messages.items() if len(part) > MAX_FDS}
            supplies: Packed = {rank: (Extras(segments=Link.describe(part)), part) for rank, part in surplus.items()}
            raise_failures(self._converse(Kind.SUPPLY, 0, supplies, deadline, phase, what), self.world_size, phase)
            messages = packed()
        return self._converse(kind, value, messages, deadline, phase, what)

    def _converse(
        self, kind: Kind, value: int, messages: Packed, deadline: float | None, phase: str, what: str
    ) -> dict[int, Reply]:
        """Send each rank its message and wait for the replies of all."""
        sequence = self.next_sequence()
        self._unsettled = list(messages)
        try:
            for rank, (extras, missing) in messages.items():
                self._send(self.links[rank], kind, sequence, value, extras, missing)
            replies = self._wait(set(messages), sequence, deadline, phase, what)
        except WorkerDied:
            self._unsettled = []
            raise
        except BaseException:
            if self._unsettled and not self.is_closed:
                self._settle()
            raise
        self._unsettled = []
        for rank, reply in replies.items():
            if reply.flags & IS_UNRECEIVED:
                self.links[rank].forget_sent()
        return replies

    def _send(
        self, link: Link, kind: Kind, sequence: int, value: int, extras: Extras | None, missing: list[Segment]
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
            process.channel.ring(kind, 0, sequence, value)
            return
        body = pickle.dumps(extras, protocol=5)
        self.counters["bytes_down"] += len(body)
        with deferred():  # what the rank holds and what is noted must not differ
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is found in the wait
                process.channel.send_body(sequence, body, [segment.fd for segment in missing])
            process.channel.ring(kind, HAS_BODY, sequence, value)
            link.note_sent(extras, missing)

    def _wait(
        self,
        pending: set[int],
        sequence: int | None,
        deadline: float | None,
        phase: str,
        what: str = "",
        replies: dict[int, Reply] | None = None,
    ) -> dict[int, Reply]:
        """Collect one reply from each pending rank; a death or the deadline ends the wait with an error.

        Replies are taken before deaths: a worker that answered and then died has answered.
        """
        replies = {} if replies is None else replies
        dead: list[int] = []
        if self.is_inline:
            process = self.links[0].process
            assert isinstance(process, InlineProcess)
            self.counters["messages_up"] += 1
            self.counters["bytes_up"] += 8
            return {0: process.reply()}
        report_at = time.monotonic() + self._stuck_after_s
        while pending:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                self._on_timeout(pending, phase, what)
            if now >= report_at:
                report_at = math.inf
                _logger.warning("%s has run for more than %g s:\n%s", what or phase, self._stuck_after_s, self.where())
            next_event = report_at if deadline is None else min(report_at, deadline)
            timeout_ms = None if next_event == math.inf else math.ceil((next_event - now) * 1000)
            # What a function printed lies in its pipe before the doorbell rings, so one poll reports both, and the
            # lines are shown before the call returns.
            for fd, _ in self._poll.poll(timeout_ms):
                kind, rank = self._fds.get(fd, ("", -1))
                if kind == "up" and phase == "start":
                    with deferred():  # a hello comes once
                        self._take_reply(rank, sequence, pending, replies)
                elif kind == "up":
                    self._take_reply(rank, sequence, pending, replies)
                elif kind == "death":
                    dead.append(rank)
                elif kind == "output":
                    self._forward(self.links[rank], fd)
                elif kind == "wake":
                    self._on_wake(fd)
            if dead:
                self._on_deaths(dead, pending, replies, sequence, phase, what)
                dead = []
        return replies

    def _take_reply(self, rank: int, sequence: int | None, pending: set[int], replies: dict[int, Reply]) -> None:
        reply = self._read_reply(self.links[rank], sequence)
        if reply is not None and rank in pending:
            replies[rank] = reply
            pending.discard(rank)

    def _on_wake(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(fd)
        if self.is_exiting:
            raise SystemExit  # ends a daemon thread without a word: the program is over
        if self.is_closing:
            raise ClosedError("the call was ended: the runtime is being closed by another thread.")

    def _read_reply(self, link: Link, sequence: int | None) -> Reply | None:
        """Read one doorbell and its body; None for the answer to an earlier message."""
        process = link.process
        assert isinstance(process, WorkerProcess)
        message = process.channel.answer()
        if message is None:
            self._unwatch(process.channel.read_fd)  # its end is closed; the pidfd tells of the death
            return None
        status, flags, got_sequence, _ = message
        self.counters["messages_up"] += 1
        self.counters["bytes_up"] += 8
        if sequence is not None and got_sequence != sequence:
            return None
        if status == Status.DONE and not flags & HAS_BODY:
            return ASSEMBLED if flags & IS_ASSEMBLED else DONE
        body = b""
        if flags & HAS_BODY:
            try:
                with deferred():  # descriptors have no owner until they are closed
                    body, fds = process.channel.receive_body(got_sequence)
                    for fd in fds:
                        os.close(fd)
            except (ProtocolError, EOFError, ConnectionResetError):
                process.kill()  # what it sends is not what our worker sends
                return None
            self.counters["bytes_up"] += len(body)
        return Reply(Status(status), flags, body)

    # -- faults -------------------------------------------------------------------------------------------------------

    def _on_deaths(
        self,
        dead: list[int],
        pending: set[int],
        replies: dict[int, Reply],
        sequence: int | None,
        phase: str,
        what: str,
    ) -> None:
        """Take late replies of dead ranks; raise WorkerDied if one of them still owed a reply."""
        for rank in dead:
            link = self.links[rank]
            process = link.process
            assert isinstance(process, WorkerProcess)
            os.set_blocking(process.channel.read_fd, False)
            while rank in pending:
                try:
                    reply = self._read_reply(link, sequence)
                except BlockingIOError:
                    break
                if reply is not None:
                    replies[rank] = reply
                    pending.discard(rank)
                elif process.channel.read_fd not in self._fds:
                    break
        owing = [rank for rank in dead if rank in pending]
        for rank in dead:
            how = self._bury(self.links[rank])
            if rank not in owing:
                self._unreported_deaths[rank] = how
        if not owing:
            return
        fallen = sorted(owing)
        if phase != "start":  # a worker that is still coming up cannot be interrupted; the teardown ends it
            survivors = pending - set(owing)
            self._end_calls(survivors, kill_at=time.monotonic() + GRACE_S)
            fallen = sorted(set(owing) | {rank for rank in survivors if self.links[rank].is_dead})
        error = self._worker_died(fallen, phase, what)
        self.cause = copy.copy(error)  # without the traceback that will hold the caller's frames
        raise error

    def _on_timeout(self, pending: set[int], phase: str, what: str) -> None:
        ranks = f"rank {', '.join(map(str, sorted(pending)))} of {self.world_size}"
        if phase == "start":
            raise CallTimeout(
                f"the workers were not up in time: {ranks} is still starting. Raise timeout=, or call again."
            )
        self._settle()
        raise CallTimeout(
            f"{what or phase} did not end in time on {ranks}. Raise timeout=, or give the function less to do."
        )

    def _end_calls(self, ranks: Iterable[int], kill_at: float) -> None:
        """Have ``ranks`` give up what they run: SIGINT, then a ping whose answer proves them idle, then SIGKILL."""
        ranks = [rank for rank in ranks if not self.links[rank].is_dead]
        if not ranks:
            return
        running = self.sequence
        self._on_trouble()
        for rank in ranks:
            self.down[rank, Down.INTERRUPT] = running
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
                    reply = self._read_reply(self.links[rank], ping)
                    if reply is not None:
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
        """After an exception in the middle of an exchange: every rank idle again, or dead."""
        ranks = list(self._unsettled)
        if self.is_inline:
            self._unsettled = []
            return
        kill_at = [time.monotonic() + GRACE_S]
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
            self._unsettled = []
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
        if self.is_closed or self.is_inline or self._unsettled:
            return
        sequence = self.next_sequence()
        waiting = set()
        for link in self.links:
            if link.is_ready and not link.is_dead and isinstance(link.process, WorkerProcess):
                link.process.channel.ring(Kind.CLOSE, 0, sequence, 0)
                waiting.add(link.rank)
        deadline = time.monotonic() + GRACE_S
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for fd, _ in self._poll.poll(math.ceil(remaining * 1000)):
                kind, rank = self._fds.get(fd, ("", -1))
                if kind == "death":
                    self._bury(self.links[rank])
                    waiting.discard(rank)
                elif kind == "output":
                    self._forward(self.links[rank], fd)
                elif kind == "up":
                    self._read_reply(self.links[rank], sequence)  # the bye; the death follows
                elif kind == "wake":
                    os.eventfd_read(fd)


def own_versions() -> dict[str, str]:
    """Versions that master and workers must share."""
    import platform

    import synk

    return {"python": platform.python_version(), "numpy": np.__version__, "synk": synk.__version__}
