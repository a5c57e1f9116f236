"""The messages in flight: which ranks owe a reply to which message, and what came.

A request goes to any number of ranks. Several may be in flight, and their replies come in any order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence

from synk._master.processes.processes import Processes, WorkerState
from synk._wire.channel import Channel, ProtocolError
from synk._wire.messages import ASSEMBLED, DONE, HAS_BODY, IS_ASSEMBLED, IS_UNRECEIVED, Reply, Status
from synk.errors import CallTimeout

HELLO = 0
"""The sequence number of a worker's hello. Messages count from 1."""


class Request:
    """A message in flight: it was sent to some ranks, and not all of them may have answered.

    It is *answered* once ``pending`` is empty. After an error or an interrupt, one that was not answered is *lost*: it
    is registered no longer, and what ranks still send is dropped. One that was answered is *forgotten*: its replies
    are here, but no later message can refer to it.

    Attributes
    ----------
    pending : set of int
        Ranks that owe a reply.
    replies : dict of int to Reply
        By rank.
    deadline : float or None
        Monotonic time by which all ranks must have answered.
    phase, what : str
        For errors.
    is_lost : bool
        Whether it was given up, so that no more replies will come.
    is_forgotten : bool
        Whether all ranks answered, but the workers no longer remember the message.
    error : Exception or None
        The error that ended it, if its own time limit did.
    lost_to : BaseException or None
        The error that broke off taking in its answers.
    began : float
        Monotonic time at which its operation began.
    is_joint : bool
        Whether a rank must live until all have answered: it may take along what others still wait for.
    """

    is_lost = is_forgotten = is_joint = False
    began = 0.0
    error: Exception | None = None
    lost_to: BaseException | None = None

    def __init__(self, sequence: int, ranks: Iterable[int], deadline: float | None, phase: str, what: str) -> None:
        self.sequence = sequence
        self.pending = set(ranks)
        self.replies: dict[int, Reply] = {}
        self.deadline = deadline
        self.phase = phase
        self.what = what

    def concerns(self, rank: int) -> bool:
        """Whether the request is not over for a rank. One that has answered a joint request may say that it failed."""
        return rank in self.pending or (self.is_joint and bool(self.pending) and rank in self.replies)

    def take(self, rank: int, reply: Reply) -> None:
        """Note the reply of a rank."""
        self.replies[rank] = reply
        self.pending.discard(rank)

    def late(self, ranks: str) -> Exception:
        """Return the error of a request whose time is over, while ``ranks`` still owe a reply."""
        return CallTimeout(
            f"{self.what or self.phase} did not end in time on {ranks}. Raise timeout=, or give the function less to "
            "do."
        )


class AnyOf(Request):
    """Waits until any one of several requests is answered. It is not registered."""

    def __init__(self, requests: Sequence[Request]) -> None:
        first = requests[0]
        super().__init__(first.sequence, (), first.deadline, first.phase, first.what)
        self._requests = requests

    @property
    def pending(self) -> set[int]:
        """The ranks that owe an answer; empty as soon as one of the requests is answered."""
        if any(not request.pending for request in self._requests):
            return set()
        return set().union(*(request.pending for request in self._requests))

    @pending.setter
    def pending(self, ranks: set[int]) -> None:
        """Do nothing: the requests themselves know."""


class Requests(dict[int, Request]):
    """The requests of a runtime that are in flight, or answered but not collected, by sequence number, oldest first.

    Attributes
    ----------
    sequence : int
        The number of the last message.
    """

    def __init__(self, processes: Processes, counters: dict[str, int]) -> None:
        super().__init__()
        self._processes = processes
        self._counters = counters
        self.sequence = 0

    def next_sequence(self) -> int:
        self.sequence = self.sequence % 0xFFFF + 1
        return self.sequence

    def debtors(self) -> set[int]:
        """Return the ranks that owe a reply."""
        return {rank for request in self.values() for rank in request.pending}

    def most_urgent(self, request: Request) -> Request:
        """Return the request with the earliest deadline, or ``request`` if none has one."""
        limited = [each for each in self.values() if each.pending and each.deadline is not None]
        return min(limited, key=lambda each: each.deadline or 0.0, default=request)

    def lose(self, error: BaseException) -> None:
        """Mark every request that some rank did not answer as lost to ``error``. The ranks still work on them.

        What was read of an answer may be gone. This takes less of the stack than reading an answer does, so it works
        wherever one was read, even if ``error`` is a ``RecursionError``.
        """
        for request in self.values():
            if request.pending:
                request.is_lost, request.lost_to = True, error

    def give_up(self) -> None:
        """Lose every request that some rank did not answer. The others stay, but the workers forget them."""
        # Mark all of them before the first is removed: an interrupt may come between two lines.
        for request in list(self.values()):
            request.is_lost, request.is_forgotten = bool(request.pending), not request.pending
        for sequence in [sequence for sequence, request in self.items() if request.is_lost]:
            self.pop(sequence, None)

    # -- replies ------------------------------------------------------------------------------------------------------

    def take_replies(self, ranks: Iterable[int]) -> None:
        """Read one reply from each of ``ranks``, which have answered."""
        for rank in ranks:
            self.note(rank, self.read(self._processes.by_rank[rank]))

    def take_late_replies(self, rank: int) -> None:
        """Read all replies that a dead rank left in its pipe."""
        worker = self._processes.by_rank[rank]
        # Nothing here waits for the dead: reading an empty pipe fails at once, and a worker sends each body before its
        # doorbell, so the body of a doorbell is there.
        os.set_blocking(worker.process.channel.read_fd, False)
        with contextlib.suppress(BlockingIOError):
            while self.note(rank, self.read(worker)):
                pass

    def take_doorbell(self, rank: int, doorbell: bytes) -> bool:
        """Note the reply in a doorbell that was already read. Return whether it succeeded and needs nothing else."""
        message = self._understood(self._processes.by_rank[rank], Channel.understood(doorbell))
        return self.note(rank, message) and message is not None and message[1].status == Status.DONE

    def note(self, rank: int, message: tuple[int, Reply] | None) -> bool:
        """Note a reply in the request that it answers. Return False if there is no reply."""
        if message is None:
            return False
        sequence, reply = message
        request = self.get(sequence)  # None: the reply belongs to a message that was given up
        if sequence == HELLO:
            self._processes.by_rank[rank].hello = reply
        if request is not None and request.concerns(rank):
            request.take(rank, reply)
        return True

    def read(self, worker: WorkerState) -> tuple[int, Reply] | None:
        """Read one doorbell and its body. Return the number of the message that it answers, and the reply."""
        return self._understood(worker, worker.process.channel.answer())

    def _understood(self, worker: WorkerState, message: tuple[int, int, int, int] | None) -> tuple[int, Reply] | None:
        """Return the reply that a doorbell announces, with its body."""
        process = worker.process
        if message is None:  # The rank closed its end of the pipe. Its pidfd reports the death, perhaps a moment later.
            self._processes.poll_set.unwatch(process.channel.read_fd)
            return None
        status, flags, sequence, _ = message
        # Here, so that it also counts where nobody waits for the reply any more, as after an interrupt.
        worker.known.note_answered(sequence, is_received=not flags & IS_UNRECEIVED)
        counters = self._counters
        counters["messages_up"] += 1
        if status == Status.DONE and not flags & HAS_BODY:
            return sequence, ASSEMBLED if flags & IS_ASSEMBLED else DONE
        body = b""
        try:
            status = Status(status)
            if flags & HAS_BODY:
                body, fds = process.channel.receive_body(sequence)
                for fd in fds:
                    os.close(fd)
        except (ValueError, ProtocolError, EOFError, ConnectionResetError):
            process.kill()  # this cannot come from a worker of ours
            return None  # the rank still owes its reply, and its pidfd reports the death
        counters["bytes_up"] += len(body)
        return sequence, Reply(status, flags, body)
