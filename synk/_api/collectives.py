"""The collectives over shared variables, which the program calls. They run on the runtime of their variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from synk._api.current import current
from synk._engine import collectives
from synk._engine.shared import Shared
from synk._engine.things import check_owner
from synk._engine.variables import Variable
from synk._pure.tracebacks import verb
from synk._wire.cell import refuse_inside_worker


@contextlib.contextmanager
def _begun(verb: str, variables: Any) -> Iterator[list[Variable]]:
    """Begin a verb on one ``Shared`` or a sequence of them: yield the variables."""
    refuse_inside_worker(verb)
    listed = [variables] if isinstance(variables, Shared) else variables
    if not isinstance(listed, (list, tuple)):
        raise TypeError(f"cannot {verb}: got {type(variables).__name__}, expected a Shared or a sequence of them.")
    for shared in listed:
        if not isinstance(shared, Shared):
            raise TypeError(f"cannot {verb}: got {type(shared).__name__}, expected a Shared or several.")
    session = listed[0]._session if listed else current()._session
    for shared in listed:
        check_owner(shared._referent.owner, session.variables, shared._referent.label, f"{verb} argument")
    with session.entered(verb):
        session.begin(verb)
        yield [shared._referent for shared in listed]


@verb
def broadcast(variables: Any, values: Any = None) -> None:
    """Copy rank 0's value of each variable, or ``values``, to all ranks.

    Parameters
    ----------
    variables : Shared or sequence of Shared
    values : value or sequence of values, optional
        One for each variable. A nested value has the nesting of its variable.

    Raises
    ------
    TypeError, ValueError
        If a value does not fit its variable. Nothing has changed then.
    """
    with _begun("broadcast", variables) as listed:
        for variable, value in collectives.pair(variables, listed, values):
            collectives.broadcast(variable, value)


@verb
def scatter(variables: Any, values: Any, batch: Any = None) -> None:
    """Divide the rows of ``values`` among the ranks, as calls divide their inputs.

    Parameters
    ----------
    variables : Shared or sequence of Shared
    values : array-like of shape (rows, *rest), Data, or a sequence of them
        One for each variable.
    batch : int, slice, sequence of int or bool mask, optional
        The rows of ``values`` to use.

    Raises
    ------
    TypeError, ValueError, IndexError
        If a value does not fit its variable, or ``batch`` does not fit the rows. Nothing has changed then.
    """
    with _begun("scatter", variables) as listed:
        parts = [
            (variable, variable.split(variable.check(value), batch))
            for variable, value in collectives.pair(variables, listed, values)
        ]
        for variable, own in parts:
            collectives.scatter(variable, own)


@verb
def gather(variables: Any, nd_up: int = 1) -> Any:
    """Return the values of all ranks as new arrays.

    Parameters
    ----------
    variables : Shared or sequence of Shared
    nd_up : {0, 1}
        With 1 the values are stacked, with shape ``(world_size, *shape)``; all values must have one shape. With 0 they
        are concatenated along axis 0; shards may differ in length.

    Returns
    -------
    ndarray, nesting of ndarray, or list of them
        New arrays, with the nesting of the variable; a list for a sequence of variables.

    Raises
    ------
    ValueError
        If the shapes do not allow it, or ``nd_up`` is neither 0 nor 1.
    """
    with _begun("gather", variables) as listed:
        results = [collectives.gather(variable, nd_up) for variable in listed]
    return results[0] if isinstance(variables, Shared) else results


@verb
def all_gather(variables: Any) -> None:
    """Give every rank the concatenation of all ranks' values along axis 0.

    Parameters
    ----------
    variables : Shared or sequence of Shared

    Raises
    ------
    ValueError
        If a variable has no axis 0. Nothing has changed then.
    """
    with _begun("all_gather", variables) as listed:
        for variable in listed:
            collectives.check_rows(variable)
        for variable in listed:
            collectives.all_gather(variable)


@verb
def reduce(variables: Any, op: str = "avg", in_place: bool = True) -> Any:
    """Reduce the values of all ranks. All ranks weigh the same.

    Parameters
    ----------
    variables : Shared or sequence of Shared
        Variables with one shape on all ranks.
    op : {"avg", "sum", "prod", "min", "max"}
    in_place : bool
        True makes the result rank 0's value. False returns the result and changes no variable.

    Returns
    -------
    ndarray, list of ndarray, or None
        With ``in_place=False``, the result of each variable.

    Raises
    ------
    ValueError, TypeError
        If the op is unknown or does not fit the dtype, or the shapes differ. Nothing has changed then.
    """
    with _begun("reduce", variables) as listed:
        for variable in listed:
            collectives.check_reduction(variable, op)
        results = [collectives.reduce(variable, op, in_place) for variable in listed]
    return results[0] if isinstance(variables, Shared) else results


@verb
def all_reduce(variables: Any, op: str = "avg") -> None:
    """Reduce the values of all ranks and give every rank the result. All ranks weigh the same.

    Parameters
    ----------
    variables : Shared or sequence of Shared
    op : {"avg", "sum", "prod", "min", "max"}

    Raises
    ------
    ValueError, TypeError
        As for :func:`reduce`.
    """
    with _begun("all_reduce", variables) as listed:
        for variable in listed:
            collectives.check_reduction(variable, op)
        for variable in listed:
            collectives.all_reduce(variable, op)
