"""Where outputs go: into the slot that this rank has made, to where they lay the last time if they look like that."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from synk._pure.nested import PLAIN_TYPES
from synk._pure.ops import REDUCTIONS
from synk._pure.output_ops import match_ops, wanted_leaves
from synk._pure.ranges import places_of
from synk._pure.trees import flatten, key_orders, output_names, skeleton_of
from synk._pure.words import text_of
from synk._rank.failures import dumps
from synk._rank.functions import LoadedFunction
from synk._rank.values import take_whole, taken
from synk._wire import orders as wire
from synk._wire.memory import Segment
from synk._wire.messages import LARGE_NBYTES, Layout, Leaf, News, Share
from synk.errors import SerializationError

Published = tuple[int, Any, list[Segment], Callable[[], None] | None]
"""The status of a reply, its body, the memory that goes with it, and a step that notes that it was told."""


FIXED_TYPES = (float, complex, bool)
"""Python's numbers whose dtype does not depend on their value."""


class RankOutputs:
    """The outputs of the calls of one plan on one rank.

    Attributes
    ----------
    destination : RankDestination or None
        Where the large outputs of the current call go.
    """

    def __init__(self, function: LoadedFunction, lane: int, subset: tuple[Any, ...] | None) -> None:
        self._function, self._lane, self._subset = function, lane, subset
        self._layout: Layout | None = None
        self._told: Layout | None = None  # what the program knows
        self._memory: Segment | None = None
        self._structure: Any = None
        self._orders: Any = None
        self._skeleton: Any = None
        self._ops: list[Any] = []
        self._names: list[str] = []
        self._wanted: set[int] | None = None
        self._views: list[Any] = []
        self._slots: OutputSlots | None = None
        self.destination: RankDestination | None = None
        self._kept: frozenset[int] = frozenset()  # the outputs that this rank keeps until they are asked for

    def publish(self, rank: Any, result: Any) -> Published:
        """Put the outputs into the slot, or large ones where they are to go.

        Return the reply: nothing new if they look like the last ones.
        """
        slots, layout, destination = self._slots, self._layout, self.destination
        status = wire.DONE
        is_told = slots is not None and self._memory is rank.told_slots.get(self._lane) and self._told is layout
        if is_told and destination is not None:
            slots, status = destination.slots_of(self), wire.PLACED
        if not is_told or not slots.fill(result):  # type: ignore[union-attr]
            return self._publish(rank, result)
        if not rank.variables.assigned and not layout.assigned:  # type: ignore[union-attr]
            return status, None, [], None
        assigned = rank.variables.publish()
        if assigned[0] == layout.assigned and not assigned[1]:  # type: ignore[union-attr]
            return status, None, [], assigned[3]
        return self._publish(rank, result, assigned)

    def _publish(self, rank: Any, result: Any, written: Any = None) -> Published:
        function, backend = self._function, rank.backend
        self._slots = None
        if function.whole is not None:
            result = take_whole(result, function.whole)
        values = self._match(result)
        before = None if self._layout is None else self._layout.leaves
        outputs, leaves, objects = taken(backend, function, values, self._ops, self._names, self._wanted, before)
        assigned, places, made, note_assigned = written or rank.variables.publish()
        slot = self._lay_out(rank, leaves, assigned)
        self._store(rank, outputs)
        packed = self._pickled(rank, objects)
        layout = self._layout
        is_complete = not objects and self._subset is None
        self._slots = self._slots_of(result, values) if is_complete else None

        def note() -> None:
            self._told = layout
            rank.told_slots[self._lane] = self._memory
            note_assigned()

        if layout is self._told and not packed and slot is None and not places:
            return wire.DONE, None, [], note
        news = News(None if layout is self._told else layout, packed, 0 if slot is None else slot.nbytes, places)
        return wire.TOLD, tuple(news), [each for each in (slot, *made) if each is not None], note

    def _store(self, rank: Any, outputs: list[Any]) -> None:
        """Write the outputs into the slot."""
        for value, view in zip(outputs, self._views):
            if type(value) is bytes:
                view.data[: len(value)] = value
            elif value is not None and view is not None:
                rank.backend.to_host(value, view)

    def _match(self, result: Any) -> list[Any]:
        """Return the leaves of a result, and find the op of each if their structure is another one."""
        values, structure = flatten(result)
        orders = key_orders(result)
        if self._layout is None or structure != self._structure or orders != self._orders:
            name = self._function.name
            self._layout = None
            self._skeleton = skeleton_of(structure, len(values))
            self._ops = match_ops(self._function.ops, self._skeleton, len(values), repr(name))
            self._names = output_names(self._skeleton)
            self._wanted = wanted_leaves(self._skeleton, self._subset, name)
            self._structure, self._orders = structure, orders
        return values

    def _lay_out(self, rank: Any, leaves: tuple[Leaf, ...], assigned: Any) -> Segment | None:
        """Give each output a place. Return the slot if the program must be told of it."""
        layout, memory = self._layout, rank.slots.get(self._lane)
        is_alike = layout is not None and layout.leaves == leaves
        if not (is_alike and layout.assigned == assigned and self._memory is memory and memory is not None):  # type: ignore[union-attr]
            self._lay_out_anew(rank, leaves, assigned, memory)
        return None if rank.told_slots.get(self._lane) is self._memory else self._memory

    def _lay_out_anew(self, rank: Any, leaves: tuple[Leaf, ...], assigned: Any, memory: Segment | None) -> None:
        layout = self._layout
        kept = self._kept
        places, end = places_of([0 if k in kept else leaf.nbytes for k, leaf in enumerate(leaves)])
        places = [-1 if k in kept else at for k, at in enumerate(places)]
        if memory is None or memory.nbytes < end:
            room = max(2 * end if end < LARGE_NBYTES else end, 1 << 16)
            if memory is not None:
                rank.backend.forget_segment(memory)
            memory = rank.slots[self._lane] = Segment.create(room, is_worker_writable=True)
            rank.backend.note_segment(memory)
        skeleton = dumps(self._skeleton) if layout is None else layout.skeleton
        self._layout = Layout(skeleton, leaves, tuple(places), assigned)
        self._views = [None if at < 0 else leaf.view(memory, at) for leaf, at in zip(leaves, places)]
        self._memory = memory

    def _pickled(self, rank: Any, objects: list[tuple[str, Any]]) -> list[tuple[str, bytes]]:
        """Pickle outputs, each on its own, so that the one that cannot be pickled can be named."""
        packed = []
        what = "the structure of its result"
        try:
            for what, item in objects:
                packed.append((what, item if type(item) is bytes else dumps(item)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # __reduce__ of a result is the user's code
            raise SerializationError(
                f"cannot send the result of {self._function.name!r} from rank {rank.rank} ({what}): "
                f"{text_of(error)}. "
                "Return arrays, numbers or picklable objects (a generator: return list(...))."
            ) from error
        return packed

    def _slots_of(self, result: Any, values: list[Any]) -> OutputSlots | None:
        """Return where the next call's outputs go if they look like these. None unless a quick check can tell."""
        layout, function = self._layout, self._function
        assert layout is not None
        for value, leaf in zip(values, layout.leaves):
            if leaf.dtype is None:
                is_alike = type(value) in PLAIN_TYPES
            else:
                is_alike = leaf.dtype.kind != "V" and (is_plain_output(value) or function.is_tensor(value))
            if not is_alike:
                return None
        return OutputSlots(result, values, self._skeleton, layout.leaves, self._views, self._structure, function)


class OutputSlots:
    """Where the outputs go as long as they have the form of the last call's.

    It exists only if all outputs are small arrays, tensors, numbers or texts, or tuples, lists and dicts of these. That
    is what most functions return.
    """

    def __init__(
        self,
        result: Any,
        values: Sequence[Any],
        skeleton: Any,
        leaves: Sequence[Leaf],
        views: Sequence[np.ndarray],
        structure: Any,
        function: LoadedFunction,
    ) -> None:
        self._kind = type(result)
        is_dict = type(skeleton) is dict and set(map(type, skeleton)) == {str}
        parts = list(skeleton.values()) if is_dict else skeleton if type(skeleton) is tuple else [skeleton]
        # None for a single value, a tuple of values, or a dict of values: then the slots are in the order of the dict.
        is_flat = all(type(part) is int for part in parts)
        self._structure = None if is_flat else structure
        self._orders = None if is_flat else key_orders(result)
        self._keys: tuple[str, ...] = ()
        if is_flat and is_dict:
            self._keys = tuple(skeleton)
            values, views = [values[k] for k in parts], [views[k] for k in parts]
            leaves = tuple(leaves[k] for k in parts)
        self._slots = [
            (type(value), _conversion(value, leaf, function), view.dtype, view.shape, view)
            for value, leaf, view in zip(values, leaves, views)
        ]

    def moved(self, views: dict[int, Any]) -> OutputSlots:
        """Return slots for the same outputs, of which some lie elsewhere: by the ``id()`` of the slot's view."""
        other = copy.copy(self)
        other._slots = [(*slot[:-1], views.get(id(slot[-1]), slot[-1])) for slot in self._slots]
        return other

    def fill(self, result: Any) -> bool:
        """Write ``result`` into the slots. Return False if its form differs.

        The slots may be torn then: partly overwritten. Nobody reads them, because the program has not been told.
        """
        if type(result) is not self._kind:
            return False
        values: Collection[Any] = result if self._kind is tuple else (result,)
        if self._keys:
            if tuple(result) != self._keys or set(map(type, result)) != {str}:
                return False
            values = result.values()
        elif self._structure is not None:
            values, structure = flatten(result)
            if structure != self._structure or key_orders(result) != self._orders:
                return False
        if len(values) != len(self._slots):
            return False
        for value, (kind, as_array, dtype, shape, view) in zip(values, self._slots):
            if type(value) is not kind or (as_array is put_pickle and not put_pickle(value, view)):
                return False
            if as_array is put_pickle:
                continue
            if as_array is not None:
                value = as_array(value)
            if kind not in FIXED_TYPES and (value.dtype != dtype or value.shape != shape):
                return False
            view[...] = value
        return True


def _conversion(value: Any, leaf: Leaf, function: LoadedFunction) -> Callable[..., Any] | None:
    """Return what makes the array that lies in the slot of an output like ``value``; None if it is that already."""
    if leaf.dtype is None:
        return put_pickle
    return None if is_plain_output(value) else function.from_framework


def put_pickle(value: Any, view: np.ndarray) -> bool:
    """Write the pickle of a text, a number or None to its place in the slot. Return False if that cannot be."""
    if type(value) not in PLAIN_TYPES:
        return False
    pickled = pickle.dumps(value, protocol=5)
    if len(pickled) > view.size:
        return False
    view.data[: len(pickled)] = pickled
    return True


def is_plain_output(value: Any) -> bool:
    """Whether an output is a NumPy array or a number whose dtype does not depend on its value."""
    return type(value) is np.ndarray or type(value) in FIXED_TYPES or isinstance(value, np.generic)


class RankDestination:
    """Where the large outputs of a plan's calls go: into the result, and not into the slot."""

    is_once = False

    def __init__(self, rank: Any, payload: tuple[int, int, list[tuple[int, int]]]) -> None:
        self._plan, result, self._places = payload
        self._memory: Segment = rank.held[result]
        self._of: OutputSlots | None = None
        self._moved: Any = None

    def slots_of(self, outputs: RankOutputs) -> OutputSlots:
        """Return the places for outputs like the last ones of a plan."""
        if self._of is not outputs._slots:
            assert outputs._slots is not None and outputs._layout is not None
            leaves: Any = outputs._layout.leaves
            views = outputs._views
            self._moved = outputs._slots.moved(
                {id(views[k]): leaves[k].view(self._memory, at) for k, at in self._places}
            )
            self._of = outputs._slots
        return self._moved

    def bring_back(self, rank: Any) -> None:
        """Copy the outputs of the last call into the slot, as other ranks have theirs there."""
        outputs = rank.held[self._plan].outputs
        for k, at in self._places:
            outputs._views[k][...] = outputs._layout.leaves[k].view(self._memory, at)

    def answer(self, rank: Any, number: int, in_place: int, numbers: tuple[int, ...]) -> Published:
        plan = rank.held[self._plan]
        plan.outputs.destination = self
        try:
            published: Published = plan.answer(rank, number, in_place, numbers)
        finally:
            plan.outputs.destination = None
        return published

    def leave(self, rank: Any) -> None:
        rank.held[self._plan].leave(rank)


class RankReduction:
    """This rank's part in large outputs: from the slots of all ranks into the result."""

    is_once = False

    def __init__(self, rank: Any, payload: tuple[int, list[Share]]) -> None:
        result, shares = payload
        self._steps = []
        for share in shares:
            op, dtype, length, sources, at, rows = Share(*share)
            parts = [rank.held[number].view(place, (length,), dtype) for number, place in sources]
            self._steps.append((op, parts, rows, rank.held[result].view(at, (length,), dtype)))

    def answer(self, rank: Any, number: int, in_place: int, rows: tuple[int, ...]) -> Published:
        rank.failpoint("reduce.before")
        with np.errstate(all="ignore"):
            for op, parts, weights, out in self._steps:
                if op:
                    REDUCTIONS[op].reduce_into(parts, weights, out)
                else:
                    out[...] = parts[0]
        rank.failpoint("reduce.after")
        return wire.DONE, None, [], None

    def leave(self, rank: Any) -> None:
        pass
