"""Parcels, and the nodes for the objects in them."""

from __future__ import annotations

import types
import weakref
from typing import Any, Protocol

from synk._master.code.facets import Change, Facet, Names
from synk._master.code.handles import Handle
from synk._wire.memory import Segment


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
    handles, optimizers, uncompared : list
        The objects of each kind that were pickled into it; see ``PartsPickler``.
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
        self.uncompared: list[Any] = []
        self.is_optional = False

    @property
    def nbytes(self) -> int:
        return len(self.data) + (0 if self.segment is None else self.segment.nbytes)


class Host(Protocol):
    """What a book needs of its runtime."""

    @property
    def is_inline(self) -> bool: ...

    @property
    def has_shared_memory(self) -> bool: ...

    def new_id(self) -> int: ...

    def new_segment(self, nbytes: int, segment_id: int) -> Segment: ...

    def drop_parcel(self, parcel: Parcel, unbound: list[tuple[tuple[int, int], Any]]) -> None: ...


class Shelf(Protocol):
    """What packing needs of a book.

    Attributes
    ----------
    known : dict of int to Node
        By the id of the object.
    namespaces : dict of int to Node
        By the id of the dict in which functions look up their globals.
    """

    known: dict[int, Node]
    namespaces: dict[int, Node]
    host: Host

    def namespace(self, table: dict[str, Any]) -> tuple[Node, Names]: ...

    def meet_cell(self, cell: types.CellType) -> bool: ...

    def tell(self, node: Node, facet: Facet, change: Change, parcel: Parcel) -> None: ...
