"""Shared memory segments: unnamed, sealed, and private to the processes that hold their file descriptor.

This file owns allocation. A segment has no name, so nothing can leak or be opened by others, and the kernel frees it
with its last descriptor and mapping. Small segments may lie side by side in a larger one (``synk._wire.arenas``). This
file knows only bytes, and nothing of workers.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import threading

import numpy as np
import numpy.typing as npt

from synk._pure.interrupts import deferred, raise_if_of_handler
from synk._pure.ranges import round_up
from synk._wire.mapping import NONE, Descriptor, MappedFile, owned, punch
from synk.errors import SharedMemoryError

PAGE_NBYTES = mmap.PAGESIZE


def available_nbytes() -> int:
    """Return how many bytes of memory are available: ``MemAvailable``, or the cgroup's limit if that is lower.

    A memfd has no size limit of its own, and over-committing it ends with the out-of-memory killer instead of an error.
    So segments check this before they allocate.
    """
    available = 1 << 62
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
                    break
    except OSError:  # Not Linux, or /proc is hidden: posix_fallocate is then the only check.
        pass
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            used = int(file.read())
        if limit != "max":
            available = min(available, int(limit) - used)
    except (OSError, ValueError):  # no cgroup v2, or none for this process
        pass
    return available


class Forks:
    """Counts how often this process has forked.

    A child maps everything that was mapped when it was made, and may read it for as long as it lives. So memory that is
    older than the last fork is neither zeroed nor used for anything else. It is unmapped and closed, and the kernel
    frees it with the last process that maps it.
    """

    def __init__(self) -> None:
        self.count = 0


forks = Forks()


class Fence:
    """When called, orders this process's accesses of shared memory: all before the call come before all after it.

    Other processes may see plain stores late or in another order. Releasing a lock and taking it again is a full memory
    barrier on x86-64 and AArch64, also between a store and a later load. docs/design.md says why, and which words rely
    on it. The lock is private and never contended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        lock = self._lock
        if not lock.locked():  # an interrupt broke off an earlier fence between the two lines below
            lock.acquire()
        lock.release()
        lock.acquire()


def create_fd(nbytes: int, *, is_reserved: bool = True) -> Descriptor:
    """Return a descriptor of ``nbytes`` of unnamed memory that only its owner may open, reserved now or in pieces."""
    try:
        (fd,) = owned(map(os.memfd_create, ["synk"], [os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING]))
        is_sealable = True
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise
        # memfd is missing or blocked (old kernel, seccomp). An unlinked file has no name either.
        import tempfile

        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryFile(dir=folder) as file:
            (fd,) = owned(map(os.dup, [file.fileno()]))
        is_sealable = False
    os.fchmod(fd, 0o600)
    if is_reserved:  # full memory is ENOSPC here instead of SIGBUS at the first write
        os.posix_fallocate(fd, 0, nbytes)
    else:
        os.ftruncate(fd, nbytes)
    if is_sealable:
        # Whoever holds the descriptor could otherwise shrink the file, and every access to the pages behind its new end
        # would be a SIGBUS in all processes that map it.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


class Segment:
    """A mapped piece of shared memory.

    ``buffer`` is a ``uint8`` array of shape ``(nbytes,)`` over the mapping. Every view of it keeps the mapping alive.
    So a segment that is closed while views exist stays readable, and its memory is freed with the last view.

    Parameters
    ----------
    fd : int
        Descriptor of the memory. The segment owns it once it is made.
    nbytes : int
        Size in bytes, at least 1.
    is_writable : bool
        Whether this process may write through the mapping.
    segment_id : int
        The number by which messages refer to it.
    is_private : bool
        Whether the pages that this process writes are invisible to all others.

    Attributes
    ----------
    is_staging : bool
        Whether it holds the arguments of one call after another.
    arena : Segment or None
        The larger segment in which it lies, ``offset`` bytes from the start. It then has no descriptor of its own.
    is_arena : bool
        Whether it holds other segments.
    generation : int
        ``forks.count`` when it was made.
    mapping : MappedFile or None
        None after it was closed.
    """

    __slots__ = (
        "__weakref__", "arena", "buffer", "generation", "id", "is_arena", "is_private",
        "is_staging", "is_worker_writable", "mapping", "nbytes", "offset",
    )  # fmt: skip

    mapping: MappedFile | None
    buffer: npt.NDArray[np.uint8]
    is_worker_writable: bool

    def __init__(self, fd: int, nbytes: int, *, is_writable: bool, segment_id: int, is_private: bool = False) -> None:
        self._lie_at(_map(fd, nbytes, is_writable, is_private), segment_id, 0, nbytes, None)
        self.is_private = is_private

    def map_again(self) -> None:
        """Map a read-only segment a second time. The first mapping lives on as long as arrays refer to it."""
        assert self.mapping is not None
        again = _map(self.mapping.fd, self.nbytes, False, self.is_private)
        self.mapping.fd, self.mapping = NONE, again  # the old mapping goes on without a descriptor
        self.buffer = self.root()

    def _lie_at(self, mapping: MappedFile, segment_id: int, offset: int, nbytes: int, arena: Segment | None) -> None:
        self.mapping = mapping
        self.id = segment_id
        self.offset = offset
        self.nbytes = nbytes
        self.arena = arena
        self.is_arena = self.is_staging = False
        self.is_private = arena is not None and arena.is_private
        self.is_worker_writable = arena is not None and arena.is_worker_writable
        self.generation = forks.count
        self.buffer = self.root()

    @classmethod
    def create(
        cls, nbytes: int, *, is_worker_writable: bool = False, segment_id: int = 0, is_arena: bool = False
    ) -> Segment:
        """Allocate a new segment of at least ``nbytes`` bytes, filled with zeros.

        ``is_worker_writable`` says how workers map it: they cannot damage what they map read-only. ``segment_id`` is
        unique within the runtime, or 0 if no message refers to the segment. The memory of an arena is reserved in parts
        (:meth:`create_part`).

        Raises
        ------
        SharedMemoryError
            If the memory, the file size limit or the number of descriptors does not suffice.
        """
        nbytes = round_up(max(nbytes, 1), PAGE_NBYTES)
        try:
            # the check reads a file: for large segments only
            if nbytes > (1 << 24) and not is_arena and nbytes > available_nbytes():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fd = create_fd(nbytes, is_reserved=not is_arena)
        except OSError as error:
            raise _no_memory(nbytes, error) from error
        segment = cls(fd, nbytes, is_writable=True, segment_id=segment_id)
        segment.is_worker_writable, segment.is_arena = is_worker_writable, is_arena
        return segment

    def create_part(self, segment_id: int, offset: int, nbytes: int) -> Segment:
        """Reserve memory in this arena and return the segment there, filled with zeros.

        Raises
        ------
        SharedMemoryError
        """
        try:
            os.posix_fallocate(self.fd, offset, nbytes)
        except OSError as error:
            raise _no_memory(nbytes, error) from error
        return self.part(segment_id, offset, nbytes)

    def part(self, segment_id: int, offset: int, nbytes: int) -> Segment:
        """Return the segment that lies ``offset`` bytes from the start of this arena."""
        assert self.mapping is not None
        part = Segment.__new__(Segment)
        part._lie_at(self.mapping, segment_id, offset, nbytes, self)
        return part

    @property
    def fd(self) -> int:
        """The descriptor to pass on; -1 if there is none."""
        return self.mapping.fd if self.arena is None and self.mapping is not None else NONE

    def view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array of ``shape`` and ``dtype`` over the bytes from ``offset`` on. No copy."""
        dtype = np.dtype(dtype)
        return np.ndarray(shape, dtype, self.buffer, offset) if math.prod(shape) else np.empty(shape, dtype)

    def root(self) -> np.ndarray:
        """Return a new ``uint8`` array over the whole segment. It becomes the base of all arrays made from it."""
        assert self.mapping is not None
        return np.frombuffer(self.mapping, np.uint8, self.nbytes, self.offset)

    def close_fd(self) -> None:
        """Close the descriptor of a segment that this process will not pass on. The mapping stays."""
        if self.arena is None and self.mapping is not None:
            self.mapping.close_fd()

    def release(self) -> MappedFile | None:
        """Drop the mapping and return it. It lives, with its descriptor, as long as views of it do."""
        mapping, self.mapping = self.mapping, None
        self.buffer = np.empty(0, np.uint8)
        return mapping

    def close(self) -> None:
        """Close the descriptor and drop the mapping. The memory is freed when the last view is gone."""
        self.close_fd()
        self.release()

    def discard(self) -> None:
        """Close, and give the memory back at once if no view is left, although workers still map it."""
        with deferred():
            self._discard()

    def _discard(self) -> None:
        # Workers go on mapping the file until they have read that they must forget it, and find zeros there after the
        # punch. So the caller must be sure that no call in flight reads it (see ``Memory.forget``).
        mapping = self.release()
        if mapping is None or self.arena is not None:
            return
        fd = mapping.take_fd()
        if fd < 0:
            return
        try:
            mapping.close()  # refused while this process has a view of the segment
            if self.generation == forks.count:
                punch(fd, 0, self.nbytes)
        except (BufferError, OSError):  # views exist, or the file cannot be punched
            pass


def _map(fd: int, nbytes: int, is_writable: bool, is_private: bool) -> MappedFile:
    try:
        return MappedFile(fd, nbytes, is_writable=is_writable, is_private=is_private)
    except OSError as error:
        raise_if_of_handler(error)
        limit = "open files (ulimit -n)" if error.errno == errno.EMFILE else "address space (ulimit -v)"
        raise SharedMemoryError(
            f"cannot map a shared segment of {nbytes} bytes: {os.strerror(error.errno or 0)}. Free some Data, or raise "
            f"the limit of {limit}."
        ) from error


def _no_memory(nbytes: int, error: OSError) -> SharedMemoryError:
    raise_if_of_handler(error)
    return SharedMemoryError(
        f"cannot allocate a shared segment: got a size of {nbytes} bytes, {available_nbytes()} bytes are free "
        f"({os.strerror(error.errno or 0)}). Free some Data (free_memory), use fewer rows per call, or raise "
        "the limit (ulimit -n for descriptors, ulimit -f for sizes)."
    )
