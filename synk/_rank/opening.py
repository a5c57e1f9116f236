"""Opens the device of a rank, and the rank."""

from __future__ import annotations

from collections.abc import Sequence

from synk._rank.rank import Rank
from synk._wire.memory import Segment
from synk.backends import backend_module


def open_rank(
    rank: int,
    world_size: int,
    backend_name: str,
    device: str,
    control: Segment,
    eventfds: Sequence[int],
    nodes: Sequence[int] = (),
    host: str = "",
) -> Rank:
    """Open the device of a rank, and return the rank."""
    backend = backend_module(backend_name).open_device(device)
    if not backend.is_device:
        return Rank(rank, world_size, backend, control, eventfds, nodes, host)
    from synk._rank.device import DeviceRank  # CPU workers need none of it

    return DeviceRank(rank, world_size, backend, control, eventfds, nodes, host)
