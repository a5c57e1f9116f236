"""The workers of one runtime: sends messages to some or all of them, waits for their replies, and starts them.

This file knows nothing of functions, plans and arrays. ``Known.pack`` adds to a message what its rank has yet to learn.
The wait notices what goes wrong, and ``recovery`` handles it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from synk._master.processes.log import Known, Packed, Sources
from synk._master.processes.placement import Placement
from synk._master.processes.process import Process
from synk._master.processes.processes import Processes, WorkerState
from synk._master.workers.doorbells import Doorbells
from synk._master.workers.failures import raise_failures
from synk._master.workers.recovery import Recovery
from synk._master.workers.requests import AnyOf, Request, Requests
from synk._master.workers.starting import Starting
from synk._master.workers.waiting import Waiting
from synk._pure.environment import spin_s
from synk._wire.channel import MAX_FDS, Patience
from synk._wire.memory import Segment
from synk._wire.messages import IS_ALONE, LANE_SHIFT, Body, Kind, Reply
from synk._wire.settings import Reader

AWAKE_S = 200e-6
"""How long the master waits awake for replies that are doorbells."""


class Workers:
    """The workers of one runtime.

    Parameters
    ----------
    placement : Placement
    process_type : callable
        ``process_type(rank)`` makes what plays a rank, not started yet: a process, or an object in this one.
    seed : int
        The seed of random numbers.
    max_restarts : int
    counters : dict of str to int
    token : bytes
    on_trouble, on_idle : callable
        See :class:`Recovery`.

    Attributes
    ----------
    processes, requests, recovery, waiting, starting
        The parts: who the workers are, what they were sent, what happens after trouble, the wait for replies, and the
        start.
    by_rank : list of WorkerState
    total_ranks : int
        The ranks of all nodes.
    has_shared_memory : bool
        Whether the workers can map this process's memory. Agents get everything in messages.
    log : Log
        What all workers must know. Messages carry its new entries.
    sources : dict of str to callable
        For each kind of thing in the log, the function that says what ranks are told about it.
    began : float
        When the current operation began.
    settings : Reader
        Reads the program's settings, which travel with messages.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        process_type: type[Process],
        seed: int,
        max_restarts: int,
        counters: dict[str, int],
        token: bytes,
        on_trouble: Callable[[], None],
        on_idle: Callable[[], None],
    ) -> None:
        self.is_inline = process_type.is_inline
        self.world_size = len(placement.devices)
        self.total_ranks = placement.total_ranks
        self.has_shared_memory = placement.has_shared_memory
        self.counters = counters
        self.began = 0.0
        self.settings = Reader()
        self.patience = Patience(min(spin_s(), AWAKE_S))
        self.processes = Processes(placement, process_type=process_type, seed=seed, token=token)
        self.by_rank = self.processes.by_rank
        self.log = self.processes.log
        self.sources: Sources = {"settings": lambda rank, number: (self.log.settings, [])}
        self.requests = Requests(self.processes, counters)
        self.recovery = Recovery(
            self.processes, self.requests,
            max_restarts=max_restarts, counters=counters, on_trouble=on_trouble, on_idle=on_idle,
        )  # fmt: skip
        self.waiting = Waiting(self.processes, self.requests, self.recovery)
        self.starting = Starting(self.processes, self.requests, self.recovery, self.waiting.until)

    # -- between messages ---------------------------------------------------------------------------------------------

    def prepare(self, deadline: float | None) -> None:
        """Bring the workers to a known state: settle what an interrupt left, note deaths, replace the dead.

        Raises
        ------
        ClosedError
            If workers died too often.
        StartupError
        """
        processes, recovery = self.processes, self.recovery
        recovery.settle()  # Before the search for deaths: the dead are those that would not answer.
        events = processes.wait(0)
        for rank, _ in events.printed:
            self.by_rank[rank].process.note_backlog()
        # A worker that has died while it was starting is left to the wait for its hello, which says so.
        recovery.bury_idle([rank for rank in events.deaths if self.by_rank[rank].is_ready])
        if events.is_woken:
            self.waiting.on_wake()
        if processes.has_dead:  # these, and workers whose death an earlier call reported
            recovery.restart_dead()
        for worker in self.by_rank:
            if not worker.is_ready:
                self.starting.await_ready(deadline)
                break
        recovery.tell_news()  # after the start: the warning may be turned into an error, which ends the operation
        self.began = time.monotonic()

    def replace(self, deadline: float | None) -> None:
        """End all workers, which must be idle, and start others in their place."""
        self.recovery.replace_all()
        self.starting.await_ready(deadline)

    # -- sending ------------------------------------------------------------------------------------------------------

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
            After any of these the living workers are idle, and all requests are lost.
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
        request: Request | None = None,
    ) -> Request:
        """Send one message to each of ``ranks``. :meth:`wait` returns the replies.

        Several requests may be in flight, to the same ranks or to others, and they may be awaited in any order.

        Parameters
        ----------
        contents : dict
            The body of the message, for ranks that need one.
        segments : iterable of Segment
            What the message refers to. A rank that lacks one gets it with the message.
        deadline : float or None
            Monotonic time at which the wait ends with ``CallTimeout``.
        phase, what : str
            For errors.
        lane : int
            The lane of the call that the message belongs to.
        request : Request, optional
            The request to use for the message. By default a new one is made.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
            As for :meth:`ask`.
        """
        fallen = [rank for rank in ranks if self.by_rank[rank].is_dead]
        if fallen:  # it answered an earlier message of this operation and then died
            raise self.recovery.died(fallen, phase, what, self.began)
        messages = self._fitting(ranks, contents, list(segments), deadline, phase, what)
        return self._send_all(kind, value, messages, lane, request or Request(0, ranks, deadline, phase, what))

    def _fitting(
        self,
        ranks: Sequence[int],
        contents: dict[int, Any],
        segments: Sequence[Segment],
        deadline: float | None,
        phase: str,
        what: str,
    ) -> dict[int, Packed]:
        """Pack the messages. Descriptors that do not fit into one are sent ahead, in messages of their own."""
        messages = self._packed(ranks, contents, segments)
        # No rank gets the message before all ranks have room for its descriptors: an early answer would be discarded.
        while any(len(each.segments) > MAX_FDS for each in messages.values()):
            own = {
                rank: [segment for segment in each.segments if segment.arena is None] for rank, each in messages.items()
            }
            supplies = {
                rank: Packed(Body(segments=Known.describe(part[:MAX_FDS])), part[:MAX_FDS], 0)
                for rank, part in own.items()
                if len(part) > MAX_FDS
            }
            if not supplies:
                break
            request = Request(0, supplies, deadline, phase, what)
            replies = self.wait(self._send_all(Kind.SUPPLY, 0, supplies, 0, request))
            raise_failures(replies, self.world_size, phase)
            messages = self._packed(ranks, contents, segments)
        return messages

    def _packed(self, ranks: Sequence[int], contents: dict[int, Any], segments: Sequence[Segment]) -> dict[int, Packed]:
        if not self.is_inline:  # an inline rank shares the settings of this thread
            values = self.settings.read()  # reading may find new names
            self.log.set_settings(self.settings.names, values)
        self.log.fold()
        return {rank: self.by_rank[rank].known.pack(contents.get(rank), segments, self.sources) for rank in ranks}

    def _send_all(self, kind: Kind, value: int, messages: dict[int, Packed], lane: int, request: Request) -> Request:
        """Send each rank its message."""
        requests = self.requests
        sequence = request.sequence = requests.next_sequence()
        flags = lane << LANE_SHIFT | (0 if requests else IS_ALONE)
        if kind in (Kind.CALL, Kind.ITEMS) and requests:  # a submitted call or a chunk joins others in flight
            self.began = time.monotonic()
        # Register the request before the first rank gets the message. If the sending is broken off, all ranks count as
        # having it.
        request.began = self.began
        requests[sequence] = request
        try:
            for rank, packed in messages.items():
                self._send_one(self.by_rank[rank], kind, flags, sequence, value, packed)
        except BaseException as error:
            self.recovery.settle_after(error)
            raise
        return request

    def _send_one(self, worker: WorkerState, kind: Kind, flags: int, sequence: int, value: int, packed: Packed) -> None:
        counters, (body, segments, read) = self.counters, packed
        counters["messages_down"] += 1
        if body is None:
            worker.process.channel.ring(kind, flags, sequence, value)
            return
        counters["bytes_down"] += worker.process.deliver(
            kind, flags, sequence, value, body, segments, lambda: worker.known.note_sent(sequence, body, read)
        )

    def prefetch(self, ranks: Sequence[int], plan_id: int, lane: int) -> None:
        """Have ranks bring the inputs of a call to their devices. The call follows once no other is in flight."""
        for rank in ranks:
            if plan_id in self.by_rank[rank].known.held["plan"]:
                self.counters["messages_down"] += 1
                # No request is registered: the rank does not answer, and 0 is no message's number.
                self.by_rank[rank].process.channel.ring(Kind.PREFETCH, lane << LANE_SHIFT, 0, plan_id)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def doorbells(self, ranks: Sequence[int]) -> Doorbells:
        """Return how to ring and hear some ranks while the state of the log stays the same."""
        channels = {rank: self.by_rank[rank].process.channel for rank in ranks}
        poll = self.processes.poll_set.poll
        return Doorbells(poll, channels, self.requests, self.patience, self.recovery, self.counters)

    def wait(self, request: Request) -> dict[int, Reply]:
        """Wait for the replies of all ranks and return them.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
            As for :meth:`ask`. ``CallTimeout`` may also come from another request, which then keeps it as its
            ``error``.
        """
        if request.pending:
            self.wait_until(request, None)
        # No rank owes it a reply. If an interrupt comes from here on, the next operation removes it.
        self.requests.pop(request.sequence, None)
        return request.replies

    def wait_any(self, requests: Sequence[Request], until: float | None) -> None:
        """Wait until one of ``requests`` is answered by all its ranks, at most until the monotonic time ``until``.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
            As for :meth:`wait`.
        """
        self.wait_until(requests[0] if len(requests) == 1 else AnyOf(requests), until)

    def wait_until(self, request: Request, until: float | None) -> bool:
        """Wait until no rank owes ``request`` a reply, at most until the monotonic time ``until``. Return whether all
        came.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
            As for :meth:`wait`.
        """
        try:
            return self.waiting.until(request, until)
        except BaseException as error:
            self.recovery.settle_after(error)
            raise

    def pump(self) -> None:
        """Take in the workers' answers without waiting. A death or a time limit ends all requests.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
        """
        try:
            while self.waiting.take_events(0):
                pass
            for request in list(self.requests.values()):
                if request.pending and request.deadline is not None and time.monotonic() >= request.deadline:
                    self.recovery.on_timeout(request)
        except BaseException as error:
            self.recovery.settle_after(error)
            raise
