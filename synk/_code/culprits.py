"""Names a part of a function or an object in an error's text, the way one would write it in code."""

from __future__ import annotations

import gc
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from synk._code.comparisons import contents_getter
from synk._code.facets import class_table, slot, slots_of, table_of
from synk._code.modules import globals_in, is_users_module
from synk._pure.interrupts import raise_if_of_handler

_MAX_DEPTH = 6


def culprit_in(place: str, value: Any, pickle: Callable[[Any], Any], depth: int = _MAX_DEPTH) -> tuple[str, Any]:
    """Find the innermost part of an object that cannot be pickled. Return how one would write it, and the part.

    Parameters
    ----------
    place : str
        How one would write ``value``.
    value : object
        What ``pickle`` has refused.
    """
    is_code = isinstance(value, (type, types.FunctionType))
    is_open = is_code or _can(operator.methodcaller("__reduce_ex__", 4), value)  # not one that refuses by itself
    for step, part in _held_by(value) if depth and is_open else ():
        if not _can(pickle, part):
            return culprit_in(part.__name__ if isinstance(part, type) else place + step, part, pickle, depth - 1)
    return place, value


def _can(pickle: Callable[[Any], Any], value: Any) -> bool:
    try:
        pickle(value)
    except Exception as error:
        raise_if_of_handler(error)
        return False
    return True


def place_of(fn: Any, obj: Any) -> str:
    """Return how a function would write an object that it captured, such as ``config["rates"]``; else its type."""
    found = (place for place, value in _places(fn) if value is obj)
    return next(found, f"of type {type(obj).__name__}")


def dearest(fn: Any, costs: dict[int, float]) -> str:
    """Return what costs most of all that a function captured: an object or, if that is a small part, its variable.

    ``costs`` has the cost of each object by id.
    """
    by_name: dict[str, list[tuple[float, str]]] = {}
    for place, value in _places(fn):
        if id(value) in costs:
            by_name.setdefault(re.split(r"[.\[]", place)[0], []).append((costs.pop(id(value)), place))
    if not by_name:
        return "its captured objects"
    name = max(by_name, key=lambda each: sum(cost for cost, _ in by_name[each]))
    cost, place = max(by_name[name])
    return place if 2 * cost > sum(cost for cost, _ in by_name[name]) else name


def _places(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function captured, and how it would write each object."""
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = list(named_by(fn))
    for _ in range(20_000):
        if not pending:
            break
        place, value = pending.pop(0)
        yield place, value
        if id(value) in seen or isinstance(value, (str, bytes, int, float, type(None))):
            continue
        seen.add(id(value))
        pending += [(place + step, each) for step, each in _held_by(value)]


def named_by(fn: Any) -> Iterable[tuple[str, Any]]:
    """Yield what a function captured, and under which name."""
    fn = getattr(fn, "func", fn)
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        yield "self", owner
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, types.FunctionType):
        yield "self", fn
        return
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
        yield name, contents_getter(cell)("", None)
    for name in sorted(globals_in(fn.__code__)):
        if name in fn.__globals__:
            yield name, fn.__globals__[name]
    for name, value in (fn.__kwdefaults__ or {}).items():
        yield name, value
    defaults, names = fn.__defaults__ or (), fn.__code__.co_varnames[: fn.__code__.co_argcount]
    yield from zip(names[len(names) - len(defaults) :], defaults)


def _held_by(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", each) for key, each in list(dict.items(value))]
    if isinstance(value, (list, tuple)):
        return [(f"[{place}]", each) for place, each in enumerate(value)]
    if isinstance(value, types.FunctionType):
        return [("", each) for _, each in named_by(value)]
    if isinstance(value, type):
        members = [(f".{name}", each) for name, each in class_table(value).items() if name not in slots_of(value)]
        return members + [("", base) for base in value.__bases__]
    if isinstance(value, types.ModuleType):
        return (
            [(f".{name}", each) for name, each in list(vars(value).items())] if is_users_module(value.__name__) else []
        )
    if isinstance(value, np.ndarray):
        return [(f"[{place}]", each) for place, each in enumerate(value.flat)] if value.dtype.hasobject else []
    found = [(f".{name}", each) for name, each in list((table_of(value) or {}).items())]
    found += [(f".{name}", slot(value, name)) for name in slots_of(type(value))]
    return found + [("", each) for each in gc.get_referents(value)]  # in C: under the holder's name
