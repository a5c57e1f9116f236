"""``Function.verify``: a call, compared with the plain function in the program or, if that cannot be, with ``serial``.

This file makes the calls, of copies of the function, compares them, and reports on each output. ``synk._api.plain``
calls the plain function.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from synk._api.comparison import (
    MISSING,
    SINGLE,
    Runs,
    Tolerance,
    are_same,
    are_single,
    combine,
    difference,
    fitting_ops,
    is_same,
    leave_out,
    outputs_of,
)
from synk._api.plain import Failed, NotComparable, PlainCopy, ScatteredArguments, call_plain, copied
from synk._engine.rows import CallOptions
from synk._pure.interrupts import raise_if_of_handler
from synk._pure.ops import OPS, Op
from synk._pure.words import text_of
from synk._wire.apart import Quiet
from synk.errors import SerializationError

_ORACLES = {"plain": "the plain function", "serial": "its serial call"}


@dataclass(frozen=True)
class VerifiedOutput:
    """The verdict on one output, or on one shared variable that the function assigned.

    Attributes
    ----------
    name : str
        The path in the result, for instance ``"[0]['loss']"``; empty if the function returns one value.
    op : op, nesting of ops, or None
        The op in ``outputs``, or the ops that do not match what the function returned. For a variable ``"shard"`` or
        ``"replica"``.
    verdict : str
        ``"equal"`` or ``"different"``. ``"one per rank"`` (op None) is not compared. If values differ for a legitimate
        reason, the verdict is the reason: ``"random"``, or ``"per rank"`` (built with ``per_rank=True``).
    difference : float
        The largest absolute difference. Infinite where one of two numbers is NaN; NaN if there is no difference to
        compute (other shapes, text, objects).
    matching : tuple of str
        The ops that give the expected value, if the chosen op does not.
    """

    name: str
    op: Any
    verdict: str
    difference: float = float("nan")
    matching: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Report:
    """The result of :meth:`synk.Function.verify`. True if every output that can be compared is equal.

    Attributes
    ----------
    function : str
        The name of the function.
    oracle : str
        What the call was compared with: ``"plain"``, the plain function in the program, or ``"serial"``.
    outputs : tuple of VerifiedOutput
    notes : tuple of str
        Sentences about other observations.
    """

    function: str
    oracle: str
    outputs: tuple[VerifiedOutput, ...]
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return all(output.verdict in ("equal", "one per rank") for output in self.outputs)

    def __repr__(self) -> str:
        rows = [("output", "op", "equal", "largest difference", "would match")]
        words = {"equal": "yes", "different": "NO"}
        for output in self.outputs:
            op = getattr(output.op, "__name__", None) or str(output.op)
            distance = "" if np.isnan(output.difference) else f"{output.difference:.1e}"
            verdict = words.get(output.verdict, output.verdict)
            rows.append((output.name or "result", op, verdict, distance, ", ".join(output.matching)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([f"{self.function!r} against {_ORACLES[self.oracle]}:", *lines, *self.notes])


def verify(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions, tolerance: Tolerance
) -> Report:
    """Compare a call with the plain function in the program or, where that cannot be, with its serial call.

    Raises
    ------
    SerializationError
        If the function cannot be copied.
    """
    callee, batch = function._callee, options.batch
    if options.num_slices > 1 and function._options.variables:
        raise ValueError(
            f"cannot verify {callee.name!r}: got num_slices={options.num_slices}, expected 1 with updates=, whose new "
            "values are compared as each rank returns them for all its rows."
        )
    runs = _runs(function, args, kwargs, options)
    parts, again = runs.apart(batch, options.num_slices), runs.apart(batch, options.num_slices)
    is_random = not all(are_same(one.value, other.value) for one, other in zip(parts, again))
    result, problem = _called(function, args, kwargs, options)
    oracle, expected, assigned, notes = "plain", MISSING, dict[int, Any](), []
    try:
        expected, got = call_plain(function, args, kwargs, batch)
        notes.append(got)
    except NotComparable as why:
        oracle = "serial"
        notes.append(f"Not compared with the plain function: {why}.")
        expected, _, assigned = _runs(function, args, kwargs, options).alone(batch)
    except Failed as error:
        notes.append(str(error))
    if is_random:
        notes.insert(0, "It draws random numbers, or changes what it captured: each run returns something else.")
    if problem is not None:
        notes.append(f"The call raised {text_of(problem)}")
    rows = [part.num_rows for part in parts]
    compared = list(outputs_of(callee.outputs, [expected, result, *(part.value for part in parts)]))
    judged = [_judged(path, op, *values, rows=rows, tolerance=tolerance) for path, op, values in compared]
    ops = {variable._referent.number: op for variable, op in function._options.variables}
    for variable in sorted(runs.variables, key=lambda each: each.number):
        own = [part.assigned.get(variable.number, MISSING) for part in parts]
        wanted = assigned.get(variable.number, MISSING)
        if any(each is not MISSING for each in [*own, wanted]):
            op = "gather" if variable.is_sharded else ops.get(variable.number)
            judged.append(_judged_variable(variable, op, own, wanted, rows, tolerance))
    reason = "random" if is_random else "per rank" if callee.per_rank else "different"
    judged = [each if each.verdict != "different" else replace(each, verdict=reason) for each in judged]
    return Report(callee.name, oracle, tuple(judged), tuple(filter(None, notes)))


# -- the calls --------------------------------------------------------------------------------------------------------


def _copied(function: Any) -> PlainCopy:
    callee = function._callee
    try:
        return copied(callee.fn)
    except Exception as error:
        raise_if_of_handler(error)
        raise SerializationError(
            f"cannot verify {callee.name!r}: it cannot be copied ({text_of(error)}), expected objects "
            "that can be pickled. Compare a call with f.serial(...) yourself."
        ) from error


def _runs(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Runs:
    """Return runs that begin with the state of the program, whatever others have made of theirs."""
    return Runs(function, _copied(function), args, kwargs, options.timeout, function._options.residents)


def _called(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
) -> tuple[Any, Exception | None]:
    """Return what the call itself returns, and why its outputs cannot be combined."""
    callee, own, made = function._callee, function._options, _copied(function)
    quiet = Quiet(made.fn, own.residents, [variable for variable, _ in own.variables])
    called = function._alike(quiet, outputs=callee.outputs, updates=own.residents, **own.of_calls)
    try:
        return made.with_own_classes(called(*args, **options.of_user, **kwargs)), None
    except (TypeError, ValueError) as error:  # the outputs cannot be combined
        if ScatteredArguments(callee, args, kwargs).select(options.batch) is None:
            raise  # there are no rows to divide
        return MISSING, error
    finally:
        leave_out(called)


# -- the comparison ---------------------------------------------------------------------------------------------------


def _judged(
    path: str, op: Any, expected: Any, value: Any, *parts: Any, rows: Sequence[int], tolerance: Tolerance
) -> VerifiedOutput:
    """Compare an output, given as the oracle's value, that of the call, and those of the ranks."""
    if op is None:
        return VerifiedOutput(path, op, "one per rank")
    wanted = expected
    if isinstance(op, Op) and expected is not MISSING:  # it may change even the value for all rows, perhaps in place
        wanted = combine(op, [copy.deepcopy(expected)], [sum(rows)])
    if isinstance(expected, float) and are_single([expected, *parts]):
        tolerance = replace(tolerance, least=100 * SINGLE)
    distance = difference(value, wanted)
    if is_same(value, wanted, tolerance):
        return VerifiedOutput(path, op, "equal", distance)
    fitting = fitting_ops(parts, rows, expected, tolerance)
    # Where the distance is 0, what differs is no number.
    return VerifiedOutput(
        path, op, "different", distance or float("nan"), tuple(each for each in fitting if each != op)
    )


def _judged_variable(
    variable: Any, op: str | None, own: Any, wanted: Any, rows: Sequence[int], tolerance: Tolerance
) -> VerifiedOutput:
    """Compare what two calls assigned to a variable: the ranks' values combined, or without an op each of them."""
    if op is None:
        wanted = [wanted] * len(own)
    elif all(each is not MISSING for each in own):
        own = [combine(OPS[op], values, rows) for values in zip(*own)]
    is_equal, kind = is_same(own, wanted, tolerance), "shard" if variable.is_sharded else "replica"
    verdict = "equal" if is_equal else "different"
    return VerifiedOutput(f"variable {variable.name!r}", kind, verdict, difference(own, wanted))
