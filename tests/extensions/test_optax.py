"""Loops of optax on workers, against the same loops in plain optax in this process: losses, parameters, states."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import synk
from synk.extensions.train_function import make_train_function
from synk.extensions.updates import from_optax, sgd

WHY = "needs JAX and optax: `make jax` installs them"
jax = pytest.importorskip("jax", reason=WHY)
optax = pytest.importorskip("optax", reason=WHY)
jnp = jax.numpy
PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"

SIZES = (4, 3, 1)  # few, for each shape is compiled anew in each process


@contextlib.contextmanager
def sixty_four_bits() -> Iterator[None]:
    """Compute with as many in this process; the workers must follow."""
    before = bool(jax.config.jax_enable_x64)
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def start(dtype: str) -> dict[str, Any]:
    """Return parameters in every container: a dict, a tuple, a list, and a scalar."""
    random = np.random.default_rng(5)
    hidden = random.normal(size=(4, 3)).astype(dtype), np.zeros(3, dtype)
    return {"hidden": hidden, "out": [random.normal(size=3).astype(dtype), np.zeros((), dtype)]}


def batch(number: int, dtype: str) -> tuple[Any, Any]:
    random = np.random.default_rng(number)
    x = random.normal(size=(SIZES[number % len(SIZES)], 4))
    return x.astype(dtype), (3 * np.sin(x).sum(1)).astype(dtype)


def predict(params: Any, x: Any) -> Any:
    weight, bias = params["hidden"]
    slope, offset = params["out"]
    return jnp.tanh(x @ weight + bias) @ slope + offset


def loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((predict(params, x) - y) ** 2)


GRADIENT = jax.jit(jax.value_and_grad(loss))


def plain(tx: Any, num_steps: int, dtype: str) -> tuple[list[float], Any, Any]:
    """Return losses, parameters and state of a loop as a user of optax writes it."""
    params = jax.tree_util.tree_map(jnp.asarray, start(dtype))
    state = tx.init(params)
    losses = []

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    for number in range(num_steps):
        value, params, state = step(params, state, *batch(number, dtype))
        losses.append(float(value))
    return losses, params, state


def assert_same(tree: Any, expected: Any, bound: float) -> None:
    assert jax.tree_util.tree_structure(tree) == jax.tree_util.tree_structure(expected)
    for leaf, other in zip(*map(jax.tree_util.tree_leaves, (tree, expected)), strict=True):
        assert leaf.dtype == other.dtype
        np.testing.assert_allclose(leaf, other, rtol=0, atol=bound)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.05, 20), weight_decay=0.01),
    "a chain": lambda: optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.add_decayed_weights(0.1, mask=lambda p: jax.tree_util.tree_map(lambda leaf: leaf.ndim > 1, p)),
        optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0.01, 10)),
    ),
    "every third": lambda: optax.MultiSteps(optax.adam(0.02), every_k_schedule=3),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_those_of_plain_optax(shared_runtimes: Any, kind: str) -> None:
    """In float64, with uneven batches, one of which has fewer rows than workers."""
    rt, tx = shared_runtimes[2], OPTIMIZERS[kind]()
    with sixty_four_bits():
        train = make_train_function(GRADIENT, start("float64"), from_optax(tx), runtime=rt, name="fit")
        losses = [float(train(*batch(number, "float64"))) for number in range(12)]
        expected, params, state = plain(tx, 12, "float64")
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    for rank in range(2):
        assert_same(rt.get_value(train.params, rank=rank), params, 1e-12)
        assert_same(rt.get_value(train.state, rank=rank)["optax"], state, 1e-12)


def test_clipping_acts_on_the_averaged_gradient(shared_runtimes: Any) -> None:
    """The gradients of two ranks are opposite and large; their mean is below the bound, so nothing is clipped."""

    def linear(params: Any, x: Any) -> Any:
        return jnp.mean(x * params["w"])

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    params = {"w": np.zeros((), "float32")}
    train = make_train_function(jax.value_and_grad(linear), params, from_optax(tx), runtime=shared_runtimes[2])
    train(np.array([100.0, -99.0], "float32"))
    np.testing.assert_allclose(train.params.value["w"], -0.5)


def test_submitted_and_serial_steps_in_float32(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    tx = optax.adam(0.02)
    train = make_train_function(GRADIENT, start("float32"), from_optax(tx), runtime=rt)
    losses: list[Any] = []
    for number in range(9):
        losses.append((train, train.submit, train.serial)[number % 3](*batch(number, "float32")))
    losses = [float(value.result() if hasattr(value, "result") else value) for value in losses]
    expected, params, state = plain(tx, 9, "float32")
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for rank in range(2):
        assert_same(rt.get_value(train.params, rank=rank), params, 2e-5)
        assert_same(rt.get_value(train.state, rank=rank)["optax"], state, 2e-5)


def test_values_beside_the_loss_are_combined_by_ops_of_their_own(shared_runtimes: Any) -> None:
    def with_aux(params: Any, x: Any, y: Any) -> Any:
        error = predict(params, x) - y
        aux = {"mean": jnp.mean(jnp.abs(error)), "worst": jnp.max(jnp.abs(error)), "error": error}
        return jnp.mean(error**2), aux

    ops = {"mean": "avg", "worst": "max", "error": "gather"}
    rt = shared_runtimes[2]
    gradient = jax.jit(jax.value_and_grad(with_aux, has_aux=True))
    tx = from_optax(optax.sgd(0.05))
    train = make_train_function(gradient, start("float32"), tx, has_aux=True, aux_outputs=ops, runtime=rt)
    params = start("float32")
    for number in range(3):
        x, y = batch(number, "float32")
        (expected, of_whole), grads = gradient(params, x, y)
        value, aux = train(x, y)
        np.testing.assert_allclose(value, expected, rtol=2e-5)
        assert sorted(aux) == sorted(of_whole)
        for name in aux:
            np.testing.assert_allclose(aux[name], of_whole[name], rtol=0, atol=2e-5)
        params = jax.tree_util.tree_map(lambda p, g: p - 0.05 * g, params, grads)
    with pytest.raises(ValueError, match="got aux_outputs='max' with num_slices=2"):
        make_train_function(gradient, start("float32"), tx, has_aux=True, aux_outputs="max", num_slices=2, runtime=rt)
    without = make_train_function(GRADIENT, start("float32"), tx, has_aux=True, runtime=rt)
    with pytest.raises(TypeError, match="because of has_aux=True"):
        without(*batch(0, "float32"))


def test_aux_without_jax(shared_runtimes: Any) -> None:
    """Also with rules of synk's own, and over slices of a rank's rows."""

    def gradient(params: Any, x: Any) -> Any:
        return (float(np.mean(x)), {"square": float(np.mean(x**2))}), {"w": np.ones(2)}

    for num_slices in (1, 2):
        rule, rt = sgd(0.5), shared_runtimes[2]
        train = make_train_function(gradient, {"w": np.zeros(2)}, rule, has_aux=True, num_slices=num_slices, runtime=rt)
        value, aux = train(np.arange(7.0))
        assert (float(value), float(aux["square"])) == (3.0, 13.0)


def test_a_checkpoint_goes_into_a_plain_loop_and_back(shared_runtimes: Any) -> None:
    tx = optax.adam(0.02)
    rt = shared_runtimes[2]
    train = make_train_function(GRADIENT, start("float32"), from_optax(tx), runtime=rt)
    for number in range(3):
        train(*batch(number, "float32"))
    params, state = rt.get_value(train.params), rt.get_value(train.state)
    assert int(state["step"]) == 3
    assert type(state["optax"][0]) is optax.ScaleByAdamState
    value, grads = GRADIENT(params, *batch(3, "float32"))
    updates, _ = tx.update(grads, state["optax"], params)
    expected = optax.apply_updates(params, updates)
    np.testing.assert_allclose(float(train(*batch(3, "float32"))), float(value), rtol=2e-5)
    assert_same(rt.get_value(train.params), expected, 2e-5)
    train.params.value, train.state.value = params, state
    train(*batch(3, "float32"))
    assert_same(rt.get_value(train.params), expected, 2e-5)


@pytest.mark.parametrize(
    "kind",
    [
        "a chain",
        "every third",
        *(pytest.param(kind, marks=pytest.mark.storm) for kind in ("momentum", "adamw with a schedule")),
    ],
)
def test_a_run_goes_on_from_a_file_bit_for_bit(shared_runtimes: Any, tmp_path: Path, kind: str) -> None:
    def make() -> Any:
        tx = OPTIMIZERS[kind]()
        return make_train_function(GRADIENT, start("float32"), from_optax(tx), runtime=shared_runtimes[2])

    train = make()
    for number in range(4):
        train(*batch(number, "float32"))
    train.save(tmp_path / "run.npz")
    expected = [float(train(*batch(number, "float32"))) for number in range(4, 9)]
    again = make()
    again.load(tmp_path / "run.npz")
    assert [float(again(*batch(number, "float32"))) for number in range(4, 9)] == expected
    for one, other in ((again.params, train.params), (again.state, train.state)):
        assert_same(copy.deepcopy(one.value), copy.deepcopy(other.value), 0.0)


def test_what_cannot_work_is_refused_in_the_master(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    with pytest.raises(TypeError, match="got function, expected an optimizer of optax"):
        from_optax(optax.adam)
    with pytest.raises(ValueError, match="got framework='torch' with from_optax"):
        make_train_function(GRADIENT, start("float32"), from_optax(optax.sgd(0.1)), framework="torch", runtime=rt)
    with pytest.raises(TypeError, match=r"got params\['hidden'\]\[0\] of dtype float64"):
        make_train_function(GRADIENT, start("float64"), from_optax(optax.sgd(0.1)), runtime=rt)
    with pytest.raises(TypeError, match=r"got params\['w'\] of dtype int64"):
        make_train_function(GRADIENT, {"w": np.arange(3)}, from_optax(optax.sgd(0.1)), runtime=rt)
    with pytest.raises(TypeError, match="its update cannot do with gradients, state and parameters"):
        make_train_function(GRADIENT, start("float32"), from_optax(optax.lbfgs()), runtime=rt)
    wrong = make_train_function(
        lambda params, x: (0.0, {"w": np.ones(1, "float32")}), {"w": np.ones(2, "float32")},
        from_optax(optax.sgd(0.1)), runtime=rt,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"cannot step the optax rule: got grads\['w'\] of shape \(1,\)"):
        wrong(np.ones(4, "float32"))


def test_the_loops_of_the_documentation() -> None:
    """Marked ``py`` there and not ``python``: they run only where JAX is installed."""
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    blocks = [block for block in blocks if "import transformers" not in block and "from transformers" not in block]
    assert len(blocks) == 2
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), namespace)
    finally:
        synk.close()
