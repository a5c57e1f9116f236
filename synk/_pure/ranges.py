"""Divides elements: into blocks for devices, and into chunks on cache lines for ranks."""

from __future__ import annotations

import itertools

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
