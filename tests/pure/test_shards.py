"""Rows to ranks, as NumPy does it: ``array_split`` and indexing on the whole axis. No process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.seeds import examples

from synk._pure.shards import Assignment, assign_owned, select_common, select_rows, shard_bounds

quick = examples(25)


@st.composite
def batches(draw: st.DrawFn, num_rows: int) -> Any:
    """Draw a batch of any kind that fits ``num_rows`` rows; it may name no row."""
    edges = st.one_of(st.none(), st.integers(-num_rows - 2, num_rows + 2))
    kinds: list[st.SearchStrategy[Any]] = [
        st.none(),
        st.integers(0, num_rows),
        st.builds(slice, edges, edges, st.sampled_from([None, 1, 2, 3, -1, -2, -3])),
        st.lists(st.booleans(), min_size=num_rows, max_size=num_rows).map(lambda bits: np.array(bits, bool)),
        st.just([]),
    ]
    if num_rows:
        indices = st.lists(st.integers(-num_rows, num_rows - 1), max_size=2 * num_rows)
        dtypes = st.sampled_from(["int8", "int32", "int64"])
        kinds += [indices, indices.map(tuple), st.builds(np.array, indices, dtype=dtypes)]
    return draw(st.one_of(kinds))


def picked_by(batch: Any, array: np.ndarray) -> np.ndarray:
    """Return what NumPy picks; an int n stands for the first n rows."""
    if batch is None:
        return array
    if isinstance(batch, int):
        return array[:batch]
    return array[batch] if isinstance(batch, (slice, np.ndarray)) else array[np.array(batch, np.int64)]


@given(num_rows=st.integers(0, 200), world_size=st.integers(1, 17))
@quick
def test_rows_are_split_as_array_split_does(num_rows: int, world_size: int) -> None:
    rows = np.arange(num_rows)
    parts = [rows[low:high] for low, high in shard_bounds(num_rows, world_size)]
    for part, expected in zip(parts, np.array_split(rows, world_size), strict=True):
        np.testing.assert_array_equal(part, expected)


@given(data=st.data(), num_rows=st.integers(0, 12))
@quick
def test_a_selection_is_what_numpy_picks(data: st.DataObject, num_rows: int) -> None:
    batch = data.draw(batches(num_rows))
    selection = select_rows(batch, num_rows, "'f'")
    expected = picked_by(batch, np.arange(num_rows))
    np.testing.assert_array_equal(selection.positions(), expected)
    assert selection.positions().dtype == np.int64
    assert selection.count == len(expected)


def test_lengths_may_differ_where_the_batch_means_the_same_rows() -> None:
    assert select_common(None, [("x", 5), ("y", 5), ("z", 5)], "'f'").count == 5
    for batch in (3, slice(1, 3), [2, 0], slice(0, 4)):
        selection = select_common(batch, [("x", 6), ("y", 4)], "'f'")
        np.testing.assert_array_equal(selection.positions(), picked_by(batch, np.arange(4)))


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


# ----- rows that the ranks own


def local_rows(assignment: Assignment, rank: int) -> np.ndarray:
    """Return which rows of its own shard a rank works on, as the worker reads it."""
    low, high = assignment.bounds[rank]
    if assignment.local_indices is not None:
        return assignment.local_indices[low:high]
    start, step = assignment.local_ranges[rank]
    return start + step * np.arange(high - low)


lengths_of_shards = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@given(data=st.data(), lengths=lengths_of_shards)
@quick
def test_each_rank_takes_the_rows_it_owns(data: st.DataObject, lengths: list[int]) -> None:
    """Oracle: the indices that NumPy picks, those of each owner kept in the caller's order."""
    batch = data.draw(batches(sum(lengths)))
    assignment = assign_owned(batch, lengths, "'f'")
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    wanted = picked_by(batch, np.arange(sum(lengths)))
    for rank in range(len(lengths)):
        mine = wanted[(edges[rank] <= wanted) & (wanted < edges[rank + 1])]
        low, high = assignment.bounds[rank]
        np.testing.assert_array_equal(local_rows(assignment, rank), mine - edges[rank])
        np.testing.assert_array_equal(assignment.selection.positions()[low:high], mine)
    assert assignment.bounds[-1][1] == len(wanted)
    order = np.arange(len(wanted)) if assignment.order is None else assignment.order
    back = np.empty_like(wanted)
    back[order] = assignment.selection.positions()
    np.testing.assert_array_equal(back, wanted)
