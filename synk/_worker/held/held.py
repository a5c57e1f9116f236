"""The segments, functions and plans that the master has sent, as a rank keeps them until it is told to drop them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from synk._wire.memory import Segment
from synk._wire.messages import Body, LoadOrder, Plan
from synk._worker.held.pages import own_bytes
from synk._worker.held.plans import LoadedFunction, PreparedPlan
from synk._worker.held.received import Received
from synk.backends import Backend
from synk.errors import SharedMemoryError


class Held:
    """The segments, functions and plans of one rank.

    Attributes
    ----------
    segments, functions, plans : dict
        By number.
    """

    def __init__(self, rank: int, backend: Backend) -> None:
        self._rank = rank
        self._backend = backend
        self._received = Received(self._own_memory)
        self.segments: dict[int, Segment] = {}
        self.functions: dict[int, LoadedFunction] = {}
        self.plans: dict[int, PreparedPlan] = {}

    # -- segments -----------------------------------------------------------------------------------------------------

    def map_segment(
        self, fd: int, number: int, nbytes: int, is_writable: bool, is_staging: bool, is_arena: bool
    ) -> Segment:
        """Map a segment that has arrived. If it is only read, its mapping is private: nobody else sees what is written.

        A device reads memory past the page tables of this process, so its worker maps the segment as it is.
        """
        is_private = not (is_writable or self._backend.is_device)
        segment = Segment(fd, nbytes, is_writable=is_writable, segment_id=number, is_private=is_private)
        segment.is_staging, segment.is_arena = is_staging, is_arena
        if not is_staging:  # only a staging segment may have to be mapped again
            segment.close_fd()
        return segment

    def add_segment(self, segment: Segment) -> None:
        """Take in a segment that has arrived."""
        self.segments[segment.id] = segment
        if not segment.is_arena:  # its parts come and go, so the backend does not register it
            self._backend.note_segment(segment)

    def take_in(self, body: Body) -> None:
        """Take in the segments that a body names, after dropping what the master has dropped."""
        self._drop(body.dropped)
        for segment_id, arena_id, offset, nbytes in body.parts:  # dropped parts may have lain in the same places
            arena = self.segments.get(arena_id)  # None: the message that brought it could not be taken in
            if arena is not None and segment_id not in self.segments:
                self.add_segment(arena.part(segment_id, offset, nbytes))

    def _drop(self, dropped: Mapping[str, Mapping[int, Any]]) -> None:
        """Forget what the master has dropped. Some of it may never have arrived here."""
        for plan_id in dropped.get("plan", ()):
            self.plans.pop(plan_id, None)
        for function_id in dropped.get("function", ()):
            self.functions.pop(function_id, None)
        for number, unbound in dropped.get("parcel", {}).items():
            self._received.drop(number, unbound)
        if segment_ids := dropped.get("segment", {}).keys():
            # The plans go first: their views would keep the memory mapped.
            for plan_id in [p for p, prepared in self.plans.items() if prepared.segment_ids & segment_ids]:
                del self.plans[plan_id]
            for segment_id in segment_ids:
                segment = self.segments.pop(segment_id, None)
                if segment is not None:
                    # Views that a function has kept keep the mapping alive. They show zeros once the master has given
                    # the memory back, as it does for a ``Data`` that was freed (``Segment.discard``).
                    self._backend.forget_segment(segment)
                    segment.close()

    def _own_memory(self, segment_id: int, offset: int, nbytes: int) -> np.ndarray:
        """Return bytes of a segment, as they are now, in an array. Only this process sees what it writes there."""
        segment = self.segments[segment_id]
        if not segment.is_private:
            return segment.buffer[offset : offset + nbytes].copy()
        return own_bytes(segment.buffer[offset : offset + nbytes])

    # -- functions and plans ------------------------------------------------------------------------------------------

    def load(self, order: LoadOrder) -> None:
        """Take in functions and what they refer to."""
        self._received.load(order, self._load_function)

    def _load_function(self, function_id: int, options: dict[str, Any]) -> None:
        self.functions[function_id] = LoadedFunction(**options, backend=self._backend)

    def prepare(self, plan: Plan) -> None:
        """Take in the plan of a call, for this call and its repetitions."""
        try:
            function, is_device = self.functions[plan.function_id], self._backend.is_device
            self.plans[plan.plan_id] = PreparedPlan(plan, function, self.segments, self._rank, is_device=is_device)
        except KeyError as error:
            raise SharedMemoryError(
                f"cannot find shared segment {error}: it came with an earlier call, which this process could not "
                "take in. Call again."
            ) from error

    def forget_slots(self) -> None:
        """Drop the views of output slots that are being replaced: they would keep the memory mapped."""
        for prepared in self.plans.values():
            prepared.slot_views, prepared.slot_key, prepared.slots = [], None, None

    # -- what functions keep ------------------------------------------------------------------------------------------

    def map_again(self, segment: Segment) -> None:
        """Use a new mapping of a segment from the next call on, because a function keeps views of the old one."""
        segment.map_again()
        self._backend.note_segment(segment)
        for prepared in self.plans.values():
            if segment.id in prepared.segment_ids:
                prepared.map(self.segments)
