"""Shared variables: values that stay on the workers between calls, and the collectives that move them.

Run: python demos/03_shared.py
"""

from __future__ import annotations

import os

import numpy as np

import synk

num_workers = max(2, len(os.sched_getaffinity(0)))  # two at least, for something to move
synk.fork(num_workers, backend="numpy")
rng = np.random.default_rng(0)
x_host, y_host = rng.standard_normal((8 * num_workers, 4)), rng.standard_normal((4, 5))

x = synk.shared(np.ones((100, 4)), sharded=True, name="x")  # a shard of the rows on each rank
y = synk.shared(np.zeros((4, 5)), name="y")  # a replica on each rank


@synk.function(outputs="avg")
def mean_product(x: np.ndarray) -> np.ndarray:
    return (x @ y.value).mean(axis=0)  # y.value is this rank's replica


print("lengths of x on the ranks:", x.lengths)
assert sum(x.lengths) == 100

# Scatter splits rows among the ranks, broadcast gives all of them the same value, gather brings the rows back.
synk.scatter(x, x_host)
synk.broadcast(y, y_host)
print("after scatter and broadcast:", x.shapes, y.shapes)
assert x.shapes == [(8, 4)] * num_workers
assert np.array_equal(synk.gather(x, nd_up=0), x_host)
assert all(np.array_equal(replica, y_host) for replica in synk.gather(y))
assert np.array_equal(x[1], x_host[8:16])

# A call on a sharded variable moves no rows.
expected = (x_host @ y_host).mean(axis=0)
assert np.allclose(mean_product(x), expected)
assert np.allclose(mean_product(x, num_slices=2), expected)

# Average the shards; every rank then holds the average.
shards = synk.gather(x, nd_up=1)
synk.all_reduce(x, op="avg")
assert all(np.allclose(shard, np.mean(shards, axis=0)) for shard in synk.gather(x, nd_up=1))

# Give one rank its old shard back, then give every rank all rows.
x[1] = x_host[8:16]
assert np.array_equal(x[1], x_host[8:16])
synk.all_gather(x)
print("after all_gather:", x.shapes)
assert x.shapes == [(8 * num_workers, 4)] * num_workers

# In the master, reading and assigning .value are the same moves in short.
y.value = 2 * y_host
assert np.array_equal(y.value, 2 * y_host)

synk.close()
print("All assertions passed.")
