"""A call on its rank: views of the inputs, the user's function slice by slice, outputs into the slot."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from synk._pure.exact import as_recarray
from synk._pure.nested import build
from synk._pure.ranges import taken_from_place
from synk._pure.shards import shard_bounds
from synk._pure.tables import taken_rows, unpacked
from synk._pure.tensors import as_dtype
from synk._pure.trees import flatten, unflatten
from synk._pure.words import text_of
from synk._rank import pages
from synk._rank.outputs import Published, RankOutputs
from synk._rank.slices import run_slices
from synk._wire import orders as wire
from synk._wire.file_maps import map_again
from synk._wire.memory import Segment
from synk._wire.messages import Input, Look
from synk.errors import SerializationError


class Part(NamedTuple):
    """The rows of one slice: positions in the selection."""

    low: int
    high: int


class RankPlan:
    """A plan as its rank has it.

    Attributes
    ----------
    function : LoadedFunction
    bases : list of (ndarray or None)
        The whole inputs, read-only.
    """

    is_once = False
    outputs_type: type[RankOutputs] = RankOutputs

    def __init__(self, rank: Any, look: Look) -> None:
        self.look = look = Look(*look)
        self.function = rank.functions[look.function]
        self._lane = look.lane
        self._staging: Segment | None = rank.held[look.staging] if look.staging else None
        self.nests: Sequence[tuple[int, int, Any]] = load_nests(look.nests, self.function.name)
        inner = {first + k for first, num_leaves, _ in self.nests for k in range(1, num_leaves)}
        inputs = list(enumerate(look.inputs))
        # The names of the arguments that the function gets by keyword, which come last.
        self._keywords = [each.name for k, each in inputs if k not in inner and each.name]
        self._kinds = [each.kind for each in look.inputs]
        self._takes_views = not (
            rank.backend.is_device or self.function.to_framework
            or any(kind not in ("picked", "whole") for kind in self._kinds)
        )  # fmt: skip
        self._is_simple = look.num_slices == 1 and not self.function.updates
        self._files = {k: as_recarray(map_again(*each.file)) for k, each in inputs if each.file is not None}
        self.outputs = self.outputs_type(self.function, look.lane, look.subset)
        self.bases: list[np.ndarray | None] = []
        self._root: np.ndarray | None = None
        self._watched: list[np.ndarray] = []
        self._num_references = 0
        self._object_stop = 0
        self.rows: tuple[int, ...] = ()
        self._in_place = 0

    # -- inputs -------------------------------------------------------------------------------------------------------

    def _look_at(self, rank: Any) -> None:
        """See that there are views of all inputs. They hold until a function keeps some of them (:meth:`leave`)."""
        staging = self._staging
        if self.bases and (staging is None or self._root is staging.buffer):
            return
        self._root = None if staging is None else staging.buffer
        self.bases, self._watched = [], [] if self._root is None else [self._root]
        for k, each in enumerate(self.look.inputs):
            if each.kind not in ("rows", "picked", "whole", "table"):
                self.bases.append(None)
                continue
            if each.file is not None:
                self.bases.append(self._files[k])
                continue
            if 0 in each.shape or each.dtype.itemsize == 0:  # no bytes, so no memory
                array = as_recarray(np.empty(each.shape, each.dtype))
                array.flags.writeable = False
                self.bases.append(array)
                continue
            if each.segment_id == self.look.staging:
                assert self._root is not None
                base = as_recarray(np.ndarray(each.shape, each.dtype, self._root, each.offset))
                if type(base) is not np.ndarray:  # views of it refer to it, and not to the root
                    self._watched.append(base)
            else:
                segment = rank.held[each.segment_id]
                base = as_recarray(segment.view(each.offset, each.shape, each.dtype))
            base.flags.writeable = False
            self.bases.append(base)
        if staging is not None:
            if self.look.indices_at >= 0:
                self._indices = staging.view(self.look.indices_at, (self.look.num_indices,), np.dtype(np.int64))
            if self.look.local_at >= 0:
                self._local = staging.view(self.look.local_at, (self.look.num_indices,), np.dtype(np.int64))

    def _load_objects(self, rank: Any, count: int) -> list[Any]:
        """Unpickle the broadcast objects of the call. This runs code of the user's classes."""
        try:
            assert self._root is not None
            data, *buffers = taken_from_place(self._root[self.look.object_at :], count)
            last = buffers[-1] if buffers else data
            self._object_stop = byte_bounds(last)[1] - byte_bounds(self._root)[0]
            for buffer in buffers:
                buffer.flags.writeable = False
            objects = pickle.loads(data.data, buffers=buffers)
            arrays = [rank.backend.from_objects(value) for value in objects]
            if self.function.to_framework is None:
                return arrays
            as_framework = rank.variables.as_framework
            return [in_framework(value, as_framework, rank.backend.xp) for value in arrays]
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            names = ", ".join(each.name or "an argument" for each in self.look.inputs if each.kind == "object")
            raise SerializationError(
                f"cannot load the broadcast inputs of {self.function.name!r} ({names}) on the workers: "
                f"{text_of(error)}. Their classes must be importable there, or defined in the script."
            ) from error

    def _arguments(
        self, rank: Any, objects: Sequence[Any], part: Part, numbers: tuple[int, ...]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return what the function gets for some rows."""
        low, high = part
        values: list[Any]
        if self._takes_views:
            # A new view for each input: if anything refers to one after the call, the function has kept it.
            values = [
                base[low:high] if kind == "picked" else base[...]  # type: ignore[index]
                for base, kind in zip(self.bases, self._kinds)
            ]
        else:
            values = [
                self._array(rank, k, part, numbers)
                if kind in ("picked", "whole", "rows")
                else self._other(rank, self.bases[k], kind, self.look.inputs[k], part, numbers, objects)
                for k, kind in enumerate(self._kinds)
            ]
        if self.nests:
            values = nested(values, self.nests)
        split = len(values) - len(self._keywords)
        return values[:split], dict(zip(self._keywords, values[split:]))

    def _array(self, rank: Any, k: int, part: Part, numbers: tuple[int, ...]) -> Any:
        """Return the rows of an array, or all of it, as the function gets them."""
        value = self._brought(rank, k, part, numbers)
        if self.function.to_framework is not None:
            value = self.function.to_framework(value)
            dtype = self.look.inputs[k].tensor_dtype
            value = as_dtype(value, dtype) if dtype else value
        return value

    def _brought(self, rank: Any, k: int, part: Part, numbers: tuple[int, ...]) -> Any:
        """Return the rows of an array, or all of it: a new view, for the function may set its shape."""
        base: Any = self.bases[k]
        (low, high), (_, _, start, step, *_) = part, numbers
        if self._kinds[k] == "whole":
            return base[...]
        if self._kinds[k] == "picked":
            return base[low:high]
        if self.look.indices_at >= 0:
            value = rank.backend.take_rows(base, self._indices[low:high])
            if self.function.to_framework is None and not rank.backend.is_device:
                value.flags.writeable = False
            return value
        stop = start + high * step
        return base[start + low * step : stop if stop >= 0 else None : step] if high > low else base[:0]

    def _other(
        self,
        rank: Any,
        base: Any,
        kind: str,
        each: Input,
        part: Part,
        numbers: tuple[int, ...],
        objects: Sequence[Any],
    ) -> Any:
        """Return an argument that is no array."""
        (low, high), (first, _, _, _, local_start, local_step) = part, numbers
        variables = rank.variables
        if kind == "object":
            return objects[each.offset]
        if kind == "table":
            own = unpacked(base[rank.rank])
            return taken_rows(own, slice(low - first, high - first)) if self.look.num_slices > 1 else own
        if kind == "resident":
            return rank.residents[each.segment_id].value
        if kind == "replica":
            return variables.whole_of(each.segment_id)
        if self.look.local_at >= 0:
            return variables.rows_of(each.segment_id, self._local, low, high, 0, 1)
        return variables.rows_of(each.segment_id, None, low - first, high - first, local_start, local_step)

    # -- the call -----------------------------------------------------------------------------------------------------

    def answer(self, rank: Any, number: int, in_place: int, numbers: tuple[int, ...]) -> Published:
        """Run the call and publish its outputs."""
        self._look_at(rank)
        self.rows, self._in_place = numbers, in_place
        low, high = numbers[:2]
        rank.begin_call(self)  # it lets go of the plan before, whose views of these inputs count no more
        self._num_references = sum(map(sys.getrefcount, self._watched))
        look = self.look
        if look.changes:
            rank.changes.begin(number, rank.residents, look.changes)
        rank.check_interrupt(number)
        objects = self._load_objects(rank, in_place) if in_place else ()
        rank.failpoint("call.before_function")
        rank.began_ns = rank.ended_ns = time.monotonic_ns()
        if self._is_simple:
            args, kwargs = self._arguments(rank, objects, Part(low, high), numbers)
            result = self._called(rank, args, kwargs)
            del args, kwargs
        else:
            result = self._run(rank, objects, numbers)
        rank.ended_ns = time.monotonic_ns()
        if look.changes:
            rank.changes.has_finished = True
            rank.hold_back(False)  # an interrupt may wait for this
        rank.end_function()
        return self.outputs.publish(rank, result)

    def _run(self, rank: Any, objects: Sequence[Any], numbers: tuple[int, ...]) -> Any:
        low, high = numbers[:2]
        look, function, variables = self.look, self.function, rank.variables

        def call(part: Any) -> Any:
            args, kwargs = self._arguments(rank, objects, part, numbers)
            result = self._called(rank, args, kwargs)
            del args, kwargs
            rank.end_if_copy()  # a copy runs no other slice
            return variables.take_updates(function, result, part.high - part.low) if function.updates else result

        if look.num_slices > 1 and not look.is_rowless:
            bounds = shard_bounds(high - low, look.num_slices)
            parts: Any = [Part(low + a, low + b) for a, b in bounds if b > a] or [Part(low, high)]
            result = run_slices(function, rank.backend, parts, call)
        else:
            result = call(Part(low, high))
        if function.updates:
            variables.finish_updates()
        return result

    def _called(self, rank: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self.function.fn(*args, **kwargs)

    def inputs_again(self, rank: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return what the function gets once more, with objects that are unpickled anew."""
        objects = self._load_objects(rank, self._in_place) if self._in_place else ()
        return self._arguments(rank, objects, Part(self.rows[0], self.rows[1]), self.rows)

    def leave(self, rank: Any) -> None:
        """Before the reply: if anything still refers to inputs that the next call may overwrite, leave them to it."""
        if not self._watched or sum(map(sys.getrefcount, self._watched)) == self._num_references:
            self._object_stop = 0
            return
        staging = self._staging
        assert staging is not None and self._root is not None
        start = byte_bounds(self._root)[0]
        low, high = self.rows[:2]
        rank.backend.forget_segment(staging)
        if not staging.is_private:
            pages.map_privately(start, staging.nbytes, staging.fd)
        for base, kind, each in zip(self.bases, self._kinds, self.look.inputs):
            if each.segment_id != self.look.staging or base is None or each.file is not None or not base.nbytes:
                continue
            used = base[low:high] if kind == "picked" else base[rank.rank] if kind == "table" else base
            first, stop = byte_bounds(used)
            if stop > first:
                pages.make_own(first, stop - first)
        if self._object_stop:
            pages.make_own(start + self.look.object_at, self._object_stop - self.look.object_at)
            self._object_stop = 0
        staging.map_again()
        rank.backend.note_segment(staging)
        self._root, self.bases, self._watched = None, [], []


class RankQuestion:
    """What answers a question of the program, once."""

    is_once = True

    def __init__(self, action: Callable[[Any], Any]) -> None:
        self._action = action

    def answer(self, rank: Any, number: int, in_place: int, numbers: tuple[int, ...]) -> Published:
        rank.check_interrupt(number)
        content = self._action(rank)
        return (wire.DONE, None, [], None) if content is None else (wire.TOLD, content, [], None)

    def leave(self, rank: Any) -> None:
        pass


def in_framework(value: Any, convert: Callable[[Any], Any], xp: Any) -> Any:
    """Return a broadcast object in which arrays, nested in tuples, lists and dicts, are the framework's."""
    if not isinstance(value, (tuple, list, dict)):
        return value
    leaves, structure = flatten(value)
    return unflatten(structure, [convert(leaf) if type(leaf) in (np.ndarray, xp.ndarray) else leaf for leaf in leaves])


def nested(values: list[Any], nests: Sequence[tuple[int, int, Any]]) -> list[Any]:
    """Return the arguments of a call whose leaves are ``values``."""
    arguments: list[Any] = []
    done = 0
    for first, num_leaves, structure in nests:
        arguments += values[done:first]
        done = first + num_leaves
        arguments.append(build(structure, iter(values[first:done])))
    return arguments + values[done:]


def load_nests(data: bytes, name: str) -> Sequence[tuple[int, int, Any]]:
    """Unpickle the structure of nested arguments. This runs code of the user's classes."""
    try:
        return pickle.loads(data) if data else ()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise SerializationError(
            f"cannot load the structure of the arguments of {name!r} on the workers: {text_of(error)}. "
            "Keys and classes of nested arguments must be importable there, or defined in the script."
        ) from error
