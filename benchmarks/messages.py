"""Messages between two ranks inside a function, against mpi4py's; what only one of them has, alone.

What is measured is the time inside of the function, so that the call around it does not count.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from benchmarks._harness import MPI, SYNK, Case, Harness

KALMAN = "Kalman filter, operations as sleeps"
# Beside the order that is found: operations and messages that wait, where the program has them.
AS_WRITTEN = replace(SYNK, name="as written")
COMMON: dict[str, Case] = {
    "half a round trip of 8 B": {"name": "round_trip", "nbytes": 8, "repetitions": 500},
    "half a round trip of 64 KB": {"name": "round_trip", "nbytes": 1 << 16, "repetitions": 100},
    "half a round trip of 1 MB": {"name": "round_trip", "nbytes": 1 << 20, "repetitions": 5},
    "64 MB into an existing array": {"name": "one_way", "nbytes": 64 << 20, "repetitions": 1},
    "8 MB exchanged, 10 ms of work between": {"name": "exchange", "nbytes": 8 << 20, "repetitions": 3},
    KALMAN: {"name": "kalman", "nbytes": 1 << 20, "repetitions": 1},
}
ALONE: dict[str, Case] = {
    "isend of 8 MB to a rank that sleeps": {"name": "to_a_sleeper", "nbytes": 8 << 20, "repetitions": 1},
    "deadlock to its error": {"name": "deadlock", "nbytes": 8, "repetitions": 1},
}
WORK_S = 0.01
NAP_S = 0.5
# Of one n^3 operations of the filter: about that of a core for n = 500 in float32, whose matrices have 1 MB.
CUBE_S = 0.002


def run(harness: Harness) -> dict[str, Any]:
    """Return case -> peer -> rounds (or what went wrong); ``inner_s`` is that of one message."""
    results: dict[str, Any] = {}
    with harness.peers(SYNK, AS_WRITTEN) as (synk, as_written):
        for _ in range(harness.rounds):
            harness.versus(MPI, [synk], "message", COMMON, results)
            harness.progress(f"{AS_WRITTEN.name}: {KALMAN}")
            synk.prepare("message", **COMMON[KALMAN])
            as_written.prepare("message", **COMMON[KALMAN] | {"name": "kalman as written"})
            found = results.setdefault(KALMAN, {}).setdefault(AS_WRITTEN.name, [])
            found.append(harness.turns([synk, as_written]))
            for case, params in ALONE.items():
                harness.progress(case)
                synk.prepare("message", **params)
                results.setdefault(case, {}).setdefault("alone", []).append(harness.turns([synk]))
    return results


def lines(results: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table: microseconds of a message, and the ratio to mpi4py's."""
    rows = []
    for case, peers in results.items():
        for peer, rounds in peers.items():
            if isinstance(rounds, str):
                rows.append([case, "", rounds, ""])
                continue
            names = ("synk",) if peer == "alone" else ("synk", peer)
            medians = [statistics.median(entry[name]["inner_s"] for entry in rounds) for name in names]
            times = [f"{median * 1e6:.1f}" for median in medians]
            ratios = [entry["synk"]["inner_s"] / entry[peer]["inner_s"] for entry in rounds if peer in entry]
            rows.append([case, *times, *[""] * (2 - len(times)), f"{statistics.median(ratios):.2f}" if ratios else ""])
    return rows
