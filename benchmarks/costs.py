"""What does it cost: an argument and a result by their size, and a call by the number of workers. In turns.

Beside each size stands what NumPy takes to copy as many bytes once, in one process.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks._harness import Harness

SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}
WAYS = ("one copy", "synk.data", "plain array", "result")
NUM_WORKERS = (1, 2, 4, 8, 16)


def run(harness: Harness) -> dict[str, Any]:
    """Return ``{"copies": {size: rounds of {way: s}}, "workers": {number: rounds of s}}``."""
    harness.progress("costs")
    copies: dict[str, list[Any]] = {}
    workers: dict[str, list[Any]] = {}
    for _ in range(harness.rounds):
        for size, nbytes in SIZES.items():
            copies.setdefault(size, []).append(harness.script("costs", str(harness.world_size), str(nbytes)))
        for number in NUM_WORKERS[: 3 if harness.quick else None]:
            workers.setdefault(str(number), []).append(harness.script("costs", str(number), "64")["plain array"])
    return {"copies": copies, "workers": workers}


def measure(world_size: int, nbytes: int) -> dict[str, float]:
    """Return the median seconds of a call by way; in a process of its own."""
    import synk  # here, so that the harness that imports this module needs no synk

    x = np.random.default_rng(0).standard_normal((nbytes // 8,))
    target = np.empty_like(x)
    with synk.fork(world_size, backend="numpy"):
        data = synk.data(x)
        first = synk.function(lambda x: float(x[0]), outputs="sum")
        same = synk.function(lambda x: x, outputs="gather")
        assert np.array_equal(same(data), x) and np.isclose(first(x), first(data))
        ways = (
            lambda: np.copyto(target, x),
            lambda: first(data),
            lambda: first(x),
            lambda: same(data),
        )
        return medians(dict(zip(WAYS, ways, strict=True)))


def medians(ways: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median seconds of each, in turns of some calls, for about a second."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for call in ways.values():
        for _ in range(5):
            call()
    until = time.perf_counter() + 1.0
    while time.perf_counter() < until:
        for way, call in ways.items():
            for _ in range(10):
                start = time.perf_counter()
                call()
                seconds[way].append(time.perf_counter() - start)
    return {way: statistics.median(each) for way, each in seconds.items()}


def by_size(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return way -> bytes -> seconds, medians of the rounds."""
    return {
        way: {
            str(SIZES[size]): statistics.median(entry[way] for entry in rounds)
            for size, rounds in results["copies"].items()
        }
        for way in WAYS
    }


def by_workers(results: dict[str, Any]) -> dict[str, float]:
    """Return number of workers -> seconds of a tiny call, medians of the rounds."""
    return {number: statistics.median(rounds) for number, rounds in results["workers"].items()}


def lines(results: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table: microseconds by size and way, then of a tiny call by the number of workers."""
    found = by_size(results)
    rows = [[size, *(f"{found[way][str(SIZES[size])] * 1e6:.0f}" for way in WAYS)] for size in results["copies"]]
    for number, seconds in by_workers(results).items():
        rows.append([f"64 B on {number} workers", "", "", f"{seconds * 1e6:.0f}", ""])
    return rows


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, sys.argv[1:]))))
