"""The mailbox of a rank for ranks of other nodes: tagged messages and notes, which go by wires.

Between two ranks there is a stream in each direction. Arrays travel in it in pieces. At most ``WINDOW_NBYTES`` of a
stream may be unread: the receiver says how far it has read. As in a ring, whoever waits for anything takes in all that
has arrived, and keeps what it was not asked for yet.

Notes are short and never wait. They say how far a receiver has read, that a rank has left the call, why nobody can go
on, and what a rank waits for (a *report*, see ``is_stuck``).

In one file because a rank that waits to send receives in the meantime, and the other way round.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from synk._pure.ranges import LINE_NBYTES
from synk.communicators._messages import Inbox, Incoming, MessageBox, Outgoing, unreceived_text, unsent_text
from synk.communicators._rendezvous import CommRequest, Rendezvous

if TYPE_CHECKING:
    from synk.communicators._wires import Wires

WINDOW_NBYTES = 1 << 22
"""How much of a stream may be unread."""

PIECE_NBYTES = 1 << 18
_INLINE_NBYTES = 1 << 12  # a piece up to this size is part of the head
_MESSAGE_NBYTES = 1 << 8  # what a piece counts besides its bytes
_HEAD = struct.Struct("=B3xiq")
"""kind, sender, number of the call"""

_PIECE, _READ, _LEFT, _VERDICT, _REPORT = range(5)
_COUNTS = struct.Struct("=qq")

_UNKNOWN, _GONE = -1, -2
"""These stand in the place of a rank's nap: nothing is known of it yet, or it has left."""


class Left(NamedTuple):
    """A rank that has left the call: how many collectives it has joined, and what it has read of this rank's stream.

    ``failure``: the text of the CollectiveMismatch by which it has failed, if it has.
    """

    num_joined: int
    num_read: int
    failure: str


class SleepReport(NamedTuple):
    """How far a rank is that has slept for a while, and what it waits for. In a nap it sends and reads nothing.

    Attributes
    ----------
    nap : int
        The number of its nap.
    has_unsent : bool
    sent, read : list of int
        The bytes that it has sent to each rank, and the bytes that it has read from each.
    seen : list of int
        The nap of each rank in the last report that it has got; ``_GONE`` for a rank that it knows to have left.
    request : bytes
        What it waits for.
    """

    nap: int
    has_unsent: bool
    sent: list[int]
    read: list[int]
    seen: list[int]
    request: bytes


class WireMailbox(MessageBox):
    """One rank's ends of all streams, and what it knows of the others in the current call.

    Parameters
    ----------
    rank : int
    world_size : int
        Of all nodes.
    wires : Wires
    """

    def __init__(self, rank: int, world_size: int, wires: Wires) -> None:
        self.rank, self.wires = rank, wires
        self._world_size = world_size
        self._early: list[tuple[bytes, np.ndarray]] = []
        self.begin((), -1)

    def begin(self, ranks: tuple[int, ...], number: int) -> None:
        """Begin a call. Messages of earlier calls are dropped when they are met.

        With submitted calls, other ranks may have begun a later call already. Its messages are kept until it begins
        here.
        """
        size = self._world_size
        self.ranks, self._number, self._has_left = ranks, number, False
        self._others = tuple(rank for rank in ranks if rank != self.rank)
        self.num_joined = 0  # collectives of this call
        self.left: dict[int, Left] = {}
        self.reports: dict[int, SleepReport] = {}
        self.verdict = self.failure = ""
        self._reported = b""
        self._sent, self._acknowledged = [0] * size, [0] * size
        self._read, self._told = [0] * size, [0] * size
        self._unsent: dict[int, deque[Outgoing]] = {}
        # By receiver: the ends in the stream of messages that it may not have read, for the texts of errors.
        self._unread: dict[int, deque[tuple[int, CommRequest]]] = {}
        self._arriving: dict[int, Incoming] = {}
        self._inbox = Inbox()

    def attach(self, rendezvous: Rendezvous, check_joined: Callable[[WireMailbox], None]) -> None:
        """Wait by means of a rendezvous from now on; ``check_joined`` raises if a rank has left a collective out."""
        self._rendezvous, self._check_joined = rendezvous, check_joined

    def _head(self, kind: int) -> bytes:
        return _HEAD.pack(kind, self.rank, self._number)

    # -- notes ---------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Tell all others that this rank has left the call. It reads and sends nothing after that."""
        head = self._head(_LEFT)
        for rank in self._others:
            self.wires.send(rank, head + _COUNTS.pack(self.num_joined, self._read[rank]) + self.failure.encode())
        self.ranks = self._others = ()
        self._has_left = True

    def give_verdict(self, text: str) -> None:
        """Tell all others why nobody can go on."""
        self.verdict = text
        head = self._head(_VERDICT) + text.encode()
        for rank in self._others:
            self.wires.send(rank, head)

    def report(self, nap: int, request: bytes) -> None:
        """Tell all others what this rank waits for, unless they know all of it."""
        seen = [_UNKNOWN] * self._world_size
        for rank, report in self.reports.items():
            seen[rank] = report.nap
        for rank in self.left:
            seen[rank] = _GONE
        numbers = [nap, bool(self._unsent), *self._sent, *self._read, *seen]
        note = self._head(_REPORT) + request + np.array(numbers, np.int64).tobytes()
        if note != self._reported:
            for rank in self._others:
                self.wires.send(rank, note)
            self._reported = note

    def _note_report(self, sender: int, content: bytes) -> None:
        size = self._world_size
        nap, has_unsent, *counts = np.frombuffer(content, np.int64, offset=LINE_NBYTES).tolist()
        sent, read, seen = counts[:size], counts[size : 2 * size], counts[2 * size :]
        self.reports[sender] = SleepReport(nap, bool(has_unsent), sent, read, seen, content[:LINE_NBYTES])

    def is_stuck(self, nap: int) -> bool:
        """Whether every rank of the call has left, or sleeps until something happens that no rank can do any more.

        Every rank that is left has reported that it has seen a report from the same nap of each other one. So there was
        a moment, between these reports, at which all of them slept. If by then all had read what the others had sent,
        and knew which ranks have left, nothing was on its way that could wake any of them: a rank takes in what another
        one has sent before it learns that it has left.
        """
        others = [rank for rank in self._others if rank not in self.left]
        if self._unsent or not all(rank in self.reports for rank in others):
            return False
        naps = {rank: self.reports[rank].nap for rank in others} | {self.rank: nap}
        known = naps | dict.fromkeys(self.left, _GONE)
        sent = {rank: self.reports[rank].sent for rank in others} | {self.rank: self._sent}
        read = {rank: self.reports[rank].read for rank in others} | {self.rank: self._read}
        for rank in others:
            report = self.reports[rank]
            if report.has_unsent or any(report.seen[each] != known[each] for each in known if each != rank):
                return False
        return all(sent[one][other] == read[other][one] for one in naps for other in naps)

    # -- sending -------------------------------------------------------------------------------------------------------

    def put(self, array: np.ndarray, peer: int, tag: int) -> Outgoing:
        """Queue a C-contiguous array, which must not change until ``is_done``. Send as much as may be unread."""
        message = Outgoing(array, peer, tag)
        self._unsent.setdefault(peer, deque()).append(message)
        self._write(peer)
        return message

    def send(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Send a message. Return as soon as its last byte is on its way."""
        self.finish_sending(self.put(array, peer, tag))

    def isend(self, array: np.ndarray, peer: int, tag: int) -> None:
        """Send a message without waiting: what cannot be sent yet is copied."""
        self.put(array, peer, tag).make_own()

    def is_sent(self, message: Outgoing) -> bool:
        if not message.is_done and message.request.peer in self.left:
            self._fail(message.request, unreceived_text(message.request, self.rank))
        return message.is_done

    def _fail(self, request: CommRequest, text: str) -> NoReturn:
        """Raise that the other side of a message has left. ``text``: what to say if no collective has sent it."""
        if request.tag < 0:
            self._check_joined(self)
            text = (
                f"cannot finish a collective: rank {request.peer} left the function in the middle of it. "
                "Let exceptions of synk.comm leave the function."
            )
        self._rendezvous.fail(text, [request.peer])

    def _write(self, peer: int) -> None:
        """Send of the queue for ``peer`` what may be unread."""
        queue, sent = self._unsent[peer], self._sent
        while queue:
            if sent[peer] - self._acknowledged[peer] >= WINDOW_NBYTES:
                return
            self._rendezvous.rouse()
            message = queue[0]
            head = self._head(_PIECE)
            if not message.num_written:
                head += message.line
                message.num_written = LINE_NBYTES
            start = message.num_written - LINE_NBYTES
            piece = message.rest[start : start + PIECE_NBYTES]
            if piece.size <= _INLINE_NBYTES:
                self.wires.send(peer, head + piece.tobytes())
            else:
                self.wires.send(peer, head, piece)
            message.num_written += piece.size
            sent[peer] += piece.size + _MESSAGE_NBYTES
            if message.is_done:
                queue.popleft()
                self._unread.setdefault(peer, deque()).append((sent[peer], message.request))
        del self._unsent[peer]

    # -- receiving -----------------------------------------------------------------------------------------------------

    def progress(self) -> None:
        """Take in all that has arrived, and send on."""
        if self._early:
            early, self._early = self._early, []
            for head, body in early:
                self._sort(head, body)
        while (head := self.wires.receive()) is not None:  # type: ignore[assignment]
            self._sort(head, None)
        for peer in list(self._unsent):
            self._write(peer)

    def _sort(self, head: bytes, body: np.ndarray | None) -> None:
        """Take in a message. Its body is still to be received, unless it came early and was kept."""
        kind, sender, number = _HEAD.unpack_from(head)
        if number > self._number:
            if body is None:  # it must be taken off the socket now, before the next head can be read
                body = np.empty(PIECE_NBYTES, np.uint8)
                body = body[: self.wires.take(body)].copy()
            self._early.append((head, body))
        elif number < self._number or (kind == _PIECE and self._has_left):
            self.wires.drop()
        elif kind == _PIECE:
            self._take_in(sender, head[_HEAD.size :], body)
        else:
            self._note(kind, sender, head[_HEAD.size :])

    def _note(self, kind: int, sender: int, content: bytes) -> None:
        if kind == _READ:
            self._note_read(sender, _COUNTS.unpack(content)[1])
        elif kind == _LEFT:
            num_joined, num_read = _COUNTS.unpack_from(content)
            left = Left(num_joined, num_read, content[_COUNTS.size :].decode())
            self.left[sender] = left
            self._note_read(sender, left.num_read)
        elif kind == _VERDICT:
            self.verdict = self.verdict or content.decode()
        else:
            self._note_report(sender, content)

    def _note_read(self, peer: int, num_read: int) -> None:
        self._acknowledged[peer] = num_read
        unread = self._unread.get(peer)
        while unread and unread[0][0] <= num_read:
            unread.popleft()

    def _take_in(self, sender: int, content: bytes, body: np.ndarray | None) -> None:
        """Take in a piece of a message. ``content`` is its beginning."""
        self._rendezvous.rouse()
        message = self._arriving.get(sender)
        if message is None:
            message = self._arriving[sender] = self._inbox.open(sender, content[:LINE_NBYTES])
            content = content[LINE_NBYTES:]
        assert message.body is not None
        start = message.num_filled
        if content:
            message.body[start : start + len(content)] = np.frombuffer(content, np.uint8)
            num_new = len(content)
        elif body is not None:
            message.body[start : start + body.size] = body
            num_new = body.size
        else:
            num_new = self.wires.take(message.body[start:])
        message.num_filled += num_new
        if message.is_done:
            del self._arriving[sender]
        self._read[sender] += num_new + _MESSAGE_NBYTES
        if self._read[sender] - self._told[sender] >= WINDOW_NBYTES // 4:
            self._told[sender] = self._read[sender]
            self.wires.send(sender, self._head(_READ) + _COUNTS.pack(0, self._read[sender]))

    def is_there(self, message: Incoming) -> bool:
        request = message.request
        assert request is not None
        if not message.is_done and request.peer in self.left:
            self._fail(request, unsent_text(request, self.rank))
        return message.is_done

    # -- the end of a call ---------------------------------------------------------------------------------------------

    def check_received(self) -> None:
        """After this rank has left: wait until the others have read its messages, and check that none is left over.

        Raises
        ------
        CollectiveMismatch
            If a message to this rank was never asked for, or a rank left without reading one of this rank's.
        """
        self._inbox.check_asked(self.rank, self._rendezvous.fail)
        for peer in self._unread:
            self._rendezvous.wait(lambda peer=peer: self._is_read(peer))  # type: ignore[misc]

    def _is_read(self, peer: int) -> bool:
        """Whether ``peer`` has read all that this rank has sent."""
        unread = self._unread[peer]
        if unread and peer in self.left:
            self._fail(unread[0][1], unreceived_text(unread[0][1], self.rank))
        return not unread
