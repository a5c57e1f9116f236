"""Parcels, the nodes for the objects in them, and the shelf on which both lie.

Handles stand for what lives on the workers, and for functions; the pickler replaces them by references.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from synk._code.facets import Change, Facet, Names, contents
from synk._code.trees import Tree
from synk._pure.tensors import is_tensor, is_torch_module, is_torch_optimizer
from synk._wire.cell import Elsewhere
from synk._wire.memory import Segment
from synk._wire.parcels import TravelPickler, make_cell


class Handle:
    """The base of :class:`synk.Shared`, :class:`synk.Resident` and replicated modules: what the pickler looks for.

    Attributes
    ----------
    _reference : (callable, tuple)
        How the handle is pickled: a worker calls the function and gets its own value.
    _referent : object
        The variable or resident object behind the handle. Set only for handles that can be arguments of calls.
    """

    __slots__ = ("_reference", "_referent")
    _reference: tuple[Callable[..., Any], tuple[Any, ...]]
    _referent: Any


class FunctionHandle:
    """The base of :class:`synk.Function`, which stays in the program: on workers ``Elsewhere`` stands for it.

    A module may hold one under the function's name. Workers that import the module make their own; see
    ``code.modules.is_told_by_import``.
    """

    _is_made_by_import = True
    _callee: Any
    __name__: str

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        TravelPickler.dispatch_table[cls] = _elsewhere


def _elsewhere(function: FunctionHandle) -> Any:
    return Elsewhere, (function.__name__,)


class HandlePickler(TravelPickler):
    """Pickles by cloudpickle's rules, except that a handle becomes a reference to what the rank has.

    Attributes
    ----------
    handles : list of Handle
        The handles it has met.
    modules, optimizers, tensors : list
        The torch modules, optimizers and tensors it has met.
    """

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, protocol=5, **options)
        self.handles: list[Handle] = []
        self.modules: list[Any] = []
        self.optimizers: list[Any] = []
        self.tensors: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Handle):
            self.handles.append(obj)
            return obj._reference
        if is_torch_module(obj):
            self.modules.append(obj)
        elif is_torch_optimizer(obj):
            self.optimizers.append(obj)
        elif is_tensor(obj):
            self.tensors.append(obj)
        return super().reducer_override(obj)


class Node:
    """An object that the workers hold.

    Attributes
    ----------
    obj : object
    parcel : Parcel
        The parcel that brought it.
    index : int
        Its position among the objects of that parcel.
    facets : list of Facet
        Empty once the node is no longer in the book.
    sources : dict of (kind, key) to Parcel
        The parcels that brought the units which did not come with the object itself.
    captures : WeakSet of Capture
        The captures that compare the object before each call.
    """

    __slots__ = ("captures", "facets", "index", "obj", "parcel", "sources")

    def __init__(self, obj: Any, parcel: Parcel, index: int, facets: list[Facet]) -> None:
        self.obj, self.parcel, self.index, self.facets = obj, parcel, index, facets
        self.sources: dict[tuple[str, Any], Parcel] = {}
        self.captures: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def address(self) -> tuple[int, int]:
        return self.parcel.number, self.index


class Parcel:
    """One pickle for the workers.

    Attributes
    ----------
    number : int
    data : bytes
    segment : Segment or None
        The shared memory that holds its large arrays.
    refers : set of Parcel
        The parcels that must be loaded before this one.
    named : set of (Node, str)
        The globals that its functions name: a namespace and a name.
    tells : list of (Node, Facet, Change)
        The changes it brings to objects of earlier parcels.
    nodes : list of Node
        The objects that it brings.
    modules_met : set of str
        The user's modules to which it refers.
    imports : set of str
        The modules, the user's or not, that its functions may import.
    handles, optimizers : list
        The handles and the torch optimizers in it.
    is_optional : bool
        Whether workers keep what they have if it cannot be loaded.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.data = b""
        self.segment: Segment | None = None
        self.refers: set[Parcel] = set()
        self.named: set[tuple[Node, str]] = set()
        self.tells: list[tuple[Node, Facet, Change]] = []
        self.nodes: list[Node] = []
        self.modules_met: set[str] = set()
        self.imports: set[str] = set()
        self.handles: list[Handle] = []
        self.optimizers: list[Any] = []
        self.is_optional = False

    @property
    def nbytes(self) -> int:
        return len(self.data) + (0 if self.segment is None else self.segment.nbytes)

    def release(self) -> None:
        """Release what it brought. This breaks reference cycles, so objects that nobody needs are freed at once."""
        for node in self.nodes:
            node.facets = []
            node.sources.clear()
        for container in (self.nodes, self.tells, self.refers, self.named):
            container.clear()
        self.segment = None


class _Cell:
    """Stands for an empty cell in a pickle."""

    def __reduce__(self) -> Any:
        return make_cell, ()


_CELL = pickle.dumps([], protocol=5) + pickle.dumps((_Cell(),), protocol=5)


class Shelf:
    """The parcels that the workers of one runtime hold or are about to get, and the objects in them.

    Attributes
    ----------
    known : dict of int to Node
        By the id of the object.
    namespaces : dict of int to Node
        By the id of the dict in which functions look up their globals.
    parcels : dict of int to Parcel
        By number, in the order in which they are loaded.
    unsettled : list of Parcel
        Parcels that may not have arrived everywhere.
    prepared : dict of (int or str) to (object, bool)
        By id, or by the name of a module: code that may run while a parcel is loaded (see ``ComesFirst``), brought in
        this update, and whether all that it refers to was brought as well.
    trees : dict of int to Tree
        By the id of the root.
    apart : dict of int to object
        Roots of trees that are no units, because parts of them are captured as well.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.known: dict[int, Node] = {}
        self.namespaces: dict[int, Node] = {}
        self.parcels: dict[int, Parcel] = {}
        self.unsettled: list[Parcel] = []
        self.prepared: dict[int | str, tuple[Any, bool]] = {}
        self.trees: dict[int, Any] = {}
        self.apart: dict[int, Any] = {}
        self._numbers = itertools.count(1)

    def new_parcel(self) -> Parcel:
        """Return an empty parcel. It is in no list yet."""
        return Parcel(next(self._numbers))

    def plain_parcel(self, data: bytes) -> Parcel:
        """Return a parcel that needed no pickler of its own."""
        parcel = self.new_parcel()
        parcel.data = data
        self.parcels[parcel.number] = parcel
        self.unsettled.append(parcel)
        return parcel

    def know(self, obj: Any, parcel: Parcel, facets: list[Facet]) -> Node:
        node = Node(obj, parcel, len(parcel.nodes), facets)
        parcel.nodes.append(node)
        self.known[id(obj)] = node
        if facets and type(facets[0]) is Tree:
            self.trees[id(obj)] = facets[0]
        return node

    def is_found(self, function: Any) -> bool:
        """Whether ranks find under a function's name what the program has there: they may have been told otherwise."""
        *path, key = function.__qualname__.split(".")
        holder: Any = sys.modules.get(function.__module__)
        for name in path:
            holder = getattr(holder, name)
        node = self.known.get(id(holder if path else getattr(holder, "__dict__", None)))
        if node is None or not node.facets:
            return True
        told = node.facets[0].told.get(key)  # type: ignore[attr-defined]
        return told is function or getattr(told, "__func__", None) is function

    def namespace(self, table: dict[str, Any]) -> tuple[Node, Names]:
        """Return the node of a dict of globals. Workers have a dict of their own, filled as functions name things."""
        node = self.namespaces.get(id(table))
        if node is None:
            base = {k: table[k] for k in ("__package__", "__name__", "__path__", "__file__") if k in table}
            parcel = self.plain_parcel(pickle.dumps([], protocol=5) + pickle.dumps((base,), protocol=5))
            node = self.namespaces[id(table)] = Node(table, parcel, 0, [Names(table)])
            parcel.nodes.append(node)
        return node, node.facets[0]  # type: ignore[return-value]

    def meet_cell(self, cell: types.CellType) -> bool:
        """Have the workers hold a cell, which functions may share. Return whether it is new to them.

        The cell travels empty. What is in it is a change of its own.
        """
        if id(cell) in self.known:
            return False
        facet = contents(cell)
        facet.told.clear()
        self.know(cell, self.plain_parcel(_CELL), [facet])
        return True

    def is_located(self, node: Node) -> bool:
        raise NotImplementedError

    def is_prepared(self, what: Any) -> bool:
        """Whether something is noted in ``prepared``."""
        return (what if isinstance(what, str) else id(what)) in self.prepared

    def is_in_preparation(self, cls: type) -> bool:
        """Whether something that a class refers to is being packed."""
        return not self.prepared.get(id(cls), (cls, True))[1]

    def tell(self, node: Node, facet: Facet, change: Change, parcel: Parcel) -> None:
        """Record that ``parcel`` brings a change."""
        parcel.tells.append((node, facet, change))
        facet.tell(change)
        if change.kind != "reload":
            node.sources[change.kind, change.key] = parcel
        end_captures(node, facet, change)


def end_captures(node: Node, facet: Facet, change: Change) -> None:
    """Invalidate the captures that compare a unit: what they compare it with is not what the ranks have now."""
    for capture in node.captures:
        if not isinstance(facet, Names) or (node, change.key) in capture.named:
            capture.is_valid = False
