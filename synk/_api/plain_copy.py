"""Copies a function and the arguments of a call, so that the copy shares nothing with the program except modules."""

from __future__ import annotations

import io
import math
import pickle
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from synk._code.handles import Handle
from synk._code.modules import is_users_module
from synk._engine.argument import ObjectPickler
from synk._wire.classes import by_word
from synk._wire.parcels import Pickler


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
