"""Programs of the ancestor with their imports changed: its demos, its documentation examples, its training functions.

The oracle is PyTensor in this process: the same graph, compiled by ``pytensor.function``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

WHY = "needs PyTensor: `make test EXTRA=pytensor` installs it"

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("PYTENSOR_FLAGS", "cxx=,linker=py,optimizer_excluding=fusion,traceback__limit=0,floatX=float64")
    theano = pytest.importorskip("pytensor", reason=WHY)
    import pytensor.tensor as T

    import synk.extensions.synkhronos as synk


@pytest.fixture(scope="module", params=(3,))
def n_gpus(request: Any, kept_open: Any) -> Iterator[int]:
    """One runtime for all tests of a number of ranks: each worker imports PyTensor, which takes most of a start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTENSOR_FLAGS", "cxx=,linker=py,optimizer_excluding=fusion,traceback__limit=0")
        yield synk.fork(request.param, use_gpu=False)
    synk.close()


def test_the_introductory_example_and_ops_and_slices(n_gpus: int) -> None:
    """The example of the documentation, with the outputs of demo 1."""
    rng = np.random.default_rng(1)
    x, y = T.matrix("x"), T.matrix("y")
    product = x.dot(y)
    f = synk.function(
        inputs=[x],
        bcast_inputs=[y],
        outputs=[T.mean(product, axis=0), (T.sum(product, axis=0), "c_sum"), (T.max(product, axis=0), "max")],
    )
    single = synk.function([x], outputs=T.mean(product), bcast_inputs=[y])
    synk.distribute()
    x_dat, y_dat = rng.standard_normal((101, 10)), rng.standard_normal((10, 5))
    expected = f.as_theano(x_dat, y_dat)
    plain = theano.function([x, y], [T.mean(product, axis=0), T.sum(product, axis=0), T.max(product, axis=0)])
    inputs = f.build_inputs(x_dat, y_dat)
    for num_slices in (1, 4):
        found = f(*inputs, num_slices=num_slices)
        assert isinstance(found, list)
        for each, serial, other in zip(found, expected, plain(x_dat, y_dat), strict=True):
            np.testing.assert_allclose(each, other, rtol=1e-12)
            np.testing.assert_allclose(serial, other, rtol=1e-15)
    for batch in (None, 50, slice(10, 100), rng.integers(0, 100, 50)):  # demo 4
        rows = x_dat[slice(batch) if batch is None or isinstance(batch, int) else batch]
        np.testing.assert_allclose(single(*inputs, batch=batch), (rows @ y_dat).mean(), rtol=1e-10)
    np.testing.assert_allclose(f(x=inputs[0], y=inputs[1])[1], expected[1], rtol=1e-12)


def test_shared_variables_and_collectives(n_gpus: int) -> None:
    """Demo 3."""
    rng = np.random.default_rng(3)
    s_x, s_y = theano.shared(np.ones((12, 4)), name="s_x"), theano.shared(np.zeros((4, 5)), name="s_y")
    unused = theano.shared(np.zeros(3))
    f = synk.function(inputs=[], sliceable_shareds=[s_x], outputs=T.mean(s_x.dot(s_y), axis=0))
    synk.distribute()
    x_dat, y_dat = rng.standard_normal((8 * n_gpus, 4)), rng.standard_normal((4, 5))
    synk.scatter(s_x, x_dat)
    synk.broadcast(s_y, y_dat)
    assert synk.get_lengths(s_x) == [8] * n_gpus
    assert [tuple(shape) for shape in synk.get_shapes(s_x)] == [(8, 4)] * n_gpus
    np.testing.assert_array_equal(synk.gather(s_x, nd_up=0), x_dat)
    np.testing.assert_array_equal(synk.get_value(n_gpus - 1, s_x), x_dat[-8:])
    np.testing.assert_array_equal(synk.gather(s_y), np.stack([y_dat] * n_gpus))
    for num_slices in (1, 2):
        np.testing.assert_allclose(f(num_slices=num_slices), (x_dat @ y_dat).mean(axis=0), rtol=1e-12)
    before = np.asarray(synk.gather(s_x, nd_up=1))
    synk.all_reduce(s_x, op="avg")
    np.testing.assert_allclose(synk.gather(s_x, nd_up=1), np.stack([before.mean(axis=0)] * n_gpus), rtol=1e-12)
    synk.set_value(rank=n_gpus - 1, shared_vars=s_x, values=before[-1])
    np.testing.assert_array_equal(synk.get_value(n_gpus - 1, s_x), before[-1])
    synk.all_gather(s_x)
    assert synk.get_lengths(s_x) == [8 * n_gpus] * n_gpus
    with pytest.raises(ValueError, match=r"no function made by .* uses it"):
        synk.all_reduce(unused)


def test_rows_of_each_rank(n_gpus: int) -> None:
    """Demo 5: the rows of a call, chosen on each rank of those that it holds."""
    rng = np.random.default_rng(5)
    length = 200
    s_x, s_y = theano.shared(np.empty((length, 10))), theano.shared(np.empty((10, 5)))
    f = synk.function(inputs=[], outputs=(T.sum(s_x.dot(s_y), axis=0), "sum"), sliceable_shareds=[s_x])
    x_dat, y_dat = rng.standard_normal((length * n_gpus, 10)), rng.standard_normal((10, 5))
    synk.scatter(s_x, x_dat)
    synk.broadcast(s_y, y_dat)
    parts = np.split(x_dat, n_gpus)
    choices: list[Any] = [slice(100, 200), rng.integers(0, length, 100)]
    choices += [[slice(k, 100 + k) for k in range(n_gpus)], [rng.integers(0, length, 100) for _ in range(n_gpus)]]
    for choice in choices:
        each = choice if isinstance(choice, list) else [choice] * n_gpus
        rows = np.concatenate([part[own] for part, own in zip(parts, each, strict=True)])
        for num_slices in (1, 4):
            np.testing.assert_allclose(f(batch_s=choice, num_slices=num_slices), (rows @ y_dat).sum(0), rtol=1e-9)


def test_updates_are_each_ranks_own(n_gpus: int) -> None:
    """The second example of the documentation: what the main process sees is rank 0."""
    x, s = T.matrix("x"), theano.shared(np.ones(2), name="s")
    f = synk.function([x], updates=[(s, T.sum(x * s, axis=0))])
    x_dat = np.array([[1.0, 1], [2, 2], [3, 3], [4, 4]])
    assert f.as_theano(x_dat) == []
    np.testing.assert_array_equal(s.get_value(), [10, 10])
    s.set_value(np.ones(2))
    assert f(synk.data(x_dat)) == []
    parts = [part.sum(axis=0) for part in np.array_split(x_dat, n_gpus)]
    np.testing.assert_array_equal(s.get_value(), parts[0])
    np.testing.assert_array_equal(synk.gather(s, nd_up=1), parts)
    synk.reduce(s, op="sum")
    np.testing.assert_array_equal(s.get_value(), [10, 10])
    synk.broadcast(s, np.ones(2))
    f(synk.data(x_dat))
    synk.all_reduce(s, op="sum")
    np.testing.assert_array_equal(synk.gather(s, nd_up=1), [[10, 10]] * n_gpus)


def test_values_that_were_set_reach_the_workers(n_gpus: int) -> None:
    """Also if another function is built meanwhile; what cannot reach them is refused."""
    x, w = T.vector("x"), theano.shared(1.0, name="w")
    f = synk.function([x], [(T.sum(x) * w, "first")], bcast_inputs=None, givens=None, sliceable_shareds=None)
    x_dat = np.ones(4 * n_gpus)
    assert f(x_dat) == [4.0]
    w.set_value(5.0)
    g = synk.function([x], [(T.sum(x) * w + 1, "first")])
    assert w.get_value() == 5.0 and f(x_dat) == [20.0] and g(x_dat) == [21.0]
    with pytest.raises(ValueError, match="got batch_s, expected none"):
        f(x_dat, batch_s=slice(1))
    with pytest.raises(ValueError, match=r"cannot use w divided by rows .* Make another shared variable"):
        synk.function([], [(T.sum(w), "sum")], sliceable_shareds=[w])
    s = theano.shared(np.arange(4.0 * n_gpus), name="s")
    h = synk.function([], [(T.sum(s), "sum")], sliceable_shareds=[s])
    total = s.get_value().sum()
    assert h() == [total]
    s.set_value(np.ones(4 * n_gpus))
    with pytest.raises(ValueError, match=r"the value that was set in s: .* Use scatter"):
        h()
    synk.scatter(s, s.get_value())
    assert h() == [4.0 * n_gpus]


def test_values_that_were_changed_in_place_reach_the_workers(n_gpus: int) -> None:
    """The tutorial on aliasing. A value that no call changes stays the same array."""
    x, w = T.vector("x"), theano.shared(np.ones(2), name="w")
    f = synk.function([x], (T.sum(x) + 1 / w, "first"))
    own = w.get_value(borrow=True)
    for value, expected in ((5.0, 0.2), (0.0, np.inf), (-0.0, -np.inf)):
        own[:] = value
        np.testing.assert_array_equal(f(np.zeros(n_gpus)), [expected] * 2)
    w.set_value(own * 3 + 1, borrow=True)
    synk.broadcast(w)
    np.testing.assert_array_equal(synk.gather(w), np.ones((n_gpus, 2)))


# -- training functions: a gradient on each rank, one all-reduce, the same update on all


def zeros(param: Any) -> Any:
    return theano.shared(np.zeros_like(param.get_value()))


def adam(params: Any, grads: Any) -> Any:
    """The counter is listed once for each parameter, as in the ancestor."""
    found, before = [], theano.shared(np.array(0.0))
    t = before + 1
    rate = 0.01 * T.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    for p, g in zip(params, grads):
        first, second = zeros(p), zeros(p)
        m, v = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
        found += [(first, m), (second, v), (p, p - rate * m / (T.sqrt(v) + 1e-8)), (before, t)]
    return found


def make_training(build: Callable[..., Any]) -> tuple[Any, Any, list[Any], Any]:
    """Return the function of gradients, that of updates, the parameters, and the flat gradient."""
    rng = np.random.default_rng(6)
    x, y = T.matrix("x"), T.vector("y")
    params = [theano.shared(rng.standard_normal(4), name="w"), theano.shared(np.array(0.1), name="b")]
    loss = T.mean((T.tanh(x.dot(params[0])) + params[1] - y) ** 2)
    grads = [T.flatten(each) for each in T.grad(loss, params)]
    flat = theano.shared(np.zeros(5), name="flat")
    unflat = [flat[:4], flat[4]]
    updates = adam(params, unflat)
    if build is theano.function:
        updates = list(dict(updates).items())  # it refuses a variable that is listed twice
    gradient = build([x, y], loss, updates=[(flat, T.concatenate(grads))])
    return gradient, build([], [], updates=updates), params, flat


def test_train_functions_equal_the_serial_ones(n_gpus: int) -> None:
    """Even rows: the ancestor's mean of the ranks' means is the mean over all rows."""
    rng = np.random.default_rng(7)
    x_dat, y_dat = rng.standard_normal((24, 4)), rng.standard_normal(24)
    serial, update, expected, _ = make_training(theano.function)
    losses = []
    for _ in range(5):
        losses.append(float(serial(x_dat, y_dat)))
        update()
    gradient, step, params, flat = make_training(synk.function)
    for k, num_slices in enumerate((1, 4, 1, 4, 1)):
        np.testing.assert_allclose(gradient(x_dat, y_dat, num_slices=num_slices), losses[k], rtol=1e-13)
        synk.all_reduce(flat, op="avg")
        step()
    for param, other in zip(params, expected, strict=True):
        np.testing.assert_allclose(param.get_value(), other.get_value(), rtol=1e-12, atol=1e-15)
        np.testing.assert_array_equal(*synk.gather(param, nd_up=1)[:2])


# -- what PyTensor has beside


def test_outputs_givens_names_and_subsets(n_gpus: int) -> None:
    x_dat = np.random.default_rng(0).standard_normal((17, 3))
    x, k, z = T.matrix("x"), T.scalar("k"), T.vector("z")
    scales = theano.shared(np.array([2.0, 1.0, 0.0]), name="scales")
    outputs = [(k * x @ z, "gather"), (x.max(), "max"), (x.sum(0), None), T.mean(x)]
    f = synk.function([x], outputs, bcast_inputs=[k], givens={z: scales})
    product, largest, each, mean = f(k=3.0, x=x_dat)
    np.testing.assert_allclose(product, 3 * x_dat @ [2, 1, 0], rtol=1e-12)
    assert largest == x_dat.max()
    np.testing.assert_allclose(each, [part.sum(0) for part in np.array_split(x_dat, n_gpus)], rtol=1e-12)
    np.testing.assert_allclose(mean, x_dat.mean(), rtol=1e-9)
    for subset in (1, [1]):
        assert f(x_dat, 3.0, output_subset=subset) == [x_dat.max()]


def test_each_rank_draws_numbers_of_its_own_at_each_call(n_gpus: int) -> None:
    x, rngs = T.matrix("x"), [theano.shared(np.random.default_rng(5), name="rng") for _ in range(2)]
    drawn = [T.random.normal(size=(x.shape[0],), rng=rng, return_next_rng=True) for rng in rngs]
    f = synk.function(
        [x], [(draws, "gather") for _, draws in drawn], updates=list(zip(rngs, [new for new, _ in drawn]))
    )
    x_dat = np.zeros((17, 3))
    found = np.concatenate([*f(x_dat), *f(x_dat)])
    assert len({*found}) == 4 * len(x_dat) and abs(found.mean()) < 0.5
    one, other = f.as_theano(x_dat), f.as_theano(x_dat)  # by the graph's own generators, which go on
    np.testing.assert_array_equal(one[0], np.random.default_rng(5).normal(size=17))
    assert not np.any(one[0] == other[0])


def test_what_is_refused(n_gpus: int) -> None:
    x, w = T.matrix("x"), theano.shared(np.ones((4, 3)), name="w")
    with pytest.raises(ValueError, match=r"cannot update w: got one of sliceable_shareds"):
        synk.function([x], updates=[(w, w + 1)], sliceable_shareds=[w])
    with pytest.raises(ValueError, match=r"cannot update x: got TensorVariable, expected a shared variable"):
        synk.function([x], updates=[(x, x + 1)])
    with pytest.raises(ValueError, match="op"):
        synk.function([x], (x.sum(), "average"))
