"""Reports on the workers: what each is doing now, and how a dead one ended."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from synk._wire.orders import Phase, Up
from synk.errors import WorkerDied

_COMMUNICATION = os.path.join("synk", "communicators", "")
"""The folder that appears in the stack of a rank that waits for another one."""


def where(processes: Any) -> str:
    """Return what each rank is doing: phase, Python stacks. Any thread may call it at any time."""
    parts, up = [], processes.up  # a reference: another thread may close the runtime in the meantime
    for worker in processes.by_rank:
        process, rank = worker.process, worker.rank
        name = f"rank {rank}"
        named = f"{name} (pid {process.pid}, {processes.devices[rank]})"
        if worker.is_dead:
            parts.append(f"{name}: ended with {process.exit_text}")
        elif not worker.is_ready:  # it has no signal handler yet: the signal would end it
            parts.append(f"{named}: still starting")
        else:
            stacks = process.stacks().strip().replace("\n", "\n    ")
            phase = Phase(int(up[rank, Up.PHASE])).name.lower() if len(up) else "closed"
            parts.append(f"{named}: {phase}\n    {stacks}")
    return "\n".join(parts)


def stacks(processes: Any) -> dict[int, str]:
    """Return the Python stacks of all ranks whose workers are running. Any thread may call it at any time."""
    workers = [worker for worker in processes.by_rank if worker.is_ready and not worker.is_dead]
    return {worker.rank: worker.process.stacks().strip() for worker in workers}


def at_work(processes: Any, ranks: Iterable[int]) -> str:
    """Return what all ranks do, as :func:`where`; only one line if ``ranks`` compute and wait for no other rank."""
    text, up = where(processes), processes.up
    ranks = sorted(ranks)
    computes = ranks and len(up) and all(up[rank, Up.PHASE] == Phase.FUNCTION for rank in ranks)
    if not computes or _COMMUNICATION in text:
        return "\n" + text
    names = f"rank {ranks[0]} is" if len(ranks) == 1 else f"{len(ranks)} ranks are"
    return f" {names} at work in it. Runtime.where() shows what they do."


class DeathReports:
    """Makes the errors for deaths. Remembers earlier kills of the kernel's out-of-memory killer."""

    def __init__(self, processes: Any) -> None:
        self._processes = processes
        self._oom_kills = oom_kills()

    def died(self, ranks: Iterable[int], phase: str, what: str, began: float) -> WorkerDied:
        """Return the error for the deaths of ``ranks``, with what they wrote to stderr since the time ``began``."""
        processes = self._processes
        workers = [processes.by_rank[rank] for rank in ranks]
        exits = tuple(worker.process.exit_text for worker in workers)
        ended = "; ".join(
            f"{processes.placement.among_all([worker.rank])} (pid {worker.process.pid}, "
            f"{processes.devices[worker.rank]}) ended with {how}"
            for worker, how in zip(workers, exits)
        )
        killed = [worker.rank for worker, how in zip(workers, exits) if how == "SIGKILL"]
        hints = self._kill_hint(killed) if killed else ""
        if "SIGBUS" in exits:
            hints += " Likely a memory-mapped file has become shorter, or could not be read."
        message = f"{ended} during {what or phase}.{hints} The next call starts them again, if max_restarts= allows it."
        if phase != "start":
            message += " What functions kept there, in closures or globals, is gone."
        return WorkerDied(
            "\n".join([message, *stderr_tails(workers, began)]),
            ranks=tuple(worker.rank for worker in workers),
            pids=tuple(worker.process.pid for worker in workers),
            exits=exits,
            phase=phase,
        )

    def _kill_hint(self, ranks: Sequence[int]) -> str:
        """Return what is known about the SIGKILL of some ranks."""
        kills, self._oom_kills = self._oom_kills, oom_kills()
        why = (
            "The kernel's out-of-memory killer was at work"
            if self._oom_kills > kills
            else ("Likely out of memory, or somebody killed it")
        )
        held = [(rank, int(self._processes.up[rank, Up.RSS]) >> 20) for rank in ranks]
        sizes = ", ".join(f"rank {rank} held {size} MiB at its last report" for rank, size in held if size)
        return f" {why}{f' ({sizes})' if sizes else ''}."


def stderr_tails(workers: Sequence[Any], began: float) -> list[str]:
    """Return the last lines that workers wrote to stderr since the monotonic time ``began``, one text for each rank."""
    return [
        f"stderr of rank {worker.rank}: " + "\n  ".join(lines)
        for worker in workers
        if (lines := worker.process.stderr_since(began))
    ]


def oom_kills() -> int:
    """Return how often the kernel's out-of-memory killer has acted on this machine."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:  # /proc is hidden: only the signal is known
        return 0


def signs_of_life(pid: int) -> int:
    """Return a number that grows while a process reads files, also by the pages of a mapped library; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            num_read = int(file.readline().split()[1])
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # The name of the process, in parentheses, may have spaces. The fields after it begin with the third.
            return num_read + int(file.read().rpartition(")")[2].split()[9])
    except (OSError, ValueError, IndexError):
        return 0
