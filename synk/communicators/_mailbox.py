"""Tagged messages from one rank to another, through a ring of bytes for each ordered pair of ranks.

A ring is a stream of messages: a line with the header and the first bytes, the other bytes, padding to whole lines. The
sender alone raises the count of bytes written and the receiver alone the count of bytes read (both in the rendezvous),
so a ring needs no lock. Whoever waits for a message takes in everything that has arrived for it; what is not wanted yet
is kept in private memory. So messages may be received in any order of tags, and two ranks may send to each other first
and receive afterwards.

A message that finds no room stands in a queue of its sender, who writes on whenever it waits for anything.
"""

from __future__ import annotations

import functools
from collections import deque

import numpy as np

from synk._pure.dtypes import dtype_name
from synk._pure.ranges import LINE_NBYTES, round_up
from synk.communicators._buffers import DTYPE_NAMES, named_dtype
from synk.communicators._messages import (
    HEADER,
    Incoming,
    Outgoing,
)
from synk.communicators._rendezvous import Rendezvous, Request
from synk.communicators._schedule import Schedule

Key = tuple[int, int]
"""Sender and tag."""


class Mailbox:
    """One rank's ends of all streams.

    Parameters
    ----------
    rendezvous : Rendezvous
    schedule : Schedule
        Of the collectives that were started: they go on while the rank waits for a message.
    rings : ndarray of uint8, shape ``(sender, receiver, nbytes)``
        The shared memory; ``nbytes`` is a multiple of the cache line.
    """

    def __init__(self, rendezvous: Rendezvous, schedule: Schedule, rings: np.ndarray) -> None:
        self._rendezvous = rendezvous
        self._schedule = schedule
        self._rank = rendezvous.rank
        self.to_peers = list(rings[self._rank])
        self.from_peers = list(rings[:, self._rank])
        self.capacity = rings.shape[2]
        # While one part is taken out, the next is put in.
        self._grain = max(round_up(self.capacity // 4, LINE_NBYTES), LINE_NBYTES)
        self._unsent: dict[int, deque[Outgoing]] = {}  # by receiver; none that is empty
        self._arriving: dict[int, Incoming] = {}  # by sender
        self._posted: dict[Key, deque[Incoming]] = {}  # that have not come
        self._arrived: dict[Key, deque[Incoming]] = {}  # that nobody has asked for
        self.is_used = False  # in the present call

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked for, kept or waiting."""
        return not (self._arriving or self._posted or self._arrived or self._unsent or self._schedule.operations)

    def clear(self) -> None:
        """Forget all messages. To be called before the rendezvous begins a call, so that no rank reads old counts."""
        if self.is_used:
            for messages in (self._unsent, self._arriving, self._posted, self._arrived):
                messages.clear()
            rank, rendezvous = self._rank, self._rendezvous
            for peer in range(len(self.to_peers)):
                rendezvous.written[rank][peer] = 0
                rendezvous.read[rank][peer] = 0
                rendezvous.unsent[rank][peer] = 0
            self.is_used = False  # last: an interrupted call leaves the rest to the next one

    def close(self) -> None:
        """Let go of the shared memory."""
        self.to_peers, self.from_peers = [], []

    def progress(self) -> None:
        """Take in what has arrived, write what finds room, and go on with the collectives."""
        for peer in self._rendezvous.ranks:
            if self._rendezvous.has_begun(peer):
                self._take_in(peer)
        self.write_on()
        self._schedule.advance()

    # -- the end of a call ---------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Wait for what was asked for, and until what was sent is in the rings."""
        for messages in list(self._posted.values()):
            for message in list(messages):
                self.finish(message)
        for outgoing in [message for queue in self._unsent.values() for message in queue]:
            self._finish_sending(outgoing)

    def check_received(self) -> None:
        """When this rank has left the call: wait until its messages are taken in, and raise where one is left over.

        What its receiver has taken in and nobody has asked for is an error there.

        Raises
        ------
        CollectiveMismatch
        """
        rank, rendezvous = self._rank, self._rendezvous
        for (sender, tag), messages in self._arrived.items():
            message = messages[0]
            request = Request("send", dtype=message.dtype, num_elements=message.num_elements, peer=rank, tag=tag)
            rendezvous.fail(_unreceived_text(request, sender))
        for peer, written in enumerate(rendezvous.written[rank].tolist() if self.is_used else ()):
            if written:
                rendezvous.wait(functools.partial(self._is_taken_in, peer))

    def _is_taken_in(self, peer: int) -> bool:
        """Whether ``peer`` has taken in all that this rank has sent."""
        rank, rendezvous = self._rank, self._rendezvous
        has_left = rendezvous.has_left(peer)  # looked at first: what it read before leaving counts
        num_read = rendezvous.read[peer][rank] if rendezvous.has_begun(peer) else 0
        if num_read == rendezvous.written[rank][peer]:
            return True
        if has_left:
            rendezvous.fail(_unreceived_text(self._first_unread(peer, num_read), rank))
        return False

    def _first_unread(self, peer: int, num_read: int) -> Request:
        """Return what was sent to ``peer`` and stands at the front of the ring."""
        start = num_read % self.capacity
        tag, nbytes, number, _ = HEADER.unpack_from(self.to_peers[peer][start : start + LINE_NBYTES])
        name = DTYPE_NAMES[number]
        return Request("send", dtype=name, num_elements=nbytes // named_dtype(name).itemsize, peer=peer, tag=tag)

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Write a message; return as soon as its last byte is in the ring.

        Raises
        ------
        CollectiveMismatch
            If the ring is full and the receiver has left the call, or no rank can go on.
        """
        self._finish_sending(self._put(array, peer, tag))

    def isend(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Write what finds room of a message, and keep a copy of the rest."""
        self._put(array, peer, tag).make_own()

    def _finish_sending(self, message: Outgoing) -> None:
        if not message.is_done:
            self._rendezvous.post(message.request)
            self._rendezvous.wait(lambda: self._is_written(message), is_message=True)

    def _put(self, array: np.ndarray, peer: int, tag: int) -> Outgoing:
        self.is_used = True
        message = Outgoing(array, peer, tag)
        self._unsent.setdefault(peer, deque()).append(message)
        self._write(peer)
        return message

    def _is_written(self, message: Outgoing) -> bool:
        rendezvous, peer = self._rendezvous, message.request.peer
        has_left = rendezvous.has_left(peer)  # looked at first: what it read before leaving counts
        self.progress()
        if message.is_done:
            return True
        if has_left:
            rendezvous.fail(_unreceived_text(message.request, self._rank))
        return False

    def write_on(self) -> None:
        """Write what finds room by now."""
        if self._unsent:
            for peer in list(self._unsent):
                self._write(peer)

    def _write(self, peer: int) -> None:
        """Write what waits for ``peer``, as far as there is room."""
        rank, rendezvous, queue = self._rank, self._rendezvous, self._unsent[peer]
        ring, written = self.to_peers[peer], rendezvous.written[rank]
        while queue:
            room = self._room(peer)
            if not room:
                rendezvous.unsent[rank][peer] = 1
                return
            rendezvous.rouse()
            start = written[peer] % self.capacity
            # Both counts stay multiples of a line, so a first line never wraps around.
            nbytes = queue[0].write(ring[start : start + min(room, self._grain)])
            rendezvous.fence()
            written[peer] += nbytes
            rendezvous.wake(peer)
            if queue[0].is_done:
                queue.popleft()
        del self._unsent[peer]
        rendezvous.unsent[rank][peer] = 0

    def _room(self, peer: int) -> int:
        """Return how many bytes may be written for ``peer``: whole lines."""
        rendezvous = self._rendezvous
        if not rendezvous.has_begun(peer):  # its count of bytes read is still that of an earlier call
            return self.capacity - rendezvous.written[self._rank][peer]
        return rendezvous.room(self._rank, peer)

    # -- receiving -----------------------------------------------------------------------------------------------

    def irecv(self, like: np.ndarray | None, peer: int, tag: int) -> Incoming:
        """Ask for the next message of this sender and tag that was not asked for."""
        self.is_used = True
        dtype, count = ("", -1) if like is None else (dtype_name(like.dtype), like.size)
        request = Request("recv", dtype=dtype, num_elements=count, peer=peer, tag=tag)
        key = peer, tag
        message = _take(self._arrived, key)
        if message is None:
            message = Incoming(request, like)
            self._posted.setdefault(key, deque()).append(message)
        else:
            message.request, message.target = request, like
        return message

    def finish(self, message: Incoming) -> None:
        """Wait until what was asked for is there.

        Raises
        ------
        CollectiveMismatch
            If the sender has left without sending, or no rank can go on.
        """
        if not message.is_done:
            assert message.request is not None
            self._rendezvous.post(message.request)
            self._rendezvous.wait(lambda: self._is_there(message), is_message=True)

    def _is_there(self, message: Incoming) -> bool:
        rendezvous, request = self._rendezvous, message.request
        assert request is not None
        has_left = rendezvous.has_left(request.peer)  # looked at first: what it sent before leaving counts
        self.progress()
        if message.is_done:
            return True
        if has_left:
            rendezvous.fail(
                f"cannot finish {request} on rank {self._rank}: rank {request.peer} left the function without "
                "sending it. Every recv needs a send of the same tag."
            )
        return False

    def _take_in(self, sender: int) -> None:
        """Move all that ``sender`` has written out of the ring."""
        rank, rendezvous = self._rank, self._rendezvous
        ring, read = self.from_peers[sender], rendezvous.read[rank]
        while True:
            num_new = rendezvous.written[sender][rank] - read[sender]
            if num_new == 0:
                return
            rendezvous.rouse()
            start = read[sender] % self.capacity
            message = self._arriving.get(sender)
            if message is None:
                message = self._open(sender, ring[start : start + LINE_NBYTES].tobytes())
                num_read = LINE_NBYTES
            else:
                assert message.body is not None
                num_left = message.body.size - message.num_filled
                nbytes = min(num_new, self.capacity - start, num_left)
                message.body[message.num_filled : message.num_filled + nbytes] = ring[start : start + nbytes]
                message.num_filled += nbytes
                num_read = round_up(nbytes, LINE_NBYTES)
            if message.is_done:
                self._arriving.pop(sender, None)
            rendezvous.fence()
            read[sender] += num_read
            rendezvous.wake(sender)

    def _open(self, sender: int, line: bytes) -> Incoming:
        """Begin to take in the message of this line."""
        self.is_used = True
        key = sender, HEADER.unpack_from(line)[0]
        message = _take(self._posted, key)
        if message is None:
            message = Incoming()
            self._arrived.setdefault(key, deque()).append(message)
        message.open(line)
        self._arriving[sender] = message
        return message


def _unreceived_text(request: Request, sender: int) -> str:
    return (
        f"cannot finish {request} of rank {sender}: rank {request.peer} left the function without receiving it. "
        "Every send needs a recv of the same tag."
    )


def _take(messages: dict[Key, deque[Incoming]], key: Key) -> Incoming | None:
    """Take the oldest message of a sender and tag out."""
    queue = messages.get(key)
    if queue is None:
        return None
    message = queue.popleft()
    if not queue:
        del messages[key]
    return message
