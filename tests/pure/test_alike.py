"""Recipes of pickles that were kept, and those made later: a copy is alike, a change of any part is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from synk._pure.alike import alike, keep


class Held:
    """An object of the program: it counts by identity."""


HELD, OTHER = Held(), Held()

RECIPES: dict[str, tuple[Callable[[], Any], list[Callable[[Any], Any]]]] = {
    "numbers": (lambda: (1, 2.5, True, None, 1j), [lambda r: (1, 2.5, True, None), lambda r: (1, 2.5, 1, None, 1j)]),
    "text": (lambda: ("a", b"b"), [lambda r: ("a", b"c"), lambda r: (b"a", b"b")]),
    "a list": (lambda: [1, [2, 3]], [lambda r: [1, [2, 4]], lambda r: [1, (2, 3)], lambda r: [1, [2, 3], 4]]),
    "a dict": (
        lambda: {"a": 1, "b": {"c": [2]}},
        [lambda r: {"b": {"c": [2]}, "a": 1}, lambda r: {"a": 1, "b": {"c": [3]}}, lambda r: {"a": 1}],
    ),
    "an object": (lambda: (HELD, [HELD]), [lambda r: (OTHER, [HELD]), lambda r: (HELD, [OTHER])]),
    "many objects": (lambda: [HELD] * 20, [lambda r: [HELD] * 19 + [OTHER], lambda r: [HELD] * 19]),
    "an array": (
        lambda: [np.arange(6.0)],
        [
            lambda r: [np.arange(6.0) + 1],
            lambda r: [np.arange(6)],
            lambda r: [np.arange(6.0).reshape(2, 3)],
            lambda r: [np.arange(6.0).tolist()],
        ],
    ),
    "a number of NumPy": (lambda: [np.float64(1)], [lambda r: [np.float64(2)], lambda r: [np.float32(1)]]),
    "a set": (lambda: {"a", "b"}, [lambda r: {"a"}, lambda r: frozenset("ab")]),
    "bytes that change": (lambda: [bytearray(b"ab")], [lambda r: [bytearray(b"ac")], lambda r: [b"ab"]]),
    "a slice": (lambda: (slice(1, 2), 3), [lambda r: (slice(1, 3), 3)]),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_again_is_alike_and_a_change_is_not(name: str) -> None:
    make, changes = RECIPES[name]
    told = keep(make())
    assert alike(told, make())
    for change in changes:
        assert not alike(told, change(make()))


@pytest.mark.parametrize("name", ["a list", "a dict", "an array", "a set", "bytes that change"])
def test_what_is_kept_does_not_change_with_its_object(name: str) -> None:
    recipe = RECIPES[name][0]()
    told, before = keep(recipe), copy.deepcopy(recipe)
    target = recipe[0] if name in ("an array", "bytes that change") else recipe
    if isinstance(target, list):
        target[1].append(4)
    elif isinstance(target, dict):
        target["b"]["c"].append(3)
    elif isinstance(target, set):
        target.add("c")
    else:
        target[0] = 7
    assert not alike(told, recipe)
    assert alike(told, before)


def test_nan_is_itself_and_a_nest_that_holds_itself_ends() -> None:
    nan = float("nan")
    assert alike(keep([nan]), [nan])
    endless: list[Any] = []
    endless.append(endless)
    alike(keep(endless), endless)
