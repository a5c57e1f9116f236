"""What both halves must agree on: how the inputs and the outputs of a call lie in memory, and shares of large ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from synk._wire.messages import Input, Leaf
from synk._wire.variables import Shapes

COMMON_A, COMMON_B, OWN_A, OWN_B = range(4)
"""The places of a variable: two for all ranks, and two of each rank's own."""


def spare_of(front: int) -> int:
    """Return the own place of a rank that is not its front: there a call writes what it assigns."""
    return OWN_A if front == OWN_B else OWN_B


Assigned = tuple[tuple[int, bool, Shapes], ...]
"""What a call has assigned: the number of each variable, whether its value, which belongs into the spare place, lies on
the device alone, and its shapes."""

ON_DEVICE = 4
"""Added to a place: the new value lies on the device of its rank alone."""


class Look(NamedTuple):
    """What a plan tells its ranks.

    Attributes
    ----------
    inputs : tuple of Input
        Kind ``"picked"``: an array in staging memory that holds the rows of the call and no others.
    object_at, indices_at, local_at : int
        Where in the staging memory pickled objects and rows lie; -1: nowhere.
    """

    function: int
    lane: int
    staging: int
    inputs: tuple[Input, ...]
    num_slices: int
    subset: tuple[Any, ...] | None
    is_rowless: bool
    nests: bytes
    object_at: int
    indices_at: int
    local_at: int
    num_indices: int
    changes: tuple[int, ...]


class Layout(NamedTuple):
    """What a function has returned on one rank.

    Attributes
    ----------
    skeleton : bytes
        A pickle of the result, with the position of each leaf in its place.
    leaves : tuple of Leaf
    places : tuple of int
        Where each of them begins in the slot; -1: the rank keeps it until it is asked for (:class:`Share`).
    assigned : Assigned
    """

    skeleton: bytes
    leaves: tuple[Leaf, ...]
    places: tuple[int, ...]
    assigned: Assigned


class News(NamedTuple):
    """The body of a reply that is new.

    Attributes
    ----------
    layout : Layout or None
        None: as last time.
    objects : list of (name, pickle)
        The outputs that lie in no slot.
    slot : int
        The size of a new slot; 0 if there is none. Its descriptor comes first.
    places : list of (variable, which, nbytes)
        Places of variables that the rank has made, in the order of their descriptors.
    """

    layout: Layout | None
    objects: list[tuple[str, bytes]]
    slot: int
    places: list[tuple[int, int, int]]


class Share(NamedTuple):
    """One rank's part in one large output.

    Attributes
    ----------
    op : str
        Reduces ``length`` elements of all sources; empty: copies the one source.
    dtype
    length : int
    sources : list of (int, int)
        Memory and offset, one for each rank that votes. For an output that the rank has kept, one source: -1 minus its
        lane, and its position. An op then reduces those of all ranks.
    at : int
        Where the part goes in the result.
    rows : list of int
    """

    op: str
    dtype: Any
    length: int
    sources: list[tuple[int, int]]
    at: int
    rows: list[int]


ITEM_BITS = 20
"""``Up.ITEM`` is the number of a message, times this power of two, plus the position of an item in it."""


class ItemsOrder(NamedTuple):
    """What a rank is told of a chunk of a map.

    Attributes
    ----------
    function, job : int
        The function's number, and the map's.
    numbers : sequence of int
        The number of each item in its map.
    goes_on : bool
        Whether the others are run after one has failed.
    most_ns : int
        No item is begun so long after the first one; 0 if all of them are to be run.
    is_timed : bool
        Whether to tell which item took longest.
    has_word : bool
        Whether items may say what their classes hold. Otherwise parcels have brought that since they were pickled.
    parts : list of (count, nbytes)
        Pickles in ``stream``: a list of so many items or, with a count of 0, one item.
    stream : bytes or ndarray of uint8
    """

    function: int
    job: int
    numbers: Sequence[int]
    goes_on: bool
    most_ns: int
    is_timed: bool
    has_word: bool
    parts: list[tuple[int, int]]
    stream: Any
