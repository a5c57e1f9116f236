"""Programs of Synkhronos, the ancestor of synk, with their imports changed::

    import pytensor as theano
    import pytensor.tensor as T
    import synk.extensions.synkhronos as synk

In these programs the main process was rank 0: ``w.get_value()`` returned the value on rank 0, and ``w.set_value(v)``
set it. So here PyTensor's variables have the values of rank 0 after each call, and values that the program sets go to
rank 0 before the next call.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable

import synk
from synk import close, data, distribute
from synk.extensions import _pytensor_function as functions
from synk.extensions._pytensor_function import PyTensorFunction, remote

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


class Function(PyTensorFunction):
    """A function with the ancestor's interface: ``batch_s=``, ``as_theano``, a list of outputs."""

    def __call__(self, /, *args: Any, batch_s: Any = None, **options: Any) -> Any:
        _send_set_values(self.variables)
        if batch_s is not None:
            options["batch"] = self._rows_of(batch_s)
        result = super().__call__(*args, **options)
        _fetch_values(self.variables)
        return result

    def _rows_of(self, batch_s: Any) -> np.ndarray:
        """Return the rows of the sharded variables that a slice or list, or one for each rank, picks on each rank."""
        lengths = next(shared.lengths for shared in self.variables.values() if shared.is_sharded)
        has_parts = isinstance(batch_s, (list, tuple)) and any(np.ndim(each) or type(each) is slice for each in batch_s)
        each_rank = batch_s if has_parts else [batch_s] * len(lengths)
        shards = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
        return np.concatenate([shard[rows] for shard, rows in zip(shards, each_rank, strict=True)])

    def as_theano(self, /, *args: Any) -> Any:
        """Run the function in this process alone, on PyTensor's own variables."""
        return self.serial(*map(np.asarray, args))


def function(inputs: Sequence[Any], outputs: Any = None, bcast_inputs: Any = (), **options: Any) -> Function:
    """Build a function of a graph; see `synk.extensions.pytensor.function`. Ops may have the ancestor's ``c_``."""
    listed = outputs if isinstance(outputs, list) else [outputs]
    plain = [(each[0], _op(each[1])) if isinstance(each, tuple) else each for each in listed]
    made = functions.function(
        inputs, plain if isinstance(outputs, list) else plain[0], bcast_inputs=bcast_inputs or (), **options
    )
    made.__class__ = Function
    _fetch_values(made.variables)
    return made  # type: ignore[return-value]


def _op(op: Any) -> Any:
    return op.removeprefix("c_") if isinstance(op, str) else op


def _verb(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a verb of synk's variables for PyTensor's variables, with the ancestor's arguments."""

    @functools.wraps(method)
    def run(shared_vars: Any, *args: Any, nccl: bool = True, **options: Any) -> Any:
        variables = [shared_vars] if isinstance(shared_vars, SharedVariable) else list(shared_vars)
        _send_set_values(variables)
        handles = list(map(remote, variables))
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


_seen: weakref.WeakKeyDictionary[SharedVariable, Any] = weakref.WeakKeyDictionary()


def _send_set_values(variables: Iterable[SharedVariable]) -> None:
    """Give rank 0 the values that the program has set since the last ``_fetch_values``."""
    for variable in variables:
        shared, value = remote(variable), variable.get_value(borrow=True)
        if not shared.is_sharded and _seen.get(variable) is not value:
            shared[0] = value


def _fetch_values(variables: Iterable[SharedVariable]) -> None:
    """Give PyTensor's variables the values of rank 0."""
    for variable in variables:
        shared = remote(variable)
        if not shared.is_sharded:
            variable.set_value(np.array(shared.value), borrow=True)
            _seen[variable] = variable.get_value(borrow=True)
