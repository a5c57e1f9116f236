"""Which pieces of shared memory are registered with the driver, when, and what happens where it refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import fake_gpus
from support.harness import wait_for

from synk._pure.arrays import address_of
from synk._wire.memory import PAGE_NBYTES, Segment
from synk.cuda import _pinned
from synk.cuda._pinned import PinnedRing, PinnedSegments

CHUNK = 2 * PAGE_NBYTES


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the stand-in for ``cupy.cuda``."""
    monkeypatch.syspath_prepend(str(fake_gpus.FAKES))
    import cupy

    yield cupy.cuda
    assert cupy.cuda.runtime.registered() == {}
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        del sys.modules[name]  # not by monkeypatch, which would put it back


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(8 * PAGE_NBYTES)
    yield made
    made.close()


@pytest.fixture
def pinned(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[PinnedSegments]:
    monkeypatch.setattr(_pinned, "CHUNK_NBYTES", CHUNK)
    made = PinnedSegments(cuda.runtime, 0, True)
    yield made
    made.close()


def settle(pinned: PinnedSegments, nbytes: int) -> None:
    """Wait until ``nbytes`` are registered."""
    assert wait_for(lambda: pinned.registered_nbytes == nbytes), pinned.registered_nbytes


def test_chunks_are_registered_when_they_are_used(pinned: PinnedSegments, segment: Segment, cuda: Any) -> None:
    """Memory that is no segment is one piece; a segment that goes is unregistered."""
    array = np.zeros(10 * PAGE_NBYTES, np.uint8)
    for _ in range(2):
        assert pinned.pieces(address_of(array), array.nbytes) == [(0, array.nbytes)]
        pinned.add(segment)
    start = address_of(segment.buffer)
    assert pinned.registered_nbytes == 0
    assert pinned.pieces(start + 100, 50) == [(0, 50)]
    settle(pinned, CHUNK)
    assert [pinned.is_pinned(start, nbytes) for nbytes in (0, CHUNK, CHUNK + 1)] == [True, True, False]
    assert pinned.pieces(start + CHUNK - 10, CHUNK + 20) == [(0, 10), (10, CHUNK), (10 + CHUNK, 10)]
    settle(pinned, 3 * CHUNK)
    pinned.forget(segment)
    assert cuda.runtime.registered() == {}
    pinned.forget(segment)
    assert pinned.pieces(start, 100) == [(0, 100)]


def test_a_segment_that_lies_where_another_lay_is_registered_anew(pinned: PinnedSegments, cuda: Any) -> None:
    """The pages that the driver knows are no longer those of the file."""
    arena = Segment.create_arena(8 * PAGE_NBYTES, is_worker_writable=True, segment_id=1)
    for nbytes in (PAGE_NBYTES, 2 * PAGE_NBYTES):
        part = arena.create_part(1 + nbytes, 0, nbytes)
        pinned.add(part)
        assert cuda.runtime.registered() == {}
        pinned.pieces(address_of(part.buffer), nbytes)
        settle(pinned, nbytes)
    pinned.forget(part)
    arena.close()


def test_a_refusal_is_said_once_and_copies_go_on(
    pinned: PinnedSegments, segment: Segment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SYNK_FAKE_REFUSE", "1")
    pinned.add(segment)
    assert pinned.pieces(address_of(segment.buffer), segment.nbytes) == [(k * CHUNK, CHUNK) for k in range(4)]
    assert wait_for(lambda: pinned.refusal)
    pinned.close()
    assert "801" in pinned.refusal
    assert len(caplog.records) == 1
    assert "copies take longer" in caplog.text


def test_rows_through_the_ring(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pinned, "RING_NBYTES", 100)
    for num_rows in (0, 1, 7, 1000):
        rows = np.random.default_rng(0).integers(0, 255, (num_rows, 3)).astype(np.int32)
        out = np.zeros_like(rows)

        def write(start: int, stop: int, piece: np.ndarray, rows: np.ndarray = rows) -> None:
            piece[...] = rows[start:stop]

        PinnedRing(cuda).copy_rows(rows.shape, rows.dtype, address_of(out), cuda.Stream(non_blocking=True), write)
        np.testing.assert_array_equal(out, rows)
