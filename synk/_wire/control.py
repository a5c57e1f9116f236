"""The numbers that the master and the workers share in memory: their names, and where they lie."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

NUM_LANES = 3
"""How many calls can be in flight at once: one runs, one gets its inputs, one waits."""


class Down(IntEnum):
    """Positions in the block that the master writes for a rank.

    INTERRUPT, COMMITTED and BROKEN belong to the rank, and count only in lane 0. The others belong to a call.
    """

    # the messages that a SIGINT is meant for, see interrupt_word; negative: none; written before the signal is sent
    INTERRUPT = 0
    PARTICIPATES = 1
    LOW = 2  # the rank's rows, as positions in the selection
    HIGH = 3
    START = 4  # first row and step of the selection
    STEP = 5
    ROWS = 6  # the rank's weight in averages
    LOCAL_START = 7  # first row and step of the rank's rows within its shard
    LOCAL_STEP = 8
    TIMED = 9  # whether the ranks write the times of the call; rank 0's entry counts for all
    CALL = 10  # number of the call; rank 0's entry counts for all
    COMMITTED = 11  # number of the last call whose assignments took effect on this rank
    GROUP = 12  # number of the NCCL group that reduces the call's large outputs on the devices; 0: the host does
    BROKEN = 13  # number of the last NCCL group that was given up
    # segment for the call's large outputs; 0: the master asks for them later; rank 0's entry counts for all
    RESULT = 14
    # on one of several nodes: the rows of the ranks of all nodes that run the call; rank 0's entry counts for all
    ALL_ROWS = 15
    ALL_GROUP = 16  # number of the group by which the ranks of all nodes are joined; 0: none


class Up(IntEnum):
    """Positions in the block that a worker writes.

    RSS, PHASE and BROKEN belong to the rank, and count only in lane 0. The others belong to a call.
    """

    FUNCTION_NS = 0  # time in the user's function, without WAIT_NS
    RSS = 1  # resident memory in bytes, at the last measurement
    PHASE = 2  # what the worker is doing: a Phase
    BROKEN = 3  # number of the last NCCL group that this rank gave up
    # number of the last call whose outputs lie in the slot and fit the known layout; its negative: they do not
    PUBLISHED = 4
    WAIT_NS = 5  # time in the function that was spent waiting for other ranks in synk.comm; written once ranks talk
    # when the rank received the call, when its function began and ended, and when its outputs were in place
    RECEIVED_NS = 6
    BEGAN_NS = 7
    ENDED_NS = 8
    PUBLISHED_NS = 9
    # bytes that the backend has copied to and from the device since the last timed call; written on devices
    H2D_NBYTES = 10
    D2H_NBYTES = 11
    PAGEABLE_NBYTES = 12  # those of both that went by way of memory which the driver does not know


class Phase(IntEnum):
    """What a worker is doing: the value of ``Up.PHASE``."""

    IDLE = 0
    FUNCTION = 1
    PUBLISHING = 2
    REDUCING = 3
    LOADING = 4


# Each word is aligned and eight bytes wide, and has one writer. So a process that is killed in the middle of a store
# leaves the old number or the new one, never a mixture. A table in docs/design.md says what orders each word.
# 24 words are three cache lines: the master and a rank never write to the same line, nor do two ranks.
BLOCK_LENGTH = 24
assert max(Down) < BLOCK_LENGTH
assert max(Up) < BLOCK_LENGTH


def control_nbytes(world_size: int) -> int:
    """Return the size in bytes of the control segment for ``world_size`` ranks."""
    return NUM_LANES * world_size * 2 * BLOCK_LENGTH * 8


def control_blocks(buffer: np.ndarray, world_size: int, lane: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the int64 arrays ``(down, up)`` of a lane, each of shape ``(world_size, BLOCK_LENGTH)``."""
    blocks = buffer[: control_nbytes(world_size)].view(np.int64).reshape(NUM_LANES, world_size, 2, BLOCK_LENGTH)
    return blocks[lane, :, 0], blocks[lane, :, 1]
