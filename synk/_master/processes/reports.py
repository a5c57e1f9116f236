"""What the master can say of its workers: what each is doing right now, and how one that died has ended."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from synk._master.processes.processes import Processes, WorkerState
from synk._wire.control import Phase, Up
from synk.errors import WorkerDied

_COMMUNICATION = (os.path.join("synk", "_worker", "comm.py"), os.path.join("synk", "communicators", ""))
"""Files that show in the stack of a rank which waits for another one."""


def where(processes: Processes) -> str:
    """Return what each rank is doing: phase, bytes published, Python stacks. For any thread, also during a call."""
    parts, up = [], processes.up  # held: another thread may close the runtime meanwhile
    for worker in processes.by_rank:
        process, rank = worker.process, worker.rank
        named = f"rank {rank} (pid {process.pid}, {processes.devices[rank]})"
        if worker.is_dead:
            parts.append(f"rank {rank}: ended with {process.exit_text}")
        elif not worker.is_ready:  # it has no handler yet: the signal would end it
            parts.append(f"{named}: still starting")
        else:
            phase = Phase(int(up[rank, Up.PHASE])).name.lower() if len(up) else "closed"
            nbytes = int(up[rank, Up.OUTPUT_NBYTES]) if len(up) else 0
            stacks = process.stacks(1.0).strip().replace("\n", "\n    ")
            parts.append(f"{named}: {phase}, {nbytes} bytes of outputs published so far\n    {stacks}")
    return "\n".join(parts)


def at_work(processes: Processes, ranks: Iterable[int]) -> str:
    """Return what all ranks do, as :func:`where`; a line if ``ranks`` are in their function and wait for no other."""
    text, up = where(processes), processes.up
    ranks = sorted(ranks)
    computes = ranks and len(up) and all(up[rank, Up.PHASE] == Phase.FUNCTION for rank in ranks)
    if not computes or any(folder in text for folder in _COMMUNICATION):
        return "\n" + text
    names = f"rank {ranks[0]} is" if len(ranks) == 1 else f"{len(ranks)} ranks are"
    return f" {names} at work in it. Runtime.where() shows what they do."


class DeathReports:
    """Makes the errors that tell of deaths; remembers what the kernel's out-of-memory killer had done before."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._oom_kills = oom_kills()

    def died(self, ranks: Iterable[int], phase: str, what: str, began: float) -> WorkerDied:
        """Return the error for ``ranks``, with what they wrote to stderr since the monotonic time ``began``."""
        processes = self._processes
        workers = [processes.by_rank[rank] for rank in ranks]
        exits = tuple(worker.process.exit_text for worker in workers)
        ended = "; ".join(
            f"rank {worker.rank} of {processes.world_size} (pid {worker.process.pid}, "
            f"{processes.devices[worker.rank]}) ended with {how}"
            for worker, how in zip(workers, exits)
        )
        killed = [worker.rank for worker, how in zip(workers, exits) if how == "SIGKILL"]
        hints = self._kill_hint(killed) if killed else ""
        if "SIGBUS" in exits:
            hints += " Likely a memory-mapped file has become shorter, or could not be read."
        message = f"{ended} during {what or phase}.{hints} The next call starts dead workers again."
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
        """Return what is known of the SIGKILL of some ranks."""
        kills, self._oom_kills = self._oom_kills, oom_kills()
        why = (
            "The kernel's out-of-memory killer was at work"
            if self._oom_kills > kills
            else ("Likely out of memory, or somebody killed it")
        )
        held = [(rank, int(self._processes.up[rank, Up.RSS]) >> 20) for rank in ranks]
        sizes = ", ".join(f"rank {rank} held {size} MiB at its last report" for rank, size in held if size)
        return f" {why}{f' ({sizes})' if sizes else ''}."


def stderr_tails(workers: Sequence[WorkerState], began: float) -> list[str]:
    """Return the last lines that workers wrote to stderr since the monotonic time ``began``, a text for each rank."""
    return [
        f"stderr of rank {worker.rank}: " + "\n  ".join(lines)
        for worker in workers
        if (lines := worker.process.stderr_since(began))
    ]


def oom_kills() -> int:
    """How often the kernel's out-of-memory killer has struck on this machine."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:  # /proc is hidden: the signal alone has to do
        return 0
