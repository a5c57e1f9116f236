"""Collectives between the worker processes of one machine, through one shared segment. No socket, no shared lock.

The collectives are in ``_shm_collectives``, their order in ``_schedule``, messages in ``_mailbox``, and where the ranks
meet in ``_rendezvous``.

The master makes the segment (``required_nbytes``) and one eventfd for each rank, hands both to the workers, and keeps
them for those that it starts again: ``set_abort`` when a worker failed, ``reset`` when all workers are idle again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.dtypes import dtype_name
from synk._pure.ops import REDUCE_OPS
from synk._wire.channel import Patience
from synk._wire.memory import Segment
from synk.communicators import Buffer, Capabilities
from synk.communicators._buffers import DTYPE_NAMES, as_array, named_dtype
from synk.communicators._layout import Layout, required_nbytes
from synk.communicators._mailbox import Mailbox
from synk.communicators._messages import Incoming
from synk.communicators._outbox import Outbox
from synk.communicators._rendezvous import Aborted, Rendezvous, reset, set_abort
from synk.communicators._schedule import Operation, Schedule, Steps
from synk.communicators._shm_collectives import ShmCollectives
from synk.communicators._short_path import ShortPath
from synk.errors import CollectiveMismatch, SharedMemoryError

__all__ = ["Aborted", "ShmCommunicator", "required_nbytes", "reset", "set_abort"]


class ShmCommunicator(ShmCollectives):
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
    patience_s : float
        The longest wait that a rank spends awake, where that pays.

    Attributes
    ----------
    short_path : ShortPath
        For messages of plain arrays.

    Raises
    ------
    Aborted
        By every operation, once the master called ``set_abort``.

    Notes
    -----
    A message that fits its mailbox is sent without waiting for the receiver. A longer one waits until the receiver
    waits for anything; what that one does not want yet is kept in its private memory.
    """

    def __init__(
        self, segment: Segment, rank: int, world_size: int, eventfds: Sequence[int], patience_s: float = 0.0
    ) -> None:
        layout = Layout(segment.nbytes, world_size)
        halves = (world_size, 2, layout.half_nbytes)
        rings = (world_size, world_size, layout.mailbox_nbytes)
        rendezvous = Rendezvous(segment, rank, world_size, eventfds, layout.mailbox_nbytes, Patience(patience_s))
        super().__init__(rendezvous, segment.view(layout.halves, halves, np.dtype(np.uint8)))
        self.world_size = world_size
        self._schedule = Schedule(rendezvous)
        self._mailbox = Mailbox(
            rendezvous,
            self._schedule,
            segment.view(layout.mailboxes, rings, np.dtype(np.uint8)),
            Outbox(segment.tail(), rank, world_size),
        )
        self.short_path = ShortPath(rendezvous, self._mailbox)
        self._is_closed = False

    # -- the call ------------------------------------------------------------------------------------------------

    @property
    def call(self) -> int:
        """The number of the present call; -1 outside a call."""
        return self._rendezvous.sequence if self._rendezvous.ranks else -1

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
        self._schedule.clear()
        self._rendezvous.is_unfinished = False
        self._rendezvous.begin(ranks, sequence)

    def complete(self) -> None:
        """Bring what this rank has started in the call to its end, and leave it: the function has returned.

        Raises
        ------
        CollectiveMismatch
            If that cannot be done, or a message is left that nobody has received.
        """
        if self._rendezvous.is_unfinished:  # and the function has got over it
            self.end()
            return
        while self._schedule:
            self.finish(self._schedule.last)
        self._rendezvous.is_unfinished = True
        self._mailbox.complete()
        self._rendezvous.is_unfinished = False
        self.end()
        self._mailbox.check_received()
        self._mailbox.trim()

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

    # -- collectives that are started ------------------------------------------------------------------------------

    def start(self, steps: Steps) -> Operation:
        """Start a collective, behind those that are not finished, and go as far as the others have come.

        What the steps raise before they have shown anything to the others is raised here, and nothing has happened.

        Raises
        ------
        CollectiveMismatch
            If an earlier operation of this call has failed.
        """
        operation = Operation(steps)
        self._check_whole()
        self._rendezvous.is_unfinished = True
        self._schedule.append(operation)
        self._rendezvous.is_unfinished = False
        return operation

    @property
    def has_started(self) -> bool:
        """Whether a collective was started in the call that is not finished."""
        return bool(self._schedule)

    def finish(self, operation: Operation) -> Any:
        """Wait until a collective is done, and return what its steps return."""
        if not operation.is_done:
            self._check_whole()
            self._rendezvous.is_unfinished = True
            self._rendezvous.wait(lambda: self._advance(operation))
            self._rendezvous.is_unfinished = False
        return operation.value

    def test(self, operation: Operation) -> bool:
        """Go as far as the others have come; return whether a collective is done."""
        if not operation.is_done:
            self._check_whole()
            self._rendezvous.is_unfinished = True
            self._advance(operation)
            self._rendezvous.is_unfinished = False
        return operation.is_done

    def run(self, steps: Steps) -> Any:
        """Run a collective to its end."""
        return self.finish(self.start(steps))

    def _advance(self, operation: Operation) -> bool:
        self._schedule.advance()
        if not operation.is_done:  # a sender may have to be freed of a message first
            self._mailbox.progress()
        return operation.is_done

    def barrier(self) -> None:
        """Return when every rank of the call is here."""
        self.run(self.barrier_steps())

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: each operation returns with its result."""
        return contextlib.nullcontext()

    def poll(self) -> str:
        """Return ``"error"`` if the call was aborted or an operation of it failed on this rank, else ``"ok"``."""
        return "error" if self._rendezvous.is_unfinished or self._is_closed or self._rendezvous.is_aborted() else "ok"

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
        self.run(self.all_reduce_steps(send, recv, op, weight=weight))

    def reduce(
        self, send: Buffer, recv: Buffer, op: str, root: int, *, weight: float | None = None, stream: int = 0
    ) -> None:
        """Reduce ``send`` of all ranks into ``recv`` of rank ``root``; elsewhere ``recv`` is not touched."""
        self.run(self.reduce_steps(send, recv, op, root, weight=weight))

    def reduce_scatter(
        self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0
    ) -> None:
        """Reduce ``send`` (one block for each of ``ranks``) and leave this rank's block in ``recv``."""
        self.run(self.reduce_scatter_steps(send, recv, op, weight=weight))

    # -- copies --------------------------------------------------------------------------------------------------

    def broadcast(self, buffer: Buffer, root: int, *, stream: int = 0) -> None:
        """Copy ``buffer`` of rank ``root`` into ``buffer`` of every rank."""
        self.run(self.broadcast_steps(buffer, root))

    def all_gather(self, send: Buffer, recv: Buffer, *, stream: int = 0) -> None:
        """Concatenate ``send`` of all ranks, in the order of ``ranks``, into ``recv``."""
        self.run(self.all_gather_steps(send, recv))

    def send(self, buffer: Buffer, peer: int, tag: int = 0, *, stream: int = 0) -> None:
        """Send ``buffer`` to rank ``peer``, which may be this one; it may be changed as soon as this returns."""
        self.send_array(as_array(buffer), peer, tag)

    def recv(self, buffer: Buffer, peer: int, tag: int = 0, *, stream: int = 0) -> None:
        """Receive into ``buffer`` from rank ``peer`` the oldest message of this tag."""
        self.recv_array(as_array(buffer), peer, tag)

    def send_array(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Send a C-contiguous array, as ``send``."""
        self._check_message("send", peer, array)
        self._rendezvous.is_unfinished = True
        self._mailbox.send(array, peer, tag)
        self._rendezvous.is_unfinished = False

    def isend_array(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Send a C-contiguous array, which may be changed when this returns, without waiting for the receiver."""
        self._check_message("send", peer, array)
        self._rendezvous.is_unfinished = True
        try:
            self._mailbox.isend(array, peer, tag)
        except SharedMemoryError:  # nothing was sent
            self._rendezvous.is_unfinished = False
            raise
        self._rendezvous.is_unfinished = False

    def recv_array(self, like: np.ndarray | None, peer: int, tag: int) -> np.ndarray:
        """Receive into a C-contiguous array, or as a new one whatever comes."""
        return self.finish_message(self.irecv_array(like, peer, tag))

    def irecv_array(self, like: np.ndarray | None, peer: int, tag: int) -> Incoming:
        """Ask for the next message that was not asked for, to be received as by ``recv_array``."""
        self._check_message("recv", peer, like)
        return self._mailbox.irecv(like, peer, tag)

    def finish_message(self, message: Incoming) -> np.ndarray:
        """Wait for what was asked for by ``irecv_array``."""
        if not message.is_done:
            self._check_whole()
            self._rendezvous.is_unfinished = True
            self._mailbox.finish(message)
            self._rendezvous.is_unfinished = False
        return message.array()

    def test_message(self, message: Incoming) -> bool:
        """Take in what has arrived; return whether what was asked for is there."""
        if not message.is_done:
            self._check_whole()
            self._rendezvous.is_unfinished = True
            self._mailbox.progress()
            self._rendezvous.is_unfinished = False
        return message.is_done

    def _check_whole(self) -> None:
        """Raise where an operation of this call was broken off: no later one may meet the others half-way."""
        self._rendezvous.check_abort()
        if self._rendezvous.is_unfinished:
            raise CollectiveMismatch(
                f"cannot communicate on rank {self.rank}: an earlier collective of this call failed, and the ranks "
                "may no longer agree. Let its exception leave the function."
            )

    def _check_message(self, kind: str, peer: int, array: np.ndarray | None) -> None:
        self.check_member(kind, "peer", peer)
        if array is not None:
            named_dtype(dtype_name(array.dtype))  # refuses what the other side could not read
        self._check_whole()
