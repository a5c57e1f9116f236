"""CSR matrices as arguments: each rank gets the rows that it would get of an array."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse

KINDS = (scipy.sparse.csr_matrix, scipy.sparse.csr_array)
BATCHES = (None, 5, slice(2, 11), slice(None, None, -2), [3, 3, 12, 0, 1], slice(0, 0))


def matrix(kind: Any, num_rows: int = 13, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    dense = rng.integers(0, 4, (num_rows, 6)) * (rng.random((num_rows, 6)) < 0.4)
    dense[4:7] = 0
    return kind(dense.astype(float))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("where", [1, 2, 3, "inline"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_gets_its_rows(shared_runtimes: Any, where: Any, kind: Any) -> None:
    rt, x = shared_runtimes[where], matrix(kind)
    dense, y = x.toarray(), np.arange(13.0)

    def look(x: Any, y: Any) -> tuple[Any, ...]:
        return x.toarray(), x @ np.ones(6) * y, type(x).__name__, x.has_sorted_indices

    f = rt.function(look, outputs=("gather", "gather", "first", "first"))
    for batch in BATCHES[:-1]:
        rows = slice(0, batch) if isinstance(batch, int) else slice(None) if batch is None else batch
        for options in ({}, {"num_slices": 2}):
            for call in (f, f.serial):
                got, product, name, is_sorted = call(x, y, batch=batch, **options)
                np.testing.assert_array_equal(got, dense[rows])
                np.testing.assert_array_equal(product, dense[rows].sum(axis=1) * y[rows])
                assert name == kind.__name__ and is_sorted
    assert f.submit(x, y).result()[0].tolist() == dense.tolist()
    assert rt.function(lambda x: x.sum(), outputs="sum").verify(x)


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_nesting_and_beside_other_inputs(shared_runtimes: Any, kind: Any) -> None:
    rt, x = shared_runtimes[2], matrix(kind)
    other = kind(scipy.sparse.vstack([x, x])[5:18])
    minibatch = rt.data(np.arange(9.0), minibatch=True)
    f = rt.function(
        lambda fields, w, other, m: fields["x"] @ w * fields["y"] + other.toarray().sum(axis=1) * m,
        bcast_inputs="w",
        outputs="gather",
    )
    y, w = np.arange(13.0), np.arange(6.0)
    rows = slice(2, 11)
    expected = x[rows] @ w * y[rows] + other.toarray()[rows].sum(axis=1) * np.arange(9.0)
    np.testing.assert_array_equal(f({"x": x, "y": rt.data(y)}, w, other, minibatch, batch=rows), expected)


def test_with_sharded_variables(shared_runtimes: Any) -> None:
    rt, x = shared_runtimes[2], matrix(KINDS[1])
    y = rt.shared(np.arange(13.0), sharded=True)
    f = rt.function(lambda x, y: x.T @ y, outputs="sum")
    for batch in (None, slice(3, 9), [12, 0, 5]):
        rows = slice(None) if batch is None else batch
        np.testing.assert_array_equal(f(x, y, batch=batch), x[rows].T @ np.arange(13.0)[rows])


def test_calls_that_are_repeated(shared_runtimes: Any) -> None:
    """Other elements in the same places, other places, other numbers of elements."""
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.toarray(), outputs="gather")
    x = matrix(KINDS[0])
    for _ in range(3):
        x.data[:] += 1
        np.testing.assert_array_equal(f(x), x.toarray())
    for seed in range(4):
        x = matrix(KINDS[seed % 2], seed=seed)
        np.testing.assert_array_equal(f(x), x.toarray())


def test_edges(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.toarray(), outputs="gather")
    for shape in ((1, 3), (5, 1), (2, 0)):
        empty = scipy.sparse.csr_array(shape)
        np.testing.assert_array_equal(f(empty), np.zeros(shape))
    roomy = scipy.sparse.csr_array(np.eye(3))
    roomy = scipy.sparse.csr_array((np.append(roomy.data, 9.0), np.append(roomy.indices, 0), roomy.indptr), (3, 3))
    np.testing.assert_array_equal(f(roomy), np.eye(3))
    wide = scipy.sparse.csr_array(np.eye(4))
    wide.indices, wide.indptr = wide.indices.astype(np.int64), wide.indptr.astype(np.int64)
    np.testing.assert_array_equal(f(wide), np.eye(4))


def test_blocks_of_rows(shared_runtimes: Any) -> None:
    rt, x, y = shared_runtimes[2], matrix(KINDS[1]), np.arange(13.0)
    f = rt.function(lambda d: d["x"] @ np.ones(6) + d["y"], outputs="gather")
    np.testing.assert_array_equal(np.concatenate([*f.rows({"x": x, "y": y}, batch_size=4)]), x @ np.ones(6) + y)
    g = rt.function(lambda x: x @ np.ones(6), outputs="gather")
    np.testing.assert_array_equal(np.concatenate([*g.rows(x, batch_size=4)]), x @ np.ones(6))


def test_whole(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x, w: x @ w.toarray(), bcast_inputs="w", outputs="gather")
    np.testing.assert_array_equal(f(np.eye(13), matrix(KINDS[0])), matrix(KINDS[0]).toarray())


def test_what_is_refused(shared_runtimes: Any) -> None:
    rt, x = shared_runtimes[2], matrix(KINDS[0])
    f = rt.function(lambda x: x.sum(), outputs="sum")
    with pytest.raises(
        TypeError, match=r"x of '<lambda>': got a sparse matrix \(from csc_matrix\), expected.*tocsr\(\)"
    ):
        f(x.tocsc())
    with pytest.raises(TypeError, match="cannot share Data: got a sparse matrix"):
        rt.data(x)
    with pytest.raises(ValueError, match="got x with 13 rows and y with 4"):
        rt.function(lambda x, y: 0.0)(x, np.ones(4))
    with pytest.raises(TypeError, match=r"got a sparse matrix, and its inputs are tensors of torch.*x.toarray\(\)"):
        rt.function(lambda x: x.sum(), framework="torch")(x)
    with pytest.raises(TypeError, match=r"got csr_matrix, expected an array of numbers.*op None"):
        rt.function(lambda x: x, outputs="gather")(x)


def test_scipy_is_not_imported() -> None:
    code = "import sys, synk; assert 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
