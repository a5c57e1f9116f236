"""The large outputs of a call on its rank: chunks for other ranks to reduce, and this rank's part of the result."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from synk._pure.ops import REDUCTIONS, Op, Reduction, accumulator_dtype
from synk._pure.ranges import chunk_bounds
from synk._wire.memory import Segment
from synk._wire.messages import Leaf, Move, slot_offsets
from synk._worker.held.plans import PreparedPlan
from synk._worker.held.slots import NO_VIEW, Slots
from synk.backends import Backend

if TYPE_CHECKING:
    from synk.cuda._collectives import NcclCollectives


def own(backend: Backend, holder: Any, position: int) -> Any:
    """Return the array at ``holder[position]``, or a copy if anybody else could change it."""
    if backend.is_device or not is_only_reference(holder, position):
        return backend.own_copy(holder[position])
    return holder[position]


def is_only_reference(holder: Any, position: int) -> bool:
    """Whether ``holder[position]``, a NumPy array, is the only reference to its memory."""
    return _references(holder, position) in _ONLY_REFERENCES


def _references(holder: Any, position: int) -> tuple[bool, bool, int, int]:
    """Return whether NumPy owns an array's memory, whether it is no view, and the references to it and to its base."""
    array = holder[position]
    owner = array if array.base is None else array.base
    is_own = type(owner) is np.ndarray and owner.flags.owndata and not weakref.getweakrefcount(owner)
    return is_own, array is owner, sys.getrefcount(array), sys.getrefcount(owner)


# Measured, because interpreters differ in the references that their own variables add.
_ONLY_REFERENCES = (_references([np.empty(1)], 0), _references([np.empty(1)[:]], 0))


class LargeOutputs:
    """The large outputs of one call, kept until they are assembled.

    Attributes
    ----------
    collectives : NcclCollectives or None
        The collectives between all ranks, if the ranks have joined an NCCL group.
    """

    def __init__(self, backend: Backend, slots: Slots) -> None:
        self._backend = backend
        self._slots = slots
        self._parts: dict[int, Any] = {}
        self.collectives: NcclCollectives | None = None

    def forget(self) -> None:
        self._parts = {}

    def publish(self, position: int, array: Any, view: np.ndarray, op: Op) -> None:
        """Copy the chunks that other ranks reduce to the slot, and keep what this rank writes to the result itself."""
        self._parts[position] = self._publish_chunks(array, view) if isinstance(op, Reduction) else array

    def _publish_chunks(self, array: Any, view: np.ndarray) -> Any:
        """Copy the chunks that other ranks reduce to the slot. Return the elements that this rank reduces itself."""
        participants = self._slots.participants
        if view is NO_VIEW and len(participants) > 1:  # the devices reduce it
            array = self._backend.as_array(array, "a large output")
        flat = self._backend.flat(array)
        if len(participants) == 1 or view is NO_VIEW:
            return flat
        flat_view = view.reshape(-1)
        bounds = dict(zip(participants, chunk_bounds(flat.size, flat.itemsize, len(participants))))
        own_start, own_stop = bounds.pop(self._slots.rank)
        for start, stop in bounds.values():
            self._backend.to_host(flat[start:stop], flat_view[start:stop])
        return flat[own_start:own_stop]

    def detach(self) -> None:
        """Copy the parts that the user's code could change; it is about to run again."""
        for position in self._parts:
            self._parts[position] = own(self._backend, self._parts, position)

    def assemble(self, prepared: PreparedPlan, moves: Sequence[Move], result: Segment) -> None:
        """Write this rank's part of the large outputs to the result segment."""
        assert prepared.layout is not None
        leaves = prepared.layout.leaves
        rows = self._slots.rows()
        offsets, _ = slot_offsets(leaves, prepared.ops, len(rows), self._slots.has_group)
        self._reduce_on_devices([move for move in moves if move.kind == "device"], leaves, rows, result)
        for move in moves:
            leaf = leaves[move.leaf]
            if move.kind == "copy":
                self._backend.to_host(self._parts[move.leaf], result.view(move.offset, leaf.shape, leaf.dtype))
            elif move.kind in ("reduce", "merge"):
                self._reduce(move, leaf, offsets[move.leaf], rows, result)

    def _reduce(self, move: Move, leaf: Leaf, offset: int, rows: list[int], result: Segment) -> None:
        """Reduce this rank's chunk of an output, which lies at ``offset`` in the slots of all other ranks."""
        slots, start = self._slots, move.start
        count = move.stop - start
        dtype = accumulator_dtype(leaf.dtype) if move.kind == "merge" else leaf.dtype
        out = result.view(move.offset + start * dtype.itemsize, (count,), dtype)
        if len(rows) == 1 and move.kind == "reduce":
            self._backend.to_host(self._parts[move.leaf], out)
            return
        assert slots.segment is not None
        # The slots of the others are complete: the ranks have met, or the master has the replies of all. A rank that
        # has died since then has left its slot behind, and the master drops the result.
        values = []
        for rank in slots.participants:
            if rank == slots.rank:
                values.append(self._backend.host_copy(self._parts[move.leaf]))
            else:
                at = rank * slots.nbytes + offset + start * leaf.dtype.itemsize
                values.append(slots.segment.view(at, (count,), leaf.dtype))
        op = REDUCTIONS[move.op]
        with np.errstate(all="ignore"):
            op.merge_into(values, rows, out) if move.kind == "merge" else op.reduce_into(values, rows, out)

    def _reduce_on_devices(
        self, moves: Sequence[Move], leaves: Sequence[Leaf], rows: list[int], result: Segment
    ) -> None:
        """Reduce large outputs with NCCL, in one launch, and write this rank's block of each to the result."""
        if not moves:
            return
        assert self.collectives is not None
        share = rows[self._slots.rank] / sum(rows) if len(set(rows)) > 1 else None
        with self.collectives.guard():
            weights = [share if REDUCTIONS[move.op].is_weighted else None for move in moves]
            items = [(self._parts[move.leaf], move.op, weight) for move, weight in zip(moves, weights)]
            blocks = self.collectives.reduce_blocks(items)
        for move, block in zip(moves, blocks):
            dtype = leaves[move.leaf].dtype
            out = result.view(move.offset + move.start * dtype.itemsize, (move.stop - move.start,), dtype)
            self._backend.to_host(block[: out.size], out)
