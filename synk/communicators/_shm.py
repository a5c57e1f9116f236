"""Collectives between the worker processes of one machine, through one shared segment. No socket, no shared lock.

``_shm_collectives`` has the collectives, ``_schedule`` their order, ``_mailbox`` messages between two ranks, and
``_rendezvous`` the words by which ranks meet.

The master makes the segment (``required_nbytes``) and one eventfd for each rank. It hands both to the workers, and
keeps them for replacements of workers that died. When a worker failed it calls ``set_abort``, and when all workers are
idle again ``reset``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.dtypes import dtype_name
from synk._pure.ops import REDUCE_OPS
from synk._wire.channel import Patience
from synk._wire.memory import Segment
from synk._wire.process_memory import let_siblings_read
from synk.communicators import Buffer, Capabilities
from synk.communicators._buffers import DTYPE_NAMES, named_dtype
from synk.communicators._exchange import Exchange, Place
from synk.communicators._layout import Layout
from synk.communicators._mailbox import Mailbox
from synk.communicators._messages import Incoming
from synk.communicators._outbox import Outbox
from synk.communicators._rendezvous import SPIN_YIELDS, Aborted, Rendezvous
from synk.communicators._results import ResultMemory
from synk.communicators._schedule import Operation, Schedule, Steps
from synk.communicators._shm_collectives import ShmCollectives
from synk.communicators._short_collectives import ShortCollectives
from synk.communicators._short_path import ShortPath
from synk.errors import CollectiveMismatch, SharedMemoryError

__all__ = ["Aborted", "ShmCommunicator"]


class ShmCommunicator(ShmCollectives):
    """Collectives of one rank. They run between ``begin`` and ``end``, over the ranks given to ``begin``.

    All ranks call the same collectives, in the same order, with equal arguments. If they do not, every rank that waits
    raises ``CollectiveMismatch``, and the rest of the call has no collectives. One thread at a time may use it.

    Parameters
    ----------
    segment : Segment
        Writable, at least ``required_nbytes(world_size)`` bytes, the same memory in all ranks.
    rank, world_size : int
    eventfds : sequence of int
        The descriptors in this process, one for each rank.
    patience_s : float
        How long a rank waits awake at most before it sleeps.
    rendezvous_type : type of Rendezvous

    Attributes
    ----------
    short_path : ShortPath
        The quick way for messages and collectives of plain arrays.
    results : ResultMemory
        Memory for this rank's large results.

    Raises
    ------
    Aborted
        By every operation, once the master has called ``set_abort``.

    Notes
    -----
    ``send_array`` returns without waiting if the message fits into its ring. A longer message is taken in whenever the
    receiver waits for anything: what the receiver has not asked for yet, it keeps in private memory.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        world_size: int,
        eventfds: Sequence[int],
        patience_s: float = 0.0,
        rendezvous_type: type[Rendezvous] = Rendezvous,
    ) -> None:
        layout = Layout(segment.nbytes, world_size)
        halves = (world_size, 2, layout.half_nbytes)
        rings = (world_size, world_size, layout.ring_nbytes)
        rendezvous = rendezvous_type(segment, rank, world_size, eventfds, layout.ring_nbytes, Patience(patience_s))
        super().__init__(rendezvous, segment.view(layout.halves, halves, np.dtype(np.uint8)))
        self.world_size, self.patience = world_size, rendezvous.patience
        self._schedule = Schedule(rendezvous)
        self._mailbox = Mailbox(
            rendezvous,
            self._schedule,
            segment.view(layout.rings, rings, np.dtype(np.uint8)),
            Outbox(segment.tail(), rank, world_size),
        )
        self.results = ResultMemory()
        let_siblings_read()
        short = ShortCollectives(self, rendezvous, self._schedule, self.results, self.meet, self.run, self.go_on)
        self.short_path = ShortPath(rendezvous, self._mailbox, short)
        self._is_closed = False

    def parts(self) -> tuple[Rendezvous, Schedule, Mailbox]:
        """Return what this communicator consists of, for one over several nodes that is built on it."""
        return self._rendezvous, self._schedule, self._mailbox

    # -- the call ------------------------------------------------------------------------------------------------

    @property
    def call(self) -> int:
        """The number of the current call; -1 outside a call."""
        return self._rendezvous.sequence if self._rendezvous.ranks else -1

    def begin(self, ranks: tuple[int, ...], sequence: int) -> None:
        """Enter a call, before its first operation. Only ``ranks`` may call this. ``end`` follows.

        A rank that uses no collectives may write ``skip_words`` instead of both. No rank may enter a call before all
        ranks have left the one before. The master sees to that: it waits for their replies.

        Parameters
        ----------
        ranks : tuple of int
            The ranks that take part, ascending. This rank is one of them.
        sequence : int
            The number of the call, the same on all ranks: at least 1, and larger than in any earlier call.
        """
        self._mailbox.clear()
        self._schedule.clear()
        self._rendezvous.is_unfinished = False
        self._reads_memory = True
        self.short_path.collectives.begin(ranks)
        self._rendezvous.begin(ranks, sequence)

    def complete(self) -> None:
        """Finish what this rank has started in the call, and leave the call. The function has returned.

        Raises
        ------
        CollectiveMismatch
            If something cannot be finished, or a message is left that nobody has received.
        """
        if self._rendezvous.is_unfinished:  # an operation failed, and the function caught its error
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
        self.results.trim()

    def end(self) -> None:
        """Leave the call, after the function returned or raised. Peers that wait for this rank are woken and told."""
        self._rendezvous.end()

    def skip_words(self) -> tuple[memoryview, memoryview]:
        """Return the words by which a rank goes through a call without ``begin`` and ``end``; see ``Rendezvous``."""
        return self._rendezvous.skip_words()

    def wake_sleepers(self) -> None:
        """Wake peers that may wait for what this rank wrote to ``skip_words``."""
        self._rendezvous.wake_all()

    # -- collectives in flight -------------------------------------------------------------------------------------

    def start(self, steps: Steps) -> Operation:
        """Start a collective, behind those in flight, and take the steps for which the other ranks are ready.

        If the steps raise before they have shown anything to the other ranks, nothing has happened.

        Raises
        ------
        CollectiveMismatch
            If an earlier operation of this call has failed.
        """
        operation = Operation(steps)
        self.check_whole()
        self._rendezvous.is_unfinished = True
        self._schedule.append(operation)
        self._rendezvous.is_unfinished = False
        return operation

    @property
    def has_started(self) -> bool:
        """Whether a collective of this call is in flight."""
        return bool(self._schedule)

    def finish(self, operation: Operation) -> Any:
        """Wait until a collective is done. Return what its steps returned."""
        if not operation.is_done:
            self.check_whole()
            self._rendezvous.is_unfinished = True
            self._rendezvous.wait(lambda: self._advance(operation))
            self._rendezvous.is_unfinished = False
        return operation.value

    def test(self, operation: Operation) -> bool:
        """Take the steps for which the other ranks are ready. Return whether a collective is done."""
        if not operation.is_done:
            self.check_whole()
            self._rendezvous.is_unfinished = True
            self._advance(operation)
            self._rendezvous.is_unfinished = False
        return operation.is_done

    def run(self, steps: Steps) -> Any:
        """Run a collective to its end. Return what its steps returned."""
        if self._schedule:  # behind the collectives in flight
            return self.finish(self.start(steps))
        rendezvous = self._rendezvous
        try:
            next(steps)  # all checks of the arguments come before the first yield
            self.check_whole()
            rendezvous.is_unfinished = True
        except StopIteration as end:
            return end.value
        value = self.go_on(steps)
        rendezvous.is_unfinished = False
        return value

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

    def _advance(self, operation: Operation) -> bool:
        self._schedule.advance()
        if not operation.is_done:  # as in _has_met
            self._mailbox.progress()
        return operation.is_done

    def barrier(self) -> None:
        """Return when every rank of the call has called it."""
        self.run(self.barrier_steps())

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: each operation returns with its result."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Leave the call and release the segment. The eventfds stay open: they belong to the caller."""
        if not self._is_closed:
            self._is_closed = True
            self.end()
            self._rendezvous.close()
            self._mailbox.close()
            self.short_path.collectives.close()
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

    def exchange_steps(
        self, kind: str, rows: np.ndarray | None, sizes: list[int] | None, root: int, place: Place
    ) -> Steps:
        """Take the steps of an exchange of rows; see ``Exchange``."""
        return Exchange(self, kind, rows, sizes, root).steps(place)

    # -- messages ------------------------------------------------------------------------------------------------

    def send_array(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Send a C-contiguous array to rank ``peer``, which may be this one. It may be changed once this returns."""
        self._check_message("send", peer, array)
        self._rendezvous.is_unfinished = True
        self._mailbox.send(array, peer, tag)
        self._rendezvous.is_unfinished = False

    def isend_array(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Send a C-contiguous array without waiting for the receiver. The array may be changed once this returns."""
        self._check_message("send", peer, array)
        self._rendezvous.is_unfinished = True
        try:
            self._mailbox.isend(array, peer, tag)
        except SharedMemoryError:  # nothing was sent, so later operations still meet the others
            self._rendezvous.is_unfinished = False
            raise
        self._rendezvous.is_unfinished = False

    def recv_array(self, like: np.ndarray | None, peer: int, tag: int) -> np.ndarray:
        """Receive into a C-contiguous array. Without one, return whatever comes as a new array."""
        return self.finish_message(self.irecv_array(like, peer, tag))

    def irecv_array(self, like: np.ndarray | None, peer: int, tag: int) -> Incoming:
        """Ask for the next message that no earlier receive asked for. ``finish_message`` waits for it."""
        self._check_message("recv", peer, like)
        return self._mailbox.irecv(like, peer, tag)

    def finish_message(self, message: Incoming) -> np.ndarray:
        """Wait for a message that ``irecv_array`` asked for, and return its array."""
        if not message.is_done:
            self.check_whole()
            self._rendezvous.is_unfinished = True
            self._mailbox.finish(message)
            self._rendezvous.is_unfinished = False
        return message.array()

    def test_message(self, message: Incoming) -> bool:
        """Take in what has arrived. Return whether a message that ``irecv_array`` asked for is complete."""
        if not message.is_done:
            self.check_whole()
            self._rendezvous.is_unfinished = True
            self._mailbox.progress()
            self._rendezvous.is_unfinished = False
        return message.is_done

    def check_whole(self) -> None:
        """Raise if an earlier operation of this call was broken off: a later one would meet the others half-way."""
        self._rendezvous.check_abort()
        if self._rendezvous.is_unfinished:
            raise CollectiveMismatch(
                f"cannot communicate on rank {self.rank}: an earlier collective of this call failed, and the ranks "
                "may no longer agree. Let its exception leave the function."
            )

    def _check_message(self, kind: str, peer: int, array: np.ndarray | None) -> None:
        self.check_member(kind, "peer", peer)
        if array is not None:
            named_dtype(dtype_name(array.dtype))  # raises if the other side could not read it
        self.check_whole()
