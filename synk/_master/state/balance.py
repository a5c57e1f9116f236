"""How many rows each rank gets, by how long the ranks took for theirs: for devices, or cores, that differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from synk._wire.control import Up

EVERY = 8
"""The shares are revised after this many calls."""

MOST = 0.1
"""The largest change of a share at once, as a fraction of it."""

_LEAST = 0.02
"""Smaller changes are not made, because after each change calls take the slow path."""


class Balance:
    """The shares of the ranks.

    Attributes
    ----------
    shares : list of float
        Each rank's share of all rows. Their sum is 1.
    """

    def __init__(self, world_size: int) -> None:
        self.shares = [1 / world_size] * world_size
        self._num_calls = 0
        self._rows = [0] * world_size
        self._ns = [0] * world_size

    def bounds(self, num_rows: int) -> list[tuple[int, int]]:
        """Return ``(start, stop)`` of each rank's rows.

        Examples
        --------
        >>> balance = Balance(2)
        >>> balance.shares = [0.7, 0.3]
        >>> balance.bounds(10)
        [(0, 7), (7, 10)]
        """
        ends = [round(share * num_rows) for share in itertools.accumulate(self.shares)]
        ends[-1] = num_rows
        return list(zip([0, *ends[:-1]], ends))

    def follow(self, session: Any, launched: Any, result: Any, heard_ns: int, ended_ns: int) -> None:
        """Take in a call. If it changes the shares, the next calls take the slow path."""
        call, words = launched.call, launched.cached.lane.up_words
        if call.options.is_serial or call.owned is not None:
            return
        if self.note(call.ranks, call.rows, [words[rank][Up.FUNCTION_NS] for rank in call.ranks]):
            for function in session.functions.bound:
                function.plans.forget_compiled()

    def note(self, ranks: Sequence[int], rows: Sequence[int], work_ns: Sequence[int]) -> bool:
        """Note how long the ranks worked in a call. Return whether the shares have changed."""
        if len(ranks) < len(self.shares) or min(rows) < 1:
            return False
        for rank, count, ns in zip(ranks, rows, work_ns):
            self._rows[rank] += count
            self._ns[rank] += ns
        self._num_calls += 1
        if self._num_calls < EVERY:
            return False
        speeds = [count / max(ns, 1) for count, ns in zip(self._rows, self._ns)]
        self._num_calls, self._rows, self._ns = 0, [0] * len(speeds), [0] * len(speeds)
        wanted = [speed / sum(speeds) for speed in speeds]
        if all(abs(new - old) < _LEAST * old for new, old in zip(wanted, self.shares)):
            return False
        moved = [min(max(new, old * (1 - MOST)), old * (1 + MOST)) for new, old in zip(wanted, self.shares)]
        self.shares = [share / sum(moved) for share in moved]
        return True
