"""Parts side by side in memory: each begins on a cache line. Those that differ in number stand behind their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.ranges import LINE_NBYTES, round_up


def places_of(sizes: Sequence[int], end: int = 0) -> tuple[list[int], int]:
    """Return where parts of these sizes lie one after the other, and where the last one ends.

    Examples
    --------
    >>> places_of([8, 100, 1])
    ([0, 64, 192], 256)
    """
    places = []
    for nbytes in sizes:
        places.append(end)
        end += round_up(nbytes, LINE_NBYTES)
    return places, end


def nbytes_in_place(parts: Sequence[Any]) -> int:
    """Return how much room :func:`put_in_place` needs."""
    sizes = [memoryview(part).nbytes for part in parts]
    return places_of(sizes, places_of([8 * len(parts)])[1])[1]


def put_in_place(place: np.ndarray, parts: Sequence[Any]) -> None:
    """Write parts behind their lengths."""
    arrays = [np.frombuffer(part, np.uint8) for part in parts]
    places, _ = places_of([each.nbytes for each in arrays], places_of([8 * len(parts)])[1])
    place[: 8 * len(parts)].view(np.int64)[:] = [each.nbytes for each in arrays]
    for at, part in zip(places, arrays):
        place[at : at + part.nbytes] = part


def taken_from_place(place: np.ndarray, count: int) -> list[np.ndarray]:
    """Return the parts: views of the place."""
    sizes = place[: 8 * count].view(np.int64).tolist()
    places, _ = places_of(sizes, places_of([8 * count])[1])
    return [place[at : at + size] for at, size in zip(places, sizes)]
