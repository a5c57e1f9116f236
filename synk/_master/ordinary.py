"""The ordinary way of a call, from beginning to end, and what it prepares: the quiet calls that may follow."""

from __future__ import annotations

from typing import Any

import numpy as np

from synk._master.arguments import is_plain_object
from synk._master.call import CallOptions, collect, launch
from synk._master.callee import Callee
from synk._master.launched import Launched
from synk._master.quiet import QuietCall
from synk._master.session import Session
from synk._master.trials import try_shorter


def run_call(
    session: Session,
    function: Callee,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CallOptions,
    deadline: float | None,
) -> Any:
    """Run one call the ordinary way, prepare the quiet ones that may follow, and return its result."""
    launched = launch(session, function, args, kwargs, options, deadline, session.lanes.first)
    result = collect(session, launched)
    if function.row_shapes.wants_trial:
        try_shorter(session, launched)
    prepare(session, launched)
    return result


def prepare(session: Session, launched: Launched) -> None:
    """After a call that went the ordinary way and ended well: prepare the quiet ones that may follow in its lane."""
    # Where the epoch has not ended no rank had to be told anything: the next call need not tell it either.
    if launched.epoch == session.workers.epoch.number and _can_repeat(session, launched):
        launched.function.plans.quiet[launched.cached.lane.index] = QuietCall(session, launched)


def _can_repeat(session: Session, launched: Launched) -> bool:
    """Whether calls like one that has just ended well can be quiet."""
    call, cached = launched.call, launched.cached
    assembly, plan_id = cached.assembly, cached.plan.plan_id
    options = call.options
    if options.num_slices > 1 or options.output_subset is not None or options.is_serial or options.is_trial:
        return False
    if session.has_devices or call.sources or not cached.is_agreed:
        return False
    if assembly is None or not assembly.is_plain:
        return False
    # Ranks that know their parts of large outputs bring them into place without being asked.
    known = [session.workers.by_rank[rank].known.assemblies.get(plan_id) for rank in call.ranks]
    if assembly.result_nbytes and any(number != assembly.number for number in known):
        return False
    staged = iter(cached.staged)
    for argument in call.arguments:
        if argument.kind == "closed over" or (argument.kind == "object" and not is_plain_object(argument.value)):
            return False
        if argument.contents is not None and argument.data is None:  # a file can become shorter between two calls
            return False
        array, target = argument.array, None if argument.array is None else next(staged)
        if (
            array is not None
            and target is not None
            and (  # records, of which equal dtypes can differ, and what was changed in place since it was passed
                type(array) is not np.ndarray
                or array.dtype.kind == "V"
                or array.dtype.newbyteorder("=") != target.dtype
                or array.shape != target.shape
            )
        ):
            return False
    return True
