"""The collectives of a rank in shared memory, step by step. Each is a generator; ``_schedule`` says when it goes on.

Each rank has a *slot* of two halves, which it alone writes and all read. Data of tick ``t`` lies in half ``t & 1``, so
one meeting of the ranks for each piece is enough (see ``_rendezvous``). Results are folded in rank order, whatever the
timing: all ranks hold the same bits, and so does every repetition.
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

# As long as the values of all ranks together take no more, every rank reduces everything for itself: one meeting.
# Above, each reduces its share: at least two meetings.
SMALL_NBYTES = 1 << 19
# A rank's share of one piece, at most: long enough for a meeting to cost little beside it, short enough for the caches.
CHUNK_NBYTES = 1 << 20


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
        self._half_nbytes = halves.shape[2]
        # Of the collective under way: whether the ranks agreed on it, and the weights of all of them.
        self._has_agreed = False
        self._is_weighted = False
        self._weights: list[Any] | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part in the present call, ascending; empty outside a call."""
        return self._rendezvous.ranks

    def agree_steps(
        self, kind: str, dtype: str, count: int, op: str = "", peer: int = -1, *, weight: float | None = None
    ) -> Steps:
        """Return when every rank of the call asks for this same collective; nothing is moved.

        For a library beside this one that does not compare what the ranks ask for (NCCL).

        Raises
        ------
        CollectiveMismatch
        """
        yield from self._start(kind, dtype, count, op, peer=peer, weight=weight)
        yield from self._meet()

    def barrier_steps(self) -> Steps:
        """Return when every rank of the call is here."""
        yield from self._start("barrier")
        yield from self._meet()

    def all_reduce_steps(
        self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0
    ) -> Steps:
        check_reduction(op, send.dtype, weight)
        check_buffers("all_reduce", send, recv, send_count=send.count, recv_count=send.count)
        yield from self.all_reduce_arrays(as_array(send), as_array(recv), op, weight)

    def all_reduce_arrays(self, source: np.ndarray, target: np.ndarray, op: str, weight: float | None) -> Steps:
        """Take the steps of ``all_reduce`` from one flat array into another, or the same one, as checked before."""
        yield from self._start("all_reduce", dtype_name(source.dtype), source.size, op, weight=weight)
        yield from self._reduce(source, target, op, is_receiver=True)

    def reduce_steps(
        self, send: Buffer, recv: Buffer, op: str, root: int, *, weight: float | None = None, stream: int = 0
    ) -> Steps:
        check_reduction(op, send.dtype, weight)
        check_buffers("reduce", send, recv, send_count=send.count, recv_count=send.count)
        source, target = as_array(send), as_array(recv)
        self.check_member("reduce", "root", root)
        yield from self._start("reduce", send.dtype, send.count, op, root, weight=weight)
        yield from self._reduce(source, target, op, is_receiver=self.rank == root)

    def reduce_scatter_steps(
        self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0
    ) -> Steps:
        self._check_active("reduce_scatter")
        size, count = len(self.ranks), recv.count
        check_reduction(op, send.dtype, weight)
        check_buffers("reduce_scatter", send, recv, send_count=size * count, recv_count=count)
        source, target = as_array(send), as_array(recv)
        yield from self._start("reduce_scatter", send.dtype, count, op, weight=weight)
        for start, stop in _pieces(count, self._chunk_nbytes() // source.itemsize):
            half = self._next_half()
            shares = [slice(block * count + start, block * count + stop) for block in range(size)]
            self._publish_shares(source, shares, half)
            yield from self._meet()
            target[start:stop] = self._fold_share(source, shares, half, op)

    def _reduce(self, source: np.ndarray, target: np.ndarray, op: str, is_receiver: bool) -> Steps:
        if source.nbytes > min(SMALL_NBYTES // len(self.ranks), self._half_nbytes):
            yield from self._reduce_shares(source, target, op, is_receiver)
            return
        half = self._next_half()
        self._part(self.rank, half, 0, source)[:] = source
        yield from self._meet()
        if is_receiver:
            parts = [self._part(rank, half, 0, source) for rank in self.ranks]
            REDUCTIONS[op].reduce_into(parts, self._weights, target)

    def _reduce_shares(self, source: np.ndarray, target: np.ndarray, op: str, is_receiver: bool) -> Steps:
        """Reduce in pieces: every rank its share of each, collected by the receivers at the next meeting.

        So one meeting serves two pieces: it shows the values of this one and the results of the one before.
        """
        size, count = len(self.ranks), source.size
        results = size * self._chunk_nbytes()  # where in a half a result lies: after the share of each rank
        previous: list[slice] = []
        for start, stop in (*_pieces(count, results // source.itemsize), (count, count)):
            half = self._next_half()
            shares = _shares(start, stop, size, source.itemsize)
            self._publish_shares(source, shares, half)
            yield from self._meet()
            result = self._fold_share(source, shares, half, op)
            if is_receiver:
                target[shares[self._position()]] = result
                for rank, share in zip(self.ranks, previous, strict=False):
                    if rank != self.rank:
                        target[share] = self._part(rank, half, results, target[share])
            previous = shares

    def _publish_shares(self, source: np.ndarray, shares: Sequence[slice], half: int) -> None:
        """Put what the others reduce into this rank's half; its own share is read where it is."""
        chunk_nbytes = self._chunk_nbytes()
        for position, share in enumerate(shares):
            if position != self._position():
                self._part(self.rank, half, position * chunk_nbytes, source[share])[:] = source[share]

    def _fold_share(self, source: np.ndarray, shares: Sequence[slice], half: int, op: str) -> np.ndarray:
        """Reduce this rank's share into its other half, where the next meeting shows it; return that view."""
        chunk_nbytes, position = self._chunk_nbytes(), self._position()
        mine = source[shares[position]]
        parts = [
            mine if rank == self.rank else self._part(rank, half, position * chunk_nbytes, mine) for rank in self.ranks
        ]
        result = self._part(self.rank, 1 - half, len(shares) * chunk_nbytes, mine)
        REDUCTIONS[op].reduce_into(parts, self._weights, result)
        return result

    def broadcast_steps(self, buffer: Buffer, root: int, *, stream: int = 0) -> Steps:
        array = as_array(buffer)
        self.check_member("broadcast", "root", root)
        yield from self._start("broadcast", buffer.dtype, buffer.count, peer=root)
        for start, stop in _pieces(array.size, self._half_nbytes // array.itemsize):
            part = self._part(root, self._next_half(), 0, array[start:stop])
            if self.rank == root:
                part[:] = array[start:stop]
            yield from self._meet()
            if self.rank != root:
                array[start:stop] = part

    def all_gather_steps(self, send: Buffer, recv: Buffer, *, stream: int = 0) -> Steps:
        self._check_active("all_gather")
        count = send.count
        check_buffers("all_gather", send, recv, send_count=count, recv_count=len(self.ranks) * count)
        source, target = as_array(send), as_array(recv)
        yield from self._start("all_gather", send.dtype, count)
        for start, stop in _pieces(count, self._half_nbytes // source.itemsize):
            half = self._next_half()
            self._part(self.rank, half, 0, source[start:stop])[:] = source[start:stop]
            yield from self._meet()
            for block, rank in enumerate(self.ranks):
                there = target[block * count + start : block * count + stop]
                there[:] = self._part(rank, half, 0, there)

    # -- one operation -------------------------------------------------------------------------------------------

    def _start(
        self,
        kind: str,
        dtype: str = "",
        count: int = 0,
        op: str = "",
        peer: int = -1,
        weight: float | None = None,
    ) -> Steps:
        """Show the others what this rank is about to do."""
        self._check_active(kind)
        if dtype:
            named_dtype(dtype)  # refuses what the others could not read
        yield
        self._has_agreed = False
        self._is_weighted = weight is not None
        self._rendezvous.post(Request(kind, op, dtype, count, peer, 0, weight))

    def _meet(self) -> Steps:
        """Meet the others; the first time in a collective, make sure that all want the same."""
        self._rendezvous.arrive()
        yield
        if not self._has_agreed:
            weights = self._rendezvous.compare()
            self._weights = weights if self._is_weighted else None
            self._has_agreed = True

    def _next_half(self) -> int:
        """Return which half belongs to the next meeting."""
        return (self._rendezvous.tick + 1) & 1

    def _part(self, rank: int, half: int, offset: int, like: np.ndarray) -> np.ndarray:
        """View as many bytes of a half as ``like`` has, with its dtype."""
        return self._halves[rank, half, offset : offset + like.nbytes].view(like.dtype)

    def _chunk_nbytes(self) -> int:
        """Return the largest share of a piece: a half holds one for each rank, and a result."""
        return min(CHUNK_NBYTES, self._half_nbytes // (len(self.ranks) + 1) // LINE_NBYTES * LINE_NBYTES)

    def _position(self) -> int:
        return self.ranks.index(self.rank)

    def _check_active(self, kind: str) -> None:
        if not self.ranks:
            raise SynkError(
                f"cannot run {kind} on rank {self.rank}: no call is running here. "
                "Use collectives inside a function that the runtime called."
            )

    def member(self, kind: str, role: str, place: Any) -> int:
        """Return the number of the rank that functions know by its place among those of the call.

        Raises
        ------
        TypeError, ValueError
            If there is none.
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
    """Return the bounds of ``count`` elements in pieces of ``length``: at least one piece, which may be empty."""
    return [(start, min(start + length, count)) for start in range(0, max(count, 1), length)]


def _shares(start: int, stop: int, size: int, itemsize: int) -> list[slice]:
    """Return the parts of ``[start, stop)`` for ``size`` ranks; all but the last ones are whole cache lines."""
    length = round_up(-(-(stop - start) // size) * itemsize, LINE_NBYTES) // itemsize
    bounds = [min(start + position * length, stop) for position in range(size + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(bounds)]
