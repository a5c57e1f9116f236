"""The book: which parcels the program has sent to the workers with its functions, and which object lies where.

A *parcel* is one pickle. It brings a function, or changes of objects that came before, and refers to those objects by
the number of their parcel and their position in it. It is kept as long as a living function needs it, for workers that
are started later. An object that a function captures is sent once. Whatever refers to it later refers to the object
that the rank has, in the state that it has there.

The book pickles and remembers; it sends nothing. A parcel whose pickling fails, or that may not have arrived
everywhere, is forgotten: the ranks count as not knowing what it brought, and the next update sends that again. In one
file because packing and forgetting must be read together.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

from synk._code.arrays import ArrayContents, copy_bytes
from synk._code.copies import is_made_by_own_code, stale_copies
from synk._code.facets import (
    FUNCTION_PARTS,
    MISSING,
    UNKNOWN,
    Change,
    Elements,
    Facet,
    Names,
    State,
    Table,
    attributes,
    contents,
)
from synk._code.modules import (
    Located,
    first_code_of,
    imports_inside,
    inside,
    is_told_by_import,
    plain_defaults,
    reached_from,
)
from synk._code.packing import Address, ComesApart, ComesFirst, PartsPickler, SharedBytes
from synk._code.parcels import Handle, Node, Parcel, Shelf, end_captures
from synk._code.trees import Tree
from synk._pure.interrupts import raise_if_of_handler
from synk._pure.tensors import is_tensor
from synk._wire.memory import Segment
from synk._wire.parcels import BY_VALUE, Absent

_MOST_ROUNDS = 16
"""After so many rounds of one update nothing more is sent because of copies: some code makes others each time."""


class _Entry(NamedTuple):
    """A function that was sent, with the parcel that brought it."""

    fn: Any
    parcel: Parcel


class _Module(NamedTuple):
    """One of the user's modules, as the workers know it."""

    module: types.ModuleType
    spec: Any
    parcel: Parcel

    def is_current(self, name: str) -> bool:
        """Whether the program has neither reloaded nor replaced it."""
        module = sys.modules.get(name)
        return module is self.module and module.__spec__ is self.spec


class Book(Shelf):
    """The record of everything that was sent with the functions of one runtime.

    It says what a function needs, what to send next and what to forget.

    Parameters
    ----------
    engine : Engine
        If it ``is_inline``, the one rank is in this process and shares the program's modules. Without shared memory,
        large arrays travel in the pickles.
    drop_parcel : callable
        Has the ranks forget a parcel, and globals: (address of the namespace, name).

    Attributes
    ----------
    packed_nbytes : int
        How much has been packed so far.
    sent_anew : set of int
        Functions that were sent as a whole: the workers' plans may still hold an earlier version.
    restless : dict of int to object
        By id, what the last update has sent and whose pickle is another one already: it is sent with each update.
    """

    def __init__(self, engine: Any, drop_parcel: Callable[[Parcel, list[Any]], None]) -> None:
        super().__init__(engine)
        self._drop_parcel = drop_parcel
        self._modules: dict[str, _Module] = {}
        self._modules_before: dict[str, _Module | None] = {}  # what roll_back restores
        self._entries: dict[int, _Entry] = {}
        self.packed_nbytes = 0
        self.sent_anew: set[int] = set()
        self.restless: dict[int, Any] = {}
        self._again: dict[Node, None] = {}  # in this update: what must be looked at once more
        self._packed_before: set[int] = set()  # the numbers of the parcels from before this update
        self._may_have_copies = False  # whether an object was sent that the user's own code makes
        self._changed: dict[int, int] = {}  # in this update: by the id of an object, the last parcel that changed it
        self._reached: dict[frozenset[str], list[str]] = {}  # a cache, cleared by each update

    # -- packing ------------------------------------------------------------------------------------------------------

    def update(self, function_id: int, fn: Any, options: dict[str, Any]) -> None:
        """Pack a function that the workers do not have, and whatever has changed of what it captures."""
        self.prepared.clear()
        self._note_reloads()
        again = self._again = {}
        self.restless.clear()
        self._changed.clear()
        packed_before = self._packed_before = set(self.parcels)
        entry = self._entries.get(function_id)
        if entry is None or entry.fn is not fn:
            self._pack_function(function_id, fn, options)
        seen: set[Node] = set()
        num_rounds = 0
        # What a round packs may need further modules, and may hold objects that changed since another function sent
        # them. So the rounds go on until one finds nothing.
        while True:
            self._met(self._modules_of(function_id))
            nodes = [node for node in self.nodes_of(function_id) if self._is_known(node)]
            fresh = [node for node in nodes if node not in seen or node in again or isinstance(node.facets[0], Names)]
            is_last = seen.issuperset(fresh)
            seen.update(fresh)
            if self._replace(fresh, function_id):
                self._pack_function(function_id, fn, options)
            named = self.named_of(function_id)
            current = set(nodes)
            fresh = [node for node in fresh if node not in again] + [node for node in again if node in current]
            # These come last, as do states: a rank may copy objects into them that change now.
            for node in filter(self._is_known, sorted(fresh, key=_turn)):
                is_open = isinstance(node.facets[0], (Names, _Imported)) or isinstance(node.obj, types.CellType)
                if is_open or node in again or node.parcel.number in packed_before:
                    again.pop(node, None)
                    is_last = not self._pack_changes(node, named) and is_last
            num_rounds += 1
            is_last = not self._unbind_copies(function_id, num_rounds) and is_last
            if is_last:
                return

    def _pack_function(self, function_id: int, fn: Any, options: dict[str, Any]) -> None:
        parcel = self._pack([("function", function_id, options)])
        self._entries[function_id] = _Entry(fn, parcel)
        self.sent_anew.add(function_id)

    def _unbind_copies(self, function_id: int, num_rounds: int) -> bool:
        """Have objects sent anew whose own code may hold copies of what has changed. Return whether there are any."""
        if not (self._may_have_copies and self._changed) or num_rounds == _MOST_ROUNDS:
            return False
        copies = stale_copies(list(filter(self._is_known, self.nodes_of(function_id))), self._changed)
        for node, keys in copies.items():
            for facet in node.facets:
                if isinstance(facet, State):
                    _unbind_state(facet, keys)
        self._again.update(dict.fromkeys(copies))
        self._packed_before.update(each.parcel.number for each in copies)  # they may be replaced, though sent just now
        return bool(copies)

    def _is_known(self, node: Node) -> bool:
        """Whether the ranks hold the object through this node: it was not forgotten, and no later node replaced it."""
        table = self.namespaces if node.facets and isinstance(node.facets[0], Names) else self.known
        return bool(node.facets) and table.get(id(node.obj)) is node

    def _pack_changes(self, node: Node, named: set[tuple[Node, str]]) -> bool:
        """Pack what has changed of one object. Return whether there was anything."""
        has_changed = False
        for facet in node.facets:
            changes = facet.changes()
            if isinstance(facet, Names):
                changes = [change for change in changes if (node, change.key) in named]
            for change in changes:
                if isinstance(facet, Table) and facet.told.get(change.key, self) is change.value:
                    continue  # what came first has brought it
                has_changed = True
                self._pack_change(node, facet, change)
                if isinstance(facet, State) and not facet.is_current():
                    self.restless[id(node.obj)] = node.obj
        return has_changed

    def _pack_change(self, node: Node, facet: Facet, change: Change) -> None:
        """Pack what a unit has become."""
        value = Absent if change.value is MISSING else change.value
        kind = change.kind
        source = (kind, change.key)
        if kind in ("state", "elements") and type(node.obj).__module__ != "builtins":
            self._prepare(type(node.obj))
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
            raise_if_of_handler(error)
            if isinstance(error, MemoryError):
                raise
            if not (self.is_located(node) or node.parcel.is_optional):
                what = f"{change.key!r} ({type(change.value).__name__})"
                raise pickle.PicklingError(f"cannot pickle {what}: {error}") from error
            facet.tell(change)  # what a module holds and cannot be pickled stays as the workers' own import made it
            return
        self.tell(node, facet, change, parcel)
        self._changed[id(node.obj)] = parcel.number

    def _pack(self, actions: list[Any], *, is_optional: bool = False) -> Parcel:
        """Pickle actions for the workers as one parcel, and register the objects in it.

        First come parcels with the code that may run while this one is loaded, and with what that refers to.
        """
        while True:
            try:
                return self._pack_now(actions, is_optional)
            except ComesFirst as first:  # nothing of this parcel is known yet, so nothing is sent twice
                self._prepare(first.what)
            except ComesApart as found:
                self._take_apart(found.tree)

    def _take_apart(self, tree: Tree) -> None:
        """Have the objects of a tree sent one by one, because a part of it is captured by itself."""
        self.apart[id(tree.obj)] = tree.obj
        node = self.known.get(id(tree.obj))
        if node is not None:
            self._forget(node)
            self._again.update(dict.fromkeys(self._unbind_holders(node)))

    def _forget(self, node: Node) -> None:
        """Forget an object, whose holders must be told of another one."""
        self.known.pop(id(node.obj), None)
        self.trees.pop(id(node.obj), None)
        node.facets = []

    def _prepare(self, what: Any) -> None:
        """Bring the ranks a class, a function or a module, and all that it refers to, as it is now."""
        if self.is_prepared(what):
            return
        key = what if isinstance(what, str) else id(what)
        self.prepared[key] = what, False
        if isinstance(what, str):
            self.meet_module(what)
            parcels = {self._modules[name].parcel for name in self._met([what])}
        else:
            node = self.known.get(id(what))
            parcels = {self._pack([("bring", None, what)]) if node is None else node.parcel}
        needed = self._needs(parcels)
        named = set().union(*(parcel.named for parcel in needed))
        nodes = [node for parcel in sorted(needed, key=lambda each: each.number) for node in parcel.nodes]
        for node in sorted(nodes, key=lambda each: isinstance(each.obj, type)):  # what classes hold: instances of them
            if self._is_known(node):
                self._pack_changes(node, named)
        self.prepared[key] = what, True

    def _pack_now(self, actions: list[Any], is_optional: bool) -> Parcel:
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
            node = self.know(obj, parcel, facets)
            self._may_have_copies = self._may_have_copies or is_made_by_own_code(node)
            self._changed[id(obj)] = parcel.number  # an object that was replaced is new as well
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

    def _replace(self, nodes: Sequence[Node], function_id: int) -> bool:
        """Forget objects that no change can bring up to date, so that their holders get new ones, in all functions.

        Return whether the function itself must be sent again, because no facet holds one of these objects.
        """
        is_all = False
        pending = [node for node in nodes if self._must_be_replaced(node)]
        while pending:
            node = pending.pop()
            if not node.facets:
                continue
            users = [key for key, each in self._entries.items() if node.parcel in self._needs([each.parcel])]
            self._forget(node)
            _end(node.captures)
            holders = self._unbind_holders(node)
            self._again.update(dict.fromkeys(holders))
            lost = [each for each in users if holders.isdisjoint(self.nodes_of(each))]
            is_all = function_id in lost or is_all
            for each in lost:
                self._send_anew(each)
            pending += [each for each in self.nodes_of(function_id) if self._must_be_replaced(each)]
        if is_all:
            self._forget_all_of(function_id)
        return is_all

    def _unbind_holders(self, node: Node) -> set[Node]:
        """Have whatever holds an object that was forgotten told of it anew. Return the holders."""
        holders: set[Node] = set()
        # What refers to an object came with it, or with a parcel that refers to its parcel.
        for parcel in [each for each in self.parcels.values() if each is node.parcel or node.parcel in each.refers]:
            for each in {*parcel.nodes, *(told for told, _, _ in parcel.tells)} - holders:
                if sum(_unbind(facet, {id(node.obj)}) for facet in each.facets):
                    holders.add(each)
                    _end(each.captures)
        return holders

    def _send_anew(self, function_id: int) -> None:
        """Have a function sent as a whole by its next update."""
        self._entries[function_id] = self._entries[function_id]._replace(fn=None)

    def _forget_all_of(self, function_id: int) -> None:
        """Forget all objects of a function, and of the functions that share some of them: they are sent anew."""
        pending, met = [function_id], {function_id}
        while pending:
            function_id = pending.pop()
            for node, name in self.named_of(function_id):
                node.facets[0].told[name] = UNKNOWN  # type: ignore[attr-defined]
            nodes = self.nodes_of(function_id)
            again = {id(each.obj) for each in nodes if not isinstance(each.facets[0], (Names, _Imported))}
            for node in nodes:
                if id(node.obj) in again:
                    self.known.pop(id(node.obj), None)
                    _end(node.captures)
                elif isinstance(node.facets[0], _Imported):
                    _unbind(node.facets[0], again)
            self._send_anew(function_id)
            sharing = [each for each in self._entries if each not in met and not again.isdisjoint(self._ids_of(each))]
            pending += sharing
            met.update(sharing)

    def _ids_of(self, function_id: int) -> set[int]:
        return {id(node.obj) for node in self.nodes_of(function_id)}

    def _must_be_replaced(self, node: Node) -> bool:
        if not any(facet.is_unfit(self.known.keys()) for facet in node.facets):
            return False
        if node.parcel.number not in self._packed_before:  # sent just now: it would never end
            self.restless[id(node.obj)] = node.obj
            return False
        return True

    # -- the user's modules -------------------------------------------------------------------------------------------

    def _note_reloads(self) -> None:
        """Find known modules that the program has imported again. What is in them travels by value from now on.

        Whatever holds functions or classes that were sent by name is told of them again.
        """
        found = [name for name, known in self._modules.items() if not known.is_current(name)]
        if not found:
            return
        BY_VALUE.update(found)
        by_name: set[int] = set()
        for name in found:
            known = self._modules_before[name] = self._modules.pop(name)
            by_name.update(id(node.obj) for node in known.parcel.nodes)
            by_name.update(
                id(each) for each in vars(known.module).values() if isinstance(each, (type, types.FunctionType))
            )
            self._forget_nodes(known.parcel)
            for node in known.parcel.nodes:
                node.facets = []
        for node in [node for parcel in self.parcels.values() for node in parcel.nodes]:
            for facet in node.facets:
                _unbind(facet, by_name)
        self._entries = {
            key: each._replace(fn=None) if each.parcel.modules_met.intersection(found) else each
            for key, each in self._entries.items()
        }

    def _met(self, names: Iterable[str]) -> list[str]:
        """Register the user's modules that these can reach, and return them."""
        names = reached_from(names)
        for name in names:
            self.meet_module(name)
        return names

    def meet_module(self, name: str) -> None:
        """Register one of the user's modules."""
        if name not in self._modules:
            module = sys.modules[name]
            parcel = self._pack_located(inside(module))
            parcel.imports |= imports_inside(module)
            parcel.modules_met.add(name)
            self._modules_before.setdefault(name, None)
            self._modules[name] = _Module(module, module.__spec__, parcel)

    def _modules_of(self, function_id: int) -> list[str]:
        self._reached.clear()
        if self.engine.is_inline:
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
        places = tuple((each.module, each.steps, plain_defaults(each.obj)) for each in located)
        actions = pickle.dumps([("locate", (places, names), None, None)], protocol=5)
        parcel = self.plain_parcel(actions + pickle.dumps((), protocol=5))
        for each, (_, _, defaults) in zip(located, places):
            self.know(each.obj, parcel, [_imported_facet(each, defaults)])
        return parcel

    def is_located(self, node: Node) -> bool:
        """Whether workers make the object themselves, by importing a module."""
        return bool(node.facets) and isinstance(node.facets[0], _Imported)

    # -- ending -------------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Everything packed has arrived everywhere: discard what it replaced."""
        self._again = {}
        self.prepared.clear()
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
            while self._modules_before:  # so that the next update meets them again
                name, known = self._modules_before.popitem()
                self._modules.pop(name, None)
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
            if node is None or self.is_located(node):
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
        self.apart = {key: each for key, each in self.apart.items() if key in self.known}

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
        self._drop_parcel(parcel, [] if has_failed else unbound)
        parcel.release()

    def _forget_nodes(self, parcel: Parcel) -> None:
        """Forget that the workers hold the objects of a parcel, except those that a later one brought again."""
        for node in parcel.nodes:
            for known in (self.known, self.namespaces):
                if known.get(id(node.obj)) is node:
                    del known[id(node.obj)]
                    self.trees.pop(id(node.obj), None)

    def clear(self) -> None:
        """Release everything that functions capture."""
        for parcel in self.parcels.values():
            parcel.release()
        for table in (self.known, self.namespaces, self.parcels, self._modules, self._entries, self.trees, self.apart):
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

    def nbytes_of(self, function_id: int) -> int:
        """Return how much was packed for a function and what it captured, in pickles and in shared memory."""
        return sum(parcel.nbytes for parcel in self._own(function_id))

    def handles_of(self, function_id: int) -> tuple[list[Handle], list[Handle]]:
        """Return two lists: the handles that a function captures, and the handles in modules that it can reach.

        The first list may include handles of other functions with which this one shares objects.
        """
        own, needed = self._own(function_id), self._needs([self._entries[function_id].parcel])
        of_modules = [handle for parcel in needed - own for handle in parcel.handles]
        if self.engine.is_inline:
            for name in self._reached_from(own):
                of_modules += [value for value in vars(sys.modules[name]).values() if isinstance(value, Handle)]
        return [handle for parcel in own for handle in parcel.handles], of_modules

    def optimizers_of(self, function_id: int) -> list[Any]:
        """Return the torch optimizers that a function captures, except those that lie in modules."""
        return [each for parcel in self._own(function_id) for each in parcel.optimizers]

    def tensors_of(self, function_id: int) -> list[Any]:
        """Return the tensors that a function captures, in the same way."""
        return [node.obj for parcel in self._own(function_id) for node in parcel.nodes if is_tensor(node.obj)]

    def imports_of(self, function_id: int) -> set[str]:
        """Return the modules that a function's code may import and that the program has not imported yet."""
        parcels = self._needs([self._entries[function_id].parcel])
        return {name for parcel in parcels for name in parcel.imports if name not in sys.modules}

    def specs_of(self, function_id: int) -> list[tuple[types.ModuleType, Any]]:
        """Return the modules that a function can reach, with their specs. A reload gives a module a new spec."""
        names = self._reached_from(self._own(function_id))
        return [(known.module, known.spec) for known in map(self._modules.get, names) if known is not None]


class _Imported(Table):
    """The table of an object that workers make themselves, by importing its module.

    Functions and classes count as told, because the import brings them. Data count as unknown at first.
    """


def _imported_facet(located: Located, defaults: dict[str, Any]) -> Facet:
    obj = located.obj
    if isinstance(obj, dict):
        made = Table(obj, "item", lambda: obj, {})
    elif isinstance(obj, types.CellType):
        made = contents(obj)
    else:
        made = attributes(obj)
    read = made.read

    def own() -> dict[Any, Any]:
        return {k: v for k, v in read().items() if k in (*FUNCTION_PARTS, "__bases__") or not _is_dunder(k, v)}

    facet = _Imported(obj, made.kind, own, {})
    told = {**defaults, "__code__": first_code_of(obj)} if isinstance(obj, types.FunctionType) else {}
    for key, value in own().items():
        is_fixed = isinstance(obj, types.CellType) or type(obj).__module__ == "_ctypes"  # ``_fields_`` is set once
        if key not in FUNCTION_PARTS and (is_fixed or is_told_by_import(key, value, located.module)):
            told[key] = value
        facet.told[key] = told.get(key, UNKNOWN)
    return facet


def _is_dunder(key: Any, value: Any) -> bool:
    if not (isinstance(key, str) and key.startswith("__") and key.endswith("__")):
        return False
    return not isinstance(value, types.FunctionType)


def _unbind(facet: Facet, ids: Container[int]) -> int:
    """Mark each unit of a facet that holds one of these objects as unknown to the ranks. Return how many there are."""
    if isinstance(facet, Table):
        now = facet.read()
        held = {key: now.get(key) if value is UNKNOWN else value for key, value in facet.told.items()}
        keys = [key for key, value in held.items() if _mentions(value, ids)]
        for key in keys:
            facet.told[key] = UNKNOWN
        return len(keys)
    if isinstance(facet, (State, ArrayContents)):
        return isinstance(facet, State) and _unbind_state(facet, ids)
    told = getattr(facet, "told", ())
    if any(_mentions(value, ids) for value in told):
        facet.forget(Change("elements", None, None))
        return 1
    return 0


def _end(captures: Iterable[Any]) -> None:
    """Have captures ask the book what their function lacks."""
    for capture in captures:
        capture.is_valid = False


def _turn(node: Node) -> tuple[bool, bool]:
    return _lacks_parts(node), any(isinstance(facet, State) for facet in node.facets)


def _lacks_parts(node: Node) -> bool:
    """Whether the ranks must be told anew of something that an object holds."""
    for facet in node.facets:
        told = getattr(facet, "told", ())
        if isinstance(facet, Elements):
            told = told[:1]  # all or none
        elif isinstance(told, dict):
            told = tuple(told.values())
        if isinstance(told, tuple) and any(each is UNKNOWN for each in told):
            return True
    return False


def _unbind_state(facet: State, ids: Container[int]) -> int:
    """Mark the part of a recipe that holds an object as unknown. Unknown arguments have the whole object replaced."""
    make, args, state = facet.told
    if _is_in_recipe((make, args), ids):
        facet.told = (make, UNKNOWN, state)
        return 1
    if _is_in_recipe(state, ids):
        facet.told = (make, args, UNKNOWN)
        return 1
    return 0


def _is_in_recipe(recipe: Any, ids: Container[int]) -> bool:
    if type(recipe) in (tuple, list):
        return any(_is_in_recipe(each, ids) for each in recipe)
    if type(recipe) is dict:
        return any(_is_in_recipe(each, ids) for each in recipe.values())
    return id(recipe) in ids


def _mentions(value: Any, ids: Container[int]) -> bool:
    return id(value) in ids or (isinstance(value, tuple) and any(_mentions(each, ids) for each in value))


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
