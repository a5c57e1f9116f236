"""The inputs of a call on its rank: its rows as arrays of the backend, which may be brought ahead of the call."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from synk._pure.nested import build
from synk._pure.tensors import as_dtype
from synk._pure.trees import flatten, unflatten
from synk._wire.control import Down
from synk._wire.messages import Input
from synk._worker.held.loans import RowsOf
from synk._worker.held.plans import PreparedPlan
from synk._worker.held.residents import resident_argument
from synk._worker.held.variables import VariableStore
from synk.backends import Backend, DeviceBackend
from synk.errors import SerializationError


class Ahead(NamedTuple):
    """The inputs of a call that were brought before it began; see ``DeviceBackend.beside``."""

    prepared: PreparedPlan
    call: int
    arrays: list[Any]
    event: Any


class Inputs:
    """Brings the inputs of the calls of one lane."""

    def __init__(self, rank: int, backend: Backend, down: np.ndarray) -> None:
        self._rank = rank
        self._backend = backend
        self._down = down
        self._ahead: Ahead | None = None
        self.num_ahead = 0  # of the call under way, those that were brought before it began
        self.look_ahead: Callable[[bool], None] = do_nothing  # whether a call waits whose inputs can be brought

    def load_objects(self, prepared: PreparedPlan, variables: VariableStore) -> Sequence[Any]:
        """Unpickle the broadcast objects of the call: the user's classes are built here."""
        if prepared.pickle_view is None:
            return ()
        try:
            objects = pickle.loads(prepared.pickle_view, buffers=prepared.loans.buffers)
            arrays = [self._backend.from_objects(value) for value in objects]
            if prepared.function.to_framework is None:
                return arrays
            return [in_framework(value, variables.as_framework, self._backend.xp) for value in arrays]
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            names = ", ".join(item.name or "an argument" for item in prepared.plan.inputs if item.kind == "object")
            raise SerializationError(
                f"cannot load the broadcast inputs of {prepared.function.name!r} ({names}) on the workers: "
                f"{type(error).__name__}: {error}. Their classes must be importable there, or defined in the script."
            ) from error

    def arguments(
        self,
        prepared: PreparedPlan,
        numbers: list[int],
        low: int,
        high: int,
        objects: Sequence[Any],
        variables: VariableStore,
        arrays: list[Any] | None = None,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return what the function gets for the rows ``low`` to ``high`` of the selection.

        Parameters
        ----------
        numbers : list of int
            This rank's, of the call under way; see ``synk._wire.control.Down``.
        objects : sequence
            As :meth:`load_objects` returned them.
        arrays : list of (array or None), optional
            The inputs that were brought ahead.
        """
        function = prepared.function
        values: list[Any] = []
        for item, base, ahead in zip(prepared.plan.inputs, prepared.bases, arrays or prepared.nothing):
            if ahead is not None:
                value = ahead
            elif item.kind == "rows":
                value = self._rows(prepared, item, base, numbers, low, high)
            elif item.kind == "whole":
                value = self._backend.from_host(base[...])  # a view: the function may change the shape of what it gets
            elif item.kind == "object":
                value = objects[item.offset]
            elif item.kind == "closed over":
                continue
            elif item.kind == "resident":
                value = resident_argument(item.segment_id, is_trial=prepared.plan.is_trial)
            else:
                value = variables.argument(item, prepared.local_indices, low, high, numbers[Down.LOW])
            if function.to_framework is not None and item.kind in ("rows", "whole"):
                value = function.to_framework(value)
                if item.tensor_dtype:
                    value = as_dtype(value, item.tensor_dtype)
            values.append(value)
        if prepared.nests:
            values = nested(values, prepared.nests)
        args = [value for value, keyword in zip(values, prepared.keywords) if not keyword]
        return args, {keyword: value for value, keyword in zip(values, prepared.keywords) if keyword}

    def _rows(
        self, prepared: PreparedPlan, item: Input, base: np.ndarray, numbers: list[int], low: int, high: int
    ) -> Any:
        """Return the rows ``low`` to ``high`` of the selection, as a view where they are a range."""
        indices = prepared.indices_for(item)
        if indices is not None:
            return self._backend.take_rows(base, indices[low:high])
        return self._backend.from_host(base[row_range(item, numbers, low, high)])

    def lent_rows(self, prepared: PreparedPlan, low: int, high: int) -> RowsOf:
        """Return what tells which rows of an input the function got when it was called for ``low`` to ``high``."""
        numbers = self._down[self._rank].tolist()

        def rows(item: Input, base: np.ndarray) -> np.ndarray | None:
            if self._backend.is_device or prepared.indices_for(item) is not None:
                return None
            return base[row_range(item, numbers, low, high)]

        return rows

    # -- brought ahead ------------------------------------------------------------------------------------------------

    def prefetch(self, prepared: PreparedPlan, *, is_hurried: bool) -> None:
        """Begin to bring the inputs of the call that comes next in this lane; ``run`` finds them.

        ``is_hurried``: only where it does not hold up the host, because the call before has not begun its work yet.
        """
        if self._ahead is not None or prepared.plan.num_slices > 1:
            return
        backend = cast(DeviceBackend, self._backend)
        numbers = self._down[self._rank].tolist()
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

    def _bring(self, prepared: PreparedPlan, numbers: list[int], low: int, high: int) -> list[Any]:
        """Return the scattered and the broadcast arrays of a call by the position of the input; None for the others."""
        return [
            self._rows(prepared, item, base, numbers, low, high)
            if item.kind == "rows"
            else self._backend.from_host(base)
            if item.kind == "whole"
            else None
            for item, base in zip(prepared.plan.inputs, prepared.bases)
        ]

    def take_ahead(self, prepared: PreparedPlan) -> Ahead | None:
        """Return what was brought ahead, where it is for the call that begins now; forget it in any case."""
        ahead = self._ahead
        self.forget()
        if ahead is not None and ahead.prepared is prepared and ahead.call == self._down[0, Down.CALL]:
            return ahead
        return None

    def join(self, ahead: Ahead) -> list[Any]:
        """Return the inputs that were brought ahead, for use in the call that begins now."""
        cast(DeviceBackend, self._backend).join(ahead.event)
        self.num_ahead = len(ahead.arrays)
        self.look_ahead(True)
        return ahead.arrays

    def forget(self) -> None:
        """Drop what was brought ahead."""
        self._ahead = None
        self.num_ahead = 0


def row_range(item: Input, numbers: Sequence[int], low: int, high: int) -> slice:
    """Return where the rows ``low`` to ``high`` of the selection lie in an input, when they are a range."""
    start, step = (0, 1) if item.is_minibatch else (numbers[Down.START], numbers[Down.STEP])
    first, stop = start + low * step, start + high * step
    if high <= low:
        return slice(0, 0)
    return slice(first, stop if stop >= 0 else None, step)  # below 0: a negative step that ends on row 0


def in_framework(value: Any, convert: Callable[[Any], Any], xp: Any) -> Any:
    """Return a broadcast object with the arrays in its nesting of tuples, lists and dicts as those of the framework."""
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


def do_nothing(is_hurried: bool) -> None:
    pass
