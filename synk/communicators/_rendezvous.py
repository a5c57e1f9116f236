"""Where the ranks of one machine meet: who takes part, who has arrived, who has left, who sleeps, and whether to stop.

This file owns the control words at the head of a communicator's segment, and waiting and waking. It moves no data.
Every word has a single writer: the rank it belongs to, or the program (the abort word). No lock is ever shared between
processes, so a process that is killed at any instruction leaves nothing locked.

The unit of agreement is the *tick*: a rank raises its own tick, then waits until all ranks of the group have raised
theirs as far. Whatever is written to shared memory for tick ``t`` lies in one of two places, chosen by ``t & 1``. A
reader has finished with it before it raises its own tick to ``t + 1``, and the next write to that place comes after the
writer has seen tick ``t + 1`` of everybody. So two places and one wait for each tick are enough.

A table in docs/design.md says which fence orders which words. tests/support/memory_model.py has the same steps and
tries them in every order that a processor may choose. In one file because each step relies on the ones beside it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from synk._pure.ops import REDUCE_OPS
from synk._pure.ranges import LINE_NBYTES
from synk._wire.memory import Fence, Segment
from synk._wire.patience import Patience
from synk._wire.process_memory import may_read
from synk.communicators._checks import DTYPE_NAMES
from synk.communicators._layout import WORD_NBYTES, ControlLayout
from synk.errors import CollectiveMismatch, SynkError

# A rank that arrives a few microseconds after the others finds them awake, even if they have no patience because there
# are fewer cores than ranks.
SPIN_YIELDS = 16
# Every change is followed by a wake-up, so a sleeper needs no timer for changes. It needs one for deadlocks, which
# nobody announces.
RECHECK_MS = 100

_MESSAGES = ("send", "recv")
KINDS = (
    *("barrier", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"),
    *("gather", "scatter", "all_to_all", "all_gather along an axis", *_MESSAGES),
)
# Requests for collectives alternate between the places 0 and 1, by their tick. The request for a message has its own.
_MESSAGE_PLACE = 2
_PLACE_MASK = 3
# Flags beside the place of what a sleeping rank waits for. This one: it has raised its tick and waits for the others.
_IS_MEETING = 4
RULE = "Every rank that takes part must call the same collectives, in the same order, with equal arguments."


class Aborted(SynkError):
    """The program broke the wait of this rank off: another failure is the cause."""


class CommRequest(NamedTuple):
    """A collective or message that a rank asks for. ``peer``: the root, or the other side of a message."""

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
        if self.num_elements < 0:  # a recv without an array accepts any
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


# One cache line: seven words that must be equal on all ranks, then the weight, which may differ.
_REQUEST = struct.Struct("=7qd")
_NUM_EQUAL_WORDS = 7
_OP_NAMES = ("", *REDUCE_OPS)
_DTYPE_NAMES = ("", *DTYPE_NAMES)


@functools.lru_cache(maxsize=1024)  # a program makes the same few requests again and again
def packed(request: CommRequest) -> bytes:
    """Return a request as other ranks read it."""
    return _REQUEST.pack(
        KINDS.index(request.kind),
        _OP_NAMES.index(request.op),
        _DTYPE_NAMES.index(request.dtype),
        request.num_elements,
        request.peer,
        request.tag,
        request.weight is not None,
        1.0 if request.weight is None else request.weight,
    )


def unpacked(line: Any) -> CommRequest:
    """Return a request from its line in shared memory."""
    kind, op, dtype, count, peer, tag, is_weighted, weight = _REQUEST.unpack(line)
    return CommRequest(
        KINDS[kind], _OP_NAMES[op], _DTYPE_NAMES[dtype], count, peer, tag, weight if is_weighted else None
    )


def agreed_weights(lines: Mapping[int, bytes]) -> list[float] | None:
    """Compare the requests of all ranks, given as lines. Return the weights in rank order, or None if there are none.

    Raises
    ------
    CollectiveMismatch
        If any two requests differ.
    """
    equal = {line[: _NUM_EQUAL_WORDS * WORD_NBYTES] for line in lines.values()}
    if len(equal) > 1:
        raise mismatch(lines)
    *_, is_weighted, _ = _REQUEST.unpack(next(iter(lines.values())))
    return [_REQUEST.unpack(line)[-1] for line in lines.values()] if is_weighted else None


def mismatch(lines: Mapping[int, Any]) -> CollectiveMismatch:
    """Return the error that says what each rank has asked for, by its line."""
    texts = "; ".join(f"rank {rank}: {unpacked(line)}" for rank, line in lines.items())
    return CollectiveMismatch(f"cannot run a collective: the ranks asked for different ones: {texts}. {RULE}")


class RunningOperation:
    """For a ``with`` block around all that an operation does. After an error in it the call can have no further one.

    Parameters
    ----------
    rendezvous : Rendezvous
        Its ``is_unfinished`` is true in the block, and from an error in the block until the next call begins.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    def __enter__(self) -> None:
        """Raise CollectiveMismatch if an earlier operation was broken off: a later one would meet others half-way."""
        rendezvous = self._rendezvous
        rendezvous.check_abort()
        if rendezvous.is_unfinished:
            raise CollectiveMismatch(
                f"cannot communicate on rank {rendezvous.rank}: an earlier operation of this call failed, and the "
                "ranks may no longer agree. Let its exception leave the function."
            )
        rendezvous.is_unfinished = True

    def __exit__(self, error_type: type[BaseException] | None, error: object, traceback: object) -> None:
        if error_type is None:
            self._rendezvous.is_unfinished = False


class Rendezvous:
    """One rank's view of the control words.

    It has many attributes: a view of each kind of word, since to look one up at each meeting would take as long as the
    meeting, and what this rank knows of the current call.

    Parameters
    ----------
    segment : Segment
        Writable. Its first ``ControlLayout(world_size).nbytes`` bytes are the control words, initially zero.
    rank, world_size : int
    eventfds : sequence of int
        One for each rank. A rank sleeps on its own; the others write to it.
    ring_nbytes : int
        The size of a ring: how much a sender may write before its receiver reads.
    patience : Patience
        How this rank waits before it sleeps.

    Attributes
    ----------
    ranks : tuple of int
        The ranks of the current call, ascending; empty outside a call.
    tick : int
        How many meetings of the current call this rank has arrived at.
    is_meeting : bool
        Whether this rank has raised its tick and still waits for the others.
    is_unfinished : bool
        Whether an operation is running, or one was broken off.
    operation : RunningOperation
    begun : set of int
        The ranks that are known to have joined the current call.
    pids : memoryview of int
        The process of each rank, once it has joined.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        world_size: int,
        eventfds: Sequence[int],
        ring_nbytes: int,
        patience: Patience,
    ) -> None:
        layout = ControlLayout(world_size)
        self.rank = rank
        self.ranks: tuple[int, ...] = ()
        self.tick = 0
        self.is_meeting = False
        self.sequence = 0
        self._place = 0  # of the last request for a collective
        self.is_unfinished = False
        self.operation = RunningOperation(self)
        self.begun: set[int] = set()
        self.patience = patience
        self._ring_nbytes = ring_nbytes
        self._eventfds = tuple(eventfds)
        self._poll = select.poll()
        self._poll.register(eventfds[rank], select.POLLIN)
        self.fence = Fence()

        memory = segment.buffer.data[: layout.nbytes]
        words = memory.cast("q")

        def column(offset: int) -> memoryview[int]:
            start = offset // WORD_NBYTES
            return words[start : start + world_size]

        self._abort_word = words[:1]
        columns = [column(layout.column(index)) for index in range(8)]
        self._sequences, self._ticks, self._left, self._sleeps, self._places, self._verdicts, *columns = columns
        self.pids, self._readers = columns
        self.pids[rank] = os.getpid()
        self._may_read = 0  # not asked yet
        step = layout.column_nbytes
        # The sender alone writes written[sender][receiver] and unsent[sender][receiver], the receiver alone
        # read[receiver][sender].
        self.written, self.read, self.unsent = (
            [column(layout.matrix(index) + each * step) for each in range(world_size)] for index in range(3)
        )
        # Three views of the line at requests[place][rank]: all of it, the words that must be equal, and the weight.
        lines = [[memory[start : start + LINE_NBYTES] for start in layout.request_offsets(place)] for place in range(3)]
        self._requests = lines
        self._wanted = [[line.cast("q")[:_NUM_EQUAL_WORDS] for line in each] for each in lines]
        self._weights = [[line.cast("d")[_NUM_EQUAL_WORDS:] for line in each] for each in lines]

    # -- who takes part ------------------------------------------------------------------------------------------

    def begin(self, ranks: tuple[int, ...], sequence: int) -> None:
        """Join a call of ``ranks``. Its number, ``sequence``, is above those of all earlier calls."""
        self.ranks, self.sequence, self.tick, self.is_meeting = ranks, sequence, 0, False
        self.begun = set()
        self._ticks[self.rank] = 0
        self.pids[self.rank] = os.getpid()
        self._may_read = self._may_read or self._may_read_others()
        self._readers[self.rank] = self._may_read
        self.fence()  # nobody may mistake an old tick or an old count of bytes for one of this call
        self._sequences[self.rank] = sequence

    def _may_read_others(self) -> int:
        """Return 1 if the kernel lets this process read the memory of other ranks, else -1; 0 if none is there yet."""
        found = [may_read(pid) for pid in self.pids.tolist() if pid not in (0, os.getpid())]
        return next((1 if each else -1 for each in found if each is not None), 0)

    def is_reader(self, rank: int) -> bool:
        """Whether ``rank`` is known to be able to read this one's memory."""
        return rank != self.rank and self._readers[rank] > 0

    def end(self) -> None:
        """Leave the call: a rank that waits for this one, now or later, learns that it will not come."""
        if self.ranks:
            self.ranks = ()
            # No fence is needed here: every store that the others must see first was followed by a wake-up, which
            # begins with one.
            self._left[self.rank] = self.sequence
            self.wake_all()

    def skip_words(self) -> tuple[memoryview, memoryview]:
        """Return the words by which a rank goes through a call without ``begin`` and ``end``.

        The first hold, for each rank, the last call that it has left: the rank stores the call's number there. The
        second are odd for ranks that sleep: if any is, ``wake_all`` must follow the store.
        """
        return self._left, self._sleeps

    def has_begun(self, rank: int) -> bool:
        """Whether ``rank`` has joined the current call. Until then its counters are those of an earlier call."""
        if rank not in self.begun:
            if self._sequences[rank] != self.sequence:
                return False
            self.fence()  # its counters must be read after its sequence, or they could still be old
            self.begun.add(rank)
        return True

    def has_left(self, rank: int) -> bool:
        """Whether ``rank`` has left the current call. If so, everything it wrote before is visible from here on."""
        if self._left[rank] != self.sequence:
            return False
        self.fence()  # what it wrote must be read after the word that says it left
        return True

    def room(self, sender: int, receiver: int) -> int:
        """Return how many bytes ``sender`` may write for ``receiver``, once both have begun."""
        return self._ring_nbytes - self.written[sender][receiver] + self.read[receiver][sender]

    # -- meeting -------------------------------------------------------------------------------------------------

    def post(self, request: CommRequest) -> None:
        """Show the others what this rank is about to do. For a collective, ``arrive`` follows."""
        if request.kind in _MESSAGES:
            self._requests[_MESSAGE_PLACE][self.rank][:] = packed(request)
        else:
            self.post_packed(packed(request))

    def post_packed(self, request: bytes) -> None:
        """Show the others which collective this rank is about to join. ``arrive`` follows."""
        # This overwrites the request of the tick before. A rank that is behind may still compare that one, until it
        # raises its own tick. So this rank's meeting must be over.
        assert not self.is_meeting
        place = self._place = (self.tick + 1) & 1
        self._requests[place][self.rank][:] = request
        self._places[self.rank] = place

    def arrive(self) -> None:
        """Raise this rank's tick, which announces everything that it has written for it."""
        self.tick += 1
        self.is_meeting = True
        self.fence()  # data and request must be visible before the tick that announces them
        self._ticks[self.rank] = self.tick
        self.wake_all()

    def has_met(self) -> bool:
        """Whether all ranks have arrived. If so, this rank is awake and no longer in the meeting.

        Raises
        ------
        CollectiveMismatch
            If a rank left without arriving.
        """
        if not self._have_all_arrived():
            return False
        self.rouse()  # its fence comes before this rank reads what the others wrote
        self.is_meeting = False
        return True

    def compare(self) -> None:
        """Compare the requests of all ranks, after the first meeting of a collective.

        Raises
        ------
        CollectiveMismatch
            On every rank of the group, if any two requests differ.
        """
        place, own = self.tick & 1, self.rank
        wanted = self._wanted[place]
        mine = wanted[own]
        for rank in self.ranks:
            if rank != own and wanted[rank] != mine:
                raise mismatch({each: self._requests[place][each] for each in self.ranks})

    def weights(self) -> list[float]:
        """Return the weights of the requests that were compared, in rank order."""
        weights = self._weights[self.tick & 1]
        return [weights[rank][0] for rank in self.ranks]

    def _have_all_arrived(self) -> bool:
        if len(self.begun) == len(self.ranks):  # the quick way: everybody has joined, so ticks alone decide
            tick, ticks = self.tick, self._ticks
            for rank in self.ranks:
                if ticks[rank] < tick:
                    break
            else:
                return True
        missing = [rank for rank in self.ranks if not self._has_arrived(rank)]
        if not missing:
            return True
        # A rank may arrive and leave between the two looks. So look again after it has left: only a rank that left
        # without arriving is missing.
        left = [rank for rank in missing if self.has_left(rank)]
        left = [rank for rank in left if not self._has_arrived(rank)]
        if left:
            self.fail(self._left_text(left), left)
        return False

    def _has_arrived(self, rank: int) -> bool:
        return self.has_begun(rank) and self._ticks[rank] >= self.tick

    # -- waiting and waking --------------------------------------------------------------------------------------

    def wait(self, is_ready: Callable[[], bool], *, is_message: bool = False) -> None:
        """Return once ``is_ready()`` is true. It is called again after every wake-up, and may raise.

        What is read afterwards is at least as new as what ``is_ready`` has seen. ``is_message``: the rank waits for the
        message that it posted, not for a collective.

        Raises
        ------
        Aborted
            If the program set the abort word.
        CollectiveMismatch
            If no rank of the group can go on.
        """
        try:
            for _ in range(SPIN_YIELDS):
                if is_ready():
                    return
                os.sched_yield()
            self.patience.wait_for(is_ready, lambda: self._doze(is_ready, is_message))
        finally:
            self.rouse()

    def _doze(self, is_ready: Callable[[], bool], is_message: bool) -> bool:
        """Sleep until ``is_ready()``, and return True."""
        sleeps, rank, ranks = self._sleeps, self.rank, self.ranks
        while True:
            place = _MESSAGE_PLACE if is_message else self._place
            self._places[rank] = place | _IS_MEETING * self.is_meeting
            # What this rank has done and asked for must be visible before the word that says it sleeps.
            self.fence()
            sleeps[rank] |= 1
            # This rank says that it sleeps, then looks again. A rank that changes something first changes it, then
            # looks who sleeps. Each has a fence in between, so at least one sees the other: no wake-up is lost.
            self.fence()
            if is_ready():
                return True
            if not sleeps[rank] & 1:  # is_ready found something to do and roused this rank: say again that it sleeps
                continue
            self.check_abort()
            if self.ranks is not ranks:  # this is a thread that the function has left behind
                raise Aborted(f"cannot wait any longer on rank {rank}: its call is over. End threads in the function.")
            # After it has left, a rank waits only for its messages to be taken in: that is no deadlock.
            if not self._nap() and self.ranks:
                self._check_deadlock()

    def _nap(self) -> bool:
        """Sleep until this rank is woken, but not for long. Return whether it was."""
        if not self._poll.poll(RECHECK_MS):
            return False
        with contextlib.suppress(BlockingIOError):  # a thread that a function has left behind was quicker
            os.eventfd_read(self._eventfds[self.rank])
        return True

    def rouse(self) -> None:
        """Say that this rank is awake: before it changes anything, and after each wait.

        A rank's number in ``_sleeps`` is odd while it sleeps, and a rank that sleeps changes nothing.
        ``_check_deadlock`` relies on both. The fence also makes what this rank reads next as new as what it has seen.
        """
        if self._sleeps[self.rank] & 1:
            self._sleeps[self.rank] += 1
        self.fence()

    def wake_all(self) -> None:
        """Wake every rank that sleeps, after a change that any of them may wait for."""
        self.fence()
        for rank, number in enumerate(self._sleeps.tolist()):
            if number & 1:
                os.eventfd_write(self._eventfds[rank], 1)

    def wake(self, rank: int) -> None:
        """Wake ``rank`` if it sleeps, after a change that no other rank may wait for."""
        self.fence()
        if self._sleeps[rank] & 1:
            os.eventfd_write(self._eventfds[rank], 1)

    def check_abort(self) -> None:
        """Raise Aborted if the call was aborted."""
        if self._abort_word[0]:
            raise Aborted(f"rank {self.rank} gave up waiting: the call was aborted after a failure elsewhere.")

    def fail(self, text: str, left: Sequence[int] = ()) -> NoReturn:
        """Raise CollectiveMismatch with ``text``, unless the real cause is an abort or a deadlock: then raise that.

        ``left``: the ranks that have left too early, if these are the reason.
        """
        self.check_abort()
        if self.sequence in self._verdicts.tolist():
            self._give_verdict()
        raise CollectiveMismatch(text)

    def is_aborted(self) -> bool:
        """Whether ``check_abort`` would raise."""
        return bool(self._abort_word[0])

    # -- deadlocks -----------------------------------------------------------------------------------------------

    def _check_deadlock(self) -> None:
        """Raise if every rank of the group has left, or sleeps until something happens that no rank can do any more.

        A rank that sleeps changes nothing. So what is read here is consistent if no rank woke up in the meantime, which
        the second look at ``_sleeps`` shows: each nap has a number of its own.
        """
        # A rank that was killed looks as it did at its last store. If it was awake, this finds nothing, and the abort
        # of the program ends the wait. If it slept, the program usually learns of the death before RECHECK_MS are over.
        numbers = self._sleeps.tolist()
        self.fence()
        for rank in self.ranks:
            if self.has_left(rank):  # perhaps without having begun: it used no collectives
                continue
            if not (self.has_begun(rank) and numbers[rank] & 1 and self._is_stuck(rank)):
                return
        self.fence()
        if self._sleeps.tolist() == numbers:
            self._give_verdict()

    def _is_stuck(self, rank: int) -> bool:
        """Whether the sleeping ``rank`` has nothing to do: everything that it waits for is still missing."""
        place, peers = self._places[rank], [each for each in self.ranks if self.has_begun(each)]
        if place & _IS_MEETING and all(each in peers and self._ticks[each] >= self._ticks[rank] for each in self.ranks):
            return False
        # A rank that waits also writes on where a receiver has made room, and takes in whatever has arrived for it. An
        # array that is lent leaves room in the ring; until it is read, its receiver has something to read.
        if any(self.unsent[rank][each] and self.room(rank, each) > 0 for each in peers):
            return False
        return not any(self.written[each][rank] != self.read[rank][each] for each in peers)

    def _give_verdict(self) -> NoReturn:
        """Raise that no rank can go on. All ranks raise the same text, no matter which finds out first and leaves."""
        self.check_abort()
        self._verdicts[self.rank] = self.sequence
        self.fence()  # a rank that sees that this one has left must also see why
        waiting = [rank for rank in self.ranks if not self.has_left(rank) or self._verdicts[rank] == self.sequence]
        raise CollectiveMismatch(
            f"cannot go on: every rank waits for another one: {self._requests_text(waiting)}. {RULE}"
        )

    # -- texts ---------------------------------------------------------------------------------------------------

    def _request(self, rank: int) -> CommRequest:
        """Return the request that the sleeping ``rank`` waits for."""
        return unpacked(self._requests[self._places[rank] & _PLACE_MASK][rank])

    def _requests_text(self, ranks: Sequence[int]) -> str:
        return "; ".join(f"rank {rank}: {self._request(rank)}" for rank in ranks)

    def _left_text(self, left: Sequence[int]) -> str:
        names = ", ".join(map(str, left))
        waiting = [rank for rank in self.ranks if rank == self.rank or self._has_arrived(rank)]
        return (
            f"cannot finish a collective: {'rank' if len(left) == 1 else 'ranks'} {names} left the function without "
            f"joining it; waiting: {self._requests_text(waiting)}. {RULE}"
        )


def reset(segment: Segment, world_size: int) -> None:
    """Make the segment as new: counters at zero, no abort. A wake-up that is pending ends a nap, and nothing else.

    Only the program calls this, while no rank is in a call: after ``set_abort``, and before a replacement of a worker
    that died begins.
    """
    segment.buffer[: ControlLayout(world_size).nbytes] = 0


def set_abort(segment: Segment, eventfds: Sequence[int]) -> None:
    """Make every rank that waits raise ``Aborted``, until ``reset``. Only the program calls this."""
    segment.view(0, (1,), np.dtype(np.int64))[0] = 1
    for eventfd in eventfds:  # each write is a system call, which makes the word visible before the wake-up
        os.eventfd_write(eventfd, 1)
