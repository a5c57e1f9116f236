"""``Function``: the object that the user calls. It checks options and runs the verbs; calls use its ``Callee``.

In one file because it is one class: everything that can be done with a function, each verb a few lines.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from synk._api.first_calls import Release, verifying
from synk._api.op_check import OpCheck, hold_back
from synk._api.options import Options, call_options
from synk._api.repeat import call_repeatedly, check_repeats
from synk._api.serial import call_serially
from synk._code.parcels import FunctionHandle
from synk._engine.argument import OPTION_NAMES
from synk._engine.callee import Callee
from synk._engine.function import PLAIN, run, submit
from synk._engine.jobs import length_of
from synk._engine.pending import PendingCall
from synk._engine.rows import CallOptions
from synk._engine.session import Session
from synk._pure.interrupts import holding
from synk._pure.output_ops import DefaultOp
from synk._pure.tracebacks import Results, outline, verb
from synk._pure.words import Hinting
from synk._wire.apart import WithOneMore
from synk._wire.cell import current_session, refuse_inside_worker

if TYPE_CHECKING:
    from synk._api.verify import Report

P = ParamSpec("P")
"""The parameters of the user's function."""


Made = TypeVar("Made")
R = TypeVar("R")
"""The result of the user's function, if results of calls have its type: not under op None or a callable, nor with
updates.
"""


class Function(FunctionHandle, Hinting, Generic[P, R]):
    """A function that runs on all workers as one call. Made by :func:`synk.function`.

    Call it like the function it was made from. Each argument is scattered along axis 0 unless it is named in
    ``bcast_inputs``. A scattered argument is an array, or a dict, tuple, named tuple or dataclass of arrays with the
    same number of rows; the function gets the same nesting with the rows of its rank. The outputs are combined by their
    ops. The keyword arguments below are synk's own: a function with a parameter of one of these names is refused.

    Parameters
    ----------
    batch : int, slice, sequence of int or bool mask, optional
        The rows of the scattered inputs to use, selected before they are divided: the first n, a slice, an index list
        (in its order), or a mask.
    num_slices : int
        The number of parts of its rows on which each rank calls the function, one after the other. The results are
        accumulated, so a call takes less memory and gives the same result.
    output_subset : sequence, optional
        Positions or keys of the wanted outputs. The others are neither reduced nor sent.
    timeout : float, optional
        Seconds until ``CallTimeout``. The runtime's default if not given.

    Raises
    ------
    TypeError, ValueError, IndexError
        For wrong input, before anything is sent.
    Exception
        The exception of the function on the lowest failing rank, with a ``RemoteError`` as its cause.
    WorkerDied, CallTimeout, CollectiveMismatch, SerializationError, ClosedError
        As described in :mod:`synk.errors`.

    Notes
    -----
    The function computes with the contents that its captured objects have in the program at the moment of the call,
    even if they were changed in place. Changes that only a rank has made to its copies stay on that rank.
    """

    __name__: str
    _is_new = False
    """Whether it was never called; only of functions that the user has built."""

    def __init__(self, fn: Callable[P, R], options: Options, session: Session | None = None) -> None:
        name, has_default = options.name, isinstance(options.outputs, DefaultOp)
        self._callee = Callee(
            fn,
            name,
            bcast_inputs=options.bcast_inputs,
            outputs=str(options.outputs) if has_default else options.outputs,
            updates=options.variables,
            changes=options.residents,
            framework=options.framework,
            per_rank=options.per_rank,
            reserved=OPTION_NAMES,
            session=session,
        )
        is_checked = has_default and not (options.per_rank or options.updates)
        self._op_check: OpCheck | None = OpCheck(self._callee.signature.first_scattered) if is_checked else None
        self._verb = f"call {name!r}"
        self._wrapped: dict[Any, Any] = {}
        self._options = options
        functools.update_wrapper(self, fn, updated=())
        self.__name__ = name

    @property
    def outputs(self) -> Any:
        """The ops of the function's outputs, as given to :func:`synk.function`."""
        return self._callee.outputs

    # -- calling ------------------------------------------------------------------------------------------------------

    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def __call__(
        self,
        /,
        *args: Any,
        batch: Any = None,
        num_slices: int = 1,
        output_subset: None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> R: ...

    @overload
    def __call__(self, /, *args: Any, **options: Any) -> Any: ...

    def __call__(  # type: ignore[misc]  # a parameter of one of these names is refused by Signature
        self,
        /,
        *args: Any,
        batch: Any = None,
        num_slices: int = 1,
        output_subset: Any = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        try:
            check = self._op_check
            if self._is_new or (check is not None and check.may_be_due(args)):
                with holding():
                    return self._run_checked(args, kwargs, call_options(batch, num_slices, output_subset, timeout))
            if type(num_slices) is int and num_slices == 1 and output_subset is None and timeout is None:
                return run(self, args, kwargs, PLAIN if batch is None else CallOptions(batch))
            return run(self, args, kwargs, call_options(batch, num_slices, output_subset, timeout))
        except BaseException as error:  # like a verb, but written out: this is the path of every call
            __tracebackhide__ = True
            outline(error)
            if sys.version_info < (3, 11):
                raise error
            raise

    @overload
    def serial(self, /, *args: Any, output_subset: None = None, **options: Any) -> R: ...

    @overload
    def serial(self, /, *args: Any, **options: Any) -> Any: ...

    @verb
    def serial(
        self,
        /,
        *args: Any,
        batch: Any = None,
        num_slices: int = 1,
        output_subset: Any = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the whole input on one worker: the oracle for the parallel call.

        Sharded variables are whole there, also those that the function closes over, which it cannot assign. Options and
        errors are those of a call.
        """
        options = call_options(batch, num_slices, output_subset, timeout, num_ranks=1)
        return call_serially(self, args, kwargs, options)

    @verb
    def repeat(
        self,
        num_repeats: int,
        /,
        *args: Any,
        batch: Any = None,
        num_slices: int = 1,
        output_subset: Any = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the function several times with the same arguments and one message, and return the last result.

        Each rank runs it again and again on its rows, without the program in between. A run finds the values that the
        run before has assigned to shared variables, returned for ``updates`` or changed in resident objects. So
        ``repeat`` is for short steps that go on from their own state: an iteration of a solver, a simulation, a chain
        of samples.

        Parameters
        ----------
        num_repeats : int
            The number of runs, at least 1.
        *args, batch, num_slices, output_subset, timeout, **kwargs
            As for a call. ``timeout`` is for all repetitions together.

        Returns
        -------
        Any
            The result that the last of so many calls would have returned.

        Raises
        ------
        ValueError
            If ``num_repeats`` is not an integer of 1 or more, ``num_slices`` is not 1, or the function gives a sharded
            variable another number of rows before the last repetition.
        Exception
            As for a call. All repetitions are one transaction: if one of them fails on any rank, shared variables keep
            the values that they had before the first. Resident objects may keep what was changed, as after any call
            that fails; all ranks have the same, and a note on the exception reports that.

        Notes
        -----
        The ranks do not wait for each other between two repetitions, unless the function communicates. Ranks that have
        no rows get the new values at the end.

        Examples
        --------
        >>> import numpy as np, synk
        >>> with synk.fork(2):
        ...     w = synk.shared(np.zeros(2))
        ...
        ...     @synk.function(updates=[w])
        ...     def step(x):
        ...         gradient = synk.comm.all_reduce((w.value - x).mean(0), "avg")
        ...         return np.abs(gradient).max(), w.value - 0.5 * gradient
        ...
        ...     largest = step.repeat(50, np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
        ...     w.value
        array([3., 4.])
        """
        num_repeats = check_repeats(num_repeats, self.__name__)
        options = call_options(batch, num_slices, output_subset, timeout)
        return self._run_checked(args, kwargs, options, functools.partial(call_repeatedly, self, num_repeats))

    @verb
    def verify(
        self,
        /,
        *args: Any,
        rtol: float | None = None,
        atol: float | None = None,
        batch: Any = None,
        num_slices: int = 1,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Report:
        """Compare each output of a call with that of the plain function, called in the program.

        The plain function gets the arguments that were passed: ``Data`` as arrays, lists as they are or, if it raises
        on them, as arrays, the rows that ``batch`` selects, and tensors if the function has a ``framework``.

        These runs leave nothing behind. Shared variables keep their values. Each run gets copies of the captured
        objects, with random number generators in their present state. Printed text is dropped. Effects outside of the
        process, or on modules that the function imports, are not undone.

        Parameters
        ----------
        *args, **kwargs
            As for a call, with enough rows for more than one rank: on one worker everything is equal.
        rtol, atol : float, optional
            The relative and absolute tolerance to the expected value, as in `numpy.allclose`. The default allows for
            rounding: ``rtol`` is the square root of the dtype's precision, and ``atol`` is ``rtol`` times the largest
            expected value.
        batch, num_slices, timeout
            As for a call. ``timeout`` applies to each run on the workers, of which there are up to four.

        Returns
        -------
        Report
            True if all outputs are equal, and the shared variables that the call assigns on CPU workers. It prints as a
            table, with the ops that would have matched. If values differ because the function draws random numbers, a
            note reports that.

        Raises
        ------
        SerializationError
            If the captured objects cannot be copied.
        Exception
            The exception of the call. Only errors about outputs that cannot be combined are reported instead.

        Notes
        -----
        Where the plain function cannot be called in the program, or its result means something else there, the call is
        compared with :meth:`serial`, and a note in the report says why. This is so if it uses ``synk.comm``, shared
        variables or resident objects, or runs on devices, or if it and its arguments cannot be copied. An exception
        that only the plain function raises is a difference.

        Examples
        --------
        >>> import numpy as np, synk
        >>> with synk.fork(2):
        ...     @synk.function
        ...     def total(x):
        ...         return x.sum()
        ...     total.verify(np.arange(6.0))
        'total' against the plain function:
        output  op   equal  largest difference  would match
        result  avg  NO     7.5e+00             sum
        """
        from synk._api.comparison import Tolerance
        from synk._api.verify import verify

        for name in {"rtol", "atol"} & set(self._callee.signature.names):
            if (rtol if name == "rtol" else atol) is not None:
                raise ValueError(
                    f"cannot verify {self.__name__!r}: got {name}=, which is a parameter of the function and the "
                    "tolerance of this verb, expected an argument by position. Pass it so, or bind it by a lambda."
                )
        if "output_subset" in kwargs:
            raise TypeError(f"cannot verify {self.__name__!r}: got output_subset=, expected all outputs. Leave it out.")
        function = self._renewed()
        options = call_options(batch, num_slices, None, timeout)
        return verify(function, args, kwargs, options, Tolerance(rtol, atol))

    def _alike(self, fn: Callable[..., Any], **options: Any) -> Function[..., Any]:
        """Return a function of another callable with the inputs of this one, on the same runtime."""
        own = {name: getattr(self._options, name) for name in ("bcast_inputs", "framework", "per_rank")}
        return type(self)(fn, Options.of(fn, **own | options), self._bound_session())

    def _with_one_more(self, wrapper: type[WithOneMore], *of: Any) -> Function[..., Any]:
        """Return the function ``wrapper(fn, *of)``, which gets one more argument whole, before its own."""
        callee = self._callee

        def make() -> Function[..., Any]:
            names = [callee.bcast_inputs] if isinstance(callee.bcast_inputs, str) else callee.bcast_inputs
            options = {"outputs": callee.outputs, "updates": self._options.updates}
            return self._alike(wrapper(callee.fn, *of), bcast_inputs=[wrapper.first, *names], **options)

        return self._made_once(wrapper, make, *of)

    def _made_once(self, what: Any, make: Callable[[], Made], *of: Any) -> Made:
        """Return what ``make`` has made of the plain function as it is now, for this runtime and these objects."""
        fn = self._callee.fn
        key = of, self._bound_session(), fn, getattr(fn, "__code__", None)
        known, made = self._wrapped.get(what, (None, None))
        if known != key:
            made = make()
            self._wrapped[what] = key, made
        return made

    @overload
    def submit(self, /, *args: Any, output_subset: None = None, **options: Any) -> PendingCall[R]: ...

    @overload
    def submit(self, /, *args: Any, **options: Any) -> PendingCall[Any]: ...

    @verb
    def submit(
        self,
        /,
        *args: Any,
        batch: Any = None,
        num_slices: int = 1,
        output_subset: Any = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> PendingCall[Any]:
        """Send the call and return its future, without waiting for it.

        Three calls can be in flight: one runs, one waits, and the inputs of the third are being copied to the devices.
        A fourth ``submit`` first waits for the oldest call, and every other operation of the runtime waits for all of
        them. Calls run in the order in which they were submitted. Each rank continues with the next call as soon as
        it has finished its part. A call that fails does not stop those behind it; a worker that dies does.

        Arrays and objects are copied before ``submit`` returns. ``Data`` is not copied: changing it waits for the calls
        that read it, unless it is changed through an array that was taken from ``.data`` before. A call that uses
        shared variables is never in flight together with others: ``submit`` waits until the assignments of the call
        before have taken effect.

        Parameters
        ----------
        batch, num_slices, output_subset
            As for a call.
        timeout : float, optional
            Seconds from now until ``CallTimeout``, including the time spent waiting for earlier calls.

        Returns
        -------
        PendingCall

        Raises
        ------
        TypeError, ValueError, IndexError
            For wrong input, at once. ``result()`` raises the errors of the call itself. A function with ``retry``,
            ``on_oom`` or ``reproducible`` cannot be submitted, nor streamed.
        """
        options = call_options(batch, num_slices, output_subset, timeout, is_submitted=True)
        is_checked = self._op_check is None or not self._op_check.may_be_due(args)
        release = None if is_checked and not self._is_new else self._begin(args, kwargs, options)
        return submit(self, args, kwargs, options, release)

    @verb
    def stream(self, batches: Iterable[Any], *, progress: bool = False) -> Iterator[R]:
        """Call the function for each batch of an iterable, and return an iterator over the results, in order.

        Calls are submitted ahead: while you work with a result, the workers compute the next batch, and the batch after
        it is being sent. At most three batches are ahead of you, so the iterable may be endless.

        Parameters
        ----------
        batches : iterable
            A tuple or a list, as a data loader returns it, holds the arguments of a call. Anything else (an array, a
            dict) is the only argument.
        progress : bool
            Whether to show a progress bar, by tqdm (``pip install "synkhronos[progress]"``).

        Returns
        -------
        iterator
            The results. The work begins when you ask for the first. An exception, of a call or of the iterable, comes
            after the results before it and ends the iterator. A note names the batch.

        Raises
        ------
        TypeError
            If ``batches`` is not an iterable.
        ModuleNotFoundError
            With ``progress``, if tqdm is not installed.

        Examples
        --------
        >>> import numpy as np, synk
        >>> with synk.fork(2):
        ...     total = synk.function(lambda x: x.sum(), outputs="sum")
        ...     [int(value) for value in total.stream(np.full(4, k) for k in range(3))]
        [0, 4, 8]
        """
        return self._streamed(self.submit, batches, progress)

    @verb
    def _streamed(self, submit: Callable[..., Any], batches: Iterable[Any], progress: bool) -> Iterator[Any]:
        """Do what :meth:`stream` does, by the ``submit`` of this function or of an object that wraps it."""
        from synk._api.mapping import progress_bar, with_progress
        from synk._api.stream import arguments, stream

        refuse_inside_worker(f"stream {self.__name__!r}")
        if not isinstance(batches, Iterable):
            raise TypeError(
                f"cannot stream {self.__name__!r}: got {type(batches).__name__}, expected an iterable of batches."
            )
        results = stream(lambda batch: submit(*arguments(batch)), self.__name__, iter(batches))
        if progress:
            results = with_progress(results, progress_bar(self.__name__, length_of(batches)))
        return Results.of(([result] for result in results), "synk.Function.stream", self.__name__)

    def _run_checked(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        run: Callable[[tuple[Any, ...], dict[str, Any], CallOptions], Any] | None = None,
    ) -> Any:
        """Run a call, and hold its result back until the default op is known to fit."""
        release = self._begin(args, kwargs, options)
        result = (run or self._run)(args, kwargs, options)
        if release is not None:
            release(result)
        return result

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Release | None:
        """Return what a call that begins now must do with its result before it is given out; None for nothing."""
        release = self._hold_back(args, kwargs, options)
        return verifying(self, args, kwargs, options, release) if self._is_new else release

    def _hold_back(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Release | None:
        """Return what it must do because of the default op."""
        return hold_back(self, args, kwargs, options)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Any:
        """Run a call whatever its default op."""
        return run(self, args, kwargs, options)

    def _renewed(self) -> Function:
        """Return the function to call: this one, prepared for its present captures, or the one that replaced it."""
        successor = self._callee.renew()
        return successor if isinstance(successor, Function) else self

    def _bound_session(self) -> Session:
        """Return the session to use: that of the runtime that made the function, else that of the current runtime."""
        callee = self._callee
        if callee.fixed_session is not None:
            return callee.fixed_session
        refuse_inside_worker(self._verb)
        if callee.session is not None and not callee.session.is_closed:
            return callee.session
        return current_session()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # This is called for a decorator on a method. The instance would become a broadcast argument, which is rarely
        # meant.
        if instance is None:
            return self
        raise TypeError(
            f"cannot use {self.__name__!r} as a method: build it from the bound method, as in "
            "self.step = synk.function(self._step)."
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle the synk function {self.__name__!r}: it belongs to a runtime. To store or move it, pickle "
            f"a program: synk.Program({_argument(self.__name__)}={_argument(self.__name__)})."
        )

    def __repr__(self) -> str:
        return f"<synk.Function {self.__name__!r} outputs={self.outputs!r}>"


def _argument(name: str) -> str:
    return name if name.isidentifier() else "f"
