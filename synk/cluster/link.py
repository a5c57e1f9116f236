"""Encrypted connections between the program's machine and a node's, by which a tunnel and its actor exchange messages.

A connection has one direction. The side that listens has a key (CURVE), and the other side gets the key through Ray. A
stranger does not know the key and cannot complete the handshake, so nothing is received from a stranger or sent to one.

A body travels in pieces. Each piece is a message of its own, and only a few are in flight. So a few buffers carry all
pieces, and a body is received straight into its destination.

Messages are never sent twice. The side that has connected learns that the connection is lost and raises ``LinkLost``;
the tunnel then ends, and the head starts the node again. The side that listens does not learn of it: it is an actor,
which Ray ends with the tunnel.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from synk.cluster.channel import Parts

PIECE_NBYTES = 1 << 18
MAX_PIECES = 16
"""How many pieces may wait on each side."""

CONNECT_S = 10.0
"""How long the other side may take to complete the handshake."""

_COUNT = struct.Struct("=q")  # the bytes of a body

_HEARTBEAT_MS, _SILENCE_MS = 10_000, 60_000


class LinkLost(Exception):
    """The connection is lost. Messages in flight may be lost with it."""


class Place(NamedTuple):
    """The address at which a side listens, and its public key, which the other side needs to connect."""

    address: str
    key: bytes


class Link:
    """One side of a connection.

    Parameters
    ----------
    is_sender : bool
    host : str
        The address of this machine on which to listen. The port is chosen here, and ``place`` has it.
    place : Place, optional
        The place of the other side, to connect to it.

    Raises
    ------
    LinkLost
        If the other side cannot be reached.
    """

    place: Place

    def __init__(self, is_sender: bool, *, host: str = "", place: Place | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH if is_sender else zmq.PULL)
        self._socket.hwm = MAX_PIECES
        public, secret = zmq.curve_keypair()
        self._socket.set(zmq.CURVE_PUBLICKEY, public)
        self._socket.set(zmq.CURVE_SECRETKEY, secret)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLOUT if is_sender else zmq.POLLIN)
        self._monitor: zmq.Socket[bytes] | None = None
        if place is None:
            self._socket.set(zmq.CURVE_SERVER, 1)
            self._socket.bind(f"tcp://{host}:*")
            self.place = Place(str(self._socket.get_string(zmq.LAST_ENDPOINT)), public)
        else:
            self.place = place
            try:
                self._connect()
            except BaseException:
                self.close()
                raise

    def _connect(self) -> None:
        """Connect, and never reconnect: a second connection would hide that messages on the first were lost."""
        socket = self._socket
        socket.set(zmq.CURVE_SERVERKEY, self.place.key)
        socket.set(zmq.RECONNECT_IVL, -1)
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(self.place.address)
        if not monitor.poll(int(1000 * CONNECT_S)):
            raise LinkLost(f"cannot connect to {self.place.address}: got no answer within {CONNECT_S:g} s.")
        if recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            raise LinkLost(f"cannot connect to {self.place.address}: the other side has refused.")
        self._monitor = monitor
        self._poller.register(monitor, zmq.POLLIN)

    def send(self, *parts: bytes, body: Any = None) -> None:
        """Send a message of short parts, and its body. Wait while the other side has too much to read.

        Raises
        ------
        LinkLost
            If this side has connected, and the connection is lost.
        """
        view = memoryview(b"" if body is None else body).cast("B")
        self._wait()
        self._socket.send_multipart([_COUNT.pack(view.nbytes), *parts])
        for start in range(0, view.nbytes, PIECE_NBYTES):
            self._wait()
            self._socket.send(view[start : start + PIECE_NBYTES])

    def receive(self) -> tuple[list[bytes], Arriving | None]:
        """Wait for a message. Return its parts and its body, if it has one, which must be received next.

        Raises
        ------
        LinkLost
            If this side has connected, and the connection is lost.
        """
        self._wait()
        count, *parts = self._socket.recv_multipart()
        (nbytes,) = _COUNT.unpack(count)
        return parts, Arriving(self, nbytes) if nbytes else None

    def take(self, target: np.ndarray) -> int:
        """Wait for a piece and receive it into the beginning of an array of bytes. Return its size."""
        self._wait()
        return self._socket.recv_into(target.data)

    def _wait(self) -> None:
        """Wait until the socket is ready. Messages that arrived before the connection was lost are received first."""
        ready = dict(self._poller.poll())
        # The monitor is readable for good once the connection is lost, but messages may still lie in the socket.
        if self._monitor in ready and not ready.get(self._socket, 0) & zmq.POLLIN:
            raise LinkLost(f"cannot reach {self.place.address}: the connection is lost.")

    def await_cut(self, timeout_s: float) -> None:
        """Wait until the other side has ended, for at most ``timeout_s``. Only for the side that has connected."""
        assert self._monitor is not None
        self._monitor.poll(int(1000 * timeout_s))

    def close(self) -> None:
        """Close this side. Messages that were not sent yet are lost."""
        self._context.destroy(0)


class Arriving(Parts):
    """A body that is still to be received: copying it to its destination receives it, once."""

    def __init__(self, link: Link, nbytes: int) -> None:
        self._link, self._nbytes = link, nbytes

    def __len__(self) -> int:
        return self._nbytes

    def copy_into(self, target: np.ndarray) -> None:
        start = 0
        while start < self._nbytes:
            start += self._link.take(target[start : self._nbytes])
