"""Data-parallel training of any model: gradient, one all-reduce on a flat buffer, local update.

Owns the recipe and no arithmetic of its own: the rules are in ``updates.py``. Built on the public API only. One call:

    train(x, y) -> rows scattered -> on each rank: loss_and_grad(params, its rows)
                -> gradients averaged over all rows, in one flat buffer per dtype -> clipped
                -> the rule's step on this rank's replica -> loss averaged over all rows -> caller

Every rank holds the same parameters before and after, so no parameter ever travels.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import optree

import synk
from synk.extensions._gradients import clip_by_global_norm, flatten
from synk.extensions._rule import Tree, UpdateRule

__all__ = ["TrainFunction", "make_train_function"]

LossAndGrad = Callable[..., tuple[Any, Tree]]


@dataclass(frozen=True, eq=False)
class TrainFunction(synk.FunctionWrapper):
    """A training step that is called like a function; made by `make_train_function`.

    ``train(x, y)`` takes one step and returns the loss, averaged over all rows, or ``(loss, aux)``. Inputs are what
    ``loss_and_grad`` takes after the parameters, by position or by name; the options are those of a function's call:
    ``batch``, ``shard_batch``, ``timeout``. ``serial`` takes the step on one worker, and the others follow; ``submit``
    does not wait for the step, unless ranks without rows have to follow; ``verify`` compares the step on all workers
    with that on one, parameters and state included, and takes none.

    ``num_slices`` and ``output_subset``, which would change what one step is, raise TypeError.

    Attributes
    ----------
    runtime : synk.Runtime
        Where parameters and state live.
    function : synk.Function
        The step as it is distributed; returns what a call does, how many ranks took part and the first of them.
    params : synk.Shared
        The parameters: ``params.value`` reads them, assigning sets those of every rank.
    state : synk.Shared
        The update rule's state.
    """

    runtime: synk.Runtime
    function: synk.Function
    params: synk.Shared
    state: synk.Shared

    def finish(self, result: Any) -> Any:
        """Return the loss, with what comes beside it; ranks that have not seen the step get what it has made."""
        loss, num_ranks, first_rank = result
        if num_ranks < self.runtime.world_size:
            for variable in (self.params, self.state):
                variable.value = self.runtime.get_value(variable, rank=int(first_rank))
        return loss

    def __call__(self, /, *inputs: Any, **options: Any) -> Any:
        """Take one step and return the loss."""
        return super().__call__(*inputs, **_checked(options))

    def serial(self, /, *inputs: Any, **options: Any) -> Any:
        """Take one step on one worker and return the loss."""
        return super().serial(*inputs, **_checked(options))

    def submit(self, /, *inputs: Any, **options: Any) -> Any:
        """Send one step; ``result()`` of what is returned is the loss."""
        call = super().submit(*inputs, **_checked(options))
        if len(call.ranks) < self.runtime.world_size:  # whatever comes next finds the same parameters on all ranks
            with contextlib.suppress(Exception):  # result() raises it again
                call.result()
        return call

    def verify(self, /, *inputs: Any, **options: Any) -> Any:
        """Compare a step on all workers with one on a single worker; see `synk.Function.verify`."""
        report = super().verify(*inputs, **_checked(options))
        outputs = [replace(each, name=each.name.removeprefix("[0]")) for each in report.outputs if _is_seen(each.name)]
        return replace(report, outputs=tuple(outputs))


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call, if they leave one step what it is."""
    for option in ("num_slices", "output_subset"):
        if option in options:
            raise TypeError(
                f"cannot take a training step: got {option}={options[option]!r}, expected none, as one call is one "
                "step with one loss. Slices are set once: make_train_function(..., num_slices=k)."
            )
    return options


def _is_seen(output: str) -> bool:
    """Whether an output of the step is the loss or a variable; the others say which ranks took part."""
    return output not in ("[1]", "[2]")


def make_train_function(
    loss_and_grad: LossAndGrad,
    params: Tree,
    update_rule: UpdateRule,
    *,
    clip_norm: float | None = None,
    num_slices: int = 1,
    bcast_inputs: str | Sequence[str] = (),
    has_aux: bool = False,
    aux_outputs: Any = "avg",
    framework: str | None = None,
    name: str = "train",
    runtime: synk.Runtime | None = None,
) -> TrainFunction:
    """Make a function that takes one training step on the rows of a batch, on all ranks together.

    A step gives what it would give in one process on the whole batch, for every number of rows, ranks and slices, up
    to rounding: means are weighted by rows.

    Parameters
    ----------
    loss_and_grad : callable
        ``loss_and_grad(params, *inputs) -> (loss, grads)``: both as means over the rows given; ``grads`` nested like
        ``params``. The loss may be any nesting of floating-point numbers. ``jax.value_and_grad(loss)`` is one.
    params : tree of arrays
        The initial parameters, any nesting of dicts, lists and tuples of floating-point arrays.
    update_rule : UpdateRule
        For instance ``adam(1e-3)``; ``from_optax(tx)`` for an optimizer of optax; or any object with ``init`` and
        ``step``.
    clip_norm : float, optional
        Largest norm of the averaged gradient; see `clip_by_global_norm`.
    num_slices : int
        Each rank computes the gradient on this many slices of its rows, one after the other: the memory of a step
        falls by as much.
    bcast_inputs : str or sequence of str
        Names of the inputs that go whole to every rank; the others are scattered by rows.
    has_aux : bool
        ``loss_and_grad`` returns ``((loss, aux), grads)``, as ``jax.value_and_grad(loss, has_aux=True)`` does, and a
        call ``(loss, aux)``.
    aux_outputs : op, or nesting of ops
        How the ranks' ``aux`` are combined; as ``outputs`` of `synk.function`.
    framework : str, optional
        ``"torch"`` or ``"jax"``: parameters and inputs arrive as that library's arrays. Where not given, what the
        update rule names as its own: JAX for one of optax.
    name : str
        The function's name in messages.
    runtime : synk.Runtime, optional
        Where to train; the current one where not given.

    Returns
    -------
    TrainFunction

    Raises
    ------
    TypeError, ValueError
        If an argument is not what is described here; from the call, if the gradients do not fit the parameters.
    NotForkedError
        If there is no current runtime.
    """
    if not isinstance(num_slices, int) or num_slices < 1:
        raise ValueError(
            f"cannot make a training function: got num_slices={num_slices!r}, expected an integer of at least 1. "
            "1 takes all rows of a rank at once."
        )
    if clip_norm is not None:
        clip_by_global_norm((), clip_norm)  # checks the number here, in the master
    if has_aux and num_slices > 1 and aux_outputs != "avg":
        raise ValueError(
            f"cannot make a training function: got aux_outputs={aux_outputs!r} with num_slices={num_slices}, expected "
            "'avg', as what comes from the slices of a rank is averaged. Use num_slices=1."
        )
    framework = _framework_of(update_rule, framework)
    signature = _inputs_signature(loss_and_grad)
    whole = {bcast_inputs} if isinstance(bcast_inputs, str) else set(bcast_inputs)
    gradient = loss_and_grad if num_slices == 1 else _sliced(loss_and_grad, signature, whole, num_slices)
    runtime = synk.current() if runtime is None else runtime
    shared_params = runtime.shared(params, name=f"{name}.params")
    shared_state = runtime.shared(update_rule.init(params), name=f"{name}.state")

    def step(*args: Any, **kwargs: Any) -> tuple[Any, int, int]:
        current = shared_params.value
        loss, grads = gradient(current, *args, **kwargs)
        if has_aux and not (isinstance(loss, tuple) and len(loss) == 2):
            raise TypeError(
                f"cannot take a step of {name!r}: got {type(loss).__name__} beside the gradients, expected (loss, "
                "aux), because of has_aux=True. For JAX use value_and_grad(loss, has_aux=True)."
            )
        flats, unflatten = flatten(grads)
        flats = tuple(synk.comm.all_reduce(flat, op="avg") for flat in flats)
        if clip_norm is not None:
            flats, _ = clip_by_global_norm(flats, clip_norm)
        # Both new values exist before either is stored: a step that fails leaves the rank as it was.
        new_params, new_state = update_rule.step(current, unflatten(flats), shared_state.value)
        shared_params.value, shared_state.value = new_params, new_state
        ranks = synk.comm.ranks
        return loss, len(ranks), ranks[0]

    step.__name__ = step.__qualname__ = name
    step.__signature__ = signature  # type: ignore[attr-defined]
    outputs = (("avg", aux_outputs) if has_aux else "avg", "first", "first")
    function = runtime.function(step, bcast_inputs=bcast_inputs, outputs=outputs, framework=framework, name=name)
    return TrainFunction(runtime, function, shared_params, shared_state)


def _framework_of(update_rule: Any, framework: str | None) -> str | None:
    """Return the library whose arrays a step works on."""
    own: str | None = getattr(update_rule, "framework", None)
    if None not in (own, framework) and own != framework:
        raise ValueError(
            f"cannot make a training function: got framework={framework!r} with {update_rule!r}, expected {own!r}, "
            "whose arrays the rule works on."
        )
    return framework or own


def _inputs_signature(loss_and_grad: LossAndGrad) -> inspect.Signature:
    """Return the signature of ``loss_and_grad`` without its first parameter, bare of annotations."""
    parameters = list(inspect.signature(loss_and_grad).parameters.values())
    if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise TypeError(
            f"cannot make a training function: got {loss_and_grad!r} with no positional parameter, expected "
            "loss_and_grad(params, *inputs). Add the parameters as its first argument."
        )
    inputs = parameters if parameters[0].kind is inspect.Parameter.VAR_POSITIONAL else parameters[1:]
    return inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in inputs])


def _sliced(
    loss_and_grad: LossAndGrad, signature: inspect.Signature, whole: Collection[str], num_slices: int
) -> LossAndGrad:
    """Return ``loss_and_grad`` as the mean over slices of this rank's rows, weighted by their rows."""

    def gradient(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        given = signature.bind(*args, **kwargs)
        arguments = given.arguments
        rows = synk.comm.rows
        num_parts = min(num_slices, rows)
        edges = [rows * k // num_parts for k in range(num_parts + 1)]
        total: Any = None
        for low, high in itertools.pairwise(edges):
            given.arguments = {
                name: value if name in whole else _rows_of(value, slice(low, high)) for name, value in arguments.items()
            }
            mean: Any = loss_and_grad(params, *given.args, **given.kwargs)
            share = optree.tree_map(functools.partial(operator.mul, (high - low) / rows), mean)
            total = share if total is None else optree.tree_map(operator.add, total, share)
        return total

    return gradient


def _rows_of(value: Any, rows: slice) -> Any:
    """Return some of the rows of an input; of a nested one those of its arrays, as calls divide them."""
    make: Any = type(value)
    if hasattr(value, "shape"):
        return value[rows] if len(value.shape) else value
    if isinstance(value, Mapping):
        return make({key: _rows_of(part, rows) for key, part in value.items()})
    if isinstance(value, tuple):
        parts = [_rows_of(part, rows) for part in value]
        return make(*parts) if hasattr(value, "_fields") else make(parts)
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.init]
        return make(**{name: _rows_of(getattr(value, name), rows) for name in names})
    return value
