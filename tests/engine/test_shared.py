"""Shared variables: replicas and shards that stay on the ranks, read, assigned and updated, by functions and by the
program, and passed as arguments.

The oracle is NumPy on a list of one array per rank. What sequences of such operations give is in
``test_shared_sequences.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.harness import nothing_sent
from support.rank_arrays import assert_same, everywhere, numbers, picked
from support.tables import combinations, named

import synk

EVERYWHERE = (1, 2, 4, 3, 0, "1+3")
NEST = {"a": np.arange(3), "b": (np.ones(2), None)}


@pytest.fixture(params=[3, 0, "1+3"])
def rt(request: pytest.FixtureRequest, shared_runtimes: Any) -> synk.Runtime:
    """A runtime with workers, one without and one over two nodes."""
    runtime: synk.Runtime = shared_runtimes[request.param]
    return runtime


# ----- values


def test_the_program_gives_copies_gets_copies_and_assigns(rt: Any) -> None:
    """An assignment broadcasts, or scatters rows. Any array-like will do."""
    for value in (1.5, np.float32(2), True, [[1, 2], [3, 4]], np.zeros((2, 0)), np.arange(10)[::-3], np.ones(3, ">i4")):
        expected = np.asarray(value)
        expected = expected.astype(expected.dtype.newbyteorder("="))
        assert_same(everywhere(rt, rt.shared(value)), [expected] * rt.world_size)
    value = np.arange(3.0)
    w, x = rt.shared(value), rt.shared(np.arange(4.0), sharded=True)
    value[:] = -1
    for read in (lambda: w.value.copy(), lambda: w[0].copy(), lambda: synk.gather(w)[0], lambda: +x.value[:3]):
        got = read()
        got[:] = -2
        np.testing.assert_array_equal(read(), np.arange(3.0))
    w.value, x.value = value, np.arange(7.0)
    value[:] = -3
    w.value += 2
    assert_same(everywhere(rt, w), [np.ones(3)] * rt.world_size)
    assert_same(everywhere(rt, x), np.array_split(np.arange(7.0), rt.world_size))


# ----- in functions


def test_variables_can_be_swapped_and_views_of_them_assigned(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    a, b = rt.shared(np.arange(4.0)), rt.shared(np.arange(4.0) * 10)

    def shuffle() -> float:
        a.value, b.value = b.value, a.value
        a.value = a.value[::-1]
        b.value = b.value.reshape(2, 2).T.reshape(-1)
        return 0.0

    f = rt.function(shuffle)
    left, right = np.arange(4.0), np.arange(4.0) * 10
    for _ in range(3):
        f()
        left, right = right[::-1], left.reshape(2, 2).T.reshape(-1)
        assert_same(everywhere(rt, a), [left] * 2)
        assert_same(everywhere(rt, b), [right] * 2)


# ----- which functions share a variable


def test_all_functions_share_the_one_replica_of_each_rank(rt: Any) -> None:
    """Built together or later, through closures, partials and objects."""
    w, x = rt.shared(np.zeros(1)), np.ones(rt.world_size)
    holder = SimpleNamespace(state={"w": w})

    def add(variable: Any, x: np.ndarray) -> Any:
        variable.value = variable.value + 1
        return w.value

    fns = (lambda x: add(w, x), functools.partial(add, w), lambda x: add(holder.state["w"], x))
    first, second = (rt.function(named("early", fn), outputs="max") for fn in fns[:2])
    rt.distribute()
    assert [first(x), second(x)] == [1, 2]
    for count, fn in enumerate(fns, 3):
        assert rt.function(named("late", fn), outputs="max")(x) == count
    assert first(x) == 6
    assert_same(everywhere(rt, w), [np.array([6.0])] * rt.world_size)


# ----- as arguments: shards stay where they are, ``batch`` picks among them


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


# ----- ``updates=``: new values that a function returns, accumulated over the slices of each rank


def test_with_one_slice_the_value_is_stored_as_it_is(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    """No weight is applied where there is nothing to average: no rounding, no overflow, and any op will do."""
    for where, dtype, rows in combinations(12, (3, 0, "1+3"), ("f2", "f4", "f8", "i8", "S3"), (0, 1, 49)):
        rt, new = shared_runtimes[where], (np.random.default_rng(0).normal(size=200) * 100).astype(dtype)
        if new.dtype.kind == "f":
            new[0], new[1] = np.finfo(dtype).max, np.finfo(dtype).tiny
        with subtests.test(where=where, dtype=dtype, rows=rows):
            w = rt.shared(np.zeros(200, dtype))
            for updates in (w, [w], (w,), [(w, "avg")]):
                w.value = np.zeros(200, dtype)
                f = rt.function(lambda x: (x.sum(), [new]), updates=updates, outputs="sum")  # noqa: B023
                assert f(np.ones(rows)) == rows
                assert_same(everywhere(rt, w), [new] * rt.world_size)


def test_a_call_without_arguments_updates_as_well(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    for op in ("avg", "sum", "max"):
        w = rt.shared(np.full(2, 5.0))
        f = rt.function(lambda: (0.0, w.value + 1), updates=[(w, op)], outputs="first")  # noqa: B023
        for num_slices in (1, 3):
            f(num_slices=num_slices)
        assert_same(everywhere(rt, w), [np.full(2, 7.0)] * 3)


def test_several_variables_each_with_its_op(rt: Any) -> None:
    """A function may fill one buffer for all slices. One variable: ``test_shared_sequences.py``."""
    total, largest = rt.shared(0.0, name="total"), rt.shared(np.full(2, -np.inf), name="largest")
    tree = rt.shared({"mean": np.zeros(2), "scale": 0.0, "parts": [np.zeros(2, "f4")]}, name="tree")
    counts = rt.shared(np.zeros(rt.world_size, "i8"), sharded=True, name="counts")

    buffer = np.zeros(2)

    def statistics(x: np.ndarray) -> Any:
        buffer[:] = x.mean(axis=0)
        new_tree = {"mean": buffer, "scale": buffer.mean(), "parts": [buffer.astype("f4")]}
        return {"rows": len(x)}, (x.sum(), x.max(axis=0), new_tree, [len(x)])

    with pytest.raises(ValueError, match=r"got num_slices=2, expected 1, .* 'counts' without an op.*rows"):
        rt.function(lambda x: (0.0, [[len(x)]]), updates=[counts])(np.ones(4), num_slices=2)
    updates = [(total, "sum"), (largest, "max"), tree, (counts, "sum")]
    f = rt.function(statistics, updates=updates, outputs={"rows": "sum"})
    x = np.random.default_rng(0).normal(size=(13, 2))
    parts = np.array_split(x, rt.world_size)
    for num_slices in (1, 3):
        assert f(x, num_slices=num_slices) == {"rows": 13}
        assert_same(everywhere(rt, total), [part.sum() for part in parts], is_rounded=True)
        assert_same(everywhere(rt, largest), [part.max(axis=0) for part in parts])
        means = [part.mean(axis=0) for part in parts]
        trees = [{"mean": mean, "scale": mean.mean(), "parts": [mean.astype("f4")]} for mean in means]
        assert_same(everywhere(rt, tree), trees, is_rounded=True)
        assert_same(everywhere(rt, counts), [np.array([len(part)]) for part in parts])


def test_torch_tensors_are_read_updated_and_assigned(shared_runtimes: Any) -> None:
    rt = shared_runtimes[0]
    w = rt.shared({"a": np.ones((2, 2)), "b": np.zeros(2, "f4")})
    rows = np.arange(6.0).reshape(3, 2)
    x = rt.shared(rows, sharded=True)

    def update(x: Any) -> Any:
        assert type(x).__name__ == type(w.value["a"]).__name__ == "Tensor"
        return x.sum(dim=0), [{"a": w.value["a"] + len(x), "b": w.value["b"] + x.sum(dim=0).float()}]

    def assign(x: Any) -> Any:
        w.value = {"a": w.value["a"] * 2, "b": w.value["b"] * 2}
        return x.sum(dim=0)

    f = rt.function(update, updates=[w], outputs="sum", framework="torch")
    assert_same(f(x), np.array([6.0, 9.0]))
    assert_same(everywhere(rt, w), [{"a": np.full((2, 2), 4.0), "b": rows.sum(axis=0).astype("f4")}])
    g = rt.function(assign, outputs="sum", framework="torch")
    assert_same(g(x, batch=[2, 0, 1]), np.array([6.0, 9.0]))
    assert_same(everywhere(rt, w), [{"a": np.full((2, 2), 8.0), "b": rows.sum(axis=0).astype("f4") * 2}])


# ----- misuse

WRONG_RESULTS: list[tuple[Any, Any, str]] = [
    (1.0, TypeError, r"got a result of type float, expected \(outputs, new_values\)"),
    ((1.0, 2.0, 3.0), TypeError, "type tuple"),
    ((0.0, (np.ones(2), np.ones(2))), ValueError, "'w'.*axes"),
    ((0.0, {"w": np.ones(2)}), ValueError, "'w'.*structure"),
    ((0.0, np.ones(2, complex)), TypeError, "'w'.*complex128"),
    ((0.0, "text"), TypeError, "'w'|update"),
    ((0.0, None), (TypeError, ValueError), "'w'"),
]


def test_a_wrong_result_is_an_error_and_the_next_call_is_right(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w, v = rt.shared(np.ones(2), name="w"), rt.shared(np.ones(2), name="v")
    right = rt.function(lambda x: (0.0, np.ones(2)), updates=[w])
    for result, error, words in WRONG_RESULTS:
        for num_slices in (1, 2):
            with subtests.test(result=str(result), num_slices=num_slices):
                with pytest.raises(error, match=words):
                    rt.function(lambda x: result, updates=[w])(np.ones(4), num_slices=num_slices)  # noqa: B023
                assert_same(everywhere(rt, w), [np.ones(2)] * 2)
                right(np.ones(4), num_slices=num_slices)
    for values in ([np.ones(2)], [np.ones(2)] * 3, np.ones(2), {"w": 1}):
        with pytest.raises(ValueError, match="one for each of the 2 updates"):
            rt.function(lambda x: (0.0, values), updates=[w, v])(np.ones(4))  # noqa: B023
    for updates, error, words in (([3], TypeError, "got int in updates"), ([(w, None)], ValueError, "op None")):
        with pytest.raises(error, match=words):
            rt.function(lambda x: (0.0, 0.0), updates=updates)


def test_new_values_of_all_slices_have_one_shape_and_structure_and_a_dtype_for_the_op(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w, tree = rt.shared(np.ones(2), name="w"), rt.shared({"a": np.zeros(2), "b": np.zeros(2)}, name="tree")
    full, part = {"a": np.ones(2), "b": np.ones(2)}, {"a": np.ones(2)}
    with pytest.raises(ValueError, match=r"update of 'w'.*slice"):
        rt.function(lambda x: (0.0, np.ones(len(x))), updates=[w])(np.ones(10), num_slices=3)
    with pytest.raises(ValueError, match=r"'tree'.*structure"):
        rt.function(lambda x: (0.0, [full if x[0] == 0 else part]), updates=[tree])(np.arange(4.0), num_slices=2)
    # The first slice of each rank is complete: a missing leaf must not be taken for one that adds nothing.
    with pytest.raises(ValueError, match=r"accumulate the update of 'tree'.*structure"):
        rt.function(lambda x: (0.0, [full if x[0] % 2 == 0 else part]), updates=[tree])(np.arange(4.0), num_slices=2)
    assert_same(everywhere(rt, tree), [{"a": np.zeros(2), "b": np.zeros(2)}] * 2)
    for op, dtype in [("avg", "i8"), ("sum", "?"), ("min", "c16"), ("sum", "S3")]:
        state = rt.shared(np.zeros(2, dtype), name="state")
        with pytest.raises(TypeError, match="state"):
            rt.function(lambda x: (0.0, state.value), updates=[(state, op)])(np.ones(4), num_slices=2)  # noqa: B023
        assert_same(everywhere(rt, state), [np.zeros(2, dtype)] * 2)


def test_direct_assignment_and_updates_exclude_each_other(rt: Any) -> None:
    w, v = rt.shared(np.ones(2), name="w"), rt.shared(np.ones(2), name="v")

    def both(x: np.ndarray) -> Any:
        v.value = v.value + 1
        return 0.0, w.value + 1

    def direct(x: np.ndarray) -> float:
        v.value = v.value + 1
        return 0.0

    with pytest.raises(ValueError, match=r"'v' in a function with updates=.*return its new value"):
        rt.function(both, updates=w)(np.ones(4))
    f = rt.function(direct)
    with pytest.raises(ValueError, match=r"'v' with num_slices above 1.*updates="):
        f(np.ones(8), num_slices=2)
    assert_same(everywhere(rt, w), [np.ones(2)] * rt.world_size)
    assert_same(everywhere(rt, v), [np.ones(2)] * rt.world_size)
    f(np.ones(8), num_slices=1)
    assert_same(everywhere(rt, v), [np.full(2, 2.0)] * rt.world_size)
