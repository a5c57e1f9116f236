"""Collectives on variables that live on the workers, against mpi4py, gloo and the copy of one array."""

from __future__ import annotations

from typing import Any

from benchmarks._harness import GLOO, MPI, Case, Harness

NAMES = ("all_reduce", "broadcast", "scatter", "gather")
SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20, "256 MB": 256 << 20}
QUICK_SIZES = ("4 KB", "1 MB", "64 MB")


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
    return results
