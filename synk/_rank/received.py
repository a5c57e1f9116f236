"""Parcels as a worker keeps them, with the objects to which later parcels refer.

This is the counterpart of ``synk._code``.
"""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._wire.classes import is_at_home, note_brought
from synk._wire.parcels import Absent, Missing, locate

_log = logging.getLogger("synk")


class _Unpickler(pickle.Unpickler):
    """Loads one parcel. Addresses in it stand for objects of other parcels, and for large arrays in shared memory."""

    def __init__(
        self, data: bytes, objects: dict[int, Sequence[Any]], memory: Callable[[int, int, int], np.ndarray]
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._objects = objects
        self._memory = memory
        self._trees: list[Any] = []

    def persistent_load(self, address: Any) -> Any:
        if len(address) == 1:  # a tree of plain containers: its pickle, and later its place among those of this parcel
            (tree,) = address
            if not isinstance(tree, bytes):
                return self._trees[tree]
            self._trees.append(pickle.loads(tree))
            return self._trees[-1]
        if len(address) == 3:
            return self._memory(*address)
        number, index = address
        return self._objects[number][index]


class Received:
    """The parcels of one rank, by number, with the objects of each.

    Parameters
    ----------
    memory : callable
        ``memory(segment, offset, nbytes)`` returns bytes of shared memory as an array. What this process writes to it
        is seen by no other.
    """

    def __init__(self, memory: Callable[[int, int, int], np.ndarray]) -> None:
        self._memory = memory
        self._objects: dict[int, Sequence[Any]] = {}
        self._taken: dict[int, Any] = {}

    def load(
        self, number: int, data: bytes, is_optional: bool, load_function: Callable[[int, dict[str, Any]], None]
    ) -> None:
        """Load a parcel. One that cannot be loaded raises, unless it is optional."""
        try:
            self._load(number, data, load_function)
        except Exception as error:
            if not is_optional:
                raise
            self._objects[number] = ()  # the module keeps what its own import made
            _log.warning(
                "a worker keeps what its own import of a module has made: what the program has there could not be "
                "loaded (%s: %s). Pass it as an argument.",
                type(error).__name__,
                error,
            )

    def _load(self, number: int, data: bytes, load_function: Callable[[int, dict[str, Any]], None]) -> None:
        unpickler = _Unpickler(data, self._objects, self._memory)
        actions = unpickler.load()
        objects = unpickler.load()
        if actions and actions[0][0] == "locate":
            places, names = actions.pop()[1]
            objects = tuple(locate(*place) for place in places)
            if names is not None:
                _remove_others(objects[0], names)
        self._objects[number] = objects
        for kind, target, key, *value in actions:
            if kind == "function":
                if isinstance(key["fn"], Missing):
                    key["fn"].check()
                load_function(target, key)
            elif kind.startswith("adopt "):
                kind = kind.removeprefix("adopt ")
                own = self._own(kind, target, key, value[0]) if any(each is value[0] for each in objects) else None
                if own is None:
                    change(kind, target, key, value[0])
                else:
                    objects = tuple(own if each is value[0] else each for each in objects)
                    self._objects[number] = objects
            elif kind != "bring":
                change(kind, target, key, value[0])

    def _own(self, kind: str, target: Any, key: Any, value: Any) -> Any:
        """Give the object that a module's import made the contents of the program's object, and return it.

        Everything in this process that holds the module's own object keeps sharing it. Return None if that object
        cannot take the contents, or has taken some before: two names of one object here may name two objects in the
        program.
        """
        own = (target if kind == "item" else getattr(target, "__dict__", {})).get(key)
        if id(own) in self._taken or not _take_over(own, value):
            return None
        self._taken[id(own)] = own
        return own

    def drop(self, number: int, unbound: Sequence[tuple[tuple[int, int], Any]]) -> None:
        """Release a parcel's objects, and unbind the globals that it brought."""
        self._objects.pop(number, None)
        for (parcel, index), name in unbound:
            if parcel in self._objects:
                self._objects[parcel][index].pop(name, None)


def change(kind: str, target: Any, key: Any, value: Any) -> None:
    """Apply a change to an object of this rank. Runs no properties and works on frozen classes."""
    if kind in ("item", "attribute", "cell"):
        _bind(kind, target, key, value)
    elif kind in ("elements", "tree"):
        _fill(target, value)
    elif kind == "order":
        table = vars(target)
        table.update([(name, table.pop(name)) for name in value if name in table])
    elif kind == "contents":
        _write(target, value)
    elif kind == "reload":
        if _address(value) != _address(target):  # else the array lies in that memory and shows the new bytes already
            _write(target, value)
    else:
        _restore(target, value)


def _bind(kind: str, target: Any, key: Any, value: Any) -> None:
    if kind == "cell":
        if value is Absent:
            with contextlib.suppress(ValueError):
                del target.cell_contents
        else:
            target.cell_contents = value
        return
    if kind == "item":
        base = _base_of(target)
        if value is Absent:
            base.pop(target, key, None)
        else:
            base.__setitem__(target, key, value)
        return
    table = getattr(target, "__dict__", None)
    is_slot = key not in (table or ()) and isinstance(getattr(type(target), key, None), types.MemberDescriptorType)
    is_special = key in ("__class__", "__bases__") or isinstance(target, types.FunctionType)
    if is_slot or is_special or not isinstance(table, dict):
        _set_attribute(target, key, value)
    elif value is Absent:
        table.pop(key, None)
    else:
        table[key] = value


def _base_of(table: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return the class whose methods change a dict without running those of a user's subclass."""
    return collections.OrderedDict if isinstance(table, collections.OrderedDict) else dict


def _set_attribute(target: Any, key: str, value: Any) -> None:
    owner: Any = object
    if isinstance(target, type):
        if is_at_home(target):
            return
        owner = type
        note_brought(target, key)
    if value is not Absent:
        owner.__setattr__(target, key, value)
    else:
        with contextlib.suppress(AttributeError):
            owner.__delattr__(target, key)


def _remove_others(table: dict[str, Any], names: Sequence[str]) -> None:
    """Remove names that a module's import bound here and that the program has removed."""
    for name in [name for name in table if name not in names and not name.startswith("__")]:
        if not isinstance(table[name], types.ModuleType):  # keep submodules that only this process has imported
            del table[name]


def _take_over(own: Any, value: Any) -> bool:
    """Give the object ``own`` the contents of ``value``. Return whether that was possible."""
    cls = type(own)
    if cls is not type(value) or own is value or isinstance(own, (types.FunctionType, type)):
        return False
    if cls is dict:
        own.clear()
        own.update(value)
        return True
    if cls in (list, set, bytearray, collections.deque) and getattr(own, "maxlen", 0) == getattr(value, "maxlen", 0):
        _fill(own, value)
        return True
    rules: Any = object
    is_plain = cls.__reduce_ex__ is rules.__reduce_ex__ and cls.__reduce__ is rules.__reduce__
    state = getattr(own, "__dict__", None)
    if type(state) is dict and is_plain:
        state.clear()
        state.update(vars(value))
        return True
    return False


def _fill(target: Any, value: Any) -> None:
    """Give a container the elements of another."""
    if isinstance(target, np.ndarray):
        if target.shape != value.shape:
            target.shape = value.shape
        target[...] = value
    elif isinstance(target, (list, bytearray)):
        target[:] = value
    elif isinstance(target, dict):
        base = _base_of(target)
        base.clear(target)
        base.update(target, value)
    else:
        target.clear()
        (target.update if isinstance(target, set) else target.extend)(value)


def _write(target: Any, value: Any) -> None:
    """Give an array or a tensor the contents of ``value``, even if it is read-only."""
    if not isinstance(target, np.ndarray):
        import torch

        with torch.no_grad():
            is_expanded = target.layout is torch.strided and 0 in target.stride()  # torch refuses to write into it
            if target.shape == value.shape and target.dtype == value.dtype and not is_expanded:
                target.copy_(value)
            else:
                target.data = value.detach()
            if target.is_leaf:
                target.requires_grad_(value.requires_grad)
        return
    if target.flags.writeable:  # NumPy may refuse to set the flag even where it is set
        target[...] = value
        return
    target.flags.writeable = True
    target[...] = value
    target.flags.writeable = False


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())


def _restore(target: Any, state: Any) -> None:
    """Give an object a state, as unpickling does."""
    setstate = getattr(target, "__setstate__", None)
    if setstate is not None:
        setstate(state)
        return
    table, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if table is not None:
        vars(target).clear()
        vars(target).update(table)
    for key, value in (slots or {}).items():
        object.__setattr__(target, key, value)
