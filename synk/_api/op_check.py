"""Whether the default op fits a function: found out at its first calls, by ordinary calls of a copy on a few rows.

A function that returns a sum gets the average of the ranks' sums unless the user names another op. No error would tell
the user. So the result of its first call is held back. A copy of the function runs on a few rows, on all ranks and on
one worker alone. If the average of what the ranks return is not what the one worker returns, and this is so again with
other random numbers, the call raises ``OpMismatch``.

Nothing in a message or on a worker knows of this: the copy is a function like any other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from synk._api.comparison import (
    MISSING,
    SINGLE,
    Runs,
    Tolerance,
    are_same,
    are_single,
    combine,
    fitting_ops,
    measured,
    outputs_of,
)
from synk._api.plain import NotComparable, ScatteredArguments, copied
from synk._engine.data import Data
from synk._engine.rows import CallOptions
from synk._processes.output import warn_at_users_line
from synk._pure.ops import OPS
from synk._pure.output_ops import DEFAULT_OP
from synk._pure.trees import flatten
from synk._wire.apart import Part
from synk.errors import CallTimeout, OpMismatch, WorkerDied

FEW = 61
"""The most rows that are tried: a prime, since equal shares would hide a sum over a power of two."""

_MAX_TRIES = 8
MAX_S, _LIMIT_S = 1.0, 10.0
"""The longest time that a run on one worker may be expected to take, and the time limit of a run."""

MAX_NBYTES = 1 << 26
"""The most bytes of outputs, captures and arguments."""

_MAX_SAID = 3


class Unknown(Exception):
    """Raised where a call says nothing about the op: a run has raised something, or would cost too much."""


@dataclass
class OpCheck:
    """How far it is known that the default op fits a function.

    Attributes
    ----------
    position : int
        Which argument is the first that is scattered.
    num_tries : int
        How many calls were compared.
    num_rows : int
        It fits calls with up to so many rows. Few rows tell little: the average of two is also their median.
    """

    position: int
    num_tries: int = 0
    num_rows: int = 1

    @property
    def is_over(self) -> bool:
        return self.num_rows >= FEW or self.num_tries >= _MAX_TRIES

    def may_be_due(self, args: tuple[Any, ...]) -> bool:
        """Whether a call may have more rows than are known. Never False if it has."""
        try:
            shape: tuple[int, ...] = args[self.position].shape
            return not shape or shape[0] > self.num_rows
        except Exception:  # it is given by name, has no shape, or cannot tell it
            return True


def hold_back(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
) -> Callable[[Any], None] | None:
    """Return what a call that begins now must do with its result before it is given out; None for nothing.

    It raises ``OpMismatch`` if the default op does not fit, and takes no longer than what is left of the call's time.
    """
    few = few_rows(function, args, kwargs, options)
    if few is None:
        return None
    check, session, before = function._op_check, function._bound_session(), _assignments(function)
    end = session.deadline(options.timeout)

    def release(result: Any) -> None:
        # Another call may have shown it meanwhile, and nothing can be run any more in a runtime that is closed.
        if function._op_check is not None and few.num_rows > check.num_rows and not session.is_closed:
            settle(function, few, lambda: _compare(function, few, result, end, before))

    return release


def settle(function: Any, few: Few, find: Callable[[], str | None]) -> None:
    """Find out whether the default op fits a few rows of a call, and note what is known then.

    Parameters
    ----------
    find : callable
        Returns what to tell the user, an empty text if the op fits, or None if it will never be known: the function
        draws random numbers. Raises Unknown if it is not known for these rows.

    Raises
    ------
    OpMismatch
    """
    check = function._op_check
    try:
        misfit = find()
        if misfit:
            raise OpMismatch(misfit)
        if misfit is None:
            function._op_check = None
        check.num_rows = few.num_rows
    except Unknown:
        pass
    except (CallTimeout, WorkerDied) as error:
        function._op_check = None
        warn_at_users_line(
            f"a second run of {function.__name__!r}, made to find out whether its default op fits, has ended: "
            f'{error} Name its op, as by outputs="{DEFAULT_OP}"; then there is no second run.',
            RuntimeWarning,
        )
    check.num_tries += 1
    if check.is_over:
        function._op_check = None


def limit_of(function: Any, end: float | None = None) -> float | None:
    """Return the time limit of a run that the user has not asked for; None where the program itself is the rank."""
    if function._bound_session().is_inline:
        return None
    return _LIMIT_S if end is None else max(min(_LIMIT_S, end - time.monotonic()), 0.05)


def tried(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what a run returns.

    Raises
    ------
    Unknown
        If the function raises something in it, which it may on a few rows.
    """
    try:
        return run(*args, **options)
    except (CallTimeout, WorkerDied):
        raise
    except Exception as error:
        raise Unknown from error


def _assignments(function: Any) -> list[Any]:
    """Return what changes when a call assigns variables that the function refers to."""
    return [variable.fronts.tolist() for variable in function._callee.variables]


# -- a few rows -------------------------------------------------------------------------------------------------------


class Few(NamedTuple):
    """A few rows of a call.

    Attributes
    ----------
    args, kwargs
        Of the call.
    total, num_rows : int
        How many rows it has, and how many of them are taken.
    rows : ndarray of int, or None
        Where they lie in the arguments; None if these have no rows, but a variable that the function closes over.
    is_owned : bool
        Whether each rank has other rows, of a variable.
    scale, eps : float
        The largest of the floats among the arguments, and the precision of the least precise.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    total: int
    num_rows: int
    rows: np.ndarray | None
    is_owned: bool
    scale: float
    eps: float

    def unevenly(self) -> Few:
        """Return some of the rows, in gaps that grow: the mean of evenly spaced numbers is also their median."""
        assert self.rows is not None
        at = np.linspace(0, 1, self.num_rows)
        rows = self.rows[np.unique(((at + at**3) / 2 * (self.num_rows - 1)).astype(int))]
        return self._replace(rows=rows, num_rows=len(rows))

    def described(self) -> str:
        return f"{self.num_rows} rows" if self.num_rows == self.total else f"{self.num_rows} of the {self.total} rows"


def few_rows(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Few | None:
    """Return a few rows of a call, or None if it has not more than are known.

    If nothing can be picked, the call is not checked either, and counts as one that tells nothing.
    """
    check, callee, session = function._op_check, function._callee, function._bound_session()
    is_divided = session.world_size > 1 or options.num_slices > 1 or function._options.reproducible
    if check is None or not is_divided:
        return None
    try:
        scattered = ScatteredArguments(callee, args, kwargs)
        closed_over = [sum(variable.lengths) for variable in callee.variables if variable.is_sharded]
        if closed_over and options.batch is not None:
            raise NotComparable("each rank has other rows")
        selection = scattered.select(options.batch)
        if closed_over:  # its rows cannot be picked
            total = count = max(closed_over)
            rows = None
        else:
            total = 0 if selection is None else selection.count
            count = min(total, FEW)
            spread = np.arange(count) * (total - 1) // max(count - 1, 1)
            rows = None if selection is None else selection.positions()[spread]
        if count <= check.num_rows:
            return None
        whole = [value for is_broadcast, value in scattered.bound if is_broadcast]
        leaves = [leaf for leaf in flatten([scattered.sampled(rows), whole])[0] if not isinstance(leaf, Data)]
        if sum(getattr(leaf, "nbytes", 0) for leaf in leaves) > MAX_NBYTES:
            raise NotComparable("its arguments are large")
        is_owned = bool(closed_over or scattered.shards)
        return Few(args, kwargs, total, count, rows, is_owned, *measured(leaves))
    except Exception:  # wrong input, which the call will refuse
        check.num_tries += 1
        return None


# -- the comparison ---------------------------------------------------------------------------------------------------


class Misfit(NamedTuple):
    """An output, and what can be said of it.

    Attributes
    ----------
    path : str
    whole : object
        Its value for all rows.
    parts : list
        Its values for the rows of the ranks.
    ops : sequence of str
        The ops that fit.
    """

    path: str
    whole: Any
    parts: list[Any]
    ops: Sequence[str]


def _compare(function: Any, few: Few, result: Any, end: float | None, before: list[Any]) -> str | None:
    """Return what to tell the user; see :func:`settle`."""
    record = function._callee.record
    seconds = record.function_ns * 1e-9 / max(record.num_calls, 1)
    expected = seconds * function._bound_session().world_size * few.num_rows / max(few.total, 1)
    nbytes = sum(getattr(leaf, "nbytes", 0) for leaf in flatten(result)[0])
    if before != _assignments(function) or expected > MAX_S or nbytes > MAX_NBYTES:
        raise Unknown
    copy = tried(copied, function._callee.fn, max_nbytes=MAX_NBYTES)
    runs = Runs(function, copy, few.args, few.kwargs, limit_of(function, end))
    said = _judged(function.__name__, runs, few)
    if said == "" and few.rows is not None and few.num_rows > 3:  # of three it would leave two, which tell nothing
        with contextlib.suppress(Unknown):
            said = _judged(function.__name__, runs, few.unevenly())
    return said


def _judged(name: str, runs: Runs, few: Few) -> str | None:
    """Return what to tell the user after a few rows; see :func:`settle`."""
    num_slices = 2 if runs.num_ranks == 1 else 1  # a single rank has its parts one after the other
    parts = tried(runs.apart, few.rows, num_slices)
    whole = tried(runs.alone, few.rows)
    outputs = outputs_with_ops(few, whole, parts)
    misfits = [each for each in outputs if DEFAULT_OP not in each.ops]
    if not misfits:
        if any(len(each.ops) > 1 for each in outputs):  # as for zeros
            raise Unknown
        return ""
    unsteady = _differing([whole, tried(runs.alone, few.rows)])
    if few.rows is not None and not few.is_owned:
        with contextlib.suppress(Unknown):
            unsteady += _differing(tried(runs.apart, np.tile(few.rows, runs.num_ranks)))  # each has the same rows
    misfits = [each for each in misfits if not any(path.startswith(each.path) for path in unsteady)]
    if not misfits:
        return None  # they are random numbers, times or counts, or depend on the rank
    if few.rows is not None and any(misfit.ops for misfit in misfits):
        with contextlib.suppress(Unknown):  # other rows may need another op
            back = few.rows[::-1]
            there = outputs_with_ops(few, tried(runs.alone, back), tried(runs.apart, back, num_slices))
            fitting = {(each.path, op) for each in there for op in each.ops}
            misfits = [each._replace(ops=[op for op in each.ops if (each.path, op) in fitting]) for each in misfits]
    return (
        f"cannot average the outputs of {name!r}, which names no op: on {few.described()} "
        f"{_said_of(misfits, [part.num_rows for part in parts])}Naming an op in synk.function(..., outputs=...), also "
        f'"{DEFAULT_OP}", ends this check.'
    )


def outputs_with_ops(few: Few, whole: Part, parts: Sequence[Part]) -> list[Misfit]:
    """Return all outputs with the ops that make the values of the parts the value for all rows, but for rounding."""
    rows = [part.num_rows for part in parts]
    values = outputs_of(DEFAULT_OP, [whole.value, *(part.value for part in parts)])
    return [
        Misfit(path, value, own, fitting_ops(own, rows, value, _tolerance(few, [value, *own])))
        for path, _, (value, *own) in values
    ]


def _tolerance(few: Few, values: Sequence[Any]) -> Tolerance:
    """Return what rounding allows, by the largest value, since parts may cancel out, and by the rows' own size."""
    largest, eps = measured(values)
    eps = max(eps, few.eps, SINGLE if are_single(values) else 0.0)
    rtol = max(2.0**-26, min(eps**0.5, 100 * eps))
    return Tolerance(rtol, eps + rtol * largest + eps * few.num_rows * few.scale)


def _differing(runs: Sequence[Part]) -> list[str]:
    """Return the paths of the outputs that are not the same in all these runs."""
    outputs = outputs_of(DEFAULT_OP, [run.value for run in runs])
    return [path for path, _, (first, *others) in outputs if not all(are_same(first, other) for other in others)]


# -- what the user is told --------------------------------------------------------------------------------------------


def _said_of(misfits: Sequence[Misfit], rows: Sequence[int]) -> str:
    """Return sentences about outputs: the value by the default op, that of one worker, and the op that fits."""
    said = []
    for path, whole, parts, ops in misfits[:_MAX_SAID]:
        value, where = combine(OPS[DEFAULT_OP], parts, rows), f" for output{path}" if path else ""
        got = "cannot combine what the workers return" if value is MISSING else f"gives {_shown(value)}"
        said.append(f'outputs="{DEFAULT_OP}", the default, {got}{where}, and one worker alone {_shown(whole)}.')
        if ops:
            fitting = " or ".join(f'"{op}"' for op in ops) + (", which all fit these rows" if len(ops) > 1 else "")
            said.append(f"Use op {fitting}{where}." if path else f"Use outputs={fitting}.")
        else:
            said.append(
                "No op fits: return what can be combined, as a sum and a count, or one value for each rank by op None, "
                "or call f.serial(...)."
            )
    if len(misfits) > _MAX_SAID:
        said.append(f"{len(misfits) - _MAX_SAID} more outputs differ.")
    return " ".join([*said, ""])


def _shown(value: Any) -> str:
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim:
        text = np.array2string(np.asarray(value), threshold=6, edgeitems=2, separator=", ").replace("\n", "")
        return f"{text} of shape {value.shape}"
    text = repr(value.item() if isinstance(value, (np.ndarray, np.generic)) else value)
    return text if len(text) <= 80 else f"{text[:76]} ..."
