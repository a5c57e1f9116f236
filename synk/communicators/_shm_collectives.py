"""The collectives of a rank in shared memory, step by step. Each is a generator; ``_schedule`` says when it goes on.

Each rank has two *halves* of memory, which it alone writes and all ranks read. Data of tick ``t`` lies in half
``t & 1``, so one meeting of the ranks for each piece is enough (see ``_rendezvous``). Values are folded in rank order,
whatever the timing, so that all ranks get the same bits, each time. In one file because each collective is a few lines
over the same steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from synk._pure.arrays import address_of
from synk._pure.dtypes import dtype_name
from synk._pure.ops import REDUCTIONS
from synk._pure.ranges import LINE_NBYTES, chunk_bounds, round_up
from synk._wire.process_memory import read_memory
from synk.communicators._checks import named_dtype
from synk.communicators._host import HostCommunicator
from synk.communicators._layout import MAX_HEAD_WORDS, WORD_NBYTES
from synk.communicators._mailbox import Mailbox
from synk.communicators._meetings import Meeting, Meetings
from synk.communicators._rendezvous import SPIN_YIELDS, CommRequest, Rendezvous
from synk.communicators._schedule import Schedule, Steps

# Up to this size, of all ranks' values together, every rank reduces everything for itself: that takes one meeting.
# Above it each rank reduces only its share, which takes at least two meetings.
SMALL_NBYTES = 1 << 19
# The largest share of one piece: long enough for a meeting to cost little beside it, short enough for the caches.
CHUNK_NBYTES = 1 << 20
# How much of an array that is copied a rank shows at one meeting. The others read longer arrays from its memory. That
# takes the kernel as long for each small page as two copies through the caches, and another meeting follows. It pays
# where pages are large, as those of NumPy's arrays from 4 MB on, and where two copies would not stay in the caches.
PIECE_NBYTES = 1 << 20


Streams = Mapping[int, np.ndarray]
"""The memory that a rank shows: flat arrays of bytes, by the index of their place in a frame."""

NOTHING = np.empty(0, np.uint8)
_PLACE = np.empty(1, np.int64)
"""The form of what says where a stream lies: the address in the memory of its rank."""


class Frame(NamedTuple):
    """Where in a half the streams of a rank are shown: from ``begin`` on, ``length`` bytes of each."""

    begin: int
    length: int

    def offset(self, index: int) -> int:
        return self.begin + index * self.length


class StreamReading(NamedTuple):
    """A stream of another rank, by its index, and the flat array of bytes into which this rank reads it."""

    rank: int
    place: int
    target: np.ndarray


class ShmCollectives(HostCommunicator):
    """The steps of one rank's collectives, over the ranks that take part in the call.

    Parameters
    ----------
    rendezvous : Rendezvous
    halves : ndarray of uint8, shape ``(rank, 2, nbytes)``
        The shared memory.
    """

    def __init__(self, rendezvous: Rendezvous, halves: np.ndarray) -> None:
        self.rank = rendezvous.rank
        self._rendezvous = rendezvous
        self._halves = halves
        self.half_nbytes = halves.shape[2]
        # State of the collective that takes steps: whether the ranks have agreed on it, and the weights of all ranks.
        self.has_agreed = False
        self._is_weighted = False
        self._weights: list[Any] | None = None
        self._reads_memory = True  # until a rank of the call could not read another one's
        self.meetings = Meetings()

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._rendezvous.ranks

    def parts(self) -> tuple[Rendezvous, Schedule, Mailbox]:
        """Return what this communicator consists of, for one over several nodes that is built on it."""
        return self._rendezvous, self._schedule, self._mailbox

    # -- collectives in flight -------------------------------------------------------------------------------------

    def run(self, steps: Steps) -> Any:
        if self._schedule.operations:  # behind the collectives in flight
            return super().run(steps)
        try:
            next(steps)  # all checks of the arguments come before the first yield
        except StopIteration as end:
            return end.value
        with self._rendezvous.operation:
            return self.go_on(steps)

    def go_on(self, steps: Steps) -> Any:
        """Take the remaining steps of a collective. Return what they return."""
        try:
            next(steps)
            while True:
                self.meet()
                next(steps)
        except StopIteration as end:
            return end.value

    def meet(self) -> None:
        """Wait until all ranks have met."""
        rendezvous = self._rendezvous
        for _ in range(SPIN_YIELDS):
            if rendezvous.has_met():
                return
            os.sched_yield()
        rendezvous.wait(self._has_met)

    def _has_met(self) -> bool:
        if self._rendezvous.has_met():
            return True
        self._mailbox.progress()  # a rank that is late may be stuck in a send until this one takes its message in
        return False

    # -- their steps -----------------------------------------------------------------------------------------------

    def agree_steps(
        self, kind: str, dtype: str, count: int, op: str = "", peer: int = -1, *, weight: float | None = None
    ) -> Steps:
        """Wait until every rank of the call asks for this same collective. Moves no data.

        Needed before a collective of a library that does not compare what the ranks ask for (NCCL).

        Raises
        ------
        CollectiveMismatch
            If the ranks ask for different ones.
        """
        yield from self.start_steps(kind, dtype, count, op, peer=peer, weight=weight)
        yield from self.meet_steps()

    def barrier_steps(self) -> Steps:
        return self._meet_once("barrier", NOTHING, None)

    def reduce_steps(
        self, kind: str, source: np.ndarray, target: np.ndarray, op: str, weight: float | None, root: int = -1
    ) -> Steps:
        if self.is_small(source.nbytes):
            return self._meet_once(kind, source, target if root in (-1, self.rank) else None, op, weight, root)
        return self._reduce(kind, source, target, op, weight, root)

    def is_small(self, nbytes: int) -> bool:
        """Whether every rank shows all of an array of this size at one meeting, to reduce it."""
        return nbytes <= min(SMALL_NBYTES // len(self.ranks), self.half_nbytes)

    def _meet_once(
        self, kind: str, source: np.ndarray, target: Any, op: str = "", weight: float | None = None, peer: int = -1
    ) -> Steps:
        """Take the steps of a collective in which each rank shows at one meeting all that it has.

        ``target`` is None if this rank gets nothing.
        """
        self._check_active(kind)
        key = kind, source.dtype, source.size, op, peer, weight is None
        meeting = self.meetings.get(key) or self.meetings.keep(key, self._meeting(*key))
        yield
        rendezvous, half = self._rendezvous, self.next_half()
        meeting.show(half, source)
        rendezvous.post_packed(meeting.request if weight is None else meeting.request_of(weight))
        rendezvous.arrive()
        yield
        rendezvous.compare()
        if target is not None:
            meeting.finish(half, None if weight is None else rendezvous.weights(), target)

    def _meeting(self, kind: str, dtype: np.dtype, count: int, op: str, peer: int, is_unweighted: bool) -> Meeting:
        ranks, size = self.ranks, len(self.ranks)
        first = 0 if op else self.head_nbytes()
        block, begin = count, first
        if kind == "reduce_scatter":
            block = count // size
            begin += self._position() * block * dtype.itemsize
        senders = (peer,) if kind == "broadcast" else ranks
        name = "" if kind == "barrier" else dtype_name(dtype)
        request = CommRequest(kind, op, name, block, peer, 0, None if is_unweighted else 1.0)
        own = [self.view(self.rank, half, first, (count,), dtype) for half in range(2) if self.rank in senders]
        parts = [[self.view(rank, half, begin, (block,), dtype) for rank in senders] for half in range(2)]
        return Meeting(request, dtype, own, parts)

    def view(
        self, rank: int, half: int, offset: int, shape: tuple[int, ...], dtype: Any, strides: Any = None
    ) -> np.ndarray:
        """Return a view of a half from ``offset`` on."""
        return np.ndarray(shape, dtype, self._halves[rank, half], offset, strides)

    def _reduce(
        self, kind: str, source: np.ndarray, target: np.ndarray, op: str, weight: float | None, root: int
    ) -> Steps:
        is_divided = kind == "reduce_scatter"
        count = target.size if is_divided else source.size
        yield from self.start_steps(kind, dtype_name(source.dtype), count, op, root, weight=weight)
        if is_divided:
            yield from self._reduce_blocks(source, target, op)
        else:
            yield from self._reduce_shares(source, target, op, is_receiver=root in (-1, self.rank))

    def _reduce_blocks(self, source: np.ndarray, target: np.ndarray, op: str) -> Steps:
        """Reduce in pieces. Every rank reduces its own block."""
        size, count = len(self.ranks), target.size
        if np.may_share_memory(source, target):  # other ranks' rows are read after the first of the target are written
            source = source.copy()
        for start, stop in _pieces(count, self._chunk_nbytes() // source.itemsize):
            half = self.next_half()
            shares = [slice(block * count + start, block * count + stop) for block in range(size)]
            self._publish_shares(source, shares, half)
            yield from self.meet_steps()
            self._fold_share(source, shares, half, op, target[start:stop])

    def _reduce_shares(self, source: np.ndarray, target: np.ndarray, op: str, is_receiver: bool) -> Steps:
        """Reduce in pieces. Every rank reduces its share of a piece; receivers collect the shares at the next meeting.

        So one meeting serves two pieces: it shows the values of this one and the results of the one before.
        """
        size, count = len(self.ranks), source.size
        results = size * self._chunk_nbytes()  # the offset of a rank's result in a half, after the shares of all ranks
        previous: list[slice] = []
        for start, stop in (*_pieces(count, results // source.itemsize), (count, count)):
            half = self.next_half()
            bounds = chunk_bounds(stop - start, source.itemsize, size)
            shares = [slice(start + low, start + high) for low, high in bounds]
            self._publish_shares(source, shares, half)
            yield from self.meet_steps()
            # The next meeting shows the result in the other half. All ranks have finished reading there: they did so
            # before they arrived at the meeting that is just over.
            result = self.part(self.rank, 1 - half, results, source[shares[self._position()]])
            self._fold_share(source, shares, half, op, result)
            if is_receiver:
                target[shares[self._position()]] = result
                for rank, share in zip(self.ranks, previous, strict=False):
                    if rank != self.rank:
                        target[share] = self.part(rank, half, results, target[share])
            previous = shares

    def _publish_shares(self, source: np.ndarray, shares: Sequence[slice], half: int) -> None:
        """Put the other ranks' shares into this rank's half. Its own share stays where it is."""
        chunk_nbytes = self._chunk_nbytes()
        for position, share in enumerate(shares):
            if position != self._position():
                self.part(self.rank, half, position * chunk_nbytes, source[share])[:] = source[share]

    def _fold_share(self, source: np.ndarray, shares: Sequence[slice], half: int, op: str, target: np.ndarray) -> None:
        """Reduce this rank's share into ``target``."""
        offset = self._position() * self._chunk_nbytes()
        mine = source[shares[self._position()]]
        parts = [mine if rank == self.rank else self.part(rank, half, offset, mine) for rank in self.ranks]
        REDUCTIONS[op].reduce_into(parts, self._weights, target)

    def broadcast_steps(self, array: np.ndarray, root: int) -> Steps:
        if array.nbytes <= self.copied_nbytes():
            return self._meet_once("broadcast", array, None if self.rank == root else array, peer=root)
        return self._broadcast(array, root)

    def _broadcast(self, array: np.ndarray, root: int) -> Steps:
        is_root = self.rank == root
        yield from self.start_steps("broadcast", dtype_name(array.dtype), array.size, peer=root)
        whole = flat_bytes(array)
        yield from self.copy_steps({0: whole} if is_root else {}, [StreamReading(root, 0, whole)][is_root:], whole.size)

    def all_gather_steps(self, source: np.ndarray, target: np.ndarray) -> Steps:
        if source.nbytes <= self.copied_nbytes():
            return self._meet_once("all_gather", source, target)
        return self._all_gather(source, target)

    def _all_gather(self, source: np.ndarray, target: np.ndarray) -> Steps:
        yield from self.start_steps("all_gather", dtype_name(source.dtype), source.size)
        mine, blocks = flat_bytes(source), flat_bytes(target).reshape(len(self.ranks), -1)
        readings = [StreamReading(rank, 0, block) for rank, block in zip(self.ranks, blocks) if rank != self.rank]
        yield from self.copy_steps({0: mine}, readings, mine.size)
        blocks[self._position()] = mine

    # -- copies ----------------------------------------------------------------------------------------------------

    def copy_steps(
        self, streams: Streams, readings: Sequence[StreamReading], longest: int, num_streams: int = 1
    ) -> Steps:
        """Show the streams of this rank, and read others. ``num_streams`` is for how many there must be room."""
        frame = self.frame(num_streams)
        half = self.show(frame, streams)
        yield from self.meet_steps()
        yield from self.read_steps(frame, streams, readings, longest, half)

    def show(self, frame: Frame, streams: Streams, start: int = 0) -> int:
        """Put what the next meeting shows into a half: of each stream a piece, or where it lies.

        Returns
        -------
        int
            Which half that is.
        """
        half = self.next_half()
        for index, stream in streams.items():
            if self._reads_memory and stream.size > frame.length:
                piece = np.array([address_of(stream)], np.int64)
            else:
                piece = stream[start : start + frame.length]
            self.part(self.rank, half, frame.offset(index), piece)[:] = piece
        return half

    def read_steps(
        self, frame: Frame, streams: Streams, readings: Sequence[StreamReading], longest: int, half: int
    ) -> Steps:
        """Take the steps that follow the meeting at which all ranks have shown the beginning of their streams.

        A stream that is longer than a piece is read from the memory of its rank. Then the ranks meet once more, and
        if one of them could not read, all go on in pieces.
        """
        if longest <= frame.length or not self._reads_memory:
            yield from self._read_pieces(frame, streams, readings, longest, half)
            return
        # The memory of a rank that dies now may be read in part or not at all. It is missed at the meeting below, so
        # nothing that was read of it is returned. Until that meeting no rank may change its array.
        has_read = all(self._read(frame, reading, half) for reading in readings)
        half = self.next_half()
        self._halves[self.rank, half, 0] = has_read
        yield from self.meet_steps()
        if not all(self._halves[rank, half, 0] for rank in self.ranks):
            self._reads_memory = False
            half = self.show(frame, streams)
            yield from self.meet_steps()
            yield from self._read_pieces(frame, streams, readings, longest, half)

    def _read_pieces(
        self, frame: Frame, streams: Streams, readings: Sequence[StreamReading], longest: int, half: int
    ) -> Steps:
        for start in range(0, max(longest, 1), frame.length):
            if start:
                half = self.show(frame, streams, start)
                yield from self.meet_steps()
            for reading in readings:
                there = reading.target[start : start + frame.length]
                there[:] = self.part(reading.rank, half, frame.offset(reading.place), there)

    def _read(self, frame: Frame, reading: StreamReading, half: int) -> bool:
        """Read a whole stream, from the half or from the memory of its rank. Return whether that was possible."""
        rank, target, offset = reading.rank, reading.target, frame.offset(reading.place)
        if target.size > frame.length:
            address = int(self.part(rank, half, offset, _PLACE)[0])
            return read_memory(self._rendezvous.pids[rank], address, target)
        target[:] = self.part(rank, half, offset, target)
        return True

    # -- one operation -------------------------------------------------------------------------------------------

    def start_steps(
        self, kind: str, dtype: str, count: int, op: str = "", peer: int = -1, weight: float | None = None
    ) -> Steps:
        """Check the call and the dtype, yield, then show the others what this rank is about to do."""
        self._check_active(kind)
        if dtype:
            named_dtype(dtype)  # raises if the others could not read it
        yield
        self.has_agreed = False
        self._is_weighted = weight is not None
        self._rendezvous.post(CommRequest(kind, op, dtype, count, peer, 0, weight))

    def meet_steps(self) -> Steps:
        """Meet the others. At the first meeting of a collective, compare the requests of all ranks."""
        self._rendezvous.arrive()
        yield
        if not self.has_agreed:
            self._rendezvous.compare()
            self._weights = self._rendezvous.weights() if self._is_weighted else None
            self.has_agreed = True

    def next_half(self) -> int:
        """Return which half belongs to the next meeting."""
        return (self._rendezvous.tick + 1) & 1

    def copied_nbytes(self) -> int:
        """Return up to which size every rank shows all of an array at one meeting, to have it copied."""
        return min(PIECE_NBYTES, self.half_nbytes - self.head_nbytes())

    def frame(self, num_streams: int) -> Frame:
        """Return where the streams of a rank are shown, if each rank has so many: behind the head of an exchange."""
        begin = self.head_nbytes()
        return Frame(begin, min(PIECE_NBYTES, (self.half_nbytes - begin) // num_streams // LINE_NBYTES * LINE_NBYTES))

    def head_nbytes(self) -> int:
        """Return how many bytes of a half are for the head of an exchange."""
        return round_up((1 + MAX_HEAD_WORDS + len(self.ranks)) * WORD_NBYTES, LINE_NBYTES)

    def half(self, rank: int, half: int) -> np.ndarray:
        """Return a view of one of a rank's two halves."""
        view: np.ndarray = self._halves[rank, half]
        return view

    def words(self, rank: int, half: int, count: int) -> memoryview[int]:
        """Return a view of the first words of a half."""
        view: memoryview[int] = self._halves[rank, half, : count * WORD_NBYTES].data.cast("q")
        return view

    def part(self, rank: int, half: int, offset: int, like: np.ndarray) -> np.ndarray:
        """Return a view of a half from ``offset`` on, with the size and dtype of ``like``."""
        return self._halves[rank, half, offset : offset + like.nbytes].view(like.dtype)

    def _chunk_nbytes(self) -> int:
        """Return the largest share of a piece in bytes: a half has room for one share for each rank, and a result."""
        return min(CHUNK_NBYTES, self.half_nbytes // (len(self.ranks) + 1) // LINE_NBYTES * LINE_NBYTES)

    def _position(self) -> int:
        """Return this rank's position among the ranks of the call."""
        return self.ranks.index(self.rank)


def flat_bytes(array: np.ndarray) -> np.ndarray:
    """View the memory of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8)


def _pieces(count: int, length: int) -> list[tuple[int, int]]:
    """Return the bounds of ``count`` elements in pieces of ``length``. There is at least one piece; it may be empty."""
    return [(start, min(start + length, count)) for start in range(0, max(count, 1), length)]
