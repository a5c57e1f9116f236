"""Rows to ranks, as NumPy does it: ``array_split`` and indexing on the whole axis. No process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.seeds import examples

from synk._pure.shards import (
    Assignment,
    Selection,
    assign_local,
    assign_owned,
    select_common,
    select_rows,
    shard_bounds,
)

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


@given(data=st.data(), num_rows=st.integers(0, 8))
@quick
def test_same_rows_compares_rows_and_not_their_spelling(data: st.DataObject, num_rows: int) -> None:
    first, second = (select_rows(data.draw(batches(num_rows)), num_rows, "'f'") for _ in range(2))
    listed = Selection(first.count, indices=first.positions())
    assert first.same_rows(listed)
    assert listed.same_rows(first)
    if first.indices is not None or second.indices is not None:
        assert first.same_rows(second) == np.array_equal(first.positions(), second.positions())


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (4, IndexError, "got batch=4, expected 0 to 3"),
        (-1, IndexError, "got batch=-1"),
        ([0, 3], IndexError, "got index 3"),
        ([-4], IndexError, "got index -4"),
        (np.array([2**63], np.uint64), IndexError, "9223372036854775808"),
        (np.array([True, False]), IndexError, "a mask of 2 values"),
        (np.zeros((1, 1), int), IndexError, r"shape \(1, 1\)"),
        ([0.5], IndexError, "dtype float64"),
        ("rows", IndexError, "dtype <U4"),
        (np.array([], float), IndexError, "dtype float64"),
        (True, TypeError, "batch=True"),
        (np.True_, TypeError, "expected an int"),
        ([[0], [1, 2]], TypeError, "type list"),
    ],
)
def test_a_batch_that_names_no_rows_is_an_error_that_says_why(batch: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        select_rows(batch, 3, "'loss'")
    assert "'loss'" in str(caught.value)


# ----- several inputs


def test_without_a_batch_all_inputs_have_equal_lengths() -> None:
    assert select_common(None, [("x", 5), ("y", 5)], [("z", 5)], "'f'").count == 5
    with pytest.raises(ValueError, match=r"x with 5 rows and y with 4.*batch=4"):
        select_common(None, [("x", 5), ("y", 4)], [], "'f'")
    with pytest.raises(ValueError, match="x with 5 rows and z with 2"):
        select_common(None, [("x", 5)], [("z", 2)], "'f'")


@pytest.mark.parametrize("batch", [3, slice(1, 3), [2, 0], slice(0, 4)])
def test_lengths_may_differ_where_the_batch_means_the_same_rows(batch: Any) -> None:
    selection = select_common(batch, [("x", 6), ("y", 4)], [], "'f'")
    np.testing.assert_array_equal(selection.positions(), picked_by(batch, np.arange(4)))


@pytest.mark.parametrize("batch", [slice(None), slice(-2, None), [-1], slice(0, 5)])
def test_lengths_may_not_differ_where_the_batch_means_other_rows(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"different rows of x \(6 rows\) and y \(4 rows\)"):
        select_common(batch, [("x", 6), ("y", 4)], [], "'f'")


def test_minibatch_inputs_hold_at_least_the_rows_of_the_batch() -> None:
    for rows in (3, 4, 100):
        assert select_common([7, 5, 8], [("x", 9)], [("mini", rows)], "'f'").count == 3
    with pytest.raises(IndexError, match="picks 3 rows, and minibatch input mini has 2"):
        select_common([7, 5, 8], [("x", 9)], [("mini", 2)], "'f'")
    assert select_common([], [("x", 9)], [("mini", 0)], "'f'").count == 0


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (4, 4),
        (np.int64(4), 4),
        (0, 0),
        (slice(3), 3),
        (slice(5, 9), 4),
        (slice(5, 9, 3), 2),
        (slice(9, 5, -1), 4),
        (slice(9, 5), 0),
        ([7, 5], 2),
        ((7, 7, 7), 3),
        (np.array([90, 0], "u1"), 2),
        ([], 0),
    ],
)
def test_minibatch_inputs_alone_need_only_the_number_of_rows(batch: Any, expected: int) -> None:
    selection = select_common(batch, [], [("mini", 4), ("other", 5)], "'f'")
    assert selection.positions().tolist() == list(range(expected))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (slice(None), "a slice that has a stop"),
        (slice(5, None), "a slice that has a stop"),
        (slice(-3, 5), "a slice that has a stop"),
        (slice(0, -1), "a slice that has a stop"),
        (slice(None, 0, -1), "a slice that has a stop"),
        (slice(5, None, -1), "a slice that has a stop"),
        ([3, -1], "got index -1"),
        (np.array([-2]), "got index -2"),
        (-3, "got -3"),
        ([True, False], "got a mask"),
        (np.ones(4, bool), "got a mask"),
    ],
)
def test_with_minibatch_inputs_alone_there_are_no_rows_to_count_from(batch: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"cannot select rows of 'f' with minibatch data only: .*{words}"):
        select_common(batch, [], [("mini", 9)], "'f'")


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (True, TypeError),
        (np.True_, TypeError),
        ([[1], [2, 3]], TypeError),
        ([1.5], IndexError),
        (slice(0, 4, 0), ValueError),
    ],
)
def test_what_is_no_batch_is_none_with_minibatch_inputs_alone(batch: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        select_common(batch, [], [("mini", 9)], "'f'")


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


@given(data=st.data(), lengths=lengths_of_shards)
@quick
def test_shard_batch_picks_among_the_rows_of_each_rank(data: st.DataObject, lengths: list[int]) -> None:
    if data.draw(st.booleans()):
        shard_batch: Any = [data.draw(batches(length)) for length in lengths]
        if not any(isinstance(entry, (slice, list, tuple, np.ndarray)) for entry in shard_batch):
            shard_batch[0] = slice(None)
        entries = shard_batch
    else:
        shard_batch = data.draw(batches(min(lengths)))
        if isinstance(shard_batch, np.ndarray) and shard_batch.dtype == bool and len(set(lengths)) > 1:
            shard_batch = np.flatnonzero(shard_batch)
        entries = [shard_batch] * len(lengths)
    assignment = assign_local(shard_batch, lengths, "'f'")
    for rank, (entry, length) in enumerate(zip(entries, lengths, strict=True)):
        np.testing.assert_array_equal(local_rows(assignment, rank), picked_by(entry, np.arange(length)))
    # Other inputs hold one row for each selected one, rank after rank.
    np.testing.assert_array_equal(assignment.selection.positions(), np.arange(assignment.bounds[-1][1]))


@pytest.mark.parametrize(
    ("pick", "error", "words"),
    [
        (lambda: assign_local([slice(1), slice(1)], [2, 2, 2], "'f'"), ValueError, "2 entries.*3 ranks"),
        (lambda: assign_local([0, 2], [3, 2], "'f'"), IndexError, "shard of rank 1.*index 2"),
        (lambda: assign_local([[0], [5]], [3, 2], "'f'"), IndexError, "shard of rank 1.*index 5"),
        (lambda: assign_local(np.ones(3, bool), [3, 2], "'f'"), IndexError, "shard of rank 1.*mask of 3"),
        (lambda: assign_owned([5], [3, 2], "'f'"), IndexError, "index 5"),
        (lambda: assign_owned(6, [3, 2], "'f'"), IndexError, "batch=6"),
    ],
)
def test_rows_that_no_rank_owns_are_an_error(
    pick: Callable[[], Assignment], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        pick()
