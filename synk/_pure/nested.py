"""Takes nested arguments apart and builds them again: dicts, tuples, named tuples and dataclasses of arrays.

This file decides what is structure and what is rows. A list is rows, as for ``numpy.asarray``, and so is a tuple of
numbers or texts. Every other tuple is structure, so arrays of equal length are never stacked. A list of arrays could be
either, and is refused where rows are divided.

In one file because whatever one half takes apart the other half must build again.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from synk._pure.interrupts import raise_if_of_handler
from synk._pure.sparse import is_csr
from synk._pure.tables import is_table
from synk._pure.tensors import is_tensor
from synk._pure.trees import told_apart

SINGLE_VALUES = (str, bytes, bool, int, float, complex, np.generic)
"""Types without rows to divide, besides None."""

PLAIN_TYPES = frozenset((str, bytes, bool, int, float, complex, type(None)))
"""Types for which the plain pickler is enough. It takes a tenth of the time."""

_SCALAR_TYPES = frozenset(np.sctypeDict.values()) - {np.object_, np.void}
_SEQUENCES = (list, tuple, collections.deque)

_MAX_DEPTH, _PLAIN_DEPTH = 16, 8

LEAF = "leaf"


class Container(NamedTuple):
    """One container of a nesting, without its leaves. Hashable, so that calls of one structure share a plan.

    Attributes
    ----------
    kind : {"mapping", "fields", "named", "tuple", "filled"}
        The last is a subclass of dict, UserDict or tuple that is filled with its only part.
    make : callable
        What the container is built with: its class, in most cases.
    keys : tuple
        The keys of a mapping in its order, or the names of the fields or attributes, or nothing.
    parts : tuple of Container, ``LEAF`` or None
        None stands for a value that is None.
    exact : tuple
        What tells the keys apart, and a factory of missing values; nothing if all keys are str. The key 1 equals True,
        which a function can tell apart.
    """

    kind: str
    make: Callable[..., Any]
    keys: tuple[Any, ...]
    parts: tuple[Any, ...]
    exact: tuple[Any, ...] = ()


def is_nested(value: Any) -> bool:
    """Whether a value is structure around leaves, rather than an array, rows or a single value.

    Examples
    --------
    >>> is_nested({"x": [1, 2]}), is_nested(([1, 2], [3, 4]))
    (True, True)
    >>> is_nested([[1, 2], [3, 4]]), is_nested((1, 2))
    (False, False)
    """
    cls = type(value)
    if cls is np.ndarray or cls is list or hasattr(cls, "__array__"):
        return False
    if isinstance(value, tuple):
        return hasattr(cls, "_fields") or not all(isinstance(part, SINGLE_VALUES) for part in value)
    return isinstance(value, Mapping) or (dataclasses.is_dataclass(cls) and not isinstance(value, type))


def is_plain_object(value: Any, depth: int = _PLAIN_DEPTH) -> bool:
    """Whether a value is a number, a text, None, or a tuple, list or dict of these: pickling it runs no user code."""
    if type(value) in PLAIN_TYPES or type(value) in _SCALAR_TYPES:
        return True
    if not depth or type(value) not in (tuple, list, dict):
        return False
    parts = [*value, *value.values()] if type(value) is dict else value
    return all(is_plain_object(part, depth - 1) for part in parts)


def has_inner_rows(value: Any) -> bool:
    """Whether a value is a sparse matrix or a table: no array, but an object that has rows."""
    return is_csr(value) or is_table(value)


def held_array(value: Any) -> Any:
    """Return an array or tensor with axes that a list or tuple holds at any depth, or None.

    Examples
    --------
    >>> held_array([1, 2]), held_array([[1, 2], [3, 4]]), held_array([{"x": (np.ones(2), 1)}])
    (None, None, array([1., 1.]))
    """
    pending: list[Any] = [value] if isinstance(value, _SEQUENCES) else []
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if isinstance(part, (*_SEQUENCES, Mapping)):
            parts = part.values() if isinstance(part, Mapping) else part
            if id(part) not in seen and not PLAIN_TYPES.issuperset(map(type, parts)):
                seen.add(id(part))
                pending += parts
        elif getattr(part, "ndim", hasattr(type(part), "__array__")):
            return part
    return None


def check_no_list(value: Any, verb: str, what: str, label: str = "", caller: str = "") -> None:
    """Raise TypeError for a list of arrays, which could mean rows or structure.

    Parameters
    ----------
    verb, what : str
        What cannot be done, for the error.
    label : str
        How the program writes the value. Empty if structure is not allowed there.
    caller : str
        The name of the function whose only argument this may have become by mistake.

    Raises
    ------
    TypeError
    """
    array = held_array(value)
    if array is None:
        return
    kind, stack = ("tensors", "torch.stack") if is_tensor(array) else ("arrays", "np.stack")
    steps = [f"{stack}({label or '...'}) if each of them is one row"]
    if label:
        steps.append(f"tuple({label}) to divide the rows of each")
    if caller:
        name = caller if caller.isidentifier() else "f"
        steps.append(f"{name}(*{label}) if they are the arguments, as in the batch of a loader")
    raise TypeError(
        f"cannot {verb} {what}: got a {type(value).__name__} of {kind}, which can mean rows or structure, expected an "
        f"array{', or a tuple or dict of arrays' if label else ''}. Pass {', or '.join(steps)}."
    )


def take_apart(value: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a nested value, and its structure.

    Raises
    ------
    TypeError
        If a dataclass cannot be built from its fields.
    RecursionError
        If the value holds itself.

    Examples
    --------
    >>> leaves, structure = take_apart({"x": [1, 2], "y": ([3, 4], None)})
    >>> leaves, paths(structure)
    ([[1, 2], [3, 4]], ["['x']", "['y'][0]"])
    >>> build(structure, iter(["a", "b"]))
    {'x': 'a', 'y': ('b', None)}
    """
    leaves: list[Any] = []
    return leaves, _structure(value, leaves)


def _structure(value: Any, leaves: list[Any]) -> Any:
    if value is None:
        return None
    if not is_nested(value):
        leaves.append(value)
        return LEAF
    kind, make, keys, parts = _opened(value)
    return Container(kind, make, keys, tuple([_structure(part, leaves) for part in parts]), _exact(keys, make))


def _exact(keys: tuple[Any, ...], make: Any) -> tuple[Any, ...]:
    """Return what tells keys and factories apart, or nothing if all keys are str."""
    found = told_apart(keys)
    if isinstance(make, _DefaultDict) and getattr(make.factory, "__module__", "builtins") != "builtins":
        found += told_apart((make.factory,))
    return tuple(found) if found.count(str) < len(found) else ()


def take_apart_whole(value: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a value that goes whole to every rank, and its structure.

    Lists are structure here, since the value has no rows. A part without arrays is one leaf, however deeply it is
    nested. So is everything that a pickle keeps and that its parts alone would lose: objects of other classes, an array
    that appears twice.

    Examples
    --------
    >>> leaves, structure = take_apart_whole({"w": [np.ones(2), np.ones(3)], "names": ("a", "b")})
    >>> [type(leaf).__name__ for leaf in leaves], paths(structure)
    (['ndarray', 'ndarray', 'tuple'], ["['w'][0]", "['w'][1]", "['names']"])
    """
    leaves: list[Any] = []
    arrays: list[int] = []
    structure = _whole_structure(value, leaves, arrays, _MAX_DEPTH)
    if arrays and len(set(arrays)) == len(arrays):
        return leaves, structure
    return [value], LEAF


def _whole_structure(value: Any, leaves: list[Any], arrays: list[int], depth: int) -> Any:
    """Return the structure of a value, and add its leaves and the identities of its arrays to the lists."""
    cls = type(value)
    make: Any = cls
    kind: str = ""
    keys: tuple[Any, ...] = ()
    parts: Any = ()
    if hasattr(cls, "__array__"):
        if not isinstance(value, np.generic):
            arrays.append(id(value))
    elif cls is dict:
        kind, keys, parts = "mapping", tuple(value), value.values()
    elif cls is list or cls is tuple:
        kind, parts = "tuple", value
    elif isinstance(value, tuple) and hasattr(cls, "_fields") and not hasattr(value, "__dict__"):
        kind, keys, parts = "named", cls._fields, value
    elif _is_plain_dataclass(value):
        kind, keys, parts = "fields", tuple(vars(value)), vars(value).values()
        make = Restored(cls, tuple(vars(cls).values()))
    if not kind or not depth:
        leaves.append(value)
        return LEAF
    first_leaf, num_arrays, structures = len(leaves), len(arrays), []
    for part in parts:
        if type(part) is np.ndarray:  # most parts are arrays; the general way below gives the same
            leaves.append(part)
            arrays.append(id(part))
            structures.append(LEAF)
        else:
            structures.append(_whole_structure(part, leaves, arrays, depth - 1))
    if len(arrays) == num_arrays:  # it holds no array
        leaves[first_leaf:] = [value]
        return LEAF
    return Container(kind, make, keys, tuple(structures), _exact(keys, make))


def _is_plain_dataclass(value: Any) -> bool:
    """Whether a dataclass is pickled as its fields and nothing else, and loaded without user code."""
    cls = type(value)
    if not dataclasses.is_dataclass(cls) or not hasattr(value, "__dict__"):
        return False
    own = ("__getstate__", "__reduce__", "__reduce_ex__", "__setstate__", "__new__")
    return all(getattr(cls, name, None) is getattr(object, name, None) for name in own)


class Restored:
    """Builds an object from its attributes, as unpickling does. Equal while the class holds the same objects."""

    def __init__(self, cls: type, contents: tuple[Any, ...] = (), state: bytes = b"") -> None:
        self.cls, self._contents, self._state = cls, contents, state

    def __call__(self, **fields: Any) -> Any:
        return self._completed(object.__new__(self.cls), fields)

    def filled(self, content: Any) -> Any:
        """Return a subclass of dict, UserDict or tuple with this content."""
        if isinstance(content, tuple):
            return self._completed(tuple.__new__(self.cls, content))
        if not issubclass(self.cls, dict):
            return self(data=content)
        made: Any = dict.__new__(self.cls)
        dict.update(made, content)
        return self._completed(made)

    def _completed(self, made: Any, fields: Mapping[str, Any] = {}) -> Any:
        attributes = {**(pickle.loads(self._state) if self._state else {}), **fields}
        if attributes:
            vars(made).update(attributes)
        return made

    def __eq__(self, other: object) -> bool:
        if type(other) is not Restored or self.cls is not other.cls or self._state != other._state:
            return False
        return len(self._contents) == len(other._contents) and all(map(operator.is_, self._contents, other._contents))

    def __hash__(self) -> int:
        return hash(self.cls)

    def __reduce__(self) -> Any:
        return Restored, (self.cls, (), self._state)


def _opened(value: Any) -> tuple[str, Callable[..., Any], tuple[Any, ...], Any]:
    """Return a container's kind, the callable that builds another like it, its keys and its parts."""
    cls = type(value)
    if cls is dict:
        return "mapping", dict, tuple(value), value.values()
    if cls is tuple:
        return "tuple", tuple, (), value
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return "named", cls, cls._fields, value
    if dataclasses.is_dataclass(cls):
        declared = dataclasses.fields(cls)
        given = {field.name: getattr(value, field.name) for field in declared if field.init}
        is_all = _is_plain_dataclass(value) and vars(value).keys() == given.keys()
        if not is_all and not _other_attributes(value) and _keeps(cls, given):
            return "fields", cls, tuple(given), given.values()
        if not hasattr(value, "__dict__"):
            why = "it has slots, and its constructor does not keep them"
            raise TypeError(f"the dataclass {cls.__qualname__} cannot be built from its fields ({why})")
        fields = {field.name: vars(value)[field.name] for field in declared if field.name in vars(value)}
        return "fields", _restored(value), tuple(fields), fields.values()
    if cls is collections.defaultdict:
        return "mapping", _DefaultDict(value.default_factory), tuple(value), value.values()
    if isinstance(value, dict) and _is_filled(cls, dict):
        return "filled", _restored(value), (), [dict(dict.items(value))]
    if isinstance(value, collections.UserDict) and _is_filled(cls, collections.UserDict):
        return "filled", _restored(value), (), [dict(value.data)]
    if isinstance(value, tuple):
        if _is_filled(cls, tuple):
            return "filled", _restored(value), (), [tuple.__getitem__(value, slice(None))]
        return "tuple", _maker(cls, tuple(value), tuple), (), value
    items = dict(value.items())
    return "mapping", _maker(cls, items, dict), tuple(items), items.values()


def _restored(value: Any) -> Restored:
    cls = type(value)
    return Restored(cls, tuple(vars(cls).values()), pickle.dumps(_other_attributes(value)))


def _other_attributes(value: Any) -> dict[str, Any]:
    """Return the numbers, texts and the like that an object has as attributes, besides the fields of a dataclass."""
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else ()
    own = vars(value) if hasattr(value, "__dict__") else {}
    return {name: each for name, each in own.items() if name not in fields and is_plain_object(each)}


def _is_filled(cls: type, base: type) -> bool:
    """Whether pickle makes an object of this class empty, fills it, and gives it its attributes."""
    own = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
    return all(getattr(cls, name, None) is getattr(base, name, None) for name in own)


def _keeps(cls: Any, fields: dict[str, Any]) -> bool:
    """Whether the constructor of a dataclass takes the values of its fields as they are."""
    try:
        made = cls(**fields)
        return all(getattr(made, name) is value for name, value in fields.items())
    except Exception as error:  # the user's constructor may raise anything
        raise_if_of_handler(error)
        return False


@dataclasses.dataclass(frozen=True)
class _DefaultDict:
    """Builds a defaultdict from a dict. Unlike a partial, it is equal for equal factories."""

    factory: Any

    def __call__(self, items: dict[Any, Any]) -> Any:
        return collections.defaultdict(self.factory, items)


_is_built_so: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _maker(cls: type, parts: Any, plain: type) -> Callable[..., Any]:
    """Return ``cls`` if it can be built from its parts, as most classes can, else the plain type that holds them."""
    is_built_so = _is_built_so.get(cls)
    if is_built_so is None:
        try:
            made = cls(parts)
            # The elements of a tuple, or the items of a mapping: ``Point(*xs)`` would make a tuple with one element.
            is_built_so = len(made) == len(parts) and all(map(operator.is_, made, parts))
            if plain is dict:
                is_built_so = is_built_so and all(made[key] is part for key, part in parts.items())
        except Exception as error:  # the user's constructor may raise anything
            raise_if_of_handler(error)
            is_built_so = False
        _is_built_so[cls] = is_built_so
    return cls if is_built_so else plain


def holds(value: Any, kind: type) -> bool:
    """Whether ``value`` or one of its leaves is an instance of ``kind``; False if it cannot be taken apart."""
    if not is_nested(value):
        return isinstance(value, kind)
    try:
        return any(isinstance(leaf, kind) for leaf in take_apart(value)[0])
    except (TypeError, RecursionError):
        return False


def build(structure: Any, leaves: Iterator[Any]) -> Any:
    """Return the nesting of ``structure``, filled with the next items of ``leaves``."""
    if structure == LEAF:
        return next(leaves)
    if structure is None:
        return None
    kind, make, keys, parts, _ = structure
    built = [next(leaves) if part == LEAF else build(part, leaves) for part in parts]
    if kind == "mapping":
        items = dict(zip(keys, built))
        return items if make is dict else make(items)
    if kind == "fields":
        return make(**dict(zip(keys, built)))
    if kind == "filled":
        return make.filled(built[0])
    return make(*built) if kind == "named" else make(built)


def paths(structure: Any, path: str = "") -> list[str]:
    """Return the path of each leaf, as one would write it behind the argument's name."""
    if structure is None:
        return []
    if structure == LEAF:
        return [path]
    kind, _, keys, parts, _ = structure
    if kind == "filled":
        return paths(parts[0], path)
    if kind == "tuple":
        steps = [f"[{position}]" for position in range(len(parts))]
    else:
        steps = [f"[{key!r}]" if kind == "mapping" else f".{key}" for key in keys]
    return [leaf for step, part in zip(steps, parts) for leaf in paths(part, path + step)]
