"""Runs of a function that are compared: its outputs on all ranks, each apart, and on one worker alone.

They are ordinary calls of a function like any other, made of a wrapper; see ``synk._wire.apart``. The check of the
default op, that of training steps, and ``verify`` are made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from synk._pure.comparison import Tolerance, is_same
from synk._pure.tensors import array_of, is_plain, is_tensor
from synk._wire.apart import Apart, Part, Parts
from synk.errors import CallTimeout, WorkerDied

LIMIT_S = 10.0
"""The time limit of each run."""

_EXACTLY = Tolerance(0, 0)


class Unknown(Exception):
    """Raised if a run says nothing about the op: it raised something, or would cost too much."""


class Few(NamedTuple):
    """A call with a few of its rows, and a copy of its function.

    Attributes
    ----------
    total, num_rows : int
        How many rows the call has, and how many of them are taken.
    fn, args, kwargs
        Share no memory with the program.
    batch : ndarray of int, or None
        Where the rows lie in the arguments; None if these hold no others.
    scale : float
        The largest number among the arguments.
    eps : float
        The precision of the least precise float among them.
    """

    total: int
    num_rows: int
    fn: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    batch: Any
    scale: float
    eps: float

    def described(self) -> str:
        return f"{self.num_rows} rows" if self.num_rows == self.total else f"{self.num_rows} of the {self.total} rows"


class Runs:
    """The runs of a copy of a function, each an ordinary call.

    Parameters
    ----------
    function : Function
    few : Few
        The copy, and its arguments.
    limit_s : float or None
        The time limit of each run.
    changes : sequence of Resident
        What the copy changes. It is put back after each run.

    Attributes
    ----------
    seconds : float
        How long the function took in a run, on the rank that took longest.
    """

    def __init__(self, function: Any, few: Few, limit_s: float | None = LIMIT_S, changes: Sequence[Any] = ()) -> None:
        self._function, self._few, self._timeout, self._changes = function, few, limit_s, changes
        # One function for all runs: a generator that it captured goes on drawing on its rank.
        self._copy = self._built()
        self.seconds = 0.0

    def apart(self, order: np.ndarray | None = None) -> list[Part]:
        """Return what the ranks return, each for its rows."""
        return self._run(self._copy, order)

    def in_parts(self, order: np.ndarray | None = None) -> list[Part]:
        """Return the same; of a single rank, what it returns for two parts of the rows."""
        if self._function._bound_session().total_ranks > 1:
            return self.apart(order)
        count = self._few.num_rows
        order, middle = np.arange(count) if order is None else order, (count + 1) // 2
        return [part for rows in (order[:middle], order[middle:]) for part in self.alone(rows)]

    def alone(self, order: np.ndarray | None = None) -> list[Part]:
        """Return what one worker returns for all rows."""
        return self._run(self._copy, order, True)

    def are_repeatable(self, whole: Part) -> bool:
        """Whether a run with other random numbers returns the same, and all ranks do so for the same rows."""
        (again,) = self.alone()
        if not are_same(again.value, whole.value):
            return False
        if self._few.batch is not None or not (names := self._function._callee.signature.names):
            return True
        try:
            first, *others = self._run(self._built(bcast_inputs=names, per_rank=True))
        except Unknown:
            return True
        return all(are_same(part.value, first.value) for part in others)

    def backwards(self) -> tuple[Part, list[Part]] | None:
        """Return the same with the rows in the opposite order, or None if it raises."""
        order = np.arange(self._few.num_rows)[::-1]
        try:
            (whole,) = self.alone(order)
            return whole, self.in_parts(order)
        except Unknown:
            return None

    def _built(self, **options: Any) -> Any:
        fn = Apart(self._few.fn, self._changes)
        return self._function._alike(fn, outputs=Parts(), updates=self._changes, **options)

    def _run(self, function: Any, order: Any = None, is_alone: bool = False) -> list[Part]:
        few = self._few
        batch = few.batch if order is None else order if few.batch is None else few.batch[order]
        call = function.serial if is_alone else function
        try:
            parts: list[Part] = call(*few.args, batch=batch, timeout=self._timeout, **few.kwargs)
        except (CallTimeout, WorkerDied):
            raise
        except Exception as error:
            raise Unknown from error
        record = function._callee.record
        self.seconds = record.function_ns * 1e-9 / max(record.num_calls, 1)
        return parts


def outputs_of(whole: Any, parts: Sequence[Any], path: str = "") -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield for each output its path, its value for all rows, and those for the parts.

    What is nested in the same way everywhere is taken apart. A list whose length depends on the rows is one output.
    """
    if isinstance(whole, dict) and all(isinstance(part, dict) and part.keys() == whole.keys() for part in parts):
        for key in whole:
            yield from outputs_of(whole[key], [part[key] for part in parts], f"{path}[{key!r}]")
    elif isinstance(whole, (tuple, list)) and all(
        isinstance(part, (tuple, list)) and len(part) == len(whole) for part in parts
    ):
        for position in range(len(whole)):
            yield from outputs_of(whole[position], [part[position] for part in parts], f"{path}[{position}]")
    elif whole is not None or any(part is not None for part in parts):
        yield path, comparable(whole), [comparable(part) for part in parts]


def comparable(leaf: Any) -> Any:
    """Return an output, with a tensor as an array that can be compared."""
    return array_of(leaf.detach().cpu()) if is_tensor(leaf) and is_plain(leaf) else leaf


def are_same(one: Any, other: Any) -> bool:
    pairs = list(outputs_of(one, [other]))
    return all(is_same(a, b, _EXACTLY) for _, a, (b,) in pairs)
