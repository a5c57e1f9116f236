"""What travels with orders and replies: inputs, outputs and failures, as names, shapes and bounds. Never array bytes.

All records are named tuples: defining a frozen dataclass takes seven times as long, and each worker defines them when
it starts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from synk._pure.ranges import LINE_NBYTES, round_up
from synk._wire.memory import Segment

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
