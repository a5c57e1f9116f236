"""Work that comes in items: ``synk.map`` and the backend of joblib, beside joblib's own processes. In turns.

*fits* are 100 tasks of 20 ms that are given one array of 1.3 MB, by joblib with either backend; *tiny* are 20 000 items
of no work, by ``synk.map`` and by joblib.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks._harness import Harness

NUM_FITS, FIT_S, NUM_TINY = 100, 0.02, 20_000


def run(harness: Harness) -> dict[str, Any]:
    """Return case -> rounds, each with the seconds of all tasks by way."""
    harness.progress("items")
    return dict(harness.script("items", str(harness.world_size), str(2 if harness.quick else 5)))


def measure(world_size: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return what ``run`` returns; in a process of its own."""
    import joblib

    import synk  # here, so that the harness that imports this module needs no synk

    x = np.random.default_rng(0).random((400, 400))

    def fits(backend: str) -> None:
        with joblib.parallel_config(backend=backend, n_jobs=world_size):
            joblib.Parallel()(joblib.delayed(fit)(x, k) for k in range(NUM_FITS))

    def tiny(backend: str) -> None:
        with joblib.parallel_config(backend=backend, n_jobs=world_size):
            joblib.Parallel()(joblib.delayed(abs)(k) for k in range(NUM_TINY))

    with synk.fork(world_size, backend="numpy"):
        return {
            "fits": _turns({"synk": lambda: fits("synk"), "loky": lambda: fits("loky")}, rounds),
            "tiny": _turns(
                {"synk.map": lambda: list(synk.map(abs, range(NUM_TINY))), "loky": lambda: tiny("loky")}, rounds
            ),
        }


def fit(x: np.ndarray, seed: int) -> float:
    """Compute for some 20 ms of processor time."""
    end = time.process_time() + FIT_S
    total = float(seed)
    while time.process_time() < end:
        total += float(x.sum())
    return total


def _turns(ways: dict[str, Callable[[], Any]], rounds: int) -> list[dict[str, float]]:
    for call in ways.values():  # starts the workers, and sends what is sent once
        call()
    entries = []
    for _ in range(rounds):
        entry = {}
        for way, call in ways.items():
            start = time.perf_counter()
            call()
            entry[way] = time.perf_counter() - start
        entries.append(entry)
    return entries


def lines(results: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table: seconds for all tasks."""
    return [
        [case, way, f"{statistics.median(entry[way] for entry in rounds):.2f}"]
        for case, rounds in results.items()
        for way in rounds[0]
    ]


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
