"""Items of a map: what a worker is sent of them, and the arrays among them that lie in shared memory."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synk._wire.cell import cell


class Items(NamedTuple):
    """What an ITEMS message says.

    Attributes
    ----------
    pickles : sequence of bytes
        One for each item.
    """

    function_id: int
    pickles: Sequence[bytes]


class ItemsDone(NamedTuple):
    """What a rank answers to an ITEMS message.

    Attributes
    ----------
    values : list of bytes
        One pickle for each item that came to its end, up to the first that failed.
    failure : Failure or None
        What that one raised.
    failed_item : str
        Its text, in short.
    duration_ns : int
    """

    values: list[bytes]
    failure: Any
    failed_item: str
    duration_ns: int


def call(task: Any) -> Any:
    """Call a task: the function that is mapped where the items are tasks."""
    return task()


def call_with(fn: Any, items: tuple[Any, ...]) -> Any:
    """Call a function with one item of each iterable that is mapped over."""
    return fn(*items)


def array_in_segment(segment_id: int, shape: tuple[int, ...], dtype: np.dtype, is_transposed: bool) -> np.ndarray:
    """Return a large array of an item, on its rank: a read-only view of shared memory."""
    if cell.worker is None:
        raise pickle.UnpicklingError("cannot load an item of synk.map here: expected a worker of its runtime.")
    array = cell.worker.held.segments[segment_id].view(0, shape, dtype)
    array.flags.writeable = False
    return array.T if is_transposed else array
