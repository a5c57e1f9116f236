"""Which ranks each node plays. No process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.seeds import examples

from synk.cluster.split import Topology, counts_of

COUNTS = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@examples(60)
@given(counts=COUNTS)
def test_nodes_play_all_ranks_once(counts: tuple[int, ...]) -> None:
    topology = Topology(counts)
    ranks = [rank for node in range(len(counts)) for rank in topology.ranks_of(node)]
    assert ranks == list(range(sum(counts)))
    assert [topology.node_of(rank) for rank in ranks] == [
        node for node, count in enumerate(counts) for _ in range(count)
    ]


def test_the_number_of_workers() -> None:
    assert [counts_of(2, 3), counts_of((1, 3), 2), counts_of(np.int64(1), 2)] == [(2, 2, 2), (1, 3), (1, 1)]
    wrong: list[tuple[Any, type[Exception]]] = [
        *(((1, 2, 3), ValueError), (0, ValueError), ((2, 0), ValueError), (1.5, TypeError), ("22", TypeError))
    ]
    for num_workers, error in wrong:
        with pytest.raises(error, match="cannot fork: got num_workers="):
            counts_of(num_workers, 2)
