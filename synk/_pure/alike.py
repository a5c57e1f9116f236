"""Compares recipes of pickles: would an object be rebuilt as it was?

A recipe is what an object says it is rebuilt from: nested tuples, lists and dicts that hold other objects. These
objects count by identity, because the caller compares their contents elsewhere. The containers that hold them, and the
bytes of arrays, count by value, because the code that rebuilds the object may copy them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from synk._pure.tensors import array_of, is_plain, is_tensor, is_torch_device

NUMBERS = (bool, int, float, complex, str, bytes, type(None))
"""Types that are compared by value."""

_SMALL_NBYTES = 1 << 16
_MAX_DEPTH = 12
_FEW = 8
_CONTAINERS = frozenset((tuple, list, dict, set, bytearray, np.ndarray))


class _Bytes(NamedTuple):
    """The contents of an array or a tensor."""

    dtype: np.dtype
    shape: tuple[int, ...]
    raw: bytes


def kept(recipe: Any, again: Any, note: Callable[[Any], Any], depth: int = _MAX_DEPTH) -> Any:
    """Return a recipe in the form in which it can be kept and compared later.

    Parameters
    ----------
    again : object
        The same recipe, made a second time.
    note : callable
        Called with each part that was made only for the recipe and is no object of the program.
    """
    kind = type(recipe)
    if not depth:  # the recipe may hold itself: compare by identity from here
        return recipe
    is_fresh = recipe is not again and kind not in NUMBERS
    if is_fresh:
        note(recipe)
        if kind is not type(again):
            return recipe
    if kind is tuple or kind is list:
        others = again if len(again) == len(recipe) else recipe
        parts = [kept(a, b, note, depth - 1) for a, b in zip(recipe, others)]
        if kind is tuple and all(a is b for a, b in zip(parts, recipe)):
            return recipe
        return kind(parts)
    if kind is dict:
        return {key: kept(value, again.get(key, value), note, depth - 1) for key, value in recipe.items()}
    if kind is set or kind is bytearray:
        return kind(recipe)
    if is_fresh or (kind is np.ndarray and recipe.nbytes < _SMALL_NBYTES):
        return _bytes_of(recipe) or recipe
    return recipe


def _bytes_of(value: Any) -> _Bytes | None:
    """Return the contents of an array or of a tensor in host memory; None for everything else."""
    if is_tensor(value) and value.device.type == "cpu" and is_plain(value):
        value = array_of(value)
    if type(value) is not np.ndarray or value.dtype.hasobject:
        return None
    return _Bytes(value.dtype, value.shape, value.tobytes())


def is_same_value(told: Any, now: Any) -> bool:
    """Whether two values of one of ``NUMBERS`` cannot be told apart. 0.0 equals -0.0, and can; NaN differs from NaN."""
    return repr(told) == repr(now) if type(now) in (float, complex) else bool(told == now)


def alike(told: Any, now: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether a recipe that was kept equals one that was made now."""
    kind = type(now)
    if told is now and (not depth or kind not in _CONTAINERS or kind in (tuple, np.ndarray)):
        return True
    if type(told) is _Bytes:
        return bool(told == _bytes_of(now))
    if kind is not type(told) or not depth:
        return False
    if kind in (tuple, list):
        return len(told) == len(now) and _are_alike(told, now, depth - 1)
    if kind is dict:
        pairs = (told, now), (told.values(), now.values())
        return len(told) == len(now) and all(_are_alike(one, other, depth - 1) for one, other in pairs)
    if kind is set:
        return {*map(id, told)} == {*map(id, now)}  # a copy may have another order
    if isinstance(now, np.generic):
        return bool(told.dtype == now.dtype and told.tobytes() == now.tobytes())
    if kind in NUMBERS:
        return is_same_value(told, now)
    if kind is slice:
        return _are_alike((told.start, told.stop, told.step), (now.start, now.stop, now.step), depth - 1)
    is_by_value = kind is bytearray or isinstance(now, np.dtype) or is_torch_device(now)
    return bool(told == now) if is_by_value else False


def _are_alike(told: Collection[Any], now: Collection[Any], depth: int) -> bool:
    """Whether the parts of two recipes are alike. Containers are compared by value, other objects by identity first."""
    if len(now) > _FEW and all(map(operator.is_, told, now)) and _CONTAINERS.isdisjoint(map(type, now)):
        return True
    return all(alike(one, other, depth) for one, other in zip(told, now))
