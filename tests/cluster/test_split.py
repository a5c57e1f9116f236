"""Which rows a node gets, and that the partial results of nodes make the result of all ranks. No process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.seeds import examples

from synk._pure.shards import select_rows, shard_bounds
from synk.cluster.split import Topology, counts_of, own_bounds

COUNTS = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
BATCHES = st.one_of(
    st.none(),
    st.integers(1, 30),
    st.builds(slice, st.integers(-30, 30), st.integers(-30, 30), st.sampled_from([-3, -1, 1, 2])),
    st.lists(st.integers(-30, 29), min_size=1, max_size=40),
)


@examples(60)
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
        rows = array[selection.between(low, high)]
        assert own[0][0] == 0
        assert own[-1][1] == len(rows)
        found += [rows[start:stop] for start, stop in own]
    for got, want in zip(found, np.array_split(picked, topology.total_ranks), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_number_of_workers() -> None:
    assert [counts_of(2, 3), counts_of((1, 3), 2), counts_of(np.int64(1), 2)] == [(2, 2, 2), (1, 3), (1, 1)]
    wrong: list[tuple[Any, type[Exception]]] = [
        *(((1, 2, 3), ValueError), (0, ValueError), ((2, 0), ValueError), (1.5, TypeError), ("22", TypeError))
    ]
    for num_workers, error in wrong:
        with pytest.raises(error, match="cannot fork: got num_workers="):
            counts_of(num_workers, 2)
