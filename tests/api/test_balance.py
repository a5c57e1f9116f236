"""``fork(balance="measured")``: rows follow the speed of the ranks, and results stay exact."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

import synk
from synk._master.state.balance import EVERY, MOST, Balance

X = np.random.default_rng(1).normal(size=(400, 3))


def slow_on_1(x: np.ndarray) -> tuple[Any, Any, Any]:
    """Take three times as long for a row on rank 1."""
    time.sleep(len(x) * (3e-5 if synk.comm.rank == 1 else 1e-5))
    return x.mean(axis=0), x.sum(axis=0), x


def test_a_slow_rank_gets_fewer_rows_and_results_stay_exact() -> None:
    with synk.Runtime(2, backend="numpy", balance="measured") as rt:
        f = rt.function(slow_on_1, outputs=("avg", "sum", "gather"))
        for _ in range(12 * EVERY):
            mean, total, rows = f(X)
            np.testing.assert_allclose(mean, X.mean(axis=0), rtol=1e-12)
            np.testing.assert_allclose(total, X.sum(axis=0), rtol=1e-12)
            np.testing.assert_array_equal(rows, X)
        plan = f.plan(X)
        assert sum(rank.rows for rank in plan.ranks) == len(X)
        assert plan.ranks[0].rows > 1.2 * plan.ranks[1].rows
        assert f._callee.record.num_new < 12 * EVERY / 2  # most calls fit the one before


def test_small_batches_reach_all_rows() -> None:
    with synk.Runtime(3, backend="numpy", balance="measured") as rt:
        rt._session.balance.shares = [0.9, 0.05, 0.05]
        f = rt.function(lambda x: x.sum(), outputs="sum")
        for count in range(1, 20):
            assert f(np.arange(float(count))) == count * (count - 1) / 2
            assert f(np.ones(30), batch=count) == count


SPEEDS = [[1, 1], [2, 1], [1, 4, 2], [1, 1, 1, 0.1]]


@pytest.mark.parametrize("speeds", SPEEDS, ids=str)
def test_the_shares_follow_the_speeds_by_a_tenth_at_most(speeds: list[float]) -> None:
    balance, ranks = Balance(len(speeds)), list(range(len(speeds)))
    for _ in range(60 * EVERY):
        bounds = balance.bounds(10_000)
        rows = [stop - start for start, stop in bounds]
        assert bounds[0][0] == 0 and bounds[-1][1] == 10_000
        assert all(first[1] == second[0] for first, second in itertools.pairwise(bounds))
        before = list(balance.shares)
        balance.note(ranks, rows, [int(1e6 * count / speed) for count, speed in zip(rows, speeds)])
        moved = [new / old for new, old in zip(balance.shares, before)]
        assert max(moved) <= (1 + MOST) / (1 - MOST) and min(moved) >= (1 - MOST) / (1 + MOST)
        assert sum(balance.shares) == pytest.approx(1)
    np.testing.assert_allclose(balance.shares, np.array(speeds) / sum(speeds), rtol=0.03)


def test_ranks_without_rows_or_times_change_nothing() -> None:
    balance = Balance(3)
    for _ in range(4 * EVERY):
        assert not balance.note([0, 1], [5, 5], [1, 100])
        assert not balance.note([0, 1, 2], [5, 5, 0], [1, 100, 1])
    assert balance.shares == [1 / 3] * 3


@pytest.mark.parametrize("balance", ["", "Measured", None, True])
def test_unknown_balances_are_refused(balance: Any) -> None:
    with pytest.raises(ValueError, match="cannot fork: got balance="):
        synk.Runtime(1, backend="numpy", balance=balance)
