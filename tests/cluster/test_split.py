"""Which rows a node gets, and that the partial results of nodes make the result of all ranks. No process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.seeds import examples

from synk._pure.ops import REDUCTIONS, accumulator_dtype
from synk._pure.shards import Selection, select_rows, shard_bounds
from synk._wire.messages import Layout, Leaf
from synk.cluster.head import GatheredOutputs
from synk.cluster.split import Topology, counts_of, own_bounds, rows_between

COUNTS = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
BATCHES = st.one_of(
    st.none(),
    st.integers(1, 30),
    st.builds(slice, st.integers(-30, 30), st.integers(-30, 30), st.sampled_from([-3, -1, 1, 2])),
    st.lists(st.integers(-30, 29), min_size=1, max_size=40),
)


@given(counts=COUNTS)
def test_nodes_play_all_ranks_once(counts: tuple[int, ...]) -> None:
    topology = Topology(counts)
    ranks = [rank for node in range(len(counts)) for rank in topology.ranks_of(node)]
    assert ranks == list(range(topology.total_ranks))
    assert [topology.node_of(rank) for rank in ranks] == [
        node for node, count in enumerate(counts) for _ in range(count)
    ]


@example(counts=(1, 1), batch=slice(1, 0, -3))  # the second node has no rows, from before the first row on
@examples(60)
@given(counts=COUNTS, batch=BATCHES)
def test_ranks_get_the_rows_that_they_would_have_on_one_machine(counts: tuple[int, ...], batch: Any) -> None:
    """The oracle is ``numpy.array_split`` of the rows that NumPy selects, over all ranks at once."""
    array = np.arange(60).reshape(30, 2)
    picked = array if batch is None else array[:batch] if isinstance(batch, int) else array[batch]
    topology = Topology(counts)
    selection = select_rows(batch, len(array), "f")
    bounds = shard_bounds(selection.count, topology.total_ranks)
    found = []
    for node in range(len(counts)):
        low, high, own = own_bounds(bounds, topology.ranks_of(node))
        rows = rows_between(array, selection, low, high)
        assert own[0][0] == 0
        assert own[-1][1] == len(rows)
        found += [rows[start:stop] for start, stop in own]
    for got, want in zip(found, np.array_split(picked, topology.total_ranks), strict=True):
        np.testing.assert_array_equal(got, want)


def test_rows_of_a_range_are_a_view() -> None:
    array = np.arange(40)
    for selection in (Selection(3, 2, 4), Selection(3, 20, -5)):
        assert rows_between(array, selection, 0, 3).base is array


def test_the_number_of_workers() -> None:
    assert [counts_of(2, 3), counts_of((1, 3), 2), counts_of(np.int64(1), 2)] == [(2, 2, 2), (1, 3), (1, 1)]
    wrong: list[tuple[Any, type[Exception]]] = [
        *(((1, 2, 3), ValueError), (0, ValueError), ((2, 0), ValueError), (1.5, TypeError), ("22", TypeError))
    ]
    for num_workers, error in wrong:
        with pytest.raises(error, match="cannot fork: got num_workers="):
            counts_of(num_workers, 2)


# -- partial results --------------------------------------------------------------------------------------------------

DTYPES = ("float16", "float32", "float64", "int8", "uint16", "int64", "complex128")


@examples(60)
@example(op="avg", dtype="float32", counts=(1, 3, 3, 4), seed=45365)
@given(
    op=st.sampled_from(sorted(REDUCTIONS)),
    dtype=st.sampled_from(DTYPES),
    counts=COUNTS,
    seed=st.integers(0, 2**20),
)
def test_partials_of_nodes_make_the_reduction_of_all_ranks(
    op: str, dtype: str, counts: tuple[int, ...], seed: int
) -> None:
    """Each node merges the values of its ranks to a partial result; the head merges those, and finishes once.

    Bit for bit for 16-bit floats, integers, min and max. A wider float may round otherwise in its last bits, because
    it is added up in another order.
    """
    reduction = REDUCTIONS[op]
    if (op == "avg" and dtype[0] in "iu") or (op in ("min", "max") and dtype == "complex128"):
        return
    rng = np.random.default_rng(seed)
    topology = Topology(counts)
    rows = [int(count) for count in rng.integers(1, 9, topology.total_ranks)]
    values = [(rng.normal(size=5) * 3).astype(dtype) for _ in rows]
    want = np.empty(5, dtype)
    with np.errstate(all="ignore"):
        reduction.reduce_into(values, rows, want)
        partials = []
        for node in range(len(counts)):
            own = topology.ranks_of(node)
            partial = np.empty(5, accumulator_dtype(np.dtype(dtype)))
            reduction.merge_into([values[rank] for rank in own], [rows[rank] for rank in own], partial)
            partials.append(partial)
    leaf = Leaf((5,), partials[0].dtype, partial_of=np.dtype(dtype))
    layouts = [Layout(0, (leaf,)) for _ in rows]
    firsts = {topology.ranks_of(node)[0]: partial for node, partial in enumerate(partials)}
    arrays = [[firsts.get(rank)] for rank in range(topology.total_ranks)]
    gathered = GatheredOutputs("f", reduction, None, list(range(len(rows))), layouts, arrays, len(rows))
    got = gathered.build(rows, (), None, None)
    assert got.dtype == want.dtype
    if dtype[0] in "iu" or op in ("min", "max"):
        np.testing.assert_array_equal(got, want)
    else:
        eps = 64 * float(np.finfo(dtype).eps)
        largest = 0 if op == "prod" else np.abs(values).max()  # terms may cancel each other
        np.testing.assert_allclose(got, want, rtol=eps, atol=eps * float(largest))
