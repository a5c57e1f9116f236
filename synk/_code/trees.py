"""Large trees of plain containers, such as a list of records: one unit each, pickled at once and compared at once."""

from __future__ import annotations

import gc
import hashlib
import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._code.comparisons import Check, addresses
from synk._code.facets import UNKNOWN, Change, Elements, Facet

SMALLEST = 1000
"""A tree of fewer containers has a facet for each of them."""

_LEAVES = frozenset((bool, int, float, complex, str, bytes, type(None)))
_CONTAINERS = frozenset((dict, list, tuple, set))
_SCALARS = frozenset({*np.sctypeDict.values()} - {np.object_, np.void})


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
    dicts = [each for each in containers if type(each) is dict]

    def held() -> list[Any]:
        # Keys, too: a dict whose keys are all texts names none.
        return gc.get_referents(*containers) + list(itertools.chain.from_iterable(dicts))

    lengths, kept = list(map(len, containers)), held()
    told = addresses(kept, len(kept))

    def is_same() -> bool:
        if list(map(len, containers)) != lengths:
            return False
        now = held()
        return addresses(now, len(now)) == told

    return is_same, kept
