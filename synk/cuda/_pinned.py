"""Page-locked host memory: shared segments that the driver knows, and a ring of buffers for scattered rows.

Only registered memory is copied at the speed of the link and without blocking the host. Registering takes about 0.1 s
per GB, so it is done on first use, in chunks, by a separate thread. Until a chunk is ready, and if it cannot be
registered, copies from it take the driver's slower path.

The worker's thread copies and unmaps, the other thread registers. A chunk must be unregistered before its pages are
unmapped, so ``forget`` comes before a segment is unmapped, and a lock keeps it from falling between the two lines of a
registration.
"""

from __future__ import annotations

import bisect
import logging
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from synk._pure.arrays import address_of
from synk._wire.memory import PAGE_NBYTES, Segment

logger = logging.getLogger("synk")

CHUNK_NBYTES = 1 << 30
RING_NBYTES = 1 << 24
_READ_ONLY = 8  # cudaHostRegisterReadOnly: for mappings that this process may only read
_NUM_BUFFERS = 2

# The states of a chunk. The worker's thread makes it queued; the other thread makes it pinned or refused.
_NEW, _QUEUED, _PINNED, _REFUSED = range(4)


class _Region:
    """One segment and the states of its chunks."""

    def __init__(self, start: int, nbytes: int, flags: int) -> None:
        self.start = start
        self.stop = start + nbytes
        self.flags = flags
        self.states = [_NEW] * -(-nbytes // CHUNK_NBYTES)

    def bounds(self, chunk: int) -> tuple[int, int]:
        start = self.start + chunk * CHUNK_NBYTES
        return start, min(start + CHUNK_NBYTES, self.stop)

    def chunks(self, start: int, nbytes: int) -> range:
        """Return the chunks in which the ``nbytes`` bytes at ``start`` lie."""
        return range((start - self.start) // CHUNK_NBYTES, (start + nbytes - 1 - self.start) // CHUNK_NBYTES + 1)

    def pinned(self) -> list[tuple[int, int]]:
        """Return the bounds of the chunks that are registered."""
        return [self.bounds(chunk) for chunk, state in enumerate(self.states) if state == _PINNED]


class PinnedSegments:
    """The segments of a worker, each with the chunks that are registered with the driver.

    Parameters
    ----------
    runtime : module
        ``cupy.cuda.runtime``.
    ordinal : int
        Number of the device in this process.
    has_read_only : bool
        Whether the device can register memory that this process may only read.
    """

    def __init__(self, runtime: Any, ordinal: int, has_read_only: bool) -> None:
        self._runtime = runtime
        self._ordinal = ordinal
        self._has_read_only = has_read_only
        self._starts: list[int] = []
        self._regions: dict[int, _Region] = {}
        self._lock = threading.Lock()  # held while a chunk is registered, so that it is not unmapped in the meantime
        self._queue: queue.SimpleQueue[tuple[_Region, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.refusal = ""
        """The reason of the driver's first refusal to register memory; empty if there was none."""

    def add(self, segment: Segment) -> None:
        """Note a segment. Each chunk is registered when something is first copied from or to it.

        A segment that is not made of whole pages is left out.
        """
        start = address_of(segment.buffer)
        if segment.nbytes % PAGE_NBYTES:
            return
        self.forget(segment)  # another segment, with other pages, may have been mapped at this address before
        is_read_only = not segment.buffer.flags.writeable
        bisect.insort(self._starts, start)
        region = _Region(start, segment.nbytes, _READ_ONLY if is_read_only else 0)
        if is_read_only and not self._has_read_only:
            region.states = [_REFUSED] * len(region.states)
            self.refusal = self.refusal or "the device cannot register memory that is read-only"
        self._regions[start] = region

    def forget(self, segment: Segment) -> None:
        """Unregister a segment that is about to be unmapped. No copy from or to it may be running."""
        start = address_of(segment.buffer) if segment.buffer.size else -1
        region = self._regions.pop(start, None)
        if region is None:
            return
        self._starts.remove(start)
        with self._lock:
            for low, _ in region.pinned():
                self._unregister(low)
            # The registering thread may still have orders for this region in its queue. It skips chunks in this state,
            # so it never registers an address where another segment lies by then.
            region.states = [_REFUSED] * len(region.states)

    def pieces(self, start: int, nbytes: int) -> list[tuple[int, int]]:
        """Return ``(offset, length)`` of the copies that move ``nbytes`` bytes at ``start``, and order missing chunks.

        A copy must lie entirely inside one registered range of memory, or entirely outside. So copies are divided at
        the chunks' bounds, registered or not: a chunk may become registered between this line and the copy.
        """
        region = self._region_of(start, nbytes)
        if region is None:
            return [(0, nbytes)]
        result = []
        for chunk in region.chunks(start, nbytes):
            low, high = region.bounds(chunk)
            low, high = max(low, start), min(high, start + nbytes)
            result.append((low - start, high - low))
            if region.states[chunk] == _NEW:
                region.states[chunk] = _QUEUED
                self._order(region, chunk)
        return result

    def is_pinned(self, start: int, nbytes: int) -> bool:
        """Whether ``nbytes`` bytes at ``start`` are all registered, so that copying them does not block the host."""
        if nbytes == 0:
            return True
        region = self._region_of(start, nbytes)
        return region is not None and all(region.states[chunk] == _PINNED for chunk in region.chunks(start, nbytes))

    def _region_of(self, start: int, nbytes: int) -> _Region | None:
        """Return the region that holds all of the ``nbytes`` bytes at ``start``; None if no region does."""
        place = bisect.bisect_right(self._starts, start) - 1
        region = self._regions[self._starts[place]] if place >= 0 else None
        return region if region is not None and start + nbytes <= region.stop else None

    def _order(self, region: _Region, chunk: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="synk-pin", daemon=True)
            self._thread.start()
        self._queue.put((region, chunk))

    def _run(self) -> None:
        """Register chunks, in a thread of its own, until ``close``."""
        self._runtime.setDevice(self._ordinal)
        while (order := self._queue.get()) is not None:
            region, chunk = order
            with self._lock:
                if region.states[chunk] != _QUEUED:
                    continue
                low, high = region.bounds(chunk)
                try:
                    self._runtime.hostRegister(low, high - low, region.flags)
                    region.states[chunk] = _PINNED
                except self._runtime.CUDARuntimeError as error:
                    # CuPy clears the driver's last error (cudaGetLastError) when it raises. No later call reports it.
                    region.states[chunk] = _REFUSED
                    if not self.refusal:
                        self.refusal = str(error)
                        logger.warning("cannot register shared memory with CUDA (%s): copies take longer.", error)

    def _unregister(self, start: int) -> None:
        try:
            self._runtime.hostUnregister(start)
        except self._runtime.CUDARuntimeError as error:  # a device that has failed answers every call like this
            logger.debug("cannot unregister shared memory with CUDA: %s", error)

    @property
    def registered_nbytes(self) -> int:
        """The number of bytes that are registered now."""
        return sum(high - low for region in list(self._regions.values()) for low, high in region.pinned())

    def close(self) -> None:
        """End the thread and unregister everything. The thread ends first, so it cannot register a chunk afterwards."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        with self._lock:
            for region in self._regions.values():
                for low, _ in region.pinned():
                    self._unregister(low)
        self._regions.clear()
        self._starts.clear()


class PinnedRing:
    """Buffers for rows that are not adjacent in memory: one is filled on the host while the other is copied.

    The buffers are page-locked and belong to the ring as long as the worker lives. The event of a buffer says when the
    device has read it, so the host never writes into a buffer that a copy still reads.

    Parameters
    ----------
    cuda : module
        ``cupy.cuda``.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._buffers: list[Any] = [None] * _NUM_BUFFERS  # (array of uint8, event of its last copy)
        self._next = 0

    def _take(self, nbytes: int) -> tuple[np.ndarray, Any]:
        """Return a buffer of at least ``nbytes`` bytes that the device has finished reading."""
        place, self._next = self._next, (self._next + 1) % _NUM_BUFFERS
        held = self._buffers[place]
        if held is not None:
            held[1].synchronize()
        if held is None or held[0].size < nbytes:
            memory = self._cuda.alloc_pinned_memory(max(nbytes, RING_NBYTES))
            array = np.frombuffer(memory, np.uint8, max(nbytes, RING_NBYTES))
            held = self._buffers[place] = (array, self._cuda.Event(disable_timing=True))
        return held

    def copy_rows(
        self, shape: tuple[int, ...], dtype: np.dtype, target: int, stream: Any, write: Callable[..., None]
    ) -> None:
        """Copy the rows of a device array of ``shape`` to the device, piece by piece.

        Parameters
        ----------
        target : int
            Address of the array on the device.
        stream : Stream
        write : callable
            ``write(start, stop, out)`` puts the rows ``start`` to ``stop`` into the host array ``out``.
        """
        row_nbytes = math.prod(shape[1:]) * dtype.itemsize
        num_rows = max(RING_NBYTES // max(row_nbytes, 1), 1)
        for start in range(0, shape[0], num_rows):
            stop = min(start + num_rows, shape[0])
            nbytes = (stop - start) * row_nbytes
            buffer, event = self._take(nbytes)
            write(start, stop, buffer[:nbytes].view(dtype).reshape(stop - start, *shape[1:]))
            runtime = self._cuda.runtime
            runtime.memcpyAsync(
                target + start * row_nbytes, address_of(buffer), nbytes, runtime.memcpyHostToDevice, stream.ptr
            )
            event.record(stream)
