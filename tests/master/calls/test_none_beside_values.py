"""Under op None each rank returns one object, of any structure, or None where others return a value."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.seeds import WHOLE_OR_SAMPLE, drawn

import synk
from synk.errors import CollectiveMismatch


class Pair(NamedTuple):
    """A named tuple."""

    a: Any
    b: Any


BIG = 40_000
"""Rows of 8 bytes, more than goes through the slots."""


def only(rank: int, value: Callable[[], Any]) -> Any:
    """Return a value on one rank, None on the others."""
    return value() if synk.comm.rank == rank else None


CASES: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "first": (lambda x: only(0, lambda: len(x)), None, [2, None, None]),
    "last": (lambda x: only(2, lambda: len(x)), None, [None, None, 2]),
    "object": (lambda x: only(1, lambda: {1, 2}), None, [None, {1, 2}, None]),
    "array": (lambda x: only(1, lambda: x.tolist()[0]), None, [None, 2.0, None]),
    "dict": (lambda x: only(1, lambda: {"b": 1, "a": 2}), None, [None, {"b": 1, "a": 2}, None]),
    "tuple": (lambda x: (x.sum(), only(0, lambda: "r")), ("sum", None), (15.0, ["r", None, None])),
    "before": (lambda x: (only(1, lambda: "r"), x.sum()), (None, "sum"), ([None, "r", None], 15.0)),
    "named": (lambda x: Pair(only(1, lambda: 1), x.sum()), (None, "sum"), Pair([None, 1, None], 15.0)),
    "two": (
        lambda x: [only(0, lambda: 1), only(1, lambda: 2), x.sum(), None],
        [None, None, "sum", None],
        [[1, None, None], [None, 2, None], 15.0, [None] * 3],
    ),
    "deep": (
        lambda x: {"s": x.sum(), "r": (1, only(2, lambda: {"k": [3, 4]}))},
        {"s": "sum", "r": None},
        {"s": 15.0, "r": [(1, None), (1, None), (1, {"k": [3, 4]})]},
    ),
    "nobody": (lambda x: (x.sum(), None), ("sum", None), (15.0, [None] * 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_none_beside_values(shared_runtimes: Any, case: str) -> None:
    rt = shared_runtimes[3]
    fn, outputs, expected = CASES[case]
    f = rt.function(fn, outputs=outputs)
    x = np.arange(6.0)
    for call in (f, f, f, f, lambda x: f.submit(x).result()):
        result = call(x)
        assert type(result) is type(expected)
        assert result == expected


@pytest.mark.sampled(20)
@pytest.mark.parametrize("op", ["sum", "gather", "first"])
@pytest.mark.parametrize("before", [False, True])
def test_large_outputs_beside_them(shared_runtimes: Any, op: str, before: bool) -> None:
    rt = shared_runtimes[3]

    def fn(x: Any) -> Any:
        mine = only(1, lambda: x * 2)
        return (mine, x) if before else (x, mine)

    f = rt.function(fn, outputs=(None, op) if before else (op, None))
    x = np.random.default_rng(0).normal(size=(3, BIG))
    for number in range(3):
        values = x + number
        result = f(values)
        parts, combined = result if before else result[::-1]
        np.testing.assert_array_equal(parts[1], values[1:2] * 2)
        assert parts[0] is parts[2] is None
        expected = {"sum": values.sum(0, keepdims=True), "gather": values, "first": values[:1]}[op]
        np.testing.assert_allclose(combined, expected)


def test_who_returns_none_may_change_from_call_to_call(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    f = rt.function(lambda k, x: (only(k, lambda: x.sum()), x.sum()), bcast_inputs="k", outputs=(None, "sum"))
    for _ in range(2):
        for rank in (0, 1, 2, 5, 1):
            parts, total = f(rank, np.arange(6.0))
            assert total == 15.0
            expected = [value if each == rank else None for each, value in enumerate([1.0, 5.0, 9.0])]
            assert parts == expected


def test_verify_pairs_outputs_by_their_place(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    f = rt.function(lambda x: (only(1, lambda: "r"), x.sum(), x.sum()), outputs=(None, "sum", "avg"))
    report = f.verify(np.arange(7.0))
    assert {output.name: output.matching for output in report.outputs} == {"[0]": (), "[1]": (), "[2]": ("sum",)}


@pytest.mark.parametrize(
    ("fn", "outputs"),
    [
        (lambda x: only(0, lambda: x.sum()), "sum"),
        (lambda x: (x, only(0, lambda: x)), "gather"),
        (lambda x: (only(0, lambda: (1, x.sum())), 1.0), ((None, "sum"), "sum")),
        (lambda x: ([1] * synk.comm.rank, x.sum()), ("sum", None)),
        (lambda x: ((1, 2) if synk.comm.rank else 3, x.sum()), ("first", "sum")),
    ],
)
def test_other_differences_are_refused(shared_runtimes: Any, fn: Any, outputs: Any) -> None:
    with pytest.raises(CollectiveMismatch, match="expected one structure on all ranks"):
        shared_runtimes[2].function(fn, outputs=outputs)(np.arange(4.0))


def tensor(x: Any) -> Any:
    import torch

    return torch.from_numpy(x.copy())


DIFFERENT: dict[str, Callable[[int, np.ndarray], Any]] = {
    "kinds": lambda rank, x: [7, {"a": 1}, "text"][rank],
    "lengths": lambda rank, x: [float(value) for value in x[: rank + 1]],
    "nothing": lambda rank, x: [[], (), {}][rank],
    "keys": lambda rank, x: {"abc"[rank]: x, "z": None},
    "deep": lambda rank, x: (x, {"k": [x[: rank + 1], "s"] if rank else rank}),
    "deep in some": lambda rank, x: (x, None if rank == 1 else {"k": [1] * rank}),
    "none and others": lambda rank, x: [None, (1, 2), 3][rank],
    "classes": lambda rank, x: [Pair(1, x), (1, x), [1, x]][rank],
    "tensors": lambda rank, x: [tensor(x), (tensor(x), x), {"t": tensor(x)}][rank],
    "large": lambda rank, x: [np.tile(x, BIG), (np.tile(x, BIG), 1), [np.tile(x, 2 * BIG)]][rank],
    "objects": lambda rank, x: [{1, 2}, ({3}, {"a": {4}}), [{5}, x]][rank],
}


def assert_alike(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for pair in zip(found, expected):
            assert_alike(*pair)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("case", DIFFERENT)
def test_each_rank_returns_what_it_likes(shared_runtimes: Any, case: str) -> None:
    """The plain function, called for each rank's rows, is the oracle."""
    if case == "tensors":
        pytest.importorskip("torch")
    rt, fn = shared_runtimes[3], DIFFERENT[case]
    f = rt.function(lambda x: fn(synk.comm.rank, x), outputs=None)
    g = rt.function(lambda x: (x.sum(), fn(synk.comm.rank, x), len(x)), outputs=("sum", None, "sum"))
    x = np.arange(9.0)
    for rows in (9, 9, 9, 7, 2, 5, 9):
        parts = [part for part in np.array_split(x[:rows], 3) if len(part)]
        expected = [fn(rank, part) for rank, part in enumerate(parts)] + [None] * (3 - len(parts))
        for result in (f(x[:rows]), f.submit(x[:rows]).result()):
            assert_alike(result, expected)
        total, result, length = g(x[:rows])
        assert_alike(result, expected)
        assert (total, length) == (x[:rows].sum(), rows)


def test_structures_may_differ_in_one_call_and_not_in_the_next(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x, same: [0.5] * (1 if same else 1 + synk.comm.rank), bcast_inputs="same", outputs=None)
    for same in (True, False, False, True, True, False):
        assert f(np.zeros(2), same) == ([[0.5]] * 2 if same else [[0.5], [0.5, 0.5]])


def test_a_choice_of_outputs_needs_an_op_for_each(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x: (1, [2] * synk.comm.rank), outputs=None, name="f")
    with pytest.raises(TypeError, match=r"cannot select outputs of 'f': got output_subset and op None"):
        f(np.zeros(2), output_subset=[0])
    g = shared_runtimes[2].function(lambda x: (1, [2] * synk.comm.rank), outputs=(None, None))
    assert g(np.zeros(2), output_subset=[1]) == ([[], [2]],)


# -- the whole table --------------------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[Any], Any]] = {
    "list of floats": lambda x: [float(value) for value in x],
    "list of texts": lambda x: [str(value) for value in x],
    "list of lists": lambda x: [[float(value)] * len(x) for value in x],
    "list of arrays": lambda x: [x[:1], x],
    "empty list": lambda x: [],
    "tuple": lambda x: (float(x[0]), len(x)),
    "tuple of arrays": lambda x: (x, x.sum(), x[:1] > 0),
    "named tuple": lambda x: Pair(len(x), {"rows": x.tolist()}),
    "named tuple of arrays": lambda x: Pair(x, None),
    "dict by rows": lambda x: {int(value): float(value) for value in x},
    "dict of arrays": lambda x: {"b": x, "a": {"mean": x.mean(), "parts": [x, (x,)]}},
    "default dict": lambda x: defaultdict(list, {"rows": x.tolist()}),
    "deque": lambda x: deque(x.tolist()),
    "set": lambda x: set(x.tolist()),
    "text": lambda x: "rows" * len(x),
    "int": lambda x: 10 ** (30 * len(x)),
    "array": lambda x: x * 2,
    "array by rows": lambda x: np.outer(x, x),
    "None": lambda x: None,
    "None in a list": lambda x: [None] * len(x),
    "bool": lambda x: bool(x[0] > 2),
}
PLACES: dict[str, tuple[Callable[[Any], Any], Any, Callable[[Any], Any]]] = {
    "alone": (lambda value: value, None, lambda result: result),
    "in a tuple": (lambda value: (1.5, value), ("avg", None), lambda result: result[1]),
    "in a dict": (lambda value: {"z": value, "a": 1}, {"a": "sum", "z": None}, lambda result: result["z"]),
}


@pytest.mark.parametrize("is_whole", WHOLE_OR_SAMPLE)
def test_one_object_for_each_rank(shared_runtimes: Any, is_whole: bool) -> None:
    def run(x: Any, form: str, place: str) -> Any:
        return PLACES[place][0](FORMS[form](x))

    table = itertools.product(FORMS, PLACES, (1, 2, 3), (1, 2, 5, 6), (1, 2))
    functions = {
        (place, workers): shared_runtimes[workers].function(
            run, bcast_inputs=("form", "place"), outputs=outputs, name=place
        )
        for place, (_, outputs, _) in PLACES.items()
        for workers in (1, 2, 3)
    }
    for case in drawn(table, is_whole, 80):
        form, place, workers, rows, num_slices = case
        make, (_, _, found) = FORMS[form], PLACES[place]
        x = np.arange(1.0, rows + 1)
        shares = [part for part in np.array_split(x, workers) if len(part)]
        expected = [make(part) for part in shares]
        if num_slices > 1:
            expected = [[make(cut) for cut in np.array_split(part, num_slices) if len(cut)] for part in shares]
        for _ in range(2):
            got = found(functions[place, workers](x, form, place, num_slices=num_slices))
            try:
                assert_alike(got, expected + [None] * (workers - len(shares)))
            except AssertionError as error:
                raise AssertionError(f"{case}: got {got!r}, expected {expected!r}") from error
