"""Shared variables as the master holds them: two buffers for each rank in shared memory, one of which is the value.

A call is a transaction: it assigns to the second buffers, and one store makes these the values. In one file because one
variable and all of them change together: whether a buffer may be written depends on what the others hold.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._master.processes.log import Dropped
from synk._master.state.memory import Memory
from synk._master.state.variable_value import VariableValue
from synk._master.workers.ranks import Ranks
from synk._pure.arrays import copy_into
from synk._wire.control import Down
from synk._wire.memory import Segment
from synk._wire.messages import Layout
from synk._wire.variables import (
    Declaration,
    Shapes,
    leaf_offsets,
    shapes_of,
)


class Variable(VariableValue):
    """A shared variable as the master holds it: two buffers for each rank, one of which is the value.

    Parameters
    ----------
    variables : Variables
        All variables of the runtime.
    value : array-like, or nesting of arrays
    sharded : bool
    name : str or None
    number : int or None
        Its id; None: the next one that is free.

    Attributes
    ----------
    buffers : list of (Segment or None, Segment or None)
        The buffers of each rank.
    shapes : list of (Shapes, Shapes)
        The shapes of the leaves in either buffer of each rank.
    front : list of int
        For each rank, which buffer holds the value. The next value goes to the other one.
    content : list of int
        For each rank, how often the master has written its value.
    is_stale : list of bool
        For each rank, whether a newer value lies on its device.
    lost : set of int
        Ranks whose value was lost with their worker.
    """

    kind = "variable"
    __slots__ = (
        "__weakref__", "_has_common", "_spares", "buffers", "content", "front", "id", "is_stale", "lost", "shapes",
    )  # fmt: skip

    def __init__(
        self,
        variables: Variables,
        value: Any,
        *,
        sharded: bool = False,
        name: str | None = None,
        number: int | None = None,
    ) -> None:
        self.variables = variables
        self.id = next(variables.ids) if number is None else number
        self.name = name or f"shared{self.id}"
        self.is_sharded = bool(sharded)
        arrays = self.declare(value)
        world_size = variables.world_size
        shapes = tuple(array.shape for array in arrays)
        self.buffers: list[list[Segment | None]] = [[None, None] for _ in range(world_size)]
        self.shapes: list[list[Shapes]] = [[shapes, shapes] for _ in range(world_size)]
        self.front = [0] * world_size
        self.content = [0] * world_size
        self.is_stale = [False] * world_size
        self.lost: set[int] = set()
        self._spares: list[Segment] = []  # buffers of any rank: the common buffer may end up with another rank
        self._has_common = False
        parts = self.split(arrays) if self.is_sharded else [arrays]
        for rank, part in enumerate(parts):
            self.fill_back(rank, part)
        if self.is_sharded:
            self.flip(range(world_size))
        else:
            self.unite(is_new=True)
        variables.add(self)

    def leaves(self, rank: int) -> list[np.ndarray]:
        """Return views of the value of ``rank``."""
        return self._views(rank, self.front[rank])

    def _views(self, rank: int, index: int) -> list[np.ndarray]:
        segment = self.buffers[rank][index]
        assert segment is not None
        shapes = self.shapes[rank][index]
        offsets, _ = leaf_offsets(self.dtypes, shapes)
        return [segment.view(at, shape, dtype) for at, shape, dtype in zip(offsets, shapes, self.dtypes)]

    def reserve(self, rank: int, shapes: Shapes) -> Segment:
        """Make room for ``shapes`` in the second buffer of ``rank``."""
        return self._reserve(rank, 1 - self.front[rank], shapes)

    def reserve_front(self, rank: int) -> Segment:
        """Make room in the first buffer of ``rank`` for the value on its device."""
        return self._reserve(rank, self.front[rank], self.shapes[rank][self.front[rank]])

    def _reserve(self, rank: int, index: int, shapes: Shapes) -> Segment:
        _, nbytes = leaf_offsets(self.dtypes, shapes)
        segment = self.buffers[rank][index]
        if segment is not None and segment.nbytes >= nbytes:
            return segment
        larger = self.buffers[rank][index] = self.variables.memory.arenas.create(nbytes, is_worker_writable=True)
        self._note_change()
        if segment is not None:
            self.variables.memory.released.append(segment)  # freed later: an operation is running
        return larger

    def back(self, rank: int, shapes: Shapes) -> list[np.ndarray]:
        """Return views of the second buffer of ``rank`` for a value of ``shapes``. ``flip`` makes it the value."""
        self.reserve(rank, shapes)
        self.shapes[rank][1 - self.front[rank]] = shapes
        return self._views(rank, 1 - self.front[rank])

    def fill_back(self, rank: int, arrays: Sequence[np.ndarray]) -> None:
        """Copy a value to the second buffer of ``rank``. ``flip`` makes it the value."""
        for target, source in zip(self.back(rank, shapes_of(arrays)), arrays):
            copy_into(target, source)

    def assigned_leaves(self, rank: int) -> list[np.ndarray]:
        """Return views of what a call assigned on ``rank`` and has not committed yet."""
        return self._views(rank, 1 - self.front[rank])

    def note_back(self, rank: int, shapes: Shapes) -> None:
        """Note that a call has stored a value of ``shapes`` in the second buffer of ``rank``, or is about to."""
        self.shapes[rank][1 - self.front[rank]] = shapes

    def copy_back(self, source: int, ranks: Sequence[int]) -> None:
        """Copy the second buffer of ``source`` to the second buffers of ``ranks``."""
        # These ranks have not run the call, so nobody else writes to their second buffers.
        shapes = self.shapes[source][1 - self.front[source]]
        values = self._views(source, 1 - self.front[source])
        for rank in ranks:
            for target, value in zip(self.back(rank, shapes), values):
                np.copyto(target, value)
        self._note_change()

    def flip(self, ranks: Sequence[int] | range) -> None:
        """Make the second buffers of ``ranks`` the values. The workers are told."""
        self._turn([1 - front if rank in ranks else front for rank, front in enumerate(self.front)], ranks)

    def unite(self, *, is_new: bool) -> None:
        """Make one buffer of rank 0 the value of every rank: its second one if ``is_new``, else its first.

        Equal values then lie in memory once. That is safe because nobody ever writes into a first buffer.
        """
        index = 1 - self.front[0] if is_new else self.front[0]
        self.variables.torn, self._has_common = self, True
        for rank in range(1, len(self.front)):
            back = 1 - self.front[rank]
            own = self.buffers[rank][back]
            self.buffers[rank][back] = self.buffers[0][index]
            if own is not None:
                self._spares.append(own)
            self.shapes[rank][back] = self.shapes[0][index]
        front = [index, *(1 - front for front in self.front[1:])]
        self._turn(front, range(0 if is_new else 1, len(front)))

    def _turn(self, front: list[int], written: Sequence[int] | range) -> None:
        """Make other buffers the values, of all ranks at once. Those of ``written`` are new."""
        content = [number + (rank in written) for rank, number in enumerate(self.content)]
        is_stale = [stale and rank not in written for rank, stale in enumerate(self.is_stale)]
        lost = self.lost.difference(written)
        self._note_change()
        self.variables.torn = self
        # No handler of a signal runs between these stores: all ranks have their old value, or all the new one.
        self.front, self.content, self.is_stale, self.lost = front, content, is_stale, lost
        self.separate()
        self.variables.torn = None

    def separate(self) -> None:
        """Give ranks new second buffers where theirs is another rank's buffer. Called after each change of the buffers.

        A rank writes into its second buffer, so it must not share it. Safe to call again after an interrupt.
        """
        if not self._has_common:
            return
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
        """Note that the value of ``rank`` is now the one in shared memory. A copy on its device is out of date."""
        self.content[rank] += 1
        self.is_stale[rank] = False
        self.lost.discard(rank)

    def _note_change(self) -> None:
        self.variables.note_change(self.id)

    def declaration(self, rank: int) -> Declaration:
        """Return what the worker of ``rank`` must know."""
        ids = tuple(0 if segment is None else segment.id for segment in self.buffers[rank])
        shapes = (self.shapes[rank][0], self.shapes[rank][1])
        return Declaration(
            self.id,
            self.name,
            self.skeleton(),
            self.dtypes,
            self.is_sharded,
            (ids[0], ids[1]),
            shapes,
            self.front[rank],
            self.content[rank],
        )

    def segments(self, rank: int) -> list[Segment]:
        """Return the buffers that the worker of ``rank`` uses."""
        return [segment for segment in self.buffers[rank] if segment is not None]

    def _all_segments(self) -> list[Segment]:
        held = [segment for rank in range(len(self.buffers)) for segment in self.segments(rank)]
        return list({segment.id: segment for segment in (*held, *self._spares)}.values())

    @property
    def value_shapes(self) -> list[Shapes]:
        """The shapes of the leaves of each rank's value."""
        return [pairs[front] for pairs, front in zip(self.shapes, self.front)]

    def close(self) -> None:
        """Drop the memory: the runtime is closing."""
        for segment in self._all_segments():
            segment.close()
        self.buffers, self._spares = [], []

    def __del__(self) -> None:
        variables = getattr(self, "variables", None)
        if variables is not None and hasattr(self, "_spares") and not variables.is_closed:
            # A finalizer may run in the middle of an operation that reads these buffers, so they are only queued.
            variables.dropped.append(self.id)
            for segment in self._all_segments():
                variables.memory.released.append(segment)


class Variables:
    """All variables of a runtime, and the changes that affect several of them.

    Parameters
    ----------
    ranks : Ranks
    memory : Memory
    has_devices : bool
        Whether functions leave new values on devices.

    Attributes
    ----------
    ids : iterator of int
        Numbers for new variables.
    dropped : Dropped, of int
        Numbers of variables that no longer exist. Filled by finalizers.
    torn : Variable or None
        A variable whose ranks may have one second buffer, because the master is exchanging buffers, or an interrupt
        broke that off.
    to_flip : list
        The changes of a commit that are not recorded yet, because it is running or an interrupt broke it off.
    """

    def __init__(self, ranks: Ranks, memory: Memory, *, has_devices: bool) -> None:
        self.memory = memory
        self.world_size = ranks.num_ranks
        self.is_closed = False
        self.ids = itertools.count(1)
        self.dropped = Dropped(ranks.log)
        self._log, self._words = ranks.log, ranks.words
        self._has_devices = has_devices
        self._living: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()
        self.torn: Variable | None = None
        self.to_flip: list[tuple[Variable, int, int, bool]] = []
        self._flip_call = -1

    def __getitem__(self, variable_id: int) -> Variable:
        return self._living[variable_id]

    def get(self, variable_id: int) -> Variable | None:
        """Return a variable, or None if it no longer exists."""
        return self._living.get(variable_id)

    def add(self, variable: Variable) -> None:
        self._living[variable.id] = variable
        self.note_change(variable.id)

    def living(self) -> list[Variable]:
        """Return all variables. The copy is one step of the interpreter, so no thread can add one meanwhile."""
        return [variable for ref in self._living.valuerefs() if (variable := ref()) is not None]

    def note_change(self, variable_id: int) -> None:
        """Note that a variable is new, or that the master changed it. Workers learn of it with the next message."""
        self._log.tell("variable", variable_id)

    def told(self, rank: int, variable_id: int) -> tuple[Declaration, list[Segment]] | None:
        """Return what a rank must know of a variable, and the memory that it uses."""
        variable = self.get(variable_id)
        return None if variable is None else (variable.declaration(rank), variable.segments(rank))

    def free_dropped(self) -> None:
        """Have the workers forget variables that no longer exist."""
        while self.dropped:
            self._log.drop("variable", self.dropped.popleft())

    def commit(self, ranks: Sequence[int], layouts: Sequence[Layout], number: int) -> None:
        """Commit the assignments of call ``number``, on all of its ranks at once.

        One store into shared memory decides: before it the call has changed nothing, after it everything. The rest is
        bookkeeping that an interrupt can postpone.
        """
        flips = []
        for rank, layout in zip(ranks, layouts):
            for variable_id, shapes in layout.assigned:
                variable = self._living[variable_id]
                back = 1 - variable.front[rank]
                variable.shapes[rank][back] = shapes
                flips.append((variable, rank, back, False))
        absent = sorted(set(range(self.world_size)) - set(ranks))
        for variable_id, _ in layouts[0].assigned if absent else ():
            variable = self._living[variable_id]
            if not variable.is_sharded:
                # Ranks without rows did not run. They get the value of the lowest rank that did; otherwise replicas
                # would drift apart.
                variable.copy_back(ranks[0], absent)
                flips += [(variable, rank, 1 - variable.front[rank], True) for rank in absent]
        # The order matters: an interrupt before the store leaves to_flip without effect, and one after it leaves the
        # rest to finish_commit. The ranks are idle and read the word only after their next doorbell.
        self._flip_call = number
        self.to_flip = flips
        self._words.down[list(ranks), Down.COMMITTED] = number
        self.finish_commit()

    def finish_commit(self) -> None:
        """Record a commit that an interrupt may have broken off after its store, and part buffers it left shared."""
        if self.torn is not None:
            self.torn.separate()
            self.torn = None
        flips = self.to_flip
        if not flips:
            return
        if int(self._words.down[flips[0][1], Down.COMMITTED]) == self._flip_call:
            # Broken off in the middle, this is done again from the beginning. It names the buffer that is the value and
            # does not exchange the two, so once more does no harm.
            for variable, rank, front, is_followed in flips:
                variable.front[rank] = front
                if is_followed:
                    variable.note_written(rank)
                elif self._has_devices:
                    variable.is_stale[rank] = True
                    variable.lost.discard(rank)
            for variable in {variable for variable, *_ in flips}:
                variable.separate()
        self.to_flip = []

    def close(self) -> None:
        """Drop all memory: the runtime is closing."""
        self.is_closed = True
        for variable in self.living():
            variable.close()
