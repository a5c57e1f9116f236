"""``synk.fork(check=True)``: the first call of each function is verified too, and a difference warns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.names import named

import synk

X = np.arange(6.0)
TOTAL = named("total", lambda x: x.sum())
TEXT = "the first call of 'total' differs: 'total' against the plain function:"

WAYS: dict[str, Callable[[Any], Any]] = {
    "call": lambda f: f(X),
    "submit": lambda f: f.submit(X).result(),
    "repeat": lambda f: f.repeat(1, X),
    "time limit": lambda f: f(X, timeout=60.0),
}


def test_a_difference_warns_once(reused_checking: Any, subtests: pytest.Subtests) -> None:
    for way, call in WAYS.items():
        with subtests.test(way):
            f = reused_checking.function(TOTAL, outputs="avg")
            with pytest.warns(RuntimeWarning, match=TEXT) as caught:
                assert call(f) == 7.5  # the user's word
            assert [each.filename for each in caught] == [__file__]
            assert call(f) == 7.5
    with pytest.warns(RuntimeWarning, match=TEXT):
        assert reused_checking.function(TOTAL, outputs="avg", retry=1)(X) == 7.5


def test_what_is_equal_or_raises_is_as_without(reused_checking: Any) -> None:
    rt, seen = reused_checking, reused_checking.resident([0])

    def count(x: Any) -> Any:
        seen.value[0] += 1
        return x.sum()

    assert rt.function(TOTAL, outputs="sum")(X) == 15.0
    assert rt.function(count, outputs="sum", updates=seen)(X) == 15.0
    assert seen.get() == [1]
    for f in (rt.function(lambda x: 1 / 0), rt.function(lambda x: 1 / 0, outputs="sum")):
        with pytest.raises(ZeroDivisionError):
            f(X)
    assert rt.profile.records["total"].num_calls == 1


def raises_again(key: str) -> Callable[[Any], Any]:
    """A function that raises in its second run on each worker."""

    def total(x: Any) -> Any:
        import sys

        if hasattr(sys, key):
            raise ValueError("not again")
        setattr(sys, key, True)
        return x.sum()

    return total


def test_a_warning_may_be_an_error(reused_checking: Any) -> None:
    f = reused_checking.function(TOTAL, outputs="avg")
    with pytest.raises(RuntimeWarning, match=TEXT):
        f(X)
    assert f(X) == 7.5


def test_a_check_that_cannot_be_made_warns(reused_checking: Any, subtests: pytest.Subtests) -> None:
    for way, call in WAYS.items():
        with subtests.test(way):
            f = reused_checking.function(raises_again(f"_check {way}"), outputs="sum")
            text = "the first call of 'total' could not be verified: ValueError: not again"
            with pytest.warns(RuntimeWarning, match=text) as caught:
                assert call(f) == 15.0
            assert [each.filename for each in caught] == [__file__]


@pytest.fixture
def reused_checking() -> Any:
    with synk.Runtime(2, backend="numpy", check=True) as rt, warnings.catch_warnings():
        warnings.simplefilter("error")
        yield rt
