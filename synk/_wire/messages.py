"""What travels between master and workers: kinds, status, and the message bodies.

A repeated call is one doorbell of eight bytes down and one up for each rank; its numbers lie in the control segment,
where each rank has two blocks of int64 in each lane, one written by the master and one by the worker. Everything that
is new (a function, a plan, a segment) travels as the pickled body of the message that needs it first, as names, shapes
and bounds: array bytes never do.

All records are named tuples. To define a frozen dataclass takes seven times as long, nearly a millisecond, and each
worker would define twenty of them when it starts.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from synk._pure.ops import Op, Reduction
from synk._pure.ranges import LINE_NBYTES
from synk._wire.logs import Levels

VERSION = 1

DOORBELL = struct.Struct("<BBHI")
"""kind, flags, sequence (16 bits), value: the whole message of a repeated call, each way."""

HAS_BODY = 1
IS_COLLATERAL = 2
"""Flag of an error reply: the rank failed only because another one did."""

IS_UNRECEIVED = 4
"""Flag of an error reply: the rank could not take in what the message brought."""

IS_ASSEMBLED = 8
"""Flag of a reply to a call: the rank's part of the large outputs is in its place."""


LANE_SHIFT = 6
"""Where in a doorbell's flags the lane of the call begins."""

IS_ALONE = 16
"""Flag of a message: no other is under way, so the rank need not remember what happened in other lanes."""

DEVICE_DTYPES = frozenset(
    (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    )
)  # fmt: skip
"""What NCCL can reduce between devices, if not directly then in another dtype."""

LARGE_NBYTES = 1 << 18
"""Outputs from this size on are reduced by the workers, each its own chunk; smaller ones by the master."""


MIN_CHECKED_ROWS = 4
"""Rows of a rank from which on it is checked whether the default op fits a function."""


class Kind(IntEnum):
    """Messages from the master to a worker."""

    LOAD = 1  # functions, and objects that they refer to
    CALL = 2  # value = plan
    PUBLISH = 3  # the slots have grown: publish the outputs of the last call again
    ASSEMBLE = 4  # value = segment: reduce or copy the large outputs of the last call into it
    VARIABLE = 5  # an operation on shared variables
    PING = 6
    CLOSE = 7
    GROUP = 8  # join NCCL
    SUPPLY = 9  # segments of the next message, where they are more than one can bring
    RESIDENT = 11  # an operation on resident objects, see synk._wire.residents
    PREFETCH = 10  # value = plan: bring the inputs of the call that will follow in this lane; gets no answer
    ITEMS = 12  # run a function on each of some items, see synk._wire.items
    CHECK = 13  # see on trial whether the default op fits the function of the last call


class Status(IntEnum):
    """Replies from a worker to the master."""

    HELLO = 1
    DONE = 2
    ERROR = 3
    INTERRUPTED = 4
    UNPUBLISHED = 5  # outputs are there, but the slot is too small for them
    PONG = 6
    BYE = 7


class Input(NamedTuple):
    """Where a worker finds one argument of a call.

    Attributes
    ----------
    name : str
        The parameter; empty for one passed by position.
    kind : str
        ``"rows"`` (scattered array), ``"whole"`` (broadcast array), ``"object"`` (entry of the call's pickle),
        ``"shard"`` or ``"replica"`` (a shared variable, sharded or replicated), ``"resident"`` (the rank's own object),
        ``"closed over"`` (all rows of an
        array of a sharded variable that the function closes over, for a serial call; ``name`` is the variable's id).
    segment_id, offset : int
        Where the array starts; for ``"object"`` ``offset`` is the position in the pickled tuple, and for shared
        variables and resident objects ``segment_id`` is their number.
    shape, dtype
        Of the whole array, axis 0 being the rows.
    is_minibatch : bool
        Whether axis 0 is the rows of the batch, and not of the data set that the batch was chosen from.
    tensor_dtype : str
        Of a tensor whose dtype NumPy lacks, its name; ``dtype`` is then that in which it lies.
    """

    name: str
    kind: str
    segment_id: int = 0
    offset: int = 0
    shape: tuple[int, ...] = ()
    dtype: Any = None
    is_minibatch: bool = False
    tensor_dtype: str = ""


IN_SEGMENTS = ("rows", "whole", "closed over")
"""The kinds of input that are arrays in a segment."""


class Plan(NamedTuple):
    """A call with everything that does not change when it is repeated.

    Attributes
    ----------
    pickle_place : tuple (segment_id, offset, nbytes) or None
        Where the pickle of the ``"object"`` arguments lies; ``buffers`` are its out-of-band buffers, likewise.
    indices_place : tuple (segment_id, offset, count) or None
        The selected rows as int64, where they are no range.
    local_indices_place : tuple (segment_id, offset, count) or None
        Likewise the rows of sharded variables, as positions in each rank's own shard.
    order_place : tuple (segment_id, offset, count) or None
        Likewise the rows of minibatch inputs, where the ranks' rows are not in the order of the batch.
    is_trial : bool
        Nothing shall be left of the call but its outputs.
    is_apart : bool
        Of a call on trial: the outputs are not combined, as with op None.
    nests : bytes
        A pickle of ``(first, num_leaves, structure)`` for each nested argument: the inputs that are its leaves. Nothing
        where there are none.
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
    order_place: tuple[int, int, int] | None = None
    is_trial: bool = False
    is_apart: bool = False
    nests: bytes = b""


class Leaf(NamedTuple):
    """Shape and dtype of one output of one rank; ``dtype`` None stands for an object that travels in the body.

    ``is_tensor``: the function returned it as a tensor, and the master gives it back as one. ``partial_of``: the dtype
    of the value that a partial result (see ``synk._pure.partials``) becomes when those of all ranks are combined.
    """

    shape: tuple[int, ...]
    dtype: Any
    is_tensor: bool = False
    partial_of: Any = None

    @property
    def nbytes(self) -> int:
        if self.dtype is None:
            return 0
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def value_dtype(self) -> Any:
        """That of the finished value."""
        return self.dtype if self.partial_of is None else self.partial_of


class Layout(NamedTuple):
    """The structure of a function's result on one rank.

    Attributes
    ----------
    skeleton
        The result with leaf positions as leaves.
    leaves : tuple of Leaf
    assigned : tuple of (variable_id, shapes)
        Shared variables that the call has assigned.
    """

    skeleton: Any
    leaves: tuple[Leaf, ...]
    assigned: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()


class Move(NamedTuple):
    """What a worker does with one large output at assembly.

    Attributes
    ----------
    leaf : int
        Position among the rank's leaves.
    kind : str
        ``"reduce"`` (this rank reduces elements ``start`` to ``stop`` of all ranks' values), ``"device"`` (likewise, by
        NCCL) or ``"copy"`` (the whole value goes to ``offset``).
    op : str
    offset : int
        Byte offset in the result segment of the output (``"reduce"``) or of this rank's part (``"copy"``).
    start, stop : int
    """

    leaf: int
    kind: str
    op: str
    offset: int
    start: int = 0
    stop: int = 0


class Fetch(NamedTuple):
    """Have a rank copy the value of a variable into its buffer in shared memory."""

    variable_id: int


class DeviceCollective(NamedTuple):
    """Have all ranks do a collective over a variable on their devices.

    Attributes
    ----------
    kind : {"all_reduce", "broadcast", "all_gather"}
        ``"broadcast"`` is from rank 0; ``"all_gather"`` concatenates values of one shape along axis 0.
    op : str
    """

    variable_id: int
    kind: str
    op: str = ""


class JoinOrder(NamedTuple):
    """Have a rank join the NCCL group ``number``; without an id it makes one."""

    number: int
    unique_id: bytes | None


class Body(NamedTuple):
    """What a message brings besides its own content: segments (their descriptors ride along) and what to forget.

    Attributes
    ----------
    segments : list of (segment_id, nbytes, is_writable, is_staging, is_arena, is_file)
    parts : list of (segment_id, arena_id, offset, nbytes)
        Segments that lie in arenas, which came before or come with this.
    dropped : dict of str to dict
        By kind, the numbers of what the rank has to forget: segments, plans, functions, variables, residents, and
        parcels with the globals that they brought (the address of the namespace, and the name).
    news : list of (kind, number, value)
        What the log says that is new: ``"variable"`` (a Declaration), ``"lane"`` (the segment of its slots, their size,
        and the segment through which functions communicate, 0 where there is none), ``"settings"`` (of the program;
        on the rank their pickle).
    content : the message's own body
    """

    segments: Sequence[tuple[int, int, bool, bool, bool, bool]] = ()
    parts: Sequence[tuple[int, int, int, int]] = ()
    dropped: Mapping[str, Mapping[int, Any]] = {}
    news: Sequence[tuple[str, int, Any]] = ()
    content: Any = None


class Reload(NamedTuple):
    """A module of the user's program whose code has changed: its source now, and before where that is known."""

    module: str
    file: str
    before: str | None
    source: str


class ParcelOrder(NamedTuple):
    """A parcel to load; see ``synk._master.code.book``.

    Attributes
    ----------
    is_optional : bool
        Whether to go on where it cannot be loaded.
    """

    number: int
    data: bytes
    is_optional: bool


class LoadOrder(NamedTuple):
    """What a LOAD message says.

    Attributes
    ----------
    reloads : list of Reload
    parcels : list of ParcelOrder
    sys_path : list of str
        The master's.
    levels : Levels
        Of the master's loggers.
    prepare : int or None
        The function to run in a worker that was started in the place of another.
    """

    reloads: list[Reload]
    parcels: list[ParcelOrder]
    sys_path: list[str]
    levels: Levels
    prepare: int | None = None


def is_reduced_on_devices(leaf: Leaf, op: Op, has_group: bool) -> bool:
    """Whether the devices reduce an output of all ranks among themselves."""
    return has_group and leaf.nbytes >= LARGE_NBYTES and isinstance(op, Reduction) and leaf.dtype.name in DEVICE_DTYPES


def is_in_slot(leaf: Leaf, op: Op, num_voters: int, has_group: bool) -> bool:
    """Whether an output, or what other ranks need of it, lies in the rank's slot."""
    if leaf.nbytes < LARGE_NBYTES:
        return True
    return isinstance(op, Reduction) and num_voters > 1 and not is_reduced_on_devices(leaf, op, has_group)


def slot_offsets(leaves: Sequence[Leaf], ops: Sequence[Op], num_voters: int, has_group: bool) -> tuple[list[int], int]:
    """Return the byte offset of each leaf in a rank's slot, and the bytes needed. Both sides compute the same.

    Large outputs take room only where the ranks have to read one another's values: reduced ones with several voters.
    Reduced outputs come first: they are of one size on all ranks, so each rank finds those of the others where its own
    ones lie, whatever the sizes of the rest.
    """
    offsets = [0] * len(leaves)
    offset = 0
    for position in sorted(range(len(leaves)), key=lambda position: not isinstance(ops[position], Reduction)):
        leaf = leaves[position]
        offsets[position] = offset
        if is_in_slot(leaf, ops[position], num_voters, has_group):
            offset += -(-leaf.nbytes // LINE_NBYTES) * LINE_NBYTES
    return offsets, offset


class Reply(NamedTuple):
    """A worker's answer; ``body`` is still pickled."""

    status: Status
    flags: int
    body: bytes


DONE = Reply(Status.DONE, 0, b"")
"""What a rank answers to a repeated call that went well."""


ASSEMBLED = Reply(Status.DONE, IS_ASSEMBLED, b"")
"""Likewise where the outputs are large."""
