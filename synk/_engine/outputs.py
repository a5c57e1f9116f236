"""From the replies of the ranks to the result: where their outputs lie, and what each does for the large ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._engine.things import Once, Thing
from synk._pure.ops import Reduction
from synk._pure.ranges import block_bounds, chunk_bounds
from synk._wire.combining import Combining, loaded
from synk._wire.looks import Layout, Share
from synk._wire.memory import Segment
from synk._wire.messages import LARGE_NBYTES

_MAX_SHARES = 8


class Outputs(Combining):
    """How the outputs of one call become its result. It serves the next calls as long as they look like this.

    Parameters
    ----------
    name, outputs, subset, voters, world_size
        As for :class:`Combining`.
    layouts : list of Layout
        One for each voter.
    lane : Lane
        In whose slots the outputs lie.

    Attributes
    ----------
    assigned : list of Assigned
        What each voter has assigned to variables.
    nbytes : int
        Of all voters together.
    can_be_placed : bool
        Whether there are large outputs, and each is copied whole to its place in the result.
    rows : list of int
        How many rows each voter had.
    """

    def __init__(
        self,
        name: str,
        outputs: Any,
        subset: tuple[Any, ...] | None,
        voters: list[int],
        layouts: list[Layout],
        lane: Any,
        world_size: int,
    ) -> None:
        skeletons = [loaded(layout.skeleton, name, rank) for rank, layout in zip(voters, layouts)]
        super().__init__(name, outputs, subset, voters, skeletons, [layout.leaves for layout in layouts], world_size)
        self._lane = lane.index
        self.slots = [lane.slots.get(rank) for rank in voters]
        self._sent = layouts
        self.assigned = [layout.assigned for layout in layouts]
        self.nbytes = sum(leaf.nbytes for layout in layouts for leaf in layout.leaves)
        self._shares: dict[int, list[Share]] = {rank: [] for rank in voters}
        self._told: dict[Any, dict[int, Thing]] = {}
        self.rows: Sequence[int] = ()
        self._whole: dict[int, list[tuple[int, int]]] = {rank: [] for rank in voters}
        self._destinations: dict[int, Destination] = {}
        self._lay_out([self._own_views(layout, slot) for layout, slot in zip(layouts, self.slots)])
        is_copied = all(not share.op for shares in self._shares.values() for share in shares)
        self.can_be_placed = bool(self.result_nbytes) and is_copied

    def fits(self, voters: Sequence[int]) -> bool:
        """Whether it serves a call of these ranks."""
        return self.voters is voters or self.voters == voters

    @staticmethod
    def _own_views(layout: Layout, slot: Segment | None) -> list[np.ndarray | None]:
        """Return a voter's arrays in its slot, and the places of pickles there. Large ones are brought by the ranks."""
        views: list[np.ndarray | None] = []
        for leaf, at in zip(layout.leaves, layout.places):
            if leaf.nbytes >= LARGE_NBYTES or (leaf.dtype is None and not leaf.room):
                views.append(None)
            else:
                views.append(np.empty(leaf.shape, leaf.dtype) if slot is None else leaf.view(slot, at))
        return views

    # -- large outputs ------------------------------------------------------------------------------------------------

    def _place(self, leaf: int) -> None:
        """Give a large output its place in the result, and the ranks their shares of it."""
        op, items = self._rank_ops[leaf], self._items[leaf]
        if all(item.nbytes < LARGE_NBYTES for item in items):
            return
        if isinstance(op, Reduction) and len(items) > 1:
            dtype, count = items[0].dtype, items[0].nbytes // items[0].dtype.itemsize
            offset = self._reserve(leaf, -1, items[0].nbytes)
            is_kept = self._sent[0].places[self._positions[0][leaf]] < 0  # NCCL then reduces it, on all ranks at once
            num_voters = len(self.voters)
            bounds = block_bounds(count, num_voters) if is_kept else chunk_bounds(count, dtype.itemsize, num_voters)
            for voter, (start, stop) in enumerate(bounds):
                if stop > start or is_kept:
                    at = start * dtype.itemsize
                    peers = [voter] if is_kept else range(num_voters)
                    sources = [self._source(peer, leaf, at) for peer in peers]
                    self._share(voter, Share(op.name, dtype, stop - start, sources, offset + at, []))
        elif isinstance(op, Reduction) or op.concatenates:
            offset = self._reserve(leaf, -1, sum(item.nbytes for item in items))
            for voter, item in enumerate(items):
                if item.nbytes >= LARGE_NBYTES:
                    self._copy(voter, leaf, item.nbytes, offset)
                offset += item.nbytes
        else:
            for voter, item in enumerate(items):
                if item.nbytes >= LARGE_NBYTES and (voter == 0 or not op.is_of_rank_0):
                    offset = self._reserve(leaf, voter, item.nbytes)
                    self._copy(voter, leaf, item.nbytes, offset)

    def _source(self, voter: int, leaf: int, at: int = 0) -> tuple[int, int]:
        slot, position = self.slots[voter], self._positions[voter][leaf]
        place = self._sent[voter].places[position]
        if place < 0:
            return -1 - self._lane, position
        assert slot is not None
        return slot.id, place + at

    def _copy(self, voter: int, leaf: int, nbytes: int, at: int) -> None:
        self._share(voter, Share("", np.dtype(np.uint8), nbytes, [self._source(voter, leaf)], at, []))
        self._whole[self.voters[voter]].append((self._positions[voter][leaf], at))

    def _share(self, voter: int, share: Share) -> None:
        self._shares[self.voters[voter]].append(share)

    def reductions(self, engine: Any, result: Segment, rows: Sequence[int]) -> dict[int, Thing]:
        """Return what each rank that has a share is told, for a result in this memory."""
        key = result.id, tuple(rows)
        if key not in self._told:
            while len(self._told) >= _MAX_SHARES:
                self._told.pop(next(iter(self._told)))
            needs = [slot for slot in self.slots if slot is not None] + [result]
            self._told[key] = {
                rank: _Reduction(engine, (result.id, [each._replace(rows=list(rows)) for each in shares]), needs)
                for rank, shares in self._shares.items()
                if shares
            }
        return self._told[key]

    def destination(self, engine: Any, plan: int, result: Segment) -> Destination:
        """Return what tells ranks to write large outputs into the result in this memory."""
        if result.id not in self._destinations:
            while len(self._destinations) >= _MAX_SHARES:
                self._destinations.pop(next(iter(self._destinations)))
            self._destinations[result.id] = Destination(engine, plan, result, self._whole)
        return self._destinations[result.id]


class Destination(Thing):
    """Where the large outputs of a plan's calls go at once. An order names it in place of the plan.

    Attributes
    ----------
    known : frozenset of int
        The numbers that a rank must know besides those of the plan.
    """

    kind = "destination"

    def __init__(self, registry: Any, plan: int, result: Segment, places: dict[int, list[tuple[int, int]]]) -> None:
        super().__init__(registry, [result])
        self._plan, self._result, self._places = plan, result.id, places
        self.known = frozenset(self.numbers())

    def told(self, rank: int) -> tuple[Any, Sequence[Segment]]:
        return (self._plan, self._result, self._places[rank]), ()


class _Reduction(Once):
    """What one rank does for large outputs. It is told once for each place of the result."""

    is_once = False

    def __init__(self, registry: Any, payload: Any, needs: Sequence[Any]) -> None:
        super().__init__(registry, "reduction", payload, needs)
