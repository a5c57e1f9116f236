"""A function in a wrapper: its outputs come apart by rank and its run leaves no trace, or it sees all rows of shards.

``op_check``, ``verify``, ``serial`` and ``blocks`` of ``synk._api`` build ordinary functions of these wrappers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from synk._pure.generators import generator_states, move_generators, restore_generators
from synk._pure.nested import SINGLE_VALUES
from synk._pure.ops import Op
from synk._pure.tables import is_table
from synk._pure.trees import flatten, unflatten
from synk._wire.cell import cell
from synk._wire.settings import kept
from synk._wire.variables import split_updates
from synk.errors import UnsupportedError


class Part(NamedTuple):
    """What one run of a function did on the rows of a rank, or of a slice of them.

    Attributes
    ----------
    value : object
        What it returned, with arrays of NumPy.
    num_rows : int
        For how many rows.
    assigned : dict of int to list of ndarray
        What it assigned to shared variables, by their numbers.
    """

    value: Any
    num_rows: int
    assigned: dict[int, list[np.ndarray]]


class Box:
    """What a part holds beside its number of rows, as one output, whatever it is."""

    def __init__(self, value: Any, assigned: dict[int, list[np.ndarray]]) -> None:
        self.value, self.assigned = value, assigned


class Parts(Op):
    """Returns the parts of all ranks that have rows, in the place of op None, under which others run, too."""

    needs_rows = False
    has_empty = True

    def combine(self, values: list[Any], rows: list[int]) -> list[Part]:
        return [Part(box.value, num_rows, box.assigned) for box, num_rows in zip(values, rows)]


class Around:
    """A function with something around it. It has its name and parameters, for :func:`inspect.signature`.

    Parameters
    ----------
    fn : callable
    """

    __name__: str
    __call__: Callable[..., Any]

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        own: Any = self
        functools.update_wrapper(own, fn, updated=())


class Quiet(Around):
    """Calls a function so that the run leaves nothing behind.

    Prints, logs and warnings are dropped. Settings, random generators and the resident objects that it changes are put
    back, and nothing that it assigns to shared variables takes effect.

    Parameters
    ----------
    residents : sequence of Resident
        What the function changes.
    updates : sequence of Shared
        The variables whose new values it returns beside its outputs.

    Notes
    -----
    Each run finds the generators moved on by one more draw, so that a function which draws from them returns something
    else in each run.
    """

    def __init__(self, fn: Callable[..., Any], residents: Sequence[Any] = (), updates: Sequence[Any] = ()) -> None:
        super().__init__(fn)
        self._residents, self._updates = residents, updates
        self._num_runs = 0

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)[0]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[int, list[np.ndarray]]]:
        """Return the outputs, and what was assigned to shared variables."""
        self._num_runs += 1
        generator, variables = cell.worker.rng.bit_generator, cell.worker.variables
        states = [resident.state() for resident in self._residents]
        drawn, before = generator.state, dict(variables.assigned)
        try:
            cell.worker.rng.random(self._num_runs)
            with unseen():
                move_generators(self._num_runs)
                value = self._fn(*args, **kwargs)
            if self._updates:
                value, new = split_updates(self.__name__, value, len(self._updates))
                for replica, each in zip(self._updates, new):
                    replica.assign(each)
            assigned = {
                replica.variable_id: [np.array(cell.worker.backend.host_copy(leaf)) for leaf in leaves]
                for replica, leaves in variables.assigned.items()
                if before.get(replica) is not leaves
            }
            return value, assigned
        finally:
            generator.state, variables.assigned = drawn, before
            for resident, state in zip(self._residents, states):
                resident.restore(state)


class Apart(Quiet):
    """Calls a function in the same way, and returns a :class:`Part` of it in a :class:`Box`."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Box:
        value, assigned = self._run(args, kwargs)
        leaves, structure = flatten(value)
        return Box(unflatten(structure, list(map(_on_host, leaves))), assigned)


class Silent(Around):
    """Calls a function whose result may not depend on the rank: it cannot use ``synk.comm`` or assign variables."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        comm: Any = sys.modules["synk"].comm
        own: Any = type(comm)
        comm.__class__ = _refusing(own)
        try:
            result = self._fn(*args, **kwargs)
        finally:
            comm.__class__ = own
        for replica in cell.worker.variables.assigned:
            raise ValueError(
                f"cannot assign variable {replica.name!r} in {self.__name__!r}: it is built with reproducible= and "
                "called for each block of rows, expected a function that changes nothing."
            )
        return result


@functools.cache
def _refusing(comm: Any) -> type:
    """Return what ``synk.comm`` is while all that it has is refused."""

    def refuse(self: Any, name: str) -> Any:
        if name.startswith("_"):
            return object.__getattribute__(self, name)
        raise UnsupportedError(
            f"cannot use synk.comm.{name} in {cell.worker.function_name!r}: it is built with reproducible=, and what "
            "the ranks say depends on their number, expected a function of its rows."
        )

    return type(comm.__name__, (comm,), {"__getattribute__": refuse})


class BlockValues:
    """What a function has returned for each block, as one object, whatever it is."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.to_come = list(values[::-1])


def next_block(values: BlockValues, weights: np.ndarray) -> Any:
    """Return what the function has returned for the next block."""
    return values.to_come.pop()


class WithOneMore(Around):
    """Has the parameters of the function, and ``first`` before them. A profile tells its calls apart by ``title``."""

    first: ClassVar[str]
    title: ClassVar[str]

    @property
    def __signature__(self) -> inspect.Signature:
        first = inspect.Parameter(self.first, inspect.Parameter.POSITIONAL_ONLY)
        try:
            own = list(inspect.signature(self._fn).parameters.values())
        except (TypeError, ValueError):  # some builtins have no signature
            own = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
        return inspect.Signature([first, *own])


class Whole(WithOneMore):
    """Calls a function that closes over sharded variables as if the rank held all their rows. It cannot assign them.

    The parameter before its own are the values of the variables.

    Parameters
    ----------
    fn : callable
    numbers : sequence of int
        The variables.
    """

    first, title = "_shards", "serial"

    def __init__(self, fn: Callable[..., Any], numbers: Sequence[int]) -> None:
        super().__init__(fn)
        self._numbers = numbers

    def __call__(self, values: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
        variables = cell.worker.variables
        replicas = list(map(variables.get, self._numbers))
        for replica, value in zip(replicas, values):
            replica.assign(value)
        shown = dict(variables.assigned)
        result = self._fn(*args, **kwargs)
        for replica in replicas:
            if variables.assigned.pop(replica) is not shown[replica]:
                raise unassignable(replica.name, self.__name__)
        return result


class Again(WithOneMore):
    """Calls a function several times, each time as the rank would call it anew; the parameter before its own says how
    often. What a run assigns, the next one finds.
    """

    first, title = "_num_repeats", "repeat"

    def __call__(self, num_runs: Any, /, *args: Any, **kwargs: Any) -> Any:
        worker = cell.worker
        called, variables = worker.lane.called, worker.variables
        for _ in range(int(num_runs) - 1):
            if called.function.updates:
                variables.take_updates(called.function, self._fn(*args, **kwargs), worker.num_rows)
            else:
                self._fn(*args, **kwargs)
            variables.check_given()
            for replica in list(variables.assigned):
                variables.assigned[replica] = _settled(replica, variables.assigned.pop(replica))
            (_, *args), kwargs = called.inputs_again(worker)
        return self._fn(*args, **kwargs)


def _settled(replica: Any, leaves: Sequence[Any]) -> list[Any]:
    """Return what was assigned as the value for the next run, whatever the function does to its own arrays."""
    if replica._is_sharded and len(leaves[0]) != len(replica.leaves()[0]):
        raise ValueError(
            f"cannot repeat a call: it has assigned {len(leaves[0])} rows to the shard of variable {replica.name!r}, "
            f"expected {len(replica.leaves()[0])} as before. Call the function again and again instead, so that rows "
            "are divided anew."
        )
    return [leaf if _is_last_view(leaf) else replica.keep(leaf.copy(), leaf.dtype) for leaf in leaves]


def _is_last_view(array: Any) -> bool:
    """Whether nobody else holds the memory behind a view; on devices that is unknown."""
    is_on_host = isinstance(array, np.ndarray)
    return is_on_host and sys.getrefcount(array.base) == 2 and array.base.base is None  # the view's, and the argument


def unassignable(variable: str, function: str) -> ValueError:
    """Return the error that refuses to assign a sharded variable in a serial call."""
    return ValueError(
        f"cannot assign variable {variable!r} in a serial call of {function!r}: it is sharded, expected a parallel "
        "call, in which each rank assigns its own rows. The call has changed nothing."
    )


def _on_host(leaf: Any) -> Any:
    """Return a tensor, or an array of another library, as an array of NumPy; any other object as it is."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()  # the function may return the same buffer again, filled for the next slice
    if isinstance(leaf, SINGLE_VALUES) or is_table(leaf):
        return leaf
    backend, from_framework = cell.worker.backend, cell.worker.lane.called.function.from_framework
    array = backend.as_output(leaf if from_framework is None else from_framework(leaf))
    return leaf if array is None else np.array(backend.host_copy(array))


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Drop prints, logs and warnings, and put settings and random number generators back."""
    states, sink, level = generator_states(), io.StringIO(), logging.root.manager.disable
    logging.disable()
    try:
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink), kept():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        restore_generators(states)
