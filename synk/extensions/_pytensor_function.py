"""PyTensor's ``function`` on all workers: each rank runs a graph that was compiled once as a pure function.

Shared variables become inputs of the compiled function and updates become outputs, so slices, transactions and exact
averages are those of synk. On the workers a shared variable of PyTensor is a :class:`synk.Shared`; see :func:`remote`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytensor
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import graph_inputs
from pytensor.tensor.random.type import RandomGeneratorType

import synk
from synk.extensions._wrapper import FunctionWrapper

_remotes: weakref.WeakKeyDictionary[SharedVariable, synk.Shared] = weakref.WeakKeyDictionary()


def remote(variable: SharedVariable) -> synk.Shared:
    """Return the variable of synk that a shared variable of PyTensor is on the workers.

    Raises
    ------
    ValueError
        If no function of an open runtime uses the variable.
    """
    found = _remotes.get(variable)
    if found is None:
        raise ValueError(
            f"cannot find {variable} on the workers: no function made by synk.extensions.pytensor.function uses it. "
            "Build such a function first."
        )
    return found


class PyTensorFunction(FunctionWrapper):
    """A compiled graph that is called like a function; made by :func:`function`.

    It has the verbs and options of a :class:`synk.Function`. ``batch`` selects among the rows of all
    ``sliceable_shareds``, too.

    Attributes
    ----------
    compiled : pytensor.compile.function.types.Function
        The pure function: inputs, then the values of shared variables, to outputs and new values.
    variables : dict of SharedVariable to Shared
    """

    def __init__(
        self,
        function: synk.Function,
        runtime: synk.Runtime,
        compiled: Any,
        variables: dict[SharedVariable, synk.Shared],
        updated: Sequence[SharedVariable],
        rows: dict[str, synk.Shared],
        reduced: Sequence[synk.Shared],
        num_outputs: int | None,
        generators: Sequence[SharedVariable],
    ) -> None:
        super().__init__(function)
        self.runtime, self.compiled, self.variables = runtime, compiled, variables
        self._updated, self._rows, self._reduced, self._generators = updated, rows, reduced, generators
        self._num_outputs = num_outputs  # None for a single output that is not in a list
        self._has_extra = bool(reduced) or num_outputs == 0  # whether the rows of each rank follow the outputs

    def finish(self, result: Any) -> Any:
        """Return the outputs. Updates that are reduced over all ranks are averaged now.

        The call is committed by then. An interrupt here leaves the ranks with the values of their own rows.
        """
        outputs, extra = (list(result[:-1]), result[-1]) if self._has_extra else (list(result), ())
        if self._reduced:
            weights = [0.0 if rows is None else float(np.sum(rows)) for rows in extra]
            for shared in self._reduced:
                values = synk.gather(shared, nd_up=1)
                mean = np.average(values, axis=0, weights=weights).astype(shared.dtype)
                synk.broadcast(shared, mean)
        return outputs[0] if self._num_outputs is None else outputs

    def __call__(self, /, *args: Any, output_subset: Any = None, **options: Any) -> Any:
        if output_subset is not None and self._has_extra:
            extra = 1 if self._num_outputs is None else self._num_outputs  # its position, behind the outputs
            output_subset = [*(output_subset if isinstance(output_subset, Iterable) else [output_subset]), extra]
        return super().__call__(*args, output_subset=output_subset, **options, **self._rows)

    def submit(self, /, *args: Any, **options: Any) -> Any:
        call = super().submit(*args, **options, **self._rows)
        if self._reduced:  # the next operation must find the averages, which ``finish`` makes in ``result()``
            with contextlib.suppress(Exception):  # result() raises it again
                call.result()
        return call

    def repeat(self, num_repeats: int, /, *args: Any, **options: Any) -> Any:
        if self._reduced and num_repeats != 1:
            raise ValueError(
                f"cannot repeat {self.function.__name__!r}: got an update with 'all', which is averaged over the ranks "
                "when a call has ended, expected updates of each rank's own rows. Call it in a loop."
            )
        return super().repeat(num_repeats, *args, **options, **self._rows)

    def verify(self, /, *args: Any, **options: Any) -> Any:
        return super().verify(*args, **options, **self._rows)

    def serial(self, /, *args: Any) -> Any:
        """Run the compiled function in the program, on PyTensor's own variables, which it updates."""
        sharded = [v.get_value(borrow=True) for v, shared in self.variables.items() if shared.is_sharded]
        others = [v.get_value(borrow=True) for v, shared in self.variables.items() if not shared.is_sharded]
        random = [v.get_value() for v in self._generators]
        results = self.compiled(*args, *sharded, *others, *random)
        num = 1 if self._num_outputs is None else self._num_outputs
        for variable, value in zip([*self._updated, *self._generators], results[num:]):
            variable.set_value(value)
        return results[0] if self._num_outputs is None else results[:num]

    def sync_to_parent(self) -> None:
        """Give PyTensor's variables the values of the workers: those of rank 0, or the rows of all ranks."""
        for variable, shared in self.variables.items():
            variable.set_value(np.array(shared.value))

    def sync_from_parent(self) -> None:
        """Give the workers the values of PyTensor's variables."""
        for variable, shared in self.variables.items():
            shared.value = variable.get_value(borrow=True)


def function(
    inputs: Sequence[Variable],
    outputs: Any = None,
    *,
    bcast_inputs: Sequence[Variable] = (),
    updates: Any = (),
    givens: Any = (),
    sliceable_shareds: Sequence[SharedVariable] = (),
    mode: Any = None,
    name: str = "",
    runtime: synk.Runtime | None = None,
) -> PyTensorFunction:
    """Compile a graph of PyTensor to a function that runs on all workers as one call.

    Parameters
    ----------
    inputs, bcast_inputs : sequence of variables
        The inputs that are divided by rows, then those that every rank gets whole. Both are the parameters of the
        function, in this order.
    outputs : variable, (variable, op), or list of them
        The op is one of the ops of :func:`synk.function`; ``"avg"`` if none is given.
    updates : sequence of (shared, new) or (shared, new, op), or dict
        New values of shared variables, on each rank from its own rows. The op is for slices; ``"all"`` averages over
        the rows of all ranks instead, so that the ranks stay alike. If a variable is listed twice, the last entry
        counts.
    givens : mapping, or sequence of pairs
        Variables to replace in the graph, as in ``pytensor.function``.
    sliceable_shareds : sequence of shared variables
        Shared variables whose rows are divided among the ranks. The others are the same on all ranks.
    mode : optional
        As for ``pytensor.function``.
    name : str
    runtime : Runtime, optional
        By default the current one.

    Returns
    -------
    PyTensorFunction

    Raises
    ------
    ValueError
        If an update is not for a shared variable that every rank has whole, or ``"all"`` is used without rows.

    Notes
    -----
    Shared variables go to the workers when the first function that uses them is built. From then on the workers have
    values of their own: ``f.sync_to_parent()`` and ``f.sync_from_parent()`` copy them, and ``remote(w)`` is the
    variable on the workers. Each rank draws from a generator of its own, spawned from that of the graph
    (``RandomStream``, ``shared_rng``). Its update is listed like others. Source: https://pytensor.readthedocs.io.

    Examples
    --------
    >>> import numpy as np, pytensor.tensor as pt, synk
    >>> from synk.extensions.pytensor import function
    >>> x, y = pt.matrix("x", dtype="float64"), pt.vector("y", dtype="float64")
    >>> with synk.fork(2, backend="numpy"):
    ...     f = function([x], [pt.mean(x @ y), (pt.sum(x @ y), "sum")], bcast_inputs=[y])
    ...     f(np.arange(6.0).reshape(3, 2), np.ones(2))
    [np.float64(5.0), np.float64(15.0)]
    """
    runtime = synk.current() if runtime is None else runtime
    is_one = outputs is not None and (isinstance(outputs, Variable) or _is_pair(outputs))
    listed = [outputs] if is_one else list(outputs or ())
    pairs = [each if isinstance(each, tuple) else (each, "avg") for each in listed]
    drawn, new = _updates_of(updates)
    givens = list(givens.items() if isinstance(givens, Mapping) else givens)
    graph = clone_replace([v for v, _ in pairs] + [v for v, _ in new.values()], replace=givens)
    found = [v for v in dict.fromkeys(graph_inputs(graph)) if isinstance(v, SharedVariable)]
    found += [v for v in (*new, *sliceable_shareds) if v not in found]
    states = {v: state for v in found if _is_generator(v) and (state := drawn.get(v, v.default_update)) is not None}
    generators = [*states, *(v for v in found if _is_generator(v) and v not in states)]
    rows = [v for v in found if v in sliceable_shareds]
    whole = [v for v in found if v not in rows and v not in generators]
    for variable in new:
        if variable not in whole:
            raise ValueError(
                f"cannot update {variable}: got one of sliceable_shareds, or a generator, expected a shared variable "
                "that every rank has whole."
            )
    given = [*inputs, *bcast_inputs]
    stand_ins = [v.type(name=v.name) for v in (*rows, *whole, *generators)]
    made = clone_replace([*graph, *states.values()], replace=list(zip((*rows, *whole, *generators), stand_ins)))
    compiled = pytensor.function([*given, *stand_ins], made, mode=mode, on_unused_input="ignore")
    names = _names_of([*given, *rows])
    sharded = {v: _remote(v, runtime, is_sharded=True) for v in rows}
    replicated = {v: _remote(v, runtime, is_sharded=False) for v in whole}
    is_reduced = [v for v, (_, op) in new.items() if op == "all"]
    entropies = [_entropy_of(v) for v in generators]
    if is_reduced and not (inputs or rows):
        raise ValueError(
            f"cannot average the update of {is_reduced[0]} over all rows: got no inputs that are divided by rows, "
            "expected at least one. Without rows all ranks compute the same: leave out 'all'."
        )
    sizes = len(pairs), len(pairs) + len(new), (0 if inputs else len(given)) if is_reduced else -1
    # Tuples, because captured objects that cannot change are not compared at each call.
    run = _run_of(pickle.dumps(compiled), tuple(replicated.values()), tuple(entropies), sizes, tuple(names))
    run.__name__ = name or "graph"
    extra = (None,) if is_reduced else () if pairs else ("first",)
    made_function = runtime.function(
        run,
        bcast_inputs=names[len(inputs) : len(given)],
        outputs=(*(op for _, op in pairs), *extra),
        updates=[(replicated[v], "avg" if op == "all" else op) for v, (_, op) in new.items()],
    )
    return PyTensorFunction(
        made_function,
        runtime,
        compiled,
        {**sharded, **replicated},
        list(new),
        dict(zip(names[len(given) :], sharded.values())),
        [replicated[v] for v in is_reduced],
        None if is_one else len(pairs),
        generators,
    )


def _run_of(
    data: bytes,
    variables: Sequence[synk.Shared],
    entropies: Sequence[int],
    sizes: tuple[int, int, int],
    names: Sequence[str],
) -> Any:
    """Return the function for the workers. It captures the compiled function as bytes, which are quickly compared."""

    def run(*args: Any, **named: Any) -> Any:
        values = [variable.value for variable in variables]
        return _run(data, values, entropies, sizes, (*args, *(named[name] for name in names[len(args) :])))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    run.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return run


def _run(data: bytes, values: Sequence[Any], entropies: Sequence[int], sizes: tuple[int, int, int], args: Any) -> Any:
    """Run the compiled function on this rank's rows, with its own generators. Add the number of its rows if wanted."""
    num_outputs, num_results, rows_at = sizes
    generators = [_generator(data, number, entropy) for number, entropy in enumerate(entropies)]
    results = _loaded(data)(*args, *values, *generators)
    for number, state in enumerate(results[num_results:]):
        _generators[data, number] = state
    outputs = tuple(results[:num_outputs])
    if rows_at >= 0 or not outputs:
        outputs = (*outputs, float(len(args[rows_at])) if rows_at >= 0 else _NOTHING)
    return (outputs, results[num_outputs:num_results]) if num_results > num_outputs else outputs


@functools.lru_cache(maxsize=256)
def _loaded(data: bytes) -> Any:
    """Return the compiled function. A rank loads each once."""
    return pickle.loads(data)


_NOTHING = np.zeros(())
"""The result of a function that has no outputs."""

# The rank's generators, by compiled function and position. They live as long as the worker.
_generators: dict[tuple[bytes, int], np.random.Generator] = {}


def _generator(data: bytes, number: int, entropy: int) -> np.random.Generator:
    """Return this rank's generator, which takes the place of one of the graph's."""
    if (data, number) not in _generators:
        # The key of the rank's own generator. That of a replacement is another one, so it does not draw the same again.
        key = synk.comm.rng.bit_generator.seed_seq.spawn_key  # type: ignore[attr-defined]  # missing in NumPy's types
        _generators[data, number] = np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=key))
    return _generators[data, number]


def _entropy_of(variable: SharedVariable) -> int:
    """Return a seed that depends on the state of the graph's generator."""
    return int(variable.get_value().integers(1 << 63))


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and not isinstance(value[1], Variable)


def _is_generator(variable: Variable) -> bool:
    return isinstance(variable.type, RandomGeneratorType)


def _updates_of(updates: Any) -> tuple[dict[SharedVariable, Variable], dict[SharedVariable, tuple[Variable, Any]]]:
    """Return the new states of generators, and the new value and the op of each other variable in the list."""
    drawn: dict[SharedVariable, Variable] = {}
    found: dict[SharedVariable, tuple[Variable, Any]] = {}
    for variable, value, *op in updates.items() if isinstance(updates, Mapping) else updates or ():
        if not isinstance(variable, SharedVariable):
            raise ValueError(f"cannot update {variable}: got {type(variable).__name__}, expected a shared variable.")
        if _is_generator(variable):
            drawn[variable] = value
        else:
            found[variable] = pytensor.tensor.as_tensor_variable(value).astype(variable.type.dtype), *(op or ("avg",))
    return drawn, found


def _names_of(variables: Sequence[Variable]) -> list[str]:
    """Return names for the parameters: the names of the variables, if they are identifiers and differ."""
    names: list[str] = []
    for number, variable in enumerate(variables):
        name = variable.name or ""
        names.append(name if name.isidentifier() and name not in names else f"input_{number}")
    return names


def _remote(variable: SharedVariable, runtime: synk.Runtime, *, is_sharded: bool) -> synk.Shared:
    """Return the variable on the workers. It is made when the first function uses it."""
    found = _remotes.get(variable)
    if found is None or found._session is not runtime._session or found.is_sharded != is_sharded:
        value = variable.get_value(borrow=True)
        found = _remotes[variable] = runtime.shared(value, sharded=is_sharded, name=variable.name)
    return found
