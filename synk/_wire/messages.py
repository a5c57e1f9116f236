"""The messages between the master and the workers: kinds, status words and bodies.

A repeated call is one doorbell of eight bytes down and one up for each rank. Its numbers lie in the control segment,
where each rank has two blocks of int64 in each lane: one that the master writes and one that the worker writes. New
things (a function, a plan, a segment) travel in the pickled body of the first message that needs them, as names, shapes
and bounds. Array bytes never travel in messages.

All records are named tuples. Defining a frozen dataclass takes seven times as long, nearly a millisecond, and each
worker would define twenty of them when it starts. In one file because it is all that the two halves must agree on.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from synk._pure.ops import Op, Reduction
from synk._pure.ranges import LINE_NBYTES, round_up
from synk._wire.logs import Levels
from synk._wire.memory import Segment

VERSION = 1

DOORBELL = struct.Struct("<BBHI")
"""kind, flags, sequence (16 bits), value: the whole message of a repeated call, in both directions"""

# On the way down, a doorbell's flags are HAS_BODY, IS_ALONE and the lane, in the two highest bits. The others belong to
# replies.
HAS_BODY = 1
IS_COLLATERAL = 2
"""Flag of an error reply: the rank failed only because another rank did."""

IS_UNRECEIVED = 4
"""Flag of an error reply: the rank could not take in what the message brought."""

IS_ASSEMBLED = 8
"""Flag of a reply to a call: the rank has put its part of the large outputs in place."""

LANE_SHIFT = 6
"""The lowest bit of a doorbell's flags that holds the lane of the call."""

IS_ALONE = 16
"""Flag of a message: no other message is in flight, so the rank need not remember what happened in other lanes."""

DEVICE_DTYPES = frozenset(
    (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    )
)  # fmt: skip
"""Dtypes that NCCL can reduce between devices, directly or by way of another dtype."""

LARGE_NBYTES = 1 << 18
"""Outputs of at least this size are reduced by the workers, each its own chunk. The master reduces smaller ones."""

MAX_ROOM_NBYTES = LARGE_NBYTES // 2
"""The largest pickle of an output for which there is a place in the rank's slot."""

MAX_ROOMS_NBYTES = 1 << 20
"""How much of a slot a call's pickles may take together: slots are kept."""


class Kind(IntEnum):
    """Messages from the master to a worker."""

    LOAD = 1  # functions and the objects that they refer to
    CALL = 2  # value = plan
    PUBLISH = 3  # the slots have grown: publish the outputs of the last call again
    ASSEMBLE = 4  # value = segment: reduce or copy the large outputs of the last call into it
    VARIABLE = 5  # an operation on shared variables
    PING = 6
    CLOSE = 7
    GROUP = 8  # join an NCCL group
    SUPPLY = 9  # segments of the next message, if there are more than one message can carry
    RESIDENT = 11  # an operation on resident objects, see synk._wire.residents
    PREFETCH = 10  # value = plan: bring the inputs of this lane's next call; the rank does not answer
    ITEMS = 12  # run a function on items, see synk._wire.items


class Status(IntEnum):
    """Replies from a worker to the master."""

    HELLO = 1
    DONE = 2
    ERROR = 3
    INTERRUPTED = 4
    UNPUBLISHED = 5  # the outputs are there, but the slot is too small for them
    PONG = 6
    BYE = 7


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


IN_SEGMENTS = ("rows", "picked", "whole", "table")
"""The kinds of input that are arrays in a segment."""


class Plan(NamedTuple):
    """All parts of a call that stay the same when it is repeated.

    Attributes
    ----------
    pickle_place : tuple (segment_id, offset, nbytes) or None
        Where the pickle of the ``"object"`` arguments lies. ``buffers`` are the places of its out-of-band buffers.
    indices_place : tuple (segment_id, offset, count) or None
        Where the selected rows lie as int64, if they are not a range.
    local_indices_place : tuple (segment_id, offset, count) or None
        Where the rows of sharded variables lie, as positions in each rank's own shard, if they are not ranges.
    nests : bytes
        A pickle of ``(first, num_leaves, structure)`` for each nested argument: which inputs are its leaves. Empty if
        no argument is nested.
    all_ranks : tuple of int
        On one of several nodes: the ranks of all nodes that run the call.
    """

    plan_id: int
    function_id: int
    inputs: tuple[Input, ...]
    num_slices: int = 1
    output_subset: tuple[Any, ...] | None = None
    pickle_place: tuple[int, int, int] | None = None
    buffers: tuple[tuple[int, int, int], ...] = ()
    indices_place: tuple[int, int, int] | None = None
    is_rowless: bool = False
    local_indices_place: tuple[int, int, int] | None = None
    nests: bytes = b""
    all_ranks: tuple[int, ...] = ()


class Leaf(NamedTuple):
    """Shape and dtype of one output of one rank. ``dtype`` is None for an object, which is pickled.

    ``is_tensor``: whether the function returned a tensor, so that the master returns one too. ``partial_of``: the dtype
    of the final value, if this is a partial result (see ``synk._pure.partials``). ``room``: the size of the place for
    the pickle of an object in the rank's slot; 0 if it travels in the body of the reply.
    """

    shape: tuple[int, ...]
    dtype: Any
    is_tensor: bool = False
    partial_of: Any = None
    room: int = 0

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


PickledOutput = tuple[str, bytes]
"""The name of an output, and its pickle."""


def room_for(nbytes: int) -> int:
    """Return the size of the place for an object whose pickle takes ``nbytes`` now: the next ones may be longer."""
    return round_up(nbytes + nbytes // 8, LINE_NBYTES)


class Layout(NamedTuple):
    """The structure of a function's result on one rank.

    Attributes
    ----------
    skeleton
        The result, with the position of each leaf in its place.
    leaves : tuple of Leaf
    assigned : tuple of (variable_id, shapes)
        The shared variables that the call assigned.
    """

    skeleton: Any
    leaves: tuple[Leaf, ...]
    assigned: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()


class Move(NamedTuple):
    """One rank's part in putting together one large output.

    Attributes
    ----------
    leaf : int
        Position among the rank's leaves.
    kind : str
        ``"reduce"`` (this rank reduces elements ``start`` to ``stop`` of all ranks' values), ``"merge"`` (the same to a
        partial result, in the dtype in which values are combined), ``"device"`` (NCCL reduces them) or ``"copy"`` (the
        whole value goes to ``offset``).
    op : str
    offset : int
        Byte offset in the result segment of the whole output (``"reduce"``) or of this rank's part (``"copy"``).
    start, stop : int
    """

    leaf: int
    kind: str
    op: str
    offset: int
    start: int = 0
    stop: int = 0


class JoinOrder(NamedTuple):
    """Orders a rank to join NCCL group ``number``. A rank that gets no id makes one."""

    number: int
    unique_id: bytes | None


class WireOrder(NamedTuple):
    """Orders a rank to join group ``number`` of the ranks of all nodes.

    Attributes
    ----------
    counts : tuple of int
        The ranks of each node.
    table : dict of int to (address, key)
        By rank. Empty: the rank opens an inlet, and its reply says where.
    host : str
        The address of the rank's machine, which its agent fills in; empty if all ranks are on one machine.
    """

    number: int
    counts: tuple[int, ...]
    table: Mapping[int, tuple[str, bytes]]
    host: str = ""


class Body(NamedTuple):
    """The body of a message: its content, and all that the rank must take in before it acts on the content.

    The descriptors of ``segments`` travel with the body, in the same order.

    Attributes
    ----------
    segments : list of (segment_id, nbytes, is_writable, is_staging, is_arena)
    parts : list of (segment_id, arena_id, offset, nbytes)
        Segments that lie in arenas. The arenas came before or come with this message.
    dropped : dict of str to dict
        The numbers of what the rank must forget, by kind: segments, plans, functions, variables, residents, and parcels
        with the globals that they brought (the address of the namespace, and the name).
    news : list of (kind, number, value)
        New entries of the log: ``"variable"`` (a Declaration), ``"lane"`` (the segment of its slots, their size, and
        the segment for ``synk.comm``, 0 if there is none), ``"settings"`` (of the program; on the rank, their pickle).
    content : the message's own body
    """

    segments: Sequence[tuple[int, int, bool, bool, bool]] = ()
    parts: Sequence[tuple[int, int, int, int]] = ()
    dropped: Mapping[str, Mapping[int, Any]] = {}
    news: Sequence[tuple[str, int, Any]] = ()
    content: Any = None


class ParcelOrder(NamedTuple):
    """A parcel to load; see ``synk._master.code.book``.

    Attributes
    ----------
    is_optional : bool
        Whether to go on if it cannot be loaded.
    """

    number: int
    data: bytes
    is_optional: bool


class LoadOrder(NamedTuple):
    """The content of a LOAD message.

    Attributes
    ----------
    parcels : list of ParcelOrder
    sys_path : list of str
        The master's.
    levels : Levels
        The levels of the master's loggers.
    prepare : int or None
        The function to run in a worker that replaces another.
    """

    parcels: list[ParcelOrder]
    sys_path: list[str]
    levels: Levels
    prepare: int | None = None


def is_reduced_on_devices(leaf: Leaf, op: Op, has_group: bool) -> bool:
    """Whether the devices reduce an output of all ranks among themselves."""
    return has_group and leaf.nbytes >= LARGE_NBYTES and isinstance(op, Reduction) and leaf.dtype.name in DEVICE_DTYPES


def is_in_slot(leaf: Leaf, op: Op, num_voters: int, has_group: bool) -> bool:
    """Whether an output lies in the rank's slot, at least the part that other ranks need."""
    if leaf.nbytes < LARGE_NBYTES:
        return True
    return isinstance(op, Reduction) and num_voters > 1 and not is_reduced_on_devices(leaf, op, has_group)


def slot_offsets(leaves: Sequence[Leaf], ops: Sequence[Op], num_voters: int, has_group: bool) -> tuple[list[int], int]:
    """Return the byte offset of each leaf in a rank's slot, and the bytes needed. Both halves compute the same.

    A large output takes room only if the ranks must read one another's values: if it is reduced and several ranks vote.
    These come first. They have the same size on all ranks, so each rank finds the others' at its own offsets, whatever
    the sizes of the other outputs.
    """
    offsets = [0] * len(leaves)
    offset = 0
    is_read = [isinstance(op, Reduction) and leaf.nbytes >= LARGE_NBYTES for leaf, op in zip(leaves, ops)]
    for position in sorted(range(len(leaves)), key=lambda position: not is_read[position]):
        leaf = leaves[position]
        offsets[position] = offset
        if is_in_slot(leaf, ops[position], num_voters, has_group):
            offset += round_up(leaf.nbytes, LINE_NBYTES)
    return offsets, offset


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


class Reply(NamedTuple):
    """A worker's answer. ``body`` is still pickled."""

    status: Status
    flags: int
    body: bytes


# The master recognises these two by their eight bytes alone (``Doorbells.hear``), without building a reply.
DONE = Reply(Status.DONE, 0, b"")
"""A rank's answer to a repeated call that succeeded."""


ASSEMBLED = Reply(Status.DONE, IS_ASSEMBLED, b"")
"""A rank's answer to a repeated call that succeeded and has large outputs."""
