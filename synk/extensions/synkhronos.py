"""Programs of Synkhronos, the ancestor of synk, with their imports changed::

    import pytensor as theano
    import pytensor.tensor as T
    import synk.extensions.synkhronos as synk

A graph is compiled once, as a pure function: shared variables become inputs and updates become outputs, so slices,
transactions and exact averages are those of synk. On the workers a shared variable is a :class:`synk.Shared`.

In these programs the main process was rank 0: ``w.get_value()`` returned the value on rank 0, and ``w.set_value(v)``
set it. So here PyTensor's variables have the values of rank 0 after each call, and values that the program sets go to
rank 0 before the next call.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import graph_inputs
from pytensor.tensor.random.type import RandomGeneratorType

import synk
from synk import close, data, distribute

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "close",
    "data",
    "distribute",
    "fork",
    "function",
    "gather",
    "get_lengths",
    "get_shapes",
    "get_value",
    "reduce",
    "scatter",
    "set_value",
]


def fork(n_parallel: int | None = None, use_gpu: bool = True, **ignored: Any) -> int:
    """Start workers and return their number. Options of the ancestor that have no meaning any more are ignored."""
    return synk.fork(n_parallel, backend="auto" if use_gpu else "numpy").world_size


@dataclass(eq=False)
class GraphFunction:
    """A graph that runs on all workers as one call; made by :func:`function`.

    Attributes
    ----------
    function : synk.Function
        The function on the workers. Its own calls do not move the values of PyTensor's variables.
    compiled : pytensor.compile.function.types.Function
        The pure function: inputs, then the values of shared variables, to outputs and new values.
    variables : dict of SharedVariable to synk.Shared
    """

    function: synk.Function
    compiled: Any
    variables: dict[SharedVariable, synk.Shared]
    _sharded: dict[str, synk.Shared]
    _results: Sequence[SharedVariable]
    _generators: Sequence[SharedVariable]
    _num_outputs: int | None  # None for a single output that is not in a list

    def __call__(self, /, *args: Any, batch_s: Any = None, **options: Any) -> Any:
        """Call it, with the options of a :class:`synk.Function` and ``batch_s``, rows of each rank's own."""
        _send_set_values(self.variables)
        if batch_s is not None:
            options["batch"] = self._rows_of(batch_s)
        result = self.function(*args, **options, **self._sharded)
        _fetch_values(self.variables)
        outputs = list(result) if isinstance(result, tuple) else [result]
        return outputs[0] if self._num_outputs is None else outputs[: self._num_outputs]

    def _rows_of(self, batch_s: Any) -> np.ndarray:
        """Return the rows of the sharded variables that a slice or list, or one for each rank, picks on each rank."""
        if not self._sharded:
            raise ValueError(
                f"cannot call {self.function.__name__!r}: got batch_s, expected none, because it has no variables in "
                "sliceable_shareds. Use batch= for rows of the inputs."
            )
        lengths = next(iter(self._sharded.values())).lengths
        has_parts = isinstance(batch_s, (list, tuple)) and any(np.ndim(each) or type(each) is slice for each in batch_s)
        each_rank = batch_s if has_parts else [batch_s] * len(lengths)
        shards = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
        return np.concatenate([shard[rows] for shard, rows in zip(shards, each_rank, strict=True)])

    def as_theano(self, /, *args: Any) -> Any:
        """Run the compiled function in this process alone, on PyTensor's own variables, which it updates."""
        values = [variable.get_value(borrow=True) for variable in (*self.variables, *self._generators)]
        results = self.compiled(*map(np.asarray, args), *values)
        num = 1 if self._num_outputs is None else self._num_outputs
        for variable, value in zip(self._results, results[num:]):
            variable.set_value(value)
        return results[0] if self._num_outputs is None else results[:num]

    def build_inputs(self, *arrays: Any, **options: Any) -> tuple[synk.Data, ...]:
        """Return one :class:`synk.Data` for each array; see :func:`synk.data`."""
        return tuple(synk.data(array, **options) for array in arrays)


def function(
    inputs: Sequence[Any],
    outputs: Any = None,
    bcast_inputs: Sequence[Any] | None = None,
    *,
    updates: Any = None,
    givens: Any = None,
    sliceable_shareds: Sequence[SharedVariable] | None = None,
    mode: Any = None,
    name: str = "graph",
) -> GraphFunction:
    """Compile a graph to a function that runs on all workers as one call.

    Parameters
    ----------
    inputs, bcast_inputs : sequence of variables
        The inputs that are divided by rows, then those that every rank gets whole, in the order of the arguments.
    outputs : variable, (variable, op), or list of them
        The op is one of the ops of :func:`synk.function`, also with the ancestor's ``c_``; ``"avg"`` if none is given.
    updates : sequence of (shared, new) or (shared, new, op), or dict
        New values of shared variables, on each rank from its own rows. The op is for slices. If a variable is listed
        twice, the last entry counts.
    givens : mapping, or sequence of pairs
        Variables to replace in the graph, as in ``pytensor.function``.
    sliceable_shareds : sequence of shared variables
        Shared variables whose rows are divided among the ranks. The others are the same on all ranks.
    mode : optional
        As for ``pytensor.function``.
    name : str

    Raises
    ------
    ValueError
        If an update is not for a shared variable that every rank has whole.

    Notes
    -----
    A random variable draws on the workers from ``synk.comm.rng``, whose seed is that of the runtime. Source:
    https://pytensor.readthedocs.io.

    Examples
    --------
    >>> import numpy as np, pytensor.tensor as T
    >>> import synk.extensions.synkhronos as synk
    >>> x, y = T.matrix("x", dtype="float64"), T.vector("y", dtype="float64")
    >>> synk.fork(2, use_gpu=False)
    2
    >>> f = synk.function([x], [T.mean(x @ y), (T.sum(x @ y), "sum")], bcast_inputs=[y])
    >>> f(np.arange(6.0).reshape(3, 2), np.ones(2))
    [np.float64(5.0), np.float64(15.0)]
    >>> synk.close()
    """
    bcast_inputs, sliceable_shareds, givens = bcast_inputs or (), sliceable_shareds or (), givens or ()
    listed = outputs if isinstance(outputs, list) else [] if outputs is None else [outputs]
    pairs = [(each[0], _op(each[1])) if isinstance(each, tuple) else (each, "avg") for each in listed]
    drawn, new = _updates_of(updates)
    graph = [*(variable for variable, _ in pairs), *(value for value, _ in new.values())]
    graph = clone_replace(graph, replace=list(givens.items() if isinstance(givens, Mapping) else givens))
    found = [v for v in dict.fromkeys(graph_inputs(graph)) if isinstance(v, SharedVariable)]
    found += [v for v in (*new, *sliceable_shareds) if v not in found]
    states = {v: state for v in found if _draws(v) and (state := drawn.get(v, v.default_update)) is not None}
    generators = [*states, *(v for v in found if _draws(v) and v not in states)]
    rows = [v for v in found if v in sliceable_shareds]
    whole = [v for v in found if v not in rows and v not in generators]
    if refused := [variable for variable in new if variable not in whole]:
        raise ValueError(
            f"cannot update {refused[0]}: got one of sliceable_shareds, or a generator, expected a shared variable "
            "that every rank has whole."
        )
    given, state = [*inputs, *bcast_inputs], [*rows, *whole, *generators]
    stand_ins = [v.type(name=v.name) for v in state]
    made = clone_replace([*graph, *states.values()], replace=list(zip(state, stand_ins)))
    compiled = pytensor.function([*given, *stand_ins], made, mode=mode, on_unused_input="ignore")
    names = _names_of([*given, *rows])
    sharded, replicated = ({v: _remote(v, of_rows) for v in part} for part, of_rows in ((rows, True), (whole, False)))
    run = _run_of(pickle.dumps(compiled), tuple(replicated.values()), len(generators), len(pairs), len(new), names)
    run.__name__ = name
    made_function = synk.function(
        run,
        bcast_inputs=names[len(inputs) : len(given)],
        outputs=tuple(op for _, op in pairs) or ("first",),
        updates=[(replicated[v], op) for v, (_, op) in new.items()],
    )
    variables = {**sharded, **replicated}
    _send_set_values(variables)
    _fetch_values(variables)
    return GraphFunction(
        made_function,
        compiled,
        variables,
        dict(zip(names[len(given) :], sharded.values())),
        [*new, *states],
        generators,
        len(pairs) if outputs is None or isinstance(outputs, list) else None,
    )


def _run_of(
    data: bytes,
    variables: Sequence[synk.Shared],
    num_generators: int,
    num_outputs: int,
    num_updates: int,
    names: Sequence[str],
) -> Any:
    """Return the function for the workers. It captures the compiled function as bytes, which are quickly compared."""

    def run(*args: Any, **named: Any) -> Any:
        values = [variable.value for variable in variables]
        generators = [np.random.default_rng(synk.comm.rng.integers(1 << 63, size=4)) for _ in range(num_generators)]
        results = _loaded(data)(*args, *(named[each] for each in names[len(args) :]), *values, *generators)
        outputs = tuple(results[:num_outputs]) or (np.zeros(()),)
        return (outputs, results[num_outputs : num_outputs + num_updates]) if num_updates else outputs

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    run.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return run


@functools.lru_cache(maxsize=256)
def _loaded(data: bytes) -> Any:
    """Return the compiled function. A rank loads each once."""
    return pickle.loads(data)


def _op(op: Any) -> Any:
    return op.removeprefix("c_") if isinstance(op, str) else op


def _draws(variable: SharedVariable) -> bool:
    return isinstance(variable.type, RandomGeneratorType)


def _updates_of(updates: Any) -> tuple[dict[SharedVariable, Any], dict[SharedVariable, tuple[Any, Any]]]:
    """Return the new states of generators, and the new value and the op of each other variable in the list."""
    drawn: dict[SharedVariable, Any] = {}
    found: dict[SharedVariable, tuple[Any, Any]] = {}
    for variable, value, *op in updates.items() if isinstance(updates, Mapping) else updates or ():
        if not isinstance(variable, SharedVariable):
            raise ValueError(f"cannot update {variable}: got {type(variable).__name__}, expected a shared variable.")
        if _draws(variable):
            drawn[variable] = value
        else:
            new = pytensor.tensor.as_tensor_variable(value).astype(variable.type.dtype)
            found[variable] = new, _op(op[0]) if op else "avg"
    return drawn, found


def _names_of(variables: Sequence[Any]) -> list[str]:
    """Return names for the parameters: the names of the variables, if they are identifiers and differ."""
    names: list[str] = []
    for number, variable in enumerate(variables):
        name = variable.name or ""
        names.append(name if name.isidentifier() and name not in names else f"input_{number}")
    return names


# -- shared variables ------------------------------------------------------------------------------------------------

_remotes: weakref.WeakKeyDictionary[SharedVariable, tuple[synk.Runtime, synk.Shared]] = weakref.WeakKeyDictionary()
_seen: weakref.WeakKeyDictionary[SharedVariable, Any] = weakref.WeakKeyDictionary()
"""A copy of the value that each variable had after the last call: the program may change its own in place. Of a sharded
variable, which may be a whole dataset, it is the value itself, so only a value that was set is noticed."""


def _remote(variable: SharedVariable, is_sharded: bool | None = None) -> Any:
    """Return the variable on the workers. It is made when the first function uses it."""
    found: Any
    runtime, found = _remotes.get(variable, (None, None))
    if is_sharded is None and found is None:
        raise ValueError(f"cannot find {variable} on the workers: no function made by function() uses it.")
    if is_sharded is not None and (found is None or runtime is not synk.current()):
        value = variable.get_value(borrow=True)
        found = synk.shared(value, sharded=is_sharded, name=variable.name)
        _remotes[variable], _seen[variable] = (synk.current(), found), value if is_sharded else np.array(value)
    if is_sharded is not None and found.is_sharded != is_sharded:
        whole, rows = "whole on every rank", "divided by rows (in sliceable_shareds)"
        raise ValueError(
            f"cannot use {variable} {rows if is_sharded else whole}: got a variable that another function uses "
            f"{whole if is_sharded else rows}, expected one way for all. Make another shared variable."
        )
    return found


def _send_set_values(variables: Iterable[SharedVariable]) -> None:
    """Give rank 0 the values that the program has set since the last ``_fetch_values``."""
    for variable in variables:
        shared, value = _remote(variable), variable.get_value(borrow=True)
        if shared.is_sharded and value is not _seen[variable]:
            raise ValueError(
                f"cannot send the value that was set in {variable}: it is one of sliceable_shareds, whose rows are "
                "divided among the ranks. Use scatter(variable, value)."
            )
        if not shared.is_sharded and not _is_same(value, _seen[variable]):
            shared[0] = value


def _fetch_values(variables: Iterable[SharedVariable]) -> None:
    """Give PyTensor's variables the values of rank 0."""
    for variable in variables:
        shared, value = _remote(variable), variable.get_value(borrow=True)
        _seen[variable] = value if shared.is_sharded else shared.value
        if not shared.is_sharded and not _is_same(value, _seen[variable]):
            variable.set_value(np.array(_seen[variable]), borrow=True)


def _is_same(value: np.ndarray, seen: np.ndarray) -> bool:
    """Whether two arrays of one dtype hold the same bytes."""
    own, other = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (value, seen))
    return value.shape == seen.shape and np.array_equal(own, other)


def _verb(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a verb of synk's variables for PyTensor's variables, with the ancestor's arguments."""

    @functools.wraps(method)
    def run(shared_vars: Any, *args: Any, nccl: bool = True, **options: Any) -> Any:
        variables = [shared_vars] if isinstance(shared_vars, SharedVariable) else list(shared_vars)
        if method is not synk.scatter:  # which replaces them
            _send_set_values(variables)
        handles = list(map(_remote, variables))
        result = method(handles[0] if isinstance(shared_vars, SharedVariable) else handles, *args, **options)
        _fetch_values(variables)
        return result

    return run


all_gather, all_reduce, broadcast = _verb(synk.all_gather), _verb(synk.all_reduce), _verb(synk.broadcast)
gather, reduce, scatter = _verb(synk.gather), _verb(synk.reduce), _verb(synk.scatter)


@_verb
def get_lengths(shared_vars: Any) -> Any:
    """Return the number of rows on each rank, as a list for each variable."""
    return _each(shared_vars, lambda shared: shared.lengths)


@_verb
def get_shapes(shared_vars: Any) -> Any:
    """Return the shape on each rank, as a list for each variable."""
    return _each(shared_vars, lambda shared: shared.shapes)


def get_value(rank: int, shared_vars: Any) -> Any:
    """Return the value of shared variables on one rank."""
    return _verb(_each)(shared_vars, lambda shared: copy.deepcopy(shared[rank]))


def set_value(rank: int, shared_vars: Any, values: Any, batch: Any = None) -> None:
    """Set the value of shared variables on one rank. ``batch`` selects rows of the values."""
    rows = slice(batch) if isinstance(batch, int) else batch
    listed = iter(values if isinstance(shared_vars, (list, tuple)) else [values])

    def assign(shared: synk.Shared) -> None:
        shared[rank] = next(listed) if batch is None else np.asarray(next(listed))[rows]

    _verb(_each)(shared_vars, assign)


def _each(shared: Any, verb: Callable[[synk.Shared], Any]) -> Any:
    return [verb(each) for each in shared] if isinstance(shared, list) else verb(shared)
