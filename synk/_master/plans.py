"""What the master keeps of a function's calls: plans, by the look of the arguments, and what makes the next one quiet.

A plan says all that does not change from one call to the next; the numbers that do lie in shared memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk._master.arguments import Argument
from synk._master.assembly import Assembly
from synk._master.lanes import Lane
from synk._master.variable import Variable
from synk._master.workers import Workers
from synk._pure.interrupts import deferred
from synk._pure.shards import Assignment, Selection
from synk._wire.control import NUM_LANES
from synk._wire.memory import Segment
from synk._wire.messages import Layout, Plan

_MAX_PLANS = 64

IndexArrays = tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]
"""Which rows to take of whole inputs, of the ranks' own shards, and of minibatch inputs; None for a range."""


class CachedPlan:
    """A plan with what the master learnt about its outputs."""

    def __init__(
        self, plan: Plan, lane: Lane, segments: list[Segment], staged: list[np.ndarray], places: Places
    ) -> None:
        self.plan = plan
        self.lane = lane  # calls of this plan go there and nowhere else
        self.segments = segments
        self.staged = staged
        self.places = places
        self.layouts: dict[int, Layout] = {}
        self.assembly: Assembly | None = None  # of the last call
        self.output_nbytes = 0  # of all ranks together, in the last call
        # Whether the last call ended well. One that did not may have left a worker ahead of what is noted here.
        self.is_agreed = False


@dataclass
class Places:
    """Byte ranges of the staging segment that a plan uses."""

    pickle: np.ndarray | None
    buffers: list[np.ndarray]
    indices: list[np.ndarray | None]  # as Call.index_arrays


class PlanCache:
    """The plans of one function on one runtime, least recently used first."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Any, CachedPlan] = OrderedDict()
        self.quiet: list[Any] = [None] * NUM_LANES  # by lane, what the next call may be; see synk._master.quiet

    def get(self, key: Any) -> CachedPlan | None:
        cached = self._plans.get(key)
        if cached is None or not cached.is_agreed:
            return None
        self._plans.move_to_end(key)
        return cached

    def put(self, key: Any, cached: CachedPlan, workers: Workers) -> None:
        with deferred():  # a plan that is lost here would stay with the workers
            broken = self._plans.pop(key, None)
            if broken is not None:
                workers.drop_plan(broken.plan.plan_id)
            self._plans[key] = cached
            while len(self._plans) > _MAX_PLANS:
                _, old = self._plans.popitem(last=False)
                workers.drop_plan(old.plan.plan_id)

    def drop_staging(self, segment_id: int, workers: Workers) -> None:
        """Forget the plans that use a staging segment which has been replaced: nobody finds them any more."""
        for key in [key for key in self._plans if key[-1] == segment_id]:
            workers.drop_plan(self._plans.pop(key).plan.plan_id)
        self.forget_quiet()

    def drop_assemblies(self, lane: Lane) -> None:
        """Forget the views of slots that have been replaced."""
        for cached in self._plans.values():
            if cached.lane is lane:
                cached.assembly = None
        self.quiet[lane.index] = None

    def drop_all(self, workers: Workers) -> None:
        """Forget everything, here and on the workers: the function is gone."""
        for cached in self._plans.values():
            workers.drop_plan(cached.plan.plan_id)
        self.forget()

    def forget(self) -> None:
        """Drop everything; the runtime is closed."""
        self.forget_quiet()
        self._plans.clear()

    def forget_quiet(self) -> None:
        """Forget the last calls: the next ones are checked again from the beginning."""
        self.quiet = [None] * NUM_LANES

    def discard(self, cached: CachedPlan, workers: Workers) -> None:
        """Forget one plan, here and on the workers."""
        with deferred():
            self.quiet[cached.lane.index] = None
            self._plans = OrderedDict((key, value) for key, value in self._plans.items() if value is not cached)
            workers.drop_plan(cached.plan.plan_id)


@dataclass
class CallOptions:
    """How one call is to be done; see :class:`synk.Function` and, for trials, :class:`synk._wire.messages.Plan`."""

    batch: Any = None
    shard_batch: Any = None
    num_slices: int = 1
    output_subset: tuple[Any, ...] | None = None
    timeout: float | None = None
    is_serial: bool = False
    is_trial: bool = False
    is_apart: bool = False
    is_submitted: bool = False


@dataclass
class Call:
    """One call on its way: what was bound, which rows, which ranks and how many rows each of them has."""

    arguments: list[Argument]
    selection: Selection | None
    bounds: list[tuple[int, int]]
    ranks: list[int]
    rows: list[int]
    objects: tuple[bytes, list[memoryview]] | None
    options: CallOptions
    owned: Assignment | None = None
    sources: Sequence[Variable] = ()  # sharded variables whose rows are those of the call, as no argument has any
    unequal: str = ""  # why their rows are no weights of an average
    index_arrays: IndexArrays = (None, None, None)
    has_group: bool = False  # whether its large outputs are reduced by NCCL
    beside_rows: Any = None  # the shapes of the inputs but for their rows, where the arguments are not kept
