"""``Function.verify``: one call in parallel and serially, on trial, and the plain function in the program.

This file compares them and reports on each output. ``synk._api.plain`` calls the plain function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from synk._api.plain import PlainCall, PlainOutputs
from synk._master.calls.call import CallOptions
from synk._master.calls.trials import Tried
from synk._pure.comparison import MISSING, Tolerance, difference, fitting_ops, is_same, shape_of
from synk._pure.ops import Op
from synk._pure.output_ops import each_op, match_ops
from synk._pure.partials import concatenate
from synk._pure.show import Text
from synk._pure.trees import paths
from synk._wire.control import Traits

if TYPE_CHECKING:
    from synk._master.state.variable import Variable


Try = Callable[[CallOptions], Tried]


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
        reason, the verdict is the reason: ``"random"``, ``"communicates"``, or ``"per rank"`` (built with
        ``per_rank=True``).
    difference : float
        The largest absolute difference between the value and the serial value, or between the serial value and the
        plain one; of those that count as different, if there are any. Infinite where one of two numbers is NaN; NaN if
        there is no difference to compute (other shapes, text, objects).
    matching : tuple of str
        The ops that give the serial value, if the chosen op does not.
    plain_verdict : str
        ``"equal"`` or ``"different"``: whether the serial value equals that of the plain function, called in the
        program. Empty if these were not compared.
    shapes : dict of str to tuple of int
        If they differ, the shapes of the value (``"parallel"``), the serial value and the plain one. Else empty.
    """

    name: str
    op: Any
    verdict: str
    difference: float = float("nan")
    matching: tuple[str, ...] = ()
    plain_verdict: str = ""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Report:
    """The result of :meth:`synk.Function.verify`.

    True if every output that can be compared equals the serial output, the serial output equals that of the plain
    function wherever it was compared, and no captured object of the workers is out of date.

    Attributes
    ----------
    function : str
        The name of the function.
    outputs : tuple of VerifiedOutput
    notes : tuple of str
        Sentences about other observations.
    stale : tuple of str
        The notes about captured objects that are out of date on the workers.
    """

    function: str
    outputs: tuple[VerifiedOutput, ...]
    notes: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.stale and all(
            output.verdict in ("equal", "one per rank") and output.plain_verdict != "different"
            for output in self.outputs
        )

    def _repr_html_(self) -> str:
        return Text(self)._repr_html_()

    def __repr__(self) -> str:
        rows = [("output", "op", "equals serial", "equals plain", "largest difference", "would match")]
        words = {"equal": "yes", "different": "NO"}
        for output in self.outputs:
            serial, plain = (words.get(verdict, verdict) for verdict in (output.verdict, output.plain_verdict))
            op = getattr(output.op, "__name__", None) or str(output.op)
            difference = "" if np.isnan(output.difference) else f"{output.difference:.1e}"
            difference = ", ".join(f"{which} {shape}" for which, shape in output.shapes.items()) or difference
            rows.append((output.name or "result", op, serial, plain, difference, ", ".join(output.matching)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        has_plain = any(output.plain_verdict for output in self.outputs)
        others = "the plain function and its serial call" if has_plain else "its serial call"
        return "\n".join([f"{self.function!r} against {others}:", *lines, *self.notes])


def verify(
    run: Try,
    options: CallOptions,
    tolerance: Tolerance,
    plain: PlainCall,
    *,
    stale: Sequence[str],
    known: Traits,
    without_draws: Try | None,
) -> Report:
    """Run a call on trial, in parallel and serially, and the plain function in the program, and compare them.

    Parameters
    ----------
    run : callable
        Runs the call with other options.
    options : CallOptions
        The options of the parallel call.
    plain : PlainCall
        The same call of the plain function, and the function itself.
    stale : sequence of str
        A sentence for each captured object that is out of date on the workers.
    known : Traits
        The function's traits that mean the same in parallel and serially.
    without_draws : callable or None
        Runs the call of another function, in place of one that draws random numbers.
    """
    name, outputs, is_per_rank = plain.callee.name, plain.callee.outputs, plain.callee.per_rank
    serial_options = replace(options, num_slices=1, is_serial=True, is_apart=True)
    serial, started = run(serial_options), time.monotonic()
    again = run(serial_options)
    switched = ""
    if without_draws is not None and (serial.traits & Traits.DRAWS or _are_different(serial, again)):
        switched = "Compared with all modules but batch norms in eval(): it draws random numbers (as dropout does)."
        run = without_draws
        serial, again = run(serial_options), run(serial_options)
    serial_s = time.monotonic() - started
    apart = run(replace(options, num_slices=1, is_apart=True))  # an exception of the function itself is raised here
    problem: Exception | None = None
    whole: Tried | None = None
    try:
        combined: Tried | None = run(options)
        if any(isinstance(op, Op) for op in each_op(outputs)):  # such an op may change even the value for all rows
            whole = run(replace(serial_options, is_apart=False))
    except (TypeError, ValueError) as error:  # its outputs cannot be combined
        combined, problem = None, error
    expected = [parts[0] for parts in serial.leaves]
    is_random = _are_different(serial, again)
    traits = (serial.traits | apart.traits | (combined.traits if combined is not None else Traits(0))) & ~known
    reason = _reason(is_random, traits, is_per_rank)
    ops = match_ops(outputs, serial.skeleton, len(expected), repr(name))
    called = _call_plain(plain, serial.skeleton, ops, reason, serial_s)
    plain_values = called.leaves if called.leaves is not None else [MISSING] * len(expected)
    results = []
    parts_at = dict(zip(paths(apart.skeleton), apart.leaves))
    values_at = dict(zip(paths(combined.skeleton), combined.leaves)) if combined is not None else {}
    results_at = dict(zip(paths(whole.skeleton), whole.leaves)) if whole is not None else {}
    for path, op, serial_value, plain_value in zip(paths(serial.skeleton), ops, expected, plain_values):
        parts = [parts_at[path][rank] for rank in apart.ranks] if path in parts_at else []
        value = values_at.get(path, MISSING)
        output = _compare(path, op, value, results_at.get(path, serial_value), tolerance, reason)
        if output.verdict not in ("equal", "one per rank"):
            fitting = fitting_ops(parts, apart.rows, serial_value, tolerance)
            output = replace(output, matching=tuple(word for word in fitting if word != op))
        results.append(_beside_plain(output, serial_value, plain_value, tolerance) if called.is_run else output)
    if combined is not None:
        results += _compare_variables(combined.assigned, serial.assigned, tolerance, reason)
    notes = [*_notes(is_random, traits, is_per_rank), switched, called.note, *stale, *plain.callee.uncompared()]
    if problem is not None:
        notes.append(f"The call raised {type(problem).__name__}: {problem}")
    return Report(name, tuple(results), tuple(filter(None, notes)), tuple(stale))


def _are_different(serial: Tried, again: Tried) -> bool:
    exactly = Tolerance(0, 0)
    return not all(is_same(parts[0], other[0], exactly) for parts, other in zip(serial.leaves, again.leaves))


def _reason(is_random: bool, traits: Traits, is_per_rank: bool) -> str:
    """Return the reason why values may rightly differ from the serial ones; "different" if there is none."""
    if is_random or traits & Traits.DRAWS:
        return "random"
    if traits & Traits.COMMUNICATES:
        return "communicates"
    return "per rank" if is_per_rank else "different"


_NOT_JUDGED = {
    "random": "it draws random numbers",
    "communicates": "it uses synk.comm, which has no meaning outside of a worker",
    "per rank": "its result depends on the number of workers",
}


def _call_plain(plain: PlainCall, skeleton: Any, ops: Sequence[Any], reason: str, serial_s: float) -> PlainOutputs:
    """Call the plain function, if its outputs mean the same as the serial ones."""
    why_not = plain.why_not() or _NOT_JUDGED.get(reason, "")
    if why_not:
        return PlainOutputs.not_run(why_not)
    if all(op is None for op in ops):
        return PlainOutputs(False, None, "")  # there is nothing to compare
    return plain.run(skeleton, serial_s)


def _notes(is_random: bool, traits: Traits, is_per_rank: bool) -> list[str]:
    notes = []
    if is_random or traits & Traits.DRAWS:
        notes.append("It draws random numbers: other ones on each rank, and at each call.")
    if traits & Traits.CHANGES:
        notes.append("It changes objects that it captured: their state is each rank's own.")
    if traits & Traits.COMMUNICATES:
        notes.append("It uses synk.comm, which means something else in a serial call.")
    if is_per_rank:
        notes.append("It is built with per_rank=True: its result depends on the number of workers.")
    return notes


def _compare(path: str, op: Any, value: Any, serial: Any, tolerance: Tolerance, reason: str) -> VerifiedOutput:
    if op is None:
        return VerifiedOutput(path, op, "one per rank")
    is_equal = is_same(value, serial, tolerance)
    largest, shapes = _largest([(is_equal, difference(value, serial))]), _shapes(parallel=value, serial=serial)
    return VerifiedOutput(path, op, "equal" if is_equal else reason, largest, shapes=shapes)


def _shapes(**values: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of those values that have one, if they differ."""
    shapes = {which: shape for which, value in values.items() if (shape := shape_of(value)) is not None}
    return shapes if len(set(shapes.values())) > 1 else {}


def _largest(compared: Sequence[tuple[bool, float]]) -> float:
    """Return the largest difference of the comparisons that are not equal, or of all if all are.

    Each is given by whether it is equal and by its difference. Where that is 0 and they are not equal, the difference
    is none of numbers: NaN.
    """
    differing = [distance or float("nan") for is_equal, distance in compared if not is_equal]
    return float(np.fmax.reduce(differing or [distance for _, distance in compared] or [float("nan")]))


def _beside_plain(output: VerifiedOutput, serial: Any, plain: Any, tolerance: Tolerance) -> VerifiedOutput:
    """Add whether the serial value of an output equals that of the plain function."""
    if output.op is None:
        return output
    verdict = "equal" if is_same(plain, serial, tolerance) else "different"
    largest = _largest(
        [(output.verdict == "equal", output.difference), (verdict == "equal", difference(plain, serial))]
    )
    shapes = {**output.shapes, **_shapes(serial=serial, plain=plain)}
    return replace(output, plain_verdict=verdict, difference=largest, shapes=shapes)


def _compare_variables(
    assigned: dict[Variable, list[list[np.ndarray]]],
    serial: dict[Variable, list[list[np.ndarray]]],
    tolerance: Tolerance,
    reason: str,
) -> list[VerifiedOutput]:
    """Compare the values that the two calls assigned: all shards together, or the replica of each rank."""
    results = []
    for variable, (expected,) in serial.items():
        values = assigned.get(variable, [])
        if variable.is_sharded:
            values = [[concatenate(shards) for shards in zip(*values)]]
        pairs = [(a, b) for leaves in values for a, b in zip(leaves, expected)]
        compared = [(is_same(a, b, tolerance), difference(a, b)) for a, b in pairs]
        is_equal = bool(values) and all(len(leaves) == len(expected) for leaves in values)
        is_equal = is_equal and all(each for each, _ in compared)
        shapes = next(filter(None, (_shapes(parallel=a, serial=b) for a, b in pairs)), {})
        kind, verdict = "shard" if variable.is_sharded else "replica", "equal" if is_equal else reason
        results.append(VerifiedOutput(f"variable {variable.name!r}", kind, verdict, _largest(compared), shapes=shapes))
    return results
