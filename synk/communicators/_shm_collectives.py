"""The collectives of a rank in shared memory, step by step. Each is a generator; ``_schedule`` says when it goes on.

Each rank has two *halves* of memory, which it alone writes and all ranks read. Data of tick ``t`` lies in half
``t & 1``, so one meeting of the ranks for each piece is enough (see ``_rendezvous``). Values are folded in rank order,
whatever the timing, so that all ranks get the same bits, each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.dtypes import dtype_name
from synk._pure.ops import REDUCTIONS
from synk._pure.ranges import LINE_NBYTES, round_up
from synk.communicators import Buffer
from synk.communicators._buffers import as_array, named_dtype
from synk.communicators._checks import check_buffers, check_place, check_reduction
from synk.communicators._rendezvous import Rendezvous, Request
from synk.communicators._schedule import Steps
from synk.errors import SynkError

# Up to this size, of all ranks' values together, every rank reduces everything for itself: that takes one meeting.
# Above it each rank reduces only its share, which takes at least two meetings.
SMALL_NBYTES = 1 << 19
# The largest share of one piece: long enough for a meeting to cost little beside it, short enough for the caches.
CHUNK_NBYTES = 1 << 20
# How much a rank shows at one meeting. Pieces of a root are shorter, so that the root copies the next one in while the
# others copy this one out.
PIECE_NBYTES = 1 << 20
ROOTED_PIECE_NBYTES = 1 << 18


class ShmCollectives:
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
        self._has_agreed = False
        self._is_weighted = False
        self._weights: list[Any] | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the current call, ascending; empty outside a call."""
        return self._rendezvous.ranks

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
        """Wait until every rank of the call has called it."""
        yield from self.start_steps("barrier")
        yield from self.meet_steps()

    def all_reduce_steps(
        self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0
    ) -> Steps:
        check_reduction(op, send.dtype, weight)
        check_buffers("all_reduce", send, recv, send_count=send.count, recv_count=send.count)
        yield from self.all_reduce_arrays(as_array(send), as_array(recv), op, weight)

    def all_reduce_arrays(self, source: np.ndarray, target: np.ndarray, op: str, weight: float | None) -> Steps:
        """Take the steps of ``all_reduce`` from one flat array into another one or itself, both already checked."""
        yield from self.start_steps("all_reduce", dtype_name(source.dtype), source.size, op, weight=weight)
        yield from self._reduce(source, target, op, is_receiver=True)

    def reduce_steps(
        self, send: Buffer, recv: Buffer, op: str, root: int, *, weight: float | None = None, stream: int = 0
    ) -> Steps:
        check_reduction(op, send.dtype, weight)
        check_buffers("reduce", send, recv, send_count=send.count, recv_count=send.count)
        source, target = as_array(send), as_array(recv)
        self.check_member("reduce", "root", root)
        yield from self.start_steps("reduce", send.dtype, send.count, op, root, weight=weight)
        yield from self._reduce(source, target, op, is_receiver=self.rank == root)

    def reduce_scatter_steps(
        self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0
    ) -> Steps:
        self._check_active("reduce_scatter")
        size, count = len(self.ranks), recv.count
        check_reduction(op, send.dtype, weight)
        check_buffers("reduce_scatter", send, recv, send_count=size * count, recv_count=count)
        source, target = as_array(send), as_array(recv)
        yield from self.start_steps("reduce_scatter", send.dtype, count, op, weight=weight)
        if self.is_small(source.nbytes):
            half = self.next_half()
            self.part(self.rank, half, 0, source)[:] = source
            yield from self.meet_steps()
            offset = self._position() * target.nbytes
            parts = [self.part(rank, half, offset, target) for rank in self.ranks]
            REDUCTIONS[op].reduce_into(parts, self._weights, target)
            return
        for start, stop in _pieces(count, self._chunk_nbytes() // source.itemsize):
            half = self.next_half()
            shares = [slice(block * count + start, block * count + stop) for block in range(size)]
            self._publish_shares(source, shares, half)
            yield from self.meet_steps()
            target[start:stop] = self._fold_share(source, shares, half, op)

    def is_small(self, nbytes: int) -> bool:
        """Whether every rank shows all of an array of this size at one meeting."""
        return nbytes <= min(SMALL_NBYTES // len(self.ranks), self.half_nbytes)

    def _reduce(self, source: np.ndarray, target: np.ndarray, op: str, is_receiver: bool) -> Steps:
        """Reduce ``source`` of all ranks into ``target`` of the receivers."""
        if not self.is_small(source.nbytes):
            yield from self._reduce_shares(source, target, op, is_receiver)
            return
        half = self.next_half()
        self.part(self.rank, half, 0, source)[:] = source
        yield from self.meet_steps()
        if is_receiver:
            parts = [self.part(rank, half, 0, source) for rank in self.ranks]
            REDUCTIONS[op].reduce_into(parts, self._weights, target)

    def _reduce_shares(self, source: np.ndarray, target: np.ndarray, op: str, is_receiver: bool) -> Steps:
        """Reduce in pieces. Every rank reduces its share of a piece; receivers collect the shares at the next meeting.

        So one meeting serves two pieces: it shows the values of this one and the results of the one before.
        """
        size, count = len(self.ranks), source.size
        results = size * self._chunk_nbytes()  # the offset of a rank's result in a half, after the shares of all ranks
        previous: list[slice] = []
        for start, stop in (*_pieces(count, results // source.itemsize), (count, count)):
            half = self.next_half()
            shares = _shares(start, stop, size, source.itemsize)
            self._publish_shares(source, shares, half)
            yield from self.meet_steps()
            result = self._fold_share(source, shares, half, op)
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

    def _fold_share(self, source: np.ndarray, shares: Sequence[slice], half: int, op: str) -> np.ndarray:
        """Reduce this rank's share into its other half, where the next meeting shows it. Return that view."""
        chunk_nbytes, position = self._chunk_nbytes(), self._position()
        mine = source[shares[position]]
        parts = [
            mine if rank == self.rank else self.part(rank, half, position * chunk_nbytes, mine) for rank in self.ranks
        ]
        result = self.part(self.rank, 1 - half, len(shares) * chunk_nbytes, mine)
        REDUCTIONS[op].reduce_into(parts, self._weights, result)
        return result

    def broadcast_steps(self, buffer: Buffer, root: int, *, stream: int = 0) -> Steps:
        array = as_array(buffer)
        self.check_member("broadcast", "root", root)
        yield from self.start_steps("broadcast", buffer.dtype, buffer.count, peer=root)
        for start, stop in _pieces(array.size, self.piece_nbytes(is_rooted=True) // array.itemsize):
            part = self.part(root, self.next_half(), 0, array[start:stop])
            if self.rank == root:
                part[:] = array[start:stop]
            yield from self.meet_steps()
            if self.rank != root:
                array[start:stop] = part

    def all_gather_steps(self, send: Buffer, recv: Buffer, *, stream: int = 0) -> Steps:
        self._check_active("all_gather")
        count = send.count
        check_buffers("all_gather", send, recv, send_count=count, recv_count=len(self.ranks) * count)
        source, target = as_array(send), as_array(recv)
        yield from self.start_steps("all_gather", send.dtype, count)
        for start, stop in _pieces(count, self.piece_nbytes(is_rooted=False) // source.itemsize):
            half = self.next_half()
            self.part(self.rank, half, 0, source[start:stop])[:] = source[start:stop]
            yield from self.meet_steps()
            for block, rank in enumerate(self.ranks):
                there = target[block * count + start : block * count + stop]
                there[:] = self.part(rank, half, 0, there)

    # -- one operation -------------------------------------------------------------------------------------------

    def start_steps(
        self,
        kind: str,
        dtype: str = "",
        count: int = 0,
        op: str = "",
        peer: int = -1,
        weight: float | None = None,
    ) -> Steps:
        """Check the call and the dtype, yield, then show the others what this rank is about to do."""
        self._check_active(kind)
        if dtype:
            named_dtype(dtype)  # raises if the others could not read it
        yield
        self._has_agreed = False
        self._is_weighted = weight is not None
        self._rendezvous.post(Request(kind, op, dtype, count, peer, 0, weight))

    def meet_steps(self) -> Steps:
        """Meet the others. At the first meeting of a collective, compare the requests of all ranks."""
        self._rendezvous.arrive()
        yield
        if not self._has_agreed:
            weights = self._rendezvous.compare()
            self._weights = weights if self._is_weighted else None
            self._has_agreed = True

    def next_half(self) -> int:
        """Return which half belongs to the next meeting."""
        return (self._rendezvous.tick + 1) & 1

    def piece_nbytes(self, *, is_rooted: bool) -> int:
        """Return how many bytes of an array are shown at one meeting."""
        return min(ROOTED_PIECE_NBYTES if is_rooted else PIECE_NBYTES, self.half_nbytes)

    def half(self, rank: int, half: int) -> np.ndarray:
        """Return a view of one of a rank's two halves."""
        view: np.ndarray = self._halves[rank, half]
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

    def _check_active(self, kind: str) -> None:
        if not self.ranks:
            raise SynkError(
                f"cannot run {kind} on rank {self.rank}: no call is running here. "
                "Use collectives inside a function that the runtime called."
            )

    def member(self, kind: str, role: str, place: Any) -> int:
        """Return the number of a rank that a function names by its position among the ranks of the call.

        Raises
        ------
        TypeError, ValueError
            If the call has no such rank.
        """
        self._check_active(kind)
        check_place(kind, role, place, len(self.ranks))
        return self.ranks[place]

    def check_member(self, kind: str, role: str, rank: int) -> None:
        """Raise ValueError unless ``rank`` takes part in the call."""
        self._check_active(kind)
        if rank not in self.ranks:
            raise ValueError(f"cannot {kind}: got {role}={rank}, expected a rank of this call: one of {self.ranks}.")


def _pieces(count: int, length: int) -> list[tuple[int, int]]:
    """Return the bounds of ``count`` elements in pieces of ``length``. There is at least one piece; it may be empty."""
    return [(start, min(start + length, count)) for start in range(0, max(count, 1), length)]


def _shares(start: int, stop: int, size: int, itemsize: int) -> list[slice]:
    """Return the parts of ``[start, stop)`` for ``size`` ranks. All but the last ones are whole cache lines."""
    length = round_up(-(-(stop - start) // size) * itemsize, LINE_NBYTES) // itemsize
    bounds = [min(start + position * length, stop) for position in range(size + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(bounds)]
