"""Messages of plain arrays between ranks that are awake: what ``_mailbox`` does for them, with nothing in between.

A message takes this path if it lies in its ring in one piece, nothing else is under way on this rank, and the other one
has begun the call; all others are left to the mailbox. It is the same stream of messages.
"""

from __future__ import annotations

import os

import numpy as np

from synk._pure.ranges import LINE_NBYTES
from synk._wire.channel import Looked
from synk.communicators._buffers import DTYPE_NAMES, named_dtype
from synk.communicators._mailbox import Mailbox
from synk.communicators._messages import HEADER, INLINE_NBYTES, LINE, MAX_INLINE_AXES, NUMBERS, SHAPES, prefix_nbytes
from synk.communicators._rendezvous import SPIN_YIELDS, Rendezvous

# What a message takes beside its array, and what rounds it up to whole lines; by the number of axes.
_OVERHEAD_NBYTES = [HEADER.size + prefix_nbytes(num_axes) + LINE_NBYTES - 1 for num_axes in range(MAX_INLINE_AXES + 1)]


def _do_not_sleep() -> bool:
    """Leave that to the mailbox, which tells the others what this rank waits for."""
    return False


class ShortPath:
    """One rank's short path.

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
        self._written, self._read = rendezvous.written[self._rank], rendezvous.read[self._rank]

    def _free_rank(self, peer: object) -> int | None:
        """Return the number of a rank, which functions know by its place in the call, if its messages may go here."""
        rendezvous = self._rendezvous
        if type(peer) is not int or not 0 <= peer < len(rendezvous.ranks):
            return None
        rank = rendezvous.ranks[peer]
        return rank if rank in rendezvous.begun and not rendezvous.is_unfinished and self._mailbox.is_idle() else None

    def send_now(self, array: object, peer: int, tag: int) -> bool:
        """Send a plain array if the ring takes all of it in one piece; return whether it was sent.

        The steps of ``_write``, for a rank that is awake and a peer that has begun, with nothing in between.
        """
        rendezvous = self._rendezvous
        if type(array) is not np.ndarray or (receiver := self._free_rank(peer)) is None:
            return False
        number, nbytes, num_axes = NUMBERS.get(array.dtype), array.nbytes, array.ndim
        if number is None or num_axes > MAX_INLINE_AXES or type(tag) is not int or tag < 0:
            return False
        num_more = nbytes + (8 * num_axes if num_axes > 1 else 0) - INLINE_NBYTES
        total = (
            LINE_NBYTES if num_more <= 0 else LINE_NBYTES + (num_more + LINE_NBYTES - 1) // LINE_NBYTES * LINE_NBYTES
        )
        written, ring = self._written, self._mailbox.to_peers[receiver]
        end = written[receiver]
        start = end % self._capacity
        if start + total > self._capacity or total > self._capacity - end + rendezvous.read[receiver][self._rank]:
            return False
        self._mailbox.is_used = True
        if nbytes <= INLINE_NBYTES and num_axes <= 1:
            LINE.pack_into(ring, start, tag, nbytes, number, num_axes, -1, array.tobytes())
        else:
            place = start + HEADER.size
            HEADER.pack_into(ring, start, tag, nbytes, number, num_axes, -1)
            if num_axes > 1:
                SHAPES[num_axes].pack_into(ring, place, *array.shape)
                place += 8 * num_axes
            np.ndarray(array.shape, array.dtype, ring, place)[...] = array
        rendezvous.fence()
        written[receiver] = end + total
        rendezvous.wake(receiver)
        return True

    def recv_now(self, peer: int, tag: int, like: object) -> np.ndarray | None:
        """Return the next message if it is this one and in the ring, or soon is, in one piece; else None.

        The steps of ``_take_in``, for a rank that is awake and has nothing else under way.
        """
        rendezvous = self._rendezvous
        if (sender := self._free_rank(peer)) is None:
            return None
        wanted = like if type(like) is np.ndarray else None
        if wanted is not like or (wanted is not None and wanted.dtype not in NUMBERS):
            return None
        written, read, rank = rendezvous.written[sender], self._read, self._rank
        begin = read[sender]
        for _ in range(SPIN_YIELDS):
            if written[rank] != begin:
                break
            os.sched_yield()
        else:
            message = Looked(lambda: written[rank] != begin, _do_not_sleep)
            if not (rendezvous.patience.pays and message.awaited(rendezvous.patience)):
                return None
        rendezvous.fence()
        ring, start = self._mailbox.from_peers[sender], begin % self._capacity
        found, nbytes, found_number, num_axes, place = HEADER.unpack_from(ring, start)
        if found != tag or place >= 0 or num_axes > MAX_INLINE_AXES:
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
        elif NUMBERS[wanted.dtype] == found_number and wanted.nbytes == nbytes:
            dtype, shape = wanted.dtype, wanted.shape
        else:
            return None
        self._mailbox.is_used = True
        array = np.ndarray(shape, dtype, ring, start + HEADER.size + prefix_nbytes(num_axes)).copy()
        rendezvous.fence()
        read[sender] = begin + total
        rendezvous.wake(sender)
        return array
