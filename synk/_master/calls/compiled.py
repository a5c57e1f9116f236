"""A compiled call: what a successful call leaves behind, so that calls like it need only a doorbell.

There is one for each function and lane. A call *fits* if nothing has changed. A call that does not fit is bound again,
and may compile a new one. All that can make a call new, in the order in which it is asked:

- its options: ``output_subset``, ``timeout``, ``num_slices`` (``Function.__call__``);
- something that the function captured has changed (``code.capture``);
- this thread is in an operation, or runs on a worker, or another call is in flight (``call.call_again``);
- the state of the log: what the runtime itself changed, and what finalizers dropped (``processes.log``); assignments to
  be committed; settings of libraries (``synk._wire.settings``); a fork; how the last outputs were put together (here);
- the arguments: their types, dtypes, shapes, identities, structure, the size of their pickle (``calls.pattern``);
- a batch that other ranks would run or that needs other places, or the first that allows the check of the op (here);
- a death or a printed line that the workers' descriptors report, or no buffer for large outputs that the ranks know.

Nothing is written before all this. ``_why_new`` lists the calls that are never compiled, for ``synk.profile()``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from synk._master.calls.arguments import NO_OBJECTS
from synk._master.calls.binding import divider
from synk._master.calls.callee import Callee
from synk._master.calls.launched import Launched
from synk._master.calls.op_check import can_check
from synk._master.calls.pattern import Pattern
from synk._master.calls.plans import Call
from synk._master.session import Session
from synk._pure.nested import is_plain_object

_NO_BATCH: Any = object()
"""Takes the place of a batch that must be read again even if it is equal: an array can be changed in place."""


class CompiledCall:
    """The calls of one function in one lane that are like the last one.

    It holds neither the function nor its arguments, so what the user drops is freed.

    Attributes
    ----------
    cached : CachedPlan
    pattern : Pattern
        What the arguments must match.
    """

    def __init__(self, session: Session, launched: Launched) -> None:
        cached, arguments = launched.cached, launched.call.arguments
        call = replace(launched.call, arguments=[], objects=NO_OBJECTS)
        assert cached.assembly is not None
        self._log_state = launched.log_state
        told = session.workers.log.settings
        self._settings = None if told is None else told.values
        self._batch, self._call = _remembered(call, call.options.batch)
        self._ranks = frozenset(call.ranks)
        self.cached = cached
        self._assembly = cached.assembly
        self.pattern = Pattern(launched.function.name, arguments, cached.staged, cached.pickle_place)
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
        """Return the call to send if it is like the last one and nothing has changed, else None. Writes nothing.

        A batch that does not fit raises, as in a call that is bound again.
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
        values = self.pattern.values(args, kwargs)
        if values is None:
            return None
        call = self._call
        if shard_batch is not None or type(batch) is not type(self._batch) or batch != self._batch:
            chosen = self.pattern.choose(call, divider(session, function), batch, shard_batch)
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
        pickled_nbytes = self.pattern.pickled_nbytes
        return Launched(
            function, call, self.cached, values, deadline, started_ns, pickled_nbytes,
            self._log_state, self._doorbells, lease,
        )  # fmt: skip


def _remembered(call: Call, batch: Any) -> tuple[Any, Call]:
    """Return a call with the batch it was made for, or with ``_NO_BATCH`` if an equal batch may mean other rows."""
    is_plain = batch is None or type(batch) is int
    return (batch if is_plain and call.owned is None else _NO_BATCH), call


def compile_call(session: Session, launched: Launched) -> None:
    """After a successful call: if it was new, let calls like it need only a doorbell, if that is possible.

    A call that fitted a compiled one does not know its arguments any more. If it returned something of another layout,
    the compiled call no longer fits by itself, and the next call is new.
    """
    function = launched.function
    if launched.call.options.is_trial or launched.doorbells is not None or session.nodes is not None:
        return
    record = function.record
    record.num_new += 1
    record.why_new = _why_new(session, launched)
    # If the state of the log is the same, no rank had to be told anything, and the next call need not tell it either.
    # A function's first call told them of the function and the plan, so the second is the first that is compiled.
    is_same = launched.log_state == session.workers.log.state and not session.has_dropped
    if not record.why_new and is_same:
        function.copies.ignore(each.label for each in launched.call.arguments if each.is_part)
        function.plans.compiled[launched.cached.lane.index] = CompiledCall(session, launched)


def _why_by_options(launched: Launched) -> str:
    function, options = launched.function, launched.call.options
    if function.block_rows:
        return "reproducible=True"
    if function.retry:
        return "retry="
    if options.timeout is not None:
        return "timeout= in the call"
    if options.is_serial or options.num_slices > 1 or options.output_subset is not None or options.num_repeats > 1:
        return "serial calls, num_slices, output_subset and repeat"
    return ""


def _why_new(session: Session, launched: Launched) -> str:
    """Say why calls like a successful one are new each time; empty if they need not be."""
    call, cached = launched.call, launched.cached
    assembly = cached.assembly
    by_options = _why_by_options(launched)
    if by_options:
        return by_options
    if session.has_devices:
        return "the workers are on devices"
    if call.sources:
        return "its rows are those of a sharded variable that it closes over"
    if can_check(launched.function, call):  # it took too long, as first calls that import something do: check again
        return "the check of its op is still to come"
    if assembly is None:
        return "its outputs are not put together"
    # Ranks that know their parts of large outputs put them in place without being asked.
    if not cached.is_agreed or (assembly.result_nbytes and not assembly.told.issuperset(call.ranks)):
        return "its large outputs are new to the workers"
    staged = iter(cached.staged)
    for argument in call.arguments:
        array, target = argument.array, None if argument.array is None else next(staged)
        if argument.kind == "closed over" or (argument.kind == "object" and not is_plain_object(argument.value)):
            return f"{argument.label} is an object that may hold arrays or run code when it is pickled"
        if argument.contents is not None and argument.data is None:  # a file can become shorter between two calls
            return f"{argument.label} lies in a file"
        if array is not None and target is not None and not _is_plain(array, target):
            return f"{argument.label} is a record, or no plain array"
    return ""


def _is_plain(array: np.ndarray, target: np.ndarray) -> bool:
    """Whether an array is not a record, whose equal dtypes can differ, and was not changed since it was passed."""
    is_same = array.dtype.newbyteorder("=") == target.dtype and array.shape == target.shape
    return type(array) is np.ndarray and array.dtype.kind != "V" and is_same
