"""Copies a function and the arguments of a call, so that the copy shares nothing with the program except modules."""

from __future__ import annotations

import io
import math
import pickle
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from synk._master.calls.arguments import ObjectPickler
from synk._master.code.handles import Handle, HandlePickler
from synk._master.code.modules import is_users_module
from synk._master.objects.data import Data
from synk._master.objects.shared import Shared
from synk._wire.memory import available_nbytes
from synk._wire.parcels import Pickler

SHARED = "it uses shared variables, whose values are on the workers"
RESIDENT = "it uses objects that live on the workers"


class NotComparable(Exception):
    """The plain function cannot be called in the program. The text says why."""


def why_no_handle(handle: Handle) -> str:
    """Return why a function that gets this handle cannot be called in the program."""
    return SHARED if isinstance(handle, Shared) else RESIDENT


@dataclass(frozen=True)
class PlainCopy:
    """A copy of a function and its arguments.

    Attributes
    ----------
    fn : callable
    args, kwargs
    classes, copies : list of type
        Classes of the program that were copied, and their copies.
    """

    fn: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    classes: list[type]
    copies: list[type]

    def with_own_classes(self, result: Any) -> Any:
        """Return a result of the copy with instances of the program's own classes, as a call returns it."""
        if not self.copies:
            return result
        file = io.BytesIO()
        try:
            _ClassesOut(file, self.copies).dump(result)
            file.seek(0)
            return _ByNumber(file, self.classes).load()
        except Exception:  # a result that cannot be pickled is compared as it is
            return result


def copied(
    fn: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
    *,
    for_workers: bool = False,
    max_nbytes: float = math.inf,
) -> PlainCopy:
    """Return a copy, made by a single pickle.

    Parameters
    ----------
    for_workers : bool
        Whether the copy is called on the workers. It may refer to what lives there, and share objects with modules.
    max_nbytes : float
        How much memory the copy may take, at most half of what is free.

    Raises
    ------
    NotComparable
        If an object in it lives on the workers, or the copy takes too much memory.
    Exception
        The exception of pickling.
    """
    room = _Room(max_nbytes)
    file = _File(room)
    buffers: list[pickle.PickleBuffer] = []

    def keep(buffer: pickle.PickleBuffer) -> None:
        room.take(buffer.raw().nbytes)
        buffers.append(buffer)

    copier = _Copier(file, buffer_callback=keep)
    copier.kept = (Handle, Data) if for_workers else (Handle,)
    # The list of classes is pickled last, when it is complete.
    copier.dump((fn, args, kwargs, copier.copied))
    if copier.handles and not for_workers:
        raise NotComparable(why_no_handle(copier.handles[0]))
    objects = {} if for_workers else _objects_in(copier.modules)
    if objects.keys() & copier.memo.copy().keys() or any(type(each) in copier.copied for each in objects.values()):
        raise NotComparable("it shares an object with a module, which would not be copied with it")
    file.seek(0)
    loader = _ByNumber(file, copier.handles, buffers=[bytearray(buffer.raw()) for buffer in buffers])
    fn, args, kwargs, copies = loader.load()
    return PlainCopy(fn, args, kwargs, copier.copied, copies)


def _objects_in(modules: Sequence[types.ModuleType]) -> dict[int, Any]:
    """Return the values of modules' names, by id, without code and constants."""
    others = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, str, int, float, bytes, tuple)
    values = [value for module in modules for value in vars(module).values()]
    return {id(value): value for value in values if value is not None and not isinstance(value, others)}


class _Room:
    """The memory that a pickle may take: half of the free memory, because loading takes as much again."""

    def __init__(self, max_nbytes: float) -> None:
        self._left = min(available_nbytes() // 2, max_nbytes)

    def take(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise NotComparable("a copy of it and its arguments takes more than half of the memory that is free")


class _File(io.BytesIO):
    def __init__(self, room: _Room) -> None:
        super().__init__()
        self._room = room

    def write(self, data: Any) -> int:
        self._room.take(memoryview(data).nbytes)
        return super().write(data)


class _Copier(ObjectPickler, HandlePickler):
    """Pickles the program's own functions and classes by value.

    Attributes
    ----------
    copied : list of type
        The classes that were pickled by value. Their pickles must not identify the classes, as cloudpickle's do:
        loading would find the originals in this process and write into them.
    modules : list of module
        The user's modules, which the copy shares with the program.
    kept : tuple of type
        Of objects that the copy shares with the program; they are listed in ``handles``.
    """

    kept: tuple[type, ...] = (Handle,)

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self.copied: list[type] = []
        self.modules: list[types.ModuleType] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, self.kept):
            return None
        self.handles.append(cast(Handle, obj))
        return len(self.handles) - 1

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and is_users_module(obj.__name__):
            self.modules.append(obj)
        if isinstance(obj, types.FunctionType) and is_users_module(obj.__module__):
            return self._dynamic_function_reduce(obj)
        return super().reducer_override(obj)

    def class_recipe(self, cls: type, recipe: Any) -> Any:
        self.copied.append(cls)
        *parts, _, extra = recipe[1]  # the omitted argument identifies the class
        return (recipe[0], (*parts, None, extra), *recipe[2:])


class _ClassesOut(Pickler):
    """Pickles a result of the copy, with the copied classes as numbers."""

    def __init__(self, file: Any, copies: Sequence[type]) -> None:
        super().__init__(file, protocol=5)
        self._numbers = {id(cls): number for number, cls in enumerate(copies)}

    def persistent_id(self, obj: Any) -> int | None:
        return self._numbers.get(id(obj))


class _ByNumber(pickle.Unpickler):
    """Loads a pickle in which some objects were replaced by numbers."""

    def __init__(self, file: Any, objects: Sequence[Any], **options: Any) -> None:
        super().__init__(file, **options)
        self._objects = objects

    def persistent_load(self, number: int) -> Any:
        return self._objects[number]
