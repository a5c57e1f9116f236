"""Calls over two nodes with a worker each, beside one machine with two workers, and what each may cost at most.

``python -m benchmarks.cluster [--ray] [--rounds N]``. All ways take turns; a figure is the median of rounds of medians.
``--ray`` needs Ray and a network of its own, because it starts raylets. gloo listens on the loopback device, if torch
is installed. So this measures everything:

    python tests/support/alone.py python -m benchmarks.cluster --ray

The bars are those of the design: calls beside actors written by hand with Ray, ``all_reduce`` beside gloo, and so on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

import synk
from benchmarks._harness import GLOO, Harness, Peer, PeerError
from benchmarks.cluster_faults import QUIET, RayCluster, deaths, starts

BLOCK_S = 0.4
LARGE = 1 << 23
"""Elements of a large float64 array: 64 MB."""
SIZES = {"all_reduce of 8 B": 8, "all_reduce of 4 MB": 1 << 22, "all_reduce of 64 MB": 8 * LARGE}
NUM_STEPS = 50

Sample = Callable[[], float]
"""Does something, and returns how many seconds one of it took."""
Figures = dict[str, dict[str, float]]
"""Job -> way -> milliseconds, or bytes if the name of the job says so."""

RELATIVE_BARS = (
    ("small call", ("ray",), 2.0, "actors"),
    ("5 ms of work", ("here", "ray"), 1.6, "local"),
    ("64 MB averaged", ("ray",), 1.0, "actors"),
    ("all_reduce of 8 B", ("here", "ray"), 1.0, "gloo"),
    ("all_reduce of 64 MB", ("here", "ray"), 1.5, "gloo"),
)
ABSOLUTE_BARS = {
    "resident step, bytes": 10_000,
    "agent's death told": 1_000,
    "next call after it": 5_000,
    "machine's death told": 5_000,
    "next call after that": 5_000,
}
REPLICATE_MS = 3.0
"""What a step of training may take longer than on one machine, besides its gradients at the rate of the wires."""


# ----- jobs


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


def timed(call: Callable[[], Any]) -> Sample:
    """Return the sample of one call."""

    def sample() -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return sample


def through_comm(nbytes: int) -> Callable[[np.ndarray], float]:
    """Return a function that says how long an average of float32 arrays takes, after a first one."""

    def measure(x: np.ndarray) -> float:
        array, count = np.ones(nbytes // 4, np.float32), 50 if nbytes < 1 << 20 else 4
        out = np.empty_like(array)
        synk.comm.all_reduce(array, "avg", out=out)
        began = time.perf_counter()
        for _ in range(count):
            synk.comm.all_reduce(array, "avg", out=out)
        return (time.perf_counter() - began) / count

    return measure


def resident_step(runtime: Any) -> Callable[[], Any]:
    """Return a call that changes an object of 8 MB, which the ranks keep."""
    held = runtime.resident([np.zeros(1 << 20)])

    def add(x: np.ndarray, held: list[np.ndarray]) -> None:
        held[0] += 1.0

    step, x = runtime.function(add, outputs=None, bcast_inputs="held", updates=[held]), np.arange(2.0)
    return lambda: step(x, held)


def samples_of(runtime: Any) -> dict[str, Sample]:
    """Return the jobs on a runtime."""
    small, wide = np.arange(1000.0), np.ones(LARGE)
    functions = {name: runtime.function(fn, outputs="sum") for name, fn in (("small", total), ("work", work))}
    average = runtime.function(large, outputs="avg")
    found = {
        "small call": timed(lambda: functions["small"](small)),
        "5 ms of work": timed(lambda: functions["work"](small)),
        "64 MB argument": timed(lambda: functions["small"](wide)),
        "64 MB averaged": timed(lambda: average(small)),
        "resident step": timed(resident_step(runtime)),
    }
    for name, nbytes in SIZES.items():
        reduce = runtime.function(through_comm(nbytes), outputs=None)
        found[name] = lambda reduce=reduce: max(reduce(np.arange(2.0)))  # type: ignore[misc]
    if importlib.util.find_spec("torch"):
        found["replicate step"] = timed(training(runtime))
    return found


def training(runtime: Any) -> Callable[[], Any]:
    """Return a step of training a model with 5 MB of parameters, on batches that the ranks cannot share evenly."""
    import torch

    import synk.torch
    from benchmarks._models import step

    def set_one_thread(x: np.ndarray) -> None:
        torch.set_num_threads(1)  # each of the raylets on this machine takes all cores for its own

    runtime.function(set_one_thread, outputs=None)(np.arange(2.0))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 64))
    run = synk.torch.replicate(model, torch.optim.AdamW(model.parameters()), runtime=runtime).function(step)
    batches = [(torch.randn(rows, 512), torch.randint(64, (rows,))) for rows in (63, 64, 51, 17, 33)]
    turn = itertools.cycle(batches)
    return lambda: float(run(*next(turn)))


TRAINING_NBYTES = 4 * (512 * 2048 + 2048 + 2048 * 64 + 64)


def bytes_of_step(runtime: Any) -> float:
    """Return how many bytes the program sends in one call that changes a resident object."""
    call = resident_step(runtime)
    call()
    before = runtime.counters["bytes_down"]
    for _ in range(NUM_STEPS):
        call()
    return (runtime.counters["bytes_down"] - before) / NUM_STEPS


# ----- peers


@contextmanager
def actors(address: str) -> Iterator[dict[str, Sample]]:
    """Yield the jobs as a user of Ray writes them by hand: an actor with methods on each machine, combined by NumPy.

    Ray puts large arguments and results into its object store by itself. ``ray.put`` of each part would do the same.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=1)
    class Actor:
        def total(self, x: np.ndarray) -> Any:
            return total(x)

        def work(self, x: np.ndarray) -> Any:
            return work(x)

        def large(self, x: np.ndarray) -> np.ndarray:
            return large(x)

    remote: Any = Actor
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        while len(machines := [each["NodeID"] for each in ray.nodes() if each["Resources"].get("CPU")]) != 2:
            time.sleep(0.2)  # until Ray knows which ones are lost
        places = [NodeAffinitySchedulingStrategy(machine, soft=False) for machine in machines]
        workers = [remote.options(scheduling_strategy=place).remote() for place in places]
        small, wide = np.arange(1000.0), np.ones(LARGE)

        def run(method: str, x: np.ndarray) -> list[Any]:
            parts = np.array_split(x, 2)
            return list(ray.get([getattr(each, method).remote(part) for each, part in zip(workers, parts)]))

        def average() -> np.ndarray:
            first, second = run("large", small)
            both = first + second
            both /= 2
            return both

        yield {
            "small call": timed(lambda: sum(run("total", small))),
            "5 ms of work": timed(lambda: sum(run("work", small))),
            "64 MB argument": timed(lambda: sum(run("total", wide))),
            "64 MB averaged": timed(average),
        }
    finally:
        ray.shutdown()


def gloo(peer: Peer) -> dict[str, Sample]:
    """Return ``all_reduce`` by gloo between two processes."""

    def sample_of(nbytes: int) -> Sample:
        def sample() -> float:
            peer.prepare("collective", name="all_reduce", nbytes=nbytes)
            peer.run(1)
            return max(map(statistics.fmean, peer.run(50 if nbytes < 1 << 20 else 4)["call_s"]))

        return sample

    return {name: sample_of(nbytes) for name, nbytes in SIZES.items()}


# ----- figures


def measured(ways: dict[str, dict[str, Sample]], rounds: int) -> Figures:
    """Return the median milliseconds of each job by each way."""
    found: Figures = {}
    for job in ways["local"]:
        having = {way: samples[job] for way, samples in ways.items() if job in samples}
        medians: dict[str, list[float]] = {way: [] for way in having}
        for way, sample in [*having.items()] * (rounds + 1):
            seconds: list[float] = []
            end = time.perf_counter() + BLOCK_S
            while time.perf_counter() < end or len(seconds) < 3:
                seconds.append(sample())
            medians[way].append(statistics.median(seconds))
        found[job] = {way: 1e3 * statistics.median(each[1:]) for way, each in medians.items()}
    return found


def bars_of(found: Figures) -> dict[tuple[str, str], tuple[float, str]]:
    """Return (job, way) -> the bar in the unit of the job, and its text, for what was measured."""
    bars = {}
    for job, ways, factor, other in RELATIVE_BARS:
        for way in ways:
            if found.get(job, {}).keys() >= {way, other}:
                ratio = found[job][way] / found[job][other]
                bars[job, way] = factor * found[job][other], f"{ratio:.2f} x {other}, bar {factor}"
    for job, limit in ABSOLUTE_BARS.items():
        for way in found.get(job, {}).keys() & {"here", "ray"}:
            bars[job, way] = float(limit), f"bar {limit}"
    steps = found.get("replicate step", {})
    for way in steps.keys() & {"here", "ray"}:
        gradients_ms = found["all_reduce of 64 MB"][way] * TRAINING_NBYTES / (8 * LARGE)
        limit_ms = steps["local"] + REPLICATE_MS + gradients_ms
        text = f"bar local + {REPLICATE_MS:.0f} + {gradients_ms:.1f} for its gradients = {limit_ms:.1f}"
        bars["replicate step", way] = limit_ms, text
    return bars


def print_table(found: Figures) -> None:
    """Print the figures, and below each job its bars."""
    ways = list(dict.fromkeys(way for by_way in found.values() for way in by_way))
    print(f"{'milliseconds':>22}" + "".join(f"{name:>10}" for name in ways))
    bars = bars_of(found)
    for job, by_way in found.items():
        if not by_way:
            continue
        row = "".join(f"{by_way[way]:10.3f}" if way in by_way else f"{'':10}" for way in ways)
        notes = []
        for way in ways:
            if (job, way) in bars:
                limit, text = bars[job, way]
                notes.append(f"{way}: {text}, {'met' if by_way[way] <= limit else 'MISSED'}")
        print(f"{job:>22}{row}  {'; '.join(notes)}".rstrip())


def versions() -> str:
    """Return what is installed, and in which version."""
    found = []
    for name in ("numpy", "pyzmq", "torch", "ray"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} missing")
    return ", ".join(found)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("synk").setLevel(logging.ERROR)
    harness = Harness()
    found: Figures = {}
    with ExitStack() as stack:
        stack.callback(harness.close)
        os.environ.update(QUIET, SYNK_INSECURE_CLUSTER="1")  # nobody else reaches these raylets
        cluster = stack.enter_context(RayCluster(2)) if options.ray else None
        makers = {
            "local": lambda: synk.Runtime(2, backend="numpy"),
            "here": lambda: synk.Runtime(1, cluster="here", nodes=2, max_restarts=100),
        }
        if cluster is not None:
            address = cluster.address
            makers["ray"] = lambda: synk.Runtime(1, cluster=address, nodes=2, max_restarts=100)
        # These come first: the program has not imported Ray yet.
        ends = starts(makers, options.rounds) | deaths(makers, cluster, options.rounds)
        runtimes = {way: stack.enter_context(make()) for way, make in makers.items()}
        ways = {way: samples_of(runtime) for way, runtime in runtimes.items()}
        if cluster is not None:
            ways["actors"] = stack.enter_context(actors(cluster.address))
        try:
            (peer,) = stack.enter_context(harness.peers(GLOO))
            ways["gloo"] = gloo(peer)
        except PeerError as error:
            print(f"gloo: {error}")
        found |= measured(ways, options.rounds)
        found["resident step, bytes"] = {way: bytes_of_step(runtime) for way, runtime in runtimes.items()}
        found |= ends
    print_table(found)
    print(versions())


if __name__ == "__main__":
    main()
