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
from synk._pure.tensors import array_of, is_plain, is_tensor
from synk._wire.apart import Apart, Part, Parts
from synk.errors import CallTimeout, WorkerDied

LIMIT_S = 10.0
"""The time limit of a run that the user has not asked for."""

_EXACTLY = Tolerance(0, 0)


class Unknown(Exception):
    """Raised if a run says nothing about the op: it raised something, or would cost too much."""


class Runs:
    """The runs of a copy of a function on some rows of a call, each an ordinary call.

    Parameters
    ----------
    function : Function
        Whose options the copy has.
    copy : PlainCopy
    args, kwargs
        Of the call.
    batch
        The rows.
    limit_s : float or None
        The time limit of each run.
    changes : sequence of Resident
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
        batch: Any,
        limit_s: float | None,
        changes: Sequence[Any] = (),
    ) -> None:
        self.num_ranks = function._bound_session().total_ranks
        self._copy, self._args, self._kwargs = copy, args, kwargs
        self._batch, self._timeout = batch, limit_s
        # One function for all runs: a generator that it captured goes on drawing on its rank.
        self._apart = function._alike(Apart(copy.fn, changes), outputs=Parts(), updates=changes)
        self.seconds = 0.0

    def apart(self, batch: Any = None) -> list[Part]:
        """Return what the ranks return, each for its rows; ``batch`` may say which."""
        return self._run(self._apart, batch)

    def alone(self, batch: Any = None) -> Part:
        """Return what one worker returns for all rows."""
        (part,) = self._run(self._apart.serial, batch)
        return part

    def _run(self, call: Any, batch: Any) -> list[Part]:
        batch = self._batch if batch is None else batch
        try:
            parts: list[Part] = call(*self._args, batch=batch, timeout=self._timeout, **self._kwargs)
        except (CallTimeout, WorkerDied):
            raise
        except Exception as error:
            raise Unknown from error
        finally:
            record = leave_out(self._apart)
        self.seconds = record.function_ns * 1e-9 / max(record.num_calls, 1)
        return [part._replace(value=self._copy.with_own_classes(part.value)) for part in parts]


def leave_out(function: Any) -> Any:
    """Take a function of synk's own out of the profile, and return its record."""
    record = function._callee.record
    function._bound_session().profile.leave_out(record)
    return record


def outputs_of(ops: Any, values: Sequence[Any], path: str = "") -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield for each output its path, its op, and what it is in each of some results; ``MISSING`` stays so.

    What is nested in the same way everywhere is taken apart, but not under op None. A list whose length depends on the
    rows, or whose op concatenates, is one output.
    """
    is_op = not isinstance(ops, (dict, tuple, list))
    given = [value for value in values if value is not MISSING]
    first: Any = given[0] if given and ops is not None else None
    keys: Any = None
    if isinstance(first, dict):
        keys = first.keys() if all(isinstance(each, dict) and each.keys() == first.keys() for each in given) else None
    elif isinstance(first, (tuple, list)) and not (type(first) is list and is_op and _concatenates(ops)):
        is_alike = all(isinstance(each, (tuple, list)) and len(each) == len(first) for each in given)
        keys = range(len(first)) if is_alike else None
    if keys is not None:
        for key in keys:
            own = [value if value is MISSING else value[key] for value in values]
            yield from outputs_of(ops if is_op else ops[key], own, f"{path}[{key!r}]")
    elif ops is None or any(value is not None for value in given):
        yield path, ops if is_op else None, [comparable(value) for value in values]


def _concatenates(op: Any) -> bool:
    return bool(getattr(OPS[op] if isinstance(op, str) else op, "concatenates", False))


def comparable(leaf: Any) -> Any:
    """Return an output, with a tensor as an array that can be compared."""
    return array_of(leaf.detach().cpu()) if is_tensor(leaf) and is_plain(leaf) else leaf


def are_same(one: Any, other: Any) -> bool:
    return all(is_same(a, b, _EXACTLY) for _, _, (a, b) in outputs_of("first", [one, other]))
