"""``Function.verify``: a call, compared with the plain function in the program or, if that cannot be, with ``serial``.

This file makes the calls, of copies of the function, compares them, and reports on each output. ``synk._api.plain``
calls the plain function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from synk._api.plain import Failed, ScatteredArguments, call_plain, why_not
from synk._api.plain_copy import NotComparable, PlainCopy, copied
from synk._api.runs import Runs, Unknown, are_same, leave_out, outputs_of
from synk._master.calls.call import CallOptions
from synk._pure.comparison import MISSING, Tolerance, combine, difference, fitting_ops, is_same, shape_of
from synk._pure.ops import Op
from synk._pure.output_ops import ops_of
from synk._pure.partials import concatenate
from synk._pure.show import Text
from synk._wire.apart import Part, Quiet
from synk.errors import SerializationError

_ORACLES = {"plain": "the plain function", "serial": "its serial call"}


@dataclass(frozen=True)
class VerifiedOutput:
    """The verdict on one output, or on one shared variable that the function assigned.

    Attributes
    ----------
    name : str
        The path in the result, for instance ``"[0]['loss']"``; empty if the function returns one value.
    op : op, or None
        The op in ``outputs``; for a variable ``"shard"`` or ``"replica"``.
    verdict : str
        ``"equal"`` or ``"different"``. ``"one per rank"`` (op None) is not compared. If values differ for a legitimate
        reason, the verdict is the reason: ``"random"``, or ``"per rank"`` (built with ``per_rank=True``).
    difference : float
        The largest absolute difference. Infinite where one of two numbers is NaN; NaN if there is no difference to
        compute (other shapes, text, objects).
    matching : tuple of str
        The ops that give the expected value, if the chosen op does not.
    shapes : dict of str to tuple of int
        If they differ, the shapes of the value (``"parallel"``) and the expected one (``"plain"`` or ``"serial"``).
    """

    name: str
    op: Any
    verdict: str
    difference: float = float("nan")
    matching: tuple[str, ...] = ()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


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

    def _repr_html_(self) -> str:
        return Text(self)._repr_html_()

    def __repr__(self) -> str:
        rows = [("output", "op", "equal", "largest difference", "would match")]
        words = {"equal": "yes", "different": "NO"}
        for output in self.outputs:
            op = getattr(output.op, "__name__", None) or str(output.op)
            distance = "" if np.isnan(output.difference) else f"{output.difference:.1e}"
            distance = ", ".join(f"{which} {shape}" for which, shape in output.shapes.items()) or distance
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
    compared, quiet = function._compared(), function._without_draws()
    parts, again, seconds = _apart(compared, args, kwargs, options)
    if (is_random := not _are_same(parts, again)) and quiet is not None:
        compared = quiet
        parts, again, seconds = _apart(compared, args, kwargs, options)
        is_random = not _are_same(parts, again)
    # A call that assigns variables or changes resident objects is not made: what its ranks return is combined here.
    is_combined = any(part.assigned for part in parts) or bool(callee.options["updates"] or callee.changes)
    result, problem = (MISSING, None) if is_combined else _called(compared, args, kwargs, options)
    oracle, left_out, got, assigned = "plain", why_not(callee, seconds * len(parts)), "", {}
    try:
        if left_out:
            raise NotComparable(left_out)
        expected, got = call_plain(callee, args, kwargs, batch)
    except NotComparable as why:
        oracle, left_out = "serial", f"Not compared with the plain function: {why}."
        serial = _of(_runs(compared, args, kwargs, options).alone)
        expected, assigned = serial.value, serial.assigned
    except Failed as error:
        expected, got = MISSING, str(error)
    judge = _Judge(oracle, "random" if is_random else "per rank" if callee.per_rank else "different", tolerance)
    values = list(outputs_of(_ops_of(function), [expected, result, *(part.value for part in parts)]))
    rows = [part.num_rows for part in parts]
    outputs = [judge.output(*each, rows, is_combined) for each in values]
    outputs += judge.variables(callee, parts, assigned)
    is_nested = any(op is not None and isinstance(each, (dict, tuple)) for _, op, own in values for each in own)
    notes = [
        "It draws random numbers, or changes what it captured: each run returns something else." * is_random,
        "It is built with per_rank=True: its result depends on the number of workers." * callee.per_rank,
        "Compared with all modules but batch norms in eval(): it draws random numbers (as dropout does)."
        * (compared is quiet),
        left_out,
        got,
        f"Outputs are nested in another way than those of {_ORACLES[oracle]}, or on another rank." * is_nested,
        "" if problem is None else f"The call raised {type(problem).__name__}: {problem}",
    ]
    return Report(callee.name, oracle, tuple(outputs), tuple(filter(None, notes)))


def _ops_of(function: Any) -> Any:
    """Return the ops of what the function returns, new values of variables included."""
    outputs, updates = function._callee.outputs, function._options.variables
    ops = ["gather" if variable.is_sharded else op for variable, op in updates]
    return (outputs, ops[0] if len(ops) == 1 else ops) if ops else outputs


# -- the calls --------------------------------------------------------------------------------------------------------


def _copied(function: Any) -> PlainCopy:
    callee = function._callee
    try:
        return copied(callee.fn)
    except NotComparable:  # there is not enough memory
        return PlainCopy(callee.fn)
    except Exception as error:
        raise SerializationError(
            f"cannot verify {callee.name!r}: it cannot be copied ({type(error).__name__}: {error}), expected objects "
            "that can be pickled. Compare a call with f.serial(...) yourself."
        ) from error


def _runs(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Runs:
    """Return runs that begin with the state of the program, whatever others have made of theirs."""
    changes = function._callee.options["changes"]
    return Runs(function, _copied(function), args, kwargs, options.batch, options.timeout, changes)


def _of(run: Any) -> Any:
    """Return what a run returns, or raise what the function raises in it."""
    try:
        return run()
    except Unknown as error:
        cause = error.__cause__
    assert cause is not None
    raise cause


def _apart(function: Any, *call: Any) -> tuple[list[Part], list[Part], float]:
    """Return what the ranks return, and what they return the next time, with other random numbers; and how long it
    took.
    """
    runs = _runs(function, *call)
    return _of(runs.apart), _of(runs.apart), runs.seconds


def _are_same(parts: Sequence[Part], others: Sequence[Part]) -> bool:
    return all(are_same(one.value, other.value) for one, other in zip(parts, others))


def _called(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
) -> tuple[Any, Exception | None]:
    """Return what the call itself returns, and why its outputs cannot be combined."""
    callee, copy = function._callee, _copied(function)
    called = function._alike(Quiet(copy.fn), outputs=callee.outputs)
    how = {"batch": options.batch, "timeout": options.timeout, "num_slices": options.num_slices}
    try:
        return copy.with_own_classes(called(*args, **how, **kwargs)), None
    except (TypeError, ValueError) as error:  # the outputs cannot be combined
        if ScatteredArguments(callee, args, kwargs).select(options.batch) is None:
            raise  # there are no rows to divide
        return MISSING, error
    finally:
        leave_out(called)


# -- the comparison ---------------------------------------------------------------------------------------------------


class _Judge(NamedTuple):
    """Compares values of the call with those of the oracle.

    Attributes
    ----------
    oracle : str
        ``"plain"`` or ``"serial"``.
    reason : str
        The verdict where they differ.
    tolerance : Tolerance
    """

    oracle: str
    reason: str
    tolerance: Tolerance

    def output(self, path: str, op: Any, values: Sequence[Any], rows: Sequence[int], is_combined: bool) -> Any:
        """Compare an output, given as the oracle's value, that of the call, and those of the ranks.

        ``is_combined``: the call was not made, and the ranks' values are combined in its place.
        """
        expected, value, *own = values
        if op is None:
            return VerifiedOutput(path, op, "one per rank")
        if is_combined:
            value = combine(ops_of(op, ""), own, rows)
        # An op of the user's may change even the value for all rows.
        wanted = combine(op, [expected], [sum(rows)]) if isinstance(op, Op) and expected is not MISSING else expected
        output = self._judged(path, op, value, wanted)
        if output.verdict == "equal" or expected is MISSING:
            return output
        fitting = fitting_ops(own, rows, expected, self.tolerance)
        return replace(output, matching=tuple(word for word in fitting if word != op))

    def variables(
        self, callee: Any, parts: Sequence[Part], assigned: dict[int, list[np.ndarray]]
    ) -> Iterator[VerifiedOutput]:
        """Compare the values that two calls assigned: all shards together, or the replica of each rank."""
        variables = {variable.id: variable for variable in callee.variables}
        for number, expected in sorted(assigned.items()):
            variable, missing = variables[number], [MISSING] * len(expected)
            values: Any = [part.assigned.get(number, missing) for part in parts]
            if variable.is_sharded:
                has_all = all(number in part.assigned for part in parts)
                values = [[concatenate(shards) for shards in zip(*values)] if has_all else missing]
            kind = "shard" if variable.is_sharded else "replica"
            judged = [
                self._judged(f"variable {variable.name!r}", kind, value, wanted)
                for leaves in values
                for value, wanted in zip(leaves, expected)
            ]
            yield max(judged, key=lambda output: (output.verdict != "equal", np.nan_to_num(output.difference)))

    def _judged(self, name: str, op: Any, value: Any, expected: Any) -> VerifiedOutput:
        is_equal = expected is not MISSING and is_same(value, expected, self.tolerance)
        distance = difference(value, expected)
        shapes = {"parallel": shape_of(value), self.oracle: shape_of(expected)}
        told = {which: shape for which, shape in shapes.items() if shape is not None}
        return VerifiedOutput(
            name,
            op,
            "equal" if is_equal else self.reason,
            distance if is_equal else distance or float("nan"),  # where it is 0, what differs is no number
            shapes=told if len({*told.values()}) > 1 else {},
        )
