"""Small segments side by side in a large one: thousands of small values need only a few descriptors.

An arena is cut into places of one size. Workers either write to all places of an arena or only read them. The memory of
a place is reserved when a value is put there and given back when the value is gone. The arena's descriptor and
addresses are given back when all of its places are free. This file knows nothing of workers: the runtime informs them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator

import numpy as np

from synk._pure.interrupts import deferred
from synk._pure.ranges import round_up
from synk._wire.mapping import punch
from synk._wire.memory import PAGE_NBYTES, Segment, forks
from synk.errors import SharedMemoryError

ARENA_NBYTES = 1 << 24
_PLACE_NBYTES = tuple(PAGE_NBYTES << shift for shift in (0, 2, 4, 6))


class _Arena:
    """One arena. Taking or returning a place is a single step of the interpreter, so any thread may do it."""

    def __init__(self, place_nbytes: int, is_worker_writable: bool, segment_id: int) -> None:
        self.segment = Segment.create(
            ARENA_NBYTES, is_worker_writable=is_worker_writable, segment_id=segment_id, is_arena=True
        )
        self.free = deque(range(0, ARENA_NBYTES, place_nbytes))
        self.num_places = len(self.free)
        self.retired: list[int] = []  # places that are never used again, because a forked child may read there

    def take(self) -> int | None:
        """Return the offset of a free place, which then belongs to the caller, or None if there is none."""
        try:
            return self.free.popleft()
        except IndexError:
            return None


class Arenas:
    """The small segments of one runtime.

    A place is used again when its segment was discarded, which the runtime does while no call is in flight, and when no
    view of it is left. It is never used again if a forked child may still read it.

    Parameters
    ----------
    released : deque of Segment
        Receives arenas that became empty.
    ids : iterator of int
        Numbers for new segments, unique within the runtime.
    """

    def __init__(self, released: deque[Segment], ids: Iterator[int]) -> None:
        self._released = released
        self._ids = ids
        self._by_kind: dict[tuple[int, bool], list[_Arena]] = {}
        # By ``id()`` of a weak reference to the array behind all views of a value: the reference, which is never called
        # if nobody holds it, and where the value lies.
        self._tenants: dict[int, tuple[weakref.ref[np.ndarray], _Arena, list[_Arena], int, int, int]] = {}
        self._ended: deque[weakref.ref[np.ndarray]] = deque()  # filled in C, see ResultPool

    def create(self, nbytes: int, *, is_worker_writable: bool = False) -> Segment:
        """Allocate a segment of at least ``nbytes`` bytes, filled with zeros. A small one lies in an arena.

        Raises
        ------
        SharedMemoryError
        """
        nbytes = round_up(max(nbytes, 1), PAGE_NBYTES)
        place_nbytes = next((size for size in _PLACE_NBYTES if size >= nbytes), 0)
        if not place_nbytes:
            return Segment.create(nbytes, is_worker_writable=is_worker_writable, segment_id=next(self._ids))
        arenas = self._by_kind.setdefault((place_nbytes, is_worker_writable), [])
        with deferred():  # an exception in between would lose a place that is neither free nor in use
            self.sweep()
            for arena in reversed(arenas):
                offset = arena.take()
                if offset is not None:
                    break
            else:
                try:
                    arena = _Arena(place_nbytes, is_worker_writable, next(self._ids))
                except SharedMemoryError:  # there is no room for a whole arena, but one segment may still fit
                    return Segment.create(nbytes, is_worker_writable=is_worker_writable, segment_id=next(self._ids))
                offset = arena.take()
                arenas.append(arena)
            assert offset is not None
            return self._create_part(arena, arenas, offset, nbytes)

    def _create_part(self, arena: _Arena, arenas: list[_Arena], offset: int, nbytes: int) -> Segment:
        """Create a segment in a place that was taken."""
        try:
            segment = arena.segment.create_part(next(self._ids), offset, nbytes)
        except BaseException:
            arena.free.append(offset)
            raise
        reference = weakref.ref(segment.buffer, self._ended.append)
        self._tenants[id(reference)] = reference, arena, arenas, offset, nbytes, segment.generation
        return segment

    def sweep(self) -> None:
        """Free the places whose segment and views are gone. Any thread may call it at any time."""
        while self._ended:
            try:
                reference = self._ended.popleft()
            except IndexError:  # another thread was faster
                return
            tenant = self._tenants.pop(id(reference), None)
            if tenant is None:  # all were dropped meanwhile
                continue
            _, arena, arenas, offset, nbytes, generation = tenant
            if generation == forks.count:
                # Cleared first: another thread may take the place as soon as it is free, and must find zeros there.
                _clear(arena.segment, offset, nbytes)
                arena.free.append(offset)
            else:
                arena.retired.append(offset)
            self._drop_if_empty(arena, arenas)

    def _drop_if_empty(self, arena: _Arena, arenas: list[_Arena]) -> None:
        """Give up an empty arena, unless it is the only one: that one is kept for the next value."""
        is_wanted = len(arenas) == 1 and not arena.retired
        if is_wanted or len(arena.free) + len(arena.retired) < arena.num_places:
            return
        taken = []
        # Another thread may take places meanwhile, or run this method too, but each place has one holder. So a thread
        # that holds all places knows that no other thread can take one.
        while (offset := arena.take()) is not None:
            taken.append(offset)
        if len(taken) + len(arena.retired) == arena.num_places:
            try:
                arenas.remove(arena)
            except ValueError:  # another thread was faster
                return
            self._released.append(arena.segment)
        else:
            arena.free.extend(taken)

    def close(self) -> None:
        """Drop all arenas. Their memory lives on in views."""
        for arenas in self._by_kind.values():
            for arena in arenas:
                arena.segment.close()
        self._by_kind.clear()
        self._tenants.clear()


def _clear(arena: Segment, offset: int, nbytes: int) -> None:
    try:
        punch(arena.fd, offset, nbytes)
    except OSError:  # not every file system can punch holes
        arena.buffer[offset : offset + nbytes] = 0
