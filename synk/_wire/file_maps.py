"""Read-only maps of files (``np.load(path, mmap_mode="r")``) travel by name: each rank maps the file itself.

So do writable maps in items of a map and in tasks, which may write their results into the file. What is in the file is
neither copied nor compared. All maps of one file show the same bytes at any time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import weakref
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from synk._pure.arrays import address_of
from synk._wire.mapping import owned

_files: weakref.WeakKeyDictionary[Any, tuple[int, int] | None] = weakref.WeakKeyDictionary()
"""For each map, the device and the inode of its file; None if the name led to another file when it was first met."""


def recipe_of_map(array: np.ndarray, modes: tuple[str, ...] = ("r",)) -> Any:
    """Return how a rank makes the same array: a function and its arguments.

    None if the array does not lie in a map of a file, in one of these modes, that can be opened by its name.
    """
    owner = map_of(array)
    if owner is None or owner.mode not in modes or array.dtype.hasobject:
        return None
    if owner.base not in _files:
        _files[owner.base] = _file_of(owner)
    path = str(owner.filename)
    try:
        status = os.stat(path)
    except OSError:
        return None
    file = status.st_dev, status.st_ino
    if file != _files[owner.base]:
        return None
    offset = owner.offset + address_of(array) - address_of(owner)
    return map_again, (path, file, offset, array.dtype, array.shape, array.strides, type(array) is np.memmap)


def map_of(array: np.ndarray) -> np.memmap | None:
    """Return the array that holds the map of a file in which ``array`` lies."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner if isinstance(owner, np.memmap) and owner.base is not None and owner.filename else None


def writes_to_file(array: np.ndarray) -> bool:
    """Whether what is written into an array changes a file."""
    owner = map_of(array) if array.base is not None and array.flags.writeable else None
    return owner is not None and owner.mode in ("r+", "w+")


def map_again(
    path: str,
    file: tuple[int, int],
    offset: int,
    dtype: Any,
    shape: Any,
    strides: Any,
    is_memmap: bool,
    is_writable: bool = False,
) -> np.ndarray:
    """Map a file, and return the array that lies in it from ``offset`` on.

    Raises
    ------
    OSError, ValueError, TypeError
        If the file cannot be opened, another one has taken its name, or it is shorter by now.
    """
    whole = np.memmap(path, np.uint8, "r+" if is_writable else "r")
    status = os.stat(path)
    if (status.st_dev, status.st_ino) != file:
        raise ValueError(
            f"cannot map {path}: another file has taken its name since the program mapped it. Map it again."
        )
    made: np.ndarray = np.ndarray(shape, dtype, whole, offset, strides)
    return made.view(np.memmap) if is_memmap else made


def check_length(array: np.ndarray, what: str) -> None:
    """Raise ValueError if the file of a map is too short for an array in it: reading it would end the process."""
    owner = map_of(array)
    assert owner is not None
    size, needed = os.stat(str(owner.filename)).st_size, owner.offset + byte_bounds(array)[1] - address_of(owner)
    if size < needed:
        raise ValueError(
            f"cannot pass {what}: got a memory map of {owner.filename}, which has {size} bytes by now, expected "
            f"{needed} or more. Open it again."
        )


def _file_of(owner: np.memmap) -> tuple[int, int] | None:
    """Return the device and the inode of the file that is mapped; None if its name leads to another by now.

    What tells is the kernel's own table of this process's maps. ``fstat`` reports other numbers on some file systems.
    """
    try:
        # The name may belong to a pipe by now, and opening it would wait for a writer.
        (fd,) = owned(map(os.open, [str(owner.filename)], [os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK]))
    except OSError:
        return None
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        with contextlib.suppress(OSError, ValueError), mmap.mmap(fd, 1, access=mmap.ACCESS_READ) as page:
            theirs, ours = _files_at([address_of(owner), address_of(np.frombuffer(page, np.uint8))])
            return (status.st_dev, status.st_ino) if theirs == ours is not None else None
    return None


def _files_at(addresses: list[int]) -> list[tuple[bytes, bytes] | None]:
    """Return the kernel's names of the files that this process has mapped at each of the addresses."""
    found: list[tuple[bytes, bytes] | None] = [None] * len(addresses)
    with open("/proc/self/maps", "rb") as lines:
        for line in lines:
            span, _, _, device, inode = line.split(maxsplit=5)[:5]
            low, high = (int(bound, 16) for bound in span.split(b"-"))
            for position, address in enumerate(addresses):
                if low <= address < high:
                    found[position] = device, inode
    return found
