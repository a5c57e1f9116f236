"""A message between two ranks: how it lies in a ring, and what either side remembers of it. Touches no shared words."""

from __future__ import annotations

import struct

import numpy as np

from synk._pure.dtypes import dtype_name
from synk._pure.ranges import LINE_NBYTES, round_up
from synk.communicators._buffers import DTYPE_NAMES, named_dtype
from synk.communicators._rendezvous import Request
from synk.errors import CollectiveMismatch

# tag, bytes of the array, number of the dtype, axes; then what lies behind the header: from two axes on the shape, and
# the array, of which all that does not fit the line follows in the next ones.
# place: in the outbox of the sender, where the message is all there, behind its shape; negative: it is in the ring.
LINE = struct.Struct("=qqHB5xq32s")
HEADER = struct.Struct("=qqHB5xq")
INLINE_NBYTES = LINE_NBYTES - HEADER.size
MAX_INLINE_AXES = INLINE_NBYTES // 8
SHAPES = [struct.Struct(f"={num_axes}q") for num_axes in range(MAX_INLINE_AXES + 1)]
NUMBERS = {np.dtype(name): number for number, name in enumerate(DTYPE_NAMES) if name != "bfloat16"}
"""Of dtypes that need no look: in the machine's byte order, and known to NumPy."""


def prefix_nbytes(num_axes: int) -> int:
    """Return the size of the shape in front of an array; one axis is as long as the array has bytes for."""
    return 8 * num_axes if num_axes > 1 else 0


class Outgoing:
    """A message on the sender's side, until all of it is in the ring.

    Attributes
    ----------
    line : bytes
        Its first line.
    rest : ndarray of uint8
        What follows.
    num_written : int
        Bytes in the ring, of both.
    begin : int
        Where in the stream it begins, as soon as a byte of it is there.
    """

    __slots__ = ("_body", "_header", "_prefix", "begin", "line", "num_written", "request", "rest")

    def __init__(self, array: np.ndarray, peer: int, tag: int) -> None:
        name = dtype_name(array.dtype)
        self.request = Request("send", dtype=name, num_elements=array.size, peer=peer, tag=tag)
        body = array.reshape(-1).view(np.uint8)
        prefix = np.array(array.shape, np.int64).tobytes() if array.ndim > 1 else b""
        if len(prefix) > INLINE_NBYTES:
            body = np.concatenate([np.frombuffer(prefix, np.uint8), body])
            prefix = b""
        num_inline = INLINE_NBYTES - len(prefix)
        inline = prefix + body[:num_inline].tobytes()
        self._header = tag, array.nbytes, DTYPE_NAMES.index(name), array.ndim
        self.line = LINE.pack(*self._header, -1, inline)
        self.rest = body[num_inline:]
        self.num_written = self.begin = 0
        self._prefix, self._body = prefix, body

    def lay_out(self, place: int) -> np.ndarray:
        """Have the ring say only where the message lies; return the bytes to be put there."""
        self.line = LINE.pack(*self._header, place, self._prefix)
        self.rest = self.rest[:0]
        return self._body

    @property
    def is_done(self) -> bool:
        return self.num_written >= LINE_NBYTES + self.rest.size

    def make_own(self) -> None:
        """Copy what is left, so that the array may be changed."""
        if not self.is_done:
            start = max(self.num_written - LINE_NBYTES, 0)
            self.rest = self.rest[start:].copy()
            self.num_written -= start

    def write(self, place: np.ndarray) -> int:
        """Write as much as ``place`` takes, which has room for a line; return how many bytes, in whole lines."""
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
    """A message on the receiver's side, from its recv or its arrival on, whichever is first.

    Attributes
    ----------
    request : Request or None
        What a recv has asked for.
    target : ndarray or None
        Where its array is to be.
    place : int
        In the outbox of its sender; negative for one that comes through the ring.
    """

    __slots__ = (
        *("_num_apart", "_num_axes", "_shape", "body", "dtype", "nbytes", "num_filled", "place", "request", "target"),
    )

    def __init__(self, request: Request | None = None, target: np.ndarray | None = None) -> None:
        self.request, self.target = request, target
        self.body: np.ndarray | None = None  # bytes of the array, behind those of a shape that the line has no room for
        self.num_filled = 0
        self.place = -1

    @property
    def is_done(self) -> bool:
        return self.body is not None and self.num_filled == self.body.size

    def open(self, line: bytes) -> None:
        """Take in the first line."""
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
        if self.place >= 0:  # it stays where it is until somebody asks for it
            return
        self.make_body()
        assert self.body is not None
        first = np.frombuffer(inline, np.uint8)[: self.body.size]
        self.body[: first.size] = first
        self.num_filled = first.size

    def make_body(self) -> None:
        """Make room for the bytes: the array of the recv itself, where it is like the message."""
        target = self.target
        if target is not None and not self._num_apart and self._is_like(target):
            self.body = target.reshape(-1).view(np.uint8)
        else:
            self.body = np.empty(self._num_apart + self.nbytes, np.uint8)

    @property
    def num_elements(self) -> int:
        return int(self.nbytes) // named_dtype(self.dtype).itemsize

    def _is_like(self, array: np.ndarray) -> bool:
        return array.nbytes == self.nbytes and dtype_name(array.dtype) == self.dtype

    def array(self) -> np.ndarray:
        """Return what came, in the array of the recv where that was given one.

        Raises
        ------
        CollectiveMismatch
            If the message has another dtype or count than what the recv asked for.
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
