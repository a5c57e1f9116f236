"""Two lifelines by which the kernel ends a worker, and the processes that it started, when the program ends.

The first is a pipe whose write end only the program holds. A child that the program makes by ``fork`` inherits that
end. Python's own hooks close it there, but a fork by a C library runs no hooks. So the second lifeline is the mapping
of a memory file without a descriptor. No child inherits it: the file ceases to exist with the program's address space.

Both raise SIGKILL in the worker's process group. This takes no thread and not the interpreter's lock, so it works while
a function is stuck in C code.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
from collections.abc import Mapping
from typing import Any

from synk._wire.mapping import FAILED, NONE, Descriptor, last_error, libc
from synk._wire.memory import create_fd

_IN_DELETE_SELF = 0x400


class Pulse:
    """A memory file that exists as long as the program lives, or until ``close``."""

    def __init__(self) -> None:
        self._fd: int = create_fd(mmap.PAGESIZE)
        self._pid = os.getpid()
        self._address: list[int] = []  # whoever pops the address unmaps it, so that this happens once
        # No ``mmap`` object: it would keep a duplicate of the descriptor, which children inherit.
        address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, self._fd, 0)
        if address == FAILED:
            raise last_error()
        self._address.append(address)
        # A child that another thread forks just before this line inherits the mapping and keeps the file alive. The
        # worker then has the pipe alone.
        libc.madvise(address, mmap.PAGESIZE, mmap.MADV_DONTFORK)

    def take(self) -> int:
        """Return the descriptor for the worker. The worker must be the last to hold it."""
        fd, self._fd = self._fd, NONE
        return fd

    def close(self) -> None:
        """Release the file, which ends the worker if it still runs. Safe to call more than once."""
        self._fd = NONE
        # A child of ``fork`` does not have the mapping, and may have something of its own at this address.
        if self._pid == os.getpid():
            while self._address:
                libc.munmap(self._address.pop(), mmap.PAGESIZE)


def tie_to_program(setup: Mapping[str, Any]) -> tuple[Descriptor, Descriptor | None]:
    """End this process when the process that started it ends.

    Parameters
    ----------
    setup : mapping
        The first message to this process.

    Returns
    -------
    tuple
        A pidfd of the program, and the pulse, which must stay open.
    """
    tie_to_pipe(setup["fds"]["lifeline"])
    pulse = tie_to_pulse(setup["fds"]["pulse"])
    program = Descriptor(os.pidfd_open(setup["program_pid"]))
    if os.getppid() != setup["program_pid"]:
        os._exit(1)  # the program ended before the pidfd was open, which may name another process now
    return program, pulse


def tie_to_pipe(fd: int) -> None:
    """End this process when the write end of the pipe ``fd`` is closed. Nothing is ever written to the pipe."""
    _kill_on_event(fd)
    try:
        is_closed = os.read(fd, 1) == b""
    except BlockingIOError:
        is_closed = False
    if is_closed:  # it was closed before the signal was armed
        os._exit(1)


def tie_to_pulse(fd: int) -> Descriptor | None:
    """End this process when the file of a :class:`Pulse` ceases to exist. Closes ``fd``; returns what must stay open.

    Returns None if this user has no inotify watches left. Then the pipe alone must do.
    """
    watch = libc.inotify_init1(os.O_CLOEXEC)
    if watch >= 0:
        # The signal is armed before the watch is added, so no event can come unseen. A program that is already dead is
        # noticed as well: ``fd`` is then the last reference to the file, and closing it below is the event.
        _kill_on_event(watch)
        if libc.inotify_add_watch(watch, f"/proc/self/fd/{fd}".encode(), _IN_DELETE_SELF) < 0:  # /proc is hidden
            os.close(watch)
            watch = -1
    os.close(fd)
    return Descriptor(watch) if watch >= 0 else None


def _kill_on_event(fd: int) -> None:
    # To the whole process group, which holds what functions have started.
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
