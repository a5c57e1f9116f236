"""One function on all workers: the same numbers as the serial call.

Run: python demos/01_intro.py
"""

from __future__ import annotations

import numpy as np

import synk

synk.fork()


@synk.function(bcast_inputs="y")  # x is scattered by rows, y goes whole to every worker, the outputs are averaged
def mean_product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.mean(x.dot(y), axis=0)


@synk.function(bcast_inputs="y", outputs=("avg", "sum", "max"))  # one word for each output
def statistics(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    z = x.dot(y)
    return z.mean(axis=0), z.sum(axis=0), z.max(axis=0)


synk.distribute()

rng = np.random.default_rng(0)
x_host = rng.standard_normal((100, 10)).astype("float32")
y_host = rng.standard_normal(10).astype("float32")
x, y = synk.data(x_host), synk.data(y_host)  # in shared memory: the workers read it in place

result = mean_product(x, y)
serial = np.mean(x_host.dot(y_host), axis=0)
assert np.allclose(result, serial, atol=1e-6)
print(f"mean of x.dot(y): {result:.6f} on {synk.current().world_size} workers, {serial:.6f} serial")

# The serial twin runs the whole input on one worker. 103 rows do not divide evenly: the average is exact all the same.
matrices = rng.standard_normal((103, 10)), rng.standard_normal((10, 5))
expected = statistics.serial(*matrices)
inputs = [synk.data(matrix) for matrix in matrices]
for name, all_at_once, in_slices, reference in zip(
    ("avg", "sum", "max"), statistics(*inputs), statistics(*inputs, num_slices=4), expected, strict=True
):
    assert np.allclose(all_at_once, reference)
    assert np.allclose(in_slices, reference)  # four calls a worker, a quarter of the memory
    print(f"{name}: largest difference {abs(all_at_once - reference).max():.1e}")

synk.close()
print("All assertions passed.")
