"""The surroundings: settings of the environment, modules that are imported late or by others, whether workers can run,
and how many cores this process may use.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from synk.errors import UnsupportedError


def _number(name: str, default: str, expected: str) -> float:
    text = os.environ.get(name, default)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"cannot read {name}: got {text!r}, expected {expected}.")
    return number


def stuck_after_s() -> float:
    """Return after how many seconds the log explains a running call: ``SYNK_STUCK_AFTER``, 60 by default.

    Raises
    ------
    ValueError
        If it is not a number.
    """
    seconds = _number("SYNK_STUCK_AFTER", "60", "seconds, or 0 for never")
    return seconds if seconds > 0 else math.inf


def spin_s() -> float:
    """Return for how many seconds a worker waits awake: ``SYNK_SPIN_US`` microseconds, 500 by default.

    A worker waits in this way for its next message, as long as that pays, and for the other ranks at the end of a call
    with large outputs.

    Raises
    ------
    ValueError
        If it is not a number.
    """
    return max(_number("SYNK_SPIN_US", "500", "microseconds, or 0 to sleep at once"), 0.0) / 1e6


class _AbsoluteFinder:
    """Finds modules for the thread that made it, along the absolute entries of the search path."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if path is not None or threading.get_ident() != self._thread:
            return None
        entries = [entry for entry in list(sys.path) if isinstance(entry, str) and os.path.isabs(entry)]
        return PathFinder.find_spec(name, entries, target)


def imported_late(name: str) -> Any:
    """Return a module that is imported when it is first used, because ``import synk`` must be quick.

    The search begins with the absolute entries of the search path: by now the program may be in another folder, where a
    file of that name would take the module's place. ``sys.path`` itself stays as it is, since other threads may import
    at the same time. A file of synk needs this only if it imports such modules itself: the path of a package is
    absolute.
    """
    if name not in sys.modules:
        finder: Any = _AbsoluteFinder()
        with contextlib.suppress(ValueError):  # a program may have replaced the finder of Python
            # Behind the finders of built-in and frozen modules, which come before any file.
            sys.meta_path.insert(sys.meta_path.index(PathFinder), finder)
        try:
            importlib.import_module(name)
        finally:
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(finder)
    return sys.modules[name]


class _Follower:
    """A finder that finds nothing itself: at the end of each import of one module it calls ``act``."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self.name, self.act = name, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == name:  # a loader may serve several modules
                    self.act(module)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def follow(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call ``act`` with a module after each import to come."""
    known = [(finder.name, finder.act) for finder in sys.meta_path if isinstance(finder, _Follower)]
    if (name, act) not in known:
        sys.meta_path.insert(0, _Follower(name, act))


def at_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call ``act`` with a module: now if it is imported, and after each import to come. Imports nothing itself."""
    follow(name, act)
    if sys.modules.get(name) is not None:
        act(importlib.import_module(name))  # waits for another thread that is importing it


def check_platform() -> None:
    """Raise if workers cannot run on this platform. The package can still be imported, and functions be built.

    Raises
    ------
    UnsupportedError
    """
    if sys.platform != "linux":
        needed = ("memfd_create", "pidfd_open", "eventfd", "sched_getaffinity")
        missing = [f"os.{name}" for name in needed if not hasattr(os, name)]
        raise UnsupportedError(
            f"cannot fork: got the platform {sys.platform!r}, expected Linux. What its workers and shared memory are "
            f"built on is missing here ({', '.join(missing) or 'pidfds'}). Run the program in a Linux container."
        )


def merged(wanted: list[str], here: list[str]) -> list[str]:
    """Return the part of the program's search path that exists on this machine, then the machine's own."""
    found = [entry for entry in wanted if not os.path.isabs(entry) or os.path.exists(entry)]
    return [*found, *(entry for entry in here if entry not in found)]


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
