"""What compares equal and can still be told apart: a repeated call sees it as a function that is called first does.

The oracle is the same function, called here.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

X = np.arange(4.0)
WHERE = [2, 0]
rate: Any = 0.0


@pytest.mark.parametrize("where", WHERE)
def test_captured_zeros_have_signs(subtests: Any, shared_runtimes: Any, where: Any) -> None:
    global rate
    a_dict: dict[str, Any] = {"v": 0.0}
    a_list, a_space, a_tuple = [0.0, 1], types.SimpleNamespace(v=0.0), (0.0,)

    def f(x: Any) -> list[str]:
        return [repr((rate, a_dict, a_list, a_space.v, a_tuple))]

    call = shared_runtimes[where].function(f, outputs="first")
    for zeros in ((0.0, -0.0), (0j, -0j), (math.nan, -math.nan)):
        for value in zeros * 2:
            with subtests.test(value=value):
                rate, a_dict["v"], a_list[0], a_space.v, a_tuple = value, value, value, value, (value,)
                for _ in range(2):
                    assert call(X) == f(X)


WRAPS: list[Callable[[Any], Any]] = [lambda d: d, lambda d: [d], lambda d: (d, {"z": d})]


@pytest.mark.parametrize("where", WHERE)
def test_dicts_that_are_returned_keep_their_order(subtests: Any, shared_runtimes: Any, where: Any) -> None:
    def total(wrap: Any, x: Any, names: Any) -> Any:
        return wrap({name: int(x.sum()) * k for k, name in enumerate(names)})

    for number, wrap in enumerate(WRAPS):
        f = shared_runtimes[where].function(
            lambda x, names, wrap=wrap: total(wrap, x, names), outputs="sum", bcast_inputs=("names", "wrap")
        )
        for names in ("ab", "ba", "ba", "ab", "ab", "cab", "abc", "ba"):
            with subtests.test(number=number, names=names):
                for call in (f, f.serial):
                    assert repr(call(X, tuple(names))) == repr(total(wrap, X, names))


class Point(tuple):
    """Built from its elements, where most classes of tuples are built from one sequence."""

    def __new__(cls, *elements: Any) -> Any:
        return tuple.__new__(cls, elements)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("lengths", [(1, 2, 1), (2, 1, 2)])
def test_a_tuple_that_is_built_from_its_elements(shared_runtimes: Any, where: Any, lengths: tuple[int, ...]) -> None:
    own = type("Own", (Point,), {})  # what is known of a class is remembered
    call = shared_runtimes[where].function(lambda p: float(sum(len(part) for part in p)), outputs="sum")
    for length in lengths:
        assert call(own(*[X] * length)) == call.serial(own(*[X] * length)) == 4.0 * length
