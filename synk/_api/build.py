"""``synk.function``: from a plain Python function to one that runs on all workers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from synk._api.function import Function, P
from synk._api.options import FunctionOptions, check_names
from synk._master.session import Session

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])


class Decorator(Protocol):
    """What ``synk.function`` with options but without a function returns."""

    def __call__(self, fn: Callable[P, Any], /) -> Function[P]:
        """Build the function."""


def build_function(fn: Any, options: Any, session: Session | None, kind: type[Function[Any]] = Function) -> Any:
    """Return a Function, or a decorator where ``fn`` is None.

    Also on a worker, which imports modules whose functions are decorated; only a call is refused there.
    """
    check_names(options)
    if fn is None:
        return lambda target: kind(target, session=session, **options)
    return kind(fn, session=session, **options)


def with_options(verb: F) -> F:
    """Have ``help`` and editors show the options of a verb that passes them on, with their defaults."""
    _, fn, *options = inspect.signature(Function.__init__).parameters.values()
    shown = [fn.replace(default=None), *(option for option in options if option.name != "session")]
    verb.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return verb


@overload
def function(fn: Callable[P, Any], **options: Unpack[FunctionOptions]) -> Function[P]: ...


@overload
def function(fn: None = None, **options: Unpack[FunctionOptions]) -> Decorator: ...


@with_options
def function(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
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
    return build_function(fn, options, None)
