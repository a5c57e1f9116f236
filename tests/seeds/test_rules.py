"""Update rules against the optimizers of torch, with NumPy arrays, tensors, and arrays of CuPy."""

from __future__ import annotations

import pickle
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import optree
import pytest
import rules
import torch

TWINS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.5}),
    "nesterov_momentum": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"alpha": 0.9, "eps": 1e-4}),
    "adadelta": (torch.optim.Adadelta, {"rho": 0.8, "eps": 1e-4}),
    "adam": (torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-4}),
    "adamax": (torch.optim.Adamax, {"betas": (0.8, 0.7), "eps": 1e-4}),
}
"""The optimizer of torch that each rule is, with settings that both have."""

Layer = namedtuple("Layer", ["weight", "bias"])


def start(dtype: str = "float64") -> Any:
    """Return parameters in every kind of nesting, a 0-d and an empty array among them."""
    random = np.random.default_rng(3)

    def array(*shape: int) -> np.ndarray:
        return np.asarray(random.uniform(-1, 1, shape), dtype)

    return {"layers": [Layer(array(3, 2), array(2)), (array(2, 2),)], "scale": array(), "no": array(0)}


def gradient(params: Any) -> Any:
    return optree.tree_map(lambda leaf: 3 * leaf**3 - leaf + 0.5, params)


def trained(rule: rules.Rule, params: Any, num_steps: int) -> list[Any]:
    state = rule.init(params)
    for _ in range(num_steps):
        params, state = rule.step(params, gradient(params), state)
    assert state["step"] == num_steps
    return optree.tree_leaves(params)


def test_a_rule_goes_the_way_of_torchs_optimizer(subtests: pytest.Subtests) -> None:
    """After it was sent to another process; on NumPy arrays and on tensors."""
    for name, (twin, settings) in TWINS.items():
        kept = {key: value for key, value in settings.items() if key != "nesterov"}
        rule = pickle.loads(cloudpickle.dumps(getattr(rules, name)(**kept, learning_rate=0.01, weight_decay=0.1)))
        tensors = [torch.tensor(leaf) for leaf in optree.tree_leaves(start())]
        optimizer = twin(tensors, **settings, lr=0.01, weight_decay=0.1)  # type: ignore[call-arg]
        for _ in range(10):
            for tensor in tensors:
                tensor.grad = gradient(tensor)
            optimizer.step()
        for params in (start(), optree.tree_map(torch.tensor, start())):
            with subtests.test(name=name, params=type(params["scale"]).__name__):
                for leaf, other in zip(trained(rule, params, 10), tensors, strict=True):
                    assert isinstance(leaf, torch.Tensor) == isinstance(params["scale"], torch.Tensor)
                    np.testing.assert_allclose(np.asarray(leaf), other.numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.gpu
def test_cupy_arrays(runtime: Callable[..., Any]) -> None:
    """In a worker, for CUDA keeps descriptors for the life of a process."""

    def check(row: np.ndarray) -> None:
        import cupy

        for name in TWINS:
            rule = getattr(rules, name)(weight_decay=0.1)
            values = start("float32")
            params = optree.tree_map(cupy.asarray, values)
            state, expected_state = rule.init(params), rule.init(values)
            for _ in range(3):
                params, state = rule.step(params, gradient(params), state)
                values, expected_state = rule.step(values, gradient(values), expected_state)
            for leaf, expected in zip(optree.tree_leaves(params), optree.tree_leaves(values), strict=True):
                assert isinstance(leaf, cupy.ndarray)
                assert leaf.dtype == "float32"
                np.testing.assert_allclose(leaf.get(), expected, rtol=1e-5)

    runtime(1, backend="cupy").function(check, outputs=None)(np.ones(1))
