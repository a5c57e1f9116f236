"""One call on one rank: view of its rows -> the user's function, slice by slice -> accumulate -> publish.

Owns the outputs of the last call until the next message. Knows segments and plans, no processes and no channels.
"""

from __future__ import annotations

import pickle
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from synk._pure.ops import Accumulator, Op, check_op, is_reducible, match_ops, reduce_into, wanted_leaves
from synk._pure.ranges import chunk_bounds
from synk._pure.shards import shard_bounds
from synk._pure.trees import flatten, skeleton_of, unflatten
from synk._wire.control import Down
from synk._wire.memory import Segment
from synk._wire.messages import (
    IN_SEGMENTS,
    LARGE_NBYTES,
    Input,
    Layout,
    Leaf,
    Move,
    Plan,
    Status,
    is_in_slot,
    slot_offsets,
)
from synk._worker.loans import Loans, RowsOf
from synk._worker.pages import give_back
from synk._worker.variables import VariableStore
from synk.backends import Backend, DeviceBackend
from synk.errors import SerializationError, SharedMemoryError

if TYPE_CHECKING:
    from synk._worker.device_collectives import DeviceCollectives


class LoadedFunction:
    """A function as a worker holds it."""

    def __init__(
        self, fn: Callable[..., Any], name: str, outputs: Any, framework: str | None, updates: Any, backend: Backend
    ) -> None:
        self.fn = fn
        self.name = name
        self.outputs = outputs
        self.updates = updates
        self.to_framework: Callable[[Any], Any] | None = None
        self.from_framework: Callable[[Any], Any] | None = None
        if framework is not None:
            self.to_framework, self.from_framework = backend.converters(framework)


_IMMUTABLE_TYPES = (int, float, complex, str, bytes, type(None))
_FIXED_TYPES = (float, complex, bool)  # Python's numbers whose dtype does not depend on their value
_PLAIN_TYPES = (np.ndarray, *_FIXED_TYPES)


class OutputSlots:
    """Where the outputs go, as long as they look like those of the call before.

    Only for a value or a tuple of them that are all small arrays or numbers, which is what most functions return.
    """

    def __init__(self, result: Any, values: Sequence[Any], views: Sequence[np.ndarray]) -> None:
        self._kind = type(result)
        self._slots = [(type(value), view.dtype, view.shape, view) for value, view in zip(values, views)]
        self.nbytes = sum(view.nbytes for view in views)

    def fill(self, result: Any) -> bool:
        """Write ``result`` into the slots; return False where it looks different, nothing having been told."""
        if type(result) is not self._kind:
            return False
        values = result if self._kind is tuple else (result,)
        if len(values) != len(self._slots):
            return False
        for value, (kind, dtype, shape, view) in zip(values, self._slots):
            if type(value) is not kind:
                return False
            if kind not in _FIXED_TYPES and (value.dtype != dtype or value.shape != shape):
                return False
            view[...] = value
        return True


class PreparedPlan:
    """A plan with its segments mapped: full-length array views, ready to be cut into rows."""

    def __init__(self, plan: Plan, function: LoadedFunction, segments: dict[int, Segment]) -> None:
        self.plan = plan
        self.function = function
        self.nothing = (None,) * len(plan.inputs)  # for inputs of which none was brought ahead
        self.map(segments)
        self.segment_ids = {item.segment_id for item in plan.inputs if item.kind in IN_SEGMENTS}
        places = (plan.pickle_place, plan.indices_place, plan.local_indices_place, plan.order_place, *plan.buffers)
        self.segment_ids.update(place[0] for place in places if place is not None)
        self.layout: Layout | None = None
        self.ops: list[Op] = []
        self.structure: Any = None
        self.slot_views: list[np.ndarray] = []
        self.slot_key: Any = None
        self.slots: OutputSlots | None = None
        self.moves: Sequence[Move] = ()  # this rank's part of the large outputs

    def map(self, segments: dict[int, Segment]) -> None:
        """Make the views of shared memory; again where a segment was mapped anew."""
        plan = self.plan
        self.loans = Loans(plan, segments, is_writable=self.function.to_framework is not None)
        self.bases: list[Any] = self.loans.arrays
        self.whole: dict[int, list[Any]] = {}  # all rows of sharded variables, by variable, for a serial call
        for item, base in zip(plan.inputs, self.bases):
            if item.kind == "closed over":
                self.whole.setdefault(int(item.name), []).append(base)
        self.indices = self._index_view(plan.indices_place, segments)
        self.local_indices = self._index_view(plan.local_indices_place, segments)
        self.order = self._index_view(plan.order_place, segments)
        self.pickle_view: memoryview | None = None
        if plan.pickle_place is not None:
            self.pickle_view = self._bytes_view(plan.pickle_place, segments)

    @staticmethod
    def _index_view(place: tuple[int, int, int] | None, segments: dict[int, Segment]) -> np.ndarray | None:
        if place is None:
            return None
        segment_id, offset, count = place
        return segments[segment_id].view(offset, (count,), np.dtype(np.int64))

    @staticmethod
    def _bytes_view(place: tuple[int, int, int], segments: dict[int, Segment]) -> memoryview:
        segment_id, offset, nbytes = place
        return segments[segment_id].buffer[offset : offset + nbytes].data


class Ahead(NamedTuple):
    """The inputs of a call that were brought before it began; see ``DeviceBackend.beside``."""

    prepared: PreparedPlan
    call: int
    arrays: list[Any]
    event: Any


class Executor:
    """Runs prepared plans for one rank and keeps their outputs until the next message."""

    def __init__(self, rank: int, backend: Backend, down: np.ndarray) -> None:
        self.rank = rank
        self.backend = backend
        self._down = down
        self.exchange: Segment | None = None
        self.slot_nbytes = 0
        self.collectives: DeviceCollectives | None = None
        self.held_plan: PreparedPlan | None = None
        self._outputs: list[Any] = []
        self._parts: dict[int, Any] = {}  # of the large outputs, what is needed at their assembly
        self._is_published = False
        self._lost: BaseException | None = None  # why the outputs of the last call are there no more
        self._result: Any = None
        self._ahead: Ahead | None = None
        self.num_ahead = 0  # inputs of the call under way that were brought before it began
        self.look_ahead: Callable[[bool], None] = _do_nothing  # whether a call waits whose inputs can be brought
        self.output_nbytes = 0  # of the last call
        self.is_waiting = False  # whether outputs of the last call are still to be assembled

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, prepared: PreparedPlan, variables: VariableStore) -> Any:
        """Call the user's function on this rank's rows and return its result, accumulated over the slices."""
        ahead, self._ahead = self._ahead, None
        self.forget()
        plan, function = prepared.plan, prepared.function
        numbers = self._down[self.rank].tolist()
        low, high = numbers[Down.LOW], numbers[Down.HIGH]
        arrays = None
        if ahead is not None and ahead.prepared is prepared and ahead.call == self._down[0, Down.CALL]:
            cast(DeviceBackend, self.backend).join(ahead.event)
            arrays, self.num_ahead = ahead.arrays, len(ahead.arrays)
            self.look_ahead(True)
        objects = self._load_objects(prepared)
        is_sliced = plan.num_slices > 1 and not plan.is_rowless
        variables.begin(function, is_sliced, self._down)
        if prepared.whole:
            variables.show(prepared.whole)
        if is_sliced:
            bounds = [(low + a, low + b) for a, b in shard_bounds(high - low, plan.num_slices) if b > a]
            result = self._run_slices(prepared, numbers, bounds or [(low, high)], objects, variables)
        else:
            result = self._call(prepared, numbers, low, high, objects, variables, arrays)
        if function.updates:
            variables.finish_updates()
        variables.check_given()
        variables.whole = {}  # what still refers to it now is the function
        return result

    def _load_objects(self, prepared: PreparedPlan) -> Sequence[Any]:
        """Unpickle the broadcast objects of the call: the user's classes are built here."""
        if prepared.pickle_view is None:
            return ()
        try:
            objects = pickle.loads(prepared.pickle_view, buffers=prepared.loans.buffers)
            return [self.backend.from_objects(value) for value in objects]
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            names = ", ".join(item.name or "an argument" for item in prepared.plan.inputs if item.kind == "object")
            raise SerializationError(
                f"cannot load the broadcast inputs of {prepared.function.name!r} ({names}) on the workers: "
                f"{type(error).__name__}: {error}. Their classes must be importable there, or defined in the script."
            ) from error

    def _call(
        self,
        prepared: PreparedPlan,
        numbers: list[int],
        low: int,
        high: int,
        objects: Sequence[Any],
        variables: VariableStore,
        arrays: list[Any] | None = None,
    ) -> Any:
        function = prepared.function
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for item, base, ahead in zip(prepared.plan.inputs, prepared.bases, arrays or prepared.nothing):
            if ahead is not None:
                value = ahead
            elif item.kind == "rows":
                value = self._rows(prepared, item, base, numbers, low, high)
            elif item.kind == "whole":
                value = self.backend.from_host(base[...])  # a view: the function may change the shape of what it gets
            elif item.kind == "object":
                value = objects[item.offset]
            elif item.kind == "closed over":
                continue
            else:
                value = variables.argument(item, prepared.local_indices, low, high, numbers[Down.LOW])
            if function.to_framework is not None and item.kind in ("rows", "whole"):
                value = function.to_framework(value)
            if item.name:
                kwargs[item.name] = value
            else:
                args.append(value)
        result = function.fn(*args, **kwargs)
        return variables.take_updates(function, result, high - low) if function.updates else result

    def _bring(self, prepared: PreparedPlan, numbers: list[int], low: int, high: int) -> list[Any]:
        """Return the scattered and the broadcast arrays of a call by the position of the input; None for the others."""
        return [
            self._rows(prepared, item, base, numbers, low, high)
            if item.kind == "rows"
            else self.backend.from_host(base)
            if item.kind == "whole"
            else None
            for item, base in zip(prepared.plan.inputs, prepared.bases)
        ]

    def prefetch(self, prepared: PreparedPlan, *, is_hurried: bool) -> None:
        """Begin to bring the inputs of the call that comes next in this lane; ``run`` finds them.

        ``is_hurried``: only where it does not hold up the host, because the call before has not begun its work yet.
        """
        if self._ahead is not None or prepared.plan.num_slices > 1:
            return
        backend = cast(DeviceBackend, self.backend)
        numbers = self._down[self.rank].tolist()
        low, high = numbers[Down.LOW], numbers[Down.HIGH]
        if is_hurried:
            is_range = prepared.indices is None and prepared.order is None and numbers[Down.STEP] == 1
            if not is_range or not all(base is None or backend.is_pinned(base) for base in prepared.bases):
                return
        try:
            with backend.beside() as event:
                arrays = self._bring(prepared, numbers, low, high)
        except MemoryError:  # no room for the inputs of two calls: this one brings its own when it runs
            return
        self._ahead = Ahead(prepared, int(self._down[0, Down.CALL]), arrays, event)

    def _rows(
        self, prepared: PreparedPlan, item: Input, base: np.ndarray, numbers: list[int], low: int, high: int
    ) -> Any:
        """Return the rows ``low`` to ``high`` of the selection, as a view where they are a range."""
        indices = prepared.order if item.is_minibatch else prepared.indices
        if indices is not None:
            return self.backend.take_rows(base, indices[low:high])
        return self.backend.from_host(self._row_range(item, base, numbers, low, high))

    @staticmethod
    def _row_range(item: Input, base: np.ndarray, numbers: Sequence[int], low: int, high: int) -> np.ndarray:
        """Return the rows of a range as a view."""
        start, step = (0, 1) if item.is_minibatch else (numbers[Down.START], numbers[Down.STEP])
        first = start + low * step
        if step == 1:
            return base[first : first + high - low]
        stop: int | None = first + (high - low) * step
        if stop is not None and stop < 0:  # a negative step that ends on row 0
            stop = None
        return base[first:stop:step] if high > low else base[:0]

    # -- what the function keeps of its inputs, and writes into them --------------------------------------------------

    def _lent_rows(self, prepared: PreparedPlan, low: int, high: int) -> RowsOf:
        """Return what tells which rows of an input the function got when it was called for ``low`` to ``high``."""
        numbers = self._down[self.rank].tolist()

        def rows(item: Input, base: np.ndarray) -> np.ndarray | None:
            indices = prepared.order if item.is_minibatch else prepared.indices
            if self.backend.is_device or indices is not None:
                return None
            return self._row_range(item, base, numbers, low, high)

        return rows

    def let_go(self) -> None:
        """Hold the outputs of the last call no longer, or as copies: they may be views of its inputs."""
        if self.is_waiting or not self._is_published:
            self.detach()
        else:
            self.forget()

    def take_back(self, prepared: PreparedPlan, low: int, high: int) -> None:
        """Drop what the function has written into its inputs, if they are tensors, when it got these rows."""
        for address, nbytes in prepared.loans.written(self._lent_rows(prepared, low, high)):
            self.let_go()
            give_back(address, nbytes)

    def settle_inputs(self, prepared: PreparedPlan) -> bool:
        """When a function has returned, see to what it keeps of its inputs and has written into them.

        Return whether it keeps plain arrays. They have their own memory now, and the segment must be mapped anew.
        """
        low, high = self._down[self.rank, Down.LOW : Down.HIGH + 1].tolist()
        loans = prepared.loans
        if loans.is_kept():
            self.let_go()
            if loans.is_kept():
                self.backend.forget_segment(loans.staging)
                loans.make_own(self._lent_rows(prepared, low, high))
                return True
        self.take_back(prepared, low, high)
        return False

    def _run_slices(
        self,
        prepared: PreparedPlan,
        numbers: list[int],
        bounds: list[tuple[int, int]],
        objects: Sequence[Any],
        variables: VariableStore,
    ) -> Any:
        function = prepared.function
        accumulators: list[Accumulator] = []
        structure: Any = None
        ops: list[Op] = []
        for start, stop in bounds:
            result = self._call(prepared, numbers, start, stop, objects, variables)
            values, got_structure = flatten(result)
            if structure is None:
                structure = got_structure
                skeleton = skeleton_of(structure, len(values))
                ops = match_ops(function.outputs, skeleton, len(values), repr(function.name))
                accumulators = [
                    Accumulator(op, f"output {k} of {function.name!r}", self.backend.xp) for k, op in enumerate(ops)
                ]
            elif got_structure != structure:
                raise ValueError(
                    f"cannot accumulate the outputs of {function.name!r} over slices: got structure {got_structure}, "
                    f"expected {structure} as in the first slice."
                )
            for position, (accumulator, value) in enumerate(zip(accumulators, values)):
                value = self._snapshot(
                    self._array_or_object(value, ops[position], position, function), position, function
                )
                if callable(ops[position]):
                    value = self._as_object(value)
                accumulator.add(value, stop - start)
            if function.to_framework is not None:  # the next slice sees the inputs as they were
                self.take_back(prepared, start, stop)
        totals = [
            _Object([self._as_object(part) for part in a.result()]) if op is None else a.result()
            for a, op in zip(accumulators, ops)
        ]
        return unflatten(structure, totals)

    def _snapshot(self, value: Any, position: int, function: LoadedFunction) -> Any:
        """Return an object as it is now: the function may change it in the next slice. Arrays are copied elsewhere."""
        if isinstance(value, (np.ndarray, np.generic, self.backend.xp.ndarray, *_IMMUTABLE_TYPES)):
            return value
        from synk._worker.pickling import dumps

        try:  # it will be pickled in any case
            if isinstance(value, _Object):
                return _Object(pickle.loads(dumps(value.value)))
            return pickle.loads(dumps(value))
        except Exception as error:
            raise SerializationError(
                f"cannot keep output {position} of {function.name!r} from one slice to the next: "
                f"{type(error).__name__}: {error}. Return arrays, numbers or picklable objects, or pass num_slices=1."
            ) from error

    def _as_object(self, value: Any) -> Any:
        """Return a value as it can travel in a pickle: the master must not touch a device."""
        if isinstance(value, _Object):
            return value.value
        if not isinstance(value, self.backend.xp.ndarray):
            return value
        array = self.backend.fetch(value)
        return array if array.ndim else array[()]

    # -- outputs ------------------------------------------------------------------------------------------------------

    def publish(self, prepared: PreparedPlan, result: Any, variables: VariableStore) -> tuple[Status, Any]:
        """Bring the outputs into the rank's slot, and new values of variables into their second buffers; return the
        status and the reply's body (None: nothing new).

        The body is ``(layout or None, objects)``: the layout where it differs from that of the plan's last call, and
        the outputs that are no arrays.
        """
        slots = prepared.slots
        if slots is not None and not variables.assigned and slots.fill(result):
            self.output_nbytes = slots.nbytes
            return Status.DONE, None
        function = prepared.function
        subset = prepared.plan.output_subset
        values, structure = flatten(result)
        if prepared.layout is None or structure != prepared.structure:
            skeleton = skeleton_of(structure, len(values))
            prepared.ops = match_ops(function.outputs, skeleton, len(values), repr(function.name))
            prepared.structure = structure
            prepared.layout = None
        else:
            skeleton = prepared.layout.skeleton
        outputs: list[Any] = []
        leaves: list[Leaf] = []
        objects: list[Any] = []
        wanted = wanted_leaves(skeleton, subset, function.name)
        for position, (value, op) in enumerate(zip(values, prepared.ops)):
            if wanted is not None and position not in wanted:
                value = None  # neither reduced nor sent
                outputs.append(None)
                leaves.append(Leaf((), None))
                continue
            array = self._array_or_object(value, op, position, function)
            if isinstance(array, np.ndarray) or hasattr(array, "__cuda_array_interface__"):
                outputs.append(array)
                leaves.append(Leaf(tuple(array.shape), array.dtype))
            else:
                outputs.append(None)
                leaves.append(Leaf((), None))
                objects.append(array.value if isinstance(array, _Object) else array)
        layout = prepared.layout
        self.output_nbytes = sum(leaf.nbytes for leaf in leaves)
        assigned = variables.assignments() if variables.assigned else ()
        is_new = layout is None or layout.leaves != tuple(leaves) or layout.assigned != assigned
        if is_new:
            layout = prepared.layout = Layout(skeleton, tuple(leaves), assigned)
            prepared.slot_key = None
        self.held_plan, self._outputs, self._result = prepared, outputs, result
        self.is_waiting = any(leaf.nbytes >= LARGE_NBYTES for leaf in leaves)
        status = self._fill_slot(prepared)
        if assigned and not variables.store():
            status = Status.UNPUBLISHED
        self._is_published = status == Status.DONE
        self.look_ahead(False)
        self.backend.synchronize()
        is_complete = status == Status.DONE and not assigned and not objects and subset is None
        prepared.slots = self._slots(prepared, result, values) if is_complete else None
        return status, (layout if is_new else None, objects) if is_new or objects else None

    def _slots(self, prepared: PreparedPlan, result: Any, values: Sequence[Any]) -> OutputSlots | None:
        """Return where the outputs of the next call go if they look like these, where it can be told so easily."""
        is_flat = type(result) is tuple or (len(values) == 1 and values[0] is result)
        is_flat = is_flat and len(values) == len(result if type(result) is tuple else values)
        is_plain = all(type(value) in _PLAIN_TYPES or isinstance(value, np.generic) for value in values)
        is_small = all(
            view is not _NO_VIEW and view.nbytes < LARGE_NBYTES and view.dtype.kind != "V"
            for view in prepared.slot_views
        )
        is_first = "first" not in prepared.ops or self.rank == self.participants[0]
        if not (is_flat and is_plain and is_small and is_first) or self.backend.name != "numpy":
            return None
        return OutputSlots(result, values, prepared.slot_views)

    def _array_or_object(self, value: Any, op: Op, position: int, function: LoadedFunction) -> Any:
        """Return an output as an array of the backend where it is one, checked against its op."""
        if isinstance(value, _Object):
            return value
        if function.from_framework is not None:
            value = function.from_framework(value)
        is_number = isinstance(value, (int, float, complex)) and not isinstance(value, np.generic)
        if is_number and not is_reducible(op) and op != "gather":
            return value  # nothing is computed with it: a Python number stays one, of whatever class
        array = self.backend.as_output(value)
        what = f"output {position} of {function.name!r}"
        if array is None:
            if op is None or op == "first" or callable(op):
                return _Object(value) if isinstance(value, np.ndarray) else value
            raise TypeError(
                f"cannot apply op {op!r} to {what}: got {_kind_of(value)}, expected an array of numbers or a number. "
                "Use op None to get one object per rank."
            )
        if is_reducible(op):
            check_op(str(op), array.dtype, what)
        elif op == "gather" and array.ndim == 0:
            raise ValueError(f"cannot gather {what}: got a single number, expected an array with rows on axis 0.")
        return array

    def _fill_slot(self, prepared: PreparedPlan) -> Status:
        layout = prepared.layout
        assert layout is not None
        participants = self.participants
        has_group = self.has_group
        offsets, total = slot_offsets(layout.leaves, prepared.ops, len(participants), has_group)
        if total > self.slot_nbytes or self.exchange is None:
            return Status.UNPUBLISHED
        key = (self.exchange.id, len(participants), has_group)
        if prepared.slot_key != key:
            base = self.rank * self.slot_nbytes
            prepared.slot_views = [
                self.exchange.view(base + offset, leaf.shape, leaf.dtype)
                if leaf.dtype is not None and is_in_slot(leaf, op, len(participants), has_group)
                else _NO_VIEW
                for offset, leaf, op in zip(offsets, layout.leaves, prepared.ops)
            ]
            prepared.slot_key = key
        self._parts = {}
        for position, (array, view, op) in enumerate(zip(self._outputs, prepared.slot_views, prepared.ops)):
            if array is None or (op == "first" and self.rank != participants[0]):
                continue
            if array.nbytes < LARGE_NBYTES:
                self.backend.to_host(array, view)
            elif is_reducible(op):
                self._parts[position] = self._publish_chunks(array, view, participants)
            else:
                self._parts[position] = array
        return Status.DONE

    @property
    def participants(self) -> list[int]:
        """The ranks that run the call under way, ascending."""
        return np.flatnonzero(self._down[:, Down.PARTICIPATES]).tolist()

    def _publish_chunks(self, array: Any, view: np.ndarray, participants: list[int]) -> Any:
        """Copy the chunks that other ranks reduce; return the elements that this rank reduces itself."""
        if view is _NO_VIEW and len(participants) > 1:  # the devices reduce it
            array = self.backend.as_array(array, "a large output")
        flat = self.backend.flat(array)
        if len(participants) == 1 or view is _NO_VIEW:
            return flat
        flat_view = view.reshape(-1)
        bounds = dict(zip(participants, chunk_bounds(flat.size, flat.itemsize, len(participants))))
        own_start, own_stop = bounds.pop(self.rank)
        for start, stop in bounds.values():
            self.backend.to_host(flat[start:stop], flat_view[start:stop])
        return flat[own_start:own_stop]

    def detach(self) -> None:
        """Copy what is kept of the outputs of the last call and still belongs to the user's code, which runs next.

        A function may return a buffer that it fills again in the next call, or state that it changes in place. In a
        repeated call nothing is kept as long: its outputs are published and assembled before it ends.
        """
        if self.held_plan is None or self._lost is not None:
            return
        self._result = None  # or its arrays would seem to be in use
        if self._is_published:
            self._outputs = [None] * len(self._outputs)
        else:
            self._parts = {}
        try:
            for position in self._parts:
                self._parts[position] = self._own(self._parts, position)
            for position, array in enumerate(self._outputs):
                if array is not None:
                    self._outputs[position] = self._own(self._outputs, position)
        except Exception as error:  # no room: whoever asks for them is told
            self._lost = error
            self._parts, self._outputs = {}, []

    def _own(self, holder: Any, position: int) -> Any:
        """Return the array at ``holder[position]`` as one that nobody else can change."""
        if self.backend.is_device or not is_only_reference(holder, position):
            xp = np if isinstance(holder[position], np.ndarray) else self.backend.xp
            return xp.array(holder[position])
        return holder[position]

    def republish(self, variables: VariableStore) -> Status:
        """Publish the outputs of the last call again, into new slots and buffers."""
        assert self.held_plan is not None
        if self._lost is not None:
            raise self._lost
        if variables.assigned and not variables.store():
            raise SharedMemoryError("cannot store the new value of a shared variable: its buffer has no room for it.")
        status = self._fill_slot(self.held_plan)
        self._is_published = status == Status.DONE
        self.backend.synchronize()
        return status

    def assemble(self, moves: Sequence[Move], result: Segment) -> None:
        """Bring this rank's part of the large outputs into the result segment."""
        if not self.is_waiting:  # its outputs are small, only those of others are large
            return
        if self._lost is not None:
            raise self._lost
        prepared = self.held_plan
        assert prepared is not None and self.exchange is not None and prepared.layout is not None
        participants = self.participants
        rows = [int(self._down[rank, Down.ROWS]) for rank in participants]
        offsets, _ = slot_offsets(prepared.layout.leaves, prepared.ops, len(participants), self.has_group)
        self._reduce_on_devices([move for move in moves if move.kind == "device"], rows, result)
        for move in moves:
            leaf = prepared.layout.leaves[move.leaf]
            if move.kind == "copy":
                self.backend.to_host(self._parts[move.leaf], result.view(move.offset, leaf.shape, leaf.dtype))
                continue
            if move.kind == "device":
                continue
            start, stop = move.start, move.stop
            count = stop - start
            out = result.view(move.offset + start * leaf.dtype.itemsize, (count,), leaf.dtype)
            if len(participants) == 1:
                self.backend.to_host(self._parts[move.leaf], out)
                continue
            values = []
            for rank in participants:
                if rank == self.rank:
                    values.append(self.backend.fetch(self._parts[move.leaf]))
                else:
                    at = rank * self.slot_nbytes + offsets[move.leaf] + start * leaf.dtype.itemsize
                    values.append(self.exchange.view(at, (count,), leaf.dtype))
            with np.errstate(all="ignore"):
                reduce_into(move.op, values, rows if move.op == "avg" else None, out)
        self.backend.synchronize()
        self.is_waiting = False

    @property
    def has_group(self) -> bool:
        """Whether the call under way reduces its large outputs by NCCL."""
        return bool(self._down[self.rank, Down.GROUP])

    def _reduce_on_devices(self, moves: Sequence[Move], rows: list[int], result: Segment) -> None:
        """Reduce large outputs by NCCL, all in one launch, and bring this rank's block of each to the result."""
        if not moves:
            return
        assert self.collectives is not None and self.held_plan is not None and self.held_plan.layout is not None
        share = rows[self.rank] / sum(rows) if len(set(rows)) > 1 else None
        leaves = self.held_plan.layout.leaves
        with self.collectives.guard():
            items = [(self._parts[move.leaf], move.op, share if move.op == "avg" else None) for move in moves]
            blocks = self.collectives.reduce_blocks(items)
        for move, block in zip(moves, blocks):
            dtype = leaves[move.leaf].dtype
            out = result.view(move.offset + move.start * dtype.itemsize, (move.stop - move.start,), dtype)
            self.backend.to_host(block[: out.size], out)

    def forget(self) -> None:
        """Drop the outputs of the last call."""
        self.is_waiting = False
        self._ahead = None
        self.num_ahead = 0
        self.held_plan = self._result = self._lost = None
        self._outputs = []
        self._parts = {}


def _do_nothing(is_hurried: bool) -> None:
    pass


class _Object:
    """An output that is one object, whatever it holds: an array of objects, or the values over a rank's slices."""

    def __init__(self, value: Any) -> None:
        self.value = value


_NO_VIEW = np.empty(0, np.uint8)


def is_only_reference(holder: Any, position: int) -> bool:
    """Whether nobody but ``holder[position]``, an array of NumPy, refers to its memory."""
    return _references(holder, position) in _ONLY_REFERENCES


def _references(holder: Any, position: int) -> tuple[bool, bool, int, int]:
    """Return whose the memory of an array is, whether it is a view, and how often it and what it views are used."""
    array = holder[position]
    owner = array if array.base is None else array.base
    is_own = type(owner) is np.ndarray and owner.flags.owndata and not weakref.getweakrefcount(owner)
    return is_own, array is owner, sys.getrefcount(array), sys.getrefcount(owner)


# Counted, for it depends on the interpreter what its own variables add.
_ONLY_REFERENCES = (_references([np.empty(1)], 0), _references([np.empty(1)[:]], 0))


def _kind_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype}, which holds Python objects"
    return "an int of more than 64 bits" if isinstance(value, int) else type(value).__name__
