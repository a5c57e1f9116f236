"""Data-parallel training of any model: gradient, one all-reduce on a flat buffer, local update.

This file has the recipe and no arithmetic of its own: the rules are in ``updates.py``. The path of one call:

    train(x, y) -> rows scattered -> on each rank: loss_and_grad(params, its rows)
                -> gradients averaged over all rows, in one flat buffer per dtype -> clipped
                -> the rule's step on this rank's replica -> loss averaged over all rows -> caller

Every rank holds the same parameters before and after, so parameters never travel.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import optree

import synk
from synk._pure import files, plain_values
from synk._pure.nested import build, take_apart
from synk.extensions._gradients import clip_by_global_norm, flatten
from synk.extensions._rule import Tree, UpdateRule
from synk.extensions._wrapper import FunctionWrapper

__all__ = ["TrainFunction", "make_train_function"]

LossAndGrad = Callable[..., tuple[Any, Tree]]


@dataclass(frozen=True, eq=False)
class TrainFunction(FunctionWrapper):
    """A training step that is called like a function; made by `make_train_function`.

    ``train(x, y)`` takes one step and returns the loss, averaged over all rows, or ``(loss, aux)``. The inputs are
    those of ``loss_and_grad`` after the parameters, by position or by name. The options are those of a function's call:
    ``batch``, ``timeout``. ``serial`` takes the step on one worker, and the other ranks then get its
    result. ``submit`` does not wait for the step, unless ranks without rows need its result. ``verify`` compares the
    step on all workers with that on one, including parameters and state, and takes no step.

    ``num_slices`` and ``output_subset`` would change the meaning of a step, and raise TypeError.

    Attributes
    ----------
    runtime : synk.Runtime
        The runtime that holds parameters and state.
    function : synk.Function
        The step on the workers. It returns the loss, the number of ranks that took part, and the first of them.
    params : synk.Shared
        The parameters: ``params.value`` reads them, and assigning it sets those of every rank.
    state : synk.Shared
        The update rule's state.
    """

    runtime: synk.Runtime
    function: synk.Function
    params: synk.Shared
    state: synk.Shared

    def finish(self, result: Any) -> Any:
        """Return the loss, and aux if there is one. Ranks that took no part get the new parameters and state."""
        loss, num_ranks, first_rank = result
        if num_ranks < self.runtime.world_size:
            for variable in (self.params, self.state):
                variable.value = variable[int(first_rank)]
        return loss

    def __call__(self, /, *inputs: Any, **options: Any) -> Any:
        """Take one step and return the loss."""
        return super().__call__(*inputs, **_checked(options))

    def serial(self, /, *inputs: Any, **options: Any) -> Any:
        """Take one step on one worker and return the loss."""
        return super().serial(*inputs, **_checked(options))

    def repeat(self, num_repeats: int, /, *inputs: Any, **options: Any) -> Any:
        """Take several steps on the same rows with one message, and return the loss of the last."""
        return super().repeat(num_repeats, *inputs, **_checked(options))

    def submit(self, /, *inputs: Any, **options: Any) -> Any:
        """Submit one step. ``result()`` of the returned future is the loss."""
        call = super().submit(*inputs, **_checked(options))
        # Ranks without rows get the new parameters from ``finish``, in ``result()``. It must come before the next
        # operation, which must find the same parameters on all ranks.
        if len(call.ranks) < self.runtime.world_size:
            with contextlib.suppress(Exception):  # result() raises it again
                call.result()
        return call

    def save(self, path: files.Path, *, wait: bool = True) -> Future[None] | None:
        """Write parameters and state to a file, as a whole or not at all. :meth:`load` goes on from it bit for bit.

        Parameters
        ----------
        path : path
            A program that is killed at any instruction leaves either the whole old file or the whole new one.
        wait : bool
            True returns when the file is on the disk. False returns a future as soon as parameters and state were
            copied; its ``result()`` waits for the file.

        Returns
        -------
        concurrent.futures.Future or None

        Raises
        ------
        OSError
            If the file cannot be written. An older file is not changed.
        """
        return files.save(path, self.state_dict, plain_values.write, wait=wait)

    def load(self, path: files.Path) -> None:
        """Bring all ranks to the parameters and the state that :meth:`save` wrote. Runs no code from the file.

        Raises
        ------
        ValueError
            If the file was not written by :meth:`save`, is damaged, or has parameters or a state of another structure.
        OSError
            If the file cannot be read.
        """
        self.load_state_dict(plain_values.read(path))

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"params": ..., "state": ...}``, each a dict with copies of its arrays and numbers by path."""
        return {name: _by_path(_tree(variable))[0] for name, variable in self._variables()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring all ranks to parameters and a state that :meth:`state_dict` returned.

        Raises
        ------
        ValueError
            If the structure, a shape or a dtype differs from that of the function.
        """
        names, variables = zip(*self._variables())
        if not isinstance(state, Mapping) or set(state) != set(names):
            got = f"the keys {list(state)}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
            raise ValueError(
                f"cannot load the state of {self.function.__name__!r}: got {got}, expected a dict with the keys "
                f"{list(names)}, as state_dict() returns it."
            )
        values = [
            _filled(_tree(variable), state[name], f"{self.function.__name__}.{name}")
            for name, variable in self._variables()
        ]
        synk.broadcast(variables, values)

    def _variables(self) -> list[tuple[str, synk.Shared]]:
        return [("params", self.params), ("state", self.state)]

    def verify(self, /, *inputs: Any, **options: Any) -> Any:
        """Compare a step on all workers with a step on one; see `synk.Function.verify`."""
        report = super().verify(*inputs, **_checked(options))
        outputs = [replace(each, name=each.name.removeprefix("[0]")) for each in report.outputs if _is_seen(each.name)]
        return replace(report, outputs=tuple(outputs))


def _tree(variable: synk.Shared) -> Tree:
    return copy.deepcopy(variable.value)  # of ordinary dicts and lists, which optree takes apart


def _by_path(tree: Tree) -> tuple[dict[str, Any], Any]:
    """Return the leaves of a tree by their paths, and its structure."""
    paths, leaves, spec = optree.tree_flatten_with_path(tree)
    names = ["".join(f"[{part!r}]" for part in path) for path in paths]
    return dict(zip(names, leaves)), spec


def _filled(tree: Tree, saved: Mapping[str, Any], what: str) -> Tree:
    """Return a tree like ``tree`` with the saved leaves."""
    own, spec = _by_path(tree)
    for name in {**own, **saved}:
        looks = [_look_of(leaves[name]) if name in leaves else "nothing" for leaves in (saved, own)]
        if looks[0] != looks[1]:
            raise ValueError(
                f"cannot load {what}{name}: got {looks[0]}, expected {looks[1]}. Make the function with the same "
                "parameters and the same rule as the one whose state it is."
            )
    return optree.tree_unflatten(spec, [saved[name] for name in own])


def _look_of(leaf: Any) -> str:
    return f"{leaf.dtype} of shape {leaf.shape}" if hasattr(leaf, "shape") else type(leaf).__name__


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call. Raise TypeError for options that would change the meaning of a step."""
    for option in ("num_slices", "output_subset"):
        if option in options:
            raise TypeError(
                f"cannot take a training step: got {option}={options[option]!r}, expected none, as one call is one "
                "step with one loss. Slices are set once: make_train_function(..., num_slices=k)."
            )
    return options


def _is_seen(output: str) -> bool:
    """Whether an output of the step is the loss or a variable. The other outputs name the ranks that took part."""
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

    A step gives the same result as in one process on the whole batch, up to rounding, for every number of rows, ranks
    and slices: means are weighted by rows.

    Parameters
    ----------
    loss_and_grad : callable
        ``loss_and_grad(params, *inputs) -> (loss, grads)``, both as means over the given rows. ``grads`` has the
        nesting and shapes of ``params``. The loss may be any nesting of floating-point numbers.
        ``jax.value_and_grad(loss)`` is such a callable.
    params : tree of arrays
        The initial parameters: any nesting of dicts, lists and tuples of floating-point arrays.
    update_rule : UpdateRule
        For instance ``adam(1e-3)``; ``from_optax(tx)`` for an optax optimizer; or any object with ``init`` and
        ``step``.
    clip_norm : float, optional
        The largest norm of the averaged gradient, above 0; see `clip_by_global_norm`.
    num_slices : int
        Each rank computes the gradient on this many slices of its rows, one after the other. The memory of a step falls
        by this factor.
    bcast_inputs : str or sequence of str
        Names of the inputs that go whole to every rank. The others are scattered by rows.
    has_aux : bool
        Whether ``loss_and_grad`` returns ``((loss, aux), grads)``, as ``jax.value_and_grad(loss, has_aux=True)`` does.
        A call then returns ``(loss, aux)``.
    aux_outputs : op, or nesting of ops
        How the ranks' ``aux`` are combined: like ``outputs`` of `synk.function`.
    framework : str, optional
        ``"torch"`` or ``"jax"``: parameters and inputs arrive as that library's arrays. The default is the update
        rule's own: JAX for a rule of optax.
    name : str
        The function's name in messages.
    runtime : synk.Runtime, optional
        The runtime in which to train. By default the current one.

    Returns
    -------
    TrainFunction

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described here. The call raises them if the gradients do not fit the parameters.
    NotForkedError
        If there is no current runtime.

    Notes
    -----
    On each rank a call runs ``loss_and_grad`` once (once for each slice), one all-reduce for each dtype of the
    gradients, and the rule's step.
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
            "'avg', because the aux of a rank's slices are averaged. Use num_slices=1."
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
        # Both new values exist before either is stored, so a step that fails leaves the rank as it was.
        new_params, new_state = update_rule.step(current, unflatten(flats), shared_state.value)
        shared_params.value, shared_state.value = new_params, new_state
        ranks = synk.comm.ranks
        return loss, len(ranks), ranks[0]

    step.__name__ = step.__qualname__ = name
    step.__signature__ = signature  # type: ignore[attr-defined]
    outputs = (("avg", aux_outputs) if has_aux else "avg", "first", "first")
    function = runtime.function(step, bcast_inputs=bcast_inputs, outputs=outputs, framework=framework)
    return TrainFunction(runtime, function, shared_params, shared_state)


def _framework_of(update_rule: Any, framework: str | None) -> str | None:
    """Return the library whose arrays a step gets."""
    own: str | None = getattr(update_rule, "framework", None)
    if None not in (own, framework) and own != framework:
        raise ValueError(
            f"cannot make a training function: got framework={framework!r} with {update_rule!r}, expected {own!r}, "
            "whose arrays the rule works on."
        )
    return framework or own


def _inputs_signature(loss_and_grad: LossAndGrad) -> inspect.Signature:
    """Return the signature of ``loss_and_grad`` without its first parameter and without annotations."""
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
    """Return some rows of an input. The arrays of a nested input are divided one by one, as in a call."""
    leaves, structure = take_apart(value)
    return build(structure, iter([leaf[rows] if getattr(leaf, "shape", ()) else leaf for leaf in leaves]))
