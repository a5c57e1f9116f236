"""Seed 001: the update rules of Synkhronos' extension, as pairs of pure functions on nested arrays of any library.

Definitions, default values and names of state entries are those of ``torch.optim``. In the formulas ``p`` is a
parameter, ``g`` its gradient, ``lr`` the learning rate and ``t`` the number of the step, from 1. With ``weight_decay``,
``g + weight_decay * p`` takes the place of ``g``. Nothing is modified in place.

>>> import numpy as np
>>> rule = momentum(learning_rate=0.5, momentum=0.5)
>>> params, state = {"w": np.array([1.0])}, rule.init({"w": np.array([1.0])})
>>> for _ in range(2):
...     params, state = rule.step(params, {"w": np.array([1.0])}, state)
>>> params, state
({'w': array([-0.25])}, {'step': 2, 'momentum_buffer': {'w': array([1.5])}})
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import optree

Array: TypeAlias = Any
Tree: TypeAlias = Any


class Rule(NamedTuple):
    """``init(params)`` makes the state; ``step(params, grads, state)`` returns new parameters and a new state."""

    init: Callable[[Tree], dict[str, Tree]]
    step: Callable[[Tree, Tree, dict[str, Tree]], tuple[Tree, dict[str, Tree]]]


def rule_of(slots: str, weight_decay: float, update: Callable[..., tuple[Array, ...]]) -> Rule:
    """Make a rule from the arithmetic of one array: ``update(p, g, t, *slots)`` returns a new parameter and slots."""
    names = slots.split()

    def init(params: Tree) -> dict[str, Tree]:
        return {"step": 0, **{name: optree.tree_map(lambda leaf: leaf * 0, params) for name in names}}

    def step(params: Tree, grads: Tree, state: dict[str, Tree]) -> tuple[Tree, dict[str, Tree]]:
        t = int(state["step"]) + 1
        leaves, spec = optree.tree_flatten(params)
        columns = [spec.flatten_up_to(each) for each in (grads, *(state[name] for name in names))]
        found = [update(p, g + weight_decay * p, t, *own) for p, g, *own in zip(leaves, *columns, strict=True)]
        new, *new_columns = (spec.unflatten(column) for column in zip(*found, strict=True))
        return new, {"step": t, **dict(zip(names, new_columns, strict=True))}

    return Rule(init, step)


def sgd(learning_rate: float = 1e-3, *, weight_decay: float = 0.0) -> Rule:
    """``p <- p - lr g``. Robbins and Monro, Annals of Mathematical Statistics 22(3), 1951."""
    return rule_of("", weight_decay, lambda p, g, t: (p - learning_rate * g,))


def momentum(learning_rate: float = 1e-3, *, momentum: float = 0.9, weight_decay: float = 0.0) -> Rule:
    """``v <- momentum v + g``; ``p <- p - lr v``. Polyak, USSR Comput. Math. Math. Phys. 4(5), 1964."""

    def update(p: Array, g: Array, t: int, v: Array) -> tuple[Array, ...]:
        v = momentum * v + g
        return p - learning_rate * v, v

    return rule_of("momentum_buffer", weight_decay, update)


def nesterov_momentum(learning_rate: float = 1e-3, *, momentum: float = 0.9, weight_decay: float = 0.0) -> Rule:
    """``v <- momentum v + g``; ``p <- p - lr (g + momentum v)``. Sutskever et al., ICML 2013."""

    def update(p: Array, g: Array, t: int, v: Array) -> tuple[Array, ...]:
        v = momentum * v + g
        return p - learning_rate * (g + momentum * v), v

    return rule_of("momentum_buffer", weight_decay, update)


def adagrad(learning_rate: float = 1e-2, *, eps: float = 1e-10, weight_decay: float = 0.0) -> Rule:
    """``s <- s + g^2``; ``p <- p - lr g / (sqrt(s) + eps)``. Duchi, Hazan and Singer, JMLR 12, 2011."""

    def update(p: Array, g: Array, t: int, s: Array) -> tuple[Array, ...]:
        s = s + g * g
        return p - learning_rate * g / (s**0.5 + eps), s

    return rule_of("sum", weight_decay, update)


def rmsprop(learning_rate: float = 1e-2, *, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0) -> Rule:
    """``s <- alpha s + (1 - alpha) g^2``; ``p <- p - lr g / (sqrt(s) + eps)``. Tieleman and Hinton, 2012."""

    def update(p: Array, g: Array, t: int, s: Array) -> tuple[Array, ...]:
        s = alpha * s + (1 - alpha) * (g * g)
        return p - learning_rate * g / (s**0.5 + eps), s

    return rule_of("square_avg", weight_decay, update)


def adadelta(learning_rate: float = 1.0, *, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0) -> Rule:
    """Steps have the scale of earlier steps. Zeiler, arXiv:1212.5701, 2012.

    ``s <- rho s + (1 - rho) g^2``; ``d = sqrt(a + eps) / sqrt(s + eps) g``; ``a <- rho a + (1 - rho) d^2``;
    ``p <- p - lr d``
    """

    def update(p: Array, g: Array, t: int, s: Array, a: Array) -> tuple[Array, ...]:
        s = rho * s + (1 - rho) * (g * g)
        d = (a + eps) ** 0.5 / (s + eps) ** 0.5 * g
        return p - learning_rate * d, s, rho * a + (1 - rho) * (d * d)

    return rule_of("square_avg acc_delta", weight_decay, update)


def adam(
    learning_rate: float = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Rule:
    """Running means of the gradient and of its square. Kingma and Ba, ICLR 2015, arXiv:1412.6980.

    ``m <- beta1 m + (1 - beta1) g``; ``v <- beta2 v + (1 - beta2) g^2``;
    ``p <- p - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)``
    """
    beta1, beta2 = betas

    def update(p: Array, g: Array, t: int, m: Array, v: Array) -> tuple[Array, ...]:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * (g * g)
        return p - learning_rate / (1 - beta1**t) * m / (v**0.5 / (1 - beta2**t) ** 0.5 + eps), m, v

    return rule_of("exp_avg exp_avg_sq", weight_decay, update)


def adamax(
    learning_rate: float = 2e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Rule:
    """As ``adam``, with ``u <- max(beta2 u, |g| + eps)`` and ``p <- p - lr / (1 - beta1^t) m / u``; section 7.1."""
    beta1, beta2 = betas

    def update(p: Array, g: Array, t: int, m: Array, u: Array) -> tuple[Array, ...]:
        m = beta1 * m + (1 - beta1) * g
        old, new = beta2 * u, abs(g) + eps
        u = old * (old >= new) + new * (new > old)  # by operators that every array library has
        return p - learning_rate / (1 - beta1**t) * m / u, m, u

    return rule_of("exp_avg exp_inf", weight_decay, update)
