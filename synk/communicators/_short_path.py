"""The short path of messages: plain arrays between ranks that are awake, without the queues of ``_mailbox``.

A message takes this path if it lies in its ring in one piece, this rank has nothing else in flight, and the other rank
has begun the call. The mailbox takes all others. Both write and read the same stream of messages.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from synk._pure.ranges import LINE_NBYTES
from synk.communicators._checks import DTYPE_NAMES, named_dtype
from synk.communicators._mailbox import Mailbox
from synk.communicators._messages import (
    HEADER,
    IN_RING,
    INLINE_NBYTES,
    LINE,
    MAX_INLINE_AXES,
    NUMBERS,
    SHAPES,
    prefix_nbytes,
)
from synk.communicators._rendezvous import SPIN_YIELDS, Rendezvous

# By the number of axes: what a message takes besides its array, plus what rounds the sum up to whole lines.
_OVERHEAD_NBYTES = [HEADER.size + prefix_nbytes(num_axes) + LINE_NBYTES - 1 for num_axes in range(MAX_INLINE_AXES + 1)]


_ANY = -1
"""In the place of the number of a dtype: a recv without an array accepts any."""


def _number_of(wanted: Any, like: Any, out: Any) -> int | None:
    """Return the number of the dtype of an array that a recv gives, or None if it must take the longer path."""
    if type(wanted) is not np.ndarray:
        return None
    if out is not None:
        flags = wanted.flags
        if like is not None or not flags.c_contiguous or not flags.writeable:
            return None
    return NUMBERS.get(wanted.dtype)


def _do_not_sleep() -> bool:
    """Return that sleeping is left to the mailbox, which tells the others what this rank waits for."""
    return False


class ShortPath:
    """One rank's short path for messages.

    Parameters
    ----------
    rendezvous : Rendezvous
    mailbox : Mailbox
    """

    def __init__(self, rendezvous: Rendezvous, mailbox: Mailbox) -> None:
        self._rendezvous = rendezvous
        self._mailbox = mailbox
        self._rank = rendezvous.rank
        self._capacity = mailbox.capacity
        self._to_peers = [ring.data for ring in mailbox.to_peers]
        self._from_peers = [ring.data for ring in mailbox.from_peers]
        self._written, self._read = rendezvous.written[self._rank], rendezvous.read[self._rank]

    def _free_rank(self, peer: object) -> int | None:
        """Return the number of the rank at position ``peer`` of the call, if its messages may take this path."""
        rendezvous = self._rendezvous
        if type(peer) is not int or not 0 <= peer < len(rendezvous.ranks):
            return None
        rank = rendezvous.ranks[peer]
        return rank if rank in rendezvous.begun and not rendezvous.is_unfinished and self._mailbox.is_idle() else None

    def send_now(self, array: object, peer: int, tag: int) -> bool:
        """Send a plain array if the ring has room for all of it in one piece. Return whether it was sent.

        These are the steps of ``Mailbox._write``, for a rank that is awake and a peer that has begun.
        """
        rendezvous = self._rendezvous
        if type(array) is not np.ndarray or (receiver := self._free_rank(peer)) is None:
            return False
        number, nbytes, num_axes = NUMBERS.get(array.dtype), array.nbytes, array.ndim
        if number is None or num_axes > MAX_INLINE_AXES or type(tag) is not int or not 0 <= tag < 1 << 63:
            return False
        num_more = nbytes + (8 * num_axes if num_axes > 1 else 0) - INLINE_NBYTES
        total = (
            LINE_NBYTES if num_more <= 0 else LINE_NBYTES + (num_more + LINE_NBYTES - 1) // LINE_NBYTES * LINE_NBYTES
        )
        written, ring = self._written, self._to_peers[receiver]
        end = written[receiver]
        start = end % self._capacity
        if start + total > self._capacity or total > self._capacity - end + rendezvous.read[receiver][self._rank]:
            return False
        self._mailbox.is_used = True
        if nbytes <= INLINE_NBYTES and num_axes <= 1:
            LINE.pack_into(ring, start, tag, nbytes, number, num_axes, IN_RING, array.tobytes())
        else:
            place = start + HEADER.size
            HEADER.pack_into(ring, start, tag, nbytes, number, num_axes, IN_RING)
            if num_axes > 1:
                SHAPES[num_axes].pack_into(ring, place, *array.shape)
                place += 8 * num_axes
            np.ndarray(array.shape, array.dtype, ring, place)[...] = array
        rendezvous.fence()  # the bytes must be visible before the count that announces them
        written[receiver] = end + total
        rendezvous.wake(receiver)
        return True

    def recv_now(self, peer: int, tag: int, like: object, out: object) -> np.ndarray | None:
        """Return the next message if it has this tag and is, or soon will be, in the ring in one piece; else None.

        These are the steps of ``Mailbox._take_in``, for a rank that is awake and has nothing else in flight.
        """
        rendezvous = self._rendezvous
        if (sender := self._free_rank(peer)) is None:
            return None
        wanted: Any = like if out is None else out
        number = _ANY if wanted is None else _number_of(wanted, like, out)
        if number is None:
            return None
        written, read, rank = rendezvous.written[sender], self._read, self._rank
        begin = read[sender]
        for _ in range(SPIN_YIELDS):
            if written[rank] != begin:
                break
            os.sched_yield()
        else:
            patience = rendezvous.patience
            if not (patience.pays and patience.wait_for(lambda: written[rank] != begin, _do_not_sleep)):
                return None
        rendezvous.fence()  # the bytes must be read after the count that announces them
        ring, start = self._from_peers[sender], begin % self._capacity
        # Nothing is taken out before all is known to fit. Until then the mailbox can still read the whole message.
        found, nbytes, found_number, num_axes, place = HEADER.unpack_from(ring, start)
        if found != tag or place != IN_RING or num_axes > MAX_INLINE_AXES:
            return None
        total = nbytes + _OVERHEAD_NBYTES[num_axes] & -LINE_NBYTES
        if start + total > self._capacity or total > written[rank] - begin:
            return None
        if wanted is None:
            dtype = named_dtype(DTYPE_NAMES[found_number])
            shape = (
                SHAPES[num_axes].unpack_from(ring, start + HEADER.size)
                if num_axes > 1
                else (nbytes // dtype.itemsize,) * num_axes
            )
        elif number == found_number and wanted.nbytes == nbytes:
            dtype, shape = wanted.dtype, wanted.shape
        else:
            return None
        self._mailbox.is_used = True
        place = start + HEADER.size
        array = np.ndarray(shape, dtype, ring, place if num_axes < 2 else place + 8 * num_axes)
        if out is None:
            array = array.copy()
        else:
            wanted[...] = array
            array = wanted
        rendezvous.fence()  # the bytes must be read before the count that gives their place back
        read[sender] = begin + total
        rendezvous.wake(sender)
        return array
