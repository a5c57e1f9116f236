"""Shared memory segments: unnamed, sealed, private to the processes that hold their file descriptor.

Owns allocation and mapping. A segment has no name anywhere, so nothing can leak or be opened by others, and the kernel
frees it with its last descriptor and mapping. Knows nothing of arrays beyond bytes, nothing of workers.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import threading

import numpy as np
import numpy.typing as npt

from synk._descriptors import above_streams, streams_taken
from synk._interrupts import deferred
from synk._orphans import orphans
from synk.errors import SharedMemoryError

PAGE_NBYTES = mmap.PAGESIZE
_segment_ids = itertools.count(1)


def round_up(nbytes: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``nbytes``."""
    return -(-nbytes // multiple) * multiple


def available_nbytes() -> int:
    """Bytes of memory that can still be taken: ``MemAvailable``, or the cgroup's limit where it is lower.

    A memfd has no size limit of its own, and over-committing it ends with the out-of-memory killer instead of an
    error, so segments check this before they allocate.
    """
    available = 1 << 62
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
                    break
    except OSError:  # not Linux, or /proc hidden: posix_fallocate is then the only check
        pass
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            used = int(file.read())
        if limit != "max":
            available = min(available, int(limit) - used)
    except (OSError, ValueError):  # no cgroup v2, or none of our own
        pass
    return available


class Fence:
    """Calling it puts this process's reads and writes of shared memory before the call ahead of those after it.

    Plain stores of one process may be seen late, or in another order, by the others. Releasing a lock and taking it
    again is a full memory barrier on x86-64 and AArch64, also between a store and a later load; docs/design.md says
    why, and which words rely on it. The lock itself is private and never contended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        lock = self._lock
        if not lock.locked():  # an interrupt has broken off the fence before, between the two lines below
            lock.acquire()
        lock.release()
        lock.acquire()


def create_fd(nbytes: int) -> int:
    """Return a descriptor of ``nbytes`` of reserved, owner-only, unnamed memory."""
    try:
        fd = above_streams(os.memfd_create("synk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        is_sealable = True
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        # memfd missing or blocked (old kernel, seccomp): an unlinked file has no name either.
        import tempfile

        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryFile(dir=folder) as file:
            fd = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
        is_sealable = False
    try:
        os.fchmod(fd, 0o600)
        # Reserving every page now turns "memory full" into ENOSPC here instead of SIGBUS at the first write.
        os.posix_fallocate(fd, 0, nbytes)
        if is_sealable:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Segment:
    """A mapped piece of shared memory.

    ``buffer`` is a ``uint8`` array of shape ``(nbytes,)`` over the mapping; every view of it keeps the mapping alive,
    so a segment that is closed while views exist stays readable and its memory returns with the last view.

    Parameters
    ----------
    fd : int
        Descriptor of the memory; owned by the segment once it is made.
    nbytes : int
        Size, in bytes; at least 1.
    is_writable : bool
        Whether this process may write through the mapping.
    segment_id : int
        The name under which messages refer to it.
    is_private : bool
        Whether the mapping shows the pages that this process writes, by whatever means, to nobody else.

    Attributes
    ----------
    is_staging : bool
        Whether it holds the arguments of one call after the other.
    """

    __slots__ = ("__weakref__", "_mapping", "buffer", "fd", "id", "is_private", "is_staging", "is_worker_writable",
                 "nbytes")  # fmt: skip

    def __init__(self, fd: int, nbytes: int, *, is_writable: bool, segment_id: int, is_private: bool = False) -> None:
        self.is_worker_writable = False
        self.is_staging = False
        self.is_private = is_private
        self.fd = -1
        self.nbytes = nbytes
        self.id = segment_id
        self._map(fd, is_writable)
        orphans.watch(fd, self)
        self.fd = fd  # last: whoever called owns it until here

    def _map(self, fd: int, is_writable: bool) -> None:
        nbytes = self.nbytes
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        kind = mmap.MAP_PRIVATE if self.is_private else mmap.MAP_SHARED
        try:
            with streams_taken():  # the mapping keeps a descriptor of its own
                self._mapping: mmap.mmap | None = mmap.mmap(fd, nbytes, kind, access)
        except OSError as error:
            raise SharedMemoryError(
                f"cannot map a shared segment of {nbytes} bytes: {os.strerror(error.errno or 0)}. Free some Data, or "
                f"raise "
                f"the limit of "
                f"{'open files (ulimit -n)' if error.errno == errno.EMFILE else 'address space (ulimit -v)'}."
            ) from error
        self.buffer: npt.NDArray[np.uint8] = np.frombuffer(self._mapping, dtype=np.uint8)

    def map_again(self) -> None:
        """Map what is only read a second time. The first mapping lives on as long as arrays refer to it."""
        self._map(self.fd, False)

    @classmethod
    def create(cls, nbytes: int, *, is_worker_writable: bool = False) -> Segment:
        """Allocate a new segment of at least ``nbytes`` bytes, filled with zeros.

        ``is_worker_writable`` says how workers map it: what they only read they cannot damage.

        Raises
        ------
        SharedMemoryError
            If the memory, the file size limit or the number of descriptors does not suffice.
        """
        with deferred():  # between two calls of the system the descriptor has no owner
            return cls._create(round_up(max(nbytes, 1), PAGE_NBYTES), is_worker_writable)

    @classmethod
    def _create(cls, nbytes: int, is_worker_writable: bool) -> Segment:
        free = available_nbytes() if nbytes > (1 << 24) else nbytes  # the check costs a file read: large ones only
        try:
            if nbytes > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fd = create_fd(nbytes)
        except OSError as error:
            raise SharedMemoryError(
                f"cannot allocate a shared segment: got a size of {nbytes} bytes, {available_nbytes()} bytes are free "
                f"({os.strerror(error.errno or 0)}). Free some Data (free_memory), use fewer rows per call, or raise "
                "the limit (ulimit -n for descriptors, ulimit -f for sizes)."
            ) from error
        try:
            segment = cls(fd, nbytes, is_writable=True, segment_id=next(_segment_ids))
        except SharedMemoryError:
            os.close(fd)
            raise
        segment.is_worker_writable = is_worker_writable
        return segment

    def view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array of ``shape`` and ``dtype`` over the bytes from ``offset`` on (no copy)."""
        dtype = np.dtype(dtype)
        count = 1
        for length in shape:
            count *= length
        return np.ndarray(shape, dtype, self.buffer, offset) if count else np.empty(shape, dtype)

    def shared_view(self) -> Segment:
        """Return a segment over the same mapping for an inline rank; read-only where workers map it so."""
        twin = Segment.__new__(Segment)
        twin.fd, twin.nbytes, twin.id, twin.is_worker_writable = -1, self.nbytes, self.id, self.is_worker_writable
        twin._mapping = self._mapping
        twin.buffer = self.root()
        twin.buffer.flags.writeable = self.is_worker_writable
        return twin

    def root(self) -> np.ndarray:
        """Return a new ``uint8`` array over the whole segment that all arrays made from it refer to as their base."""
        assert self._mapping is not None
        return np.frombuffer(self._mapping, dtype=np.uint8)

    def close_fd(self) -> None:
        """Close the descriptor; the mapping stays. For a process that will not pass it on."""
        fd, self.fd = self.fd, -1  # first: whatever interrupts this must not lead to a second close of the number
        if fd >= 0:
            orphans.close(fd)

    def close(self) -> None:
        """Close the descriptor and drop the mapping; its memory returns when the last view is gone."""
        self.close_fd()
        self.buffer = np.empty(0, np.uint8)
        self._mapping = None

    def discard(self) -> None:
        """Close, and where no view is left give the pages back at once, though workers still map them."""
        with deferred():
            self._discard()

    def _discard(self) -> None:
        fd, self.fd = self.fd, -1
        mapping = self._mapping
        self.close()
        if fd < 0:
            return
        try:
            if mapping is not None:
                mapping.close()
                with mmap.mmap(fd, self.nbytes) as again:
                    again.madvise(mmap.MADV_REMOVE)
        except BufferError:  # views exist: their memory returns with the last of them
            pass
        except OSError:  # no descriptor or address space is left: the pages return when the workers forget the segment
            pass
        finally:
            orphans.close(fd)

    def __del__(self) -> None:
        # Only a descriptor is closed here: no lock, no message, safe in a finalizer. Where a signal handler breaks it
        # off, the next operation finds the descriptor.
        if hasattr(self, "fd"):
            self.close_fd()
