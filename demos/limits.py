"""Why a speed-up is small: what other programs take of the cores, and what the memory gives."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

import synk

SMALL = 1.3
"""A speed-up below this one is explained."""


class Watch:
    """How much of the cores other programs use while the body of ``with`` runs.

    Attributes
    ----------
    other_cores : float
    """

    def _read(self) -> tuple[float, float]:
        """Return the time, and for how long cores have been busy with other programs, in seconds."""
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
        busy = 0
        for name, *counts in lines:
            if name in cores:
                user, nice, system, _idle, _disk, *interrupts_and_stolen = map(int, counts[:8])
                busy += user + nice + system + sum(interrupts_and_stolen)
        return time.perf_counter(), (busy - sum(own_ticks())) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Watch:
        self._before = self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        seconds, busy = (after - before for before, after in zip(self._before, self._read(), strict=True))
        self.other_cores = max(0.0, busy) / seconds


def own_ticks() -> Iterator[int]:
    """Yield the processor time of this process and of each of its workers, which are its children."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            pid, rest = path.read_text().split(" (", 1)
            _state, parent, *fields = rest.rsplit(") ", 1)[1].split()
            if os.getpid() in (int(pid), int(parent)):
                yield int(fields[9]) + int(fields[10])  # as a user, and in the kernel


def memory_rate(runtime: synk.Runtime) -> float:
    """Return the GB/s that all workers together read and write, in arrays too large for their caches."""

    def copies(_: int) -> float:
        source = np.ones(1 << 23)
        target = source.copy()
        start = time.perf_counter()
        for _ in range(10):
            np.copyto(target, source)
        return 20 * source.nbytes / (time.perf_counter() - start) / 1e9

    return sum(runtime.map(copies, range(runtime.world_size), batch_size=1))  # one to each worker


def explain(speed_up: float, runtime: synk.Runtime, other_cores: float, job_rate: float) -> str:
    """Return what limits ``speed_up``, as far as two measurements say.

    Parameters
    ----------
    speed_up : float
        Of the workers of ``runtime`` over the serial program.
    other_cores : float
        How many cores other programs used meanwhile.
    job_rate : float
        The GB/s that the job itself reads and writes, on all workers together.
    """
    num_cores = len(os.sched_getaffinity(0))
    rate = memory_rate(runtime)
    lines = [
        f"A speed-up of {speed_up:.2f} is small. Two measurements:",
        f"- other programs used {other_cores:.1f} of the {num_cores} cores meanwhile;",
        f"- the job moves {job_rate:.1f} GB/s, and the memory gives all workers together {rate:.1f} GB/s.",
    ]
    if num_cores - other_cores < runtime.world_size - 0.3:
        lines.append("So the other programs are the limit: run the demo again when they have ended.")
    elif job_rate > rate / 2:
        lines.append("So memory is the limit: a function that computes more with each byte gains more.")
    else:
        lines.append("Neither explains it. Are two of the cores threads of one, or is the machine throttled?")
    return "\n".join(lines)
