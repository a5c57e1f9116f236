"""The communicator of one rank in a call over several nodes: its collectives, requests and messages.

Messages between ranks of a node go through its mailbox, and all others by wires.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from synk._pure.dtypes import dtype_name
from synk.communicators import Buffer, Capabilities
from synk.communicators._buffers import named_dtype
from synk.communicators._messages import Incoming
from synk.communicators._node_collectives import NodeCollectives
from synk.communicators._schedule import Operation, Steps
from synk.communicators._shm import ShmCommunicator
from synk.communicators._wire_mail import FarIncoming


class TwoLevel(NodeCollectives):
    """The collectives and messages of one rank in one call over several nodes; see ``NodeCollectives``.

    It has the methods of ``ShmCommunicator`` that a function's collectives need.
    """

    # -- the call ------------------------------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Enter the call with this number, which is larger than those of all earlier ones."""
        self._mail.begin(self._all, number)
        self._rendezvous.attach(self._mail, self._mailbox, self._schedule)
        self._local.begin(self._group, number)

    def complete(self) -> None:
        """Finish what this rank has started in the call, and leave the call. The function has returned.

        Raises
        ------
        CollectiveMismatch
            If something cannot be finished, or a message is left that nobody has received.
        """
        rendezvous, mail, mailbox = self._rendezvous, self._mail, self._mailbox
        if rendezvous.is_unfinished:  # an operation failed, and the function caught its error
            self.end()
            return
        while self._schedule:
            self.finish(self._schedule.last)
        rendezvous.is_unfinished = True
        mailbox.complete()
        mail.complete()
        rendezvous.is_unfinished = False
        mail.leave()
        self._local.end()
        mailbox.check_received()
        mail.check_received()
        mailbox.trim()
        self.results.trim()

    def end(self) -> None:
        """Leave the call, after the function returned or raised."""
        self._mail.leave()
        self._local.end()
        self._rendezvous.detach()

    def close(self) -> None:
        """Leave the call. The parts belong to the caller."""
        self.end()

    # -- collectives in flight -----------------------------------------------------------------------------------------

    @property
    def has_started(self) -> bool:
        """Whether a collective of this call is in flight."""
        return self._local.has_started

    def start(self, steps: Steps) -> Operation:
        """Start a collective; see ``ShmCommunicator.start``."""
        return self._local.start(steps)

    def finish(self, operation: Operation) -> Any:
        """Wait until a collective is done. Return what its steps returned."""
        return self._local.finish(operation)

    def test(self, operation: Operation) -> bool:
        """Take the steps for which the other ranks are ready. Return whether a collective is done."""
        self._mail.progress()
        return self._local.test(operation)

    def run(self, steps: Steps) -> Any:
        """Run a collective to its end. Return what its steps returned."""
        return self.finish(self.start(steps))

    def capabilities(self) -> Capabilities:
        """Say what this communicator can do in this process."""
        return dataclasses.replace(self._local.capabilities(), name="shm and wires")

    # -- collectives --------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return when every rank of the call has called it."""
        self.run(self.barrier_steps())

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

    def broadcast(self, buffer: Buffer, root: int, *, stream: int = 0) -> None:
        """Copy ``buffer`` of rank ``root`` into ``buffer`` of every rank."""
        self.run(self.broadcast_steps(buffer, root))

    def all_gather(self, send: Buffer, recv: Buffer, *, stream: int = 0) -> None:
        """Concatenate ``send`` of all ranks, in the order of ``ranks``, into ``recv``."""
        self.run(self.all_gather_steps(send, recv))

    # -- messages ------------------------------------------------------------------------------------------------------

    def _guarded(self, array: np.ndarray | None, action: Callable[[], Any]) -> Any:
        """Do something with a message to or from another node. If it is broken off, later operations are refused."""
        if array is not None:
            named_dtype(dtype_name(array.dtype))  # raises if the other side could not read it
        self._local.check_whole()
        self._rendezvous.is_unfinished = True
        result = action()
        self._rendezvous.is_unfinished = False
        return result

    def send_array(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Send a C-contiguous array to rank ``peer``, which may be this one. It may be changed once this returns."""
        self.check_member("send", "peer", peer)
        if peer in self._group:
            self._local.send_array(array, peer, tag)
        else:
            self._guarded(array, lambda: self._mail.send(array, peer, tag))

    def isend_array(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Send a C-contiguous array without waiting for the receiver. The array may be changed once this returns."""
        self.check_member("send", "peer", peer)
        if peer in self._group:
            self._local.isend_array(array, peer, tag)
        else:
            self._guarded(array, lambda: self._mail.isend(array, peer, tag))

    def recv_array(self, like: np.ndarray | None, peer: int, tag: int) -> np.ndarray:
        """Receive into a C-contiguous array. Without one, return whatever comes as a new array."""
        return self.finish_message(self.irecv_array(like, peer, tag))

    def irecv_array(self, like: np.ndarray | None, peer: int, tag: int) -> Incoming:
        """Ask for the next message that no earlier receive asked for. ``finish_message`` waits for it."""
        self.check_member("recv", "peer", peer)
        if peer in self._group:
            return self._local.irecv_array(like, peer, tag)
        message: Incoming = self._guarded(like, lambda: self._mail.irecv(like, peer, tag))
        return message

    def finish_message(self, message: Incoming) -> np.ndarray:
        """Wait for a message that ``irecv_array`` asked for, and return its array."""
        if isinstance(message, FarIncoming) and not message.is_done:
            self._guarded(None, lambda: self._mail.finish(message))
        return self._local.finish_message(message)

    def test_message(self, message: Incoming) -> bool:
        """Take in what has arrived. Return whether a message that ``irecv_array`` asked for is complete."""
        self._mail.progress()
        return self._local.test_message(message)


Host = ShmCommunicator | TwoLevel
"""What a function communicates by: within a node, or between nodes."""
