"""How many cores this process may use: those in its affinity mask, or fewer if its control group has a CPU quota."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def num_cores(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many cores this process may use, at least 1.

    A quota is rounded up: a container that is limited to 1.5 CPUs may run on all cores of its machine, for 1.5 seconds
    of CPU time per second, and counts as 2 cores.

    Parameters
    ----------
    proc : Path
        The file in which the kernel lists the control groups of this process.
    mount : Path
        Where the control groups are mounted.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([allowed, *(math.ceil(quota) for quota in _quotas(proc, mount))]), 1)


def _quotas(proc: Path, mount: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of this process's control groups and of their parents."""
    for line in _read(proc).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mount / controllers if controllers else mount
        group = Path(os.path.normpath(root / name.lstrip("/")))
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            if controllers:
                limit = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
            else:
                limit = _read(folder / "cpu.max").split()
            if len(limit) == 2 and limit[0].isdigit() and limit[1].isdigit() and int(limit[1]) > 0:
                yield int(limit[0]) / int(limit[1])


def _read(path: Path) -> str:
    """Return the text of a file, or an empty text if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
