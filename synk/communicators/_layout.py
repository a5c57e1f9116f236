"""How the segment of a shared-memory communicator is divided. Pure arithmetic: both sides derive it from the size.

In this order: the control words; for each rank the two halves of its slot; for each ordered pair of ranks a mailbox.
"""

from __future__ import annotations

from typing import NamedTuple

from synk._pure.ranges import LINE_NBYTES, round_up
from synk._wire.memory import PAGE_NBYTES

WORD_NBYTES = 8

# Three quarters are for the two halves: of two ranks, each half holds a full chunk of both and a result.
SLOT_NBYTES = 1 << 23


class ControlLayout(NamedTuple):
    """Where the control words of ``world_size`` ranks lie; offsets in bytes from the start of the segment."""

    world_size: int

    @property
    def column_nbytes(self) -> int:
        """Size of one word for each rank."""
        return round_up(self.world_size * WORD_NBYTES, LINE_NBYTES)

    def column(self, index: int) -> int:
        """Return the offset of the ``index``-th column; the abort word has the line before them."""
        return LINE_NBYTES + index * self.column_nbytes

    @property
    def requests(self) -> int:
        """Offset of the requests, ``(rank, 3)``, a line each: two for collectives in turn, one for messages."""
        return self.column(6)

    @property
    def written(self) -> int:
        """Offset of the bytes written to each mailbox, ``(sender, receiver)``."""
        return self.requests + self.world_size * 3 * LINE_NBYTES

    @property
    def read(self) -> int:
        """Offset of the bytes read from each mailbox, ``(receiver, sender)``."""
        return self.written + self.world_size * self.column_nbytes

    @property
    def unsent(self) -> int:
        """Offset of what tells whether a sender has more for a mailbox than is written, ``(sender, receiver)``."""
        return self.read + self.world_size * self.column_nbytes

    @property
    def nbytes(self) -> int:
        """Size of all control words, in whole pages."""
        return round_up(self.unsent + self.world_size * self.column_nbytes, PAGE_NBYTES)


class Layout(NamedTuple):
    """How a segment of ``nbytes`` is divided among ``world_size`` ranks."""

    nbytes: int
    world_size: int

    @property
    def halves(self) -> int:
        """Offset of the slots, ``(rank, 2, half_nbytes)``."""
        return ControlLayout(self.world_size).nbytes

    @property
    def rank_nbytes(self) -> int:
        """What each rank has: the two halves of its slot and the mailboxes that it writes."""
        return (self.nbytes - self.halves) // self.world_size

    @property
    def mailbox_nbytes(self) -> int:
        return self.rank_nbytes // 4 // self.world_size // LINE_NBYTES * LINE_NBYTES

    @property
    def half_nbytes(self) -> int:
        return (self.rank_nbytes - self.world_size * self.mailbox_nbytes) // 2 // LINE_NBYTES * LINE_NBYTES

    @property
    def mailboxes(self) -> int:
        """Offset of the mailboxes, ``(sender, receiver, mailbox_nbytes)``."""
        return self.halves + self.world_size * 2 * self.half_nbytes


def required_nbytes(world_size: int, slot_nbytes: int = SLOT_NBYTES) -> int:
    """Return the size of the segment for ``world_size`` ranks.

    Parameters
    ----------
    world_size : int
    slot_nbytes : int
        What each rank may fill before the others must have read it. More makes large collectives meet less often;
        a quarter goes to the mailboxes.

    Raises
    ------
    ValueError
        If the slot cannot hold a cache line for each rank, twice, and as many mailboxes.
    """
    smallest = 8 * (world_size + 1) * LINE_NBYTES
    if slot_nbytes < smallest:
        raise ValueError(
            f"cannot divide a slot of {slot_nbytes} bytes among {world_size} ranks: expected at least {smallest}."
        )
    return ControlLayout(world_size).nbytes + world_size * slot_nbytes
