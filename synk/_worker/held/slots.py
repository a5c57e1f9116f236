"""The output slots of a lane: where each rank publishes the outputs of a call that others read."""

from __future__ import annotations

import numpy as np

from synk._wire.control import Down
from synk._wire.memory import Segment
from synk._wire.messages import is_in_slot, slot_offsets
from synk._worker.held.plans import PreparedPlan

NO_VIEW = np.empty(0, np.uint8)
"""Stands for an output that lies in no slot."""


class Slots:
    """The slots of all ranks. This rank writes only its own.

    Attributes
    ----------
    segment : Segment or None
        The segment of all slots; None before the first outputs.
    nbytes : int
        The size of one slot.
    """

    def __init__(self, rank: int, down: np.ndarray) -> None:
        self.rank = rank
        self._down = down
        self.segment: Segment | None = None
        self.nbytes = 0

    @property
    def participants(self) -> list[int]:
        """The ranks that run the current call, ascending."""
        return [rank for rank, takes_part in enumerate(self._down[:, Down.PARTICIPATES].tolist()) if takes_part]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the lowest that runs the current call."""
        return self.rank == self.participants[0]

    @property
    def has_group(self) -> bool:
        """Whether the current call reduces its large outputs by NCCL."""
        return bool(self._down[self.rank, Down.GROUP])

    def rows(self) -> list[int]:
        """Return how many rows each participant has."""
        return [int(self._down[rank, Down.ROWS]) for rank in self.participants]

    def lay_out(self, prepared: PreparedPlan) -> bool:
        """Make views for this rank's outputs in its slot. Return False if the slot has no room for them."""
        layout = prepared.layout
        assert layout is not None
        num_ranks, has_group = len(self.participants), self.has_group
        # The master and the other ranks compute the same offsets for this slot from the layout, so none are sent.
        offsets, total = slot_offsets(layout.leaves, prepared.ops, num_ranks, has_group)
        if total > self.nbytes or self.segment is None:
            return False
        key = (self.segment.id, num_ranks, has_group)
        if prepared.slot_key != key:
            base = self.rank * self.nbytes
            views = [
                leaf.view(self.segment, base + offset) if is_in_slot(leaf, op, num_ranks, has_group) else None
                for offset, leaf, op in zip(offsets, layout.leaves, prepared.ops)
            ]
            prepared.slot_views = [NO_VIEW if view is None else view for view in views]
            prepared.slot_key = key
        return True
