"""Collectives between the worker processes of one machine, through one shared segment. No socket, no shared lock.

``_shm_collectives`` has the collectives, ``_schedule`` their order, ``_mailbox`` messages between two ranks, and
``_rendezvous`` the words by which ranks meet.

The master makes the segment (``required_nbytes``) and one eventfd for each rank. It hands both to the workers, and
keeps them for replacements of workers that died. When a worker failed it calls ``set_abort``, and when all workers are
idle again ``reset``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from synk._wire.channel import Patience
from synk._wire.memory import Segment
from synk._wire.process_memory import let_siblings_read
from synk.communicators._exchange import Exchange
from synk.communicators._layout import SegmentLayout
from synk.communicators._mailbox import Mailbox
from synk.communicators._rendezvous import Aborted, Rendezvous
from synk.communicators._results import Place, ResultMemory
from synk.communicators._schedule import Schedule, Steps
from synk.communicators._shm_collectives import ShmCollectives
from synk.communicators._short_collectives import ShortCollectives
from synk.communicators._short_path import ShortPath

__all__ = ["Aborted", "ShmCommunicator"]


class ShmCommunicator(ShmCollectives):
    """Collectives of one rank. They run between ``begin`` and ``end``, over the ranks given to ``begin``.

    All ranks call the same collectives, in the same order, with equal arguments. If they do not, every rank that waits
    raises ``CollectiveMismatch``, and the rest of the call has no collectives. One thread at a time may use it.

    Parameters
    ----------
    segment : Segment
        Writable, at least ``required_nbytes(world_size)`` bytes, the same memory in all ranks.
    rank, world_size : int
    eventfds : sequence of int
        The descriptors in this process, one for each rank.
    patience_s : float
        How long a rank waits awake at most before it sleeps.
    rendezvous_type : type of Rendezvous

    Attributes
    ----------
    short_path : ShortPath
        The quick way for messages and collectives of plain arrays.

    Raises
    ------
    Aborted
        By every operation, once the master has called ``set_abort``.

    Notes
    -----
    ``send_array`` returns without waiting if the message fits into its ring. A longer message is taken in whenever the
    receiver waits for anything: what the receiver has not asked for yet, it keeps in private memory.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        world_size: int,
        eventfds: Sequence[int],
        patience_s: float = 0.0,
        rendezvous_type: type[Rendezvous] = Rendezvous,
    ) -> None:
        layout = SegmentLayout(segment.nbytes, world_size)
        halves = (world_size, 2, layout.half_nbytes)
        rings = (world_size, world_size, layout.ring_nbytes)
        rendezvous = rendezvous_type(segment, rank, world_size, eventfds, layout.ring_nbytes, Patience(patience_s))
        super().__init__(rendezvous, segment.view(layout.halves, halves, np.dtype(np.uint8)))
        self.world_size, self.patience = world_size, rendezvous.patience
        self._schedule, self.results = Schedule(rendezvous), ResultMemory()
        self._mailbox = Mailbox(
            rendezvous,
            self._schedule,
            segment.view(layout.rings, rings, np.dtype(np.uint8)),
            self.results,
        )
        self._boxes = (self._mailbox,)
        let_siblings_read()
        self.short_path = ShortPath(rendezvous, self._mailbox, ShortCollectives(self))

    # -- the call ------------------------------------------------------------------------------------------------

    def begin(self, ranks: tuple[int, ...], sequence: int) -> None:
        """Enter a call, before its first operation. Only ``ranks`` may call this. ``end`` follows.

        A rank that uses no collectives may write ``skip_words`` instead of both. No rank may enter a call before all
        ranks have left the one before. The master sees to that: it waits for their replies.

        Parameters
        ----------
        ranks : tuple of int
            The ranks that take part, ascending. This rank is one of them.
        sequence : int
            The number of the call, the same on all ranks: at least 1, and larger than in any earlier call.
        """
        # All this comes before the rendezvous begins: the number of the call, which it stores last, tells the others
        # that this rank's counts of bytes are valid.
        self._mailbox.clear()
        self._schedule.clear()
        self._rendezvous.is_unfinished = False
        self._reads_memory = True
        self.short_path.collectives.begin(ranks)
        self._rendezvous.begin(ranks, sequence)

    def _leave(self) -> None:
        self._rendezvous.end()

    def skip_words(self) -> tuple[memoryview, memoryview]:
        """Return the words by which a rank goes through a call without ``begin`` and ``end``; see ``Rendezvous``."""
        return self._rendezvous.skip_words()

    def wake_sleepers(self) -> None:
        """Wake peers that may wait for what this rank wrote to ``skip_words``."""
        self._rendezvous.wake_all()

    def exchange_steps(
        self, kind: str, rows: np.ndarray | None, sizes: list[int] | None, root: int, place: Place
    ) -> Steps:
        return Exchange(self, kind, rows, sizes, root).steps(place)
