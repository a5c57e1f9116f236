"""Collectives between the worker processes of one machine, through one shared segment. No socket, no shared lock.

Each rank has a *slot* of two halves, which it alone writes and all read. Data of tick ``t`` lies in half ``t & 1``, so
one meeting of the ranks for each piece is enough (see ``_rendezvous``). Results are folded in rank order, whatever the
timing: all ranks hold the same bits, and so does every repetition. Messages go through the mailboxes (``_mailbox``).

The master makes the segment (``required_nbytes``) and one eventfd for each rank, hands both to the workers, and keeps
them for those that it starts again: ``set_abort`` when a worker failed, ``reset`` when all workers are idle again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.ops import REDUCE_OPS
from synk._pure.partials import reduce_into
from synk._pure.ranges import LINE_NBYTES, round_up
from synk._wire.memory import Segment
from synk.communicators import Buffer, Capabilities
from synk.communicators._buffers import DTYPE_NAMES, as_array
from synk.communicators._checks import check_buffers, check_reduction
from synk.communicators._layout import Layout, required_nbytes
from synk.communicators._mailbox import Mailbox
from synk.communicators._rendezvous import Aborted, Rendezvous, Request, reset, set_abort
from synk.errors import CollectiveMismatch, SynkError

__all__ = ["Aborted", "ShmCommunicator", "required_nbytes", "reset", "set_abort"]

# As long as the values of all ranks together take no more, every rank reduces everything for itself: one meeting.
# Above, each reduces its share: at least two meetings.
SMALL_NBYTES = 1 << 19
# A rank's share of one piece, at most: long enough for a meeting to cost little beside it, short enough for the caches.
CHUNK_NBYTES = 1 << 20


class ShmCommunicator:
    """Collectives of one rank; they run between ``begin`` and ``end``, over the ranks given to ``begin``.

    All take part in the same order with equal arguments; where they do not, ``CollectiveMismatch`` is raised on every
    rank that waits, and the rest of this call has no collectives. One thread at a time, but for ``abort``.

    Parameters
    ----------
    segment : Segment
        Writable, at least ``required_nbytes(world_size)`` bytes, the same memory in all ranks.
    rank, world_size : int
    eventfds : sequence of int
        One for each rank, as numbered in this process.

    Raises
    ------
    Aborted
        By every operation, once the master called ``set_abort``.

    Notes
    -----
    A message that fits its mailbox is sent without waiting for the receiver. A longer one waits until the receiver
    waits in any ``send`` or ``recv``; what that one does not want yet is kept in its private memory.
    """

    def __init__(self, segment: Segment, rank: int, world_size: int, eventfds: Sequence[int]) -> None:
        layout = Layout(segment.nbytes, world_size)
        self.rank = rank
        self.world_size = world_size
        self._rendezvous = Rendezvous(segment, rank, world_size, eventfds, layout.mailbox_nbytes)
        # Indexed by rank and half.
        self._halves = segment.view(layout.halves, (world_size, 2, layout.half_nbytes), np.dtype(np.uint8))
        rings = (world_size, world_size, layout.mailbox_nbytes)
        self._mailbox = Mailbox(self._rendezvous, segment.view(layout.mailboxes, rings, np.dtype(np.uint8)))
        self._half_nbytes = layout.half_nbytes
        self._is_closed = False
        # The present operation: whether it goes on, whether the ranks agreed on it, and the weights of all of them.
        self._is_unfinished = False
        self._has_agreed = False
        self._is_weighted = False
        self._weights: list[Any] | None = None

    # -- the call ------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part in the present call, ascending; empty outside a call."""
        return self._rendezvous.ranks

    def begin(self, ranks: tuple[int, ...], sequence: int) -> None:
        """Enter a call, before its first operation; to be called by ``ranks`` only. ``end`` follows.

        One of ``ranks`` that has no use for collectives may call ``skip`` instead of both. No rank may enter a call
        before all ranks have left the one before: the master sees to that by waiting for their replies.

        Parameters
        ----------
        ranks : tuple of int
            Those that take part, ascending, this rank among them.
        sequence : int
            The number of the call, the same on all of them: at least 1, and larger than in any earlier call.
        """
        self._mailbox.clear()
        self._is_unfinished = False
        self._rendezvous.begin(ranks, sequence)

    def end(self) -> None:
        """Leave the call, after the function returned or raised. Peers that still wait for this rank are told."""
        self._rendezvous.end()

    def skip_words(self) -> tuple[memoryview, memoryview]:
        """Return what ``skip`` writes (the last call that each rank has left) and what it looks at: who sleeps."""
        return self._rendezvous.skip_words()

    def wake_sleepers(self) -> None:
        """Wake peers that may wait for what was written to ``skip_words``."""
        self._rendezvous.wake_all()

    def skip(self, sequence: int) -> None:
        """Go through a call without ``begin`` and ``end``. Peers that wait for this rank are told."""
        self._rendezvous.skip(sequence)

    def agree(
        self, kind: str, dtype: str, count: int, op: str = "", peer: int = -1, *, weight: float | None = None
    ) -> None:
        """Return when every rank of the call asks for this same collective; nothing is moved.

        For a library beside this one that does not compare what the ranks ask for (NCCL).

        Raises
        ------
        CollectiveMismatch
        """
        self._start(kind, dtype, count, op, peer=peer, weight=weight)
        self._meet()
        self._finish()

    def barrier(self) -> None:
        """Return when every rank of the call is here."""
        self._start("barrier")
        self._meet()
        self._finish()

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: each operation returns with its result."""
        return contextlib.nullcontext()

    def poll(self) -> str:
        """Return ``"error"`` if the call was aborted or an operation of it failed on this rank, else ``"ok"``."""
        return "error" if self._is_unfinished or self._is_closed or self._rendezvous.is_aborted() else "ok"

    def abort(self) -> None:
        """Break the pending operation of this rank, and all later ones of this call. Callable from another thread."""
        if not self._is_closed:
            self._rendezvous.abort()

    def close(self) -> None:
        """Leave the call and let go of the segment; the eventfds stay with whoever opened them."""
        if not self._is_closed:
            self._is_closed = True
            self.end()
            self._rendezvous.close()
            self._mailbox.close()
            self._halves = np.empty((0, 2, 0), np.uint8)

    def capabilities(self) -> Capabilities:
        """Say what this communicator can do in this process."""
        return Capabilities(name="shm", ops=REDUCE_OPS, dtypes=DTYPE_NAMES)

    # -- reductions ----------------------------------------------------------------------------------------------

    def all_reduce(self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0) -> None:
        """Reduce ``send`` of all ranks into ``recv`` of every rank."""
        check_reduction(op, send.dtype, weight)
        check_buffers("all_reduce", send, recv, send_count=send.count, recv_count=send.count)
        source, target = as_array(send), as_array(recv)
        self._start("all_reduce", send.dtype, send.count, op, weight=weight)
        self._reduce(source, target, op, is_receiver=True)
        self._finish()

    def reduce(
        self, send: Buffer, recv: Buffer, op: str, root: int, *, weight: float | None = None, stream: int = 0
    ) -> None:
        """Reduce ``send`` of all ranks into ``recv`` of rank ``root``; elsewhere ``recv`` is not touched."""
        check_reduction(op, send.dtype, weight)
        check_buffers("reduce", send, recv, send_count=send.count, recv_count=send.count)
        source, target = as_array(send), as_array(recv)
        self._check_member("reduce", "root", root)
        self._start("reduce", send.dtype, send.count, op, root, weight=weight)
        self._reduce(source, target, op, is_receiver=self.rank == root)
        self._finish()

    def reduce_scatter(
        self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0
    ) -> None:
        """Reduce ``send`` (one block for each of ``ranks``) and leave this rank's block in ``recv``."""
        self._check_active("reduce_scatter")
        size, count = len(self.ranks), recv.count
        check_reduction(op, send.dtype, weight)
        check_buffers("reduce_scatter", send, recv, send_count=size * count, recv_count=count)
        source, target = as_array(send), as_array(recv)
        self._start("reduce_scatter", send.dtype, count, op, weight=weight)
        for start, stop in _pieces(count, self._chunk_nbytes() // source.itemsize):
            half = self._next_half()
            shares = [slice(block * count + start, block * count + stop) for block in range(size)]
            self._publish_shares(source, shares, half)
            self._meet()
            target[start:stop] = self._fold_share(source, shares, half, op)
        self._finish()

    def _reduce(self, source: np.ndarray, target: np.ndarray, op: str, is_receiver: bool) -> None:
        if source.nbytes > min(SMALL_NBYTES // len(self.ranks), self._half_nbytes):
            self._reduce_shares(source, target, op, is_receiver)
            return
        half = self._next_half()
        self._part(self.rank, half, 0, source)[:] = source
        self._meet()
        if is_receiver:
            parts = [self._part(rank, half, 0, source) for rank in self.ranks]
            reduce_into(op, parts, self._weights, target)

    def _reduce_shares(self, source: np.ndarray, target: np.ndarray, op: str, is_receiver: bool) -> None:
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
            self._meet()
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
        reduce_into(op, parts, self._weights, result)
        return result

    # -- copies --------------------------------------------------------------------------------------------------

    def broadcast(self, buffer: Buffer, root: int, *, stream: int = 0) -> None:
        """Copy ``buffer`` of rank ``root`` into ``buffer`` of every rank."""
        array = as_array(buffer)
        self._check_member("broadcast", "root", root)
        self._start("broadcast", buffer.dtype, buffer.count, peer=root)
        for start, stop in _pieces(array.size, self._half_nbytes // array.itemsize):
            part = self._part(root, self._next_half(), 0, array[start:stop])
            if self.rank == root:
                part[:] = array[start:stop]
            self._meet()
            if self.rank != root:
                array[start:stop] = part
        self._finish()

    def all_gather(self, send: Buffer, recv: Buffer, *, stream: int = 0) -> None:
        """Concatenate ``send`` of all ranks, in the order of ``ranks``, into ``recv``."""
        self._check_active("all_gather")
        count = send.count
        check_buffers("all_gather", send, recv, send_count=count, recv_count=len(self.ranks) * count)
        source, target = as_array(send), as_array(recv)
        self._start("all_gather", send.dtype, count)
        for start, stop in _pieces(count, self._half_nbytes // source.itemsize):
            half = self._next_half()
            self._part(self.rank, half, 0, source[start:stop])[:] = source[start:stop]
            self._meet()
            for block, rank in enumerate(self.ranks):
                there = target[block * count + start : block * count + stop]
                there[:] = self._part(rank, half, 0, there)
        self._finish()

    def send(self, buffer: Buffer, peer: int, tag: int = 0, *, stream: int = 0) -> None:
        """Send ``buffer`` to rank ``peer``, which may be this one; it may be changed as soon as this returns."""
        body = as_array(buffer).view(np.uint8)
        self._check_member("send", "peer", peer)
        self._mailbox.send(body, self._start("send", buffer.dtype, buffer.count, peer=peer, tag=tag))
        self._finish()

    def recv(self, buffer: Buffer, peer: int, tag: int = 0, *, stream: int = 0) -> None:
        """Receive into ``buffer`` from rank ``peer`` the oldest message of this tag."""
        body = as_array(buffer).view(np.uint8)
        self._check_member("recv", "peer", peer)
        self._mailbox.recv(body, self._start("recv", buffer.dtype, buffer.count, peer=peer, tag=tag))
        self._finish()

    # -- one operation -------------------------------------------------------------------------------------------

    def _start(
        self,
        kind: str,
        dtype: str = "",
        count: int = 0,
        op: str = "",
        peer: int = -1,
        tag: int = 0,
        weight: float | None = None,
    ) -> Request:
        """Show the others what this rank is about to do."""
        self._check_active(kind)
        self._rendezvous.check_abort()
        request = Request(kind, op, dtype, count, peer, tag, weight)
        if self._is_unfinished:
            raise CollectiveMismatch(
                f"cannot run {request} on rank {self.rank}: an earlier collective of this call failed, and the ranks "
                "may no longer agree. Let its exception leave the function."
            )
        # Whatever interrupts the operation, this stays set: no later one of this call can meet the others half-way.
        self._is_unfinished = True
        self._has_agreed = False
        self._is_weighted = request.weight is not None
        self._rendezvous.post(request)
        return request

    def _meet(self) -> None:
        """Meet the others; the first time in a collective, make sure that all want the same."""
        if self._has_agreed:
            self._rendezvous.meet()
            return
        weights = self._rendezvous.agree()
        self._weights = weights if self._is_weighted else None
        self._has_agreed = True

    def _finish(self) -> None:
        self._is_unfinished = False

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

    def _check_member(self, kind: str, role: str, rank: int) -> None:
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
