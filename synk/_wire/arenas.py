"""Small segments side by side in large ones: thousands of small values with a few descriptors.

An arena is cut into places of one size, and holds what workers may write or what they only read. Its memory is taken
place by place, when a value comes to lie there, and given back when the value is gone; its descriptor and its addresses
when all of its places are free. Knows nothing of workers: the runtime tells them.
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
    """One arena. Places are taken and put back in one step of the interpreter each, in any thread."""

    def __init__(self, place_nbytes: int, is_worker_writable: bool, segment_id: int) -> None:
        self.segment = Segment.create_arena(ARENA_NBYTES, is_worker_writable=is_worker_writable, segment_id=segment_id)
        self.free = deque(range(0, ARENA_NBYTES, place_nbytes))
        self.num_places = len(self.free)
        self.burnt: list[int] = []  # never used again, because a forked child may read there

    def take(self) -> int | None:
        """Return the offset of a free place, which is the caller's from now on; None where there is none."""
        try:
            return self.free.popleft()
        except IndexError:
            return None


class _Tenant(weakref.ref[np.ndarray]):
    """What all views of a value refer to, and where it lies."""

    __slots__ = ("arena", "arenas", "generation", "nbytes", "offset")
    arena: _Arena
    arenas: list[_Arena]
    generation: int
    nbytes: int
    offset: int


class Arenas:
    """The small segments of one runtime.

    A place is used again when its segment was discarded, which the runtime does while no call is in flight, and no view
    is left; unless a forked child may still read it.

    Parameters
    ----------
    released : deque of Segment
        Where arenas go that have become empty.
    ids : iterator of int
        For new segments: those of one runtime.
    """

    def __init__(self, released: deque[Segment], ids: Iterator[int]) -> None:
        self._released = released
        self._ids = ids
        self._by_kind: dict[tuple[int, bool], list[_Arena]] = {}
        self._tenants: dict[int, _Tenant] = {}  # by their id
        self._ended: deque[_Tenant] = deque()  # filled in C, see ResultPool

    def create(self, nbytes: int, *, is_worker_writable: bool = False) -> Segment:
        """Allocate a segment of at least ``nbytes`` bytes, filled with zeros: in an arena where it is small.

        Raises
        ------
        SharedMemoryError
        """
        nbytes = round_up(max(nbytes, 1), PAGE_NBYTES)
        place_nbytes = next((size for size in _PLACE_NBYTES if size >= nbytes), 0)
        if not place_nbytes:
            return Segment.create(nbytes, is_worker_writable=is_worker_writable, segment_id=next(self._ids))
        arenas = self._by_kind.setdefault((place_nbytes, is_worker_writable), [])
        with deferred():  # a place that is neither free nor taken would be lost
            self.sweep()
            for arena in reversed(arenas):
                offset = arena.take()
                if offset is not None:
                    break
            else:
                try:
                    arena = _Arena(place_nbytes, is_worker_writable, next(self._ids))
                except SharedMemoryError:  # no room for a whole arena: one segment may still fit
                    return Segment.create(nbytes, is_worker_writable=is_worker_writable, segment_id=next(self._ids))
                offset = arena.take()
                arenas.append(arena)
            assert offset is not None
            return self._settle(arena, arenas, offset, nbytes)

    def _settle(self, arena: _Arena, arenas: list[_Arena], offset: int, nbytes: int) -> Segment:
        """Make a segment in a place that was taken."""
        try:
            segment = arena.segment.create_part(next(self._ids), offset, nbytes)
        except BaseException:
            arena.free.append(offset)
            raise
        tenant = _Tenant(segment.buffer, self._ended.append)
        tenant.arena, tenant.arenas, tenant.offset, tenant.nbytes = arena, arenas, offset, nbytes
        tenant.generation = segment.generation
        self._tenants[id(tenant)] = tenant
        return segment

    def sweep(self) -> None:
        """Free the places whose segment and views are gone; for any thread, at any time."""
        while self._ended:
            try:
                tenant = self._ended.popleft()
            except IndexError:  # another thread was faster
                return
            self._tenants.pop(id(tenant), None)
            arena = tenant.arena
            if tenant.generation == forks.count:
                _clear(arena.segment, tenant.offset, tenant.nbytes)
                arena.free.append(tenant.offset)
            else:
                arena.burnt.append(tenant.offset)
            self._drop_if_empty(arena, tenant.arenas)

    def _drop_if_empty(self, arena: _Arena, arenas: list[_Arena]) -> None:
        """Give an empty arena up, but keep one for what comes next."""
        is_wanted = len(arenas) == 1 and not arena.burnt
        if is_wanted or len(arena.free) + len(arena.burnt) < arena.num_places:
            return
        taken = []
        while (offset := arena.take()) is not None:  # who holds all places can be sure that nobody takes one
            taken.append(offset)
        if len(taken) + len(arena.burnt) == arena.num_places:
            try:
                arenas.remove(arena)
            except ValueError:  # another thread was faster
                return
            self._released.append(arena.segment)
        else:
            arena.free.extend(taken)

    def close(self) -> None:
        """Drop everything; segments live on in their views."""
        for arenas in self._by_kind.values():
            for arena in arenas:
                arena.segment.close()
        self._by_kind.clear()
        self._tenants.clear()


def _clear(arena: Segment, offset: int, nbytes: int) -> None:
    try:
        punch(arena.fd, offset, nbytes)
    except OSError:  # not every file can
        arena.buffer[offset : offset + nbytes] = 0
