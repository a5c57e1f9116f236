"""File descriptors that are closed exactly once, and never while a thread still uses the number."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable

NONE = -1
"""Takes the place of a descriptor that was given up."""


class Descriptor(int):
    """The number of an open file, which is closed when the last reference to this object is gone.

    An owner keeps it in one attribute and gives it up by assigning ``NONE``, in any thread and as often as it likes. A
    thread in the middle of a system call holds a reference of its own. So the number cannot be closed and reused during
    the call.

    Parameters
    ----------
    fd : int
        A descriptor that no other code closes. One that is such an object already stays it.
    """

    __slots__ = ()

    def __new__(cls, fd: int) -> Descriptor:
        return fd if isinstance(fd, Descriptor) else super().__new__(cls, above_streams(fd))

    # ``close`` is bound here: when the interpreter ends, this module may be cleared before the last descriptor goes.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        with contextlib.suppress(OSError):  # the program closed it, as programs do that close every descriptor
            close(self)


def above_streams(fd: int) -> int:
    """Return ``fd``, duplicated to a number above 2 if it took the place of a closed standard stream.

    Otherwise text that C code prints, or the output of a program that is started later, would go into it.
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
        # Moving the first end may fail for want of descriptors, and the second end has no owner yet.
        os.close(write_fd)
        raise
    return read, Descriptor(write_fd)


def packet_pair() -> tuple[socket.socket, Descriptor]:
    """Return the two ends of a new socket pair that preserves message boundaries."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        other = Descriptor(theirs.detach())
        return socket.socket(fileno=above_streams(ours.detach())), other


def eventfd() -> Descriptor:
    """Return a new event descriptor, close-on-exec and non-blocking."""
    return Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
