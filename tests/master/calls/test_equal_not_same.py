"""What compares equal and can still be told apart: a repeated call sees it as a function that is called first does."""

from __future__ import annotations

import enum
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

X = np.arange(4.0)
WHERE = [2, "inline"]
rate = 0.0


class Level(enum.IntEnum):
    ONE = 1


class Point(tuple):
    """Built from its elements, where most classes of tuples are built from one sequence."""

    def __new__(cls, *elements: Any) -> Point:
        return tuple.__new__(cls, elements)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("zeros", [(0.0, -0.0), (0j, -0j), (math.nan, -math.nan)], ids=str)
def test_captured_zeros_have_signs(shared_runtimes: Any, where: Any, zeros: tuple[Any, Any]) -> None:
    global rate
    one, other = zeros
    a_dict, a_list, a_space = {"v": one}, [one, 1], types.SimpleNamespace(v=one)

    def f(x: Any) -> list[str]:
        return [repr((rate, a_dict, a_list, a_space.v, a_tuple))]

    for value in (one, other, one, other):
        rate, a_dict["v"], a_list[0], a_space.v = value, value, value, value
        a_tuple = (value,)
        if value is one and "call" not in locals():
            call = shared_runtimes[where].function(f, outputs="first")
        for _ in range(2):
            assert call(X) == f(X)


KEYS: list[Any] = [1, True, 1.0, np.int64(1), Level.ONE, 1]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("is_whole", [False, True])
def test_keys_of_arguments_keep_their_types(shared_runtimes: Any, where: Any, is_whole: bool) -> None:
    rt = shared_runtimes[where]
    call = rt.function(lambda d: repr(list(d)), outputs="first", bcast_inputs=["d"] if is_whole else [])
    deep = rt.function(lambda d: repr(list(d["a"])), outputs="first")
    for key in KEYS:
        for _ in range(2):
            assert call({key: X}) == repr([key])
            assert deep({"a": {key: X}}) == repr([key])


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: [d], lambda d: (d, {"z": d})], ids=["flat", "list", "deep"])
def test_dicts_that_are_returned_keep_their_order(shared_runtimes: Any, where: Any, wrap: Callable[[Any], Any]) -> None:
    rt = shared_runtimes[where]

    def f(x: Any, names: Any) -> Any:
        return wrap({name: x.sum() * k for k, name in enumerate(names)})

    call = rt.function(f, outputs="sum", bcast_inputs="names")
    serial = rt.function(f, outputs="first", bcast_inputs="names").serial
    for names in ("ab", "ba", "ba", "ab", "ab", "cab", "abc", "ba"):
        assert repr(call(X, tuple(names))).replace("np.float64", "") == repr(f(X, names)).replace("np.float64", "")
        assert repr(serial(X, tuple(names))).replace("np.float64", "") == repr(f(X, names)).replace("np.float64", "")


@pytest.mark.parametrize("where", WHERE)
def test_what_has_no_keys_is_returned_as_ever(shared_runtimes: Any, where: Any) -> None:
    results = [None, [None], ((), []), {}, [{}], ({}, None), None, [(1.0, [2.0])], "text", [("text", {"a": None})]]
    call = shared_runtimes[where].function(lambda x: results[int(x[0])], outputs="first")
    for number, result in enumerate(results):
        for _ in range(2):
            assert call(np.full(2, number)) == result


@pytest.mark.parametrize("where", WHERE)
def test_keys_that_are_returned_keep_their_types(shared_runtimes: Any, where: Any) -> None:
    keys = KEYS
    call = shared_runtimes[where].function(lambda x: {keys[int(x[0])]: "a text"}, outputs="first")
    for number, key in enumerate(KEYS):
        for _ in range(2):
            assert repr(call(np.full(2, number))) == repr({key: "a text"})


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("lengths", [(1, 2, 1), (2, 1, 2)])
def test_a_tuple_that_is_built_from_its_elements(shared_runtimes: Any, where: Any, lengths: tuple[int, ...]) -> None:
    class Pair(Point):
        """Of this test alone: what is known of a class is remembered."""

    call = shared_runtimes[where].function(lambda p: float(sum(len(part) for part in p)), outputs="sum")
    for length in lengths:
        assert call(Pair(*[X] * length)) == call.serial(Pair(*[X] * length)) == 4.0 * length
