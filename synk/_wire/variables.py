"""Shared variables as both halves know them: how a value is checked, and how it lies in a buffer."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._pure.arrays import as_held, as_plain_array
from synk._pure.ranges import places_of
from synk._pure.trees import describe, flatten
from synk._wire.cell import cell

Shapes = tuple[tuple[int, ...], ...]


def shapes_of(leaves: Sequence[Any]) -> Shapes:
    return tuple(leaf.shape for leaf in leaves)


def leaf_offsets(dtypes: Sequence[np.dtype], shapes: Shapes) -> tuple[list[int], int]:
    """Return the byte offset of each leaf in a variable's buffer, and the buffer's size."""
    return places_of([math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes)])


def flatten_value(value: Any, expected: Any = None) -> tuple[list[Any], Any]:
    """Flatten the value of a variable. Lists of numbers, texts or dates are arrays; other containers are nestings.

    ``expected`` is the structure of the variable, if it is known.

    Examples
    --------
    >>> flatten_value([np.float64(1), 2.0])[1], flatten_value([1.0, 2.0], flatten([np.array(1), np.array(2)])[1])[0]
    ('leaf', [1.0, 2.0])
    """
    is_list = isinstance(value, (list, tuple)) if expected == "leaf" else expected is None and isinstance(value, list)
    return ([value], "leaf") if is_list and (expected or _is_plain(value)) else flatten(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_plain, value))
    is_structure = value is None or isinstance(value, dict)
    return isinstance(value, np.generic) or not (is_structure or hasattr(value, "__array__"))


def check_value(
    name: str,
    leaves: Sequence[Any],
    dtypes: Sequence[np.dtype],
    shapes: Shapes,
    *,
    is_sharded: bool = False,
    as_array: Callable[[Any, str], Any] = as_plain_array,
) -> list[Any]:
    """Return ``leaves`` as arrays that fit a variable: same number, axes and trailing shape, and a dtype that casts
    safely, or values that the dtype holds.

    Raises
    ------
    ValueError, TypeError
        With the variable's name, what it got and what it expects.
    """
    arrays = []
    for position, (leaf, dtype, shape) in enumerate(zip(leaves, dtypes, shapes)):
        where = f"variable {name!r}" + (f" (leaf {position})" if len(dtypes) > 1 else "")
        array = as_array(as_held(leaf, dtype, where), where)
        if not np.can_cast(array.dtype, dtype, "safe"):
            raise TypeError(
                f"cannot assign {where}: got dtype {array.dtype}, expected {dtype}, or a list of values that it holds. "
                f"Convert it with astype({str(dtype)!r})."
            )
        if array.ndim != len(shape):
            raise ValueError(
                f"cannot assign {where}: got {array.ndim} axes {array.shape}, expected {len(shape)} {shape}."
            )
        if array.shape[1:] != shape[1:]:
            raise ValueError(
                f"cannot assign {where}: got shape {array.shape}, expected (rows, {', '.join(map(str, shape[1:]))}): "
                "only axis 0 can change."
            )
        arrays.append(array)
    if is_sharded and len({array.shape[0] for array in arrays}) > 1:
        raise ValueError(
            f"cannot assign variable {name!r}: got axis-0 lengths {[array.shape[0] for array in arrays]}, expected one "
            "length for all arrays of a sharded variable."
        )
    return arrays


def split_updates(name: str, result: Any, count: int) -> tuple[Any, Sequence[Any]]:
    """Return the outputs and the new values of so many variables, which a function with ``updates=`` has returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"cannot update the variables of {name!r}: got a result of type {type(result).__name__}, expected "
            "(outputs, new_values) because of updates=."
        )
    outputs, values = result
    if count == 1 and not (isinstance(values, (tuple, list)) and len(values) == 1):
        values = (values,)
    if not isinstance(values, (tuple, list)) or len(values) != count:
        raise ValueError(
            f"cannot update the variables of {name!r}: got "
            f"{len(values) if isinstance(values, (tuple, list)) else 1} new values, expected one for each of the "
            f"{count} updates."
        )
    return outputs, values


def value_as_array(variable: Any, structure: Any, dtype: Any, copy: bool | None) -> np.ndarray:
    """Return ``variable.value`` in the form that NumPy requests through ``__array__``."""
    if structure != "leaf":
        raise TypeError(
            f"cannot make an array of variable {variable.name!r}: got {describe(structure)}, expected one array. "
            "Take one of the arrays of its value."
        )
    return np.array(variable.value, dtype=dtype) if copy else np.asarray(variable.value, dtype=dtype)


def resolve_variable(variable_id: int) -> Any:
    """Return this worker's replica. This loads a pickled ``Shared``."""
    if cell.worker is None:
        raise pickle.UnpicklingError(
            "cannot load a shared variable here: it can only be used on the workers of its runtime."
        )
    return cell.worker.variables.get(variable_id)
