"""A training step in slices: a rank runs the body on parts of its rows, and each part gets the sums over all rows.

When ``backward()`` returns in the body, the gradients must be those of all rows, which nobody knows before the last
part has run. So the parts run in rounds. In a round each part runs until it needs a sum that is not known yet, and is
broken off there. Then the ranks add up the terms of all parts, weighted by rows. In the last round all sums are known,
and each part runs to its end, the optimizer's step included, so its outputs are those of a step in one piece. Each part
begins with the state before the step, and the state after the last part is the state after the step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from synk._wire.cell import cell
from synk._worker.comm.comm import comm


class Awaited(BaseException):
    """A part needs a sum that is not known until the other parts have reached the same point.

    It derives from ``BaseException``, so that a body that catches ``Exception`` does not swallow it.
    """


class Sums:
    """The sums over all rows that a step has asked for so far, in the order in which its body asks for them."""

    def __init__(self) -> None:
        self._known: list[torch.Tensor] = []
        self._own: torch.Tensor | None = None  # the terms of this rank's parts for the next sum, added up so far
        self._position = 0

    def begin_part(self) -> None:
        self._position = 0

    def of(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all parts of all ranks. ``own`` is the term of the part that is running.

        Raises
        ------
        Awaited
            If it is not known yet.
        """
        position, self._position = self._position, self._position + 1
        if position < len(self._known):
            return self._known[position]
        own = own.to(torch.float64)
        self._own = own if self._own is None else self._own.add_(own)
        raise Awaited

    def mean(self, own: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over all parts, weighted by their rows."""
        return self.of(own.to(torch.float64) * (comm.rows / comm.total_rows))

    def add_up(self) -> None:
        """Add up the terms of all ranks. From now on this sum is known."""
        own, self._own = self._own, None
        assert own is not None
        self._known.append(own if comm.world_size == 1 else torch.as_tensor(comm.all_reduce(own, "sum")))


class Sliced:
    """The step that is being taken in slices on this rank, if any.

    Attributes
    ----------
    sums : Sums or None
        The step's sums; None if no step is being taken in slices.
    part : int
        The number of the part that is running, from 0.
    """

    sums: Sums | None = None
    part = 0


sliced = Sliced()
"""One value for all threads, because autograd has its own threads on devices."""


def step_in_slices(
    parts: Sequence[Any],
    call: Callable[[Any], Any],
    combined: Callable[[Callable[[Any], Any]], Any],
    go_back: Callable[[], None],
) -> Any:
    """Return the result of a step over parts of this rank's rows.

    Parameters
    ----------
    parts : sequence of Rows
    call : callable
        Runs the body on one part.
    combined : callable
        Runs the function that it is given on each part, and returns the combined outputs.
    go_back : callable
        Brings the objects into their state before the step.

    Raises
    ------
    ValueError
        If the body asks for more sums on some rows than on others.
    """
    worker, sums = cell.worker, Sums()
    num_run = 0

    def run(part: Any) -> Any:
        nonlocal num_run
        if num_run:
            go_back()
        num_run += 1
        worker.part_rows, sliced.part = part.high - part.low, parts.index(part)
        sums.begin_part()
        return call(part)

    # Hooks of gradients and ``all_rows_mean`` look at ``sliced`` and at the number of rows. Whatever ends the step, an
    # interrupt included, they are put back, or later steps would wait for sums that nobody makes.
    sliced.sums = sums
    try:
        while True:
            begun = num_run
            try:
                result = combined(run)
                with _talking():
                    comm.barrier()  # all or none: if a rank fails in the last round, the others fail here and go back
                return result
            except Awaited:
                is_first = num_run == begun + 1
            # ``combined`` has ended with the first part that was broken off; the other parts of the round run here. If
            # it was not the first part, the parts before it have run to their end, and cannot need the same sums.
            if not is_first or not all(_is_broken_off(run, part) for part in parts[1:]):
                raise ValueError(
                    "cannot take a step in slices: its body runs more backward passes on some rows than on others, "
                    "expected as many on all. Use num_slices=1, and no on_oom."
                )
            with _talking():
                sums.add_up()
    finally:
        sliced.sums, sliced.part, worker.part_rows = None, 0, 0


@contextlib.contextmanager
def _talking() -> Iterator[None]:
    """Let the ranks communicate between the parts, where all ranks are at the same place.

    Its time counts as time of the function.
    """
    worker, began = cell.worker, time.monotonic_ns()
    worker.part_rows, worker.variables.is_sliced = 0, False
    try:
        yield
    finally:
        worker.variables.is_sliced = True
        worker.executor.function_ns += time.monotonic_ns() - began


def _is_broken_off(run: Callable[[Any], Any], part: Any) -> bool:
    try:
        run(part)
    except Awaited:
        return True
    return False
