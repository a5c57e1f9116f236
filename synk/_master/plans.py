"""What the master keeps of a function's calls: plans, by the look of the arguments, and the last call for the next one.

A plan says all that does not change from one call to the next; the numbers that do lie in shared memory.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from synk._master.arguments import Argument
from synk._master.assembly import Assembly
from synk._master.lanes import Lane
from synk._master.variable import Variable
from synk._master.workers import Workers
from synk._pure.arrays import copy_into
from synk._pure.interrupts import deferred
from synk._pure.read_only import ReadOnlyArray
from synk._pure.shards import Assignment, Selection
from synk._wire.control import Down
from synk._wire.memory import Segment
from synk._wire.messages import Layout, Plan

_MAX_PLANS = 64
ARRAYS = (np.ndarray, ReadOnlyArray)


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
        self.repeats: dict[int, RepeatedCall] = {}  # by lane
        self.quiet: Any = None  # what the next call may be, see synk._master.quiet

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
        self.forget_repeats()

    def drop_assemblies(self, lane: Lane) -> None:
        """Forget the views of slots that have been replaced."""
        for cached in self._plans.values():
            if cached.lane is lane:
                cached.assembly = None
        self.quiet = None

    def drop_all(self, workers: Workers) -> None:
        """Forget everything, here and on the workers: the function is gone."""
        for cached in self._plans.values():
            workers.drop_plan(cached.plan.plan_id)
        self.forget()

    def forget(self) -> None:
        """Drop everything; the runtime is closed."""
        self.forget_repeats()
        self._plans.clear()

    def forget_repeats(self) -> None:
        """Forget the last calls: the next ones are checked again from the beginning."""
        self.repeats.clear()
        self.quiet = None

    def discard(self, cached: CachedPlan, workers: Workers) -> None:
        """Forget one plan, here and on the workers."""
        with deferred():
            self.repeats.pop(cached.lane.index, None)
            self.quiet = None
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

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked for but the call itself."""
        return (
            self.batch is None
            and self.num_slices == 1
            and self.output_subset is None
            and self.shard_batch is None
            and not self.is_serial
            and not self.is_trial
        )


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
    has_group: bool = False  # whether its large outputs are reduced by NCCL

    @property
    def index_arrays(self) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """Which rows of whole inputs, of the ranks' own shards and of minibatch inputs to take; None: a range."""
        indices = self.selection.indices if self.selection is not None else None
        if self.owned is None:
            return indices, None, None
        has_minibatch = any(argument.is_minibatch for argument in self.arguments)
        return indices, self.owned.local_indices, self.owned.order if has_minibatch else None


class RepeatedCall:
    """The short way for a call that looks like the last one of its function: the same rows, other numbers.

    Only for arguments by position that are ``Data`` or arrays, all of their rows, in one slice. What it skips is the
    checks, which the last call has passed. Holds no argument: what the user drops is freed.
    """

    def __init__(self, cached: CachedPlan, call: Call) -> None:
        lane = cached.lane
        self.cached = cached
        self.call = replace(call, arguments=[], selection=None, sources=())
        self._staging = lane.staging
        self._numbers = lane.last_numbers
        self._block = lane.down[:, Down.PARTICIPATES : Down.LOCAL_STEP + 1].copy()
        targets = iter(cached.staged)
        self._lengths = [(variable, variable.lengths) for variable in call.sources]
        self.arguments: list[tuple[Any, Any, np.ndarray | None]] = []
        for argument in call.arguments:
            if argument.data is not None and argument.contents is not None:
                self.arguments.append((weakref.ref(argument.data), weakref.ref(argument.contents.array), None))
            elif argument.array is not None:
                self.arguments.append((_kind_of(argument.array), argument.array.shape, next(targets)))

    @staticmethod
    def fits(call: Call) -> bool:
        """Whether the next call can take the short way."""
        return all(
            not a.keyword
            and a.nest is None
            and a.kind in ("rows", "whole")
            and (a.data is not None or type(a.array) is np.ndarray)
            for a in call.arguments
        )

    def stage(self, counters: dict[str, int], args: tuple[Any, ...]) -> bool:
        """Bring the arguments of a new call into place; return False where it is another kind of call."""
        lane = self.cached.lane
        is_known = self.cached.is_agreed and lane.staging is self._staging
        if not is_known or len(args) != len(self.arguments):
            return False
        for variable, lengths in self._lengths:
            if variable.lengths != lengths:
                return False
        for value, (first, second, target) in zip(args, self.arguments):
            if target is None:
                if value is None or value is not first() or value._contents.array is not second():
                    return False
            elif type(value) not in ARRAYS or _kind_of(value) != first or value.shape != second:
                return False
        for value, (_, _, target) in zip(args, self.arguments):
            if target is not None:
                copy_into(target, value)
                counters["bytes_staged"] += target.nbytes
        if lane.last_numbers is not self._numbers:
            self.write_numbers()
        return True

    def write_numbers(self) -> None:
        """Write the bounds of the ranks again: a call with others came between."""
        lane = self.cached.lane
        lane.last_numbers = None  # until all of them are written
        lane.down[:, Down.PARTICIPATES : Down.LOCAL_STEP + 1] = self._block
        lane.last_numbers = self._numbers


def _kind_of(array: np.ndarray) -> tuple[np.dtype, type]:
    """Return what tells the elements of two arrays apart: NumPy calls ``np.record`` equal to a plain record."""
    return array.dtype, array.dtype.type
