"""What the fault tests make workers do. Imported by the workers themselves, so: standard library and NumPy only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np

pins: list[Any] = []
"""Objects that outlive a call, in the worker's own copy of this module."""


def kill_self() -> NoReturn:
    """End this process by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("alive after SIGKILL")


def kill_all(pids: Iterable[int]) -> NoReturn:
    """End processes at once, this one among them or not, and wait for the end."""
    others = [pid for pid in pids if pid != os.getpid()]
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    if len(others) < len(list(pids)):
        kill_self()
    loop_for_ever()


def segfault(*_: object) -> NoReturn:
    """Read address 0."""
    ctypes.string_at(0)
    raise AssertionError("alive after reading address 0")


def libc_exit() -> NoReturn:
    """End this process by the C library's exit(0), behind Python's back."""
    ctypes.CDLL(None).exit(0)
    raise AssertionError("alive after exit(0)")


def hold_the_gil(seconds: int) -> None:
    """Sleep in C without letting another thread run."""
    ctypes.PyDLL(None).sleep(seconds)


def start_sleeper() -> int:
    """Start a program that outlives this process unless its group is killed; return its pid."""
    return os.posix_spawnp("sleep", ["sleep", "600"], os.environ)


def loop_for_ever() -> NoReturn:
    """Loop in Python."""
    while True:
        time.sleep(0.001)


def loop_in_c(*_: object) -> NoReturn:
    """Hold the interpreter for ever: no Python signal handler can run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        hold_the_gil(1)


DEATHS: dict[str, tuple[Callable[[], object], str]] = {
    "exit 0": (lambda: os._exit(0), "exit 0"),
    "exit 3": (lambda: os._exit(3), "exit 3"),
    "libc exit": (libc_exit, "exit 0"),
    "abort": (os.abort, "SIGABRT"),
    "kill": (kill_self, "SIGKILL"),
    "segv": (segfault, "SIGSEGV"),
}
"""Ways to die and what ``WorkerDied.exits`` says of each."""


class TwoArguments(Exception):
    """Pickles, but cannot be rebuilt: its state holds one argument."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__(f"{first} and {second}")


class Quit(BaseException):
    """Not an ``Exception``."""


class HoldsLock(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Hostile(Exception):
    """Does ``action`` when it is pickled, when it is printed, or when it is loaded."""

    def __init__(self, stage: str, action: Callable[..., object]) -> None:
        super().__init__("hostile")
        self.stage = stage
        self.action = action

    def __reduce__(self) -> tuple[Any, ...]:
        if self.stage == "pickle":
            self.action()
        if self.stage == "load":
            return (self.action, ())
        return (ValueError, ("hostile",))

    def __str__(self) -> str:
        if self.stage == "print":
            self.action()
        return "hostile"


def raise_value_error() -> NoReturn:
    """Raise an ordinary exception."""
    raise ValueError("from the saboteur")


def system_exit() -> NoReturn:
    """Raise SystemExit."""
    sys.exit(5)


class AtPickle:
    """Does ``action`` when it is pickled."""

    def __init__(self, action: Callable[..., object]) -> None:
        self.action = action

    def __reduce__(self) -> tuple[Any, ...]:
        self.action()
        return (int, ())


class AtLoad:
    """Does ``action(*args)`` when it is loaded by a process that is not ``spared_pid``."""

    def __init__(self, action: Callable[..., object], *args: object, spared_pid: int = -1) -> None:
        self.action = action
        self.args = args
        self.spared_pid = spared_pid

    def __reduce__(self) -> tuple[Any, ...]:
        return (act_unless, (self.spared_pid, self.action, *self.args))


def act_unless(spared_pid: int, action: Callable[..., object], *args: object) -> object:
    """Call the action except in one process."""
    return None if os.getpid() == spared_pid else action(*args)


def deep(levels: int) -> list[Any]:
    """Return a list in a list in a list ..."""
    nest: list[Any] = []
    for _ in range(levels):
        nest = [nest]
    return nest


def open_targets() -> list[str]:
    """Return what the open descriptors of this process are."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(targets)


def synk_descriptors(_: object = None) -> list[str]:
    """Return what this process holds of the life lines between a master and its workers."""
    return [target for target in open_targets() if "pidfd" in target or "eventfd" in target]


class Recorder:
    """Counts what is written to it and refuses all else: a standard output of the user's own."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered."""


def raise_text(text: str) -> NoReturn:
    """Raise an ordinary exception that says ``text``."""
    raise ValueError(text)


def reduce_rows(op: str, x: Any) -> Any:
    """Reduce over the rows as NumPy does, in the dtype of the rows; a row of what has no arithmetic is itself."""
    if (
        x.dtype.kind not in "biufc"
        or (x.dtype.kind not in "fc" and op == "avg")
        or (x.dtype.kind == "b" and op == "sum")
    ):
        return x[0]
    with np.errstate(all="ignore"):
        if op == "sum":
            return x.sum(axis=0, dtype=x.dtype)
        return getattr(x, {"avg": "mean"}.get(op, op))(axis=0)


_opened: list[str] = []


def watch_files() -> None:
    """Record every file that this process opens from now on."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            _opened.append(os.fsdecode(arguments[0]))

    sys.addaudithook(hook)


def watched_files() -> list[str]:
    """Return the files opened since ``watch_files``, except modules and what /proc tells about memory."""
    return [
        path
        for path in _opened
        if not path.endswith((".py", ".pyc", ".so")) and not path.startswith(("/proc/", "/sys/"))
    ]


def anonymous_kb() -> int:
    """Return the private memory of this process, in KB: copies of its own, pages of shared segments not counted."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous:"))


def resident_nbytes(pid: int | str = "self") -> int:
    """Return the resident bytes of a process."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
