"""The collectives and messages of one rank in host memory: what is the same within a node and over several.

``_shm`` and ``_two_level`` are the two kinds. They differ in the steps of the collectives, and in the ways of messages.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from synk._pure.dtypes import dtype_name
from synk.communicators._checks import check_place, named_dtype
from synk.communicators._mailbox import Mailbox
from synk.communicators._messages import Incoming
from synk.communicators._rendezvous import Rendezvous
from synk.communicators._schedule import Operation, Schedule, Steps
from synk.communicators._user_arrays import Place, ResultMemory
from synk.errors import SynkError

if TYPE_CHECKING:
    from synk.communicators._wire_mail import WireMailbox


class HostCommunicator(abc.ABC):
    """The base class of communicators of host memory.

    A collective is a generator of *steps* (see ``_schedule``): ``start``, ``test`` and ``finish`` take them one by one,
    and ``run`` takes them all. Everything that can be refused is refused before the first ``yield``, when the other
    ranks know nothing of it yet.

    Every rank calls the same collectives in the same order. Ops are the words of ``REDUCE_OPS``. ``avg`` takes
    ``weight``, this rank's share of the rows (the shares of all ranks sum to 1); ``None`` weights all ranks equally.
    ``source`` and ``target`` may be the same memory. If one of them holds a block for each rank, the other may be this
    rank's block of it. Counts may be 0. If only some of the ranks take part in a call, blocks, shares and averages are
    over those ranks, and every rank keeps its number.

    Attributes
    ----------
    rank, world_size : int
    results : ResultMemory
        Memory for this rank's large results.
    """

    rank: int
    world_size: int
    results: ResultMemory
    _rendezvous: Rendezvous
    _schedule: Schedule
    _mailbox: Mailbox
    _boxes: Sequence[Mailbox | WireMailbox]  # all of this rank's; the first is for ranks of this machine

    # -- the call --------------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the current call, ascending; empty outside a call."""

    @property
    def call(self) -> int:
        """The number of the current call; -1 outside a call."""
        return self._rendezvous.sequence if self._rendezvous.ranks else -1

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

    def complete(self) -> None:
        """Finish what this rank has started in the call, and leave the call. The function has returned.

        Raises
        ------
        CollectiveMismatch
            If something cannot be finished, a message is left that nobody has received, or a send was broken off.
        """
        if self._rendezvous.is_unfinished:  # an operation failed, and the function caught its error
            self.end()
            self._mailbox.check_lent()
            return
        while self._schedule:
            self.finish(self._schedule.last)
        # An interrupt in what follows leaves this set. The call fails then, and ``begin`` of the next one resets it.
        self._rendezvous.is_unfinished = True
        for box in self._boxes:
            box.complete()
        self._rendezvous.is_unfinished = False
        self._leave()
        for box in self._boxes:
            box.check_received()
        self._mailbox.forget()
        self.results.trim()

    def end(self) -> None:
        """Leave the call, after the function returned or raised. Peers that wait for this rank are woken and told."""
        self._leave()

    def disown(self) -> None:
        """In a forked child, which is no rank: refuse all operations, also those that were started before."""
        self._rendezvous.is_unfinished = True

    @abc.abstractmethod
    def _leave(self) -> None:
        """Leave the call. Messages that this rank has sent can still be received."""

    def _check_active(self, kind: str) -> None:
        if not self.ranks:
            raise SynkError(
                f"cannot run {kind} on rank {self.rank}: no call is running here. "
                "Use collectives inside a function that the runtime called."
            )

    # -- collectives in flight -------------------------------------------------------------------------------------

    @property
    def has_started(self) -> bool:
        """Whether a collective of this call is in flight."""
        return bool(self._schedule)

    def start(self, steps: Steps) -> Operation:
        """Start a collective, behind those in flight, and take the steps for which the other ranks are ready.

        If the steps raise before they have shown anything to the other ranks, nothing has happened.

        Raises
        ------
        CollectiveMismatch
            If an earlier operation of this call has failed.
        """
        operation = Operation(steps)  # takes the first step, which checks the arguments
        with self._rendezvous.operation:
            self._schedule.append(operation)
        return operation

    def finish(self, operation: Operation) -> Any:
        """Wait until a collective is done. Return what its steps returned."""
        if not operation.is_done:
            with self._rendezvous.operation:
                self._rendezvous.wait(lambda: self._advance(operation))
        return operation.value

    def test(self, operation: Operation) -> bool:
        """Take the steps for which the other ranks are ready. Return whether a collective is done."""
        if not operation.is_done:
            with self._rendezvous.operation:
                self._progress()
        return operation.is_done

    def run(self, steps: Steps) -> Any:
        """Run a collective to its end. Return what its steps returned."""
        return self.finish(self.start(steps))

    def _advance(self, operation: Operation) -> bool:
        self._schedule.advance()
        if not operation.is_done:  # a rank that is late may be stuck in a send until this one takes its message in
            self._mailbox.progress()
        return operation.is_done

    def _progress(self) -> None:
        """Take in what has come, and take the steps for which the other ranks are ready."""
        self._mailbox.progress()

    # -- the steps of collectives ----------------------------------------------------------------------------------

    # Arrays are flat, and ops and counts have been checked.

    @abc.abstractmethod
    def barrier_steps(self) -> Steps:
        """Wait until every rank of the call has called it."""

    @abc.abstractmethod
    def reduce_steps(
        self, kind: str, source: np.ndarray, target: np.ndarray, op: str, weight: float | None, root: int = -1
    ) -> Steps:
        """Reduce ``source`` of all ranks into ``target``: of every rank, or of rank ``root`` alone (``reduce``); or
        this rank's block of the result, of one block for each of ``ranks`` (``reduce_scatter``).
        """

    @abc.abstractmethod
    def broadcast_steps(self, array: np.ndarray, root: int) -> Steps:
        """Copy ``array`` of rank ``root`` into ``array`` of every rank."""

    @abc.abstractmethod
    def all_gather_steps(self, source: np.ndarray, target: np.ndarray) -> Steps:
        """Concatenate ``source`` of all ranks, in the order of ``ranks``, into ``target``."""

    @abc.abstractmethod
    def exchange_steps(
        self, kind: str, rows: np.ndarray | None, sizes: list[int] | None, root: int, place: Place
    ) -> Steps:
        """Take the steps of an exchange of rows; see ``Exchange``."""

    # -- messages --------------------------------------------------------------------------------------------------

    def _box(self, peer: int) -> Mailbox | WireMailbox:
        """Return the mailbox for messages to and from a rank."""
        return self._mailbox

    def _checked_box(self, peer: int, array: np.ndarray | None) -> Mailbox | WireMailbox:
        if array is not None:
            named_dtype(dtype_name(array.dtype))  # raises if the other side could not read it
        return self._box(peer)

    def send_array(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Send a C-contiguous array to rank ``peer``, which may be this one. It may be changed once this returns."""
        box = self._checked_box(peer, array)
        with self._rendezvous.operation:
            box.send(array, peer, tag)

    def isend_array(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Send a C-contiguous array without waiting for the receiver. The array may be changed once this returns."""
        box = self._checked_box(peer, array)
        with self._rendezvous.operation:
            box.isend(array, peer, tag)

    def irecv_array(self, like: np.ndarray | None, peer: int, tag: int) -> Incoming:
        """Ask for the next message that no earlier receive asked for. ``finish_message`` waits for it.

        It comes into ``like``, a C-contiguous array, or into a new one for None.
        """
        box = self._checked_box(peer, like)
        with self._rendezvous.operation:
            return box.irecv(like, peer, tag)

    def finish_message(self, message: Incoming) -> np.ndarray:
        """Wait for a message that ``irecv_array`` asked for, and return its array."""
        if not message.is_done:
            assert message.request is not None
            with self._rendezvous.operation:
                self._box(message.request.peer).finish(message)
        return message.array()

    def test_message(self, message: Incoming) -> bool:
        """Take in what has arrived. Return whether a message that ``irecv_array`` asked for is complete.

        Raises
        ------
        CollectiveMismatch
            If its sender has left without sending it.
        """
        if not message.is_done:
            assert message.request is not None
            with self._rendezvous.operation:
                self._progress()
                self._box(message.request.peer).is_there(message)
        return message.is_done
