"""Shared variables as the program holds them, and the collectives over them that the program calls.

Memory of a variable: a row of words, one cache line for each rank, then six places and more: common A, common B, and
for each rank own A and own B. ``fronts[rank]`` says which of four places holds the value of a rank. Only the program
writes it, while no call that uses the variable is in flight. Nobody ever writes into a place that is a front. A value
that has outgrown its place gets memory of its own there: from the rank that assigns it, or from the program. A small
variable shares its memory file with others.

In one file because a variable and the collectives share the rule of which place may be written.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synk._engine.collectives import check_rank, check_reduction, check_rows, check_scatter, copied, pair, shapes
from synk._engine.things import Thing
from synk._engine.variable_value import VariableValue
from synk._pure.arrays import copy_into
from synk._pure.ops import REDUCTIONS
from synk._pure.ranges import LINE_NBYTES, round_up
from synk._pure.shards import Selection, shard_bounds
from synk._wire.looks import COMMON_A, COMMON_B, ON_DEVICE, OWN_A, spare_of
from synk._wire.memory import PAGE_NBYTES, Segment
from synk._wire.variables import Shapes, leaf_offsets, shapes_of

SMALL_NBYTES = 1 << 18
"""A variable whose places take no more than this shares its memory file with others."""

__all__ = ["check_reduction", "check_rows", "check_scatter", "pair", "shapes"]


class Place(NamedTuple):
    """Where a value may lie."""

    segment: Segment
    at: int
    nbytes: int


class Variables:
    """The variables of a runtime.

    Attributes
    ----------
    is_closed : bool
    """

    def __init__(self, engine: Any) -> None:
        self.engine = weakref.proxy(engine)
        self.world_size: int = engine.world_size
        self.is_closed = False
        self._living: weakref.WeakSet[Variable] = weakref.WeakSet()

    def living(self) -> list[Variable]:
        return sorted(self._living, key=lambda variable: variable.number)

    def add(self, variable: Variable) -> None:
        self._living.add(variable)

    def __getitem__(self, number: int) -> Variable:
        return next(variable for variable in self._living if variable.number == number)

    def close(self) -> None:
        self.is_closed = True
        for variable in self.living():
            variable.close()


class Variable(VariableValue, Thing):
    """A shared variable: a replica or a shard on each rank.

    Parameters
    ----------
    variables : Variables
    value : array-like, or nesting of arrays
    sharded : bool
    name : str or None

    Attributes
    ----------
    fronts : ndarray of int64
        In shared memory: which place holds the value of each rank.
    counts : ndarray of int64
        In shared memory: by rank and place, how often the program has written there.
    on_device : list of bool
        By rank, whether its value lies on its device alone.
    lost : set of int
        The ranks whose value was lost with their process.
    value_shapes : list of Shapes
        The shapes of the leaves of each rank's value.
    """

    kind = "variable"

    def __init__(self, variables: Variables, value: Any, *, sharded: bool = False, name: str | None = None) -> None:
        Thing.__init__(self, variables.engine)
        self.variables = variables
        self.name = name or f"shared{self.number}"
        self.is_sharded = bool(sharded)
        arrays = self.declare(value)
        world_size = variables.world_size
        parts = self.split(arrays) if self.is_sharded else [arrays]
        self.value_shapes: list[Shapes] = [shapes_of(parts[0])] * world_size
        # By rank and place, the shapes that a rank takes the value there to have; None: nobody knows.
        self._told: list[list[Shapes | None]] = [[None] * 4 for _ in range(world_size)]
        nbytes = max(leaf_offsets(self.dtypes, shapes_of(part))[1] for part in parts)
        step = round_up(max(nbytes, 1), PAGE_NBYTES)
        first = round_up(world_size * LINE_NBYTES, PAGE_NBYTES)
        total = first + (2 + 2 * world_size) * step
        if total <= SMALL_NBYTES and variables.engine.has_shared_memory:
            self.memory = variables.engine.memory.arenas.create(total, is_worker_writable=True)
        else:  # reserved in pieces: most places are never written
            self.memory = Segment.create(total, is_worker_writable=True, is_arena=True)
            self.memory.create_part(0, 0, first)
        if self.memory.arena is not None:
            self.needs = (self.memory,)
            variables.engine.parts[self.number] = self.memory
        words = self.memory.view(0, (world_size, LINE_NBYTES // 8), np.dtype(np.int64))
        self.fronts, self.counts = words[:, 0], words[:, 1:5]
        self.on_device, self.lost = [False] * world_size, set[int]()
        self._step, self._first = step, first
        self._reserved: set[tuple[int, int]] = set()
        self.places: dict[tuple[int, int], Place] = {
            (rank, which): Place(self.memory, first + step * (which if which <= COMMON_B else 2 * rank + which), step)
            for rank in range(world_size)
            for which in range(4)
        }
        if self.is_sharded:
            self.value_shapes = [shapes_of(part) for part in parts]
            for rank, part in enumerate(parts):
                self._fill(rank, OWN_A, part)
                self.fronts[rank] = OWN_A
        else:
            self._fill(0, COMMON_A, arrays)
        variables.add(self)

    @property
    def id(self) -> int:
        return self.number

    @property
    def front(self) -> list[int]:
        return [int(front) for front in self.fronts]

    # -- places -------------------------------------------------------------------------------------------------------

    def told(self, rank: int) -> tuple[Any, Sequence[Segment]]:
        segments = [self.memory]
        number = 0 if self.memory.arena is None else self.memory.id
        found = []
        for which in range(4):
            place = self.places[0 if which <= COMMON_B else rank, which]
            if place.segment not in segments:
                segments.append(place.segment)
            found.append((segments.index(place.segment), place.at, place.nbytes))
        segments = segments[1:] if number else segments
        sizes = [segment.nbytes for segment in segments]
        self._told[rank] = [self.value_shapes[rank]] * 4
        return (
            self.name, self.skeleton(), self.dtypes, self.is_sharded, number, sizes, found, self.value_shapes[rank],
        ), segments  # fmt: skip

    def leaves(self, rank: int) -> list[np.ndarray]:
        """Return views of the value of ``rank``."""
        if self.on_device[rank] or self.lost:
            self.variables.engine.device_values.fetch(self, [rank])
        return self.views(rank, int(self.fronts[rank]), self.value_shapes[rank])

    def all_leaves(self) -> list[list[np.ndarray]]:
        """Return views of the values of all ranks."""
        ranks = range(self.variables.world_size)
        if any(self.on_device) or self.lost:
            self.variables.engine.device_values.fetch(self, ranks)
        return [self.leaves(rank) for rank in ranks]

    def views(self, rank: int, which: int, found: Shapes) -> list[np.ndarray]:
        place = self.places[0 if which <= COMMON_B else rank, which]
        offsets, _ = leaf_offsets(self.dtypes, found)
        return [
            place.segment.view(place.at + at, shape, dtype) for at, shape, dtype in zip(offsets, found, self.dtypes)
        ]

    def spare(self, rank: int) -> int:
        """Return which own place of a rank is no front."""
        return spare_of(self.fronts[rank])

    def spare_common(self) -> int:
        """Return which common place is nobody's front."""
        return COMMON_B if COMMON_A in self.fronts else COMMON_A

    def note_made(self, rank: int, which: int, segment: Segment) -> None:
        """Note that a rank has made memory of its own for a place."""
        self.places[rank, which] = Place(segment, 0, segment.nbytes)

    def room(self, rank: int, which: int, found: Shapes) -> list[np.ndarray]:
        """Return views of a place that is no front, for the program to write a value of these shapes there."""
        self.reserve(rank, which, found)
        self.counts[slice(None) if which <= COMMON_B else rank, which] += 1
        return self.views(rank, which, found)

    def reserve(self, rank: int, which: int, found: Shapes) -> None:
        """See that a place has room for a value of these shapes."""
        key = 0 if which <= COMMON_B else rank, which
        _, nbytes = leaf_offsets(self.dtypes, found)
        place = self.places[key]
        self.variables.engine.note_written(self.number, key)
        if nbytes > place.nbytes:
            self.places[key] = Place(Segment.create(2 * nbytes, is_worker_writable=True), 0, 2 * nbytes)
            self.variables.engine.retell(self.number)  # all ranks are told anew
        elif place.segment is self.memory and not self.needs and key not in self._reserved:
            self.memory.create_part(0, place.at, place.nbytes)
            self._reserved.add(key)

    def _fill(self, rank: int, which: int, arrays: Sequence[np.ndarray]) -> None:
        for target, source in zip(self.room(rank, which, shapes_of(arrays)), arrays):
            copy_into(target, source)

    def turn(self, rank: int, which: int, found: Shapes) -> None:
        """Make a place the value of a rank; a part of a commit, which may be done again."""
        self.value_shapes[rank] = found
        if self._told[rank][which % ON_DEVICE] != found:
            self.variables.engine.retell(self.number, [rank])
        self.fronts[rank], self.on_device[rank] = which % ON_DEVICE, which >= ON_DEVICE
        self.lost.discard(rank)

    def note_assigned(self, rank: int, which: int, found: Shapes) -> None:
        """Note that a rank has written a value of these shapes, and knows them."""
        self._told[rank][which % ON_DEVICE] = found

    def note_failed(self, ranks: Sequence[int]) -> None:
        """Note that a call has failed, in which ranks may have written where there is no front."""
        for rank in ranks:
            self._told[rank][self.spare(rank)] = None

    def close(self) -> None:
        """Release the memory: the runtime is closed."""
        self.fronts, self.counts = np.array(self.fronts), np.array(self.counts)
        for place in self.places.values():
            place.segment.close()
        self.memory.close()
        self.places = {}

    # -- setting ------------------------------------------------------------------------------------------------------

    def set_rank(self, rank: int, arrays: Sequence[np.ndarray]) -> None:
        """Give one rank a value."""
        self.set_ranks({rank: arrays})

    def set_ranks(self, values: dict[int, Sequence[np.ndarray]]) -> None:
        """Give ranks values of their own, all at once."""
        moves = []
        for rank, arrays in values.items():
            which = self.spare(rank)
            self._fill(rank, which, arrays)
            moves.append((self, rank, which, shapes_of(arrays)))
        self.variables.engine.commit(moves)

    def unite(self, arrays: Sequence[np.ndarray]) -> None:
        """Give all ranks one value, in the common place that is nobody's front."""
        found = shapes_of(arrays)
        self._fill(0, self.spare_common(), arrays)
        self.turn_all(found)

    def turn_all(self, found: Shapes) -> None:
        """Make the spare common place the value of all ranks."""
        which = self.spare_common()
        self.variables.engine.commit([(self, rank, which, found) for rank in range(self.variables.world_size)])


# -- collectives, called by the program --------------------------------------------------------------------------------


def broadcast(session: Any, variable: Variable, value: Any = None) -> None:
    """Give every rank ``value``, or without one the value of rank 0."""
    if value is not None or not session.device_values.collective(variable, "broadcast"):
        variable.unite(variable.leaves(0) if value is None else variable.check(value))


def assign(session: Any, variable: Variable, value: Any) -> None:
    """Set the value of all ranks, or divide its rows among them."""
    if variable.is_sharded:
        scatter(session, variable, *check_scatter(variable, value, None))
    else:
        variable.unite(variable.check(value))


def set_value(session: Any, variable: Variable, value: Any, rank: Any) -> None:
    """Set the value of one rank."""
    check_rank(session, variable, rank)
    variable.set_rank(rank, variable.check(value, rank))


def get_value(session: Any, variable: Variable, rank: Any) -> Any:
    """Return a copy of the value on ``rank``."""
    check_rank(session, variable, rank)
    return variable.build([copied(leaf) for leaf in variable.leaves(rank)])


def scatter(session: Any, variable: Variable, arrays: Sequence[np.ndarray], selection: Selection) -> None:
    """Give each rank its part of the selected rows of ``arrays``."""
    bounds = shard_bounds(selection.count, session.world_size)
    variable.set_ranks(
        {rank: [array[selection.between(low, high)] for array in arrays] for rank, (low, high) in enumerate(bounds)}
    )


def gather(session: Any, variable: Variable, nd_up: int) -> Any:
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


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    out = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    start = 0
    for part in parts:
        copy_into(out[start : start + len(part)], part)
        start += len(part)
    return out


def all_gather(session: Any, variable: Variable) -> None:
    """Make every rank's value the concatenation of the values of all ranks, along axis 0."""
    if session.device_values.collective(variable, "all_gather"):
        return
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


def all_reduce(session: Any, variable: Variable, op: str) -> None:
    """Reduce the values of all ranks, and give the result to every rank."""
    check_reduction(session, variable, op)
    if not session.device_values.collective(variable, "all_reduce", op):
        variable.unite(_reduced(variable, op))


def reduce(session: Any, variable: Variable, op: str, in_place: bool) -> Any:
    """Reduce the values of all ranks into rank 0's value, or into new arrays for the caller."""
    check_reduction(session, variable, op)
    found = _reduced(variable, op)
    if in_place:
        variable.set_rank(0, found)
        return None
    return variable.build(found)
