"""The memory of another process of the same user: read by a copy that the kernel makes, without any shared mapping.

Containers and security modules may forbid it, so every reader has another way.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np

from synk._wire.mapping import libc

_read = libc.process_vm_readv
_read.restype = ctypes.c_ssize_t
_read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
_RANGE_NBYTES = 2 * ctypes.sizeof(ctypes.c_size_t)
_PR_SET_PTRACER = 0x59616D61
_Ranges = ctypes.c_size_t * 4
"""Addresses and sizes of two ranges: the kernel's ``struct iovec`` of each."""


def let_siblings_read() -> None:
    """Let all descendants of this process's parent read its memory.

    Only the security module Yama asks for it. Kernels without Yama do not know the request, and need none.
    """
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def address_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def read_memory(pid: int, address: int, target: np.ndarray) -> bool:
    """Fill a flat array of bytes with the memory of a process. Return whether the kernel could do all of it.

    It cannot if that is forbidden, if the process has ended, and for some memory of devices.
    """
    num_left = target.size
    start = ctypes.addressof(ctypes.c_char.from_buffer(target.data)) if num_left else 0
    while num_left:  # a call reads 2 GiB at most
        ranges = _Ranges(start, num_left, address, num_left)
        here = ctypes.addressof(ranges)
        num_read = _read(pid, here, 1, here + _RANGE_NBYTES, 1, 0)
        if num_read <= 0:
            return False
        start, address, num_left = start + num_read, address + num_read, num_left - num_read
    return True
