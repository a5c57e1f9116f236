"""Seed 001: Synkhronos' recipe of training: gradient, one all-reduce on a flat buffer, the same update on each rank.

Parameters and state are on every rank and are never sent, only gradients are. `synk.extensions.optax.train` does the
same by two ordinary calls, with gradients that pass through the program.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
from rules import Rule

import synk


class TrainFunction:
    """A function that takes one training step for each call and returns the loss; made by `make_train_function`.

    Attributes
    ----------
    function : synk.Function
        A step on the workers; it returns the loss, the number of ranks that took part, and the first of them.
    params, state : synk.Shared
    """

    def __init__(self, function: synk.Function, params: synk.Shared, state: synk.Shared) -> None:
        self.function, self.params, self.state = function, params, state

    def __call__(self, /, *inputs: Any, batch: Any = None) -> Any:
        loss, num_ranks, first_rank = self.function(*inputs, batch=batch)
        if num_ranks < synk.current().world_size:  # ranks without rows get the new values from one that has some
            for variable in (self.params, self.state):
                variable.value = variable[int(first_rank)]
        return loss


def make_train_function(loss_and_grad: Callable[..., Any], params: Any, rule: Rule) -> TrainFunction:
    """Make a function that takes one training step on the rows of a batch, on all ranks together.

    A step gives the same result as in one process on the whole batch, up to rounding, for every number of rows and
    ranks: means are weighted by rows.

    Parameters
    ----------
    loss_and_grad : callable
        ``loss_and_grad(params, *inputs) -> (loss, grads)``, both as means over the given rows.
    params : tree of NumPy arrays of one dtype
    rule : Rule
        Of ``rules``, or any other with ``init`` and ``step``.
    """
    shared_params, shared_state = synk.shared(params, name="params"), synk.shared(rule.init(params), name="state")

    def step(*inputs: Any) -> tuple[Any, int, int]:
        current = shared_params.value
        loss, grads = loss_and_grad(current, *inputs)
        leaves, spec = optree.tree_flatten(grads)
        flat = synk.comm.all_reduce(np.concatenate([np.ravel(leaf) for leaf in leaves]), op="avg")
        edges = itertools.pairwise(itertools.accumulate((np.size(leaf) for leaf in leaves), initial=0))
        means = [flat[start:stop].reshape(np.shape(leaf)) for (start, stop), leaf in zip(edges, leaves)]
        # Both new values exist before either is stored, so a step that fails leaves the rank as it was.
        new_params, new_state = rule.step(current, spec.unflatten(means), shared_state.value)
        shared_params.value, shared_state.value = new_params, new_state
        ranks = synk.comm.ranks
        return loss, len(ranks), ranks[0]

    step.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        list(inspect.signature(loss_and_grad).parameters.values())[1:]
    )
    function = synk.function(step, outputs=("avg", "first", "first"))
    return TrainFunction(function, shared_params, shared_state)
