"""Options of calls that are on their way out: one test of what each promises until then."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from support.tables import combinations

X = np.arange(12.0).reshape(6, 2)


def test_minibatch_data_goes_row_by_row_with_the_rows_that_the_batch_picks(subtests: Any, shared_runtimes: Any) -> None:
    """In the order in which it picks them; ``shard_batch`` picks rows on each rank."""
    whole = np.arange(46.0).reshape(23, 2)
    batches = (7, slice(20, None, -3), [5, 1, 1, 22], np.arange(23) % 2 == 0, slice(0))
    for where, batch, num_slices, kind in combinations(20, (1, 3, "inline"), batches, (1, 3), ("array", "sharded")):
        rt = shared_runtimes[where]
        picked = whole[:batch] if isinstance(batch, int) else whole[batch]
        loaded = np.arange(2.0 * len(picked) + 4).reshape(-1, 2)
        f = rt.function(lambda x, y: (x * 100 + y, (x * y).sum(axis=0)), outputs=("gather", "sum"))
        x = rt.shared(whole, sharded=True) if kind == "sharded" else whole
        with subtests.test(where=where, batch=str(batch), num_slices=num_slices, kind=kind):
            rows, total = f(x, rt.data(loaded, minibatch=True), batch=batch, num_slices=num_slices)
            np.testing.assert_array_equal(rows, picked * 100 + loaded[: len(picked)])
            np.testing.assert_array_equal(total, (picked * loaded[: len(picked)]).sum(axis=0))
    rt = shared_runtimes[2]
    shard, minibatch = rt.shared(whole[:, 0], sharded=True), rt.data(np.arange(5.0), minibatch=True)
    f = rt.function(lambda x, y: x + y, outputs="gather")
    rows = np.concatenate([part[[1, 0]] for part in np.array_split(whole[:, 0], 2)])
    np.testing.assert_array_equal(f(shard, minibatch, shard_batch=[1, 0]), rows + np.arange(4.0))
    with pytest.raises(ValueError, match="with minibatch data only"):
        rt.function(lambda x: x.sum(), outputs="sum")(minibatch, batch=[-1])


def test_a_plan_says_why_the_next_call_is_new_and_sends_nothing(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.sum(), outputs="sum", name="planned")
    gc.collect()  # functions of earlier tests: a call that has some dropped is new
    for _ in range(5):
        f(X)
    sent = rt.counters["messages_down"]
    assert f.plan(X + 1).is_compiled
    other = f.plan(X.astype(np.float32))
    assert rt.counters["messages_down"] == sent
    assert not other.is_compiled and "x has dtype float32, was float64" in repr(other)
