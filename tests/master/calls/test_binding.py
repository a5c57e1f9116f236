"""Which argument belongs to which parameter, and which rows fit. The oracle is ``inspect.Signature.bind``."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from synk._master.calls.signature import Signature

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "two": lambda w, x: 0,
    "a default": lambda w, x=1: 0,
    "by position only": eval("lambda w, /, x: 0"),
    "a keyword": lambda w, *, k: 0,
    "a keyword with a default": lambda w, *, k=1: 0,
    "any number": lambda w, *rest: 0,
    "any keywords": lambda w, **more: 0,
    "everything": lambda w, x=1, *rest, k=2, **more: 0,
    "none": lambda: 0,
}
KEYWORDS = [("x", 10), ("k", 11), ("other", 12), ("w", 13)]
CALLS = [
    (args, dict(kwargs))
    for args in ((), (1,), (1, 2), (1, 2, 3, 4))
    for count in range(3)
    for kwargs in itertools.combinations(KEYWORDS, count)
]


def test_arguments_are_bound_as_python_binds_them(subtests: Any) -> None:
    for name, (args, kwargs) in itertools.product(FUNCTIONS, CALLS):
        signature, oracle = Signature(FUNCTIONS[name], (), "f"), inspect.signature(FUNCTIONS[name])
        with subtests.test(name, args=args, kwargs=kwargs):
            try:
                expected = oracle.bind(*args, **kwargs)
            except TypeError:
                with pytest.raises(TypeError, match=r"^f\(\) "):
                    signature.bind(args, kwargs)
                continue
            found = signature.bind(args, kwargs)
            by_position = [value for _, keyword, _, value in found if not keyword]
            by_keyword = {keyword: value for _, keyword, _, value in found if keyword}
            assert oracle.bind(*by_position, **by_keyword) == expected
            assert [value for *_, value in found] == [*args, *kwargs.values()]
            assert len({label for label, *_ in found}) == len(found)


BROADCAST: list[tuple[str, Any, Any, Any, list[str]]] = [
    ("two", "w", (1, 2), {}, ["w"]),
    ("two", ["w", "x"], (1,), {"x": 2}, ["w", "x"]),
    ("two", (), (1, 2), {}, []),
    ("any number", "rest", (1, 2, 3), {}, ["rest[0]", "rest[1]"]),
    ("any keywords", "more", (1,), {"a": 2, "b": 3}, ["a", "b"]),
    ("any keywords", "a", (1,), {"a": 2, "b": 3}, ["a"]),
    ("everything", ["k", "x"], (1, 2, 3), {"k": 4, "z": 5}, ["x", "k"]),
]


def test_what_is_broadcast(subtests: Any) -> None:
    for name, bcast, args, kwargs, broadcast in BROADCAST:
        with subtests.test(name, bcast=bcast):
            found = Signature(FUNCTIONS[name], bcast, "f").bind(args, kwargs)
            assert [label for label, _, is_broadcast, _ in found if is_broadcast] == broadcast
    for bcast in ("y", ["w", "y"], ("y",)):
        with pytest.raises(ValueError, match=r"got bcast_inputs \['y'.*expected names of its parameters \['w', 'x'\]"):
            Signature(FUNCTIONS["two"], bcast, "f")
    with pytest.raises(TypeError, match="got bcast_inputs=3, expected the name of a parameter"):
        Signature(FUNCTIONS["two"], 3, "f")  # type: ignore[arg-type]


def test_a_builtin_without_a_signature_takes_all_by_position() -> None:
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(max)
    found = Signature(max, (), "max").bind((1, 2), {"key": 3})
    assert found == [("argument 0", "", False, 1), ("argument 1", "", False, 2), ("key", "key", False, 3)]


def test_rows_that_do_not_fit(subtests: Any, shared_runtimes: Any) -> None:
    rt, five, six = shared_runtimes[2], np.arange(5.0), np.arange(6.0)
    f = rt.function(lambda x, y: x @ y[: len(x)], outputs="sum")
    with pytest.raises(ValueError, match=r"x with 5 rows.* y with 6"):
        f(five, six)
    assert f(five, six, batch=5) == five @ five, "the common rows"
    for batch in ([0, 5], [-7], 2.5, "rows", np.zeros((2, 2), int), np.zeros(3, bool)):
        with subtests.test(batch=str(batch)), pytest.raises((TypeError, ValueError, IndexError), match="'<lambda>'"):
            f(five, six, batch=batch)
    whole = rt.function(lambda w: w.sum(), bcast_inputs="w", outputs="first")
    with pytest.raises(ValueError, match="batch was given, but no argument is scattered"):
        whole(five, batch=3)
