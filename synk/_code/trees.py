"""Large trees of plain containers, such as a list of records: one unit each, pickled at once and compared at once."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import itertools
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._code.comparisons import (
    MANY,
    POINTERS,
    Check,
    addresses,
    has_pointers,
    lists_check,
    may_read_memory,
    memcmp,
    place_of_pointers,
)
from synk._code.facets import UNKNOWN, Change, Elements, Facet

SMALLEST = 1000
"""A tree of fewer containers has a facet for each of them."""

_LEAVES = frozenset((bool, int, float, complex, str, bytes, type(None)))
_CONTAINERS = frozenset((dict, list, tuple, set))
_SCALARS = frozenset({*np.sctypeDict.values()} - {np.object_, np.void})
_WORD = ctypes.sizeof(ctypes.c_uint64)
_HEAD = 2 * _WORD
"""Where a dict has its length and its version, a word that changes with it, as far as CPython has one: up to 3.13."""


def walk(root: Any) -> tuple[list[Any], set[int]] | None:
    """Return the containers of a tree, the root first, and their ids; None if it holds any but plain objects."""
    containers, seen, level = [root], {id(root)}, [root]
    while level:
        inner = gc.get_referents(*level)  # without keys where all are texts
        kinds = list(map(type, inner))
        different = {*kinds} - _LEAVES - _SCALARS
        if not different <= _CONTAINERS:
            return None
        level = list(itertools.compress(inner, map(_CONTAINERS.__contains__, kinds))) if different else []
        ids = {*map(id, level)}
        if len(ids) < len(level) or not seen.isdisjoint(ids):  # some are met again
            level = [each for key, each in {id(each): each for each in level}.items() if key not in seen]
        seen.update(ids)
        containers += level
    return containers, seen


class Tree(Facet):
    """All that is in a tree of plain containers."""

    def __init__(self, obj: Any, containers: list[Any], ids: set[int]) -> None:
        self.obj, self.data, self._digest = obj, b"", b""
        self._note(containers, ids)

    def _note(self, containers: list[Any], ids: set[int]) -> None:
        self.told: Any = containers
        self.ids = ids
        self._is_same, self._kept = _check(containers)

    def pack(self) -> bool:
        """Pickle the tree as it is now. Return whether the ranks lack this pickle."""
        while True:
            if self.is_current():
                data = pickle.dumps(self.obj, protocol=5)
                if self.is_current():  # no other thread has written meanwhile
                    break
            found = walk(self.obj)
            if found is None:
                raise pickle.PicklingError(
                    f"cannot pickle a {type(self.obj).__name__}: another thread put other objects into it meanwhile. "
                    "Change it before or after the call."
                )
            self._note(*found)
        before, self._digest = self._digest, hashlib.blake2b(data).digest()
        self.data = data if self._digest != before else b""
        return bool(self.data)

    def is_current(self) -> bool:
        return self.told is not UNKNOWN and self._is_same()

    def is_unfit(self, known: Any = frozenset()) -> bool:
        if self.is_current():
            return False
        found = walk(self.obj)
        if type(self.obj) is tuple or found is None:
            return True
        containers, ids = found
        ids.discard(id(self.obj))
        return not known.isdisjoint(ids) or any(each is self.obj for each in gc.get_referents(*containers))

    def changes(self) -> list[Change]:
        return [Change("tree", None, self)] if not self.is_current() and self.pack() else []

    def tell(self, change: Change) -> None:
        self.data = b""

    def forget(self, change: Change) -> None:
        self.told, self._digest = UNKNOWN, b""


def plain_facet(obj: Any, *others: Any) -> tuple[Facet, bytes] | None:
    """Return the facet and the pickle of a large tree of plain containers, or of a long container of texts and numbers.

    None for other objects, and for trees that share containers with ``others``, which are sets of ids.
    """
    found = walk(obj)
    if found is None or not all(ids.isdisjoint(found[1]) for ids in others):
        return None
    if len(found[0]) >= SMALLEST:
        tree = Tree(obj, *found)
        tree.pack()
        return tree, tree.data
    if len(found[0]) > 1 or len(obj) < SMALLEST or type(obj) is tuple:
        return None
    facet = Elements(obj)
    data = pickle.dumps(obj, protocol=5)
    return (facet, data) if facet.is_current() else None  # another thread writes


def _check(containers: Sequence[Any]) -> tuple[Check, Any]:
    """Return a check that these containers hold what they hold now, and all that must stay alive for it.

    As long as an object lives, no other one has its address.
    """
    dicts, lists, sets = ([each for each in containers if type(each) is kind] for kind in (dict, list, set))
    kept = _held(dicts, lists, sets)
    told = _addresses(*kept)
    quick = _memory_checks(dicts, lists) if _has_versions and may_read_memory() else None
    of_sets = _addresses(*_held(sets))

    def is_same() -> bool:
        if quick is not None and may_read_memory():
            return all(check() for check in quick) and _addresses(*_held(sets)) == of_sets
        return _addresses(*_held(dicts, lists, sets)) == told

    return is_same, kept


def _held(*kinds: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return containers, all that they refer to, and the keys of dicts: one whose keys are all texts names none."""
    containers = list(itertools.chain.from_iterable(kinds))
    keys = list(itertools.chain.from_iterable(each for each in containers if type(each) is dict))
    return containers, gc.get_referents(*containers), keys


def _addresses(containers: list[Any], held: list[Any], keys: list[Any]) -> tuple[bytes, ...]:
    """Return how many elements containers have, and the addresses of what is in them."""
    lengths = np.fromiter(map(len, containers), np.int64, len(containers))
    return lengths.tobytes(), addresses(held, len(held)), addresses(keys, len(keys))


def _memory_checks(dicts: Sequence[Any], lists: Sequence[Any]) -> list[Check]:
    """Return checks of dicts and lists in memory: the cheapest way by far, where nobody changes them meanwhile."""
    heads = np.concatenate([_places(dicts) + _HEAD, _places(lists) + POINTERS - _WORD])
    long = [each for each in lists if len(each) > MANY]
    lists = [each for each in lists if len(each) <= MANY]
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    starts = np.fromiter((place_of_pointers(each).value or 0 for each in lists), np.int64, len(lists))
    ends = lengths.cumsum()
    elements = starts.repeat(lengths) + _WORD * (np.arange(lengths.sum()) - (ends - lengths).repeat(lengths))
    found = [_memory_check(heads, np.complex128)] if len(heads) else []
    found += [lists_check(long)] if long else []
    return found + ([_memory_check(elements, np.uint64)] if len(elements) else [])


def _places(objects: Sequence[Any]) -> np.ndarray:
    return np.fromiter(map(id, objects), np.int64, len(objects))


def _memory_check(addresses: np.ndarray, kind: Any) -> Check:
    """Return a check of words, or of pairs of words, in the memory of objects, which others must keep alive."""
    addresses = np.sort(addresses)  # what lies side by side is read at once
    first, nbytes = int(addresses[0]), np.dtype(kind).itemsize
    size = int(addresses[-1]) - first + nbytes
    memory = np.frombuffer((ctypes.c_char * size).from_address(first), kind, size // nbytes)
    places, rest = divmod(addresses - first, nbytes)
    if rest.any():  # not so with the allocator of CPython
        return _memory_check(np.concatenate([addresses, addresses + _WORD]), np.uint64)
    told, now = memory.take(places).tobytes(), np.empty(len(places), kind)
    at = now.ctypes.data

    def is_same() -> bool:
        memory.take(places, out=now, mode="clip")  # without the copy that "raise" makes
        return not memcmp(at, told, len(told))

    return is_same


def _test_versions() -> bool:
    """Whether this interpreter's dicts have a word that changes with each change of the dict."""
    if not has_pointers or sys.version_info >= (3, 14):
        return False
    acts: tuple[Callable[[Any], object], ...] = (
        lambda d: d.__setitem__("a", object()), lambda d: d.__setitem__(1, object()), lambda d: d.update(b=object()),
        lambda d: d.pop("a"), lambda d: d.setdefault("c", 1), lambda d: d.popitem(), lambda d: d.__ior__({"k": 1}),
        lambda d: d.clear(),
    )  # fmt: skip
    tables: list[dict[Any, Any]] = [{"a": 1, "b": 2}, {1: 2, "a": 3, "b": 4}, dict.fromkeys("ab", 0)]
    for table in tables:
        for act in acts:
            check = _memory_check(_places([table]) + _HEAD, np.complex128)
            list(table.items()), table.get("a"), table.copy(), len(table)
            if not check() or (act(table), check())[1]:
                return False
    return True


_has_versions = _test_versions()
