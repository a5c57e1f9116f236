"""The value of a shared variable in the program: a copy that cannot be changed in place.

``w.value[0] = 5`` would change only that copy and be lost. Any operation that makes a new object gives an ordinary
array, dict or list, which may be changed. So does the operator of ``w.value += 1``, and Python then assigns its result.
"""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

_TEXT = (
    "cannot change the value of a shared variable in place: it is a copy, so no rank would see the change. Assign the "
    "whole value (w.value = ...), or change a copy: copy.deepcopy(w.value)."
)


class ReadOnlyArray(np.ndarray):
    """An array that is not writable, with an error that says what to do. Results and copies are ordinary arrays."""

    __slots__ = ()

    def __setitem__(self, index: Any, value: Any) -> None:
        if not self.flags.writeable:
            raise ValueError(_TEXT)
        super().__setitem__(index, value)

    def __array_wrap__(self, array: np.ndarray, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else array

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _as_result(super().__array_function__(func, types, args, kwargs))

    def __getitem__(self, index: Any) -> Any:
        return _as_result(super().__getitem__(index))

    def copy(self, order: Any = "C") -> np.ndarray:  # type: ignore[override]
        return np.array(self, order=order)

    def astype(self, *args: Any, **options: Any) -> np.ndarray:
        return _as_result(super().astype(*args, **options))

    def flatten(self, order: Any = "C") -> np.ndarray:
        return _as_result(super().flatten(order))

    def __copy__(self) -> np.ndarray:  # type: ignore[override]
        return self.copy()

    def __deepcopy__(self, memo: Any) -> np.ndarray:  # type: ignore[override]
        return self.copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.copy().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self.view(np.ndarray))


def _as_result(result: Any) -> Any:
    """Return a new array as an ordinary one. Views of a value stay read-only."""
    if isinstance(result, ReadOnlyArray) and result.flags.writeable:
        return result.view(np.ndarray)
    return result


def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(_TEXT)


def _on_a_copy(operate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: operate(copied(self), other)


for _name in (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "xor", "or",
):  # fmt: skip
    setattr(ReadOnlyArray, f"__i{_name}__", _on_a_copy(getattr(operator, f"__i{_name}__")))

_CHANGING = (
    "__setitem__", "__delitem__", "clear", "pop", "popitem", "update", "setdefault", "move_to_end",
    "append", "extend", "insert", "remove", "reverse", "sort",
)  # fmt: skip


class _Container:
    """Mixin of the read-only containers: copies of them are ordinary containers."""

    __slots__ = ()

    def copy(self) -> Any:
        return ordinary(self)

    def __or__(self, other: Any) -> Any:
        return ordinary(self) | other

    def __copy__(self) -> Any:
        return ordinary(self)

    def __deepcopy__(self, memo: Any) -> Any:
        return copied(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        own = ordinary(self)  # of a class that can be loaded without synk
        if type(own) is list:
            return list, (tuple(own),)
        factory = (own.default_factory,) if type(own) is defaultdict else ()
        return type(own), (*factory, tuple(own.items()))

    def __repr__(self) -> str:
        return repr(ordinary(self))


@functools.cache
def _read_only_kind(kind: type) -> type:
    """Return the read-only subclass of the container class ``kind``."""
    members: dict[str, Any] = {name: _refuse for name in _CHANGING if hasattr(kind, name)}
    members.update((f"__i{name}__", _on_a_copy(getattr(operator, f"__i{name}__"))) for name in ("or", "add", "mul"))
    return type(kind.__name__, (_Container, kind), {"__slots__": (), "_kind": kind, **members})


def read_only(value: Any) -> Any:
    """Return a value of a variable so that it cannot be changed in place. The value must belong to the caller."""
    if isinstance(value, np.ndarray):
        view = value.view(ReadOnlyArray)
        view.flags.writeable = False
        return view
    return _rebuilt(value, read_only, _read_only_kind)


def ordinary(value: Any) -> Any:
    """Return a nesting with ordinary containers. Its arrays are not converted."""
    return _rebuilt(value, ordinary, _ordinary_kind)


def copied(value: Any) -> Any:
    """Return a copy with ordinary containers and arrays, which may be changed."""
    return value.copy() if isinstance(value, np.ndarray) else _rebuilt(value, copied, _ordinary_kind)


def _ordinary_kind(kind: type) -> type:
    return kind._kind if issubclass(kind, _Container) else kind  # type: ignore[attr-defined]


def _rebuilt(value: Any, convert: Callable[[Any], Any], kind_of: Callable[[type], type]) -> Any:
    """Return a container with its children converted, of the class that ``kind_of`` gives; other values unchanged."""
    if isinstance(value, tuple):
        children = [convert(child) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    own = _ordinary_kind(type(value))
    if own not in (list, dict, OrderedDict, defaultdict):
        return value
    kind: Any = kind_of(own)
    if own is list:
        return kind(convert(child) for child in value)
    result = kind(value.default_factory) if own is defaultdict else kind()
    for key, child in value.items():
        own.__setitem__(result, key, convert(child))
    return result
