"""Shared variables on a rank: what ``w`` is inside a function, and what a call does to all variables.

A call is a transaction on them. While the function runs, an assignment is kept aside. When it has returned, the new
value goes into a place that is no front. When the program has committed the call, that place becomes the front. So a
call that fails on any rank, in any way, changes no variable on any rank.
In one file because a variable and the store of all variables share one transaction.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._pure.dtypes import BFLOAT16
from synk._pure.ops import REDUCTIONS
from synk._pure.partials import Accumulator
from synk._pure.ranges import LINE_NBYTES
from synk._pure.trees import describe, flatten, unflatten
from synk._wire.mapping import Descriptor
from synk._wire.memory import Segment
from synk._wire.messages import ON_DEVICE, OWN_A, OWN_B, Assigned, spare_of
from synk._wire.variables import (
    Shapes,
    check_value,
    flatten_value,
    leaf_offsets,
    resolve_variable,
    shapes_of,
    split_updates,
    value_as_array,
)
from synk.backends import Backend
from synk.backends._frameworks import bfloat16
from synk.errors import SharedMemoryError

Places = list[tuple[int, int, int]]
"""Places that this rank has made: (variable, which, nbytes)."""


class Replica:
    """One variable on one rank: what ``w`` is inside a function.

    The value lies in one of four places. The word that says in which one is written by the program, while no call that
    uses the variable is in flight.
    """

    # Without a dictionary a misspelt ``w.vlaue = ...`` is an error.
    __slots__ = (
        "_dtypes", "_is_reserved", "_is_sharded", "_kept", "_name", "_places", "_shapes", "_skeleton", "_store",
        "_structure", "_views", "_word", "variable_id",
    )  # fmt: skip

    def __init__(self, store: VariableStore) -> None:
        self._store = store
        self._shapes: list[Shapes] = [()] * 4
        self._views: list[list[np.ndarray] | None] = [None] * 4

    def told(self, number: int, payload: Any, segments: Sequence[Segment], rank: int) -> None:
        """Take in what the program says: the places, and the shapes of the value."""
        self._name, self._skeleton, self._dtypes, self._is_sharded, _, _, places, found = payload
        self.variable_id = number
        self._word = memoryview(segments[0].view(rank * LINE_NBYTES, (1,), np.dtype(np.int64)).data)
        self._places = [(segments[k], at, nbytes) for k, at, nbytes in places]
        self._shapes, self._views = [found] * 4, [None] * 4
        self._kept = segments[0]
        self._is_reserved = segments[0].arena is not None
        self._structure: Any = None
        del self._structure  # so that the next use calls __getattr__, which loads the new one

    def __getattr__(self, name: str) -> Any:
        """Load the structure of the value at its first use: that may import the user's modules, and fail, in a call."""
        if name != "_structure":
            return object.__getattribute__(self, name)  # raises
        _, self._structure = flatten(pickle.loads(self._skeleton))
        return self._structure

    @property
    def name(self) -> str:
        return self._name

    @property
    def _front(self) -> int:
        return self._word[0]

    def _arrays(self, which: int) -> list[np.ndarray]:
        """Return views of the value in a place."""
        segment, at, _ = self._places[which]
        offsets, _ = leaf_offsets(self._dtypes, self._shapes[which])
        return [
            segment.view(at + offset, shape, dtype)
            for offset, shape, dtype in zip(offsets, self._shapes[which], self._dtypes)
        ]

    def leaves(self) -> list[np.ndarray]:
        """Return the arrays of the value as this call sees it, read-only."""
        current = self._store.assigned.get(self)
        if current is not None:
            return current
        front = self._front
        views = self._views[front]
        if views is None:
            views = self._views[front] = self._arrays(front)
            for view in views:
                view.flags.writeable = False
        return views

    @property
    def value(self) -> Any:
        """This rank's value: a read-only array or a nesting of such arrays, which are views of shared memory."""
        leaves: list[Any] = list(self.leaves())
        if self._store.to_framework is not None:
            leaves = [self._store.as_framework(leaf) for leaf in leaves]
        if self._structure == "leaf":
            return leaves[0]
        value = unflatten(self._structure, leaves)
        if type(value) is not tuple or any(isinstance(part, (tuple, list, dict)) for part in value):
            self._store.note_given(self, value, leaves)
        return value

    @value.setter
    def value(self, value: Any) -> None:
        self._store.check_direct(self)
        self.assign(value)

    def assign(self, value: Any) -> None:
        """Check ``value``, and keep it aside as the new one."""
        shapes = self._shapes[self._front]
        if (  # the most frequent case, which needs no other check
            type(value) is np.ndarray
            and self._structure == "leaf"
            and not self._store.backend.is_device
            and value.dtype == self._dtypes[0]
            and value.shape == shapes[0]
        ):
            self._store.note_assigned(self, [self.keep(value, value.dtype)])
            return
        leaves, structure = flatten_value(value, self._structure)
        if structure != self._structure:
            raise ValueError(
                f"cannot assign variable {self.name!r}: got a value of structure {describe(structure)}, expected "
                f"{describe(self._structure)}."
            )
        leaves = [self._store.from_user(leaf) for leaf in leaves]
        as_array = self._store.backend.as_array
        arrays = check_value(self.name, leaves, self._dtypes, shapes, is_sharded=self._is_sharded, as_array=as_array)
        self._store.note_assigned(self, [self.keep(array, dtype) for array, dtype in zip(arrays, self._dtypes)])

    def keep(self, array: Any, dtype: np.dtype) -> Any:
        """Return an assigned array in the form in which it is kept until the call ends."""
        array = np.asarray(array, dtype=dtype, order="C").view()  # ascontiguousarray would add an axis to 0-d
        array.flags.writeable = False
        return array

    def write_back(self, pending: Sequence[Any]) -> tuple[int, Segment | None]:
        """Write an assigned value into the own place that is no front. Return which, and memory that had to be made."""
        which = spare_of(self._front)
        found: Shapes = shapes_of(pending)
        offsets, nbytes = leaf_offsets(self._dtypes, found)
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
        for offset, source, shape, dtype in zip(offsets, pending, found, self._dtypes):
            self._store.backend.to_host(source, segment.view(at + offset, shape, dtype))
        return which, made

    def note_written(self, which: int, found: Shapes, made: Segment | None) -> None:
        """Note where a new value lies. It becomes the value when the program says so."""
        if made is not None:
            self._places[which] = made, 0, made.nbytes
        self._shapes[which] = found
        self._views[which] = None

    def fetch(self) -> None:
        """Do nothing: the value lies in shared memory already."""

    def close(self) -> None:
        self._views = [None] * 4

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return value_as_array(self, self._structure, dtype, copy)

    @property
    def shape(self) -> Any:
        shapes = [leaf.shape for leaf in self.leaves()]
        return shapes[0] if self._structure == "leaf" else unflatten(self._structure, list(shapes))

    @property
    def dtype(self) -> Any:
        dtypes = list(self._dtypes)
        return dtypes[0] if self._structure == "leaf" else unflatten(self._structure, dtypes)

    def __reduce__(self) -> Any:
        return resolve_variable, (self.variable_id,)

    def __repr__(self) -> str:
        return f"<synk.Shared {self.name!r} on rank {self._store.rank}>"


class VariableStore:
    """All variables of one rank, and the assignments of the current call.

    Parameters
    ----------
    rank : int
    backend : Backend
    replica_type : type
        The class of variables here: :class:`Replica`, or its subclass for devices.
    is_far : bool
        Whether the program is on another machine, and shares no memory with this rank.
    """

    def __init__(self, rank: int, backend: Backend, replica_type: type[Replica], *, is_far: bool) -> None:
        self.rank, self.is_far = rank, is_far
        self._replica_type = replica_type
        self.backend = backend
        self._replicas: dict[int, Replica] = {}
        self.assigned: dict[Replica, list[Any]] = {}
        # The containers that the function got last, with what was in them, and the variables of changed containers.
        self.given: dict[Replica, tuple[Any, list[Any]]] = {}
        self._changed: set[Replica] = set()
        self.is_sliced = False
        self._updates: Sequence[tuple[Replica, str]] = ()
        self._sums: list[list[Accumulator]] = []
        self._structures: list[Any] = []
        self.to_framework: Any = None
        self.from_framework: Any = None

    def get(self, variable_id: int) -> Replica:
        """Return a variable. A function may refer to it before the program tells of it."""
        replica = self._replicas.get(variable_id)
        if replica is None:
            replica = self._replicas[variable_id] = self._replica_type(self)
        return replica

    def forget(self, variable_id: int) -> None:
        replica = self._replicas.pop(variable_id, None)
        if replica is not None:
            replica.close()

    def close(self) -> None:
        """Release the shared memory of all variables. Closures of functions may still refer to them."""
        self.abandon()
        for replica in self._replicas.values():
            replica.close()

    def told(self, number: int, payload: Any, held: dict[int, Any], fds: list[Descriptor]) -> None:
        segments = [held[payload[4]]] if payload[4] else []
        segments += [Segment(fds.pop(0), nbytes, is_writable=True, segment_id=0) for nbytes in payload[5]]
        replica: Any = self.get(number)
        replica.told(number, payload, segments, self.rank)
        for segment in segments[1:]:
            segment.close_fd()

    def begin(self, function: Any, is_sliced: bool) -> None:
        """Prepare for a call of ``function``."""
        if self.assigned or self.given or self._sums:
            self.abandon()
        self.is_sliced, self._updates = is_sliced, function.updates
        self.to_framework, self.from_framework = function.to_framework, function.from_framework

    def abandon(self) -> None:
        """Drop what the current call has assigned, and what was prepared for it alone."""
        self.assigned = {}
        self.given, self._changed = {}, set()
        self._sums, self._structures = [], []

    def note_given(self, replica: Replica, value: Any, leaves: list[Any]) -> None:
        """Note that a function got the containers of ``value``, which it must not change."""
        self._look_at(replica)
        self.given[replica] = (value, leaves)

    def note_assigned(self, replica: Replica, leaves: list[Any]) -> None:
        """Note that a function assigns a variable. Changes of the old value no longer matter."""
        self.given.pop(replica, None)
        self._changed.discard(replica)
        self.assigned[replica] = leaves

    def _look_at(self, replica: Replica) -> None:
        """Note whether the function has changed the containers that it got last."""
        given, leaves = self.given.get(replica, (None, []))
        if given is not None:
            found, structure = flatten(given)
            if structure != replica._structure or any(leaf is not old for leaf, old in zip(found, leaves)):
                self._changed.add(replica)

    def check_given(self) -> None:
        """Refuse a change of a container that would be lost: ``w.value["b"] = z`` without an assignment after it.

        The containers themselves cannot refuse it: they are ordinary ones, because libraries check for exact classes.
        """
        for replica in self.given:
            self._look_at(replica)
        for replica in self._changed:
            raise ValueError(
                f"cannot change the value of variable {replica.name!r} in place: the function has changed a container "
                "that it read, and the change would be lost. Assign the whole value (w.value = ...), or change a copy."
            )

    def check_direct(self, replica: Replica) -> None:
        """Refuse a direct assignment in a call whose result it would make ambiguous."""
        if self._updates:
            raise ValueError(
                f"cannot assign variable {replica.name!r} in a function with updates=: return its new value, as in "
                "return outputs, (new_value,), and list it in updates."
            )
        if self.is_sliced:
            raise ValueError(
                f"cannot assign variable {replica.name!r} with num_slices above 1: the slices would see each other's "
                "values. Use updates=, or num_slices=1."
            )

    def take_updates(self, function: Any, result: Any, num_rows: int) -> Any:
        """Split ``(outputs, new_values)`` of one slice, accumulate the new values, and return the outputs."""
        outputs, values = split_updates(function.name, result, len(self._updates))
        if not self.is_sliced:
            for (replica, _), value in zip(self._updates, values):
                replica.assign(value)
            return outputs
        is_first = not self._sums
        for position, ((replica, op), value) in enumerate(zip(self._updates, values)):
            leaves, structure = flatten(value)
            if is_first:
                what = f"the update of {replica.name!r}"
                self._sums.append([Accumulator(REDUCTIONS[op], what, self.backend.xp) for _ in leaves])
                self._structures.append(structure)
            elif structure != self._structures[position]:
                raise ValueError(
                    f"cannot accumulate the update of {replica.name!r} over slices: got structure "
                    f"{describe(structure)}, expected {describe(self._structures[position])} as in the first slice."
                )
            for accumulator, leaf in zip(self._sums[position], leaves):
                array = self.backend.as_array(self.from_user(leaf), f"the update of {replica.name!r}")
                accumulator.add(array, num_rows)
        return outputs

    def from_user(self, leaf: Any) -> Any:
        """Return a leaf of a new value as an array of the backend, if the function gave it as a tensor."""
        if self.from_framework is None:
            return leaf
        array = self.from_framework(leaf)
        # The program reads variables as arrays, whose dtypes must be ones that NumPy computes with.
        return array.view(bfloat16()) if isinstance(array, np.ndarray) and array.dtype == BFLOAT16 else array

    def finish_updates(self) -> None:
        """Assign the new values that were accumulated over slices."""
        from_framework, self.from_framework = self.from_framework, None  # they are host arrays by now
        for (replica, _), sums, structure in zip(self._updates, self._sums, self._structures):
            replica.assign(unflatten(structure, [accumulator.result() for accumulator in sums]))
        self._sums, self._structures = [], []
        self.from_framework = from_framework

    def as_framework(self, leaf: Any) -> Any:
        """Return an array of a value as one of the framework, on the host with memory of its own."""
        return self.to_framework(leaf.copy() if isinstance(leaf, np.ndarray) else leaf)

    def publish(self) -> tuple[Assigned, Places, list[Segment], Callable[[], None]]:
        """Write all assignments of the call. Return what to tell of them, and a step that notes that it was told."""
        told: list[tuple[int, bool, Shapes]] = []
        places: Places = []
        segments: list[Segment] = []
        notes: list[tuple[Any, int, Shapes, Segment | None]] = []
        for each, pending in self.assigned.items():
            replica: Any = each
            which, made = replica.write_back(pending)
            found = shapes_of(pending)
            told.append((replica.variable_id, which >= ON_DEVICE, found))
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
