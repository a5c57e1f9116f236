"""Keeps the master's own objects in step with the objects of the ranks: reading an object first brings it up to date.

A linked object gets a class of its own, derived from its old one, whose attribute access first updates the object. So
``model.state_dict()``, ``model(x)``, ``copy.deepcopy(model)``, ``optimizer.param_groups`` and ``torch.save(model)``
need no special code. The object claims to be of its old class, and its pickles and copies are of that class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_CLASS: Any = object.__dict__["__class__"]


def link(obj: Any, refresh: Callable[[], None]) -> bool:
    """Call ``refresh`` whenever an attribute of ``obj`` is read. Return False if its class cannot be replaced."""
    original: Any = type(obj)

    def getattribute(self: Any, name: str) -> Any:
        refresh()
        return original.__getattribute__(self, name)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        refresh()
        reduced = original.__reduce_ex__(self, protocol)
        if not isinstance(reduced, tuple):
            return reduced
        make, args, *rest = reduced
        return (make, tuple(original if each is linked else each for each in args), *rest)

    names = {
        "__getattribute__": getattribute,
        "__reduce_ex__": reduce_ex,
        "__class__": property(lambda self: original),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_synk_original": original,
        "_synk_refresh": staticmethod(refresh),
    }
    try:
        linked = type(original)(original.__name__, (original,), names)
        _CLASS.__set__(obj, linked)
    except TypeError:  # implemented in C, or with slots
        return False
    return True


def refresh_of(obj: Any) -> Callable[[], None] | None:
    """Return the function that a linked object calls before it is read; None if the object is not linked."""
    found = type(obj).__dict__.get("_synk_refresh")
    return None if found is None else found.__func__


def unlink(obj: Any) -> None:
    """Give an object its own class back."""
    original = type(obj).__dict__.get("_synk_original")
    if original is not None:
        _CLASS.__set__(obj, original)
