"""What the master knows of one rank: which functions, plans and segments it holds, and what it must forget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cloudpickle

from synk._master.processes.epoch import Epoch
from synk._wire.memory import Segment
from synk._wire.messages import Body


class Told:
    """Settings as they are sent, pickled once for all ranks. A rank gets the pickle, and imports nothing for it."""

    def __init__(self, names: Sequence[str], values: list[Any]) -> None:
        self.values = values
        self._data = cloudpickle.dumps(dict(zip(names, values)), protocol=5)

    def __reduce__(self) -> Any:
        return bytes, (self._data,)


class KnownByRank:
    """What one rank is known to hold, and what it has yet to be told to forget.

    Attributes
    ----------
    rank : int
    functions, parcels, plans, segments : set of int
    assemblies : dict of int to int
        By plan, the number of the assembly in which the rank knows its part.
    variables : dict of int to int
        By variable, the version that it was told of.
    settings : list or None
        The settings of the program that it was told last.
    unanswered : dict of int to Body
        By number, the bodies of messages that it has not answered.
    """

    def __init__(self, rank: int, epoch: Epoch) -> None:
        self.rank = rank
        self._epoch = epoch
        self.functions: set[int] = set()
        self.parcels: set[int] = set()
        self.plans: set[int] = set()
        self.assemblies: dict[int, int] = {}
        self.segments: set[int] = set()
        self.variables: dict[int, int] = {}
        self.unanswered: dict[int, Body] = {}
        self.clear()

    def clear(self) -> None:
        """Begin anew: the process that holds it is another one, which knows nothing."""
        self._epoch.end()
        self.functions.clear()
        self.parcels.clear()
        self.plans.clear()
        self.assemblies.clear()
        self.segments = set()
        self.variables = {}
        self.unanswered.clear()
        self.settings: list[Any] | None = None
        self.num_changes = -1
        self.residents: dict[int, int] = {}  # id -> ``first_version`` of what it has
        self._dropped_residents: list[int] = []
        self._dropped_variables: list[int] = []
        self._dropped_segments: list[int] = []
        self._dropped_plans: list[int] = []
        self._dropped_functions: list[int] = []
        self._dropped_parcels: list[tuple[int, list[tuple[tuple[int, int], Any]]]] = []
        self._lane_ids: dict[int, tuple[int, int]] = {}  # what it knows of each lane, see Lane.ids

    def drop_segment(self, segment_id: int) -> None:
        self._epoch.end()
        if segment_id in self.segments:
            self.segments.discard(segment_id)
            self._dropped_segments.append(segment_id)

    def drop_plan(self, plan_id: int) -> None:
        self._epoch.end()
        if plan_id in self.plans:
            self.plans.discard(plan_id)
            self.assemblies.pop(plan_id, None)
            self._dropped_plans.append(plan_id)

    def drop_function(self, function_id: int) -> None:
        self._epoch.end()
        if function_id in self.functions:
            self.functions.discard(function_id)
            self._dropped_functions.append(function_id)

    def drop_parcel(self, number: int, unbound: list[tuple[tuple[int, int], Any]]) -> None:
        """Also one that it may not hold: a load that was broken off may have reached it."""
        self._epoch.end()
        self.parcels.discard(number)
        self._dropped_parcels.append((number, unbound))

    def drop_variable(self, variable_id: int) -> None:
        self._epoch.end()
        if self.variables.pop(variable_id, None) is not None:
            self._dropped_variables.append(variable_id)

    def drop_resident(self, resident_id: int) -> None:
        self._epoch.end()
        if self.residents.pop(resident_id, None) is not None:
            self._dropped_residents.append(resident_id)

    @staticmethod
    def describe(segments: Sequence[Segment]) -> list[tuple[int, int, bool, bool, bool, bool]]:
        """Describe the segments whose descriptors ride along."""
        return [
            (each.id, each.nbytes, each.is_worker_writable, each.is_staging, each.is_arena, each.is_file)
            for each in segments
        ]

    def _with_arenas(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return ``segments``, each once, and the arenas that some lie in where the rank does not hold them."""
        arenas = [segment.arena for segment in segments if segment.arena is not None]
        return list({each.id: each for each in (*arenas, *segments) if each.id not in self.segments}.values())

    def body(
        self, content: Any, needed: Sequence[Segment], lane: Any, news: Sequence[Any], settings: Told | None
    ) -> tuple[Body | None, list[Segment]]:
        """Return the body of a message (None if it needs none) and the segments that it brings.

        ``lane`` is that of the call, ``news`` are shared variables of which the rank must learn, and ``settings`` those
        of the program.
        """
        known = self.segments
        missing = [segment for segment in needed if segment.id not in known]
        new_slots = new_collective = None
        if self._lane_ids.get(lane.index) != lane.ids:
            slots_id, collective_id = self._lane_ids.get(lane.index, (0, 0))
            slots, collective = lane.slots, lane.collective
            if slots_id != slots.id:
                new_slots = (lane.index, slots.id, lane.slot_nbytes)
                if slots.id not in known:
                    missing.append(slots)
            if collective is not None and collective_id != collective.id:
                new_collective = (lane.index, collective.id)
                if collective.id not in known:
                    missing.append(collective)
        if missing:
            missing = self._with_arenas(missing)
        if settings is not None and settings.values == self.settings:
            settings = None
        dropped = self._dropped_segments or self._dropped_plans or self._dropped_functions or self._dropped_variables
        is_dropping = bool(dropped or self._dropped_parcels or self._dropped_residents)
        if content is None and not (missing or new_slots or new_collective or is_dropping or news or settings):
            return None, missing
        return (
            Body(
                segments=self.describe([segment for segment in missing if segment.arena is None]),
                parts=[
                    (each.id, each.arena.id, each.offset, each.nbytes) for each in missing if each.arena is not None
                ],
                dropped_segments=list(self._dropped_segments),
                dropped_plans=list(self._dropped_plans),
                dropped_functions=list(self._dropped_functions),
                dropped_parcels=list(self._dropped_parcels),
                slots=new_slots,
                collective=new_collective,
                declarations=[variable.declaration(self.rank) for variable in news],
                dropped_variables=list(self._dropped_variables),
                dropped_residents=list(self._dropped_residents),
                settings=settings,
                content=content,
            ),
            missing,
        )

    def note_sent(self, sequence: int, body: Body) -> None:
        """Remember what the rank holds now. Called after sending: a message lost to an interrupt is sent again."""
        self._epoch.end()  # a call that is prepared must not be sent to a rank that knows other things now
        self.unanswered[sequence] = body
        self.segments.update(_brought_by(body))
        for waiting, told in self._drops(body):
            del waiting[: len(told)]
        for declaration in body.declarations:
            self.variables[declaration.variable_id] = declaration.version
        if body.settings is not None:
            self.settings = body.settings.values
        if body.slots is not None:
            lane, slots_id, _ = body.slots
            self._lane_ids[lane] = (slots_id, self._lane_ids.get(lane, (0, 0))[1])
        if body.collective is not None:
            lane, collective_id = body.collective
            self._lane_ids[lane] = (self._lane_ids.get(lane, (0, 0))[0], collective_id)

    def take_back(self, body: Body) -> None:
        """The rank could not take in a message: it holds nothing of what came with it, and has forgotten nothing."""
        self._epoch.end()
        self.segments.difference_update(_brought_by(body))
        for waiting, told in self._drops(body):
            waiting[:0] = told
        for declaration in body.declarations:
            if declaration.variable_id in self.variables:
                self.variables[declaration.variable_id] = -1  # it may hold what an earlier message told of it
        self.settings, self.num_changes = None, -1
        for place in (body.slots, body.collective):
            if place is not None:
                self._lane_ids.pop(place[0], None)

    def _drops(self, body: Body) -> list[tuple[list[Any], Sequence[Any]]]:
        """Return what the rank has yet to be told to forget, and what a message tells it of that."""
        return [
            (self._dropped_segments, body.dropped_segments),
            (self._dropped_plans, body.dropped_plans),
            (self._dropped_functions, body.dropped_functions),
            (self._dropped_parcels, body.dropped_parcels),
            (self._dropped_variables, body.dropped_variables),
            (self._dropped_residents, body.dropped_residents),
        ]


def _brought_by(body: Body) -> list[int]:
    """Return the segments that come with a message."""
    return [place[0] for place in (*body.segments, *body.parts)]
