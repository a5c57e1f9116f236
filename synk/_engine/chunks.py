"""Chunks: items that one rank runs in turn, and what has become of them. Nothing here sends."""

from __future__ import annotations

from typing import NamedTuple

_NUM_SLOWEST = 3


class Rules(NamedTuple):
    """What the user of a map wants of it.

    Attributes
    ----------
    batch_size : int or None
        Items in a chunk; None: as many as suit the time that items take.
    is_ordered : bool
        Whether results come in the order of the items.
    returns_errors : bool
        Whether a failed item gives an ``ItemError`` in its place; otherwise it ends the map.
    item_s : float or None
        Seconds after which an item is given up.
    max_tasks, max_memory : int or None
        A worker is replaced after so many items, or when it holds so many bytes.
    """

    batch_size: int | None = None
    is_ordered: bool = True
    returns_errors: bool = False
    item_s: float | None = None
    max_tasks: int | None = None
    max_memory: int | None = None


class PoolStats:
    """What has happened in a map.

    Attributes
    ----------
    deaths : int
        Workers that died at an item.
    replaced : int
        Workers that were ended for the time of an item, or for the number of items or the memory of a worker.
    slowest : list of (float, int)
        The items that took longest: seconds and number, the longest first.
    """

    def __init__(self) -> None:
        self.deaths = self.replaced = 0
        self.slowest: list[tuple[float, int]] = []

    def note_time(self, seconds: float, number: int) -> None:
        """Note how long an item took."""
        self.slowest = sorted([*self.slowest, (seconds, number)], reverse=True)[:_NUM_SLOWEST]
