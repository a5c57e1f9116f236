"""The numbers that the program and the workers share in memory: their names, and where they lie."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

NUM_LANES = 3
"""How many calls can be in flight at once: one runs, one gets its inputs, one waits."""


class Down(IntEnum):
    """Positions in the block that the program writes for a rank.

    INTERRUPT and BROKEN belong to the rank, and count only in lane 0. The others belong to a call.
    """

    INTERRUPT = 0  # the last message that a SIGINT is meant for; written before the signal is sent
    PARTICIPATES = 1
    ROWS = 2  # the rank's weight in averages
    CALL = 3  # number of the call; rank 0's entry counts for all
    GROUP = 4  # number of the NCCL group that joins the ranks of the call; 0: none
    BROKEN = 5  # number of the last NCCL group that was given up
    ALL_GROUP = 6  # number of the group by which the ranks of all nodes are joined; 0: none


class Up(IntEnum):
    """Positions in the block that a worker writes: they belong to the rank, and count only in lane 0."""

    RSS = 0  # resident memory in bytes, at the last measurement
    PHASE = 1  # what the worker is doing: a Phase
    BROKEN = 2  # number of the last NCCL group that this rank gave up
    # bytes that the backend has copied to and from the device since the last call; written on devices
    H2D_NBYTES = 3
    D2H_NBYTES = 4
    PAGEABLE_NBYTES = 5  # those of both that went by way of memory which the driver does not know
    ITEM = 6  # the number of a chunk of a map, and at which of its items this rank is; see ``ITEM_BITS``


class Phase(IntEnum):
    """What a worker is doing: the value of ``Up.PHASE``."""

    IDLE = 0
    FUNCTION = 1
    PUBLISHING = 2
    LOADING = 4


# Each word is aligned and eight bytes wide, and has one writer. So a process that is killed in the middle of a store
# leaves the old number or the new one, never a mixture. A table in docs/design.md says what orders each word.
# 8 words are a cache line: the program and a rank never write to the same line, nor do two ranks.
BLOCK_LENGTH = 8
assert max(Down) < BLOCK_LENGTH
assert max(Up) < BLOCK_LENGTH


def control_nbytes(world_size: int) -> int:
    """Return the size in bytes of the control segment for ``world_size`` ranks."""
    return NUM_LANES * world_size * 2 * BLOCK_LENGTH * 8


def control_blocks(buffer: np.ndarray, world_size: int, lane: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the int64 arrays ``(down, up)`` of a lane, each of shape ``(world_size, BLOCK_LENGTH)``."""
    blocks = buffer[: control_nbytes(world_size)].view(np.int64).reshape(NUM_LANES, world_size, 2, BLOCK_LENGTH)
    return blocks[lane, :, 0], blocks[lane, :, 1]
