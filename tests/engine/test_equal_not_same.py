"""What compares equal and can still be told apart: a repeated call sees it as a function that is called first does.

The oracle is the same function, called here.
"""

from __future__ import annotations

import itertools
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
def test_dicts_that_are_returned_keep_their_keys_and_their_order(
    subtests: Any, shared_runtimes: Any, where: Any
) -> None:
    def total(wrap: Any, x: Any, names: Any) -> Any:
        return wrap({name: int(x.sum()) * k for k, name in enumerate(names)})

    for number, wrap in enumerate(WRAPS):
        f = shared_runtimes[where].function(
            lambda x, names, wrap=wrap: total(wrap, x, names), outputs="sum", bcast_inputs=("names", "wrap")
        )
        odd = (1, True, 1.0, (1,), (True,), (1, (0,)), (1, (False,)), (1,), "a", np.str_("a"))
        for names in ("ab", "ba", "ba", "ab", "ab", "cab", "abc", "ba", *([key] for key in odd * 2)):
            with subtests.test(number=number, names=str(names)):
                for call in (f, f.serial):
                    assert repr(call(X, tuple(names))) == repr(total(wrap, X, names))


@pytest.mark.parametrize("where", WHERE)
def test_an_object_after_a_float(shared_runtimes: Any, where: Any) -> None:
    """NumPy calls the dtype of a float equal to None, which is that of an object."""

    def body(kind: Any, other: Any) -> Any:
        return np.float64(7) if kind else other

    for other, op in itertools.product(({1}, "s" * 200_000), (None, "first")):
        call = shared_runtimes[where].function(body, outputs=op, bcast_inputs=("kind", "other"))
        for kind in (1, 0, 0, 1, 1, 0):
            want = body(kind, other)
            assert call(kind, other) == (want if op else [want] * shared_runtimes[where].world_size)


@pytest.mark.parametrize("where", WHERE)
def test_plain_records_after_a_recarray(shared_runtimes: Any, where: Any) -> None:
    records = np.rec.array([(1, 2.0)], names="a,b")
    plain = records.view([("a", "i8"), ("b", "f8")], np.ndarray)
    for op in ("gather", "first"):
        call = shared_runtimes[where].function(lambda x: records if x[0] else plain, outputs=op)
        for k in (0, 1, 0, 0, 1):
            assert type(call([k, k])) is type(records if k else plain)


def test_arguments_that_look_alike_but_are_given_in_another_form(shared_runtimes: Any) -> None:
    """Calls find the plan of a call before: each of these must find its own."""
    rt, x, y = shared_runtimes[2], np.arange(6.0), np.arange(6.0) + 10
    pair = rt.function(lambda a, b=1.0, **more: (a.sum(), type(b).__name__, sorted(more)), bcast_inputs=["b"],
                       outputs=("sum", "first", "first"))  # fmt: skip
    for _ in range(2):
        assert pair(x) == (15.0, "float", [])
        assert pair(x, 2) == pair(x, b=2) == pair(b=2, a=x) == (15.0, "int", [])
        assert pair(b=y, a=x) == pair(x, y) == (15.0, "ndarray", [])
        assert pair(x, {"lr": 0.1}) == pair(x, b={}) == (15.0, "dict", [])
        assert pair(x, {"w": y, "lr": 0.1}) == pair(x, {"w": y}) == (15.0, "dict", [])
        assert pair(x, c=y) == (15.0, "float", ["c"]) and pair(x, d=y) == (15.0, "float", ["d"])
        assert pair(x, c=y, d=y) == pair(x, d=y, c=y) == (15.0, "float", ["c", "d"])
    for wrong, error in ((lambda: pair(x, a=x), TypeError), (lambda: pair(b=2), TypeError)):
        for _ in range(2):
            with pytest.raises(error, match="a"):
                wrong()
