"""Reductions over blocks of rows, which give the same bits for any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from synk._pure.ops import Op, Reduction


class InBlocks(Op):
    """A reduction of the values of blocks of rows, in a tree that depends only on their number.

    The ranks get whole blocks and call the function once for each, so any number of ranks gives the same bits.

    Parameters
    ----------
    op : Reduction
    """

    def __init__(self, op: Reduction) -> None:
        self.op = op
        self.needs_rows, self.has_empty = op.needs_rows, op.has_empty

    def check(self, dtype: np.dtype, what: str) -> None:
        self.op.check(dtype, what)

    def combine(self, values: list[Any], rows: list[int]) -> Any:
        arrays = [np.asarray(value) for value in values]
        if len({(array.dtype, array.shape) for array in arrays}) > 1:
            raise ValueError(
                f"cannot combine blocks with op {self.op!r}: got shapes and dtypes "
                f"{sorted({f'{array.shape} {array.dtype}' for array in arrays})}, expected the same from every block."
            )
        with np.errstate(all="ignore"):
            level = [self.op.lift(array, count) for array, count in zip(arrays, rows)]
            while len(level) > 1:
                pairs = zip(level[::2], level[1::2])
                level = [self.op.merge(one, other) for one, other in pairs] + level[len(level) // 2 * 2 :]
            return self.op.finished(np.array(level[0]), sum(rows), arrays[0].dtype)

    def __repr__(self) -> str:
        return f"{self.op!r} in blocks"
