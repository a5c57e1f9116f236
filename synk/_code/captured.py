"""Checks on captured objects: whether they can be sent, and which variables are in them.

An error's text names the part of a function or an object the way one would write it in code.
"""

from __future__ import annotations

import gc
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from synk._code.comparisons import contents_getter
from synk._code.facets import class_table, slot, slots_of, table_of
from synk._code.modules import globals_in, is_users_module
from synk._code.parcels import HandlePickler
from synk._processes.output import warn_at_users_line
from synk._pure.interrupts import raise_if_of_handler
from synk._pure.words import text_of
from synk.errors import SerializationError

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


class Restless:
    """The objects of a function whose pickle is another one each time: they are sent with each call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._places: set[str] = set()
        self._has_told = False

    def note(self, fn: Any, objects: Iterable[Any]) -> None:
        """Note such objects. Tell the user once, when one is sent again."""
        places = {place_of(fn, obj) for obj in objects}
        told = self._places & places
        if told and not self._has_told:
            self._has_told = True
            warn_at_users_line(
                f"{self._name!r} captured {min(told)}, whose pickle is another one each time: it is sent with each "
                "call, and what a rank has changed in it is lost. Pass it as an argument, or make it in the function.",
                UserWarning,
            )
        self._places |= places


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class Referred(NamedTuple):
    """The variables and resident objects to which a function refers."""

    variables: set[Any]
    residents: set[Any]


class Captured(NamedTuple):
    """Everything to which a function refers: things on the workers, and those of torch, which are copied there."""

    referred: Referred
    modules: tuple[Any, ...]
    optimizers: tuple[Any, ...]
    tensors: tuple[Any, ...]

    @property
    def classes(self) -> list[type]:
        """The classes that resident objects name."""
        residents = sorted(self.referred.residents, key=lambda resident: resident.number)
        return [cls for resident in residents for cls in resident.classes]


def captured_in(value: Any) -> Captured:
    """Return what ``value`` refers to. Raises whatever pickling it raises."""
    pickler = HandlePickler(_Nowhere(), buffer_callback=lambda buffer: None)
    pickler.dump(value)
    parts = {id(part) for module in pickler.modules for part in list(module.modules())[1:]}
    return Captured(
        referred_in(pickler.handles),
        tuple(module for module in pickler.modules if id(module) not in parts),
        tuple(pickler.optimizers),
        tuple(pickler.tensors),
    )


def check_captured(name: str, options: dict[str, Any]) -> Captured:
    """Return what a function refers to.

    Raises
    ------
    SerializationError
        If the function cannot be sent.
    TypeError
        If it would train: each worker would change a copy of its own, and no model would learn.
    """
    try:
        captured = captured_in(options)
    except Exception as error:
        raise unsendable(repr(name), options["fn"], error) from error
    check_optimizers(name, captured.optimizers)
    return captured


def unsendable(names: str, fn: Any, error: Exception) -> SerializationError:
    """Return the error for a function that cannot be pickled. What a handler of a signal has raised is raised here."""
    raise_if_of_handler(error)
    return SerializationError(
        f"cannot send {names} to the workers: {_culprit_of(fn)}{text_of(error).rstrip('.')}. "
        "Make such an object inside the function, or pass what it needs as an argument."
    )


def check_optimizers(name: str, optimizers: Sequence[Any]) -> None:
    if optimizers:
        raise TypeError(
            f"cannot build {name!r}: it refers to a torch optimizer ({type(optimizers[0]).__name__}), whose steps "
            "would change a copy on each worker and not the model here. Use synk.torch.replicate(model, optimizer), "
            "and as the body a function outside of any class that holds them; or keep both on the workers by "
            "synk.resident((model, optimizer))."
        )


def _culprit_of(fn: Any) -> str:
    """Return a sentence that names the first part of a function that cannot be pickled."""
    for name, value in named_by(fn):
        try:
            captured_in(value)
        except Exception as error:
            raise_if_of_handler(error)
            place, part = culprit_in(name, value, captured_in)
            return f"its variable {place!r} ({type(part).__name__}) cannot be pickled. "
    return ""


def referred_in(handles: Sequence[Any]) -> Referred:
    """Return the variables and resident objects behind the handles that a function captured."""
    referents = [handle._referent for handle in handles]
    return Referred(
        {each for each in referents if getattr(each, "kind", "") == "variable"},
        {each for each in referents if getattr(each, "kind", "") == "resident"},
    )
