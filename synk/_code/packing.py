"""How captured objects are pickled: each once, with the facets by which it can change.

The rules are cloudpickle's, with three exceptions: an object that the workers hold is pickled as its address, a large
array as its place in shared memory, and a function without its globals and cells, which travel apart. In one file
because these are the methods of one pickler.
"""

from __future__ import annotations

import enum
import functools
import gc
import io
import sys
import types
import typing
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from synk._code.arrays import ArrayContents, RawContents, TensorContents, contents_of
from synk._code.facets import (
    MISSING,
    Elements,
    Facet,
    State,
    Table,
    attributes,
    contents,
    factory,
    recipe_of,
    table_of,
)
from synk._code.modules import globals_in, imports_in, is_of_program, is_users_module, travels_by_name
from synk._code.parcels import FunctionHandle, Handle, HandlePickler, Node, Parcel, Shelf
from synk._code.trees import Tree, plain_facet, walk
from synk._pure.alike import NUMBERS, kept
from synk._pure.ranges import round_up
from synk._wire.classes import make_instance
from synk._wire.file_maps import recipe_of_map
from synk._wire.memory import PAGE_NBYTES
from synk._wire.parcels import (
    BY_VALUE,
    CACHED,
    Mapped,
    cached_recipe,
    dumps,
    fill_function,
    is_by_reference,
    make_array,
    make_cell,
    make_read_only,
    make_tensor,
)
from synk._wire.parcels import reduced as reduced_anew

_ATOMIC = (
    type(None), types.CodeType, types.BuiltinFunctionType, types.MethodType, np.dtype, np.generic,
    property, classmethod, staticmethod, typing.TypeVar, io.IOBase, enum.Enum, Handle, slice, range,
    functools.cached_property, FunctionHandle,
)  # fmt: skip
"""Objects that cannot change, or whose identity is all that counts. What they hold is met as objects of its own."""

_IMMUTABLE = frozenset(("datetime", "decimal", "fractions", "inspect", "pathlib", "re", "uuid", "zoneinfo"))
"""Modules of the standard library whose objects cannot change, but for those of the next two classes."""

_MUTABLE = frozenset((("decimal", "Context"), ("inspect", "BoundArguments")))


class ComesFirst(Exception):
    """Something whose code may run while a parcel is loaded, and that must be there before, with what it refers to.

    Attributes
    ----------
    what : type, function or str
        A class, a function that makes objects, or the name of one of the user's modules.
    """

    def __init__(self, what: Any) -> None:
        super().__init__(what)
        self.what = what


class ComesApart(Exception):
    """A part of a tree is captured by itself, so that the tree cannot be one unit.

    Attributes
    ----------
    tree : Tree
    """

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self.tree = tree


class Address:
    """Stands in a pickle for an object that the workers hold. Needed for globals, whose dict there is another one."""

    def __init__(self, node: Node) -> None:
        self.node = node


class SharedBytes:
    """Stands in a pickle for a large array as it lies in shared memory now."""

    def __init__(self, facet: ArrayContents) -> None:
        self.facet = facet


def _from_memory(facet: ArrayContents) -> Any:
    """Return the recipe of an array or a tensor whose bytes lie in shared memory, or of a small tensor."""
    obj = facet.obj
    if isinstance(obj, np.ndarray):
        return make_array, (facet.place, obj.dtype, obj.shape, facet.order)
    is_parameter = type(obj) is not sys.modules["torch"].Tensor
    raw = facet.told if facet.place is None else facet.place
    return make_tensor, (raw, obj.dtype, tuple(obj.shape), obj.requires_grad, is_parameter)


class PartsPickler(HandlePickler):
    """Pickles what is to be sent, and notes every object that can change.

    Attributes
    ----------
    met : list of (object, list of Facet)
        The objects that workers will know by their position in this list.
    arrays : list of ArrayContents
        Large arrays, in the order of their places in shared memory.
    arrays_nbytes, segment_id : int
        The size of that memory, and its number; 0 if there is none.
    """

    has_word = True

    def __init__(self, file: io.BytesIO, book: Shelf, parcel: Parcel) -> None:
        super().__init__(file)
        self._book = book
        self._parcel = parcel
        self.handles, self.optimizers = parcel.handles, parcel.optimizers
        self.met: list[tuple[Any, list[Facet]]] = []
        self.arrays: list[ArrayContents] = []
        self.arrays_nbytes = 0
        self.segment_id = 0
        self._ids: set[int] = set()
        self._left_out: dict[int, Any] = {}  # parts of recipes, which are no objects on a worker; kept for their ids
        self._cells: set[int] = set()
        self._trees: dict[int, int] = {}
        self._own_trees: list[Tree] = []

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is Mapped:
            return tuple(obj)
        if type(obj) is Tree:
            return (obj.data,)
        if type(obj) is Address:
            self._parcel.refers.add(obj.node.parcel)
            return obj.node.address
        node = self._book.known.get(id(obj))
        if node is None and type(obj) is dict and id(obj) in self._book.namespaces:  # the dict itself is captured
            node, names = self._book.namespace(obj)
            names.is_whole = True
            self._parcel.named |= {(node, name) for name in obj}
        if node is not None:
            if isinstance(obj, type):
                self._come_first(obj.__module__ if self._book.is_located(node) else obj)
            self._parcel.refers.add(node.parcel)
            return node.address
        return None if id(obj) in self._left_out else self._meet_container(obj)

    def _meet_container(self, obj: Any) -> tuple[Any, ...] | None:
        """Note a container that is new to the ranks. Return what stands for it if it is pickled here at once."""
        kind = type(obj)
        if id(obj) in self._trees:  # met before in this parcel
            return (self._trees[id(obj)],)
        data = self._pickle_plain(obj) if kind in _PLAIN else None
        if data is not None:
            self._trees[id(obj)] = len(self._trees)
            return (data,)
        if kind in (dict, list, set, deque):
            self._meet(obj, Elements)
        elif kind is bytearray:
            self._meet(obj, RawContents)
        return None

    def _pickle_plain(self, obj: Any) -> bytes | None:
        """Return the pickle of a large tree of plain containers, or of a long container of texts and numbers."""
        for tree in (*self._book.trees.values(), *self._own_trees):
            if id(obj) in tree.ids and obj is not tree.obj:
                raise ComesApart(tree)
        if not obj or id(obj) in self._ids or id(obj) in self._book.apart:
            return None
        found = plain_facet(obj, self._ids, self._book.known.keys())
        if found is None:
            return None
        facet, data = found
        if isinstance(facet, Tree):
            self._own_trees.append(facet)
        self._meet(obj, lambda _: facet)
        return data

    def _meet(self, obj: Any, *makers: Callable[[Any], Facet]) -> None:
        if id(obj) not in self._ids:
            self._ids.add(id(obj))
            self.met.append((obj, [make(obj) for make in makers]))

    def _come_first(self, what: Any) -> None:
        """See that a class, a function or a module is up to date on the ranks before this parcel is loaded."""
        if not self._book.is_prepared(what):
            raise ComesFirst(what)

    def leave_out(self, part: Any) -> None:
        """Treat a container as part of a recipe, not as an object that can change."""
        self._left_out[id(part)] = part

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is SharedBytes:
            return _from_memory(obj.facet)
        if isinstance(obj, types.ModuleType):
            return self._reduce_module(obj)
        is_atomic = isinstance(obj, _ATOMIC) and not isinstance(obj, (io.BytesIO, io.StringIO, np.void))
        if is_atomic or _is_immutable(type(obj)):
            return super().reducer_override(obj)
        if type(obj) is types.MappingProxyType:  # of the very object behind it, which has a facet of its own
            return types.MappingProxyType, tuple(gc.get_referents(obj))
        if isinstance(obj, types.CellType) and id(obj) in self._cells:
            self._meet(obj, contents)
            return make_cell, ()  # its contents come with the function
        if isinstance(obj, (types.FunctionType, type)):
            return self._reduce_code(obj)
        if type(obj).__module__ == "torch.storage":  # the memory of a tensor: the tensor's facet compares it
            return super().reducer_override(obj)
        found = contents_of(obj)
        if found is not None:
            return self._reduce_array(obj, found)
        reduced = self._reduce_instance(obj)
        is_plain = isinstance(reduced, tuple) and reduced[:2] == (_NEW, (type(obj),))
        is_held_by_class = is_plain and any(map(self._book.is_in_preparation, type(obj).__mro__))
        return (make_instance, *reduced[1:]) if is_held_by_class else reduced

    # -- code -------------------------------------------------------------------------------------------------------

    def _reduce_module(self, module: types.ModuleType) -> Any:
        reduced = reduced_anew(module)
        if not isinstance(reduced, tuple) or len(reduced[1]) == 1:
            self._note_module(module.__name__)
            return reduced
        self.leave_out(reduced[1][1])
        self._meet(module, attributes)
        return reduced

    def _note_module(self, name: Any) -> None:
        if is_users_module(name):
            if not self._book.engine.is_inline:
                self._come_first(name)
            self._parcel.modules_met.add(name)

    def _reduce_code(self, obj: Any) -> Any:
        is_named = isinstance(obj, types.FunctionType) and is_by_reference(obj)
        if is_named and not (travels_by_name(obj) and self._book.is_found(obj)):
            reduced = self._dynamic_function_reduce(obj)
        else:
            reduced = super().reducer_override(obj)
        if reduced is NotImplemented or len(reduced) < 3:
            self._note_module(getattr(obj, "__module__", None))
            return reduced
        if obj.__module__ in BY_VALUE and is_users_module(obj.__module__):
            self._note_module(obj.__module__)
        if isinstance(obj, type):
            self._come_first(obj)
        facet = attributes(obj)
        self._meet(obj, lambda _: facet)
        if isinstance(obj, types.FunctionType):
            self._parcel.imports |= imports_in(obj.__code__)
            return self._reduce_function(obj, reduced)
        for state in reduced[2]:
            self.leave_out(state)
        if not (self._parcel.is_optional or isinstance(obj, enum.EnumMeta)):
            table = reduced[2][0]
            for name in [name for name in facet.told if name in table and _comes_later(name, table[name])]:
                del table[name], facet.told[name]
        return reduced

    def _reduce_function(self, function: types.FunctionType, reduced: Any) -> Any:
        """Pickle a function without its globals and cells, which travel apart."""
        make, (code, _, *rest), (state, slots), *_, setter = reduced
        table, changes = function.__globals__, []
        node = self._book.known.get(id(table)) if table.get("__name__") in BY_VALUE else None
        if node is None:
            node, names = self._book.namespace(table)
            named = globals_in(function.__code__)
            names.names |= named
            self._parcel.named |= {(node, name) for name in named}
            changes = [each for each in names.changes() if each.key in named and each.value is not MISSING]
        cells = function.__closure__ or ()
        if self._parcel.is_optional:  # it arrives whole or not at all, so globals and cells come with it
            for change in changes:
                self._book.tell(node, names, change, self._parcel)
            self._cells.update(map(id, cells))
            fresh = [cell for cell in cells if id(cell) not in self._ids and id(cell) not in self._book.known]
            for cell in fresh:
                self._meet(cell, contents)
        else:  # globals and cells are changes of their own: functions share them, and they can be bound anew
            changes = [change for change in changes if isinstance(change.value, _LIGHT)]
            fresh = [cell for cell in cells if self._book.meet_cell(cell)]
        new = {change.key: change.value for change in changes}
        filled = [(cell, value) for cell in fresh for value in contents(cell).told.values()]
        if not self._parcel.is_optional:
            filled = [(cell, value) for cell, value in filled if isinstance(value, _LIGHT)]
        slots = {**slots, "__globals__": new, "__closure__": None}
        for each in (state, slots, new, filled, slots.get("__annotations__"), slots.get("_cloudpickle_submodules")):
            self.leave_out(each)
        newargs = (code, Address(node), *rest[:-1], function.__closure__)
        return make, newargs, (filled, setter, (state, slots)), None, None, fill_function

    # -- data -------------------------------------------------------------------------------------------------------

    def _reduce_array(self, obj: Any, facet: ArrayContents) -> Any:
        is_array = isinstance(obj, np.ndarray)
        mapped = recipe_of_map(obj) if is_array and self._book.engine.has_shared_memory else None
        if mapped is not None:
            self._meet(obj, lambda _: State(obj, recipe_of_map, (*mapped, None)))
            return mapped
        self._meet(obj, lambda _: facet, *(() if type(obj) is np.ndarray else (attributes,)))
        if type(obj) is not np.ndarray if is_array else not _is_simple_tensor(obj):
            facet.note_sent(facet.raw())
            recipe = super().reducer_override(obj)
            self.leave_out(recipe[2][1] if is_array and recipe is not NotImplemented else table_of(obj))
            return recipe
        if facet.is_large and self._book.engine.has_shared_memory:
            self.segment_id = self.segment_id or next(self._book.engine.numbers)
            facet.place = Mapped(self.segment_id, self.arrays_nbytes, facet.nbytes)
            self.arrays.append(facet)
            self.arrays_nbytes += round_up(facet.nbytes, PAGE_NBYTES)
            return _from_memory(facet)
        facet.note_sent(facet.raw())
        if is_array and not obj.flags.writeable:  # NumPy's own recipe puts it into memory that nobody can change
            return make_read_only, (facet.told, obj.dtype, obj.shape, facet.order)
        return NotImplemented if is_array else _from_memory(facet)

    def _reduce_instance(self, obj: Any) -> Any:
        table = table_of(obj)  # first, because some objects pickle their attributes only once the dict was read
        reduced = super().reducer_override(obj)
        is_own = _has_own_rule(obj) or reduced is not NotImplemented
        if reduced is NotImplemented:
            reduced = reduced_anew(obj)
        if not isinstance(reduced, tuple):
            is_found = not isinstance(obj, CACHED) or self._book.is_found(obj)
            return reduced if is_found else cached_recipe(obj)  # reduced is the name of a global
        for code in (reduced[0], *reduced[5:6]):
            code = code.func if isinstance(code, functools.partial) else code
            if isinstance(code, types.FunctionType) and not is_by_reference(code):
                self._come_first(code)
        makers: list[Callable[[Any], Facet]] = []
        if isinstance(obj, dict):
            makers += [Elements, factory] if isinstance(obj, defaultdict) else [Elements]
        elif isinstance(obj, bytearray):
            makers.append(RawContents)
        elif isinstance(obj, _CONTAINERS) or type(obj) is np.ndarray:  # an array of objects
            makers.append(Elements)
        state = reduced[2] if len(reduced) > 2 else None
        is_table = state is not None and _is_whole_table(obj, state, table)
        if is_own and not is_table and not makers:
            content = [None if part is None else list(part) for part in reduced[3:5]]
            self._meet_state(obj, (*reduced[:3], *content))
            return *reduced[:3], *(None if part is None else iter(part) for part in content), *reduced[5:]
        is_restored = is_own and state is not None and _restores_itself(type(obj))
        if is_restored:
            makers.append(_class_of)
        elif is_table or not is_own or (table is not None and type(obj).__module__ != "collections"):
            makers.append(attributes)
        if is_own:
            makers += self._of_own_rule(reduced, obj, table if is_table else None, is_restored)
        else:
            self._leave_out_containers(state)
        self._meet(obj, *makers)
        return reduced

    def _of_own_rule(
        self, reduced: tuple[Any, ...], obj: Any, table: dict[str, Any] | None, is_restored: bool
    ) -> list[Callable[[Any], Facet]]:
        """Leave out what the recipe of an object with other facets has made.

        Return a facet for its state if a method of the user's ``is_restored`` by it; for its arguments if its state is
        ``table``, and they hold more than that.
        """
        again = reduced_anew(obj)
        if not isinstance(again, tuple):
            return []
        fresh: list[Any] = []
        make, args, state = kept(recipe_of(reduced[:3]), recipe_of(again[:3]), fresh.append)
        for part in fresh if table is None and not is_restored else (*fresh, reduced[2]):
            self.leave_out(part)
        if is_restored:
            return [lambda _: _state(obj, lambda own: reduced_anew(own)[:3], (make, args, state))]
        if table is None or _holds_only(reduced[1], {*map(id, table.values())}):
            return []
        return [lambda _: _state(obj, lambda own: reduced_anew(own)[:2], (make, args, None))]

    def _leave_out_containers(self, part: Any) -> None:
        """Leave out the containers that make up a recipe."""
        if type(part) is tuple:
            for each in part:
                self._leave_out_containers(each)
        elif type(part) in (list, dict, set):
            self.leave_out(part)

    def _meet_state(self, obj: Any, reduced: tuple[Any, ...]) -> None:
        """Note an object with a pickling rule of its own."""
        again = reduced_anew(obj)
        if not isinstance(again, tuple):
            return
        fresh: list[Any] = []
        told = kept(recipe_of(reduced), recipe_of(again), fresh.append)
        for part in (*fresh, reduced[2] if len(reduced) > 2 else None):
            self.leave_out(part)
        if type(obj).__module__ == _MANAGERS:
            self._leave_out_containers(reduced[1])
        self._meet(obj, lambda _: _state(obj, reduced_anew, told), _class_of)


def _comes_later(name: str, value: Any) -> bool:
    """Whether an attribute of a class may hold instances of it, so that it is a change of its own, after the class."""
    if name.startswith("__") or isinstance(value, types.FunctionType):
        return False
    if isinstance(value, (*_CONTAINERS, dict, tuple)):
        return type(value) not in _PLAIN or walk(value) is None
    return not (isinstance(value, type) or is_by_reference(type(value)))


def _is_immutable(cls: type) -> bool:
    module = str(cls.__module__).partition(".")[0]  # the paths of Python 3.13 are of pathlib._local
    return module in _IMMUTABLE and (module, cls.__name__) not in _MUTABLE


def _state(obj: Any, reduce: Callable[[Any], Any], told: tuple[Any, Any, Any]) -> State:
    """Return the facet of a recipe; of the pickle where the recipe differs each time. That may differ, too."""
    facet = State(obj, reduce, told)
    return facet if facet.is_current() else State(obj, _pickled, _pickled(obj))


def _pickled(obj: Any) -> tuple[Any, Any, Any]:
    return dumps(obj), (), None


def _holds_only(args: Any, ids: set[int]) -> bool:
    """Whether the arguments of a recipe are classes and objects with these ids, alone or in tuples and dicts."""
    if isinstance(args, type) or id(args) in ids:
        return True
    if type(args) in (tuple, dict):
        return all(_holds_only(part, ids) for part in (args if type(args) is tuple else args.values()))
    return False


def _class_of(obj: Any) -> Facet:
    return Table(obj, "attribute", lambda: {"__class__": type(obj)})


_CONTAINERS = (list, deque, set)
_PLAIN = frozenset((dict, list, tuple, set))
_LIGHT = (types.ModuleType, types.FunctionType, type, types.BuiltinFunctionType, *NUMBERS)
"""Globals that a function may need already while its parcel is being loaded."""
_OBJECT: Any = object
_NEW = object().__reduce_ex__(2)[0]
"""Makes an object by ``__new__`` of its class."""
_MANAGERS = "pandas.core.internals.managers"
"""The module of what holds a DataFrame's columns. Its list of axes is private and must fit the columns."""


def _is_whole_table(obj: Any, state: Any, table: dict[str, Any] | None) -> bool:
    """Whether an object's state is exactly its attributes, so that workers can set them one by one."""
    if _restores_itself(type(obj)):
        return False
    if state is table:
        return not hasattr(type(obj), "__setstate__")
    if type(state) is not dict or not table or type(obj).__reduce_ex__ is not _OBJECT.__reduce_ex__:
        return False
    others = [value for name, value in state.items() if name not in table]
    is_whole = all(state.get(name, Address) is value for name, value in table.items())
    return is_whole and all(isinstance(value, NUMBERS) for value in others)


def _restores_itself(cls: type) -> bool:
    """Whether code of the user's restores an object from its state, and may copy what is in it."""
    restore = getattr(cls, "__setstate__", None)
    return isinstance(restore, types.FunctionType) and is_of_program(restore)


def _has_own_rule(obj: Any) -> bool:
    """Whether an object has a pickling rule of its own, beyond its attributes."""
    cls = type(obj)
    if cls in HandlePickler.dispatch_table or cls.__reduce_ex__ is not _OBJECT.__reduce_ex__:
        return True
    if cls.__reduce__ is not _OBJECT.__reduce__ or hasattr(cls, "__getnewargs__") or hasattr(cls, "__getnewargs_ex__"):
        return True
    return any("__getstate__" in vars(base) for base in cls.__mro__[:-1])  # object itself has one since Python 3.11


def _is_simple_tensor(obj: Any) -> bool:
    """Whether a tensor can be rebuilt from its elements alone."""
    torch: Any = sys.modules["torch"]
    if type(obj) not in (torch.Tensor, torch.nn.Parameter) or not TensorContents(obj).is_in_order:
        return False
    return bool(obj.is_leaf and not obj.__dict__ and not obj._backward_hooks)
