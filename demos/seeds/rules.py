"""Update rules of gradient descent, as pure functions on nested arrays of any library.

This file has the arithmetic of one step and nothing else: no process, no communication, no array library. It uses
arithmetic operators and methods that NumPy, CuPy, torch and JAX share. So a rule runs where its parameters lie, keeps
their dtype, and can be called inside or outside of a synk function. Nothing is modified in place.

Definitions, default values and names of state entries are those of ``torch.optim``. In the formulas ``p`` is a
parameter, ``g`` its gradient, ``lr`` the learning rate and ``t`` the number of the step, from 1. With ``weight_decay``,
``g + weight_decay * p`` takes the place of ``g`` (L2 regularisation), except in `adamw`.

In one file because they read as one page: each is a few lines below the formula in its docstring.
"""

from __future__ import annotations

from typing import Any

from synk.extensions._gradients import clip_by_global_norm, flatten
from synk.extensions._optax import from_optax
from synk.extensions._rule import Array, LearningRate, Slots, Updated, UpdateRule, decoupled, rule_of

__all__ = [
    "UpdateRule",
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "clip_by_global_norm",
    "flatten",
    "from_optax",
    "momentum",
    "nesterov_momentum",
    "rmsprop",
    "sgd",
]


def sgd(learning_rate: LearningRate = 1e-3, *, weight_decay: float = 0.0) -> UpdateRule:
    """Make the rule of stochastic gradient descent.

    ``p <- p - lr g``

    Parameters
    ----------
    learning_rate : float or callable of the step count
    weight_decay : float
        Factor of the L2 term, at least 0.

    Notes
    -----
    `torch.optim.SGD`. Robbins and Monro, "A stochastic approximation method", Annals of Mathematical Statistics
    22(3), 1951.

    Examples
    --------
    >>> import numpy as np
    >>> rule = sgd(learning_rate=0.5)
    >>> params = [np.array([1.0, 2.0])]
    >>> rule.step(params, [np.array([1.0, -1.0])], rule.init(params))
    ([array([0.5, 2.5])], {'step': 1})
    """

    def update(p: Array, g: Array, slots: Slots, lr: float, t: int) -> Updated:
        return p - lr * g, ()

    return rule_of("sgd", learning_rate, (), update, weight_decay=weight_decay)


def momentum(learning_rate: LearningRate = 1e-3, *, momentum: float = 0.9, weight_decay: float = 0.0) -> UpdateRule:
    """Make the rule of gradient descent with momentum.

    | ``v <- momentum v + g``
    | ``p <- p - lr v``

    Parameters
    ----------
    learning_rate : float or callable of the step count
    momentum : float
        Share of the velocity kept at each step, in [0, 1).
    weight_decay : float
        Factor of the L2 term, at least 0.

    Notes
    -----
    State: ``momentum_buffer`` (v). `torch.optim.SGD` with ``momentum`` and ``dampening=0``: the learning rate
    multiplies the velocity and is not stored in it. Polyak, "Some methods of speeding up the convergence of iteration
    methods", USSR Computational Mathematics and Mathematical Physics 4(5), 1964.

    Examples
    --------
    >>> import numpy as np
    >>> rule = momentum(learning_rate=0.5, momentum=0.5)
    >>> params, state = np.array([1.0]), rule.init(np.array([1.0]))
    >>> for _ in range(2):
    ...     params, state = rule.step(params, np.array([1.0]), state)
    >>> params, state["momentum_buffer"]
    (array([-0.25]), array([1.5]))
    """
    return _momentum_rule("momentum", learning_rate, momentum, weight_decay, looks_ahead=False)


def nesterov_momentum(
    learning_rate: LearningRate = 1e-3, *, momentum: float = 0.9, weight_decay: float = 0.0
) -> UpdateRule:
    """Make the rule of gradient descent with Nesterov's momentum.

    | ``v <- momentum v + g``
    | ``p <- p - lr (g + momentum v)``

    Parameters
    ----------
    learning_rate : float or callable of the step count
    momentum : float
        Share of the velocity kept at each step, in [0, 1).
    weight_decay : float
        Factor of the L2 term, at least 0.

    Notes
    -----
    State: ``momentum_buffer`` (v). `torch.optim.SGD` with ``nesterov=True``. The gradient is taken at the parameters
    themselves, in the form of Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum
    in deep learning", ICML 2013; Nesterov, Soviet Mathematics Doklady 27(2), 1983.

    Examples
    --------
    >>> import numpy as np
    >>> rule = nesterov_momentum(learning_rate=0.5, momentum=0.5)
    >>> params, state = rule.step(np.array([1.0]), np.array([1.0]), rule.init(np.array([1.0])))
    >>> params
    array([0.25])
    """
    return _momentum_rule("nesterov_momentum", learning_rate, momentum, weight_decay, looks_ahead=True)


def _momentum_rule(
    name: str, learning_rate: LearningRate, momentum: float, weight_decay: float, *, looks_ahead: bool
) -> UpdateRule:
    def update(p: Array, g: Array, slots: Slots, lr: float, t: int, momentum: float) -> Updated:
        (v,) = slots
        v = momentum * v + g
        return p - lr * (g + momentum * v if looks_ahead else v), (v,)

    return rule_of(name, learning_rate, ("momentum_buffer",), update, momentum=momentum, weight_decay=weight_decay)


def adagrad(learning_rate: LearningRate = 1e-2, *, eps: float = 1e-10, weight_decay: float = 0.0) -> UpdateRule:
    """Make the AdaGrad rule: each element's rate falls with the sum of its squared gradients.

    | ``s <- s + g^2``
    | ``p <- p - lr g / (sqrt(s) + eps)``

    Parameters
    ----------
    learning_rate : float or callable of the step count
    eps : float
        Added to the denominator, at least 0.
    weight_decay : float
        Factor of the L2 term, at least 0.

    Notes
    -----
    State: ``sum`` (s). `torch.optim.Adagrad`; its ``lr_decay`` is the schedule
    ``lambda step: lr / (1 + step * lr_decay)``. Duchi, Hazan and Singer, "Adaptive subgradient methods for online
    learning and stochastic optimization", JMLR 12, 2011.

    Examples
    --------
    >>> import numpy as np
    >>> rule = adagrad(learning_rate=0.5, eps=0.0)
    >>> rule.step(np.array([1.0, 1.0]), np.array([3.0, -4.0]), rule.init(np.ones(2)))[0]
    array([0.5, 1.5])
    """

    def update(p: Array, g: Array, slots: Slots, lr: float, t: int, eps: float) -> Updated:
        (s,) = slots
        s = s + g * g
        return p - lr * g / (s**0.5 + eps), (s,)

    return rule_of("adagrad", learning_rate, ("sum",), update, eps=eps, weight_decay=weight_decay)


def rmsprop(
    learning_rate: LearningRate = 1e-2, *, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0
) -> UpdateRule:
    """Make the RMSProp rule: gradients are divided by a running root mean square.

    | ``s <- alpha s + (1 - alpha) g^2``
    | ``p <- p - lr g / (sqrt(s) + eps)``

    Parameters
    ----------
    learning_rate : float or callable of the step count
    alpha : float
        Share of the mean square kept at each step, in [0, 1).
    eps : float
        Added to the denominator, at least 0.
    weight_decay : float
        Factor of the L2 term, at least 0.

    Notes
    -----
    State: ``square_avg`` (s). `torch.optim.RMSprop` without its ``momentum`` and ``centered``. Tieleman and Hinton,
    "Lecture 6.5: RMSProp", COURSERA: Neural networks for machine learning, 2012.

    Examples
    --------
    >>> import numpy as np
    >>> rule = rmsprop(learning_rate=0.5, alpha=0.75, eps=0.0)
    >>> rule.step(np.array([1.0, 1.0]), np.array([3.0, -4.0]), rule.init(np.ones(2)))[0]
    array([0., 2.])
    """

    def update(p: Array, g: Array, slots: Slots, lr: float, t: int, alpha: float, eps: float) -> Updated:
        (s,) = slots
        s = alpha * s + (1 - alpha) * (g * g)
        return p - lr * g / (s**0.5 + eps), (s,)

    return rule_of("rmsprop", learning_rate, ("square_avg",), update, alpha=alpha, eps=eps, weight_decay=weight_decay)


def adadelta(
    learning_rate: LearningRate = 1.0, *, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0
) -> UpdateRule:
    """Make the AdaDelta rule: steps have the scale of earlier steps, whatever the scale of the gradient.

    | ``s <- rho s + (1 - rho) g^2``
    | ``d = sqrt(a + eps) / sqrt(s + eps) g``
    | ``a <- rho a + (1 - rho) d^2``
    | ``p <- p - lr d``

    Parameters
    ----------
    learning_rate : float or callable of the step count
    rho : float
        Share of both running means kept at each step, in [0, 1).
    eps : float
        Added under both roots, at least 0. It sets the size of the first steps.
    weight_decay : float
        Factor of the L2 term, at least 0.

    Notes
    -----
    State: ``square_avg`` (s), ``acc_delta`` (a). `torch.optim.Adadelta`. Zeiler, "ADADELTA: an adaptive learning rate
    method", arXiv:1212.5701, 2012.

    Examples
    --------
    >>> import numpy as np
    >>> rule = adadelta(rho=0.75, eps=1.0)
    >>> rule.step(np.array([1.0]), np.array([2.0]), rule.init(np.ones(1)))[0].round(6)
    array([-0.414214])
    """

    def update(p: Array, g: Array, slots: Slots, lr: float, t: int, rho: float, eps: float) -> Updated:
        s, a = slots
        s = rho * s + (1 - rho) * (g * g)
        d = (a + eps) ** 0.5 / (s + eps) ** 0.5 * g
        a = rho * a + (1 - rho) * (d * d)
        return p - lr * d, (s, a)

    slots = ("square_avg", "acc_delta")
    return rule_of("adadelta", learning_rate, slots, update, rho=rho, eps=eps, weight_decay=weight_decay)


def adam(
    learning_rate: LearningRate = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> UpdateRule:
    """Make the Adam rule: running means of the gradient and of its square, corrected for their zero start.

    | ``m <- beta1 m + (1 - beta1) g``
    | ``v <- beta2 v + (1 - beta2) g^2``
    | ``p <- p - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)``

    Parameters
    ----------
    learning_rate : float or callable of the step count
    betas : (float, float)
        Shares of the two means kept at each step, in [0, 1).
    eps : float
        Added to the denominator, at least 0.
    weight_decay : float
        Factor of the L2 term, at least 0; for decoupled decay use `adamw`.

    Notes
    -----
    State: ``exp_avg`` (m), ``exp_avg_sq`` (v). `torch.optim.Adam`. Kingma and Ba, "Adam: a method for stochastic
    optimization", ICLR 2015, arXiv:1412.6980.

    Examples
    --------
    >>> import numpy as np
    >>> rule = adam(learning_rate=0.5, eps=0.0)
    >>> rule.step(np.array([1.0, 1.0]), np.array([3.0, -4.0]), rule.init(np.ones(2)))[0].round(6)
    array([0.5, 1.5])
    """
    slots = ("exp_avg", "exp_avg_sq")
    return rule_of("adam", learning_rate, slots, _adam_update, betas=betas, eps=eps, weight_decay=weight_decay)


def adamw(
    learning_rate: LearningRate = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> UpdateRule:
    """Make the AdamW rule: Adam with weight decay outside of the running means.

    | ``p <- (1 - lr weight_decay) p``
    | then the step of `adam` without weight decay

    Parameters
    ----------
    learning_rate : float or callable of the step count
    betas : (float, float)
        Shares of the two means kept at each step, in [0, 1).
    eps : float
        Added to the denominator, at least 0.
    weight_decay : float
        At least 0; the parameters shrink by ``lr * weight_decay`` at each step.

    Notes
    -----
    State: ``exp_avg`` (m), ``exp_avg_sq`` (v). `torch.optim.AdamW`. Loshchilov and Hutter, "Decoupled weight decay
    regularization", ICLR 2019, arXiv:1711.05101.

    Examples
    --------
    >>> import numpy as np
    >>> rule = adamw(learning_rate=0.5, eps=0.0, weight_decay=0.5)
    >>> rule.step(np.array([1.0, 1.0]), np.array([3.0, -4.0]), rule.init(np.ones(2)))[0].round(6)
    array([0.25, 1.25])
    """
    settings: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    return rule_of("adamw", learning_rate, ("exp_avg", "exp_avg_sq"), _adam_update, decay=decoupled, **settings)


def _adam_update(
    p: Array, g: Array, slots: Slots, lr: float, t: int, betas: tuple[float, float], eps: float
) -> Updated:
    m, v = slots
    beta1, beta2 = betas
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g * g)
    denominator = v**0.5 / (1 - beta2**t) ** 0.5 + eps
    return p - lr / (1 - beta1**t) * m / denominator, (m, v)


def adamax(
    learning_rate: LearningRate = 2e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> UpdateRule:
    """Make the AdaMax rule: Adam with a decaying maximum in place of the mean square.

    | ``m <- beta1 m + (1 - beta1) g``
    | ``u <- max(beta2 u, |g| + eps)``
    | ``p <- p - lr / (1 - beta1^t) m / u``

    Parameters
    ----------
    learning_rate : float or callable of the step count
    betas : (float, float)
        Shares of the mean and of the maximum kept at each step, in [0, 1).
    eps : float
        Added to the gradient's absolute value, at least 0.
    weight_decay : float
        Factor of the L2 term, at least 0.

    Notes
    -----
    State: ``exp_avg`` (m), ``exp_inf`` (u). `torch.optim.Adamax`. Kingma and Ba, "Adam: a method for stochastic
    optimization", ICLR 2015, arXiv:1412.6980, section 7.1.

    Examples
    --------
    >>> import numpy as np
    >>> rule = adamax(learning_rate=0.5, eps=0.0)
    >>> rule.step(np.array([1.0, 1.0]), np.array([3.0, -4.0]), rule.init(np.ones(2)))[0].round(6)
    array([0.5, 1.5])
    """

    def update(p: Array, g: Array, slots: Slots, lr: float, t: int, betas: tuple[float, float], eps: float) -> Updated:
        m, u = slots
        beta1, beta2 = betas
        m = beta1 * m + (1 - beta1) * g
        u = _maximum(beta2 * u, abs(g) + eps)
        return p - lr / (1 - beta1**t) * m / u, (m, u)

    slots = ("exp_avg", "exp_inf")
    return rule_of("adamax", learning_rate, slots, update, betas=betas, eps=eps, weight_decay=weight_decay)


def _maximum(a: Array, b: Array) -> Array:
    """Return the elementwise maximum of two arrays of one dtype, by operators that every array library has.

    It is exact, and NaN propagates. Two infinite elements give NaN, but the step of such a gradient is NaN anyway.
    """
    return a * (a >= b) + b * (b > a)
