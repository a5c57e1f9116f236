"""Elements divided into blocks and chunks: every element once, in order, and edges where they have to be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from synk._pure.ranges import LINE_NBYTES, block_bounds, chunk_bounds, round_up

COUNTS = (0, 1, 2, 7, 8, 9, 63, 64, 65, 1000, 4097)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 64])
def test_every_element_is_in_one_block(num_parts: int) -> None:
    for count in COUNTS:
        parts = block_bounds(count, num_parts)
        assert len(parts) == num_parts
        np.testing.assert_array_equal(np.concatenate([np.arange(*bounds) for bounds in parts]), np.arange(count))
        full = math.ceil(count / num_parts)
        assert [stop - start for start, stop in parts] == [
            min(full, max(count - k * full, 0)) for k in range(num_parts)
        ]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16, 24, 100])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_every_element_is_in_one_chunk_and_edges_lie_on_lines(itemsize: int, num_parts: int) -> None:
    for count in COUNTS:
        parts = chunk_bounds(count, itemsize, num_parts)
        assert len(parts) == num_parts
        np.testing.assert_array_equal(np.concatenate([np.arange(*bounds) for bounds in parts]), np.arange(count))
        if LINE_NBYTES % itemsize == 0:
            assert all(stop == count or stop * itemsize % LINE_NBYTES == 0 for _, stop in parts)
            lines = [math.ceil((stop - start) * itemsize / LINE_NBYTES) for start, stop in parts]
            assert max(lines) - min(lines) <= 1


def test_rounded_up() -> None:
    for multiple in (1, 3, 64, 4096):
        for nbytes in COUNTS:
            assert round_up(nbytes, multiple) == math.ceil(nbytes / multiple) * multiple
