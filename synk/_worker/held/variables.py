"""Shared variables on a worker: what ``w`` is inside a function, and what a call does to all variables.

A call is a transaction on them. While the function runs, an assignment is kept aside. When it has returned, the new
value goes into the variable's second buffer. When the master has committed the call, the buffers change places; the
worker sees that with its next message. So a call that fails on any rank, in any way, changes no variable on any rank.
In one file because a variable and the store of all variables share one transaction.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from synk._pure.dtypes import BFLOAT16
from synk._pure.ops import REDUCTIONS
from synk._pure.partials import Accumulator
from synk._pure.trees import describe, flatten, unflatten
from synk._wire.control import Down
from synk._wire.memory import Segment
from synk._wire.messages import Input
from synk._wire.variables import (
    Declaration,
    Shapes,
    check_value,
    flatten_value,
    leaf_offsets,
    resolve_variable,
    split_updates,
    value_as_array,
)
from synk.backends import Backend
from synk.backends._frameworks import bfloat16

_shape_of = operator.attrgetter("shape")


class Replica:
    """One variable on one rank: what ``w`` is inside a function."""

    # Without a dictionary a misspelt ``w.vlaue = ...`` is an error.
    __slots__ = ("_buffers", "_declaration", "_front", "_shapes", "_store", "_structure", "_views")

    def __init__(self, store: VariableStore) -> None:
        self._store = store
        self._declaration: Declaration | None = None
        self._front = 0
        self._shapes: list[Shapes] = [(), ()]
        self._structure: Any = None
        self._views: list[np.ndarray] | None = None
        self._buffers: list[tuple[Shapes, list[np.ndarray]] | None] = [None, None]

    def declare(self, declaration: Declaration) -> None:
        """Take in the master's declaration, which may bring new buffers and new shapes."""
        self._declaration = declaration
        self._front = declaration.front
        self._shapes = list(declaration.shapes)
        self._views, self._buffers = None, [None, None]
        self._structure = None
        del self._structure  # so that the next use calls __getattr__, which loads the new one

    def __getattr__(self, name: str) -> Any:
        """Load the structure of the value at its first use: that may import the user's modules, and fail, in a call."""
        if name != "_structure":
            return object.__getattribute__(self, name)  # raises
        _, self._structure = flatten(pickle.loads(self._known.skeleton))
        return self._structure

    @property
    def _known(self) -> Declaration:
        assert self._declaration is not None
        return self._declaration

    @property
    def name(self) -> str:
        return self._known.name

    def _arrays(self, index: int) -> list[np.ndarray]:
        """Return writable views of the arrays in one buffer."""
        known = self._buffers[index]
        if known is not None and known[0] == self._shapes[index]:
            return known[1]
        declaration = self._known
        segment = self._store.segments[declaration.segment_ids[index]]
        offsets, _ = leaf_offsets(declaration.dtypes, self._shapes[index])
        arrays = [
            segment.view(offset, shape, dtype)
            for offset, shape, dtype in zip(offsets, self._shapes[index], declaration.dtypes)
        ]
        self._buffers[index] = self._shapes[index], arrays
        return arrays

    def leaves(self) -> list[np.ndarray]:
        """Return the arrays of the value as this call sees it, read-only."""
        current = self._store.assigned.get(self)
        if current is not None:
            return current
        if self._views is None:
            views = []
            for array in self._arrays(self._front):
                view = array[...]
                view.flags.writeable = False
                views.append(view)
            self._views = views
        return self._views

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
        declaration, shapes = self._declaration, self._shapes[self._front]
        assert declaration is not None
        if (  # the most frequent case, which needs no other check
            type(value) is np.ndarray
            and self._structure == "leaf"
            and not self._store.backend.is_device
            and value.dtype == declaration.dtypes[0]
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
        arrays = check_value(
            self.name, leaves, declaration.dtypes, shapes, is_sharded=declaration.is_sharded, as_array=as_array
        )
        self._store.note_assigned(self, [self.keep(array, dtype) for array, dtype in zip(arrays, declaration.dtypes)])

    def keep(self, array: Any, dtype: np.dtype) -> Any:
        """Return an assigned array in the form in which it is kept until the call ends."""
        array = np.asarray(array, dtype=dtype, order="C").view()  # ascontiguousarray would add an axis to 0-d
        array.flags.writeable = False
        return array

    @property
    def variable_id(self) -> int:
        return self._known.variable_id

    def store(self, pending: Sequence[Any]) -> bool:
        """Write an assigned value into the second buffer. Return False if the buffer has no room."""
        # Nobody reads the back buffer before the commit. So a rank that dies in the middle leaves it torn, and no harm
        # is done: the value is still in the front buffer.
        back = 1 - self._front
        shapes = tuple(map(_shape_of, pending))
        known = self._buffers[back]
        if known is None or known[0] != shapes:
            _, needed = leaf_offsets(self._known.dtypes, shapes)
            segment = self._store.segments.get(self._known.segment_ids[back])
            if segment is None or segment.nbytes < needed:
                return False
        self._shapes[back] = shapes
        for target, source in zip(self._arrays(back), pending):
            self._store.backend.to_host(source, target)
        return True

    def fetch(self) -> None:
        """Do nothing: the value lies in shared memory already."""

    def close(self) -> None:
        """Release the shared memory, though functions may still refer to the variable."""
        self._views = None
        self._buffers = [None, None]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return value_as_array(self, self._structure, dtype, copy)

    @property
    def shape(self) -> Any:
        shapes = [leaf.shape for leaf in self.leaves()]
        return shapes[0] if self._structure == "leaf" else unflatten(self._structure, list(shapes))

    @property
    def dtype(self) -> Any:
        dtypes = list(self._known.dtypes)
        return dtypes[0] if self._structure == "leaf" else unflatten(self._structure, dtypes)

    def __reduce__(self) -> Any:
        return resolve_variable, (self.variable_id,)

    def __repr__(self) -> str:
        return f"<synk.Shared {self.name!r} on rank {self._store.rank}>"


class VariableStore:
    """All variables of one rank, and the assignments of the current call.

    An interrupt can come between any two steps of a call. So each thing that the next call looks at changes in a single
    step: what was assigned (``assigned``), and which call stored what (``stored``). The store has many attributes,
    because they are the state of one transaction. ``plan`` is set only while nothing of it is left over.

    Parameters
    ----------
    rank : int
    segments : dict of int to Segment
        The segments that the worker holds.
    down : ndarray
        The control block that the master writes, of lane 0.
    backend : Backend
    replica_type : type
        The class of variables here: :class:`Replica`, or its subclass for devices.
    """

    def __init__(
        self, rank: int, segments: dict[int, Segment], down: np.ndarray, backend: Backend, replica_type: type[Replica]
    ) -> None:
        self.rank = rank
        self._replica_type = replica_type
        self.segments = segments
        self.backend = backend
        self._down = down
        self.call_down = down  # the control block of the current call's lane
        self._replicas: dict[int, Replica] = {}
        self.assigned: dict[Replica, list[Any]] = {}
        self.stored: tuple[int, list[Replica]] = (-1, [])  # a call, and what it wrote: valid if the master commits it
        # The containers that the function got last, with what was in them, and the variables of changed containers.
        self.given: dict[Replica, tuple[Any, list[Any]]] = {}
        self._changed: set[Replica] = set()
        self.plan: Any = None  # its next call can begin at once: nothing was assigned or given since its last
        self.is_sliced = False
        self._updates: Sequence[tuple[Replica, str]] = ()
        self._sums: list[list[Accumulator]] = []
        self._structures: list[Any] = []
        self.to_framework: Any = None
        self.from_framework: Any = None

    def get(self, variable_id: int) -> Replica:
        """Return a variable. A function may refer to it before the master declares it."""
        replica = self._replicas.get(variable_id)
        if replica is None:
            replica = self._replicas[variable_id] = self._replica_type(self)
        return replica

    def declare(self, declaration: Declaration) -> None:
        self.get(declaration.variable_id).declare(declaration)

    def forget(self, variable_ids: Iterable[int]) -> None:
        for variable_id in variable_ids:
            replica = self._replicas.pop(variable_id, None)
            if replica is not None:
                replica.close()

    def fetch(self, variable_id: int) -> None:
        """Copy a value that lives on a device into its buffer in shared memory."""
        with self.backend.running():
            self.get(variable_id).fetch()
            self.backend.synchronize()

    def close(self) -> None:
        """Release the shared memory of all variables. Closures of functions may still refer to them."""
        self.abandon()
        for replica in self._replicas.values():
            replica.close()

    def collective(self, variable_id: int, kind: str, op: str, collectives: Any) -> None:
        """Do this rank's part of a collective over values on devices. It takes effect when the master commits it."""
        replica: Any = self.get(variable_id)
        with self.backend.running():
            replica.store_on_device(replica.collective(kind, op, collectives))
            self.backend.synchronize()
        self.plan, self.stored = None, (int(self._down[0, Down.CALL]), [replica])

    # -- one call -----------------------------------------------------------------------------------------------------

    def begin(self, function: Any, is_sliced: bool, down: np.ndarray, plan: Any = None) -> None:
        """Prepare for a call of ``function``, whose numbers are in ``down``: one of ``plan``, or of no plan.

        Whatever leaves something behind (an assignment, a value that was given) forgets the plan. So while
        ``self.plan`` is still that of the next call, nothing has to be prepared, and the caller skips this.
        """
        self.plan = None  # an interrupt may come between any two lines
        if self.assigned or self.given or self._sums:
            self.abandon()
        self.call_down, self.is_sliced, self._updates = down, is_sliced, function.updates
        self.to_framework, self.from_framework = function.to_framework, function.from_framework
        self.plan = plan

    def abandon(self) -> None:
        """Drop what the current call has assigned, and what was prepared for it alone."""
        self.plan = None
        self.assigned = {}
        self.given, self._changed = {}, set()
        self._sums, self._structures = [], []

    def note_given(self, replica: Replica, value: Any, leaves: list[Any]) -> None:
        """Note that a function got the containers of ``value``, which it must not change."""
        self.plan = None
        self._look_at(replica)
        self.given[replica] = (value, leaves)

    def note_assigned(self, replica: Replica, leaves: list[Any]) -> None:
        """Note that a function assigns a variable. Changes of the old value no longer matter."""
        self.plan = None
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
        self.plan = None
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
        # The master reads variables as arrays, whose dtypes must be ones that NumPy computes with.
        return array.view(bfloat16()) if isinstance(array, np.ndarray) and array.dtype == BFLOAT16 else array

    def finish_updates(self) -> None:
        """Assign the new values that were accumulated over slices."""
        from_framework, self.from_framework = self.from_framework, None  # they are host arrays by now
        for (replica, _), sums, structure in zip(self._updates, self._sums, self._structures):
            replica.assign(unflatten(structure, [accumulator.result() for accumulator in sums]))
        self._sums, self._structures = [], []
        self.from_framework = from_framework

    def store(self) -> bool:
        """Write all assignments of the current call into second buffers. Return False if one has no room."""
        has_room = True
        for replica, pending in self.assigned.items():
            has_room = replica.store(pending) and has_room
        if has_room:
            self._note_stored()
        return has_room

    def _note_stored(self) -> None:
        """Note that the call's assignments are written. They take effect if the master commits the call."""
        # An interrupt between the two lines fails the call, so the master never commits it. ``resolve`` then finds
        # another number in COMMITTED, and drops what was stored and what was assigned.
        self.stored = (int(self.call_down[0, Down.CALL]), list(self.assigned))
        self.abandon()

    def argument(self, item: Input, local_indices: np.ndarray | None, rows: Any) -> Any:
        """Return a variable that is an argument of the call: the whole value, or some of its rows."""
        replica = self._replicas[item.segment_id]
        leaves: list[Any] = list(replica.leaves())
        if item.kind == "shard":
            low, high, numbers = rows.low, rows.high, self.call_down[self.rank]
            if local_indices is not None:
                leaves = [self.backend.take(leaf, local_indices[low:high]) for leaf in leaves]
            else:
                step = int(numbers[Down.LOCAL_STEP])
                start = int(numbers[Down.LOCAL_START]) + (low - rows.first) * step
                stop = start + (high - low) * step
                leaves = [
                    leaf[start : stop if stop >= 0 else None : step] if high > low else leaf[:0] for leaf in leaves
                ]
        if self.to_framework is not None:
            leaves = [self.as_framework(leaf) for leaf in leaves]
        return unflatten(replica._structure, leaves)

    def as_framework(self, leaf: Any) -> Any:
        """Return an array of a value as one of the framework, on the host with memory of its own."""
        return self.to_framework(leaf.copy() if isinstance(leaf, np.ndarray) else leaf)
