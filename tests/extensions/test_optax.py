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
from synk.extensions.updates import from_optax

WHY = "needs JAX and optax: `make jax` installs them"
jax = pytest.importorskip("jax", reason=WHY)
optax = pytest.importorskip("optax", reason=WHY)
jnp = jax.numpy
PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"

SIZES = (3, 1)  # few, for each shape is compiled anew in each process


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
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.05, 20), weight_decay=0.01),
    "a chain": lambda: optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.add_decayed_weights(0.1, mask=lambda p: jax.tree_util.tree_map(lambda leaf: leaf.ndim > 1, p)),
        optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0.01, 10)),
    ),
    "every third": lambda: optax.MultiSteps(optax.adam(0.02), every_k_schedule=3),
}


STEPS = [("a chain", "float64", 1e-12), ("adamw with a schedule", "float32", 2e-5)]


@pytest.mark.parametrize(("kind", "dtype", "bound"), STEPS)
def test_steps_are_those_of_plain_optax(shared_runtimes: Any, kind: str, dtype: str, bound: float) -> None:
    """Also where gradients are clipped, with batches that are uneven or have fewer rows than workers."""
    rt, tx = shared_runtimes[2], OPTIMIZERS[kind]()
    with sixty_four_bits() if dtype == "float64" else contextlib.nullcontext():
        train = make_train_function(GRADIENT, start(dtype), from_optax(tx), runtime=rt)
        losses: list[Any] = []
        for number in range(12):
            losses.append((train, train.submit, train.serial)[number // 3 % 3](*batch(number, dtype)))
        losses = [float(value.result() if hasattr(value, "result") else value) for value in losses]
        expected, params, state = plain(tx, 12, dtype)
    np.testing.assert_allclose(losses, expected, rtol=bound)
    for rank in range(2):
        assert_same(copy.deepcopy(train.params[rank]), params, bound)
        assert_same(copy.deepcopy(train.state[rank])["optax"], state, bound)


def test_a_run_goes_on_from_a_file_and_in_a_plain_loop(shared_runtimes: Any, tmp_path: Path) -> None:
    """Bit for bit from the file. The state is optax's own."""
    rt, tx = shared_runtimes[2], OPTIMIZERS["every third"]()

    def make() -> Any:
        return make_train_function(GRADIENT, start("float32"), from_optax(tx), runtime=rt)

    train = make()
    for number in range(4):
        train(*batch(number, "float32"))
    train.save(tmp_path / "run.npz")
    params, state = copy.deepcopy((train.params.value, train.state.value))
    expected = [float(train(*batch(number, "float32"))) for number in range(4, 9)]
    again = make()
    again.load(tmp_path / "run.npz")
    assert [float(again(*batch(number, "float32"))) for number in range(4, 9)] == expected
    for one, other in ((again.params, train.params), (again.state, train.state)):
        assert_same(copy.deepcopy(one.value), copy.deepcopy(other.value), 0.0)
    assert int(state["step"]) == 4
    state = state["optax"]
    for number in range(4, 9):
        value, grads = GRADIENT(params, *batch(number, "float32"))
        np.testing.assert_allclose(float(value), expected[number - 4], rtol=2e-5)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)


def test_what_cannot_work_is_refused_in_the_master(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    with pytest.raises(TypeError, match="got function, expected an optimizer of optax"):
        from_optax(optax.adam)
    with pytest.raises(ValueError, match="got framework='torch' with from_optax"):
        make_train_function(GRADIENT, start("float32"), from_optax(optax.sgd(0.1)), framework="torch", runtime=rt)
    with pytest.raises(TypeError, match=r"got params\['hidden'\]\[0\] of dtype float64"):
        make_train_function(GRADIENT, start("float64"), from_optax(optax.sgd(0.1)), runtime=rt)


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
