"""What the master has sent to the workers with its functions: which parcels there are, and which object lies where.

An object that a function captures is sent once. Whatever refers to it later, in a function distributed later or in
a value bound anew, refers to the object that the rank has, in the state that it has there.

Pickles and remembers; sends nothing. In one file because packing and its undoing must be read together.
"""

from __future__ import annotations

import functools
import io
import itertools
import pickle
import sys
import tokenize
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from synk._master.handles import Handle, HandlePickler
from synk._master.parcels import NUMBERS, UNKNOWN, Known, Parcel, contents_of, elements_of, is_same
from synk._master.watch import (
    MISSING,
    Part,
    Place,
    Watch,
    read,
    table_of,
)
from synk._pure.interrupts import deferred, is_from_handler
from synk._wire.messages import Reload
from synk._wire.parcels import Absent, Found, fill_function, make_cell
from synk._wire.pickling import is_by_reference

_ATOMIC = (
    type(None), types.CodeType, types.ModuleType, types.BuiltinFunctionType, np.dtype, np.generic, Handle,
)  # fmt: skip


class _Entry(NamedTuple):
    """A function that was sent, and what it names, as far as workers do not make it themselves."""

    fn: Any
    parcel: Parcel
    parts: list[tuple[Known, Any]]

    @property
    def sources(self) -> list[Parcel]:
        """What brought its parts."""
        return [known.sources[key] for known, key in self.parts if key in known.sources]


class _Pickler(HandlePickler):
    """Pickles by cloudpickle's rules, but an object that the workers hold as its address."""

    def __init__(self, file: io.BytesIO, book: Book, parcel: Parcel) -> None:
        super().__init__(file)
        self._book = book
        self._parcel = parcel
        self.met: list[Any] = []
        self._ids: set[int] = set()
        self._passing: dict[int, Any] = {}  # states of objects: they do not exist as objects on a worker
        self._cells: set[int] = set()

    def persistent_id(self, obj: Any) -> tuple[int, int] | None:
        known = self._book.known.get(id(obj))
        if known is not None:
            assert known.parcel is not None
            self._parcel.refers.add(known.parcel)
            return known.address
        if type(obj) in (list, dict, set, bytearray) and id(obj) not in self._passing:
            self._meet(obj)
        return None

    def _meet(self, obj: Any) -> None:
        if id(obj) not in self._ids:
            self._ids.add(id(obj))
            self.met.append(obj)

    def _pass(self, state: Any) -> None:
        self._passing[id(state)] = state

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _ATOMIC):
            return super().reducer_override(obj)
        if isinstance(obj, types.CellType) and id(obj) in self._cells:
            self._meet(obj)
            return make_cell, ()  # its contents come with the function
        is_function = isinstance(obj, types.FunctionType)
        if is_function and not is_by_reference(obj):
            self.globals_ref[id(obj.__globals__)] = obj.__globals__
            self._meet(obj)
            return self._reduce_function(obj, super().reducer_override(obj))
        reduced = super().reducer_override(obj)
        if is_function or (isinstance(obj, type) and (reduced is NotImplemented or len(reduced) < 3)):
            return reduced  # by its name
        self._meet(obj)
        if reduced is not NotImplemented:
            for state in reduced[2]:
                self._pass(state)
        elif isinstance(table := table_of(obj), dict):
            self._pass(table)
        return reduced

    def _reduce_function(self, function: types.FunctionType, reduced: Any) -> Any:
        """Bring only globals and cells along that the workers do not have, and no copies of cells."""
        make, (code, namespace, *rest), (state, slots), *_, setter = reduced
        known = self._book.namespace(namespace)
        new = {}
        for name, value in slots["__globals__"].items():
            self._parcel.named.add((known, name))
            if known.contents.get(name, MISSING) is not value:
                new[name] = value
                self._book.tell_global(known, name, value, self._parcel)
        cells = function.__closure__ or ()
        self._cells.update(map(id, cells))
        fresh = [cell for cell in cells if id(cell) not in self._ids and id(cell) not in self._book.known]
        for cell in fresh:
            self._meet(cell)
        filled = [(cell, value) for cell in fresh if (value := contents_of(cell)[""]) is not MISSING]
        slots = {**slots, "__globals__": new, "__closure__": None}
        for each in (state, slots, new, filled):
            self._pass(each)
        newargs = (code, namespace, *rest[:-1], function.__closure__)
        return make, newargs, (filled, setter, (state, slots)), None, None, fill_function


class Book:
    """All parcels that the workers of one runtime hold, or will, in the order in which they are loaded.

    Parameters
    ----------
    drop : callable
        ``drop(number, unbound)`` has the workers forget a parcel, and globals: (address of the namespace, name).
    is_inline : bool
        Whether the one rank is in this process, and the modules that it imports are the master's own.
    """

    def __init__(self, drop: Callable[[int, list[tuple[tuple[int, int], Any]]], None], *, is_inline: bool) -> None:
        self.known: dict[int, Known] = {}
        self.parcels: dict[int, Parcel] = {}
        self._imported: dict[int, Known] = {}  # modules of the user's and what is in them
        self._module_sources: dict[str, str | None] = {}
        self._entries: dict[int, _Entry] = {}
        self._numbers = itertools.count(1)
        self._undo: list[Callable[[], Any]] = []
        self._drop = drop
        self._is_inline = is_inline

    # -- packing ------------------------------------------------------------------------------------------------------

    def has(self, function_id: int, fn: Any) -> bool:
        """Whether a function was sent."""
        entry = self._entries.get(function_id)
        return entry is not None and entry.fn is fn

    def update(self, function_id: int, fn: Any, options: dict[str, Any], watch: Watch) -> Update:
        """Pack a function that the workers do not have, and what has changed of what it names."""
        parts = [*watch.parts, *self._deleted(watch)]
        reloads = [self._pack_reload(name, parts) for name in self._reloaded(self._changed(parts))]
        if not self.has(function_id, fn):
            earlier = set(self.parcels.values())
            parcel = self._pack([("function", function_id, options)])
            entry = self._enter(function_id, _Entry(fn, parcel, []))
            # Who defines a function means the objects as they are now.
            self._pack_inside(earlier & self._needs(entry))
        found = [(known, part.key) for part in parts if (known := self._holder(part)) is not None]
        self._enter(function_id, self._entries[function_id]._replace(parts=found))
        sent = []
        for part in self._changed(parts):
            known = self._holder(part)
            assert known is not None
            if not is_same(known.contents.get(part.key, MISSING), part.value):  # what came before may have brought it
                sent.append((part, self._pack_part(known, part)))
        return Update([reload for reload in reloads if reload is not None], sent)

    def _enter(self, function_id: int, entry: _Entry) -> _Entry:
        old = self._entries.get(function_id)
        self._undo.append(lambda: _put(self._entries, function_id, MISSING if old is None else old))
        self._entries[function_id] = entry
        return entry

    def _deleted(self, watch: Watch) -> list[Part]:
        """Return the parts that ranks were told of and that no longer exist."""
        found = []
        for container, place in watch.containers:
            kind = "item" if isinstance(container, dict) else "attribute"
            known = self._holder(Part(container, kind, "", MISSING, place))
            for key, value in known.contents.items() if known is not None else ():
                part = Part(container, kind, key, MISSING, place)
                if value is not MISSING and read(part) is MISSING:
                    found.append(part)
        return found

    def _changed(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that are not what the ranks were told."""
        found = []
        for part in parts:
            known = self._holder(part)
            if known is None or (part.place is not None and self._is_inline):
                continue  # comes with the function; or is the same object there
            if part.place is not None and part.key not in known.contents:
                self._meet_imported(known, part, part.place)
            if not is_same(known.contents.get(part.key, MISSING), part.value):
                found.append(part)
        return found

    def _pack_part(self, known: Known, part: Part) -> int:
        """Add what a part has become, and return the size of the parcel."""
        target = part.container
        if part.place is not None and part.place.steps and not isinstance(target, type):
            target = Found(*part.place)
        value = Absent if part.value is MISSING else part.value
        if part.kind == "tensor":
            value = part.container.detach()
        try:
            parcel = self._pack([("bind", part.kind, target, part.key, value)])
        except Exception as error:
            if is_from_handler(error):
                raise
            if part.place is None:
                what = f"{part.key!r} ({type(part.value).__name__})"
                raise pickle.PicklingError(f"cannot pickle {what}: {error}") from error
            parcel = None  # workers keep what they made themselves, where it cannot travel
        self._tell(known, part.key, part.value, parcel)
        return 0 if parcel is None else len(parcel.data)

    def _pack_inside(self, parcels: Iterable[Parcel]) -> None:
        """Add what was changed inside objects that the ranks hold."""
        for known in [known for parcel in parcels for known in parcel.objects]:
            for part in known.changed_parts():
                self._pack_part(known, part)
            if known.has_other_elements():
                parcel = self._pack([("fill", known.obj, known.obj.copy())])
                self._undo.append(functools.partial(setattr, known, "elements", known.elements))
                known.elements = elements_of(known.obj)
                self._tell(known, "", MISSING, parcel)

    def _pack(self, actions: list[Any]) -> Parcel:
        """Pickle orders for the workers, and note the objects in them."""
        parcel = Parcel(next(self._numbers))
        file = io.BytesIO()
        pickler = _Pickler(file, self, parcel)
        num_undo = len(self._undo)
        try:
            pickler.dump(actions)
            pickler.dump(tuple(pickler.met))
        except BaseException:
            self.roll_back(num_undo)
            raise
        parcel.handles = pickler.handles
        parcel.data = file.getvalue()
        with deferred():
            self._keep(parcel)
            for index, obj in enumerate(pickler.met):
                self._know(Known(obj, parcel, index))
        return parcel

    def _know(self, known: Known) -> None:
        assert known.parcel is not None
        self.known[id(known.obj)] = known
        known.parcel.objects.append(known)

    def _keep(self, parcel: Parcel) -> None:
        self._undo.append(lambda: self._discard(parcel, is_unbinding=False))
        self.parcels[parcel.number] = parcel

    def namespace(self, table: dict[str, Any]) -> Known:
        """Return the entry of the globals of functions: on the workers a dict that fills as functions name them."""
        known = self.known.get(id(table))
        if known is None:
            parcel = Parcel(next(self._numbers))
            base = {k: table[k] for k in ("__package__", "__name__", "__path__", "__file__") if k in table}
            parcel.data = pickle.dumps([], protocol=5) + pickle.dumps((base,), protocol=5)
            known = Known(table, parcel, 0, is_empty=True)
            with deferred():
                self._keep(parcel)
                self._know(known)
        return known

    def tell_global(self, namespace: Known, name: str, value: Any, parcel: Parcel) -> None:
        """Remember that ``parcel`` brings a global."""
        self._tell(namespace, name, value, parcel)

    def _tell(self, known: Known, key: Any, value: Any, parcel: Parcel | None) -> None:
        contents, sources = known.contents, known.sources
        source = sources.get(key)

        def undo() -> None:
            contents[key] = UNKNOWN  # some ranks may have been told, and some not
            _put(sources, key, MISSING if source is None else source)

        self._undo.append(undo)
        contents[key] = value
        _put(sources, key, MISSING if parcel is None else parcel)
        if parcel is not None:
            parcel.tells.append((known, key))
            if known.parcel is not None and not known.is_namespace:
                known.parcel.bound.add(known)

    # -- modules of the user's ----------------------------------------------------------------------------------------

    def _holder(self, part: Part) -> Known | None:
        """Return the entry of what holds a part; None if the workers do not hold it yet."""
        if part.place is None:
            return self.known.get(id(part.container))
        known = self._imported.get(id(part.container))
        if known is None:
            known = self._imported[id(part.container)] = Known(part.container, None, 0, is_empty=True)
        return known

    def _meet_imported(self, known: Known, part: Part, place: Place) -> None:
        """Take it that a worker that imports the module finds there what the master has, but for plain values.

        A configuration is often set after the import and before the first call, so plain values are sent.
        """
        if place.module not in self._module_sources:
            self._module_sources[place.module] = _source_of(place.module)
        is_data = not (isinstance(part.key, str) and part.key.startswith("__")) and part.kind != "tensor"
        known.contents[part.key] = MISSING if is_data and _is_plain(part.value) else part.value

    def _reloaded(self, changed: Sequence[Part]) -> list[str]:
        """Return the modules of which code has changed, in the order in which they were imported."""
        names = {part.place.module for part in changed if part.place is not None and _is_code(part, part.place)}
        return [name for name in list(sys.modules) if name in names]

    def _pack_reload(self, name: str, parts: Sequence[Part]) -> Reload | None:
        """Return the order to renew a module; what was sent for its data is to be sent again."""
        before, source = self._module_sources.get(name), _source_of(name)
        self._undo.append(lambda: self._module_sources.__setitem__(name, before))
        self._module_sources[name] = source
        for part in parts:
            known = self._holder(part) if part.place is not None and part.place.module == name else None
            if known is None or part.place is None:
                continue
            if _is_code(part, part.place):
                self._tell(known, part.key, part.value, None)
            elif part.key in known.sources:
                self._tell(known, part.key, MISSING, known.sources[part.key])
        if source is None or source == before:  # what workers imported, or another function had them renew
            return None
        return Reload(name, getattr(sys.modules[name], "__file__", None) or name, before, source)

    # -- ending -------------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """What was packed has arrived: let go of what it has replaced."""
        with deferred():
            self._undo.clear()
            self._collect()

    def roll_back(self, length: int = 0) -> None:
        """What was packed has not arrived everywhere, as if it never had: it is sent again."""
        if len(self._undo) > length:
            with deferred():
                while len(self._undo) > length:
                    self._undo.pop()()

    def forget_function(self, function_id: int) -> None:
        """Let go of what only this function needs."""
        if self._entries.pop(function_id, None) is not None:
            self._collect()

    def _collect(self) -> None:
        """Let go of parcels that no function needs."""
        needed: set[Parcel] = set()
        for entry in self._entries.values():
            _reach([entry.parcel, *entry.sources], needed)
        for known in self._imported.values():
            _reach(known.sources.values(), needed)
        for parcel in [parcel for parcel in self.parcels.values() if parcel not in needed]:
            self._discard(parcel)

    def _discard(self, parcel: Parcel, *, is_unbinding: bool = True) -> None:
        unbound = []
        for known, key in parcel.tells:
            if known.sources.get(key) is parcel:
                del known.sources[key]
                known.contents.pop(key, None)
                if known.is_namespace:
                    unbound.append((known.address, key))
        for known in parcel.objects:
            if self.known.get(id(known.obj)) is known:
                del self.known[id(known.obj)]
        self.parcels.pop(parcel.number, None)
        self._drop(parcel.number, unbound if is_unbinding else [])

    def clear(self) -> None:
        """Let go of all that functions capture."""
        for table in (self.known, self.parcels, self._imported, self._entries):
            table.clear()
        self._undo.clear()

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def function_ids(self) -> set[int]:
        """The functions that were sent."""
        return set(self._entries)

    def _needs(self, entry: _Entry) -> set[Parcel]:
        return _reach([entry.parcel, *entry.sources], set())

    def nbytes_of(self, function_id: int) -> int:
        """Return the size of all that was sent for a function."""
        return sum(len(parcel.data) for parcel in self._needs(self._entries[function_id]))

    def is_changed_inside(self, function_id: int) -> bool:
        """Whether an object that a function needs holds something else than what the ranks were told."""
        entry = self._entries.get(function_id)
        known = [known for parcel in (self._needs(entry) if entry else ()) for known in parcel.objects]
        return any(each.has_other_elements() or each.changed_parts() for each in known)


class Update(NamedTuple):
    """What a function's update has packed: modules to renew, and parts with the sizes of their parcels."""

    reloads: list[Reload]
    sent: list[tuple[Part, int]]


def _reach(parcels: Iterable[Parcel], found: set[Parcel]) -> set[Parcel]:
    """Add ``parcels``, and all that they need, to ``found``."""
    pending = list(parcels)
    while pending:
        parcel = pending.pop()
        if parcel in found:
            continue
        found.add(parcel)
        pending += parcel.refers
        pending += [known.sources[name] for known, name in parcel.named if name in known.sources]
        pending += [source for known in parcel.bound for source in known.sources.values()]
    return found


def _put(table: dict[Any, Any], key: Any, value: Any) -> None:
    if value is MISSING:
        table.pop(key, None)
    else:
        table[key] = value


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in NUMBERS or value is None or isinstance(value, np.generic)


def _is_code(part: Part, place: Place) -> bool:
    """Whether a part of a module can be had by running the module's source again."""
    if isinstance(part.container, types.FunctionType) or part.key == "__spec__":
        return True
    if isinstance(part.value, (types.FunctionType, type)):
        return part.value.__module__ == place.module
    return isinstance(part.value, (staticmethod, classmethod, property))


def _source_of(name: str) -> str | None:
    """Return the source of a module as it is now, None where there is none."""
    try:
        with tokenize.open(str(sys.modules[name].__file__)) as file:
            return file.read()
    except (OSError, SyntaxError, ValueError) as error:
        if is_from_handler(error):
            raise
        return None
