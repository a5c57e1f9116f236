"""How the program and the agent of a node talk: lists of events, in messages that never block.

An event is a tuple: the name of the method that acts on it, and its arguments. They hold names, numbers, pickles that
nobody opens on the way, and arrays, which travel beside the pickle of the message.
"""

from __future__ import annotations

import select
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from synk._wire import orders as wire

Event = tuple[Any, ...]

_BELL = struct.Struct("<q")


class Post:
    """Messages over a link: each is a body, and a bell that has its number.

    Parameters
    ----------
    link : Link

    Attributes
    ----------
    fd : int
        Becomes writable when there is room.
    unsent : deque of (int, bytes, list of ndarray)
        What was queued and not sent: number, pickle and buffers of each message.
    """

    def __init__(self, link: wire.Link) -> None:
        self.link = link
        self.unsent: deque[tuple[int, bytes, Sequence[np.ndarray]]] = deque()
        self._number = 0
        self.fd = link._sock.fileno()
        self._room = select.poll()
        self._room.register(self.fd, select.POLLOUT)

    def has_room(self) -> bool:
        """Whether a message can be sent without waiting for the other side to read earlier ones."""
        return bool(self._room.poll(0))

    def send(self, events: list[Event]) -> None:
        """Send a message. Arrays are copied now."""
        self._number += 1
        self._put(self._number, *wire.dumped(events))

    def queue(self, events: list[Event]) -> int:
        """Send a message, or keep it for :meth:`send_unsent`. Return its size. Arrays are copied now."""
        self._number += 1
        data, buffers = wire.dumped(events)
        if self.unsent or not self.has_room():
            self.unsent.append((self._number, data, [each.copy() for each in buffers]))
        else:
            self._put(self._number, data, buffers)
        return len(data) + sum(each.nbytes for each in buffers)

    def send_unsent(self) -> None:
        """Send of what was queued as much as there is room for."""
        while self.unsent and self.has_room():
            self._put(*self.unsent.popleft())

    def _put(self, number: int, data: bytes, buffers: Sequence[np.ndarray]) -> None:
        self.link.send_dumped(number, data, buffers)
        self.link.write(_BELL.pack(number))

    def received(self) -> Iterator[list[Event]]:
        """Yield the messages that are there."""
        while len(bell := self.link.read(_BELL.size)) == _BELL.size:
            yield self.link.receive_body(_BELL.unpack(bell)[0])[0]
