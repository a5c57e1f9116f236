"""Read-only maps of files (``np.load(path, mmap_mode="r")``) travel by name: each rank maps the file itself.

What is in the file is neither copied nor compared. All maps of one file show the same bytes at any time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from typing import Any, NamedTuple

import numpy as np


def recipe_of_map(array: np.ndarray) -> Any:
    """Return how a rank makes the same array: a function and its arguments.

    None if the array does not lie in a read-only map of a file that can be opened by its name.
    """
    owner = map_of(array)
    if owner is None or owner.mode != "r" or array.dtype.hasobject:
        return None
    try:
        status = os.stat(str(owner.filename))
    except OSError:
        return None
    offset = owner.offset + _address(array) - _address(owner)
    file = str(owner.filename), (status.st_dev, status.st_ino)
    return map_again, (*file, offset, array.dtype, array.shape, array.strides, type(array) is np.memmap)


def sure_recipe_of_map(array: np.ndarray) -> Any:
    """Return the same after making sure that the name still leads to the file; None if another has taken it."""
    owner, recipe = map_of(array), recipe_of_map(array)
    return recipe if owner is not None and recipe is not None and _is_found_by_name(owner) else None


def map_of(array: np.ndarray) -> np.memmap | None:
    """Return the array that holds the map of a file in which ``array`` lies."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner if isinstance(owner, np.memmap) and owner.base is not None and owner.filename else None


def map_again(
    path: str, file: tuple[int, int], offset: int, dtype: Any, shape: Any, strides: Any, is_memmap: bool
) -> np.ndarray:
    """Map a file, and return the array that lies in it from ``offset`` on.

    Raises
    ------
    OSError, ValueError
        If the file cannot be opened, is shorter by now, or another one has taken its name.
    """
    whole = np.memmap(path, np.uint8, "r")
    status = os.stat(path)
    if (status.st_dev, status.st_ino) != file:
        raise ValueError(
            f"cannot map {path}: another file has taken its name since the program mapped it. Map it again."
        )
    made: np.ndarray = np.ndarray(shape, dtype, whole, offset, strides)
    return made.view(np.memmap) if is_memmap else made


def _is_found_by_name(owner: np.memmap) -> bool:
    """Whether the name of a file still leads to the file that is mapped: another may have taken its place."""
    try:
        # The name may belong to a pipe by now, and opening it would wait for a writer.
        fd = os.open(str(owner.filename), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        with contextlib.suppress(OSError, ValueError), mmap.mmap(fd, 1, access=mmap.ACCESS_READ) as page:
            address = np.frombuffer(page, np.uint8).ctypes.data
            theirs, ours = mappings_at([_address(owner), address])
            return theirs is not None and ours is not None and theirs.file == ours.file
        return False
    finally:
        os.close(fd)


class Mapping(NamedTuple):
    """A part of this process's memory: its address, and the part of a file that lies there."""

    start: int
    offset: int
    file: tuple[bytes, bytes]
    is_shared: bool


def mappings_at(addresses: list[int]) -> list[Mapping | None]:
    """Return what this process has mapped at each of the addresses.

    These are the kernel's own names of files: on some file systems ``fstat`` reports others.
    """
    found: list[Mapping | None] = [None] * len(addresses)
    try:
        with open("/proc/self/maps", "rb") as lines:
            for line in lines:
                span, permissions, offset, device, inode = line.split(maxsplit=5)[:5]
                low, high = (int(bound, 16) for bound in span.split(b"-"))
                for position, address in enumerate(addresses):
                    if low <= address < high:
                        found[position] = Mapping(low, int(offset, 16), (device, inode), permissions.endswith(b"s"))
    except OSError:  # /proc is hidden: every array is copied
        pass
    return found


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
