"""Whether an array is still the user's as well, who may change it in the next call, and a copy of it where it is."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy as np

from synk.backends import Backend


def own(backend: Backend, holder: Any, position: int) -> Any:
    """Return the array at ``holder[position]`` as one that nobody else can change."""
    if backend.is_device or not is_only_reference(holder, position):
        return backend.own_copy(holder[position])
    return holder[position]


def is_only_reference(holder: Any, position: int) -> bool:
    """Whether nobody but ``holder[position]``, an array of NumPy, refers to its memory."""
    return _references(holder, position) in _ONLY_REFERENCES


def _references(holder: Any, position: int) -> tuple[bool, bool, int, int]:
    """Return whose the memory of an array is, whether it is a view, and how often it and what it views are used."""
    array = holder[position]
    owner = array if array.base is None else array.base
    is_own = type(owner) is np.ndarray and owner.flags.owndata and not weakref.getweakrefcount(owner)
    return is_own, array is owner, sys.getrefcount(array), sys.getrefcount(owner)


# Counted, for it depends on the interpreter what its own variables add.
_ONLY_REFERENCES = (_references([np.empty(1)], 0), _references([np.empty(1)[:]], 0))
