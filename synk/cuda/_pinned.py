"""Page-locked host memory: the shared segments that the driver knows.

Only registered memory is copied at the speed of the link and without blocking the host, and only registered memory can
be read by the device itself. A segment is registered, as a whole, when it is first used: this takes about 0.1 s per GB,
which is what a copy of it from pageable memory takes. Where the driver refuses, copies go on, at the lower speed. A
segment must be unregistered before its pages are unmapped, so ``forget`` comes before.
"""

from __future__ import annotations

import bisect
import logging
import mmap
from typing import Any

from synk._pure.arrays import address_of
from synk._wire.mapping import libc
from synk._wire.memory import PAGE_NBYTES, Segment

logger = logging.getLogger("synk")


class PinnedSegments:
    """The segments of a worker, by the address at which each begins.

    Parameters
    ----------
    runtime : module
        ``cupy.cuda.runtime``.

    Attributes
    ----------
    refusal : str
        The reason of the driver's first refusal to register memory; empty if there was none.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._starts: list[int] = []  # ascending
        self._sizes: dict[int, int] = {}
        self._on_device: dict[int, int] = {}  # where the device sees those that are registered
        self.refusal = ""

    def add(self, segment: Segment) -> None:
        """Note a segment. One that is not made of whole pages is left out."""
        self.forget(segment)  # another segment, with other pages, may have been mapped at this address before
        if segment.nbytes % PAGE_NBYTES == 0:
            start = address_of(segment.buffer)
            bisect.insort(self._starts, start)
            self._sizes[start] = segment.nbytes

    def forget(self, segment: Segment) -> None:
        """Unregister a segment that is about to be unmapped. No copy from or to it may be running."""
        self._drop(address_of(segment.buffer) if segment.buffer.size else -1)

    def is_pinned(self, start: int, nbytes: int) -> bool:
        """Whether ``nbytes`` bytes at ``start`` are registered, so that copying them does not block the host."""
        return nbytes == 0 or self._segment_of(start, nbytes) in self._on_device

    def on_device(self, start: int, nbytes: int) -> int:
        """Return the address at which the device sees ``nbytes`` bytes at ``start``, registered now if need be.

        0 if they lie in no segment, or the driver refuses to register it.
        """
        segment = self._segment_of(start, nbytes)
        if segment and segment not in self._on_device:
            self._on_device[segment] = 0  # first: after an interrupt in the lines below it is unregistered all the same
            try:
                # The mapping becomes writable below NumPy's flags, because few devices can register one that is not.
                libc.mprotect(segment, self._sizes[segment], mmap.PROT_READ | mmap.PROT_WRITE)
                self._runtime.hostRegister(segment, self._sizes[segment], 0)
                self._on_device[segment] = self._runtime.pointerGetAttributes(segment).devicePointer
            except self._runtime.CUDARuntimeError as error:
                # CuPy clears the driver's last error (cudaGetLastError) when it raises. No later call reports it.
                self._drop(segment)
                if not self.refusal:
                    self.refusal = str(error)
                    logger.warning("cannot register shared memory with CUDA (%s): copies take longer.", self.refusal)
                return 0
        seen = self._on_device.get(segment, 0)
        return seen and seen + start - segment

    def _segment_of(self, start: int, nbytes: int) -> int:
        """Return where the segment begins in which all of the ``nbytes`` bytes at ``start`` lie; 0 if there is none."""
        segment = self._starts[place - 1] if (place := bisect.bisect_right(self._starts, start)) else 0
        return segment if segment and start + nbytes <= segment + self._sizes[segment] else 0

    def _drop(self, segment: int) -> None:
        if self._sizes.pop(segment, None) is not None:
            self._starts.remove(segment)
        if self._on_device.pop(segment, None) is not None:
            try:
                self._runtime.hostUnregister(segment)
            except self._runtime.CUDARuntimeError as error:  # a device that has failed answers every call like this
                logger.debug("cannot unregister shared memory with CUDA: %s", error)

    def close(self) -> None:
        """Unregister everything."""
        while self._starts:
            self._drop(self._starts[-1])
