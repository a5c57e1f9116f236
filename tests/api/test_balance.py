"""``fork(balance="measured")``: rows follow the speed of the ranks, and results stay exact."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import synk
from synk._master.state.balance import EVERY, Balance


def test_results_stay_exact_where_one_rank_is_slow(runtime: Any) -> None:
    def slow_on_1(x: np.ndarray) -> tuple[Any, Any, Any]:
        time.sleep(len(x) * (3e-5 if synk.comm.rank == 1 else 1e-5))
        return x.mean(axis=0), x.sum(axis=0), x

    rt = runtime(2, balance="measured")
    f = rt.function(slow_on_1, outputs=("avg", "sum", "gather"))
    for count in (400, 1, 2, 3, 50):
        x = np.random.default_rng(count).normal(size=(count, 3))
        for _ in range(3 * EVERY):
            mean, total, rows = f(x)
            np.testing.assert_allclose(mean, x.mean(axis=0), rtol=1e-12)
            np.testing.assert_allclose(total, x.sum(axis=0), rtol=1e-11)
            np.testing.assert_array_equal(rows, x)
    with pytest.raises(ValueError, match="cannot fork: got balance="):
        synk.Runtime(1, backend="numpy", balance="Measured")


def test_the_shares_follow_the_speeds() -> None:
    speeds = [1, 1, 1, 0.1]
    balance = Balance(4)
    for _ in range(60 * EVERY):
        rows = [stop - start for start, stop in balance.bounds(10_000)]
        balance.note([0, 1, 2, 3], rows, [int(1e6 * count / speed) for count, speed in zip(rows, speeds)])
    np.testing.assert_allclose(balance.shares, np.array(speeds) / sum(speeds), rtol=0.03)
