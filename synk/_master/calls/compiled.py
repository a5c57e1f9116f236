"""A compiled call: what a successful call leaves behind, so that calls like it need only a doorbell.

There is one for each function and lane. A call *fits* if nothing has changed. A call that does not fit takes the slow
path: it is bound again, and may compile a new one.
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
from synk._master.calls.pattern import Pattern
from synk._master.calls.plans import Call
from synk._master.session import Session
from synk._pure.nested import is_plain_object

_NO_BATCH: Any = object()
"""Takes the place of a batch that must be read again even if it is equal: an array can be changed in place."""


class CompiledCall:
    """The calls of one function in one lane that are like the last one.

    It holds neither the function nor its arguments, so what the user drops is freed.

    Parameters
    ----------
    is_current : bool
        Whether the ranks know all that the call after it needs. If not, no call fits.

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
    ) -> Launched | None:
        """Return the call to send if it is like the last one and nothing has changed, else None.

        Writes nothing that a rank can read. A batch that does not fit raises, as in a call that takes the slow path.
        """
        workers = session.workers
        log = workers.log
        if function.is_stale or self._log_state != log.state:
            return None
        cached = self.cached
        if session.variables.to_flip or not cached.is_agreed:
            return None
        if log.settings is not None and workers.settings.read() != log.settings.values:
            return None
        if os.getpid() != session.pid:  # a copy of the master that was made without at-fork hooks
            return None
        values = self.pattern.values(args, kwargs)
        if values is None:
            return None
        last_batch, call = self._last
        if type(batch) is not type(last_batch) or batch != last_batch:
            chosen = self.pattern.choose(call, divider(session), batch)
            if chosen is None:
                return None
            self._last = _remembered(chosen, batch)
            call = chosen
        if not self._doorbells.are_silent():
            return None
        lease, assembly = None, cached.assembly
        assert assembly is not None
        if assembly.result_nbytes:
            lease = session.memory.lease_known(assembly.result_nbytes, call.ranks)
            if lease is None or self._log_state != log.state:
                return None
        timeout = session.timeout
        deadline = None if timeout is None else started_ns * 1e-9 + timeout
        pickled_nbytes = self.pattern.pickled_nbytes
        return Launched(
            function, call, cached, values, deadline, started_ns, pickled_nbytes,
            self._log_state, self._doorbells, lease,
        )  # fmt: skip


def _remembered(call: Call, batch: Any) -> tuple[Any, Call]:
    """Return a call with the batch it was made for, or with ``_NO_BATCH`` if an equal batch may mean other rows."""
    is_plain = batch is None or type(batch) is int
    return (batch if is_plain and call.owned is None else _NO_BATCH), call


def compile_call(session: Session, launched: Launched) -> None:
    """After a successful call: if it was new, let calls like it need only a doorbell, if that is possible."""
    function = launched.function
    if launched.doorbells is not None or session.nodes is not None or not _may_fit(session, launched):
        return
    # If the state of the log is the same, no rank had to be told anything, and the next call need not tell it either.
    # A function's first call told them of the function and the plan, so the second is the first that is compiled.
    is_same = launched.log_state == session.workers.log.state and not session.has_dropped
    place = launched.cached.lane.index
    function.plans.compiled[place] = CompiledCall(session, launched, is_current=is_same)


def _may_fit(session: Session, launched: Launched) -> bool:
    """Whether calls like a successful one can fit it, rather than being new each time."""
    call, cached = launched.call, launched.cached
    options, assembly = call.options, cached.assembly
    if (
        options.num_ranks is not None
        or options.timeout is not None
        or options.num_slices > 1
        or options.output_subset is not None
    ):
        return False
    if session.has_devices or call.sources or assembly is None or not cached.is_agreed:
        return False
    # Ranks that know their parts of large outputs put them in place without being asked.
    if assembly.result_nbytes and not assembly.told.issuperset(call.ranks):
        return False
    staged = iter(cached.staged)
    for argument in call.arguments:
        array, target = argument.array, None if argument.array is None else next(staged)
        if argument.kind in ("table", "picked"):  # rows are copied at each call
            return False
        if argument.kind == "object" and not is_plain_object(argument.value):
            return False
        if argument.contents is not None and argument.data is None:  # a file can become shorter between two calls
            return False
        if array is not None and target is not None and not _is_plain(array, target):
            return False
    return True


def _is_plain(array: np.ndarray, target: np.ndarray) -> bool:
    """Whether an array is not a record, whose equal dtypes can differ, and was not changed since it was passed."""
    is_same = array.dtype.newbyteorder("=") == target.dtype and array.shape == target.shape
    return type(array) is np.ndarray and array.dtype.kind != "V" and is_same
