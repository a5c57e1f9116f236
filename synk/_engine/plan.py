"""A plan: everything about a call that its look fixes. Places in memory, what ranks must know, how values get there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synk._engine.argument import HELD, Argument, pickle_nests
from synk._engine.ledger import Transfer
from synk._engine.rows import Division, divide
from synk._engine.things import Thing
from synk._pure.arrays import copy_into
from synk._pure.ranges import places_of, put_in_place, round_up
from synk._wire.memory import Segment
from synk._wire.messages import Input, Look

MAX_PLANS = 64
_LARGE = 1 << 16
_SLACK_NBYTES = 1 << 22


class Copy(NamedTuple):
    """How one array gets to its place.

    Attributes
    ----------
    leaf : int
        Its position among the leaves.
    base : ndarray
        The place: for rows with room for more of them.
    kind : str
        ``"rows"``, ``"whole"`` or ``"table"``.
    label : str
        Of a large array; else empty.
    """

    leaf: int
    base: np.ndarray
    kind: str
    label: str


class Plan(Thing):
    """A plan for the calls of one function that look alike, in one lane.

    Attributes
    ----------
    copies : list of Copy
    objects : list of int
        The leaves that are pickled.
    row_leaves : list of (int, str, str)
        The leaves with rows: position, kind, label.
    shards : list of (str, variable)
    variables : list of Variable
        Those that calls may read or assign.
    has_state : bool
        Whether calls read or change variables or resident objects.
    outputs : Outputs or None
        How the outputs of the last call were combined.
    layouts : dict of int to Layout
        By rank, what the last outputs looked like.
    fits : bool
        Whether the rows of the last division have room, and are told as the plan says.
    moved, varying : tuple of Transfer
        What the last call has transferred, the outputs last; and the part of it that differs from call to call.
    is_outgrown : bool
        Whether something has no room in its places, or was replaced.
    """

    kind = "plan"

    def __init__(
        self,
        engine: Any,
        callee: Any,
        lane: Any,
        arguments: Sequence[Argument],
        division: Division,
        options: Any,
        object_nbytes: int,
        before: Plan | None,
    ) -> None:
        self.lane = lane
        self.what = repr(callee.name)
        self.subset = options.output_subset
        count = division.count
        self.row_leaves = [
            (k, "table" if a.kind == "table" else "array" if a.contents is None else "data", a.label)
            for k, a in enumerate(arguments)
            if a.kind in ("rows", "table")
        ]
        self.shards = [(a.label, a.value) for a in arguments if a.kind == "shard"]
        self.objects = [k for k, a in enumerate(arguments) if a.kind == "object"]
        self.object_labels = [arguments[k].label for k in self.objects]
        self._has_rows_in_place = any(kind == "data" for _, kind, _ in self.row_leaves)
        self.has_indices = self._has_rows_in_place and division.indices is not None
        self.has_local = division.local_indices is not None
        self.row_room = self._row_room(arguments, count, before)
        self.table_rooms = {k: arguments[k].array.shape[1] for k, kind, _ in self.row_leaves if kind == "table"}  # type: ignore[union-attr]
        self._lay_out(arguments, lane, object_nbytes)
        needs: list[Thing | Segment] = [lane.joined()]
        needs += [a.contents.segment for a in arguments if a.contents is not None and a.contents.segment is not None]
        self.segments = frozenset(segment.id for segment in needs if isinstance(segment, Segment))
        held = [a.value for a in arguments if a.kind in HELD]
        self.residents = [each for each in held if each.kind == "resident"] + sorted(
            callee.residents, key=lambda each: int(each.number)
        )
        self.changes = callee.changes
        state = [*held, *callee.variables, *callee.residents]
        self.variables = [each for each in state if each.kind == "variable"]
        self.has_state = bool(state)
        needs += list({each.number: each for each in state}.values())
        if self.staging is not None:
            needs.append(self.staging)
        self.look = Look(
            callee.id,
            lane.index,
            0 if self.staging is None else self.staging.id,
            tuple(self._inputs(arguments)),
            options.num_slices,
            options.output_subset,
            division.selection is None,
            pickle_nests(arguments, callee.name),
            self._object_at if self.objects else -1,
            self._indices_at if self.has_indices else -1,
            self._local_at if self.has_local else -1,
            self.row_room,
            tuple(each.number for each in callee.changes),
        )
        super().__init__(engine, needs)
        self.known_by_all = frozenset(self.numbers())
        self.outputs: Any = None
        self.layouts: dict[int, Any] = {}
        self.is_outgrown = False
        self.division: Division | None = None
        self.fits = True
        self._chosen: Any = None
        self._targets: list[tuple[int, np.ndarray, str, str]] = []
        self._num_targets = -1
        self._nbytes = 0
        self._fixed = [_moved(argument) for argument in arguments if argument.kind not in ("table", "object")]
        self.varying: tuple[Transfer, ...] = ()
        self.moved: tuple[Transfer, ...] = (*self._fixed, Transfer("outputs", "output", 0))

    # -- making -------------------------------------------------------------------------------------------------------

    def _row_room(self, arguments: Sequence[Argument], count: int, before: Plan | None) -> int:
        """Return for how many rows there is room: as many as now, or more if a plan like this had too little."""
        if before is None or before.row_room >= count:
            return max(count, 1)
        widest = max(
            (a.array.nbytes // max(len(a.array), 1) for a in arguments if a.array is not None and a.array.ndim),
            default=1,
        )
        return max(count, min(2 * before.row_room, count + _SLACK_NBYTES // max(widest, 1)))

    def _lay_out(self, arguments: Sequence[Argument], lane: Any, object_nbytes: int) -> None:
        """Give arrays, objects and indices their places in the lane's staging memory."""
        sizes, shapes = [], []
        for argument in arguments:
            shape: tuple[int, ...] = ()
            nbytes = 0
            if argument.array is not None:
                shape = argument.array.shape
                if argument.kind == "rows":
                    shape = (self.row_room, *shape[1:])
                nbytes = int(np.prod(shape, dtype=np.int64)) * argument.dtype.itemsize
            sizes.append(nbytes)
            shapes.append(shape)
        self._shapes = shapes
        self._places, end = places_of(sizes)
        self._object_at, self._indices_at = end, end + (object_nbytes if self.objects else 0)
        self._indices_at = round_up(self._indices_at, 64)
        self._local_at = self._indices_at + (8 * self.row_room if self.has_indices else 0)
        end = self._local_at + (8 * self.row_room if self.has_local else 0)
        is_staged = end > 0 and (bool(self.objects) or any(sizes) or self.has_indices or self.has_local)
        self.staging: Segment | None = lane.staged(end) if is_staged else None
        self.copies = []
        for k, argument in enumerate(arguments):
            if argument.array is None:
                continue
            kind = "table" if argument.kind == "table" else "rows" if argument.kind == "rows" else "whole"
            if sizes[k]:
                assert self.staging is not None
                base = self.staging.view(self._places[k], shapes[k], argument.dtype)
                label = argument.label if sizes[k] >= _LARGE and kind != "table" else ""
                self.copies.append(Copy(k, base, kind, label))
        if self.staging is not None:
            view = self.staging.buffer
            self.object_place = view[self._object_at : self._object_at + object_nbytes]
            self._index_place = view[self._indices_at : self._indices_at + 8 * self.row_room * self.has_indices]
            self._local_place = view[self._local_at : self._local_at + 8 * self.row_room * self.has_local]

    def _inputs(self, arguments: Sequence[Argument]) -> list[Input]:
        found = []
        for k, argument in enumerate(arguments):
            kind = argument.kind
            if kind == "object":
                found.append(Input(argument.keyword, kind, 0, self.objects.index(k)))
            elif kind in HELD:
                found.append(Input(argument.keyword, kind, argument.value.number))
            elif argument.contents is not None:
                array, number = argument.contents.array, argument.contents.segment_id
                found.append(Input(argument.keyword, kind, number, 0, array.shape, array.dtype, file=argument.file))
            else:
                kind = "picked" if kind == "rows" else kind
                staging = 0 if self.staging is None else self.staging.id
                found.append(
                    Input(
                        argument.keyword,
                        kind,
                        staging,
                        self._places[k],
                        self._shapes[k],
                        argument.dtype,
                        tensor_dtype=argument.tensor_dtype,
                    )
                )
        return found

    def told(self, rank: int) -> tuple[Any, Sequence[Segment]]:
        return self.look, ()

    def place_of(self, leaf: int) -> int:
        """Return where an argument lies in the staging memory."""
        return self._places[leaf]

    def other_places(self, low: int, high: int) -> list[tuple[int, np.ndarray]]:
        """Return what else calls read there, for some rows: where it lies, and a view of it."""
        found = [(self._object_at, self.object_place)] if self.objects else []
        if self.has_local:
            found.append((self._local_at + 8 * low, self._local_place[8 * low : 8 * high]))
        return found

    # -- one call -----------------------------------------------------------------------------------------------------

    def choose(self, session: Any, callee: Any, values: Sequence[Any], batch: Any, num_ranks: int | None) -> Division:
        """Return the division of the rows of a call, which is often that of the last one."""
        counts = [(values[k].array if kind == "data" else values[k]).shape[0] for k, kind, _ in self.row_leaves]
        chosen: Any = None
        if counts and not self.shards and (batch is None or type(batch) in (int, slice)):
            chosen = counts, batch, num_ranks
            if self.division is not None and chosen == self._chosen:
                return self.division
        lengths = [(label, count) for (_, _, label), count in zip(self.row_leaves, counts)]
        self.division = divide(session, callee, lengths, self.shards, batch, num_ranks)
        self._chosen = chosen
        self.fits = (
            self.division.count <= self.row_room
            and self.has_indices == (self._has_rows_in_place and self.division.indices is not None)
            and self.has_local == (self.division.local_indices is not None)
            and self.look.is_rowless == (self.division.selection is None)
        )
        return self.division

    def stage(self, values: Sequence[Any], objects: Sequence[Any], division: Division, callee: Any) -> int:
        """Copy what is passed by value, and return how many bytes of arrays that are.

        No rank reads these places now: the lane's last call has ended.
        """
        if self._num_targets != division.count:
            count = division.count
            self._targets = [
                (leaf, base[:count] if kind == "rows" else base, kind, label) for leaf, base, kind, label in self.copies
            ]
            self._num_targets = count
            self._nbytes = sum(target.nbytes for _, target, kind, _ in self._targets if kind != "table")
        selection, nbytes = division.selection, self._nbytes
        for leaf, target, kind, label in self._targets:
            value = values[leaf]
            if kind == "rows" and selection is not None and (not division.is_whole or len(value) != len(target)):
                value = value[selection.between(0, selection.count)]
            if kind == "table":
                target[:, : value.shape[1]] = value
                nbytes += value.nbytes
            elif label:
                callee.repeated.note(label, value, callee.session.profile.keeper)
                began = time.monotonic_ns()
                copy_into(target, value)
                callee.record.staged_ns += time.monotonic_ns() - began
            else:
                target[...] = value
        if self.has_indices:
            self._index_place.view(np.int64)[: division.count] = division.indices
        if self.has_local:
            self._local_place.view(np.int64)[: division.count] = division.local_indices
        if objects:
            put_in_place(self.object_place, objects)
        return nbytes

    def varying_of(self, values: Sequence[Any], objects: Sequence[Any]) -> tuple[Transfer, ...]:
        """Return what a call transfers that differs from call to call: tables and objects."""
        found = [
            Transfer(label, "staged", values[leaf].nbytes) for leaf, kind, label in self.row_leaves if kind == "table"
        ]
        if objects:
            found.append(
                Transfer(", ".join(self.object_labels), "pickled", sum(memoryview(each).nbytes for each in objects))
            )
        return tuple(found)

    def note_moved(self, varying: tuple[Transfer, ...], nbytes: int) -> None:
        """Note what a call has transferred whose outputs had so many bytes."""
        self.varying = varying
        self.moved = (*self._fixed, *varying, Transfer("outputs", "output", nbytes))


def _moved(argument: Argument) -> Transfer:
    """Return what calls transfer for an argument, unless it differs from call to call."""
    array = argument.whole_array
    if array is None:
        assert argument.kind in HELD
        return Transfer(argument.label, "shared", 0)
    kind = "staged" if argument.contents is None else "data"
    if argument.kind != "rows":
        return Transfer(argument.label, kind, array.nbytes)
    return Transfer(argument.label, kind, 0, array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64)))


def keep(callee: Any, key: Any, plan: Plan) -> None:
    """Note a plan that was made. The oldest of many goes."""
    plans = callee.plans_by_key
    plans.pop(key, None)
    while len(plans) >= MAX_PLANS:
        plans.pop(next(iter(plans)), None)
    plans[key] = plan
