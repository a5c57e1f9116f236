"""File descriptors that are closed once, and never while a thread still uses the number."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from synk._pure.interrupts import deferred

NONE = -1
"""What stands in the place of a descriptor that was given up."""


class Descriptor(int):
    """The number of an open file, which is closed when nobody refers to this object any more.

    An owner keeps it in one attribute and gives it up by assigning ``NONE``, in any thread and as often as it likes. A
    thread that is in the middle of a system call holds a reference of its own, so the number cannot be closed under it
    and given to somebody else.

    Parameters
    ----------
    fd : int
        A descriptor that nobody else closes.
    """

    __slots__ = ()

    def __new__(cls, fd: int) -> Descriptor:
        return super().__new__(cls, above_streams(fd))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        with contextlib.suppress(OSError):  # closed behind our back, by a program that closes all it finds
            close(self)


def above_streams(fd: int) -> int:
    """Return ``fd``, moved where it took the place of a closed standard stream.

    What C code prints, and what a program started later takes for its output, would go into it.
    """
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def pipe() -> tuple[Descriptor, Descriptor]:
    """Return the two ends ``(read, write)`` of a new pipe."""
    read_fd, write_fd = os.pipe()
    try:
        read = Descriptor(read_fd)
    except BaseException:
        os.close(write_fd)
        raise
    return read, Descriptor(write_fd)


def packet_pair() -> tuple[socket.socket, Descriptor]:
    """Return the two ends of a new socket pair that keeps the bounds of messages."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        other = Descriptor(theirs.detach())
        return socket.socket(fileno=above_streams(ours.detach())), other


class Orphans:
    """Knows the owner of each descriptor, and which are without one.

    Attributes
    ----------
    ended : deque of weakref.ref
        Of owners that are gone, with a descriptor still open. Filled by the references themselves, at any time and in
        any thread, in C: nothing can come between.
    """

    def __init__(self) -> None:
        self.ended: deque[weakref.ref[Any]] = deque()
        self._owners: dict[int, weakref.ref[Any]] = {}

    def watch(self, fd: int, owner: object) -> None:
        """Note that ``owner`` closes ``fd``, with :meth:`close`."""
        self._owners[fd] = weakref.ref(owner, self.ended.append)

    def close(self, fd: int) -> None:
        """Close a descriptor on behalf of its owner. A signal handler runs before or after it, not in between."""
        del self._owners[fd]
        os.close(fd)

    def close_all(self) -> None:
        """Close what owners that are gone have left open."""
        with deferred():
            while self.ended:
                owner = self.ended.popleft()
                for fd in [fd for fd, reference in list(self._owners.items()) if reference is owner]:
                    self.close(fd)


orphans = Orphans()
