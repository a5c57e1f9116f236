"""Calls that are waited for against calls that are submitted, in synk and in the standard library's process pool.

*tiny* does nothing: what is measured is the way there and back. *stream* is a loop in which the master prepares each
batch for as long as the workers compute on it, as a program does that reads and decodes its data. In all cases up to
three calls are in flight. One process, all ways in turns.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any

import numpy as np

from benchmarks._harness import Harness

NUM_UNDER_WAY = 3
PREPARE_S = COMPUTE_S = 0.003
CASES = {"tiny": (8, 0.0), "stream": (1 << 17, COMPUTE_S)}  # rows of one float64, seconds of work on them
WAYS = ("synk, waited for", "synk, submitted", "ProcessPoolExecutor, waited for", "ProcessPoolExecutor, submitted")

Submit = Callable[[np.ndarray], Callable[[], Any]]


def run(harness: Harness) -> dict[str, Any]:
    """Return case -> rounds, each with the seconds of a call by way."""
    rounds = 3 if harness.quick else 9
    harness.progress("submitted")
    return dict(harness.script("submitted", str(harness.world_size), str(rounds), str(harness.block_s)))


def work(x: np.ndarray, seconds: float) -> float:
    """Keep a core busy and return a number."""
    end = time.perf_counter() + seconds
    total = float(x[:1024].sum())
    while time.perf_counter() < end:
        pass
    return total


def _prepare(block: np.ndarray, seconds: float) -> np.ndarray:
    end = time.perf_counter() + seconds
    block += 1.0
    while time.perf_counter() < end:
        pass
    return block


def _loop(submit: Submit, num_in_flight: int, block: np.ndarray, prepare_s: float, num_calls: int) -> float:
    """Return the seconds of one of ``num_calls`` calls."""
    held: deque[Callable[[], Any]] = deque()
    start = time.perf_counter()
    for _ in range(num_calls):
        held.append(submit(_prepare(block, prepare_s)))
        if len(held) == num_in_flight:
            held.popleft()()
    while held:
        held.popleft()()
    return (time.perf_counter() - start) / num_calls


def _of_pool(pool: Executor, world_size: int, seconds: float) -> Submit:
    def submit(x: np.ndarray) -> Callable[[], Any]:
        futures: list[Future[float]] = [pool.submit(work, part, seconds) for part in np.array_split(x, world_size)]
        return lambda: sum(future.result() for future in futures)

    return submit


def measure(world_size: int, rounds: int, block_s: float) -> dict[str, list[dict[str, float]]]:
    """Return what ``run`` returns; in a process of its own."""
    import synk  # here, so that the harness that imports this module needs no synk

    results: dict[str, list[dict[str, float]]] = {}
    with (
        ProcessPoolExecutor(world_size, mp_context=multiprocessing.get_context("fork")) as pool,
        synk.fork(world_size, backend="numpy"),
    ):
        for case, (num_rows, seconds) in CASES.items():
            function = synk.function(lambda x, seconds: work(x, float(seconds)), bcast_inputs="seconds", outputs="sum")
            given = np.float64(seconds)
            submits: dict[str, tuple[Submit, int]] = {}
            for name, submit in (
                ("synk", lambda x, f=function, s=given: f.submit(x, s).result),
                ("ProcessPoolExecutor", _of_pool(pool, world_size, seconds)),
            ):
                submits[f"{name}, waited for"] = (submit, 1)
                submits[f"{name}, submitted"] = (submit, NUM_UNDER_WAY)
            # A plain call is not a submitted one that is waited for: it takes no handle.
            submits["synk, waited for"] = (lambda x, f=function, s=given: _answered(f(x, s)), 1)
            block, prepare_s = np.zeros(num_rows), PREPARE_S if seconds else 0.0
            counts = {}
            for way, (submit, in_flight) in submits.items():
                _loop(submit, in_flight, block, prepare_s, 20)
                counts[way] = max(20, int(block_s / _loop(submit, in_flight, block, prepare_s, 20)))
            results[case] = [
                {way: _loop(*submits[way], block, prepare_s, counts[way]) for way in WAYS} for _ in range(rounds)
            ]
    return results


def _answered(value: Any) -> Callable[[], Any]:
    return lambda: value


def lines(results: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table: microseconds a call, and the ratio to the plain call of the same round."""
    rows = []
    for case in CASES:
        for way in WAYS:
            seconds = [entry[way] for entry in results[case]]
            ratios = [entry[way] / entry["synk, waited for"] for entry in results[case]]
            rows.append(
                [
                    case,
                    way,
                    f"{statistics.median(seconds) * 1e6:.0f}",
                    f"{statistics.median(ratios):.2f}",
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                ]
            )
    return rows


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
