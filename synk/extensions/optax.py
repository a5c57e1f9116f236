"""Training by optax, or by any other pair of functions ``init`` and ``step``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import synk


class Train:
    """A function that takes one training step on the rows of a batch, on all ranks together; made by :func:`train`.

    A call takes the arguments of ``loss_and_grad`` without the parameters, and the options of a
    :class:`synk.Function`. It returns the loss over all rows.

    Attributes
    ----------
    gradient, step : synk.Function
        The two calls of a step: loss and gradients over all rows, and the update on each rank.
    shared : synk.Shared
        A dict with ``"params"`` and ``"state"``, as ``shared.value``; assigning it sets those of every rank.
    """

    def __init__(self, gradient: synk.Function, step: synk.Function, shared: synk.Shared) -> None:
        self.gradient, self.step, self.shared = gradient, step, shared

    def __call__(self, /, *inputs: Any, **options: Any) -> Any:
        loss, grads = self.gradient(*inputs, **options)
        self.step(grads)
        return loss


def train(
    loss_and_grad: Callable[..., Any],
    params: Any,
    rule: Any,
    *,
    bcast_inputs: str | Sequence[str] = (),
    framework: str | None = None,
) -> Train:
    """Make a function that takes one training step on the rows of a batch, on all ranks together.

    A step gives the same result as in one process on the whole batch, up to rounding, for every number of rows, ranks
    and slices: loss and gradients are outputs with the op ``"avg"``, and the rule gets the gradients over all rows. So
    clipping by the norm, and every other part of a chain, gets what it would get in one process.

    Parameters
    ----------
    loss_and_grad : callable
        ``loss_and_grad(params, *inputs) -> (loss, grads)``, both as means over the given rows, for instance
        ``jax.jit(jax.value_and_grad(loss))``. The loss may be any nesting of floating-point numbers.
    params : tree of arrays
    rule : optax.GradientTransformation, or object with ``init`` and ``step``
        ``init(params)`` returns the state, and ``step(params, grads, state)`` new parameters and a new state.
    bcast_inputs : str or sequence of str
        Names of the inputs that go whole to every rank.
    framework : str, optional
        As for :func:`synk.function`. For a rule of optax it is ``"jax"``.

    Examples
    --------
    >>> import numpy as np, synk
    >>> from synk.extensions.optax import train
    >>> class Descent:
    ...     def init(self, params):
    ...         return {}
    ...     def step(self, params, grads, state):
    ...         return params - 0.25 * grads, state
    >>> def loss_and_grad(w, x):
    ...     return ((x - w) ** 2).mean(), 2 * (w - x.mean())
    >>> with synk.fork(2, backend="numpy"):
    ...     fit = train(loss_and_grad, np.array(0.0), Descent())
    ...     losses = [float(fit(np.arange(5.0))) for _ in range(9)]
    ...     round(float(fit.shared.value["params"]), 2)
    2.0
    """
    step = getattr(rule, "step", None)
    if step is None:
        step, params, state, framework = *_of_optax(rule, params), "jax"
    else:
        state = rule.init(params)
    shared = synk.shared({"params": params, "state": state}, name="train")

    def gradient(*inputs: Any, **named: Any) -> Any:
        return loss_and_grad(shared.value["params"], *inputs, **named)

    def update(grads: Any) -> None:
        new_params, new_state = step(shared.value["params"], grads, shared.value["state"])
        shared.value = {"params": new_params, "state": new_state}

    parameters = list(inspect.signature(loss_and_grad).parameters.values())[1:]
    gradient.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(annotation=each.empty) for each in parameters]
    )
    return Train(
        synk.function(gradient, bcast_inputs=bcast_inputs, outputs="avg", framework=framework),
        synk.function(update, bcast_inputs="grads", outputs="first", framework=framework),
        shared,
    )


def _of_optax(transformation: Any, params: Any) -> tuple[Callable[..., Any], Any, Any]:
    """Return the step of an optimizer of optax, and its parameters and state as NumPy arrays of JAX's dtypes."""
    import jax
    import numpy as np
    import optax

    def step(params: Any, grads: Any, state: Any) -> Any:
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree_util.tree_map(jax.numpy.asarray, params)
    state = transformation.init(params)
    return jax.jit(step), *(jax.tree_util.tree_map(np.array, tree) for tree in (params, state))
