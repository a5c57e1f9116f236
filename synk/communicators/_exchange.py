"""Collectives of rows, through the halves: gather, scatter and all_to_all of blocks with any lengths.

At the first meeting each sender shows a *head*, which says what it brings, and the first piece of each of its streams.
From the heads all ranks know how many pieces follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from synk._pure.dtypes import dtype_name
from synk.communicators._checks import DTYPE_NAMES, named_dtype
from synk.communicators._meetings import Meeting
from synk.communicators._messages import NUMBERS
from synk.communicators._rendezvous import CommRequest
from synk.communicators._schedule import Steps
from synk.communicators._shm_collectives import ShmCollectives, StreamReading, flat_bytes
from synk.communicators._user_arrays import Place
from synk.errors import CollectiveMismatch

FROM_ROOT, TO_ROOT = ("scatter",), ("gather",)
DIVIDED = ("scatter", "all_to_all")
"""The kinds in which each rank gets a block of its own."""
ROWS = frozenset(("gather", "all_gather along an axis", *DIVIDED))


class Head(NamedTuple):
    """A rank's description of its rows: dtype, shape without the first axis, and the length of each block."""

    dtype: np.dtype
    shape: tuple[int, ...]
    sizes: list[int]

    @classmethod
    def read(cls, words: list[int]) -> Head:
        number, num_axes, *rest = words
        return cls(named_dtype(DTYPE_NAMES[number]), tuple(rest[:num_axes]), rest[num_axes:])

    @classmethod
    def of(cls, rows: np.ndarray, sizes: list[int] | None) -> Head:
        """Return the head of rows. They are one block if there are no sizes."""
        return cls(rows.dtype, rows.shape[1:], [len(rows)] if sizes is None else sizes)

    def words(self) -> np.ndarray:
        """Return the head as it lies in a half: the number of words, then the words."""
        words = [DTYPE_NAMES.index(dtype_name(self.dtype)), len(self.shape), *self.shape, *self.sizes]
        return np.array([len(words), *words], np.int64)

    @property
    def row_size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def row_nbytes(self) -> int:
        return self.row_size * self.dtype.itemsize

    @property
    def longest(self) -> int:
        """The size of the largest block, in bytes."""
        return max(self.sizes) * self.row_nbytes

    def block(self, index: int) -> slice:
        """Return which bytes of the rows are in a block."""
        start = sum(self.sizes[:index])
        return slice(start * self.row_nbytes, (start + self.sizes[index]) * self.row_nbytes)


def check_shapes(kind: str, heads: Mapping[int, Head]) -> None:
    """Raise CollectiveMismatch unless all senders bring rows of one shape. All ranks that look raise the same."""
    (first, head), *others = heads.items()
    for rank, other in others:
        if other.shape != head.shape:
            raise CollectiveMismatch(
                f"cannot {kind.split()[0]}: got rows of shape {other.shape} from rank {rank}, expected {head.shape} as "
                f"from rank {first}. Bring rows of one shape on all ranks."
            )


def asked_for(kind: str, head: Head | None) -> tuple[str, int]:
    """Return the dtype and the size of a row, as far as all ranks must ask for the same.

    In a scatter only the root knows them, so the requests of the others cannot have them.
    """
    return ("", 0) if head is None or kind in FROM_ROOT else (dtype_name(head.dtype), head.row_size)


def joined_rows(heads: Mapping[int, Head], index: int, place: Place) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Return the array for the rows of all senders, and where the rows of each go, as bytes.

    ``index``: which of a sender's blocks is for this rank.
    """
    counts = [head.sizes[index] for head in heads.values()]
    first = next(iter(heads.values()))
    joined = place((sum(counts), *first.shape), first.dtype)
    bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
    return joined, {rank: flat_bytes(joined[start:stop]) for rank, (start, stop) in zip(heads, bounds)}


class Exchange:
    """One rank's part in an exchange.

    Parameters
    ----------
    collectives : ShmCollectives
    kind : {"gather", "all_gather along an axis", "scatter", "all_to_all"}
    rows : ndarray or None
        C-contiguous; None for a rank that sends nothing. They must not change until the exchange is over.
    sizes : list of int or None
        How many of the rows are for each rank. None if every receiver gets all of them.
    root : int
        The rank's number; -1 if the kind has no root.
    """

    def __init__(
        self, collectives: ShmCollectives, kind: str, rows: np.ndarray | None, sizes: list[int] | None, root: int
    ) -> None:
        self._collectives = collectives
        self._kind, self._root = kind, root
        ranks, rank = collectives.ranks, collectives.rank
        self._senders = (root,) if kind in FROM_ROOT else ranks
        self._is_receiver = kind not in TO_ROOT or rank == root
        self._is_divided = kind in DIVIDED
        self._index = ranks.index(rank) if self._is_divided else 0
        self._frame = collectives.frame(len(ranks) if self._is_divided else 1)
        self._rows = rows
        self._head: Head | None = None
        self._streams: dict[int, np.ndarray] = {}  # one for each rank, or one for all of them
        if rows is not None:
            self._head = Head.of(rows, sizes)
            bounds = itertools.accumulate(self._head.sizes, initial=0)
            blocks = [flat_bytes(rows[start:stop]) for start, stop in itertools.pairwise(bounds)]
            self._streams, self._own = dict(enumerate(blocks)), blocks[self._index]
            if self._is_divided or (kind in TO_ROOT and self._is_receiver):
                del self._streams[self._index]  # nobody else reads it

    def steps(self, place: Place) -> Steps:
        """Take the steps. They return the rows for this rank, joined in rank order, or None if it receives nothing.

        Raises
        ------
        CollectiveMismatch
            If the ranks ask for different collectives, or bring rows of different shapes.
        """
        collectives, head = self._collectives, self._head
        dtype, row_size = asked_for(self._kind, head)
        yield from collectives.start_steps(self._kind, dtype, row_size, peer=self._root)
        half = collectives.show(self._frame, self._streams)
        if head is not None:
            words = head.words()
            collectives.part(collectives.rank, half, 0, words)[:] = words
        yield from collectives.meet_steps()
        return (yield from self.rest_steps(half, place))

    def rest_steps(self, half: int, place: Place) -> Steps:
        """Take the steps that follow the first meeting."""
        collectives = self._collectives
        heads = {rank: self._read_head(rank, half) for rank in collectives.ranks if rank in self._senders}
        check_shapes(self._kind, heads)
        joined, readings = self._open(heads, place) if self._is_receiver else (None, [])
        longest = max(head.longest for head in heads.values())
        yield from collectives.read_steps(self._frame, self._streams, readings, longest, half)
        first = next(iter(heads.values()))
        is_even = len(set(first.sizes)) == 1 and all(head == first for head in heads.values())
        if is_even and longest <= self._frame.length:
            self._keep(first)
        return joined

    def _keep(self, head: Head) -> None:
        """Keep the meeting that was enough, where all senders have brought as many rows for each rank."""
        collectives, rows, frame, dtype = self._collectives, self._rows, self._frame, head.dtype
        block, strides = (head.sizes[0], *head.shape), None
        if rows is not None and rows.dtype not in NUMBERS:
            return
        shown = block
        if self._is_divided:
            shown, strides = (len(head.sizes), *block), (frame.length, *np.empty(block, dtype).strides)
        own, rank, place = [], collectives.rank, frame.offset(self._index)
        if rows is not None:
            own = [collectives.view(rank, half, frame.begin, shown, dtype, strides) for half in range(2)]
        senders = [each for each in collectives.ranks if each in self._senders]
        parts = [[collectives.view(each, half, place, block, dtype) for each in senders] for half in range(2)]
        name, row_size = asked_for(self._kind, self._head)
        meeting = Meeting(CommRequest(self._kind, "", name, row_size, self._root), dtype, own, parts)
        words = meeting.head = head.words().data.cast("B").cast("q")
        heads = {each: [collectives.words(each, half, len(words)) for half in range(2)] for each in senders}
        meeting.own_heads = heads.pop(rank, [])
        meeting.heads = [[each[half] for each in heads.values()] for half in range(2)]
        meeting.shape = (len(senders) * block[0], *head.shape)
        form = (None, None) if rows is None else (rows.dtype, rows.shape)
        collectives.meetings.keep((self._kind, *form, "", self._root, True), meeting)

    def _read_head(self, rank: int, half: int) -> Head:
        count = int(self._collectives.part(rank, half, 0, np.empty(1, np.int64))[0])
        return Head.read(self._collectives.part(rank, half, 0, np.empty(1 + count, np.int64))[1:].tolist())

    def _open(self, heads: dict[int, Head], place: Place) -> tuple[np.ndarray, list[StreamReading]]:
        """Return the result, with this rank's own rows in place, and what is to be read from the others."""
        joined, targets = joined_rows(heads, self._index, place)
        if self._collectives.rank in targets:
            targets.pop(self._collectives.rank)[:] = self._own
        return joined, [StreamReading(rank, self._index, target) for rank, target in targets.items()]
