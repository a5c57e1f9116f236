"""An argument as calls know it: its kind, the rows it has, its pickle, and its description for the workers."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from synk._master.code.culprits import culprit_in
from synk._master.objects.data import Contents
from synk._master.state.variable import Variable
from synk._pure.interrupts import operation, safe_point
from synk._pure.nested import PLAIN_TYPES
from synk._pure.ranges import LINE_NBYTES
from synk._pure.shards import Assignment, Selection, assign_local, assign_owned, bounds_of, select_common
from synk._pure.tensors import array_of, copied_tensor, dtype_of, is_ordinary, is_tensor
from synk._wire.messages import Input
from synk._wire.parcels import Pickler
from synk.errors import SerializationError

_PAGE = 4096


class Nest(NamedTuple):
    """The nested value that an argument and those behind it are the leaves of; see ``synk._pure.nested``."""

    num_leaves: int
    structure: Any
    is_whole: bool = False
    """Whether it goes whole to every rank, so that lists in it are structure."""


@dataclass
class Argument:
    """One argument of a call, or a leaf of a nested one, checked.

    Attributes
    ----------
    label : str
        How errors call it.
    keyword : str
        Under which name the function gets it; empty for by position.
    kind : str
        As ``Input.kind``.
    array : ndarray or None
        What must be staged (``rows`` and ``whole`` that lie in no segment yet).
    data : synk.Data or None
    contents : Contents or None
        Of ``data`` when the argument was bound, or of a memory-mapped array. Another thread may replace those of
        ``data`` at any time, so the whole call goes by these.
    value : object
        For ``object``, ``shard``, ``replica`` and ``resident``.
    tensor_dtype : str
        As ``Input.tensor_dtype``.
    is_tensor : bool
        Whether ``array`` is the memory of a tensor of torch.
    nest : Nest or None
        Of the first leaf of a nested argument.
    is_part : bool
        Whether ``array`` is part of a sparse matrix or a table, which cannot be a ``Data``.
    """

    label: str
    keyword: str
    kind: str
    array: np.ndarray | None = None
    data: Any = None
    contents: Contents | None = None
    value: Any = None
    dtype: Any = None
    tensor_dtype: str = ""
    is_tensor: bool = False
    nest: Nest | None = None
    is_part: bool = False

    @property
    def key(self) -> Any:
        """What must be equal for a plan to be used again."""
        if self.contents is not None:
            array, place = self.contents.array, (self.contents.segment_id, self.contents.offset)
            return (self.kind, *place, array.shape, array.dtype, array.dtype.type, self.is_minibatch)
        if self.kind == "closed over":
            return (self.kind, self.value.id, self.array.shape)  # type: ignore[union-attr]
        if self.array is not None:  # the type as well: NumPy calls np.record equal to a plain record
            return (self.kind, self.array.shape, self.dtype, self.dtype.type, self.tensor_dtype)
        if self.kind in ("shard", "replica", "resident"):
            return (self.kind, self.value.id)
        return self.kind

    @property
    def is_minibatch(self) -> bool:
        """Whether it holds the rows of the batch only."""
        return self.data is not None and self.data.minibatch

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of the array; None where it is none."""
        array = self.array if self.contents is None else self.contents.array
        return None if array is None else array.shape


class Rows(NamedTuple):
    """A scattered array of a call, as far as it matters for which rows the ranks get."""

    label: str
    num_rows: int
    is_minibatch: bool


def rows_of(arguments: Sequence[Argument]) -> list[Rows]:
    """Return the arrays that have rows, as ``select`` and ``assign`` take them."""
    return [Rows(a.label, a.shape[0], a.is_minibatch) for a in arguments if a.kind == "rows" and a.shape is not None]


def select(rows: Sequence[Rows], batch: Any, function_name: str) -> Selection | None:
    """Return the rows of a call, or None where no argument is scattered."""
    if not rows:
        if batch is not None:
            raise ValueError(f"cannot select rows of {function_name!r}: batch was given, but no argument is scattered.")
        return None
    whole = [(label, count) for label, count, is_minibatch in rows if not is_minibatch]
    mini = [(label, count) for label, count, is_minibatch in rows if is_minibatch]
    return select_common(batch, whole, mini, repr(function_name))


def own_rows(variables: Sequence[Variable], world_size: int, function_name: str) -> tuple[list[tuple[int, int]], str]:
    """Return the bounds of each rank's rows where the sharded ``variables`` of a function are all that has rows.

    Returns
    -------
    bounds : list of (low, high)
        All zero where there are no variables. Where shards differ in length, the longest one of a rank counts.
    unequal : str
        The text of an error if they are no weights of an average, because the variables are not divided alike.
    """
    variables = sorted(variables, key=lambda variable: variable.id)
    lengths = [variable.lengths for variable in variables]
    unequal = ""
    for variable, own in zip(variables, lengths):
        if any(a * sum(lengths[0]) != b * sum(own) for a, b in zip(own, lengths[0])):
            unequal = (
                f"cannot average the outputs of {function_name!r}: it closes over the sharded variables "
                f"{variables[0].name!r} with {lengths[0]} rows on the ranks and {variable.name!r} with {own}, expected "
                "one division of rows, which gives the weights. Pass the one that is averaged over as an argument."
            )
    return bounds_of([max(own) for own in zip(*lengths)] or [0] * world_size), unequal


def assign(
    rows: Sequence[Rows], shards: Sequence[tuple[str, Variable]], batch: Any, shard_batch: Any, function_name: str
) -> Assignment:
    """Return which rank works on which rows where some arguments are sharded variables: each on those it owns.

    ``shards`` are the variables, with how errors call them. With ``batch`` and ``shard_batch`` the rows that the first
    picks of the other arguments go with those that the second picks of the variables, one by one.

    Raises
    ------
    ValueError
        If the variables' shards differ in length, or other inputs do not have one row for each of theirs.
    """
    (first, variable), *others = shards
    lengths = variable.lengths
    for label, other in others:
        if other.lengths != lengths:
            raise ValueError(
                f"cannot call {function_name!r}: got {first} with {lengths} rows on the ranks and {label} with "
                f"{other.lengths}, expected equal shards."
            )
    if shard_batch is not None:
        assignment = assign_local(shard_batch, lengths, repr(function_name))
        expected = assignment.selection.count
        if batch is not None:
            selection = select(rows, batch, function_name)
            assert selection is not None  # a batch of nothing was refused
            if selection.count != expected:
                raise ValueError(
                    f"cannot call {function_name!r}: got a batch of {selection.count} rows of {rows[0].label}, "
                    f"expected {expected}, as many as shard_batch picks of {first}."
                )
            return replace(assignment, selection=selection)
    else:
        assignment = assign_owned(batch, lengths, repr(function_name))
        expected = sum(lengths)
    is_batched = batch is not None or shard_batch is not None
    for label, count, is_minibatch in rows:
        is_mini = is_minibatch and is_batched
        wanted = assignment.selection.count if is_mini else expected
        if count < wanted or (count > wanted and not is_mini):
            raise ValueError(
                f"cannot scatter {label} of {function_name!r}: got {count} rows, expected "
                f"{wanted}{' or more' if is_mini else ''}, one for each "
                f"{'selected ' if is_mini or shard_batch is not None else ''}row of the sharded variable {first}."
            )
    return assignment


# -- staging ----------------------------------------------------------------------------------------------------------


class ObjectPickler(Pickler):
    """Pickles broadcast objects; the memory of tensors goes out of band, like that of arrays."""

    def reducer_override(self, obj: Any) -> Any:
        if is_tensor(obj) and is_ordinary(obj):
            with operation():
                array: Any = np.ascontiguousarray(array_of(obj)).reshape(-1).view(np.uint8)
            buffer = pickle.PickleBuffer(array)
            return copied_tensor, (buffer, dtype_of(obj), tuple(obj.shape))
        return super().reducer_override(obj)


def padded(data: bytes, nbytes: int) -> np.ndarray:
    """Return a pickle as an array of ``nbytes`` bytes; what follows its end is not read."""
    return np.frombuffer(data.ljust(nbytes, b"\0"), np.uint8)


def pickle_objects(values: list[Any], labels: list[str], function_name: str) -> tuple[bytes, list[memoryview]]:
    """Pickle the broadcast objects of a call as one tuple; arrays inside go out of band.

    Returns
    -------
    data : bytes
    buffers : list of memoryview
        Contiguous, in the order in which the pickle refers to them.

    Raises
    ------
    SerializationError
        Naming the argument that cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    if all(type(value) in PLAIN_TYPES for value in values):
        return pickle.dumps(tuple(values), protocol=5), []
    try:
        file = io.BytesIO()
        safe_point(ObjectPickler(file, protocol=5, buffer_callback=buffers.append).dump, tuple(values))
        data = file.getvalue()
    except Exception as error:
        for label, value in zip(labels, values):
            try:
                safe_point(cloudpickle.dumps, value, protocol=5)
            except Exception as inner:
                place, part = culprit_in(label, value, cloudpickle.dumps)
                raise SerializationError(
                    f"cannot send {place} of {function_name!r} ({type(part).__name__}): {type(inner).__name__}: "
                    f"{str(inner).rstrip('.')}. Broadcast inputs must be arrays or picklable."
                ) from inner
        raise SerializationError(f"cannot send the broadcast inputs of {function_name!r}: {error}") from error
    return data, [buffer.raw() for buffer in buffers]


def pickle_nests(arguments: Sequence[Argument], function_name: str) -> bytes:
    """Pickle ``(first, num_leaves, structure)`` of each nested argument; nothing where there are none."""
    nests = [(first, a.nest.num_leaves, a.nest.structure) for first, a in enumerate(arguments) if a.nest is not None]
    if not nests:
        return b""
    try:
        return safe_point(cloudpickle.dumps, nests, protocol=5)
    except Exception as error:
        raise SerializationError(
            f"cannot send the structure of the arguments of {function_name!r}: {type(error).__name__}: {error}. Keys "
            "and classes of nested arguments must be picklable."
        ) from error


def aligned(offset: int, nbytes: int) -> int:
    """Return the next offset where ``nbytes`` bytes should start: on a cache line, on a page if they are many."""
    alignment = _PAGE if nbytes >= (1 << 20) else LINE_NBYTES
    return -(-offset // alignment) * alignment


def capacity_for(nbytes: int) -> int:
    """Return the room for a pickle of ``nbytes`` bytes: powers of two, so that small changes keep the plan."""
    return 256 if nbytes <= 256 else 1 << (nbytes - 1).bit_length()


def input_of(argument: Argument, segment_id: int, offset: int) -> Input:
    """Return the worker's description of an argument at its place."""
    if argument.kind == "object":
        return Input(argument.keyword, "object", 0, offset)
    if argument.kind in ("shard", "replica", "resident"):
        return Input(argument.keyword, argument.kind, argument.value.id)
    if argument.contents is not None:
        array, place = argument.contents.array, (argument.contents.segment_id, argument.contents.offset)
        return Input(argument.keyword, argument.kind, *place, array.shape, array.dtype, argument.is_minibatch)
    assert argument.array is not None
    if argument.kind == "closed over":
        name = str(argument.value.id)
        return Input(name, argument.kind, segment_id, offset, argument.array.shape, argument.dtype)
    shape, dtype = argument.array.shape, argument.dtype
    return Input(argument.keyword, argument.kind, segment_id, offset, shape, dtype, tensor_dtype=argument.tensor_dtype)
