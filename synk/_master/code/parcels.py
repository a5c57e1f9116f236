"""Parcels, and the objects in them that the workers hold."""

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
    parcel : Parcel
        What brought it, as the object number ``index`` in it.
    facets : list of Facet
    sources : dict of (kind, key) to Parcel
        What brought the units that did not come with the object itself.
    captures : WeakSet
        Whoever compares it before each call.
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
        The shared memory in which its large arrays lie.
    refers : set of Parcel
        Those that must be loaded before it.
    named : set of (Node, str)
        The globals that the functions in it name: a namespace and a name.
    tells : list of (Node, Facet, Change)
        What it brings of objects that came before it.
    nodes : list of Node
        The objects in it.
    modules_met, imports : set of str
        The user's modules to which it refers, and those of any kind that its functions may import.
    handles, optimizers, uncompared : list
        Objects of these kinds in it; see ``PartsPickler``.
    is_optional : bool
        Whether workers go on with what they have where it cannot be loaded.
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
    """What a book needs of the runtime to which it belongs."""

    @property
    def is_inline(self) -> bool: ...

    def new_id(self) -> int: ...

    def new_segment(self, nbytes: int, segment_id: int) -> Segment: ...

    def drop_parcel(self, parcel: Parcel, unbound: list[tuple[tuple[int, int], Any]]) -> None: ...


class Shelf(Protocol):
    """What packing needs of a book.

    Attributes
    ----------
    known, namespaces : dict of int to Node
        By the id of an object, or of a dict in which functions look up their globals.
    """

    known: dict[int, Node]
    namespaces: dict[int, Node]
    host: Host

    def namespace(self, table: dict[str, Any]) -> tuple[Node, Names]: ...

    def meet_cell(self, cell: types.CellType) -> bool: ...

    def tell(self, node: Node, facet: Facet, change: Change, parcel: Parcel) -> None: ...
