"""The short path of collectives of plain arrays: without checks and, where one meeting is enough, without generators.

Everything that can be prepared is prepared once for each kind of request, in a *short plan*. The layout, the words and
their order are the same as in ``_shm_collectives`` and ``_exchange``, so other ranks may take the same collective step
by step. A rank goes on step by step, too, if it finds at the meeting that the rows of others do not fit its plan, or if
the arrays take more than one meeting.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from synk.communicators._checks import check_out
from synk.communicators._exchange import DIVIDED, Exchange
from synk.communicators._rendezvous import CommRequest, packed
from synk.communicators._results import Place
from synk.communicators._schedule import Steps
from synk.communicators._shm_collectives import ShmCollectives
from synk.communicators._short_plans import ROOTED, ShortPlan, ShortPlans

LONGER = object()
"""Returned by a method that has done nothing, because the request must take the longer path."""

_WEIGHT = struct.Struct("=d")
_BARRIER = packed(CommRequest("barrier"))


class ShortCollectives:
    """One rank's short path through collectives.

    Every method takes the arguments as the user's function gave them. It returns ``LONGER`` if the request does not fit
    the short path.

    Parameters
    ----------
    collectives : ShmCollectives

    Attributes
    ----------
    share : float or None
        A cache of this rank's share of the rows of the call.
    """

    def __init__(self, collectives: ShmCollectives) -> None:
        self._collectives = collectives
        self._rendezvous, self._schedule, _ = collectives.parts()
        self._results = collectives.results
        self._ranks: tuple[int, ...] = ()
        self._plans = ShortPlans(collectives)
        self.share: float | None = None

    def begin(self, ranks: tuple[int, ...]) -> None:
        """Get ready for a call of ``ranks``."""
        self.share = None
        self._ranks = ranks
        self._plans.begin(ranks)

    def barrier(self) -> Any:
        if self._schedule.operations or self._rendezvous.is_unfinished:
            return LONGER
        self._meet(_BARRIER)
        self._rendezvous.is_unfinished = False
        return None

    def reduce(self, kind: str, array: Any, op: str, root: int, weight: float | None, out: Any) -> Any:
        """Take part in an ``all_reduce``, ``reduce`` or ``reduce_scatter``."""
        if type(array) is not np.ndarray or type(root) is not int:  # to the cache, True and 1.0 are the root 1
            return LONGER
        if self._schedule.operations or self._rendezvous.is_unfinished:
            return LONGER
        key = kind, array.shape, array.dtype, root, op, weight is None
        plan = self._plans.find(key, self._plans.reduction)
        if plan is None or not plan.fits(kind, array, out) or not (weight is None or 0.0 <= weight <= 1.0):
            return LONGER
        result = self._place(plan, out)
        if plan.is_long:
            self._collectives.run(self._reduce_steps(kind, array, op, root, weight, result))
            return result
        half = (self._rendezvous.tick + 1) & 1
        plan.own[half][...] = array
        self._meet(plan.request if weight is None else plan.request[: -_WEIGHT.size] + _WEIGHT.pack(weight))
        if result is not None:
            plan.fold(half, None if weight is None else self._rendezvous.weights(), result)
        self._rendezvous.is_unfinished = False
        return result

    def _reduce_steps(
        self, kind: str, array: np.ndarray, op: str, root: int, weight: float | None, result: np.ndarray | None
    ) -> Steps:
        """Return the steps of a reduction that takes several meetings."""
        collectives, source = self._collectives, array.reshape(-1)
        target = source if result is None else result.reshape(-1)
        if kind == "reduce":
            return collectives.reduce_steps(source, target, op, weight, self._ranks[root])
        if kind == "reduce_scatter":
            return collectives.reduce_scatter_steps(source, target, op, weight)
        return collectives.all_reduce_steps(source, target, op, weight)

    def copy(self, kind: str, array: Any, root: int, out: Any) -> Any:
        """Take part in a ``broadcast``, an ``all_gather`` that stacks, or an exchange of rows in equal blocks."""
        if type(root) is not int or self._schedule.operations or self._rendezvous.is_unfinished:
            return LONGER
        if kind == "scatter" and self._ranks[root : root + 1] != (self._collectives.rank,):
            return self._take_block(root, out)
        if type(array) is not np.ndarray:
            return LONGER
        plan = self._plans.find((kind, array.shape, array.dtype, root), self._plans.copying)
        if plan is None or not plan.fits(kind, array, out):
            return LONGER
        if plan.is_long:
            return self._copy_long(kind, plan, array, root, out)
        half = (self._rendezvous.tick + 1) & 1
        if plan.own:
            plan.own[half][...] = array if array.shape == plan.source_shape else array.reshape(plan.source_shape)
        if plan.head is not None:
            plan.own_heads[half][:] = plan.head
        self._meet(plan.request)
        for head in plan.heads[half]:
            if head != plan.head:
                return self._go_on(self._exchange(kind, array, root), half, out)
        result = self._place(plan, out)
        self._take(plan, half, result)
        self._rendezvous.is_unfinished = False
        return result

    def _place(self, plan: ShortPlan, out: np.ndarray | None) -> np.ndarray | None:
        """Return the array for the result, or None if this rank gets none."""
        if not plan.is_receiver:
            return None
        return self._results.empty(plan.shape, plan.dtype) if out is None else out

    def _take(self, plan: ShortPlan, half: int, result: np.ndarray | None) -> None:
        """Take this rank's result, after the meeting."""
        if result is not None:
            parts = plan.parts[half]
            if len(parts) > 1:
                np.concatenate(parts, out=result)
            else:
                result[...] = parts[0]

    def _copy_long(self, kind: str, plan: ShortPlan, array: np.ndarray, root: int, out: Any) -> Any:
        """Copy what takes several meetings."""
        if kind not in ("broadcast", "all_gather"):
            return self._collectives.run(self._exchange(kind, array, root).steps(self._placing(out)))
        collectives, result = self._collectives, self._place(plan, out)
        assert result is not None
        if kind == "all_gather":
            self._collectives.run(collectives.all_gather_steps(array, result))
            return result
        is_root = self._ranks[root] == collectives.rank
        self._collectives.run(collectives.broadcast_steps(array if is_root else result, self._ranks[root]))
        if is_root and result is not array:
            result[...] = array
        return result

    def _exchange(self, kind: str, array: np.ndarray | None, root: int) -> Exchange:
        """Return this rank's part in an exchange of equal blocks."""
        rows, sizes = None, None
        if array is not None:
            rows = np.ascontiguousarray(array)
            sizes = [len(array) // len(self._ranks)] * len(self._ranks) if kind in DIVIDED else None
        return Exchange(self._collectives, kind, rows, sizes, self._ranks[root] if kind in ROOTED else -1)

    def _take_block(self, root: int, out: Any) -> Any:
        """Take this rank's block of what ``root`` scatters. Only the root's head says what it is."""
        plan = self._plans.find(("scatter", None, None, root), self._plans.copying)
        if plan is None:
            return LONGER
        half = (self._rendezvous.tick + 1) & 1
        self._meet(plan.request)
        (head,) = plan.heads[half]
        words = head[: head[0] + 1].tobytes()
        found = self._plans.find(("block", None, None, root, words), self._plans.block)
        assert found is not None
        if found.is_long:
            return self._go_on(self._exchange("scatter", None, root), half, out)
        result = self._placing(out)(found.shape, found.dtype)
        self._take(found, half, result)
        self._rendezvous.is_unfinished = False
        return result

    def _go_on(self, exchange: Exchange, half: int, out: Any) -> Any:
        """Take the steps of an exchange that follow the first meeting."""
        result = self._collectives.go_on(exchange.rest_steps(half, self._placing(out)))
        self._rendezvous.is_unfinished = False
        return result

    def _placing(self, out: Any) -> Place:
        """Return what makes the array for a result, once its shape and dtype are known."""

        def place(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            array: np.ndarray = self._results.empty(shape, dtype) if out is None else check_out(out, shape, dtype)
            return array

        return place

    def _meet(self, request: bytes) -> None:
        """Meet the others and compare the requests."""
        rendezvous = self._rendezvous
        # Until the caller has its result: if anything is raised before, later collectives of this call are refused.
        rendezvous.is_unfinished = True
        rendezvous.post_packed(request)
        rendezvous.arrive()
        collectives = self._collectives
        collectives.meet()
        collectives.has_agreed = True
        rendezvous.compare()
