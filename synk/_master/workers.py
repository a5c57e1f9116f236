"""The workers as a group: one message to each and its reply, deaths, time limits, interrupts, new starts, goodbye.

Knows nothing of functions, plans and arrays; what a message brings beside its content it asks of ``pack``.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
import platform
import select
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from synk._master.failures import raise_failures
from synk._master.known import WorkerState
from synk._master.output import report
from synk._master.process import WorkerProcess
from synk._master.recovery import Crew, stderr_tails
from synk._pure.environment import spin_s, stuck_after_s
from synk._pure.interrupts import deferred, plain_interrupts
from synk._pure.limits import poll_ms
from synk._version import __version__
from synk._wire.channel import MAX_FDS, Channel, Patience, ProtocolError
from synk._wire.control import Down, interrupt_word
from synk._wire.memory import Segment
from synk._wire.messages import (
    ASSEMBLED,
    DONE,
    HAS_BODY,
    IS_ALONE,
    IS_ASSEMBLED,
    IS_UNRECEIVED,
    LANE_SHIFT,
    Body,
    Kind,
    Reply,
    Status,
)
from synk.errors import CallTimeout, ClosedError, SerializationError, StartupError, WorkerDied

GRACE_S = 2.0
"""How long a worker may take to answer an interrupt before it is killed."""

NCCL_GRACE_S = 5.0
"""Likewise with NCCL: aborting it can take seconds, and a process that is killed loses its device's values."""

AWAKE_S = 200e-6
"""How long the master waits awake for the replies to a quiet call."""

RESTART_WINDOW_S = 60.0
START_TIMEOUT_S = 120.0

Pack = Callable[[WorkerState, Any, Sequence[Segment], int], tuple["Body | None", list[Segment]]]
Packed = dict[int, tuple["Body | None", list[Segment]]]
"""By rank: the body of its message, and the segments that it brings: their descriptors ride along, if they have one."""

_HELLO = 0  # the sequence number of a worker's first word; messages count from 1


class Request:
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


class Workers(Crew):
    """The workers of one runtime.

    Parameters
    ----------
    placement : Placement
    is_inline : bool
    max_restarts : int
    counters : dict of str to int
    token : bytes
    pack : callable
        ``pack(worker, content, segments, lane)`` returns the body of a message for a rank (None if it needs none) and
        the segments that it brings.
    on_idle : callable
        Called when workers were made idle after a failure, before anything else is sent.

    Attributes
    ----------
    requests : dict of int to Request
        Messages that were not answered by all, by sequence number, oldest first.
    restarted : list of int
        Ranks that were started anew; whoever has seen to them takes them out.
    cause : BaseException or None
        The fault that closed the runtime.
    grace_s : float
        How long a worker may take to answer an interrupt before it is killed.
    """

    def __init__(
        self,
        placement: Any,
        *,
        process_type: type,
        max_restarts: int,
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
        self._pack = pack
        self._on_trouble = on_trouble
        self._on_idle = on_idle
        self.requests: dict[int, Request] = {}
        self._hellos: dict[int, Reply] = {}  # kept here: an interrupt in the wait must not lose one
        self._restarts: deque[float] = deque()
        self._last_death: WorkerDied | None = None  # of the workers that are dead now
        self.began = 0.0  # when the operation under way began
        self._once_stuck: set[int] = set()  # ranks whose process was started because another had not come up
        self._news: list[str] = []  # of workers that were started again, to tell the user when they are up
        self._stuck_after_s = stuck_after_s()
        self.patience = Patience(min(spin_s(), AWAKE_S))
        self._kill_at = 0.0  # when workers that are to be idle and do not answer are killed
        self.num_cancels = -1  # what num_cancels() was when the operation began
        super().__init__(placement, process_type=process_type, token=token)

    # -- starting -----------------------------------------------------------------------------------------------------

    def await_ready(self, deadline: float | None = None) -> None:
        """Wait until every started worker has said hello; one that is stuck as it starts is killed and started again.

        Raises
        ------
        StartupError
            Naming the ranks that did not, with the end of their stderr. The runtime is closed then.
        WorkerDied
            If one died that was started in the place of another.
        CallTimeout
            If they had not at ``deadline``; they go on starting.
        """
        while waiting := [worker for worker in self.by_rank if not worker.is_ready]:
            # From the start of the process on: calls that give up sooner must not put it off.
            silent = [worker.process.started for worker in waiting if worker.rank not in self._hellos]
            limit = min(silent, default=math.inf) + START_TIMEOUT_S
            try:
                self._await_hellos(waiting, limit if deadline is None else min(deadline, limit))
            except CallTimeout:
                if time.monotonic() < limit:
                    raise
                self._replace_stuck()

    def _await_hellos(self, waiting: Sequence[WorkerState], deadline: float) -> None:
        ranks = {worker.rank for worker in waiting}
        try:
            hello = Request(_HELLO, ranks - self._hellos.keys(), deadline, "start", "")
            hello.replies = self._hellos
            self.requests[_HELLO] = hello
            try:
                with plain_interrupts(self.num_cancels) if self.num_cancels >= 0 else contextlib.nullcontext():
                    self._await(hello)
            finally:
                self.requests.pop(_HELLO, None)
            for worker in waiting:
                self._greet(worker, self._hellos[worker.rank])
        except (WorkerDied, ProtocolError, SerializationError) as error:
            if isinstance(error, WorkerDied) and self._restarts:
                raise  # a replacement: one more death, and the next operation starts another
            died = getattr(error, "ranks", ()) or tuple(sorted(ranks))
            self._fail_to_start(died, f"did not come up. {error}", error)
        except StartupError as error:
            self.fail(error)
            raise

    def _fail_to_start(self, ranks: Iterable[int], what_happened: str, error: BaseException | None) -> NoReturn:
        named = f"rank {', '.join(map(str, ranks))} of {self.world_size}"
        failure = StartupError(f"cannot start the workers: {named} {what_happened}")
        self.fail(failure)
        raise failure from error

    def _replace_stuck(self) -> None:
        """Kill the workers whose time to start is over, and start others; a second one that is stuck is the last."""
        latest = time.monotonic() - START_TIMEOUT_S
        stuck = [worker for worker in self.by_rank if not worker.is_ready and worker.process.started <= latest]
        stuck = [worker for worker in stuck if worker.rank not in self._hellos]
        for worker in stuck:
            worker.process.kill()
            self._bury(worker)
            self._unreported_deaths[worker.rank] = f"was not up {START_TIMEOUT_S:g} s after its start, was killed,"
        ranks = {worker.rank for worker in stuck}
        if self.max_restarts == 0 or ranks & self._once_stuck:
            tails = "\n".join(["", *stderr_tails(stuck, 0.0)])
            self._fail_to_start(sorted(ranks), f"was not up {START_TIMEOUT_S:g} s after its start.{tails}", None)
        self._once_stuck |= ranks
        self._restart_dead()

    def _greet(self, worker: WorkerState, reply: Reply) -> None:
        hello = pickle.loads(reply.body)
        mine = own_versions()
        if hello["versions"] != mine:
            differing = [f"{k} {v} (master: {mine[k]})" for k, v in hello["versions"].items() if v != mine[k]]
            raise StartupError(f"cannot use worker rank {worker.rank}: it runs {', '.join(differing)}.")
        worker.description = hello["device"]
        worker.is_ready = True
        self._once_stuck.discard(worker.rank)

    # -- between messages ---------------------------------------------------------------------------------------------

    def prepare(self, deadline: float | None = None) -> None:
        """Bring the workers to a known state: settle what an interrupt left, note deaths, start the dead again.

        Raises
        ------
        ClosedError
            If workers died too often.
        StartupError
        """
        if self.requests:
            self._settle(is_interrupted=False)
            self.requests.clear()
        if not self.is_inline:
            self._drain_events()
        for worker in self.by_rank:
            if worker.is_dead:
                self._restart_dead()
                break
        for worker in self.by_rank:
            if not worker.is_ready:
                self.await_ready(deadline)
                break
        if self._news:
            news, self._news = self._news, []
            warnings.warn(
                f"{'; '.join(news)} and was started again. What functions kept there, in closures or globals, is gone.",
                RuntimeWarning,
                stacklevel=5,
            )
        self.began = time.monotonic()

    def _drain_events(self) -> None:
        """Handle what happened while nobody waited: deaths, and lines printed by threads of workers."""
        for fd, _ in self._poll.poll(0):
            kind, rank = self._fds.get(fd, ("", -1))
            worker = self.by_rank[rank]
            if kind == "death":
                self._unreported_deaths[rank] = f"ended with {self._bury(worker)} while idle"
            elif kind == "output":
                self._forward(worker, fd)
                worker.process.note_backlog()
            elif kind == "wake":
                self._on_wake(fd)

    def _restart_dead(self) -> None:
        """Start dead ranks again; they get functions with the next load, segments and plans with the next call."""
        dead = [worker for worker in self.by_rank if worker.is_dead]
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        news = [
            f"rank {rank} (pid {self.by_rank[rank].process.pid}) {what_happened}"
            for rank, what_happened in sorted(self._unreported_deaths.items())
        ]
        self._unreported_deaths.clear()
        if len(self._restarts) >= self.max_restarts:
            ended = ", ".join(f"rank {worker.rank} ({worker.process.exit_text})" for worker in dead)
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
        lasting = [point for point in self._failpoints if point[2] == 0]
        with deferred():
            for worker in workers:
                self.counters["restarts"] += 1
                self._hellos.pop(worker.rank, None)
                self._start(worker, lasting)
                worker.is_prepared = False
                self.restarted.append(worker.rank)

    def replace(self, deadline: float | None) -> None:
        """End all workers, which are idle, and start others in their place."""
        self.say_goodbye()
        for worker in self.by_rank:
            if isinstance(worker.process, WorkerProcess):
                if not worker.is_dead:
                    worker.process.kill()
                    self._bury(worker)
            else:
                worker.process.close()
                worker.restart(self._new_process(worker.rank))
        self._unreported_deaths.clear()
        self._start_again(self.by_rank)
        self.await_ready(deadline)

    # -- sending and waiting ------------------------------------------------------------------------------------------

    def doorbells(self, ranks: Sequence[int]) -> tuple[select.poll, list[Channel], dict[int, tuple[int, Channel]]]:
        """Return the poll set, the channels of ranks, and the rank and its channel by the descriptor of its replies.

        Good until the epoch ends. No descriptor is held: a channel closes its own, whoever refers to it.
        """
        channels = [self.by_rank[rank].process.channel for rank in ranks]
        return self._poll, channels, {int(each.read_fd): (rank, each) for rank, each in zip(ranks, channels)}

    def next_sequence(self) -> int:
        self.sequence = self.sequence % 0xFFFF + 1
        return self.sequence

    def ask(
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
            The workers that are alive then are idle again, and all requests are lost.
        """
        return self.wait(self.send(kind, ranks, value, contents, segments, deadline, phase, what, lane))

    def send(
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
    ) -> Request:
        """Send one message to each of ``ranks``; :meth:`wait` returns the replies.

        Parameters
        ----------
        contents : dict
            Body of the message for the ranks that need one.
        segments : iterable of Segment
            What the message refers to; ranks that do not hold one yet get it with the message.
        deadline : float or None
            Monotonic time at which the wait ends with ``CallTimeout``.
        phase, what : str
            For errors.
        lane : int
            That of the call which the message belongs to.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
            As :meth:`ask`.
        """
        fallen = [rank for rank in ranks if self.by_rank[rank].is_dead]
        if fallen:  # it answered an earlier message of this operation and died then
            for rank in fallen:
                self._unreported_deaths.pop(rank, None)
            raise self._worker_died(fallen, phase, what, self.began)
        messages = self._fitting(ranks, contents, list(segments), lane, deadline, phase, what)
        return self._send_all(kind, value, messages, lane, deadline, phase, what)

    def _fitting(
        self,
        ranks: Sequence[int],
        contents: dict[int, Any],
        segments: Sequence[Segment],
        lane: int,
        deadline: float | None,
        phase: str,
        what: str,
    ) -> Packed:
        """Pack the messages; descriptors for which one has no room go ahead, in messages of their own."""
        messages = self._packed(ranks, contents, segments, lane)
        # No rank gets the message before all have room for its descriptors: what it answers would be taken for nothing.
        while not self.is_inline and any(len(part) > MAX_FDS for _, part in messages.values()):
            own = {rank: [each for each in part if each.arena is None] for rank, (_, part) in messages.items()}
            surplus = {rank: part[:MAX_FDS] for rank, part in own.items() if len(part) > MAX_FDS}
            if not surplus:
                break
            supplies: Packed = {
                rank: (Body(segments=WorkerState.describe(part)), part) for rank, part in surplus.items()
            }
            replies = self.wait(self._send_all(Kind.SUPPLY, 0, supplies, 0, deadline, phase, what))
            raise_failures(replies, self.world_size, phase)
            messages = self._packed(ranks, contents, segments, lane)
        return messages

    def _packed(self, ranks: Sequence[int], contents: dict[int, Any], segments: Sequence[Segment], lane: int) -> Packed:
        return {rank: self._pack(self.by_rank[rank], contents.get(rank), segments, lane) for rank in ranks}

    def prefetch(self, ranks: Sequence[int], plan_id: int, lane: int) -> None:
        """Have ranks bring the inputs of a call to their devices, which follows when those under way have ended."""
        for rank in ranks:
            process = self.by_rank[rank].process
            if isinstance(process, WorkerProcess) and plan_id in self.by_rank[rank].plans:
                self.counters["messages_down"] += 1
                self.counters["bytes_down"] += 8
                process.channel.ring(Kind.PREFETCH, lane << LANE_SHIFT, 0, plan_id)

    def _send_all(
        self, kind: Kind, value: int, messages: Packed, lane: int, deadline: float | None, phase: str, what: str
    ) -> Request:
        """Send each rank its message."""
        sequence = self.next_sequence()
        flags = lane << LANE_SHIFT | (0 if self.requests else IS_ALONE)
        if kind == Kind.CALL and self.requests:  # it was submitted, and joins others
            self.began = time.monotonic()
        request = self.requests[sequence] = Request(sequence, messages, deadline, phase, what)
        request.began = self.began
        try:
            for rank, (body, missing) in messages.items():
                self._send_one(self.by_rank[rank], kind, flags, sequence, value, body, missing)
        except BaseException as error:
            self.settle_after(error)
            raise
        return request

    def wait(self, request: Request) -> dict[int, Reply]:
        """Wait for the replies of all ranks and return them.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
            As :meth:`ask`; ``CallTimeout`` also for another request, whose ``error`` it is then.
        """
        if request.pending:
            self.wait_until(request, None)
        replies = request.replies
        for rank, reply in replies.items():
            if reply.flags & IS_UNRECEIVED:
                self.by_rank[rank].forget_sent()
        self.requests.pop(request.sequence, None)
        return replies

    def wait_until(self, request: Request, until: float | None) -> bool:
        """Wait until no rank owes ``request`` a reply, at most until the monotonic time given; return whether it is so.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
            As :meth:`wait`.
        """
        try:
            if self.num_cancels < 0:
                return self._await(request, until)
            with plain_interrupts(self.num_cancels):
                return self._await(request, until)
        except BaseException as error:
            self.settle_after(error)
            raise

    def pump(self) -> None:
        """Take in, without waiting, what workers have answered; a death or a time limit ends all requests.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
        """
        try:
            while self._take_events(0):
                pass
            for request in list(self.requests.values()):
                if request.pending and request.deadline is not None and time.monotonic() >= request.deadline:
                    self._on_timeout(request)
        except BaseException as error:
            self.settle_after(error)
            raise

    def settle_after(self, error: BaseException) -> None:
        """Make the workers that still owe a reply idle, after an error in the middle of a message."""
        if self._debtors() and not self.is_closed:
            self._settle(is_interrupted=isinstance(error, KeyboardInterrupt))

    def _send_one(
        self,
        worker: WorkerState,
        kind: Kind,
        flags: int,
        sequence: int,
        value: int,
        body: Body | None,
        missing: list[Segment],
    ) -> None:
        process = worker.process
        self.counters["messages_down"] += 1
        self.counters["bytes_down"] += 8
        if self.is_inline:
            for segment in missing:
                process.give(segment)
            worker.note_sent(body, missing)
            process.handle(kind, sequence, value, body)
            return
        if body is None:
            process.channel.ring(kind, flags, sequence, value)
            return
        data = pickle.dumps(body, protocol=5)
        self.counters["bytes_down"] += len(data)
        with deferred():  # what the rank holds and what is noted must not differ
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is found in the wait
                process.channel.send_body(sequence, data, [each.fd for each in missing if each.arena is None])
            process.channel.ring(kind, HAS_BODY | flags, sequence, value)
            worker.note_sent(body, missing)

    def _await(self, request: Request, until: float | None = None) -> bool:
        """Wait until no rank owes ``request`` a reply, or until ``until``; return whether it is so.

        A death, or the time limit of any request, ends the wait with an error.
        """
        if self.is_inline:
            process = self.by_rank[0].process
            self.counters["messages_up"] += 1
            self.counters["bytes_up"] += 8
            request.replies[0] = process.reply()
            request.pending.clear()
            return True
        report_at = time.monotonic() + self._stuck_after_s
        while request.pending:
            now = time.monotonic()
            if now >= report_at:
                report_at = math.inf
                what = request.what or request.phase
                report("%s has run for more than %g s:\n%s", what, self._stuck_after_s, self.where())
            urgent = request if len(self.requests) == 1 else self._most_urgent(request)
            next_event = report_at if urgent.deadline is None else min(report_at, urgent.deadline)
            if until is not None:
                next_event = min(next_event, until)
            timeout_ms = None if next_event == math.inf else poll_ms(next_event - now)
            if self._take_events(timeout_ms):
                continue  # what came in time but was not looked at before the deadline still counts
            if urgent.deadline is not None and now >= urgent.deadline:
                self._on_timeout(urgent)
            if until is not None and now >= until:
                return False
        return True

    def _most_urgent(self, request: Request) -> Request:
        """Return the request whose time limit comes first; ``request`` if none has one."""
        limited = [each for each in self.requests.values() if each.pending and each.deadline is not None]
        return min(limited, key=lambda each: each.deadline or 0.0, default=request)

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
                if _HELLO in self.requests:
                    with deferred():  # a hello comes once
                        self._take_reply(rank)
                else:
                    self._take_reply(rank)
            elif kind == "death":
                dead.append(rank)
            elif kind == "output":
                self._forward(self.by_rank[rank], fd)
            elif kind == "wake":
                self._on_wake(fd)
        if dead:
            self._on_deaths(dead)
        return has_replies

    def _take_reply(self, rank: int) -> bool:
        """Read one doorbell and its body into its request; return False where there is none."""
        return self._note_reply(rank, self._read_reply(self.by_rank[rank]))

    def take_doorbell(self, rank: int, doorbell: bytes) -> bool:
        """Take a doorbell that was read, and its body, into its request; return whether that is all there is to it."""
        message = self._reply_of(self.by_rank[rank], Channel.understood(doorbell))
        return self._note_reply(rank, message) and message is not None and message[1].status == Status.DONE

    def _note_reply(self, rank: int, message: tuple[int, Reply] | None) -> bool:
        if message is None:
            return False
        sequence, reply = message
        request = self.requests.get(sequence)  # None: the answer to a message that was given up
        if request is not None and rank in request.pending:
            request.replies[rank] = reply
            request.pending.discard(rank)
        return True

    def _on_wake(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(fd)
        if self.is_exiting:
            raise SystemExit  # ends a daemon thread without a word: the program is over
        if self.is_closing:
            raise ClosedError("the call was ended: the runtime is being closed by another thread.")

    def _read_reply(self, worker: WorkerState) -> tuple[int, Reply] | None:
        """Read one doorbell and its body; return the number of the message that it answers, and the reply."""
        process = worker.process
        assert isinstance(process, WorkerProcess)
        return self._reply_of(worker, process.channel.answer())

    def _reply_of(self, worker: WorkerState, message: tuple[int, int, int, int] | None) -> tuple[int, Reply] | None:
        """Return what a doorbell stands for, with its body."""
        process = worker.process
        assert isinstance(process, WorkerProcess)
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
            process = self.by_rank[rank].process
            assert isinstance(process, WorkerProcess)
            os.set_blocking(process.channel.read_fd, False)
            with contextlib.suppress(BlockingIOError):
                while self._take_reply(rank):
                    pass
        owed = [request for request in self.requests.values() if not request.pending.isdisjoint(dead)]
        owing = [rank for rank in dead if any(rank in request.pending for request in owed)]
        for rank in dead:
            how = self._bury(self.by_rank[rank])
            if rank not in owing:
                self._unreported_deaths[rank] = f"ended with {how} while idle"
        if not owing:
            return
        request = owed[0]  # the oldest: what they were at
        fallen = set(owing)
        if request.phase != "start":  # a worker that is still coming up cannot be interrupted; the teardown ends it
            survivors = self._debtors() - fallen
            self._end_calls(survivors)
            fallen |= {rank for rank in survivors if self.by_rank[rank].is_dead}
        error = self._worker_died(sorted(fallen), request.phase, request.what, request.began)
        self._last_death = copy.copy(error)  # without the traceback that will hold the caller's frames
        raise error

    def _debtors(self) -> set[int]:
        """Return the ranks that owe a reply."""
        return {rank for request in self.requests.values() for rank in request.pending}

    def _on_timeout(self, request: Request) -> None:
        ranks = f"rank {', '.join(map(str, sorted(request.pending)))} of {self.world_size}"
        if request.phase == "start":
            raise CallTimeout(
                f"the workers were not up in time: {ranks} is still starting. Raise timeout=, or call again."
            )
        request.error = CallTimeout(
            f"{request.what or request.phase} did not end in time on {ranks}. "
            "Raise timeout=, or give the function less to do."
        )
        self._settle(is_interrupted=False)
        raise request.error

    def _end_calls(self, ranks: Iterable[int]) -> None:
        """End all requests, which only ``ranks`` still work on; those that were answered by all stay.

        They get SIGINT, then a ping whose answer proves them idle, then, when ``_kill_at`` has come, SIGKILL.
        """
        self._kill_at = time.monotonic() + self.grace_s
        ranks = [rank for rank in ranks if not self.by_rank[rank].is_dead]
        if ranks:
            self._interrupt(ranks)
        for request in self.requests.values():
            request.is_lost, request.is_cut = bool(request.pending), not request.pending
        self.requests = {sequence: request for sequence, request in self.requests.items() if not request.is_lost}

    def _interrupt(self, ranks: list[int]) -> None:
        interrupted = interrupt_word(next(iter(self.requests)), self.sequence)
        self.epoch.end()
        self._on_trouble()
        for rank in ranks:
            self.down[rank, Down.INTERRUPT] = interrupted
            process = self.by_rank[rank].process
            assert isinstance(process, WorkerProcess)
            process.signal(signal.SIGINT)
        ping = self.next_sequence()
        for rank in ranks:
            process = self.by_rank[rank].process
            assert isinstance(process, WorkerProcess)
            process.channel.ring(Kind.PING, 0, ping, 0)
        silent = set(ranks)
        while silent and time.monotonic() < self._kill_at:
            for fd, _ in self._poll.poll(poll_ms(self._kill_at - time.monotonic())):
                kind, rank = self._fds.get(fd, ("", -1))
                if kind == "up":
                    message = self._read_reply(self.by_rank[rank])
                    if message is not None and message[0] == ping:
                        silent.discard(rank)
                elif kind == "death":
                    self._bury(self.by_rank[rank])
                    silent.discard(rank)
                elif kind == "output":
                    self._forward(self.by_rank[rank], fd)
                elif kind == "wake":
                    os.eventfd_read(fd)
        for rank in silent:
            process = self.by_rank[rank].process
            assert isinstance(process, WorkerProcess)
            process.kill()
            self._bury(self.by_rank[rank])
        for rank in ranks:
            self.down[rank, Down.INTERRUPT] = -1
        self._on_idle()

    def _settle(self, *, is_interrupted: bool) -> None:
        """After an exception in the middle of a message: every rank idle again, or dead. All requests are lost.

        A Ctrl-C meanwhile ends the wait for workers that do not answer: they are killed. The second one, which the
        first is where ``is_interrupted`` (a Ctrl-C has brought us here), closes the runtime.
        """
        ranks = sorted(self._debtors())
        if self.is_inline:
            self.requests.clear()
            return
        num_interrupts = int(is_interrupted)

        def on_interrupt() -> None:
            nonlocal num_interrupts
            num_interrupts += 1
            self._kill_at = 0.0
            self._end_wait()

        with deferred(on_interrupt):
            self._end_calls(ranks)
            if num_interrupts > 1:
                self.fail(ClosedError("the runtime was closed by a second Ctrl-C while it ended a call."))

    def fail(self, error: BaseException) -> None:
        """Close at once, because of ``error``."""
        self.cause = self.cause or error
        self.tear_down()

    # -- ending -------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have a wait in another thread end with ``ClosedError``: the runtime is closing."""
        self.is_closing = True
        self.epoch.end()
        self._end_wait()

    def _end_wait(self) -> None:
        fd = self._wake_fd  # held: another thread may close the runtime meanwhile
        if fd >= 0:
            os.eventfd_write(fd, 1)

    def say_goodbye(self) -> None:
        """Ask idle workers to end; the teardown kills whoever does not."""
        if self.is_closed or self.is_inline or self._debtors():
            return
        sequence = self.next_sequence()
        waiting = set()
        for worker in self.by_rank:
            if worker.is_ready and not worker.is_dead and isinstance(worker.process, WorkerProcess):
                worker.process.channel.ring(Kind.CLOSE, 0, sequence, 0)
                waiting.add(worker.rank)
        deadline = time.monotonic() + self.grace_s
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for fd, _ in self._poll.poll(poll_ms(remaining)):
                kind, rank = self._fds.get(fd, ("", -1))
                if kind == "death":
                    self._bury(self.by_rank[rank])
                    waiting.discard(rank)
                elif kind == "output":
                    self._forward(self.by_rank[rank], fd)
                elif kind == "up":
                    self._read_reply(self.by_rank[rank])  # the bye; the death follows
                elif kind == "wake":
                    os.eventfd_read(fd)


def own_versions() -> dict[str, str]:
    """Versions that master and workers must share."""
    return {"python": platform.python_version(), "numpy": np.__version__, "synk": __version__}
