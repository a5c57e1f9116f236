"""Where the ranks of one machine meet: who takes part, who has arrived, who has left, who sleeps, and whether to stop.

Owns the control words at the head of a communicator's segment, and waiting and waking. Every word has a single writer:
the rank it belongs to, or the master (the abort word). No lock is ever shared between processes, so a process that is
killed at any instruction leaves nothing locked. Moves no data.

The unit of agreement is the *tick*: a rank raises its own tick, then waits until those of all ranks of the group are as
high. Everything in shared memory that is written for tick ``t`` lies in one of two places, chosen by ``t & 1``. Reading
it ends before the reader's tick ``t + 1``, and the next write to that place comes after the writer has seen tick
``t + 1`` of everybody: two places and one wait for each tick are enough.

Which fence orders which words stands in one table of docs/design.md; tests/memory_model.py has the same steps and tries
them in every order that a processor may choose. In one file because each step relies on the ones beside it.
"""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from synk._pure.ops import REDUCE_OPS
from synk._pure.ranges import LINE_NBYTES
from synk._wire.channel import Looked, Patience
from synk._wire.memory import Fence, Segment
from synk.communicators._buffers import DTYPE_NAMES
from synk.communicators._layout import WORD_NBYTES, ControlLayout
from synk.errors import CollectiveMismatch, SynkError

# A rank that comes a few microseconds after the others finds them awake, also where the wait is without patience
# because there are fewer cores than ranks.
SPIN_YIELDS = 16
# Every change is followed by a wake-up; looking again without one is for what nobody can announce: a deadlock.
RECHECK_MS = 100

_MESSAGES = ("send", "recv")
KINDS = (
    *("barrier", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"),
    *("gather", "scatter", "all_to_all", "all_gather along an axis", *_MESSAGES),
)
# Where requests lie: those of collectives take turns in the places 0 and 1, by their tick.
_MESSAGE_PLACE = 2
_PLACE_MASK = 3
# Beside the place of what a rank waits for: it has raised its tick, and not gone on from there.
_IS_MEETING = 4
# Likewise: what it waits for is being copied by its sender, who waits for nothing meanwhile.
_IS_FETCHING = 8
_RULE = "Every rank that takes part must call the same collectives, in the same order, with equal arguments."


class Aborted(SynkError):
    """The wait of this rank was broken off, by the master or by ``abort``: another failure is the cause."""


class Request(NamedTuple):
    """What a rank asks for; ``peer`` is the root of a collective or the other side of a message."""

    kind: str
    op: str = ""
    dtype: str = ""
    num_elements: int = 0
    peer: int = -1
    tag: int = 0
    weight: float | None = None

    def __str__(self) -> str:
        if self.kind == "barrier":
            return "barrier()"
        words = [self.op] if self.op else []
        if self.num_elements < 0:  # whatever comes
            words.append("any array")
        elif self.dtype:
            words += [self.dtype, f"{self.num_elements} elements"]
        if self.weight is not None:
            words.append("weighted")
        if self.kind in ("reduce", "broadcast", "gather", "scatter"):
            words.append(f"root {self.peer}")
        elif self.kind in _MESSAGES:
            words += [f"{'to' if self.kind == 'send' else 'from'} rank {self.peer}", f"tag {self.tag}"]
        return f"{self.kind}({', '.join(words)})"


# Seven words that must be equal on all ranks, then the weight, which may differ: one cache line.
_REQUEST = struct.Struct("=7qd")
_NUM_EQUAL_NBYTES = 7 * WORD_NBYTES
_OP_NAMES = ("", *REDUCE_OPS)
_DTYPE_NAMES = ("", *DTYPE_NAMES)


def _packed(request: Request) -> tuple[Any, ...]:
    return (
        KINDS.index(request.kind),
        _OP_NAMES.index(request.op),
        _DTYPE_NAMES.index(request.dtype),
        request.num_elements,
        request.peer,
        request.tag,
        request.weight is not None,
        1.0 if request.weight is None else request.weight,
    )


class Rendezvous:
    """One rank's hold of the control words.

    Parameters
    ----------
    segment : Segment
        Writable; its first ``ControlLayout(world_size).nbytes`` bytes are the control words, zero at first.
    rank, world_size : int
    eventfds : sequence of int
        One for each rank: a rank sleeps on its own, the others write to it.
    mailbox_nbytes : int
        How much a sender may write before its receiver reads.
    patience : Patience
        How this rank waits before it sleeps.

    Attributes
    ----------
    ranks : tuple of int
        Who takes part in the present call, ascending; empty outside a call.
    tick : int
        How often this rank has met the others in the present call.
    is_meeting : bool
        Whether it has raised its tick and not gone on from there.
    is_fetching : bool
        Whether a message that was asked for is being copied by its sender.
    is_unfinished : bool
        Whether an operation goes on, or was broken off.
    begun : set of int
        Who is known to have joined the present call.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        world_size: int,
        eventfds: Sequence[int],
        mailbox_nbytes: int,
        patience: Patience,
    ) -> None:
        layout = ControlLayout(world_size)
        self.rank = rank
        self.ranks: tuple[int, ...] = ()
        self.tick = 0
        self.is_meeting = False
        self.sequence = 0
        self._place = 0  # of the last request for a collective
        self._is_aborted = False
        self.is_unfinished = False
        self.is_fetching = False
        self.begun: set[int] = set()
        self.patience = patience
        self._mailbox_nbytes = mailbox_nbytes
        self._eventfds = tuple(eventfds)
        self._poll = select.poll()
        self._poll.register(eventfds[rank], select.POLLIN)
        self.fence = Fence()

        self._bytes = segment.buffer.data[: layout.nbytes]
        self._requests = layout.requests
        words = self._bytes.cast("q")

        def column(offset: int) -> memoryview[int]:
            start = offset // WORD_NBYTES
            return words[start : start + world_size]

        self._abort_word = words[:1]
        columns = [column(layout.column(index)) for index in range(6)]
        self._sequences, self._ticks, self._left, self._sleeps, self._places, self._verdicts = columns
        step = layout.column_nbytes
        # written and unsent[sender][receiver] belong to the sender, read[receiver][sender] to the receiver.
        self.written = [column(layout.written + each * step) for each in range(world_size)]
        self.read = [column(layout.read + each * step) for each in range(world_size)]
        self.unsent = [column(layout.unsent + each * step) for each in range(world_size)]
        self._views = [words, self._abort_word, *columns, *self.written, *self.read, *self.unsent]

    def close(self) -> None:
        """Let go of the shared memory; any use afterwards raises ValueError."""
        self.ranks = ()
        for view in (*self._views, self._bytes):
            view.release()

    # -- who takes part ------------------------------------------------------------------------------------------

    def begin(self, ranks: tuple[int, ...], sequence: int) -> None:
        """Join the call ``sequence`` (above all earlier ones) of the ranks ``ranks``."""
        self.ranks, self.sequence, self.tick, self.is_meeting = ranks, sequence, 0, False
        self._is_aborted = self.is_fetching = False
        self.begun = set()
        self._ticks[self.rank] = 0
        self.fence()  # nobody may take an old tick, or an old count of bytes, for one of this call
        self._sequences[self.rank] = sequence

    def end(self) -> None:
        """Leave the call: whoever waits for this rank, now or later, learns that it will not come."""
        if self.ranks:
            self.ranks = ()
            # Whatever the others must see before this was followed by a wake-up, and so by a fence.
            self._left[self.rank] = self.sequence
            self.wake_all()

    def skip(self, sequence: int) -> None:
        """Say that this rank has gone through the call ``sequence`` without ``begin``."""
        self._left[self.rank] = sequence
        self.wake_all()

    def skip_words(self) -> tuple[memoryview, memoryview]:
        """Return the words that ``skip`` writes, and those that tell who sleeps: odd numbers."""
        return self._left, self._sleeps

    def has_begun(self, rank: int) -> bool:
        """Whether ``rank`` has joined the present call; its counters mean nothing before."""
        if rank not in self.begun:
            if self._sequences[rank] != self.sequence:
                return False
            self.fence()  # its counters are read after this, or they could be those of the call before
            self.begun.add(rank)
        return True

    def has_left(self, rank: int) -> bool:
        """Whether ``rank`` has left the present call; what it wrote before can be seen after this returned True."""
        if self._left[rank] != self.sequence:
            return False
        self.fence()  # what it wrote is read after this
        return True

    def room(self, sender: int, receiver: int) -> int:
        """Return how many bytes ``sender`` may write for ``receiver``, once both have begun."""
        return self._mailbox_nbytes - self.written[sender][receiver] + self.read[receiver][sender]

    # -- meeting -------------------------------------------------------------------------------------------------

    def post(self, request: Request) -> None:
        """Show what this rank is about to do; for a collective, ``arrive`` follows."""
        is_message = request.kind in _MESSAGES
        # Who is behind may still compare the request of the tick before, which lies where that of the next one goes.
        assert is_message or not self.is_meeting
        place = _MESSAGE_PLACE if is_message else (self.tick + 1) & 1
        _REQUEST.pack_into(self._bytes, self._request_offset(self.rank, place), *_packed(request))
        if not is_message:
            self._place = place
            self._places[self.rank] = place

    def arrive(self) -> None:
        """Raise this rank's tick: what it has written for this one is there."""
        self.tick += 1
        self.is_meeting = True
        self.fence()  # data and request come before the tick that tells of them
        self._ticks[self.rank] = self.tick
        self.wake_all()

    def has_met(self) -> bool:
        """Whether all ranks have arrived; this one goes on from there, awake.

        Raises
        ------
        CollectiveMismatch
            If a rank left without arriving.
        """
        if not self._have_all_arrived():
            return False
        self.rouse()  # what the others have written is read after this
        self.is_meeting = False
        return True

    def compare(self) -> list[Any]:
        """When all have met at the start of a collective, return the weights, in the order of ``ranks``.

        Raises
        ------
        CollectiveMismatch
            On every rank of the group, if any two requests differ.
        """
        place = self.tick & 1
        starts = [self._request_offset(rank, place) for rank in self.ranks]
        if len({bytes(self._bytes[start : start + _NUM_EQUAL_NBYTES]) for start in starts}) > 1:
            texts = "; ".join(f"rank {rank}: {self._request_at(start)}" for rank, start in zip(self.ranks, starts))
            raise CollectiveMismatch(f"cannot run a collective: the ranks asked for different ones: {texts}. {_RULE}")
        return [_REQUEST.unpack_from(self._bytes, start)[-1] for start in starts]

    def _have_all_arrived(self) -> bool:
        missing = [rank for rank in self.ranks if not self._has_arrived(rank)]
        if not missing:
            return True
        # A rank may arrive and leave between the two looks: only who had not arrived when it left is missing.
        left = [rank for rank in missing if self.has_left(rank)]
        left = [rank for rank in left if not self._has_arrived(rank)]
        if left:
            self.fail(self._left_text(left))
        return False

    def _has_arrived(self, rank: int) -> bool:
        return self.has_begun(rank) and self._ticks[rank] >= self.tick

    # -- waiting and waking --------------------------------------------------------------------------------------

    def wait(self, is_ready: Callable[[], bool], *, is_message: bool = False) -> None:
        """Return when ``is_ready()``; it is called again after every wake-up and may raise.

        What is read afterwards is as new as what ``is_ready`` has seen. ``is_message``: the rank waits for what it has
        posted about a message, else for a collective.

        Raises
        ------
        Aborted
            If the master set the abort word, or another thread called ``abort``.
        CollectiveMismatch
            If no rank of the group can go on.
        """
        try:
            for _ in range(SPIN_YIELDS):
                if is_ready():
                    return
                os.sched_yield()
            Looked(is_ready, lambda: self._doze(is_ready, is_message)).awaited(self.patience)
        finally:
            self.rouse()

    def _doze(self, is_ready: Callable[[], bool], is_message: bool) -> bool:
        """Sleep until ``is_ready()``, and return True."""
        sleeps, rank, ranks = self._sleeps, self.rank, self.ranks
        while True:
            place = _MESSAGE_PLACE if is_message else self._place
            self._places[rank] = place | _IS_MEETING * self.is_meeting | _IS_FETCHING * self.is_fetching
            # What this rank has done and asked for comes before the news that it sleeps.
            self.fence()
            sleeps[rank] |= 1
            # The other side changes something, then looks who sleeps; this side says that it sleeps, then looks again.
            # Each has a fence between, so at least one of them sees the other: no wake-up is lost.
            self.fence()
            if is_ready():
                return True
            if not sleeps[rank] & 1:  # it was roused by what it saw, and has to look once more
                continue
            self.check_abort()
            if self.ranks is not ranks:  # in a thread that the function has left behind
                raise Aborted(f"cannot wait any longer on rank {rank}: its call is over. End threads in the function.")
            if self._poll.poll(RECHECK_MS):
                os.eventfd_read(self._eventfds[rank])
            elif self.ranks:  # who has left waits only for what it sent, and that may go on as long as it likes
                self._check_deadlock()

    def rouse(self) -> None:
        """Say that this rank is awake, before it changes anything and after each wait.

        The number of naps is odd as long as the rank sleeps, and whoever sleeps changes nothing: ``_check_deadlock``
        relies on it. The fence also puts what the rank has seen before whatever it reads next.
        """
        if self._sleeps[self.rank] & 1:
            self._sleeps[self.rank] += 1
        self.fence()

    def wake_all(self) -> None:
        """Wake every rank that sleeps, after a change that it may wait for."""
        self.fence()
        for rank, number in enumerate(self._sleeps.tolist()):
            if number & 1:
                os.eventfd_write(self._eventfds[rank], 1)

    def wake(self, rank: int) -> None:
        """Wake ``rank`` if it sleeps, after a change that only it may wait for."""
        self.fence()
        if self._sleeps[rank] & 1:
            os.eventfd_write(self._eventfds[rank], 1)

    def check_abort(self) -> None:
        """Raise Aborted if the call is to be given up."""
        if self._abort_word[0] or self._is_aborted:
            raise Aborted(f"rank {self.rank} gave up waiting: the call was aborted after a failure elsewhere.")

    def fail(self, text: str) -> NoReturn:
        """Raise CollectiveMismatch; where a rank has left for an abort or a verdict, that is raised instead."""
        self.check_abort()
        if self.sequence in self._verdicts.tolist():
            self._give_verdict()
        raise CollectiveMismatch(text)

    def is_aborted(self) -> bool:
        """Whether ``check_abort`` would raise."""
        return bool(self._abort_word[0]) or self._is_aborted

    def abort(self) -> None:
        """Break the wait of this rank; callable from another thread of the process."""
        self._is_aborted = True
        os.eventfd_write(self._eventfds[self.rank], 1)

    # -- nobody can go on ----------------------------------------------------------------------------------------

    def _check_deadlock(self) -> None:
        """Raise if every rank of the group has left or sleeps over something that no rank can bring about any more.

        A rank that sleeps changes nothing, so what is read here belongs together if nobody woke up meanwhile.
        """
        numbers = self._sleeps.tolist()
        self.fence()
        for rank in self.ranks:
            if self.has_left(rank):  # perhaps without having begun: it had no use for collectives
                continue
            if not (self.has_begun(rank) and numbers[rank] & 1 and self._is_stuck(rank)):
                return
        self.fence()
        if self._sleeps.tolist() == numbers:
            self._give_verdict()

    def _is_stuck(self, rank: int) -> bool:
        """Whether the sleeping ``rank`` has nothing to do: all that it waits for is still missing."""
        place, peers = self._places[rank], [each for each in self.ranks if self.has_begun(each)]
        if place & _IS_FETCHING:
            return False
        if place & _IS_MEETING and all(each in peers and self._ticks[each] >= self._ticks[rank] for each in self.ranks):
            return False
        # Whoever waits goes on writing when a receiver made room, and takes in whatever reaches it.
        if any(self.unsent[rank][each] and self.room(rank, each) > 0 for each in peers):
            return False
        return not any(self.written[each][rank] != self.read[rank][each] for each in peers)

    def _give_verdict(self) -> NoReturn:
        """Raise what every rank raises when none can go on: the same text, whoever has found it first and left."""
        self.check_abort()
        self._verdicts[self.rank] = self.sequence
        self.fence()  # whoever sees that this rank has left sees why
        waiting = [rank for rank in self.ranks if not self.has_left(rank) or self._verdicts[rank] == self.sequence]
        raise CollectiveMismatch(
            f"cannot go on: every rank waits for another one: {self._requests_text(waiting)}. {_RULE}"
        )

    # -- texts ---------------------------------------------------------------------------------------------------

    def _request_offset(self, rank: int, place: int) -> int:
        return self._requests + (3 * rank + place) * LINE_NBYTES

    def _request(self, rank: int) -> Request:
        """Return what ``rank`` sleeps over."""
        return self._request_at(self._request_offset(rank, self._places[rank] & _PLACE_MASK))

    def _request_at(self, offset: int) -> Request:
        kind, op, dtype, count, peer, tag, is_weighted, weight = _REQUEST.unpack_from(self._bytes, offset)
        return Request(
            KINDS[kind], _OP_NAMES[op], _DTYPE_NAMES[dtype], count, peer, tag, weight if is_weighted else None
        )

    def _requests_text(self, ranks: Sequence[int]) -> str:
        return "; ".join(f"rank {rank}: {self._request(rank)}" for rank in ranks)

    def _left_text(self, left: Sequence[int]) -> str:
        names = ", ".join(map(str, left))
        waiting = [rank for rank in self.ranks if rank == self.rank or self._has_arrived(rank)]
        return (
            f"cannot finish a collective: {'rank' if len(left) == 1 else 'ranks'} {names} left the function without "
            f"joining it; waiting: {self._requests_text(waiting)}. {_RULE}"
        )


def reset(segment: Segment, world_size: int, eventfds: Sequence[int]) -> None:
    """Make the segment as new: counters at zero, no abort, no wake-up under way.

    For the master, while no rank is in a call: after ``set_abort``, and before a worker that was started again begins.
    """
    segment.buffer[: ControlLayout(world_size).nbytes] = 0
    for eventfd in eventfds:
        poll = select.poll()
        poll.register(eventfd, select.POLLIN)
        if poll.poll(0):
            os.eventfd_read(eventfd)


def set_abort(segment: Segment, eventfds: Sequence[int]) -> None:
    """Make every rank leave what it waits for, with ``Aborted``. For the master; stays set until ``reset``."""
    segment.view(0, (1,), np.dtype(np.int64))[0] = 1
    for eventfd in eventfds:  # a system call each: the word is visible before the wake-up
        os.eventfd_write(eventfd, 1)
