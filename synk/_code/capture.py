"""Whether what a function captured is still what the ranks were told. Asked before each call, about all of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from synk._code.arrays import ArrayContents, TensorContents, tensor_bytes_check, versions_check
from synk._code.book import Book
from synk._code.comparisons import Check, Comparisons
from synk._code.facets import Facet, Names, State
from synk._code.parcels import Node
from synk._code.trees import Tree

_LARGE = 5000
"""Only what is of this size takes long enough to compare that the time is measured."""

_NUM_CALLS = 10
_MUCH_NS = 1_000_000
_SHARE = 0.05


class Capture:
    """The captured objects of one function, and how they are compared.

    Parameters
    ----------
    book : Book
    function_id : int
    lookups : sequence of (callable, key, value)
        What else must not change: ``get(key, MISSING) is value``.
    watch : Watch

    Attributes
    ----------
    is_valid : bool
        False once a comparison has found a difference, or the ranks were told of a change that another capture found.
    is_overtaken : bool
        Whether something other than a parcel, such as the items of a map, has brought the ranks some of what this
        compares. The next call brings that again, as it is then.
    named : set of (Node, str)
        The globals that the function and the functions it captured name.
    """

    def __init__(
        self, book: Book, function_id: int, lookups: Sequence[tuple[Callable[..., Any], Any, Any]], watch: Watch
    ) -> None:
        self.is_valid, self.is_overtaken = True, False
        self._watch = watch
        self._size = 0
        self.named = book.named_of(function_id)
        self._checks = self._compile(book, function_id, lookups)

    # -- compiling ----------------------------------------------------------------------------------------------------

    def _compile(
        self, book: Book, function_id: int, lookups: Sequence[tuple[Callable[..., Any], Any, Any]]
    ) -> list[Check]:
        each = Comparisons()
        for lookup in lookups:
            each.expect(*lookup)
        self._add_names(book, function_id, each)
        arrays: list[ArrayContents] = []
        states: list[Facet] = []
        for node in book.nodes_of(function_id):
            node.captures.add(self)
            for facet in node.facets:
                self._size += _size_of(facet)
                if isinstance(facet, ArrayContents):
                    each.add(facet) if facet.is_row else arrays.append(facet)
                elif isinstance(facet, (State, Tree)):
                    states.append(facet)
                elif isinstance(facet, Names):
                    continue
                # Below, what it holds now is what later calls expect. But another thread, or a hook of a pickle, may
                # have changed it since it was packed.
                elif not _is_current(facet):
                    self.is_valid = False
                else:
                    each.add(facet)
        return each.checks() + _array_checks(arrays) + ([lambda: _are_current(states)] if states else [])

    def _add_names(self, book: Book, function_id: int, each: Comparisons) -> None:
        """Add the globals that functions name and the modules that they reach."""
        named: dict[Node, list[str]] = {}
        for node, name in self.named:
            named.setdefault(node, []).append(name)
        for node, names in named.items():
            node.captures.add(self)
            table = node.obj
            facet = node.facets[0]
            # What was told, for the same reason as in ``_compile``; workers make a module's names themselves.
            known = facet.told if isinstance(facet, Names) else table
            for name in names:
                if name in known:
                    each.expect(table.get, name, known[name])
            absent = frozenset(name for name in names if name not in known)
            if absent:
                each.forbid(table.keys(), absent)
            if isinstance(facet, Names) and facet.is_whole:
                each.count(table)
        imports = frozenset(book.imports_of(function_id))
        if imports:
            each.forbid(sys.modules.keys(), imports)
        for module, spec in book.specs_of(function_id):
            each.expect(vars(module).get, "__spec__", spec)

    # -- before each call ---------------------------------------------------------------------------------------------

    def is_current(self) -> bool:
        """Whether no difference is found. Asked at every call; it compares everything, and remembers a difference."""
        began = time.thread_time_ns() if self._size >= _LARGE else 0
        try:
            for check in self._checks if self.is_valid else ():
                if not check():
                    self.is_valid = False
                    break
        except Exception:  # a cell was emptied, or another thread changes a container
            self.is_valid = False
        if began:
            self._watch.note(time.thread_time_ns() - began)
        return self.is_valid and not self.is_overtaken

    def has_changed(self) -> bool:
        """Whether a difference is found while the ranks run the function, with what they were brought meanwhile."""
        return not (self.is_current() or self.is_valid)


class Watch:
    """How long the comparisons of a function take. Warns once where that is much.

    Parameters
    ----------
    wall_ns : callable
        Returns how long the function's calls have taken so far.
    warn : callable
    """

    def __init__(self, wall_ns: Callable[[], int], warn: Callable[[float], None]) -> None:
        self._wall_ns, self._warn = wall_ns, warn
        self._has_warned = False
        self._begin()

    def _begin(self) -> None:
        self._num_calls = self._spent_ns = 0
        self._began_ns = self._wall_ns()

    def note(self, spent_ns: int) -> None:
        """Note the processor time of a comparison; that of a busy machine would be another one each time."""
        if self._has_warned:
            return
        self._num_calls += 1
        self._spent_ns += spent_ns
        taken_ns = self._wall_ns() - self._began_ns
        if taken_ns < 0:  # the profile was reset
            self._begin()
        elif self._num_calls >= _NUM_CALLS:
            mean_ns = self._spent_ns / self._num_calls
            if mean_ns > _MUCH_NS and self._spent_ns > _SHARE * taken_ns:
                self._has_warned = True
                self._warn(mean_ns)


def _size_of(facet: Facet) -> int:
    """Return the cost of comparing a facet, in objects of about 20 ns."""
    if isinstance(facet, ArrayContents):
        return facet.nbytes >> 10
    return _LARGE if isinstance(facet, State) else len(getattr(facet, "told", ()))


def _array_checks(arrays: Sequence[ArrayContents]) -> list[Check]:
    """Return the checks of arrays that fit into no row."""
    tensors = [each for each in arrays if isinstance(each, TensorContents)]
    placed = [each.obj for each in tensors if each.has_address]
    small = [each for each in tensors if each.nbytes and not each.is_large]
    others = [each for each in arrays if each.is_large or not (isinstance(each, TensorContents) and each.has_address)]
    checks: list[Check] = [versions_check(placed)] if placed else []
    if small:
        checks.append(tensor_bytes_check(small))
    return checks + ([lambda: _are_current(others)] if others else [])


def _are_current(facets: Sequence[Facet]) -> bool:
    return all(facet.is_current() for facet in facets)


def _is_current(facet: Facet) -> bool:
    try:
        return facet.is_current()
    except Exception:  # as in Capture.is_current
        return False
