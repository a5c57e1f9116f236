"""What travels with orders and replies, as names, shapes and bounds. Never array bytes.

Inputs, outputs and failures; how the inputs and the outputs of a call lie in memory, and shares of large ones; items of
maps, and their large arrays, which lie in shared memory if there is any; resident objects.

All records are named tuples: defining a frozen dataclass takes seven times as long, and each worker defines them when
it starts.
"""

from __future__ import annotations

import math
import pickle
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synk._pure.ranges import LINE_NBYTES, round_up
from synk._version import __version__
from synk._wire.cell import cell
from synk._wire.classes import fill_class
from synk._wire.memory import Segment
from synk._wire.variables import Shapes

DEVICE_DTYPES = frozenset(
    (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    )
)  # fmt: skip
"""Dtypes that NCCL can reduce between devices, directly or by way of another dtype."""

LARGE_NBYTES = 1 << 18
"""Outputs of at least this size are reduced by the workers, each its own chunk. The program reduces smaller ones."""

MAX_ROOM_NBYTES = LARGE_NBYTES // 2
"""The largest pickle of an output for which there is a place in the rank's slot."""

MAX_ROOMS_NBYTES = 1 << 20
"""How much of a slot a call's pickles may take together: slots are kept."""


def versions() -> dict[str, str]:
    """Return the versions that program and ranks must share."""
    return {"python": platform.python_version(), "numpy": np.__version__, "synk": __version__}


class Input(NamedTuple):
    """The place of one argument of a call, as a worker finds it.

    Attributes
    ----------
    name : str
        The parameter; empty if the argument is passed by position.
    kind : str
        ``"rows"`` (scattered array), ``"picked"`` (the rows of such an array that the call uses), ``"whole"``
        (broadcast array), ``"table"`` (the packed rows of a table, a row of bytes for each rank), ``"object"`` (entry
        of the call's pickle), ``"shard"`` or ``"replica"`` (a shared variable, sharded or replicated), ``"resident"``
        (the rank's own object).
    segment_id, offset : int
        Where the array starts. For ``"object"``, ``offset`` is the position in the pickled tuple. For shared variables
        and resident objects, ``segment_id`` is their number.
    shape, dtype
        The shape and dtype of the whole array. Axis 0 is the rows.
    tensor_dtype : str
        The dtype of a tensor, if NumPy lacks it. ``dtype`` is then the one that stores its elements.
    file : tuple or None
        If the array lies in a file that each rank maps itself: the arguments of ``synk._wire.file_maps.map_again``.
    """

    name: str
    kind: str
    segment_id: int = 0
    offset: int = 0
    shape: tuple[int, ...] = ()
    dtype: Any = None
    tensor_dtype: str = ""
    file: Any = None


class Leaf(NamedTuple):
    """Shape and dtype of one output of one rank. ``dtype`` is None for an object, which is pickled.

    ``is_tensor``: whether the function returned a tensor, so that the program returns one too. ``partial_of``: the
    dtype of the final value, if this is a partial result (see ``synk._pure.partials``). ``room``: the size of the place
    for the pickle of an object in the rank's slot; 0 if it travels in the body of the reply.
    """

    shape: tuple[int, ...]
    dtype: Any
    is_tensor: bool = False
    partial_of: Any = None
    room: int = 0

    def __eq__(self, other: Any) -> bool:  # NumPy calls float64 equal to None, and np.record equal to a plain record
        return tuple.__eq__(self, other) and getattr(self.dtype, "type", 0) is getattr(other.dtype, "type", 0)

    def __hash__(self) -> int:
        return tuple.__hash__(self)

    @property
    def nbytes(self) -> int:
        if self.dtype is None:
            return self.room
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def view(self, segment: Segment, offset: int) -> np.ndarray | None:
        """Return what lies of it in shared memory at ``offset``: an array, or the place for a pickle."""
        if self.dtype is not None:
            return segment.view(offset, self.shape, self.dtype)
        return segment.view(offset, (self.room,), np.dtype(np.uint8)) if self.room else None

    @property
    def value_dtype(self) -> Any:
        """The dtype of the final value."""
        return self.dtype if self.partial_of is None else self.partial_of


def room_for(nbytes: int) -> int:
    """Return the size of the place for an object whose pickle takes ``nbytes`` now: the next ones may be longer."""
    return round_up(nbytes + nbytes // 8, LINE_NBYTES)


class Failure(NamedTuple):
    """An exception of one rank in a form that can travel.

    Attributes
    ----------
    pickled : bytes or None
        The exception itself, if it is an ordinary ``Exception`` that can be pickled and loaded.
    unfit : str
        Why an ordinary ``Exception`` could not be pickled.
    is_collateral : bool
        Whether the rank failed only because another rank did.
    """

    rank: int
    device: str
    type_name: str
    message: str
    traceback_text: str
    pickled: bytes | None
    unfit: str = ""
    is_collateral: bool = False


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


def call(task: Any) -> Any:
    """Call a task. This is the mapped function if the items are tasks."""
    return task()


def call_with(fn: Any, items: tuple[Any, ...]) -> Any:
    """Call a function with one item of each mapped iterable."""
    return fn(*items)


def fill_class_of_item(cls: type, state: tuple[Any, ...]) -> None:
    """Give a class what an item has brought, unless a parcel has brought the class since the item was pickled."""
    table, slots, owner, *rest = state
    fill_class(cls, (table, slots, owner if cell.worker.items.order.has_word else "", *rest))


def array_in_segment(segment_id: int, shape: tuple[int, ...], dtype: np.dtype, is_transposed: bool) -> np.ndarray:
    """Return a large array of an item, on its rank, as a read-only view of shared memory."""
    if cell.worker is None:
        raise pickle.UnpicklingError("cannot load an item of synk.map here: expected a worker of its runtime.")
    # A function may keep the array. The view keeps the mapping, and the program does not take the memory back from
    # under it: the kernel frees it with the last mapping.
    array = cell.worker.held[segment_id].view(0, shape, dtype)
    array.flags.writeable = False
    return array.T if is_transposed else array


def array_in_pickle(data: bytes, shape: tuple[int, ...], dtype: np.dtype, is_transposed: bool) -> np.ndarray:
    """Return a large array of an item, read-only as one in shared memory, on a rank of another node."""
    array = np.frombuffer(data, dtype).reshape(shape)
    return array.T if is_transposed else array


COUNTED, TORN = -2, -1
"""What has become of an object after a call that failed: it is as after the call, or in between. Other numbers say that
it was put back: 0 that it is as before the call, any other that it differs from that in what could not be put back, and
is equal on ranks with equal numbers.
"""


def methods_of(value: Any) -> tuple[Any, Any]:
    """Return ``(dump, load)`` for an object with torch's state methods, or for a list or tuple of such objects.

    Both are None for any other object.

    Without these methods the state is a pickle of the object, and loading it makes a new object.
    """
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return _state_of_one, _load_into_one
    if type(value) in (tuple, list) and value and all(methods_of(item)[0] is _state_of_one for item in value):
        return _states_of_all, _load_into_all
    return None, None


def _state_of_one(value: Any) -> Any:
    return value.state_dict()


def _load_into_one(value: Any, state: Any) -> None:
    value.load_state_dict(state)


def _states_of_all(values: Any) -> Any:
    return [value.state_dict() for value in values]


def _load_into_all(values: Any, states: Any) -> None:
    for value, state in zip(values, states):
        value.load_state_dict(state)


def resolve_resident(resident_id: int) -> Any:
    """Return this rank's object. This loads a pickled ``Resident``."""
    if cell.worker is None:
        raise pickle.UnpicklingError(
            "cannot load a resident object here: it can only be used on the workers of its runtime."
        )
    return cell.worker.residents[resident_id]
