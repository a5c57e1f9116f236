"""Optimizers of optax as update rules.

It imports JAX and optax when a rule is made, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from synk.extensions._rule import Array, Tree, floating_leaves, leaves_like

__all__ = ["from_optax"]

_NAME = "the optax rule"


def from_optax(transformation: Any) -> OptaxRule:
    """Make an update rule from an optax optimizer, for `make_train_function`.

    A step is ``updates, state = tx.update(grads, state, params)`` and ``optax.apply_updates(params, updates)``,
    compiled by ``jax.jit``. ``grads`` are the gradients over all rows. So ``optax.clip_by_global_norm``, and every
    other part of a chain, gets the gradients that it would get in one process on the whole batch.

    Parameters
    ----------
    transformation : optax.GradientTransformation
        For instance ``optax.adam(1e-3)``, or a chain. Its update may need gradients, state and parameters. ``init``
        refuses a transformation that needs the loss as well (a line search, ``reduce_on_plateau``).

    Returns
    -------
    OptaxRule
        With ``init(params)`` and ``step(params, grads, state)``. The state is a dict with ``"step"``, the number of
        steps done, and ``"optax"``, optax's own state.

    Raises
    ------
    ImportError
        If JAX or optax is not installed.
    TypeError
        If ``transformation`` is not a gradient transformation.

    Notes
    -----
    `make_train_function` then passes everything as JAX arrays, as with ``framework="jax"``. The workers compute with 64
    bits if the master's JAX does (``jax_enable_x64``). Source: https://optax.readthedocs.io.

    Examples
    --------
    >>> import jax, optax                                                      # doctest: +SKIP
    >>> def loss(params, x, y):                                                # doctest: +SKIP
    ...     return ((x @ params["w"] - y) ** 2).mean()
    >>> train = make_train_function(                                           # doctest: +SKIP
    ...     jax.value_and_grad(loss), {"w": jax.numpy.zeros(3)}, from_optax(optax.adam(1e-3)))
    """
    if not callable(getattr(transformation, "init", None)) or not callable(getattr(transformation, "update", None)):
        raise TypeError(
            f"cannot make an update rule: got {type(transformation).__name__}, expected an optimizer of optax, with "
            "init and update. Pass for instance optax.adam(1e-3)."
        )
    return OptaxRule(transformation)


class OptaxRule:
    """An optimizer of optax as an update rule; made by `from_optax`.

    Attributes
    ----------
    framework : str
        The library whose arrays a step takes and returns.
    """

    framework = "jax"

    def __init__(self, transformation: Any) -> None:
        import jax
        import optax

        def advance(params: Tree, grads: Tree, state: Any) -> tuple[Tree, Any]:
            updates, state = transformation.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self._transformation = transformation
        self._advance: Callable[..., Any] = jax.jit(advance)

    def __reduce__(self) -> Any:
        return OptaxRule, (self._transformation,)

    def __repr__(self) -> str:
        return f"from_optax({self._transformation!r})"

    def init(self, params: Tree) -> dict[str, Any]:
        """Return the state before the first step, with NumPy arrays: ``"step"``, and optax's own state as ``"optax"``.

        Parameters
        ----------
        params : tree of arrays
            Any nesting of dicts, lists, tuples and named tuples. The dtypes must be real floating-point dtypes.

        Raises
        ------
        TypeError
            If a parameter is not an array of a floating-point dtype, or has more bits than JAX computes with; if the
            update needs more than gradients, state and parameters; if the state holds anything but plain arrays.
        """
        import jax

        leaves, spec = floating_leaves(_NAME, params)
        for accessor, leaf in zip(spec.accessors(), leaves, strict=True):
            if str(leaf.dtype) == "float64" and not _has_64_bits(jax.config):
                raise TypeError(
                    f"cannot initialise {_NAME}: got {accessor.codify('params')} of dtype float64, expected float32 or "
                    "less, with which JAX computes unless told otherwise. Cast it, or call "
                    "jax.config.update('jax_enable_x64', True) first."
                )
        state = self._transformation.init(params)
        try:
            jax.eval_shape(self._advance, params, params, state)
        except TypeError as error:
            raise TypeError(
                f"cannot initialise {_NAME}: its update cannot do with gradients, state and parameters: {error}. Use a "
                "transformation that needs no more, or write an update rule of your own with init and step."
            ) from error
        return {"step": np.zeros((), np.int32), "optax": jax.tree_util.tree_map(_as_numpy, state)}

    def step(self, params: Tree, grads: Tree, state: Mapping[str, Any]) -> tuple[Tree, dict[str, Any]]:
        """Return the parameters and the state after one step, as new JAX arrays.

        Parameters
        ----------
        params : tree of arrays
        grads : tree of arrays
            Gradients with the structure and shapes of ``params``.
        state : mapping
            The state from `init` or from the last step.

        Raises
        ------
        ValueError
            If structures or shapes disagree.
        """
        leaves, spec = floating_leaves(_NAME, params)
        leaves_like(_NAME, spec, leaves, grads, "grads")
        params, own = self._advance(params, grads, state["optax"])
        return params, {"step": state["step"] + 1, "optax": own}


def _as_numpy(leaf: Array) -> np.ndarray:
    try:
        return np.array(leaf)
    except TypeError as error:
        raise TypeError(
            f"cannot initialise {_NAME}: its state holds a value of {getattr(leaf, 'dtype', type(leaf).__name__)}, "
            "expected plain arrays. Where it is a key, make it by jax.random.PRNGKey(seed)."
        ) from error


def _has_64_bits(config: Any) -> bool:
    """Whether JAX computes with 64 bits. JAX's own type stubs do not know this setting."""
    return bool(config.jax_enable_x64)
