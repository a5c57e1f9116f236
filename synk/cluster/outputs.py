"""The outputs of all ranks of all nodes, which the head puts together as a session does with those of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._master.calls.assembly import Assembly
from synk._wire.memory import Segment
from synk._wire.messages import Layout


class GatheredOutputs(Assembly):
    """How the outputs of one call become its result. They came in messages, so none of them must be assembled.

    Small outputs are those of each rank, so the result has the bits that it would have on one machine with as many
    ranks. Large reductions came as one partial result of each node.

    Parameters
    ----------
    name, outputs, subset, voters, layouts, world_size
        As for :class:`Assembly`.
    arrays : list of lists of ndarray or None
        Each voter's arrays; see ``Assembly.outputs``.
    """

    def __init__(
        self,
        name: str,
        outputs: Any,
        subset: tuple[Any, ...] | None,
        voters: list[int],
        layouts: list[Layout],
        arrays: Sequence[list[np.ndarray | None]],
        world_size: int,
    ) -> None:
        self._arrays = arrays
        super().__init__(name, outputs, subset, voters, layouts, None, 0, world_size, 0)

    def _own_views(self, voter: int, slots: Segment | None, slot_nbytes: int) -> list[np.ndarray | None]:
        return self._arrays[voter]

    def _place(self, leaf: int) -> None:
        """Do nothing: the outputs lie in this process."""
