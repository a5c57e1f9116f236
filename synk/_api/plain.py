"""Calls the plain function in the program: the oracle of ``verify`` that shares nothing with the workers.

It calls a copy on copies of the arguments, which share nothing with the program except modules, so nothing in the
program changes. Random number generators are put back, and printed text is dropped. Effects on modules and outside of
the process cannot be undone.

The arguments are those that the user passed, without the conversions of a call, because a conversion may be the
mistake: a column of a table stays a column, and a list a list. A function that raises on a list is called once more
with what ``numpy.asarray`` makes of it, and the report says which it got. Only a few must be converted: ``Data``
becomes an array, ``batch`` selects rows, and a function with a framework gets tensors.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from synk._code.modules import is_users_module
from synk._code.parcels import Handle
from synk._engine.argument import ObjectPickler
from synk._engine.callee import Callee
from synk._engine.data import Data
from synk._engine.rows import select
from synk._engine.shared import Shared
from synk._pure.interrupts import raise_if_of_handler, waiting
from synk._pure.nested import build, take_apart
from synk._pure.shards import Selection
from synk._pure.sparse import is_csr
from synk._pure.tables import is_table, taken_rows
from synk._pure.tensors import is_tensor
from synk._pure.trees import flatten, unflatten
from synk._pure.words import text_of
from synk._wire.apart import unseen
from synk._wire.classes import by_word
from synk._wire.parcels import Pickler
from synk.backends._frameworks import Converter, host_converters
from synk.errors import ReentrancyError


class NotComparable(Exception):
    """The plain function cannot be called in the program. The text says why."""


@dataclass(frozen=True)
class PlainCopy:
    """A copy of a function and its arguments.

    Attributes
    ----------
    fn : callable
    args, kwargs
    handles : list of Handle
        What it refers to on the workers.
    classes, copies : list of type
        Classes of the program that were copied, and their copies.
    """

    fn: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    handles: Sequence[Handle] = ()
    classes: Sequence[type] = ()
    copies: Sequence[type] = ()

    def with_own_classes(self, result: Any) -> Any:
        """Return a result of the copy with instances of the program's own classes, as a call returns it."""
        if not self.copies:
            return result
        file = io.BytesIO()
        try:
            _ClassesOut(file, self.copies).dump(result)
            return ByReference(file.getvalue(), self.classes).load()
        except Exception:  # a result that cannot be pickled is compared as it is
            return result


def copied(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] = {},  # noqa: B006
    *,
    max_nbytes: float = math.inf,
    methods_by_name: bool = False,
) -> PlainCopy:
    """Return a copy, made by a single pickle.

    With ``methods_by_name`` the copy of a method is the one that the class of the copied object has. Otherwise it has a
    function of its own where the class is imported, and so not copied.

    Raises
    ------
    NotComparable
        If it takes more than ``max_nbytes``.
    Exception
        The exception of pickling.
    """
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    copier = _Copier(file, methods_by_name, buffer_callback=buffers.append)
    # The list of classes is pickled last, when it is complete.
    copier.dump((fn, args, kwargs, copier.copied))
    if file.tell() + sum(buffer.raw().nbytes for buffer in buffers) > max_nbytes:
        raise NotComparable(f"a copy of it takes more than {max_nbytes} bytes")
    own = [bytearray(buffer.raw()) for buffer in buffers]
    fn, args, kwargs, copies = ByReference(file.getvalue(), copier.handles, buffers=own).load()
    return PlainCopy(fn, args, kwargs, copier.handles, copier.copied, copies)


class _Copier(ObjectPickler):
    """Pickles the program's own functions and classes by value.

    Attributes
    ----------
    handles : list of Handle
        What it has met of the workers', pickled by their numbers here.
    copied : list of type
        The classes that were pickled by value. Their pickles must not identify the classes, as cloudpickle's do:
        loading would find the originals in this process and write into them.
    """

    def __init__(self, file: Any, methods_by_name: bool, **options: Any) -> None:
        super().__init__(file, protocol=5, **options)
        self._methods_by_name = methods_by_name
        self.handles: list[Handle] = []
        self.copied: list[type] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Handle):
            return None
        self.handles.append(obj)
        return len(self.handles) - 1

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and is_users_module(obj.__module__):
            return self._dynamic_function_reduce(obj)
        if self._methods_by_name and isinstance(obj, types.MethodType):
            found = getattr(obj.__self__, obj.__name__, None)
            if isinstance(found, types.MethodType) and found == obj:
                return getattr, (obj.__self__, obj.__name__)
        return super().reducer_override(obj)

    def class_recipe(self, cls: type, recipe: Any) -> Any:
        self.copied.append(cls)
        *parts, _, extra = recipe[1]  # the omitted argument identifies the class
        return by_word(cls, (recipe[0], (*parts, None, extra), *recipe[2:]), has_word=False)


class CodePickler(Pickler):
    """Pickles functions by value, also those in the user's modules, and classes and modules by name.

    Parameters
    ----------
    file : binary file
    reference : callable
        Returns the name or number by which a handle is found again; see :class:`ByReference`.
    """

    def __init__(self, file: Any, reference: Callable[[Handle], Any]) -> None:
        super().__init__(file, protocol=5)
        self._reference = reference

    def persistent_id(self, obj: Any) -> Any:
        return self._reference(obj) if isinstance(obj, Handle) else None

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.FunctionType and is_users_module(obj.__module__):
            return self._dynamic_function_reduce(obj)
        return super().reducer_override(obj)


class _ClassesOut(Pickler):
    """Pickles a result of the copy, with the copied classes as numbers."""

    def __init__(self, file: Any, copies: Sequence[type]) -> None:
        super().__init__(file, protocol=5)
        self._numbers = {id(cls): number for number, cls in enumerate(copies)}

    def persistent_id(self, obj: Any) -> int | None:
        return self._numbers.get(id(obj))


class ByReference(pickle.Unpickler):
    """Loads a pickle in which some objects were replaced by numbers or names.

    Parameters
    ----------
    data : bytes
    objects : sequence or mapping
        The objects, by number or by name.
    """

    def __init__(self, data: bytes, objects: Any, **options: Any) -> None:
        super().__init__(io.BytesIO(data), **options)
        self._objects = objects

    def persistent_load(self, pid: Any) -> Any:
        return self._objects[pid]


_SHARED = "it uses shared variables, whose values are on the workers"
_RESIDENT = "it uses objects that live on the workers"


class Failed(Exception):
    """The plain function raised something."""


def call_plain(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> tuple[Any, str]:
    """Return what a copy of the plain function returns in the program, and a sentence about lists that it got, if any.

    Raises
    ------
    NotComparable
        If it cannot be called here, or its call does not mean the same in the program as on a worker.
    Failed
    """
    callee = function._callee
    if callee.variables or callee.residents or callee.changes:
        raise NotComparable(_SHARED if callee.variables else _RESIDENT)
    if function._bound_session().has_devices:
        raise NotComparable("the workers compute on devices, and the program touches none")
    scattered = ScatteredArguments(callee, args, kwargs)
    has_lists = any(map(_is_list, scattered.leaves))
    try:
        return _called(callee, scattered, batch), "The plain function got lists as they are." if has_lists else ""
    except Failed as error:
        if not has_lists:
            raise
        raised = type(error.__cause__).__name__
    got = f"The plain function got numpy.asarray(list) for each list, because it raised {raised} on the list itself."
    return _called(callee, scattered, batch, has_arrays=True), got


def _called(callee: Callee, scattered: ScatteredArguments, batch: Any, *, has_arrays: bool = False) -> Any:
    """Call a copy; ``has_arrays``: with what NumPy makes of lists, in place of the lists."""
    try:
        into, out_of = (None, None) if callee.framework is None else host_converters(callee.framework)
        copy = copied(callee.fn, *_arguments(scattered, batch, into, has_arrays))
    except NotComparable:
        raise
    except Exception as error:
        raise_if_of_handler(error)
        text = text_of(error).rstrip(".")
        raise NotComparable(f"it cannot be copied with its arguments ({text})") from None
    list(map(as_plain, copy.handles))
    try:
        with unseen():
            result = waiting(copy.fn, *copy.args, **copy.kwargs)
    except ReentrancyError:
        raise NotComparable("it uses synk.comm, which has no meaning outside of a worker") from None
    except Exception as error:
        raise_if_of_handler(error)
        raise Failed(f"The plain function raised {text_of(error)}, and the call did not.") from error
    leaves, structure = flatten(copy.with_own_classes(result))
    return unflatten(structure, leaves if out_of is None else list(map(out_of, leaves)))


def _arguments(
    scattered: ScatteredArguments, batch: Any, into: Converter | None, has_arrays: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments, by position and by name, as the plain function gets them. They share the user's memory.

    ``into``: makes an array of the function's framework of an array.
    """
    picked = None if batch is None else scattered.select(batch)

    def plain(leaf: Any) -> Any:
        value = as_plain(leaf)
        if picked is not None and has_rows(value):
            value = rows_at(value, picked.positions())
        if has_arrays and _is_list(value):
            value = np.asarray(value)
        return in_framework(value, into, is_column=True)

    made: list[Any] = []
    for is_broadcast, value in scattered.bound:
        if is_broadcast:
            made.append(in_framework(as_plain(value), into))
        else:
            leaves, structure = take_apart(value)
            made.append(build(structure, map(plain, leaves)))
    count = len(made) - len(scattered.names)
    return made[:count], dict(zip(scattered.names, made[count:]))


class ScatteredArguments:
    """The arguments of a call, with those that are scattered taken apart.

    Attributes
    ----------
    bound : list of (bool, object)
        Of each argument whether it is broadcast, and its value.
    names : list of str
        Those of the last arguments, which are given by name.
    leaves : list
        The scattered leaves of all arguments.
    shards : list of Shared
        Those that are sharded variables.
    """

    def __init__(self, callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._name = callee.name
        self.bound = [each[2:] for each in callee.signature.bind(args, kwargs)]
        self.names = list(kwargs)
        scattered = [value for is_broadcast, value in self.bound if not is_broadcast]
        self.leaves = [leaf for value in scattered for leaf in take_apart(value)[0]]
        self.shards = [leaf for leaf in self.leaves if isinstance(leaf, Shared) and leaf.is_sharded]

    def select(self, batch: Any) -> Selection | None:
        """Return the rows that ``batch`` selects, or all rows for None; None if no leaf has rows."""
        rows = [("", sum(shard._referent.lengths)) for shard in self.shards]
        values = [as_plain(leaf) for leaf in self.leaves if not isinstance(leaf, Handle)]
        counts = [value.shape[0] if hasattr(value, "shape") else len(value) for value in values if has_rows(value)]
        rows += [("", int(count)) for count in counts]
        return select(rows, batch, self._name)

    def sampled(self, positions: np.ndarray | None) -> list[Any]:
        """Return some rows of each leaf whose rows the program can pick, or all for None."""
        found = []
        for leaf in self.leaves:
            with contextlib.suppress(NotComparable):
                value = as_plain(leaf)
                found.append(value if positions is None or not has_rows(value) else rows_at(value, positions))
        return found


def rows_at(value: Any, positions: np.ndarray) -> Any:
    """Return some rows of an array, a tensor, a table or a list.

    Raises
    ------
    NotComparable
        If rows of such an object can be picked on the workers only.
    """
    if isinstance(value, np.ndarray) or is_tensor(value) or is_csr(value):
        return value[positions]
    if is_table(value):
        return taken_rows(value, positions)
    if _is_list(value):
        rows = [value[place] for place in np.arange(len(value))[positions]]
        return tuple(rows) if type(value) is tuple else rows
    raise NotComparable(f"batch= picks rows of a {type(value).__name__} on the workers only")


def as_plain(value: Any) -> Any:
    if isinstance(value, Handle):
        raise NotComparable(_SHARED if isinstance(value, Shared) else _RESIDENT)
    return value._contents.array if isinstance(value, Data) else value


def has_rows(value: Any) -> bool:
    return bool(value.shape) if hasattr(value, "shape") else _is_list(value)


def _is_list(value: Any) -> bool:
    """Whether a scattered leaf is a list, a tuple or another sequence of Python's."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def in_framework(value: Any, into: Converter | None, *, is_column: bool = False) -> Any:
    """Return a value with its arrays converted to arrays of the framework.

    With ``is_column``, objects that NumPy can make an array of are converted, too, as a call does with the columns of a
    table.
    """
    if into is None:
        return value
    leaves, structure = flatten(value)
    for position, leaf in enumerate(leaves):
        if is_column and not is_tensor(leaf) and hasattr(leaf, "__array__") and not isinstance(leaf, np.generic):
            leaf = np.asarray(leaf)
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            leaves[position] = into(leaf.view(np.ndarray))
    return unflatten(structure, leaves)
