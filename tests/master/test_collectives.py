"""Collectives over variables, called by the master: NumPy on a list of one array per rank is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.rank_arrays import OPS, REDUCIBLE, assert_same, everywhere, is_reducible, numbers, reduced

from synk._wire.messages import LARGE_NBYTES

WORKERS = (1, 2, 3, 4)
EVERYWHERE = (3, "inline", "1+3", *(pytest.param(where, marks=pytest.mark.storm) for where in (1, 2, 4)))
ANY_DTYPE = ("f2", "f8", "i1", "u8", "c16", "?", "S3", "U2", "i4,f8", "M8[s]")


def differing(rt: Any, shape: tuple[int, ...], dtype: Any = "f8", **options: Any) -> tuple[Any, list[np.ndarray]]:
    """Return a variable with another value of ``shape`` on each rank, and those values."""
    return set_to(rt, [numbers(dtype, shape, rank) for rank in range(rt.world_size)], **options)


def set_to(rt: Any, values: list[Any], **options: Any) -> tuple[Any, list[Any]]:
    """Return a variable with the given value on each rank, and the values."""
    variable = rt.shared(values[0], name="w", **options)
    for rank, value in enumerate(values):
        rt.set_value(variable, value, rank=rank)
    assert_same(everywhere(rt, variable), values)
    return variable, values


def unequal(rt: Any, dtype: Any = "f8", **options: Any) -> tuple[Any, list[np.ndarray]]:
    """Return a variable of other lengths on each rank, one of them 0."""
    return set_to(
        rt, [numbers(dtype, (5 * rank % 4 + (rank > 2), 3), rank) for rank in range(rt.world_size)], **options
    )


# ----- reductions


@pytest.mark.parametrize("where", [1, 2, 4, "inline", "1+3"])
@pytest.mark.parametrize(("op", "dtype"), REDUCIBLE)
@pytest.mark.sampled(60)
def test_reductions_equal_numpy(shared_runtimes: Any, where: Any, op: str, dtype: str) -> None:
    rt = shared_runtimes[where]
    for shape in ((7, 3), (), (0, 2)):
        w, values = differing(rt, shape, dtype)
        expected = reduced(op, values)
        assert_same(rt.reduce(w, op, in_place=False), expected, is_rounded=True)
        assert_same(everywhere(rt, w), values)  # nothing changed
        assert rt.reduce(w, op) is None
        assert_same(everywhere(rt, w), [expected, *values[1:]], is_rounded=True)
        rt.set_value(w, values[0], rank=0)
        assert rt.all_reduce(w, op) is None
        got = everywhere(rt, w)
        assert_same(got, [expected] * rt.world_size, is_rounded=True)
        assert_same(got, [got[0]] * rt.world_size)  # the same bits everywhere


@pytest.mark.parametrize("op", OPS)
def test_nan_infinity_and_overflow_are_numpys(shared_runtimes: Any, op: str) -> None:
    rt = shared_runtimes[3]
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e308, 5e-324])
    values = [np.roll(special, rank) for rank in range(3)]
    w, _ = set_to(rt, values)
    rt.all_reduce(w, op)
    with np.errstate(all="ignore"):
        wide = {"avg": (values[0] + values[1] + values[2]) / 3}.get(op)
        assert_same(w.value, reduced(op, values) if wide is None else wide)
    n, counts = set_to(rt, [np.full(2, 2**62) + rank for rank in range(3)])
    if op != "avg":
        rt.all_reduce(n, op)
        assert_same(n.value, reduced(op, counts))  # wraps


@pytest.mark.parametrize("where", [1, 2, "inline", "1+3"])
def test_an_op_without_a_meaning_changes_nothing(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    for dtype in ANY_DTYPE:
        w, values = differing(rt, (4,), dtype)
        for op in OPS:
            if is_reducible(op, w.dtype):
                continue
            for verb in (rt.reduce, rt.all_reduce):
                with pytest.raises(TypeError, match="variable 'w'"):
                    verb(w, op)
        for verb in (rt.reduce, rt.all_reduce):
            for op in ("mean", "gather", None):
                with pytest.raises((ValueError, TypeError), match="'w'"):
                    verb(w, op)
        assert_same(everywhere(rt, w), values)


@pytest.mark.parametrize("op", OPS)
def test_unequal_values_are_not_reduced(shared_runtimes: Any, op: str) -> None:
    rt = shared_runtimes[3]
    for options in ({}, {"sharded": True}):
        w, values = unequal(rt, **options)
        for verb in (lambda: rt.reduce(w, op), lambda: rt.reduce(w, op, in_place=False), lambda: rt.all_reduce(w, op)):  # noqa: B023
            with pytest.raises(ValueError, match=r"'w'.*\(0, 3\), \(1, 3\), \(2, 3\)"):
                verb()
        assert_same(everywhere(rt, w), values)


# ----- copies


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("dtype", ANY_DTYPE)
@pytest.mark.sampled(60)
def test_broadcast_scatter_and_gather_move_any_dtype(shared_runtimes: Any, where: Any, dtype: str) -> None:
    rt = shared_runtimes[where]
    w, values = differing(rt, (4, 2), dtype)
    assert_same(rt.gather(w), np.stack(values))
    assert_same(rt.gather(w, nd_up=1), np.stack(values))
    assert_same(rt.gather(w, nd_up=0), np.concatenate(values))
    rt.all_gather(w)
    assert_same(everywhere(rt, w), [np.concatenate(values)] * rt.world_size)
    rt.set_value(w, values[-1], rank=0)
    rt.broadcast(w)
    assert_same(everywhere(rt, w), [values[-1]] * rt.world_size)
    new = numbers(dtype, (6, 2), 9)
    rt.broadcast(w, new)
    assert_same(everywhere(rt, w), [new] * rt.world_size)
    for rows in (new, new[:0], new[::-2], rt.data(new)):
        rt.scatter(w, rows)
        assert_same(everywhere(rt, w), np.array_split(np.asarray(rows), rt.world_size))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("sharded", [False, True])
def test_values_of_unequal_length(shared_runtimes: Any, where: Any, sharded: bool) -> None:
    rt = shared_runtimes[where]
    w, values = unequal(rt, sharded=sharded)
    assert rt.get_lengths(w) == [len(value) for value in values]
    assert rt.get_shapes(w) == [value.shape for value in values]
    assert_same(rt.gather(w, nd_up=0), np.concatenate(values))
    if rt.world_size > 1:
        with pytest.raises(ValueError, match=r"nd_up=0"):
            rt.gather(w)
    rt.all_gather(w)
    assert_same(everywhere(rt, w), [np.concatenate(values)] * rt.world_size)
    w, values = unequal(rt, sharded=sharded)
    rt.broadcast(w)
    assert_same(everywhere(rt, w), [values[0]] * rt.world_size)
    w, values = unequal(rt, sharded=sharded)
    rt.set_value(w, values[0], rank=rt.world_size - 1)
    assert_same(everywhere(rt, w), [*values[:-1], values[0]])


@pytest.mark.sampled(20)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize(
    "batch", [3, 0, slice(1, None, 2), slice(None, None, -1), [5, -1, 5], [], np.array([0, 6]), np.arange(7) % 2 == 0]
)
def test_scatter_and_set_value_take_the_rows_of_a_batch(shared_runtimes: Any, where: Any, batch: Any) -> None:
    rt = shared_runtimes[where]
    rows = numbers("f4", (7, 2), 0)
    picked = (
        rows[:batch] if isinstance(batch, int) else rows[np.array(batch, int) if isinstance(batch, list) else batch]
    )
    x = rt.shared(rows, sharded=True)
    for source in (rows, rt.data(rows), rows.tolist()):
        rt.scatter(x, source, batch=batch)
        assert_same(everywhere(rt, x), np.array_split(picked, rt.world_size))
    rt.set_value(x, rows, batch=batch)
    assert_same(everywhere(rt, x), [picked] * rt.world_size)
    rt.scatter(x, rows)
    shards = everywhere(rt, x)
    rt.set_value(x, rows, rank=rt.world_size - 1, batch=batch)
    assert_same(everywhere(rt, x), [*shards[:-1], picked])


@pytest.mark.parametrize("where", EVERYWHERE)
def test_get_value_reads_one_rank(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    w, values = differing(rt, (2,))
    assert_same([rt.get_value(w, rank) for rank in range(rt.world_size)], values)
    assert_same(rt.get_value(w), values[0])
    for rank in (-1, rt.world_size, True, 0.0, None, "0"):
        with pytest.raises((ValueError, TypeError), match="rank"):
            rt.get_value(w, rank)
        if rank is not None:
            with pytest.raises((ValueError, TypeError), match="rank"):
                rt.set_value(w, np.zeros(2), rank=rank)
    assert_same(everywhere(rt, w), values)


# ----- several variables and nestings


@pytest.mark.parametrize("where", EVERYWHERE)
def test_several_variables_in_one_verb(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    (a, a_values), (b, b_values) = differing(rt, (4,)), differing(rt, (2, 3), "f4")
    gathered = rt.gather([a, b])
    assert_same(gathered, [np.stack(a_values), np.stack(b_values)])
    assert rt.get_shapes((a, b)) == [[(4,)] * rt.world_size, [(2, 3)] * rt.world_size]
    assert rt.get_lengths([b]) == [[2] * rt.world_size]
    results = rt.reduce([a, b], "sum", in_place=False)
    assert_same(results, [reduced("sum", a_values), reduced("sum", b_values)])
    rt.all_reduce([a, b], "max")
    assert_same(everywhere(rt, a), [reduced("max", a_values)] * rt.world_size)
    assert_same(everywhere(rt, b), [reduced("max", b_values)] * rt.world_size)
    rt.broadcast((a, b), [np.zeros(4), np.ones((2, 3), "f4")])
    rt.scatter([a], [np.arange(5.0)])
    assert_same(everywhere(rt, a), np.array_split(np.arange(5.0), rt.world_size))
    assert_same(everywhere(rt, b), [np.ones((2, 3), "f4")] * rt.world_size)
    rt.all_gather([a, b])
    assert_same(everywhere(rt, a), [np.arange(5.0)] * rt.world_size)
    assert rt.gather([]) == []
    rt.broadcast([])


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


@pytest.mark.parametrize("where", EVERYWHERE)
def test_a_nesting_goes_through_every_verb_as_its_arrays_do(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    w, values = set_to(rt, [tree(rank) for rank in range(rt.world_size)])
    assert rt.get_shapes(w)[0]["w"] == ((3, 5), (3, 1))
    assert_same(rt.gather(w), by_leaf(lambda *leaves: np.stack(leaves), *values))
    assert_same(rt.gather(w, nd_up=0), by_leaf(lambda *leaves: np.concatenate(leaves), *values))
    for op in OPS:
        expected = by_leaf(lambda *leaves: reduced(op, leaves), *values)  # noqa: B023
        assert_same(rt.reduce(w, op, in_place=False), expected, is_rounded=True)
        rt.reduce(w, op)
        assert_same(everywhere(rt, w), [expected, *values[1:]], is_rounded=True)
        rt.set_value(w, values[0], rank=0)
        rt.all_reduce(w, op)
        assert_same(everywhere(rt, w), [expected] * rt.world_size, is_rounded=True)
        for rank, value in enumerate(values):
            rt.set_value(w, value, rank=rank)
    rt.all_gather(w)
    assert_same(everywhere(rt, w), [by_leaf(lambda *leaves: np.concatenate(leaves), *values)] * rt.world_size)
    rt.set_value(w, values[-1], rank=0)
    rt.broadcast(w)
    assert_same(everywhere(rt, w), [values[-1]] * rt.world_size)
    rows = tree(7, rows=6)
    rt.scatter(w, rows)
    for batch in (None, slice(1, 6, 2), [4, 0]):
        rt.scatter(w, rows, batch=batch)
        split = by_leaf(lambda leaf: np.array_split(leaf if batch is None else leaf[batch], rt.world_size), rows)  # noqa: B023
        expected_parts = [by_leaf(lambda *parts: parts[rank], *[part_of(split, k) for k in range(rt.world_size)])  # noqa: B023
                          for rank in range(rt.world_size)]  # fmt: skip
        assert_same(everywhere(rt, w), expected_parts)


def part_of(split: Any, rank: int) -> Any:
    """Return the nesting of the parts of one rank from a nesting of lists of parts."""
    if isinstance(split, dict):
        return {key: part_of(value, rank) for key, value in split.items()}
    if isinstance(split, tuple) or (isinstance(split, list) and not isinstance(split[0], np.ndarray)):
        return type(split)(part_of(value, rank) for value in split)
    return None if split is None else split[rank]


def test_a_collective_over_several_variables_moves_all_of_them_or_none(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    (a, a_values), (n, n_values) = differing(rt, (3,)), differing(rt, (3,), "i8")
    wrong: list[Callable[[], Any]] = [
        lambda: rt.broadcast([a, n], [np.zeros(3), np.zeros(3)]),
        lambda: rt.broadcast([a, n], [np.zeros(3)]),
        lambda: rt.broadcast([a, n], np.zeros(3)),
        lambda: rt.scatter([a, n], [np.zeros(3), np.zeros((3, 2), "i8")]),
        lambda: rt.scatter([a, n], [np.zeros(3), np.zeros(2, "i8")], batch=[2]),
        lambda: rt.all_reduce([a, n], "avg"),
        lambda: rt.reduce([a, n], "avg"),
        lambda: rt.all_gather([a, rt.shared(0.0)]),
    ]
    for call in wrong:
        with pytest.raises((ValueError, TypeError, IndexError)):
            call()
        assert_same(everywhere(rt, a), a_values)
        assert_same(everywhere(rt, n), n_values)


# ----- large values


@pytest.mark.parametrize("where", [2, 3, "inline"])
@pytest.mark.parametrize("dtype", ["f4", "c16", "i1"])
@pytest.mark.sampled(3)
def test_large_values_are_moved_by_the_workers(shared_runtimes: Any, where: Any, dtype: str) -> None:
    """5 MB and an odd number of elements: each rank moves its own part, and no array byte passes the pipes."""
    rt = shared_runtimes[where]
    count = 5 * (1 << 20) // np.dtype(dtype).itemsize + 5
    w, values = differing(rt, (count,), dtype)
    before = dict(rt.counters)
    for op in ("avg", "sum", "max"):
        if is_reducible(op, dtype):
            assert_same(rt.reduce(w, op, in_place=False), reduced(op, values), is_rounded=True)
    rt.all_reduce(w, "sum")
    assert_same(rt.gather(w), np.stack([reduced("sum", values)] * rt.world_size))
    rt.set_value(w, values[0], rank=0)
    rt.broadcast(w)
    assert_same(rt.gather(w), np.stack([values[0]] * rt.world_size))
    rt.scatter(w, values[0])
    shards = np.array_split(values[0], rt.world_size)
    assert_same(rt.gather(w, nd_up=0), values[0])
    rt.all_gather(w)
    assert_same(rt.gather(w), np.stack([values[0]] * rt.world_size))
    assert rt.counters["bytes_down"] - before["bytes_down"] < 1 << 16
    assert rt.counters["bytes_up"] - before["bytes_up"] < 1 << 12
    if where != "inline":
        assert rt.counters["messages_down"] > before["messages_down"]
    rt.scatter(w, values[0])
    assert_same(everywhere(rt, w), shards)


def test_results_of_reductions_are_the_callers_own(shared_runtimes: Any) -> None:
    """A large result is a view of a leased buffer: it is not written again while somebody holds it."""
    rt = shared_runtimes[2]
    for count in (3, LARGE_NBYTES):
        w, values = differing(rt, (count,))
        kept = [rt.reduce(w, "sum", in_place=False) for _ in range(3)]
        kept[0][:] = 7
        rt.set_value(w, np.zeros(count), rank=0)
        assert_same(rt.reduce(w, "sum", in_place=False), values[1])
        assert_same(kept[1], values[0] + values[1])
        assert_same(kept[2], values[0] + values[1])


@pytest.mark.parametrize("where", [2, "inline", "1+3"])
def test_small_collectives_send_no_message(shared_runtimes: Any, where: Any) -> None:
    """The master does them in shared memory: a message would cost more than the arithmetic."""
    rt = shared_runtimes[where]
    w, values = differing(rt, (100,))
    messages = rt.counters["messages_down"]
    rt.all_reduce(w, "sum")
    rt.broadcast(w)
    rt.reduce(w, "max")
    rt.all_gather(w)
    rt.scatter(w, values[0])
    rt.gather(w, nd_up=0)
    assert rt.counters["messages_down"] == messages
    assert_same(everywhere(rt, w), np.array_split(values[0], rt.world_size))


# ----- misuse


def test_what_is_no_variable_is_named(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w = rt.shared(np.ones(3))
    for wrong in (3, None, np.ones(3), "w", {"w": w}, [w, np.ones(3)]):
        for verb in (
            rt.broadcast,
            rt.gather,
            rt.all_gather,
            rt.reduce,
            rt.all_reduce,
            rt.get_lengths,
            rt.get_shapes,
            rt.get_value,
            lambda variable: rt.scatter(variable, np.ones(3)),
            lambda variable: rt.set_value(variable, np.ones(3)),
        ):
            with pytest.raises(TypeError, match="expected a Shared"):
                verb(wrong)


def test_values_without_rows_are_not_scattered_or_concatenated(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    z = rt.shared(1.5, name="z")
    wrong: list[Callable[[], Any]] = [
        lambda: rt.scatter(z, 2.0),
        lambda: rt.gather(z, nd_up=0),
        lambda: rt.all_gather(z),
        lambda: rt.get_lengths(z),
        lambda: rt.set_value(z, 2.0, batch=1),
        lambda: rt.gather(z, nd_up=2),
        lambda: rt.gather(z, nd_up=None),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match="'z'"):
            call()
    assert_same(rt.gather(z), np.array([1.5, 1.5]))
    assert rt.get_shapes(z) == [(), ()]


def test_a_batch_out_of_range_and_rows_of_unequal_length(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    x = rt.shared(np.arange(4.0), sharded=True, name="x")
    pair = rt.shared({"a": np.zeros(4), "b": np.zeros(4)}, name="pair")
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
        (IndexError, lambda: rt.scatter(x, np.arange(4.0), batch=[4])),
        (IndexError, lambda: rt.scatter(x, np.arange(4.0), batch=5)),
        (IndexError, lambda: rt.set_value(x, np.arange(4.0), batch=[4])),
        (IndexError, lambda: rt.scatter(x, np.arange(4.0), batch=np.ones(3, bool))),
        (TypeError, lambda: rt.scatter(x, np.arange(4.0), batch=True)),
        (ValueError, lambda: rt.scatter(pair, {"a": np.zeros(4), "b": np.zeros(3)})),
        ((TypeError, ValueError), lambda: rt.scatter(x, None)),  # type: ignore[list-item]
    ]
    for error, call in wrong:
        with pytest.raises(error):
            call()
    assert_same(x.value, np.arange(4.0))
    assert_same(pair.value, {"a": np.zeros(4), "b": np.zeros(4)})
