"""Tagged messages from one rank to another, through a ring of bytes for each ordered pair of ranks.

A ring is a stream: a header of one cache line, the payload, padding to whole lines. The sender alone raises the count
of bytes written and the receiver alone the count of bytes read (both in the rendezvous), so a ring needs no lock.
Whoever waits here takes in everything that has arrived for it; what is not wanted yet is kept in private memory. So
messages may be received in any order of tags, and two ranks may send to each other first and receive afterwards.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np

from synk._pure.ranges import LINE_NBYTES, round_up
from synk.communicators._buffers import DTYPE_NAMES
from synk.communicators._rendezvous import Rendezvous, Request
from synk.errors import CollectiveMismatch

_HEADER = struct.Struct("=4q")  # tag, number of the dtype, elements, bytes


@dataclass
class _Message:
    """One message on the receiver's side, while it arrives and after."""

    dtype: str
    count: int
    body: np.ndarray
    num_filled: int = 0

    def is_complete(self) -> bool:
        return self.num_filled == self.body.size


class Mailbox:
    """One rank's ends of all streams.

    Parameters
    ----------
    rendezvous : Rendezvous
    rings : ndarray of uint8, shape ``(sender, receiver, nbytes)``
        The shared memory; ``nbytes`` is a multiple of the cache line.
    """

    def __init__(self, rendezvous: Rendezvous, rings: np.ndarray) -> None:
        self._rendezvous = rendezvous
        self._rank = rendezvous.rank
        self._rings = rings
        self._capacity = rings.shape[2]
        # While one part is taken out, the next is put in.
        self._grain = max(round_up(self._capacity // 4, LINE_NBYTES), LINE_NBYTES)
        self._arriving: dict[int, _Message] = {}
        self._waiting: defaultdict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        self._expected: tuple[tuple[int, int], np.ndarray] | None = None
        self._is_used = False

    def clear(self) -> None:
        """Forget all messages. To be called before the rendezvous begins a call, so that no rank reads old counts."""
        if self._is_used:
            self._arriving.clear()
            self._waiting.clear()
            self._expected = None
            for rank in range(len(self._rings)):
                self._rendezvous.written[self._rank][rank] = 0
                self._rendezvous.read[self._rank][rank] = 0
            self._is_used = False  # last: an interrupted call leaves the rest to the next one

    def close(self) -> None:
        """Let go of the shared memory."""
        self._rings = self._rings[:0, :0].copy()

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, body: np.ndarray, request: Request) -> None:
        """Write a message of bytes; return as soon as its last byte is in the ring.

        Raises
        ------
        CollectiveMismatch
            If the ring is full and the receiver has left the call, or no rank can go on.
        """
        self._is_used = True
        header = np.zeros(LINE_NBYTES, np.uint8)
        _HEADER.pack_into(
            header.data, 0, request.tag, DTYPE_NAMES.index(request.dtype), request.num_elements, body.size
        )
        self._write(header, request)
        self._write(body, request)

    def _write(self, data: np.ndarray, request: Request) -> None:
        rank, peer, rendezvous = self._rank, request.peer, self._rendezvous
        ring, written = self._rings[rank, peer], rendezvous.written[rank]
        done = 0

        def has_room() -> bool:
            has_left = rendezvous.has_left(peer)  # looked at first: what it read before leaving counts
            self._take_in_all()
            if self._room(peer):
                return True
            if has_left:
                rendezvous.fail(
                    f"cannot finish {request} on rank {rank}: rank {peer} left the function without receiving it. "
                    "Every message that is larger than the mailbox needs a recv."
                )
            return False

        while done < data.size:
            if not self._room(peer):
                rendezvous.wait(has_room)
            start = written[peer] % self._capacity
            room = min(self._room(peer), self._grain, self._capacity - start)
            nbytes = min(room, data.size - done)
            ring[start : start + nbytes] = data[done : done + nbytes]
            done += nbytes
            # Both counts stay multiples of a line, so a header never wraps around.
            rendezvous.fence()
            written[peer] += round_up(nbytes, LINE_NBYTES)
            rendezvous.wake(peer)

    def _room(self, peer: int) -> int:
        """Return how many bytes may be written for ``peer``: whole lines."""
        rendezvous = self._rendezvous
        if not rendezvous.has_begun(peer):  # its count of bytes read is still that of an earlier call
            return self._capacity - rendezvous.written[self._rank][peer]
        return rendezvous.room(self._rank, peer)

    # -- receiving -----------------------------------------------------------------------------------------------

    def recv(self, body: np.ndarray, request: Request) -> None:
        """Fill ``body`` with the next message of this sender and tag.

        Raises
        ------
        CollectiveMismatch
            If the message has another dtype or count, the sender has left without sending, or no rank can go on.
        """
        self._is_used = True
        rendezvous = self._rendezvous
        key = (request.peer, request.tag)
        queue = self._waiting[key]
        self._expected = (key, body)

        def has_message() -> bool:
            has_left = rendezvous.has_left(request.peer)  # looked at first: what it sent before leaving counts
            self._take_in_all()
            if queue and queue[0].is_complete():
                return True
            if has_left:
                rendezvous.fail(
                    f"cannot finish {request} on rank {self._rank}: rank {request.peer} left the function without "
                    "sending it. Every recv needs a send of the same tag."
                )
            return False

        rendezvous.wait(has_message)
        self._expected = None
        message = queue.popleft()
        if not queue:
            del self._waiting[key]
        if (message.dtype, message.count) != (request.dtype, request.num_elements):
            raise CollectiveMismatch(
                f"cannot finish {request} on rank {self._rank}: got a message of {message.count} elements of dtype "
                f"{message.dtype}. Send and receive equal counts and dtypes."
            )
        if message.body is not body:
            body[:] = message.body

    def _take_in_all(self) -> None:
        for sender in self._rendezvous.ranks:
            if self._rendezvous.has_begun(sender):
                self._take_in(sender)

    def _take_in(self, sender: int) -> None:
        """Move all that ``sender`` has written out of the ring."""
        rank, rendezvous = self._rank, self._rendezvous
        ring, read = self._rings[sender, rank], rendezvous.read[rank]
        while True:
            num_new = rendezvous.written[sender][rank] - read[sender]
            if num_new == 0:
                return
            rendezvous.rouse()
            start = read[sender] % self._capacity
            message = self._arriving.get(sender)
            if message is None:
                self._open(sender, ring[start : start + LINE_NBYTES])
                num_read = LINE_NBYTES
            else:
                num_left = message.body.size - message.num_filled
                nbytes = min(num_new, self._capacity - start, num_left)
                message.body[message.num_filled : message.num_filled + nbytes] = ring[start : start + nbytes]
                message.num_filled += nbytes
                num_read = round_up(nbytes, LINE_NBYTES)
                if message.is_complete():
                    del self._arriving[sender]
            rendezvous.fence()
            read[sender] += num_read
            rendezvous.wake(sender)

    def _open(self, sender: int, header: np.ndarray) -> None:
        """Prepare for the message of this header: straight into the array of a waiting recv where there is one."""
        tag, dtype_number, count, nbytes = _HEADER.unpack_from(header.data)
        key = (sender, tag)
        body = None
        if self._expected is not None and self._expected[0] == key and not self._waiting[key]:
            body = self._expected[1]
        if body is None or body.size != nbytes:
            body = np.empty(nbytes, np.uint8)
        message = _Message(DTYPE_NAMES[dtype_number], count, body)
        self._waiting[key].append(message)
        if nbytes:
            self._arriving[sender] = message
