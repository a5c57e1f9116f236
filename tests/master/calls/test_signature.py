"""Which argument belongs to which parameter. The oracle is ``inspect.Signature.bind``."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_are_bound_as_python_binds_them(name: str) -> None:
    fn = FUNCTIONS[name]
    signature, oracle = Signature(fn, (), "f"), inspect.signature(fn)
    num_bound = 0
    for args, kwargs in CALLS:
        try:
            expected = oracle.bind(*args, **kwargs)
        except TypeError:
            with pytest.raises(TypeError, match=r"^f\(\) "):
                signature.bind(args, kwargs)
            continue
        num_bound += 1
        found = signature.bind(args, kwargs)
        by_position = [value for _, keyword, _, value in found if not keyword]
        by_keyword = {keyword: value for _, keyword, _, value in found if keyword}
        assert oracle.bind(*by_position, **by_keyword) == expected
        assert [value for *_, value in found] == [*args, *kwargs.values()]
        assert len({label for label, *_ in found}) == len(found)
    assert num_bound


@pytest.mark.parametrize(
    ("name", "bcast", "args", "kwargs", "broadcast"),
    [
        ("two", "w", (1, 2), {}, ["w"]),
        ("two", ["w", "x"], (1,), {"x": 2}, ["w", "x"]),
        ("two", (), (1, 2), {}, []),
        ("any number", "rest", (1, 2, 3), {}, ["rest[0]", "rest[1]"]),
        ("any keywords", "more", (1,), {"a": 2, "b": 3}, ["a", "b"]),
        ("any keywords", "a", (1,), {"a": 2, "b": 3}, ["a"]),
        ("everything", ["k", "x"], (1, 2, 3), {"k": 4, "z": 5}, ["x", "k"]),
    ],
)
def test_what_is_broadcast(name: str, bcast: Any, args: Any, kwargs: Any, broadcast: list[str]) -> None:
    found = Signature(FUNCTIONS[name], bcast, "f").bind(args, kwargs)
    assert [label for label, _, is_broadcast, _ in found if is_broadcast] == broadcast


def test_a_builtin_without_a_signature_takes_all_by_position() -> None:
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(max)
    found = Signature(max, (), "max").bind((1, 2), {"key": 3})
    assert found == [("argument 0", "", False, 1), ("argument 1", "", False, 2), ("key", "key", False, 3)]


@pytest.mark.parametrize("bcast", ["y", ["w", "y"], ("y",)])
def test_a_name_that_is_no_parameter(bcast: Any) -> None:
    with pytest.raises(ValueError, match=r"got bcast_inputs \['y'.*expected names of its parameters \['w', 'x'\]"):
        Signature(FUNCTIONS["two"], bcast, "f")
    with pytest.raises(TypeError, match="got bcast_inputs=3, expected the name of a parameter"):
        Signature(FUNCTIONS["two"], 3, "f")  # type: ignore[arg-type]
