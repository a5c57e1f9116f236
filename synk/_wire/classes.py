"""Classes that travel with what they hold, because no module that the receiver can import has them. Type hints.

cloudpickle gives such a class a number, by which a process that has the class finds it again. It then writes over what
the class holds there. Here the process that made the class decides: what others send back of it changes
nothing where it is known already.

Hints say nothing about what a function computes: one that cannot be sent as it is does not keep its function from it.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import importlib
import sys
import types
import typing
import uuid
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from cloudpickle.cloudpickle import (
    _DYNAMIC_CLASS_TRACKER_BY_ID,
    _extract_code_globals,
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


_HERE = uuid.uuid4().hex
"""Names this process."""

_BASES, _NAMESPACE, _NUMBER = 2, 3, -2
"""Where cloudpickle's makers of classes take the bases, what the class is made with, and its number."""

_MEMBERS = "members"
"""Under which name the attributes of an enum's members travel."""

_MISSING: Any = object()

_came: weakref.WeakKeyDictionary[type, set[str] | None] = weakref.WeakKeyDictionary()
"""The classes that other processes have sent, with the names that they brought; None until a class was filled."""

_returned: weakref.WeakSet[type] = weakref.WeakSet()
"""The classes that this process has sent to itself, as an inline runtime does."""


def completed(cls: type, reduced: Any) -> Any:
    """Return cloudpickle's recipe for a class, completed by what cloudpickle leaves out."""
    _, args, (table, slots), *_ = reduced
    if isinstance(cls, enum.EnumMeta):  # makes its names by itself
        slots[_MEMBERS] = tuple(_attributes_of_members(cls))
    else:
        table.update(_same_as_inherited(cls))
        if cls.__qualname__ != cls.__name__:
            table["__qualname__"] = cls.__qualname__
        # cloudpickle sets it afterwards, when it has no effect any more. Of a NamedTuple it cannot be set.
        if "__slots__" in vars(cls) and NamedTuple not in args[_BASES]:
            args[_NAMESPACE]["__slots__"] = vars(cls)["__slots__"]
    add_annotations(cls, table)
    return reduced


def by_word(cls: type, reduced: Any, has_word: bool) -> Any:
    """Return how a class travels, from its completed recipe. With ``has_word``, the sender decides what it holds."""
    make, args, (table, slots), *_, setter = reduced
    owner = _HERE if has_word and cls not in _came else ""
    return find_or_make, (make, args), (table, slots, owner, cls.__bases__, setter), None, None, fill_class


def _attributes_of_members(cls: enum.EnumMeta) -> Iterator[tuple[str, str, Any]]:
    """Yield what ``__init__`` or ``__new__`` has given the members of an enum, where neither runs again."""
    members: dict[str, Any] = dict(cls.__members__)
    for name, member in members.items():
        for key, value in vars(member).items():
            if not (key.startswith("_") and key.endswith("_")):
                yield name, key, value


def _same_as_inherited(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that are the very objects of a base. cloudpickle leaves them to the base."""
    own = {name: value for name, value in vars(cls).items() if not (name.startswith("__") and name.endswith("__"))}
    bases = [vars(base) for base in cls.__bases__]
    return {k: value for k, value in own.items() if any(base.get(k, _MISSING) is value for base in bases)}


def find_or_make(make: Any, args: tuple[Any, ...]) -> type:
    """Return the class that this process has by the same number, or a new one, which is empty.

    Hooks that came have run where the class was made, and what they did to objects comes with these. So only those run
    here that name no such object: they may register the class in a library.
    """
    found: type | None = _DYNAMIC_CLASS_TRACKER_BY_ID.get(args[_NUMBER])
    if found is None:
        metaclass, bases = (type(args[0][-1]), args[0]) if type(args[0]) is tuple else (args[0], args[_BASES])
        hooks = _hooks(metaclass, types.resolve_bases(bases))
        owners = {cls for owner, *_ in hooks for cls in owner.__mro__ if cls in _came}
        with contextlib.suppress(Exception), _without([each for each in hooks if _names_object(each[-1], {*owners})]):
            found = make(*args)
        if found is None:  # a hook needs what the class does not hold yet
            with _without(hooks):
                found = make(*args)
        _came[found] = None
    return found


def _hooks(metaclass: type, bases: Iterable[type] = ()) -> list[tuple[type, str, Any]]:
    """Return what came and runs when a class is made or filled, each with the class that has it and its name."""
    names = ("__prepare__", "__new__", "__init__", "__setattr__")
    places = [(cls, name) for cls in metaclass.__mro__ for name in names]
    places += dict.fromkeys((cls, "__init_subclass__") for base in bases for cls in base.__mro__)
    return [(cls, name, vars(cls)[name]) for cls, name in places if cls in _came and name in vars(cls)]


def _names_object(value: Any, met: set[Any]) -> bool:
    """Whether a value is an object that came, or a function that names one, or an attribute of a class in ``met``.

    ``met`` gets the functions that were looked at.
    """
    code = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    if isinstance(code, types.ModuleType):
        return False
    is_code = isinstance(code, (type, types.FunctionType, types.BuiltinFunctionType))
    if is_code and (code in met or _lookup_module_and_qualname(code) is not None):
        return False
    if not isinstance(code, types.FunctionType) or code.__defaults__ or code.__kwdefaults__ or vars(code):
        return True
    owners, table = [cls for cls in met if isinstance(cls, type)], {**vars(builtins), **code.__globals__}
    met.add(code)
    named = [table.get(name) for name in _extract_code_globals(code.__code__)]  # None: it is still to come
    names = [name for name in code.__code__.co_names if not name.startswith("__")]
    named += [vars(cls)[name] for cls in owners for name in names if name in vars(cls)]
    has_cells = not {"__class__"}.issuperset(code.__code__.co_freevars)
    return has_cells or any(_names_object(each, met) for each in named)


@contextlib.contextmanager
def _without(hooks: list[tuple[type, str, Any]]) -> Iterator[None]:
    """Take hooks from their classes for a while."""
    for cls, name, _ in hooks:
        type.__delattr__(cls, name)
    try:
        yield
    finally:
        for each in hooks:
            type.__setattr__(*each)


def make_instance(cls: Any) -> Any:
    """Return an empty object of a class whose own ``__new__`` may need what the class does not hold yet."""
    return next(base for base in cls.__mro__ if base not in _came and "__new__" in vars(base)).__new__(cls)


def fill_class(cls: type, state: tuple[Any, Any, str, tuple[type, ...], Any]) -> None:
    """Give a class exactly what the process that made it has sent.

    What that process sent before and has removed since is removed here. What this process has added itself stays.
    """
    table, slots, owner, bases, setter = state
    before = _came.get(cls, _MISSING)
    if owner == _HERE and before is not None:
        _returned.add(cls)
        return
    if not owner and before is not None:
        return
    for name in () if before in (None, _MISSING) else before.difference(table).intersection(vars(cls)):
        type.__delattr__(cls, name)
    _came[cls] = set(table)
    for member, name, value in slots.pop(_MEMBERS, ()):
        object.__setattr__(cls.__members__[member], name, value)  # type: ignore[attr-defined]
    with _without(_hooks(type(cls))):
        setter(cls, (table, slots))
    if cls.__bases__ != bases:  # of a class that this process had
        type.__setattr__(cls, "__bases__", bases)


def is_at_home(cls: type) -> bool:
    """Whether the process that sends changes of a class is this one, so that the class has them already."""
    return cls in _returned and cls not in _came


def note_brought(cls: type, name: str) -> None:
    """Note that the process that made a class has sent a change of it."""
    names = _came.get(cls)
    if names is not None:
        names.add(name)
