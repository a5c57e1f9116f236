"""Items of a map: how they are sent to a worker, and their large arrays, which lie in shared memory if there is any."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synk._wire.cell import cell


class Items(NamedTuple):
    """The content of an ITEMS message.

    Attributes
    ----------
    pickles : sequence of bytes
        One for each item.
    """

    function_id: int
    pickles: Sequence[bytes]


class ItemsDone(NamedTuple):
    """A rank's answer to an ITEMS message.

    Attributes
    ----------
    values : list of bytes
        One pickle for each item that succeeded, up to the first that failed.
    failure : Failure or None
        The exception of that item.
    failed_item : str
        A short text that names that item.
    duration_ns : int
    """

    values: list[bytes]
    failure: Any
    failed_item: str
    duration_ns: int


def call(task: Any) -> Any:
    """Call a task. This is the mapped function if the items are tasks."""
    return task()


def call_with(fn: Any, items: tuple[Any, ...]) -> Any:
    """Call a function with one item of each mapped iterable."""
    return fn(*items)


def array_in_segment(segment_id: int, shape: tuple[int, ...], dtype: np.dtype, is_transposed: bool) -> np.ndarray:
    """Return a large array of an item, on its rank, as a read-only view of shared memory."""
    if cell.worker is None:
        raise pickle.UnpicklingError("cannot load an item of synk.map here: expected a worker of its runtime.")
    # A function may keep the array. The view keeps the mapping, and the master does not take the memory back from under
    # it: the kernel frees it with the last mapping.
    held = cell.worker.held
    segment = held[segment_id] if isinstance(held, dict) else held.segments[segment_id]
    array = segment.view(0, shape, dtype)
    array.flags.writeable = False
    return array.T if is_transposed else array


def array_in_pickle(data: bytes, shape: tuple[int, ...], dtype: np.dtype, is_transposed: bool) -> np.ndarray:
    """Return a large array of an item, read-only as one in shared memory, on a rank of another node."""
    array = np.frombuffer(data, dtype).reshape(shape)
    return array.T if is_transposed else array
