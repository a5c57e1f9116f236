"""An argument as calls know it: its kind, what makes a plan fit it, its pickle, and what it transfers."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from synk._code.culprits import culprit_in
from synk._engine.data import Contents
from synk._pure.interrupts import raise_if_of_handler
from synk._pure.nested import PLAIN_TYPES, Container, Restored
from synk._pure.tables import packed, pickled_rows
from synk._pure.tensors import array_of, copied_tensor, dtype_of, is_ordinary, is_tensor
from synk._pure.texts import text_of
from synk._wire.parcels import TravelPickler, dumps
from synk.errors import SerializationError

NEW_NBYTES = 1 << 22
"""Copying that much costs as much as a call that is new. Larger arrays are mapped by name, or copied by rows."""


HELD = frozenset({"shard", "replica", "resident"})
"""The kinds of arguments that the ranks already have."""


class Nest(NamedTuple):
    """A nested value. Its leaves are consecutive arguments, from the one that holds this; see ``synk._pure.nested``."""

    num_leaves: int
    structure: Any
    is_whole: bool = False
    """Whether the value goes whole to every rank, so that its lists are structure."""


@dataclass
class Argument:
    """One argument of a call, or one leaf of a nested argument, after the checks.

    Attributes
    ----------
    label : str
        Its name in errors.
    keyword : str
        The name under which the function gets it; empty if by position.
    kind : str
        As in ``Input.kind``.
    array : ndarray or None
        The array to stage: ``rows``, ``picked`` or ``whole`` that lies in no segment yet; for ``table``, the packed
        rows of all ranks.
    data : synk.Data or None
    contents : Contents or None
        The contents of ``data`` when the argument was bound, or a memory-mapped array. Another thread may replace the
        contents of ``data`` at any time, so the whole call uses these.
    file : tuple or None
        How a rank maps the file in which the array lies: the arguments of ``map_again``.
    value : object
        For ``object``, ``shard``, ``replica`` and ``resident``; for ``table``, a table or a CSR matrix with rows.
    tensor_dtype : str
        As in ``Input.tensor_dtype``.
    is_tensor : bool
        Whether ``array`` is the memory of a torch tensor.
    nest : Nest or None
        The nested value, if this is its first leaf.
    """

    label: str
    keyword: str
    kind: str
    array: np.ndarray | None = None
    data: Any = None
    contents: Contents | None = None
    file: Any = None
    value: Any = None
    dtype: Any = None
    tensor_dtype: str = ""
    is_tensor: bool = False
    nest: Nest | None = None

    @property
    def key(self) -> Any:
        """The part of a plan's key that comes from this argument: equal keys can share a plan."""
        if self.contents is not None:
            array = self.contents.array
            return (self.kind, self.contents.segment_id, self.file, array.shape, array.dtype, array.dtype.type)
        if self.array is not None:  # the type too: NumPy calls np.record equal to a plain record
            shape = self.array.shape[1:] if self.kind == "rows" else self.array.shape
            return (self.kind, shape, self.dtype, self.dtype.type, self.tensor_dtype)
        if self.kind in HELD:
            return (self.kind, self.value.number)
        return self.kind

    @property
    def num_rows(self) -> int | None:
        """How many rows are to be divided; None if the argument has none, or is a shard."""
        if self.kind == "table":
            return int(self.value.shape[0])
        return len(self.whole_array) if self.kind == "rows" and self.whole_array is not None else None

    @property
    def whole_array(self) -> np.ndarray | None:
        """The array, wherever it lies; None if it is not an array."""
        return self.array if self.contents is None else self.contents.array


class ObjectPickler(TravelPickler):
    """Pickles broadcast objects. The memory of tensors goes out of band, like that of arrays."""

    def reducer_override(self, obj: Any) -> Any:
        if is_tensor(obj) and is_ordinary(obj):
            array: Any = np.ascontiguousarray(array_of(obj)).reshape(-1).view(np.uint8)
            buffer = pickle.PickleBuffer(array)
            return copied_tensor, (buffer, dtype_of(obj), tuple(obj.shape))
        return super().reducer_override(obj)


def pickle_objects(values: list[Any], labels: list[str], function_name: str) -> tuple[list[Any], list[type]]:
    """Pickle the broadcast objects of a call as one tuple. Arrays in them go out of band.

    Returns
    -------
    parts : list of buffer
        The pickle, then its buffers: contiguous, in the order in which it refers to them.
    classes : list of type
        The classes that the pickle names.

    Raises
    ------
    SerializationError
        With the name of the argument that cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    if all(type(value) in PLAIN_TYPES for value in values):
        return [pickle.dumps(tuple(values), protocol=5)], []
    try:
        file = io.BytesIO()
        pickler = ObjectPickler(file, protocol=5, buffer_callback=buffers.append)
        pickler.dump(tuple(values))
    except Exception as error:
        raise_if_of_handler(error)
        for label, value in zip(labels, values):
            try:
                dumps(value)
            except Exception as inner:
                place, part = culprit_in(label, value, dumps)
                raise SerializationError(
                    f"cannot send {place} of {function_name!r} ({type(part).__name__}): "
                    f"{text_of(inner).rstrip('.')}. Broadcast inputs must be arrays or picklable."
                ) from inner
        raise SerializationError(f"cannot send the broadcast inputs of {function_name!r}: {error}") from error
    return [file.getvalue(), *(buffer.raw() for buffer in buffers)], pickler.named


def pack_tables(arguments: Sequence[Argument], division: Any, name: str) -> None:
    """Give each table the packed rows of all ranks that run the call.

    No function captures the classes in them, so the pickle itself says how those of the program are now.

    Raises
    ------
    TypeError
        If rows cannot be pickled. The text names the column.
    """
    dumps_now = functools.partial(dumps, has_word=True)
    for argument in arguments:
        if argument.kind == "table" and division.selection is not None:
            pickles: list[list[Any]] = [[] for _ in division.bounds]
            try:
                for rank in division.ranks:
                    rows = division.selection.between(*division.bounds[rank])
                    pickles[rank] = pickled_rows(argument.value, rows, dumps_now)
            except TypeError as error:
                raise TypeError(
                    f"cannot scatter {argument.label} of {name!r}: {error}. Pass its arrays in a dict or a tuple."
                ) from None
            argument.array = packed(pickles)
            argument.dtype = argument.array.dtype


def pickle_nests(arguments: Sequence[Argument], function_name: str) -> bytes:
    """Pickle ``(first, num_leaves, structure)`` of each nested argument; empty if there are none."""
    nests = [(first, a.nest.num_leaves, a.nest.structure) for first, a in enumerate(arguments) if a.nest is not None]
    if not nests:
        return b""
    try:
        return dumps(nests)
    except Exception as error:
        raise_if_of_handler(error)
        raise SerializationError(
            f"cannot send the structure of the arguments of {function_name!r}: {text_of(error)}. Keys "
            "and classes of nested arguments must be picklable."
        ) from error


def classes_in(structure: Any) -> Iterator[type]:
    """Yield the classes of which the containers of a nested argument are built. They travel once, with the plan."""
    if isinstance(structure, Container):
        made = structure.make.cls if isinstance(structure.make, Restored) else structure.make
        if isinstance(made, type):
            yield made
        for part in structure.parts:
            yield from classes_in(part)
