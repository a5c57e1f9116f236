"""The leaves of a function's result: each is an array of the backend, or an object that travels in a pickle."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from synk._pure.exact import has_own_meaning, plain_form
from synk._pure.nested import is_plain_object
from synk._pure.ops import EACH, Op, Reduction, is_int
from synk._pure.read_only import ReadOnlyArray
from synk._pure.table_outputs import check_table, num_rows
from synk._pure.tables import is_table
from synk._pure.tensors import is_tensor, tensor_of
from synk._pure.trees import flatten, unflatten
from synk._pure.words import text_of
from synk._rank.failures import dumps
from synk._rank.functions import LoadedFunction
from synk._wire.messages import MAX_ROOM_NBYTES, MAX_ROOMS_NBYTES, Leaf, room_for
from synk.backends import Backend
from synk.errors import SerializationError

_PLAIN_ARRAYS = (np.ndarray, np.memmap, ReadOnlyArray)
_INT64 = np.dtype(np.int64)
_IMMUTABLE_TYPES = (int, float, complex, str, bytes, type(None))


class Object:
    """An output that counts as one object: an array of objects, a table, the values of all slices."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Partial:
    """A partial result: a reduced output of several slices, to be finished together with the other ranks' values.

    Attributes
    ----------
    value : array, or tensor
        The value in the dtype in which values are combined. For an average, the sum weighted by rows.
    dtype
        The dtype of the finished value.
    """

    def __init__(self, value: Any, dtype: Any) -> None:
        self.value = value
        self.dtype = dtype


def take_whole(result: Any, outputs: Any, *, has_arrays: bool = False) -> Any:
    """Return a result in which each output that is one object is an ``Object``.

    Under an op that concatenates, a list is one: it holds the objects of the rank's rows. As among the arguments, a
    list counts as rows and a tuple as structure; a list that has a list of ops is structure.

    Under op None everything is one. A container of arrays nevertheless stays structure, so that they travel as arrays,
    and the program puts it together again; so does None. With ``has_arrays`` these are objects, too.
    """
    is_op = isinstance(outputs, Op)
    if outputs is EACH:
        is_structure = result is None or isinstance(result, (tuple, list, dict))
        is_whole = is_structure and (has_arrays or not (result is None or _has_array(result)))
        return Object(result) if is_whole else result
    if is_op and outputs.concatenates and type(result) is list:
        return Object(result)
    if isinstance(outputs, (tuple, list)) and isinstance(result, (tuple, list)) and len(outputs) == len(result):
        parts: Any = outputs
    elif is_op and isinstance(result, tuple):
        parts = [outputs] * len(result)
    elif isinstance(result, dict):
        ops = outputs if isinstance(outputs, dict) else dict.fromkeys(result, outputs)
        taken = copy.copy(result)  # a defaultdict cannot be made from its items alone
        taken.update({key: take_whole(part, ops.get(key), has_arrays=has_arrays) for key, part in result.items()})
        return taken
    else:
        return result
    made = [take_whole(part, op, has_arrays=has_arrays) for part, op in zip(result, parts)]
    return type(result)(*made) if hasattr(result, "_fields") else type(result)(made)


def _has_array(result: Any) -> bool:
    try:
        leaves, _ = flatten(result)
    except RecursionError:  # it contains itself, which only a pickle can
        return False
    return any(hasattr(leaf, "dtype") and not isinstance(leaf, np.generic) for leaf in leaves)


def array_or_object(backend: Backend, value: Any, op: Op, name: str, function: LoadedFunction) -> Any:
    """Check an output against its op. Return it as an array of the backend, or as an object."""
    if isinstance(value, Object):
        is_rows = op.concatenates and function.from_framework is not None
        return Object(on_host(function, backend, value.value, name)) if is_rows else value
    if is_table(value):
        check_table(op, value, f"{name} of {function.name!r}")
        return Object(value)
    if function.from_framework is not None:
        value = function.from_framework(value)
    what = f"{name} of {function.name!r}"
    is_number = isinstance(value, (int, float, complex)) and not isinstance(value, np.generic)
    if is_number and not op.is_of_arrays:
        op.check(_INT64 if is_int(value) else np.asarray(value).dtype, what)
        return value  # a Python number stays what it is, whatever its class
    if isinstance(op, Reduction) and is_int(value):
        op.check(_INT64, what)
        return int(value)  # of any size
    if not op.is_of_arrays and isinstance(value, np.ndarray) and type(value) not in _PLAIN_ARRAYS:
        return Object(value)  # its class counts
    if not op.is_of_arrays and is_tensor(value):
        return value  # of a function without a framework: an object like others, wherever it lies
    array = backend.as_output(value)
    if array is None:
        if not op.is_of_arrays:
            return Object(value) if isinstance(value, np.ndarray) else value
        raise TypeError(
            f"cannot apply op {op!r} to {what}: got {_kind_of(value)}, expected an array of numbers or a number. "
            f"{_way_out(value, op)}Use op None to get one object per rank."
        )
    op.check(array.dtype, what)
    if op.concatenates and array.ndim == 0:
        raise ValueError(
            f"cannot gather {what}: got a single number, expected an array with rows on axis 0, or a list with an "
            "object for each row. Return np.array(list) or the list, not a tuple of values."
        )
    return array


def snapshot(backend: Backend, value: Any, name: str, function: LoadedFunction) -> Any:
    """Return a copy of an object, because the function may change it in the next slice. Arrays are copied elsewhere."""
    if backend.is_array(value) or isinstance(value, (np.generic, *_IMMUTABLE_TYPES)):
        return value
    try:  # by pickling, because it will be pickled anyway
        if isinstance(value, Object):
            return Object(pickle.loads(dumps(value.value)))
        return pickle.loads(dumps(value))
    except Exception as error:
        raise SerializationError(
            f"cannot keep {name} of {function.name!r} from one slice to the next: "
            f"{text_of(error)}. Return arrays, numbers or picklable objects, or pass num_slices=1."
        ) from error


def as_object(backend: Backend, value: Any) -> Any:
    """Return a value in host memory, so that the program can load it without touching a device."""
    if isinstance(value, Object):
        return value.value
    if not backend.is_array(value):
        return value
    array = backend.host_copy(value)
    return array if array.ndim else array[()]


def on_host(function: LoadedFunction, backend: Backend, value: Any, name: str) -> Any:
    """Return a value that is one object with its arrays and tensors as the program gets them."""
    try:
        leaves, structure = flatten(value)
    except RecursionError:  # it contains itself
        return value
    made = [
        as_returned(as_object(backend, array_or_object(backend, leaf, EACH, name, function)), was_tensor)
        for leaf, was_tensor in zip(leaves, map(function.is_tensor, leaves))
    ]
    return unflatten(structure, made)


def as_returned(value: Any, was_tensor: bool) -> Any:
    """Return a host value as a tensor if the function returned one. The tensor shares its memory with nothing else."""
    return tensor_of(np.array(value)) if was_tensor and isinstance(value, (np.ndarray, np.generic)) else value


def _way_out(value: Any, op: Op) -> str:
    if has_own_meaning(value):
        return f"Return {plain_form(value)} where you mean a plain array. "
    if op.concatenates:
        return "Return a list with an object for each row, or np.array(list). "
    return "Use a callable such as operator.add if two of them can be combined. "


def _kind_of(value: Any) -> str:
    if has_own_meaning(value):
        return f"{type(value).__name__}, which has a meaning of its own"
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype}, which holds Python objects"
    return type(value).__name__


def taken(
    backend: Backend,
    function: LoadedFunction,
    values: Sequence[Any],
    ops: Sequence[Op],
    names: Sequence[str],
    wanted: Collection[int] | None,
    before: Sequence[Leaf] | None,
) -> tuple[list[Any], tuple[Leaf, ...], list[tuple[str, Any]]]:
    """Return what of a result goes into the slot, its leaves, and what goes into the reply.

    Parameters
    ----------
    wanted : collection of int or None
        The leaves that are reduced and sent; None for all.
    before : sequence of Leaf or None
        Those of the last result, if its structure was the same.

    Returns
    -------
    outputs : list
        By leaf: an array, the pickle of a short plain object, or None.
    leaves : tuple of Leaf
    objects : list of (name, object or its pickle)
    """
    leaves: list[Leaf] = []
    outputs: list[Any] = []
    objects: list[tuple[str, Any]] = []
    rooms = 0
    for position, (value, op, name) in enumerate(zip(values, ops, names)):
        if wanted is not None and position not in wanted:
            outputs.append(None)
            leaves.append(Leaf((), None))
            continue
        partial_of = None
        if isinstance(value, Partial):
            value, partial_of = value.value, value.dtype
        array = array_or_object(backend, value, op, name, function)
        if backend.is_array(array):
            outputs.append(array)
            leaves.append(Leaf(tuple(array.shape), array.dtype, function.is_tensor(value), partial_of))
            continue
        item = array.value if isinstance(array, Object) else array
        data = pickle.dumps(item, protocol=5) if is_plain_object(item) else None
        room = 0 if data is None else _room(len(data), None if before is None else before[position])
        if room and rooms + room <= MAX_ROOMS_NBYTES:
            rooms += room
            leaves.append(Leaf((), None, room=room))
            outputs.append(data)
        else:
            # Of the objects that can be reduced, tables have rows, and ints have none.
            has_rows = isinstance(op, Reduction) and not is_int(item)
            leaves.append(Leaf((num_rows(item),) if has_rows else (), None))
            outputs.append(None)
            objects.append((name, item if data is None else data))
    return outputs, tuple(leaves), objects


def _room(nbytes: int, known: Leaf | None) -> int:
    """Return the size of the place for a pickle of ``nbytes`` in the slot, or 0 if it goes into the reply.

    ``known``: the same output of the last call. What went into the reply then does so again, or a layout would be sent
    at each call of a function whose results are sometimes long.
    """
    if known is not None and known.dtype is None and (not known.room or nbytes <= known.room):
        return known.room
    return room_for(nbytes) if nbytes <= MAX_ROOM_NBYTES else 0
