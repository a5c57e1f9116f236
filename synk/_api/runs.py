"""Runs of a function that are compared: its outputs on all ranks, each apart, and on one worker alone.

They are ordinary calls of a function like any other, made of a copy in a wrapper; see ``synk._wire.apart``. The check
of the default op, that of training steps, and ``verify`` are made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from synk._api.plain_copy import PlainCopy
from synk._pure.comparison import MISSING, Tolerance, is_same
from synk._pure.ops import OPS
from synk._wire.apart import Apart, Part, Parts

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
