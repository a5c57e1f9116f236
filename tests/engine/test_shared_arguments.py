"""Variables as arguments: shards stay where they are, ``batch`` picks among them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import nothing_sent
from support.rank_arrays import assert_same, numbers, picked
from support.tables import combinations

import synk

EVERYWHERE = (1, 2, 4, 3, 0, "1+3")
NEST = {"a": np.arange(3), "b": (np.ones(2), None)}


@pytest.fixture(params=[3, 0, "1+3"])
def rt(request: pytest.FixtureRequest, shared_runtimes: Any) -> synk.Runtime:
    """A runtime with workers, one without and one over two nodes."""
    runtime: synk.Runtime = shared_runtimes[request.param]
    return runtime


class Sharded:
    """A sharded variable with the rows that each rank holds; ``whole`` is all of them, rank after rank."""

    def __init__(self, rt: Any, lengths: list[int], seed: int = 0) -> None:
        self.shards = [numbers("f8", (length, 2), seed + rank) for rank, length in enumerate(lengths)]
        self.whole = np.concatenate(self.shards)
        self.variable = rt.shared(np.zeros((1, 2)), sharded=True, name="x")
        for rank, shard in enumerate(self.shards):
            self.variable[rank] = shard
        self.ranks = np.repeat(np.arange(len(lengths)), lengths)


BATCHES: dict[str, Callable[[int, np.random.Generator], Any]] = {
    "none": lambda count, rng: None,
    "count": lambda count, rng: int(rng.integers(count + 1)),
    "slice": lambda count, rng: slice(*sorted(rng.integers(0, count + 1, 2).tolist())),
    "step": lambda count, rng: slice(int(rng.integers(count + 1)), None, int(rng.integers(1, 4))),
    "backwards": lambda count, rng: slice(None, None, -int(rng.integers(1, 3))),
    "list": lambda count, rng: rng.integers(-count, count, int(rng.integers(2 * count))).tolist() if count else [],
    "array": lambda count, rng: rng.permutation(count)[: int(rng.integers(count + 1))],
    "mask": lambda count, rng: rng.random(count) < 0.6,
}
LENGTHS = ([2, 5, 0, 3], [0, 1, 4, 1], [6, 6, 6, 6], [1, 0, 0, 0], [0, 0, 0, 0])


def test_a_call_on_shards_equals_numpy_on_all_rows(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    """In the caller's order, beside other inputs, which hold the whole data set, and where no row is selected."""
    build = functools.lru_cache(None)(functions_of)
    for number, (where, lengths, kind, num_slices) in enumerate(
        combinations(48, EVERYWHERE, LENGTHS, BATCHES, (1, 1, 2, 3, 7))
    ):
        rt, rng = shared_runtimes[where], np.random.default_rng(number)
        x, (alone, beside) = Sharded(rt, lengths[: rt.world_size], number), build(rt)
        batch = BATCHES[kind](len(x.whole), rng)
        positions = picked(batch, np.arange(len(x.whole)))
        y, w = rng.integers(-3, 4, len(x.whole)).astype(float), rt.shared(2.0)
        with subtests.test(where=where, lengths=lengths, batch=batch, num_slices=num_slices):
            for got, factors in (
                (alone(x.variable, batch=batch, num_slices=num_slices), np.ones((len(positions), 1))),
                (beside(x.variable, y, w, batch=batch, num_slices=num_slices), 2 * y[positions, None]),
                (beside(x.variable, b=rt.data(y), w=w, batch=batch), 2 * y[positions, None]),
            ):
                rows = x.whole[positions] * factors
                assert_same(got, (rows.sum(axis=0), rows, x.ranks[positions]))
            if len(positions):
                assert_same(alone.serial(x.variable, batch=batch)[0], x.whole[positions].sum(axis=0))
            else:
                with pytest.raises(ValueError, match="no rows"):
                    rt.function(lambda x: x.sum(0))(x.variable, batch=batch)


def functions_of(rt: Any) -> tuple[Any, Any]:
    """Return a function of the shards alone, and one of the shards with other inputs: sum, rows and who has them."""

    def own_rank() -> int:
        return synk.comm.ranks[synk.comm.rank]

    def beside(a: np.ndarray, b: np.ndarray, w: Any) -> Any:
        return (a * b[:, None] * w).sum(axis=0), a * b[:, None] * w, np.full(len(b), own_rank())

    options: dict[str, Any] = {"outputs": ("sum", "gather", "gather")}
    alone = rt.function(lambda x: (x.sum(axis=0), x, np.full(len(x), own_rank())), **options)
    return alone, rt.function(beside, bcast_inputs="w", **options)


def test_shards_arrive_read_only_and_as_views_where_they_are_a_range(rt: Any) -> None:
    x = rt.shared(np.arange(4.0 * rt.world_size), sharded=True)
    f = rt.function(lambda x: (x.flags.writeable, x.flags.owndata), outputs=None)
    for options in ({}, {"batch": slice(1, None, 2)}, {"batch": 3}):
        assert set(f(x, **options)) <= {(False, False), None}
    assert (False, True) in set(f(x, batch=[2, 0]))


def test_a_nested_sharded_variable_is_a_data_set(rt: Any) -> None:
    x, y = numbers("f4", (9, 2), 0), numbers("i8", (9,), 1)
    data = rt.shared({"x": x, "y": y}, sharded=True, name="data")
    f = rt.function(lambda d: (d["x"] * d["y"][:, None].astype("f4"), d["y"].sum()), outputs=("gather", "sum"))
    product = x * y[:, None].astype("f4")
    for batch in (None, 4, slice(7, 1, -2), [0, 8, 8, 3]):
        for num_slices in (1, 2):
            got, total = f(data, batch=batch, num_slices=num_slices)
            assert_same(got, picked(batch, product))
            assert total == picked(batch, y).sum()
    with pytest.raises(TypeError, match=r"nested sharded variable"):
        f.serial(data)
    new = {"x": numbers("f4", (6, 2), 5), "y": numbers("i8", (6,), 6)}
    data.value = new
    assert_same(data.value, new)
    assert f(data)[1] == new["y"].sum()


def test_a_replica_is_a_broadcast_argument(rt: Any) -> None:
    f = rt.function(lambda w, x: [w, x.sum()], bcast_inputs="w", outputs=["first", "sum"])
    alone = rt.function(lambda w: w, bcast_inputs="w", outputs="first")
    for value in (np.arange(3.0), np.float32(2), NEST):
        w = rt.shared(value)
        for arguments in ({"w": w, "x": np.ones(5)}, {"x": np.ones(5), "w": value}):
            got, total = f(**arguments)
            assert_same(got, value)
            assert total == 5
        assert_same(alone(w), value)


def test_an_argument_and_a_closure_see_the_same_assignment(shared_runtimes: Any) -> None:
    """Passed as an argument it is the value of before the call, however the function assigns it."""
    rt = shared_runtimes[2]
    w, x = rt.shared(np.zeros(2)), rt.shared(np.arange(4.0), sharded=True)

    def step(w_old: np.ndarray, x_old: np.ndarray) -> Any:
        w.value = w.value + 1
        x.value = x.value * 2
        return w_old[0], w.value[0], x_old, x.value

    f = rt.function(step, bcast_inputs="w_old", outputs=("max", "max", "gather", "gather"))
    for count in range(3):
        old, new, x_old, x_new = f(w, x)
        assert (old, new) == (count, count + 1)
        assert_same(x_old, np.arange(4.0) * 2**count)
        assert_same(x_new, np.arange(4.0) * 2 ** (count + 1))


# ----- misuse


def test_inputs_that_do_not_match_the_shards(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    x, y = Sharded(rt, [3, 2]).variable, Sharded(rt, [2, 3]).variable
    w = rt.shared(np.ones(5), name="w")
    f = rt.function(lambda a, b: (a[:, 0] if a.ndim > 1 else a).sum(), outputs="sum")
    g = rt.function(lambda a: a.sum(), outputs="sum")
    b = rt.function(lambda a: 0.0, bcast_inputs="a")
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, r"'w' is replicated; add 'a' to bcast_inputs", lambda: g(w)),
        (ValueError, r"'x' is sharded; take it out of bcast_inputs", lambda: b(x)),
        (ValueError, r"a with \[3, 2\] rows.*b with \[2, 3\]", lambda: f(x, y)),
        (ValueError, r"b of '<lambda>': got 4 rows, expected 5", lambda: f(x, np.ones(4))),
        (IndexError, "index 5", lambda: g(x, batch=[5])),
        (IndexError, "batch=6", lambda: g(x, batch=6)),
        (IndexError, "mask of 4", lambda: g(x, batch=np.ones(4, bool))),
    ]
    for error, words, call in cases:
        with subtests.test(words), nothing_sent(rt), pytest.raises(error, match=words):
            call()
