"""The connection between the head and a node. Arrays in its messages are copied once on the way, and not pickled."""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._pure.ranges import LINE_NBYTES, round_up
from synk._wire.channel import INLINE_NBYTES, IS_LARGE, Channel, encode_header
from synk._wire.control import control_blocks
from synk._wire.descriptors import Descriptor
from synk._wire.lifeline import tie_to_master
from synk._wire.memory import Segment
from synk._wire.parcels import dumps

_COUNT = struct.Struct("<Q")


class Parts:
    """A pickle and the buffers that it refers to, to be copied one behind the other.

    The bytes begin with the number of parts and the length of each. Every part starts on a cache line. The buffers are
    views of the user's arrays until :meth:`copy_into`, so an array that changes in between travels as it is then.

    Examples
    --------
    >>> parts = Parts.of({"x": np.arange(3)})
    >>> unpacked(parts.joined())
    {'x': array([0, 1, 2])}
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        views = [memoryview(part).cast("B") for part in parts]
        head = b"".join(_COUNT.pack(number) for number in (len(views), *(view.nbytes for view in views)))
        self._views = [memoryview(head), *views]

    @classmethod
    def of(cls, obj: Any, dumps: Callable[..., bytes] = pickle.dumps) -> Parts:
        """Pickle an object. Contiguous arrays in it are not copied."""
        buffers: list[pickle.PickleBuffer] = []
        data = dumps(obj, protocol=5, buffer_callback=buffers.append)
        return cls([data, *(buffer.raw() for buffer in buffers)])

    def __len__(self) -> int:
        return sum(round_up(view.nbytes, LINE_NBYTES) for view in self._views)

    def copy_into(self, target: np.ndarray) -> None:
        """Copy all parts to an array of at least ``len(self)`` bytes."""
        offset = 0
        for view in self._views:
            target[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
            offset += round_up(view.nbytes, LINE_NBYTES)

    def joined(self) -> bytes:
        target = np.zeros(len(self), np.uint8)
        self.copy_into(target)
        return target.tobytes()


def unpacked(data: Any) -> Any:
    """Return the object that was packed as :class:`Parts`. Its arrays are views of ``data``."""
    view = memoryview(data)
    (count,) = _COUNT.unpack_from(view)
    lengths = [_COUNT.unpack_from(view, (1 + position) * _COUNT.size)[0] for position in range(count)]
    offset = round_up((1 + count) * _COUNT.size, LINE_NBYTES)
    parts = []
    for length in lengths:
        parts.append(view[offset : offset + length])
        offset += round_up(length, LINE_NBYTES)
    return pickle.loads(parts[0], buffers=parts[1:])


def with_code(obj: Any) -> Parts:
    """Pack an object that may refer to classes of the user's script."""
    return Parts.of(obj, dumps)


class NodeChannel(Channel):
    """One side of the connection between the head and an agent. A body may be bytes or :class:`Parts`.

    A large body travels as a segment of its own, which goes with the message: the sender closes its descriptor after
    sending, the receiver after mapping, and the kernel frees the memory with the last view.
    """

    @property
    def has_room(self) -> bool:
        """Whether a body can be sent without waiting for the other side to read earlier ones."""
        waiting = select.poll()
        waiting.register(self.sock, select.POLLOUT)
        return bool(waiting.poll(0))

    def send_body(self, sequence: int, body: Any, fds: Sequence[int] = ()) -> None:
        """Send one body; see :meth:`Channel.send_body`."""
        if not isinstance(body, Parts):
            super().send_body(sequence, body, fds)
        elif len(body) <= INLINE_NBYTES:
            super().send_body(sequence, body.joined(), fds)
        else:
            segment = Segment.create(len(body))
            try:
                body.copy_into(segment.buffer)
                header = encode_header(sequence, len(body), self._token, IS_LARGE)
                socket.send_fds(self.sock, [header], [*fds, segment.fd], socket.MSG_NOSIGNAL)
            finally:
                # The message in the socket has a descriptor of its own. If the other side dies before it reads the
                # message, the kernel frees the memory with the socket.
                segment.close()

    def _body_in(self, fd: int, nbytes: int) -> Any:
        """Return the bytes of a large body. The memory lives as long as any view of it."""
        segment = Segment(fd, nbytes, is_writable=True, segment_id=0, is_private=True)
        segment.close_fd()
        return segment.buffer[:nbytes].data


class NodeEnd:
    """The end of the connection to the head in a child that stands for a node: in an agent or in a tunnel.

    Parameters
    ----------
    sock : socket
    setup : dict
        The first message.
    """

    def __init__(self, sock: socket.socket, setup: dict[str, Any]) -> None:
        fds = setup["fds"]
        for fd in fds.values():
            # A child that outlived this process would keep the head's pipes open.
            os.set_inheritable(fd, False)
        self._channel = NodeChannel(sock, Descriptor(fds["down"]), Descriptor(fds["up"]), bytes.fromhex(setup["token"]))
        # From here on the kernel ends this process with the head, whatever it is doing.
        self._head_fd, self._pulse = tie_to_master(setup)
        self._stacks_fd = fds["stacks"]
        self._control = Segment(fds["control"], setup["control_nbytes"], is_writable=True, segment_id=0)
        down, up = control_blocks(self._control.buffer, setup["world_size"], 0)
        self._own_down, self._own_up = down[setup["rank"]], up[setup["rank"]]
        # Only the mapping stays. The head writes this block without a message: which call is interrupted.
        self._control.close_fd()
        self._setup = setup

    def _write_stacks(self, text: str) -> None:
        """Write the stacks of the node's ranks to the pipe from which the head reads them."""
        os.write(self._stacks_fd, text.encode("utf-8", "replace")[: 1 << 15])
