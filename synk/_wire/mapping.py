"""Files mapped into memory: without a second descriptor, made private when the process forks, given back in pieces.

The standard library's ``mmap`` keeps a duplicate of each descriptor, cannot map at a chosen address, and cannot reserve
or free part of a file. The C library's functions for this are declared here and nowhere else. This file knows nothing
of segments and arrays.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from synk._wire.descriptors import NONE, Descriptor

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
