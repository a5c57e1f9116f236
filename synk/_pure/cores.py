"""How many cores this process may use: those in its affinity mask, or fewer if its control group has a CPU quota."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

StrPath = str | os.PathLike[str]


def num_cores(proc: StrPath = "/proc/self/cgroup", mount: StrPath = "/sys/fs/cgroup") -> int:
    """Return how many cores this process may use, at least 1.

    A quota is rounded up: a container that is limited to 1.5 CPUs may run on all cores of its machine, for 1.5 seconds
    of CPU time per second, and counts as 2 cores.

    Parameters
    ----------
    proc : path-like
        The file in which the kernel lists the control groups of this process.
    mount : path-like
        Where the control groups are mounted.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([allowed, *(math.ceil(quota) for quota in _quotas(proc, mount))]), 1)


def _quotas(proc: StrPath, mount: StrPath) -> Iterator[float]:
    """Yield the quotas, in cores, of this process's control groups and of their parents."""
    for line in _read(proc).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = os.path.join(mount, controllers)
        folder = os.path.normpath(os.path.join(root, name.lstrip("/")))
        root = os.path.normpath(root)
        while os.path.commonpath((root, folder)) == root:
            if controllers:
                limit = [_read(os.path.join(folder, f"cpu.cfs_{part}_us")).strip() for part in ("quota", "period")]
            else:
                limit = _read(os.path.join(folder, "cpu.max")).split()
            if len(limit) == 2 and limit[0].isdigit() and limit[1].isdigit() and int(limit[1]) > 0:
                yield int(limit[0]) / int(limit[1])
            folder = os.path.dirname(folder)


def _read(path: StrPath) -> str:
    """Return the text of a file, or an empty text if it cannot be read."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
