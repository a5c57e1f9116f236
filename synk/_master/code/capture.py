"""Whether what a function captured is still what the ranks were told. Asked before each call.

Most objects are compared each time, row by row. What is too large for that is compared in turns. What is slow to
compare is compared now and then, so that it takes a small share of the time of the function's calls. A change that is
found only after calls have used the old contents is an error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from synk._master.code.arrays import (
    WINDOW_NBYTES,
    ArrayContents,
    TensorContents,
    tensor_bytes_check,
    versions_check,
)
from synk._master.code.book import Book
from synk._master.code.comparisons import Check, Comparisons, size_of
from synk._master.code.facets import Elements, Facet, Names, State
from synk._master.code.parcels import Node
from synk._master.code.turns import GroupTurn, Ring, Turn, Walk, Windows
from synk._pure.interrupts import is_from_handler

MAX_SIZE = 1000
"""How many objects are compared at every call; the others in turns."""

MAX_ARRAYS = 256
"""How many arrays are compared at every call; the others in turns."""

WINDOW_SIZE = 256
"""How many of the objects that are compared in turns have their turn at one call."""

MAX_STATES_NS = 300_000
"""How much time of each call may go into objects with a pickling rule of their own; the others count as slow."""

_SHARE = 0.05
"""The largest share of the time of a function's calls that slow comparisons take."""


class Capture:
    """The captured objects of one function, and how they are compared.

    Parameters
    ----------
    book : Book
    function_id : int
    lookups : sequence of (callable, key, value)
        What else must not change: ``get(key, MISSING) is value``.
    wall_ns : callable
        Returns how long the function's calls have taken so far.
    before : Capture or None
        The capture that this one replaces.
    is_refreshed : bool
        Whether the program has said that something was changed, and everything has been compared in full.

    Attributes
    ----------
    is_valid : bool
        False once a comparison has found a difference, or the ranks were told of a change that another capture found.
    is_overtaken : bool
        Whether something other than a parcel, such as the items of a map, has brought the ranks some of what this
        compares. The next call brings that again, as it is then.
    named : set of (Node, str)
        The globals that the function and the functions it captured name.
    late : (object, int) or None
        An object that was found to differ, and how many calls may have used its old contents.
    perhaps_late : (object, int) or None
        An object that an update found changed in a place no call compares: either it was changed only now, or that
        many calls may have used its old contents.
    slow_change : object
        A slow object whose occasional comparison found a difference, or None.
    """

    def __init__(
        self,
        book: Book,
        function_id: int,
        lookups: Sequence[tuple[Callable[..., Any], Any, Any]],
        wall_ns: Callable[[], int],
        before: Capture | None,
        *,
        is_refreshed: bool,
    ) -> None:
        self.is_valid, self.is_overtaken = True, False
        self.named = book.named_of(function_id)
        self.late: tuple[Any, int] | None = None
        self.perhaps_late: tuple[Any, int] | None = None
        self.slow_change: Any = None
        self._wall_ns = wall_ns
        self._num_calls: int = (before._num_calls if before is not None else 0) + 1
        self._spent_ns: int = before._spent_ns if before is not None else 0
        self._slow: list[tuple[Node, State]] = []
        self._next_slow = 0
        self._rings = Ring(WINDOW_SIZE), Ring(WINDOW_NBYTES)
        self._checks = self._compile(book, function_id, lookups)
        self._has_turns = bool(self._rings[0] or self._rings[1] or self._slow)
        known = {}
        if before is not None and not is_refreshed:
            self.perhaps_late = next(before._unseen(before._turns()), None)
            windows = [turn for turn in before._rings[1] if isinstance(turn, Windows)]  # the rest was compared just now
            known = {id(turn.facet): turn.known_at for turn in windows}
        for turn in self._turns():
            turn.begin(min(known.get(id(facet), self._num_calls) for _, facet in turn.members))
        if before is not None:
            for ring, old in zip(self._rings, before._rings):
                ring.go_on_after(old)

    def _turns(self) -> Iterable[Turn]:
        return (turn for ring in self._rings for turn in ring)

    def _unseen(self, turns: Iterable[Turn]) -> Iterator[tuple[Any, int]]:
        """Return what an update, of this function or of another one, has found changed that the turns had missed."""
        for turn in turns:
            if turn.was_unseen() and self._num_calls > turn.known_at:
                yield turn.members[0][0].obj, self._num_calls - turn.known_at

    # -- compiling ----------------------------------------------------------------------------------------------------

    def _compile(
        self, book: Book, function_id: int, lookups: Sequence[tuple[Callable[..., Any], Any, Any]]
    ) -> list[Check]:
        each = Comparisons()
        for lookup in lookups:
            each.expect(*lookup)
        self._add_names(book, function_id, each)
        rest: list[tuple[Node, Facet]] = []
        arrays: list[tuple[Node, ArrayContents]] = []
        states: list[tuple[Node, State]] = []
        left = MAX_SIZE  # a container that is too large for it leaves it to those behind
        for node in book.nodes_of(function_id):
            node.captures.add(self)
            for facet in node.facets:
                if isinstance(facet, ArrayContents):
                    arrays.append((node, facet))
                elif isinstance(facet, State):
                    states.append((node, facet))
                elif isinstance(facet, Names):
                    continue
                # Below, what it holds now is what later calls expect. But another thread, or a hook of a pickle, may
                # have changed it since it was packed.
                elif not _is_current(facet):
                    self.is_valid = False
                elif size_of(facet) <= left:
                    left -= size_of(facet)
                    each.add(facet)
                else:
                    rest.append((node, facet))
        unfit = self._add_arrays(arrays, each, rest)
        self._add_in_turn(rest, each)
        return each.checks() + unfit + self._add_states(states)

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

    def _add_arrays(
        self, arrays: Sequence[tuple[Node, ArrayContents]], each: Comparisons, rest: list[tuple[Node, Facet]]
    ) -> list[Check]:
        """Add arrays to the rows and to the turns. Return the checks that fit into no row."""
        num_left = MAX_ARRAYS
        glanced: list[ArrayContents] = []
        tensors: list[Any] = []
        small: list[tuple[Node, TensorContents]] = []
        for node, facet in arrays:
            is_in_windows = facet.is_large
            if isinstance(facet, TensorContents):
                tensors.append(facet.obj) if facet.has_address else glanced.append(facet)
                if facet.nbytes and not facet.is_large:
                    small.append((node, facet))
            else:
                num_left -= 1
                if facet.is_row:
                    each.add(facet) if num_left >= 0 else rest.append((node, facet))
                elif num_left >= 0:
                    glanced.append(facet)
                else:
                    is_in_windows = True
            if is_in_windows:
                self._rings[1].append(Windows(node, facet))
        checks: list[Check] = []
        if tensors:
            checks.append(versions_check(tensors))
        for position, members in enumerate(_portions(small, WINDOW_NBYTES, lambda facet: facet.nbytes)):
            check = tensor_bytes_check([facet for _, facet in members])
            if not position:
                checks.append(check)
            else:
                size = sum(facet.nbytes for _, facet in members)
                self._rings[1].append(GroupTurn(members, [check], size))
        if glanced:
            checks.append(lambda: all(facet.glance() for facet in glanced))
        return checks

    def _add_in_turn(self, rest: Sequence[tuple[Node, Facet]], each: Comparisons) -> None:
        """Add turns: a walk for each large container, groups for the rest. Their lengths are compared at each call."""
        small = [(node, facet) for node, facet in rest if facet.size <= WINDOW_SIZE]
        for members in _portions(small, WINDOW_SIZE, size_of):
            rows = Comparisons()
            for member in members:
                rows.add(member[1])
            size = sum(size_of(facet) for _, facet in members)
            self._rings[0].append(GroupTurn(members, rows.checks(), size))
        self._rings[0].extend(Walk(node, facet) for node, facet in rest if facet.size > WINDOW_SIZE)
        for _, facet in rest:
            if isinstance(facet, Elements):
                each.count(facet.iterable)
            elif isinstance(facet.obj, dict):
                each.count(facet.obj)

    def _add_states(self, states: Sequence[tuple[Node, State]]) -> list[Check]:
        left_ns = MAX_STATES_NS
        quick: list[State] = []
        for node, state in sorted(states, key=lambda pair: pair[1].cost_ns):
            left_ns -= state.cost_ns
            if not state.is_generator and (state.is_slow or left_ns < 0):
                self._slow.append((node, state))
            else:
                quick.append(state)
        return [lambda: all(state.is_current() for state in quick)] if quick else []

    # -- before each call ---------------------------------------------------------------------------------------------

    def is_current(self, *, has_turns: bool = True) -> bool:
        """Whether no difference is found. Asked at every call; it compares, and remembers what differs.

        ``has_turns``: also compare the next part of what is compared in turns or now and then.
        """
        try:
            for check in self._checks:
                if not check():
                    self.is_valid = False
                    break
        except Exception as error:  # a cell was emptied, or another thread changes a container
            if is_from_handler(error):
                raise
            self.is_valid = False
        if not self.is_valid:
            return self._end(has_turns=has_turns)
        if has_turns and self._has_turns:
            self._num_calls += 1
            self.is_valid = self._look_in_turn()
        return self.is_valid and not self.is_overtaken

    def has_changed(self) -> bool:
        """Whether a difference is found while the ranks run the function, with what they were brought meanwhile."""
        return not (self.is_current() or self.is_valid)

    def _end(self, *, has_turns: bool) -> bool:
        """Note a change that calls have missed, if any, before a new capture replaces this one. Return False.

        Large arrays have their turn here, too: what changes before each call must not keep them from it.
        """
        self.late = next(self._unseen(self._rings[1]), self.late)
        if has_turns and self._rings[1]:
            call = self._num_calls + 1  # the new capture counts it
            turn = self._rings[1].look(call, is_left_out=_is_seen_at_once)
            if turn is not None:
                self._note_late(turn, call)
        return False

    def _look_in_turn(self) -> bool:
        """Compare the next parts, and perhaps one slow object. Return whether they are unchanged."""
        for ring in self._rings:
            turn = ring.look(self._num_calls)
            if turn is not None:
                self._note_late(turn, self._num_calls)
                return False
        return not self._slow or self._is_slow_one_same()

    def _note_late(self, turn: Turn, call: int) -> None:
        num_calls = call - 1 - turn.known_at
        for node, facet in turn.members:
            if isinstance(turn, Windows) or not _is_current(facet):
                facet.note_unseen()
                if num_calls > 0:
                    self.late = node.obj, num_calls
        turn.begin(call)

    def _is_slow_one_same(self) -> bool:
        """Compare the next slow object if the calls have taken enough time for that. Return False if it differs."""
        node, facet = self._slow[self._next_slow]
        if self._spent_ns + facet.cost_ns > _SHARE * self._wall_ns():
            return True
        self._next_slow = (self._next_slow + 1) % len(self._slow)
        began = time.perf_counter_ns()
        is_equal = facet.is_current()
        self._spent_ns += time.perf_counter_ns() - began
        if not is_equal:
            facet.is_due = True
            self.slow_change = node.obj
        return is_equal

    # -- on demand ----------------------------------------------------------------------------------------------------

    def unseen_changes(self) -> list[tuple[Any, int]]:
        """Compare everything in full. Return objects that changed unseen, each with the number of calls at risk.

        Those calls may have used the old contents. What every call compares anyway is not among the objects.
        """
        found = [*self._unseen(self._turns())]
        for turn in self._turns():
            for node, facet in turn.members:
                is_shown = not facet.glance() if isinstance(facet, ArrayContents) else facet.shows()
                if not _is_current(facet) and not is_shown:
                    facet.note_unseen()
                    found.append((node.obj, self._num_calls - turn.known_at))
            turn.begin(self._num_calls)
        is_seen = not self.is_current(has_turns=False)  # then the next call updates, and that compares slow objects
        for node, facet in self._slow:
            if not _is_current(facet):
                facet.is_due = True
                if not is_seen:
                    self.slow_change = node.obj
                    found.append((node.obj, 0))
        self.is_valid = self.is_valid and not found
        return found


def _is_seen_at_once(turn: Turn) -> bool:
    """Whether an array differs in what every call compares: then no call has missed the change."""
    return isinstance(turn, Windows) and not turn.facet.glance()


def _is_current(facet: Facet) -> bool:
    try:
        return facet.is_current()
    except Exception as error:  # as in Capture.is_current
        if is_from_handler(error):
            raise
        return False


def _portions(members: Sequence[Any], most: int, size: Callable[[Any], int]) -> list[list[Any]]:
    """Return members in portions of at most a total size, but at least one member in each."""
    portions: list[list[Any]] = []
    left = 0
    for member in members:
        left -= size(member[1])
        if left < 0 or not portions:
            portions.append([])
            left = most - size(member[1])
        portions[-1].append(member)
    return portions
