"""Shared variables on a worker: what ``w`` is inside a function, and what a call does to all of them.

A call is a transaction on them. An assignment is kept aside while the function runs; when it has returned, the new
value goes into the variable's second buffer; and the buffers change places when the master has committed the call,
which the worker sees with its next message. So a call that fails on any rank, in any way, changes no variable on any
rank. In one file because a variable and the store of all share one transaction.
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
    shapes_of,
    value_as_array,
)
from synk.backends import Backend
from synk.backends._frameworks import bfloat16

_shape_of = operator.attrgetter("shape")


class Replica:
    """One variable on one rank; what ``w`` is inside a function."""

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
        """Take in what the master says: new buffers, new shapes, or all of it."""
        self._declaration = declaration
        self._front = declaration.front
        self._shapes = list(declaration.shapes)
        self._views, self._buffers = None, [None, None]
        self._structure = None
        del self._structure  # what it was is asked for anew: see below

    def __getattr__(self, name: str) -> Any:
        """Load how the value is nested when somebody asks: it may need modules of the user's, and a call to fail in."""
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
        """Return the arrays of one buffer, as the rank writes them."""
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
        """The arrays of the value as this call sees it, read-only."""
        current = self._store.assigned.get(self) or self._store.whole.get(self)
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
        """This rank's value: a read-only array (or nesting of arrays), a view of shared memory."""
        leaves: list[Any] = list(self.leaves())
        if self._store.to_framework is not None:
            leaves = [self._store.as_framework(leaf) for leaf in leaves]
        if self._structure == "leaf":
            return leaves[0]
        value = unflatten(self._structure, leaves)
        is_flat_tuple = isinstance(self._structure, tuple) and self._structure[0] is tuple
        if not is_flat_tuple:
            self._store.note_given(self, value, leaves)
        return value

    @value.setter
    def value(self, value: Any) -> None:
        self._store.check_direct(self)
        self.assign(value)

    def assign(self, value: Any) -> None:
        """Keep ``value`` aside as the new one."""
        declaration, shapes = self._declaration, self._shapes[self._front]
        assert declaration is not None
        if (  # as most look: there is nothing to check
            type(value) is np.ndarray
            and self._structure == "leaf"
            and not self._store.backend.is_device
            and value.dtype == declaration.dtypes[0]
            and value.shape == shapes[0]
        ):
            self._store.forget_given(self)
            self._store.assigned[self] = [self._keep(value, value.dtype)]
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
        self._store.forget_given(self)
        self._store.assigned[self] = [self._keep(array, dtype) for array, dtype in zip(arrays, declaration.dtypes)]

    def _keep(self, array: Any, dtype: np.dtype) -> Any:
        """Return an assigned array as it is kept until the call ends."""
        array = np.asarray(array, dtype=dtype, order="C").view()  # ascontiguousarray would add an axis to 0-d
        array.flags.writeable = False
        return array

    @property
    def variable_id(self) -> int:
        return self._known.variable_id

    def store(self, pending: Sequence[Any]) -> bool:
        """Write an assigned value into the second buffer; return False if that has no room."""
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
        """The value is in shared memory already."""

    def flip(self) -> None:
        self._front = 1 - self._front
        self._views = None

    def close(self) -> None:
        """Let go of the shared memory, though functions may still refer to the variable."""
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
    """All variables of one rank, and the assignments of the call under way.

    An interrupt can come between any two steps of a call, so what the next call looks at changes in one step each:
    what is assigned (``assigned``), and what was stored by which call (``stored``).

    Parameters
    ----------
    rank : int
    segments : dict of int to Segment
        The worker's own.
    down : ndarray
        The control block that the master writes, of lane 0.
    backend : Backend
    replica_type : type
        What variables are here: a :class:`Replica`, or one on a device.
    """

    def __init__(
        self, rank: int, segments: dict[int, Segment], down: np.ndarray, backend: Backend, replica_type: type[Replica]
    ) -> None:
        self.rank = rank
        self._replica_type = replica_type
        self.segments = segments
        self.backend = backend
        self._down = down
        self.call_down = down  # of the lane of the call under way
        self._replicas: dict[int, Replica] = {}
        self.assigned: dict[Replica, list[Any]] = {}
        self.whole: dict[Replica, list[Any]] = {}  # what a serial call sees of sharded variables
        self.stored: tuple[int, list[Replica]] = (-1, [])
        # Containers that functions were given last, with what was in them; and variables of which one was changed.
        self.given: dict[Replica, tuple[Any, list[Any]]] = {}
        self._changed: set[Replica] = set()
        self.is_sliced = False
        self.is_plain = False  # whether the last call was whole and without updates
        self._is_updating = False
        self._sums: list[list[Accumulator]] = []
        self._structures: list[Any] = []
        self.to_framework: Any = None
        self.from_framework: Any = None

    def get(self, variable_id: int) -> Replica:
        """Return a variable, which a function may refer to before it is declared."""
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
        """Let go of the shared memory of all variables, which functions' closures may outlive."""
        self.abandon()
        for replica in self._replicas.values():
            replica.close()

    def collective(self, variable_id: int, kind: str, op: str, collectives: Any) -> None:
        """Do this rank's part of a collective over values on devices; it holds when the master commits it."""
        replica: Any = self.get(variable_id)
        with self.backend.running():
            replica.store_on_device(replica.collective(kind, op, collectives))
            self.backend.synchronize()
        self.stored = (int(self._down[0, Down.CALL]), [replica])

    # -- one call -----------------------------------------------------------------------------------------------------

    def resolve(self) -> None:
        """Settle the call before: its assignments hold if the master committed it, and never happened otherwise."""
        call, replicas = self.stored
        if replicas and int(self._down[self.rank, Down.COMMITTED]) == call:
            for replica in replicas:
                replica.flip()
        self.stored = (-1, [])
        self.abandon()

    def begin(self, function: Any, is_sliced: bool, down: np.ndarray) -> None:
        """Prepare for a call of ``function``, whose numbers are in ``down``."""
        self.call_down = down
        self.is_sliced = is_sliced
        self._updates = [update if isinstance(update, tuple) else (update, "avg") for update in function.updates]
        self._is_updating = bool(self._updates)
        self._sums, self._structures = [], []
        self.to_framework, self.from_framework = function.to_framework, function.from_framework
        self.is_plain = not (is_sliced or self._updates)
        self.abandon()

    def show(self, whole: dict[int, list[np.ndarray]]) -> None:
        """Have the call under way, a serial one, see all rows of sharded variables, and not just this rank's."""
        self.whole = {self.get(key): [self.backend.from_host(leaf) for leaf in leaves] for key, leaves in whole.items()}

    def show_rows(self, num_rows: int, start: int, stop: int, besides: Sequence[int]) -> None:
        """Have the call under way, one on trial, see these rows of sharded variables that have ``num_rows`` here.

        Not of those ``besides``: they are passed to it.
        """
        sharded = [
            replica
            for key, replica in self._replicas.items()
            if key not in besides and replica._declaration is not None and replica._declaration.is_sharded
        ]
        leaves = {replica: replica.leaves() for replica in sharded}
        self.whole = {
            replica: [leaf[start:stop] for leaf in each]
            for replica, each in leaves.items()
            if all(len(leaf) == num_rows for leaf in each)
        }

    def abandon(self) -> None:
        """Drop what the call under way has assigned, and what it alone sees."""
        self.assigned = {}
        self.whole = {}
        self.given, self._changed = {}, set()

    def note_given(self, replica: Replica, value: Any, leaves: list[Any]) -> None:
        """A function was given the containers of ``value``, which it must not change."""
        self._look_at(replica)
        self.given[replica] = (value, leaves)

    def forget_given(self, replica: Replica) -> None:
        """The variable is being assigned: whatever became of the old value does not count."""
        self.given.pop(replica, None)
        self._changed.discard(replica)

    def _look_at(self, replica: Replica) -> None:
        given, leaves = self.given.get(replica, (None, []))
        if given is not None:
            found, structure = flatten(given)
            if structure != replica._structure or any(leaf is not old for leaf, old in zip(found, leaves)):
                self._changed.add(replica)

    def check_given(self) -> None:
        """Refuse a change of a container that would be lost: ``w.value["b"] = z`` without an assignment after it.

        The containers are ordinary ones, for libraries know these by their exact class.
        """
        for replica in self.given:
            self._look_at(replica)
        for replica in self._changed:
            raise ValueError(
                f"cannot change the value of variable {replica.name!r} in place: the function has changed a container "
                "that it read, and the change would be lost. Assign the whole value (w.value = ...), or change a copy."
            )

    def check_direct(self, replica: Replica) -> None:
        """Refuse a direct assignment where it has no meaning."""
        if self._is_updating:
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
        """Split ``(outputs, new_values)``, take in the new values of one slice, and return the outputs."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"cannot update the variables of {function.name!r}: got a result of type {type(result).__name__}, "
                f"expected "
                "(outputs, new_values) because of updates=."
            )
        outputs, values = result
        if len(self._updates) == 1 and not (isinstance(values, (tuple, list)) and len(values) == 1):
            values = (values,)
        if not isinstance(values, (tuple, list)) or len(values) != len(self._updates):
            raise ValueError(
                f"cannot update the variables of {function.name!r}: got "
                f"{len(values) if isinstance(values, (tuple, list)) else 1} new values, expected one for each of the "
                f"{len(self._updates)} updates."
            )
        is_first = not self._sums
        for position, ((replica, op), value) in enumerate(zip(self._updates, values)):
            leaves, structure = flatten(value)
            if is_first:
                what = f"the update of {replica.name!r}"
                self._sums.append(
                    [Accumulator(REDUCTIONS[op], what, self.backend.xp, is_single=not self.is_sliced) for _ in leaves]
                )
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
        """Return what a function gives for an array of a value, as an array of the backend where it is a tensor."""
        if self.from_framework is None:
            return leaf
        array = self.from_framework(leaf)
        # What the master reads of a variable are arrays, in dtypes that NumPy computes with.
        return array.view(bfloat16()) if isinstance(array, np.ndarray) and array.dtype == BFLOAT16 else array

    def finish_updates(self) -> None:
        """Assign the accumulated new values."""
        from_framework, self.from_framework = self.from_framework, None  # they are host arrays by now
        for (replica, _), sums, structure in zip(self._updates, self._sums, self._structures):
            replica.assign(unflatten(structure, [accumulator.result() for accumulator in sums]))
        self.from_framework = from_framework
        self._sums, self._structures = [], []

    def assignments(self) -> tuple[tuple[int, Shapes], ...]:
        """What the call has assigned: variables and their new shapes."""
        return tuple((replica.variable_id, shapes_of(pending)) for replica, pending in self.assigned.items())

    def write_as_before(self, expected: tuple[tuple[int, Shapes], ...]) -> bool:
        """Write all assignments, if the call has assigned what one did whose ``assignments`` were ``expected``.

        They count as stored with :meth:`note_stored`; until then the ordinary way can write them once more.
        """
        if len(self.assigned) != len(expected):
            return False
        for (replica, pending), (variable_id, shapes) in zip(self.assigned.items(), expected):
            if self._replicas.get(variable_id) is not replica or len(pending) != len(shapes):
                return False
            for leaf, shape in zip(pending, shapes):
                if leaf.shape != shape:
                    return False
            if not replica.store(pending):
                return False
        return True

    def store(self) -> bool:
        """Write all assignments of the call under way into second buffers; return False if one has no room."""
        has_room = True
        for replica, pending in self.assigned.items():
            has_room = replica.store(pending) and has_room
        if has_room:
            self.note_stored()
        return has_room

    def note_stored(self) -> None:
        """What the call has assigned is written: it holds if the master says so."""
        self.stored = (int(self.call_down[0, Down.CALL]), list(self.assigned))
        self.abandon()

    def argument(self, item: Input, local_indices: np.ndarray | None, low: int, high: int, offset: int) -> Any:
        """Return a variable passed as an argument: whole, or the rows ``low`` to ``high`` of the call's selection.

        ``offset`` is the position of the rank's first row in the selection.
        """
        replica = self._replicas[item.segment_id]
        leaves: list[Any] = list(replica.leaves())
        if item.kind == "shard":
            numbers = self.call_down[self.rank]
            if local_indices is not None:
                leaves = [self.backend.take(leaf, local_indices[low:high]) for leaf in leaves]
            else:
                step = int(numbers[Down.LOCAL_STEP])
                start = int(numbers[Down.LOCAL_START]) + (low - offset) * step
                stop = start + (high - low) * step
                leaves = [
                    leaf[start : stop if stop >= 0 else None : step] if high > low else leaf[:0] for leaf in leaves
                ]
        if self.to_framework is not None:
            leaves = [self.as_framework(leaf) for leaf in leaves]
        return unflatten(replica._structure, leaves)

    def as_framework(self, leaf: Any) -> Any:
        """Return an array of a value as a tensor. On the host a copy: a tensor can be written into, a value cannot."""
        return self.to_framework(leaf.copy() if isinstance(leaf, np.ndarray) else leaf)
