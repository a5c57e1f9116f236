"""File descriptors that are closed exactly once, and never while a thread still uses the number."""

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
"""Takes the place of a descriptor that was given up."""


class Descriptor(int):
    """The number of an open file, which is closed when the last reference to this object is gone.

    An owner keeps it in one attribute and gives it up by assigning ``NONE``, in any thread and as often as it likes. A
    thread in the middle of a system call holds a reference of its own. So the number cannot be closed and reused during
    the call.

    Parameters
    ----------
    fd : int
        A descriptor that no other code closes.
    """

    __slots__ = ()

    def __new__(cls, fd: int) -> Descriptor:
        return super().__new__(cls, above_streams(fd))

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


class Orphans:
    """Finds orphans: open descriptors whose owner is gone.

    The owner is a mapped file, whose finalizer closes the descriptor (:class:`synk._wire.mapping.MappedFile`). A signal
    handler of the program may run inside that finalizer and raise there. Python drops such an exception, and the
    descriptor stays open although no object knows it any more. So each owner is watched from outside by a weak
    reference, and the next operation that frees memory closes what the finalizer has missed.

    Attributes
    ----------
    ended : deque of weakref.ref
        References to owners that are gone. Their descriptors may still be open. The references append themselves, in
        any thread and at any time. This happens in C, so no signal handler can interrupt it.
    """

    def __init__(self) -> None:
        self.ended: deque[weakref.ref[Any]] = deque()
        self._owners: dict[int, weakref.ref[Any]] = {}

    def watch(self, fd: int, owner: object) -> None:
        """Note that ``owner`` will close ``fd`` by :meth:`close`."""
        # When a segment is mapped again, its descriptor changes hands. The new reference takes the place of the old
        # one here, so the end of the first owner no longer concerns the descriptor.
        self._owners[fd] = weakref.ref(owner, self.ended.append)

    def close(self, fd: int) -> None:
        """Close a descriptor for its owner. A signal handler may run before or after this, but not in between."""
        del self._owners[fd]
        os.close(fd)

    def close_all(self) -> None:
        """Close the descriptors that owners left open when they went."""
        with deferred():
            while self.ended:
                owner = self.ended.popleft()
                for fd in [fd for fd, reference in list(self._owners.items()) if reference is owner]:
                    self.close(fd)


orphans = Orphans()


def eventfd() -> Descriptor:
    """Return a new event descriptor, close-on-exec and non-blocking."""
    return Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
