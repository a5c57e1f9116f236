"""Comparison in turns: what is too large to compare at each call is compared part by part, one part at each call."""

from __future__ import annotations

import abc
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from synk._master.code.comparisons import Check
from synk._master.code.facets import Facet, Table, base_of
from synk._master.code.parcels import Node

_WINDOW_COST = 1 << 13
"""The fixed cost of comparing a window of an array, expressed in bytes."""


class Turn(abc.ABC):
    """Facets that are compared together when it is their turn.

    Attributes
    ----------
    members : sequence of (Node, Facet)
    known_at : int
        The call before which all members were last known to be unchanged.
    is_done : bool
        Whether this turn has come to its end, so that the next one may begin.
    """

    def __init__(self, members: Sequence[tuple[Node, Facet]]) -> None:
        self.members = members
        self.known_at = self._began_at = 0
        self.is_done = True
        self._num_unseen = self._count_unseen()

    def look(self, call: int, size: int) -> tuple[bool, int]:
        """Compare the next part. Return whether it is unchanged, and how much of the budget ``size`` it cost."""
        is_equal, taken = self._step(size)
        if is_equal and self.is_done:
            self.known_at, self._began_at = self._began_at, call
        return is_equal, taken

    @abc.abstractmethod
    def _step(self, size: int) -> tuple[bool, int]: ...

    def begin(self, call: int) -> None:
        """Note that all members are known to be unchanged before a call, or that what was found has been told."""
        self.known_at = self._began_at = call
        self._num_unseen = self._count_unseen()

    def was_unseen(self) -> bool:
        """Whether a change was found here that this turn had missed, since this was last asked."""
        before, self._num_unseen = self._num_unseen, self._count_unseen()
        return before != self._num_unseen

    def _count_unseen(self) -> int:
        return sum(facet.num_unseen for _, facet in self.members)


class GroupTurn(Turn):
    """Facets that are compared all at once, row by row."""

    def __init__(self, members: Sequence[tuple[Node, Facet]], checks: Sequence[Check], size: int) -> None:
        super().__init__(members)
        self._checks, self._size = checks, size

    def _step(self, size: int) -> tuple[bool, int]:
        return all(check() for check in self._checks), self._size


class _Single(Turn):
    """One facet, which is compared part by part."""

    def __init__(self, node: Node, facet: Facet) -> None:
        super().__init__([(node, facet)])
        self.facet: Any = facet


class Windows(_Single):
    """The bytes of one array, window by window."""

    def _step(self, size: int) -> tuple[bool, int]:
        is_equal, taken = self.facet.window(size)
        self.is_done = not self.facet.at
        return is_equal, taken + _WINDOW_COST


class Walk(_Single):
    """The elements of one large container, slice by slice."""

    _pairs: Any = None

    def _step(self, size: int) -> tuple[bool, int]:
        facet = self.facet
        if self._pairs is None:
            if isinstance(facet, Table):
                now: Any = facet.obj if type(facet) is Table and facet.kind == "item" else facet.read()
                base = base_of(now)
                self._pairs = iter(base.keys(now)), iter(facet.told), iter(base.values(now)), iter(facet.told.values())
            else:
                self._pairs = None, None, iter(facet.iterable), iter(facet.told)
        keys, told_keys, values, told = self._pairs
        is_equal = True
        if keys is not None:
            is_equal = all(map(operator.is_, itertools.islice(keys, size), itertools.islice(told_keys, size)))
        part = list(itertools.islice(values, size))
        is_equal = is_equal and all(map(operator.is_, part, itertools.islice(told, size)))
        self.is_done = len(part) < size or not is_equal
        if self.is_done:
            self._pairs = None
        return is_equal, size


class Ring(list[Turn]):
    """Turns that share a budget for each call."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self._budget = budget
        self._next = 0

    def go_on_after(self, before: Ring) -> None:
        """Begin with the turn that would have been the next one of the ring that this one replaces."""
        if before:
            upcoming = {id(facet) for _, facet in before[before._next].members}
            found = (k for k, turn in enumerate(self) if any(id(facet) in upcoming for _, facet in turn.members))
            self._next = next(found, 0)

    def look(self, call: int, is_left_out: Callable[[Turn], bool] | None = None) -> Turn | None:
        """Compare as many parts as the budget allows. Return the first turn that differs, or None."""
        left = self._budget
        for _ in range(len(self)):
            turn = self[self._next]
            if is_left_out is not None and is_left_out(turn):
                self._next = (self._next + 1) % len(self)
                continue
            is_equal, taken = turn.look(call, left)
            if not is_equal:
                return turn
            if turn.is_done:
                self._next = (self._next + 1) % len(self)
            left -= taken
            if left <= 0:
                break
        return None
