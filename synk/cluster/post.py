"""How the program and the agent of a node talk: lists of events, in messages that never block.

An event is a tuple: the name of the method that acts on it, and its arguments. They hold names, numbers, pickles that
nobody opens on the way, and arrays, which travel beside the pickle of the message.
"""

from __future__ import annotations

import select
import struct
from collections.abc import Iterator
from typing import Any

from synk._wire import orders as wire

Event = tuple[Any, ...]

_BELL = struct.Struct("<q")


class Post:
    """Messages over a link: each is a body, and a bell that has its number.

    Parameters
    ----------
    link : Link
    """

    def __init__(self, link: wire.Link) -> None:
        self.link = link
        self._number = 0
        self._room = select.poll()
        self._room.register(link._sock, select.POLLOUT)

    def has_room(self, timeout_ms: int = 0) -> bool:
        """Whether a message can be sent without waiting for the other side to read earlier ones."""
        return bool(self._room.poll(timeout_ms))

    def send(self, events: list[Event]) -> int:
        """Send a message, and return its size. Arrays are copied now."""
        self._number += 1
        data, buffers = wire.dumped(events)
        self.link.send_dumped(self._number, data, buffers)
        self.link.write(_BELL.pack(self._number))
        return len(data) + sum(buffer.nbytes for buffer in buffers)

    def received(self) -> Iterator[list[Event]]:
        """Yield the messages that are there."""
        while len(bell := self.link.read(_BELL.size)) == _BELL.size:
            yield self.link.receive_body(_BELL.unpack(bell)[0])[0]
