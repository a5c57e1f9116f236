"""The facets of captured objects: how an object can change, what the ranks were told of it, and what differs now.

How an object is pickled decides which facets it has:

- :class:`Table`: what it holds under names. The names of a module, the attributes of an instance or a
  function, the contents of a cell;
- :class:`Elements`: what a container holds. A dict, a list, a deque, a set, an array of objects;
- :class:`State`: the recipe of an object that says itself how it is pickled (``__reduce__``, ``__getstate__``). Its
  attributes are its own business, so what it would be pickled from is compared instead;
- ``ArrayContents`` (``arrays.py``): the bytes of an array or a tensor.

A table and elements are compared shallowly, by identity, because the objects behind them have facets of their own. A
recipe is made anew each time it is asked for, so it is compared by value (``synk._pure.alike``).

A *unit* is the smallest part that is sent again: an attribute, a key, an element. In one file because it is a row of
small classes with the same methods, and the functions that make them.
"""

from __future__ import annotations

import _random  # the base of Python's generators; ``random`` itself takes a millisecond to import
import contextlib
import enum
import itertools
import operator
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from synk._pure.alike import NUMBERS, alike, is_same_value, kept

MISSING: Any = enum.Enum("Missing", "MISSING").MISSING  # type: ignore[attr-defined]
"""Stands for a value that does not exist."""

UNKNOWN: Any = object()
"""Stands for what the ranks were told when some ranks may have been told and others not."""

FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__")
_NOT_SENT = frozenset(("__dict__", "__weakref__", "_abc_impl", "__firstlineno__", "__static_attributes__"))

_MADE_BY_ENUM = frozenset(name for name in vars(enum.Flag("Made", ())) if not name.startswith("__"))
"""What an enum keeps about its members, which it makes with them."""


class Change(NamedTuple):
    """One unit that differs from what the ranks were told.

    Attributes
    ----------
    kind : str
        How a worker applies it; see ``synk._rank.received``.
    key : object
        The unit within its object.
    value : object
        The unit as it is now, or ``MISSING``.
    """

    kind: str
    key: Any
    value: Any


class Facet:
    """One way in which an object can change.

    Attributes
    ----------
    obj : object
    """

    obj: Any

    def is_current(self) -> bool:
        """Whether nothing differs from what the ranks were told."""
        return not self.changes()

    def changes(self) -> list[Change]:
        """Return the units that differ from what the ranks were told."""
        raise NotImplementedError

    def tell(self, change: Change) -> None:
        """Record that a change is on its way to the ranks."""
        raise NotImplementedError

    def forget(self, change: Change) -> None:
        """Record that some ranks may have got a change and others not. :meth:`changes` then returns it again."""
        raise NotImplementedError

    def is_unfit(self, known: Any = frozenset()) -> bool:
        """Whether no change can bring the ranks' object up to date, so that it must be replaced.

        ``known`` has the ids of the objects that the ranks hold.
        """
        return False


class Table(Facet):
    """Everything that an object holds by name: the names of a module, attributes, the contents of a cell.

    Parameters
    ----------
    kind : {"item", "attribute", "cell"}
    read : callable
        Returns what the object holds now.
    told : dict or None
        What the ranks were told; None: what ``read`` returns now, a dict of its own each time.
    """

    def __init__(
        self, obj: Any, kind: str, read: Callable[[], dict[Any, Any]], told: dict[Any, Any] | None = None
    ) -> None:
        self.obj, self.kind, self._read = obj, kind, read
        self.told = read() if told is None else told

    def read(self) -> dict[Any, Any]:
        """Return what the object holds now."""
        return self._read()

    def changes(self) -> list[Change]:
        now, told = self.read(), self.told
        if (
            len(now) == len(told)
            and all(map(operator.is_, now, told))
            and all(map(operator.is_, now.values(), told.values()))
        ):
            return []
        found = [Change(self.kind, key, now.get(key, MISSING)) for key in told]
        found += [Change(self.kind, key, value) for key, value in list(now.items()) if key not in told]
        found = [each for each in found if not self._is_told(each)]
        own = {} if isinstance(self.obj, (type, types.FunctionType, types.ModuleType)) else table_of(self.obj) or {}
        return found + (_reordering(told, own) if self.kind == "attribute" else [])

    def _is_told(self, change: Change) -> bool:
        """Whether the ranks have a unit already. Binding a name to an equal number or text is no change."""
        told = self.told.get(change.key, MISSING)
        if is_same(told, change.value):
            if told is not change.value:
                self.told[change.key] = change.value
            return True
        return False

    def tell(self, change: Change) -> None:
        if change.kind == "order":
            _reorder(self.told, change.value)
        elif change.value is MISSING:
            self.told.pop(change.key, None)
        else:
            self.told[change.key] = change.value

    def forget(self, change: Change) -> None:
        if change.kind == "order":
            _reorder(self.told, change.value[::-1])
        else:
            self.told[change.key] = UNKNOWN


class Names(Table):
    """The globals that functions name, whether they exist or not. On a rank they lie in a dict of their own."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.names: set[str] = set()
        self.is_whole = False  # whether a function captured the dict itself, besides naming what is in it
        super().__init__(namespace, "item", dict, {})

    def read(self) -> dict[str, Any]:
        if self.is_whole:
            self.names.update(self.obj)
        return {name: self.obj[name] for name in self.names if name in self.obj}


class Elements(Facet):
    """The elements of a dict, a list, a deque, a set or an array of objects, compared one by one by identity.

    They are sent together: if one differs, the ranks' container gets what the program's holds.
    """

    def __init__(self, obj: Any) -> None:
        self.obj = obj
        flat = _Flat(obj) if isinstance(obj, np.ndarray) else _Pairs(obj) if isinstance(obj, dict) else obj
        self.iterable: Any = flat
        self.told: Any = tuple(flat)

    def is_current(self) -> bool:
        now = self.iterable
        return len(now) == len(self.told) and all(map(operator.is_, now, self.told))

    def changes(self) -> list[Change]:
        now = tuple(self.iterable)
        if len(now) == len(self.told) and all(map(is_same, self.told, now)):
            self.told = now
            return []
        return [Change("elements", None, _copy_of(self.obj))]

    def tell(self, change: Change) -> None:
        # Not what is there by now: while the change was pickled, another thread may have added more.
        if isinstance(self.obj, np.ndarray):
            self.told = tuple(self.iterable)
        else:
            self.told = tuple(itertools.chain(*zip(*change.value))) if isinstance(self.obj, dict) else change.value

    def forget(self, change: Change) -> None:
        self.told = (UNKNOWN,) * (len(self.told) + 1)


class _Pairs:
    """Reads a dict as if it were a list of its keys, followed by its values, past the methods of a subclass."""

    def __init__(self, table: dict[Any, Any]) -> None:
        self._table, self._base = table, base_of(table)

    def __len__(self) -> int:
        return 2 * self._base.__len__(self._table)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(self._base.keys(self._table), self._base.values(self._table))


class _Flat:
    """Reads an array of objects as if it were a flat list, the last of whose elements is the array's shape."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self._shape = array.shape  # the same object as long as it is equal, because elements are compared by identity

    def __len__(self) -> int:
        return int(self._array.size) + 1

    def __iter__(self) -> Iterator[Any]:
        if self._array.shape != self._shape:
            self._shape = self._array.shape
        return iter([*self._array.ravel().tolist(), self._shape])


class State(Facet):
    """The recipe of an object with a pickling rule of its own: a maker, its arguments and a state.

    If only the state differs, the ranks get a new state for the object that they have. If the maker or its arguments
    differ, the object can only be replaced, and whatever holds it is told of another object.

    Parameters
    ----------
    reduce : callable
        Returns the recipe by which the object would be pickled now.
    told : tuple
        The recipe that the ranks were sent, in the form that ``synk._pure.alike`` keeps.
    """

    def __init__(self, obj: Any, reduce: Callable[[Any], Any], told: tuple[Any, Any, Any]) -> None:
        self.obj, self._reduce, self.told = obj, reduce, told
        self._has_numbers_only = isinstance(obj, (np.random.BitGenerator, _random.Random))
        self._is_dict = type(told[2]) is dict and not hasattr(type(obj), "__setstate__")

    def is_current(self) -> bool:
        now = self._now()
        if self._has_numbers_only:  # a generator, which is compared often
            with contextlib.suppress(ValueError):  # the state also holds an array
                return bool(self.told == now)
        return alike(self.told, now)

    def _now(self) -> tuple[Any, Any, Any]:
        try:
            return recipe_of(self._reduce(self.obj))
        except Exception as error:  # the user's code
            return error, (), None

    def is_unfit(self, known: Any = frozenset()) -> bool:
        return not alike(self.told[:2], self._now()[:2])

    def changes(self) -> list[Change]:
        now, told = self._now(), self.told
        if alike(told, now):
            return []
        if not alike(told[:2], now[:2]):
            return [Change("replace", None, None)]
        if self._is_dict and type(told[2]) is dict and type(now[2]) is dict:
            values = {**dict.fromkeys(told[2], MISSING), **now[2]}
            found = [each for each in values.items() if not alike(told[2].get(each[0], MISSING), each[1])]
            return [Change("attribute", key, value) for key, value in found] + _reordering(told[2], now[2])
        return [Change("state", None, now[2])]

    def tell(self, change: Change) -> None:
        if change.kind == "order":
            _reorder(self.told[2], change.value)
        elif change.kind == "attribute" and change.value is MISSING:
            self.told[2].pop(change.key, None)
        elif change.kind == "attribute":
            again = self._now()[2]
            value = again.get(change.key, change.value) if type(again) is dict else change.value
            self.told[2][change.key] = kept(change.value, value, _ignore)
        else:
            self.told = (*self.told[:2], kept(change.value, self._now()[2], _ignore))

    def forget(self, change: Change) -> None:
        self.told = (*self.told[:2], UNKNOWN)


def _reordering(told: dict[Any, Any], now: dict[Any, Any]) -> list[Change]:
    """Return the change after which attributes have the order of now, once those that differ were told."""
    after = [key for key in told if key in now] + [key for key in now if key not in told]
    return [] if after == list(now) else [Change("order", None, tuple(now))]


def _reorder(table: dict[Any, Any], names: tuple[Any, ...]) -> None:
    for name in names:
        if name in table:
            table[name] = table.pop(name)


def _ignore(part: Any) -> None:
    """Take no note of what a recipe has made."""


def recipe_of(reduced: Any) -> tuple[Any, Any, Any]:
    """Return the part of an object's pickle that is compared: the maker, its arguments and the state.

    What the maker's object is filled with counts among the arguments.
    """
    make, args, *rest = reduced
    items = [list(part) for part in rest[1:3] if part is not None]
    return make, (args, items) if items else args, rest[0] if rest else None


def is_same(told: Any, now: Any) -> bool:
    """Whether a unit has not changed: it is the same object, or a number or text that cannot be told from it."""
    return told is now or (type(told) is type(now) and type(told) in NUMBERS and is_same_value(told, now))


def _copy_of(obj: Any) -> Any:
    """Return the elements of a container in a new one, which has no node."""
    if isinstance(obj, np.ndarray):
        return obj.copy()
    return tuple(base_of(obj).items(obj) if isinstance(obj, dict) else obj)


# -- which facets an object has ---------------------------------------------------------------------------------------


def base_of(table: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return the standard library's class by whose methods a dict is read, past the methods of a user's subclass."""
    return OrderedDict if isinstance(table, OrderedDict) else dict


def attributes(obj: Any) -> Table:
    """Return the facet of an instance, a module or a function: its attributes, and its class."""
    return Table(obj, "attribute", _reader_of(obj))


def factory(obj: Any) -> Table:
    """Return the facet of a defaultdict's ``default_factory``."""
    return Table(obj, "attribute", lambda: {"default_factory": obj.default_factory})


def contents(cell: types.CellType) -> Table:
    """Return the facet of what a cell holds."""

    def read() -> dict[str, Any]:
        try:
            return {"": cell.cell_contents}
        except ValueError:  # empty
            return {}

    return Table(cell, "cell", read)


def _reader_of(obj: Any) -> Callable[[], dict[str, Any]]:
    if isinstance(obj, types.FunctionType):
        return lambda: {**{name: getattr(obj, name) for name in FUNCTION_PARTS}, **obj.__dict__}
    if isinstance(obj, type):
        return lambda: {**class_table(obj), "__bases__": obj.__bases__}
    slots = slots_of(type(obj))
    if table_of(obj) is None and not slots:
        return lambda: {"__class__": type(obj)}

    def read() -> dict[str, Any]:
        found = {"__class__": type(obj), **(table_of(obj) or {})}
        for name in slots:
            value = slot(obj, name)
            if value is not MISSING:
                found[name] = value
        return found

    return read


def class_table(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that are sent with it. An enum's members are there once it is made."""
    left_out = _MADE_BY_ENUM.union(cls.__members__) if isinstance(cls, enum.EnumMeta) else _NOT_SENT
    return {name: value for name, value in vars(cls).items() if name not in left_out and name not in _NOT_SENT}


def table_of(obj: Any) -> dict[str, Any] | None:
    """Return the dict of an instance's attributes, or None if it has no such dict. Runs no code of the user's."""
    try:
        table = object.__getattribute__(obj, "__dict__")
    except (AttributeError, TypeError):
        return None
    return table if isinstance(table, dict) else None


def slots_of(cls: type) -> tuple[str, ...]:
    """Return the names of the slots in which instances of ``cls`` keep attributes."""
    found = [
        name
        for base in cls.__mro__
        if base.__dict__.get("__slots__") is not None
        for name, value in base.__dict__.items()
        if isinstance(value, types.MemberDescriptorType)
    ]
    return tuple(found)


def slot(obj: Any, name: str) -> Any:
    """Return what an instance keeps in a slot, or ``MISSING``."""
    try:
        return object.__getattribute__(obj, name)
    except AttributeError:
        return MISSING
