"""shard_batch=: choose among the rows that each rank holds. batch= with global indices works on them as well.

Run: python demos/05_shard_batch.py
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
shards = np.split(x_host, num_workers)

# One choice for all ranks, or one for each.
index_lists = [rng.integers(0, ROWS_PER_RANK, 100) for _ in range(num_workers)]
choices = {
    "one slice": slice(100, 200),
    "one index list": index_lists[0].tolist(),
    "a slice for each rank": [slice(rank, 100 + rank) for rank in range(num_workers)],
    "an index list for each rank": [rows.tolist() for rows in index_lists],
}
for name, choice in choices.items():
    per_rank = choice if name.endswith("each rank") else [choice] * num_workers
    expected = sum((shard[rows] @ y_host).sum(axis=0) for shard, rows in zip(shards, per_rank, strict=True))
    assert np.allclose(sum_product(x, shard_batch=choice), expected)
    assert np.allclose(sum_product(x, shard_batch=choice, num_slices=4), expected)
    print(f"{name}: {100 * num_workers} rows")

# batch= counts over the whole variable: each rank takes the indices that it owns.
rows = rng.permutation(len(x_host))[:77]
assert np.allclose(sum_product(x, batch=rows), (x_host[rows] @ y_host).sum(axis=0))

synk.close()
print("All assertions passed.")
