"""Which batches are refused, and how elements are divided. No process.

Which rows a batch means, and which ranks work on them: ``test_exactness.py`` and ``engine/test_shared.py``.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from synk._pure.ranges import LINE_NBYTES, block_bounds, chunk_bounds
from synk._pure.shards import assign_owned, select_common


def test_lengths_may_differ_where_the_batch_means_the_same_rows() -> None:
    assert select_common(None, [("x", 5), ("y", 5), ("z", 5)], "'f'").count == 5
    for batch in (3, slice(1, 3), [2, 0], slice(0, 4)):
        selection = select_common(batch, [("x", 6), ("y", 4)], "'f'")
        picked = np.arange(4)[slice(batch) if isinstance(batch, int) else batch]
        np.testing.assert_array_equal(selection.positions(), picked)


XY = [("x", 6), ("y", 4)]
REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    (4, [("x", 3)], IndexError, "got batch=4, expected 0 to 3"),
    (-1, [("x", 3)], IndexError, "got batch=-1"),
    ([0, 3], [("x", 3)], IndexError, "got index 3"),
    ([-4], [("x", 3)], IndexError, "got index -4"),
    (np.array([2**63], np.uint64), [("x", 3)], IndexError, "9223372036854775808"),
    (np.array([True, False]), [("x", 3)], IndexError, "a mask of 2 values"),
    (np.zeros((1, 1), int), [("x", 3)], IndexError, r"shape \(1, 1\)"),
    ([0.5], [("x", 3)], IndexError, "dtype float64"),
    ("rows", [("x", 3)], IndexError, "dtype <U4"),
    (np.array([], float), [("x", 3)], IndexError, "dtype float64"),
    (True, [("x", 3)], TypeError, "batch=True"),
    (np.True_, [("x", 3)], TypeError, "expected an int"),
    ([[0], [1, 2]], [("x", 3)], TypeError, "type list"),
    (None, XY, ValueError, r"x with 6 rows and y with 4.*batch=4"),
    *[
        (batch, XY, ValueError, r"different rows of x \(6 rows\) and y \(4 rows\)")
        for batch in (slice(None), slice(-2, None), [-1], slice(0, 5))
    ],
]


def test_a_batch_that_names_no_rows_is_an_error_that_says_why(subtests: Any) -> None:
    for batch, inputs, error, words in REFUSED:
        with subtests.test(batch=str(batch), words=words):
            with pytest.raises(error, match=words) as caught:
                select_common(batch, inputs, "'loss'")
            assert "'loss'" in str(caught.value)
    with pytest.raises(IndexError, match="index 5"):
        assign_owned([5], [3, 2], "'f'")


def test_every_element_is_in_one_part() -> None:
    """Blocks are full but the last ones; edges of chunks lie on cache lines, of which ranks have as many."""
    for count, num_parts, itemsize in itertools.product((0, 1, 7, 64, 65, 4097), (1, 3, 7, 64), (1, 2, 4, 8, 16)):
        blocks, chunks = block_bounds(count, num_parts), chunk_bounds(count, itemsize, num_parts)
        for parts in (blocks, chunks):
            assert len(parts) == num_parts
            np.testing.assert_array_equal(np.concatenate([np.arange(*part) for part in parts]), np.arange(count))
        assert all(stop == count or stop - start == math.ceil(count / num_parts) for start, stop in blocks)
        assert all(stop == count or stop * itemsize % LINE_NBYTES == 0 for _, stop in chunks)
        lines = [math.ceil((stop - start) * itemsize / LINE_NBYTES) for start, stop in chunks]
        assert max(lines) - min(lines) <= 1
