"""Which argument belongs to which parameter, and which rows to which rank. No process.

The oracles are ``inspect.Signature.bind``, and NumPy's indexing of the row numbers.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from synk._master.calls.binding import RowCount, choose_rows, index_arrays, ranks_with_rows, select
from synk._master.calls.signature import Signature
from synk._pure.shards import shard_bounds

# ----- arguments

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


# ----- rows

BATCHES: dict[str, Any] = {
    "none": None,
    "a number": 5,
    "a slice": slice(2, 9),
    "every third": slice(None, None, 3),
    "backwards": slice(None, None, -1),
    "an empty slice": slice(4, 4),
    "a list": [3, 1, 1, 0, -1],
    "an empty list": [],
    "an array": np.array([9, 2, 4]),
    "a mask": np.arange(11) % 4 == 1,
}


def test_ranks_divide_the_chosen_rows(subtests: Any) -> None:
    for name, num_parts, num_inputs in itertools.product(BATCHES, (1, 2, 3, 16), (1, 3)):
        with subtests.test(name, num_parts=num_parts, num_inputs=num_inputs):
            batch = BATCHES[name]
            index = slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch
            expected = np.arange(11)[index]
            rows = [RowCount(f"x{k}", 11, False) for k in range(num_inputs)]
            divide = partial(shard_bounds, world_size=num_parts)
            selection, bounds, owned = choose_rows(rows, (), batch, None, divide, "f")
            assert selection is not None and owned is None
            parts = [selection.positions()[low:high] for low, high in bounds]
            np.testing.assert_array_equal(np.concatenate(parts), expected)
            assert sorted(map(len, parts)) == sorted(map(len, np.array_split(expected, num_parts)))
            assert ranks_with_rows(bounds) == [rank for rank, part in enumerate(parts) if len(part)]
            whole = index_arrays(selection, owned, rows)[0]
            chosen = np.arange(11)[selection.start :: selection.step][: selection.count] if whole is None else whole
            if selection.step > 0:
                np.testing.assert_array_equal(chosen, expected)


def test_batches_and_inputs_that_do_not_fit(subtests: Any) -> None:
    for batch in ([0, 11], [-12], 2.5, "rows", np.zeros((2, 2), int), np.zeros(3, bool)):
        with subtests.test(batch=str(batch)), pytest.raises((TypeError, ValueError, IndexError), match="'f'"):
            select([RowCount("x", 11, False)], batch, "f")
    unlike = [RowCount("x", 5, False), RowCount("y", 6, False)]
    with pytest.raises(ValueError, match=r"x with 5 rows.* y with 6"):
        select(unlike, None, "f")
    assert select(unlike, 5, "f") is not None, "the common rows"
    no_rows = partial(shard_bounds, world_size=3)
    assert choose_rows((), (), None, None, no_rows, "f") == (None, [], None)
    with pytest.raises(ValueError, match="batch was given, but no argument is scattered"):
        choose_rows((), (), 3, None, no_rows, "f")
