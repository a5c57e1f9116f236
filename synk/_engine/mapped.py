"""The functions of maps, so that each is sent only once.

One that a module holds under its name is remembered as long as that is so. Any other is forgotten with the last map of
it, and what it captured is freed then.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from typing import Any


class MappedFunctions:
    """What was made of functions that are mapped."""

    def __init__(self) -> None:
        self._living: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()
        self._kept: dict[tuple[Any, ...], Any] = {}

    def get(self, fn: Any, make: Callable[[], Any], *, is_spread: bool = False) -> Any:
        """Return what was made for a function, or make it. Any thread may call it.

        ``is_spread``: whether the function is called with several items as separate arguments.
        """
        self._kept = {key: (held, made) for key, (held, made) in list(self._kept.items()) if _is_in_module(held)}
        # A method is a new object each time it is read. Equal ones belong to the same object.
        is_method = type(fn) is types.MethodType
        key = (id(fn.__self__), id(fn.__func__), is_spread) if is_method else (id(fn), is_spread)
        made = self._living.get(key)
        known = None if made is None else made.fn.args[0] if is_spread else made.fn
        if made is None or not (known is fn or (is_method and known == fn)):  # else its module was loaded again
            made = self._living[key] = make()
        if _is_in_module(fn):
            self._kept[key] = fn, made
        return made

    def clear(self) -> None:
        self._living.clear()
        self._kept.clear()


def _is_in_module(fn: Any) -> bool:
    """Whether a module holds a function under its name."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    return module is not None and vars(module).get(getattr(fn, "__qualname__", "")) is fn
