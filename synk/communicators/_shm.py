"""Collectives between the worker processes of one machine, through one shared segment. No socket, no shared lock.

``_shm_collectives`` has the collectives, ``_schedule`` their order, ``_mailbox`` messages between two ranks, and
``_rendezvous`` the words by which ranks meet.

The program makes the segment (``required_nbytes``) and one eventfd for each rank. It hands both to the workers, and
keeps them for replacements of workers that died. When a worker failed it calls ``set_abort``, and when all workers are
idle again ``reset``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._wire.memory import Segment
from synk._wire.patience import Patience
from synk._wire.process_memory import let_siblings_read
from synk.communicators._checks import check_out
from synk.communicators._exchange import DIVIDED, ROWS, TO_ROOT, Exchange
from synk.communicators._layout import SegmentLayout
from synk.communicators._mailbox import Mailbox
from synk.communicators._meetings import LONGER
from synk.communicators._rendezvous import Rendezvous
from synk.communicators._results import Place, ResultMemory
from synk.communicators._schedule import Schedule, Steps
from synk.communicators._shm_collectives import ShmCollectives
from synk.communicators._short_path import ShortPath

_TO_ROOT = frozenset(("reduce", *TO_ROOT))


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
        The quick way for messages of plain arrays.

    Raises
    ------
    Aborted
        By every operation, once the program has called ``set_abort``.

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
        self.short_path = ShortPath(rendezvous, self._mailbox)

    # -- the call ------------------------------------------------------------------------------------------------

    def begin(self, ranks: tuple[int, ...], sequence: int) -> None:
        """Enter a call, before its first operation. Only ``ranks`` may call this. ``end`` follows.

        A rank that uses no collectives may write ``skip_words`` instead of both. No rank may enter a call before all
        ranks have left the one before. The program sees to that: it waits for their replies.

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
        self.meetings.begin(ranks)
        self._rendezvous.begin(ranks, sequence)

    def _leave(self) -> None:
        self._rendezvous.end()

    def skip_words(self) -> tuple[memoryview, memoryview]:
        """Return the words by which a rank goes through a call without ``begin`` and ``end``; see ``Rendezvous``."""
        return self._rendezvous.skip_words()

    def wake_sleepers(self) -> None:
        """Wake peers that may wait for what this rank wrote to ``skip_words``."""
        self._rendezvous.wake_all()

    def at_once(
        self, kind: str, array: Any, out: Any, op: Any = "", weight: float | None = None, root: Any = -1
    ) -> Any:
        """Take a collective without generators, if the meeting of another one of its form was kept.

        The arguments are as the function gave them. Returns ``LONGER`` if the collective must go step by step; other
        ranks may do so even if this one does not.
        """
        rendezvous = self._rendezvous
        ranks = rendezvous.ranks
        if self._schedule.operations or rendezvous.is_unfinished or type(root) is not int or type(op) is not str:
            return LONGER  # in a key, True and 1.0 would be the root 1
        peer = ranks[root] if 0 <= root < len(ranks) else -1
        dtype = form = None
        if kind != "scatter" or peer == self.rank:
            if type(array) is not np.ndarray:
                return LONGER
            dtype, form = array.dtype, array.shape if kind in ROWS else array.size
        meeting = self.meetings.get((kind, dtype, form, op, peer, weight is None))
        if meeting is None or not (weight is None or 0.0 <= weight <= 1.0):
            return LONGER
        shape = meeting.shape
        if meeting.head is None:
            shape = array.shape
            if kind == "all_gather":
                shape = len(ranks), *shape
            elif kind == "reduce_scatter":
                if not shape or shape[0] % len(ranks):
                    return LONGER
                shape = shape[0] // len(ranks), *shape[1:]
        is_receiver = peer == self.rank if kind in _TO_ROOT else kind != "barrier"
        if is_receiver and out is not None and not _fits(out, shape, meeting.dtype):
            return LONGER
        half = (rendezvous.tick + 1) & 1
        meeting.show(half, array)
        # Until the caller has its result: if anything is raised before, later collectives of this call are refused.
        rendezvous.is_unfinished = True
        rendezvous.post_packed(meeting.request if weight is None else meeting.request_of(weight))
        rendezvous.arrive()
        self.meet()
        rendezvous.compare()
        result = None
        if meeting.head is not None and any(head != meeting.head for head in meeting.heads[half]):  # of other rows
            result = self._go_on(kind, array, peer, half, out)
        elif is_receiver:
            result = self.results.empty(shape, meeting.dtype) if out is None else out
            weights = None if weight is None else rendezvous.weights()
            meeting.finish(half, weights, result.reshape(-1) if meeting.head is None else result)
        rendezvous.is_unfinished = False
        return result

    def _go_on(self, kind: str, array: Any, root: int, half: int, out: Any) -> Any:
        """Take the steps of an exchange of equal blocks that follow its first meeting."""
        rows, sizes = None, None
        if kind != "scatter" or root == self.rank:
            rows = np.ascontiguousarray(array)
            if out is not None and np.may_share_memory(rows, out):  # pieces of it are shown after others have come
                rows = rows.copy()
            sizes = [len(array) // len(self.ranks)] * len(self.ranks) if kind in DIVIDED else None

        def place(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            array: np.ndarray = self.results.empty(shape, dtype) if out is None else check_out(out, shape, dtype)
            return array

        self.has_agreed = True
        return self.go_on(Exchange(self, kind, rows, sizes, root).rest_steps(half, place))

    def exchange_steps(
        self, kind: str, rows: np.ndarray | None, sizes: list[int] | None, root: int, place: Place
    ) -> Steps:
        return Exchange(self, kind, rows, sizes, root).steps(place)


def _fits(out: Any, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether a result can be written to ``out`` as it is."""
    if type(out) is not np.ndarray or out.shape != shape or out.dtype != dtype:
        return False
    flags = out.flags
    return flags.c_contiguous and flags.writeable
