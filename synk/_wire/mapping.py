"""File descriptors that are closed exactly once, and never while a thread still uses the number; mapped files.

Files are mapped without a second descriptor, made private when the process forks, and given back in pieces. The
standard library's ``mmap`` keeps a duplicate of each descriptor, cannot map at a chosen address, and cannot reserve
or free part of a file. The C library's functions for this are declared here and nowhere else. This file knows nothing
of segments and arrays.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

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


MAP_FIXED = 0x10
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13; the value on x86-64 and AArch64
_MREMAP_MAYMOVE_FIXED = 1 | 2
_FALLOC_PUNCH_HOLE_KEEP_SIZE = 2 | 1

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.mprotect.argtypes = libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
FAILED = ctypes.c_void_p(-1).value
"""The value that ``mmap`` and ``mremap`` return when they fail."""


class MappedFile(mmap.mmap):
    """A mapping of a file, which owns the file's one descriptor: they go together.

    An anonymous mapping of the standard library reserves the addresses, and the file is mapped in its place. So C code
    unmaps it when the last view is gone, and it cannot be closed before.

    Parameters
    ----------
    fd : int
        Owned by the mapping once it is made.
    nbytes : int
    is_writable : bool
    is_private : bool
        Whether writes through this mapping stay invisible to everyone else.

    Attributes
    ----------
    fd : Descriptor or int
        ``NONE`` after it was given up.

    Raises
    ------
    OSError
    """

    fd: int = NONE
    _is_private = False

    def __new__(cls, fd: int, nbytes: int, *, is_writable: bool, is_private: bool = False) -> MappedFile:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        # If the kernel refuses the file below, ``self`` unmaps the reserved addresses when it goes, and the descriptor
        # is still the caller's.
        self = super().__new__(cls, -1, nbytes, flags, protection)
        kind = mmap.MAP_PRIVATE | _MAP_NORESERVE if is_private else mmap.MAP_SHARED
        if libc.mmap(self.address, nbytes, protection, kind | MAP_FIXED, fd, 0) == FAILED:
            raise last_error()
        self._is_private = is_private
        self.fd = Descriptor(fd)  # last: until here the caller owns it
        return self

    @property
    def address(self) -> int:
        return int(np.frombuffer(self, np.uint8).__array_interface__["data"][0])

    def make_private(self) -> None:
        """Make the mapping private: from now on writes here are invisible to other processes. Nothing is copied.

        Writes of other processes to the file may still be visible here, so no process may write to it any more. The
        private mapping replaces the shared one in a single step of the kernel, so a thread that is writing at this
        moment loses nothing. It is first made at another address: if the kernel refuses it, nothing has changed.

        Raises
        ------
        OSError
        """
        try:
            held = memoryview(self)  # no other thread can unmap it while this exists
        except ValueError:  # another thread already did
            return
        with held:
            self._make_private(held.nbytes)

    def _make_private(self, nbytes: int) -> None:
        fd, protection = self.fd, mmap.PROT_READ | mmap.PROT_WRITE
        if self._is_private or fd < 0:
            return
        aside = libc.mmap(None, nbytes, protection, mmap.MAP_PRIVATE | _MAP_NORESERVE, fd, 0)
        if aside == FAILED:
            raise last_error()
        if libc.mremap(aside, nbytes, nbytes, _MREMAP_MAYMOVE_FIXED, self.address) == FAILED:
            error = last_error()
            libc.munmap(aside, nbytes)
            raise error
        self._is_private = True

    def take_fd(self) -> int:
        """Return the descriptor, which then belongs to the caller."""
        fd, self.fd = self.fd, NONE
        return fd

    def close_fd(self) -> None:
        """Close the descriptor. The mapping stays."""
        self.fd = NONE


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Give part of a file's memory back. It reads as zeros in all processes.

    Raises
    ------
    OSError
    """
    if libc.fallocate(fd, _FALLOC_PUNCH_HOLE_KEEP_SIZE, offset, nbytes):
        raise last_error()


def last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
