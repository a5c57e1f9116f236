"""Shared variables as the program holds them.

Memory of a variable: a row of words, one cache line for each rank, then six places and more: common A, common B, and
for each rank own A and own B. ``fronts[rank]`` says which of four places holds the value of a rank. Only the program
writes it, while no call that uses the variable is in flight. Nobody ever writes into a place that is a front. A value
that has outgrown its place gets memory of its own there: from the rank that assigns it, or from the program. A small
variable shares its memory file with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synk._engine.things import Living, Thing
from synk._pure.arrays import as_plain_array, check_shareable, copy_into
from synk._pure.ranges import LINE_NBYTES, round_up
from synk._pure.read_only import ordinary
from synk._pure.shards import select_rows, shard_bounds
from synk._pure.trees import describe, skeleton_of, unflatten
from synk._wire.memory import PAGE_NBYTES, Segment
from synk._wire.messages import COMMON_A, COMMON_B, ON_DEVICE, OWN_A, spare_of
from synk._wire.parcels import dumps
from synk._wire.variables import Shapes, check_value, flatten_value, leaf_offsets, shapes_of

SMALL_NBYTES = 1 << 18
"""A variable whose places take no more than this shares its memory file with others."""


class Place(NamedTuple):
    """Where a value may lie."""

    segment: Segment
    at: int
    nbytes: int


class Variable(Thing):
    """A shared variable: a replica or a shard on each rank.

    Parameters
    ----------
    owner : Living
        The variables of a runtime.
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

    def __init__(self, owner: Living[Variable], value: Any, *, sharded: bool = False, name: str | None = None) -> None:
        super().__init__(owner.engine)
        self.owner, self.engine = owner, owner.engine
        self.name = name or f"shared{self.number}"
        self.is_sharded = bool(sharded)
        arrays = self.declare(value)
        world_size = self.engine.world_size
        parts = self.split(arrays) if self.is_sharded else [arrays]
        self.value_shapes: list[Shapes] = [shapes_of(parts[0])] * world_size
        # By rank and place, the shapes that a rank takes the value there to have; None: nobody knows.
        self._told: list[list[Shapes | None]] = [[None] * 4 for _ in range(world_size)]
        nbytes = max(leaf_offsets(self.dtypes, shapes_of(part))[1] for part in parts)
        step = round_up(max(nbytes, 1), PAGE_NBYTES)
        first = round_up(world_size * LINE_NBYTES, PAGE_NBYTES)
        total = first + (2 + 2 * world_size) * step
        if total <= SMALL_NBYTES and self.engine.has_shared_memory:
            self.memory = self.engine.memory.arenas.create(total, is_worker_writable=True)
        else:  # reserved in pieces: most places are never written
            self.memory = Segment.create(total, is_worker_writable=True, is_arena=True)
            self.memory.create_part(0, 0, first)
        if self.memory.arena is not None:
            self.needs = (self.memory,)
            self.engine.parts[self.number] = self.memory
        words = self.memory.view(0, (world_size, LINE_NBYTES // 8), np.dtype(np.int64))
        self.fronts, self.counts = words[:, 0], words[:, 1:5]
        self.on_device, self.lost = [False] * world_size, set[int]()
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
        owner.add(self)

    @property
    def label(self) -> str:
        """Its name, for errors."""
        return f"variable {self.name!r}"

    # -- the kind of its value -----------------------------------------------------------------------------------------

    def declare(self, value: Any) -> list[np.ndarray]:
        """Take dtypes and nesting from a first value. Return its leaves."""
        leaves, self.structure = flatten_value(ordinary(value))
        if not leaves:
            raise ValueError(f"cannot share {self.name!r}: got a value without arrays.")
        arrays = [as_plain_array(leaf, f"variable {self.name!r}") for leaf in leaves]
        self.dtypes = tuple(check_shareable(array.dtype, f"variable {self.name!r}") for array in arrays)
        return arrays

    def split(self, arrays: Sequence[np.ndarray], batch: Any = None) -> list[list[np.ndarray]]:
        """Return each rank's rows of each leaf, of those that ``batch`` selects.

        Raises
        ------
        ValueError
            If a leaf has no axis 0, or the leaves differ in length.
        """
        found = shapes_of(arrays)
        if () in found or len({shape[0] for shape in found}) > 1:
            raise ValueError(
                f"cannot scatter variable {self.name!r}: got shapes {[*found]}, expected rows on axis 0, as many in "
                "each array."
            )
        selection = select_rows(batch, found[0][0], f"the value of {self.name!r}")
        bounds = shard_bounds(selection.count, self.engine.world_size)
        return [[array[selection.between(low, high)] for array in arrays] for low, high in bounds]

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
        skeleton = dumps(skeleton_of(self.structure, len(self.dtypes)))
        return (
            self.name, skeleton, self.dtypes, self.is_sharded, number, sizes, found, self.value_shapes[rank],
        ), segments  # fmt: skip

    def leaves(self, rank: int) -> list[np.ndarray]:
        """Return views of the value of ``rank``."""
        if self.on_device[rank] or self.lost:
            self.engine.device_values.fetch(self, [rank])
        return self.views(rank, int(self.fronts[rank]), self.value_shapes[rank])

    def all_leaves(self) -> list[list[np.ndarray]]:
        """Return views of the values of all ranks."""
        ranks = range(self.engine.world_size)
        if any(self.on_device) or self.lost:
            self.engine.device_values.fetch(self, ranks)
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
        self.engine.note_written(self.number, key)
        if nbytes > place.nbytes:
            self.places[key] = Place(Segment.create(2 * nbytes, is_worker_writable=True), 0, 2 * nbytes)
            self.engine.retell(self.number)  # all ranks are told anew
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
            self.engine.retell(self.number, [rank])
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

    def set_ranks(self, values: dict[int, Sequence[np.ndarray]]) -> None:
        """Give ranks values of their own, all at once."""
        moves = []
        for rank, arrays in values.items():
            which = self.spare(rank)
            self._fill(rank, which, arrays)
            moves.append((self, rank, which, shapes_of(arrays)))
        self.engine.commit(moves)

    def unite(self, arrays: Sequence[np.ndarray]) -> None:
        """Give all ranks one value, in the common place that is nobody's front."""
        which, found = COMMON_B if COMMON_A in self.fronts else COMMON_A, shapes_of(arrays)
        self._fill(0, which, arrays)
        self.engine.commit([(self, rank, which, found) for rank in range(self.engine.world_size)])
