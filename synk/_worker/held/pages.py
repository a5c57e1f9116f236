"""Pages of private mappings: which of them this process has written, and what becomes of its copies.

A private mapping of a file shows what the file holds, including what others write to it later. A page to which this
process writes becomes a copy of its own, which hides the file from then on.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence

import numpy as np

from synk._wire.mapping import MAP_FIXED, libc
from synk.errors import SharedMemoryError

_PAGE = mmap.PAGESIZE
_ENTRY_NBYTES = 8
_FLAGS_AT = 7 if sys.byteorder == "little" else 0
_MAX_ENTRIES = 1 << 17
# The highest byte of an entry in pagemap: 0x80 in memory, 0x40 swapped out, 0x20 a page of the file. A page that is in
# memory or swapped out, and is no page of the file, is this process's own copy.
_NOT_WRITTEN = bytes(value for value in range(256) if not value & 0xC0 or value & 0x20)


def _whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    start = address // _PAGE * _PAGE
    return start, -(-(address + nbytes) // _PAGE) * _PAGE - start


def _check(is_done: bool, what: str) -> None:
    if not is_done:
        problem = os.strerror(ctypes.get_errno())
        raise SharedMemoryError(f"cannot {what}: {problem}. Use fewer rows per call, or keep less on the workers.")


def let_write(address: int, nbytes: int) -> None:
    """Make a private mapping writable. A write past NumPy's flags then copies the page instead of raising SIGSEGV."""
    start, length = _whole_pages(address, nbytes)
    done = libc.mprotect(start, length, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    _check(done, f"let a function write to its {nbytes} bytes of inputs")


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


def joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans in whole pages, ``(address, nbytes)``, with those that share a page joined."""
    runs: list[tuple[int, int]] = []
    for start, length in sorted(_whole_pages(*span) for span in spans):
        if runs and start < sum(runs[-1]):
            first, so_far = runs[-1]
            runs[-1] = first, max(so_far, start + length - first)
        else:
            runs.append((start, length))
    return runs


def is_written(address: int, nbytes: int) -> bool:
    """Whether this process has its own copies of any of the pages. Also True if the kernel does not say."""
    start, length = _whole_pages(address, nbytes)
    first, count = start // _PAGE, length // _PAGE
    try:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        for entry in range(first, first + count, _MAX_ENTRIES):
            num_entries = min(_MAX_ENTRIES, first + count - entry)
            entries = os.pread(fd, num_entries * _ENTRY_NBYTES, entry * _ENTRY_NBYTES)
            flags = entries[_FLAGS_AT::_ENTRY_NBYTES]
            if len(flags) < num_entries or flags.translate(None, _NOT_WRITTEN):
                return True
    finally:
        os.close(fd)
    return False


def give_back(address: int, nbytes: int) -> None:
    """Drop this process's copies of pages of a private mapping, so that they show the file again."""
    start, length = _whole_pages(address, nbytes)
    _check(libc.madvise(start, length, mmap.MADV_DONTNEED) == 0, "take back what a function wrote to its inputs")


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
