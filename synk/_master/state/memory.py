"""The shared memory of one runtime: what finalizers dropped, the arenas of small values, the buffers of results."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from synk._master.processes.log import Dropped
from synk._master.processes.processes import Processes
from synk._master.state.item_pickles import ArrayCopies, Ended
from synk._master.state.results import Lease, ResultPool
from synk._wire.arenas import Arenas
from synk._wire.descriptors import orphans
from synk._wire.memory import Segment
from synk.errors import SharedMemoryError


class Memory:
    """The segments of a runtime, until the workers have been told to forget them.

    Parameters
    ----------
    processes : Processes
        The workers, which map the segments.

    Attributes
    ----------
    released : Dropped, of Segment or Ended
        Filled by finalizers, at any time and in any thread. Emptied when an operation begins.
    ids : iterator of int
        Numbers for all segments that workers learn of.
    arenas : Arenas
        For small values.
    results : ResultPool
    copies : ArrayCopies
        For large arrays in items of maps.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self.released = Dropped(processes.log)
        self.ids = itertools.count(1)
        self.arenas = Arenas(self.released, self.ids)
        self.results = ResultPool(self.ids)
        self.copies = ArrayCopies(self.released, self.ids)

    @property
    def has_dropped(self) -> bool:
        return bool(self.released or orphans.ended)

    def free_dropped(self) -> None:
        """Free what finalizers dropped. Nothing may be running that could read it."""
        if orphans.ended:
            orphans.close_all()
        while self.released:
            # Finalizers may append meanwhile, in any thread. Each popleft is one step of the interpreter.
            self._free(self.released.popleft())

    def free_copies(self) -> None:
        """Free copies of arrays that no item needs any more, even while workers run other items."""
        # Only as many as there are now, because those that must wait are appended again.
        for _ in range(len(self.released)):
            dropped = self.released.popleft()
            if isinstance(dropped, Ended):
                self._free(dropped)
            else:
                self.released.append(dropped)

    def _free(self, dropped: Segment | Ended) -> None:
        if not isinstance(dropped, Ended):
            self.forget(dropped)
        elif (segment := dropped.owner.forget(dropped)) is not None:
            self.forget(segment, is_kept=True)  # a function may have kept the array

    def forget(self, segment: Segment, *, is_kept: bool = False) -> None:
        """Free a segment here. Workers forget it with their next message.

        Its memory is given back at once or, if workers may have kept arrays on it (``is_kept``), with the last of these
        arrays.
        """
        self._processes.log.drop_held("segment", segment.id)
        # Workers map the segment until they forget it. A discarded one reads as zeros there, so no call may need it.
        segment.close() if is_kept else segment.discard()
        self.arenas.sweep()

    def lease_result(self, nbytes: int) -> Lease:
        """Lease a buffer for large results."""
        lease, dropped = self.results.take(nbytes)
        for old in dropped:
            self.forget(old)
        return lease

    def lease_known(self, nbytes: int, ranks: Collection[int]) -> Lease | None:
        """Lease a buffer for large results that all of ``ranks`` already hold; None if there is none."""
        try:
            lease = self.lease_result(nbytes)
        except SharedMemoryError:  # a call that needs the memory will raise it
            return None
        by_rank = self._processes.by_rank
        if all(lease.segment.id in by_rank[rank].known.held["segment"] for rank in ranks):
            return lease
        self.results.give_back(lease)
        return None

    def close(self) -> None:
        """Release all memory except what the user's arrays lie in."""
        while self.released:
            dropped = self.released.popleft()
            if isinstance(dropped, Segment):
                dropped.close()
        self.results.close()
        self.copies.close()
        self.arenas.close()
        orphans.close_all()
