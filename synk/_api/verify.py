"""``Function.verify``: one call in parallel and serially, and the plain function in the program.

This file makes the calls, of a copy of the function, compares them, and reports on each output. ``synk._api.plain``
calls the plain function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from synk._api.plain import PlainCall, PlainOutputs, ScatteredArguments
from synk._api.plain_copy import NotComparable, PlainCopy, copied
from synk._api.runs import Few, Runs, Unknown, are_same, comparable
from synk._master.calls.call import CallOptions
from synk._pure.comparison import MISSING, Tolerance, combine, difference, fitting_ops, is_same, shape_of
from synk._pure.ops import OPS, Op
from synk._pure.output_ops import each_op, ops_of
from synk._pure.partials import concatenate
from synk._pure.show import Text
from synk._pure.trees import paths
from synk._wire.apart import Part, Quiet
from synk.errors import SerializationError


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

    True if every output that can be compared equals the serial output, and the serial output equals that of the plain
    function wherever it was compared.

    Attributes
    ----------
    function : str
        The name of the function.
    outputs : tuple of VerifiedOutput
    notes : tuple of str
        Sentences about other observations.
    """

    function: str
    outputs: tuple[VerifiedOutput, ...]
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return all(
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
    function: Any,
    options: CallOptions,
    tolerance: Tolerance,
    plain: PlainCall,
) -> Report:
    """Run a call in parallel and serially, and the plain function in the program, and compare them.

    Parameters
    ----------
    options : CallOptions
        The options of the parallel call.
    plain : PlainCall
        The same call of the plain function, and the function itself.

    Raises
    ------
    SerializationError
        If the function cannot be copied.
    """
    name, is_per_rank = plain.callee.name, plain.callee.per_rank
    calls, started = _Calls(function._compared(), plain, options), time.monotonic()
    serial, again = calls.serial()
    switched = ""
    if not are_same(serial.value, again.value) and (other := function._without_draws()) is not None:
        switched = "Compared with all modules but batch norms in eval(): it draws random numbers (as dropout does)."
        calls = _Calls(other, plain, options)
        serial, again = calls.serial()
    serial_s = time.monotonic() - started
    is_random = not are_same(serial.value, again.value)
    reason = "random" if is_random else "per rank" if is_per_rank else "different"
    parts, ops = calls.parts(), plain.callee.outputs
    results, problem = calls.results(parts)
    expected = opened(serial.value, ops)
    rows = [part.num_rows for part in parts]
    by_path = [opened(part.value, ops).by_path() for part in parts]
    outputs = []
    for path, op, value in zip(paths(expected.skeleton), expected.ops, expected.leaves):
        own = [each.get(path, MISSING) for each in by_path]
        result, oracle = results.at(path, own, rows, op), results.serial.get(path, value)
        output = _compare(path, op, result, oracle, tolerance, reason)
        if output.verdict not in ("equal", "one per rank"):
            fitting = () if any(each is MISSING for each in own) else fitting_ops(own, rows, value, tolerance)
            output = replace(output, matching=tuple(word for word in fitting if word != output.op))
        outputs.append(output)
    verdicts = {output.verdict for output in outputs} | ({"per rank"} if is_per_rank else set())
    called = _call_plain(plain, expected, verdicts, serial_s)
    if called.is_run:
        plain_values = called.leaves if called.leaves is not None else [MISSING] * len(outputs)
        outputs = [
            _beside_plain(output, value, plain_value, tolerance)
            for output, value, plain_value in zip(outputs, expected.leaves, plain_values)
        ]
    outputs += _compare_variables(function, parts, serial, tolerance, reason)
    notes = [
        "It draws random numbers, or changes what it captured: each run returns something else." * is_random,
        "It is built with per_rank=True: its result depends on the number of workers." * is_per_rank,
        switched,
        called.note,
        "" if problem is None else f"The call raised {type(problem).__name__}: {problem}",
    ]
    return Report(name, tuple(outputs), tuple(filter(None, notes)))


class _Calls:
    """The calls that are compared: ordinary ones, of copies of the function."""

    def __init__(self, function: Any, plain: PlainCall, options: CallOptions) -> None:
        self._function, self._callee, self._options = function, function._callee, options
        try:
            copy = copied(self._callee.fn, list(plain.args), plain.kwargs, for_workers=True)
        except NotComparable:  # there is not enough memory
            copy = PlainCopy(self._callee.fn, list(plain.args), plain.kwargs, [], [])
        except Exception as error:
            raise SerializationError(
                f"cannot verify {self._callee.name!r}: it cannot be copied with its arguments ({type(error).__name__}: "
                f"{error}), expected objects that can be pickled. Compare a call with f.serial(...) yourself."
            ) from error
        self._copy, self._few = copy, Few(0, 0, copy.fn, copy.args, copy.kwargs, options.batch, 0.0, 0.0)

    def serial(self) -> list[Part]:
        """Return what one worker does for all rows, and what it does the next time, with other random numbers."""
        runs = self._runs()
        return [self._own(part) for _ in range(2) for part in _raised(runs.alone)]

    def parts(self) -> list[Part]:
        """Return what each rank that has rows does. What the function raises is raised here."""
        return list(map(self._own, _raised(self._runs().apart)))

    def results(self, parts: Sequence[Part]) -> tuple[_Results, Exception | None]:
        """Return the outputs of the call itself, or why the ranks' outputs cannot be combined.

        A call that assigns variables or changes resident objects is not made: the outputs of the ranks are combined.
        """
        callee, found, copy = self._callee, _Results(), self._copy
        if any(part.assigned for part in parts) or callee.changes or callee.options["updates"]:
            return found, None
        function = self._function._alike(Quiet(copy.fn), outputs=callee.outputs)
        options = {"batch": self._options.batch, "timeout": self._options.timeout}
        try:
            result = function(*copy.args, num_slices=self._options.num_slices, **options, **copy.kwargs)
            found.combined = opened(copy.with_own_classes(result), callee.outputs).by_path()
            if any(isinstance(op, Op) for op in each_op(callee.outputs)):  # it may change even the value for all rows
                found.serial = opened(function.serial(*copy.args, **options, **copy.kwargs), callee.outputs).by_path()
        except (TypeError, ValueError) as error:  # the outputs cannot be combined
            if ScatteredArguments(callee, tuple(copy.args), copy.kwargs).select(self._options.batch) is None:
                raise  # there are no rows to divide
            found.combined = {}
            return found, error
        return found, None

    def _runs(self) -> Runs:
        """Return runs that begin with the state of the program, whatever others have made of theirs."""
        return Runs(self._function, self._few, self._options.timeout, self._callee.options["changes"])

    def _own(self, part: Part) -> Part:
        return part._replace(value=self._copy.with_own_classes(part.value))


def _raised(run: Callable[[], list[Part]]) -> list[Part]:
    try:
        return run()
    except Unknown as error:
        cause = error.__cause__
    assert cause is not None
    raise cause


class _Results:
    """The outputs of the call itself, by path, and of its serial call. ``combined`` is None if it was not made."""

    combined: dict[str, Any] | None = None

    def __init__(self) -> None:
        self.serial: dict[str, Any] = {}

    def at(self, path: str, parts: Sequence[Any], rows: Sequence[int], op: Any) -> Any:
        if self.combined is not None:
            return self.combined.get(path, MISSING)
        return MISSING if op is None or any(part is MISSING for part in parts) else combine(ops_of(op, ""), parts, rows)


class Opened(NamedTuple):
    """A result, taken apart: its nesting with the position of each leaf in its place, its leaves, and their ops."""

    skeleton: Any
    leaves: list[Any]
    ops: list[Any]

    def by_path(self) -> dict[str, Any]:
        return dict(zip(paths(self.skeleton), self.leaves))


def opened(value: Any, outputs: Any) -> Opened:
    """Take a result apart by its ops. Under op None it is one leaf, and so is a list under an op that concatenates."""
    leaves: list[Any] = []
    ops: list[Any] = []

    def walk(value: Any, outputs: Any) -> Any:
        is_op = not isinstance(outputs, (dict, tuple, list))
        if outputs is not None:
            if value is None:
                return None
            if isinstance(value, dict):
                return {key: walk(part, outputs if is_op else outputs.get(key)) for key, part in value.items()}
            if isinstance(value, (tuple, list)) and not (type(value) is list and is_op and _concatenates(outputs)):
                each = [outputs] * len(value) if is_op else [*outputs, *[None] * (len(value) - len(outputs))]
                return [walk(part, op) for part, op in zip(value, each)]
        leaves.append(comparable(value))
        ops.append(outputs if is_op else None)
        return len(leaves) - 1

    return Opened(walk(value, outputs), leaves, ops)


def _concatenates(op: Any) -> bool:
    return OPS[op].concatenates if isinstance(op, str) else isinstance(op, Op) and op.concatenates


_NOT_JUDGED = {"random": "it draws random numbers", "per rank": "its result depends on the number of workers"}


def _call_plain(plain: PlainCall, expected: Opened, verdicts: set[str], serial_s: float) -> PlainOutputs:
    """Call the plain function, if its outputs mean the same as the serial ones."""
    why_not = plain.why_not() or next((why for verdict, why in _NOT_JUDGED.items() if verdict in verdicts), "")
    if why_not:
        return PlainOutputs.not_run(why_not)
    if all(op is None for op in expected.ops):
        return PlainOutputs(False, None, "")  # there is nothing to compare
    return plain.run(expected.skeleton, serial_s)


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
    function: Any, parts: Sequence[Part], serial: Part, tolerance: Tolerance, reason: str
) -> list[VerifiedOutput]:
    """Compare the values that the two calls assigned: all shards together, or the replica of each rank."""
    variables = {variable.id: variable for variable in function._callee.variables}
    results = []
    for number, expected in sorted(serial.assigned.items()):
        variable, values = variables[number], [part.assigned.get(number, []) for part in parts]
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
