"""Arguments that lie in memory-mapped files: workers map the same file, and the master copies nothing.

This works if the array's memory is a shared mapping of a file that can still be opened by its name; ``/proc/self/maps``
tells. All other arrays are copied.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from synk._master.state.item_pickles import Ended
from synk._pure.arrays import address_of
from synk._wire.descriptors import above_streams
from synk._wire.file_maps import map_of, mappings_at
from synk._wire.memory import Segment
from synk.errors import SharedMemoryError

_MAPPED_NBYTES = 1 << 22
"""Arrays of at least this size are mapped. Copying that much costs as much as the message for a new place."""


class FileMap(NamedTuple):
    """A file that workers map, and the address at which its first byte would lie in the master's own mapping."""

    segment: Segment
    base: int


class FileMaps:
    """The memory-mapped files of one runtime. A file is known as long as the user's mapping of it lives.

    Parameters
    ----------
    released : deque
        Receives an :class:`Ended` for each mapping that is gone, at any time and in any thread.
    new_ids : iterator of int
        Numbers for segments.
    """

    def __init__(self, released: deque[Any], new_ids: Iterator[int]) -> None:
        self._released = released
        self._new_ids = new_ids
        self._by_mapping: dict[int, Ended] = {}  # by ``id()`` of the mapping

    def place_of(self, array: np.ndarray, what: str) -> tuple[Segment, int] | None:
        """Return the file in which workers find an array, and the byte where it starts; None if it must be copied.

        Raises
        ------
        ValueError
            If the file has become too short. Copying the array would end this process by SIGBUS.
        """
        flags, dtype = array.flags, array.dtype
        if array.nbytes < _MAPPED_NBYTES or not (flags.c_contiguous and flags.aligned and dtype.isnative):
            return None
        owner = map_of(array)
        if owner is None:
            return None
        known = self._by_mapping.get(id(owner.base))
        if known is None or known() is not owner.base:
            known = self._note(owner)
        file: FileMap | None = known.held
        if file is None:
            return None
        # Anybody may shorten the file at any time. Before this call, that is noticed here; during the call, the worker
        # ends by SIGBUS, and the error says so.
        offset = address_of(array) - file.base
        size = os.fstat(file.segment.fd).st_size
        if offset + array.nbytes > size:
            raise ValueError(
                f"cannot pass {what}: got a memory map of {owner.filename}, which has {size} bytes by now, expected "
                f"{offset + array.nbytes} or more. Open it again."
            )
        return file.segment, offset

    def _note(self, owner: np.memmap) -> Ended:
        file = _open(owner, self._new_ids)
        known = Ended(owner.base, self._released.append)
        known.owner, known.held, known.key = self, file, id(owner.base)
        self._by_mapping[known.key] = known
        return known

    def forget(self, ended: Ended) -> Segment | None:
        """Forget a mapping that has ended. Return the segment that is no longer needed, if there is one."""
        file, ended.held = ended.held, None
        if self._by_mapping.get(ended.key) is ended:  # otherwise another mapping has the same id by now
            del self._by_mapping[ended.key]
        return None if file is None else file.segment

    def close(self) -> None:
        """Close all files: the runtime is closed."""
        for ended in self._by_mapping.values():
            if ended.held is not None:
                ended.held.segment.close()
        self._by_mapping.clear()


def _open(owner: np.memmap, new_ids: Iterator[int]) -> FileMap | None:
    """Open the file of a mapping for reading. None if it is another file by now, or the mapping is private."""
    try:
        # The name may belong to a pipe by now, and opening it would wait for a writer.
        fd = above_streams(os.open(str(owner.filename), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError:
        return None
    status = os.fstat(fd)
    segment = None
    if stat.S_ISREG(status.st_mode) and status.st_size:
        with contextlib.suppress(SharedMemoryError):  # no address space is left
            segment = Segment(fd, status.st_size, is_writable=False, segment_id=next(new_ids))
    if segment is None:
        os.close(fd)
        return None
    segment.is_file = True
    start = address_of(owner)
    theirs, ours = mappings_at([start, address_of(segment.buffer)])
    # The kernel's own names of the files are compared: on some file systems fstat reports others.
    if theirs is None or ours is None or theirs.file != ours.file or not theirs.is_shared:
        segment.close()
        return None
    return FileMap(segment, theirs.start - theirs.offset)
