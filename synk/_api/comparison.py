"""Runs of a function that are compared, and the ops that make the values of parts the value of the whole.

The runs are ordinary calls of a function like any other, made of a copy in a wrapper (``synk._wire.apart``): its
outputs on all ranks, each apart, and on one worker alone. The check of the default op, that of training steps, and
``verify`` are made of them. The comparison itself is pure NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk._api.plain import PlainCopy
from synk._pure.dtypes import as_numbers, is_bfloat16
from synk._pure.ops import OPS, Op, is_int
from synk._pure.partials import Accumulator
from synk._pure.table_outputs import check_table, combined, compared
from synk._pure.tables import is_table
from synk._pure.tensors import array_of, is_plain, is_tensor
from synk._wire.apart import Apart, Part, Parts
from synk.errors import CollectiveMismatch

MISSING: Any = object()
"""Stands for an output that is missing or has no meaning. It equals nothing."""

SINGLE = 2.0**-23
"""The precision of float32."""


@dataclass(frozen=True)
class Tolerance:
    """How far a value may be from the serial one, as in ``numpy.allclose``; None allows only for rounding.

    By default ``rtol`` is the square root of the dtype's precision (1.5e-8 for float64), and ``atol`` is ``rtol`` times
    the largest serial value. So a sum of numbers that cancel out is judged by the size of the whole output.
    ``least`` is the least ``rtol`` by default.
    """

    rtol: float | None
    atol: float | None
    least: float = 0.0

    def allows(self, value: Any, serial: Any) -> bool:
        """Whether two arrays of numbers, or two numbers, are equal except for rounding."""
        eps = measured([value, serial])[1]
        if not eps and self.rtol is None and self.atol is None:
            return np.array_equal(value, serial)
        by_dtype = max(eps**0.5, self.least)
        rtol = by_dtype if self.rtol is None else self.rtol
        atol = eps + by_dtype * measured([serial])[0] if self.atol is None else self.atol
        value, serial = as_numbers(np.asarray(value)), as_numbers(np.asarray(serial))
        return bool(np.allclose(value, serial, rtol=rtol, atol=atol, equal_nan=True))


def measured(values: Iterable[Any]) -> tuple[float, float]:
    """Return the largest of the floats among some values, and the precision of the least precise; 0 without floats."""
    largest = eps = 0.0
    for value in map(as_array, values):
        array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic, float, complex)) else np.zeros(0, int)
        if array.dtype.kind in "fc" or is_bfloat16(array.dtype):
            eps = max(eps, 2.0**-7 if is_bfloat16(array.dtype) else float(np.finfo(array.dtype).eps))
            with np.errstate(all="ignore"):
                sizes = np.abs(as_numbers(array)).astype(np.float64)
            largest = max(largest, float(sizes[np.isfinite(sizes)].max(initial=0.0)))
    return largest, eps


def are_single(values: Sequence[Any]) -> bool:
    """Whether doubles were computed in single precision, as ``loss.item()`` is: it holds them exactly.

    Whole numbers do not count, which it always holds.
    """
    arrays = [np.asarray(value) for value in map(as_array, values) if isinstance(value, (float, np.ndarray))]
    if len(arrays) < len(values) or any(array.dtype.kind != "f" for array in arrays):
        return False
    with np.errstate(all="ignore"):
        is_exact = all(np.array_equal(array.astype(np.float32), array, equal_nan=True) for array in arrays)
        return is_exact and any(np.any(array % 1 != 0) for array in arrays)


def _is_number(value: Any) -> bool:
    array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic, int, float, complex)) else None
    return array is not None and (array.dtype.kind in "biufc" or is_bfloat16(array.dtype))


def as_array(value: Any) -> Any:
    """Return a tensor as an array that can be compared, and anything else as it is."""
    return array_of(value.detach().cpu()) if is_tensor(value) and is_plain(value) else value


def is_same(value: Any, serial: Any, tolerance: Tolerance) -> bool:
    """Whether two outputs are equal: numbers except for rounding, everything else by ``==``. NaN equals NaN."""
    if value is MISSING or serial is MISSING:
        return False
    value, serial = as_array(value), as_array(serial)
    if is_table(value) or is_table(serial):
        return compared(value, serial, lambda a, b: is_same(a, b, tolerance), difference)[0]
    if isinstance(value, dict) and type(value) is type(serial):
        return value.keys() == serial.keys() and all(is_same(value[key], serial[key], tolerance) for key in value)
    if isinstance(value, (list, tuple)) and type(value) is type(serial):
        return len(value) == len(serial) and all(map(lambda a, b: is_same(a, b, tolerance), value, serial))
    if _is_number(value) and _is_number(serial):
        return np.shape(value) == np.shape(serial) and tolerance.allows(value, serial)
    if value is serial:
        return True
    if isinstance(value, np.dtype) is not isinstance(serial, np.dtype):
        return False  # that of float64 equals None, and float
    try:
        if isinstance(value, (np.ndarray, np.generic)) or isinstance(serial, np.ndarray):
            one, other = np.asarray(value), np.asarray(serial)
            if one.dtype.names:
                names, is_like = one.dtype.names, one.dtype.names == other.dtype.names and one.shape == other.shape
                return is_like and all(is_same(one[name], other[name], tolerance) for name in names)
            return one.shape == other.shape and bool(np.all((one == other) | (one != one) & (other != other)))
        return bool(value == serial or (value != value and serial != serial))
    except Exception:  # the user's ``==`` may raise anything
        return False


def difference(value: Any, serial: Any) -> float:
    """Return the largest absolute difference of two outputs; NaN where there is none to measure.

    It is infinite where one of two numbers is NaN.
    """
    value, serial = as_array(value), as_array(serial)
    if is_table(value):
        return compared(value, serial, lambda a, b: True, difference)[1]
    if type(value) is list and type(serial) is list and len(value) == len(serial):
        return max(map(difference, value, serial), key=lambda found: -1 if found != found else found, default=0.0)
    if not (_is_number(value) and _is_number(serial)) or np.shape(value) != np.shape(serial):
        return float("nan")
    a, b = as_numbers(np.asarray(value)), as_numbers(np.asarray(serial))
    if np.any(np.isnan(a) != np.isnan(b)):
        return float("inf")
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        distance = np.abs(a.astype(wide) - b.astype(wide))
    return float(distance[~np.isnan(distance)].max(initial=0.0))


def combine(op: Op, parts: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return the values of all ranks combined by ``op``, or ``MISSING``, which equals nothing, if it cannot."""
    if not op.is_of_arrays:
        return op.finish(op.combine(list(parts), list(rows)))
    try:
        if any(map(is_table, parts)):
            for part in parts:
                check_table(op, part, "")
            return op.finish(combined(op, parts, rows, "", ranks=range(len(parts))))
        whole = Accumulator(op, "")
        for part, count in zip(parts, rows):
            value = part if is_int(part) or (op.concatenates and type(part) is list) else np.asarray(as_array(part))
            op.check(getattr(value, "dtype", np.dtype(np.int64)), "")
            whole.add(value, count)
        value = whole.result()
    except (TypeError, ValueError, OverflowError, CollectiveMismatch):
        return MISSING
    return op.finish(value)


def fitting_ops(parts: Sequence[Any], rows: Sequence[int], whole: Any, tolerance: Tolerance) -> tuple[str, ...]:
    """Return the ops that combine the values of parts, with their numbers of rows, to the value of the whole.

    Examples
    --------
    >>> fitting_ops([3.0, 12.0], [2, 3], 15.0, Tolerance(None, None))
    ('sum',)
    """
    return tuple(word for word, op in OPS.items() if parts and is_same(combine(op, parts, rows), whole, tolerance))


_EXACTLY = Tolerance(0, 0)


class Runs:
    """The runs of a copy of a function on some rows of a call, each an ordinary call.

    Parameters
    ----------
    function : Function
        Whose options the copy has.
    copy : PlainCopy
    args, kwargs
        Of the call.
    timeout : float or None
        The time limit of each run.
    residents : sequence of Resident
        What the copy changes. It is put back after each run.

    Attributes
    ----------
    seconds : float
        How long the function took in a run, on the rank that took longest.
    """

    def __init__(
        self,
        function: Any,
        copy: PlainCopy,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout: float | None,
        residents: Sequence[Any] = (),
    ) -> None:
        self.num_ranks, self.seconds = function._bound_session().world_size, 0.0
        self._copy, self._call, self._timeout = copy, (args, kwargs), timeout
        updates = [variable for variable, _ in function._options.variables]
        # One function for all runs: a generator that it captured goes on drawing on its rank.
        self._apart = function._alike(Apart(copy.fn, residents, updates), outputs=Parts(), updates=residents)

    @property
    def variables(self) -> set[Any]:
        """The shared variables that the function refers to; known after a run."""
        return set(self._apart._callee.variables)

    def apart(self, batch: Any, num_slices: int = 1) -> list[Part]:
        """Return what the ranks return, each for its rows of those that ``batch`` says."""
        return self._run(self._apart, batch, num_slices=num_slices)

    def alone(self, batch: Any) -> Part:
        """Return what one worker returns for all these rows."""
        return self._run(self._apart.serial, batch)[0]

    def _run(self, call: Any, batch: Any, **how: Any) -> list[Part]:
        (args, kwargs), record = self._call, self._apart._callee.record
        try:
            parts: list[Part] = call(*args, batch=batch, timeout=self._timeout, **how, **kwargs)
        finally:
            leave_out(self._apart)
        self.seconds = record.function_ns * 1e-9 / max(record.num_calls, 1)
        return [part._replace(value=self._copy.with_own_classes(part.value)) for part in parts]


def leave_out(function: Any) -> None:
    """Take a function of synk's own out of the profile."""
    function._bound_session().profile.leave_out(function._callee.record)


def outputs_of(ops: Any, values: Sequence[Any], path: str = "") -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield for each output its path, its op, and what it is in each of some results; ``MISSING`` stays so.

    What is nested in the same way everywhere is taken apart, but not under op None. A list whose length depends on the
    rows, or whose op concatenates, is one output. So is what is nested in another way somewhere, or than its ops.
    """
    keys = _keys_of(ops, [value for value in values if value is not MISSING])
    if keys is not None:
        for key in keys:
            own = [value if value is MISSING else value[key] for value in values]
            yield from outputs_of(ops[key] if _is_nest(ops) else ops, own, f"{path}[{key!r}]")
    elif ops is None or any(value is not None for value in values):
        yield path, ops, list(values)


def _keys_of(ops: Any, values: Sequence[Any]) -> list[Any] | None:
    """Return the keys or positions under which all these values have outputs; None if they are one output."""
    first, op = values[0] if values else None, OPS.get(ops) if isinstance(ops, str) else ops
    is_rows = type(first) is list and getattr(op, "concatenates", False)
    if ops is None or is_rows or not isinstance(first, (dict, tuple, list)):
        return None
    nests = [*values, ops] if _is_nest(ops) else values
    if isinstance(first, dict):
        return list(first) if all(isinstance(each, dict) and each.keys() == first.keys() for each in nests) else None
    is_alike = all(isinstance(each, (tuple, list)) and len(each) == len(first) for each in nests)
    return list(range(len(first))) if is_alike else None


def _is_nest(ops: Any) -> bool:
    return isinstance(ops, (dict, tuple, list))


def are_same(one: Any, other: Any) -> bool:
    return is_same(one, other, _EXACTLY)
