"""Moves functions and their state to another runtime: the pickle of the functions, and the contents of each handle.

In the pickle a handle (a shared variable, a resident object, replicated objects) is the number of its *slot*, so it
means the same handle in all functions. A function is its *recipe*: the plain function and the options. The contents of
a slot are its *part*: a dict of plain entries, from which another runtime makes a handle of its own. This file imports
neither functions nor runtimes, because both import it.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from synk._master import collectives
from synk._master.calls.callee import FunctionHandle
from synk._master.code.handles import Handle
from synk._master.code.modules import is_users_module
from synk._master.objects.resident import make_resident_of
from synk._master.objects.shared import Shared, value_of
from synk._master.session import Session
from synk._master.state.captured import unsendable
from synk._wire.parcels import Pickler
from synk.errors import SerializationError

Part = dict[str, Any]


class CodePickler(Pickler):
    """Pickles the program's functions by value, also those in the user's modules, because they may refer to handles.

    Parameters
    ----------
    slot_of : callable
        Returns the number of a handle's slot.
    """

    def __init__(self, file: Any, slot_of: Callable[[Handle], int]) -> None:
        super().__init__(file, protocol=5)
        self._slot_of = slot_of

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Handle):
            return "slot", self._slot_of(obj)
        recipe = getattr(type(obj), "__synk_recipe__", None)
        return None if recipe is None else recipe(obj)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.FunctionType and is_users_module(obj.__module__):
            return self._dynamic_function_reduce(obj)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    """Builds functions on a runtime whose handles are in ``handles``."""

    def __init__(self, data: bytes, runtime: Any, handles: Sequence[Handle]) -> None:
        super().__init__(io.BytesIO(data))
        self._runtime, self._handles = runtime, handles

    def persistent_load(self, pid: Any) -> Any:
        kind, *found = pid
        if kind == "slot":
            return self._handles[found[0]]
        if kind == "runtime":
            return self._runtime
        owner, fn, options = (self._runtime, *found) if kind == "function" else found
        return owner.function(fn, **options)


def dumps(functions: Mapping[str, Any], slot_of: Callable[[Handle], int]) -> bytes:
    """Pickle functions together, so that objects that they share stay shared.

    Raises
    ------
    SerializationError
        If an object that they captured cannot be pickled.
    """
    file = io.BytesIO()
    try:
        CodePickler(file, slot_of).dump(dict(functions))
    except Exception as error:
        fn = next((f._callee.fn for f in functions.values() if isinstance(f, FunctionHandle)), None)
        raise unsendable(", ".join(map(repr, functions)), fn, error) from error
    return file.getvalue()


def loads(data: bytes, runtime: Any, handles: Sequence[Handle]) -> dict[str, Any]:
    """Build functions on a runtime.

    Raises
    ------
    SerializationError
        If a module or a name that they need cannot be imported here.
    """
    try:
        return dict(_Unpickler(data, runtime, handles).load())
    except (ImportError, AttributeError, pickle.UnpicklingError) as error:
        raise SerializationError(
            f"cannot build the functions of a program here: {type(error).__name__}: {error}. Install what they import; "
            "functions travel by value, classes and modules by name."
        ) from error


def session_of(handle: Any) -> Session:
    """Return the session to which a handle belongs."""
    session: Session = handle._session
    return session


def part_of(handle: Any) -> Part:
    """Return a copy of the contents of a handle. Replicas and objects are those of rank 0."""
    part: Part = handle._part()
    return part


def make_handle(runtime: Any, part: Part) -> Any:
    """Make a handle on a runtime with the contents of another handle."""
    kind = part["kind"]
    if kind == "shared":
        return runtime.shared(value_of(part), sharded=part["sharded"], name=part["name"])
    if kind == "resident":
        return make_resident_of(runtime._session, part)
    return import_module("synk").torch.Replicated._of_part(runtime, part)


def put(handles: Sequence[Any], parts: Sequence[Part]) -> None:
    """Give handles the contents of other handles. Shared variables come last: all of them change, or none.

    Raises
    ------
    ValueError, TypeError
        If a value does not fit.
    """
    variables = [(handle, value_of(part)) for handle, part in zip(handles, parts) if isinstance(handle, Shared)]
    for handle, value in variables:
        handle._referent.check(value)
    for handle, part in zip(handles, parts):
        if not isinstance(handle, Shared):
            handle._put(part)
    for session in {session_of(handle) for handle, _ in variables}:
        own = [(handle._referent, value) for handle, value in variables if session_of(handle) is session]
        with session.entered("set variables"):
            session.begin("set variables")
            collectives.assign_all(session, own)


def moved(functions: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
    """Return copies of functions on another runtime, with copies of all handles to which they refer."""
    handles: list[Handle] = []
    code = dumps(functions, lambda handle: slot_in(handles, handle))
    return loads(code, runtime, [make_handle(runtime, part_of(handle)) for handle in handles])


def slot_in(handles: list[Any], handle: Handle) -> int:
    """Return the number of a handle in a list. A new handle is added to the list."""
    for number, known in enumerate(handles):
        if known is handle:
            return number
    handles.append(handle)
    return len(handles) - 1


def check_runtime(runtime: Any, what: str) -> None:
    """Raise unless ``runtime`` is an open runtime."""
    session = getattr(runtime, "_session", None)
    if not isinstance(session, Session) or isinstance(runtime, Handle):
        raise TypeError(
            f"cannot put {what} on another runtime: got {type(runtime).__name__}, expected a synk.Runtime. Make one by "
            "synk.Runtime(num_workers, backend=...)."
        )
    session.check_open(f"put {what} there")


def names_of_captured(functions: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the captured objects that workers may have changed by themselves, as ``'cache' of 'step'``."""
    found = []
    for name, function in functions:
        fn = getattr(function, "function", function)._callee.fn
        code = getattr(fn, "__code__", None)
        if code is None:
            continue
        cells = zip(code.co_freevars, fn.__closure__ or ())
        values = {key: cell.cell_contents for key, cell in cells if _is_filled(cell)}
        table = fn.__globals__
        values.update({key: table[key] for key in code.co_names if key in table})
        found += [f"{key!r} of {name!r}" for key, value in values.items() if _may_change(value)]
    return found


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _may_change(value: Any) -> bool:
    fixed = (int, float, complex, str, bytes, tuple, frozenset, type, types.ModuleType, Handle, FunctionHandle)
    return not isinstance(value, fixed) and value is not None and not callable(value)
