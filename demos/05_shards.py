"""batch= on a sharded variable: each rank takes the rows that it owns. Rows are counted over all ranks, in rank order.

Run: python demos/05_shards.py
"""

from __future__ import annotations

import os

import numpy as np

import synk

ROWS_PER_RANK = 200
num_workers = max(2, len(os.sched_getaffinity(0)))
synk.fork(num_workers, backend="numpy")

rng = np.random.default_rng(0)
x_host, y_host = rng.standard_normal((ROWS_PER_RANK * num_workers, 10)), rng.standard_normal((10, 5))
x, y = synk.shared(x_host, sharded=True), synk.shared(y_host)
sum_product = synk.function(lambda x: (x @ y.value).sum(axis=0), outputs="sum")

# The same choice on each rank: its rows, moved to where the rank's shard begins in the whole.
starts = np.cumsum([0, *x.lengths[:-1]])
own = rng.integers(0, ROWS_PER_RANK, 100)
batches = {
    "the first rows": 100,
    "a slice": slice(100, 300),
    "any rows": rng.permutation(len(x_host))[:77],
    "the same rows of each rank": np.concatenate([start + own for start in starts]),
}
for name, batch in batches.items():
    selection = slice(batch) if isinstance(batch, int) else batch
    expected = (x_host[selection] @ y_host).sum(axis=0)
    assert np.allclose(sum_product(x, batch=batch), expected)
    assert np.allclose(sum_product(x, batch=batch, num_slices=4), expected)
    print(f"{name}: {len(x_host[selection])} rows")

synk.close()
print("All assertions passed.")
