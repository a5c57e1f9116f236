"""``Function``: what the user calls. Binds a Python function, its ops and its options; the runtime does the rest.

In one file because half of it is the text of the page that a user reads on the class.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, overload

from synk._api.captured import Changes, Referred, check_captured, referred_by
from synk._api.data import Data, make_data
from synk._api.options import (
    FRAMEWORKS,
    check_changes,
    check_retry,
    check_slices,
    check_subset,
    check_updates,
    partial_name,
)
from synk._api.verify import Report, Tolerance, verify
from synk._master.call import CallOptions
from synk._master.ordinary import run_call
from synk._master.pending import PendingCall
from synk._master.plans import PlanCache
from synk._master.quiet import NOT_QUIET
from synk._master.resident import check_owner as check_owner_of_resident
from synk._master.row_shapes import RowShapes
from synk._master.session import Session, current_session
from synk._master.signature import Signature
from synk._master.variable import check_owner
from synk._master.watch import Watch, is_users_module, watch
from synk._pure.interrupts import deferred
from synk._pure.limits import check_timeout
from synk._pure.ops import check_outputs
from synk._wire.cell import refuse_inside_worker
from synk.errors import WorkerDied

P = ParamSpec("P")
"""The parameters of the user's function."""

_waiting: weakref.WeakKeyDictionary[Function[...], None] = weakref.WeakKeyDictionary()  # in the order they were made
_waiting_lock = threading.Lock()


class Function(Generic[P]):
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
        Which of the rows a rank holds of its sharded variables.
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
    WorkerDied, CallTimeout, CollectiveMismatch, SerializationError, ClosedError
    """

    def __init__(
        self,
        fn: Callable[P, Any],
        *,
        bcast_inputs: str | Sequence[str] = (),
        outputs: Any = "avg",
        updates: Any = (),
        changes: Any = (),
        framework: str | None = None,
        name: str | None = None,
        retry: int = 0,
        per_rank: bool = False,
        session: Session | None = None,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"cannot build a function: got {type(fn).__name__}, expected a callable.")
        self.name = name or getattr(fn, "__name__", None) or partial_name(fn) or type(fn).__name__
        check_outputs(outputs, repr(self.name))
        check_updates(updates, self.name)
        if framework not in FRAMEWORKS:
            raise ValueError(f"cannot build {self.name!r}: got framework={framework!r}, expected one of {FRAMEWORKS}.")
        self._fn = fn
        self._bcast_inputs = bcast_inputs
        self.signature = Signature(fn, bcast_inputs, self.name)
        self.outputs = outputs
        self.updates = tuple(updates) if isinstance(updates, (tuple, list)) else (updates,)
        self._changed = check_changes(changes, self.name)
        self.changes = tuple(resident._resident for resident in self._changed)
        self.framework = framework
        self.id = -1  # given by the session whose workers have it
        self._verb = f"call {self.name!r}"
        self._retry = check_retry(retry, self.updates, self.changes, self.name)
        if not isinstance(per_rank, bool):
            raise TypeError(f"cannot build {self.name!r}: got per_rank={per_rank!r}, expected True or False.")
        self.per_rank = per_rank
        self._fixed_session = session
        self._session: Session | None = None
        self.row_shapes = RowShapes(self.name)
        self.plans = PlanCache()
        self.is_stale = False
        self._code = getattr(fn, "__code__", None)
        self._home: tuple[dict[str, Any], str] | None = None  # the user's module that holds it, and its name there
        self._watch: Watch | None = None  # over what the workers have been told
        self._changes = Changes(self.name)
        self._modules: tuple[Any, ...] = ()
        captured = check_captured(self.name, self.options)
        (self.variables, self.residents), self._modules = captured.referred, captured.modules
        functools.update_wrapper(self, fn, updated=())
        _waiting[self] = None

    @property
    def options(self) -> dict[str, Any]:
        """What a worker needs to run the function."""
        return {
            "fn": self._fn,
            "name": self.name,
            "outputs": self.outputs,
            "framework": self.framework,
            "updates": self.updates,
            "changes": self._changed,
            "modules": self._modules,
        }

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
        if output_subset is None and timeout is None and type(num_slices) is int and num_slices == 1:
            quiet, watched = self.plans.quiet[0], self._watch
            if quiet is not None and watched is not None and watched.is_current() and not self._retry:
                result = quiet.run(self._session, self, args, kwargs, batch, shard_batch)
                if result is not NOT_QUIET:
                    return result
        options = CallOptions(
            batch, shard_batch, check_slices(num_slices), check_subset(output_subset), check_timeout(timeout)
        )
        return self._run(args, kwargs, options)

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

        Sharded variables are whole there, those that the function closes over too; these it cannot assign.
        """
        options = CallOptions(
            batch, None, check_slices(num_slices), check_subset(output_subset), check_timeout(timeout), is_serial=True
        )
        return self._run(args, kwargs, options)

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
        """Run the call in parallel and serially and report, for each output, whether its op fits the function.

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
            As for a call; ``timeout`` for each of the runs, of which there are four.

        Returns
        -------
        Report
            True where all outputs, and the shared variables that the call assigns on CPU workers, equal the serial
            ones. It prints as a table, with the ops that would have matched. A function that draws random numbers or
            talks through ``synk.comm`` is named as such, where its values differ.

        Raises
        ------
        SerializationError
            If what the function captured cannot be copied.
        Exception
            What the call raises, but for errors that say that its outputs cannot be combined: these are reported.

        Examples
        --------
        >>> import numpy as np, synk
        >>> with synk.fork(2):
        ...     total = synk.function(lambda x: x.sum(), name="total")
        ...     total.verify(np.arange(6.0))
        'total' against its serial call:
        output  op   equals serial  largest difference  would match
        result  avg  NO             7.5e+00             sum
        """
        options = CallOptions(batch, None, check_slices(num_slices), None, check_timeout(timeout), is_trial=True)
        return verify(
            self.name,
            self.outputs,
            lambda changed: self._run(args, kwargs, changed),
            options,
            Tolerance(rtol, atol),
            is_per_rank=self.per_rank,
            is_outdated=self._is_stale_inside(),
        )

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
        """
        if self._retry:
            raise ValueError(
                f"cannot submit {self.name!r}: it was built with retry={self._retry}, and a submitted call is never "
                "run again. Call it, or build it without retry."
            )
        if output_subset is None and timeout is None and type(num_slices) is int and num_slices == 1:
            session, watched = self._session, self._watch
            if session is not None and watched is not None and watched.is_current():
                pending: PendingCall | None = session.queue.submit_quietly(self, args, kwargs, batch, shard_batch)
                if pending is not None:
                    return pending
        function = self._renewed()
        session = function._bound_session()
        options = CallOptions(
            batch, shard_batch, check_slices(num_slices), check_subset(output_subset), check_timeout(timeout)
        )
        with session.entered(f"submit {self.name!r}"):
            return session.queue.submit(function, args, kwargs, options, session.deadline(options.timeout))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Any:
        if self._watch is not None and not self._watch.is_current() and (renewed := self._renewed()) is not self:
            return renewed._run(args, kwargs, options)
        session = self._bound_session()
        deadline = session.deadline(options.timeout)
        for attempts_left in range(self._retry, -1, -1):
            with session.entered(self._verb):
                session.begin(self._verb, deadline)
                try:
                    return run_call(session, self, args, kwargs, options, deadline)
                except WorkerDied:
                    if not attempts_left:
                        raise
        raise AssertionError("the last attempt returns or raises")

    def load(self, session: Session, deadline: float | None) -> None:
        """See that the workers have this function."""
        if self._session is not session or self.is_stale:
            distribute_functions(session, [self], deadline=deadline)
        else:
            session.functions.ensure_loaded(deadline)

    def _bound_session(self) -> Session:
        """Return that of the runtime to use: the one the function was made with, else the current one."""
        if self._fixed_session is not None:
            return self._fixed_session
        refuse_inside_worker(f"call {self.name!r}")
        if self._session is not None and not self._session.is_closed:
            return self._session
        return current_session()

    def build_inputs(self, *arrays: Any, minibatch: bool = False) -> tuple[Data, ...]:
        """Return one :class:`synk.Data` per array, for the parameters in order."""
        session = self._bound_session()
        return tuple(make_data(session, array, minibatch=minibatch) for array in arrays)

    # -- life ---------------------------------------------------------------------------------------------------------

    def _bind_to(self, session: Session, watch: Watch, referred: Referred) -> None:
        is_new = self._session is not session
        if self._session is not None and is_new:
            self.plans = PlanCache()
        self._session = session
        self._watch, self.is_stale = watch, False
        self.variables, self.residents = referred
        session.functions.bound.add(self)
        _waiting.pop(self, None)
        if is_new:
            dropped = weakref.finalize(self, session.functions.dropped.append, (self.id, self.plans))
            dropped.atexit = False  # the user's own exit handlers may still call it

    def forget_sent(self) -> None:
        """The runtime is closed: let go of what was compared with what its workers had."""
        self.plans.forget()
        self._watch = None

    def _renewed(self) -> Function:
        """Return the function to call: this one, with what its code names now, or the one that took its place.

        A module that is reloaded makes its functions anew, and its name in the module tells which one is meant.
        """
        if self._watch is None or self._watch.is_current():
            return self
        home = self._home
        successor = home[0].get(home[1]) if home is not None else None
        if isinstance(successor, Function) and successor is not self:
            return successor
        fn = successor if isinstance(successor, types.FunctionType) else self._fn
        if fn is not self._fn or getattr(fn, "__code__", None) is not self._code:
            self.signature = Signature(fn, self._bcast_inputs, self.name)
            self.plans.forget_quiet()
            self._fn, self._code = fn, getattr(fn, "__code__", None)
        self.is_stale = True
        return self

    def _look(self) -> Watch:
        """Return a watch over what the function names now."""
        if self._home is None:
            self._home = _home_of(self, self._fn)
        home = self._home
        return watch(self._fn, [] if home is None else [(home[0].get, home[1], home[0].get(home[1]))])

    def _is_stale_inside(self) -> bool:
        """Whether an object that the function captures was changed in place since the workers were told of it.

        Compares the elements of arrays, lists and sets, keys of dicts and attributes, at any depth. What a new
        definition of the function, or ``Runtime.restart``, would send.
        """
        return self._session is not None and self._session.functions.book.is_changed_inside(self.id)

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


def _home_of(function: Function, fn: Any) -> tuple[dict[str, Any], str] | None:
    """Return the namespace and the name under which a module of the user's holds a function, decorated or not."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    if not isinstance(module, str) or not is_users_module(module):
        return None
    table = vars(sys.modules[module])
    return (table, name) if table.get(name) in (function, fn) else None


def distribute_functions(session: Session, only: Sequence[Function] | None = None, *, deadline: float | None) -> None:
    """Pickle the functions that the workers do not have yet, together, and load them on all workers."""
    with _waiting_lock:
        candidates = list(_waiting if only is None else only)
    functions = [
        f for f in candidates if f._fixed_session in (None, session) and (f._session is not session or f.is_stale)
    ]
    session.functions.ensure_loaded(deadline)
    if not functions:
        return
    names = ", ".join(repr(function.name) for function in functions)
    watches = [function._look() for function in functions]
    referred = [referred_by(function.name, function.options, watched) for function, watched in zip(functions, watches)]
    for variables, residents in referred:
        for variable in variables:
            check_owner(variable, session.variables, names)
        for resident in residents:
            check_owner_of_resident(resident, session.residents, names)
    for function in functions:
        if function._session is not session:
            function.id = next(session.functions.ids)
    orders = [(f.id, f._fn, f.options, watched) for f, watched in zip(functions, watches)]
    for function in functions:
        if function._session is session and not session.functions.book.has(function.id, function._fn):
            function.plans.drop_all(session.workers)  # workers plan with the function that they have
    sent = session.functions.bring(orders, names, deadline)
    for function, watched, own in zip(functions, watches, referred):
        with deferred():  # what is on the workers must be dropped there some day
            function._bind_to(session, watched, own)
    if len(functions) == 1:
        functions[0]._changes.note(sent, session.counters["calls"])
