"""The master's own objects, kept in step with those of the ranks: whoever looks at one finds it up to date.

A linked object gets a class of its own, derived from what it was, whose attribute access first brings it up to date.
So ``model.state_dict()``, ``model(x)``, ``copy.deepcopy(model)``, ``optimizer.param_groups`` and ``torch.save(model)``
need no other code. It says that it is of its old class, and pickles and copies are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_CLASS: Any = object.__dict__["__class__"]


def link(obj: Any, refresh: Callable[[], None]) -> bool:
    """Call ``refresh`` whenever an attribute of ``obj`` is looked up; return False where it can be given no class."""
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
    }
    try:
        linked = type(original)(original.__name__, (original,), names)
        _CLASS.__set__(obj, linked)
    except TypeError:  # of C, or with slots
        return False
    return True


def unlink(obj: Any) -> None:
    """Give an object its own class back."""
    original = type(obj).__dict__.get("_synk_original")
    if original is not None:
        _CLASS.__set__(obj, original)
