"""batch=: compute on some rows of data that stays where it is.

Run: python demos/04_batch.py
"""

from __future__ import annotations

import numpy as np

import synk

synk.fork()


@synk.function(bcast_inputs="y")
def mean_product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x @ y).mean(axis=0)


rng = np.random.default_rng(0)
x_host = 0.01 * rng.standard_normal((1000, 10))
y_host = rng.standard_normal((10, 5))
x, y = synk.data(x_host), synk.data(y_host)

# The rows are chosen from the whole input, then scattered; each worker takes its own part, all at once.
batches = {
    "the first 100 rows": (100, slice(100)),
    "a slice": (slice(10, 100), slice(10, 100)),
    "a slice with a step": (slice(100, 1000, 3), slice(100, 1000, 3)),
    "an index list": (rows := rng.integers(0, 1000, 100), rows),
    "a boolean mask": (mask := x_host[:, 0] > 0, mask),
    "all rows": (None, slice(None)),
}
for name, (batch, selection) in batches.items():
    result = mean_product(x, y, batch=batch)
    assert np.allclose(result, mean_product.serial(x_host[selection], y_host))
    assert np.allclose(result, (x_host[selection] @ y_host).mean(axis=0))
    print(f"{name}: {len(x_host[selection])} rows, mean {result.mean():+.6f}")

synk.close()
print("All assertions passed.")
