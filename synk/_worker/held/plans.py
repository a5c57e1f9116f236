"""A function and a plan of calls as a rank holds them: views of shared memory, ready to be cut into rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._pure.ops import Op
from synk._pure.output_ops import each_op, ops_of
from synk._pure.tensors import is_tensor
from synk._pure.trees import flatten
from synk._wire.memory import Segment
from synk._wire.messages import IN_SEGMENTS, Input, Layout, Move, Plan
from synk._worker.held.loans import Loans
from synk._worker.held.residents import Changing, Reading
from synk.backends import Backend
from synk.errors import SerializationError

FIXED_TYPES = (float, complex, bool)
"""Python's numbers whose dtype does not depend on their value."""


class LoadedFunction:
    """A function as a worker holds it."""

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        outputs: Any,
        framework: str | None,
        updates: Any,
        changes: Any,
        modules: Any,
        backend: Backend,
    ) -> None:
        self.fn = Changing(fn, changes) if changes else Reading(fn, modules, name) if modules else fn
        self.name = name
        self.ops = ops_of(outputs, repr(name))
        # Also on trial, where no op combines anything.
        self.lists = self.ops if any(op.concatenates for op in each_op(self.ops)) else None
        self.updates = updates
        self.to_framework: Callable[[Any], Any] | None = None
        self.from_framework: Callable[[Any], Any] | None = None
        self.is_tensor: Callable[[Any], bool] = is_tensor if framework == "torch" else _is_nothing
        if framework is not None:
            self.to_framework, self.from_framework = backend.converters(framework)


class OutputSlots:
    """Where the outputs go, as long as they look like those of the call before.

    Only where all are small arrays, tensors or numbers, which is what most functions return.
    """

    def __init__(
        self, result: Any, values: Sequence[Any], views: Sequence[np.ndarray], structure: Any, function: LoadedFunction
    ) -> None:
        self._kind = type(result)
        # None: a value, or a tuple of them.
        self._structure = None if structure == "leaf" or structure == (tuple, len(values)) else structure
        self._slots = [
            (type(value), None if is_plain_output(value) else function.from_framework, view.dtype, view.shape, view)
            for value, view in zip(values, views)
        ]
        self.nbytes = sum(view.nbytes for view in views)

    def fill(self, result: Any) -> bool:
        """Write ``result`` into the slots; return False where it looks different, nothing having been told."""
        if type(result) is not self._kind:
            return False
        values: Sequence[Any] = result if self._kind is tuple else (result,)
        if self._structure is not None:
            values, structure = flatten(result)
            if structure != self._structure:
                return False
        if len(values) != len(self._slots):
            return False
        for value, (kind, as_array, dtype, shape, view) in zip(values, self._slots):
            if type(value) is not kind:
                return False
            if as_array is not None:
                value = as_array(value)
            if kind not in FIXED_TYPES and (value.dtype != dtype or value.shape != shape):
                return False
            view[...] = value
        return True


def is_plain_output(value: Any) -> bool:
    """Whether an output is an array or a number as NumPy has them, whose dtype does not depend on its value."""
    return type(value) is np.ndarray or type(value) in FIXED_TYPES or isinstance(value, np.generic)


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
        self.nests: Sequence[tuple[int, int, Any]] = _load_nests(plan.nests, function.name)
        inner = {first + k for first, num_leaves, _ in self.nests for k in range(1, num_leaves)}
        # Under which name the function gets each argument; empty for by position.
        self.keywords = [
            item.name for k, item in enumerate(plan.inputs) if k not in inner and item.kind != "closed over"
        ]

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

    def indices_for(self, item: Input) -> np.ndarray | None:
        """Return which rows of a scattered array the ranks get; None where they are a range."""
        return self.order if item.is_minibatch else self.indices

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


def _is_nothing(value: Any) -> bool:
    return False


def _load_nests(data: bytes, name: str) -> Sequence[tuple[int, int, Any]]:
    """Unpickle the structure of nested arguments: the user's classes are built here."""
    try:
        return pickle.loads(data) if data else ()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise SerializationError(
            f"cannot load the structure of the arguments of {name!r} on the workers: {type(error).__name__}: {error}. "
            "Keys and classes of nested arguments must be importable there, or defined in the script."
        ) from error
