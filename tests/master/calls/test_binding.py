"""The rows of a call and those of each rank. The oracle is NumPy's indexing of the row numbers. No process."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from synk._master.calls.arguments import padded
from synk._master.calls.binding import RowCount, choose_rows, index_arrays, own_rows, ranks_with_rows, select
from synk._master.calls.staging import aligned, capacity_for
from synk._pure.shards import shard_bounds

EVEN = partial(shard_bounds, world_size=3)

BATCHES: dict[str, Any] = {
    "none": None,
    "a number": 5,
    "a slice": slice(2, 9),
    "every third": slice(None, None, 3),
    "backwards": slice(None, None, -1),
    "an empty slice": slice(4, 4),
    "a list": [3, 1, 1, 0, -1],
    "an empty list": [],
    "an array": np.array([9, 2, 4]),
    "a mask": np.arange(11) % 4 == 1,
}


@pytest.mark.sampled(60)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 16])
@pytest.mark.parametrize("num_inputs", [1, 3])
def test_ranks_divide_the_chosen_rows(name: str, num_parts: int, num_inputs: int) -> None:
    batch = BATCHES[name]
    expected = np.arange(11)[slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch]
    rows = [RowCount(f"x{k}", 11, False) for k in range(num_inputs)]
    selection, bounds, owned = choose_rows(rows, (), batch, None, partial(shard_bounds, world_size=num_parts), "f")
    assert selection is not None and owned is None
    assert len(bounds) == num_parts
    parts = [selection.positions()[low:high] for low, high in bounds]
    np.testing.assert_array_equal(np.concatenate(parts), expected)
    assert sorted(map(len, parts)) == sorted(map(len, np.array_split(expected, num_parts)))
    assert ranks_with_rows(bounds) == [rank for rank, part in enumerate(parts) if len(part)]
    whole, of_shards, of_minibatch = index_arrays(selection, owned, rows)
    assert of_shards is None and of_minibatch is None
    chosen = np.arange(11)[selection.start :: selection.step][: selection.count] if whole is None else whole
    if selection.step > 0:
        np.testing.assert_array_equal(chosen, expected)


@pytest.mark.parametrize("batch", [[0, 11], [-12], 2.5, "rows", np.zeros((2, 2), int), np.zeros(3, bool)], ids=str)
def test_a_batch_that_fits_no_rows(batch: Any) -> None:
    with pytest.raises((TypeError, ValueError, IndexError), match="'f'"):
        select([RowCount("x", 11, False)], batch, "f")


def test_inputs_of_different_lengths() -> None:
    with pytest.raises(ValueError, match=r"x with 5 rows.* y with 6"):
        select([RowCount("x", 5, False), RowCount("y", 6, False)], None, "f")
    assert select([RowCount("x", 5, False), RowCount("y", 6, False)], 5, "f") is not None, "the common rows"
    mini = [RowCount("x", 11, False), RowCount("y", 3, True)]
    assert select(mini, [2, 4, 6], "f") is not None
    with pytest.raises(IndexError, match="batch picks 4 rows, and minibatch input y has 3"):
        select(mini, [2, 4, 6, 8], "f")


def test_no_input_has_rows() -> None:
    assert choose_rows((), (), None, None, EVEN, "f") == (None, [], None)
    with pytest.raises(ValueError, match="batch was given, but no argument is scattered"):
        choose_rows((), (), 3, None, EVEN, "f")
    with pytest.raises(ValueError, match="shard_batch was given, but no argument is a sharded variable"):
        choose_rows([RowCount("x", 4, False)], (), None, [1], EVEN, "f")
    assert own_rows((), 3, "f") == ([(0, 0)] * 3, "")


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4095, 4096, 4097, 1 << 20])
def test_memory_for_arguments(nbytes: int) -> None:
    capacity = capacity_for(nbytes)
    assert capacity >= max(nbytes, 256) and np.log2(capacity) % 1 == 0
    assert capacity == 256 or capacity < 2 * nbytes
    for offset in (0, 7, 64, 5000):
        start, alignment = aligned(offset, nbytes), 4096 if nbytes >= 1 << 20 else 64
        assert start % alignment == 0 and offset <= start < offset + alignment
    data = bytes(range(256)) * 4
    room = padded(data, len(data) + nbytes)
    assert room.tobytes() == data + bytes(nbytes)
