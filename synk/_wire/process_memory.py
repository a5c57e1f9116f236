"""The memory of another process of the same user: read by a copy that the kernel makes, without any shared mapping.

Containers and security modules may forbid it, so every reader has another way.
"""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np

from synk._pure.arrays import address_of
from synk._pure.ranges import LINE_NBYTES
from synk._wire.mapping import libc
from synk._wire.memory import PAGE_NBYTES

_read = libc.process_vm_readv
_read.restype = ctypes.c_ssize_t
_read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
_RANGE_NBYTES = 2 * ctypes.sizeof(ctypes.c_size_t)
_PR_SET_PTRACER = 0x59616D61
# AMD's Zen 3 copies four times slower if the target lies less than a cache line ahead of the source, counted within a
# page (https://sourceware.org/bugzilla/show_bug.cgi?id=30994). Large arrays of one size often lie so. They are read by
# way of a buffer of this size, which stays in the cache.
_BUFFER_NBYTES = 1 << 18
_Ranges = ctypes.c_size_t * 4
"""Addresses and sizes of two ranges: the kernel's ``struct iovec`` of each."""


def let_siblings_read() -> None:
    """Let all descendants of this process's parent read its memory.

    Only the security module Yama asks for it. Kernels without Yama do not know the request, and need none.
    """
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def may_read(pid: int) -> bool | None:
    """Return whether the kernel lets this process read the memory of another one; None if that is not there.

    Nothing lies at the address 0, which the kernel finds out after it has looked whether it may read at all.
    """
    here = ctypes.addressof(_Ranges(0, 1, 0, 1))
    _read(pid, here, 1, here + _RANGE_NBYTES, 1, 0)
    number = ctypes.get_errno()
    return None if number == errno.ESRCH else number == errno.EFAULT


def can_be_read(array: np.ndarray) -> bool:
    """Return whether the kernel reads the memory of an array. It does not read some memory of devices."""
    return read_memory(os.getpid(), address_of(array), np.empty(min(array.nbytes, 1), np.uint8))


def read_memory(pid: int, address: int, target: np.ndarray) -> bool:
    """Fill a flat array of bytes with the memory of a process. Return whether the kernel copied all of it.

    It cannot if that is forbidden or the process has ended, nor for some memory of devices.
    """
    if not target.size:
        return True
    if not 0 < (address_of(target) - address) % PAGE_NBYTES < LINE_NBYTES:
        return _read_straight(pid, address, target)
    buffer = np.empty(_BUFFER_NBYTES + PAGE_NBYTES, np.uint8)
    skipped = (address + PAGE_NBYTES // 2 - address_of(buffer)) % PAGE_NBYTES  # half a page from the source and target
    for start in range(0, target.size, _BUFFER_NBYTES):
        piece = target[start : start + _BUFFER_NBYTES]
        there = buffer[skipped : skipped + piece.size]
        if not _read_straight(pid, address + start, there):
            return False
        piece[:] = there
    return True


def _read_straight(pid: int, address: int, target: np.ndarray) -> bool:
    """Fill a flat array by the kernel's copies alone."""
    start, num_left = address_of(target), target.size
    # The other process may die at any moment. The kernel then copies less, or nothing, and the caller learns of it. The
    # bytes that were copied before are never used: the ranks meet once more before a collective returns them, and the
    # receiver of a message that was read in part has an error.
    while num_left:  # a call reads 2 GiB at most
        ranges = _Ranges(start, num_left, address, num_left)
        here = ctypes.addressof(ranges)
        num_read = _read(pid, here, 1, here + _RANGE_NBYTES, 1, 0)
        if num_read <= 0:
            return False
        start, address, num_left = start + num_read, address + num_read, num_left - num_read
    return True
