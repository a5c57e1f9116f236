"""What a rank with a device does otherwise: all that the engine knows of devices on the rank's side.

Inputs are copied to the device before the function runs, or already while the function of the call before it computes
there. Values of variables stay on the device until the program asks for them, and so do large outputs, until each goes
to its place in the result. The rank waits for its device once in a call, before it replies. In one file because
all of it is left out on a worker without a device.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from synk._pure.ops import REDUCTIONS, Reduction
from synk._pure.ranges import LINE_NBYTES
from synk._rank.call import Part, RankPlan
from synk._rank.outputs import Published, RankOutputs, RankReduction
from synk._rank.rank import Answer, Rank
from synk._rank.variables import Replica
from synk._wire import orders as wire
from synk._wire.cell import cell
from synk._wire.mapping import Descriptor
from synk._wire.memory import Segment
from synk._wire.messages import DEVICE_DTYPES, LARGE_NBYTES, ON_DEVICE, Leaf, Share, spare_of
from synk._wire.orders import Down, Up
from synk._wire.variables import Shapes, shapes_of

if TYPE_CHECKING:
    from synk.cuda._collectives import NcclCollectives
    from synk.cuda._group import WorkerGroup

_COPIED = Up.H2D_NBYTES, Up.D2H_NBYTES, Up.PAGEABLE_NBYTES


class Ahead(NamedTuple):
    """The arrays of a call, by position, that were brought before it began; see ``DeviceArrays.beside``."""

    number: int
    arrays: dict[int, Any]
    event: Any


class DeviceOutputs(RankOutputs):
    """Outputs that lie on the device. Large ones are kept there if nobody must read them in the slot."""

    def publish(self, rank: Any, result: Any) -> Published:
        published = self._publish(rank, result)
        rank.peers.check_group(rank.lane)
        return published

    def _lay_out(self, rank: Any, leaves: tuple[Leaf, ...], assigned: Any) -> Segment | None:
        kept = frozenset(k for k, leaf in enumerate(leaves) if self._is_kept(rank, leaf, self._ops[k]))
        if kept != self._kept:
            self._kept, self._layout = kept, None
        return super()._lay_out(rank, leaves, assigned)

    @staticmethod
    def _is_kept(rank: Any, leaf: Leaf, op: Any) -> bool:
        if leaf.dtype is None or leaf.nbytes < LARGE_NBYTES or rank.is_far:
            return False
        if not isinstance(op, Reduction) or len(rank.lane.ranks) == 1:
            return True
        return rank.lane.has_group and leaf.dtype.name in DEVICE_DTYPES

    def _store(self, rank: Any, outputs: list[Any]) -> None:
        super()._store(rank, outputs)
        backend, lane = rank.backend, rank.lane
        for k in self._kept:
            op, array = self._ops[k], outputs[k]
            if isinstance(op, Reduction) and lane.has_group:
                array = backend.flat(backend.as_array(array, "a large output"))
            if not op.is_of_rank_0 or lane.ranks[0] == rank.rank:
                lane.kept[k] = array
        rank.look_ahead()
        backend.synchronize()
        rank.ended_ns = max(rank.ended_ns, rank.began_ns + backend.take_work_ns())  # the host has long queued it
        rank.note_copies(lane)

    def _slots_of(self, result: Any, values: list[Any]) -> None:
        """Return None: each call waits for the device."""


class DevicePlan(RankPlan):
    """A plan whose inputs go to the device."""

    outputs_type = DeviceOutputs
    _ahead: dict[int, Any] = {}  # noqa: RUF012  (replaced, never changed)

    def answer(self, rank: Any, number: int, in_place: int, numbers: tuple[int, ...]) -> Published:
        self._ahead = rank.take_ahead(number)
        try:
            return super().answer(rank, number, in_place, numbers)
        finally:
            self._ahead = {}

    def _brought(self, rank: Any, k: int, part: Part, numbers: tuple[int, ...]) -> Any:
        if k in self._ahead:
            return self._ahead[k]
        value = super()._brought(rank, k, part, numbers)
        return rank.backend.from_host(value) if isinstance(value, np.ndarray) else value

    def _called(self, rank: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        rank.backend.note_begin()
        result = super()._called(rank, args, kwargs)
        rank.backend.note_end()
        return result

    def bring_ahead(self, rank: Any, numbers: tuple[int, ...], *, is_hurried: bool) -> dict[int, Any]:
        """Begin to bring the inputs of a call that waits.

        ``is_hurried``: only without blocking the host, because the current call has not queued its work yet.
        """
        if self.look.num_slices > 1:  # slices bring their own
            return {}
        self._look_at(rank)
        wanted = [k for k, base in enumerate(self.bases) if base is not None and self._kinds[k] != "table"]
        is_range = self.look.indices_at < 0 and numbers[3] == 1
        if is_hurried and not (is_range and all(rank.backend.is_pinned(self.bases[k]) for k in wanted)):
            return {}
        part = Part(*numbers[:2])
        return {k: self._brought(rank, k, part, numbers) for k in wanted}


class DeviceReduction(RankReduction):
    """This rank's part in large outputs, some of which it has kept."""

    def __init__(self, rank: Any, payload: tuple[int, list[Share]]) -> None:
        result, shares = payload
        super().__init__(rank, (result, [each for each in shares if each[3][0][0] >= 0]))
        self._result = rank.held[result]
        self._of_kept = [Share(*each) for each in shares if each[3][0][0] < 0]
        # The other ranks wait for this one in a reduction: whatever fails here, an own copy too, must free them.
        self._is_awaited = any(share.op for share in self._of_kept)

    def answer(self, rank: Any, number: int, in_place: int, rows: tuple[int, ...]) -> Published:
        with rank.by_group.guard() if self._is_awaited else contextlib.nullcontext():
            return self._answered(rank, number, in_place, rows)

    def _answered(self, rank: Any, number: int, in_place: int, rows: tuple[int, ...]) -> Published:
        rank.check_interrupt(number)
        answered = super().answer(rank, number, in_place, rows)
        backend = rank.backend
        lane: Any = rank.lanes[-1 - self._of_kept[0].sources[0][0]] if self._of_kept else None
        items: list[tuple[Any, str, float | None]] = []
        places: list[np.ndarray] = []
        for op, dtype, length, ((_, k),), at, weights in self._of_kept:
            array = lane.kept[k]
            if isinstance(array, Exception):
                raise array
            if not op:
                backend.to_host(array, self._result.view(at, array.shape, array.dtype))
                continue
            is_weighted = REDUCTIONS[op].is_weighted and len(set(weights)) > 1
            items.append((array, op, weights[rank.rank] / sum(weights) if is_weighted else None))
            places.append(self._result.view(at, (length,), dtype))
        if items:
            blocks = rank.by_group.reduce_blocks(items)
            for block, place in zip(blocks, places):
                backend.to_host(block[: place.size], place)
        backend.synchronize()
        if items:
            rank.peers.group.check()
        if lane is not None:
            lane.kept = {}
            rank.note_copies(lane)
        return answered


class DeviceReplica(Replica):
    """One variable on a rank with a device.

    For each of its places the program counts how often it has written there. What lies on the device for a place is
    good as long as the count is the same. A value that the function has assigned lies on the device alone.
    """

    __slots__ = ("_counts", "_device", "_parts")

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self._device: dict[int, tuple[int, list[Any]]] = {}
        self._parts: list[Segment] = []

    def told(self, number: int, payload: Any, segments: Sequence[Segment], rank: int) -> None:
        self._forget_parts()
        super().told(number, payload, segments, rank)
        # Each place by itself: only what is used is registered, and thereby reserved.
        self._parts = [segment.part(0, at, nbytes) for segment, at, nbytes in self._places]
        for part in self._parts:
            self._store.backend.note_segment(part)
        self._counts = segments[0].view(rank * LINE_NBYTES, (5,), np.dtype(np.int64))[1:]

    def leaves(self) -> list[Any]:
        """The arrays of the value as this call sees it. A function must not write into them."""
        current: list[Any] | None = self._store.assigned.get(self)
        if current is not None:
            return current
        front = self._front
        count, arrays = self._device.get(front, (-1, []))
        if count != self._counts[front]:
            arrays = [self._store.backend.from_host(host) for host in self._arrays(front)]
            self._device = {front: (int(self._counts[front]), arrays)}
        return arrays

    def keep(self, array: Any, dtype: Any) -> Any:
        return self._store.backend.xp.asarray(array, dtype=dtype, order="C")

    def write_back(self, pending: Sequence[Any]) -> tuple[int, Segment | None]:
        """Copy an assigned value to the second arrays, and to shared memory if absent ranks need it there."""
        # The value in the first arrays is not touched. The copies are only queued on the device; the rank waits for
        # them before it replies.
        which = spare_of(self._front)
        self._store_at(which, pending)
        return super().write_back(pending) if self._is_shown() else (which + ON_DEVICE, None)

    def _store_at(self, which: int, pending: Sequence[Any]) -> None:
        xp = self._store.backend.xp
        _, targets = self._device.get(which, (-1, []))
        if [target.shape for target in targets] != [source.shape for source in pending]:
            targets = [xp.empty(source.shape, dtype=source.dtype) for source in pending]
        for target, source in zip(targets, pending):
            target[...] = source
        known = {self._front: self._device[self._front]} if self._front in self._device else {}
        self._device = {**known, which: (int(self._counts[which]), targets)}

    def note_written(self, which: int, found: Any, made: Segment | None) -> None:
        super().note_written(which % ON_DEVICE, found, made)

    def _is_shown(self) -> bool:
        """Whether the value is needed in shared memory: by a program that is far and cannot ask for it, or by ranks
        that are absent from the call. These take the value of the lowest that takes part.
        """
        if self._store.is_far:
            return True
        participates = cell.worker.lane.down[:, Down.PARTICIPATES]
        if self._is_sharded or participates.all():
            return False
        return int(participates.argmax()) == self._store.rank

    def collective(self, kind: str, op: str, by_group: NcclCollectives) -> tuple[int, Shapes]:
        """Do this rank's part of a collective over the variable. Return where the new value lies, and its shapes."""
        with by_group.guard():
            if kind == "broadcast":
                new = by_group.broadcast_all(self._broadcast_leaves(), 0)
            else:
                leaves = [self.keep(leaf, leaf.dtype) for leaf in self.leaves()]
                if kind == "all_reduce":
                    new = by_group.reduce_all([(leaf, op, None) for leaf in leaves])
                else:
                    new = [stack.reshape(-1, *stack.shape[2:]) for stack in by_group.gather_all(leaves)]
        which, found = spare_of(self._front), shapes_of(new)
        self._store_at(which, new)
        self._store.backend.synchronize()
        self.note_written(which, found, None)
        return which + ON_DEVICE, found

    def _broadcast_leaves(self) -> list[Any]:
        """Return the value on rank 0, and empty arrays for it elsewhere, where the value may be lost."""
        if self._store.rank == 0:
            return [self.keep(leaf, leaf.dtype) for leaf in self.leaves()]
        empty = self._store.backend.xp.empty
        return [empty(shape, dtype=dtype) for shape, dtype in zip(self._shapes[self._front], self._dtypes)]

    def fetch(self) -> None:
        """Copy the value to its place in shared memory."""
        for host, array in zip(self._arrays(self._front), self.leaves()):
            self._store.backend.to_host(array, host)
        self._store.backend.synchronize()

    def close(self) -> None:
        self._forget_parts()
        super().close()
        self._device = {}

    def _forget_parts(self) -> None:
        for part in self._parts:
            self._store.backend.forget_segment(part)
        self._parts = []


class DeviceRank(Rank):
    """A rank whose arrays lie in the memory of a device."""

    plan_type, reduction_type, replica_type = DevicePlan, DeviceReduction, DeviceReplica
    questions = Rank.questions | {
        "fetch": lambda rank, variable: rank.variables.get(variable).fetch(),
        "collective": lambda rank, asked: rank.variables.get(asked[0]).collective(*asked[1:], rank.by_group),
        "join": lambda rank, asked: rank.join(*asked),
    }

    ahead: Ahead | None = None
    num_ahead = 0
    """How many arrays of the current call were brought before it began."""

    by_group: NcclCollectives
    """The collectives by NCCL for large outputs, while the rank is in a group."""

    def answer(self, order: bytes, body: Any, fds: list[Descriptor]) -> Answer:
        with self.backend.running():
            return super().answer(order, body, fds)

    def begin_call(self, plan: Any) -> None:
        super().begin_call(plan)
        self.lane.kept = {}
        for word in _COPIED:
            self.lane.own_up[word] = 0
        self.detach()

    def detach(self) -> None:
        for lane in self.lanes:
            if lane.kept and not lane.is_own:
                lane.kept = {k: self._own_copy(array) for k, array in lane.kept.items()}
            lane.is_own = bool(lane.kept)

    def _own_copy(self, array: Any) -> Any:
        try:
            return array if isinstance(array, Exception) else self.backend.own_copy(array)
        except Exception as error:  # no memory: the message that asks for the output raises this
            return error

    def note_copies(self, lane: Any) -> None:
        """Note what was copied to the device and back in a call of a lane."""
        for word, nbytes in zip(_COPIED, self.backend.take_copied()):
            lane.own_up[word] += nbytes

    def _say(self, plan: int) -> None:
        if plan == wire.SYNC:  # no call is in flight any more
            self._drop_ahead()
            for lane in self.lanes:
                lane.kept = {}
        super()._say(plan)

    def recover(self, text: str) -> None:
        if not self.backend.recover():
            # Nothing of the array library may touch the device any more.
            sys.stderr.write(f"{text}{self.device} reports errors to every call from now on: this worker ends.\n")
            sys.stderr.flush()
            os._exit(1)
        self.backend.take_copied()
        self.backend.take_work_ns()

    # -- the call that comes next -------------------------------------------------------------------------------------

    def look_ahead(self, *, is_hurried: bool = False) -> None:
        """Bring the inputs of the next call to the device while this one computes, if its order has arrived."""
        if self.ahead is not None:
            return
        with self.uninterrupted():  # an order that was taken from the pipe must not be lost
            order = self.peek()
        if not order:
            return
        number, plan, _, _, _, has_body = wire.ORDER.unpack_from(order)
        held = self.held.get(plan)
        if has_body or not isinstance(held, DevicePlan):
            return
        try:
            with self.backend.beside() as event:
                arrays = held.bring_ahead(self, wire.ROWS.unpack_from(order, wire.ORDER.size), is_hurried=is_hurried)
        except Exception as error:
            if not isinstance(self.backend.explain(error, "the next call"), MemoryError):
                raise
            return  # no room for the inputs of two calls: the next one brings its own when it runs
        if arrays:
            self.ahead = Ahead(number, arrays, event)

    def take_ahead(self, number: int) -> dict[int, Any]:
        """Return the arrays that were brought ahead, if they are for the call that begins now. Forget them anyway."""
        self.num_ahead, ahead = 0, self._drop_ahead()
        if ahead is None or ahead.number != number:
            return {}
        self.num_ahead = len(ahead.arrays)
        self.look_ahead(is_hurried=True)
        return ahead.arrays

    def _drop_ahead(self) -> Ahead | None:
        """Forget the arrays that were brought ahead. Later work waits for their copies, and may use their memory."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            self.backend.join(ahead.event)
        return ahead

    # -- the group ----------------------------------------------------------------------------------------------------

    def join(self, number: int, unique_id: bytes | None) -> dict[str, Any]:
        """Make the id of a group of NCCL, or join one."""
        from synk.cuda._collectives import NcclCollectives
        from synk.cuda._group import WorkerGroup

        group: WorkerGroup | None = self.peers.group
        if group is None:
            group = self.peers.group = WorkerGroup(self.rank, self.world_size, self.down, self.up, self.backend)
        if unique_id is None:
            return {"unique_id": group.new_id()}
        library = group.join(number, unique_id)
        self.by_group = NcclCollectives(group, self.backend)
        return {"library": library}
