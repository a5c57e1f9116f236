"""The communicator of one rank in a call over several nodes: its collectives, requests and messages.

Messages between ranks of a node go through its mailbox, and all others by wires.
"""

from __future__ import annotations

import dataclasses

from synk.communicators import Capabilities
from synk.communicators._mailbox import Mailbox
from synk.communicators._messages import Incoming
from synk.communicators._node_collectives import NodeCollectives
from synk.communicators._schedule import Operation
from synk.communicators._wire_mail import WireMailbox


class TwoLevel(NodeCollectives):
    """The collectives and messages of one rank in one call over several nodes; see ``Agreement`` for the parameters."""

    def begin(self, number: int) -> None:
        """Enter the call with this number, which is larger than those of all earlier ones."""
        self._mail.begin(self._all, number)
        self._rendezvous.attach(self._mail, self._mailbox, self._schedule)
        self._local.begin(self._group, number)

    def _leave(self) -> None:
        self._mail.leave()
        self._local.end()

    def end(self) -> None:
        super().end()
        self._rendezvous.detach()

    def close(self) -> None:
        """Leave the call. The parts belong to the caller."""
        self.end()

    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self._local.capabilities(), name="shm and wires")

    def _box(self, peer: int) -> Mailbox | WireMailbox:
        return self._mailbox if peer in self._group else self._mail

    # What waits takes in what comes by wire; see WiredRendezvous. These two do not wait.

    def test(self, operation: Operation) -> bool:
        self._mail.progress()
        return super().test(operation)

    def test_message(self, message: Incoming) -> bool:
        self._mail.progress()
        self._mailbox.progress()
        return super().test_message(message)
