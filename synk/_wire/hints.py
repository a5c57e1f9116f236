"""Type hints of the user's code: parameters and aliases of types, and annotations.

They say nothing about what a function computes: one that cannot be sent as it is does not keep its function from it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
import typing
from typing import Any

from cloudpickle.cloudpickle import (
    _get_or_create_tracker_id,
    _is_registered_pickle_by_value,
    _lookup_class_or_track,
    _lookup_module_and_qualname,
)

_OPTIONS = ("bound", "covariant", "contravariant", "infer_variance", "default")


def _reduce_parameter(parameter: Any) -> Any:
    """Return the recipe of a type parameter: its name in a module, or what it is made with."""
    options = {}
    for name in _OPTIONS:
        with contextlib.suppress(AttributeError, NameError):  # not of this kind, or it names nothing
            options[name] = getattr(parameter, f"__{name}__")
    constraints = getattr(parameter, "__constraints__", ())
    number = _get_or_create_tracker_id(parameter)
    made = make_parameter, (type(parameter), parameter.__name__, constraints, options, number)
    return _by_name(parameter) or made


def make_parameter(kind: Any, name: str, constraints: tuple[Any, ...], options: dict[str, Any], number: str) -> Any:
    """Return the type parameter that this process has by the same number, or a new one."""
    return _lookup_class_or_track(number, kind(name, *constraints, **options))


def _reduce_alias(alias: Any) -> Any:
    """Return the recipe of an alias: its name in a module, or what it is made with. One of itself stands for a text."""
    value = str(alias.__value__) if _is_recursive(alias) else alias.__value__
    return _by_name(alias) or (make_alias, (type(alias), alias.__name__, value, alias.__type_params__))


def _is_recursive(alias: Any) -> bool:
    met: list[Any] = []
    pending = [alias.__value__]
    while pending:
        each = pending.pop()
        if each is alias:
            return True
        if not any(each is other for other in met):
            met.append(each)
            pending += [*typing.get_args(each), getattr(each, "__origin__", None), getattr(each, "__value__", None)]
    return False


def make_alias(kind: Any, name: str, value: Any, parameters: tuple[Any, ...]) -> Any:
    """Return what the statement ``type name[parameters] = value`` makes."""
    return kind(name, value, type_params=parameters)


def _reduce_new_type(new: Any) -> Any:
    return _by_name(new) or (type(new), (new.__name__, new.__supertype__))


def _by_name(obj: Any) -> Any:
    """Return the recipe of an object that a module of the receiver has, or None."""
    place = _lookup_module_and_qualname(obj, name=obj.__name__)
    return None if place is None or _is_registered_pickle_by_value(place[0]) else (getattr, place)


def _reduce_arguments(arguments: Any) -> Any:
    """Return the recipe of ``P.args`` or ``P.kwargs``, which lose their parameter from Python 3.12 on."""
    return type(arguments), (arguments.__origin__,)


_REDUCERS = {
    "TypeVar": _reduce_parameter,
    "ParamSpec": _reduce_parameter,
    "TypeVarTuple": _reduce_parameter,
    "ParamSpecArgs": _reduce_arguments,
    "ParamSpecKwargs": _reduce_arguments,
    "TypeAliasType": _reduce_alias,
    "NewType": _reduce_new_type,
}

REDUCERS: dict[type, Any] = {getattr(typing, name): rule for name, rule in _REDUCERS.items() if hasattr(typing, name)}
"""Rules of the pickler for what this version of Python has of the hints that cannot be pickled by themselves."""


def readable(function: types.FunctionType) -> types.FunctionType:
    """Return a function whose annotations can be read: itself, or one like it with their texts.

    From Python 3.14 on annotations are computed when they are read, and may name what only type checkers import.
    """
    try:
        function.__annotations__  # noqa: B018
    except (NameError, AttributeError):
        code, names, cells = function.__code__, function.__globals__, function.__closure__
        like = types.FunctionType(code, names, function.__name__, function.__defaults__, cells)
        vars(like).update(vars(function))
        for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
            setattr(like, name, getattr(function, name))
        like.__annotations__ = _texts(function)
        return like
    return function


def add_annotations(cls: type, table: dict[str, Any]) -> None:
    """Put the annotations of a class into its recipe. From Python 3.14 on they are the result of a function of it."""
    if sys.version_info >= (3, 14) and not {"__annotate_func__", "__annotations_cache__"}.isdisjoint(vars(cls)):
        table.pop("__annotations_cache__", None)
        try:
            table["__annotations__"] = cls.__annotations__
        except (NameError, AttributeError):
            table["__annotations__"] = _texts(cls)


def _texts(obj: Any) -> dict[str, str]:
    annotationlib: Any = importlib.import_module("annotationlib")  # from Python 3.14 on
    return annotationlib.get_annotations(obj, format=annotationlib.Format.STRING)
