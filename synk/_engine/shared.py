"""``Shared``: state that lives on the workers between calls, one replica or one shard for each rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from synk._code.parcels import Handle
from synk._engine import collectives
from synk._engine.variables import Variable
from synk._pure.read_only import read_only
from synk._pure.tracebacks import verb
from synk._wire.variables import resolve_variable, value_as_array


class Shared(Handle):
    """A variable on every rank: an array, or a nesting of arrays such as the parameters of a model.

    Made by :func:`synk.shared`. Inside a function ``w.value`` reads and assigns this rank's value; functions refer to
    the variable by closing over it. A call is a transaction: its assignments take effect on all ranks if it succeeds,
    and on none if it fails.

    In the program ``w.value`` is a copy of rank 0's replica, or of the gathered shards. Assigning to it broadcasts or
    scatters. ``w[rank]`` is the value of one rank, to read and to assign. What is read is a read-only copy, arrays and
    containers alike, since a change in place would be lost; ``copy.deepcopy(w.value)`` may be changed.
    ``w.value += 1`` assigns.
    """

    __slots__ = ("__weakref__", "_session")  # so that a misspelt ``w.vlaue = ...`` is an error

    def __init__(self, session: Any, variable: Variable) -> None:
        self._session = session
        self._referent = variable
        self._reference = (resolve_variable, (variable.number,))

    @property
    def name(self) -> str:
        return self._referent.name

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the rows instead of a replica."""
        return self._referent.is_sharded

    @property
    @verb
    def value(self) -> Any:
        """A read-only copy of rank 0's value, or if sharded, of the shards concatenated along axis 0."""
        return read_only(self._read())

    @value.setter
    @verb
    def value(self, value: Any) -> None:
        self._session.run("assign", collectives.assign, self._referent, value)

    @verb
    def __getitem__(self, rank: int) -> Any:
        """Return a read-only copy of the value on one rank."""
        return read_only(self._session.run("read", collectives.get_value, self._referent, rank))

    @verb
    def __setitem__(self, rank: int, value: Any) -> None:
        """Set the value of one rank."""
        self._session.run("assign", collectives.set_value, self._referent, value, rank)

    __iter__ = None  # ranks are no elements: a loop over ``w`` would be meant for its rows

    @verb
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return value_as_array(self, self._referent.structure, dtype, copy)

    @property
    def dtype(self) -> Any:
        """The dtype of the array, or a nesting of dtypes."""
        variable = self._referent
        return variable.build(variable.dtypes) if variable.is_nested else variable.dtypes[0]

    @property
    def shape(self) -> Any:
        """The shape of rank 0's replica, or of all shards together."""
        variable = self._referent
        shapes = variable.value_shapes
        whole = list(shapes[0])
        if variable.is_sharded:
            whole = [(sum(rank[leaf][0] for rank in shapes), *shape[1:]) for leaf, shape in enumerate(whole)]
        return variable.build(whole) if variable.is_nested else whole[0]

    @property
    @verb
    def lengths(self) -> list[int]:
        """How many rows each rank has.

        Raises
        ------
        ValueError
            If the variable has no axis 0.
        """
        variable: Variable = self._referent
        return self._session.run("count rows", lambda: variable.lengths)

    @property
    @verb
    def shapes(self) -> list[Any]:
        """The shape of each rank's value; of a nested value a nesting of shapes."""
        return self._session.run("look at shapes", collectives.shapes, self._referent)

    def _read(self) -> Any:
        """Return a copy of rank 0's value, or of all shards together."""
        read = collectives.gather if self.is_sharded else collectives.get_value
        return self._session.run("read", read, self._referent, 0)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle variable {self.name!r}: it lives on the workers. Pass it as an argument, or close over it; "
            "synk.Program keeps it together with the functions that use it."
        )

    def __repr__(self) -> str:
        kind = "sharded" if self.is_sharded else "replicated"
        return f"<synk.Shared {self.name!r} {kind} shape={self.shape} dtype={self.dtype}>"
