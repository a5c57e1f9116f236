"""From the outputs of all ranks to the result of a call: where they lie, and what each rank moves of the large ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.ops import Reduction, accumulator_dtype
from synk._pure.ranges import block_bounds, chunk_bounds
from synk._pure.trees import output_names
from synk._wire.combining import Combining, view_in
from synk._wire.memory import Segment
from synk._wire.messages import LARGE_NBYTES, Layout, Move, PickledOutput, is_reduced_on_devices, slot_offsets


class Assembly(Combining):
    """How the outputs of the ranks that ran become one result. It serves every call with the same layouts.

    Parameters
    ----------
    name, outputs, subset, voters, world_size
        As for :class:`Combining`.
    layouts : list of Layout
        One for each voter.
    slots : Segment
    slot_nbytes : int
    has_group : bool
        Whether the voters reduce large outputs by NCCL.
    is_partial : bool
        Whether large reductions end in partial results, which are merged with those of other nodes.

    Attributes
    ----------
    told : set of int
        The ranks that know their parts of the large outputs.
    """

    def __init__(
        self,
        name: str,
        outputs: Any,
        subset: tuple[Any, ...] | None,
        voters: list[int],
        layouts: list[Layout],
        slots: Segment | None,
        slot_nbytes: int,
        world_size: int,
        has_group: bool = False,
        is_partial: bool = False,
    ) -> None:
        skeletons = [layout.skeleton for layout in layouts]
        super().__init__(name, outputs, subset, voters, skeletons, [layout.leaves for layout in layouts], world_size)
        self._is_partial = is_partial
        self.told: set[int] = set()
        self.has_group = has_group
        self._slots_id = -1 if slots is None else slots.id
        self.has_assignments = any(layout.assigned for layout in layouts)
        self.layouts = layouts
        self.moves: dict[int, list[Move]] = {rank: [] for rank in voters}
        self._lay_out([self._own_views(voter, slots, slot_nbytes) for voter in range(len(voters))])

    def _own_views(self, voter: int, slots: Segment | None, slot_nbytes: int) -> list[np.ndarray | None]:
        """Return a voter's arrays that need not be assembled, by its own leaves: views of its slot."""
        assert slots is not None
        layout, op_of = self.layouts[voter], dict(zip(self._positions[voter], self.ops))
        ops = [op_of[position] for position in range(len(layout.leaves))]
        offsets, _ = slot_offsets(layout.leaves, ops, len(self.voters), self.has_group)
        start = self.voters[voter] * slot_nbytes
        return [
            leaf.view(slots, start + offset) if leaf.nbytes < LARGE_NBYTES else None
            for offset, leaf in zip(offsets, layout.leaves)
        ]

    def fits(self, voters: Sequence[int], layouts: Sequence[Layout], slots: Segment, has_group: bool) -> bool:
        """Whether it can be reused for a call with these ranks, layouts, slots and this use of NCCL."""
        return (
            self.voters == voters
            and all(mine is layout for mine, layout in zip(self.layouts, layouts))
            and self._slots_id == slots.id
            and self.has_group == has_group
        )

    # -- places of large outputs --------------------------------------------------------------------------------------

    def _place(self, leaf: int) -> None:
        op = self._rank_ops[leaf]
        items = self._items[leaf]
        if all(item.nbytes < LARGE_NBYTES for item in items):
            return
        if isinstance(op, Reduction):
            itemsize = items[0].dtype.itemsize
            count = items[0].nbytes // itemsize
            wide = accumulator_dtype(items[0].dtype) if self._is_partial else items[0].dtype
            offset = self._reserve(leaf, -1, count * wide.itemsize)
            kind = "merge" if self._is_partial else "reduce"
            bounds = chunk_bounds(count, itemsize, len(self.voters))
            if is_reduced_on_devices(items[0], op, self.has_group):
                kind, bounds = "device", block_bounds(count, len(self.voters))
            for voter, (start, stop) in enumerate(bounds):
                self._move(voter, leaf, kind, op.name, offset, start, stop)
        elif op.concatenates:
            offset = self._reserve(leaf, -1, sum(item.nbytes for item in items))
            for voter, item in enumerate(items):
                if item.nbytes >= LARGE_NBYTES:
                    self._move(voter, leaf, "copy", "", offset)
                offset += item.nbytes
        else:
            for voter, item in enumerate(items):
                if item.nbytes >= LARGE_NBYTES and (voter == 0 or not op.is_of_rank_0):
                    offset = self._reserve(leaf, voter, item.nbytes)
                    self._move(voter, leaf, "copy", "", offset)

    def _move(self, voter: int, leaf: int, kind: str, op: str, offset: int, start: int = 0, stop: int = 0) -> None:
        move = Move(self._positions[voter][leaf], kind, op, offset, start, stop)
        self.moves[self.voters[voter]].append(move)

    # -- results of a node ---------------------------------------------------------------------------------------------

    def outputs(self, root: np.ndarray | None) -> tuple[list[Layout], list[list[np.ndarray | None]]]:
        """Return what the voters have returned, for another process to put together with what other nodes return.

        Returns
        -------
        layouts : list of Layout
            The layouts of the voters, in which large reductions are partial results.
        arrays : list of lists of ndarray or None
            Each voter's arrays by its own leaves: views. Of a large reduction the first voter has the partial result of
            all; None where there is no array.
        """
        layouts, arrays = [], []
        starts = {leaf: offset for (leaf, voter), offset in self._places.items() if voter < 0}
        for voter, layout in enumerate(self.layouts):
            # The rooms are in these slots; see ``pickles``.
            leaves = [leaf._replace(room=0) if leaf.room else leaf for leaf in layout.leaves]
            own: list[np.ndarray | None] = [None] * len(leaves)
            for leaf in self._wanted:
                position, item = self._positions[voter][leaf], self._leaves[voter][leaf]
                if item.dtype is None:
                    continue
                if leaf in starts and isinstance(self.ops[leaf], Reduction):
                    wide = accumulator_dtype(item.dtype)
                    leaves[position] = item._replace(dtype=wide, partial_of=item.value_dtype)
                    if not voter:
                        assert root is not None
                        own[position] = view_in(root, starts[leaf], item.shape, wide)
                elif leaf in starts and item.nbytes >= LARGE_NBYTES:
                    assert root is not None
                    own[position] = view_in(root, starts[leaf], item.shape, item.dtype)
                elif not voter or not self.ops[leaf].is_of_rank_0:
                    own[position] = self._array(leaf, voter, root)
                if leaf in starts and self.ops[leaf].concatenates:
                    starts[leaf] += item.nbytes
            layouts.append(layout._replace(leaves=tuple(leaves)))
            arrays.append(own)
        return layouts, arrays

    def pickles(self, sent: Sequence[Sequence[PickledOutput]]) -> list[list[PickledOutput]]:
        """Return each voter's outputs that are not arrays, pickled: those in its slot, and those that it ``sent``."""
        found: list[list[PickledOutput]] = [[] for _ in sent]
        others, names = [iter(own) for own in sent], output_names(self.skeleton)
        for voter, leaf, view in self._objects:
            found[voter].append(next(others[voter]) if view is None else (names[leaf], view.tobytes()))
        return found
