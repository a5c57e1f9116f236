"""Resident against passed: parameters, rows, and a training step in one call or three."""

from __future__ import annotations

from typing import Any

from benchmarks._harness import Harness, PeerError, Spec

CASES: dict[str, tuple[str, dict[str, int], tuple[str, ...]]] = {
    "parameters, 4 KB": ("parameters", {"nbytes": 4 << 10}, ("passed", "resident")),
    "parameters, 1 MB": ("parameters", {"nbytes": 1 << 20}, ("passed", "resident")),
    "parameters, 64 MB": ("parameters", {"nbytes": 64 << 20}, ("passed", "resident")),
    "rows, 40 MB": ("rows", {}, ("passed", "data", "sharded")),
    "step, 100 parameters": ("step", {"columns": 100}, ("three", "one")),
    "step, 1 million parameters": ("step", {"columns": 1_000_000}, ("three", "one")),
}


def run(harness: Harness) -> dict[str, Any]:
    """Return case -> rounds (or what went wrong); each way runs in a runtime of its own."""
    results: dict[str, Any] = {}
    for case, (job, params, ways) in CASES.items():
        harness.progress(case)
        specs = [Spec(way, "synk_state", requires=("synk",), one_thread=False) for way in ways]
        try:
            with harness.peers(*specs) as peers:
                for peer in peers:
                    peer.prepare(job, way=peer.name, **params)
                results[case] = [harness.turns(peers) for _ in range(harness.rounds)]
        except PeerError as error:
            results[case] = f"failed: {error}"
    return results
