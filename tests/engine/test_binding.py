"""Which argument is broadcast, by the name of its parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "two": lambda w, x: (len(w), len(x)),
    "any number": lambda w, *rest: [len(w), *map(len, rest)],
    "any keywords": lambda w, **more: [len(w), *map(len, more.values())],
    "everything": lambda w, x=(), *rest, k=(), **more: [*map(len, (w, x, *rest, k, *more.values()))],
}
BROADCAST: list[tuple[str, Any, int, tuple[str, ...], list[int]]] = [
    ("two", "w", 2, (), [6, 3]),
    ("two", ["w", "x"], 1, ("x",), [6, 6]),
    ("two", (), 2, (), [3, 3]),
    ("any number", "rest", 3, (), [3, 6, 6]),
    ("any keywords", "more", 1, ("a", "b"), [3, 6, 6]),
    ("any keywords", "a", 1, ("a", "b"), [3, 6, 3]),
    ("everything", ["k", "x"], 3, ("k", "z"), [3, 6, 3, 6, 3]),
]
"""Function, what is broadcast, how many arguments by position and by which names, and the rows that each has."""


def test_what_is_broadcast(subtests: Any, shared_runtimes: Any) -> None:
    rt, x = shared_runtimes[2], np.arange(6.0)
    for name, bcast, count, keywords, rows in BROADCAST:
        with subtests.test(name, bcast=bcast):
            f = rt.function(FUNCTIONS[name], bcast_inputs=bcast, outputs="first")
            assert [*f(*[x] * count, **dict.fromkeys(keywords, x))] == rows
    with pytest.raises(ValueError, match=r"got bcast_inputs \['y'\], expected names of its parameters \['w', 'x'\]"):
        rt.function(FUNCTIONS["two"], bcast_inputs=["w", "y"])
    assert rt.function(max, outputs="first")([3, 1, 4, 1]) == 3, "a built-in without a signature"
    whole = rt.function(lambda w: w.sum(), bcast_inputs="w", outputs="first")
    with pytest.raises(ValueError, match="batch was given, but no argument is scattered"):
        whole(x, batch=3)
