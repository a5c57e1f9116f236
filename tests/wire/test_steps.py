"""Copies and reductions between places in segments, against NumPy. No process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.rank_arrays import REDUCIBLE, assert_same, reduced

from synk._pure.ops import BLOCK_NBYTES
from synk._wire.memory import Segment
from synk._wire.steps import Copy, Reduce, run_steps

numbers = itertools.count(1)


def made(nbytes: int, fill: int = 0) -> Segment:
    segment = Segment.create(nbytes, segment_id=next(numbers))
    segment.buffer[:] = fill
    return segment


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4097])
def test_a_copy_reaches_its_target_and_nothing_else(nbytes: int) -> None:
    source, target = made(8192), made(8192, 7)
    source.buffer[:] = np.arange(8192) % 251
    run_steps([Copy((source.id, 5), (target.id, 64), nbytes)], {source.id: source, target.id: target})
    expected = np.full(8192, 7, np.uint8)
    expected[64 : 64 + nbytes] = source.buffer[5 : 5 + nbytes]
    np.testing.assert_array_equal(target.buffer, expected)


@pytest.mark.parametrize(("op", "dtype"), REDUCIBLE)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.sampled(90)
def test_a_reduction_is_numpys_in_rank_order(op: str, dtype: str, world_size: int) -> None:
    rng = np.random.default_rng(world_size)
    count = 77
    parts = [(rng.normal(size=count) * 30).astype(dtype) for _ in range(world_size)]
    if np.dtype(dtype).kind == "f":
        parts[0][5], parts[-1][6] = np.nan, np.inf
    segments = [made(4096) for _ in range(world_size)]
    target = made(4096, 3)
    itemsize = np.dtype(dtype).itemsize
    for segment, part in zip(segments, parts, strict=True):
        segment.view(64, (count,), np.dtype(dtype))[:] = part
    step = Reduce(op, np.dtype(dtype), count, tuple((segment.id, 64) for segment in segments), (target.id, 128))
    run_steps([step], {segment.id: segment for segment in (*segments, target)})
    got = target.view(128, (count,), np.dtype(dtype))
    assert_same(got, reduced(op, parts), is_rounded=op == "avg")
    assert (target.buffer[:128] == 3).all()
    assert (target.buffer[128 + count * itemsize :] == 3).all()


@pytest.mark.parametrize("op", ["avg", "sum", "max"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.sampled(90)
def test_many_blocks_are_the_same_numbers(op: str, dtype: str, extra: int) -> None:
    """One element less, as many, and one more than whole blocks."""
    count = 2 * BLOCK_NBYTES // np.dtype(dtype).itemsize + extra
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=count).astype(dtype) for _ in range(3)]
    *segments, target = [made(count * 8) for _ in range(4)]
    for segment, part in zip(segments, parts, strict=True):
        segment.view(0, (count,), np.dtype(dtype))[:] = part
    step = Reduce(op, np.dtype(dtype), count, tuple((segment.id, 0) for segment in segments), (target.id, 0))
    run_steps([step], {segment.id: segment for segment in (*segments, target)})
    assert_same(target.view(0, (count,), np.dtype(dtype)), reduced(op, parts), is_rounded=op == "avg")


def test_steps_run_in_order() -> None:
    first, second = made(64, 1), made(64, 2)
    by_id = {first.id: first, second.id: second}
    run_steps([Copy((first.id, 0), (second.id, 0), 8), Copy((second.id, 0), (first.id, 32), 16)], by_id)
    assert first.buffer[32:48].tolist() == [1] * 8 + [2] * 8
