"""Graphs of PyTensor on all workers, against the same graph compiled for this process, and against NumPy."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import synk

WHY = "needs PyTensor: `make pytensor` installs it"

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("PYTENSOR_FLAGS", "cxx=,linker=py,optimizer_excluding=fusion,traceback__limit=0,floatX=float64")
    pytensor = pytest.importorskip("pytensor", reason=WHY)
    import pytensor.tensor as pt

    from synk.extensions.pytensor import function, remote

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((17, 3)), RNG.standard_normal(17)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTENSOR_FLAGS", "cxx=,linker=py,optimizer_excluding=fusion,traceback__limit=0,floatX=float64")


@pytest.fixture(scope="module")
def workers(kept_open: Any) -> Any:
    """A runtime of this file's own: workers take the flags of PyTensor from the environment in which they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTENSOR_FLAGS", "cxx=,linker=py,optimizer_excluding=fusion,traceback__limit=0,floatX=float64")
        opened = synk.Runtime(2, backend="numpy")
    with opened:
        yield opened


def test_updates_over_all_rows_are_those_of_one_process(workers: Any) -> None:
    """17 rows are uneven on two ranks, where the mean of the ranks' means is off."""
    x, y = pt.matrix("x"), pt.vector("y")

    def graph() -> tuple[Any, Any, Any]:
        w, b = pytensor.shared(np.ones(3), name="w"), pytensor.shared(np.array(0.5), name="b")
        loss = pt.mean((x @ w + b - y) ** 2)
        gw, gb = pytensor.grad(loss, [w, b])
        return loss, [w, b], [(w, w - 0.1 * gw), (b, b - 0.1 * gb)]

    loss, params, updates = graph()
    f = function([x, y], loss, updates=[(*each, "all") for each in updates], runtime=workers)
    for num_slices in (1, 4, 1):
        expected = (X @ params[0].get_value() + params[1].get_value() - Y) @ (
            X @ params[0].get_value() + params[1].get_value() - Y
        )
        np.testing.assert_allclose(f(X, Y, num_slices=num_slices), expected / 17, rtol=1e-7)
        f.serial(X, Y)
        for param in params:
            values = [remote(param)[rank] for rank in range(2)]
            np.testing.assert_allclose(values, [param.get_value()] * 2, rtol=1e-7)
    calls = [f.submit(X, Y) for _ in range(2)]  # the second goes on from the averages of the first
    losses = [f.serial(X, Y) for _ in range(2)]
    np.testing.assert_allclose([call.result() for call in calls], losses, rtol=1e-7)
    np.testing.assert_allclose(remote(params[0]).value, params[0].get_value(), rtol=1e-7)
    with pytest.raises(ValueError, match="cannot repeat 'graph': got an update with 'all'"):
        f.repeat(2, X, Y)


def test_outputs_givens_and_names(workers: Any) -> None:
    x, k, z = pt.matrix("x"), pt.scalar("k"), pt.vector("z")
    doubled = pytensor.shared(np.array([2.0, 1.0, 0.0]), name="scales")
    outputs = [(k * x @ z, "gather"), (x.max(), "max"), (x.sum(0), None), pt.mean(x)]
    f = function([x], outputs, bcast_inputs=[k], givens={z: doubled}, runtime=workers)
    product, largest, each, mean = f(k=3.0, x=X)
    np.testing.assert_allclose(product, 3 * X @ [2, 1, 0], rtol=1e-12)
    assert largest == X.max()
    np.testing.assert_allclose(each, [part.sum(0) for part in np.array_split(X, 2)], rtol=1e-12)
    np.testing.assert_allclose(mean, X.mean(), rtol=1e-9)
    one = function([x], (x.sum(), "sum"), runtime=workers)
    np.testing.assert_allclose(one(X), X.sum(), rtol=1e-12)
    assert bool(one.verify(X))


def test_values_go_to_the_parent_and_back(workers: Any) -> None:
    """One output may be selected beside an update over all ranks."""
    x, w = pt.matrix("x"), pytensor.shared(np.zeros(3), name="w")
    f = function([x], updates={w: w + 1}, runtime=workers)
    g = function([x], (x @ w, "gather"), runtime=workers)
    assert f(X) == []
    f.repeat(3, X)
    np.testing.assert_array_equal(w.get_value(), 0)
    np.testing.assert_allclose(g(X), X.sum(1) * 4, rtol=1e-12)  # the same variable
    f.sync_to_parent()
    np.testing.assert_array_equal(w.get_value(), 4)
    w.set_value(np.full(3, 7.0))
    g.sync_from_parent()
    np.testing.assert_allclose(g(X), X.sum(1) * 7, rtol=1e-12)
    h = function([x], [pt.mean(x), (pt.max(x), "max")], updates=[(w, x.mean(0), "all")], runtime=workers)
    for subset in (1, [1], np.int64(1)):
        assert h(X, output_subset=subset) == [X.max()]
    h.sync_to_parent()
    np.testing.assert_allclose(w.get_value(), X.mean(0), rtol=1e-7)


def test_each_rank_draws_numbers_of_its_own() -> None:
    """A worker that replaces another draws numbers that nobody has drawn."""
    with synk.Runtime(2, backend="numpy") as runtime:
        x, rng = pt.matrix("x"), pytensor.shared(np.random.default_rng(5), name="rng")
        later, draws = pt.random.normal(size=(x.shape[0],), rng=rng, return_next_rng=True)
        f = function([x], (draws, "gather"), updates=[(rng, later)], runtime=runtime)
        found = [*f(X), *f(X)]
        assert abs(np.mean(found)) < 1
        with pytest.raises(synk.errors.WorkerDied):
            runtime.function(lambda x: os._exit(3), outputs=None)(X)
        assert len({*found, *f(X)}) == 3 * len(X)


def test_what_is_refused(workers: Any) -> None:
    x, w = pt.matrix("x"), pytensor.shared(np.ones((4, 3)), name="w")
    with pytest.raises(ValueError, match=r"cannot find w on the workers: no function made by .* uses it"):
        remote(w)
    with pytest.raises(ValueError, match=r"cannot update w: got one of sliceable_shareds"):
        function([x], updates=[(w, w + 1)], sliceable_shareds=[w], runtime=workers)
    with pytest.raises(ValueError, match=r"cannot update x: got TensorVariable, expected a shared variable"):
        function([x], updates=[(x, x + 1)], runtime=workers)
    with pytest.raises(ValueError, match=r"cannot average the update of w over all rows: got no inputs"):
        function([], updates=[(w, w + 1, "all")], runtime=workers)
    with pytest.raises(ValueError, match="op"):
        function([x], (x.sum(), "average"), runtime=workers)
