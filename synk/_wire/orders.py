"""How program and ranks talk: orders and replies of fixed size on pipes, bodies with descriptors on a socket.

Beside them lie the control blocks: numbers that both share in memory.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import pickle
import select
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from operator import itemgetter
from typing import Any

import numpy as np

from synk._pure.ranges import nbytes_in_place, put_in_place, taken_from_place
from synk._wire.mapping import NONE, Descriptor, owned
from synk._wire.memory import Segment
from synk.errors import SharedMemoryError

NUM_LANES = 3
"""How many calls can be in flight at once: one runs, one gets its inputs, one waits."""


class Down(IntEnum):
    """Positions in the block that the program writes for a rank.

    INTERRUPT and BROKEN belong to the rank, and count only in lane 0. The others belong to a call.
    """

    INTERRUPT = 0  # the last message that a SIGINT is meant for; written before the signal is sent
    PARTICIPATES = 1
    ROWS = 2  # the rank's weight in averages
    CALL = 3  # number of the call; rank 0's entry counts for all
    GROUP = 4  # number of the NCCL group that joins the ranks of the call; 0: none
    BROKEN = 5  # number of the last NCCL group that was given up
    ALL_GROUP = 6  # number of the group by which the ranks of all nodes are joined; 0: none


class Up(IntEnum):
    """Positions in the block that a worker writes: they belong to the rank, and count only in lane 0."""

    RSS = 0  # resident memory in bytes, at the last measurement
    PHASE = 1  # what the worker is doing: a Phase
    BROKEN = 2  # number of the last NCCL group that this rank gave up
    # bytes that the backend has copied to and from the device since the last call; written on devices
    H2D_NBYTES = 3
    D2H_NBYTES = 4
    PAGEABLE_NBYTES = 5  # those of both that went by way of memory which the driver does not know
    ITEM = 6  # the number of a chunk of a map, and at which of its items this rank is; see ``ITEM_BITS``


class Phase(IntEnum):
    """What a worker is doing: the value of ``Up.PHASE``."""

    IDLE = 0
    FUNCTION = 1
    PUBLISHING = 2
    LOADING = 4


# Each word is aligned and eight bytes wide, and has one writer. So a process that is killed in the middle of a store
# leaves the old number or the new one, never a mixture. A table in docs/design.md says what orders each word.
# 8 words are a cache line: the program and a rank never write to the same line, nor do two ranks.
BLOCK_LENGTH = 8
assert max(Down) < BLOCK_LENGTH
assert max(Up) < BLOCK_LENGTH


def control_nbytes(world_size: int) -> int:
    """Return the size in bytes of the control segment for ``world_size`` ranks."""
    return NUM_LANES * world_size * 2 * BLOCK_LENGTH * 8


def control_blocks(buffer: np.ndarray, world_size: int, lane: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the int64 arrays ``(down, up)`` of a lane, each of shape ``(world_size, BLOCK_LENGTH)``."""
    blocks = buffer[: control_nbytes(world_size)].view(np.int64).reshape(NUM_LANES, world_size, 2, BLOCK_LENGTH)
    return blocks[lane, :, 0], blocks[lane, :, 1]


ORDER = struct.Struct("<6q")
"""number, plan, last committed, last ended, parts of objects in place, whether there is a body"""

ROWS = struct.Struct("<6q")
"""low, high, start, step, start and step in the rank's own shard"""

ORDER_NBYTES = ORDER.size + ROWS.size
NO_ROWS = ROWS.pack(0, 0, 0, 1, 0, 1)

REPLY = struct.Struct("<7q")
"""number, status, and five times in ns: when the rank took the order, when the user's function began and ended, when
the reply was sent, and how long the function waited for other ranks"""

NO_TIMES = (0, 0, 0, 0, 0)

DONE, PLACED, TOLD, FAILED, UNREAD, INTERRUPTED, READY = range(7)
WITH_BODY = frozenset((TOLD, FAILED, UNREAD, READY))
MAY_LACK = frozenset((UNREAD, INTERRUPTED))  # the rank may not have taken in what came with the order

SYNC, LOAD, CLOSE = 0, -1, -2
"""Instead of a plan: answer and tell anew; take the news and answer; end."""

_PACKET = struct.Struct("<3q")  # number, whether it is the last packet, whether its body lies in memory
_LONG = struct.Struct("<2q")  # of a body in memory: how many parts, and the size of the memory
_INLINE, _MAX_FDS, _OUT_OF_BAND = 1 << 15, 200, 1 << 14
_ANCILLARY, _DATA = itemgetter(1), itemgetter(2)  # of what ``recvmsg`` returns, and of a part of it


class Link:
    """One side's ends of the channels between the program and a rank.

    Parameters
    ----------
    sock : socket.socket
    read_fd, write_fd : Descriptor
    """

    def __init__(self, sock: socket.socket, read_fd: Descriptor, write_fd: Descriptor) -> None:
        self._sock, self.read_fd, self._write_fd = sock, read_fd, write_fd
        self.is_open = True
        self.ahead = b""

    def write(self, message: bytes) -> None:
        """Send an order or a reply."""
        os.write(self._write_fd, message)

    def read(self, nbytes: int) -> bytes:
        """Return the next order or reply that is there; nothing if there is none, or the other side is gone."""
        ahead, self.ahead = self.ahead, b""
        try:
            return ahead or os.read(self.read_fd, nbytes)
        except BlockingIOError:
            return b""

    def peek(self) -> bytes:
        """Return the next order if it is there, and leave it to :meth:`read`."""
        if not self.ahead:
            look = select.poll()
            look.register(self.read_fd, select.POLLIN)
            if look.poll(0):
                self.ahead = os.read(self.read_fd, ORDER_NBYTES)
        return self.ahead

    def send_body(self, number: int, content: Any, segments: Sequence[Segment] = ()) -> int:
        """Send the body of message ``number``, before the message. Return the size of its pickle."""
        return self.send_dumped(number, *dumped(content), segments)

    def send_dumped(
        self, number: int, data: bytes, buffers: Sequence[np.ndarray], segments: Sequence[Segment] = ()
    ) -> int:
        """Send a body that is pickled already."""
        memory = None
        if len(data) > _INLINE or buffers:
            head, memory = _in_memory(data, buffers)
        else:
            head = data
        fds = [segment.fd for segment in ([memory] if memory is not None else [])] + [each.fd for each in segments]
        while True:
            now, fds = fds[:_MAX_FDS], fds[_MAX_FDS:]
            packet = [_PACKET.pack(number, not fds, memory is not None), b"" if fds else head]
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", now))] if now else []
            self._sock.sendmsg(packet, extra)
            if not fds:
                break
        if memory is not None:
            memory.close()
        return len(data)

    def receive_body(self, number: int) -> tuple[Any, list[Descriptor]]:
        """Return the body of message ``number``, and the descriptors that came with it. Older bodies are dropped.

        Raises
        ------
        EOFError
            If the other side has ended.
        """
        fds: list[Descriptor] = []
        while True:
            try:
                packet = self._receive(fds)
            except ConnectionResetError:  # said once of a side that died with unread packets: what it sent is there
                packet = self._receive(fds)
            if not packet:
                raise EOFError("the other side closed its end")
            found, is_last, is_long = _PACKET.unpack_from(packet.ljust(_PACKET.size))
            if found != number:
                fds = []
            elif is_last:
                head = packet[_PACKET.size :]
                return (loaded_from(head, fds.pop(0)) if is_long else pickle.loads(head)), fds

    def _receive(self, fds: list[Descriptor]) -> bytes:
        """Return a packet, and add its descriptors to ``fds``. They have owners before any line of Python runs."""
        size, room = _PACKET.size + _INLINE, socket.CMSG_SPACE(_MAX_FDS * 4)
        received, again = itertools.tee(map(self._sock.recvmsg, [size], [room], [socket.MSG_CMSG_CLOEXEC]))
        rights = map(_DATA, itertools.chain.from_iterable(map(_ANCILLARY, received)))
        fds += owned(itertools.chain.from_iterable(map(array.array, itertools.repeat("i"), rights)))
        ((packet, _, flags, _),) = again
        if flags & socket.MSG_CTRUNC:
            raise SharedMemoryError(
                "cannot take in a message: got more descriptors than this process may open. Raise the limit of open "
                "files (ulimit -n)."
            )
        return packet

    def drain(self) -> None:
        """Drop the packets that are there; the kernel closes their descriptors."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._sock.recv(1, socket.MSG_DONTWAIT):
                pass

    def close(self) -> None:
        self.is_open = False
        self.read_fd = self._write_fd = NONE  # type: ignore[assignment]
        self._sock.close()


def dumped(content: Any) -> tuple[bytes, list[np.ndarray]]:
    """Return a pickle, and its large buffers beside it.

    They are kept as arrays, never as memoryviews: one that the collector finds in a cycle of garbage while something
    still uses its buffer is a segmentation fault (CPython 3.11). Arrays hide theirs from the collector.
    """
    buffers: list[np.ndarray] = []

    def is_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUT_OF_BAND:
            return True
        buffers.append(np.frombuffer(raw, np.uint8))
        return False

    return pickle.dumps(content, protocol=5, buffer_callback=is_inside), buffers


def apart(data: bytes) -> Any:
    """Return bytes in the form in which they travel in a body: beside its pickle if they are many."""
    return data if len(data) < _OUT_OF_BAND else np.frombuffer(data, np.uint8)


def _in_memory(data: bytes, buffers: Sequence[np.ndarray]) -> tuple[bytes, Segment]:
    """Return the head of a long body, and the memory in which it lies."""
    parts = [data, *buffers]
    memory = Segment.create(nbytes_in_place(parts))
    put_in_place(memory.buffer, parts)
    return _LONG.pack(len(parts), memory.nbytes), memory


def loaded_from(head: bytes, fd: Descriptor) -> Any:
    """Load a long body. Its buffers lie in memory that is private to this process."""
    count, nbytes = _LONG.unpack(head)
    memory = Segment(fd, nbytes, is_writable=True, segment_id=0, is_private=True)
    memory.close_fd()
    data, *buffers = taken_from_place(memory.buffer, count)
    return pickle.loads(data.data, buffers=buffers)
