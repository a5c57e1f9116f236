"""Shared variables on a rank: what a call assigns, and how it is dropped."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._engine.layout import Assigned
from synk._pure.ranges import LINE_NBYTES
from synk._pure.trees import unflatten
from synk._wire.memory import Segment
from synk._wire.variables import Declaration, Shapes, leaf_offsets, shapes_of
from synk._worker.held.variables import Replica as _Replica
from synk._worker.held.variables import VariableStore as _VariableStore
from synk.backends import Backend
from synk.errors import SharedMemoryError

OWN_A, OWN_B = 2, 3

Places = list[tuple[int, int, int]]
"""Places that this rank has made: (variable, which, nbytes)."""


class Replica(_Replica):
    """One variable on one rank: what ``w`` is inside a function.

    The value lies in one of four places. The word that says in which one is written by the program, while no call that
    uses the variable is in flight.
    """

    __slots__ = ("_is_reserved", "_kept", "_places", "_seen", "_word")

    def told(self, number: int, payload: Any, segments: Sequence[Segment], rank: int) -> None:
        """Take in what the program says: the places, and the shapes of the value."""
        name, skeleton, dtypes, is_sharded, _, _, places, found = payload
        self.declare(Declaration(number, name, skeleton, dtypes, is_sharded, (0, 0), (found, found), 0))
        words = segments[0].view(rank * LINE_NBYTES, (1,), np.dtype(np.int64))
        self._word = memoryview(words)  # type: ignore[arg-type]
        self._places = [(segments[k], at, nbytes) for k, at, nbytes in places]
        self._shapes = [found] * 4
        self._buffers = [None] * 4
        self._kept = segments[0]
        self._is_reserved, self._seen = segments[0].arena is not None, -1

    @property
    def _front(self) -> int:
        return self._word[0]

    @_front.setter
    def _front(self, front: int) -> None:
        pass

    def _arrays(self, index: int) -> list[np.ndarray]:
        known = self._buffers[index]
        if known is not None and known[0] == self._shapes[index]:
            return known[1]
        dtypes, (segment, at, _) = self._known.dtypes, self._places[index]
        offsets, _ = leaf_offsets(dtypes, self._shapes[index])
        arrays = [
            segment.view(at + offset, shape, dtype)
            for offset, shape, dtype in zip(offsets, self._shapes[index], dtypes)
        ]
        self._buffers[index] = self._shapes[index], arrays
        return arrays

    def leaves(self) -> list[np.ndarray]:
        front = self._front
        if front != self._seen:
            self._views, self._seen = None, front
        return super().leaves()

    def write_back(self, pending: Sequence[Any]) -> tuple[int, Segment | None]:
        """Write an assigned value into the own place that is no front. Return which, and memory that had to be made."""
        which = OWN_A if self._front == OWN_B else OWN_B
        found: Shapes = shapes_of(pending)
        _, nbytes = leaf_offsets(self._known.dtypes, found)
        segment, at, room = self._places[which]
        made = None
        if nbytes > room:
            made = segment = Segment.create(2 * nbytes, is_worker_writable=True)
            at = 0
        elif segment is self._kept and not self._is_reserved:  # full memory is an error here, and no SIGBUS
            for each in (OWN_A, OWN_B):
                if self._places[each][0] is segment:
                    try:
                        os.posix_fallocate(segment.fd, self._places[each][1], self._places[each][2])
                    except OSError as error:
                        raise SharedMemoryError(
                            f"cannot store the new value of variable {self.name!r}: got no memory for {nbytes} bytes "
                            f"({error.strerror}). Free some Data, or use fewer rows per call."
                        ) from error
            self._is_reserved = True
        offsets, _ = leaf_offsets(self._known.dtypes, found)
        for offset, source, shape, dtype in zip(offsets, pending, found, self._known.dtypes):
            self._store.backend.to_host(source, segment.view(at + offset, shape, dtype))
        return which, made

    def note_written(self, which: int, found: Shapes, made: Segment | None) -> None:
        """Note where a new value lies. It becomes the value when the program says so."""
        if made is not None:
            self._places[which] = made, 0, made.nbytes
            self._buffers[which] = None
        self._shapes[which] = found

    def close(self) -> None:
        self._views = None
        self._buffers = [None] * 4


class VariableStore(_VariableStore):
    """All variables of one rank, and the assignments of the current call."""

    def __init__(self, rank: int, down: np.ndarray, backend: Backend, replica_type: type[Replica]) -> None:
        super().__init__(rank, {}, down, backend, replica_type)

    def told(self, number: int, payload: Any, held: dict[int, Any], fds: list[int]) -> None:
        segments = [held[payload[4]]] if payload[4] else []
        segments += [Segment(fds.pop(0), nbytes, is_writable=True, segment_id=0) for nbytes in payload[5]]
        replica: Any = self.get(number)
        replica.told(number, payload, segments, self.rank)
        for segment in segments[1:]:
            segment.close_fd()

    def start(self, function: Any, is_sliced: bool, down: np.ndarray) -> None:
        """Prepare for a call."""
        self.begin(function, is_sliced, down)

    def resolve(self) -> None:
        """Do nothing: the program's words say which places hold the values."""

    def publish(self) -> tuple[Assigned, Places, list[Segment], Callable[[], None]]:
        """Write all assignments of the call. Return what to tell of them, and a step that notes that it was told."""
        told: list[tuple[int, int, Shapes]] = []
        places: Places = []
        segments: list[Segment] = []
        notes: list[tuple[Any, int, Shapes, Segment | None]] = []
        for each, pending in self.assigned.items():
            replica: Any = each
            which, made = replica.write_back(pending)
            found = shapes_of(pending)
            told.append((replica.variable_id, which, found))
            notes.append((replica, which, found, made))
            if made is not None:
                places.append((replica.variable_id, which, made.nbytes))
                segments.append(made)

        def note() -> None:
            for replica, which, found, made in notes:
                replica.note_written(which, found, made)
            self.abandon()

        return tuple(told), places, segments, note

    def rows_of(self, number: int, indices: np.ndarray | None, low: int, high: int, start: int, step: int) -> Any:
        """Return some rows of a shard that is an argument: positions ``low`` to ``high`` of this rank's."""
        replica: Any = self._replicas[number]
        leaves = []
        for leaf in replica.leaves():
            if indices is not None:
                leaves.append(self.backend.take(leaf, indices[low:high]))
            else:
                first, stop = start + low * step, start + high * step
                leaves.append(leaf[first : stop if stop >= 0 else None : step] if high > low else leaf[:0])
        return self._given_as(replica, leaves)

    def whole_of(self, number: int) -> Any:
        """Return the value of a variable that is an argument."""
        replica: Any = self._replicas[number]
        return self._given_as(replica, list(replica.leaves()))

    def _given_as(self, replica: Any, leaves: list[Any]) -> Any:
        if self.to_framework is not None:
            leaves = [self.as_framework(leaf) for leaf in leaves]
        return unflatten(replica._structure, leaves)
