"""Shared variables: replicas and shards that stay on the ranks, read and assigned by functions and by the master.

The oracle is NumPy on a list of one array per rank.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.rank_arrays import assert_same, assigner, everywhere, numbers

WORKERS = (1, 2, 3, 4)
EVERYWHERE = (3, "inline", "1+3", *(pytest.param(where, marks=pytest.mark.storm) for where in (1, 2, 4)))
DTYPES = ("f2", "f4", "f8", "i1", "i8", "u4", "c8", "c16", "?", "S3", "U2", "i4,f8", "M8[s]")


def each(rt: Any, make: Callable[[int], Any]) -> list[Any]:
    """Return ``make(rank)`` for every rank."""
    return [make(rank) for rank in range(rt.world_size)]


def rows_of(rt: Any, x: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each rank."""
    return np.array_split(x, rt.world_size)


# ----- values


@pytest.mark.sampled(60)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replica_is_the_same_array_on_every_rank(shared_runtimes: Any, where: Any, dtype: str) -> None:
    rt = shared_runtimes[where]
    value = numbers(dtype, (4, 3), 0)
    w = rt.shared(value, name="w")
    assert_same(everywhere(rt, w), [value] * rt.world_size)
    assert_same(w.value, value)
    assert (w.shape, w.dtype, w.name, w.is_sharded) == (value.shape, value.dtype, "w", False)
    assert_same(rt.function(lambda: (w.value, w.shape, w.dtype, w.name), outputs="first")()[0], value)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 8])
@pytest.mark.parametrize("dtype", ["f8", "i1", "U2"])
def test_shards_are_what_array_split_gives(shared_runtimes: Any, where: Any, num_rows: int, dtype: str) -> None:
    rt = shared_runtimes[where]
    value = numbers(dtype, (num_rows, 2), 1)
    x = rt.shared(value, sharded=True)
    assert_same(everywhere(rt, x), rows_of(rt, value))
    assert_same(x.value, value)
    assert x.shape == value.shape
    assert x.lengths == rt.get_lengths(x) == [len(part) for part in rows_of(rt, value)]
    assert rt.get_shapes(x) == [part.shape for part in rows_of(rt, value)]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("where", [1, 2, "inline", "1+3"])
@pytest.mark.parametrize(
    "value",
    [1.5, np.float32(2), np.zeros(()), True, [1.0, 2.0], [[1, 2], [3, 4]], np.zeros((0, 3)), np.zeros((2, 0)),
     np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(10)[::-3], np.arange(3, dtype=">i4")],
)  # fmt: skip
def test_any_array_like_can_be_shared(shared_runtimes: Any, where: Any, value: Any) -> None:
    rt = shared_runtimes[where]
    w = rt.shared(value)
    expected = np.asarray(value)
    expected = expected.astype(expected.dtype.newbyteorder("="))
    assert_same(everywhere(rt, w), [expected] * rt.world_size)


def test_the_master_gets_copies_and_gives_copies(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    value = np.arange(3.0)
    w, x = rt.shared(value), rt.shared(np.arange(4.0), sharded=True)
    value[:] = -1
    for read in (lambda: w.value.copy(), lambda: rt.get_value(w, 1), lambda: rt.gather(w)[0], lambda: +x.value[:3]):
        got = read()
        np.testing.assert_array_equal(got, np.arange(3.0))
        got[:] = -2
        np.testing.assert_array_equal(read(), np.arange(3.0))
    new = np.full(3, 5.0)
    w.value = new
    new[:] = -3
    assert_same(everywhere(rt, w), [np.full(3, 5.0)] * 2)


@pytest.mark.parametrize("where", EVERYWHERE)
def test_assigning_in_the_master_broadcasts_or_scatters(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    w, x = rt.shared(np.zeros(3)), rt.shared(np.zeros((4, 2)), sharded=True)
    w.value = [1, 2, 3]
    w.value += 1
    assert_same(everywhere(rt, w), [np.array([2.0, 3, 4])] * rt.world_size)
    rows = numbers("f8", (7, 2), 0)
    x.value = rows
    assert_same(everywhere(rt, x), rows_of(rt, rows))


# ----- in functions


@pytest.mark.parametrize("where", EVERYWHERE)
def test_an_assignment_is_the_ranks_own_and_holds_from_the_next_call_on(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    w = rt.shared(np.zeros(2), name="w")

    def add(x: np.ndarray) -> Any:
        before = w.value
        w.value = w.value + x.sum()
        return before, w.value, w.value is w.value

    f = rt.function(add, outputs=(None, None, None))
    x = np.arange(9.0)
    expected = [np.zeros(2)] * rt.world_size
    for _ in range(3):
        before, after, _ = f(x)
        assert_same(before, expected)
        expected = [value + rows.sum() for value, rows in zip(expected, rows_of(rt, x), strict=True)]
        assert_same(after, expected)
        assert_same(everywhere(rt, w), expected)
    assert_same(w.value, expected[0])


@pytest.mark.parametrize("where", [2, "inline", "1+3"])
def test_values_are_read_only_in_functions_and_the_error_says_what_to_do(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    w = rt.shared(np.zeros(2))

    def in_place(x: np.ndarray, kind: str) -> float:
        if kind == "item":
            w.value[0] = 1
        elif kind == "augmented":
            w.value += 1
        else:
            w.value = w.value + 1
            w.value[0] = 9
        return 0.0

    f = rt.function(in_place, bcast_inputs="kind")
    for kind in ("item", "augmented", "pending"):
        with pytest.raises(ValueError, match="read-only") as caught:
            f(np.ones(2), kind)
        assert any("shared variables are read-only" in note for note in caught.value.__notes__)
    assert_same(everywhere(rt, w), [np.zeros(2)] * rt.world_size)


@pytest.mark.parametrize("where", EVERYWHERE)
def test_ranks_without_rows_follow_the_lowest_rank_that_ran(shared_runtimes: Any, where: Any) -> None:
    """Replicas would drift apart otherwise; shards stay as they are."""
    rt = shared_runtimes[where]
    w, x = rt.shared(np.zeros(2)), rt.shared(np.arange(8.0), sharded=True)

    def add(rows: np.ndarray) -> float:
        w.value = np.full(len(rows) + 1, rows.sum())
        x.value = x.value + 1
        return 0.0

    rt.function(add)(np.array([7.0]))
    assert_same(everywhere(rt, w), [np.array([7.0, 7.0])] * rt.world_size)
    shards = rows_of(rt, np.arange(8.0))
    assert_same(everywhere(rt, x), [shards[0] + 1, *shards[1:]])
    rt.function(add)(np.array([1.0, 2.0]))
    expected = [np.array([3.0] * 3)] if rt.world_size == 1 else [np.full(2, 1.0), np.full(2, 2.0)]
    assert_same(everywhere(rt, w), (expected + [expected[0]] * rt.world_size)[: rt.world_size])


@pytest.mark.parametrize("where", EVERYWHERE)
def test_one_rank_may_assign_and_another_not(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    w, v = rt.shared(0), rt.shared(0.5)

    def some(x: np.ndarray) -> float:
        if x[0] % 2:
            w.value = int(x[0])
        else:
            v.value = x[0]
        return 0.0

    f = rt.function(some)
    for _ in range(2):
        f(np.arange(rt.world_size) + 1.0)
        assert_same(everywhere(rt, w), each(rt, lambda rank: np.asarray(rank + 1 if rank % 2 == 0 else 0)))
        assert_same(everywhere(rt, v), each(rt, lambda rank: np.asarray(0.5 if rank % 2 == 0 else rank + 1.0)))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("sharded", [False, True])
def test_axis_0_may_change_in_functions_on_each_rank_by_its_own(
    shared_runtimes: Any, where: Any, sharded: bool
) -> None:
    """Growing takes a new buffer, shrinking none; every length in between, and none at all."""
    rt = shared_runtimes[where]
    w = rt.shared(numbers("f4", (4, 3), 0), sharded=sharded)
    expected = everywhere(rt, w)

    def resize(value: np.ndarray, x: np.ndarray) -> np.ndarray:
        return np.resize(value, (int(x[0]), 3)) + np.float32(1)

    f = assigner(rt, w, resize)
    for lengths in ([5, 1, 7, 2], [2, 9, 0, 2000], [5000, 1, 1, 0], [3, 3, 3, 3], [0, 0, 0, 0], [1, 2, 3, 4]):
        x = np.array(lengths[: rt.world_size], float)
        f(x)
        expected = [resize(value, rows) for value, rows in zip(expected, rows_of(rt, x), strict=True)]
        assert_same(everywhere(rt, w), expected)
    assert rt.get_lengths(w) == [1, 2, 3, 4][: rt.world_size]


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("output", [1, 30_000, 70_000])
@pytest.mark.parametrize("num_outputs", [1, 4])
@pytest.mark.sampled(20)
def test_a_second_message_keeps_what_was_stored_before_it(
    shared_runtimes: Any, where: Any, output: int, num_outputs: int
) -> None:
    """Ranks whose buffers have room have stored their value when others ask for more room, or the outputs do."""
    rt = shared_runtimes[where]
    x = rt.shared(np.arange(3.0), sharded=True)
    rt.broadcast(x)  # rank 0 has one buffer, the others two, of other lengths

    def body(rows: np.ndarray) -> Any:
        x.value = np.concatenate([x.value[::-1], rows])
        return (np.full(output, rows.sum()),) * num_outputs

    f = rt.function(body, outputs="sum")
    expected = everywhere(rt, x)
    for num_rows in (rt.world_size, 3 * rt.world_size, 1):
        rows = np.arange(float(num_rows))
        assert_same(f(rows), (np.full(output, rows.sum()),) * num_outputs)
        expected = [
            np.concatenate([value[::-1], part]) if len(part) else value
            for value, part in zip(expected, rows_of(rt, rows), strict=True)
        ]
        assert_same(everywhere(rt, x), expected)


@pytest.mark.parametrize("where", [1, 2, "inline", "1+3"])
def test_values_without_axes_keep_none(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    for start in (np.float32(1.5), np.int64(3)):
        z = rt.shared(start)
        f = assigner(rt, z, lambda value, x: value * 2)
        for power in (2, 4, 8):
            f(np.ones(rt.world_size))
            assert_same(everywhere(rt, z), [np.asarray(start * power)] * rt.world_size)
    z32 = rt.shared(np.float32(0))
    assigner(rt, z32, lambda value, x: 0.1)(np.ones(rt.world_size))
    assert_same(everywhere(rt, z32), [np.asarray(np.float32(0.1))] * rt.world_size)


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


@pytest.mark.parametrize("where", [2, "inline", "1+3"])
def test_all_functions_share_the_one_replica_of_each_rank(shared_runtimes: Any, where: Any) -> None:
    """Built together or later, redefined, through closures, partials, methods and objects."""
    rt = shared_runtimes[where]
    w = rt.shared(np.zeros(1), name="w")

    class Holder:
        def __init__(self) -> None:
            self.state = {"w": w}

        def add(self, x: np.ndarray) -> Any:
            self.state["w"].value = self.state["w"].value + 1
            return w.value

    def add(variable: Any, x: np.ndarray) -> Any:
        variable.value = variable.value + 1
        return variable.value

    first = rt.function(lambda x: add(w, x), outputs="max")
    second = rt.function(functools.partial(add, w), outputs="max", name="second")
    x = np.ones(rt.world_size)
    rt.distribute()
    assert first(x) == 1
    assert second(x) == 2
    later = rt.function(Holder().add, outputs="max")
    assert later(x) == 3
    for count in (4, 5):  # a redefined function is sent again

        def again(x: np.ndarray) -> Any:
            return add(w, x)

        assert rt.function(again, outputs="max")(x) == count
    assert first(x) == 6
    assert_same(everywhere(rt, w), [np.array([6.0])] * rt.world_size)


def test_a_global_bound_anew_before_the_function_is_sent(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    scope: dict[str, Any] = {"w": rt.shared(np.zeros(1)), "__name__": "__main__"}
    exec("def add(x):\n    w.value = w.value + 1\n    return 0.0", scope)
    f = rt.function(scope["add"])
    scope["w"] = newer = rt.shared(np.ones(2))
    f(np.ones(2))
    assert_same(everywhere(rt, newer), [np.full(2, 2.0)] * 2)
    del newer, scope["w"]
    gc.collect()
    with pytest.raises(NameError, match="'w'"):  # as the plain function would say now
        f(np.ones(2))


def test_a_variable_made_after_another_function_was_sent(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    x = np.arange(6.0)
    f = rt.function(lambda x: x.sum(), outputs="sum")
    assert f(x) == 15
    w = rt.shared(2.0)
    g = rt.function(lambda x: x.sum() * w.value, outputs="sum")
    assert (f(x), g(x)) == (15, 30)
    w.value = 3.0
    assert (f(x), g(x)) == (15, 45)


# ----- nested state


def model(seed: int) -> dict[str, Any]:
    """Return the parameters of a small model: a nesting of arrays of several dtypes."""
    return {
        "layers": [
            (numbers("f8", (3, 2), seed), numbers("f8", (2,), seed + 1)),
            (numbers("f4", (2, 2), seed + 2), None),
        ],
        "step": np.asarray(np.int64(seed)),
        "empty": np.zeros((0, 2)),
    }


def times(tree: Any, factor: int) -> Any:
    """Return the nesting with every array multiplied."""
    if isinstance(tree, dict):
        return {key: times(value, factor) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(times(value, factor) for value in tree)
    return None if tree is None else np.asarray(tree * tree.dtype.type(factor))


@pytest.mark.parametrize("where", EVERYWHERE)
def test_a_nesting_of_arrays_is_one_variable(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    params = rt.shared(model(3), name="params")
    assert_same(everywhere(rt, params), [model(3)] * rt.world_size)
    assert params.shape == {"layers": [((3, 2), (2,)), ((2, 2), None)], "step": (), "empty": (0, 2)}
    assert params.dtype["layers"][1] == (np.dtype("f4"), None)
    f = assigner(rt, params, lambda value, x: times(value, int(x[0])))
    f(np.arange(rt.world_size) + 2.0)
    assert_same(everywhere(rt, params), each(rt, lambda rank: times(model(3), rank + 2)))
    params.value = model(5)
    assert_same(everywhere(rt, params), [model(5)] * rt.world_size)
