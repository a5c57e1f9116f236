"""Calls over nodes equal NumPy on the whole input, and the same call on one machine with as many workers."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.seeds import examples
from test_exactness import DTYPES, KERNELS, assert_equal, pick, picked_by, reference, rows_of

import synk
from synk.errors import CollectiveMismatch

NODES = ("1+3", "2+2")
Pair = collections.namedtuple("Pair", "low high")


@pytest.fixture(scope="module")
def functions(shared_runtimes: Any) -> Callable[[Any, str], Any]:
    made: dict[tuple[Any, str], Any] = {}

    def function(where: Any, op: str) -> Any:
        if (where, op) not in made:
            made[where, op] = shared_runtimes[where].function(KERNELS[op], outputs=op, name=op)
        return made[where, op]

    return function


@examples(60)
@given(
    nodes=st.sampled_from(NODES),
    op=st.sampled_from(sorted(KERNELS)),
    rows=st.integers(1, 20),
    columns=st.integers(1, 3),
    seed=st.integers(0, 2**20),
    batch_kind=st.sampled_from(["none", "none", "count", "slice", "step", "backwards", "list", "array", "mask"]),
    num_slices=st.sampled_from([1, 1, 2, 3]),
    data=st.data(),
)
def test_calls_equal_numpy_and_one_machine(
    functions: Any, nodes: str, op: str, rows: int, columns: int, seed: int, batch_kind: str, num_slices: int, data: Any
) -> None:
    """Every op and dtype, batch, number of slices; also fewer rows than ranks. On one machine: bit for bit."""
    dtype = data.draw(st.sampled_from(DTYPES[op]))
    x = rows_of(dtype, op, rows, columns, seed)
    batch = pick(batch_kind, rows, np.random.default_rng(seed))
    got = functions(nodes, op)(x, batch=batch, num_slices=num_slices)
    assert_equal(got, reference(op, picked_by(batch, x)), op)
    on_one = functions(4, op)(x, batch=batch, num_slices=num_slices)
    assert np.asarray(got).tobytes() == np.asarray(on_one).tobytes()
    assert_equal(functions(nodes, op).serial(x, batch=batch), reference(op, picked_by(batch, x)), op)


def test_large_reductions_of_nodes(nodes: synk.Runtime, subtests: Any) -> None:
    """From 256 KB on the workers of a node reduce, each its chunk; the head merges the partial results of the nodes."""
    rng = np.random.default_rng(3)
    for op, dtype in itertools.product(["avg", "sum", "prod", "min", "max"], ["float16", "float32", "int32"]):
        if (op, dtype) == ("avg", "int32"):
            continue
        x = rng.integers(-2, 3, (7, 140_000)).astype(dtype)
        f = nodes.function(lambda x, op=op: (KERNELS[op](x), x[:, :2]), bcast_inputs="op", outputs=(op, "gather"))
        for turn in range(3):  # the ranks put their parts in place without being asked from the second call on
            with subtests.test(case=f"{op} of {dtype}, call {turn}"):
                large, small = f(x)
                assert_equal(large, reference(op, x), op)
                np.testing.assert_array_equal(small, x[:, :2])


def test_large_gathered_outputs(nodes: synk.Runtime) -> None:
    """Ranks with large parts and with small ones."""
    grown = nodes.function(lambda x: np.repeat(x, 30_000 if x[0] else 10)[:, None], outputs="gather")
    x = np.array([1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 0.0])
    want = grown.serial(x[:2])
    assert want.shape == (60_000, 1)
    parts = [np.repeat(part, 30_000 if part[0] else 10)[:, None] for part in np.array_split(x, 4)]
    np.testing.assert_array_equal(grown(x), np.concatenate(parts))


def test_structures_of_outputs(nodes: synk.Runtime) -> None:
    f = nodes.function(
        lambda x, k: (x * k, {"mean": x.mean(), "n": len(x)}, [x.max(), None], Pair(x.min(), str(len(x)))),
        bcast_inputs="k",
        outputs=("gather", {"mean": "avg", "n": None}, "max", ("min", "first")),
    )
    x = np.arange(7.0)
    doubled, found, (largest, nothing), pair = f(x, 2.0)
    np.testing.assert_array_equal(doubled, 2 * x)
    assert found == {"mean": 3.0, "n": [2, 2, 2, 1]}
    assert (largest, nothing) == (6.0, None)
    assert pair == Pair(0.0, "2")
    assert type(pair) is Pair
    assert f(x[:2], 1.0)[1] == {"mean": 0.5, "n": [1, 1, None, None]}


class Median(synk.Op):
    concatenates = True

    def finish(self, value: Any) -> Any:
        return np.median(value, axis=0)


class Weighted(synk.Op):
    def combine(self, values: list[Any], rows: list[int]) -> Any:
        return sum(value * count for value, count in zip(values, rows))


def test_ops_of_the_users_stay_in_the_program(nodes: synk.Runtime) -> None:
    """A callable, and ops that combine or concatenate; also over slices."""
    x = np.arange(10.0)
    outputs = (lambda a, b: max(a, b), Median(), Weighted())
    f = nodes.function(lambda x: (float(x.max()), x, float(x.mean())), outputs=outputs)
    for num_slices in (1, 2):
        assert f(x, num_slices=num_slices) == (9.0, 4.5, 45.0)


def test_rows_of_lists(nodes: synk.Runtime) -> None:
    texts = nodes.function(lambda x: [f"{value:g}" for value in x], outputs="gather")
    assert texts(np.arange(6.0)) == ["0", "1", "2", "3", "4", "5"]


def test_tables_and_sparse_matrices(nodes: synk.Runtime) -> None:
    pandas, sparse = pytest.importorskip("pandas"), pytest.importorskip("scipy.sparse")
    table = pandas.DataFrame({"a": np.arange(7.0), "b": np.arange(7)}, index=list("abcdefg"))
    doubled = nodes.function(lambda frame: frame * 2, outputs="gather")
    pandas.testing.assert_frame_equal(doubled(table), table * 2)
    matrix = sparse.random(9, 5, 0.4, format="csr", random_state=1)
    total = nodes.function(lambda m: np.asarray(m.sum(axis=0)).ravel(), outputs="sum")
    np.testing.assert_allclose(total(matrix), np.asarray(matrix.sum(axis=0)).ravel(), rtol=1e-12)


@dataclass
class Batch:
    x: Any
    label: str


def test_nested_arguments(nodes: synk.Runtime) -> None:
    f = nodes.function(
        lambda fields, weights: (fields.x @ weights["w"] + weights["list"][1], fields.label),
        bcast_inputs="weights",
        outputs=("gather", "first"),
    )
    x = np.arange(10.0).reshape(5, 2)
    weights = {"w": np.array([1.0, 2.0]), "list": [None, 3.0, "text"]}
    got, label = f(Batch(x, "train"), weights)
    np.testing.assert_array_equal(got, x @ weights["w"] + 3.0)
    assert label == "train"
    with_key = nodes.function(lambda x, *, scale: x["a"] * scale, bcast_inputs="scale", outputs="gather")
    np.testing.assert_array_equal(with_key({"a": x}, scale=2), 2 * x)


def test_tensors(nodes: synk.Runtime) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(12.0, dtype=torch.bfloat16).reshape(6, 2)
    f = nodes.function(lambda x, w: x * w, bcast_inputs="w", outputs="gather", framework="torch")
    got = f(x, torch.tensor(3.0))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, x * 3)


def test_no_rows_and_functions_without_rows(nodes: synk.Runtime) -> None:
    total = nodes.function(lambda x: x.sum(axis=0), outputs="sum")
    np.testing.assert_array_equal(total(np.empty((0, 3))), np.zeros(3))
    ranks = nodes.function(
        lambda: (synk.comm.rank, synk.comm.world_size, str(synk.comm.ranks)), outputs=None, per_rank=True
    )
    assert ranks() == [(rank, 4, "(0, 1, 2, 3)") for rank in range(4)]
    mean = nodes.function(lambda x: x.mean(), outputs="avg")
    with pytest.raises(ValueError, match="with no rows"):
        mean(np.empty(0))


def test_random_numbers_are_those_of_one_machine() -> None:
    streams = [np.random.default_rng(each) for each in np.random.SeedSequence(7).spawn(4)]
    with synk.Runtime((1, 3), cluster="here", nodes=2, seed=7) as rt:
        draw = rt.function(lambda: synk.comm.rng.random(3), outputs="gather", per_rank=True)
        np.testing.assert_array_equal(draw(), np.concatenate([each.random(3) for each in streams]))


def test_blocks_give_the_bits_of_any_number_of_workers(nodes: synk.Runtime, shared_runtimes: Any) -> None:
    x = np.random.default_rng(1).normal(size=(1000, 2))
    found = [
        rt.function(lambda x: x.sum(axis=0), outputs="sum", reproducible=True, block_rows=64)(x)
        for rt in (nodes, shared_runtimes[1])
    ]
    assert found[0].tobytes() == found[1].tobytes()


def test_repetitions_and_subsets(nodes: synk.Runtime) -> None:
    counts: list[int] = []
    f = nodes.function(lambda x: (counts.append(1), x.sum(), len(counts))[1:], outputs=("sum", "max"))
    assert f.repeat(3, np.arange(5.0)) == (10.0, 3)
    assert f(np.arange(5.0), output_subset=[0]) == (10.0,)


def test_submitted_calls_streams_and_blocks_of_rows(nodes: synk.Runtime) -> None:
    total = nodes.function(lambda x: x.sum(), outputs="sum")
    x = np.ones(4)
    calls = []
    for k in range(5):
        x[:] = k  # a submitted call has the values of the moment
        calls.append(total.submit(x))
    assert [call.result() for call in calls] == [4.0 * k for k in range(5)]
    assert list(total.stream(np.full(4, k) for k in range(4))) == [0, 4, 8, 12]
    assert list(total.rows(np.arange(10.0), batch_size=4)) == [6.0, 22.0, 17.0]
    talks = nodes.function(lambda x: synk.comm.all_reduce(x.sum(), "sum"), outputs="first")
    assert [call.result() for call in [talks.submit(np.full(4, float(k))) for k in range(6)]] == [
        4.0 * k for k in range(6)
    ]


def test_ranks_of_two_nodes_that_disagree_are_all_named(nodes: synk.Runtime) -> None:
    f = nodes.function(lambda x: np.zeros(1 + int(x[0] == 6)), outputs="sum")
    shapes = r"rank 0: float64 \(1,\); rank 1: float64 \(1,\); rank 2: float64 \(1,\); rank 3: float64 \(2,\)"
    with pytest.raises(CollectiveMismatch, match=shapes):
        f(np.arange(8.0))
    g = nodes.function(lambda x: (1.0, 2.0) if x[0] < 4 else {"a": 1.0}, outputs="max")
    with pytest.raises(CollectiveMismatch, match=r"rank 1: .*; rank 2: .*value"):
        g(np.arange(8.0))


def test_a_large_output_that_differs_on_one_node(nodes: synk.Runtime) -> None:
    f = nodes.function(lambda x: np.zeros(100_000 + int(x[0] == 6)), outputs="sum")
    with pytest.raises(CollectiveMismatch, match=r"rank 2: float64 \(100000,\); rank 3: float64 \(100001,\)"):
        f(np.arange(8.0))
    np.testing.assert_array_equal(f(np.arange(4.0)), np.zeros(100_000))
