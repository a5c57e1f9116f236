"""Collectives over variables, called by the program: NumPy on a list of one array per rank is the oracle.

Any sequence of them, with every dtype, rank and batch, is in ``test_shared_sequences.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.rank_arrays import OPS, REDUCIBLE, assert_same, everywhere, is_reducible, looker, numbers, reduced
from support.tables import combinations

import synk

EVERYWHERE = (1, 2, 3, 4, 0, "1+3")


def differing(rt: Any, shape: tuple[int, ...], dtype: Any = "f8", **options: Any) -> tuple[Any, list[np.ndarray]]:
    """Return a variable with another value of ``shape`` on each rank, and those values."""
    return set_to(rt, [numbers(dtype, shape, rank) for rank in range(rt.world_size)], **options)


def set_to(rt: Any, values: list[Any], **options: Any) -> tuple[Any, list[Any]]:
    """Return a variable with the given value on each rank, and the values."""
    variable = rt.shared(values[0], name="w", **options)
    for rank, value in enumerate(values):
        variable[rank] = value
    return variable, values


def test_reductions_equal_numpy(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    for where, (op, dtype), shape in combinations(43, EVERYWHERE, REDUCIBLE, ((7, 3), (), (0, 2))):
        rt = shared_runtimes[where]
        with subtests.test(where=where, op=op, dtype=dtype, shape=shape):
            w, values = differing(rt, shape, dtype)
            expected, look = reduced(op, values), looker(rt, w)
            assert_same(synk.reduce(w, op, in_place=False), expected, is_rounded=True)
            assert_same(look(), values)  # nothing changed
            assert synk.reduce(w, op) is None
            assert_same(look(), [expected, *values[1:]], is_rounded=True)
            w[0] = values[0]
            assert synk.all_reduce(w, op) is None
            got = look()
            assert_same(got, [expected] * rt.world_size, is_rounded=True)
            assert_same(got, [got[0]] * rt.world_size)  # the same bits everywhere


@pytest.mark.parametrize("op", OPS)
def test_nan_infinity_and_overflow_are_numpys(shared_runtimes: Any, op: str) -> None:
    rt = shared_runtimes[3]
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e308, 5e-324])
    values = [np.roll(special, rank) for rank in range(3)]
    w, _ = set_to(rt, values)
    synk.all_reduce(w, op)
    with np.errstate(all="ignore"):
        wide = {"avg": (values[0] + values[1] + values[2]) / 3}.get(op)
        assert_same(w.value, reduced(op, values) if wide is None else wide)
    n, counts = set_to(rt, [np.full(2, 2**62) + rank for rank in range(3)])
    if op != "avg":
        synk.all_reduce(n, op)
        assert_same(n.value, reduced(op, counts))  # wraps


# ----- several variables and nestings


def tree(seed: int, rows: int = 3) -> dict[str, Any]:
    """Return a nesting whose leaves are of two dtypes, small and of odd sizes, between each other."""
    return {
        "w": (numbers("f8", (rows, 5), seed), numbers("f4", (rows, 1), seed + 1)),
        "b": [numbers("f8", (rows,), seed + 2), None],
        "c": numbers("f4", (rows, 0, 2), seed + 3),
        "d": numbers("f8", (rows, 3, 1), seed + 4),
    }


def by_leaf(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply a function leaf by leaf to nestings of one structure."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: by_leaf(function, *(each[key] for each in trees)) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(by_leaf(function, *children) for children in zip(*trees, strict=True))
    return None if first is None else function(*trees)


@pytest.mark.parametrize("rt", [3, 0, "1+3"], indirect=True)
def test_nestings_and_several_variables_go_through_every_verb(rt: Any) -> None:
    size = rt.world_size
    w, values = set_to(rt, [tree(rank) for rank in range(size)])
    a, a_values = differing(rt, (4,))
    assert w.shapes[0] == {"w": ((3, 5), (3, 1)), "b": [(3,), None], "c": (3, 0, 2), "d": (3, 3, 1)}
    assert w.dtype["w"] == (np.dtype("f8"), np.dtype("f4"))
    assert_same(synk.gather([a, w]), [np.stack(a_values), by_leaf(lambda *leaves: np.stack(leaves), *values)])
    joined = by_leaf(lambda *leaves: np.concatenate(leaves), *values)
    assert_same(synk.gather(w, nd_up=0), joined)
    for op in OPS:
        expected = by_leaf(lambda *leaves: reduced(op, leaves), *values)  # noqa: B023
        assert_same(synk.reduce(w, op, in_place=False), expected, is_rounded=True)
        synk.all_reduce([a, w], op)
        assert_same(everywhere(rt, w), [expected] * size, is_rounded=True)
        for rank, value in enumerate(values):
            w[rank] = value
    synk.all_gather(w)
    assert_same(everywhere(rt, w), [joined] * size)
    w[0] = values[-1]
    synk.broadcast(w)
    assert_same(everywhere(rt, w), [values[-1]] * size)
    rows = tree(7, rows=6)
    for batch in (None, slice(1, 6, 2), [4, 0]):
        synk.scatter(w, rows, batch=batch)
        for rank, got in enumerate(everywhere(rt, w)):
            split = [slice(None) if batch is None else batch, rank]
            assert_same(got, by_leaf(lambda leaf: np.array_split(leaf[split[0]], size)[split[1]], rows))  # noqa: B023


# ----- large values


def test_large_values_are_moved_in_shared_memory(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    """5 MB and an odd number of elements: no array byte passes the pipes."""
    for where, dtype in ((2, "c16"), (3, "f4"), (0, "i1")):
        rt = shared_runtimes[where]
        count = 5 * (1 << 20) // np.dtype(dtype).itemsize + 5
        with subtests.test(where=where, dtype=dtype):
            w, values = differing(rt, (count,), dtype)
            before = dict(rt.counters)
            for op in ("avg", "sum", "max"):
                if is_reducible(op, dtype):
                    assert_same(synk.reduce(w, op, in_place=False), reduced(op, values), is_rounded=True)
            synk.all_reduce(w, "sum")
            assert_same(synk.gather(w), np.stack([reduced("sum", values)] * rt.world_size))
            w[0] = values[0]
            synk.broadcast(w)
            assert_same(synk.gather(w), np.stack([values[0]] * rt.world_size))
            synk.scatter(w, values[0])
            assert_same(synk.gather(w, nd_up=0), values[0])
            synk.all_gather(w)
            assert_same(synk.gather(w), np.stack([values[0]] * rt.world_size))
            sent = {name: rt.counters[name] - before[name] for name in before}
            assert sent["bytes_down"] < 1 << 16 and sent["bytes_up"] < 1 << 12
            synk.scatter(w, values[0])
            assert_same(everywhere(rt, w), np.array_split(values[0], rt.world_size))


# ----- misuse


def test_what_does_not_fit_is_refused_and_moves_nothing(subtests: pytest.Subtests, rt: Any) -> None:
    (a, a_values), (n, n_values) = differing(rt, (3,)), differing(rt, (3,), "i8")
    u, u_values = set_to(rt, [np.zeros((0, 3)), np.ones((2, 3))])
    z, nest = rt.shared(1.5, name="z"), rt.shared({"a": np.zeros(4), "b": np.zeros(4)}, name="nest")
    rows = np.arange(4.0)
    cases: list[tuple[Any, str | None, Callable[[], Any]]] = [
        # several variables: all of them move or none
        (TypeError, None, lambda: synk.broadcast([a, n], [np.zeros(3), np.zeros(3)])),
        (ValueError, None, lambda: synk.broadcast([a, n], [np.zeros(3)])),
        (ValueError, None, lambda: synk.scatter([a, n], [np.zeros(3), np.zeros((3, 2), "i8")])),
        (IndexError, None, lambda: synk.scatter([a, n], [np.zeros(3), np.zeros(2, "i8")], batch=[2])),
        (TypeError, None, lambda: synk.all_reduce([a, n], "avg")),
        (TypeError, None, lambda: synk.reduce([a, n], "avg")),
        (ValueError, "'z'", lambda: synk.all_gather([a, z])),
        # ops
        (ValueError, "variable 'w'", lambda: synk.all_reduce(a, "mean")),
        (ValueError, "variable 'w'", lambda: synk.reduce(a, "gather")),
        ((ValueError, TypeError), "variable 'w'", lambda: synk.all_reduce(a, None)),
        # unequal values
        (ValueError, r"'w'.*\(0, 3\), \(2, 3\)", lambda: synk.reduce(u, "sum")),
        (ValueError, r"'w'.*\(0, 3\), \(2, 3\)", lambda: synk.all_reduce(u, "avg")),
        (ValueError, "nd_up=0", lambda: synk.gather(u)),
        (ValueError, "'nest'|rows", lambda: synk.scatter(nest, {"a": np.zeros(4), "b": np.zeros(3)})),
        # batches
        (IndexError, None, lambda: synk.scatter(a, rows, batch=5)),
        (IndexError, None, lambda: synk.scatter(a, rows, batch=np.ones(3, bool))),
        (TypeError, None, lambda: synk.scatter(a, rows, batch=True)),
        ((TypeError, ValueError), None, lambda: synk.scatter(a, None)),
        # no rows
        (ValueError, "'z'", lambda: synk.scatter(z, 2.0)),
        (ValueError, "'z'", lambda: synk.gather(z, nd_up=0)),
        (ValueError, "'z'", lambda: synk.all_gather(z)),
        (ValueError, "'z'", lambda: synk.gather(z, nd_up=2)),
        (TypeError, "not iterable", lambda: list(a)),
        *(((IndexError, TypeError), "rank.*'w'", lambda k=k: a[k]) for k in (-1, 2, True, None, slice(2))),
        *(((IndexError, TypeError), "rank.*'w'", lambda k=k: operator.setitem(a, k, rows)) for k in (-1, 2, True)),
    ]
    for number, (error, words, call) in enumerate(cases):
        with subtests.test(number=number), pytest.raises(error, match=words):
            call()
    assert_same([everywhere(rt, a), everywhere(rt, n), everywhere(rt, u)], [a_values, n_values, u_values])
    assert_same(nest.value, {"a": np.zeros(4), "b": np.zeros(4)})
    assert_same(synk.gather(z), np.array([1.5, 1.5]))


def test_what_is_no_variable_is_named(rt: Any) -> None:
    w = rt.shared(np.ones(3))
    verbs: tuple[Any, ...] = (synk.broadcast, synk.gather, synk.all_gather, synk.reduce, synk.all_reduce)
    verbs += (lambda wrong: synk.scatter(wrong, [1.0]),)
    for wrong in (3, None, np.ones(3), {"w": w}, [w, np.ones(3)]):
        for verb in verbs:
            with pytest.raises(TypeError, match="expected a Shared"):
                verb(wrong)
