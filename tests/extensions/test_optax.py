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
from synk.extensions.optax import train

WHY = "needs JAX and optax: `make test EXTRA=jax` installs them"
jax = pytest.importorskip("jax", reason=WHY)
optax = pytest.importorskip("optax", reason=WHY)
jnp = jax.numpy
PAGE = Path(__file__).resolve().parents[2] / "docs" / "updates.md"

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


@pytest.fixture(scope="module")
def two_workers(kept_open: Any) -> Iterator[None]:
    """One runtime for all tests: each worker imports JAX, which takes most of a start."""
    with synk.fork(2, backend="numpy"):
        yield


def test_the_loops_of_the_documentation(two_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marked ``py`` there and not ``python``: they run only where JAX is installed. On the workers that are there."""
    for verb in ("fork", "close"):
        monkeypatch.setattr(synk, verb, lambda *args: None)
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)


STEPS = [
    ("a chain", "float64", 1e-12),
    pytest.param("adamw with a schedule", "float32", 2e-5, marks=pytest.mark.storm),
]


@pytest.mark.parametrize(("kind", "dtype", "bound"), STEPS)
def test_steps_are_those_of_plain_optax(two_workers: None, kind: str, dtype: str, bound: float) -> None:
    """Also where gradients are clipped, with batches that are uneven or have fewer rows than workers, and in slices."""
    tx = OPTIMIZERS[kind]()
    with sixty_four_bits() if dtype == "float64" else contextlib.nullcontext():
        fit = train(GRADIENT, start(dtype), tx)
        losses = [float(fit(*batch(number, dtype), num_slices=1 + number // 10)) for number in range(12)]
        expected, params, state = plain(tx, 12, dtype)
    np.testing.assert_allclose(losses, expected, rtol=bound)
    for rank in range(2):
        assert_same(copy.deepcopy(fit.shared[rank]), {"params": params, "state": state}, bound)


def test_a_run_goes_on_from_a_file(two_workers: None, tmp_path: Path) -> None:
    """Bit for bit."""

    def make() -> Any:
        return train(GRADIENT, start("float64"), OPTIMIZERS["every third"]())

    fit = make()
    for number in range(4):
        fit(*batch(number, "float32"))
    synk.Program(state={"train": fit.shared}).save(tmp_path / "run")
    expected = [float(fit(*batch(number, "float32"))) for number in range(4, 9)]
    again = make()
    again.shared.value = synk.Program.load(tmp_path / "run").values()["train"]
    assert [float(again(*batch(number, "float32"))) for number in range(4, 9)] == expected
    assert_same(copy.deepcopy(again.shared.value), copy.deepcopy(fit.shared.value), 0.0)


class Descent:
    """A rule of nobody's library."""

    def init(self, params: Any) -> tuple[()]:
        return ()

    def step(self, params: Any, grads: Any, state: tuple[()]) -> Any:
        return {name: params[name] - 0.1 * grads[name] for name in params}, state


def test_any_rule_with_init_and_step(two_workers: None) -> None:
    """A step that fails changes nothing. Against NumPy in this process."""
    params, rule = {"w": np.zeros(3), "b": np.array(0.5)}, Descent()

    def loss_and_grad(params: Any, x: Any, y: Any, scale: Any) -> Any:
        if np.isnan(x).any():
            raise ArithmeticError("not a number")
        error = scale * (x @ params["w"] + params["b"] - y)
        return {"loss": (error**2).mean()}, {"w": 2 * scale * x.T @ error / len(x), "b": 2 * scale * error.mean()}

    fit, state = train(loss_and_grad, params, rule, bcast_inputs="scale"), rule.init(params)
    for _ in range(4):
        x, y = batch(2, "float64")[0][:, :3], np.arange(3.0)
        with pytest.raises(ArithmeticError, match="not a number"):
            fit(x * np.nan, y, 2.0)
        found = fit(x, y, scale=2.0)
        expected, grads = loss_and_grad(params, x, y, 2.0)
        params, state = rule.step(params, grads, state)
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-12)
    for name, value in params.items():
        np.testing.assert_allclose(fit.shared[1]["params"][name], value, rtol=1e-12)
