"""Recipes of pickles that were kept, and those made later: a copy is alike, a change of any part is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from synk._pure.alike import alike, kept


def keep(recipe: Any) -> Any:
    return kept(recipe, recipe, lambda part: None)


class Held:
    """An object of the program: it counts by identity."""


HELD, OTHER = Held(), Held()

RECIPES: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "numbers": (lambda: (1, 2.5, True, None, 1j), [(1, 2.5, True, None), (1, 2.5, 1, None, 1j)]),
    "text": (lambda: ("a", b"b"), [("a", b"c"), (b"a", b"b")]),
    "a list": (lambda: [1, [2, 3]], [[1, [2, 4]], [1, (2, 3)], [1, [2, 3], 4]]),
    "a dict": (
        lambda: {"a": 1, "b": {"c": [2]}},
        [{"b": {"c": [2]}, "a": 1}, {"a": 1, "b": {"c": [3]}}, {"a": 1}],
    ),
    "an object": (lambda: (HELD, [HELD]), [(OTHER, [HELD]), (HELD, [OTHER])]),
    "many objects": (lambda: [HELD] * 20, [[HELD] * 19 + [OTHER], [HELD] * 19]),
    "an array": (
        lambda: [np.arange(6.0)],
        [
            [np.arange(6.0) + 1],
            [np.arange(6)],
            [np.arange(6.0).reshape(2, 3)],
            [np.arange(6.0).tolist()],
        ],
    ),
    "a number of NumPy": (lambda: [np.float64(1)], [[np.float64(2)], [np.float32(1)]]),
    "a set": (lambda: {"a", "b"}, [{"a"}, frozenset("ab")]),
    "bytes that change": (lambda: [bytearray(b"ab")], [[bytearray(b"ac")], [b"ab"]]),
    "a slice": (lambda: (slice(1, 2), 3), [(slice(1, 3), 3)]),
}


def test_the_same_again_is_alike_and_a_change_is_not(subtests: Any) -> None:
    for name, (make, changes) in RECIPES.items():
        with subtests.test(name=name):
            told = keep(make())
            assert alike(told, make())
            assert not any(alike(told, change) for change in changes)
    for recipe, change in (([1, [2]], lambda r: r[1].append(4)), ([np.zeros(2)], lambda r: r[0].fill(7))):
        told, before = keep(recipe), copy.deepcopy(recipe)
        change(recipe)  # what is kept does not change with its object
        assert alike(told, before) and not alike(told, recipe)


def test_nan_is_itself_and_a_nest_that_holds_itself_ends() -> None:
    nan = float("nan")
    assert alike(keep([nan]), [nan])
    endless: list[Any] = []
    endless.append(endless)
    alike(keep(endless), endless)
