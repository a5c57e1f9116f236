"""The caches of a function's calls in the master: plans, keyed by the look of the arguments, and compiled calls.

A plan says everything that stays the same from call to call. The numbers that change lie in shared memory.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk._master.calls.arguments import Argument, Objects
from synk._master.calls.assembly import Assembly
from synk._master.processes.log import Log
from synk._master.state.lanes import Lane
from synk._master.state.ledger import Transfer
from synk._master.state.variable import Variable
from synk._pure.call_options import CallOptions
from synk._pure.shards import Assignment, Selection
from synk._wire.control import NUM_LANES
from synk._wire.memory import Segment
from synk._wire.messages import Layout, Plan

_MAX_PLANS = 64

_versions = itertools.count(1)

IndexArrays = tuple[np.ndarray | None, np.ndarray | None]
"""Which rows to take of whole inputs, and of the ranks' own shards; None for a range."""


class CachedPlan:
    """A plan, the memory that it uses, and what the master has learnt about its outputs.

    Parameters
    ----------
    plan : Plan
    lane : Lane
        The only lane for calls of this plan.
    segments : list of Segment
        The segments that the workers need for it.
    staged : list of ndarray
        Where arrays that are passed are copied to.
    labels : list of str
        The labels of large arrays among them; "" for the others.
    pickle_place : ndarray of uint8, or None
        Where the pickle of broadcast objects goes. ``buffers`` are the places of their arrays.
    index_places : sequence of (int, ndarray)
        Where the arrays of ``Call.index_arrays`` go, each with its position there.

    Attributes
    ----------
    targets : list of ndarray
        All places that the values of a call are copied to: ``staged`` and, if there is one, ``pickle_place``.
    staged_nbytes : int
        How many bytes a call copies.
    layouts : dict of int to Layout
    assembly : Assembly or None
        The assembly of the last call.
    transfers : tuple of Transfer
        What a call transfers: its arguments, and outputs that look like the last ones.
    is_agreed : bool
        Whether the last call has succeeded. If not, a worker may be ahead of what is noted here. A plan belongs to one
        lane, which takes one call at a time, so a call finds this False only after one that failed, and the plan is
        then made again.
    """

    def __init__(
        self,
        plan: Plan,
        lane: Lane,
        segments: list[Segment],
        staged: list[np.ndarray],
        labels: list[str],
        pickle_place: np.ndarray | None,
        buffers: list[np.ndarray],
        index_places: Sequence[tuple[int, np.ndarray]],
        inputs: tuple[Transfer, ...],
    ) -> None:
        self.plan = plan
        self.lane = lane
        self.segments = segments
        self.staged = staged
        self.labels = [*labels, ""]
        self.pickle_place = pickle_place
        self.buffers = buffers
        self.index_places = index_places
        self.targets = staged if pickle_place is None else [*staged, pickle_place]
        self.inputs = inputs
        self.transfers = inputs
        self.staged_nbytes = sum(each.nbytes for each in (*staged, *buffers, *[place for _, place in index_places]))
        self.layouts: dict[int, Layout] = {}
        self.assembly: Assembly | None = None
        self.is_agreed = False


class PlanCache:
    """The plans of one function on one runtime, least recently used first.

    Attributes
    ----------
    version : int
        Changes whenever a change of the function makes the workers need new plans.
    by_key : OrderedDict
        The same object for good, because the finalizer of the function holds it. A finalizer must not hold compiled
        calls: they refer to the calls in flight and these to their functions, which would then never be freed.
    compiled : list of CompiledCall or None
        By lane, what the next call may fit.
    """

    def __init__(self) -> None:
        self.version = next(_versions)
        self.by_key: OrderedDict[Any, CachedPlan] = OrderedDict()
        self.compiled: list[Any] = [None] * NUM_LANES

    def get(self, key: Any) -> CachedPlan | None:
        cached = self.by_key.get(key)
        if cached is None or not cached.is_agreed:
            return None
        self.by_key.move_to_end(key)
        return cached

    def put(self, key: Any, cached: CachedPlan, log: Log) -> None:
        broken = self.by_key.pop(key, None)
        if broken is not None:
            log.drop_held("plan", broken.plan.plan_id)
        self.by_key[key] = cached
        while len(self.by_key) > _MAX_PLANS:
            _, old = self.by_key.popitem(last=False)
            log.drop_held("plan", old.plan.plan_id)

    def drop_staging(self, segment_id: int, log: Log) -> None:
        """Forget the plans that use a staging segment which was replaced: no call can find them any more."""
        for key in [key for key in self.by_key if key[-1] == segment_id]:
            log.drop_held("plan", self.by_key.pop(key).plan.plan_id)
        self.forget_compiled()

    def drop_assemblies(self, lane: Lane) -> None:
        """Forget views of slots that were replaced."""
        for cached in self.by_key.values():
            if cached.lane is lane:
                cached.assembly = None
        self.compiled[lane.index] = None

    def drop_all(self, log: Log) -> None:
        """Forget everything, here and on the workers: the function is gone, or another one."""
        self.version = next(_versions)
        for cached in self.by_key.values():
            log.drop_held("plan", cached.plan.plan_id)
        self.forget()

    def forget(self) -> None:
        """Drop everything: the runtime is closed."""
        self.forget_compiled()
        self.by_key.clear()

    def forget_compiled(self) -> None:
        """Forget the compiled calls. The next calls are checked from the beginning."""
        self.compiled = [None] * NUM_LANES

    def forget_outputs(self, cached: CachedPlan) -> None:
        """Forget the compiled call of a plan: its outputs are put together in another way now."""
        place = cached.lane.index
        if self.compiled[place] is not None and self.compiled[place].cached is cached:
            self.compiled[place] = None

    def discard(self, cached: CachedPlan, log: Log) -> None:
        """Forget one plan, here and on the workers."""
        # A signal handler may break this off between two lines. The plan is not agreed, so no call uses it any more.
        self.compiled[cached.lane.index] = None
        for key in [key for key, value in self.by_key.items() if value is cached]:
            del self.by_key[key]
        log.drop_held("plan", cached.plan.plan_id)


@dataclass
class Call:
    """One call after binding: its arguments, its rows, which ranks run it, and how many rows each of them has."""

    arguments: list[Argument]
    selection: Selection | None
    bounds: list[tuple[int, int]]
    ranks: list[int]
    rows: list[int]
    objects: Objects
    options: CallOptions
    owned: Assignment | None = None
    sources: Sequence[Variable] = ()  # sharded variables whose rows the call uses, since no argument has any
    unequal: str = ""  # why their rows cannot weight an average
    index_arrays: IndexArrays = (None, None)
    is_timed: bool = False  # whether the ranks write what they copied to devices and back
    has_group: bool = False  # whether NCCL reduces its large outputs
    block: np.ndarray | None = None  # the numbers that tell each rank its rows, once they were written
    nests: bytes | None = None  # the structure of nested arguments, if it came pickled
    all_ranks: tuple[int, ...] = ()  # on one of several nodes: the ranks of all nodes that run it
