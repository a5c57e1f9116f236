"""Collectives against mpi4py: those on variables that live on the workers, and those of ``synk.comm``.

Variables are also compared with gloo and with the copy of one array, as calls of the program. Those of ``synk.comm`` go
from one given array into another; what is measured is the time inside of the function.
"""

from __future__ import annotations

from typing import Any

from benchmarks._harness import GLOO, MPI, Case, Harness

NAMES = ("all_reduce", "broadcast", "scatter", "gather")
SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20, "256 MB": 256 << 20}
QUICK_SIZES = ("4 KB", "1 MB", "64 MB")

COMM = "comm."
INSIDE = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
INSIDE_SIZES = {"8 B": 8, "64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}
# They take some milliseconds: the call around them does not count.
REPETITIONS = {"8 B": 1000, "64 KB": 200, "1 MB": 40, "16 MB": 4, "64 MB": 2}


def run(harness: Harness) -> dict[str, Any]:
    """Return "collective size" -> peer -> rounds (or what went wrong); the bytes are those of the whole array."""
    sizes = QUICK_SIZES if harness.quick else tuple(SIZES)
    cases: dict[str, Case] = {
        f"{name} {size}": {"name": name, "nbytes": SIZES[size]} for name in NAMES for size in sizes
    }
    results: dict[str, Any] = {}
    with harness.baselines() as baselines:
        for _ in range(harness.rounds):
            for spec in (MPI, GLOO):
                harness.versus(spec, baselines, "collective", cases, results)
            harness.versus(MPI, baselines[1:], "inside", inside_cases(harness.world_size, harness.quick), results)
    return results


def inside_cases(world_size: int, is_quick: bool = False) -> dict[str, Case]:
    """Return the cases of ``synk.comm``; of an array that is divided each rank has 8 bytes at least."""
    cases: dict[str, Case] = {f"{COMM}barrier": {"name": "barrier", "nbytes": 8 * world_size, "repetitions": 1000}}
    for name in INSIDE[:1] if is_quick else INSIDE:
        for size, nbytes in INSIDE_SIZES.items():
            if name not in ("all_reduce", "reduce", "broadcast"):
                nbytes = max(nbytes, 8 * world_size)
            cases[f"{COMM}{name} {size}"] = {"name": name, "nbytes": nbytes, "repetitions": REPETITIONS[size]}
    return cases
