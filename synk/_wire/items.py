"""Items of a map: how they are sent to a worker, and their large arrays, which lie in shared memory if there is any."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from synk._wire.cell import cell
from synk._wire.classes import fill_class


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
