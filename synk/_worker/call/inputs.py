"""The inputs of a call on its rank: its rows as arrays of the backend, which may be brought before the call begins."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from synk._pure.nested import build
from synk._pure.tables import taken_rows, unpacked
from synk._pure.tensors import as_dtype
from synk._pure.trees import flatten, unflatten
from synk._wire.cell import cell
from synk._wire.control import Down
from synk._worker.held.plans import PreparedPlan
from synk._worker.held.rows import Rows
from synk._worker.held.variables import VariableStore
from synk.backends import Backend, DeviceBackend
from synk.errors import SerializationError


class Ahead(NamedTuple):
    """The arrays of a call, by position, that were brought before it began; see ``DeviceBackend.beside``."""

    prepared: PreparedPlan
    call: int
    arrays: dict[int, Any]
    event: Any


class Inputs:
    """Brings the inputs of the calls of one lane."""

    def __init__(self, rank: int, backend: Backend, down: np.ndarray) -> None:
        self._backend = backend
        self._down = down
        self._own_down = memoryview(down[rank])
        self._ahead: Ahead | None = None
        self.num_ahead = 0  # how many arrays of the current call were brought before it began
        self.look_ahead: Callable[[bool], None] = do_nothing  # brings the inputs of a call that waits, if there is one

    def load_objects(self, prepared: PreparedPlan, variables: VariableStore) -> Sequence[Any]:
        """Unpickle the broadcast objects of the call. This runs code of the user's classes."""
        if prepared.pickle_view is None:
            return ()
        try:
            objects = pickle.loads(prepared.pickle_view, buffers=prepared.inputs.buffers)
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
        rows: Rows,
        objects: Sequence[Any],
        variables: VariableStore,
        ahead: dict[int, Any] | None = None,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return what the function gets for some rows.

        Parameters
        ----------
        objects : sequence
            What :meth:`load_objects` returned.
        ahead : dict of int to array, optional
            The arrays, by position, if they were brought ahead.
        """
        if prepared.takes_views:
            return [prepared.bases[position][part] for position, part in rows.views.items()], {}
        values = self._bring(prepared, rows) if ahead is None else ahead
        to_framework = prepared.function.to_framework
        if to_framework is not None:
            for position, array in values.items():
                dtype = prepared.plan.inputs[position].tensor_dtype
                values[position] = as_dtype(to_framework(array), dtype) if dtype else to_framework(array)
        for position, item in prepared.others:
            if item.kind == "object":
                values[position] = objects[item.offset]
            elif item.kind == "table":
                own = unpacked(prepared.bases[position])
                low, high = rows.low - rows.first, rows.high - rows.first
                values[position] = taken_rows(own, slice(low, high)) if prepared.is_sliced else own
            elif item.kind == "resident":
                values[position] = cell.worker.residents.get(item.segment_id).value
            else:
                values[position] = variables.argument(item, prepared.local_indices, rows)
        arguments = list(map(values.__getitem__, range(len(values))))
        if prepared.nests:
            arguments = nested(arguments, prepared.nests)
        first = len(arguments) - len(prepared.keywords)
        return arguments[:first], dict(zip(prepared.keywords, arguments[first:]))

    def _bring(self, prepared: PreparedPlan, rows: Rows) -> dict[int, Any]:
        """Return the scattered and the broadcast arrays as arrays of the backend, by position."""
        bases, backend = prepared.bases, self._backend
        arrays: dict[int, Any] = {}
        for position, part in rows.views.items():
            view = bases[position][part]
            arrays[position] = backend.from_host(view) if backend.is_device else view
        for position, indices in rows.picked.items():
            own = arrays[position] = backend.take_rows(bases[position], indices)
            if not backend.is_device and prepared.function.to_framework is None:
                own.flags.writeable = False  # inputs are read-only, also if their rows are copies
        return arrays

    # -- brought ahead ------------------------------------------------------------------------------------------------

    def prefetch(self, prepared: PreparedPlan, *, is_hurried: bool) -> None:
        """Begin to bring the inputs of the next call in this lane. The call finds them by :meth:`take_ahead`.

        ``is_hurried``: only do it without blocking the host, because the current call has not queued its work yet.
        """
        if self._ahead is not None or prepared.is_sliced:  # slices bring their own
            return
        backend = cast(DeviceBackend, self._backend)
        own_down = self._own_down
        if is_hurried:
            is_range = prepared.indices is None and own_down[Down.STEP] == 1
            if not is_range or not all(base is None or backend.is_pinned(base) for base in prepared.bases):
                return
        try:
            with backend.beside() as event:
                arrays = self._bring(prepared, prepared.cut(own_down, own_down[Down.LOW], own_down[Down.HIGH]))
        except Exception as error:
            if not isinstance(backend.explain(error, "the next call"), MemoryError):
                raise
            return  # no room for the inputs of two calls: the next one brings its own when it runs
        # The master has written the numbers and inputs of that call before it sent the message. The call's number tells
        # whether they are still those of the call that then begins.
        self._ahead = Ahead(prepared, int(self._down[0, Down.CALL]), arrays, event)

    def take_ahead(self, prepared: PreparedPlan) -> dict[int, Any] | None:
        """Return the arrays that were brought ahead, if they are for the call that begins now. Forget them anyway."""
        ahead = self._ahead
        self.forget()
        if ahead is None or ahead.prepared is not prepared or ahead.call != self._down[0, Down.CALL]:
            return None
        cast(DeviceBackend, self._backend).join(ahead.event)
        self.num_ahead = len(ahead.arrays)
        self.look_ahead(True)
        return ahead.arrays

    def forget(self) -> None:
        """Drop what was brought ahead."""
        self._ahead = None
        self.num_ahead = 0


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


def do_nothing(is_hurried: bool) -> None:
    pass
