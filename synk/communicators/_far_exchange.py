"""An exchange of rows over several nodes: which rows each rank brings, and where they go. Moves nothing itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from synk.communicators._exchange import DIVIDED, FROM_ROOT, TO_ROOT, Head, check_shapes, joined_rows
from synk.communicators._layout import WORD_NBYTES
from synk.communicators._results import Place
from synk.communicators._shm_collectives import flat_bytes


class FarExchange:
    """One rank's view of an exchange of rows over several nodes. See ``Exchange`` for the parameters."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        kind: str,
        rows: np.ndarray | None,
        sizes: list[int] | None,
        root: int,
    ) -> None:
        self._ranks, self._rank, self._kind = ranks, rank, kind
        self._is_divided = kind in DIVIDED
        self._senders = (root,) if kind in FROM_ROOT else ranks
        self.receivers = [each for each in ((root,) if kind in TO_ROOT else ranks) if each != rank]
        self.is_sender = rank in self._senders
        self._is_receiver = kind not in TO_ROOT or rank == root
        self._rows = rows
        self.head = None if rows is None else Head.of(rows, sizes)
        self.heads: dict[int, Head] = {}

    def read(self, carried: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        """Read the heads of all senders. Return the rows that came with a head, as bytes, by sender."""
        small = {}
        for rank, entry in zip(self._ranks, carried):
            if rank in self._senders:
                stop = WORD_NBYTES * (1 + int(entry[:WORD_NBYTES].view(np.int64)[0]))
                head = self.heads[rank] = Head.read(entry[WORD_NBYTES:stop].view(np.int64).tolist())
                nbytes = sum(head.sizes) * head.row_size * head.dtype.itemsize
                if entry.size - stop == nbytes:
                    small[rank] = entry[stop:]
        return small

    def _index(self, rank: int) -> int:
        return self._ranks.index(rank) if self._is_divided else 0

    def _bounds(self, head: Head, receiver: int) -> slice:
        """Return which of a sender's rows are for a receiver."""
        index = self._index(receiver)
        start = sum(head.sizes[:index])
        return slice(start, start + head.sizes[index])

    def own_block(self, receiver: int) -> np.ndarray:
        """Return the bytes of this rank's rows for a receiver."""
        assert self._rows is not None and self.head is not None
        return flat_bytes(self._rows[self._bounds(self.head, receiver)])

    def block_of(self, rows: np.ndarray, sender: int) -> np.ndarray:
        """Return the part for this rank of a sender's rows, given as bytes."""
        head = self.heads[sender]
        bounds, nbytes = self._bounds(head, self._rank), head.row_size * head.dtype.itemsize
        return rows[bounds.start * nbytes : bounds.stop * nbytes]

    def open(self, place: Place) -> tuple[np.ndarray | None, dict[int, np.ndarray]]:
        """Return the result, with this rank's own rows in place, and where those of other ranks go, as bytes.

        Raises
        ------
        CollectiveMismatch
            On every rank, if the ranks bring rows of different shapes.
        """
        check_shapes(self._kind, self.heads)
        if not self._is_receiver:
            return None, {}
        joined, targets = joined_rows(self.heads, self._index(self._rank), place)
        if self._rank in targets:
            targets.pop(self._rank)[:] = self.own_block(self._rank)
        return joined, targets
