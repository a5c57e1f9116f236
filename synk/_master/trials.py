"""The second run of a function that tells whether its outputs follow the rows."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

import numpy as np

from synk._master import collectives
from synk._master.arguments import (
    Argument,
)
from synk._master.call import collect, send
from synk._master.launched import Launched
from synk._master.plans import Call
from synk._master.row_shapes import tell
from synk._master.session import Session
from synk._master.staging import plan_call, stage, write_numbers
from synk._pure.interrupts import is_from_handler
from synk._pure.trees import flatten
from synk._wire.control import Up
from synk.errors import (
    CallTimeout,
    ClosedError,
    WorkerDied,
)

_TRIAL_NS, _TRIAL_NBYTES = 1_000_000_000, 1 << 26
"""The longest run of a function, and the largest one, that is run again to learn of its outputs."""


def try_shorter(session: Session, launched: Launched) -> None:
    """Have one rank run a function again, on trial and without its last row, and see whether the outputs are shorter.

    Once in the life of a function, after a call whose outputs were as long as a rank's rows; and only where it costs
    little. Whatever this call meets says nothing about the one before.
    """
    function, call, lane = launched.function, launched.call, launched.cached.lane
    shapes, assembly = function.row_shapes, launched.cached.assembly
    shapes.wants_trial = False
    rank = call.ranks[0]
    low, high = call.bounds[rank]
    function_ns = lane.up_words[rank][Up.FUNCTION_NS]
    is_cheap = function_ns < _TRIAL_NS and session.functions.sent_nbytes(function.id) < _TRIAL_NBYTES
    if launched.deadline is not None:  # the time limit is the call's: it must not end a worker here
        is_cheap = is_cheap and time.monotonic() + 10 * (function_ns * 1e-9 + 0.1) < launched.deadline
    is_repeated = not call.arguments and not call.sources
    if high - low < 2 or is_repeated or not is_cheap or assembly is None:
        return
    bounds = [(low, high - 1) if each == rank else pair for each, pair in enumerate(call.bounds)]
    options = replace(call.options, num_slices=1, is_trial=True, is_apart=True)
    try:
        arguments = [*call.arguments, *_shorter_variables(session, call, rank)]
        shorter = replace(
            call, arguments=arguments, bounds=bounds, ranks=[rank], rows=[high - low - 1], options=options
        )
        cached = plan_call(session, function, shorter, options, lane)
        stage(session, cached, shorter)
        write_numbers(lane, shorter)
        number = next(session.numbers)
        tried = collect(session, send(session, function, shorter, cached, number, launched.deadline))
        function.plans.discard(cached, session.workers)
    except Exception as error:
        if is_from_handler(error):
            raise
        if isinstance(error, (WorkerDied, CallTimeout, ClosedError)):  # the call is over, and has its result
            warnings.warn(
                f"a second run of {function.name!r} on rank {rank}, with one row less, which was to tell whether its "
                f"outputs follow the rows, ended its worker: {error}",
                RuntimeWarning,
                stacklevel=5,
            )
        return
    follow = [
        k for k in shapes.suspects if k < len(tried.leaves) and np.shape(tried.leaves[k][rank])[:1] == (high - low - 1,)
    ]
    tell(shapes.convict(follow, assembly.ops, high - low, assembly.skeleton))


def _shorter_variables(session: Session, call: Call, rank: int) -> list[Argument]:
    """Return the shards of ``rank`` without their last row as inputs, where they are the rows of the call."""
    return [
        Argument("", "", "closed over", array=leaf[:-1], value=variable, dtype=leaf.dtype)
        for variable in call.sources
        for leaf in flatten(collectives.get_value(session, variable, rank))[0]
    ]
