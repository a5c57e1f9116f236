"""File descriptors that are closed exactly once, and never while a thread still uses the number."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

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


def owned(numbers: Iterable[int]) -> list[Descriptor]:
    """Return descriptors that an iterator opens as it is asked for them, with their owners.

    If the iterator is one of C, such as ``map(os.pidfd_open, [pid])``, all of it is one call into C: no handler of a
    signal raises in between, when a new descriptor has no owner yet.
    """
    found: list[Any] = list(map(int.__new__, itertools.repeat(Descriptor), numbers))
    return [each if each > 2 else Descriptor(fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 3)) for each in found]


def pipe() -> tuple[Descriptor, Descriptor]:
    """Return the two ends ``(read, write)`` of a new pipe."""
    read, write = owned(itertools.chain.from_iterable(itertools.starmap(os.pipe, [()])))
    return read, write


def packet_pair() -> tuple[socket.socket, Descriptor]:
    """Return the two ends of a new socket pair that preserves message boundaries."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if min(ours.fileno(), theirs.fileno()) <= 2:  # it took the place of a standard stream, and keeps it meanwhile
        with ours, theirs:
            return packet_pair()
    with theirs, contextlib.ExitStack() as failing:
        failing.enter_context(ours)
        (other,) = owned(map(os.dup, [theirs.fileno()]))
        failing.pop_all()
    return ours, other


def eventfd() -> Descriptor:
    """Return a new event descriptor, close-on-exec and non-blocking."""
    (fd,) = owned(map(os.eventfd, [0], [os.EFD_CLOEXEC | os.EFD_NONBLOCK]))
    return fd
