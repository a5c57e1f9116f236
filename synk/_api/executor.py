"""``Executor``: the workers as a process pool, for programs that expect one from the standard library.

Code that waits for a standard future waits in the future's own lock, so a thread sends the tasks and takes in their
results. It holds the session's lock only while it does so: other operations run in between, and wait for the tasks in
flight first. In one file because the thread and the object that the user holds end together.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import itertools
import logging
import numbers
import os
import queue
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

from synk._api.current import current, fork
from synk._api.mapping import check_function, check_kinds, items_of, job_of, rules_of
from synk._api.options import is_integer
from synk._api.runtime import Runtime
from synk._engine.chunks import Rules
from synk._engine.jobs import MapJob
from synk._engine.tasks import Task, Tasks
from synk._pure.tracebacks import Results, outline, verb
from synk._wire.cell import cell, refuse_inside_worker
from synk._wire.mapping import Descriptor, eventfd
from synk.errors import ClosedError, ReentrancyError

R = TypeVar("R")

_LOOK_MS = 50
"""How often the thread checks while tasks are in flight. Another operation may have taken in their replies, so that no
descriptor becomes readable any more.
"""


class Executor(concurrent.futures.Executor):
    """The workers as an executor of ``concurrent.futures``: each task runs on the next free worker.

    It serves code that takes an executor: ``loop.run_in_executor``, ``dask.config.set(scheduler=executor)``,
    ``workers=`` of SciPy by ``executor.map``, ``pool=`` of ``emcee``. For a loop over items use :func:`synk.map`, which
    sends several items at once; for rows of arrays use :func:`synk.function`.

    Parameters
    ----------
    max_workers : int, optional
        The number of workers to use, at most all. By default all.
    runtime : Runtime, optional
        By default the current one. If there is none, one is forked.
    on_error, item_timeout, max_tasks_per_worker, max_worker_memory
        As for :func:`synk.map`. A future raises its error in any case; ``on_error`` is for :meth:`map`.

    Raises
    ------
    ValueError
        For a number of workers below 1.
    ClosedError
        If the runtime is closed.
    ReentrancyError
        On a worker.

    Notes
    -----
    Functions, arguments and results are pickled as by :func:`synk.map`, so lambdas and notebook functions can be
    passed. Arrays of 1 MB and more are sent to the workers once, and arrive read-only. A worker that dies ends its task
    with ``WorkerDied`` and is replaced, so the executor stays usable. Calls of functions on the same runtime wait for
    the tasks that are running. :meth:`shutdown` ends the executor; the workers belong to the runtime and go on.

    There is no ``journal`` and no ``progress``: both are of a whole map, whose items have numbers and an end, and a
    task that is submitted by itself has neither. Use :func:`synk.map`.

    Examples
    --------
    >>> import synk
    >>> with synk.fork(2), synk.Executor() as executor:
    ...     list(executor.map(lambda n: n * n, range(4)))
    [0, 1, 4, 9]
    """

    @verb
    def __init__(
        self,
        max_workers: int | None = None,
        *,
        runtime: Runtime | None = None,
        on_error: Literal["raise", "return"] = "raise",
        item_timeout: float | None = None,
        max_tasks_per_worker: int | None = None,
        max_worker_memory: int | None = None,
    ) -> None:
        refuse_inside_worker("make an executor")
        self._rules = rules_of(
            "make an executor",
            on_error=on_error,
            item_timeout=item_timeout,
            max_tasks_per_worker=max_tasks_per_worker,
            max_worker_memory=max_worker_memory,
        )
        if max_workers is not None and not is_integer(max_workers, 1):
            raise ValueError(f"cannot make an executor: got max_workers={max_workers!r}, expected 1 or more, or None.")
        if runtime is None:
            runtime = fork() if cell.runtime is None else current()
        if not isinstance(runtime, Runtime):
            raise TypeError(f"cannot make an executor: got runtime={runtime!r}, expected what synk.fork() returns.")
        self._runtime = runtime
        num_workers = min(max_workers or runtime.world_size, runtime.world_size)
        runtime._session.check_open("make an executor")
        self._num_workers = num_workers
        self._driver = _Driver(runtime, num_workers, self._rules)
        dropped = weakref.finalize(self, _Driver.stop, self._driver)
        dropped.atexit = False
        _open.add(self)

    @verb
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Run ``fn(*args, **kwargs)`` on a worker. Return a future of ``concurrent.futures``.

        The task is pickled when a worker is about to get it, in another thread: do not change its arguments before.

        Raises
        ------
        RuntimeError
            After :meth:`shutdown`.
        ClosedError
            If the runtime is closed. The future has all later errors: those of the task, ``SerializationError``,
            ``WorkerDied``.
        """
        return self._driver.submit(functools.partial(fn, *args, **kwargs))

    @verb
    def map(
        self, fn: Callable[..., Any], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[Any]:
        """Return an iterator over ``fn(*items)``, in the order of the iterables, which are consumed at once.

        Parameters
        ----------
        timeout : float, optional
            Seconds from now until the iterator raises ``TimeoutError``.
        chunksize : int
            The number of items to send to a worker at a time; with 1 as many as :func:`synk.map` would.

        Raises
        ------
        ValueError
            If ``chunksize`` is not an integer of at least 1.
        """
        if not is_integer(chunksize, 1):
            raise ValueError(f"cannot map: got chunksize={chunksize!r}, expected 1 or more.")
        name = check_function(fn)
        is_number = timeout is None or isinstance(timeout, numbers.Real)
        check_kinds(name, ("timeout", timeout, is_number, "seconds, or None"))
        items, is_spread = items_of(name, iterables)
        rules = self._rules._replace(batch_size=chunksize if chunksize > 1 else None)
        session = self._runtime._session
        job = job_of(
            session,
            fn,
            iter(list(itertools.chain(items))),
            rules,
            name=name,
            is_spread=is_spread,
            num_ranks=self._num_workers,
        )
        made = _Map(job, timeout, self._driver.ring)
        self._driver.add(made)
        return Results.of(made.runs(), "synk.Executor.map", name)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more tasks. A second call does nothing new.

        Parameters
        ----------
        wait : bool
            Whether to return only when all tasks have ended.
        cancel_futures : bool
            Whether to cancel the tasks that were not sent to a worker yet.
        """
        self._driver.stop(cancel_futures=cancel_futures)
        if wait:
            self._driver.join()

    def __repr__(self) -> str:
        return f"<synk.Executor on {self._runtime!r}>"


_open: weakref.WeakSet[Executor] = weakref.WeakSet()
_futures: weakref.WeakSet[concurrent.futures.Future[Any]] = weakref.WeakSet()


def _fail_in_child() -> None:
    """End the futures in a forked copy of the program, where no thread ends them, without calling their callbacks."""
    for future in list(_futures):
        if not future.done():
            concurrent.futures.Future.__init__(future)
            error = ReentrancyError(
                "cannot wait for a task of an executor: this process is a forked copy of the program, and the workers "
                "belong to the original. Wait for it there."
            )
            future.set_exception(error)


os.register_at_fork(after_in_child=_fail_in_child)


@atexit.register
def _shut_down() -> None:
    """Wait for the tasks of all executors at the end of the program.

    This module is imported after the runtime's, so its exit function runs before the one that closes runtimes. If
    Ctrl-C has ended the program, waiting tasks are cancelled and running tasks interrupted first.
    """
    is_interrupted = getattr(sys, "last_type", None) is KeyboardInterrupt
    for executor in list(_open):
        executor.shutdown(wait=False, cancel_futures=is_interrupted)
        if is_interrupted and not executor._runtime.is_closed:
            executor._runtime.interrupt()
        executor.shutdown()


class _Driver:
    """The thread behind one executor. It starts with the first task, and ends when no more can come.

    Other threads only append to ``_waiting`` and ``_maps``, set ``_is_stopping`` and ring the bell. All else,
    ``_futures`` and ``_tasks``, belongs to the thread.
    """

    def __init__(self, runtime: Runtime, num_workers: int, rules: Rules) -> None:
        self._session = runtime._session
        self._tasks: Tasks = runtime._tasks(num_workers, rules)
        self._waiting: deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = deque()  # not pickled yet
        self._futures: dict[Task, concurrent.futures.Future[Any]] = {}  # in flight
        self._maps: list[_Map] = []
        self._is_stopping = False
        self._lock = threading.RLock()  # no task is accepted after ``_is_stopping``, or the thread could miss it
        self._bell: Descriptor | None = None  # an eventfd, while the thread runs
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        _futures.add(future)
        self._accept(lambda: self._waiting.append((future, task)))
        return future

    def add(self, made: _Map) -> None:
        """Run a map."""
        self._accept(lambda: self._maps.append(made))

    def _accept(self, add: Callable[[], None]) -> None:
        with self._lock:
            if self._is_stopping:
                raise RuntimeError("cannot submit a task: the executor was shut down. Make another one.")
            self._session.check_open("submit a task")
            if self._thread is None:
                self._bell = eventfd()
                thread = threading.Thread(target=self._drive, name="synk.Executor", daemon=True)
                thread.start()
                self._thread = thread
            add()
            self.ring()

    def stop(self, *, cancel_futures: bool = False) -> None:
        """Accept no more tasks. The thread ends when the accepted ones have. A finalizer may call this."""
        with self._lock:
            self._is_stopping = True
            self.ring()
        # Not under the lock: callbacks of the futures run here, and may use the executor.
        while cancel_futures and (waiting := _next(self._waiting)) is not None:
            waiting[0].cancel()
        for each in list(self._maps) if cancel_futures else ():
            each.end(concurrent.futures.CancelledError())

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def ring(self) -> None:
        bell = self._bell  # read once: the thread may drop it, and this reference keeps the descriptor open
        if bell is not None:
            os.eventfd_write(bell, 1)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        """Send tasks and items and take in results until nothing more can come."""
        while self._waiting or self._futures or self._maps or not self._is_stopping:
            newest, maps = next(reversed(self._waiting), None), [*self._maps]
            try:
                self._send()
                is_moving = self._advance()
                newest, maps = None, []  # the wait below may be long, and keeps no task and its arrays
                if is_moving or (self._waiting and self._tasks.has_room):
                    continue
                # A bell that has rung since the checks above is still readable, so this wait cannot miss it. With
                # nothing to be done and no more tasks to come, nobody would ring.
                if self._waiting or self._futures or self._maps:  # others may have all workers
                    self._wait(_LOOK_MS, self._session.processes.descriptors())
                elif not self._is_stopping:
                    self._wait(None)
            except BaseException as error:  # for instance, the runtime was closed: the tasks in flight are lost
                self._fail_all(error, newest, maps)
                newest, maps = None, []
                self._wait(_LOOK_MS)  # another thread may run a function in the program's own rank for a while
        self._bell = None  # closes the descriptor, even if an exception that somebody keeps keeps this object

    def _wait(self, most_ms: int | None, descriptors: Iterable[int] = ()) -> None:
        """Wait until the bell rings, or a worker has answered on one of its descriptors."""
        bell = self._bell
        assert bell is not None
        poll = select.poll()
        for fd in (bell, *descriptors):
            poll.register(fd, select.POLLIN)
        poll.poll(most_ms)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(bell)

    def _send(self) -> None:
        """Take in results, pickle waiting tasks and send them, as long as workers are free."""
        self._tasks.send()
        while self._tasks.has_room and (waiting := _next(self._waiting)) is not None:
            future, fn = waiting
            if not future.set_running_or_notify_cancel():
                continue
            try:
                task = self._tasks.add([fn], self._end)
            except BaseException as error:
                _settle(future, future.set_exception, error)
                continue
            # Noted before it is sent: ``send`` may already take in the outcome, or fail and lose the task.
            self._futures[task] = future
            self._tasks.send()

    def _end(self, task: Task) -> None:
        """Give a future its outcome. Its callbacks run here, outside of any operation, so they may call functions."""
        future = self._futures.pop(task)
        try:
            (result,) = task.outcome()
        except BaseException as error:
            outline(error)
            _settle(future, future.set_exception, error)
        else:
            _settle(future, future.set_result, result)

    def _advance(self) -> bool:
        """Take the maps a step further. Return whether one has given results."""
        is_moving = False
        for each in list(self._maps):
            is_moving = each.advance() or is_moving
            if each.has_ended:
                self._maps.remove(each)
        return is_moving

    def _fail_all(self, error: BaseException, newest: Any, maps: Sequence[_Map]) -> None:
        """Give an error to maps and to all futures, in flight or waiting, up to the newest one of before it happened.

        Nobody may wait for a future that no thread will resolve. What has come since is tried for itself.
        """
        lost, self._futures = [*self._futures.values()], {}
        with self._lock:
            num_older = self._waiting.index(newest) + 1 if newest in self._waiting else 0
        for _ in range(num_older):
            waiting = _next(self._waiting)
            if waiting is not None and waiting[0].set_running_or_notify_cancel():
                lost.append(waiting[0])
        with contextlib.suppress(ClosedError, ReentrancyError):  # they end with the runtime, or nobody wants them
            self._tasks.cancel()
        # Not before: whoever hears of one may submit another, which is not lost.
        for future in lost:
            _settle(future, future.set_exception, error)
        for each in maps:  # some may have ended before
            each.end(error)
            with contextlib.suppress(ValueError):
                self._maps.remove(each)


def _settle(future: concurrent.futures.Future[Any], settle: Callable[[Any], None], outcome: Any) -> None:
    """Give a future its outcome. What a callback raises is logged, as the future itself logs an ``Exception``."""
    try:
        settle(outcome)
    except BaseException:
        logging.getLogger("concurrent.futures").exception("exception calling callback for %r", future)


def _next(waiting: deque[R]) -> R | None:
    """Take the oldest of what waits. Return None if there is none: another thread may have taken the last one."""
    try:
        return waiting.popleft()
    except IndexError:
        return None


class _Map:
    """A map that the thread of an executor drives.

    Parameters
    ----------
    job : MapJob
    timeout : float or None
        Seconds from now until :meth:`runs` raises ``TimeoutError``.
    ring : callable
        Wakes the thread.

    Attributes
    ----------
    has_ended : bool
    """

    def __init__(self, job: MapJob, timeout: float | None, ring: Callable[[], None]) -> None:
        self._job, self._timeout, self._ring = job, timeout, ring
        self._until = None if timeout is None else time.monotonic() + timeout
        self._arrived: queue.SimpleQueue[list[Any] | BaseException | None] = queue.SimpleQueue()
        self.has_ended = False

    def advance(self) -> bool:
        """Take it a step further. Return whether there were results."""
        if self._job.is_abandoned:
            self.has_ended = True
            return False
        try:
            done = self._job.next_done(is_waiting=False)
            for chunk in done or ():
                for _, values in self._job.runs_of(chunk):
                    self._arrived.put(values)
        except BaseException as error:
            self.end(error)
            return False
        if done is None:
            self._arrived.put(None)
            self.has_ended = True
        return bool(done)

    def end(self, error: BaseException) -> None:
        self._job.is_abandoned = self.has_ended = True
        self._arrived.put(error)

    def runs(self) -> Iterator[list[Any]]:
        """Yield the results in lists."""
        try:
            while (found := self._next()) is not None:
                yield found
                del found
        finally:
            self._job.is_abandoned = True
            self._ring()

    def _next(self) -> list[Any] | None:
        self._job.session.check_process(f"take results of {self._job.name!r}")
        try:
            found = self._arrived.get(timeout=None if self._until is None else max(self._until - time.monotonic(), 0))
        except queue.Empty:
            raise TimeoutError(
                f"cannot wait for a result of {self._job.name!r} any longer: it has not come within "
                f"{self._timeout:g} s."
            ) from None
        if isinstance(found, BaseException):
            raise found
        return found
