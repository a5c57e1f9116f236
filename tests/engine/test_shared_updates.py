"""``updates=``: new values of shared variables that a function returns, accumulated over the slices of each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.rank_arrays import assert_same, everywhere
from support.tables import combinations


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


@pytest.mark.parametrize("where", [3, 0, "1+3"])
def test_several_variables_each_with_its_op(shared_runtimes: Any, where: Any) -> None:
    """A function may fill one buffer for all slices. One variable: ``test_shared_sequences.py``."""
    rt = shared_runtimes[where]
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


@pytest.mark.parametrize("where", [2, 0, "1+3"])
def test_direct_assignment_and_updates_exclude_each_other(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
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
