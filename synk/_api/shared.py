"""``Shared``: state that lives on the workers between calls, one replica or one shard per rank.

Owns two buffers per rank in shared memory, of which one is the value and the other takes the next one. The verbs that
move values between ranks are in ``synk._master.collectives``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from synk._pure.arrays import as_plain_array, check_shareable, copy_into
from synk._pure.interrupts import deferred
from synk._pure.read_only import ordinary
from synk._pure.shards import shard_bounds
from synk._pure.trees import describe, skeleton_of, unflatten
from synk._wire.memory import Segment
from synk._wire.messages import Input
from synk._wire.variables import (
    Declaration,
    Shapes,
    check_value,
    flatten_value,
    leaf_offsets,
    resolve_variable,
    shapes_of,
    value_as_array,
)
from synk.errors import ClosedError

if TYPE_CHECKING:
    from synk._api.runtime import Runtime
    from synk._master.arguments import Argument

_variable_ids = itertools.count(1)


class _Pickled(threading.local):
    """The variables met while a function is pickled: those it closes over."""

    met: set[Shared] | None = None


pickled = _Pickled()


class Shared:
    """A variable on every rank: an array, or a nesting of arrays (the parameters of a model). Made by
    :func:`synk.shared`.

    Inside a function ``w.value`` reads and assigns this rank's value; functions refer to the variable by closing over
    it. A call is a transaction: its assignments take effect on all ranks when it succeeds, and on none if it fails.

    In the master ``w.value`` is a copy of rank 0's replica, or the gathered shards; assigning it broadcasts, or
    scatters. The copy is read-only, arrays and containers alike, since a change in place would be lost:
    ``synk.get_value(w)`` gives one that is the caller's own. ``w.value += 1`` assigns.

    Attributes
    ----------
    name : str
    is_sharded : bool
    dtype : dtype, or nesting of dtypes
    """

    _synk_shared = True
    __slots__ = (  # so that a misspelt ``w.vlaue = ...`` is an error
        "__weakref__", "_dtypes", "_has_common", "_id", "_runtime", "_spares", "_structure", "buffers", "content",
        "front", "is_sharded", "is_stale", "lost", "name", "shapes", "version",
    )  # fmt: skip

    def __init__(self, runtime: Runtime, value: Any, *, sharded: bool = False, name: str | None = None) -> None:
        self._runtime = runtime
        self._id = next(_variable_ids)
        self.name = name or f"shared{self._id}"
        self.is_sharded = bool(sharded)
        leaves, self._structure = flatten_value(ordinary(value))
        if not leaves:
            raise ValueError(f"cannot share {self.name!r}: got a value without arrays.")
        arrays = [as_plain_array(leaf, f"variable {self.name!r}") for leaf in leaves]
        self._dtypes = tuple(check_shareable(array.dtype, f"variable {self.name!r}") for array in arrays)
        world_size = runtime.world_size
        shapes = tuple(array.shape for array in arrays)
        self.buffers: list[list[Segment | None]] = [[None, None] for _ in range(world_size)]
        self.shapes: list[list[Shapes]] = [[shapes, shapes] for _ in range(world_size)]
        self.front = [0] * world_size
        # Of each rank: how often the master has written the value, and whether a newer one lies on the rank's device.
        self.content = [0] * world_size
        self.is_stale = [False] * world_size
        self.lost: set[int] = set()
        self.version = 0
        self._spares: list[Segment] = []  # of whichever rank: the common one may come to lie with another rank
        self._has_common = False
        parts = self.split(arrays) if self.is_sharded else [arrays]
        for rank, part in enumerate(parts):
            targets = self.back(rank, shapes_of(part))
            for target, source in zip(targets, part):
                copy_into(target, source)
        if self.is_sharded:
            self.flip(range(world_size))
        else:
            self.unite(is_new=True)
        runtime.add_variable(self)

    # -- buffers ------------------------------------------------------------------------------------------------------

    def split(self, arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Return each rank's rows of each leaf.

        Raises
        ------
        ValueError
            If a leaf has no axis 0, or the leaves differ in length.
        """
        shapes = [array.shape for array in arrays]
        if () in shapes:
            raise ValueError(f"cannot scatter variable {self.name!r}: got a single value, expected rows on axis 0.")
        if len({shape[0] for shape in shapes}) > 1:
            raise ValueError(
                f"cannot scatter variable {self.name!r}: got shapes {shapes}, expected one axis-0 length for all its "
                f"arrays."
            )
        length = shapes[0][0]
        return [[array[low:high] for array in arrays] for low, high in shard_bounds(length, self._runtime.world_size)]

    def leaves(self, rank: int) -> list[np.ndarray]:
        """Views of the value of ``rank``."""
        return self._views(rank, self.front[rank])

    def _views(self, rank: int, index: int) -> list[np.ndarray]:
        segment = self.buffers[rank][index]
        assert segment is not None
        shapes = self.shapes[rank][index]
        offsets, _ = leaf_offsets(self._dtypes, shapes)
        return [segment.view(at, shape, dtype) for at, shape, dtype in zip(offsets, shapes, self._dtypes)]

    def reserve(self, rank: int, shapes: Shapes) -> Segment:
        """Give the second buffer of ``rank`` room for ``shapes``."""
        return self._reserve(rank, 1 - self.front[rank], shapes)

    def reserve_front(self, rank: int) -> Segment:
        """Give the first buffer of ``rank`` room for the value on its device."""
        return self._reserve(rank, self.front[rank], self.shapes[rank][self.front[rank]])

    def _reserve(self, rank: int, index: int, shapes: Shapes) -> Segment:
        _, nbytes = leaf_offsets(self._dtypes, shapes)
        segment = self.buffers[rank][index]
        if segment is not None and segment.nbytes >= nbytes:
            return segment
        with deferred():  # a buffer of which the worker is not told could never be filled
            larger = self.buffers[rank][index] = self._runtime.arenas.create(nbytes, is_worker_writable=True)
            self._note_change()
            if segment is not None:
                self._runtime.release(segment)
        return larger

    def back(self, rank: int, shapes: Shapes) -> list[np.ndarray]:
        """Return views of the second buffer of ``rank``, for a value of ``shapes``; ``flip`` makes it the value."""
        self.reserve(rank, shapes)
        self.shapes[rank][1 - self.front[rank]] = shapes
        return self._views(rank, 1 - self.front[rank])

    def assigned_leaves(self, rank: int) -> list[np.ndarray]:
        """Views of what a call has assigned on ``rank`` and what does not hold yet."""
        return self._views(rank, 1 - self.front[rank])

    def note_back(self, rank: int, shapes: Shapes) -> None:
        """A call has stored a value of ``shapes`` in the second buffer of ``rank``, or is about to."""
        self.shapes[rank][1 - self.front[rank]] = shapes

    def copy_back(self, source: int, ranks: Sequence[int]) -> None:
        """Copy the second buffer of ``source`` to those of ``ranks``."""
        shapes = self.shapes[source][1 - self.front[source]]
        values = self._views(source, 1 - self.front[source])
        for rank in ranks:
            for target, value in zip(self.back(rank, shapes), values):
                np.copyto(target, value)
        self._note_change()

    def flip(self, ranks: Sequence[int] | range) -> None:
        """Make the second buffers of ``ranks`` the values, from the master's side: workers are told."""
        with deferred():
            self._note_change()
            self.front = [1 - front if rank in ranks else front for rank, front in enumerate(self.front)]
            for rank in ranks:
                self.note_written(rank)
            self.separate()

    def unite(self, *, is_new: bool) -> None:
        """Make one buffer of rank 0 the value of every rank: its second one if ``is_new``, else its first.

        Equal values lie in memory once. Nobody writes into a first buffer, so nobody notices.
        """
        with deferred():
            self._note_change()
            if is_new:
                self.front[0] = 1 - self.front[0]
                self.note_written(0)
            index = self.front[0]
            for rank in range(1, len(self.front)):
                back = 1 - self.front[rank]
                own = self.buffers[rank][back]
                self.buffers[rank][back] = self.buffers[0][index]
                if own is not None:
                    self._spares.append(own)
                self.shapes[rank][back] = self.shapes[0][index]
                self.front[rank] = back
                self.note_written(rank)
            self._has_common = True
            self.separate()

    def separate(self) -> None:
        """See that no rank's second buffer, into which it writes, is another rank's buffer; after each change of them.

        Safe to repeat where an interrupt broke it off.
        """
        if not self._has_common:
            return
        with deferred():
            firsts = [pair[front] for pair, front in zip(self.buffers, self.front)]
            taken = {id(segment) for segment in firsts}
            self._has_common = len(taken) < len(firsts)
            for rank, pair in enumerate(self.buffers):
                back = 1 - self.front[rank]
                if pair[back] is not None and id(pair[back]) in taken:
                    pair[back] = self._spares.pop() if self._spares else None
                    self._note_change()
                taken.add(id(pair[back]))

    def note_written(self, rank: int) -> None:
        """The value of ``rank`` is now what lies in shared memory: a copy on its device is out of date."""
        self.content[rank] += 1
        self.is_stale[rank] = False
        self.lost.discard(rank)

    def _note_change(self) -> None:
        self.version += 1
        self._runtime.note_change()

    def declaration(self, rank: int) -> Declaration:
        """Return what the worker of ``rank`` must know."""
        ids = tuple(0 if segment is None else segment.id for segment in self.buffers[rank])
        skeleton = cloudpickle.dumps(skeleton_of(self._structure, len(self._dtypes)), protocol=5)
        shapes = (self.shapes[rank][0], self.shapes[rank][1])
        return Declaration(
            self._id,
            self.name,
            skeleton,
            self._dtypes,
            self.is_sharded,
            (ids[0], ids[1]),
            shapes,
            self.front[rank],
            self.version,
            self.content[rank],
        )

    def segments(self, rank: int) -> list[Segment]:
        """What the worker of ``rank`` works on."""
        return [segment for segment in self.buffers[rank] if segment is not None]

    def _all_segments(self) -> list[Segment]:
        held = [segment for rank in range(len(self.buffers)) for segment in self.segments(rank)]
        return list({segment.id: segment for segment in (*held, *self._spares)}.values())

    # -- values -------------------------------------------------------------------------------------------------------

    def check(self, value: Any, rank: int = 0) -> list[np.ndarray]:
        """Return the leaves of ``value`` as arrays that fit this variable."""
        leaves, structure = flatten_value(ordinary(value), self._structure)
        if structure != self._structure:
            raise ValueError(
                f"cannot set variable {self.name!r}: got a value of structure {describe(structure)}, "
                f"expected {describe(self._structure)}."
            )
        shapes = self.shapes[rank][self.front[rank]]
        return [
            np.asarray(array, dtype=dtype)
            for array, dtype in zip(
                check_value(self.name, leaves, self._dtypes, shapes, is_sharded=self.is_sharded), self._dtypes
            )
        ]

    def build(self, leaves: Sequence[Any]) -> Any:
        """Return the nesting of this variable with ``leaves`` in place."""
        return unflatten(self._structure, list(leaves))

    @property
    def value(self) -> Any:
        """Replicated: a copy of rank 0's value. Sharded: the shards concatenated along axis 0. Read-only."""
        return self._runtime.value_of(self)

    @value.setter
    def value(self, value: Any) -> None:
        if self.is_sharded:
            self._runtime.scatter(self, value)
        else:
            self._runtime.set_value(self, value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return value_as_array(self, dtype, copy)

    @property
    def dtype(self) -> Any:
        return self._dtypes[0] if self._structure == "leaf" else self.build(self._dtypes)

    @property
    def shape(self) -> Any:
        """Of rank 0's replica, or of all shards together."""
        shapes = [self.shapes[rank][self.front[rank]] for rank in range(self._runtime.world_size)]
        whole = list(shapes[0])
        if self.is_sharded:
            whole = [(sum(rank[leaf][0] for rank in shapes), *shape[1:]) for leaf, shape in enumerate(whole)]
        return whole[0] if self._structure == "leaf" else self.build(whole)

    @property
    def lengths(self) -> list[int]:
        """Rows on each rank.

        Raises
        ------
        ValueError
            If the variable has no axis 0.
        """
        if not self.shapes[0][self.front[0]][0]:
            raise ValueError(f"cannot count the rows of variable {self.name!r}: it has no axis 0.")
        return [self.shapes[rank][self.front[rank]][0][0] for rank in range(self._runtime.world_size)]

    # -- in calls -----------------------------------------------------------------------------------------------------

    def _as_argument(
        self, label: str, keyword: str, is_broadcast: bool, function_name: str, runtime: Runtime
    ) -> Argument:
        from synk._master.arguments import Argument

        check_owner(self, runtime, f"{label} of {function_name!r}")
        if is_broadcast == self.is_sharded:
            is_kind = "sharded" if self.is_sharded else "replicated"
            hint = "take it out of bcast_inputs" if self.is_sharded else f"add {label!r} to bcast_inputs"
            raise ValueError(f"cannot pass {label} of {function_name!r}: variable {self.name!r} is {is_kind}; {hint}.")
        return Argument(label, keyword, "shard" if self.is_sharded else "replica", value=self)

    @property
    def is_nested(self) -> bool:
        """Whether the value is a nesting of arrays."""
        return bool(self._structure != "leaf")

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)

    @property
    def plan_key(self) -> int:
        return self._id

    def as_input(self, keyword: str, kind: str) -> Input:
        return Input(keyword, kind, self._id)

    def __reduce__(self) -> Any:
        if pickled.met is None:
            raise TypeError(
                f"cannot pickle variable {self.name!r}: it lives on the workers. Pass it as an argument, or close "
                f"over it."
            )
        pickled.met.add(self)
        return resolve_variable, (self._id,)

    def __repr__(self) -> str:
        kind = "sharded" if self.is_sharded else "replicated"
        return f"<synk.Shared {self.name!r} {kind} shape={self.shape} dtype={self.dtype}>"

    def close(self) -> None:
        """Drop the memory; the runtime is closing."""
        for segment in self._all_segments():
            segment.close()
        self.buffers, self._spares = [], []

    def __del__(self) -> None:
        runtime = getattr(self, "_runtime", None)
        if runtime is not None and hasattr(self, "_spares") and not runtime.is_closed:
            runtime._dropped_variables.append(self._id)
            runtime._released.extend(self._all_segments())


def check_owner(variable: Shared, runtime: Runtime, what: str) -> None:
    """Raise where ``variable`` belongs to another runtime."""
    if variable._runtime is not runtime:
        if variable._runtime.is_closed:
            raise ClosedError(
                f"cannot use {what}: the runtime of variable {variable.name!r} was closed. Make it again."
            )
        raise ValueError(f"cannot use {what}: variable {variable.name!r} belongs to another runtime.")
