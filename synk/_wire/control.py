"""The numbers that master and workers write for each other in shared memory: their names, and where they lie."""

from __future__ import annotations

from enum import IntEnum, IntFlag

import numpy as np

NUM_LANES = 3
"""How many calls can be under way at once: one that runs, one whose inputs are brought, one that waits."""


class Down(IntEnum):
    """Positions in the block that the master writes for a rank.

    INTERRUPT, COMMITTED and BROKEN belong to the rank, and only those of lane 0 count; the others belong to a call.
    """

    INTERRUPT = 0  # which messages a SIGINT is meant for, see interrupt_word; negative: none
    PARTICIPATES = 1
    LOW = 2  # the rank's rows, as positions in the selection
    HIGH = 3
    START = 4  # of the selection
    STEP = 5
    ROWS = 6  # weight of the rank in averages
    LOCAL_START = 7  # of the rank's rows among those of its shard
    LOCAL_STEP = 8
    CALL = 9  # number of the call; rank 0's entry counts for all
    COMMITTED = 10  # number of the last call whose assignments hold on this rank
    GROUP = 11  # number of the NCCL group by which the devices reduce the call's large outputs; 0: through the host
    BROKEN = 12  # number of the last NCCL group that is given up
    RESULT = 13  # segment for the call's large outputs, 0: they are asked for later; rank 0's entry counts for all


class Up(IntEnum):
    """Positions in the block that a worker writes.

    RSS, PHASE, OUTPUT_NBYTES and BROKEN belong to the rank, and only those of lane 0 count.
    """

    FUNCTION_NS = 0  # time in the user's function
    RSS = 1  # resident bytes when they were last measured
    PHASE = 2  # what the worker is doing: a Phase
    OUTPUT_NBYTES = 3  # bytes of outputs that it has published since it started
    BROKEN = 4  # number of the last NCCL group that this rank has given up
    PUBLISHED = 5  # number of the last call whose outputs lay in the slot and looked as before; negative: did not
    TRAITS = 6  # of a call on trial: what the function did, as Traits


class Traits(IntFlag):
    """What a function was seen to do in a call on trial."""

    DRAWS = 1  # random numbers, from a generator of the process or one that it captured
    CHANGES = 2  # other objects that it captured
    COMMUNICATES = 4  # by ``synk.comm``


class Phase(IntEnum):
    """What a worker is doing; the value in ``Up.PHASE``."""

    IDLE = 0
    FUNCTION = 1
    PUBLISHING = 2
    REDUCING = 3
    LOADING = 4


BLOCK_LENGTH = 16
assert max(Down) < BLOCK_LENGTH
assert max(Up) < BLOCK_LENGTH


def control_nbytes(world_size: int) -> int:
    """Bytes of the control segment of ``world_size`` ranks."""
    return NUM_LANES * world_size * 2 * BLOCK_LENGTH * 8


def control_blocks(buffer: np.ndarray, world_size: int, lane: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a lane's int64 arrays ``(down, up)``, each of shape ``(world_size, BLOCK_LENGTH)``."""
    blocks = buffer[: control_nbytes(world_size)].view(np.int64).reshape(NUM_LANES, world_size, 2, BLOCK_LENGTH)
    return blocks[lane, :, 0], blocks[lane, :, 1]


def interrupt_word(first: int, last: int) -> int:
    """Return what says that a SIGINT is meant for the messages ``first`` to ``last`` (16-bit numbers that wrap)."""
    return first << 16 | last


def is_interrupted(word: int, sequence: int) -> bool:
    """Whether a SIGINT is meant for message ``sequence``.

    Examples
    --------
    >>> [is_interrupted(interrupt_word(65535, 2), sequence) for sequence in (65534, 65535, 1, 3)]
    [False, True, True, False]
    """
    if word < 0:
        return False
    first, last = word >> 16, word & 0xFFFF
    return (sequence - first) & 0xFFFF <= (last - first) & 0xFFFF
