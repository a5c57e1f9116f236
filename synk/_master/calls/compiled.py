"""A compiled call: what a successful call leaves behind, so that calls like it need only a doorbell.

There is one for each function and lane. A call *fits* if nothing has changed. A call that does not fit takes the slow
path: it is bound again, and may compile a new one. What can make a call new is said where it is asked, in words that
``synk.profile()`` and ``f.plan`` repeat: :meth:`CompiledCall.fits`, ``Pattern.values``, :func:`_why_by_options` and
:func:`_why_never`.
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
from synk._master.calls.pattern import MAY_HOLD_ARRAYS, Pattern
from synk._master.calls.plans import CAPTURED, FAILED, FIRST, Call, CallOptions
from synk._master.session import Session
from synk._pure.nested import is_plain_object

IN_FLIGHT = "other calls were in flight"
IN_OPERATION = "it was made within another operation of the runtime, or on a worker"
_NODES = "the workers are on several nodes"
NEWS = "the workers must be told of something, such as a function, a change, a restart, or what was dropped"

_NO_BATCH: Any = object()
"""Takes the place of a batch that must be read again even if it is equal: an array can be changed in place."""


class CompiledCall:
    """The calls of one function in one lane that are like the last one.

    It holds neither the function nor its arguments, so what the user drops is freed.

    Parameters
    ----------
    is_current : bool
        Whether the ranks know all that the call after it needs. If not, no call fits, but it says what differs.

    Attributes
    ----------
    cached : CachedPlan
    pattern : Pattern
        What the arguments must match.
    """

    def __init__(self, session: Session, launched: Launched, *, is_current: bool) -> None:
        cached, arguments = launched.cached, launched.call.arguments
        call = replace(launched.call, arguments=[], objects=NO_OBJECTS)
        assert cached.assembly is not None
        self._log_state = launched.log_state if is_current else -1
        self._last = _remembered(call, call.options.batch)  # one store: never rows of another batch
        self.cached = cached
        self.pattern = Pattern(launched.function.name, arguments, cached.staged, cached.pickle_place)
        self._doorbells = session.workers.doorbells(call.ranks)

    def fits(
        self,
        session: Session,
        function: Callee,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: Any,
        started_ns: int,
    ) -> Launched | str:
        """Return the call to send if it is like the last one and nothing has changed, else why it is new.

        Writes nothing that a rank can read. A batch that does not fit raises, as in a call that takes the slow path.
        """
        workers = session.workers
        log = workers.log
        if function.is_stale:
            return CAPTURED
        if self._log_state != log.state:
            return NEWS
        cached = self.cached
        if session.variables.to_flip or not cached.is_agreed:
            return FAILED
        if log.settings is not None and workers.settings.read() != log.settings.values:
            return "a setting of a library was changed"
        if os.getpid() != session.pid:  # a copy of the master that was made without at-fork hooks
            return "this process is a copy of the program"
        values = self.pattern.values(args, kwargs)
        if isinstance(values, str):
            return values
        last_batch, call = self._last
        if type(batch) is not type(last_batch) or batch != last_batch:
            chosen = self._chosen(session, batch)
            if isinstance(chosen, str):
                return chosen
            call = chosen
        if not self._doorbells.are_silent():
            return "a worker has printed something, or has died"
        lease, assembly = None, cached.assembly
        assert assembly is not None
        if assembly.result_nbytes:
            lease = session.memory.lease_known(assembly.result_nbytes, call.ranks)
            if lease is None or self._log_state != log.state:
                return "no buffer that the workers know is free for its large outputs"
        timeout = session.timeout
        deadline = None if timeout is None else started_ns * 1e-9 + timeout
        pickled_nbytes = self.pattern.pickled_nbytes
        return Launched(
            function, call, cached, values, deadline, started_ns, pickled_nbytes,
            self._log_state, self._doorbells, lease,
        )  # fmt: skip

    def _chosen(self, session: Session, batch: Any) -> Call | str:
        """Return the call with the rows of another batch, and remember it; else return why it is new."""
        chosen = self.pattern.choose(self._last[1], divider(session), batch)
        if isinstance(chosen, str):
            return chosen
        self._last = _remembered(chosen, batch)
        return chosen


def _remembered(call: Call, batch: Any) -> tuple[Any, Call]:
    """Return a call with the batch it was made for, or with ``_NO_BATCH`` if an equal batch may mean other rows."""
    is_plain = batch is None or type(batch) is int
    return (batch if is_plain and call.owned is None else _NO_BATCH), call


def compile_call(session: Session, launched: Launched) -> None:
    """After a successful call: if it was new, let calls like it need only a doorbell, if that is possible."""
    function = launched.function
    options = launched.call.options
    if launched.doorbells is not None or session.nodes is not None:
        return
    plans, record, place = function.plans, function.record, launched.cached.lane.index
    by_options = _why_by_options(options)
    why_never = by_options or _why_never(session, launched)
    before = plans.compiled[place]
    record.num_new += 1
    record.why_new = why_never or plans.why_new
    if not by_options:  # the options say nothing of the next call
        plans.why_new = why_never or FIRST
    if why_never:
        return
    # If the state of the log is the same, no rank had to be told anything, and the next call need not tell it either.
    # A function's first call told them of the function and the plan, so the second is the first that is compiled.
    is_same = launched.log_state == session.workers.log.state and not session.has_dropped
    if is_same:
        function.repeated.ignore(each.label for each in launched.call.arguments if each.is_part)
    new = plans.compiled[place] = CompiledCall(session, launched, is_current=is_same)
    if record.why_new is NEWS and before is not None:  # perhaps because of other arguments
        record.why_new = before.pattern.difference(new.pattern) or NEWS


def _why_by_options(options: CallOptions) -> str:
    """Say why calls with these options are new each time; "" if they need not be."""
    if options.timeout is not None:
        return "timeout= in the call"
    if options.num_slices > 1:
        return "num_slices= in the call"
    if options.output_subset is not None:
        return "output_subset= in the call"
    if options.is_serial:
        return "it is a serial call"
    return "it is one of repeat" if options.num_repeats > 1 else ""


def _why_never(session: Session, launched: Launched) -> str:
    """Say why calls like a successful one are new each time, whatever their options; "" if they need not be."""
    call, cached = launched.call, launched.cached
    assembly = cached.assembly
    if session.has_devices:
        return "the workers are on devices"
    if call.sources:
        return "its rows are those of a sharded variable that it closes over"
    if assembly is None:
        return "its outputs are not put together"
    # Ranks that know their parts of large outputs put them in place without being asked.
    if not cached.is_agreed or (assembly.result_nbytes and not assembly.told.issuperset(call.ranks)):
        return "its large outputs are new to the workers"
    staged = iter(cached.staged)
    for argument in call.arguments:
        array, target = argument.array, None if argument.array is None else next(staged)
        if argument.kind == "closed over" or (argument.kind == "object" and not is_plain_object(argument.value)):
            return f"{argument.label} {MAY_HOLD_ARRAYS}"
        if argument.contents is not None and argument.data is None:  # a file can become shorter between two calls
            return f"{argument.label} lies in a file"
        if array is not None and target is not None and not _is_plain(array, target):
            return f"{argument.label} is a record, or no plain array"
    return ""


def _is_plain(array: np.ndarray, target: np.ndarray) -> bool:
    """Whether an array is not a record, whose equal dtypes can differ, and was not changed since it was passed."""
    is_same = array.dtype.newbyteorder("=") == target.dtype and array.shape == target.shape
    return type(array) is np.ndarray and array.dtype.kind != "V" and is_same
