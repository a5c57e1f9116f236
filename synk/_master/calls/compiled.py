"""A compiled call: what a call that has ended well leaves for those like it, which need no more than a doorbell.

One for each function and lane. A call *fits* if four comparisons say that nothing has changed since: the state of the
log (what the runtime itself has changed, and what finalizers dropped: ``processes.log``), other calls in flight and
whatever the workers' descriptors report, the settings of libraries (``synk._wire.settings``), and what the function
captured, which the caller has compared before (``code.capture``). Then come the arguments (``calls.look``). Their rows
may be others if the same ranks run the call. Nothing is written before, and whatever does not fit is bound anew and may
compile another.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from synk._master.calls.callee import Callee
from synk._master.calls.launched import Launched
from synk._master.calls.look import Look
from synk._master.calls.plans import Call
from synk._master.calls.trials import can_check
from synk._master.session import Session
from synk._pure.nested import is_plain_object

_NO_BATCH: Any = object()
"""In the place of a batch that is another one even where it is equal: an array can be changed in place."""


class CompiledCall:
    """The calls of one function in one lane that are like the last one.

    Holds neither the function nor its arguments: what the user drops is freed.

    Attributes
    ----------
    cached : CachedPlan
    look : Look
        That of their arguments.
    """

    def __init__(self, session: Session, launched: Launched) -> None:
        cached, arguments = launched.cached, launched.call.arguments
        call = replace(launched.call, arguments=[], objects=None)
        assert cached.assembly is not None
        self._log_state = launched.log_state
        told = session.workers.log.settings
        self._settings = None if told is None else told.values
        self._batch, self._call = _remembered(call, call.options.batch)
        self._ranks = frozenset(call.ranks)
        self.cached = cached
        self._assembly = cached.assembly
        self.look = Look(launched.function.name, arguments, cached.staged, cached.pickle_place)
        self._doorbells = session.workers.doorbells(call.ranks)

    def fits(
        self,
        session: Session,
        function: Callee,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: Any,
        shard_batch: Any,
        started_ns: int,
    ) -> Launched | None:
        """Return the call to send, if it is like the last one and nothing has changed since; writes nothing.

        A batch that does not fit raises, as in a call that is bound anew.
        """
        workers = session.workers
        if (
            self._log_state != workers.log.state
            or session.variables.to_flip
            or function.is_stale
            or (self._settings is not None and workers.settings.read() != self._settings)
            or os.getpid() != session.pid  # a copy of the master that was made without at-fork hooks
            or not self.cached.is_agreed
            or self.cached.assembly is not self._assembly
        ):
            return None
        values = self.look.values(args, kwargs)
        if values is None:
            return None
        call = self._call
        if shard_batch is not None or type(batch) is not type(self._batch) or batch != self._batch:
            chosen = self.look.choose(call, session.world_size, batch, shard_batch)
            if chosen is None or can_check(function, chosen):
                return None
            call = chosen
            self._batch, self._call = _remembered(call, batch)
        if not self._doorbells.are_silent():
            return None
        lease = None
        if self._assembly.result_nbytes:
            lease = session.memory.lease_known(self._assembly.result_nbytes, self._ranks)
            if lease is None or self._log_state != workers.log.state:
                return None
        timeout = session.timeout
        deadline = None if timeout is None else started_ns * 1e-9 + timeout
        pickled_nbytes = self.look.pickled_nbytes
        return Launched(
            function, call, self.cached, values, deadline, started_ns, pickled_nbytes,
            self._log_state, self._doorbells, lease,
        )  # fmt: skip


def _remembered(call: Call, batch: Any) -> tuple[Any, Call]:
    """Return a call with the batch that it stands for, where another one that is equal means the same rows."""
    is_plain = batch is None or type(batch) is int
    return (batch if is_plain and call.owned is None else _NO_BATCH), call


def compile_call(session: Session, launched: Launched) -> None:
    """After a new call that has ended well: have those like it need no more than a doorbell, if that can be."""
    function = launched.function
    if launched.call.options.is_trial:
        return
    record = session.profile.record(function.name)
    record.num_new += 1
    record.why_new = _why_new(session, launched)
    # Where the state of the log is the same no rank had to be told anything: the next call need not tell it either.
    is_same = launched.log_state == session.workers.log.state and not session.has_dropped
    if not record.why_new and is_same:
        function.repeated_copies.ignore(each.label for each in launched.call.arguments if each.is_part)
        function.plans.compiled[launched.cached.lane.index] = CompiledCall(session, launched)


def _why_new(session: Session, launched: Launched) -> str:
    """Say why calls like one that has just ended well are new each time; an empty text where they need not be."""
    call, cached, options = launched.call, launched.cached, launched.call.options
    assembly, plan_id = cached.assembly, cached.plan.plan_id
    if options.is_serial or options.num_slices > 1 or options.output_subset is not None:
        return "serial calls, num_slices and output_subset"
    if session.has_devices:
        return "the workers are on devices"
    if call.sources:
        return "its rows are those of a sharded variable that it closes over"
    if can_check(launched.function, call):  # it took too long, as first calls do that import something: look again
        return "the check of its op is still to come"
    if assembly is None:
        return "its outputs are not put together"
    # Ranks that know their parts of large outputs bring them into place without being asked.
    known = [session.workers.by_rank[rank].known.held["plan"].get(plan_id) for rank in call.ranks]
    if not cached.is_agreed or (assembly.result_nbytes and any(number != assembly.number for number in known)):
        return "its large outputs are new to the workers"
    staged = iter(cached.staged)
    for argument in call.arguments:
        array, target = argument.array, None if argument.array is None else next(staged)
        if argument.kind == "closed over" or (argument.kind == "object" and not is_plain_object(argument.value)):
            return f"{argument.label} is an object that may hold arrays or run code when it is pickled"
        if argument.contents is not None and argument.data is None:  # which can become shorter between two calls
            return f"{argument.label} lies in a file"
        if array is not None and target is not None and not _is_plain(array, target):
            return f"{argument.label} is a record, or no plain array"
    return ""


def _is_plain(array: np.ndarray, target: np.ndarray) -> bool:
    """Whether an array is no record, of which equal dtypes can differ, and was not changed since it was passed."""
    is_same = array.dtype.newbyteorder("=") == target.dtype and array.shape == target.shape
    return type(array) is np.ndarray and array.dtype.kind != "V" and is_same
