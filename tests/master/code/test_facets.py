"""Facets: a change that may not have arrived everywhere is reported again, until the ranks are told of it."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from synk._master.code.arrays import Contents
from synk._master.code.facets import Elements, Facet, attributes, contents, items


def move_to_end(table: dict[str, int]) -> None:
    table["a"] = table.pop("a")


def kinds(facet: Facet) -> set[str]:
    """An element may be sent again with all the others."""
    return {"elements" if each.kind == "element" else each.kind for each in facet.changes()}


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


def test_forgotten_contents_are_reported_again() -> None:
    array = np.arange(4.0)
    facet = Contents(array)
    facet.note_sent(array.tobytes())
    array[2] = 7
    (change,) = facet.changes()
    facet.tell(change)
    assert facet.is_current()
    facet.forget(change)
    (again,) = facet.changes()
    assert np.array_equal(again.value, [0, 1, 7, 3])


def test_the_shape_of_an_array_of_objects_is_compared() -> None:
    array = np.array([["a", "b"], ["c", "d"], ["e", "f"]], object)
    facet = Elements(array)
    assert facet.is_current() and not facet.changes()
    array.shape = (2, 3)
    assert not facet.is_current()
    (change,) = facet.changes()
    np.testing.assert_array_equal(change.value, array)
    facet.tell(change)
    assert facet.is_current() and not facet.changes()
