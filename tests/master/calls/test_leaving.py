"""Options of calls that are on their way out, one test of what each promises until then."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

X = np.arange(12.0).reshape(6, 2)


def test_minibatch_data_goes_row_by_row_with_the_rows_that_the_batch_picks(subtests: Any, shared_runtimes: Any) -> None:
    """In the order in which it picks them; ``shard_batch`` picks rows on each rank."""
    whole = np.arange(46.0).reshape(23, 2)
    rng = np.random.default_rng(0)
    batches = (
        7,
        slice(3, 20, 4),
        slice(20, None, -3),
        [5, 1, 1, 22],
        rng.permutation(23),
        rng.random(23) < 0.5,
        slice(0),
    )
    for where, batch, num_slices in itertools.product((1, 3, "inline"), batches, (1, 3)):
        rt = shared_runtimes[where]
        picked = whole[:batch] if isinstance(batch, int) else whole[batch]
        loaded = rng.integers(0, 50, (len(picked) + 2, 2)).astype(float)
        f = rt.function(lambda x, y: (x * 100 + y, (x * y).sum(axis=0)), outputs=("gather", "sum"))
        for x in (whole, rt.data(whole), rt.shared(whole, sharded=True)):
            with subtests.test(where=where, batch=str(batch), num_slices=num_slices, kind=type(x).__name__):
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
