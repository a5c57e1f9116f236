"""Outputs that have one row for each row of their rank, under an op that reduces them: the wrong op, most likely.

One coincidence proves nothing, as a gradient of 3 parameters may meet shards of 3 rows. So an output is suspected while
its length equals the rows of a rank in all calls that were looked at, and convicted by its length at another number of
rows. Pure logic: which calls are looked at, and the one that is made to see that length, are in
``synk._master.replies`` and ``synk._master.trials``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from synk._pure.ops import Op, is_reducible
from synk._pure.trees import output_name
from synk._wire.messages import Leaf
from synk.errors import RowShapedOutput


class RowShapes:
    """What is known of the outputs of the function ``name``.

    Attributes
    ----------
    is_open : bool
        Whether there is anything left to find out.
    suspects : tuple of int
        Leaves whose length has always been that of the rows.
    wants_trial : bool
        Whether a shorter call would settle it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_open = True
        self.suspects: tuple[int, ...] = ()
        self.wants_trial = False
        self._seen: dict[Any, int] = {}  # rows of a rank, by all else that outputs can have their shape from

    def look(
        self,
        ops: Sequence[Op],
        leaves: Sequence[Leaf],
        rows: Sequence[int],
        num_slices: int,
        others: Any,
        skeleton: Any,
    ) -> str:
        """Take in a call that several ranks have run; return what is to be told, empty for nothing.

        Parameters
        ----------
        ops, leaves
            Of the outputs; those that are reduced have one shape on all ranks.
        rows : sequence of int
            Of each rank.
        num_slices : int
        others : hashable
            The shapes of all inputs but for the rows; None where they are not known.
        skeleton
            The nesting of the outputs with the position of each in its place.
        """
        lengths = {length for count in rows for length in _slice_lengths(count, num_slices)}
        suspects = set()
        if len(lengths) == 1:  # else what follows the rows would differ in length, which is an error
            shape = tuple(lengths)
            suspects = {k for k, op in enumerate(ops) if is_reducible(op) and leaves[k].shape[:1] == shape}
        self.wants_trial = bool(suspects) and not self._seen
        self.suspects = tuple(sorted(suspects.intersection(self.suspects) if self._seen else suspects))
        self.is_open = bool(self.suspects)
        if not self.is_open:
            return ""
        (length,) = lengths
        is_confirmed = self._seen.setdefault(others, length) != length and others is not None
        return self.convict(self.suspects, ops, length, skeleton) if is_confirmed else ""

    def convict(self, positions: Sequence[int], ops: Sequence[Op], length: int, skeleton: Any) -> str:
        """Close the case; return what is to be told of the outputs at ``positions``."""
        self.is_open = self.wants_trial = False
        if not positions:
            return ""
        first = positions[0]
        return (
            f"{output_name(skeleton, first)} of {self._name!r} has as many rows as its rank, and op {ops[first]!r} has "
            f'combined these {length} rows with those of the other ranks. Use outputs="gather" if it holds one value '
            "for each row; f.verify(...) compares a call with the serial one."
        )


def _slice_lengths(count: int, num_slices: int) -> set[int]:
    """Return the lengths of the slices in which a rank works on ``count`` rows."""
    quotient, remainder = divmod(count, num_slices)
    return {length for length in (quotient, quotient + bool(remainder)) if length}


def tell(text: str) -> None:
    """Warn, if there is anything to tell, at the line of the program that called synk."""
    if not text:
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "synk":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RowShapedOutput, stacklevel=level)
