"""The check of the halves in the master: which call gets it, and what the user is told.

``synk._worker.loop.halves`` is the workers' part.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

from synk._master.calls.assembly import Assembly
from synk._master.calls.callee import Callee
from synk._master.calls.launched import Launched, Steps
from synk._master.calls.plans import Call
from synk._master.processes.output import warn_at_users_line
from synk._master.session import Session
from synk._pure.trees import output_names
from synk._wire.control import Up
from synk._wire.messages import MIN_CHECKED_ROWS, Layout, Status
from synk.errors import CallTimeout, OpMismatch, RowShapedOutput, WorkerDied

_MAX_NS, _MAX_NBYTES = 1_000_000_000, 1 << 26
"""The longest run of a function that is run again, and the limit for the outputs of all runs together."""


def can_check(function: Callee, call: Call) -> bool:
    """Whether a call could show if the default op fits its function, and no call has shown it yet."""
    options = call.options
    has_rows = call.selection is not None or bool(call.sources)
    return (
        function.is_unchecked
        and has_rows
        and max(call.rows) >= MIN_CHECKED_ROWS
        and not (options.is_serial or options.is_trial)
        and options.output_subset is None
    )


def checking(
    session: Session, launched: Launched, assembly: Assembly, layouts: Mapping[int, Layout], up_words: Any
) -> Steps[None]:
    """Have one rank check whether the average fits the function of a successful call, and tell the user if not.

    This happens once in the life of a function, and only if it costs little. Nothing that goes wrong here fails the
    call. ``layouts`` are the ranks' outputs, and ``up_words`` the numbers that ranks have reported, by rank.
    """
    function, call, cached = launched.function, launched.call, launched.cached
    largest = max(range(len(call.rows)), key=call.rows.__getitem__)
    rank = call.ranks[largest]
    function_ns = up_words[rank][Up.FUNCTION_NS]
    # The time limit is the call's own: it must not end a worker during the check.
    is_late = launched.later_deadline is not None and (
        time.monotonic() + 10 * (function_ns * 1e-9 + 0.1) > launched.later_deadline
    )
    if function_ns > _MAX_NS or is_late or launched.is_forgotten:
        return
    function.is_unchecked = False
    if assembly.has_assignments or 4 * sum(leaf.nbytes for leaf in layouts[rank].leaves) > _MAX_NBYTES:
        return
    lane, name = cached.lane.index, repr(function.name)
    request = session.ranks.send_check(rank, launched.later_deadline, name, lane)
    yield request
    reply = session.ranks.reply(request, rank)
    misfits = pickle.loads(reply.body)["misfits"] if reply.status == Status.DONE else []
    if misfits:
        warn_at_users_line(*_told(function, layouts[rank].skeleton, rank, misfits))


def tell_of_end(launched: Launched, error: BaseException) -> None:
    """Warn the user about an error that ended the check. The call itself is over and has its result."""
    if isinstance(error, (WorkerDied, CallTimeout)):
        warn_at_users_line(
            f"a second run of {launched.function.name!r}, made to find out whether op 'avg' fits it, killed "
            f"its worker: {error}",
            RuntimeWarning,
        )


def _told(
    function: Callee, skeleton: Any, rank: int, misfits: Sequence[tuple[int, tuple[str, ...]]]
) -> tuple[str, type[Warning]]:
    """Return what to tell the user about outputs that are not averages, and the class of the warning."""
    names = output_names(skeleton)
    outputs = [(names[k], ops) for k, ops in misfits if k >= 0]
    what = ", ".join(name for name, _ in outputs) or "the gradients"
    text = (
        f"op 'avg', the default, does not fit {what} of {function.name!r}: the value for all rows of rank {rank} is "
        "not the average of those for two parts of the rows."
    )
    category: type[Warning] = OpMismatch
    if function.changes and (misfits[-1][0] < 0 or not all(ops for _, ops in outputs)):
        text += (
            " backward() averages gradients in the same way, so the step differs from that on one worker. Pass a loss "
            "that is a sum over rows through synk.torch.total(loss), and one that is a mean over other things (class "
            "weights, labels of -100, tokens) through synk.torch.mean(sum, count)."
        )
        outputs = []
    for name, ops in outputs:
        use = "outputs={}" if skeleton == 0 else f"op {{}} for {name}"
        if "gather" in ops:
            category = RowShapedOutput
            text += f" {name[0].upper()}{name[1:]} has as many rows as its rank: use {use.format(_quoted('gather'))}."
        elif ops:
            text += f" Use {use.format(' or '.join(map(_quoted, ops)))}."
        else:
            text += (
                f" No op fits {name}: return what can be combined, as a sum and a count, have one value for each rank "
                "by op None, or call f.serial(...)."
            )
    text += (
        ' To name outputs=, also outputs="avg", silences this; a fixed seed of the function\'s own may be the reason, '
        "too. f.verify(...) compares a call with the serial one."
    )
    return text, category


def _quoted(op: str) -> str:
    return f'"{op}"'
