"""Wires between ranks of different nodes: sockets that carry single messages.

Each rank has one *inlet*, on which all others send to it. A rank connects to another one when it first has something
for it. On one machine inlets are Unix sockets of the abstract namespace, which leave no file behind; on a cluster they
are TCP ports. Only this file imports zmq.

Every inlet has a key of its own (CURVE), which travels only in orders of the head. Whoever does not know the key cannot
complete the handshake, so nothing of what they send gets in, and what ranks send is encrypted.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Mapping
from typing import cast

import numpy as np
import zmq

MAX_NBYTES = 1 << 20
"""No part of a message is larger, or nearly as large."""


class Wires:
    """One rank's ends of the wires. They are used by one thread at a time, and end with ``close``.

    Parameters
    ----------
    host : str
        The address of this machine, if ranks on others must reach it. Empty: all ranks are on one machine.

    Attributes
    ----------
    address : str
    key : bytes
        What others need to send to this rank.
    fd : int
        Becomes readable when something may have arrived. It may stay unreadable while messages are left, so ``receive``
        is called until it returns None before anybody waits for it.
    """

    def __init__(self, host: str = "") -> None:
        self._context = zmq.Context()
        self._end = weakref.finalize(self, self._context.destroy, 0)  # at the latest when the process ends
        self._outlets: dict[int, zmq.Socket[bytes]] = {}
        self._table: Mapping[int, tuple[str, bytes]] = {}
        self._public, self._secret = zmq.curve_keypair()
        self.key = self._public
        inlet = self._inlet = self._socket(zmq.PULL)
        inlet.set(zmq.CURVE_SERVER, 1)
        inlet.set(zmq.MAXMSGSIZE, MAX_NBYTES)
        inlet.bind(f"tcp://{host}:*" if host else f"ipc://@synk-{secrets.token_hex(16)}")
        self.address = str(inlet.get_string(zmq.LAST_ENDPOINT))
        self.fd = inlet.fileno()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        # No limits on the number of messages: streams have one of their own, and short notes must never wait.
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            socket.set(option, value)
        socket.set(zmq.CURVE_PUBLICKEY, self._public)
        socket.set(zmq.CURVE_SECRETKEY, self._secret)
        return socket

    def connect(self, table: Mapping[int, tuple[str, bytes]]) -> None:
        """Learn the address and the key of every rank."""
        self._table = table

    def send(self, rank: int, head: bytes, body: np.ndarray | None = None) -> None:
        """Send a message to a rank, without waiting. Both parts may be changed once this returns."""
        # The queue to a rank has no limit, so this never waits, even for a rank that is dead. What such a rank has not
        # taken is lost with ``close``, which does not linger.
        outlet = self._outlets.get(rank)
        if outlet is None:
            address, key = self._table[rank]
            outlet = self._outlets[rank] = self._socket(zmq.PUSH)
            outlet.set(zmq.CURVE_SERVERKEY, key)
            outlet.connect(address)
        if body is None:
            outlet.send(head)
        else:
            outlet.send(head, zmq.SNDMORE)
            outlet.send(body.data)

    def receive(self) -> bytes | None:
        """Return the head of the next message, or None if there is none. Its body must be taken or dropped next."""
        if not cast(int, self._inlet.get(zmq.EVENTS)) & zmq.POLLIN:  # a third of what an exception costs
            return None
        return self._inlet.recv(zmq.NOBLOCK)

    def take(self, target: np.ndarray) -> int:
        """Move the body of the message to a flat array of bytes. Return its size, which is 0 if there is none."""
        return self._inlet.recv_into(target.data) if self._inlet.get(zmq.RCVMORE) else 0

    def drop(self) -> None:
        """Drop the body of the message."""
        while self._inlet.get(zmq.RCVMORE):
            self._inlet.recv()

    def close(self) -> None:
        """Close all sockets. What was not sent yet is lost."""
        self._end()


def version() -> str:
    """Return which library this is."""
    return f"pyzmq {zmq.__version__} (libzmq {zmq.zmq_version()})"
