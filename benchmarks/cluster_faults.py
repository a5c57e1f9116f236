"""How long nodes take to start, and what the death of an agent or a machine costs; ``benchmarks.cluster`` prints it."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import synk
from benchmarks._harness import ROOT
from synk.errors import WorkerDied

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
NUM_TRIES = 50

Makers = Mapping[str, Callable[[], synk.Runtime]]
"""Way -> what starts a runtime."""


class RayCluster:
    """Raylets with two CPUs each, beside one without any, in a process of their own. The tests use it, too.

    Parameters
    ----------
    num_machines : int
    **variables : str
        Of the environment of the raylets.

    Attributes
    ----------
    address : str
    """

    def __init__(self, num_machines: int, **variables: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "support" / "ray_cluster.py"), str(num_machines), "2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **QUIET, **variables},
        )
        self.address = self.answer()

    def say(self, line: str) -> None:
        """Say what to do: ``add``, or ``lose PID``. ``answer`` returns when it is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """Wait for an answer, and return it. Ray prints other lines there, too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("127.", "done")):
                return line.strip()
        raise RuntimeError("the Ray cluster has ended")

    def tell(self, line: str) -> None:
        """Say what to do, and wait until it is done."""
        self.say(line)
        self.answer()

    def close(self) -> None:
        """End all raylets."""
        self._process.communicate(timeout=60)

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def wait(x: np.ndarray) -> None:
    """Wait for a minute."""
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        time.sleep(0.01)


def pids(x: np.ndarray) -> tuple[int, int]:
    """Return the processes of the worker and of its agent."""
    return os.getpid(), os.getppid()


def starts(makers: Makers, rounds: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of ``synk.fork``, and those until its first call has answered."""
    forked: dict[str, list[float]] = {way: [] for way in makers}
    answered: dict[str, list[float]] = {way: [] for way in makers}
    for way, make in [*makers.items()] * rounds:
        began = time.perf_counter()
        with make() as runtime:
            forked[way].append(time.perf_counter() - began)
            runtime.function(pids, outputs=None)(np.arange(2.0))
            answered[way].append(time.perf_counter() - began)
    return {"fork": medians(forked), "fork and first call": medians(answered)}


def deaths(makers: Makers, cluster: RayCluster | None, rounds: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds until the program is told of a death in a call, and from then until the next answer."""
    agents: dict[str, list[tuple[float, float]]] = {way: [] for way in makers if way != "local"}
    machines: dict[str, list[tuple[float, float]]] = {}
    for way in [*agents] * rounds:
        with makers[way]() as runtime:
            agents[way].append(death(runtime, lambda worker, agent: os.kill(agent, signal.SIGKILL)))
    for _ in range(rounds if cluster is not None else 0):
        assert cluster is not None
        cluster.tell("add")
        with makers["ray"]() as runtime:
            trial = death(runtime, lambda worker, agent: cluster.say(f"lose {worker}"))
            cluster.answer()
        machines.setdefault("ray", []).append(trial)
    return {
        "agent's death told": medians({way: [told for told, _ in trials] for way, trials in agents.items()}),
        "next call after it": medians({way: [then for _, then in trials] for way, trials in agents.items()}),
        "machine's death told": medians({way: [told for told, _ in trials] for way, trials in machines.items()}),
        "next call after that": medians({way: [then for _, then in trials] for way, trials in machines.items()}),
    }


def death(runtime: Any, lose: Callable[[int, int], None]) -> tuple[float, float]:
    """Lose the first node in a call. Return the seconds until the program knows, and then until a call has answered."""
    x = np.arange(2.0)
    where = runtime.function(pids, outputs=None)
    victims = where(x)[0]
    call = runtime.function(wait, outputs=None).submit(x)
    time.sleep(0.5)
    began = time.perf_counter()
    lose(*victims)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # which says that it is started again
        try:
            call.result()
        except WorkerDied:
            told = time.perf_counter()
        for _ in range(NUM_TRIES):
            try:
                where(x)
                break
            except WorkerDied:  # Ray does not know yet that the machine is lost, and has sent the agent there
                pass
    return told - began, time.perf_counter() - told


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median of each way, in milliseconds."""
    return {way: 1e3 * statistics.median(each) for way, each in seconds.items()}
