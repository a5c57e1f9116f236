"""The common part of all update rules: the walk over nested arrays, the step counter, the learning rate, the checks.

A rule adds the arithmetic for one array (``updates.py``). This file knows no array library, no process and no
communication.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import optree

Array: TypeAlias = Any
Tree: TypeAlias = Any
LearningRate: TypeAlias = float | Callable[[int], float]
Slots: TypeAlias = Sequence[Array]
Updated: TypeAlias = tuple[Array, tuple[Array, ...]]
LeafUpdate: TypeAlias = Callable[[Array, Array, Slots, float, int], Updated]
Decay: TypeAlias = Callable[[Array, Array, float, float], tuple[Array, Array]]


@dataclass(frozen=True, eq=False, repr=False)
class UpdateRule:
    """A rule that turns parameters and gradients into new parameters: two pure functions, `init` and `step`.

    Attributes
    ----------
    name : str
    learning_rate : float or callable
        A callable (a schedule) gets the number of steps done so far, at first 0, and returns the learning rate.
    settings : mapping
        The other hyper-parameters.
    slots : tuple of str
        Names of the state entries. Each entry is an array like the parameter, and starts at zero.
    update : callable
        ``update(param, grad, slot_arrays, learning_rate, t) -> (param, slot_arrays)`` for one array.

    Examples
    --------
    >>> import numpy as np
    >>> from synk.extensions.updates import momentum
    >>> rule = momentum(learning_rate=0.1)
    >>> params = {"w": np.array([1.0, 2.0]), "b": np.array([0.5])}
    >>> state = rule.init(params)
    >>> for _ in range(2):
    ...     grads = {"w": 2 * params["w"], "b": np.array([1.0])}
    ...     params, state = rule.step(params, grads, state)
    >>> params["w"], params["b"], state["step"]
    (array([0.46, 0.92]), array([0.21]), 2)
    """

    name: str
    learning_rate: LearningRate
    settings: Mapping[str, Any]
    slots: tuple[str, ...]
    update: LeafUpdate

    def __repr__(self) -> str:
        settings = {"learning_rate": self.learning_rate, **self.settings}
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"

    def init(self, params: Tree) -> dict[str, Tree]:
        """Return the state before the first step.

        Parameters
        ----------
        params : tree of arrays
            Any nesting of dicts, lists, tuples and named tuples. The dtypes must be real floating-point dtypes.

        Returns
        -------
        dict
            ``"step"``, the number of steps done: 0. For each slot, a tree of zeros like ``params``.

        Raises
        ------
        TypeError
            If a parameter is not an array of a floating-point dtype.
        """
        leaves, spec = floating_leaves(self.name, params)
        return {"step": 0, **{slot: spec.unflatten([_constant(leaf) * 0 for leaf in leaves]) for slot in self.slots}}

    def step(self, params: Tree, grads: Tree, state: Mapping[str, Tree]) -> tuple[Tree, dict[str, Tree]]:
        """Return the parameters and the state after one step. The arguments are not changed.

        Parameters
        ----------
        params : tree of arrays
        grads : tree of arrays
            Gradients with the structure and shapes of ``params``. A dtype may differ if the library promotes it to the
            parameter's dtype (bfloat16 gradients of float32 parameters).
        state : mapping
            The state from `init` or from the last step. The counter may also be a 0-d integer array.

        Returns
        -------
        params, state
            New arrays of the same structure, shapes and dtypes, outside of any automatic differentiation.

        Raises
        ------
        ValueError
            If structures or shapes disagree, the state is another rule's, or a schedule returns no valid rate.
        TypeError
            If a parameter would change its dtype.
        """
        leaves, spec = optree.tree_flatten(params)
        grad_leaves = leaves_like(self.name, spec, leaves, grads, "grads")
        if set(state) != {"step", *self.slots}:
            raise ValueError(
                f"cannot step {self.name}: got a state with entries {sorted(state)}, expected "
                f"{sorted(['step', *self.slots])}. Make the state by this rule's init(params)."
            )
        columns = [leaves_like(self.name, spec, leaves, state[slot], f"state[{slot!r}]") for slot in self.slots]
        count = _concrete(operator.index, state["step"])
        rate = self._rate_at(count)
        new_leaves, new_columns = [], [[] for _ in self.slots]  # type: list[Array], list[list[Array]]
        for index, (param, grad, *slots) in enumerate(zip(leaves, grad_leaves, *columns, strict=True)):
            new, new_slots = self.update(_constant(param), _constant(grad), slots, rate, count + 1)
            if new.dtype != param.dtype:
                raise TypeError(
                    f"cannot step {self.name}: got {spec.accessors()[index].codify('grads')} of dtype {grad.dtype} for "
                    f"a parameter of dtype {param.dtype}, expected a dtype that leaves the parameter's as it is. "
                    "Compute in the parameter's dtype, or cast the gradient."
                )
            new_leaves.append(new)
            for column, slot in zip(new_columns, new_slots, strict=True):
                column.append(slot)
        trees = {slot: spec.unflatten(column) for slot, column in zip(self.slots, new_columns, strict=True)}
        return spec.unflatten(new_leaves), {"step": state["step"] + 1, **trees}

    def _rate_at(self, count: int) -> float:
        """Return the learning rate of the step after ``count`` steps."""
        if not callable(self.learning_rate):
            return self.learning_rate
        rate = _concrete(float, self.learning_rate(count))
        if isinstance(rate, float) and not 0 <= rate < math.inf:
            raise ValueError(
                f"cannot step {self.name}: got a learning rate of {rate} from the schedule at step {count}, expected a "
                "finite number of at least 0. Correct the schedule; it gets the number of steps done so far."
            )
        return rate


def floating_leaves(rule: str, params: Tree) -> tuple[list[Array], optree.PyTreeSpec]:
    """Return the leaves of ``params`` and their structure.

    Raises
    ------
    TypeError
        If a leaf is not an array of a floating-point dtype.
    """
    leaves, spec = optree.tree_flatten(params)
    for accessor, leaf in zip(spec.accessors(), leaves, strict=True):
        if "float" not in str(getattr(leaf, "dtype", "")):
            raise TypeError(
                f"cannot initialise {rule}: got {accessor.codify('params')} of {kind_of(leaf)}, expected an array of a "
                "floating-point dtype. Convert it, for instance by numpy.asarray(value, 'float32')."
            )
    return leaves, spec


def leaves_like(rule: str, spec: optree.PyTreeSpec, leaves: list[Array], tree: Tree, name: str) -> list[Array]:
    """Return the leaves of ``tree``, which must have the structure and shapes of the parameters.

    Raises
    ------
    ValueError
        If the structure or a shape differs.
    """
    found, found_spec = optree.tree_flatten(tree)
    if found_spec != spec:
        raise ValueError(
            f"cannot step {rule}: got {name} of structure {found_spec}, expected that of the parameters, {spec}. Pass "
            "one array for each parameter, nested in the same way."
        )
    # Without this check a wrong shape would be broadcast, and the parameter would silently get another shape.
    for index, (leaf, param) in enumerate(zip(found, leaves, strict=True)):
        if getattr(leaf, "shape", ()) != param.shape:
            raise ValueError(
                f"cannot step {rule}: got {spec.accessors()[index].codify(name)} of shape "
                f"{tuple(getattr(leaf, 'shape', ()))}, expected the parameter's, {tuple(param.shape)}. Reshape or sum "
                "it to that shape."
            )
    return found


def l2(p: Array, g: Array, lr: float, weight_decay: float) -> tuple[Array, Array]:
    """Return a parameter unchanged, and its gradient with the L2 term."""
    return p, g + weight_decay * p if weight_decay else g


def decoupled(p: Array, g: Array, lr: float, weight_decay: float) -> tuple[Array, Array]:
    """Return a parameter after its own decay, and its gradient unchanged."""
    return p * (1 - lr * weight_decay), g


def rule_of(
    name: str,
    learning_rate: Any,
    slots: tuple[str, ...],
    update: Callable[..., Updated],
    *,
    weight_decay: Any,
    decay: Decay = l2,
    **settings: Any,
) -> UpdateRule:
    """Make a rule from the arithmetic of one step, after a check of its settings.

    Parameters
    ----------
    learning_rate : float or callable of the step count
    update : callable
        ``update(param, grad, slot_arrays, learning_rate, t, **settings)`` for one array, without weight decay.
    decay : callable
        ``decay(param, grad, learning_rate, weight_decay)`` returns the parameter and the gradient for the step.
    **settings : number or pair of numbers
        ``eps`` is at least 0. All others are shares in [0, 1).

    Raises
    ------
    TypeError, ValueError
        If a setting is not a number, or out of its range.
    """
    rate = learning_rate if callable(learning_rate) else number(name, "learning_rate", learning_rate)
    valid = {key: _setting_of(name, key, value) for key, value in settings.items()}
    factor = number(name, "weight_decay", weight_decay)

    def decayed(p: Array, g: Array, slots: Slots, lr: float, t: int) -> Updated:
        p, g = decay(p, g, lr, factor)
        return update(p, g, slots, lr, t, **valid)

    return UpdateRule(name, rate, {**valid, "weight_decay": factor}, slots, decayed)


def _setting_of(rule: str, name: str, value: Any) -> Any:
    if name == "betas":
        return _betas_of(rule, value)
    return number(rule, name, value, below=math.inf if name == "eps" else 1)


def _betas_of(rule: str, betas: Any) -> tuple[float, float]:
    """Return two valid decay rates."""
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(
            f"cannot make {rule}: got betas={betas!r}, expected two numbers in [0, 1). The default is (0.9, 0.999)."
        )
    return number(rule, "betas[0]", betas[0], below=1), number(rule, "betas[1]", betas[1], below=1)


def number(rule: str, name: str, value: Any, *, below: float = math.inf) -> float:
    """Return a valid hyper-parameter as a Python float, which adopts the dtype of the arrays that it meets.

    Raises
    ------
    TypeError, ValueError
        If ``value`` is not a real number, or not in ``[0, below)``.
    """
    expected = "a finite number of at least 0" if below == math.inf else f"a number in [0, {below})"
    message = f"cannot make {rule}: got {name}={value!r}, expected {expected}. help({rule}) explains it."
    if not is_real(value):
        raise TypeError(message)
    if not 0 <= value < below:
        raise ValueError(message)
    return float(value)


def is_real(value: Any) -> bool:
    """Whether ``value`` is a real number of Python or NumPy."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def kind_of(leaf: Any) -> str:
    """Return the dtype or type of a leaf, in words for an error."""
    return f"dtype {leaf.dtype}" if hasattr(leaf, "dtype") else f"type {type(leaf).__name__}"


def _constant(array: Array) -> Array:
    """Return a torch tensor outside of the autograd graph, which would otherwise grow with every step."""
    return array.detach() if hasattr(array, "detach") else array


def _concrete(convert: Callable[[Any], Any], value: Any) -> Any:
    """Return ``convert(value)``, a Python number, which never widens float32. Tracers of jax.jit are unchanged."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.core.Tracer):
        return value
    return convert(value.item() if hasattr(value, "item") else value)  # CuPy's arrays cannot be converted directly
