"""Whether the loss of a training step is a mean over rows: found out before the first step, on a copy of the objects.

``backward()`` averages gradients over rows, so a loss that is a sum, or a mean over something else, trains another
model than on one worker. The copy takes a step on a few rows, on all ranks and on one worker alone. Outputs, gradients
and what the step changed must be the same, at least with all modules in ``eval()``. These are ordinary calls, after
each of which the copy is put back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from synk._api.op_check import (
    MAX_NBYTES,
    MAX_S,
    Few,
    Unknown,
    few_rows,
    limit_of,
    outputs_with_ops,
    settle,
    tried,
)
from synk._api.plain_copy import PlainCopy, copied
from synk._api.runs import Runs, are_same
from synk._pure.output_ops import DEFAULT_OP
from synk._wire.apart import Part
from synk.torch import _rank
from synk.torch import _state as states

_RTOL = 0.02
"""Relative to the norm. Gradients are sums of rounded numbers, perhaps of 16 bits; a wrong loss is further off."""


def check_step(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Any) -> None:
    """Compare a step on a few rows with the same step on one worker, unless that is known or costs too much.

    Raises
    ------
    OpMismatch
        If they differ.
    """
    few = few_rows(function, args, kwargs, options)
    if few is not None:
        settle(function, few, lambda: _compare(function, few))


def _compare(function: Any, few: Few) -> str | None:
    replicated = function._replicated
    with replicated._guard.lifted():
        parameters = states.parameters_of(replicated._objects)
        if sum(each.numel() * each.element_size() for each in parameters) > MAX_NBYTES:
            raise Unknown
        copy = replicated._runtime.resident(
            _rank.RankReplica(replicated._objects, replicated._options), dump=_rank.dump, load=_rank.load
        )
    misfit = _misfit(function, few, copy, "run_shown")
    # Draws and batch norms may be the reason: they are each rank's own.
    return misfit if misfit == "" else _misfit(function, few, copy, "run_shown_in_eval")


def _misfit(function: Any, few: Few, copy: Any, method: str) -> str | None:
    """Return what to tell the user about a step of the copy; an empty text if all is well, None if it is random."""
    fn = tried(copied, function._fn, max_nbytes=MAX_NBYTES).fn
    body = PlainCopy(function.body(fn, copy, method))
    runs = Runs(function, body, few.args, few.kwargs, limit_of(function), [copy])
    apart = tried(runs.apart, few.rows)
    if runs.seconds * len(apart) > MAX_S:
        raise Unknown
    parts, gradients = zip(*map(_told_apart, apart))
    whole, of_whole = _told_apart(tried(runs.alone, few.rows))
    misfits = [each for each in outputs_with_ops(few, whole, parts) if DEFAULT_OP not in each.ops]
    of_gradients = _is_off(gradients[0], of_whole)
    if not misfits and not of_gradients:
        return ""
    again, of_again = _told_apart(tried(runs.alone, few.rows))
    if _is_off(of_again, of_whole) or not are_same(again.value, whole.value):
        return None
    where = "its gradients" if of_gradients else ", ".join(f"output{misfit.path}" for misfit in misfits)
    return (
        f"cannot take the step {function.__name__!r} on several workers: on {few.described()} it differs from that on "
        f"one worker, in {where}, so its loss is no mean over rows. backward() averages gradients over rows: pass a "
        "loss that is a sum over rows through synk.torch.total(loss), and one that is a mean over other things (class "
        'weights, labels of -100, tokens) through synk.torch.mean(sum, count). outputs="avg" ends this check.'
    )


def _told_apart(part: Part) -> tuple[Part, np.ndarray]:
    value, gradients = part.value
    return part._replace(value=value), gradients


def _is_off(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether gradients differ by far more than rounding."""
    if one.shape != other.shape:
        return True
    size = max(np.linalg.norm(one), np.linalg.norm(other))
    return bool(np.isfinite(other).all() and not np.linalg.norm(one - other) <= _RTOL * size)
