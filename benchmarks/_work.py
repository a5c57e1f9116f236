"""The user's functions and inputs of the call benchmarks, the same for every runtime. Needs nothing but NumPy."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

COLUMNS = 100
ROWS = {"tiny": 8, "linear": 100_000, "linear 1.5 ms": 28_000, "linear 15 ms": 280_000, "work": 1024}


@functools.cache
def inputs(rows: int) -> tuple[Array, Array]:
    """Return float32 ``x`` of shape (rows, 100) and ``y`` of shape (rows,); the same in every process."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((rows, COLUMNS), dtype=np.float32)
    return x, generator.standard_normal(rows, dtype=np.float32)


@functools.cache
def shard(rows: int, rank: int, world_size: int) -> tuple[Array, Array]:
    """Return a private copy of the rows of ``inputs`` that belong to ``rank``."""
    x, y = inputs(rows)
    return np.array_split(x, world_size)[rank].copy(), np.array_split(y, world_size)[rank].copy()


@functools.cache
def _weights() -> list[Array]:
    generator = np.random.default_rng(1)
    return [generator.standard_normal(COLUMNS, dtype=np.float32) for _ in range(64)]


def fresh_weights(call: int) -> Array:
    """Return the weights of call number ``call``: other values than in the call before."""
    return _weights()[call % 64]


def loss_and_grad(w: Array, x: Array, y: Array) -> tuple[Any, Array, float]:
    """Return loss, gradient, and the seconds that computing them took."""
    start = time.perf_counter()
    residual = x @ w - y
    loss, grad = 0.5 * (residual @ residual) / len(x), residual @ x / len(x)
    return loss, grad, time.perf_counter() - start


def work(w: Array, x: Array, y: Array, repeats: int) -> tuple[Any, Array, float]:
    """Compute ``loss_and_grad`` again and again, to take a given time."""
    start = time.perf_counter()
    for _ in range(repeats):
        loss, grad, _ = loss_and_grad(w, x, y)
    return loss, grad, time.perf_counter() - start


@functools.cache
def _output(nbytes: int) -> Array:
    return np.ones(nbytes // 4, np.float32)


def output(w: Array, x: Array, y: Array, nbytes: int) -> Array:
    """Return a float32 array of ``nbytes``, private to the process and kept, so that the function costs nothing."""
    array = _output(nbytes)
    array[0] = w[0]
    return array


def spin(seconds: float) -> None:
    """Keep a core busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def function_of(job: str, **params: Any) -> Callable[..., Any]:
    """Return the function ``(w, x, y)`` that ``job`` runs on each shard, as one that can be pickled by name."""
    if job == "output":
        return functools.partial(output, **params)
    return functools.partial(work, **params) if "work" in job else loss_and_grad


def rows_of(job: str) -> int:
    """Return how many rows the input of ``job`` has."""
    return ROWS.get(job, ROWS["linear"] if job.startswith("linear") else ROWS["tiny"])


def combine(replies: list[Any]) -> float | None:
    """Average what the shards of equal size returned; return the seconds of the slowest, None if there are none.

    What a program around a pool of processes does in its master.
    """
    if isinstance(replies[0], tuple):
        losses, grads, seconds = zip(*replies, strict=True)
        sum(losses) / len(losses), average(grads)
        return max(seconds)
    average(replies)
    return None


def average(arrays: Any) -> Array:
    """Return the mean of equal arrays with one new array, not one for each step."""
    total = arrays[0] + arrays[1] if len(arrays) > 1 else arrays[0].copy()
    for array in arrays[2:]:
        total += array
    total *= np.float32(1 / len(arrays))
    return total
