"""Objects that take over the contents of others of their class, so that all references see the new contents."""

from __future__ import annotations

import copyreg
import random
import types
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch

PLAIN = (int, float, bool, str, type(None))

CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type, weakref.ref)


def updated(old: Any, new: Any, seen: dict[int, Any] | None = None) -> Any:
    """Return the old object with the contents of ``new``, or ``new`` if it cannot take them over.

    The old object is preferred because other objects may refer to it. ``seen`` holds the results for objects in
    ``new``, by address; pass one dict for several values that share objects.
    """
    seen = {} if seen is None else seen
    if old is new or type(old) is not type(new) or isinstance(new, PLAIN):
        return new
    if id(new) not in seen:
        seen[id(new)] = new, old  # both are kept alive, so that no other object gets the address
        seen[id(new)] = new, old if _take_over(old, new, seen) else new
    return seen[id(new)][1]


def has_only_attributes(value: Any) -> bool:
    """Whether an object consists of the contents of its ``__dict__``, so that no pickling rule of its own applies."""
    return hasattr(value, "__dict__") and bool(value.__reduce_ex__(2)[0] is copyreg.__newobj__)  # type: ignore[attr-defined]


def _set_generator(old: Any, new: Any) -> None:
    if isinstance(new, np.random.Generator):
        old.bit_generator.state = new.bit_generator.state
    elif isinstance(new, torch.Generator):
        old.set_state(new.get_state())
    else:
        old.setstate(new.getstate())


def _take_over(old: Any, new: Any, seen: dict[int, Any]) -> bool:
    """Give an object the contents of another one of its class. Return False if that is not possible."""
    if isinstance(new, torch.Tensor):
        if old.shape != new.shape or old.dtype != new.dtype or not old.is_contiguous():
            return False
        old.detach().copy_(new.detach())
    elif isinstance(new, np.ndarray):
        if old.shape != new.shape or old.dtype != new.dtype or not old.flags.writeable:
            return False
        old[...] = new
    elif isinstance(new, dict):
        items = {key: updated(old.get(key), item, seen) for key, item in new.items()}
        old.clear()
        old.update(items)
    elif isinstance(new, (list, deque, bytearray)):
        items_now = [updated(*pair, seen) for pair in zip(old, new)] + list(new)[len(old) :]
        old.clear()
        old.extend(items_now)
    elif isinstance(new, set):
        old.clear()
        old.update(new)
    elif isinstance(new, types.FunctionType):
        return bool(old.__code__ == new.__code__)  # the objects that a function refers to are not taken over
    elif isinstance(new, (np.random.Generator, torch.Generator, random.Random)):
        _set_generator(old, new)
    elif isinstance(new, CODE) or not has_only_attributes(new):
        return False
    else:
        return _take_over(vars(old), vars(new), seen)
    return True
