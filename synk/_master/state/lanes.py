"""Lanes: the shared memory that a call in flight has to itself. Numbers, staged arguments, slots for the outputs.

An operation that runs alone uses lane 0. Submitted calls take turns in all lanes, so the arguments of one can be
written, and the outputs of another can wait, while a third runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from synk._master.processes.processes import Processes
from synk._pure.ranges import round_up
from synk._wire.control import NUM_LANES, Down
from synk._wire.memory import PAGE_NBYTES, Segment
from synk.communicators._layout import required_nbytes
from synk.communicators._rendezvous import reset, set_abort

_SLOT_NBYTES = 1 << 19
_COLLECTIVE_RANK_NBYTES = 1 << 22


class Lane:
    """One lane, in the master.

    It must not hold the runtime: plans refer to it, and what runs at interpreter exit refers to plans.

    Parameters
    ----------
    index : int
        Smaller than ``NUM_LANES``.
    processes : Processes
        The workers.
    ids : iterator of int
        Numbers for its segments.

    Attributes
    ----------
    down, up : ndarray of int64, shape (world_size, BLOCK_LENGTH)
        The lane's numbers; see ``synk._wire.control``.
    up_words : list of memoryview
        The rows of ``up``. Reading a word through them takes a third of NumPy's time.
    slots : Segment
        The slots in which ranks publish outputs, ``slot_nbytes`` bytes each.
    staging : Segment or None
        Where the master copies plain arrays, pickles and indices.
    collective : Segment or None
        The segment for ``synk.comm``.
    first_down : memoryview
        The numbers for the first rank, with the numbers that are for all ranks.
    bounds : ndarray of int64
        The columns of ``down`` that a call's bounds fill.

    Raises
    ------
    SharedMemoryError
    """

    def __init__(self, index: int, processes: Processes, ids: Iterator[int]) -> None:
        self.index = index
        self._ids = ids
        self.slot_nbytes = _SLOT_NBYTES
        self.slots = Segment.create(
            processes.world_size * _SLOT_NBYTES, is_worker_writable=True, segment_id=next(self._ids)
        )
        self.staging: Segment | None = None
        self.collective: Segment | None = None
        self.down, self.up = processes.blocks(index)
        self.bounds = self.down[:, Down.PARTICIPATES : Down.TIMED + 1]
        self.first_down = memoryview(self.down[0])
        self.up_words = [memoryview(row) for row in self.up]

    def replace_staging(self, nbytes: int) -> Segment | None:
        """Replace the staging segment by a larger one. Return the old one."""
        # The lane's last call is over, so no rank reads the old segment, though all may still map it. They forget it
        # with their next message.
        old, self.staging = self.staging, Segment.create(max(int(nbytes * 1.25), 1 << 16), segment_id=next(self._ids))
        self.staging.is_staging = True
        return old

    def replace_slots(self, slot_nbytes: int, published: Sequence[int]) -> Segment:
        """Replace the slots by larger ones, with the outputs of the ranks in ``published``. Return the old slots."""
        world_size = len(self.up)
        slot_nbytes = round_up(max(slot_nbytes, int(self.slot_nbytes * 1.25)), PAGE_NBYTES)
        larger = Segment.create(world_size * slot_nbytes, is_worker_writable=True, segment_id=next(self._ids))
        # These ranks have answered and wait for the next message, so they do not write to their slots during the copy.
        for rank in published:
            start = rank * self.slot_nbytes
            slot = self.slots.buffer[start : start + self.slot_nbytes]
            larger.buffer[rank * slot_nbytes : rank * slot_nbytes + self.slot_nbytes] = slot
        old, self.slots, self.slot_nbytes = self.slots, larger, slot_nbytes
        return old

    def connect(self, processes: Processes) -> None:
        """Make the segment for ``synk.comm`` if there is none yet."""
        if self.collective is None:
            num_ranks = processes.placement.total_ranks  # on one of several nodes they keep their numbers
            nbytes = required_nbytes(num_ranks, _COLLECTIVE_RANK_NBYTES)
            self.collective = Segment.create(nbytes, is_worker_writable=True, segment_id=next(self._ids))
            processes.log.tell("lane", self.index)

    def abort_collectives(self, processes: Processes) -> None:
        """Make ranks that wait for each other give up."""
        if self.collective is not None:
            # Only the master writes the abort word. The eventfds wake the ranks that are asleep in a collective.
            set_abort(self.collective, processes.eventfds)

    def reset_collectives(self, processes: Processes) -> None:
        """Make collectives of functions usable again. All ranks must be idle."""
        if self.collective is not None:
            reset(self.collective, processes.placement.total_ranks)

    def close(self) -> None:
        """Release the memory. Safe to call more than once."""
        for segment in (self.slots, self.staging, self.collective):
            if segment is not None:
                segment.close()
        # These views would keep the control segment mapped.
        self.down = self.up = self.bounds = np.empty((0, 0), np.int64)
        self.first_down, self.up_words = memoryview(b""), []


class Lanes(list[Lane]):
    """The lanes of a runtime. Each is made when it is first used.

    Attributes
    ----------
    first : Lane
        For operations that run alone.
    """

    first: Lane

    def begin(self, processes: Processes, ids: Iterator[int]) -> None:
        """Make the first lane."""
        self._processes, self._ids = processes, ids
        self.first = Lane(0, processes, ids)
        self.append(self.first)
        processes.log.tell("lane", 0)

    def told(self, rank: int, index: int) -> tuple[tuple[int, int, int], list[Segment]] | None:
        """Return what ranks must know of a lane, with its memory; None for a lane that could not be made."""
        if index >= len(self):
            return None
        slots, collective, slot_nbytes = self[index].slots, self[index].collective, self[index].slot_nbytes
        if collective is None:
            return (slots.id, slot_nbytes, 0), [slots]
        return (slots.id, slot_nbytes, collective.id), [slots, collective]

    def after(self, lane: Lane) -> Lane:
        """Return the lane whose turn comes after ``lane``."""
        index = (lane.index + 1) % NUM_LANES
        if index == len(self):
            new = Lane(index, self._processes, self._ids)
            try:
                new.connect(self._processes)
            except BaseException:
                new.close()
                raise
            self.append(new)
            self._processes.log.tell("lane", index)
        return self[index]
