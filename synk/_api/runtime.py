"""The runtime that the user holds. Its verbs use a session of the master.

In one file because it is one class: everything that can be done with a runtime, each verb a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from synk._api.build import Decorator, KeepingDecorator, build_function
from synk._api.first_calls import verified
from synk._api.function import Function, P
from synk._api.options import KeptOptions, MapOptions, check_on_restart, entropy_of, is_integer
from synk._engine.callee import Callee
from synk._engine.data import Data, make_data
from synk._engine.entrance import refuse_limit
from synk._engine.profile import Profile
from synk._engine.resident import Resident, make_resident
from synk._engine.session import Session, watch_over
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
from synk._pure.texts import Text
from synk._pure.tracebacks import verb
from synk._pure.words import Hinting
from synk._wire.cell import refuse_inside_worker
from synk.errors import ClosedError

if TYPE_CHECKING:
    from typing_extensions import Unpack


R = TypeVar("R")
T = TypeVar("T")

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
        prepared = _on_restart(on_restart)
        timeout = check_timeout(timeout)
        if not is_integer(max_restarts, 0):
            raise ValueError(f"cannot fork: got max_restarts={max_restarts!r}, expected an integer of 0 or more.")
        if not isinstance(check, bool):
            raise TypeError(f"cannot fork: got check={check!r}, expected True or False.")
        seed = entropy_of(seed)
        if cluster is not None:
            from synk.cluster.forking import open_session, refuse

            refuse(cluster, backend=("numpy" if backend == "auto" else backend, "numpy"), devices=(devices, None))
            check_program()
            self._session: Session = open_session(
                num_workers, cluster, nodes,
                timeout=timeout, seed=seed, max_restarts=int(max_restarts), on_restart=prepared,
            )  # fmt: skip
            verified.update([self._session] * check)
            return
        if nodes is not None:
            raise ValueError(f"cannot fork: got nodes={nodes!r} and no cluster=, expected both. Pass cluster='here'.")
        placement = place(num_workers, backend, devices)
        process_type: Any = WorkerProcess
        if num_workers == 0:
            refuse_limit(timeout)
            from synk._engine.inline import InlineProcess  # with a rank's half

            process_type = InlineProcess
        else:
            check_program()
        self._session = Session(
            placement,
            timeout=timeout,
            seed=seed,
            max_restarts=int(max_restarts),
            on_restart=prepared,
            process_type=process_type,
        )
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
        if self._session.workers.is_inline:
            refuse_limit(timeout)
        self._session.timeout = timeout

    @property
    def is_closed(self) -> bool:
        return self._session.is_closed

    # -- making -------------------------------------------------------------------------------------------------------

    @verb
    def data(self, value: Any = None, **options: Any) -> Data:
        """Make a :class:`synk.Data` of this runtime; see :func:`synk.data`."""
        return make_data(self._session, value, **options)

    @verb
    def shared(self, value: Any, *, sharded: bool = False, name: str | None = None) -> Shared:
        """Make a :class:`synk.Shared` of this runtime; see :func:`synk.shared`."""
        refuse_inside_worker("make a shared variable")
        session = self._session
        session.check_open("make a shared variable")
        session.reclaim()
        return Shared(session, Variable(session.variables, value, sharded=sharded, name=name))

    @verb
    def resident(
        self,
        obj: Any,
        *,
        name: str | None = None,
        dump: Callable[[Any], Any] | None = None,
        load: Callable[[Any, Any], None] | None = None,
    ) -> Resident:
        """Make a :class:`synk.Resident` of this runtime; see :func:`synk.resident`."""
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

    @overload
    def map(
        self,
        fn: Callable[[T], R],
        items: Iterable[T],
        /,
        **options: Unpack[MapOptions],
    ) -> Iterator[R]: ...

    @overload
    def map(
        self,
        fn: Callable[..., R],
        first: Iterable[Any],
        second: Iterable[Any],
        /,
        *others: Iterable[Any],
        **options: Unpack[MapOptions],
    ) -> Iterator[R]: ...

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
        """Return an iterator over the results of ``fn`` for each item; see :func:`synk.map`.

        Code that uses the ``map`` of a process pool can use a runtime instead: ``emcee.EnsembleSampler(..., pool=rt)``.
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
        """Send all functions that the workers do not have yet; see :func:`synk.distribute`."""
        with self._session.entered("distribute"):
            self._session.begin("distribute")
            self._session.distribute()

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
        self._session.check_process("look at the workers")
        if self.is_closed:
            raise ClosedError("cannot look at the workers: the runtime is closed.") from self._session.cause
        return where(self._session.workers.processes)

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
        self._session.check_process("look at the workers")
        if self.is_closed:
            raise ClosedError("cannot look at the workers: the runtime is closed.") from self._session.cause
        nodes, processes = self._session.nodes, self._session.workers.processes
        return stacks(processes) if nodes is None else nodes.stacks(processes)

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
        place = " in the program" if self._session.workers.is_inline else ""
        title = f"runtime: {self.world_size} x {self.backend}{place}"
        if self.is_closed:
            return f"{title}, closed"
        with self._session.entered("describe the workers"):
            self._session.begin("describe the workers")
            placement = self._session.workers.processes.placement
            lines = [
                f"  rank {worker.rank}: {placement.devices[worker.rank]}, pid {worker.process.pid}, "
                f"{worker.description}"
                for worker in self._session.workers.by_rank
            ]
        group = self._session.group
        lines += [f"  {group.name}: {group.library}"] if group.library else []
        lines += [f"  {group.name} is not used: {group.problem}"] if group.problem else []
        if (
            not self._session.has_devices
            and not self._session.workers.is_inline
            and (num_threads := num_torch_threads()) > 1
        ):
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

    def __repr__(self) -> str:
        return repr(self._session)


def _on_restart(fn: Any) -> tuple[Callable[[], Any], dict[str, Any]] | None:
    check_on_restart(fn)
    if fn is None:
        return None
    return fn, Callee(fn, "on_restart", outputs=None).options  # checks that it can be sent
