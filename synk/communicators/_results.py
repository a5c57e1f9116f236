"""Memory for results, which is used again once nobody has the result any more.

The kernel must make the pages of a new large array, which takes longer than filling them. So a rank keeps the memory of
large results. It belongs to a result and all views of it, as long as anybody refers to one of them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

# From this size on NumPy gets the memory of each new array from the kernel, and gives it back with the array.
MIN_NBYTES = 1 << 17
# How much memory that is not in use a rank keeps between calls.
KEPT_NBYTES = 1 << 27


Place = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""Returns the array for a result of a shape and a dtype."""


class ResultMemory:
    """One rank's memory for results."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array with undefined contents, in new memory or in memory that nobody refers to any more."""
        array: np.ndarray
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes < MIN_NBYTES:
            return np.empty(shape, dtype)
        # A view refers to the block itself, however it was made. So the number of references tells whether the function
        # still holds anything of a result.
        blocks = self._blocks
        for position in range(len(blocks)):
            if blocks[position].size == nbytes and _num_references(blocks, position) == _UNUSED:
                blocks.append(blocks.pop(position))  # in order of use: trim keeps the end of the list
                break
        else:
            blocks.append(np.empty(nbytes, np.uint8))
        array = blocks[-1].view(dtype).reshape(shape)
        return array

    def trim(self) -> None:
        """Drop the memory that results still use, and of the rest what exceeds ``KEPT_NBYTES``, oldest first."""
        blocks, kept = self._blocks, 0
        for position in reversed(range(len(blocks))):
            kept += blocks[position].size
            if kept > KEPT_NBYTES or _num_references(blocks, position) != _UNUSED:
                kept -= blocks[position].size
                del blocks[position]


def _num_references(blocks: list[np.ndarray], position: int) -> int:
    return sys.getrefcount(blocks[position])


# Measured, because interpreters differ in the references that they add themselves.
_UNUSED = _num_references([np.empty(1, np.uint8)], 0)
