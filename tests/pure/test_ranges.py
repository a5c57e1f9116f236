"""Elements divided into blocks and chunks: every element once, in order, and edges where they have to be."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from synk._pure.ranges import LINE_NBYTES, block_bounds, chunk_bounds, round_up

COUNTS = (0, 1, 2, 7, 8, 9, 63, 64, 65, 1000, 4097)


def test_every_element_is_in_one_part(subtests: Any) -> None:
    """Blocks are full but the last ones; edges of chunks lie on cache lines."""
    for count, num_parts in itertools.product(COUNTS, (1, 2, 3, 7, 64)):
        with subtests.test(count=count, num_parts=num_parts):
            for parts in (
                block_bounds(count, num_parts),
                *(chunk_bounds(count, size, num_parts) for size in (1, 8, 24)),
            ):
                assert len(parts) == num_parts
                np.testing.assert_array_equal(
                    np.concatenate([np.arange(*bounds) for bounds in parts]), np.arange(count)
                )
            full = math.ceil(count / num_parts)
            sizes = [stop - start for start, stop in block_bounds(count, num_parts)]
            assert sizes == [min(full, max(count - k * full, 0)) for k in range(num_parts)]
            for itemsize in (1, 2, 4, 8, 16):
                parts = chunk_bounds(count, itemsize, num_parts)
                assert all(stop == count or stop * itemsize % LINE_NBYTES == 0 for _, stop in parts)
                lines = [math.ceil((stop - start) * itemsize / LINE_NBYTES) for start, stop in parts]
                assert max(lines) - min(lines) <= 1
            assert round_up(count, num_parts) == math.ceil(count / num_parts) * num_parts
