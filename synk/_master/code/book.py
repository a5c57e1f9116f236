"""The book: which parcels the master has sent to the workers with its functions, and which object lies where.

A *parcel* is one pickle. It brings a function, or changes of objects that came before, and refers to those objects by
the number of their parcel and their position in it. It is kept as long as a living function needs it, for workers that
are started later. An object that a function captures is sent once. Whatever refers to it later refers to the object
that the rank has, in the state that it has there.

The book pickles and remembers; it sends nothing. A parcel whose pickling fails, or that may not have arrived
everywhere, is forgotten: the ranks count as not knowing what it brought, and the next update sends that again. In one
file because packing and forgetting must be read together.
"""

from __future__ import annotations

import enum
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from synk._master.code.arrays import ArrayContents, copy_bytes
from synk._master.code.facets import (
    FUNCTION_PARTS,
    MISSING,
    UNKNOWN,
    Change,
    Facet,
    Names,
    State,
    Table,
    attributes,
    contents,
)
from synk._master.code.handles import Handle
from synk._master.code.modules import Located, imports_inside, inside, is_told_by_import, reached_from, source_of
from synk._master.code.packing import Address, PartsPickler, SharedBytes
from synk._master.code.parcels import Host, Node, Parcel, Shelf, end_captures
from synk._wire.memory import Segment
from synk._wire.messages import Reload
from synk._wire.parcels import Absent


class _Entry(NamedTuple):
    """A function that was sent, with the parcel that brought it."""

    fn: Any
    parcel: Parcel


class _Module(NamedTuple):
    """One of the user's modules, as the workers know it."""

    module: types.ModuleType
    spec: Any
    source: str | None
    parcel: Parcel


class Update(NamedTuple):
    """The result of an update.

    Attributes
    ----------
    reloads : list of Reload
        Modules that the workers must bring up to date.
    sent : list of (object, int)
        What had changed, with the number of bytes packed for it.
    """

    reloads: list[Reload]
    sent: list[tuple[Any, int]]


class Book(Shelf):
    """The record of everything that was sent with the functions of one runtime.

    It says what a function needs, what to send next and what to forget.

    Parameters
    ----------
    host : Host
        The runtime. If it ``is_inline``, the one rank is in this process and shares the master's modules. Without
        shared memory, large arrays travel in the pickles.

    Attributes
    ----------
    packed_nbytes : int
        How much has been packed so far.
    sent_anew : set of int
        Functions that were sent again as a whole: the workers' plans still hold the earlier version.
    """

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._modules: dict[str, _Module] = {}
        self._modules_before: dict[str, _Module | None] = {}  # what roll_back restores
        self._entries: dict[int, _Entry] = {}
        self.packed_nbytes = 0
        self.sent_anew: set[int] = set()
        self._reached: dict[frozenset[str], list[str]] = {}  # a cache, cleared by each update

    # -- packing ------------------------------------------------------------------------------------------------------

    def has(self, function_id: int, fn: Any) -> bool:
        """Whether this function was sent under this id."""
        entry = self._entries.get(function_id)
        return entry is not None and entry.fn is fn

    def update(
        self, function_id: int, fn: Any, options: dict[str, Any], *, is_thorough: bool, capture: Any = None
    ) -> Update:
        """Pack a function that the workers do not have, and whatever has changed of what it captures.

        Parameters
        ----------
        is_thorough : bool
            Also compare in full what calls compare only in turns or now and then.
        capture : Capture or None
            The function's last capture. Objects that are not in it are compared in full anyway.
        """
        reloads: list[Reload] = []
        sent: list[tuple[Any, int]] = []
        packed_before = set(self.parcels)
        if not self.has(function_id, fn):
            parcel = self._pack([("function", function_id, options)])
            self._entries[function_id] = _Entry(fn, parcel)
            is_thorough = True  # a new function must see its objects as they are now

        def is_full(node: Node) -> bool:
            return is_thorough or capture not in node.captures

        seen: set[Node] = set()
        # What a round packs may need further modules, and may hold objects that changed since another function sent
        # them. So the rounds go on until one finds nothing.
        while True:
            reloads += self._meet_modules(function_id)
            nodes = [node for node in self.nodes_of(function_id) if self._is_known(node)]
            fresh = [node for node in nodes if node not in seen or isinstance(node.facets[0], Names)]
            is_last = seen.issuperset(fresh)
            seen.update(fresh)
            is_all, holders = self._replace(fresh, function_id, is_full)
            if is_all:
                parcel = self._pack([("function", function_id, options)])
                self._entries[function_id] = _Entry(fn, parcel)
                self.sent_anew.add(function_id)
            named = self.named_of(function_id)
            # What holds replaced objects comes last: a rank may make them from copies of objects that change now.
            for node in filter(self._is_known, sorted(fresh, key=holders.__contains__) if holders else fresh):
                is_open = isinstance(node.facets[0], (Names, _Imported)) or isinstance(node.obj, types.CellType)
                if is_open or node.parcel.number in packed_before:
                    changes = self._pack_changes(node, named, is_full(node))
                    is_last = is_last and not changes
                    sent += changes
            if is_last:
                return Update(reloads, sent)

    def _is_known(self, node: Node) -> bool:
        """Whether the ranks hold the object through this node: it was not forgotten, and no later node replaced it."""
        table = self.namespaces if node.facets and isinstance(node.facets[0], Names) else self.known
        return bool(node.facets) and table.get(id(node.obj)) is node

    def _pack_changes(self, node: Node, named: set[tuple[Node, str]], is_full: bool) -> list[tuple[Any, int]]:
        """Pack what has changed of one object. Return the changes, with their sizes."""
        sent = []
        for facet in node.facets:
            if isinstance(facet, ArrayContents) and is_full and facet.glance() and not facet.is_current():
                changes = [facet.change()]
            elif isinstance(facet, State) and not facet.is_asked_for(is_full):
                changes = []
            else:
                changes = facet.changes()
            if isinstance(facet, Names):
                changes = [change for change in changes if (node, change.key) in named]
            elif changes and not facet.shows() and not self._are_named(node, changes, named):
                facet.num_unseen += 1
            for change in changes:
                is_renewed = not isinstance(facet, Table) or (change.kind, change.key) in node.sources
                nbytes = self._pack_change(node, facet, change)
                if not is_renewed:  # sent for the first time: counts as part of the function
                    nbytes = 0
                sent.append((change.value if change.kind in ("item", "attribute", "cell") else node.obj, nbytes))
        return sent

    def _are_named(self, node: Node, changes: Sequence[Change], named: set[tuple[Node, str]]) -> bool:
        """Whether all changes are of globals of a module that functions name, which each call compares."""
        space = self.namespaces.get(id(vars(node.obj))) if isinstance(node.obj, types.ModuleType) else None
        return space is not None and all((space, change.key) in named for change in changes)

    def _pack_change(self, node: Node, facet: Facet, change: Change) -> int:
        """Pack what a unit has become. Return how many bytes that takes."""
        value = Absent if change.value is MISSING else change.value
        kind = change.kind
        source = (kind, change.key)
        is_first = isinstance(facet, _Imported) and facet.told.get(change.key) is UNKNOWN and source not in node.sources
        if is_first and kind in ("item", "attribute") and value is not Absent:
            kind = "adopt " + kind
        if kind == "reload" and isinstance(facet, ArrayContents):
            # No call is in flight that reads this shared memory. The ranks map it privately: a page that a rank has not
            # written shows the new bytes at once, and loading the parcel drops the pages that it has written.
            copy_bytes(facet.elements(), facet.told)
            value = SharedBytes(facet)
        try:
            parcel = self._pack([(kind, Address(node), change.key, value)], is_optional=is_first)
        except Exception as error:
            facet.forget(change)
            if isinstance(error, MemoryError):
                raise
            if not (self._is_of_module(node) or node.parcel.is_optional):
                what = f"{change.key!r} ({type(change.value).__name__})"
                raise pickle.PicklingError(f"cannot pickle {what}: {error}") from error
            facet.tell(change)  # what a module holds and cannot be pickled stays as the workers' own import made it
            node.parcel.uncompared.append(node.obj)
            return 0
        self.tell(node, facet, change, parcel)
        if kind == "elements":
            for each in [each for each in node.sources if each[0] == "element"]:
                del node.sources[each]
        return len(change.value) if change.kind == "reload" else parcel.nbytes

    def _pack(self, actions: list[Any], *, is_optional: bool = False) -> Parcel:
        """Pickle actions for the workers as one parcel, and register the objects in it."""
        parcel = self.new_parcel()
        parcel.is_optional = is_optional
        file = io.BytesIO()
        pickler = PartsPickler(file, self, parcel)
        pickler.leave_out(actions)
        for kind, _, key, *_ in actions:
            if kind == "function":
                pickler.leave_out(key)
        # Unsettled from here on: if anything below or the load is broken off, ``roll_back`` forgets the parcel, and the
        # ranks count as not having been told of what is in it.
        self.unsettled.append(parcel)
        try:
            pickler.dump(actions)
            pickler.dump(tuple(obj for obj, _ in pickler.met))
            if pickler.arrays:
                parcel.segment = Segment.create(pickler.arrays_nbytes, segment_id=pickler.segment_id)
                self._fill(parcel.segment, pickler.arrays)
        except BaseException:
            self.unsettled.remove(parcel)
            self._discard(parcel, has_failed=True)
            raise
        parcel.data = file.getvalue()
        self.packed_nbytes += parcel.nbytes
        self.parcels[parcel.number] = parcel
        for obj, facets in pickler.met:
            self.know(obj, parcel, facets)
        return parcel

    @staticmethod
    def _fill(segment: Segment, arrays: Sequence[ArrayContents]) -> None:
        """Copy large arrays to their places in the parcel's shared memory."""
        for facet in arrays:
            assert facet.place is not None
            offset = facet.place.offset
            target = segment.buffer[offset : offset + facet.nbytes]
            copy_bytes(facet.elements(), target)
            facet.memory = segment.mapping, segment.offset + offset
            facet.note_sent(target)

    # -- objects that can only be replaced ----------------------------------------------------------------------------

    def _replace(
        self, nodes: Sequence[Node], function_id: int, is_full: Callable[[Node], bool]
    ) -> tuple[bool, set[Node]]:
        """Forget objects that no change can bring up to date, so that their holders get new ones.

        ``is_full``: whether an object is compared in full.

        Return whether the function itself must be sent again, because no facet holds one of these objects, and the
        holders of the others.
        """
        is_all = False
        found: set[Node] = set()
        pending = [node for node in nodes if _must_be_replaced(node, is_full(node))]
        while pending:
            node = pending.pop()
            if not node.facets:
                continue
            self.known.pop(id(node.obj), None)
            node.facets = []
            nodes_now = self.nodes_of(function_id)
            holders = {each for each in nodes_now if sum(_unbind(facet, node.obj) for facet in each.facets)}
            is_all = is_all or not holders
            found |= holders
            pending += [each for each in self.nodes_of(function_id) if _must_be_replaced(each, is_full(each))]
        if is_all:
            for node, name in self.named_of(function_id):
                node.facets[0].told[name] = UNKNOWN  # type: ignore[attr-defined]
            for node in self.nodes_of(function_id):
                if not isinstance(node.facets[0], (Names, _Imported)):
                    self.known.pop(id(node.obj), None)
        return is_all, found

    # -- the user's modules -------------------------------------------------------------------------------------------

    def _meet_modules(self, function_id: int) -> list[Reload]:
        """Register the modules that a function can reach. Return orders for those that the program has reloaded."""
        reloads = []
        for name in self._modules_of(function_id):
            known = self._modules.get(name)
            module = sys.modules[name]
            if known is not None and known.module is module and known.spec is module.__spec__:
                continue
            source = source_of(module)
            is_patched = known is not None and any(("attribute", "__code__") in n.sources for n in known.parcel.nodes)
            if known is not None:
                if known.module is module and source is not None and source != known.source:
                    reloads.append(Reload(name, getattr(module, "__file__", None) or name, known.source, source))
                self._forget_nodes(known.parcel)
            parcel = self._pack_located(inside(module))
            parcel.imports |= imports_inside(module)
            if is_patched:  # workers have functions with other code, which a reload leaves if the source is as before
                _forget_code(parcel)
            self._modules_before.setdefault(name, known)
            self._modules[name] = _Module(module, module.__spec__, source, parcel)
        return reloads

    def _modules_of(self, function_id: int) -> list[str]:
        self._reached.clear()
        if self.host.is_inline:
            return []
        return self._reached_from(self._needs([self._entries[function_id].parcel]))

    def _reached_from(self, parcels: Iterable[Parcel]) -> list[str]:
        names = frozenset().union(*(parcel.modules_met | parcel.imports for parcel in parcels))
        if names not in self._reached:
            self._reached[names] = reached_from(sorted(names))
        return self._reached[names]

    def _pack_located(self, located: Sequence[Located]) -> Parcel:
        """Pack the places of a module's objects. Workers find their own objects there, after their own import."""
        names = tuple(located[0].obj)
        places = tuple((each.module, each.steps) for each in located), names
        actions = pickle.dumps([("locate", places, None, None)], protocol=5)
        parcel = self.plain_parcel(actions + pickle.dumps((), protocol=5))
        for each in located:
            self.know(each.obj, parcel, [_imported_facet(each)])
        return parcel

    def _is_of_module(self, node: Node) -> bool:
        """Whether workers make the object themselves, by importing a module."""
        return bool(node.facets) and isinstance(node.facets[0], _Imported)

    # -- ending -------------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Everything packed has arrived everywhere: discard what it replaced."""
        self.unsettled.clear()
        self._modules_before.clear()
        self.collect()

    def roll_back(self) -> None:
        """Forget what was packed since the last :meth:`commit`, because it may not have arrived everywhere."""
        if self.unsettled:
            unsettled = set(self.unsettled)
            while self.unsettled:
                self._discard(self.unsettled.pop(), has_failed=True)
            self._entries = {key: each for key, each in self._entries.items() if each.parcel not in unsettled}
            while self._modules_before:  # so that the next update orders their reload again
                name, known = self._modules_before.popitem()
                del self._modules[name]
                if known is not None:
                    self._modules[name] = known

    def forget_function(self, function_id: int) -> None:
        """Forget a function. The next :meth:`collect` discards what no other function needs."""
        self._entries.pop(function_id, None)

    def note_brought(self, classes: Iterable[type]) -> None:
        """Note that something other than a parcel brings the workers the contents of classes.

        It brings copies of the functions and objects that the parcels brought, and perhaps what is old by now. So the
        next call of a function that captured a class binds its names again.
        """
        for cls in classes:
            node = self.known.get(id(cls))
            if node is None or self._is_of_module(node):
                continue
            for facet in node.facets:
                if isinstance(facet, Table):
                    for key, value in facet.told.items():
                        if not _is_dunder(key, value) and not isinstance(value, types.MemberDescriptorType):
                            facet.told[key] = UNKNOWN  # slots are made with the class, and nothing brings them again
            for capture in node.captures:
                capture.is_overtaken = True

    def collect(self) -> None:
        """Discard the parcels that no function needs. Imported modules stay, because ranks keep state in them."""
        needed = self._needs(entry.parcel for entry in self._entries.values())
        _reach([known.parcel for name, known in self._modules.items() if sys.modules.get(name) is known.module], needed)
        for parcel in [parcel for parcel in self.parcels.values() if parcel not in needed]:
            self._discard(parcel)
        for name in [name for name, known in self._modules.items() if known.parcel not in needed]:
            del self._modules[name]

    def _discard(self, parcel: Parcel, *, has_failed: bool = False) -> None:
        """Drop a parcel here and on the workers.

        ``has_failed``: its changes may not have arrived, so the facets forget them. Else it is only no longer needed,
        and the workers also unbind the globals that it brought.
        """
        unbound = []
        for node, facet, change in parcel.tells:
            source = (change.kind, change.key)
            if has_failed:
                facet.forget(change)
                end_captures(node, facet, change)
            if node.sources.get(source) is parcel:
                del node.sources[source]
                if isinstance(facet, Names):
                    facet.told.pop(change.key, None)
                    unbound.append((node.address, change.key))
        self._forget_nodes(parcel)
        self.parcels.pop(parcel.number, None)
        self.host.drop_parcel(parcel, [] if has_failed else unbound)
        parcel.release()

    def _forget_nodes(self, parcel: Parcel) -> None:
        """Forget that the workers hold the objects of a parcel, except those that a later one brought again."""
        for node in parcel.nodes:
            for known in (self.known, self.namespaces):
                if known.get(id(node.obj)) is node:
                    del known[id(node.obj)]

    def clear(self) -> None:
        """Release everything that functions capture."""
        for parcel in self.parcels.values():
            parcel.release()
        for table in (self.known, self.namespaces, self.parcels, self._modules, self._entries):
            table.clear()
        self.unsettled.clear()

    # -- looking ------------------------------------------------------------------------------------------------------

    def _own(self, function_id: int) -> set[Parcel]:
        """Return the parcels that a function needs, without the parcels of modules that it can reach."""
        return _reach([self._entries[function_id].parcel], set())

    def _needs(self, parcels: Iterable[Parcel]) -> set[Parcel]:
        """Return ``parcels`` and all that they need, including the parcels of modules that they can reach."""
        found = _reach(parcels, set())
        while self._modules:
            of_modules = [self._modules[name].parcel for name in self._reached_from(found) if name in self._modules]
            if found.issuperset(of_modules):
                break
            _reach(of_modules, found)
        return found

    def nodes_of(self, function_id: int) -> list[Node]:
        """Return the nodes of what a function captures: first its own objects, then shared ones, then modules'."""
        entry = self._entries[function_id]
        of_modules = {known.parcel for known in self._modules.values()}

        def order(parcel: Parcel) -> tuple[bool, bool, int]:
            return parcel is not entry.parcel, parcel.is_optional or parcel in of_modules, parcel.number

        parcels = sorted(self._needs([entry.parcel]), key=order)
        return [node for parcel in parcels for node in parcel.nodes if node.facets]

    def named_of(self, function_id: int) -> set[tuple[Node, str]]:
        """Return the globals that a function names, and the globals that the functions it captures name."""
        parcels = self._needs([self._entries[function_id].parcel])
        return set().union(*(parcel.named for parcel in parcels))

    def handles_of(self, function_id: int) -> tuple[list[Handle], list[Handle]]:
        """Return two lists: the handles that a function captures, and the handles in modules that it can reach.

        The first list may include handles of other functions with which this one shares objects.
        """
        own, needed = self._own(function_id), self._needs([self._entries[function_id].parcel])
        of_modules = [handle for parcel in needed - own for handle in parcel.handles]
        if self.host.is_inline:
            for name in self._reached_from(own):
                of_modules += [value for value in vars(sys.modules[name]).values() if isinstance(value, Handle)]
        return [handle for parcel in own for handle in parcel.handles], of_modules

    def optimizers_of(self, function_id: int) -> list[Any]:
        """Return the torch optimizers that a function captures, except those that lie in modules."""
        return [each for parcel in self._own(function_id) for each in parcel.optimizers]

    def imports_of(self, function_id: int) -> set[str]:
        """Return the modules that a function's code may import and that the program has not imported yet."""
        parcels = self._needs([self._entries[function_id].parcel])
        return {name for parcel in parcels for name in parcel.imports if name not in sys.modules}

    def uncompared_of(self, function_id: int) -> list[Any]:
        """Return the captured objects that cannot be compared."""
        return [each for parcel in self._own(function_id) for each in parcel.uncompared]

    def specs_of(self, function_id: int) -> list[tuple[types.ModuleType, Any]]:
        """Return the modules that a function can reach, with their specs. A reload gives a module a new spec."""
        names = self._reached_from(self._own(function_id))
        return [(known.module, known.spec) for known in map(self._modules.get, names) if known is not None]


def _forget_code(parcel: Parcel) -> None:
    """Have the code of a module's functions sent again."""
    for node in parcel.nodes:
        if isinstance(node.obj, types.FunctionType):
            node.facets[0].told["__code__"] = UNKNOWN  # type: ignore[attr-defined]


class _Imported(Table):
    """The table of an object that workers make themselves, by importing its module.

    Functions and classes count as told, because the import brings them. Data count as unknown at first.
    """

    is_ordered = False


def _imported_facet(located: Located) -> Facet:
    obj = located.obj
    if isinstance(obj, dict):
        made = Table(obj, "item", lambda: obj, {})
    elif isinstance(obj, types.CellType):
        made = contents(obj)
    else:
        made = attributes(obj)
    read = made.read

    def own() -> dict[Any, Any]:
        now = {k: v for k, v in read().items() if k in FUNCTION_PARTS or not _is_dunder(k, v)}
        return {k: v for k, v in now.items() if not _is_of_enum(obj, k, v)} if isinstance(obj, enum.EnumMeta) else now

    facet = _Imported(obj, made.kind, own, {})
    for key, value in own().items():
        if key in FUNCTION_PARTS:
            is_told = key == "__code__" or value is None
        else:
            is_fixed = isinstance(obj, types.CellType) or type(obj).__module__ == "_ctypes"  # ``_fields_`` is set once
            is_told = is_fixed or is_told_by_import(key, value, located.module)
        facet.told[key] = value if is_told else UNKNOWN
    return facet


def _is_dunder(key: Any, value: Any) -> bool:
    if not (isinstance(key, str) and key.startswith("__") and key.endswith("__")):
        return False
    return not isinstance(value, types.FunctionType)


def _is_of_enum(cls: type, key: str, value: Any) -> bool:
    """Whether an attribute of an enum is one of its members or made with them, which nothing can change."""
    return (key[0] == key[-1] == "_") or isinstance(value, (cls, types.DynamicClassAttribute))


def _must_be_replaced(node: Node, is_full: bool) -> bool:
    return any(
        change.kind == "replace"
        for facet in node.facets
        if isinstance(facet, ArrayContents) or (isinstance(facet, State) and facet.is_asked_for(is_full))
        for change in facet.changes()
    )


def _unbind(facet: Facet, obj: Any) -> int:
    """Mark each unit of a facet that holds ``obj`` as unknown to the ranks. Return how many there are."""
    if isinstance(facet, Table):
        now = facet.read()
        held = {key: now.get(key) if value is UNKNOWN else value for key, value in facet.told.items()}
        keys = [key for key, value in held.items() if _mentions(value, obj)]
        for key in keys:
            facet.told[key] = UNKNOWN
        return len(keys)
    if isinstance(facet, (State, ArrayContents)):
        return isinstance(facet, State) and _unbind_state(facet, obj)
    told = getattr(facet, "told", ())
    if any(_mentions(value, obj) for value in told):
        facet.forget(Change("elements", None, None))
        return 1
    return 0


def _unbind_state(facet: State, obj: Any) -> int:
    """Mark the part of a recipe that holds ``obj`` as unknown. Unknown arguments have the whole object replaced."""
    make, args, state = facet.told
    if _is_in_recipe(args, obj):
        facet.told = (make, UNKNOWN, state)
        return 1
    if _is_in_recipe(state, obj):
        facet.told = (make, args, UNKNOWN)
        return 1
    return 0


def _is_in_recipe(recipe: Any, obj: Any) -> bool:
    if type(recipe) in (tuple, list):
        return any(_is_in_recipe(each, obj) for each in recipe)
    if type(recipe) is dict:
        return any(_is_in_recipe(each, obj) for each in recipe.values())
    return recipe is obj


def _mentions(value: Any, obj: Any) -> bool:
    return value is obj or (isinstance(value, tuple) and any(_mentions(each, obj) for each in value))


def _reach(parcels: Iterable[Parcel], found: set[Parcel]) -> set[Parcel]:
    """Add ``parcels`` and everything that they need to ``found``, and return it."""
    pending = list(parcels)
    while pending:
        parcel = pending.pop()
        if parcel in found:
            continue
        found.add(parcel)
        pending += parcel.refers
        pending += [node.sources["item", name] for node, name in parcel.named if ("item", name) in node.sources]
        for node in parcel.nodes:
            if node.sources and node.facets and not isinstance(node.facets[0], Names):
                pending += node.sources.values()
    return found
