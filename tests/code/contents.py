"""What an object holds, as one line of text that differs wherever one leaf, type, order or alias differs.

The workers import this file and read captured objects with it: so no name of an attribute or key, and no iteration,
stands in the code of the captured function itself. It has no state of its own.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import types
import warnings
import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis)))
COLLECTIONS = frozenset((list, dict, set, frozenset, deque, bytearray))
MOST_ELEMENTS = 24
"""Of arrays and collections that are written out; larger ones are summed up."""


def text(obj: Any) -> str:
    """Return what ``obj`` holds, all the way down; the second time an object is met, the number of the first."""
    return _Reader().read(obj)


class _Reader:
    def __init__(self) -> None:
        self._met: dict[int, tuple[int, Any]] = {}

    def read(self, obj: Any) -> str:
        if type(obj) in PLAIN:
            return repr(obj)
        if isinstance(obj, np.generic):
            return repr(obj.item())
        if type(obj) is tuple:  # whether two equal ones are one object is nobody's promise
            return f"({self._listed(obj)})"
        if id(obj) in self._met:
            return f"<again {self._met[id(obj)][0]}>"
        self._met[id(obj)] = len(self._met), obj
        return self._contents(obj)

    def _contents(self, obj: Any) -> str:
        if type(obj) in COLLECTIONS:  # has nothing else, and there are thousands of them
            return f"{type(obj).__name__}{self._collection(obj)}"
        if isinstance(obj, np.ndarray):
            return self._array(obj)
        if isinstance(obj, (np.random.Generator, np.random.RandomState, random.Random)):
            return f"{type(obj).__name__} next {float(copy.deepcopy(obj).random())!r}"
        if isinstance(obj, types.FunctionType):
            return self._function(obj)
        if isinstance(obj, types.MethodType):
            return f"method {obj.__name__} of {self.read(obj.__self__)}{self._called(obj)}"
        if isinstance(obj, functools.partial):
            return f"partial({self.read(obj.func)}, {self.read(obj.args)}, {self.read(obj.keywords)})"
        if isinstance(obj, types.ModuleType):
            return f"module({self._items(_public(vars(obj)))})"
        if isinstance(obj, type):
            return f"class {obj.__name__}({self._of_class(obj, [*obj.__mro__, *type(obj).__mro__])})"
        if hasattr(type(obj), "detach"):
            return f"{type(obj).__name__}{tuple(obj.shape)}{obj.detach().tolist()}"
        if hasattr(type(obj), "toarray"):
            return f"{type(obj).__name__}{obj.toarray().tolist()}"
        return f"{type(obj).__name__}{self._collection(obj)}{self._attributes(obj)}"

    def _array(self, array: np.ndarray) -> str:
        head = f"{type(array).__name__} {array.dtype.str}{array.shape}"
        if _is_ours(type(array)):
            head += self._attributes(array)
        if array.dtype == object or array.dtype.names or array.size <= MOST_ELEMENTS:
            mask = f" mask {array.mask.tolist()}" if isinstance(array, np.ma.MaskedArray) else ""
            return f"{head}{self._listed(array.tolist() if array.ndim else [array.item()])}{mask}"
        crc = f" crc {zlib.crc32(array.tobytes()):08x}" if array.nbytes < 1 << 20 else ""
        return f"{head} sum {array.sum().item()!r}{crc}"

    def _collection(self, obj: Any) -> str:
        if isinstance(obj, dict):
            return "{" + self._items(obj) + "}"
        if isinstance(obj, (set, frozenset)):
            return "{" + ", ".join(sorted(map(self.read, obj))) + "}"
        if isinstance(obj, (list, tuple, deque)):
            return f"[{self._listed(obj)}]"
        if isinstance(obj, bytearray):
            return repr(bytes(obj))
        return ""

    def _items(self, table: dict[Any, Any]) -> str:
        lines = [
            f"{key!r}: {value!r}" if type(value) in PLAIN else f"{key!r}: {self.read(value)}"
            for key, value in table.items()
        ]
        return ", ".join(lines) if len(lines) <= MOST_ELEMENTS else _summed_up(lines)

    def _listed(self, values: Iterable[Any]) -> str:
        lines = [repr(value) if type(value) in PLAIN else self.read(value) for value in values]
        return ", ".join(lines) if len(lines) <= MOST_ELEMENTS else _summed_up(lines)

    def _attributes(self, obj: Any) -> str:
        table = dict(getattr(obj, "__dict__", {}))
        mro = type(obj).__mro__
        for cls in mro:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name != "__dict__" and hasattr(obj, name):
                    table[name] = getattr(obj, name)
        if not table and not any(map(_is_ours, mro)):
            return ""
        return f"<{self._items(table)} | {self._of_class(obj, mro)}>"

    def _of_class(self, obj: Any, mro: Iterable[type]) -> str:
        """Read what ``obj`` has from classes that were made inside a function: these travel by value."""
        names = {name for cls in mro if _is_ours(cls) for name in _public(vars(cls))}
        parts = []
        for name in sorted(names):  # cloudpickle does not keep their order
            if isinstance(inspect.getattr_static(obj, name, None), types.MemberDescriptorType):
                continue
            with warnings.catch_warnings():  # Python 3.13 says that a partial of a class will be a method
                warnings.simplefilter("ignore", FutureWarning)
                value = getattr(obj, name, None)
            is_code = isinstance(value, (types.FunctionType, types.MethodType, functools.partial))
            parts.append(f"{name}{self._called(value)}" if is_code else f"{name}={self.read(value)}")
        return ", ".join(parts)

    def _function(self, function: types.FunctionType) -> str:
        own = self._items(vars(function))
        defaults = self.read(function.__defaults__) + self.read(function.__kwdefaults__)
        return f"def {function.__name__}({own} | {defaults}){self._called(function)}"

    def _called(self, function: Any) -> str:
        """Call what needs no argument; what it returns is what it means."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:  # a partial with arguments that its function does not take
            return ""
        if any(each.default is each.empty and each.kind not in (2, 4) for each in parameters):
            return ""
        return f"()={self.read(function())}"


def _public(table: Any) -> dict[str, Any]:
    return {key: value for key, value in table.items() if not key.startswith("_")}


def _is_ours(cls: type) -> bool:
    """Whether a class was made by a script. Not told by ``__qualname__``: copies by value lose it."""
    return cls.__module__ == "__main__"


def _summed_up(lines: list[str]) -> str:
    return f"{len(lines)} items crc {zlib.crc32(', '.join(lines).encode()):08x}"
