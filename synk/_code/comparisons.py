"""Facets that are compared together: a list for each kind of comparison, and one loop in C for each list.

Only identities, lengths and the bytes of small arrays are compared. If something differs, its facet may still be equal:
the update that follows compares the facets one by one.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from synk._code.arrays import ArrayContents
from synk._code.facets import FUNCTION_PARTS, MISSING, Elements, base_of, slot, slots_of, table_of

Check = Callable[[], bool]
"""Returns whether nothing in a list has changed."""

_FEW = 16
"""The addresses of more objects than this are compared as bytes."""

_MANY = 256
"""A list of more elements is compared as memory: CPython keeps the addresses of its elements in one array."""

_POINTERS = list.__basicsize__ - 16
"""Where a list has the address of that array."""

_attribute = object.__getattribute__


class Comparisons:
    """Facets that are compared at once: collected, and then compiled into checks."""

    def __init__(self) -> None:
        self._lookups: list[tuple[Callable[..., Any], Any, Any]] = []
        self._forbidden: list[tuple[Any, frozenset[str]]] = []
        self._reads: list[tuple[Any, str, Any]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._unset: list[tuple[Any, str]] = []
        self._objects: list[Any] = []
        self._counted: list[Any] = []
        self._containers: list[Any] = []
        self._keyed: list[Any] = []
        self._empty: list[Any] = []
        self._arrays: list[tuple[Callable[[], bytes], Any, Any, Any, Any]] = []
        self._lists: list[list[Any]] = []

    def add(self, facet: Any) -> None:
        """Add a facet of any kind, except large arrays, tensors and objects with a pickling rule of their own."""
        obj: Any = facet.obj
        if isinstance(facet, ArrayContents):
            self._arrays.append((obj.tobytes, facet.told, obj, obj.dtype, obj.shape))
        elif isinstance(facet, Elements) and type(obj) is list and len(obj) > _MANY:
            self._lists.append(obj)
        elif isinstance(obj, dict) and (isinstance(facet, Elements) or facet.kind == "item"):
            self._add_table(obj)
        elif isinstance(facet, Elements):
            self.count(facet.iterable)
            if len(facet.iterable):
                self._containers.append(facet.iterable)
        elif isinstance(obj, types.CellType):
            value = facet.told.get("", MISSING)
            if value is MISSING:
                self.expect(contents_getter(obj), "", MISSING)
            else:
                self._reads.append((obj, "cell_contents", value))
        elif isinstance(obj, types.FunctionType):
            self._reads += [(obj, name, getattr(obj, name)) for name in (*FUNCTION_PARTS, "__dict__")]
            self._add_table(obj.__dict__)
        elif isinstance(obj, type):
            self._add_table(vars(obj))
            self._reads.append((obj, "__bases__", obj.__bases__))
        elif "default_factory" in facet.told and isinstance(obj, defaultdict):
            self._reads.append((obj, "default_factory", obj.default_factory))
        else:
            self._add_instance(obj)

    def expect(self, get: Callable[..., Any], key: Any, value: Any) -> None:
        """Expect ``get(key, MISSING)`` to return ``value``."""
        self._lookups.append((get, key, value))

    def forbid(self, keys: Any, names: frozenset[str]) -> None:
        """Expect none of the names among the keys of a table."""
        self._forbidden.append((keys, names))

    def count(self, container: Any) -> None:
        """Expect a container to have as many elements as now."""
        if isinstance(container, dict):
            container = base_of(container).values(container)  # past the methods of a subclass
        if len(container) or hasattr(container, "__bool__"):  # a subclass may call itself empty
            self._counted.append(container)
        else:
            self._empty.append(container)

    def _add_instance(self, obj: Any) -> None:
        self._objects.append(obj)
        table = table_of(obj)
        if table is not None:
            self._slots.append((obj, "__dict__", table))
            self._add_table(table)
        slots = [(name, slot(obj, name)) for name in slots_of(type(obj))]
        self._slots += [(obj, name, value) for name, value in slots if value is not MISSING]
        self._unset += [(obj, name) for name, value in slots if value is MISSING]

    def _add_table(self, table: Any) -> None:
        base: Any = base_of(table) if isinstance(table, dict) else type(table)
        values = base.values(table)
        self.count(values)
        if values:
            self._containers.append(values)
            self._keyed.append(base.keys(table))

    def checks(self) -> list[Check]:
        """Return the checks, the cheapest first."""
        checks = []
        if self._lookups or self._forbidden or self._reads or self._empty:
            checks.append(_names_check(self._lookups, self._forbidden, self._reads, self._empty))
        rows: tuple[tuple[Callable[[Any], Check], Sequence[Any]], ...] = (
            (_lengths_check, self._counted),
            (_elements_check, self._containers),
            (_elements_check, self._keyed),
            (_types_check, self._objects),
            (_slots_check, self._slots),
            (_unset_check, self._unset),
            (_arrays_check, self._arrays),
            (_lists_check, self._lists),
        )
        return checks + [make(row) for make, row in rows if row]


def _names_check(
    lookups: Sequence[tuple[Callable[..., Any], Any, Any]],
    forbidden: Sequence[tuple[Any, frozenset[str]]],
    reads: Sequence[tuple[Any, str, Any]],
    empty: Sequence[Any],
) -> Check:
    """Return one check for lookups, attributes and empty containers. Most functions need no other."""
    holders, names, values = zip(*reads) if reads else ((), (), ())

    def is_same() -> bool:
        for get, key, value in lookups:
            if get(key, MISSING) is not value:
                return False
        for keys, absent in forbidden:
            if not keys.isdisjoint(absent):
                return False
        # There are four of each function: in C they cost a third.
        return all(map(operator.is_, map(getattr, holders, names), values)) and not any(empty)

    return is_same


def _lengths_check(containers: Sequence[Any]) -> Check:
    lengths = list(map(len, containers))
    return lambda: list(map(len, containers)) == lengths


def _elements_check(containers: Sequence[Iterable[Any]]) -> Check:
    """Return a check of the elements of containers. Their lengths must have been compared before."""
    values = list(itertools.chain.from_iterable(containers))
    if len(values) <= _FEW:
        return lambda: all(map(operator.is_, itertools.chain.from_iterable(containers), values))
    told = addresses(values, len(values))
    # The check holds ``values``, so that no other object gets one of these addresses.
    return lambda: addresses(itertools.chain.from_iterable(containers), len(values)) == told


def addresses(values: Iterable[Any], count: int) -> bytes:
    """Return the addresses of objects as bytes: the fastest way to compare many objects by identity."""
    return np.fromiter(values, object, count).tobytes()


def _place_of_pointers(items: list[Any]) -> ctypes.c_void_p:
    """Return where a list has the address of its array of addresses."""
    return ctypes.c_void_p.from_address(id(items) + _POINTERS)


def _may_read_memory() -> bool:
    """Whether no other thread of Python could have a list let go of its memory while it is read."""
    return _has_pointers and threading.active_count() == 1


def _lists_check(lists: Sequence[list[Any]]) -> Check:
    """Return a check of the elements of long lists: as memory, or one by one where that could crash.

    It compares them with copies of the lists, which keep the elements alive: no other object gets their addresses.
    """
    told = [
        (items, _place_of_pointers(items), before, _place_of_pointers(before))
        for items, before in zip(lists, map(list, lists))
    ]

    def is_same() -> bool:
        if _may_read_memory():
            return all(len(a) == len(b) and not _memcmp(of_a, of_b, 8 * len(b)) for a, of_a, b, of_b in told)
        return all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, _, b, _ in told)

    return is_same


def _test_pointers() -> bool:
    """Whether this interpreter keeps lists as expected."""
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    items: list[Any] = [object() for _ in range(9)]
    place, before = _place_of_pointers(items), addresses(items, 9)
    found = [ctypes.sizeof(ctypes.c_void_p) == 8 and not _memcmp(place, before, 72)]
    items[4] = object()
    found.append(bool(_memcmp(place, before, 72)))
    items[:] = [*items, *items]
    return all(found) and not _memcmp(place, addresses(items, 18), 144)


def _types_check(objects: Sequence[Any]) -> Check:
    types_before = list(map(type, objects))
    return lambda: all(map(operator.is_, map(type, objects), types_before))


def _slots_check(slots: Sequence[tuple[Any, str, Any]]) -> Check:
    holders, names, values = zip(*slots)
    return lambda: all(map(operator.is_, map(_attribute, holders, names), values))


def _unset_check(unset: Sequence[tuple[Any, str]]) -> Check:
    return lambda: not any(slot(holder, name) is not MISSING for holder, name in unset)


def _arrays_check(arrays: Sequence[tuple[Callable[[], bytes], Any, Any, Any, Any]]) -> Check:
    def is_same() -> bool:
        for tobytes, told, array, dtype, shape in arrays:
            if tobytes() != told or array.dtype is not dtype or array.shape != shape:
                return False
        return True

    return is_same


def contents_getter(cell: types.CellType) -> Callable[[str, Any], Any]:
    """Return a lookup of what a cell holds, in the form of ``dict.get``: the default if the cell is empty."""

    def get(name: str, default: Any) -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return default

    return get


_memcmp = ctypes.PyDLL(None).memcmp  # keeps the interpreter's lock: nobody changes a list meanwhile
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
_has_pointers = _test_pointers()
