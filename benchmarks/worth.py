"""When is it worth it: the speed-up over one process, by the rows of a call and what each row costs to compute.

The function takes the sine of all numbers of its rows, again and again, in blocks that stay in a core's cache; where it
takes none, it adds the rows up, and only reads them from memory. In turns.
"""

from __future__ import annotations

import json
import operator
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks._harness import Harness

COLUMNS, BLOCK = 32, 1000
NUM_ROWS = (100, 10_000, 1_000_000)
NUM_SINES = (0, 1, 30, 1000)
LONGEST = 30_000_000
"""Rows times sines of the longest call: some seconds in one process."""

WAYS = ("one process", "data", "plain")


def run(harness: Harness) -> dict[str, Any]:
    """Return case -> rounds, each with the seconds of a call by way, and the cores that others used as ``noise``."""
    harness.progress("worth")
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(harness.rounds):
        for rows in NUM_ROWS:
            for sines in NUM_SINES:
                if rows * sines > LONGEST:
                    continue
                entries = []
                for _ in range(harness.tries):
                    harness.noise.start()
                    entry = harness.script("worth", str(harness.world_size), str(rows), str(sines))
                    entries.append({**entry, "noise": harness.noise.stop()})
                    if entries[-1]["noise"] <= harness.max_noise:
                        break
                found.setdefault(f"{rows} {sines}", []).append(min(entries, key=operator.itemgetter("noise")))
    return found


def measure(world_size: int, rows: int, sines: int) -> dict[str, float]:
    """Return the median seconds of a call by way; in a process of its own."""
    import synk  # here, so that the harness that imports this module needs no synk

    x = np.random.default_rng(0).standard_normal((rows, COLUMNS), np.float32)

    def work(x: Any) -> Any:
        total = np.zeros(COLUMNS)
        for start in range(0, len(x), BLOCK):
            block = x[start : start + BLOCK]
            for _ in range(sines):
                block = np.sin(block)
            total += block.sum(axis=0)
        return total

    with synk.fork(world_size, backend="numpy"):
        parallel = synk.function(work, outputs="sum")
        data = synk.data(x)
        ways: dict[str, Callable[[], Any]] = dict(
            zip(WAYS, (lambda: work(x), lambda: parallel(data), lambda: parallel(x)), strict=True)
        )
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        expected = work(x)
        for call in ways.values():
            for _ in range(3):
                assert np.allclose(call(), expected, rtol=1e-2, atol=1e-2)
        until = time.perf_counter() + 1.0
        while time.perf_counter() < until or len(seconds["plain"]) < 3:
            for way, call in ways.items():
                for _ in range(10 if rows * max(sines, 1) < 1_000_000 else 1):  # the cores are awake, as in a loop
                    start = time.perf_counter()
                    call()
                    seconds[way].append(time.perf_counter() - start)
    return {way: statistics.median(each) for way, each in seconds.items()}


def speed_ups(results: dict[str, Any]) -> list[dict[str, float]]:
    """Return for each case its rows, operations a row, seconds in one process, and the median speed-ups."""
    found = []
    for case, rounds in results.items():
        rows, sines = map(int, case.split())
        entry = {"rows": rows, "sines": COLUMNS * sines}
        entry["serial_s"] = statistics.median(each["one process"] for each in rounds)
        for way in WAYS[1:]:
            entry[way] = statistics.median(each["one process"] / each[way] for each in rounds)
        found.append(entry)
    return found


def lines(results: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [
            f"{each['rows']:,}",
            f"{each['sines']:,}",
            f"{each['serial_s'] * 1e3:.3g}",
            f"{each['data']:.2f}",
            f"{each['plain']:.2f}",
        ]
        for each in speed_ups(results)
    ]


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, sys.argv[1:]))))
