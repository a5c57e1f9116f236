"""Pages of private mappings, which this process makes its own by writing to them.

A private mapping of a file shows what the file holds, including what others write to it later. A page to which this
process writes becomes a copy of its own, which hides the file from then on.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from synk._wire.mapping import MAP_FIXED, libc
from synk.errors import SharedMemoryError

_PAGE = mmap.PAGESIZE


def _whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    start = address // _PAGE * _PAGE
    return start, -(-(address + nbytes) // _PAGE) * _PAGE - start


def _check(is_done: bool, what: str) -> None:
    if not is_done:
        problem = os.strerror(ctypes.get_errno())
        raise SharedMemoryError(f"cannot {what}: {problem}. Use fewer rows per call, or keep less on the workers.")


def let_write(address: int, nbytes: int) -> None:
    """Make a private mapping writable: a write copies the page."""
    start, length = _whole_pages(address, nbytes)
    done = libc.mprotect(start, length, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    _check(done, f"make {nbytes} bytes writable")


def map_privately(address: int, nbytes: int, fd: int) -> None:
    """Replace a shared mapping of a file by a private one, at the same address."""
    kind = mmap.MAP_PRIVATE | MAP_FIXED
    # One step of the kernel: a thread that the function has left behind never finds the addresses unmapped.
    done = libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, kind, fd, 0) == address
    _check(done, f"keep inputs of {nbytes} bytes")


def make_own(address: int, nbytes: int) -> None:
    """Turn the pages of a private mapping into this process's own copies, with the values that they have now."""
    start, length = _whole_pages(address, nbytes)
    let_write(start, length)
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * length).from_address(start))
    memory[::_PAGE] |= 0  # a write to a page copies it


def give_back(address: int, nbytes: int) -> None:
    """Drop this process's copies of pages of a private mapping, so that they show the file again."""
    start, length = _whole_pages(address, nbytes)
    _check(libc.madvise(start, length, mmap.MADV_DONTNEED) == 0, "give back pages")


class _Bytes:
    """Writable memory for NumPy. It keeps the array alive in which it lies."""

    def __init__(self, owner: np.ndarray) -> None:
        self._owner = owner
        place = (owner.ctypes.data, False)
        self.__array_interface__ = {"data": place, "shape": owner.shape, "typestr": "|u1", "version": 3}


def own_bytes(memory: np.ndarray) -> np.ndarray:
    """Return whole pages of a private mapping as a writable array, with what the file holds now."""
    address, nbytes = memory.ctypes.data, memory.nbytes
    give_back(address, nbytes)
    let_write(address, nbytes)
    return np.asarray(_Bytes(memory))
