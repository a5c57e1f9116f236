"""What the collectives over shared variables check before anything is moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.arrays import copy_into
from synk._pure.ops import REDUCE_OPS, REDUCTIONS
from synk._pure.shards import Selection, select_rows
from synk._wire.variables import Shapes


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


def check_rank(session: Any, variable: Any, rank: Any) -> None:
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
        raise TypeError(
            f"cannot use {rank!r} as a rank of variable {variable.name!r}: expected an integer. w[rank] is the value "
            "on one rank; the rows are w.value[...]."
        )
    if not 0 <= rank < session.world_size:
        raise IndexError(
            f"cannot use rank {rank} of variable {variable.name!r}: expected 0 to {session.world_size - 1}."
        )


def copied(leaf: np.ndarray) -> np.ndarray:
    out = np.empty(leaf.shape, leaf.dtype)
    copy_into(out, leaf)
    return out


def check_scatter(variable: Any, value: Any, batch: Any) -> tuple[list[np.ndarray], Selection]:
    """Return the arrays to scatter, and which of their rows ``batch`` selects."""
    arrays = variable.check(value)
    if any(array.ndim == 0 for array in arrays) or len({len(array) for array in arrays}) > 1:
        raise ValueError(
            f"cannot scatter to variable {variable.name!r}: got shapes {[array.shape for array in arrays]}, "
            "expected equal axis-0 lengths."
        )
    return arrays, select_rows(batch, len(arrays[0]), f"the value of {variable.name!r}")


def check_rows(variable: Any) -> None:
    """Raise ValueError if a variable has no axis 0."""
    if any(not shape for shape in variable.value_shapes[0]):
        raise ValueError(f"cannot concatenate variable {variable.name!r}: it has no axis 0.")


def check_reduction(session: Any, variable: Any, op: str) -> Shapes:
    """Return the shapes that all ranks have in common."""
    if op not in REDUCE_OPS:
        raise ValueError(
            f"cannot reduce variable {variable.name!r}: got op {op!r}, expected one of "
            f"{', '.join(map(repr, REDUCE_OPS))}."
        )
    for dtype in variable.dtypes:
        REDUCTIONS[op].check(dtype, f"variable {variable.name!r}")
    fronts = variable.value_shapes
    if len(set(fronts)) > 1:
        raise ValueError(
            f"cannot reduce variable {variable.name!r}: got shapes {shapes(variable)}, expected the same on all ranks."
        )
    return fronts[0]


def shapes(variable: Any) -> list[Any]:
    """Return the shape on each rank; for a nested variable, a nesting of shapes."""
    return [variable.build(each) if variable.is_nested else each[0] for each in variable.value_shapes]
