"""``synk.function``: from a plain Python function to one that runs on all workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, overload

from synk._api.function import Function, P
from synk._master.session import Session
from synk._pure.output_ops import DEFAULT_OP


class Decorator(Protocol):
    """What ``synk.function`` with options but without a function returns."""

    def __call__(self, fn: Callable[P, Any], /) -> Function[P]:
        """Build the function."""


def build_function(fn: Any, options: dict[str, Any], session: Session | None) -> Any:
    """Return a Function, or a decorator where ``fn`` is None.

    Also on a worker, which imports modules whose functions are decorated; only a call is refused there.
    """
    if fn is None:
        return lambda target: Function(target, session=session, **options)
    return Function(fn, session=session, **options)


@overload
def function(
    fn: Callable[P, Any],
    *,
    bcast_inputs: str | Sequence[str] = (),
    outputs: Any = DEFAULT_OP,
    updates: Any = (),
    changes: Any = (),
    framework: str | None = None,
    name: str | None = None,
    retry: int = 0,
    per_rank: bool = False,
) -> Function[P]: ...


@overload
def function(
    fn: None = None,
    *,
    bcast_inputs: str | Sequence[str] = (),
    outputs: Any = DEFAULT_OP,
    updates: Any = (),
    changes: Any = (),
    framework: str | None = None,
    name: str | None = None,
    retry: int = 0,
    per_rank: bool = False,
) -> Decorator: ...


def function(
    fn: Callable[..., Any] | None = None,
    *,
    bcast_inputs: str | Sequence[str] = (),
    outputs: Any = DEFAULT_OP,
    updates: Any = (),
    changes: Any = (),
    framework: str | None = None,
    name: str | None = None,
    retry: int = 0,
    per_rank: bool = False,
) -> Any:
    """Build a :class:`synk.Function` from a plain Python function; also a decorator, with or without arguments.

    Parameters
    ----------
    fn : callable
        Anything that cloudpickle can carry: a lambda, closure, notebook function, method or partial. It is written for
        one device and gets the rows of that device.
    bcast_inputs : str or sequence of str
        Parameters that every rank gets whole; all others are scattered along axis 0.
    outputs : op, or nesting of ops
        ``"avg"`` (weighted by rows), ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, ``"gather"``, ``"first"``, None (a
        list with one entry per rank), a callable ``op(a, b)`` or an instance of your own subclass of :class:`synk.Op`.
        One for all outputs, or a structure like that of the result. A Series or a DataFrame is one output: joined with
        its index under ``"gather"``, and reduced only where its labels are equal on all ranks.
    updates : sequence of Shared, or of (Shared, op)
        Variables that the function updates; it then returns ``(outputs, new_values)``.
    changes : Resident or sequence of Resident
        Resident objects that the function changes; see :class:`synk.Resident`.
    framework : {None, "torch", "jax"}
        Library whose arrays the function gets and returns: scattered and broadcast arguments, and the arrays in tuples,
        lists and dicts of the broadcast ones. What it returns as a tensor of torch comes back as one, on the CPU and
        without a gradient; what it returns as JAX's comes back as NumPy's, because the program that calls touches no
        device. Numbers and NumPy's arrays stay what they are. Tensors that are passed are copied once into shared
        memory, whatever their dtype (without ``"torch"`` those that NumPy has no dtype for are refused).
    name : str, optional
        For errors and profiles.
    retry : int
        How often a call is run again after a worker died in it (never after an exception, an interrupt or a timeout).
        0: a call runs at most once. Not with ``updates`` or ``changes``.
    per_rank : bool
        Each rank contributes a value of its own (its random draws, its part of a search), so that ``"sum"``,
        ``"prod"``, ``"gather"`` and a callable op have a meaning where there are no rows to divide: without a scattered
        argument or a sharded variable that the function closes over. The result then depends on the number of workers.

    Returns
    -------
    Function

    Raises
    ------
    SerializationError
        If it cannot be sent to the workers; names the variable.
    ValueError, TypeError
        For an unknown op, parameter or framework.

    Warns
    -----
    OpMismatch
        At the first call in which a rank has four rows, once, if ``outputs`` was not named and an output is no average
        over rows. One rank runs a copy of the function on parts of its rows to find out (see the design page). Where
        that says nothing (random draws, effects, ``synk.comm``, ``per_rank``, JAX and Numba, functions of more than a
        second or 64 MB) nothing is said: ask :meth:`Function.verify`.
    RowShapedOutput
        The same for an output that has one row for each row of its rank, and wants ``"gather"``.

    Notes
    -----
    Rows to divide are those of the scattered arguments or, without any, of the sharded variables that the function
    closes over. They are the weights of ``"avg"``. Without rows every rank computes the same, and ``"sum"``,
    ``"prod"``, ``"gather"`` and a callable are refused.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     total = synk.function(lambda x: x.sum(), outputs="sum")
    ...     total(np.arange(10.0))
    np.float64(45.0)
    """
    options = {
        "bcast_inputs": bcast_inputs,
        "outputs": outputs,
        "updates": updates,
        "changes": changes,
        "framework": framework,
        "name": name,
        "retry": retry,
        "per_rank": per_rank,
    }
    return build_function(fn, options, None)
