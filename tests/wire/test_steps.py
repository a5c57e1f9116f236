"""Copies and reductions between places in segments, against NumPy. No process."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from support.rank_arrays import REDUCIBLE, assert_same, reduced

from synk._pure.ops import BLOCK_NBYTES
from synk._wire.memory import Segment
from synk._wire.steps import Copy, Reduce, run_steps

numbers = itertools.count(1)


def made(nbytes: int, fill: int = 0) -> Segment:
    segment = Segment.create(nbytes, segment_id=next(numbers))
    segment.buffer[:] = fill
    return segment


def test_a_reduction_is_numpys_in_rank_order(subtests: Any) -> None:
    """Also of one element less, as many, and one more than whole blocks."""
    for (op, dtype), world_size in itertools.product(REDUCIBLE, (1, 2, 4)):
        with subtests.test(case=f"{op} of {world_size} {dtype}"):
            check(op, dtype, world_size, 77)
    for op, dtype, extra in itertools.product(("avg", "sum", "max"), ("float16", "float64"), (-1, 0, 1)):
        with subtests.test(case=f"{op} of {dtype}, blocks and {extra}"):
            check(op, dtype, 3, 2 * BLOCK_NBYTES // np.dtype(dtype).itemsize + extra)


def check(op: str, dtype: str, world_size: int, count: int) -> None:
    rng = np.random.default_rng(world_size)
    parts = [(rng.normal(size=count) * 30).astype(dtype) for _ in range(world_size)]
    if np.dtype(dtype).kind == "f":
        parts[0][5], parts[-1][6] = np.nan, np.inf
    segments = [made(4096 + 8 * count) for _ in range(world_size)]
    target = made(4096 + 16 * count, 3)
    itemsize = np.dtype(dtype).itemsize
    for segment, part in zip(segments, parts, strict=True):
        segment.view(64, (count,), np.dtype(dtype))[:] = part
    step = Reduce(op, np.dtype(dtype), count, tuple((segment.id, 64) for segment in segments), (target.id, 128))
    run_steps([step], {segment.id: segment for segment in (*segments, target)})
    got = target.view(128, (count,), np.dtype(dtype))
    assert_same(got, reduced(op, parts), is_rounded=op == "avg")
    assert (target.buffer[:128] == 3).all()
    assert (target.buffer[128 + count * itemsize :] == 3).all()


def test_a_copy_reaches_its_target_and_nothing_else_and_steps_run_in_order() -> None:
    for nbytes in (0, 1, 63, 4097):
        source, target = made(8192), made(8192, 7)
        source.buffer[:] = np.arange(8192) % 251
        steps = [Copy((source.id, 5), (target.id, 64), nbytes), Copy((target.id, 64), (source.id, 0), 5)]
        run_steps(steps, {source.id: source, target.id: target})
        expected = np.full(8192, 7, np.uint8)
        expected[64 : 64 + nbytes] = (np.arange(8192) % 251)[5 : 5 + nbytes]
        np.testing.assert_array_equal(target.buffer, expected)
        np.testing.assert_array_equal(source.buffer[:5], expected[64:69])
