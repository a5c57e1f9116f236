"""Which shared memory is registered with the driver. How rows come from it: ``test_gpu_path.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import fake_gpus

from synk._pure.arrays import address_of
from synk._wire.memory import PAGE_NBYTES, Segment
from synk.cuda._pinned import PinnedSegments


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the stand-in for CuPy."""
    monkeypatch.syspath_prepend(str(fake_gpus.FAKES))
    import cupy

    yield cupy
    assert cupy.cuda.runtime.registered() == {}
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        del sys.modules[name]  # not by monkeypatch, which would put it back


@pytest.fixture
def segment() -> Iterator[Segment]:
    """Yield a segment as a worker maps what it only reads."""
    made = Segment.create(8 * PAGE_NBYTES)
    mapped = Segment(os.dup(made.fd), made.nbytes, is_writable=False, segment_id=1)
    yield mapped
    mapped.close()
    made.close()


def test_a_segment_is_registered_when_it_is_used(cupy: Any, segment: Segment) -> None:
    """As a whole, and writable below NumPy's flags. Memory that is no segment is never."""
    pinned, registered = PinnedSegments(cupy.cuda.runtime), cupy.cuda.runtime.registered
    array, start = np.zeros(10 * PAGE_NBYTES, np.uint8), address_of(segment.buffer)
    for _ in range(2):
        assert pinned.on_device(address_of(array), array.nbytes) == 0
        pinned.add(segment)
        assert pinned.on_device(start + 10, segment.nbytes) == 0  # it is not all in the segment
        assert (registered(), pinned.is_pinned(start, 1), pinned.is_pinned(start, 0)) == ({}, False, True)
    assert pinned.on_device(start + 100, 50) == start + 100
    assert registered() == {start: segment.nbytes}
    assert pinned.is_pinned(start, segment.nbytes) and not pinned.is_pinned(start, segment.nbytes + 1)
    assert not segment.buffer.flags.writeable
    pinned.forget(segment)
    assert registered() == {}
    pinned.forget(segment)
    assert (pinned.on_device(start, 100), pinned.refusal) == (0, "")


def test_a_segment_that_lies_where_another_lay_is_registered_anew(cupy: Any) -> None:
    """The pages that the driver knows are no longer those of the file."""
    pinned = PinnedSegments(cupy.cuda.runtime)
    arena = Segment.create(8 * PAGE_NBYTES, is_worker_writable=True, segment_id=1, is_arena=True)
    for nbytes in (PAGE_NBYTES, 2 * PAGE_NBYTES):
        part = arena.create_part(1 + nbytes, 0, nbytes)
        pinned.add(part)
        assert cupy.cuda.runtime.registered() == {}
        assert pinned.on_device(address_of(part.buffer), nbytes)
        assert cupy.cuda.runtime.registered() == {address_of(part.buffer): nbytes}
    pinned.close()
    arena.close()
