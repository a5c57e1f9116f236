"""Tagged messages from one rank to another, through a ring of bytes for each ordered pair of ranks.

A ring is a stream of messages: a line with the header and the first bytes, the other bytes, padding to whole lines.
Only the sender raises the count of bytes written, and only the receiver the count of bytes read (both lie in the
rendezvous), so a ring needs no lock. A rank that waits for anything takes in everything that has arrived for it, and
keeps in private memory what it has not asked for yet. So messages may be received in any order of tags, and two ranks
may send to each other first and receive afterwards.

A long message is *offered*: the ring has only its first line, which says where in the memory of the sender the array
lies, and the receiver reads it there. What ``send`` offers is the function's own array, which is *lent* until it was
read; what ``isend`` offers is a private copy. If the receiver cannot read the memory of others (each rank asks the
kernel once, and tells the others), the message goes through the ring like a short one. A message for which the ring has
no room waits in a queue of its sender, which goes on writing whenever it waits for anything.

In one file because a rank that waits to send receives in the meantime, and the other way round.
"""

from __future__ import annotations

import functools
from collections import deque

import numpy as np

from synk._pure.ranges import LINE_NBYTES, round_up
from synk._wire.process_memory import can_be_read, read_memory
from synk.communicators._checks import DTYPE_NAMES, named_dtype
from synk.communicators._messages import (
    HEADER,
    IN_RING,
    Inbox,
    Incoming,
    MessageBox,
    Outgoing,
    unreceived_text,
    unsent_text,
)
from synk.communicators._rendezvous import CommRequest, Rendezvous
from synk.communicators._schedule import Schedule
from synk.communicators._user_arrays import ResultMemory
from synk.errors import CollectiveMismatch

# An isend below this size is never offered: if the ring has no room, it waits in the queue of its sender.
SMALL_NBYTES = 1 << 12
# The largest piece that is written at once. The receiver finds it in the cache and copies it during the next one.
GRAIN_NBYTES = 1 << 18


class Mailbox(MessageBox):
    """One rank's ends of all streams.

    Parameters
    ----------
    rendezvous : Rendezvous
    schedule : Schedule
        The collectives in flight, which go on while the rank waits for a message.
    rings : ndarray of uint8, shape ``(sender, receiver, nbytes)``
        The shared memory. ``nbytes`` is a multiple of the cache line.
    results : ResultMemory
        For private copies.

    Attributes
    ----------
    to_peers, from_peers : list of ndarray of uint8
        The rings that this rank writes, and those that it reads.
    capacity : int
        The size of a ring in bytes.
    is_used : bool
        Whether this rank has sent or asked for a message in the current call.
    """

    def __init__(self, rendezvous: Rendezvous, schedule: Schedule, rings: np.ndarray, results: ResultMemory) -> None:
        self._rendezvous = rendezvous
        self._results = results
        self._schedule = schedule
        self._rank = rendezvous.rank
        self.to_peers = list(rings[self._rank])
        self.from_peers = list(rings[:, self._rank])
        self.capacity = rings.shape[2]
        # At most half of the ring, so that the receiver takes one piece out while the next is put in.
        self._grain = min(max(round_up(self.capacity // 2, LINE_NBYTES), LINE_NBYTES), GRAIN_NBYTES)
        self._unsent: dict[int, deque[Outgoing]] = {}  # by receiver: messages not yet written; no deque is empty
        # By receiver: messages that it may not have read, or only in part: their begin and end in the stream, and the
        # copies that they offer.
        self._unread: dict[int, deque[tuple[int, int, CommRequest, np.ndarray | None]]] = {}
        self._arriving: dict[int, Incoming] = {}  # by sender: the message whose first line was read
        self._inbox = Inbox()
        self.is_used = False

    def is_idle(self) -> bool:
        """Whether no message is asked for, kept or waiting to be written, and no collective is in flight."""
        inbox = self._inbox
        is_busy = self._unsent or self._arriving or inbox.asked or inbox.arrived
        return not (is_busy or self._schedule.operations)

    def clear(self) -> None:
        """Forget all messages. Call this before the rendezvous begins a call, so that no rank reads old counts."""
        if self.is_used:
            for messages in (self._unsent, self._unread, self._arriving, self._inbox):
                messages.clear()
            rank, rendezvous = self._rank, self._rendezvous
            for peer in range(len(self.to_peers)):
                rendezvous.written[rank][peer] = 0
                rendezvous.read[rank][peer] = 0
                rendezvous.unsent[rank][peer] = 0
            self.is_used = False  # last, so that the next clear does the rest if this one is interrupted

    def forget(self) -> None:
        """Drop what was offered, once all of it was read."""
        self._unread.clear()

    def progress(self) -> None:
        """Take in what has arrived, write what finds room, and advance the collectives in flight."""
        for peer in self._rendezvous.ranks:
            if self._rendezvous.has_begun(peer):
                self._take_in(peer)
        self.write_on()
        self._schedule.advance()

    # -- the end of a call ---------------------------------------------------------------------------------------

    def check_lent(self) -> None:
        """Check that no array is lent any more. Its receiver may have read it after the function had changed it.

        Raises
        ------
        CollectiveMismatch
        """
        for queue in self._unsent.values():
            if queue and (message := queue[-1]).is_lent:  # whoever sends after that was broken off has an error
                raise CollectiveMismatch(
                    f"cannot finish {message.request} on rank {self._rank}: an exception broke it off before rank "
                    f"{message.request.peer} said that it had read the array. Let the exception leave the function."
                )

    def check_received(self) -> None:
        """Wait until the peers have taken in this rank's messages, and check that none is left over.

        This rank has left the call. A message that its receiver took in but did not ask for is an error there, not
        here.

        Raises
        ------
        CollectiveMismatch
            If a message to this rank was never asked for, or a peer left without taking one of this rank's in.
        """
        rank, rendezvous = self._rank, self._rendezvous
        self._inbox.check_asked(rank, rendezvous.fail)
        for peer, written in enumerate(rendezvous.written[rank].tolist() if self.is_used else ()):
            if written:
                rendezvous.wait(functools.partial(self._is_taken_in, peer))

    def _is_taken_in(self, peer: int) -> bool:
        """Whether ``peer`` has taken in all that this rank has sent."""
        rank, rendezvous = self._rank, self._rendezvous
        has_left = rendezvous.has_left(peer)  # first, so that what it read before it left counts
        num_read = rendezvous.read[peer][rank] if rendezvous.has_begun(peer) else 0
        if num_read == rendezvous.written[rank][peer]:
            return True
        if has_left:
            rendezvous.fail(unreceived_text(self._first_unread(peer, num_read), rank), [peer])
        return False

    def _first_unread(self, peer: int, num_read: int) -> CommRequest:
        """Return the send to ``peer`` whose message is the first in the ring that was not read in full."""
        for begin, end, request, _ in self._unread.get(peer, ()):
            if begin < num_read < end:
                return request
        start = num_read % self.capacity
        tag, nbytes, number, _, _ = HEADER.unpack_from(self.to_peers[peer][start : start + LINE_NBYTES])
        name = DTYPE_NAMES[number]
        return CommRequest("send", dtype=name, num_elements=nbytes // named_dtype(name).itemsize, peer=peer, tag=tag)

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Write a message. Return as soon as its last byte is in the ring, or the array has been read where it lies.

        Raises
        ------
        CollectiveMismatch
            If the ring is full and the receiver has left the call, or no rank can go on.
        """
        message, is_long = Outgoing(array, peer, tag), array.nbytes >= self.capacity
        if is_long and self._rendezvous.is_reader(peer) and can_be_read(array):
            message.lend()
        self.finish_sending(self._put(message))

    def isend(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Leave a message for a peer without waiting: in the ring, or in a private copy."""
        is_small = array.nbytes < SMALL_NBYTES or (peer not in self._unsent and array.nbytes < self._room(peer) // 2)
        if is_small or not self._rendezvous.is_reader(peer):
            self._put(Outgoing(array, peer, tag)).make_own()
            return
        copy = self._results.empty(array.shape, array.dtype)
        copy[...] = array
        message = Outgoing(copy, peer, tag)
        message.offer()
        self._put(message)

    def _put(self, message: Outgoing) -> Outgoing:
        """Queue a message, and write as much of the queue as the ring has room for."""
        self.is_used = True
        peer = message.request.peer
        self._unsent.setdefault(peer, deque()).append(message)
        self._write(peer)
        return message

    def is_sent(self, message: Outgoing) -> bool:
        """Write on. Return whether all of a message is in the ring, or was read where it lies."""
        rendezvous, peer = self._rendezvous, message.request.peer
        has_left = rendezvous.has_left(peer)  # first, so that what it read before it left counts
        self.progress()
        if message.is_done:
            return True
        if has_left:
            message.is_lent = False  # nobody will read it
            rendezvous.fail(unreceived_text(message.request, self._rank), [peer])
        return False

    def write_on(self) -> None:
        """Write as much of every queue as its ring has room for by now."""
        if self._unsent:
            for peer in list(self._unsent):
                self._write(peer)

    def _write(self, peer: int) -> None:
        """Write as much of the queue for ``peer`` as the ring has room for."""
        rank, rendezvous, queue = self._rank, self._rendezvous, self._unsent[peer]
        ring, written = self.to_peers[peer], rendezvous.written[rank]
        while queue:
            message, room = queue[0], self._room(peer)
            is_unread = message.is_lent and message.num_written > 0
            if not room or (is_unread and room < self.capacity):  # nothing follows its line before that is read
                rendezvous.unsent[rank][peer] = 1
                return
            rendezvous.rouse()
            if is_unread:
                message.is_lent = False
            start = written[peer] % self.capacity
            if not message.num_written:
                message.begin = written[peer]
            # Both counts stay multiples of a line, so a first line never wraps around.
            nbytes = message.write(ring[start : start + min(room, self._grain)])
            rendezvous.fence()  # the bytes must be visible before the count that announces them
            written[peer] += nbytes
            rendezvous.wake(peer)
            if message.is_done:
                self._note_written(queue.popleft(), written[peer])
        del self._unsent[peer]
        rendezvous.unsent[rank][peer] = 0

    def _note_written(self, message: Outgoing, end: int) -> None:
        """Keep a message until the peer has read it: what is offered, and where it lies in the stream."""
        rendezvous, peer = self._rendezvous, message.request.peer
        unread = self._unread.setdefault(peer, deque())
        num_read = rendezvous.read[peer][self._rank] if peer in rendezvous.begun else 0
        while unread and unread[0][1] <= num_read:
            unread.popleft()
        unread.append((message.begin, end, message.request, message.kept))

    def _room(self, peer: int) -> int:
        """Return how many bytes may be written for ``peer``, in whole lines."""
        rendezvous = self._rendezvous
        if not rendezvous.has_begun(peer):  # its count of bytes read is from an earlier call; in this one it is 0
            return self.capacity - rendezvous.written[self._rank][peer]
        return rendezvous.room(self._rank, peer)

    # -- receiving -----------------------------------------------------------------------------------------------

    def irecv(self, like: np.ndarray | None, peer: int, tag: int) -> Incoming:
        self.is_used = True
        return super().irecv(like, peer, tag)

    def is_there(self, message: Incoming) -> bool:
        """Take in what has arrived. Return whether a message is complete."""
        rendezvous, request = self._rendezvous, message.request
        assert request is not None
        has_left = rendezvous.has_left(request.peer)  # first, so that what it sent before it left counts
        self.progress()
        if message.is_done:
            return True
        if has_left:
            rendezvous.fail(unsent_text(request, self._rank), [request.peer])
        return False

    def _take_in(self, sender: int) -> None:
        """Move everything that ``sender`` has written out of the ring."""
        rank, rendezvous = self._rank, self._rendezvous
        ring, read = self.from_peers[sender], rendezvous.read[rank]
        # A sender that is killed while it writes has not raised its count yet, so nothing torn is ever read. The rest
        # of its message never comes, and the program's abort ends the wait for it.
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
                if message.place != IN_RING:
                    self._read_offered(sender, message)
            else:
                assert message.body is not None
                num_left = message.body.size - message.num_filled
                nbytes = min(num_new, self.capacity - start, num_left)
                message.body[message.num_filled : message.num_filled + nbytes] = ring[start : start + nbytes]
                message.num_filled += nbytes
                num_read = round_up(nbytes, LINE_NBYTES)
            if message.is_done:
                self._arriving.pop(sender, None)
            rendezvous.fence()  # the bytes must be read before the count that gives their place back
            read[sender] += num_read
            rendezvous.wake(sender)

    def _open(self, sender: int, line: bytes) -> Incoming:
        """Begin to take in the message with this first line: for its recv, or to be kept until a recv asks for it."""
        self.is_used = True
        message = self._inbox.open(sender, line)
        self._arriving[sender] = message
        return message

    def _read_offered(self, sender: int, message: Incoming) -> None:
        """Read a message where it lies in the memory of its sender.

        Raises
        ------
        Aborted, CollectiveMismatch
            If the sender has died, or left with an error, and with it what it has offered; or if the kernel does not
            allow it any more.
        """
        rendezvous = self._rendezvous
        assert message.body is not None
        if not read_memory(rendezvous.pids[sender], message.place, message.body):
            rendezvous.fail(
                f"cannot receive on rank {self._rank}: the kernel no longer lets it read the memory of rank {sender}, "
                "expected what was allowed at the start. Do not call prctl(PR_SET_DUMPABLE) or the like in a function."
            )
        message.num_filled = message.body.size
