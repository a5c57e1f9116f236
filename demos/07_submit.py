"""submit: prepare the next batch while the workers compute on this one.

A program reads batch after batch, which takes time, and computes on each, which takes time. Waiting for every call adds
the two up; submitted calls overlap them. On GPUs the inputs of a call also come to the device while the call before it
computes.

Run: python demos/07_submit.py
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np

import synk

NUM_BATCHES, NUM_ROWS, READ_S = 20, 4000, 0.02
buffer = np.empty((NUM_ROWS, 64))


def read(number: int) -> np.ndarray:
    """Stand for a slow disk: fill the one buffer with the next batch."""
    time.sleep(READ_S)
    buffer[:] = np.random.default_rng(number).standard_normal(buffer.shape)
    return buffer


synk.fork()


@synk.function(outputs="sum")
def moments(x: np.ndarray) -> np.ndarray:
    """The sum of the rows' outer products, the long way round."""
    total = x.T @ x
    for _ in range(40):
        total = total + 0.0 * (x.T @ x)
    return total


def one_after_the_other() -> list[np.ndarray]:
    return [moments(read(number)) for number in range(NUM_BATCHES)]


def overlapped() -> list[np.ndarray]:
    held: deque[synk.PendingCall] = deque()
    results = []
    for number in range(NUM_BATCHES):
        held.append(moments.submit(read(number)))  # the array is copied: the buffer is free for the next batch
        if len(held) == 3:
            results.append(held.popleft().result())
    return results + [call.result() for call in held]


moments(read(0))  # the first call waits for the workers to start
seconds = {}
results = {}
for way in (one_after_the_other, overlapped):
    start = time.perf_counter()
    results[way] = way()
    seconds[way] = time.perf_counter() - start
    print(f"{way.__name__:20} {1e3 * seconds[way] / NUM_BATCHES:6.1f} ms a batch")

for number, (first, second) in enumerate(zip(results[one_after_the_other], results[overlapped], strict=True)):
    assert np.array_equal(first, second)
    assert np.allclose(first, read(number).T @ buffer)
print(f"overlapped / one after the other: {seconds[overlapped] / seconds[one_after_the_other]:.2f}")


# An error belongs to the call that raised it; those behind it run all the same.
@synk.function(outputs="max")
def check(x: np.ndarray) -> float:
    return 1 / int(x[0] != 2)


calls = [check.submit(np.full(2, k)) for k in range(4)]
outcomes = []
for call in calls:
    try:
        outcomes.append(str(call.result()))
    except ZeroDivisionError:
        outcomes.append("ZeroDivisionError")
print("outcomes:", ", ".join(outcomes))
assert outcomes[2] == "ZeroDivisionError" and len(set(outcomes)) == 2

synk.close()
print("All assertions passed.")
