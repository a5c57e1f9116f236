"""Update rules and clipping against torch, with NumPy arrays, tensors and arrays of JAX; what is refused."""

from __future__ import annotations

import math
import pickle
from collections import namedtuple
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import cloudpickle
import numpy as np
import optree
import pytest
import torch

from synk.extensions import updates

TWINS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.5}),
    "nesterov_momentum": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"alpha": 0.9, "eps": 1e-4}),
    "adadelta": (torch.optim.Adadelta, {"rho": 0.8, "eps": 1e-4}),
    "adam": (torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-4}),
    "adamax": (torch.optim.Adamax, {"betas": (0.8, 0.7), "eps": 1e-4}),
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-4}),
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


def trained_by_torch(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], num_steps: int) -> list[np.ndarray]:
    tensors = [torch.tensor(leaf) for leaf in optree.tree_leaves(start())]
    optimizer = make(tensors)
    for _ in range(num_steps):
        for tensor in tensors:
            tensor.grad = gradient(tensor)
        optimizer.step()
    return [tensor.numpy() for tensor in tensors]


def trained(rule: updates.UpdateRule, params: Any, num_steps: int) -> list[Any]:
    state = rule.init(params)
    for _ in range(num_steps):
        params, state = rule.step(params, gradient(params), state)
    assert state["step"] == num_steps
    return optree.tree_leaves(params)


@pytest.mark.parametrize("name", TWINS)
def test_a_rule_goes_the_way_of_torchs_optimizer(subtests: pytest.Subtests, name: str) -> None:
    """With default settings and others, with a schedule, sent to another process, and on arrays of other libraries."""
    make, (twin, settings) = getattr(updates, name), TWINS[name]
    defaults = {key: value for key, value in settings.items() if key in ("momentum", "nesterov")}
    kept = {key: value for key, value in settings.items() if key != "nesterov"}
    assert make().learning_rate == twin([torch.zeros(1)]).defaults["lr"]
    for ours, theirs in (
        ({"momentum": settings["momentum"]} if "momentum" in settings else {}, defaults),
        ({**kept, "learning_rate": 0.01, "weight_decay": 0.1}, {**settings, "lr": 0.01, "weight_decay": 0.1}),
    ):
        rule = pickle.loads(cloudpickle.dumps(make(**ours)))
        with subtests.test(rule=repr(rule)):
            expected = trained_by_torch(lambda tensors, theirs=theirs: twin(tensors, **theirs), 20)
            for leaf, other in zip(trained(rule, start(), 20), expected, strict=True):
                np.testing.assert_allclose(leaf, other, rtol=1e-12, atol=1e-15)
    rule = make(lambda step: np.float64(0.1) / (1 + step))
    for dtype in ("float16", "float32"):
        with subtests.test(dtype=dtype):
            assert [leaf.dtype for leaf in trained(rule, start(dtype), 2)] == [dtype] * 5
    arrays: dict[str, Any] = {"torch": lambda leaf: torch.tensor(leaf, requires_grad=True)}
    if find_spec("jax"):
        import jax

        arrays["jax"] = jax.numpy.asarray
    for library, array in arrays.items():
        with subtests.test(library=library):
            found = trained(rule, optree.tree_map(array, start("float32")), 3)
            for leaf, other in zip(found, trained(rule, start("float32"), 3), strict=True):
                assert type(leaf) is not np.ndarray
                assert not getattr(leaf, "requires_grad", False)
                np.testing.assert_allclose(np.asarray(leaf), other, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_cupy_arrays(runtime: Callable[..., Any]) -> None:
    """In a worker, for CUDA keeps descriptors for the life of a process."""
    runtime(1, backend="cupy").function(lambda row: check_cupy_arrays(), outputs=None)(np.ones(1))


def check_cupy_arrays() -> None:
    import cupy

    for name in TWINS:
        rule = getattr(updates, name)(weight_decay=0.1)
        values = start("float32")
        params = optree.tree_map(cupy.asarray, values)
        state, expected_state = rule.init(params), rule.init(values)
        for _ in range(3):
            flats, unflatten = updates.flatten(params)
            grads, _ = updates.clip_by_global_norm(unflatten(flats), 0.5)
            expected_grads, _ = updates.clip_by_global_norm(values, 0.5)
            params, state = rule.step(params, grads, state)
            values, expected_state = rule.step(values, expected_grads, expected_state)
        for leaf, expected in zip(optree.tree_leaves(params), optree.tree_leaves(values), strict=True):
            assert isinstance(leaf, cupy.ndarray)
            assert leaf.dtype == "float32"
            np.testing.assert_allclose(leaf.get(), expected, rtol=1e-5)


def test_clipping_is_that_of_torch(subtests: pytest.Subtests) -> None:
    for values in ([3.0, -4.0], [0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0]):
        for max_norm in (0.5, 100.0, math.inf):
            with subtests.test(values=values, max_norm=max_norm), np.errstate(invalid="ignore"):
                tensor = torch.zeros(2)
                tensor.grad = torch.tensor(values)
                (clipped, _), norm = updates.clip_by_global_norm([np.array(values, "f4"), np.zeros(0, "f4")], max_norm)
                expected = torch.nn.utils.clip_grad_norm_([tensor], max_norm)
                np.testing.assert_allclose(norm, expected.numpy(), rtol=1e-6)
                np.testing.assert_allclose(clipped, tensor.grad.numpy(), rtol=1e-5)
                assert clipped.dtype == "f4"


def test_what_cannot_be_is_named(subtests: pytest.Subtests) -> None:
    params, adam = {"w": np.ones((2, 3), "float32")}, updates.adam()
    state = adam.init(params)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: updates.momentum(momentum=1.0), "cannot make momentum: got momentum=1.0, expected"),
        (lambda: adam.init({"w": [np.arange(3)]}), r"cannot initialise adam: got params\['w'\]\[0\] of .* floating-"),
        (lambda: adam.step(params, {"w": np.ones(3)}, state), r"got grads\['w'\] of shape \(3,\), expected"),
        (lambda: adam.step(params, {"w": np.ones((2, 3))}, state), "of dtype float64 for a parameter of dtype float32"),
        (
            lambda: updates.sgd(lambda step: -1.0).step(params, params, {"step": 0}),
            "a learning rate of -1.0 from the s",
        ),
        (lambda: updates.clip_by_global_norm([np.ones(2)], 0), "cannot clip gradients: got a maximal norm of 0"),
    ]
    for call, text in refused:
        with subtests.test(text=text), pytest.raises((TypeError, ValueError), match=text):
            call()
