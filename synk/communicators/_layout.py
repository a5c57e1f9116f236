"""How the segment of a shared-memory communicator is divided. Pure arithmetic: each process derives it from the size.

The order is: the control words; for each rank its two halves; for each ordered pair of ranks a ring. A page is spent on
where in a page the halves begin.
"""

from __future__ import annotations

from typing import NamedTuple

from synk._pure.ranges import LINE_NBYTES, round_up
from synk._wire.memory import PAGE_NBYTES

WORD_NBYTES = 8

# Three quarters are for the two halves. With two ranks, each half holds a full chunk of both and a result.
RANK_NBYTES = 1 << 23

# The words of a head besides one for each rank: the dtype, the number of axes, and a shape of up to 63 axes.
MAX_HEAD_WORDS = 2 + 63


# Halves and rings begin so far behind the start of a page. NumPy's large arrays begin 16 bytes behind it, and from the
# very start of a page to there AMD's Zen 3 copies many times slower (see ``read_memory``).
_SHIFT_NBYTES = 2 * LINE_NBYTES


class ControlLayout(NamedTuple):
    """Where the control words of ``world_size`` ranks lie. Offsets are in bytes from the start of the segment."""

    world_size: int

    @property
    def column_nbytes(self) -> int:
        """The size of a column: one word for each rank, in whole cache lines."""
        return round_up(self.world_size * WORD_NBYTES, LINE_NBYTES)

    def column(self, index: int) -> int:
        """Return the offset of column ``index``. The abort word has the line before the columns."""
        return LINE_NBYTES + index * self.column_nbytes

    @property
    def requests(self) -> int:
        """Offset of the requests, ``(rank, 3)``, a line each: two for collectives, by turns, and one for messages."""
        return self.column(8)

    def request_offsets(self, place: int) -> list[int]:
        """Return the offsets of the requests of all ranks at one of the three places."""
        return [self.requests + (3 * rank + place) * LINE_NBYTES for rank in range(self.world_size)]

    def matrix(self, index: int) -> int:
        """Return the offset of words for each pair of ranks: 0: the bytes written to each ring, by (sender, receiver);
        1: the bytes read from each, by (receiver, sender); 2: whether a sender has more for it, by (sender, receiver).
        """
        return self.requests + self.world_size * (3 * LINE_NBYTES + index * self.column_nbytes)

    @property
    def nbytes(self) -> int:
        """The size of all control words, in whole pages."""
        return round_up(self.matrix(3), PAGE_NBYTES)


class SegmentLayout(NamedTuple):
    """How a segment of ``nbytes`` is divided among ``world_size`` ranks."""

    nbytes: int
    world_size: int

    @property
    def halves(self) -> int:
        """Offset of the halves, ``(rank, 2, half_nbytes)``."""
        return ControlLayout(self.world_size).nbytes + _SHIFT_NBYTES

    @property
    def rank_nbytes(self) -> int:
        """How much each rank has: its two halves, and the rings that it writes."""
        return (self.nbytes - ControlLayout(self.world_size).nbytes - PAGE_NBYTES) // self.world_size

    @property
    def ring_nbytes(self) -> int:
        return self.rank_nbytes // 4 // self.world_size // LINE_NBYTES * LINE_NBYTES

    @property
    def half_nbytes(self) -> int:
        return (self.rank_nbytes - self.world_size * self.ring_nbytes) // 2 // LINE_NBYTES * LINE_NBYTES

    @property
    def rings(self) -> int:
        """Offset of the rings, ``(sender, receiver, ring_nbytes)``."""
        return self.halves + self.world_size * 2 * self.half_nbytes


def required_nbytes(world_size: int, rank_nbytes: int = RANK_NBYTES) -> int:
    """Return the size of the segment for ``world_size`` ranks.

    Parameters
    ----------
    world_size : int
    rank_nbytes : int
        How much memory each rank has. A quarter of it goes to its rings. With more, large collectives meet less
        often.
    """
    return ControlLayout(world_size).nbytes + PAGE_NBYTES + world_size * rank_nbytes
