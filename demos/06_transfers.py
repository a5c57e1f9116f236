"""What must travel at each call? One program, y = m @ x + b in a loop, four times, with less of it each time.

Run: python demos/06_transfers.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

import synk

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--size", choices=("small", "full"), default="full", help="small: for tests")
SIDE, NUM_CALLS = {"small": (100, 5), "full": (1000, 40)}[parser.parse_args().size]

rng = np.random.default_rng(0)
m, x, b = (rng.standard_normal((SIDE, SIDE)).astype("float32") for _ in range(3))


def seconds_per_call(call: Callable[[], object]) -> float:
    call()  # start-up, distribution and first touches of memory
    start = time.perf_counter()
    for _ in range(NUM_CALLS):
        call()
    return (time.perf_counter() - start) / NUM_CALLS


synk.fork()
expected = m @ x + b
table = [("NumPy in the master", seconds_per_call(lambda: m @ x + b), 0)]

# 1. Everything is an argument: all of it goes to the workers and the result comes back.
everything = synk.function(lambda m, x, b: m @ x + b, bcast_inputs="x", outputs="gather")
assert np.allclose(everything(m, x, b), expected, atol=1e-3)
table.append(("all inputs passed", seconds_per_call(lambda: everything(m, x, b)), 4 * m.nbytes))

# 2. The parameters m and b stay on the workers, a shard of their rows each.
m_shared, b_shared = synk.shared(m, sharded=True), synk.shared(b, sharded=True)
only_x = synk.function(lambda m, b, x: m @ x + b, bcast_inputs="x", outputs="gather")
assert np.allclose(only_x(m_shared, b_shared, x), expected, atol=1e-3)
table.append(("parameters shared", seconds_per_call(lambda: only_x(m_shared, b_shared, x)), 2 * x.nbytes))

# 3. The input and the result stay as well: a call moves nothing, and the result is read once at the end.
x_shared, y_shared = synk.shared(x), synk.shared(np.zeros_like(b), sharded=True)


def update(m: np.ndarray, b: np.ndarray) -> None:
    y_shared.value = m @ x_shared.value + b


resident = synk.function(update, outputs=None)
table.append(("everything resident", seconds_per_call(lambda: resident(m_shared, b_shared)), 0))
assert np.allclose(y_shared.value, expected, atol=1e-3)

# 4. What the table of all calls says of the first program. A line in the log names large arrays that stay the same.
for number in range(4):
    everything(m, x + number, b)  # only x changes

print(f"y = m @ x + b, {SIDE} x {SIDE} float32, {NUM_CALLS} calls, {synk.current().world_size} workers")
print(f"{'program':<22}{'ms per call':>12}{'MB moved per call':>20}")
for program, seconds, nbytes in table:
    print(f"{program:<22}{1e3 * seconds:>12.2f}{nbytes / 1e6:>20.1f}")
print(f"\n{synk.profile()}\n")
synk.close()
