"""The collectives over shared variables that the program calls. All is checked before anything is moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._engine.variables import Variable
from synk._pure.arrays import copy_into
from synk._pure.ops import REDUCE_OPS, REDUCTIONS


def pair(variables: Any, listed: Sequence[Any], values: Any) -> list[tuple[Any, Any]]:
    """Return each variable with its value: one of each, or two sequences of equal length.

    All values are checked here, so that a collective over several variables moves all of them or none.
    """
    if values is None:
        return [(variable, None) for variable in listed]
    pairs = _paired(variables, listed, values)
    for variable, value in pairs:
        variable.check(value)
    return pairs


def _paired(variables: Any, listed: Sequence[Any], values: Any) -> list[tuple[Any, Any]]:
    if not isinstance(variables, (list, tuple)):
        return [(listed[0], values)]
    if not isinstance(values, (list, tuple)) or len(values) != len(listed):
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
        raise ValueError(f"cannot set {len(listed)} variables: got {got}, expected one value for each.")
    return list(zip(listed, values))


def check_rank(variable: Variable, rank: Any) -> None:
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
        raise TypeError(
            f"cannot use {rank!r} as a rank of variable {variable.name!r}: expected an integer. w[rank] is the value "
            "on one rank; the rows are w.value[...]."
        )
    if not 0 <= rank < variable.engine.world_size:
        raise IndexError(
            f"cannot use rank {rank} of variable {variable.name!r}: expected 0 to {variable.engine.world_size - 1}."
        )


def check_rows(variable: Variable) -> None:
    """Raise ValueError if a variable has no axis 0."""
    if any(not shape for shape in variable.value_shapes[0]):
        raise ValueError(f"cannot concatenate variable {variable.name!r}: it has no axis 0.")


def check_reduction(variable: Variable, op: str) -> None:
    """Raise ValueError or TypeError if the values of a variable cannot be reduced by an op."""
    if op not in REDUCE_OPS:
        raise ValueError(
            f"cannot reduce variable {variable.name!r}: got op {op!r}, expected one of "
            f"{', '.join(map(repr, REDUCE_OPS))}."
        )
    for dtype in variable.dtypes:
        REDUCTIONS[op].check(dtype, variable.label)
    if len(set(variable.value_shapes)) > 1:
        raise ValueError(
            f"cannot reduce variable {variable.name!r}: got shapes {shapes(variable)}, expected the same on all ranks."
        )


def shapes(variable: Variable) -> list[Any]:
    """Return the shape on each rank; for a nested variable, a nesting of shapes."""
    return [variable.build(each) if variable.is_nested else each[0] for each in variable.value_shapes]


def broadcast(variable: Variable, value: Any = None) -> None:
    """Give every rank ``value``, or without one the value of rank 0."""
    variable.unite(variable.leaves(0) if value is None else variable.check(value))


def assign(variable: Variable, value: Any) -> None:
    """Set the value of all ranks, or divide its rows among them."""
    if variable.is_sharded:
        scatter(variable, variable.split(variable.check(value)))
    else:
        variable.unite(variable.check(value))


def set_value(variable: Variable, value: Any, rank: Any) -> None:
    """Set the value of one rank."""
    check_rank(variable, rank)
    variable.set_ranks({rank: variable.check(value, rank)})


def get_value(variable: Variable, rank: Any) -> Any:
    """Return a copy of the value on ``rank``."""
    check_rank(variable, rank)
    return variable.build([_copied(leaf) for leaf in variable.leaves(rank)])


def scatter(variable: Variable, parts: Sequence[Sequence[np.ndarray]]) -> None:
    """Give each rank its part, as ``Variable.split`` has made them."""
    variable.set_ranks(dict(enumerate(parts)))


def gather(variable: Variable, nd_up: int) -> Any:
    """Return the values of all ranks: concatenated along axis 0 (``nd_up=0``), or stacked on a new one (1)."""
    if nd_up not in (0, 1):
        raise ValueError(f"cannot gather variable {variable.name!r}: got nd_up={nd_up!r}, expected 0 or 1.")
    results, values = [], variable.all_leaves()
    for leaf in range(len(variable.dtypes)):
        parts = [value[leaf] for value in values]
        if nd_up == 1 and len({part.shape for part in parts}) > 1:
            raise ValueError(
                f"cannot stack variable {variable.name!r}: got shapes {[part.shape for part in parts]}, expected "
                "equal ones. Use nd_up=0 to concatenate shards of different length."
            )
        if nd_up == 0 and parts[0].ndim == 0:
            raise ValueError(f"cannot concatenate variable {variable.name!r}: it has no axis 0. Use nd_up=1.")
        results.append(_joined([part[np.newaxis] for part in parts] if nd_up else parts))
    return variable.build(results)


def _copied(leaf: np.ndarray) -> np.ndarray:
    out = np.empty(leaf.shape, leaf.dtype)
    copy_into(out, leaf)
    return out


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    out = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    start = 0
    for part in parts:
        copy_into(out[start : start + len(part)], part)
        start += len(part)
    return out


def all_gather(variable: Variable) -> None:
    """Make every rank's value the concatenation of the values of all ranks, along axis 0."""
    values = variable.all_leaves()
    variable.unite([_joined([value[leaf] for value in values]) for leaf in range(len(variable.dtypes))])


def _reduced(variable: Variable, op: str) -> list[np.ndarray]:
    by_rank = variable.all_leaves()
    found = []
    with np.errstate(all="ignore"):
        for leaf, dtype in enumerate(variable.dtypes):
            values = [value[leaf] for value in by_rank]
            out = np.empty(values[0].shape, dtype)
            REDUCTIONS[op].reduce_into(values, [1] * len(values), out)
            found.append(out)
    return found


def all_reduce(variable: Variable, op: str) -> None:
    """Reduce the values of all ranks, and give the result to every rank."""
    variable.unite(_reduced(variable, op))


def reduce(variable: Variable, op: str, in_place: bool) -> Any:
    """Reduce the values of all ranks into rank 0's value, or into new arrays for the caller."""
    found = _reduced(variable, op)
    if in_place:
        variable.set_ranks({0: found})
        return None
    return variable.build(found)
