"""The runtime that the user holds. Its verbs use a session of the program.

In one file because it is one class: everything that can be done with a runtime, each verb a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy.typing as npt

from synk._api.build import Decorator, KeepingDecorator, build_function
from synk._api.first_calls import verified
from synk._api.function import Function, P
from synk._api.options import KeptOptions, check_on_restart, entropy_of, is_integer
from synk._engine.callee import Callee
from synk._engine.data import Data
from synk._engine.processes import Processes
from synk._engine.profile import Profile
from synk._engine.resident import Resident, make_resident
from synk._engine.session import Session, refuse_limit, watch_over
from synk._engine.shared import Shared
from synk._engine.variables import Variable
from synk._processes.placement import place
from synk._processes.program import check_program
from synk._processes.reports import stacks, where
from synk._processes.worker_process import WorkerProcess
from synk._pure.environment import check_platform
from synk._pure.files import Path
from synk._pure.limits import check_timeout
from synk._pure.tensors import num_torch_threads
from synk._pure.tracebacks import verb
from synk._pure.words import Hinting, Text
from synk._wire.cell import refuse_inside_worker
from synk.errors import ClosedError

if TYPE_CHECKING:
    from typing_extensions import Unpack


R = TypeVar("R")

watch_over()


class Runtime(Hinting):
    """A group of workers, one for each device, and the verbs to use them.

    It is made by :func:`synk.fork`, or directly if a program needs several side by side. It is a context manager that
    closes itself.

    Parameters
    ----------
    num_workers : int or None
        The number of workers. By default one for each visible GPU or, without GPUs, one for each usable CPU core.
        0 is one rank in the program itself; see :func:`synk.fork`.
    backend : str
        ``"auto"``, ``"numpy"``, ``"cupy"`` or ``"dpnp"``; see :func:`synk.fork`.
    devices : sequence or None
        The devices to use (not with ``"numpy"``). One may appear more than once.
    timeout : float or None
        Default time limit of all calls, in seconds; None means no limit.
    max_restarts : int
        How many dead workers are replaced within 60 s before the runtime closes. With 0 the first death closes it.
    on_restart : callable, optional
        Each replacement worker runs ``on_restart()`` before its first call.
    seed, cluster, nodes, check
        See :func:`synk.fork`.

    Attributes
    ----------
    world_size : int
        The number of ranks.
    backend : str
        The name of the backend, never ``"auto"``.
    devices : tuple of str
        The name of each rank's device.
    profile : Profile
        Time and bytes of the calls so far, by function.
    counters : dict of str to int
        Messages and bytes between the program and its workers since the start: ``messages_down``, ``messages_up``,
        ``bytes_down``, ``bytes_up`` (messages and bodies), ``bytes_pickled`` (arguments), ``bytes_staged`` (plain
        arrays copied into shared memory), ``calls``, ``restarts``.

    Raises
    ------
    ValueError, TypeError
        For arguments that are out of range or do not fit together.
    UnsupportedError
        If there is no such device, or an option does not work with ``cluster``.
    StartupError
        If a worker process cannot be started. If it starts and fails later, the first use of the runtime raises this.
    """

    @verb
    def __init__(
        self,
        num_workers: int | Sequence[int] | None = None,
        *,
        backend: str = "auto",
        devices: Sequence[Any] | None = None,
        timeout: float | None = None,
        max_restarts: int = 3,
        on_restart: Callable[[], Any] | None = None,
        seed: int | None = None,
        cluster: str | None = None,
        nodes: int | tuple[int, int] | None = None,
        check: bool = False,
    ) -> None:
        refuse_inside_worker("fork")
        check_platform()
        timeout = check_timeout(timeout)
        if not is_integer(max_restarts, 0):
            raise ValueError(f"cannot fork: got max_restarts={max_restarts!r}, expected an integer of 0 or more.")
        if not isinstance(check, bool):
            raise TypeError(f"cannot fork: got check={check!r}, expected True or False.")
        how: dict[str, Any] = {
            "timeout": timeout,
            "seed": entropy_of(seed),
            "max_restarts": int(max_restarts),
            "on_restart": _on_restart(on_restart),
        }
        if cluster is not None:
            from synk.cluster.forking import open_session, refuse

            refuse(cluster, backend=("numpy" if backend == "auto" else backend, "numpy"), devices=(devices, None))
            check_program()
            self._session: Session = open_session(num_workers, cluster, nodes, **how)
        elif nodes is not None:
            raise ValueError(f"cannot fork: got nodes={nodes!r} and no cluster=, expected both. Pass cluster='here'.")
        elif num_workers == 0:
            placement = place(num_workers, backend, devices)
            refuse_limit(timeout)
            from synk._engine.inline import InlineProcess  # with a rank's half

            self._session = Session(placement, process_type=InlineProcess, **how)
        else:
            placement = place(num_workers, backend, devices)
            check_program()
            self._session = Session(placement, process_type=WorkerProcess, **how)
        verified.update([self._session] * check)

    @property
    def world_size(self) -> int:
        return self._session.world_size

    @property
    def backend(self) -> str:
        return self._session.backend

    @property
    def devices(self) -> tuple[str, ...]:
        return self._session.devices

    @property
    def profile(self) -> Profile:
        return self._session.profile

    @property
    def counters(self) -> dict[str, int]:
        return self._session.counted()

    @property
    def timeout(self) -> float | None:
        """Default time limit of all calls, in seconds; None means no limit."""
        return self._session.timeout

    @timeout.setter
    @verb
    def timeout(self, timeout: float | None) -> None:
        timeout = check_timeout(timeout)
        if self._session.is_inline:
            refuse_limit(timeout)
        self._session.timeout = timeout

    @property
    def is_closed(self) -> bool:
        return self._session.is_closed

    # -- making -------------------------------------------------------------------------------------------------------

    @verb
    def data(
        self,
        value: Any = None,
        *,
        dtype: npt.DTypeLike | None = None,
        shape: Sequence[int] | int | None = None,
        ndim: int | None = None,
        force_cast: bool = False,
        oversize: float = 1.0,
        name: str | None = None,
    ) -> Data:
        """Make an array in shared memory; see :class:`synk.Data`.

        Parameters
        ----------
        value : array-like, shape (rows, *rest), optional
            The contents, which are copied. By default zeros.
        dtype, shape, ndim
            The dtype, shape and number of axes. Without a value, ``dtype`` and one of the others are needed.
        force_cast : bool
            Whether to allow a cast of ``value`` to ``dtype`` that can lose information.
        oversize : float
            The memory to take, as a factor of 1.0 to 2.0 of the array's size, so that the array can grow in place.
        name : str, optional
            The name in errors.

        Returns
        -------
        Data

        Raises
        ------
        TypeError
            For objects, masked arrays, ragged lists, and casts that lose information.
        SharedMemoryError
            If there is not enough memory.
        NotForkedError, ClosedError
            If there is no open runtime.

        Examples
        --------
        >>> import synk
        >>> with synk.fork(2):
        ...     x = synk.data([[1.0, 2.0], [3.0, 4.0]])
        ...     x[0] = 5.0
        ...     x.data.sum()
        np.float64(17.0)
        """
        self._begin_to_make("make Data")
        return Data(self._session, value, dtype, shape, ndim, force_cast, oversize, name)

    @verb
    def shared(self, value: Any, *, sharded: bool = False, name: str | None = None) -> Shared:
        """Make a variable that lives on the workers; see :class:`synk.Shared`.

        Parameters
        ----------
        value : array-like, or a nesting (tuple, list, dict) of them
            The first value. It is copied to every rank or, if ``sharded``, divided among the ranks by rows.
        sharded : bool
            Whether each rank gets a shard of the rows instead of a replica.
        name : str, optional
            The name in errors.

        Returns
        -------
        Shared

        Raises
        ------
        TypeError
            For values that are not numbers, text or records.
        SharedMemoryError
            If there is not enough memory.

        Examples
        --------
        >>> import numpy as np, synk
        >>> with synk.fork(2):
        ...     w = synk.shared(np.zeros(3))
        ...     @synk.function(outputs="sum")
        ...     def step(x):
        ...         w.value = w.value + 1
        ...         return x.sum()
        ...     step(np.ones(4))
        ...     w.value
        np.float64(4.0)
        array([1., 1., 1.])
        """
        self._begin_to_make("make a shared variable")
        return Shared(self._session, Variable(self._session.variables, value, sharded=sharded, name=name))

    def _begin_to_make(self, verb: str) -> None:
        refuse_inside_worker(verb)
        self._session.check_open(verb)
        self._session.reclaim()

    @verb
    def resident(
        self,
        obj: Any,
        *,
        name: str | None = None,
        dump: Callable[[Any], Any] | None = None,
        load: Callable[[Any, Any], None] | None = None,
    ) -> Resident:
        """Give every rank a Python object that it keeps between calls; see :class:`synk.Resident`.

        A function closes over it and uses its ``.value``, or gets the rank's object as a broadcast argument.

        Parameters
        ----------
        obj : object
            The object, copied to every rank by one pickle, so that several objects in a tuple still share their parts.
        name : str, optional
            The name in errors. By default the name of the object's class.
        dump, load : callable, optional
            How a rank takes over another rank's state: ``load(object, dump(object_of_another_rank))`` changes
            ``object`` in place. Both are sent to the workers. By default ``state_dict`` and ``load_state_dict``, if the
            object, or each object in a tuple or list, has them; else a pickle of the whole object.

        Returns
        -------
        Resident

        Raises
        ------
        SerializationError
            If the object cannot be pickled, or cannot be loaded on the workers.
        NotForkedError, ClosedError
            If there is no open runtime.

        Examples
        --------
        >>> import numpy as np, synk
        >>> with synk.fork(2):
        ...     seen = synk.resident({"rows": 0})
        ...     @synk.function(outputs="sum", updates=[seen])
        ...     def count(x):
        ...         seen.value["rows"] += synk.comm.total_rows
        ...         return len(x)
        ...     count(np.zeros(10)), count(np.zeros(7))
        ...     seen.get()
        (10, 7)
        {'rows': 17}
        """
        return make_resident(self._session, obj, name, dump, load)

    @overload
    def function(self, fn: Callable[P, R], **options: Unpack[KeptOptions]) -> Function[P, R]: ...

    @overload
    def function(self, fn: Callable[P, Any], **options: Any) -> Function[P, Any]: ...

    @overload
    def function(self, fn: None = None, **options: Unpack[KeptOptions]) -> KeepingDecorator: ...

    @overload
    def function(self, fn: None = None, **options: Any) -> Decorator: ...

    @verb
    def function(self, fn: Any = None, **options: Any) -> Any:
        """Build a :class:`synk.Function` bound to this runtime; see :func:`synk.function`."""
        self._session.check_open("build a function")
        return build_function(fn, options, self._session)

    @verb
    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        batch_size: int | None = None,
        ordered: bool = True,
        progress: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        item_timeout: float | None = None,
        max_tasks_per_worker: int | None = None,
        max_worker_memory: int | None = None,
        journal: Path | None = None,
        key: Callable[[Any], Any] | None = None,
        version: str | int | None = None,
    ) -> Iterator[R]:
        """Return an iterator over the results of ``fn`` for each item. Workers get new items as they become free.

        Use it for work that comes in items: files, parameter sets, starting points. For rows of arrays use
        :func:`synk.function`. ``from synk import *`` leaves it out, because it would hide the built-in ``map``.

        Parameters
        ----------
        fn : callable
            A plain function of one item, or of one item from each iterable. It runs for each item on one worker alone:
            ``synk.comm`` has no meaning there, and shared variables (replicated ones) can be read but not assigned.
        *iterables : iterable
            The items, objects that can be pickled. They are taken as workers need them, so an iterable may be endless.
            The shortest iterable ends the map, as in the built-in ``map``.
        batch_size : int, optional
            The number of items to send to a worker at a time. By default a share of a list at first, one of any other
            iterable, then as many as take about 20 ms; a worker returns those that it has not begun by then.
        ordered : bool
            Whether results come in the order of the items. Otherwise they come as soon as they are there.
        progress : bool
            Whether to show a progress bar, by tqdm (``pip install "synkhronos[progress]"``), with a summary at the end.
        on_error : {"raise", "return"}
            What an item that fails does: it ends the map, or gives a :class:`synk.ItemError` in its place and the
            others go on. An item fails if ``fn`` raises, if it kills its worker, or if its time is over; it is not
            tried again. With ``"return"`` deaths do not count for ``max_restarts``, but as many deaths in a row end the
            map.
        item_timeout : float, optional
            Seconds that one item may take, from when its worker begins with it. The worker is interrupted then, and
            replaced if that does not help. Other items that were sent together with it run once more, as after the
            death of a worker with ``on_error="return"``: if none may run twice, pass ``batch_size=1``.
        max_tasks_per_worker : int, optional
            A worker is replaced after so many items. The others go on meanwhile.
        max_worker_memory : int, optional
            A worker is replaced, between items, when its memory, shared memory not counted, exceeds so many bytes.
        journal : path-like, optional
            A file to which each result is written as soon as it is there. A later map of the same function over the
            same items reads those results from the file and computes the rest; items that failed are tried again. A
            program that is killed at any moment loses only the items that were running. Results are pickled, at most 1
            GB each: open only your own files.
        key : callable, optional
            A function of an item (the tuple of arguments, for several iterables) that returns a name for it. The
            journal compares the names of items whose pickles differ from run to run.
        version : str or int, optional
            The journal compares it instead of the function and what that captures. Change it when you change the
            function.

        Returns
        -------
        iterator
            The results. The work begins when you ask for the first. At most about four chunks of items for each worker
            are ahead of you, so memory is bounded. Dropping the iterator ends the items in flight.

        Raises
        ------
        TypeError, ValueError, SerializationError
            For a function or an option that does not fit, at once. For a journal of another function, which says what
            has changed, and for a function that cannot be compared between two runs of the program.
        Exception
            From the iterator, after the results of the items before it: the exception of ``fn``, with a note that names
            the item and a ``RemoteError`` as its cause; the exception of the iterable; ``SerializationError`` for an
            item that cannot be pickled; ``WorkerDied`` and ``CallTimeout`` (the runtime's ``timeout``, for each chunk
            of items). The exception ends the map.

        Notes
        -----
        You may make other calls between two results: they wait for the items that are running. Arrays of 1 MB and more
        in an item arrive read-only. An array that is in many items is sent to the workers once, as long as its contents
        stay the same. A function is sent once for as long as its map, or its module, holds it. Each chunk of items is
        computed with what the function captures as it is when the chunk is sent. So what you change between two results
        counts from the next chunk on, and not for the chunks that are ahead of you. If results depend on it, pass it
        with the items, or take all results before you change it. With ``num_workers=0`` there are no workers to
        replace, and ``item_timeout`` is refused.

        Code that uses the ``map`` of a process pool can use a runtime instead: ``emcee.EnsembleSampler(..., pool=rt)``.

        A journal compares code (without comments and positions in the file), names, constants, defaults and captured
        values, also of your functions that the function calls. Installed packages count by their names, files that the
        function reads not at all.

        Examples
        --------
        >>> import synk
        >>> with synk.fork(2):
        ...     list(synk.map(lambda n: n * n, range(5)))
        [0, 1, 4, 9, 16]
        """
        from synk._api.mapping import map_items

        return map_items(
            self._session,
            fn,
            iterables,
            batch_size=batch_size,
            ordered=ordered,
            progress=progress,
            on_error=on_error,
            item_timeout=item_timeout,
            max_tasks_per_worker=max_tasks_per_worker,
            max_worker_memory=max_worker_memory,
            journal=journal,
            key=key,
            version=version,
        )

    def _tasks(self, num_workers: int, rules: Any) -> Any:
        """Return an object that runs tasks, which are submitted one by one; for ``Executor`` and extensions."""
        from synk._engine.tasks import Tasks

        return Tasks(self._session, num_workers, rules)

    @verb
    def distribute(self) -> None:
        """Send all functions that the workers do not have yet, together.

        This is optional: the first call of a function does it. A program that builds many functions saves round trips,
        and functions that are pickled together share their common objects.

        Raises
        ------
        SerializationError
            If a function cannot be pickled, or cannot be loaded on the workers. Then no rank has it.
        """
        self._session.run("distribute", self._session.distribute)

    @verb
    def where(self) -> str:
        """Return a text with the present state of each rank: its phase, the bytes it has published, its Python stacks.

        Call it from another thread or a signal handler while a call seems stuck. If a call runs for more than
        ``SYNK_STUCK_AFTER`` seconds (an environment variable; 60 by default, 0 for never), the log shows this text
        once.

        Raises
        ------
        ClosedError
            If the runtime is closed.
        ReentrancyError
            In a forked copy of the program.
        """
        return where(self._watched())

    @verb
    def stacks(self) -> dict[int, str]:
        """Return the present Python stacks of all ranks, by rank.

        Call it from another thread while a call seems stuck. A rank that is still starting, or whose worker has ended,
        is left out. :meth:`where` also returns the ranks' phases.

        Raises
        ------
        ClosedError
            If the runtime is closed.

        Examples
        --------
        >>> import synk
        >>> with synk.fork(2) as runtime:
        ...     _ = synk.function(lambda: None, outputs=None, per_rank=True)()  # they have started
        ...     sorted(runtime.stacks())
        [0, 1]
        """
        return stacks(self._watched())

    def _watched(self) -> Processes:
        """Return the processes, for a look at them from any thread."""
        self._session.check_process("look at the workers")
        if self.is_closed:
            raise ClosedError("cannot look at the workers: the runtime is closed.") from self._session.cause
        return self._session.processes

    def interrupt(self) -> None:
        """End the calls in flight from another thread, as Ctrl-C does: for a stop button, or a server.

        The running call raises ``CallCancelled`` in its own thread, and so do submitted calls when you ask for their
        results. A call that was already answered keeps its result. Shared variables keep the values they had before.
        The runtime stays open, and the workers live on. If nothing is in flight, nothing happens. A worker that does
        not answer within two seconds (for instance, because it is stuck in C code) is killed, and the next call
        replaces it.

        Raises
        ------
        ClosedError
            If the runtime is closed.
        UnsupportedError
            With ``num_workers=0``: functions run in the thread that calls them, and only Ctrl-C can end them there.

        Examples
        --------
        >>> import time, numpy as np, synk
        >>> with synk.fork(2) as rt:
        ...     slow = synk.function(lambda x: time.sleep(60) or x.sum(), outputs="sum")
        ...     call = slow.submit(np.ones(4))
        ...     rt.interrupt()
        ...     try:
        ...         call.result()
        ...     except synk.errors.CallCancelled as error:
        ...         print(error)
        the call was ended by Runtime.interrupt(). Call it again.
        """
        self._session.interrupt()

    @verb
    def info(self) -> str:
        """Return a description of the runtime, one line for each rank."""
        return Text(self._description())

    def _description(self) -> str:
        place = " in the program" if self._session.is_inline else ""
        title = f"runtime: {self.world_size} x {self.backend}{place}"
        if self.is_closed:
            return f"{title}, closed"
        with self._session.entered("describe the workers"):
            self._session.begin("describe the workers")
            placement = self._session.processes.placement
            lines = [
                f"  rank {worker.rank}: {placement.devices[worker.rank]}, pid {worker.process.pid}, "
                f"{worker.description}"
                for worker in self._session.by_rank
            ]
        group = self._session.group
        lines += [f"  {group.name}: {group.library}"] if group.library else []
        lines += [f"  {group.name} is not used: {group.problem}"] if group.problem else []
        if not self._session.has_devices and not self._session.is_inline and (num_threads := num_torch_threads()) > 1:
            lines.append(f"  torch computes with {num_threads} threads in the program, on the cores of the workers")
        return "\n".join([title, *lines])

    @verb
    def restart(self) -> None:
        """Replace all workers by new ones, which get everything in its present state.

        Use it for changes that calls do not bring to the workers: environment variables, the working folder, installed
        packages, and captured objects that cannot be compared, such as iterators and files. It takes about as long as
        :func:`synk.fork`. Functions are sent again when they are called. ``Data`` and shared variables keep their
        values. Objects that functions kept on the workers, in closures or globals, are lost; ``on_restart`` of
        :func:`synk.fork` can make them again.

        Raises
        ------
        StartupError
            If a worker cannot be started.
        ClosedError
            If the runtime is closed.
        """
        with self._session.entered("restart"):
            self._session.begin("restart", self._session.deadline(None))
            self._session.replace_workers()

    @verb
    def close(self) -> None:
        """End the workers and release everything, within a bounded time. A second call does nothing.

        A call that runs in another thread ends with ``ClosedError`` there, and so do submitted calls.
        """
        session = self._session
        # Before the workers end: replicated objects fetch their last state. Not in a forked copy, which
        # has no workers, and not inside of an operation of this thread, which these functions could not begin.
        try:
            if session.is_own_process and not session.is_closed and not session.is_mine():
                for guest in reversed([*session.guests]):
                    session.guests.pop(guest)
                    guest._leave(session)
        finally:  # also where a program turns their warnings into errors
            session.close()

    @verb
    def __enter__(self) -> Runtime:
        self._session.check_open("enter the runtime")
        return self

    @verb
    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "cannot pickle a runtime: it stays in the program. Keep it outside of the objects that functions refer to."
        )

    def __repr__(self) -> str:
        return repr(self._session)


def _on_restart(fn: Any) -> tuple[Callable[[], Any], dict[str, Any]] | None:
    check_on_restart(fn)
    if fn is None:
        return None
    return fn, Callee(fn, "on_restart", outputs=None).options  # checks that it can be sent
