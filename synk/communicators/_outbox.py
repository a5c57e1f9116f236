"""Where a rank leaves messages for which a ring has no room: in a range of addresses behind the communicator's segment.

Each rank has a range of its own and gives away places in it: two lines of words, then the bytes of the message. The
sender raises ``filled`` while it copies, so that a receiver that waits copies along. The receiver sets ``released``
when it has everything. Both words belong to the sender until the receiver learns of the place, and again once the place
is released. The kernel gives memory when a place is first used. Above ``KEPT_NBYTES`` it gets the memory back when no
place is in use.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import functools
import os
import resource

import numpy as np

from synk._pure.arrays import address_of
from synk._pure.ranges import LINE_NBYTES, round_up
from synk._wire.mapping import give_back, populate
from synk._wire.memory import PAGE_NBYTES, Segment, available_nbytes
from synk.communicators._layout import WORD_NBYTES
from synk.errors import SharedMemoryError

KEPT_NBYTES = 1 << 26
CHUNK_NBYTES = 1 << 20
_MAX_RANGE_NBYTES = 1 << 36
_HEAD_NBYTES = 2 * LINE_NBYTES
_CHECKED_NBYTES = 1 << 24  # above this it is worth reading a file to know how much memory is free


@functools.cache
def _can_populate() -> bool:
    """Whether the kernel can allocate memory on demand and report that there is none: Linux 5.14."""
    try:
        with contextlib.closing(Segment.create(PAGE_NBYTES)) as segment:
            populate(address_of(segment.buffer), PAGE_NBYTES)
    except (OSError, SharedMemoryError):
        return False
    return True


def tail_nbytes(world_size: int) -> int:
    """Return how many bytes of addresses the outboxes of all ranks take: the size of the machine's memory for each.

    0 if the process's address space is limited, or the kernel is too old.
    """
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if is_limited or not _can_populate():
        return 0
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE_NBYTES
    return world_size * min(memory, _MAX_RANGE_NBYTES)


class Outbox:
    """The outboxes of all ranks. This rank gives away places in its own and reads from the others.

    Parameters
    ----------
    tail : ndarray of uint8
        All addresses, ``(rank, nbytes)`` flat. Empty if there are no outboxes.
    rank, world_size : int
    """

    def __init__(self, tail: np.ndarray, rank: int, world_size: int) -> None:
        self._boxes = tail
        words = tail.data.cast("B").cast("q")
        self._filled = self._released = words
        self._nbytes = tail.size // world_size // PAGE_NBYTES * PAGE_NBYTES
        self._begin = rank * self._nbytes
        self._address = address_of(tail)
        self._taken: list[tuple[int, int]] = []  # places in use, ascending, with their ends
        self._populated = self._begin  # up to here the kernel has given memory
        if self._nbytes:
            self._give_back(self._begin)  # memory left by a dead worker that had this rank before

    @property
    def is_there(self) -> bool:
        return self._nbytes > 0

    # -- the sender's side ---------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> int:
        """Return a place for a message of ``nbytes``.

        Raises
        ------
        SharedMemoryError
            If there is no memory for it.
        """
        # What receivers have released is free. A receiver that was killed releases nothing. ``clear`` takes its places
        # back when the next call begins.
        released = self._released
        self._taken = [place for place in self._taken if not released[place[0] // WORD_NBYTES + 8]]
        size = round_up(_HEAD_NBYTES + nbytes, PAGE_NBYTES)
        start = self._begin
        for begin, end in self._taken:
            if begin - start >= size:
                break
            start = end
        self._populate(start + size, nbytes)
        bisect.insort(self._taken, (start, start + size))
        # The place may hold the words of an earlier message. They are reset before the ring tells the receiver of it.
        word = start // WORD_NBYTES
        self._filled[word] = 0
        released[word + 8] = 0
        return start

    def _populate(self, end: int, message_nbytes: int) -> None:
        """Have the kernel give memory up to ``end``."""
        if end <= self._populated:
            return
        nbytes = end - self._populated
        try:
            if end > self._begin + self._nbytes or (nbytes > _CHECKED_NBYTES and nbytes > available_nbytes()):
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            populate(self._address + self._populated, nbytes)
        except OSError as error:
            raise SharedMemoryError(
                f"cannot leave a message of {message_nbytes} bytes for its receiver: {error.strerror}. Wait for "
                "messages that were sent before, or send it by send, which waits for the receiver."
            ) from error
        self._populated = end  # last: pages that the kernel has refused do not count

    def put(self, place: int, start: int, data: np.ndarray) -> None:
        """Copy bytes of a message to their place, from offset ``start`` on. A fence and ``show`` follow."""
        first = place + _HEAD_NBYTES + start
        self._boxes[first : first + data.size] = data

    def show(self, place: int, num_filled: int) -> None:
        """Tell the receiver how many bytes are in place. The caller has issued a fence after ``put``."""
        self._filled[place // WORD_NBYTES] = num_filled

    def clear(self) -> None:
        """Take all places back. Safe because no rank is any longer in the call in which they were given away."""
        self._taken.clear()
        self.trim()

    def trim(self) -> None:
        """Give memory back to the kernel if there is much of it and no place is in use."""
        released = self._released
        if self._populated - self._begin > KEPT_NBYTES and all(
            released[begin // WORD_NBYTES + 8] for begin, _ in self._taken
        ):
            self._taken.clear()
            self._give_back(self._begin + KEPT_NBYTES)

    def _give_back(self, start: int) -> None:
        """Give back all memory from ``start`` on."""
        try:
            give_back(self._address + start, self._begin + self._nbytes - start)
        except OSError:  # the memory stays and is used again
            pass
        else:
            self._populated = start

    # -- the receiver's side -------------------------------------------------------------------------------------

    def num_filled(self, place: int) -> int:
        """Return how many bytes of a message are in place. The caller issues a fence before it reads them."""
        return self._filled[place // WORD_NBYTES]

    def contents(self, place: int, start: int, stop: int) -> np.ndarray:
        """Return a view of bytes of a message."""
        first = place + _HEAD_NBYTES
        return self._boxes[first + start : first + stop]

    def release(self, place: int) -> None:
        """Give a place back to its sender. The caller has issued a fence after its last read."""
        self._released[place // WORD_NBYTES + 8] = 1
