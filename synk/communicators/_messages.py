"""A message between two ranks: its form in a ring, what each side remembers of it, and how both mailboxes wait for
it. Touches shared words only by a rendezvous.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from synk._pure.arrays import address_of
from synk._pure.dtypes import dtype_name
from synk._pure.ranges import LINE_NBYTES, round_up
from synk.communicators._checks import DTYPE_NAMES, named_dtype
from synk.communicators._rendezvous import CommRequest, Rendezvous
from synk.errors import CollectiveMismatch

# The first line of a message: tag, size of the array in bytes, number of the dtype, number of axes, place. The last 32
# bytes begin the contents: the shape, if there are two axes or more, then the array. The lines that follow have the
# rest. A place that is not ``IN_RING`` is an address in the sender's own memory. The array is offered there, and the
# line has only the shape, if there is room for it.
LINE = struct.Struct("=qqHB5xq32s")
IN_RING = 0
HEADER = struct.Struct("=qqHB5xq")
INLINE_NBYTES = LINE_NBYTES - HEADER.size
MAX_INLINE_AXES = INLINE_NBYTES // 8
SHAPES = [struct.Struct(f"={num_axes}q") for num_axes in range(MAX_INLINE_AXES + 1)]
NUMBERS = {np.dtype(name): number for number, name in enumerate(DTYPE_NAMES) if name != "bfloat16"}
"""The numbers of dtypes that need no further checks: NumPy's own, in the machine's byte order."""


def prefix_nbytes(num_axes: int) -> int:
    """Return the size of the shape in front of an array. The length of a single axis follows from the bytes."""
    return 8 * num_axes if num_axes > 1 else 0


class Outgoing:
    """A message on the sender's side, until all of it is in the ring or was read where it lies.

    Attributes
    ----------
    request : CommRequest
    line : bytes
        The first line.
    rest : ndarray of uint8
        The bytes that follow it.
    num_written : int
        How many bytes of both are in the ring.
    begin : int
        Where the message begins in the stream. Valid once its first line is in the ring.
    kept : ndarray or None
        The private copy that is offered. It must live until it is read.
    is_lent : bool
        Whether the receiver is to read the sender's own array, and may not have done so.
    """

    __slots__ = ("_body", "_header", "_prefix", "begin", "is_lent", "kept", "line", "num_written", "request", "rest")

    def __init__(self, array: np.ndarray, peer: int, tag: int) -> None:
        name = dtype_name(array.dtype)
        self.request = CommRequest("send", dtype=name, num_elements=array.size, peer=peer, tag=tag)
        body = array.reshape(-1).view(np.uint8)
        prefix = np.array(array.shape, np.int64).tobytes() if array.ndim > 1 else b""
        if len(prefix) > INLINE_NBYTES:
            body = np.concatenate([np.frombuffer(prefix, np.uint8), body])
            prefix = b""
        num_inline = INLINE_NBYTES - len(prefix)
        inline = prefix + body[:num_inline].tobytes()
        self._header = tag, array.nbytes, DTYPE_NAMES.index(name), array.ndim
        self.line = LINE.pack(*self._header, IN_RING, inline)
        self.rest = body[num_inline:]
        self.num_written = self.begin = 0
        self.is_lent = False
        self.kept: np.ndarray | None = None
        self._prefix, self._body = prefix, body

    def offer(self) -> None:
        """Let the ring say only where in this process's memory the message lies. It stays there until it is read."""
        self.line = LINE.pack(*self._header, address_of(self._body), self._prefix)
        self.rest, self.kept = self.rest[:0], self._body

    def lend(self) -> None:
        """Offer the function's own array. The message is not done before it was read."""
        self.offer()
        self.is_lent, self.kept = True, None

    @property
    def is_done(self) -> bool:
        return self.num_written >= LINE_NBYTES + self.rest.size and not self.is_lent

    def make_own(self) -> None:
        """Copy what is not written yet, so that the array may be changed."""
        if not self.is_done:
            start = max(self.num_written - LINE_NBYTES, 0)
            self.rest = self.rest[start:].copy()
            self.num_written -= start

    def write(self, place: np.ndarray) -> int:
        """Write as much as fits into ``place``, at least a line. Return how many bytes that is, in whole lines."""
        num_first = 0
        if not self.num_written:
            place[:LINE_NBYTES] = np.frombuffer(self.line, np.uint8)
            self.num_written = num_first = LINE_NBYTES
        start = self.num_written - LINE_NBYTES
        nbytes = min(place.size - num_first, self.rest.size - start)
        place[num_first : num_first + nbytes] = self.rest[start : start + nbytes]
        self.num_written += nbytes
        return num_first + round_up(nbytes, LINE_NBYTES)


class Incoming:
    """A message on the receiver's side. It exists from its recv or its arrival on, whichever comes first.

    Attributes
    ----------
    request : CommRequest or None
        The recv that asked for it, if there is one yet.
    target : ndarray or None
        The array that the recv gave for it.
    place : int
        The address in the memory of its sender; ``IN_RING`` if it comes through the ring.
    body : ndarray of uint8 or None
        Memory for the array, preceded by the shape if the first line had no room for that.
    num_filled : int
        How many bytes of the body have arrived.
    """

    __slots__ = (
        *("_num_apart", "_num_axes", "_shape", "body", "dtype", "nbytes", "num_filled", "place", "request", "target"),
    )

    def __init__(self, request: CommRequest | None = None, target: np.ndarray | None = None) -> None:
        self.request, self.target = request, target
        self.body: np.ndarray | None = None
        self.num_filled = 0
        self.place = IN_RING

    @property
    def is_done(self) -> bool:
        return self.body is not None and self.num_filled == self.body.size

    def open(self, line: bytes) -> None:
        """Read the first line, and make memory for the body, or use the recv's own array if it is like the message."""
        _, self.nbytes, number, self._num_axes, self.place, inline = LINE.unpack(line)
        self.dtype = DTYPE_NAMES[number]
        prefix = prefix_nbytes(self._num_axes)
        self._num_apart = prefix if prefix > INLINE_NBYTES else 0
        self._shape: tuple[int, ...] | None = None
        if not prefix:
            self._shape = (self.num_elements,) * self._num_axes
        elif not self._num_apart:
            self._shape = struct.unpack_from(f"={self._num_axes}q", inline)
            inline = inline[prefix:]
        target = self.target
        if target is not None and not self._num_apart and self._is_like(target):
            self.body = target.reshape(-1).view(np.uint8)
        else:
            self.body = np.empty(self._num_apart + self.nbytes, np.uint8)
        if self.place == IN_RING:
            first = np.frombuffer(inline, np.uint8)[: self.body.size]
            self.body[: first.size] = first
            self.num_filled = first.size

    @property
    def num_elements(self) -> int:
        return int(self.nbytes) // named_dtype(self.dtype).itemsize

    def _is_like(self, array: np.ndarray) -> bool:
        return array.nbytes == self.nbytes and dtype_name(array.dtype) == self.dtype

    def array(self) -> np.ndarray:
        """Return what came: in the recv's array if there is one, else as a new array.

        Raises
        ------
        CollectiveMismatch
            If the dtype or the number of elements differs from what the recv asked for.
        """
        assert self.body is not None
        target = self.target
        if target is None:
            num_apart = self._num_apart
            shape = self._shape or tuple(self.body[:num_apart].view(np.int64).tolist())
            return self.body[num_apart:].view(named_dtype(self.dtype)).reshape(shape if self._num_axes else ())
        if not self._is_like(target):
            assert self.request is not None
            raise CollectiveMismatch(
                f"cannot finish {self.request}: got a message of {self.num_elements} elements of dtype {self.dtype}. "
                "Send and receive equal counts and dtypes."
            )
        if not np.may_share_memory(target, self.body):
            np.copyto(target.reshape(-1).view(np.uint8), self.body[self._num_apart :])
        return target


Key = tuple[int, int]
"""Sender and tag."""


class Inbox:
    """The messages to one rank that were asked for and have not begun to arrive, or the other way round.

    Attributes
    ----------
    asked, arrived : dict of deque of Incoming
        Both by sender and tag.
    """

    def __init__(self) -> None:
        self.asked: dict[Key, deque[Incoming]] = {}
        self.arrived: dict[Key, deque[Incoming]] = {}

    def clear(self) -> None:
        """Forget all messages."""
        self.asked.clear()
        self.arrived.clear()

    def all_asked(self) -> list[Incoming]:
        """Return the messages that were asked for."""
        return [message for messages in self.asked.values() for message in messages]

    def ask(self, like: np.ndarray | None, peer: int, tag: int) -> Incoming:
        """Ask for the next message of this sender and tag that no earlier receive asked for."""
        dtype, count = ("", -1) if like is None else (dtype_name(like.dtype), like.size)
        request = CommRequest("recv", dtype=dtype, num_elements=count, peer=peer, tag=tag)
        message = _match(self.arrived, self.asked, (peer, tag))
        message.request, message.target = request, like
        return message

    def open(self, sender: int, line: bytes) -> Incoming:
        """Begin to take in the message with this first line: for its recv, or to be kept until a recv asks for it."""
        message = _match(self.asked, self.arrived, (sender, HEADER.unpack_from(line)[0]))
        message.open(line)
        return message

    def check_asked(self, rank: int, fail: Callable[[str], NoReturn]) -> None:
        """Fail if a message has arrived at ``rank`` that nobody has asked for."""
        for (sender, tag), messages in self.arrived.items():
            first = messages[0]
            request = CommRequest("send", dtype=first.dtype, num_elements=first.num_elements, peer=rank, tag=tag)
            fail(unreceived_text(request, sender))


def _match(waiting: dict[Key, deque[Incoming]], others: dict[Key, deque[Incoming]], key: Key) -> Incoming:
    """Remove and return the oldest message that waits under a key. If none does, return a new one among the others."""
    queue = waiting.get(key)
    if queue is None:
        message = Incoming()
        others.setdefault(key, deque()).append(message)
        return message
    message = queue.popleft()
    if not queue:
        del waiting[key]
    return message


class MessageBox(ABC):
    """One rank's ends of the streams to and from other ranks, whatever carries them: what the rank waits for.

    ``_inbox``: the messages to it. ``_arriving``: by sender, the message that has begun to arrive. ``_unsent``: by
    receiver, the messages of which not all is on its way.
    """

    _rendezvous: Rendezvous
    _inbox: Inbox
    _arriving: dict[int, Incoming]
    _unsent: dict[int, deque[Outgoing]]

    @abstractmethod
    def is_there(self, message: Incoming) -> bool:
        """Whether a message is complete. Raise CollectiveMismatch if it cannot come any more."""

    @abstractmethod
    def is_sent(self, message: Outgoing) -> bool:
        """Whether all of a message is on its way. Raise CollectiveMismatch if its receiver has left."""

    def irecv(self, like: np.ndarray | None, peer: int, tag: int) -> Incoming:
        """Ask for the next message of this sender and tag that no earlier receive asked for."""
        return self._inbox.ask(like, peer, tag)

    def finish(self, message: Incoming) -> None:
        """Wait until a message that was asked for is complete.

        Raises
        ------
        CollectiveMismatch
            If the sender has left without sending, or no rank can go on.
        """
        assert message.request is not None
        if not message.is_done:
            self._rendezvous.post(message.request)
            self._rendezvous.wait(lambda: self.is_there(message), is_message=True)

    def finish_sending(self, message: Outgoing) -> None:
        """Wait until all of a message is on its way."""
        if not message.is_done:
            self._rendezvous.post(message.request)
            self._rendezvous.wait(lambda: self.is_sent(message), is_message=True)

    def complete(self) -> None:
        """Wait until all messages that were asked for are here, and all that were sent are on their way."""
        for incoming in (*self._inbox.all_asked(), *self._arriving.values()):
            if incoming.request is not None:
                self.finish(incoming)
        for outgoing in [message for queue in self._unsent.values() for message in queue]:
            self.finish_sending(outgoing)


def unreceived_text(request: CommRequest, sender: int) -> str:
    """Return what is said of a message that its receiver has not taken in before it left."""
    return (
        f"cannot finish {request} of rank {sender}: rank {request.peer} left the function without receiving it. "
        "Every send needs a recv of the same tag."
    )


def unsent_text(request: CommRequest, rank: int) -> str:
    """Return what is said of a message that ``rank`` has asked for, and whose sender has left."""
    return (
        f"cannot finish {request} on rank {rank}: rank {request.peer} left the function without sending it. "
        "Every recv needs a send of the same tag."
    )
