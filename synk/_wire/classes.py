"""Classes that travel with what they hold, because no module that the receiver can import has them.

cloudpickle gives such a class a number, by which a process that has the class finds it again. It then writes over what
the class holds there. Here the process that made the class decides: what others send back of it changes
nothing where it is known already.
"""

from __future__ import annotations

import contextlib
import enum
import uuid
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID

from synk._wire.hints import add_annotations

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
    return find_or_make, (make, args), (table, slots, owner, setter), None, None, fill_class


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
    """Return the class that this process has by the same number, or a new one, which is empty."""
    found: type | None = _DYNAMIC_CLASS_TRACKER_BY_ID.get(args[_NUMBER])
    if found is None:
        found = make(*args)
        _came[found] = None
    return found


def fill_class(cls: type, state: tuple[Any, Any, str, Any]) -> None:
    """Give a class exactly what the process that made it has sent.

    What that process sent before and has removed since is removed here. What this process has added itself stays.
    """
    table, slots, owner, setter = state
    before = _came.get(cls, _MISSING)
    if owner == _HERE and before is not None:
        _returned.add(cls)
        return
    if not owner and before is not None:
        return
    for name in set() if before in (None, _MISSING) else before.difference(table):
        with contextlib.suppress(AttributeError):
            type.__delattr__(cls, name)
    _came[cls] = set(table)
    for member, name, value in slots.pop(_MEMBERS, ()):
        object.__setattr__(cls.__members__[member], name, value)  # type: ignore[attr-defined]
    setter(cls, (table, slots))


def is_at_home(cls: type) -> bool:
    """Whether the process that sends changes of a class is this one, so that the class has them already."""
    return cls in _returned and cls not in _came


def note_brought(cls: type, name: str) -> None:
    """Note that the process that made a class has sent a change of it."""
    names = _came.get(cls)
    if names is not None:
        names.add(name)
