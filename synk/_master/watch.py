"""What a function's code names, in the master: the objects whose rebinding the workers must hear of.

Named are globals, closure variables, defaults, and the attributes and constant keys that occur in the code of the
function and of the functions that it calls, wherever one of the objects reached so far has such an attribute or key.
That reads more than the code does, never less; what is reached by iteration, by a computed index or by ``getattr`` is
not seen. Sends nothing and knows no runtime.
"""

from __future__ import annotations

import dis
import enum
import functools
import os
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from synk._pure.interrupts import is_from_handler
from synk._wire.pickling import CACHED, is_by_reference

MISSING: Any = enum.Enum("Missing", "MISSING").MISSING  # type: ignore[attr-defined]
"""In the place of a value that does not exist."""

MAX_KEYS = 10_000
"""A larger dict is data: its keys are not compared, and no copy of it is kept."""

_FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__")
_KEY_TYPES = (str, int, float, bytes, tuple)
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, tuple, frozenset, list, set, np.ndarray))


class Place(NamedTuple):
    """Where workers find an object of a module that they import themselves.

    ``steps`` are pairs of a kind (see :class:`Part`) and a key.
    """

    module: str
    steps: tuple[tuple[str, Any], ...] = ()


class Part(NamedTuple):
    """One thing that the code names.

    Attributes
    ----------
    container : object
        What holds it: the globals of a function, a function, a cell, an instance, a class, a module or a dict.
    kind : {"item", "attribute", "cell", "tensor"}
    key : object
        Its name in the container.
    value : object
        What it was when it was looked at, or ``MISSING``. Held, so that its address is not used again.
    place : Place or None
        Where workers find the container, if it is not a copy of the master's that was sent to them.
    """

    container: Any
    kind: str
    key: Any
    value: Any
    place: Place | None


class Watch:
    """Tells whether all that a function names is still what it was.

    Attributes
    ----------
    parts : list of Part
    containers : list of (object, Place or None)
        Instances, classes, dicts and modules in which names were looked up.
    """

    def __init__(self, walk: _Walk, extra: Sequence[tuple[Any, str, Any]] = ()) -> None:
        self.parts = parts = walk.parts
        self.containers = walk.containers
        lookups: list[tuple[Callable[..., Any], Any, Any]] = list(extra)
        reads: list[tuple[Any, str, Any]] = []
        for part in parts:
            table = table_of(part.container) if part.kind in ("item", "attribute") else None
            if part.kind == "cell" and part.value is not MISSING:
                reads.append((part.container, "cell_contents", part.value))
            elif part.kind == "cell":
                lookups.append((functools.partial(_contents_of_cell, part.container), "", MISSING))
            elif table is not None and (part.kind == "item" or part.key in table or part.value is MISSING):
                lookups.append((table.get, part.key, part.value))
            elif part.kind == "attribute":
                reads.append((part.container, part.key, part.value))
        self._lookups, self._reads = tuple(lookups), tuple(reads)
        self._sizes = tuple((table, len(table)) for table in walk.tables)
        self._tensors = tuple(part.container for part in parts if part.kind == "tensor")
        self._version = sum(part.value for part in parts if part.kind == "tensor")

    def is_current(self) -> bool:
        """Whether nothing was bound anew. Asked at every call, so it does nothing but compare."""
        try:
            for get, key, value in self._lookups:
                if get(key, MISSING) is not value:
                    return False
            for holder, name, value in self._reads:
                if getattr(holder, name, MISSING) is not value:
                    return False
        except ValueError as error:  # a cell that was emptied
            if is_from_handler(error):
                raise
            return False
        for table, size in self._sizes:
            if len(table) != size:
                return False
        return not self._tensors or sum([tensor._version for tensor in self._tensors]) == self._version


def watch(fn: Any, extra: Sequence[tuple[Any, str, Any]] = ()) -> Watch:
    """Return the watch over what ``fn`` names now; ``extra`` are further lookups (get, key, expected)."""
    walk = _Walk()
    walk.visit(fn, None)
    walk.expand()
    return Watch(walk, extra)


def read(part: Part) -> Any:
    """Return what a part is now, or ``MISSING``."""
    if part.kind == "cell":
        return _contents_of_cell(part.container, "", MISSING)
    if part.kind == "tensor":
        return part.container._version
    table = table_of(part.container)
    if part.kind == "item" or (table is not None and part.key in table):
        return MISSING if table is None else table.get(part.key, MISSING)
    return getattr(part.container, part.key, MISSING) if part.key in slots_of(type(part.container)) else MISSING


def table_of(container: Any) -> Mapping[Any, Any] | None:
    """Return the mapping in which a container keeps its parts; None for one that has none (slots only)."""
    if isinstance(container, dict):
        return container
    if isinstance(container, types.FunctionType):
        return None
    try:
        table = getattr(container, "__dict__", None)
    except Exception as error:  # a proxy of the user's
        if is_from_handler(error):
            raise
        return None
    return table if isinstance(table, (dict, types.MappingProxyType)) else None


def slots_of(cls: type) -> list[str]:
    """Return the attributes that instances of ``cls`` keep outside a dictionary."""
    if issubclass(cls, types.FunctionType):
        return list(_FUNCTION_PARTS)
    found: list[str] = []
    for base in cls.__mro__:
        names = base.__dict__.get("__slots__", ())
        found += [names] if isinstance(names, str) else list(names)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def is_tensor(obj: Any) -> bool:
    """Whether ``obj`` is a tensor of torch's, which is not imported for that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def is_users_module(name: str | None) -> bool:
    """Whether a module is part of the user's program: a file outside the interpreter's and the packages' folders."""
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None)
    if module is None or not isinstance(file, str) or name == "__main__" or str(name).partition(".")[0] == "synk":
        return False
    return _is_users_file(file)


@functools.lru_cache(maxsize=4096)
def _is_users_file(file: str) -> bool:
    path = os.path.realpath(file)
    parts = path.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return False
    return not any(path.startswith(folder + os.sep) for folder in _library_folders())


@functools.lru_cache(maxsize=1)
def _library_folders() -> frozenset[str]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_path(name) for name in names} | {site.getusersitepackages()}
    return frozenset(os.path.realpath(folder) for folder in folders if folder)


def _contents_of_cell(cell: types.CellType, key: str, default: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError as error:
        if is_from_handler(error):
            raise
        return default


class _Names(NamedTuple):
    loaded: frozenset[str]
    """Globals."""
    attributes: frozenset[str]
    keys: frozenset[Any]


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> _Names:
    """Return what a code object names, and the functions inside it."""
    loaded, attributes, keys = set(), set(code.co_names), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded.add(instruction.argval)
        elif instruction.opname == "LOAD_SMALL_INT":
            keys.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            loaded |= inner.loaded
            attributes |= inner.attributes
            keys |= inner.keys
        elif type(constant) in _KEY_TYPES:
            keys.add(constant)
    return _Names(frozenset(loaded), frozenset(attributes), frozenset(keys))


class _Walk:
    """From a function along the names in its code, until no new object comes up."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.tables: list[Mapping[Any, Any]] = []
        self._attributes: set[str] = set()
        self._keys: set[Any] = set()
        self.containers: list[tuple[Any, Place | None]] = []
        self._seen: set[tuple[int, bool]] = set()
        self._noted: set[tuple[int, bool, Any]] = set()
        self._modules: set[str] = set()
        self._kept: list[Any] = []  # addresses stand for objects while this runs

    def expand(self) -> None:
        """Look up all names in all containers, those found meanwhile included."""
        size = None
        while size != (size := (len(self._attributes), len(self._keys), len(self.containers))):
            for container, place in list(self.containers):
                for key in self._named_in(container):
                    self._note(container, "item" if isinstance(container, dict) else "attribute", key, place)

    def _named_in(self, container: Any) -> list[Any]:
        table = table_of(container)
        if isinstance(container, dict):
            return [key for key in self._keys if key in container]
        if table is None:
            table = {}
        found = [name for name in self._attributes if name in table]
        if isinstance(container, type):  # what operators and construction call is not named
            return found + [k for k, v in table.items() if k.startswith("__") and isinstance(v, types.FunctionType)]
        if isinstance(container, types.ModuleType):
            return found
        return found + [name for name in slots_of(type(container)) if name in self._attributes]

    def _note(self, container: Any, kind: str, key: Any, place: Place | None) -> None:
        token = (id(container), place is None, key)
        if token in self._noted:
            return
        self._noted.add(token)
        part = Part(container, kind, key, MISSING, place)
        part = part._replace(value=read(part))
        self.parts.append(part)
        if kind != "tensor":
            self.visit(part.value, None if place is None else place._replace(steps=(*place.steps, (kind, key))))

    def visit(self, obj: Any, place: Place | None) -> None:
        """Take in an object that the code can reach."""
        if obj is MISSING or type(obj) in _PLAIN or isinstance(obj, (np.ndarray, np.generic)):
            return
        token = (id(obj), place is None)
        if token in self._seen:
            return
        self._seen.add(token)
        self._kept.append(obj)
        if isinstance(obj, types.FunctionType):
            self._visit_function(obj, place)
        elif isinstance(obj, type):
            self._visit_class(obj)
        elif isinstance(obj, types.ModuleType):
            self._visit_module(obj.__name__)
        elif isinstance(obj, dict):
            if len(obj) <= MAX_KEYS:
                self._add(obj, place)
        elif isinstance(obj, (types.BuiltinFunctionType, types.CodeType)) or type(obj).__module__.startswith("synk."):
            return
        else:
            for inner in _inside(obj):
                self.visit(inner, place)
            self._visit_instance(obj, place)

    def _add(self, container: Any, place: Place | None) -> None:
        self.containers.append((container, place))
        table = table_of(container)
        if table is not None:
            self.tables.append(table)  # what is missing and comes later changes its length

    def _visit_module(self, name: str) -> None:
        if name not in self._modules and is_users_module(name):
            self._modules.add(name)
            self.containers.append((sys.modules[name], Place(name)))
            self._note(sys.modules[name], "attribute", "__spec__", Place(name))  # a reload binds it anew

    def _visit_class(self, cls: type) -> None:
        place = None
        if is_by_reference(cls):
            if not is_users_module(cls.__module__):
                return
            place = Place(cls.__module__, tuple(("attribute", name) for name in cls.__qualname__.split(".")))
            self._visit_module(cls.__module__)
        self._add(cls, place)
        for base in cls.__bases__:
            self.visit(base, None)

    def _visit_instance(self, obj: Any, place: Place | None) -> None:
        self.visit(type(obj), None)
        self._add(obj, place)
        torch = sys.modules.get("torch")
        if is_tensor(obj):
            self._note(obj, "tensor", "_version", place)
        elif torch is not None and isinstance(obj, torch.nn.Module):
            for module in obj.modules():
                self._add(module, place)
                self._note(module, "attribute", "training", place)
                for table in (module._parameters, module._buffers, module._modules):
                    self.tables.append(table)
                    for key in table:
                        self._note(table, "item", key, place)
            for tensor in (*obj.parameters(), *obj.buffers()):
                self._note(tensor, "tensor", "_version", place)

    def _visit_function(self, function: types.FunctionType, place: Place | None) -> None:
        table: Any = function.__globals__
        holder, kind = table, "item"
        if place is None and is_by_reference(function):
            place = Place(function.__module__, tuple(("attribute", name) for name in function.__qualname__.split(".")))
        holder_place = None
        if place is not None:  # on the workers it is that of the module itself
            name = table.get("__name__")
            holder = sys.modules.get(name)
            if holder is None or vars(holder) is not table or not is_users_module(name):
                return
            kind, holder_place = "attribute", Place(name)
            self._visit_module(name)
        for part in _FUNCTION_PARTS:
            self._note(function, "attribute", part, place)
        names = _names_in(function.__code__)
        self._attributes |= names.attributes
        self._keys |= names.keys
        for name in names.loaded:  # those of built-ins, too: a global of that name may come
            self._note(holder, kind, name, holder_place)
        for index, cell in enumerate(function.__closure__ or ()):
            step = None if place is None else place._replace(steps=(*place.steps, ("closure", index)))
            self._note(cell, "cell", "", step)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(value, place)


def _inside(obj: Any) -> Iterator[Any]:
    """Yield what a callable of the standard library wraps."""
    if isinstance(obj, types.MethodType):
        yield from (obj.__func__, obj.__self__)
    elif isinstance(obj, (functools.partial, functools.partialmethod)):
        yield from (obj.func, *obj.args, *obj.keywords.values())
    elif isinstance(obj, (staticmethod, classmethod)):
        yield obj.__func__
    elif isinstance(obj, property):
        yield from (obj.fget, obj.fset)
    elif isinstance(obj, functools.cached_property):
        yield obj.func
    elif isinstance(obj, CACHED):
        yield obj.__wrapped__
