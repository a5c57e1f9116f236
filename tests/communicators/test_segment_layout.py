"""How the memory of ranks is divided. No process."""

from __future__ import annotations

import pytest

from synk.communicators._layout import ControlLayout, SegmentLayout, required_nbytes


@pytest.mark.parametrize("world_size", (1, 2, 5, 64, 300))
def test_what_belongs_to_different_ranks_does_not_overlap(world_size: int) -> None:
    nbytes = required_nbytes(world_size)
    layout = SegmentLayout(nbytes, world_size)
    assert layout.half_nbytes % 64 == layout.ring_nbytes % 64 == 0
    assert layout.halves >= ControlLayout(world_size).nbytes
    assert layout.rings >= layout.halves + world_size * 2 * layout.half_nbytes
    assert layout.rings + world_size**2 * layout.ring_nbytes <= nbytes
    assert layout.half_nbytes >= (world_size + 1) * 64
    assert layout.ring_nbytes >= 64
