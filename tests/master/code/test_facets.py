"""Facets: a change that may not have arrived everywhere is reported again, until the ranks are told of it."""

from __future__ import annotations

import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from synk._master.code import facets
from synk._master.code.arrays import ArrayContents, RawContents, contents_of
from synk._master.code.comparisons import Comparisons
from synk._master.code.facets import Elements, Facet, State, attributes, contents, items


def move_to_end(table: dict[str, int]) -> None:
    table["a"] = table.pop("a")


def kinds(facet: Facet) -> set[str]:
    """An element may be sent again with all the others."""
    return {"elements" if each.kind == "element" else each.kind for each in facet.changes()}


class NeverTrueDict(dict[str, int]):
    def __bool__(self) -> bool:
        return False


class NeverTrueList(list[int]):
    def __bool__(self) -> bool:
        return False


CASES: dict[str, tuple[Callable[[Any], Facet], Any, Callable[[Any], object]]] = {
    "a value": (items, {"a": 1, "b": 2}, lambda table: table.update(a=3)),
    "a new key": (items, {"a": 1}, lambda table: table.update(b=2)),
    "a removed key": (items, {"a": 1, "b": 2}, lambda table: table.pop("a")),
    "the order of a dict": (items, {"a": 1, "b": 2}, move_to_end),
    "the order of an OrderedDict": (items, OrderedDict(a=1, b=2), lambda table: table.move_to_end("a")),
    "an attribute": (attributes, types.SimpleNamespace(a=1), lambda obj: setattr(obj, "a", 2)),
    "a cell": (contents, types.CellType(1), lambda cell: setattr(cell, "cell_contents", 2)),
    "an emptied cell": (contents, types.CellType(1), lambda cell: delattr(cell, "cell_contents")),
    "an element": (Elements, [1, 2, 3], lambda each: each.__setitem__(1, 5)),
    "another length": (Elements, deque((1, 2)), lambda each: each.append(3)),
    "a set": (Elements, {1, 2}, lambda each: each.add(3)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_forgotten_change_is_reported_again(name: str) -> None:
    make, obj, change_it = CASES[name]
    facet = make(obj)
    assert facet.is_current()
    change_it(obj)
    expected = kinds(facet)
    for change in facet.changes():
        facet.tell(change)
    assert facet.is_current()
    facet.forget(change)
    assert not facet.is_current()
    assert kinds(facet) == expected
    for change in facet.changes():
        facet.tell(change)
    assert facet.is_current()


@pytest.mark.parametrize(
    "make, obj, fill",
    [(items, NeverTrueDict(), lambda table: table.update(a=1)), (Elements, NeverTrueList(), lambda e: e.append(1))],
    ids=["dict", "list"],
)
def test_an_empty_container_is_compared_by_its_length_not_by_its_truth(make: Any, obj: Any, fill: Any) -> None:
    for is_counted in (False, True):  # too large for each call, where only lengths are compared
        rows = Comparisons()
        rows.count(obj) if is_counted else rows.add(make(obj))
        checks = rows.checks()
        assert all(check() for check in checks)
        fill(obj)
        assert not all(check() for check in checks)
        obj.clear()


def test_forgotten_contents_are_reported_again() -> None:
    array = np.arange(4.0)
    facet = ArrayContents(array)
    facet.note_sent(array.tobytes())
    array[2] = 7
    (change,) = facet.changes()
    facet.tell(change)
    assert facet.is_current()
    facet.forget(change)
    (again,) = facet.changes()
    assert np.array_equal(again.value, [0, 1, 7, 3])


@pytest.mark.parametrize("obj", [[1], deque([1]), {1}, bytearray(b"1")], ids=lambda obj: type(obj).__name__)
def test_what_comes_while_a_change_is_pickled_is_a_change_of_its_own(obj: Any) -> None:
    """Another thread may add it, or the pickling rule of an element."""
    facet: Facet = RawContents(obj) if isinstance(obj, bytearray) else Elements(obj)
    add = obj.add if isinstance(obj, set) else obj.append
    add(2)
    (change,) = facet.changes()
    add(3)
    facet.tell(change)
    (change,) = facet.changes()
    assert set(change.value) == set(obj)
    facet.tell(change)
    assert facet.is_current() and not facet.changes()


def test_the_shape_of_an_array_of_objects_is_compared() -> None:
    array = np.array([["a", "b"], ["c", "d"], ["e", "f"]], object)
    facet = Elements(array)
    assert facet.is_current() and not facet.changes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        array.shape = (2, 3)
    assert not facet.is_current()
    (change,) = facet.changes()
    np.testing.assert_array_equal(change.value, array)
    facet.tell(change)
    assert facet.is_current() and not facet.changes()


def nine() -> list[int]:
    return [*range(9)]


SHOWN: dict[str, tuple[Callable[[Any], Facet], Callable[[], Any], Callable[[Any], object], bool]] = {
    "an element": (Elements, nine, lambda each: each.__setitem__(5, 0), False),
    "three elements for two": (Elements, nine, lambda each: each.__setitem__(slice(5, 7), "abc"), False),
    "an element, and one more": (Elements, nine, lambda each: each.__setitem__(5, 0) or each.append(1), False),
    "one more at the end": (Elements, nine, lambda each: each.append(1), True),
    "one more at the beginning": (Elements, lambda: deque(nine()), lambda each: each.appendleft(1), True),
    "some taken out": (Elements, nine, lambda each: each.__delitem__(slice(2, 5)), True),
    "a queue that has moved on": (Elements, lambda: deque(nine()), lambda each: each.append(each.popleft()), False),
    "another order": (Elements, nine, lambda each: each.reverse(), False),
    "one more in a set": (Elements, lambda: set(nine()), lambda each: each.add(100), True),
    "another in a set": (Elements, lambda: set(nine()), lambda each: each.remove(3) or each.add(100), False),
    "another, and one more": (Elements, lambda: set(nine()), lambda each: each.remove(3) or each.update("ab"), False),
    "an item": (items, lambda: dict.fromkeys(nine()), lambda table: table.update({3: 1}), False),
    "one more item": (items, lambda: dict.fromkeys(nine()), lambda table: table.update({30: 1}), True),
    "an item, and one more": (items, lambda: dict.fromkeys(nine()), lambda table: table.update({3: 1, 30: 1}), False),
    "an item less": (items, lambda: dict.fromkeys(nine()), lambda table: table.pop(3), True),
    "an attribute": (attributes, lambda: types.SimpleNamespace(a=1), lambda obj: setattr(obj, "b", 2), False),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_a_change_shows_where_lengths_alone_are_compared(name: str) -> None:
    make, make_obj, change_it, is_shown = SHOWN[name]
    facet = make(make_obj())
    change_it(facet.obj)
    assert facet.shows() is is_shown
    changes = facet.changes()
    assert changes
    for change in changes:
        facet.tell(change)
    facet.forget(change)
    assert facet.shows()  # what is sent again because some ranks may lack it has been seen already


def test_the_cost_of_a_first_comparison_that_imports_does_not_count(monkeypatch: Any) -> None:
    class Counted:
        pass

    obj, costs_ns = Counted(), iter([5_000_000, 7_000, 9_000, 6_000, 8_000, 9_000])
    state = State(obj, lambda each: (Counted, (), {}), (Counted, (), {}))
    now_ns = 0

    def thread_time_ns() -> int:
        nonlocal is_end, now_ns
        if is_end:
            now_ns += next(costs_ns)
        is_end = not is_end
        return now_ns

    is_end = False
    monkeypatch.setattr(facets.time, "thread_time_ns", thread_time_ns)
    assert state.measure()
    assert state.cost_ns == 6_000 and not state.is_slow


def of_torch(array: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(array)


@pytest.mark.parametrize("make", [np.asarray, of_torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("form", ["C", "F", "with gaps"])
@pytest.mark.parametrize("count", [12, 60_000])
def test_what_is_written_while_a_copy_is_sent_is_reported(make: Callable[[Any], Any], form: str, count: int) -> None:
    """The ranks were told of the copy, not of what the array holds when that is noted."""
    whole = np.zeros((count, 4))
    memory = whole[:, ::2] if form == "with gaps" else np.asarray(whole, order=form)  # type: ignore[call-overload]
    facet = contents_of(make(memory))
    assert facet is not None
    facet.note_sent(facet.raw())
    memory[1, 1] = 1
    (change,) = facet.changes() or [facet.change()]  # of a large one, samples need not show it
    memory[1, 1] = 2  # by another thread
    facet.tell(change)
    if not (make is of_torch and form != "C"):  # what lies between the elements of a tensor is not in its copy
        assert not facet.is_current()
    facet.tell(facet.change())
    assert facet.is_current()
