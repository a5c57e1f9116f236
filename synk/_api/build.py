"""``synk.function``: makes a function that runs on all workers from a plain Python function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from synk._api.composed import Composed
from synk._api.function import Function, P, R
from synk._api.options import KeptOptions, Options, check_names
from synk._api.replay import replay_folder
from synk._engine.session import Session
from synk._pure.tracebacks import verb

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])


class Decorator(Protocol):
    """The type of the decorator that ``synk.function`` returns when it gets options but no function."""

    def __call__(self, fn: Callable[P, Any], /) -> Function[P, Any]:
        """Build the function."""


class KeepingDecorator(Protocol):
    """The same decorator, with options under which results have the type that the plain function returns."""

    def __call__(self, fn: Callable[P, R], /) -> Function[P, R]:
        """Build the function."""


def build_function(fn: Any, options: Any, session: Session | None) -> Any:
    """Return a Function, or a decorator if ``fn`` is None.

    This also works on a worker, which may import modules with decorated functions. Only calls are refused there.
    """
    check_names(options)

    def made(fn: Any) -> Function[..., Any]:
        checked = Options.of(fn, **options)
        folder = replay_folder()
        is_plain = folder is None and not checked.of_calls
        built = Function(fn, checked, session) if is_plain else Composed(fn, checked, session, folder)
        built._is_new = True
        return built

    return verb(made) if fn is None else made(fn)


def with_options(verb: F) -> F:
    """Show ``help`` and editors the options that a verb passes on, with their defaults."""
    fn = inspect.Parameter("fn", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    _, *options = inspect.signature(Options).parameters.values()
    shown = [fn, *(option.replace(kind=option.KEYWORD_ONLY) for option in options)]
    verb.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return verb


@overload
def function(fn: Callable[P, R], **options: Unpack[KeptOptions]) -> Function[P, R]: ...


@overload
def function(fn: Callable[P, Any], **options: Any) -> Function[P, Any]: ...


@overload
def function(fn: None = None, **options: Unpack[KeptOptions]) -> KeepingDecorator: ...


@overload
def function(fn: None = None, **options: Any) -> Decorator: ...


@with_options
@verb
def function(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Build a :class:`synk.Function` from a plain Python function. Also a decorator, with or without arguments.

    Parameters
    ----------
    fn : callable
        Anything that cloudpickle can pickle: a lambda, closure, notebook function, method or partial. It is written for
        one device and gets the rows of that device. Errors and profiles show its ``__name__``.
    bcast_inputs : str or sequence of str
        Parameters that every rank gets whole. All others are scattered along axis 0.
    outputs : op, or nesting of ops
        ``"avg"`` (weighted by rows), ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, ``"gather"``, ``"first"``, None (a
        list with one entry for each rank), a callable ``op(a, b)`` or an instance of your own subclass of
        :class:`synk.Op`. Give one for all outputs, or a structure like that of the result. A Series or a DataFrame is
        one output: ``"gather"`` joins it with its index, and reductions require equal labels on all ranks.
    updates : sequence of Shared, (Shared, op) and Resident
        What the function changes. With variables it returns ``(outputs, new_values)``, a new value for each. Resident
        objects it changes in place; see :class:`synk.Resident`.
    framework : {None, "torch", "jax"}
        The library whose arrays the function gets and returns: scattered and broadcast arguments, and the arrays in
        tuples, lists and dicts of the broadcast ones. A torch tensor that it returns comes back as a tensor, on the CPU
        and without a gradient. A JAX array comes back as a NumPy array, because the calling program touches no device.
        Numbers and NumPy arrays stay as they are. Tensor arguments are copied once into shared memory, whatever their
        dtype (without ``"torch"``, dtypes that NumPy lacks are refused).
    retry : int
        How often a call is run again after a worker died in it (never after an exception, an interrupt or a timeout).
        ``timeout`` is for each run. Not with ``updates``, and such a function cannot be submitted.
    on_oom : {"raise", "slices"}
        How to go on when a call runs out of memory on a rank. With ``"slices"`` it is made again with twice as many
        slices, as by ``num_slices``, until it fits or a slice is one row. The number is remembered for arguments of
        these shapes, and logged once. Not with ``updates``. Such a function cannot be submitted.
    reproducible : bool or int
        Whether the result has the same bits for any number of workers. The rows are divided into equal blocks of at
        most so many (True: 1024), the function is called once for each, and the result is that of ``f.serial`` with
        one slice for each block. The workers compute the blocks in up to four calls; then what was returned for all
        blocks goes to the program and to one worker, which combines it. So it suits small outputs and many more blocks
        than workers. The result for a block must not depend on the rank: ``synk.comm``, sharded variables and resident
        objects are refused. Not with op None, ``updates``, ``per_rank`` or ``on_oom``, and such a function cannot be
        submitted.
    per_rank : bool
        Whether each rank contributes a different value (its random draws, its part of a search). Then ``"sum"``,
        ``"prod"``, ``"gather"`` and a callable op are allowed without rows to divide, that is, without a scattered
        argument or a sharded variable that the function closes over. The result depends on the number of workers.
        Broadcast arguments are the same on all ranks: if the function only computes with them, or seeds a generator
        with one of them, all ranks return the same bits, and a sum counts them several times. Draw from
        ``synk.comm.rng``, or seed with ``[seed, synk.comm.rank]``.

    Returns
    -------
    Function

    Raises
    ------
    SerializationError
        If the function cannot be sent to the workers. The error names the variable.
    ValueError, TypeError
        For an unknown op, parameter, framework or option.
    OpMismatch
        At a first call, if ``outputs`` was not given and an output is not an average over rows. To find out, a copy of
        the function runs on at most 61 rows, on all workers and on one alone; see the page on functions and outputs.

    Notes
    -----
    The rows to divide are those of the scattered arguments or, if there are none, of the sharded variables that the
    function closes over. They are the weights of ``"avg"``. Without rows every rank computes the same value, and
    ``"sum"``, ``"prod"``, ``"gather"`` and a callable are refused.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     total = synk.function(lambda x: x.sum(), outputs="sum")
    ...     total(np.arange(10.0))
    np.float64(45.0)
    """
    return build_function(fn, options, None)
