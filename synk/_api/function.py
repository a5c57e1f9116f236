"""``Function``: what the user calls. Checks the options and runs the verbs; what calls know of it is its ``Callee``.

In one file because it is one class: all that can be done with a function, each verb a few lines.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, overload

from synk._api.options import (
    FRAMEWORKS,
    check_changes,
    check_function,
    check_retry,
    check_slices,
    check_subset,
    check_updates,
    one_per_input,
    partial_name,
)
from synk._api.plain import PlainCall
from synk._api.stream import arguments, blocks, check_batch_size, stream, with_progress
from synk._api.verify import Report, verify
from synk._master.calls.call import UNFIT, CallOptions, call_again, run_call
from synk._master.calls.callee import Callee, FunctionHandle
from synk._master.flight.pending import PendingCall
from synk._master.objects.data import Data, make_data
from synk._master.session import Session, current_session
from synk._pure.comparison import Tolerance
from synk._pure.interrupts import as_operation, operation
from synk._pure.limits import check_timeout
from synk._pure.output_ops import DEFAULT_OP
from synk._pure.show import table
from synk._pure.tracebacks import outline
from synk._wire.cell import refuse_inside_worker
from synk._wire.control import Traits
from synk.errors import WorkerDied

P = ParamSpec("P")
"""The parameters of the user's function."""


class Function(FunctionHandle, Generic[P]):
    """A function that runs on all workers as one call. Made by :func:`synk.function`.

    Call it like the function it was made from. Each argument is scattered along axis 0 unless it is named in
    ``bcast_inputs``: an array, or a dict, tuple, named tuple or dataclass of arrays with as many rows, of which the
    function gets the same nesting with the rows of its rank. The outputs are combined by their ops. The keyword
    arguments below are synk's own; a parameter of the same name can be passed by position.

    Parameters
    ----------
    batch : int, slice, sequence of int or bool mask, optional
        The rows of the scattered inputs to use, chosen before they are split: the first n, a slice, an index list (in
        its order), or a mask.
    shard_batch : slice, sequence, or one per rank, optional
        Which of the rows a rank holds of its sharded variables. ``batch`` picks as many of the other inputs then.
    num_slices : int
        Each rank calls the function on that many parts of its rows and accumulates: less memory, the same result.
    output_subset : sequence, optional
        Positions (or keys) of the outputs wanted; the others are neither reduced nor sent.
    timeout : float, optional
        Seconds until ``CallTimeout``; the runtime's default where it is not given.

    Raises
    ------
    TypeError, ValueError, IndexError
        For wrong input, before anything is sent.
    Exception
        What the function raised on the lowest failing rank, with a ``RemoteError`` as its cause.
    StaleCaptureError
        If something that the function captured, and that is too large to be compared at each call, was changed in place
        and earlier calls may have used its old contents. The next call uses the new ones.
    WorkerDied, CallTimeout, CollectiveMismatch, SerializationError, ClosedError

    Warns
    -----
    StaleCaptureWarning
        If a captured object that is compared when there is time is pickled otherwise than when it was sent.

    Notes
    -----
    The function computes with what the objects that it captured hold in the program at the moment of the call, also
    where they were changed in place, except for what only the rank has changed.
    """

    _known = Traits(0)  # what it does that means the same in a serial call

    @as_operation
    def __init__(
        self,
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
        session: Session | None = None,
    ) -> None:
        check_function(fn)
        name = name or getattr(fn, "__name__", None) or partial_name(fn) or type(fn).__name__
        check_updates(updates, name)
        if framework not in FRAMEWORKS:
            raise ValueError(f"cannot build {name!r}: got framework={framework!r}, expected one of {FRAMEWORKS}.")
        if not isinstance(per_rank, bool):
            raise TypeError(f"cannot build {name!r}: got per_rank={per_rank!r}, expected True or False.")
        updates = tuple(updates) if isinstance(updates, (tuple, list)) else (updates,)
        changes = check_changes(changes, name)
        self._retry = check_retry(retry, updates, changes, name)
        self._callee = Callee(
            fn,
            name,
            bcast_inputs=bcast_inputs,
            outputs=outputs,
            updates=updates,
            changes=changes,
            framework=framework,
            per_rank=per_rank,
            session=session,
        )
        self._verb = f"call {name!r}"
        functools.update_wrapper(self, fn, updated=())

    @property
    def name(self) -> str:
        """What errors and profiles call it."""
        return self._callee.name

    @property
    def outputs(self) -> Any:
        """The ops of its outputs."""
        return self._callee.outputs

    # -- calling ------------------------------------------------------------------------------------------------------

    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any: ...

    @overload
    def __call__(
        self,
        /,
        *args: Any,
        batch: Any = None,
        shard_batch: Any = None,
        num_slices: int = 1,
        output_subset: Any = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any: ...

    def __call__(  # type: ignore[misc]  # a keyword-only parameter of one of these names is refused by Signature
        self,
        /,
        *args: Any,
        batch: Any = None,
        shard_batch: Any = None,
        num_slices: int = 1,
        output_subset: Any = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        has_looked = False
        try:
            if output_subset is None and timeout is None and type(num_slices) is int and num_slices == 1:
                callee = self._callee
                compiled, capture, session = callee.plans.compiled[0], callee.capture, callee.session
                if compiled is not None and session and capture and capture.is_current() and not self._retry:
                    result = call_again(session, callee, compiled, args, kwargs, batch, shard_batch)
                    if result is not UNFIT:
                        return result
                    has_looked = True
            with operation():
                options = CallOptions(
                    batch, shard_batch, check_slices(num_slices), check_subset(output_subset), check_timeout(timeout)
                )
                return self._run(args, kwargs, options, has_looked)
        except Exception as error:
            __tracebackhide__ = True
            outline(error)
            raise error

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

        Sharded variables are whole there, those that the function closes over too; these it cannot assign. All that the
        function captured is compared in full before.
        """
        options = CallOptions(
            batch, None, check_slices(num_slices), check_subset(output_subset), check_timeout(timeout), is_serial=True
        )
        try:
            with operation():
                self._callee.check_all()
                return self._run(args, kwargs, options)
        except Exception as error:
            __tracebackhide__ = True
            outline(error)
            raise error

    def refresh(self) -> None:
        """Have the next call compare all that the function captured in full, and use what is there then.

        Needed only after a change of something that is not compared in full at each call: a few elements of an array
        above 64 KB, an element of a collection beyond 1000 elements, an object that is slow to pickle. Without it the
        change is found later, and told by a :class:`~synk.errors.StaleCaptureError` or a
        :class:`~synk.errors.StaleCaptureWarning`.

        Examples
        --------
        >>> import numpy as np, synk
        >>> with synk.fork(2):
        ...     table = np.zeros(100_000)
        ...     shifted = synk.function(lambda x: x + table[17], outputs="gather")
        ...     before = shifted(np.zeros(2))
        ...     table[17] = 5.0
        ...     shifted.refresh()
        ...     shifted(np.zeros(2))
        array([5., 5.])
        """
        self._callee.refresh()

    @as_operation
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
        """Compare the call in parallel with the serial one, and this with the plain function, for each output.

        The serial call says whether the op of an output fits the function. But it computes with whatever the workers
        hold, so the plain function is called, too: in the program, on what was passed. It gets ``Data`` and lists of
        numbers as arrays, the rows that ``batch`` picks, and tensors where the function has a ``framework``.

        Nothing of these runs is kept: shared variables hold what they held, and each run gets a copy of what the
        function captured, with the generators of random numbers as they were. What it prints is dropped. What it does
        outside of the process, or to modules that it imports, is not undone.

        Parameters
        ----------
        *args, **kwargs
            As for a call, with enough rows for more than one rank: on one worker everything is equal.
        rtol, atol : float, optional
            How far from the serial value is equal, as in `numpy.allclose`. By default what rounding can do: the square
            root of the dtype's precision, for ``atol`` times the largest serial value.
        batch, num_slices, timeout
            As for a call; ``timeout`` for each of the runs on the workers, of which there are four.

        Returns
        -------
        Report
            True where all outputs, and the shared variables that the call assigns on CPU workers, equal the serial
            ones, the serial outputs equal those of the plain function, and the workers hold nothing of the function
            that is out of date. It prints as a table, with the ops that would have matched. A function that draws
            random numbers or talks through ``synk.comm`` is named as such, where its values differ.

        Raises
        ------
        SerializationError
            If what the function captured cannot be copied.
        Exception
            What the call raises, but for errors that say that its outputs cannot be combined: these are reported.

        Notes
        -----
        The plain function is left out, and a note in the report says why, where it means something else in the program
        or cannot be called there: it uses ``synk.comm``, shared variables or resident objects, draws random numbers, is
        built with ``per_rank=True`` or runs on devices; it and its arguments cannot be copied, or need more than half
        of the free memory; or its serial call takes more than 10 s. What it raises and the serial call does not is a
        difference.

        Examples
        --------
        >>> import numpy as np, synk
        >>> with synk.fork(2):
        ...     total = synk.function(lambda x: x.sum(), name="total")
        ...     total.verify(np.arange(6.0))
        'total' against the plain function and its serial call:
        output  op   equals serial  equals plain  largest difference  would match
        result  avg  NO             yes           7.5e+00             sum
        """
        stale = self._callee.doubts()  # first: here it is no error
        function = self._renewed()
        callee = function._callee
        options = CallOptions(batch, None, check_slices(num_slices), None, check_timeout(timeout), is_trial=True)
        without_draws = self._without_draws()
        return verify(
            self.name,
            self.outputs,
            lambda changed: function._run(args, kwargs, changed),
            options,
            Tolerance(rtol, atol),
            PlainCall(callee, args, kwargs, batch),
            is_per_rank=callee.per_rank,
            stale=stale,
            unknown=callee.uncompared,
            known=self._known,
            without_draws=None if without_draws is None else lambda changed: without_draws._run(args, kwargs, changed),
        )

    def _without_draws(self) -> Function[...] | None:
        """Return what to compare instead of a function that draws random numbers, where there is such a thing."""
        return None

    def submit(
        self,
        /,
        *args: Any,
        batch: Any = None,
        shard_batch: Any = None,
        num_slices: int = 1,
        output_subset: Any = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> PendingCall:
        """Send the call and return without waiting for it; ``result()`` of what is returned waits.

        Three calls can be under way: one runs, the inputs of the next are brought to the devices meanwhile, and one
        waits. A fourth ``submit`` first waits for the oldest, and so do all other operations of the runtime for all of
        them. Calls run in the order in which they were submitted, each rank going on with the next one as soon as it
        has finished its own part; a call that fails does not stop those behind it, a worker that dies does.

        Arrays and objects are copied before ``submit`` returns. ``Data`` is not: to change it waits for the calls that
        read it, unless it is changed through an array that was taken from ``.data`` before. Calls that use shared
        variables are never under way together with others: ``submit`` waits until the assignments of the one before
        hold.

        Parameters
        ----------
        batch, shard_batch, num_slices, output_subset
            As for a call.
        timeout : float, optional
            Seconds from now until ``CallTimeout``; the calls before it count.

        Returns
        -------
        PendingCall

        Raises
        ------
        TypeError, ValueError, IndexError
            For wrong input, at once. What the call itself raises comes from ``result()``.
        StaleCaptureError
            As of a call, at once.
        """
        if self._retry:
            raise ValueError(
                f"cannot submit {self.name!r}: it was built with retry={self._retry}, and a submitted call is never "
                "run again. Call it, or build it without retry."
            )
        with operation():
            has_looked = False
            if output_subset is None and timeout is None and type(num_slices) is int and num_slices == 1:
                callee = self._callee
                session, capture = callee.session, callee.capture
                if session is not None and capture is not None and capture.is_current():
                    has_looked = True
                    pending: PendingCall | None = session.queue.submit_again(callee, args, kwargs, batch, shard_batch)
                    if pending is not None:
                        return pending
            function = self if has_looked else self._renewed()
            session = function._bound_session()
            subset, limit = check_subset(output_subset), check_timeout(timeout)
            options = CallOptions(batch, shard_batch, check_slices(num_slices), subset, limit, is_submitted=True)
            with session.entered(f"submit {self.name!r}"):
                return session.queue.submit(function._callee, args, kwargs, options, session.deadline(options.timeout))

    def stream(self, batches: Iterable[Any], *, progress: bool = False) -> Iterator[Any]:
        """Call the function for each batch of an iterable, and return an iterator over the results, in order.

        Calls are submitted ahead: while you work with a result the workers are at the next batch, and the one after it
        is on its way. At most three batches are ahead of you, so the iterable may be endless.

        Parameters
        ----------
        batches : iterable
            A tuple or a list, as a data loader gives it, holds the arguments of a call; anything else (an array, a
            dict) is the one argument.
        progress : bool
            Show a bar, by tqdm (``pip install "synkhronos[progress]"``).

        Returns
        -------
        iterator
            Raises, behind the results before it, what a call or the iterable raised, with a note that names the batch.
            Work begins with the first result that is asked for.

        Examples
        --------
        >>> import numpy as np, synk
        >>> with synk.fork(2):
        ...     total = synk.function(lambda x: x.sum(), outputs="sum")
        ...     [int(value) for value in total.stream(np.full(4, k) for k in range(3))]
        [0, 4, 8]
        """
        refuse_inside_worker(f"stream {self.name!r}")
        if not isinstance(batches, Iterable):
            raise TypeError(
                f"cannot stream {self.name!r}: got {type(batches).__name__}, expected an iterable of batches."
            )
        results = stream(lambda batch: self.submit(*arguments(batch)), self.name, iter(batches))
        return with_progress(results, self.name, operator.length_hint(batches)) if progress else results

    @as_operation
    def rows(self, /, *args: Any, batch_size: int, progress: bool = False, **kwargs: Any) -> Iterator[Any]:
        """Call the function for consecutive blocks of rows, and return an iterator over the results, in order.

        For arrays that are too large for one call, as memory-mapped files: no more than three blocks are in memory. The
        calls are submitted ahead, as by :meth:`stream`.

        Parameters
        ----------
        *args, **kwargs
            As for a call. Scattered arguments have one number of rows; what is broadcast is passed whole to each call.
        batch_size : int
            Rows in a block; the last one may have fewer.
        progress : bool
            As for :meth:`stream`.

        Examples
        --------
        >>> import numpy as np, synk
        >>> with synk.fork(2):
        ...     total = synk.function(lambda x: x.sum(), outputs="sum")
        ...     [float(value) for value in total.rows(np.arange(10.0), batch_size=4)]
        [6.0, 22.0, 17.0]
        """
        refuse_inside_worker(f"stream {self.name!r}")
        size = check_batch_size(batch_size, self.name)
        num_blocks, calls = blocks(self._callee.signature.bind(args, kwargs), size, self.name)
        results = stream(lambda call: self.submit(*call[0], batch=call[2], **call[1]), self.name, calls)
        return with_progress(results, self.name, num_blocks) if progress else results

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions, has_looked: bool = False
    ) -> Any:
        """Run a call that fits no compiled one; ``has_looked``: what the function captured has just been compared."""
        function = self if has_looked else self._renewed()
        if function is not self:
            return function._run(args, kwargs, options)
        session = self._bound_session()
        deadline = session.deadline(options.timeout)
        for attempts_left in range(self._retry, -1, -1):
            with session.entered(self._verb):
                session.begin(self._verb, deadline)
                try:
                    return run_call(session, self._callee, args, kwargs, options, deadline)
                except WorkerDied:
                    if not attempts_left:
                        raise
        raise AssertionError("the last attempt returns or raises")

    def _renewed(self) -> Function:
        """Return the function to call: this one, with what its code names now, or the one that took its place."""
        successor = self._callee.renew()
        return successor if isinstance(successor, Function) else self

    def _bound_session(self) -> Session:
        """Return that of the runtime to use: the one the function was made with, else the current one."""
        callee = self._callee
        if callee.fixed_session is not None:
            return callee.fixed_session
        refuse_inside_worker(self._verb)
        if callee.session is not None and not callee.session.is_closed:
            return callee.session
        return current_session()

    def build_inputs(
        self, *arrays: Any, minibatch: Any = False, name: Any = None, dtype: Any = None
    ) -> tuple[Data, ...]:
        """Return one :class:`synk.Data` per array, for the parameters in order.

        Parameters
        ----------
        *arrays : array-like
        minibatch, name, dtype
            As for :func:`synk.data`: one for all, or a list or tuple with one for each array.

        Raises
        ------
        ValueError
            If a list has another length.
        """
        session = self._bound_session()
        options = {"minibatch": minibatch, "name": name, "dtype": dtype}
        each = one_per_input(options, len(arrays), self.name)
        return tuple(make_data(session, array, **own) for array, own in zip(arrays, each))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # As a decorator on a method: the instance becomes a broadcast argument, which is rarely meant.
        if instance is None:
            return self
        raise TypeError(
            f"cannot use {self.name!r} as a method: build it from the bound method, as in "
            "self.step = synk.function(self._step)."
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle the synk function {self.name!r}: a function on the workers cannot call another one there. "
            "Call the plain function instead."
        )

    def __repr__(self) -> str:
        return f"<synk.Function {self.name!r} outputs={self.outputs!r}>"

    def _repr_html_(self) -> str:
        callee = self._callee
        signature = callee.signature
        rows = [
            ("divided by rows", ", ".join(name for name in signature.names if name not in signature.broadcast)),
            ("whole to every rank", ", ".join(name for name in signature.names if name in signature.broadcast)),
            ("outputs", self.outputs if isinstance(self.outputs, str) else repr(self.outputs)),
            ("framework", callee.framework or ""),
            ("changes", ", ".join(resident.name for resident in callee.changes)),
            ("per_rank", callee.per_rank or ""),
        ]
        return table(f"synk.Function {self.name}", [(head, text) for head, text in rows if text])
