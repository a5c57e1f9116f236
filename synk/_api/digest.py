"""What a function computes and what an item is, as digests: equal in every process, whatever its hash seed and folder.

They do not depend on positions in a file, file names, addresses, or the order of sets and keys. Functions and classes
of installed packages count by their names.
"""

from __future__ import annotations

import collections
import hashlib
import types
import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any

import numpy as np

from synk._api.plain_copy import copied
from synk._code.modules import PARTS, WRAPPERS, globals_in, imports_in, is_users_module, users_code
from synk._pure.tensors import array_of, is_plain, is_tensor
from synk._wire.parcels import CACHED, is_by_reference, reduced

_ATOMS = (bool, float, complex, str, type(None), type(...), type(NotImplemented), range, slice)


class Undigested(Exception):
    """Something has no digest that stays the same. The arguments say what, and why."""


def digests_of(fn: Any) -> dict[str, str]:
    """Return the digest of each part of a function: its code, defaults and captured values, and those of the functions,
    classes and modules of the program that it refers to.

    Raises
    ------
    Undigested
    """
    found = _Parts(fn).digests
    _check_stable(found, _Parts(copied(fn, methods_by_name=True).fn).digests)
    return {part: digest.hex() for part, digest in found.items()}


class ItemDigests:
    """The digests of the items of one map, 16 bytes each."""

    def __init__(self) -> None:
        self._codes: weakref.WeakKeyDictionary[Any, bytes] = weakref.WeakKeyDictionary()
        self._kinds: set[type] = set()

    def __call__(self, item: Any) -> bytes:
        """Return the digest of an item. The first item with an object of a class is compared with a copy.

        Raises
        ------
        Undigested
        """
        values = _Values(self._codes)
        digest = values.part("it", item)
        if not values.kinds <= self._kinds:
            _check_stable({"it": digest}, {"it": _Values(self._codes).part("it", copied(item).fn)})
            self._kinds |= values.kinds
        return digest


def _check_stable(digests: dict[str, bytes], of_copy: dict[str, bytes]) -> None:
    for part, digest in digests.items():
        if of_copy.get(part) != digest:
            raise Undigested(part, "differs from its own copy")


def _hashed(kind: str, *parts: bytes | memoryview | str) -> bytes:
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.digest()


class _Values:
    """The digests of values. Each function and class of the program that they refer to is looked at once.

    Parameters
    ----------
    codes : mapping
        The digests of those that were looked at.

    Attributes
    ----------
    kinds : set of type
        The classes of the objects it has met that are digested by what their pickles are made of.
    """

    def __init__(self, codes: MutableMapping[Any, bytes]) -> None:
        self._codes = codes
        self.kinds: set[type] = set()
        self._path: list[int] = []  # the objects that are being looked at, outermost first

    def part(self, name: str, value: Any) -> bytes:
        """Return the digest of a value; ``name`` is for errors."""
        path, self._path = self._path, []
        try:
            return self._of(value)
        except Undigested:
            raise
        except Exception as error:  # of pickling
            text = f"{type(error).__name__}: {str(error).rstrip('.')}"
            raise Undigested(name, f"has no digest ({text})") from error
        finally:
            self._path = path

    def _of(self, obj: Any) -> bytes:
        kind = type(obj)
        if kind in _ATOMS:
            return _hashed(kind.__name__, repr(obj))
        if kind is int:
            return _hashed("int", f"{obj:x}")
        if kind in (bytes, bytearray):
            return _hashed(kind.__name__, bytes(obj))
        if id(obj) in self._path:  # it holds itself
            return _hashed("again", str(len(self._path) - self._path.index(id(obj))))
        self._path.append(id(obj))
        try:
            return self._of_container(obj) or self._of_array(obj) or self._of_code(obj) or self._of_object(obj)
        finally:
            self._path.pop()

    def _of_container(self, obj: Any) -> bytes:
        kind = type(obj)
        if kind in (list, tuple):
            return _hashed(kind.__name__, *map(self._of, obj))
        if kind in (set, frozenset):
            return _hashed(kind.__name__, *sorted(map(self._of, obj)))
        return self._of_items(obj.items()) if kind in (dict, types.MappingProxyType) else b""

    def _of_items(self, items: Iterable[tuple[Any, Any]]) -> bytes:
        keyed = sorted([(self._of(key), value) for key, value in items], key=lambda item: item[0])
        return _hashed("items", *(part for key, value in keyed for part in (key, self._of(value))))

    def _of_array(self, obj: Any) -> bytes:
        if is_tensor(obj) and is_plain(obj):
            return _hashed("tensor", str(obj.dtype), str(obj.requires_grad), self._of_array(array_of(obj.cpu())))
        if isinstance(obj, np.generic) or type(obj) in (np.ndarray, np.memmap):
            array = np.asarray(obj)
            if not array.dtype.hasobject:
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                return _hashed("array", type(obj).__name__, repr(array.dtype), repr(array.shape), data)
        return b""

    def _of_code(self, obj: Any) -> bytes:
        if isinstance(obj, types.CodeType):
            return self._of_instructions(obj)
        if isinstance(obj, types.ModuleType):
            return _hashed("module", obj.__name__)
        if isinstance(obj, WRAPPERS):
            return _hashed(type(obj).__name__, *(self._of(getattr(obj, part, None)) for part in PARTS))
        if isinstance(obj, CACHED):
            return _hashed("cached", self._of(obj.__wrapped__))
        if not isinstance(obj, (types.FunctionType, type)):
            return b""
        if is_by_reference(obj) and not is_users_module(obj.__module__):
            return _hashed("name", obj.__module__, obj.__qualname__)
        return self._of_own(obj)

    def _of_instructions(self, code: types.CodeType) -> bytes:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        table = getattr(code, "co_exceptiontable", b"")
        return _hashed("code", code.co_name, code.co_code, table, *map(self._of, (names, counts, code.co_consts)))

    def _of_own(self, obj: Any) -> bytes:
        """Return the digest of a function or a class of the program."""
        if obj not in self._codes:
            self._codes[obj] = _hashed("own", *_Parts(obj).digests.values())
        return self._codes[obj]

    def _of_object(self, obj: Any) -> bytes:
        """Return the digest of any other object: of what its pickle is made of."""
        self.kinds.add(type(obj))
        recipe = reduced(obj)
        if isinstance(recipe, str):
            return _hashed("name", str(getattr(obj, "__module__", "")), recipe)
        make, args, state, values, items = (*recipe, None, None, None)[:5]
        parts = [self._of(make), self._of(args), self._of(state), self._of(list(values or ()))]
        is_ordered = isinstance(obj, collections.OrderedDict)
        return _hashed("object", *parts, self._of(list(items or ())) if is_ordered else self._of_items(items or ()))


class _Parts(_Values):
    """The digests of the parts of a function, by their names. A part that refers to another one contains its name.

    Attributes
    ----------
    digests : dict of str to bytes
    """

    def __init__(self, fn: Any) -> None:
        super().__init__({})
        self.digests: dict[str, bytes] = {}
        self._titles: dict[int, str] = {}
        self._add("the function", fn)

    def _add(self, part: str, value: Any) -> None:
        self.digests[part] = self.part(part, value)

    def _of_own(self, obj: Any) -> bytes:
        title = self._titles.get(id(obj))
        if title is None:
            name = repr(obj.__qualname__)
            alike = sum(each.startswith(name) for each in self._titles.values())
            title = self._titles[id(obj)] = f"{name} ({alike + 1})" if alike else name
            (self._add_class if isinstance(obj, type) else self._add_function)(title, obj)
        return _hashed("own", title)

    def _add_function(self, title: str, fn: types.FunctionType) -> None:
        code = fn.__code__
        self._add(f"the code of {title}", code)
        self._add(f"the defaults of {title}", [fn.__defaults__, fn.__kwdefaults__])
        self._add(f"the attributes of {title}", fn.__dict__)
        for name, cell in zip(code.co_freevars, fn.__closure__ or ()):
            if cell != types.CellType():  # not empty
                self._add(f"{name!r} that {title} captures", cell.cell_contents)
        for name in sorted(globals_in(code) & fn.__globals__.keys()):
            value = fn.__globals__[name]
            self._add(f"the global {name!r} of {title}", value)
            if isinstance(value, types.ModuleType):
                self._add_used(value, _names_in(code))
        self._add_imported(imports_in(code))

    def _add_class(self, title: str, cls: type) -> None:
        self._add(f"the bases of {title}", cls.__bases__)
        for name, value in sorted(vars(cls).items()):
            if isinstance(value, (types.FunctionType, CACHED, *WRAPPERS)) or not name.startswith("__"):
                self._add(f"{name!r} of {title}", value)

    def _add_used(self, module: types.ModuleType, names: frozenset[str]) -> None:
        """Add what code may use of a module of the program: whatever it names that the module has."""
        for name in sorted(names & vars(module).keys()) if is_users_module(module.__name__) else ():
            part, value = f"{name!r} of the module {module.__name__!r}", vars(module)[name]
            if part not in self.digests:
                self._add(part, value)
                if isinstance(value, types.ModuleType):
                    self._add_used(value, names)

    def _add_imported(self, names: Iterable[str]) -> None:
        """Add the code of modules of the program that a function imports when it runs, and of what they import."""
        for name in sorted(names):
            part = f"the code of the module {name!r}"
            code = None if part in self.digests else users_code(name)
            if code is not None:
                self._add(part, code)
                self._add_imported(imports_in(code))


def _names_in(code: types.CodeType) -> frozenset[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(code.co_names).union(*map(_names_in, inner))
