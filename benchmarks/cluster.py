"""Calls over two nodes beside the same calls on one machine, and on a Ray cluster beside actors written by hand.

``python -m benchmarks.cluster [--ray] [--rounds N]``. All ways take turns; a figure is the median of rounds of medians.
``--ray`` needs Ray and a network of its own, because it starts two raylets:

    python tests/support/alone.py python -m benchmarks.cluster --ray
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

import synk

BLOCK_S = 0.4
LARGE = 1 << 23
"""Elements of a large float64 array: 64 MB."""

Call = Callable[[], Any]


def total(x: np.ndarray) -> Any:
    return x.sum()


def work(x: np.ndarray) -> Any:
    """Compute for 5 ms."""
    end = time.perf_counter() + 0.005
    while time.perf_counter() < end:
        pass
    return x.sum()


def large(x: np.ndarray) -> np.ndarray:
    return np.full(LARGE, x[0])


def through_comm(nbytes: int) -> Callable[[np.ndarray], float]:
    """Return a function that says how long an ``all_reduce`` of that size takes on average, after the first."""

    def measure(x: np.ndarray) -> float:
        array, count = np.ones(nbytes // 8), 50 if nbytes < 1 << 20 else 4
        out = np.empty_like(array)
        synk.comm.all_reduce(array, "sum", out=out)
        began = time.perf_counter()
        for _ in range(count):
            synk.comm.all_reduce(array, "sum", out=out)
        return (time.perf_counter() - began) / count

    return measure


def calls_of(runtime: Any) -> dict[str, Call]:
    """Return the jobs on a runtime."""
    small, wide = np.arange(1000.0), np.ones(LARGE)
    functions = {name: runtime.function(fn, outputs="sum") for name, fn in (("small", total), ("work", work))}
    average = runtime.function(large, outputs="avg")
    held = runtime.resident([0.0])

    def add(x: np.ndarray, held: list[float]) -> None:
        held[0] += 1.0

    step = runtime.function(add, outputs=None, bcast_inputs="held", changes=[held])
    return {
        "small call": lambda: functions["small"](small),
        "5 ms of work": lambda: functions["work"](small),
        "64 MB argument": lambda: functions["small"](wide),
        "64 MB averaged": lambda: average(small),
        "resident step": lambda: step(small, held),
    }


@contextmanager
def raylets() -> Iterator[str]:
    """Start two raylets, and connect this process to them."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def actors() -> dict[str, Call]:
    """Return the jobs as somebody would write them with Ray's actors: rows and results in calls, combined by NumPy."""
    import ray

    @ray.remote(num_cpus=0, scheduling_strategy="SPREAD")
    class Actor:
        def run(self, fn: Callable[..., Any], x: np.ndarray) -> Any:
            return fn(x)

    remote: Any = Actor
    workers = [remote.remote() for _ in range(2)]
    small, wide = np.arange(1000.0), np.ones(LARGE)
    kept = {fn: ray.put(fn) for fn in (total, work, large)}

    def run(fn: Callable[..., Any], x: np.ndarray) -> list[Any]:
        parts = np.array_split(x, 2)
        return list(ray.get([each.run.remote(kept[fn], part) for each, part in zip(workers, parts)]))

    return {
        "small call": lambda: sum(run(total, small)),
        "5 ms of work": lambda: sum(run(work, small)),
        "64 MB argument": lambda: sum(run(total, wide)),
        "64 MB averaged": lambda: np.add(*run(large, small)) / 2,
    }


def measured(ways: dict[str, dict[str, Call]], rounds: int) -> dict[str, dict[str, float]]:
    """Return job -> way -> median seconds of a call."""
    found: dict[str, dict[str, float]] = {}
    for job in next(iter(ways.values())):
        having = {way: jobs[job] for way, jobs in ways.items() if job in jobs}
        medians: dict[str, list[float]] = {way: [] for way in having}
        for way, call in [*having.items()] * (rounds + 1):
            seconds, end = [], time.perf_counter() + BLOCK_S
            while time.perf_counter() < end or len(seconds) < 3:
                began = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - began)
            medians[way].append(statistics.median(seconds))
        found[job] = {way: statistics.median(each[1:]) for way, each in medians.items()}
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with ExitStack() as stack:
        address = stack.enter_context(raylets()) if options.ray else None
        runtimes = {
            "local": stack.enter_context(synk.Runtime(2, backend="numpy")),
            "here": stack.enter_context(synk.Runtime(1, cluster="here", nodes=2)),
        }
        if address is not None:
            runtimes["ray"] = stack.enter_context(synk.Runtime(1, cluster=address, nodes=2, insecure=True))
        ways = {way: calls_of(runtime) for way, runtime in runtimes.items()}
        if address is not None:
            ways["actors"] = actors()
        found = measured(ways, options.rounds)
        for nbytes in (8, 8 * LARGE):
            name = f"all_reduce of {nbytes} B"
            found[name] = {
                way: statistics.median(
                    max(runtime.function(through_comm(nbytes), outputs=None)(np.arange(2.0))) for _ in range(3)
                )
                for way, runtime in runtimes.items()
                if way != "ray"
            }
    names = [*ways]
    print(f"{'milliseconds':>20}" + "".join(f"{name:>10}" for name in names))
    for job, by_way in found.items():
        print(f"{job:>20}" + "".join(f"{1e3 * by_way[way]:10.3f}" if way in by_way else f"{'':10}" for way in names))


if __name__ == "__main__":
    main()
