"""Calls and reductions of outputs, against every peer."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks._harness import Case, Harness, Peer

WORK_S = {"linear work": 0.005, "work": 0.05}  # the first reads its rows from memory, the second from the cache
OUTPUTS = {"output 4 KB": 4 << 10, "output 1 MB": 1 << 20, "output 64 MB": 64 << 20}


def run(harness: Harness) -> dict[str, Any]:
    """Return job -> peer -> rounds (or what went wrong), and the start-up seconds of each peer."""
    results: dict[str, Any] = {}
    with harness.baselines() as baselines:
        start_s: dict[str, list[Any]] = {peer.name: [peer.start_s] for peer in baselines[1:]}
        jobs = ("tiny", "linear 1.5 ms", "linear", "linear 15 ms", "linear passed")
        cases: dict[str, Case] = {job: {"job": job} for job in jobs}
        cases["tiny, cold"] = {"job": "tiny", "is_cold": 1}
        cases |= {job: {"job": job, "repeats": _repeats(baselines[0], job)} for job in WORK_S}
        cases |= {name: {"job": "output", "nbytes": nbytes} for name, nbytes in OUTPUTS.items()}
        for _ in range(harness.rounds):
            for spec in harness.chosen_peers:
                start_s.setdefault(spec.name, []).append(harness.versus(spec, baselines, "call", cases, results))
    return {"jobs": results, "start_s": start_s}


def _repeats(ideal: Peer, job: str) -> int:
    """Return how often ``job`` must repeat to take ``WORK_S`` when all workers compute at once."""
    repeats = 1
    while True:
        ideal.prepare("call", job=job, repeats=repeats)
        ideal.run(3)
        seconds = statistics.median(ideal.run(20)["call_s"][0])
        if seconds > WORK_S[job] / 4:
            return max(1, round(repeats * WORK_S[job] / seconds))
        repeats *= 4
