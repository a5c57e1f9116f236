"""What a function computes and what an item is, as digests: equal in every process, whatever its hash seed and folder.

They do not depend on positions in a file, file names, addresses, or the order of sets. Functions and classes
of installed packages count by their names. A module of the program counts with what code reads of it, and with all that
it holds where an object, a container or an argument is the module itself.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import operator
import sys
import types
import weakref
from collections.abc import MutableMapping
from typing import Any, TypeVar

import numpy as np

from synk._api.plain import copied
from synk._code.modules import CELLS, PARTS, WRAPPERS, imported_in, is_users_module, reads_in, users_code
from synk._pure.tensors import array_of, is_plain, is_tensor
from synk._pure.words import text_of
from synk._wire.parcels import CACHED, is_by_reference, reduced

_OF_IMPORT = {*vars(types.ModuleType("")), "__builtins__", "__cached__", "__file__", "__path__", "__annotations__"}
"""What the import of a module puts into it."""

_OF_CLASS = {
    "__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__annotations_cache__", "__firstlineno__",
    "__static_attributes__", "__slotnames__", "_abc_impl",
}  # fmt: skip
"""What a class statement puts into any class: slots, texts, where it is; and what pickling and ``isinstance`` add."""

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
            text = text_of(error).rstrip(".")
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
        if kind in (dict, types.MappingProxyType):  # code sees the order of keys
            return _hashed("dict", *(self._of(each) for item in obj.items() for each in item))
        return b""

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
            return self._of_own(obj) if _is_own(obj) else _hashed("module", obj.__name__)
        if isinstance(obj, WRAPPERS):
            held = [getattr(obj, part, None) for part in (*PARTS, "args", "keywords")]
            own = None if type(obj) in WRAPPERS else vars(obj)
            return _hashed("wrapper", *map(self._of, (type(obj), *held, own)))
        if isinstance(obj, TypeVar):  # its pickle has a random number
            return _hashed("type variable", obj.__name__, self._of([obj.__bound__, obj.__constraints__]))
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
        """Return the digest of a function, a class or a module of the program."""
        if obj not in self._codes:
            parts = sorted(_Parts(obj).digests.items())  # a set of classes has another order in each process
            self._codes[obj] = _hashed("own", *(each for part in parts for each in part))
        return self._codes[obj]

    def _of_object(self, obj: Any) -> bytes:
        """Return the digest of any other object: of what its pickle is made of."""
        self.kinds.add(type(obj))
        if isinstance(obj, functools.partial):
            vars(obj)  # it has none until somebody looks, and its recipe would tell
        recipe = reduced(obj)
        if isinstance(recipe, str):
            return _hashed("name", str(getattr(obj, "__module__", "")), recipe)
        make, args, state, values, items = (*recipe, None, None, None)[:5]
        return _hashed("object", *map(self._of, (make, args, state, list(values or ()), list(items or ()))))


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
        self._own: dict[str, Any] = {}  # by title
        self._pending: list[str] = []
        whole = self.part("the function", fn)
        for title in self._pending:
            obj = self._own[title]
            is_module, is_class = isinstance(obj, types.ModuleType), isinstance(obj, type)
            (self._add_module if is_module else self._add_class if is_class else self._add_function)(title, obj)
        self.digests["the function"] = whole  # last: what has changed inside it says more

    def _add(self, part: str, value: Any) -> None:
        self.digests[part] = self.part(part, value)

    def _of_own(self, obj: Any) -> bytes:
        title = self._title(obj)
        if title not in self._own:
            self._own[title] = obj
            self._pending.append(title)
        return _hashed("own", title)

    def _title(self, obj: Any) -> str:
        if id(obj) not in self._titles:
            is_module = isinstance(obj, types.ModuleType)
            name = f"the module {obj.__name__!r}" if is_module else repr(obj.__qualname__)
            alike = sum(each.startswith(name) for each in self._titles.values())
            self._titles[id(obj)] = f"{name} ({alike + 1})" if alike else name
        return self._titles[id(obj)]

    def _add_function(self, title: str, fn: types.FunctionType) -> None:
        code = fn.__code__
        self._add(f"the code of {title}", code)
        self._add(f"the defaults of {title}", [fn.__defaults__, fn.__kwdefaults__])
        self._add(f"the attributes of {title}", fn.__dict__)
        cells, reads = zip(code.co_freevars, fn.__closure__ or ()), reads_in(code, CELLS)
        captured = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}  # not empty
        for name, *path in sorted(reads | {(name,) for name in captured.keys() - {read[0] for read in reads}}):
            if name in captured:
                self._add_read(f"{name!r} that {title} captures", captured[name], path)
        for name, *path in sorted(reads_in(code)):
            if name in fn.__globals__:
                self._add_read(f"the global {name!r} of {title}", fn.__globals__[name], path)
        package = fn.__globals__.get("__package__") or ""
        self._add_imported(code, package)
        for name in sorted(imported_in(code, package)):
            self._add_used(sys.modules.get(name), _names_in(code))

    def _add_class(self, title: str, cls: type) -> None:
        self._add(f"the bases of {title}", cls.__bases__)
        self._add(f"the metaclass of {title}", type(cls))
        if isinstance(cls, abc.ABCMeta):
            registered = [each() for each in abc._get_dump(cls)[0]]  # type: ignore[attr-defined]
            by_name = sorted(filter(None, registered), key=operator.attrgetter("__module__", "__qualname__"))
            self._add(f"what is registered with {title}", by_name)
        for name in sorted(vars(cls).keys() - _OF_CLASS):
            self._add(f"{name!r} of {title}", vars(cls)[name])

    def _add_module(self, title: str, module: types.ModuleType) -> None:
        """Add all that a module holds: who has the module itself may use any of it."""
        for name in sorted(vars(module).keys() - _OF_IMPORT):
            self._add_read(f"{name!r} of {title}", vars(module)[name], [])

    def _add_read(self, part: str, value: Any, path: list[str]) -> None:
        """Add a value; where code reads an attribute of a module of the program, only that attribute."""
        if isinstance(value, types.ModuleType) and _is_own(value) and path and path[0] in vars(value):
            self.digests[part] = _hashed("own", self._title(value))
            self._add_read(f"{path[0]!r} of {self._title(value)}", vars(value)[path[0]], path[1:])
        elif part not in self.digests or isinstance(value, types.ModuleType):
            self._add(part, value)

    def _add_imported(self, code: types.CodeType, package: str) -> None:
        """Add the code of modules of the program that code imports when it runs, and of what they import."""
        for name in sorted(imported_in(code, package)):
            part = f"the code of the module {name!r}"
            found = None if part in self.digests else users_code(name)
            if found is not None:
                self._add(part, found[0])
                self._add_imported(*found)

    def _add_used(self, module: Any, names: frozenset[str]) -> None:
        """Add what code may use of a module that it imports when it runs and that the program, which can have changed
        it, has imported: whatever it names that the module has.
        """
        if not isinstance(module, types.ModuleType) or not _is_own(module):
            return
        self.digests[f"that the program has imported {module.__name__!r}"] = b""
        for name in sorted(names & vars(module).keys()):
            part, value = f"{name!r} of {self._title(module)}", vars(module)[name]
            if not isinstance(value, types.ModuleType):
                self._add_read(part, value, [])
            elif part not in self.digests:
                self.digests[part] = _hashed("own", self._title(value))
                self._add_used(value, names)


def _is_own(module: types.ModuleType) -> bool:
    """Whether a module is one of the program: the user's, the script, a package without a file, or made by hand."""
    name = module.__name__
    is_made_by_hand = type(module) is types.ModuleType and sys.modules.get(name) is not module
    has_no_file = hasattr(module, "__path__") and getattr(module, "__file__", None) is None
    return is_users_module(name) or name == "__main__" or is_made_by_hand or has_no_file


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names in a code object and the functions inside it, and the texts, which can be names for getattr."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    texts = (each for each in code.co_consts if isinstance(each, str))
    return frozenset(code.co_names).union(texts, *map(_names_in, inner))
