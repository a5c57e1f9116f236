"""Whether what a function captured is still what the ranks were told, asked before each call.

Most of it is compared each time, by a few loops that run in C. What is too large for that is compared in turn, a part
of it at each call; what is slow to compare, when the function's calls have taken enough time. What is found so late
that calls have used the old contents meanwhile is an error. In one file because what is compiled must be read beside
what runs.
"""

from __future__ import annotations

import gc
import itertools
import operator
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from synk._master.code.arrays import WINDOW_NBYTES, Contents, TensorContents, versions_of
from synk._master.code.book import Book
from synk._master.code.facets import (
    FUNCTION_PARTS,
    MISSING,
    Elements,
    Facet,
    Names,
    State,
    Table,
    base_of,
    slot,
    slots_of,
    table_of,
)
from synk._master.code.modules import globals_in, is_users_module
from synk._master.code.parcels import Node
from synk._pure.interrupts import is_from_handler

MAX_SIZE = 1000
"""How many objects are compared at each call."""

MAX_ARRAYS = 256
"""How many arrays are."""

WINDOW_SIZE = 256
"""How many of the other objects are compared at each call, in turn."""

MAX_STATES_NS = 300_000
"""How long the comparisons of objects with a rule of their own may take at each call."""

_OVERHEAD_NBYTES = 1 << 13
"""What an array costs besides its bytes, in bytes."""

_FEW = 16

_SHARE = 0.05
"""Of the time of a function's calls: the most that slow comparisons take."""


class InTurn:
    """A facet that is compared in turn.

    Attributes
    ----------
    known_at : int
        The call before which all of it was last known to be equal.
    """

    def __init__(self, node: Node, facet: Facet) -> None:
        self.node, self.facet = node, facet
        self.known_at = self._began_at = 0
        self.is_done = True
        self._pairs: Any = None
        self._num_unseen = getattr(facet, "num_unseen", 0)

    def was_unseen(self) -> bool:
        """Whether another function has found a change of it since; asked once for each."""
        before, self._num_unseen = self._num_unseen, getattr(self.facet, "num_unseen", 0)
        return bool(before != self._num_unseen)

    def step(self, call: int, size: int) -> tuple[bool, int]:
        """Compare the next part; return whether it is equal, and how much of ``size`` it has taken."""
        facet = self.facet
        if isinstance(facet, Contents):
            is_equal, taken = facet.window(size)
            taken += _OVERHEAD_NBYTES
            self.is_done = not facet.at
        elif facet.size <= WINDOW_SIZE:
            is_equal, taken, self.is_done = facet.is_current(), facet.size + 8, True
        else:
            is_equal, taken, self.is_done = self._step(size)
        if is_equal and self.is_done:
            self.known_at, self._began_at = self._began_at, call
        return is_equal, taken

    def _step(self, size: int) -> tuple[bool, int, bool]:
        facet: Any = self.facet
        if self._pairs is None:
            if isinstance(facet, Table):
                now: Any = facet.obj if isinstance(facet.obj, dict) else facet.read()
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
        is_done = len(part) < size or not is_equal
        if is_done:
            self._pairs = None
        return is_equal, size, is_done


class Ring(list[InTurn]):
    """Facets that are compared in turn, so much of them at each call."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self.budget = budget
        self.next = 0


class Capture:
    """What one function captures: rows of the same kind of comparison, each of which is one loop in C.

    It has as many attributes as there are kinds of comparison, and nothing that it compares is kept anywhere else.

    Parameters
    ----------
    book : Book
    function_id : int
    lookups : sequence of (callable, key, value)
        What else is to be as it was: ``get(key, MISSING) is value``.
    wall_ns : callable
        Returns how long the function's calls have taken so far.

    Attributes
    ----------
    is_valid : bool
        Whether the ranks have been told of nothing since that it does not know.
    named : set of (Node, str)
        The globals that the functions name.
    late : (object, int) or None
        What was found to differ, and how many calls may have used its old contents.
    suspect : object
        What is rebuilt from something else than it was, as far as was found when there was time; None for nothing.
    """

    def __init__(
        self,
        book: Book,
        function_id: int,
        lookups: Sequence[tuple[Callable[..., Any], Any, Any]],
        wall_ns: Callable[[], int],
        before: Capture | None,
    ) -> None:
        self.is_valid = True
        self.named: set[tuple[Node, str]] = set()
        self.late: tuple[Any, int] | None = None
        self.suspect: Any = None
        self._wall_ns = wall_ns
        self._num_looks: int = (before._num_looks if before is not None else 0) + 1
        self._spent_ns: int = before._spent_ns if before is not None else 0
        self._lookups = list(lookups)
        self._missing: list[tuple[Any, frozenset[str]]] = []
        self._reads: list[tuple[Any, str, Any]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._unset: list[tuple[Any, str]] = []
        self._objects: list[Any] = []
        self._containers: list[Any] = []
        self._keyed: list[Any] = []
        self._sized: list[Any] = []
        self._empty: list[Any] = []
        self._small: list[tuple[Callable[[], bytes], Any, Any, Any, Any]] = []
        self._arrays: list[Contents] = []
        self._states: list[State] = []
        self._rings = Ring(WINDOW_SIZE), Ring(WINDOW_NBYTES)
        self._in_turn: list[InTurn] = []
        self._tensors: list[Any] = []
        self._slow: list[tuple[Node, State]] = []
        self._next_slow = 0
        self._compile(book, function_id)
        for each in self._in_turn:
            self._rings[isinstance(each.facet, Contents)].append(each)
        self._types = list(map(type, self._objects))
        self._values = list(itertools.chain.from_iterable(self._containers))
        self._addresses = _addresses(self._values, len(self._values)) if len(self._values) > _FEW else b""
        self._holders = [holder for holder, _, _ in self._slots]
        self._slot_names = [name for _, name, _ in self._slots]
        self._slot_values = [value for _, _, value in self._slots]
        self._versions = versions_of(self._tensors)
        self._keys = list(itertools.chain.from_iterable(self._keyed))
        self._key_addresses = _addresses(self._keys, len(self._keys)) if len(self._keys) > _FEW else b""
        self._sized += self._containers
        self._lengths = list(map(len, self._sized))
        checks = (
            (self._sized, Capture._are_containers_same),
            (self._keyed, Capture._are_keys_same),
            (self._objects, Capture._are_objects_same),
            (self._tensors, Capture._are_tensors_same),
            (self._arrays, Capture._are_arrays_same),
            (self._states, Capture._are_states_same),
        )
        self._checks = [check for needed, check in checks if needed]
        known = {id(each.facet): each.known_at for each in before._in_turn} if before is not None else {}
        for each in self._in_turn:
            each.known_at = each._began_at = known.get(id(each.facet), self._num_looks)

    # -- compiling ----------------------------------------------------------------------------------------------------

    def _compile(self, book: Book, function_id: int) -> None:
        self._add_names(book, function_id)
        size = 0
        states: list[tuple[Node, State]] = []
        for node in book.nodes_of(function_id):
            node.captures.add(self)
            for facet in node.facets:
                if isinstance(facet, Contents):
                    self._add_array(node, facet)
                elif isinstance(facet, State):
                    states.append((node, facet))
                elif not isinstance(facet, Names):
                    size += facet.size
                    self._add(facet) if size <= MAX_SIZE else self._add_in_turn(node, facet)
        left_ns = MAX_STATES_NS
        for node, state in sorted(states, key=lambda pair: pair[1].cost_ns):
            left_ns -= state.cost_ns
            if not state.is_generator and (state.is_slow or left_ns < 0):
                self._slow.append((node, state))
            else:
                self._states.append(state)

    def _add_names(self, book: Book, function_id: int) -> None:
        """Add the globals that the functions name, and the modules that they reach."""
        named: dict[Node, list[str]] = {}
        self.named = book.named_of(function_id)
        for node, name in self.named:
            named.setdefault(node, []).append(name)
        for node, names in named.items():
            node.captures.add(self)
            table = node.obj
            self._lookups += [(table.get, name, table[name]) for name in names if name in table]
            missing = frozenset(name for name in names if name not in table)
            if missing:
                self._missing.append((table.keys(), missing))
            if isinstance(node.facets[0], Names) and node.facets[0].is_whole:
                self._sized.append(table)
        imports = frozenset(book.imports_of(function_id))
        if imports:
            self._missing.append((sys.modules.keys(), imports))
        self._lookups += [(vars(module).get, "__spec__", spec) for module, spec in book.specs_of(function_id)]

    def _add_in_turn(self, node: Node, facet: Facet) -> None:
        self._in_turn.append(InTurn(node, facet))
        if isinstance(facet, Elements):
            self._sized.append(facet.iterable)
        elif isinstance(facet.obj, dict):
            self._sized.append(facet.obj)

    def _add_array(self, node: Node, facet: Contents) -> None:
        if len(self._arrays) + len(self._small) >= MAX_ARRAYS and not isinstance(facet, TensorContents):
            self._in_turn.append(InTurn(node, facet))
            return
        if type(facet) is Contents and not facet.is_large and facet.order == "C":
            obj = facet.obj
            self._small.append((obj.tobytes, facet.told, obj, obj.dtype, obj.shape))
        elif isinstance(facet, TensorContents):
            self._tensors.append(facet.obj) if facet.has_address else self._arrays.append(facet)
        else:
            self._arrays.append(facet)
        if facet.is_large or (isinstance(facet, TensorContents) and facet.nbytes):
            self._in_turn.append(InTurn(node, facet))

    def _add(self, facet: Any) -> None:
        obj: Any = facet.obj
        if isinstance(facet, Elements):
            self._add_container(facet.iterable)
        elif isinstance(obj, types.CellType):
            value = facet.told.get("", MISSING)
            if value is MISSING:
                self._lookups.append((_contents_of(obj), "", MISSING))
            else:
                self._reads.append((obj, "cell_contents", value))
        elif isinstance(obj, dict) and facet.kind == "item":
            self._add_table(obj)
        elif isinstance(obj, types.FunctionType):
            self._reads += [(obj, name, getattr(obj, name)) for name in (*FUNCTION_PARTS, "__dict__")]
            self._add_table(obj.__dict__)
        elif isinstance(obj, type):
            self._add_table(vars(obj))
            self._reads.append((obj, "__bases__", obj.__bases__))
        elif "default_factory" in facet.told and isinstance(obj, defaultdict):
            self._reads.append((obj, "default_factory", obj.default_factory))
        else:
            self._objects.append(obj)
            table = table_of(obj)
            if table is not None:
                self._slots.append((obj, "__dict__", table))
                self._add_table(table)
            slots = [(name, slot(obj, name)) for name in slots_of(type(obj))]
            self._slots += [(obj, name, value) for name, value in slots if value is not MISSING]
            self._unset += [(obj, name) for name, value in slots if value is MISSING]

    def _add_container(self, container: Any) -> None:
        if len(container):
            self._containers.append(container)
        else:
            self._empty.append(container)

    def _add_table(self, table: Any) -> None:
        if not len(table):
            self._empty.append(table)
        elif isinstance(table, dict):
            base = base_of(table)
            self._containers.append(base.values(table))
            self._keyed.append(base.keys(table))
        else:
            self._containers.append(table.values())
            self._keyed.append(table.keys())

    # -- before each call ---------------------------------------------------------------------------------------------

    def is_current(self, *, has_turns: bool = True) -> bool:  # noqa: C901  # one loop for each kind
        """Whether nothing is seen to differ. Asked at every call, so it does nothing but compare.

        ``has_turns``: also compare the next part of what is compared in turn.
        """
        try:
            for get, key, value in self._lookups:
                if get(key, MISSING) is not value:
                    return self._end()
            for holder, name, value in self._reads:
                if getattr(holder, name) is not value:
                    return self._end()
            for keys, missing in self._missing:
                if not keys.isdisjoint(missing):
                    return self._end()
            for tobytes, told, array, dtype, shape in self._small:
                if tobytes() != told or array.dtype is not dtype or array.shape != shape:
                    return self._end()
            if self._checks and not all(check(self) for check in self._checks):
                return self._end()
            if any(self._empty) or not self.is_valid:
                return self._end()
        except Exception as error:  # a cell that was emptied, a container that another thread changes
            if is_from_handler(error):
                raise
            return self._end()
        if has_turns and (self._in_turn or self._slow):
            self._num_looks += 1
            self.is_valid = self._look_in_turn()
        return self.is_valid

    def _end(self) -> bool:
        """Note that something differs: a later one is to take its place."""
        self.is_valid = False
        for each in filter(InTurn.was_unseen, self._in_turn):
            if self._num_looks > each.known_at:
                self.late = each.node.obj, self._num_looks - each.known_at
        return False

    def _are_containers_same(self) -> bool:
        if list(map(len, self._sized)) != self._lengths:
            return False
        now = itertools.chain.from_iterable(self._containers)
        if self._addresses:
            return _addresses(now, len(self._values)) == self._addresses
        return all(map(operator.is_, now, self._values))

    def _are_keys_same(self) -> bool:
        now = itertools.chain.from_iterable(self._keyed)
        if self._key_addresses:
            return _addresses(now, len(self._keys)) == self._key_addresses
        return all(map(operator.is_, now, self._keys))

    def _are_objects_same(self) -> bool:
        if not all(map(operator.is_, map(type, self._objects), self._types)):
            return False
        if not all(map(operator.is_, map(_attribute, self._holders, self._slot_names), self._slot_values)):
            return False
        return not any(slot(holder, name) is not MISSING for holder, name in self._unset)

    def _are_tensors_same(self) -> bool:
        return versions_of(self._tensors) == self._versions

    def _are_arrays_same(self) -> bool:
        return all(array.glance() for array in self._arrays)

    def _are_states_same(self) -> bool:
        return all(state.is_current() for state in self._states)

    def _look_in_turn(self) -> bool:
        """Compare the next part of what is compared in turn."""
        for ring in self._rings:
            left = ring.budget
            for _ in range(len(ring)):
                each = ring[ring.next]
                is_equal, taken = each.step(self._num_looks, left)
                if not is_equal:
                    self._note_late(each)
                    return False
                if each.is_done:
                    ring.next = (ring.next + 1) % len(ring)
                left -= taken
                if left <= 0:
                    break
        return not self._slow or self._is_slow_one_same()

    def _note_late(self, each: InTurn) -> None:
        each.facet.doubt()
        num_calls = self._num_looks - 1 - each.known_at
        if num_calls > 0:
            self.late = each.node.obj, num_calls

    def _is_slow_one_same(self) -> bool:
        """Compare one more object of those that are slow to compare, if the calls have taken time enough for it."""
        node, facet = self._slow[self._next_slow]
        if self._spent_ns + facet.cost_ns > _SHARE * self._wall_ns():
            return True
        self._next_slow = (self._next_slow + 1) % len(self._slow)
        began = time.perf_counter_ns()
        is_equal = facet.is_current()
        self._spent_ns += time.perf_counter_ns() - began
        if not is_equal:
            facet.is_due = True
            self.suspect = node.obj
        return is_equal

    # -- on demand ----------------------------------------------------------------------------------------------------

    def doubtful(self) -> list[tuple[Any, int]]:
        """Compare everything in full; return what had changed unseen, with the calls that may have used old contents.

        What is seen at each call is none of these.
        """
        found = []
        for each in self._in_turn:
            if not _is_current(each.facet) and not (isinstance(each.facet, Contents) and not each.facet.glance()):
                each.facet.doubt()
                found.append((each.node.obj, self._num_looks - each.known_at))
        is_seen = not self.is_current(has_turns=False)  # the next call compares, and finds whatever follows from that
        for node, facet in self._slow:
            if not _is_current(facet):
                facet.is_due = True
                if not is_seen:
                    self.suspect = node.obj
                    found.append((node.obj, 0))
        self.is_valid = self.is_valid and not found
        return found


_attribute = object.__getattribute__


def _addresses(values: Iterable[Any], count: int) -> bytes:
    """Return the addresses of objects, one after the other; the fastest way there is to compare many by identity."""
    return np.fromiter(values, object, count).tobytes()


def _is_current(facet: Facet) -> bool:
    try:
        return facet.is_current()
    except Exception:  # as in a call
        return False


def _contents_of(cell: types.CellType) -> Callable[[str, Any], Any]:
    def get(name: str, default: Any) -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return default

    return get


def place_of(fn: Any, obj: Any) -> str:
    """Return how a function's code would write an object that it captured: ``config["rates"]``; else its type."""
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = list(_named_by(fn))
    for _ in range(20_000):
        if not pending:
            break
        place, value = pending.pop(0)
        if value is obj:
            return place
        if id(value) in seen or isinstance(value, (str, bytes, int, float, type(None))):
            continue
        seen.add(id(value))
        pending += [(place + step, each) for step, each in _held_by(value)]
    return f"of type {type(obj).__name__}"


def _named_by(fn: Any) -> Iterable[tuple[str, Any]]:
    fn = getattr(fn, "func", fn)
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        yield "self", owner
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, types.FunctionType):
        yield "self", fn
        return
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
        yield name, _contents_of(cell)("", None)
    for name in sorted(globals_in(fn.__code__)):
        if name in fn.__globals__:
            yield name, fn.__globals__[name]
    for name, value in (fn.__kwdefaults__ or {}).items():
        yield name, value
    for value in fn.__defaults__ or ():
        yield "a default", value


def _held_by(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", each) for key, each in list(dict.items(value))]
    if isinstance(value, (list, tuple)):
        return [(f"[{place}]", each) for place, each in enumerate(value)]
    if isinstance(value, types.FunctionType):
        return [("", each) for _, each in _named_by(value)]
    if isinstance(value, types.ModuleType):
        return (
            [(f".{name}", each) for name, each in list(vars(value).items())] if is_users_module(value.__name__) else []
        )
    if isinstance(value, np.ndarray):
        return [(f"[{place}]", each) for place, each in enumerate(value.flat)] if value.dtype.hasobject else []
    found = [(f".{name}", each) for name, each in list((table_of(value) or {}).items())]
    found += [(f".{name}", slot(value, name)) for name in slots_of(type(value))]
    return found + [("", each) for each in gc.get_referents(value)]  # of C, or a class: at least the name it is under
