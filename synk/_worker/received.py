"""What a worker has received with its functions: the objects that later messages refer to, and modules edited since.

The counterpart of ``synk._master.parcels``.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import io
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from synk._wire.messages import LoadOrder, Reload
from synk._wire.parcels import Absent, Found


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, objects: dict[int, Sequence[Any]]) -> None:
        super().__init__(io.BytesIO(data))
        self._objects = objects

    def persistent_load(self, address: tuple[int, int]) -> Any:
        number, index = address
        return self._objects[number][index]


class Received:
    """The parcels of one rank: by number, the objects in each."""

    def __init__(self) -> None:
        self._objects: dict[int, Sequence[Any]] = {}
        self._superseded: dict[tuple[str, str], weakref.WeakSet[Any]] = {}

    def load(self, order: LoadOrder, load_function: Callable[[int, dict[str, Any]], None]) -> None:
        """Take in parcels; each of them in full or, where it raises, not at all."""
        if order.sys_path is not None:
            sys.path[:] = order.sys_path
        for reload in order.reloads:
            renew_module(reload, self._superseded)
        for number, data in order.parcels:
            unpickler = _Unpickler(data, self._objects)
            actions = unpickler.load()
            self._objects[number] = unpickler.load()
            for action, *what in actions:
                if action == "function":
                    load_function(*what)
                elif action == "bind":
                    _bind(*what)
                else:
                    _fill(*what)

    def drop(self, number: int, unbound: Sequence[tuple[tuple[int, int], Any]]) -> None:
        """Let go of a parcel's objects, and of the globals that it brought."""
        self._objects.pop(number, None)
        for (parcel, index), name in unbound:
            if parcel in self._objects:
                self._objects[parcel][index].pop(name, None)


def _bind(kind: str, target: Any, key: Any, value: Any) -> None:
    """Bind a place anew, past properties and frozen classes: the master's object holds this value there."""
    if isinstance(target, Found):
        target = target.find()
    if kind == "tensor":
        import torch

        with torch.no_grad():
            target.copy_(value)
        return
    if kind == "cell":
        _set_attribute(target, "cell_contents", value)
        return
    table: Any = target
    if kind == "attribute":
        table = getattr(target, "__dict__", None)
        is_slot = key not in (table or ()) and isinstance(getattr(type(target), key, None), types.MemberDescriptorType)
        if is_slot or isinstance(target, types.FunctionType) or not isinstance(table, dict):
            _set_attribute(target, key, value)
            return
    if value is Absent:
        table.pop(key, None)
    else:
        table[key] = value


def _set_attribute(target: Any, key: str, value: Any) -> None:
    owner: Any = type if isinstance(target, type) else object
    if value is not Absent:
        owner.__setattr__(target, key, value)
    else:
        with contextlib.suppress(AttributeError):
            owner.__delattr__(target, key)


def _fill(target: Any, value: Any) -> None:
    """Give an object the elements of another of its type."""
    if isinstance(target, (list, bytearray)):
        target[:] = value
    elif isinstance(target, set):
        target.clear()
        target.update(value)
    else:
        target[...] = value


# -- modules of the user's --------------------------------------------------------------------------------------------


def renew_module(reload: Reload, superseded: dict[tuple[str, str], weakref.WeakSet[Any]]) -> None:
    """Bring a module that the master has reloaded up to date, if this process has imported it.

    Statements of the module that are as before are not run again: enums, registries and classes that were not edited
    stay the same objects, and what was made of them goes on to be theirs. ``superseded`` keeps the earlier versions of
    classes that were, by module and name.
    """
    module = sys.modules.get(reload.module)
    if module is None:
        return
    tree = ast.parse(reload.source, reload.file)
    if reload.before is not None:
        known = {ast.dump(node) for node in ast.parse(reload.before).body}
        tree.body = [node for node in tree.body if _is_future(node) or ast.dump(node) not in known]
    table = vars(module)
    before = dict(table)
    exec(compile(tree, reload.file, "exec"), table)
    for name, new in list(table.items()):
        old: Any = before.get(name)
        if old is not new and type(old) is type(new) and getattr(old, "__module__", None) == reload.module:
            if isinstance(new, types.FunctionType):
                table[name] = _update_function(old, new)
            elif isinstance(new, type):
                earlier = superseded.setdefault((reload.module, name), weakref.WeakSet())
                earlier.add(old)
                for each in earlier:
                    _update_class(each, new)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _update_function(old: Any, new: Any) -> Any:
    """Give a function, which others may hold, the code of its successor, and return the one to use."""
    try:
        old.__code__ = new.__code__
    except ValueError:  # another number of closure variables
        return new
    old.__defaults__, old.__kwdefaults__ = new.__defaults__, new.__kwdefaults__
    old.__dict__.update(new.__dict__)
    return old


def _update_class(old: type, new: type) -> None:
    """Make the instances of a class those of its successor; whoever holds the class itself gets its methods."""
    for key, value in list(vars(new).items()):
        if key not in ("__dict__", "__weakref__", "__doc__"):
            with contextlib.suppress(AttributeError, TypeError):  # an enum's members, say
                setattr(old, key, value)
    for each in gc.get_referrers(old):
        if type(each) is old:
            with contextlib.suppress(TypeError):  # another layout
                object.__setattr__(each, "__class__", new)
