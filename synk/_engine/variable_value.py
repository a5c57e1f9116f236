"""What a variable holds, wherever its values lie: a name, dtypes, a nesting, and shapes for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.arrays import as_plain_array, check_shareable
from synk._pure.read_only import ordinary
from synk._pure.shards import shard_bounds
from synk._pure.trees import describe, skeleton_of, unflatten
from synk._wire.parcels import dumps
from synk._wire.variables import check_value, flatten_value
from synk.errors import ClosedError


class VariableValue:
    """The kind of value that a variable holds. A subclass has ``value_shapes``: of the leaves of each rank's value.

    Attributes
    ----------
    variables
        All variables of the runtime.
    """

    __slots__ = ("dtypes", "is_sharded", "name", "structure", "variables")

    name: str
    is_sharded: bool
    variables: Any
    value_shapes: Any

    def declare(self, value: Any) -> list[np.ndarray]:
        """Take dtypes and nesting from a first value. Return its leaves."""
        leaves, self.structure = flatten_value(ordinary(value))
        if not leaves:
            raise ValueError(f"cannot share {self.name!r}: got a value without arrays.")
        arrays = [as_plain_array(leaf, f"variable {self.name!r}") for leaf in leaves]
        self.dtypes = tuple(check_shareable(array.dtype, f"variable {self.name!r}") for array in arrays)
        return arrays

    def split(self, arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Return each rank's rows of each leaf.

        Raises
        ------
        ValueError
            If a leaf has no axis 0, or the leaves differ in length.
        """
        found = [array.shape for array in arrays]
        if () in found:
            raise ValueError(f"cannot scatter variable {self.name!r}: got a single value, expected rows on axis 0.")
        if len({shape[0] for shape in found}) > 1:
            raise ValueError(
                f"cannot scatter variable {self.name!r}: got shapes {found}, expected one axis-0 length for all its "
                f"arrays."
            )
        bounds = shard_bounds(found[0][0], self.variables.world_size)
        return [[array[low:high] for array in arrays] for low, high in bounds]

    def check(self, value: Any, rank: int = 0) -> list[np.ndarray]:
        """Return the leaves of ``value`` as arrays that fit this variable."""
        leaves, structure = flatten_value(ordinary(value), self.structure)
        if structure != self.structure:
            raise ValueError(
                f"cannot set variable {self.name!r}: got a value of structure {describe(structure)}, "
                f"expected {describe(self.structure)}."
            )
        checked = check_value(self.name, leaves, self.dtypes, self.value_shapes[rank], is_sharded=self.is_sharded)
        return [np.asarray(array, dtype=dtype) for array, dtype in zip(checked, self.dtypes)]

    def build(self, leaves: Sequence[Any]) -> Any:
        """Return the nesting of this variable, filled with ``leaves``."""
        return unflatten(self.structure, list(leaves))

    @property
    def is_nested(self) -> bool:
        """Whether the value is a nesting of arrays."""
        return bool(self.structure != "leaf")

    @property
    def lengths(self) -> list[int]:
        """How many rows each rank has.

        Raises
        ------
        ValueError
            If the variable has no axis 0.
        """
        if not self.value_shapes[0][0]:
            raise ValueError(f"cannot count the rows of variable {self.name!r}: it has no axis 0.")
        return [shapes[0][0] for shapes in self.value_shapes]

    def skeleton(self) -> bytes:
        """Return the pickled nesting of the value, with the position of each leaf in its place."""
        return dumps(skeleton_of(self.structure, len(self.dtypes)))


def check_owner(variable: Any, variables: Any, what: str) -> None:
    """Raise if ``variable`` belongs to another runtime."""
    if variable.variables is not variables:
        if variable.variables.is_closed:
            raise ClosedError(
                f"cannot use {what}: the runtime of variable {variable.name!r} was closed. Make it again."
            )
        raise ValueError(f"cannot use {what}: variable {variable.name!r} belongs to another runtime.")
