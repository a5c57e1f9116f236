"""The check of the halves: it finds functions for which the average, the default op, gives a wrong result.

A function that returns a sum, for instance, gets the average of the ranks' sums unless the user names another op. No
error tells the user. So after the first call of a function that has enough rows, one rank runs a copy of the function
on trial: on all of its rows, and on two parts ("halves") of them. It averages the values of the parts with their rows
as weights, as the master averages the values of ranks. If the average differs from the value for all rows, the op does
not fit, and the master warns.

The master sends nothing but the request, and the check leaves nothing but its verdict. There is no verdict if the runs
say nothing about the op (random draws, side effects, communication, an exception): use ``f.verify`` for such functions.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from synk._pure.comparison import Tolerance, fitting_ops, is_same
from synk._pure.ops import OPS
from synk._pure.output_ops import DEFAULT_OP
from synk._pure.tables import is_table
from synk._pure.trees import flatten
from synk._wire.control import Down, Traits
from synk._wire.messages import MIN_CHECKED_ROWS
from synk._worker.call.trial import Trial
from synk._worker.call.values import array_or_object, as_object
from synk._worker.held.plans import PreparedPlan
from synk._worker.held.residents import Changing

if TYPE_CHECKING:
    from synk._worker.rank import Worker

_MAX_S, _MAX_NBYTES = 1.0, 1 << 26
_DISTRIBUTED = ("torch.distributed", "torch.distributed.distributed_c10d")
_ROUNDING = Tolerance(None, None)
_GRADIENT_RTOL = 0.02
"""Relative to the norm. Gradients are sums of rounded numbers, perhaps of 16 bits; a wrong loss is further off."""


class Unknown(Exception):
    """Raised when the runs can say nothing about the op."""


class Halves:
    """One check of one function: its values for some rows, compared with the average over two parts of these rows.

    A training step (``synk.torch.replicate``) also averages gradients over the ranks in the middle of a call, by
    :meth:`exchange`. The run on all rows notes these averages. Each run on a part notes its own gradients and goes on
    with the noted averages, as a rank of a real call would. Afterwards the gradients of the two parts are compared with
    the averages, like the outputs.

    Attributes
    ----------
    is_quiet : bool
        Whether a training step runs with its modules in ``eval()``.
    is_unsure : bool
        Whether a step has drawn random numbers or normalised over its rows, so that its values depend on more than the
        op.
    """

    def __init__(self, worker: Worker, prepared: PreparedPlan, until: float, *, is_quiet: bool) -> None:
        self._worker = worker
        self._trial = Trial(prepared.function, is_apart=True, max_nbytes=_MAX_NBYTES)
        self._is_step = isinstance(prepared.function.fn, Changing)
        self._prepared = copy.copy(prepared)
        self._prepared.function = self._trial.function
        self._prepared.plan = prepared.plan._replace(is_trial=True)
        self._until = until
        self._num_runs = 0
        self._has_communicated = False
        self._sums: list[np.ndarray] = []
        self._own: list[np.ndarray] = []
        self.is_quiet = is_quiet
        self.is_unsure = False

    def refused(self) -> ValueError:
        """Return the exception to raise in a function that communicates. The check then has no verdict."""
        self._has_communicated = True
        return ValueError("cannot communicate on trial: the other ranks are not in the call.")

    def exchange(self, own: np.ndarray) -> np.ndarray:
        """Take the numbers that a step averages over all ranks. Return the average: the numbers of the first run."""
        self._own.append(own)
        return own if self._num_runs == 1 else self._sums[len(self._own) - 1]

    def misfits(self) -> list[tuple[int, tuple[str, ...]]]:
        """Return the position of each output that is no average, with the ops that fit. -1 stands for gradients."""
        numbers = self._worker.lane.down[self._worker.rank]
        low, high = int(numbers[Down.LOW]), int(numbers[Down.HIGH])
        num_slices = self._prepared.plan.num_slices
        if num_slices > 1:  # there may be no memory for all rows at once
            high = min(high, low + max(MIN_CHECKED_ROWS, (high - low) // num_slices))
        rows = high - low
        with self._trial.running(), _no_process_groups(self):
            if self._trial.compiles:
                raise Unknown
            whole, self._sums = self._run(low, high)
            fits: dict[int, tuple[str, ...]] = dict.fromkeys(range(len(whole)), tuple(OPS))
            for cut in (rows // 2, rows // 4):  # two cuts, so that no ratio of rows hides a misfit
                weights = [cut, rows - cut]
                (first, own), (second, others) = self._run(low, low + cut), self._run(low + cut, high)
                if not len(first) == len(second) == len(whole) or not len(own) == len(others) == len(self._sums):
                    raise Unknown
                for position, parts in enumerate(zip(first, second)):
                    ops = fitting_ops(parts, weights, whole[position], _ROUNDING)
                    fits[position] = tuple(op for op in fits[position] if op in ops)
                if any(map(functools.partial(_is_off, weights), self._sums, own, others)):
                    fits[-1] = ()
            found = [(position, ops) for position, ops in fits.items() if DEFAULT_OP not in ops]
            if found:
                again, own = self._run(low, high)
                is_random = any(_is_off([1, 1], total, each, each) for total, each in zip(self._sums, own))
                same = [is_same(*pair, _ROUNDING) for pair in zip(again, whole)] + [not is_random]  # [-1]: gradients
                found = [(k, ops) for k, ops in found if same[k]]
        # Each run of a step has a copy of its own, so changes of that copy mean nothing.
        doubts = Traits.DRAWS if self._is_step else Traits.DRAWS | Traits.CHANGES
        if self._has_communicated or self._trial.traits & doubts:
            raise Unknown
        return found

    def _run(self, low: int, high: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the outputs for some rows, and the numbers that the run gave to ``exchange``."""
        if time.monotonic() > self._until:
            raise Unknown
        if self._is_step and self._num_runs:
            self._trial.renew()
        self._num_runs += 1
        self._own = []
        variables = self._worker.variables
        values = self._worker.executor.run_part(self._prepared, variables, low, high, self._on_host)
        if variables.assigned:
            raise Unknown
        return values, self._own

    def _on_host(self, result: Any) -> list[np.ndarray]:
        backend, function = self._worker.backend, self._prepared.function
        values, _ = flatten(result)

        def on_host(value: Any) -> Any:
            return np.array(as_object(backend, array_or_object(backend, value, OPS[DEFAULT_OP], "", function)))

        return [each if is_table(each) else on_host(each) for each in values]


def _is_off(weights: list[int], total: np.ndarray, first: np.ndarray, second: np.ndarray) -> bool:
    """Whether gradients of all rows differ from the average over two parts by far more than rounding."""
    parts = [np.asarray(part, np.float64) for part in (first, second)]
    size = max(np.linalg.norm(each) for each in (total, *parts))
    distance = np.linalg.norm(np.average(parts, axis=0, weights=weights) - total)
    return bool(np.isfinite(total).all() and not distance <= _GRADIENT_RTOL * size)


@contextlib.contextmanager
def _no_process_groups(halves: Halves) -> Iterator[None]:
    """Let the function make no torch process group. If there is one already, the check cannot tell who uses it."""
    distributed = [vars(sys.modules[name]) for name in _DISTRIBUTED if name in sys.modules]
    made = [(table, table["init_process_group"]) for table in distributed if "init_process_group" in table]
    if made and distributed[0]["is_initialized"]():
        raise Unknown

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise halves.refused()

    try:
        for table, _ in made:
            table["init_process_group"] = refuse
        yield
    finally:
        for table, function in made:
            table["init_process_group"] = function


def find_misfits(worker: Worker) -> list[tuple[int, tuple[str, ...]]]:
    """Return which outputs of the last call's function are no averages. Empty also if the check cannot tell."""
    prepared, until = worker.lane.called, time.monotonic() + _MAX_S
    assert prepared is not None
    found: list[tuple[int, tuple[str, ...]]] = []
    try:
        for is_quiet in (False, True):
            try:
                worker.check = Halves(worker, prepared, until, is_quiet=is_quiet)
                found = worker.check.misfits()
            except KeyboardInterrupt:
                raise
            except BaseException:  # an exception in a run says nothing about the op
                found = []
            if worker.check is None or not worker.check.is_unsure:
                break
        return found
    finally:
        worker.check = None
        worker.variables.abandon()
        if isinstance(prepared.function.fn, Changing):
            _free_copies()


def _free_copies() -> None:
    """Give the memory of a training step's copies back to the system.

    Each is as large as the model. They refer to themselves, so only the garbage collector frees them, and the C library
    keeps what is freed unless it is told.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)
