"""Where a rank leaves messages for which a ring has no room: behind the segment of the communicator, by address.

Each rank has a range of addresses, of which it alone gives places away: two lines of words, then the bytes of the
message. The sender raises ``filled`` while it copies, so that a receiver that waits copies along; the receiver sets
``released`` when it has all of them. Until the receiver is told of a place both words are the sender's, and again from
then on that they are released. Memory is taken when a place is first used, and above ``KEPT_NBYTES`` given back when
nothing is in use any more.
"""

from __future__ import annotations

import bisect
import errno
import functools
import os
import resource

import numpy as np

from synk._pure.ranges import LINE_NBYTES, round_up
from synk._wire.mapping import give_back, populate
from synk._wire.memory import PAGE_NBYTES, Segment, available_nbytes
from synk.communicators._layout import WORD_NBYTES
from synk.errors import SharedMemoryError

KEPT_NBYTES = 1 << 26
CHUNK_NBYTES = 1 << 20
_MAX_RANGE_NBYTES = 1 << 36
_HEAD_NBYTES = 2 * LINE_NBYTES
_CHECKED_NBYTES = 1 << 24  # from here on it is worth a file read to ask how much memory is free


@functools.cache
def _can_populate() -> bool:
    """Whether the kernel takes memory on demand and says where there is none: Linux 5.14."""
    try:
        with _probe() as probe:
            populate(probe.address, PAGE_NBYTES)
    except (OSError, SharedMemoryError):
        return False
    return True


class _probe:
    def __enter__(self) -> _probe:
        self._segment = Segment.create(PAGE_NBYTES)
        self.address = int(self._segment.buffer.__array_interface__["data"][0])
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._segment.close()


def tail_nbytes(world_size: int) -> int:
    """Return how many bytes of addresses the outboxes of all ranks take: for each as many as the machine has memory.

    0 where addresses are limited, and where the kernel is too old.
    """
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if is_limited or not _can_populate():
        return 0
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE_NBYTES
    return world_size * min(memory, _MAX_RANGE_NBYTES)


class Outbox:
    """The outboxes of all ranks, of which one is this rank's.

    Parameters
    ----------
    tail : ndarray of uint8
        The addresses, ``(rank, nbytes)`` flat; empty where there are none.
    rank, world_size : int
    """

    def __init__(self, tail: np.ndarray, rank: int, world_size: int) -> None:
        self._boxes = tail
        words = tail.data.cast("B").cast("q")
        self._filled = self._released = words
        self._nbytes = tail.size // world_size // PAGE_NBYTES * PAGE_NBYTES
        self._begin = rank * self._nbytes
        self._address = int(tail.__array_interface__["data"][0])
        self._taken: list[tuple[int, int]] = []  # places in use, ascending, with their ends
        self._populated = self._begin  # up to where memory was taken
        if self._nbytes:
            self._give_back(self._begin)  # what a worker has left that had this rank before

    @property
    def is_there(self) -> bool:
        return self._nbytes > 0

    def close(self) -> None:
        """Let go of the shared memory."""
        self._filled = self._released = memoryview(b"").cast("q")
        self._boxes = np.empty(0, np.uint8)
        self._nbytes = 0

    # -- the sender's side ---------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> int:
        """Return a place for a message.

        Raises
        ------
        SharedMemoryError
            If there is no memory for it.
        """
        released = self._released
        self._taken = [place for place in self._taken if not released[place[0] // WORD_NBYTES + 8]]
        size = round_up(_HEAD_NBYTES + nbytes, PAGE_NBYTES)
        start = self._begin
        for begin, end in self._taken:
            if begin - start >= size:
                break
            start = end
        self._populate(start + size)
        bisect.insort(self._taken, (start, start + size))
        word = start // WORD_NBYTES
        self._filled[word] = 0
        released[word + 8] = 0
        return start

    def _populate(self, end: int) -> None:
        if end <= self._populated:
            return
        nbytes = end - self._populated
        try:
            if end > self._begin + self._nbytes or (nbytes > _CHECKED_NBYTES and nbytes > available_nbytes()):
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            populate(self._address + self._populated, nbytes)
        except OSError as error:
            raise SharedMemoryError(
                f"cannot leave a message of {nbytes} bytes for its receiver: {error.strerror}. Wait for messages that "
                "were sent before, or send it by send, which waits for the receiver."
            ) from error
        self._populated = end

    def put(self, place: int, start: int, data: np.ndarray) -> None:
        """Copy the bytes of a message from ``start`` on; ``show`` follows."""
        first = place + _HEAD_NBYTES + start
        self._boxes[first : first + data.size] = data

    def show(self, place: int, num_filled: int) -> None:
        """Tell the receiver how many bytes are there, after a fence."""
        self._filled[place // WORD_NBYTES] = num_filled

    def clear(self) -> None:
        """Take all places back: no rank is in the call in which they were given away."""
        self._taken.clear()
        self.trim()

    def trim(self) -> None:
        """Give memory back if there is much of it and no place is in use."""
        released = self._released
        if self._populated - self._begin > KEPT_NBYTES and all(
            released[begin // WORD_NBYTES + 8] for begin, _ in self._taken
        ):
            self._taken.clear()
            self._give_back(self._begin + KEPT_NBYTES)

    def _give_back(self, start: int) -> None:
        """Give all memory from ``start`` on back."""
        try:
            give_back(self._address + start, self._begin + self._nbytes - start)
        except OSError:  # it stays, and is used again
            pass
        else:
            self._populated = start

    # -- the receiver's side -------------------------------------------------------------------------------------

    def num_filled(self, place: int) -> int:
        """Return how many bytes of a message are there; a fence comes before they are read."""
        return self._filled[place // WORD_NBYTES]

    def contents(self, place: int, start: int, stop: int) -> np.ndarray:
        """View bytes of a message."""
        first = place + _HEAD_NBYTES
        return self._boxes[first + start : first + stop]

    def release(self, place: int) -> None:
        """Give a place back to its sender, after a fence."""
        self._released[place // WORD_NBYTES + 8] = 1
