"""Steps of training in PyTorch against DistributedDataParallel with gloo, on CPU workers with one thread each."""

from __future__ import annotations

from typing import Any

from benchmarks._harness import Harness, PeerError, Spec

DDP = Spec("torch DDP (gloo)", "ddp", "ranks", ("torch",), {"GLOO_SOCKET_IFNAME": "lo"})
SYNK = Spec("synk", "synk_training", requires=("synk", "torch"))
JOBS = {
    "cnn, 8 x 8 images": "cnn",
    "transformer of two blocks": "transformer",
    "18 MB of gradients": "large",
    "0.6 ms of work": "small",
    "one number": "empty",
}
MEMORY = "memory, 18 MB of gradients"
PARALLEL = {"DataParallel, transformer of two blocks": "transformer", "DataParallel, 0.6 ms of work": "small"}


def run(harness: Harness) -> dict[str, Any]:
    """Return case -> peer -> rounds (or what went wrong)."""
    results: dict[str, Any] = {}
    for case, job in {**JOBS, **PARALLEL}.items():
        harness.progress(case)
        try:
            with harness.peers(SYNK, DDP) as peers:
                options = {"is_parallel": True} if case in PARALLEL else {}
                for peer, own in zip(peers, (options, {})):
                    peer.prepare("step", job=job, **own)
                results[case] = {DDP.name: [harness.turns(peers) for _ in range(harness.rounds)]}
        except PeerError as error:
            results[case] = {DDP.name: f"failed: {error}"}
    harness.progress(MEMORY)
    try:
        results[MEMORY] = {DDP.name: [_memory(harness, "large")]}
    except PeerError as error:
        results[MEMORY] = {DDP.name: f"failed: {error}"}
    for case, job, name, other_job in (
        ("empty model", "nothing", "plain call", "plain"),
        ("one number", "empty", "own step", "own"),
    ):
        other = Spec(name, "synk_training", requires=("synk", "torch"))
        rounds = results.setdefault(case, {})
        try:
            with harness.peers(SYNK, other) as peers:
                for peer, own_job in zip(peers, (job, other_job)):
                    peer.prepare("step", job=own_job)
                rounds[name] = [harness.turns(peers) for _ in range(harness.rounds)]
        except PeerError as error:
            rounds[name] = f"failed: {error}"
    return results


def _memory(harness: Harness, job: str) -> dict[str, Any]:
    """Return how much memory one rank of each peer takes after some steps: its share of what it shares counts."""
    entry: dict[str, Any] = {}
    with harness.peers(SYNK, DDP) as peers:
        for peer in peers:
            peer.prepare("memory", job=job)
            entry[peer.name] = {"nbytes": max(nbytes for (nbytes,) in peer.run(1)["inner_s"])}
    return entry
