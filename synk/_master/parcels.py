"""A parcel, and the objects in it as the ranks were told of them.

A *parcel* is one pickle: it brings a function, or a value for a place of which the function's code reads, and refers to
objects of earlier parcels by the number of the parcel and their position in it. It is kept, for workers that are
started later, as long as a living function needs it.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from synk._master.handles import Handle
from synk._master.watch import (
    MAX_KEYS,
    MISSING,
    Part,
    is_tensor,
    read,
    slots_of,
    table_of,
)

NUMBERS = (bool, int, float, complex, str, bytes)


UNKNOWN: Any = object()
"""In the place of what ranks were told, where it is not certain."""


class Known:
    """An object that the workers hold.

    Attributes
    ----------
    parcel : Parcel or None
        What brought it; None for one that workers make themselves, by importing a module.
    contents : dict
        What the ranks were told that it holds, by name or key.
    sources : dict of key to Parcel
        What brought those contents that did not come with the object itself.
    elements : object
        Likewise of an array or a list, which are compared as a whole.
    is_namespace : bool
        Whether it stands for the globals of functions; ranks hold those that functions name.
    """

    __slots__ = ("contents", "elements", "index", "is_namespace", "obj", "parcel", "sources")

    def __init__(self, obj: Any, parcel: Parcel | None, index: int, *, is_empty: bool = False) -> None:
        self.obj, self.parcel, self.index = obj, parcel, index
        self.is_namespace = is_empty and parcel is not None
        self.contents: dict[Any, Any] = {} if is_empty else contents_of(obj)
        self.elements = None if is_empty else elements_of(obj)
        self.sources: dict[Any, Parcel] = {}

    @property
    def address(self) -> tuple[int, int]:
        assert self.parcel is not None
        return self.parcel.number, self.index

    def changed_parts(self) -> list[Part]:
        """Return what it holds and the ranks were not told of, though nothing was bound anew that functions name."""
        if self.is_namespace or isinstance(self.obj, (types.FunctionType, types.CellType, type)):
            return []
        now = contents_of(self.obj)
        kind = "item" if isinstance(self.obj, dict) else "tensor" if is_tensor(self.obj) else "attribute"
        parts = [Part(self.obj, kind, key, now.get(key, MISSING), None) for key in {**self.contents, **now}]
        return [part for part in parts if not is_same(self.contents.get(part.key, MISSING), part.value)]

    def has_other_elements(self) -> bool:
        """Whether the elements of an array or a list are not those that the ranks were told of."""
        return self.elements is not None and self.elements != elements_of(self.obj)


def contents_of(obj: Any) -> dict[Any, Any]:
    """Return what an object holds by name or key, as far as it can be bound anew there."""
    if isinstance(obj, types.CellType):
        return {"": read(Part(obj, "cell", "", None, None))}
    if is_tensor(obj):
        return {"_version": obj._version}
    table = table_of(obj)
    found = dict(table) if table is not None and len(table) <= MAX_KEYS else {}
    if not isinstance(obj, (dict, type)):
        found.update((name, getattr(obj, name, MISSING)) for name in slots_of(type(obj)))
    return found


def elements_of(obj: Any) -> Any:
    """Return something that differs where the elements of an array or a container do; None for other objects."""
    if isinstance(obj, np.ndarray) and not obj.dtype.hasobject:
        return zlib.crc32(np.ascontiguousarray(obj).reshape(-1).view(np.uint8).data) if obj.size else 0
    if type(obj) is bytearray:
        return zlib.crc32(obj)
    if type(obj) in (list, set):
        return _Elements(obj)
    return None


class _Elements:
    """The elements of a container; equal to others that are the same objects, in the same order."""

    def __init__(self, container: Iterable[Any]) -> None:
        self._elements = tuple(container)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Elements) or len(self._elements) != len(other._elements):
            return False
        return all(map(is_same, self._elements, other._elements))

    __hash__ = None  # type: ignore[assignment]


def is_same(told: Any, now: Any) -> bool:
    return told is now or (type(told) is type(now) and type(told) in NUMBERS and told == now)


class Parcel:
    """One pickle for the workers.

    Attributes
    ----------
    number : int
    data : bytes
    refers : set of Parcel
        Those that must be loaded before it.
    named : set of (Known, str)
        The globals that the functions in it name: a namespace and a name.
    tells : list of (Known, key)
        What it was the first to bring, of objects that came before it.
    bound : set of Known
        Those of its own objects of which later parcels have told.
    objects : list of Known
        The objects in it.
    variables : set of Shared
        Those that it refers to, which live as long as it does.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.data = b""
        self.refers: set[Parcel] = set()
        self.named: set[tuple[Known, str]] = set()
        self.tells: list[tuple[Known, Any]] = []
        self.bound: set[Known] = set()
        self.objects: list[Known] = []
        self.handles: list[Handle] = []
