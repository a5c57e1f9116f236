"""Random numbers of the ranks: independent of one another, repeatable, and put back after a trial."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import harness

import synk
from synk.errors import WorkerDied

Fork = Callable[..., Any]


def draws(x: Any) -> Any:
    return synk.comm.rng.random(len(x))


def streams(seed: int, count: int) -> list[np.random.Generator]:
    return [np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(count)]


def test_ranks_draw_from_spawned_streams_which_go_on(runtime: Fork) -> None:
    function = runtime(3, seed=11).function(draws, outputs="gather")
    expected = streams(11, 3)
    for _ in range(4):
        np.testing.assert_array_equal(function(np.zeros(6)), np.concatenate([each.random(2) for each in expected]))
    got = function.submit(np.zeros(6)).result()
    np.testing.assert_array_equal(got, np.concatenate([each.random(2) for each in expected]))


def test_without_a_seed_each_runtime_draws_others(runtime: Fork) -> None:
    first, second = (runtime(1).function(draws, outputs="gather")(np.zeros(8)) for _ in range(2))
    assert not np.intersect1d(first, second).size


def test_a_trial_puts_the_generator_back(runtime: Fork) -> None:
    rt = runtime(2, seed=5)
    function = rt.function(draws, outputs="gather", name="draws")
    report = function.verify(np.zeros(4))
    assert not report and "random" in str(report)
    np.testing.assert_array_equal(function(np.zeros(4)), np.concatenate([each.random(2) for each in streams(5, 2)]))


def test_a_worker_that_takes_the_place_of_another_draws_numbers_of_its_own(runtime: Fork) -> None:
    rt = runtime(2, seed=3)
    function = rt.function(draws, outputs="gather")
    before = function(np.zeros(4))
    os.kill(harness.pids(rt)[1], signal.SIGKILL)
    try:
        after = function(np.zeros(4))
    except WorkerDied:
        after = function(np.zeros(4))
    assert not np.intersect1d(before[2:], after[2:]).size


def test_an_inline_rank_is_rank_0() -> None:
    with synk.Runtime(inline=True, backend="numpy", seed=2) as rt:
        got = rt.function(draws, outputs="gather")(np.zeros(5))
    np.testing.assert_array_equal(got, streams(2, 1)[0].random(5))


@pytest.mark.parametrize("seed", (-1, 1.5, "a", True))
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match="cannot fork: got seed="):
        synk.Runtime(1, backend="numpy", seed=seed)
