"""Tagged messages from one rank to another, through a ring of bytes for each ordered pair of ranks.

A ring is a stream of messages: a line with the header and the first bytes, the other bytes, padding to whole lines. The
sender alone raises the count of bytes written and the receiver alone the count of bytes read (both in the rendezvous),
so a ring needs no lock. Whoever waits for anything takes in everything that has arrived for it; what is not wanted yet
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
from synk.communicators._outbox import CHUNK_NBYTES, Outbox
from synk.communicators._rendezvous import Rendezvous, Request
from synk.communicators._schedule import Schedule

# So little is copied to private memory, where the ring has no room for it.
SMALL_NBYTES = 1 << 12

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
    outbox : Outbox
        For what a ring has no room for.
    """

    def __init__(self, rendezvous: Rendezvous, schedule: Schedule, rings: np.ndarray, outbox: Outbox) -> None:
        self._rendezvous = rendezvous
        self._outbox = outbox
        self._schedule = schedule
        self._rank = rendezvous.rank
        self.to_peers = list(rings[self._rank])
        self.from_peers = list(rings[:, self._rank])
        self.capacity = rings.shape[2]
        # While one part is taken out, the next is put in.
        self._grain = max(round_up(self.capacity // 4, LINE_NBYTES), LINE_NBYTES)
        self._unsent: dict[int, deque[Outgoing]] = {}  # by receiver; none that is empty
        # By receiver, what it may have taken in a part of: where it begins and ends in the stream.
        self._in_pieces: dict[int, deque[tuple[int, int, Request]]] = {}
        self._arriving: dict[int, Incoming] = {}  # by sender
        self._fetched: list[Incoming] = []  # from outboxes, that were asked for and are not all there
        self._posted: dict[Key, deque[Incoming]] = {}  # that have not come
        self._arrived: dict[Key, deque[Incoming]] = {}  # that nobody has asked for
        self.is_used = False  # in the present call

    def is_idle(self) -> bool:
        """Whether nothing is asked for, kept or waiting."""
        is_busy = self._arriving or self._fetched or self._posted or self._arrived or self._unsent
        return not (is_busy or self._schedule.operations)

    def clear(self) -> None:
        """Forget all messages. To be called before the rendezvous begins a call, so that no rank reads old counts."""
        if self.is_used:
            for messages in (self._unsent, self._in_pieces, self._arriving, self._fetched, self._posted, self._arrived):
                messages.clear()
            self._outbox.clear()
            rank, rendezvous = self._rank, self._rendezvous
            for peer in range(len(self.to_peers)):
                rendezvous.written[rank][peer] = 0
                rendezvous.read[rank][peer] = 0
                rendezvous.unsent[rank][peer] = 0
            self.is_used = False  # last: an interrupted call leaves the rest to the next one

    def trim(self) -> None:
        """Give memory of messages back that all were received."""
        if self.is_used:
            self._outbox.trim()

    def close(self) -> None:
        """Let go of the shared memory."""
        self.to_peers, self.from_peers = [], []
        self._outbox.close()

    def progress(self) -> None:
        """Take in what has arrived, write what finds room, and go on with the collectives."""
        for peer in self._rendezvous.ranks:
            if self._rendezvous.has_begun(peer):
                self._take_in(peer)
        self._fetch_on()
        self.write_on()
        self._schedule.advance()

    # -- the end of a call ---------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Wait for what was asked for, and until what was sent is in the rings."""
        for messages in list(self._posted.values()):
            for message in list(messages):
                self.finish(message)
        for message in list(self._fetched):
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
        for begin, end, request in self._in_pieces.get(peer, ()):
            if begin < num_read < end:
                return request
        start = num_read % self.capacity
        tag, nbytes, number, _, _ = HEADER.unpack_from(self.to_peers[peer][start : start + LINE_NBYTES])
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
        self._finish_sending(self._put(Outgoing(array, peer, tag)))

    def isend(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Write a message if the ring has room for all of it, else leave it in the outbox.

        Raises
        ------
        SharedMemoryError
            If there is no memory for it.
        """
        message = Outgoing(array, peer, tag)
        is_small = array.nbytes < SMALL_NBYTES or (peer not in self._unsent and array.nbytes < self._room(peer) // 2)
        if is_small or not self._outbox.is_there:
            self._put(message)
            message.make_own()
            return
        place = self._outbox.take(array.nbytes + 8 * array.ndim)
        body = message.lay_out(place)
        self._put(message)
        self._fill(place, body, peer)

    def _fill(self, place: int, body: np.ndarray, peer: int) -> None:
        """Copy a message into the outbox; the receiver may know of it already, and copies along."""
        rendezvous, outbox = self._rendezvous, self._outbox
        for start in range(0, body.size, CHUNK_NBYTES):
            chunk = body[start : start + CHUNK_NBYTES]
            outbox.put(place, start, chunk)
            rendezvous.fence()
            outbox.show(place, start + chunk.size)
            rendezvous.wake(peer)

    def _finish_sending(self, message: Outgoing) -> None:
        if not message.is_done:
            self._rendezvous.post(message.request)
            self._rendezvous.wait(lambda: self._is_written(message), is_message=True)

    def _put(self, message: Outgoing) -> Outgoing:
        self.is_used = True
        peer = message.request.peer
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
            if not queue[0].num_written:
                queue[0].begin = written[peer]
            # Both counts stay multiples of a line, so a first line never wraps around.
            nbytes = queue[0].write(ring[start : start + min(room, self._grain)])
            rendezvous.fence()
            written[peer] += nbytes
            rendezvous.wake(peer)
            if queue[0].is_done:
                self._note_written(queue.popleft(), written[peer])
        del self._unsent[peer]
        rendezvous.unsent[rank][peer] = 0

    def _note_written(self, message: Outgoing, end: int) -> None:
        rendezvous, peer = self._rendezvous, message.request.peer
        noted = self._in_pieces.setdefault(peer, deque())
        num_read = rendezvous.read[peer][self._rank] if peer in rendezvous.begun else 0
        while noted and noted[0][1] <= num_read:
            noted.popleft()
        noted.append((message.begin, end, message.request))

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
            self._begin_to_fetch(message)
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
        if message.place < 0:
            self._arriving[sender] = message
        elif message.request is not None:
            self._begin_to_fetch(message)
        return message

    # -- from outboxes -------------------------------------------------------------------------------------------

    def _begin_to_fetch(self, message: Incoming) -> None:
        """Have a message that somebody asks for come from the outbox of its sender, if it lies there."""
        if message.place >= 0:
            message.make_body()
            self._fetched.append(message)
            self._rendezvous.is_fetching = True

    def _fetch_on(self) -> None:
        """Copy what has come into the outboxes of messages that were asked for."""
        if self._fetched:
            for message in self._fetched:
                self._fetch(message)
            self._fetched = [message for message in self._fetched if not message.is_done]
            self._rendezvous.is_fetching = bool(self._fetched)

    def _fetch(self, message: Incoming) -> None:
        rendezvous, outbox, place = self._rendezvous, self._outbox, message.place
        assert message.body is not None
        start, stop = message.num_filled, outbox.num_filled(place)
        if stop == start:
            return
        rendezvous.rouse()
        message.body[start:stop] = outbox.contents(place, start, stop)
        message.num_filled = stop
        if message.is_done:
            rendezvous.fence()
            outbox.release(place)


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
