"""Random numbers of the ranks: independent of one another, repeatable, and put back after a trial."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import harness

import synk


def draws(x: Any) -> Any:
    return synk.comm.rng.random(len(x))


def streams(seed: int, count: int) -> list[np.random.Generator]:
    return [np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(count)]


@pytest.mark.parametrize("kind", [{}, {"cluster": "here", "nodes": 2}])
def test_ranks_draw_from_spawned_streams_which_go_on(runtime: Any, kind: dict[str, Any]) -> None:
    """Whoever takes part, on nodes too, and after a trial, which puts the generators back."""
    rt = runtime((1, 2) if kind else 3, seed=11, backend="numpy", **kind)
    function = rt.function(draws, outputs="gather")
    ways = (function, lambda x: function.submit(x).result(), function)
    expected = streams(11, 3)
    for way in ways:
        np.testing.assert_array_equal(way(np.zeros(6)), np.concatenate([each.random(2) for each in expected]))
        report = function.verify(np.zeros(6))
        assert not report and "random" in str(report)
    shards, each_draws = rt.shared(np.arange(3.0), sharded=True), rt.function(draws, outputs=None)
    for ranks in ([2], [1, 2], [0, 1, 2], [0, 2]):
        drawn = each_draws(shards, batch=ranks)
        assert drawn == [expected[rank].random(1) if rank in ranks else None for rank in range(3)]


@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
def test_a_worker_that_takes_the_place_of_another_draws_numbers_of_its_own(runtime: Any) -> None:
    """And so does another runtime without a seed, and an inline rank is rank 0."""
    rt = runtime(2, seed=3)
    function = rt.function(draws, outputs="gather")
    before = function(np.zeros(4))
    harness.kill_and_wait(harness.pids(rt)[1])
    after = function(np.zeros(4))
    assert not np.intersect1d(before[2:], after[2:]).size
    inline = runtime(0).function(draws, outputs="gather")(np.zeros(8))
    assert not np.intersect1d(before, inline).size
    seeded = runtime(0, seed=2).function(draws, outputs="gather")(np.zeros(5))
    np.testing.assert_array_equal(seeded, streams(2, 1)[0].random(5))


def test_what_is_no_seed_is_refused() -> None:
    for seed in (-1, 1.5, "a", True):
        with pytest.raises(ValueError, match="cannot fork: got seed="):
            synk.Runtime(1, backend="numpy", seed=seed)
