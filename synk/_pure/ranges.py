"""Divides elements: into blocks for devices, chunks on cache lines for ranks, and places side by side in memory.

Each place begins on a cache line. Places that differ in number stand behind their sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

LINE_NBYTES = 64
"""The size of a cache line. Different processes write to different lines."""


def round_up(nbytes: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not less than ``nbytes``."""
    return -(-nbytes // multiple) * multiple


def block_bounds(count: int, num_blocks: int) -> list[tuple[int, int]]:
    """Split ``count`` elements into blocks of equal length, as devices do: only the last ones may be shorter.

    Examples
    --------
    >>> block_bounds(7, 3)
    [(0, 3), (3, 6), (6, 7)]
    """
    length = -(-count // num_blocks)
    return [(min(k * length, count), min((k + 1) * length, count)) for k in range(num_blocks)]


def chunk_bounds(count: int, itemsize: int, num_chunks: int) -> list[tuple[int, int]]:
    """Split ``count`` elements into ``num_chunks`` ranges whose edges lie on cache lines."""
    step = max(LINE_NBYTES // itemsize, 1)
    lines = -(-count // step)
    edges = [min(-(-lines * k // num_chunks) * step, count) for k in range(num_chunks + 1)]
    return list(itertools.pairwise(edges))


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
