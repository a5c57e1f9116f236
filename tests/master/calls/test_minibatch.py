"""Minibatch data: row j belongs to the j-th row that the batch picks, however it was picked and divided."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

COUNT = 23
KINDS = ["count", "slice", "step", "backwards", "list", "repeated", "permutation", "negative", "mask", "empty"]


def batch_of(kind: str, rng: np.random.Generator) -> Any:
    """Return a batch of a given kind."""
    low, high = sorted(rng.integers(0, COUNT + 1, 2).tolist())
    return {
        "count": int(rng.integers(0, COUNT + 1)),
        "slice": slice(low, high),
        "step": slice(low, None, int(rng.integers(1, 5))),
        "backwards": slice(high, None, -int(rng.integers(1, 4))),
        "list": rng.integers(0, COUNT, int(rng.integers(1, 2 * COUNT))).tolist(),
        "repeated": np.repeat(rng.integers(0, COUNT, 4), 3),
        "permutation": rng.permutation(COUNT),
        "negative": rng.integers(-COUNT, COUNT, 9),
        "mask": rng.random(COUNT) < 0.5,
        "empty": [],
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", [1, 2, 3, "inline"])
@pytest.mark.sampled(20)
def test_row_j_goes_with_the_jth_row_of_the_batch(shared_runtimes: Any, where: Any, kind: str) -> None:
    """Oracle: NumPy, which picks the same rows of the array that the minibatch was made of."""
    rt = shared_runtimes[where]
    whole = np.arange(COUNT * 2.0).reshape(COUNT, 2)
    places = [whole, rt.data(whole), rt.shared(whole, sharded=True)]
    f = rt.function(lambda x, y: (x * 100 + y, (x * y).sum(axis=0)), outputs=("gather", "sum"))
    for seed in range(6):
        rng = np.random.default_rng(seed)
        batch = batch_of(kind, rng)
        picked = slice(batch) if isinstance(batch, int) else np.array(batch, int) if isinstance(batch, list) else batch
        rows = whole[picked]
        loaded = rng.integers(0, 50, (len(rows) + int(rng.integers(0, 3)), 2)).astype(float)
        minibatch = rt.data(loaded, minibatch=True)
        expected = rows * 100 + loaded[: len(rows)]
        for x in places:
            for options in ({}, {"num_slices": int(rng.integers(2, 6))}):
                results = [f(x, minibatch, batch=batch, **options)]
                results.append(f.submit(x, minibatch, batch=batch, **options).result())
                if not options:
                    results.append(f.serial(x, minibatch, batch=batch))
                for gathered, total in results:
                    np.testing.assert_array_equal(gathered, expected)
                    np.testing.assert_array_equal(total, (rows * loaded[: len(rows)]).sum(axis=0))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("where", [1, 2, 3])
@pytest.mark.parametrize("batch", [5, slice(10, 15), slice(3, 13, 2), slice(20, 15, -1), [90, 3, 90, 0, 7]])
def test_minibatch_data_alone_is_its_first_rows(shared_runtimes: Any, where: int, batch: Any) -> None:
    rt = shared_runtimes[where]
    x, y = np.arange(5.0), np.arange(7.0) * 10
    f = rt.function(lambda x, y: x + y, outputs="gather")
    a, b = f.build_inputs(x, y, minibatch=True)
    np.testing.assert_array_equal(f(a, b, batch=batch), x + y[:5])
    np.testing.assert_array_equal(f(a, b, batch=batch, num_slices=2), x + y[:5])


def test_a_mask_of_minibatch_data_alone_is_refused(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.sum(), outputs="sum")
    x = rt.data(np.arange(5.0), minibatch=True)
    for batch in (np.ones(5, bool), slice(2, None), [-1]):
        with pytest.raises(ValueError, match="with minibatch data only"):
            f(x, batch=batch)


@pytest.mark.parametrize("where", [1, 2, 3])
def test_rows_that_each_rank_picks_of_its_shard_come_one_rank_after_the_other(shared_runtimes: Any, where: int) -> None:
    rt = shared_runtimes[where]
    whole = np.arange(12.0)
    x = rt.shared(whole, sharded=True)
    rows = np.concatenate([part[[1, 0]] for part in np.array_split(whole, where)])
    loaded = np.arange(len(rows) + 2.0) * 10
    f = rt.function(lambda x, y: x + y, outputs="gather")
    minibatch = rt.data(loaded, minibatch=True)
    np.testing.assert_array_equal(f(x, minibatch, shard_batch=[1, 0]), rows + loaded[: len(rows)])
    with pytest.raises(ValueError, match=f"got 1 rows, expected {len(rows)} or more"):
        f(x, rt.data(np.ones(1), minibatch=True), shard_batch=[1, 0])


def test_whole_batches_and_minibatches_in_one_call(shared_runtimes: Any) -> None:
    """Two minibatches of other lengths, a plain array and data of more rows than the batch, order kept."""
    rt = shared_runtimes[2]
    rng = np.random.default_rng(1)
    x, z = rng.random((30, 3)), rng.random(30)
    rows = rng.permutation(30)[:11]
    y, w = rng.random(11), rng.random((14, 1))
    f = rt.function(lambda x, y, z, w: np.column_stack([x, y, z, w]), outputs="gather")
    got = f(rt.data(x), rt.data(y, minibatch=True), z, rt.data(w, minibatch=True), batch=rows)
    np.testing.assert_array_equal(got, np.column_stack([x[rows], y, z[rows], w[:11]]))
