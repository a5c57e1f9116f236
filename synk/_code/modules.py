"""The user's own modules, which workers import themselves: which modules a function can reach, and what is in them.

A worker that imports a module finds there what its own import made: the same functions and classes, but not what the
program has bound or changed since. So functions, classes and modules count as equal, and data are sent.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import logging
import os
import re
import site
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterable, Iterator
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Any, NamedTuple

from synk._pure.alike import NUMBERS
from synk._wire.parcels import BY_VALUE, CACHED, is_by_reference

WRAPPERS = (property, staticmethod, classmethod, functools.cached_property, functools.partialmethod)
_DESCRIPTORS = (
    types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType, types.GenericAlias,
    logging.Logger,
)  # fmt: skip


PARTS = ("__func__", "fget", "fset", "fdel", "func")
"""Where a wrapper of a method holds functions."""


class Located(NamedTuple):
    """An object of a module that workers import themselves: the module's name, and the steps to the object."""

    obj: Any
    module: str
    steps: tuple[tuple[str, Any], ...]


def is_users_module(name: Any) -> bool:
    """Whether a module is part of the user's program: a file that belongs neither to the interpreter nor to a package
    that was installed, in whatever folder.
    """
    module = sys.modules.get(name) if isinstance(name, str) else None
    file = getattr(module, "__file__", None)
    if module is None or not isinstance(file, str) or name == "__main__" or name.partition(".")[0] == "synk":
        return False
    return _is_users_file(file, name, hasattr(module, "__path__"))


def users_code(name: str) -> tuple[types.CodeType, str] | None:
    """Return the code of a module of the user's program, which need not be imported yet, and the package from which
    its relative imports count; None for other modules.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # there is none, or it was made by hand
        return None
    if spec is None or not spec.origin or not spec.has_location or name.partition(".")[0] in ("synk", "__main__"):
        return None
    is_own = _is_users_file(spec.origin, name, spec.submodule_search_locations is not None)
    code = spec.loader.get_code(name) if is_own and isinstance(spec.loader, InspectLoader) else None
    return code and (code, spec.parent or "")


@functools.lru_cache(maxsize=4096)
def _is_users_file(file: str, name: str, is_package: bool) -> bool:
    path = os.path.realpath(file)
    parts = path.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return False
    if any(path.startswith(folder + os.sep) for folder in _library_folders()):
        return False
    folder = Path(os.path.abspath(file)).parents[
        name.count(".") + is_package :
    ]  # the entry of the search path is first
    return not folder or name.partition(".")[0] not in _installed_in(folder[0])


@functools.lru_cache(maxsize=256)
def _installed_in(folder: Path) -> frozenset[str]:
    """Return the top names of what an installer has put into a folder, as pip does with ``--target``.

    It leaves metadata with the version in their name. Those of a source folder, which setuptools makes, have none.
    """
    found: set[str] = set()
    for metadata in (*folder.glob("*-*.dist-info"), *folder.glob("*-*.egg-info")):
        found.add(metadata.name.partition("-")[0])
        for listed in ("RECORD", "top_level.txt"):  # paths of files, and names
            with contextlib.suppress(OSError):
                lines = (metadata / listed).read_text(encoding="utf-8", errors="replace").splitlines()
                found.update(re.split("[/.,]", line, maxsplit=1)[0] for line in lines)
    return frozenset(found)


@functools.lru_cache(maxsize=1)
def _library_folders() -> frozenset[str]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_path(name) for name in names} | {site.getusersitepackages()}
    return frozenset(os.path.realpath(folder) for folder in folders if folder)


_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
CELLS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")


@functools.lru_cache(maxsize=4096)
def reads_in(code: types.CodeType, ops: tuple[str, ...] = _GLOBALS) -> frozenset[tuple[str, ...]]:
    """Return the globals (or, with ``CELLS``, the captured values) that a code object and the functions inside it name,
    each followed by the attributes that are read from it at once: ``("np", "random", "rand")``.
    """
    found = set[tuple[str, ...]]()
    path: tuple[str, ...] = ()
    for each in dis.get_instructions(code):  # the last one returns
        if path and each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*path, each.argval)
        elif each.opname != "EXTENDED_ARG":
            found.add(path)
            path = (each.argval,) if each.opname in ops else ()
    return frozenset(found - {()}).union(*(reads_in(inner, ops) for inner in _codes_in(code)))


@functools.lru_cache(maxsize=4096)
def globals_in(code: types.CodeType) -> frozenset[str]:
    """Return the globals that a code object and the functions inside it name."""
    return frozenset(path[0] for path in reads_in(code))


_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_IMPORTERS = frozenset(("import_module", "__import__", "modules"))


@functools.lru_cache(maxsize=4096)
def imports_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of the modules that a code object and the functions inside it may import when they run."""
    found: set[str] = set()
    if _IMPORT_NAME in code.co_code[::2]:  # quick where there is none, as in most
        found.update(each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME")
    if not _IMPORTERS.isdisjoint(code.co_names):
        found |= {constant for constant in code.co_consts if type(constant) is str}
    found |= {name[:end] for name in found for end, letter in enumerate(name) if letter == "."}  # packages first
    return frozenset(found.union(*map(imports_in, _codes_in(code))))


@functools.lru_cache(maxsize=4096)
def imported_in(code: types.CodeType, package: str) -> frozenset[str]:
    """Return the names of ``imports_in``, those of relative imports in a package, and those that ``from`` imports take
    from packages, which may be modules.
    """
    found = set(imports_in(code))
    steps = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    for level, taken, each in zip(steps, steps[1:], steps[2:]):
        if each.opname == "IMPORT_NAME":
            with contextlib.suppress(ImportError):  # it would fail there too
                base = importlib.util.resolve_name("." * level.argval + each.argval, package)
                found |= {base, *(f"{base}.{name}" for name in taken.argval or ())}
    return frozenset(found.union(*(imported_in(inner, package) for inner in _codes_in(code))))


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def reached_from(names: Iterable[str]) -> list[str]:
    """Return the user's modules among ``names``, followed by the user's modules that their code can reach."""
    found: dict[str, None] = {}
    pending = [name for name in names if is_users_module(name)]
    while pending:
        name = pending.pop(0)
        if name in found:
            continue
        found[name] = None
        pending += sorted(_neighbours(name) - set(found))
    return list(found)


def _neighbours(name: str) -> set[str]:
    found: set[Any] = set()
    for value in list(vars(sys.modules[name]).values()):
        if isinstance(value, types.ModuleType):
            found.add(value.__name__)
        elif isinstance(value, (types.FunctionType, type)):
            found.add(value.__module__)
            if value.__module__ == name and isinstance(value, types.FunctionType):
                found |= imports_in(value.__code__)
    return {each for each in found if is_users_module(each)}


def imports_inside(module: types.ModuleType) -> set[str]:
    """Return the names of the modules that the functions and methods of a module may import when they run."""
    members = _members(module.__name__, vars(module))
    return set().union(*(imports_in(each.obj.__code__) for each in members if isinstance(each.obj, types.FunctionType)))


def inside(module: types.ModuleType) -> list[Located]:
    """Return what is compared in a module: its table, its own functions with their cells, and its own classes.

    The same goes for what is in these classes. Of a module that was reloaded, only its table: what is in it travels
    with its contents.
    """
    name, table = module.__name__, vars(module)
    found = [Located(table, name, (("table", None),))]
    for each in () if name in BY_VALUE else _members(name, table):
        kind, _ = each.steps[-1]
        if not isinstance(each.obj, types.FunctionType):
            found.append(each)
        elif kind != "member" or travels_by_name(each.obj):
            found.append(each)
            cells = enumerate(each.obj.__closure__ or ())
            found += [Located(cell, name, (*each.steps, ("closure", index))) for index, cell in cells]
    return found


def _members(name: str, table: Any, prefix: str = "", steps: tuple[tuple[str, Any], ...] = ()) -> Iterator[Located]:
    """Yield the own functions and classes of a module or of a class in it, each class followed by what is in it."""
    for key, value in list(table.items()):
        place = (*steps, ("member", key))
        if isinstance(value, (types.FunctionType, type)):
            if value.__module__ == name and value.__qualname__ == f"{prefix}{key}":
                yield Located(value, name, place)
                if isinstance(value, type):
                    yield from _members(name, vars(value), f"{prefix}{key}.", place)
                else:
                    yield from _wrapped_in(Located(value, name, place), {id(value)})
        elif isinstance(value, WRAPPERS) and steps:
            for part in PARTS:
                inner = getattr(value, part, None)
                if isinstance(inner, types.FunctionType) and inner.__module__ == name:
                    yield Located(inner, name, (*place, ("attribute", part)))


def _wrapped_in(located: Located, seen: set[int]) -> Iterator[Located]:
    """Yield the functions of the same module that a function keeps in its cells, as one that a decorator made does."""
    for index, cell in enumerate(located.obj.__closure__ or ()):
        try:
            inner = cell.cell_contents
        except ValueError:  # empty
            continue
        if isinstance(inner, types.FunctionType) and inner.__module__ == located.module and id(inner) not in seen:
            seen.add(id(inner))
            steps = (*located.steps, ("closure", index), ("attribute", "cell_contents"))
            found = Located(inner, located.module, steps)
            yield found
            yield from _wrapped_in(found, seen)


_first_code: weakref.WeakKeyDictionary[Any, types.CodeType] = weakref.WeakKeyDictionary()


def first_code_of(function: types.FunctionType) -> types.CodeType:
    """Return the code that a function had when a runtime first met it, which is its import's."""
    return _first_code.setdefault(function, function.__code__)


def plain_defaults(obj: Any) -> dict[str, Any]:
    """Return the defaults of a function that cannot change in place. They travel with its place in its module."""
    if not isinstance(obj, types.FunctionType):
        return {}
    defaults = {"__defaults__": obj.__defaults__, "__kwdefaults__": obj.__kwdefaults__}
    return {k: v for k, v in defaults.items() if v is None or (type(v) is tuple and all(type(x) in NUMBERS for x in v))}


def is_told_by_import(key: Any, value: Any, module: str) -> bool:
    """Whether to assume that a worker which imports ``module`` finds under ``key`` what the program has there."""
    if key == "__bases__":
        return all(map(travels_by_name, value))
    if isinstance(key, str) and key.startswith("__") and key.endswith("__"):
        return not _is_code(value) or key == "__wrapped__" or travels_by_name(value) or value.__module__ == module
    if _is_code(value):
        return type(value).__module__ == "_ctypes" or travels_by_name(value)  # or a type that ctypes.POINTER makes
    if isinstance(value, WRAPPERS):
        inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None)
        return getattr(inner, "__module__", module) == module
    if isinstance(value, types.ModuleType):
        return sys.modules.get(value.__name__) is value
    if isinstance(value, (types.BuiltinFunctionType, types.CodeType, *_DESCRIPTORS)):
        return True
    return type(value).__module__ in ("typing", "__future__") or hasattr(type(value), "_is_made_by_import")


def travels_by_name(obj: Any) -> bool:
    """Whether workers find a function or a class under its name.

    They do not if the program has put a function of its own, with the same name, in the place of a module's function.
    """
    if not is_by_reference(obj):
        return False
    code = getattr(obj, "__code__", None)
    return code is None or not is_users_module(obj.__module__) or not _is_of_program(code.co_filename)


def is_of_program(code: type | types.FunctionType) -> bool:
    """Whether a class or a function is one of the user's: of the script, or of a module of theirs."""
    return not is_by_reference(code) or is_users_module(code.__module__)


def _is_of_program(file: str) -> bool:
    """Whether code was written in the main program, a notebook or a prompt, not in a module."""
    return file.startswith("<") or file == getattr(sys.modules.get("__main__"), "__file__", None)


def _is_code(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, type, CACHED))
