"""Items of a map: how they are sent to a worker, and their large arrays, which lie in shared memory if there is any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Items(NamedTuple):
    """The content of an ITEMS message.

    Attributes
    ----------
    pickles : sequence of bytes
        One for each item.
    """

    function_id: int
    pickles: Sequence[bytes]


def call(task: Any) -> Any:
    """Call a task. This is the mapped function if the items are tasks."""
    return task()


def call_with(fn: Any, items: tuple[Any, ...]) -> Any:
    """Call a function with one item of each mapped iterable."""
    return fn(*items)
