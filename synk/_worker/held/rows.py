"""The rows that a function gets at a time, as places in its input arrays. They are kept for calls like the last one."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import TYPE_CHECKING

import numpy as np

from synk._wire.control import Down
from synk._wire.messages import Input

if TYPE_CHECKING:
    Part = slice | EllipsisType


class Rows:
    """The rows that a function gets at a time: its rank's rows, or the rows of one slice.

    It holds places, not arrays, because a reference to an array would look like one that the function kept
    (``InputViews``).

    Parameters
    ----------
    inputs : sequence of Input
    indices : ndarray of int64, or None
        Which rows of the scattered inputs the ranks get, if they are not a range.
    own_down : sequence of int
        This rank's numbers of the call; see ``synk._wire.control.Down``.
    low, high : int
        The range of the selection.

    Attributes
    ----------
    views : dict of int to (slice or Ellipsis)
        By position, for inputs that the function gets as views: the part.
    picked : dict of int to ndarray of int64
        By position, for inputs that it gets as copies: the rows.
    first : int
        The rank's first row in the selection.
    """

    def __init__(
        self,
        inputs: Sequence[Input],
        indices: np.ndarray | None,
        own_down: Sequence[int],
        low: int,
        high: int,
    ) -> None:
        self.low, self.high, self.first = low, high, own_down[Down.LOW]
        self.views: dict[int, Part] = {}
        self.picked: dict[int, np.ndarray] = {}
        for position, item in enumerate(inputs):
            if indices is not None and item.kind == "rows":
                self.picked[position] = indices[low:high]
            elif item.kind == "picked":
                self.views[position] = slice(low, high)
            elif item.kind == "rows":
                self.views[position] = row_range(own_down, low, high)
            elif item.kind == "whole":
                self.views[position] = ...


def row_range(own_down: Sequence[int], low: int, high: int) -> slice:
    """Return where the rows ``low`` to ``high`` of the selection lie in an input, if the selection is a range."""
    start, step = own_down[Down.START], own_down[Down.STEP]
    first, stop = start + low * step, start + high * step
    if high <= low:
        return slice(0, 0)
    return slice(first, stop if stop >= 0 else None, step)  # stop is negative if a negative step ends on row 0
