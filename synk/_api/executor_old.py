"""The thread behind an executor on the old engine. It goes with that engine."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from synk._api.runtime import Runtime
from synk._master.flight.tasks import Task, Tasks
from synk._master.processes.processes import eventfd
from synk._pure.tracebacks import outline
from synk._wire.descriptors import Descriptor
from synk.errors import ClosedError

_LOOK_MS = 50


def run_chunk(fn: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    return [fn(*items) for items in chunk]


def chunks_of(items: Iterator[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    while chunk := list(itertools.islice(items, size)):
        yield chunk


class OldDriver:
    """The thread behind one executor. It starts with the first task, and ends when no more can come.

    Other threads only append to ``_waiting``, set ``_is_stopping`` and ring the bell. Everything else, ``_futures`` and
    ``_tasks``, belongs to the thread.
    """

    def __init__(self, runtime: Runtime, num_workers: int) -> None:
        self._session = runtime._session
        self._tasks: Tasks = runtime._tasks(num_workers)
        self._waiting: deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = deque()  # not pickled yet
        self._futures: dict[Task, concurrent.futures.Future[Any]] = {}  # in flight
        self._is_stopping = False
        self._lock = threading.RLock()  # no task is accepted after ``_is_stopping``, or the thread could miss it
        self._bell: Descriptor | None = None  # an eventfd, while the thread runs
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        with self._lock:
            if self._is_stopping:
                raise RuntimeError("cannot submit a task: the executor was shut down. Make another one.")
            self._session.check_open("submit a task")
            if self._thread is None:
                self._bell = eventfd()
                thread = threading.Thread(target=self._drive, name="synk.Executor", daemon=True)
                thread.start()
                self._thread = thread
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            self._waiting.append((future, task))
            self._ring()
        return future

    def stop(self, *, cancel_futures: bool = False) -> None:
        """Accept no more tasks. The thread ends when the accepted ones have. A finalizer may call this."""
        with self._lock:
            self._is_stopping = True
            self._ring()
        # Not under the lock: callbacks of the futures run here, and may use the executor.
        while cancel_futures and (waiting := self._next_waiting()) is not None:
            waiting[0].cancel()

    def _next_waiting(self) -> tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None:
        """Take the oldest task that waits. Return None if there is none: another thread may have taken the last one."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _ring(self) -> None:
        bell = self._bell  # read once: the thread may drop it, and this reference keeps the descriptor open
        if bell is not None:
            os.eventfd_write(bell, 1)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        """Send tasks and take in results until nothing more can come."""
        while self._waiting or self._futures or not self._is_stopping:
            try:
                self._send()
                if self._futures:
                    self._tasks.step(None)
                if self._waiting and self._tasks.has_room:
                    continue
                # A bell that has rung since the checks above is still readable, so this wait cannot miss it. With
                # nothing in flight and no more tasks to come, nobody would ring.
                if self._futures or not self._is_stopping:
                    self._wait()
            except Exception as error:  # for instance, the runtime was closed: the tasks in flight are lost
                self._fail_all(error)
        self._bell = None  # closes the descriptor, even if an exception that somebody keeps keeps this object

    def _wait(self) -> None:
        """Wait until a worker has answered, or the bell rings."""
        bell = self._bell
        assert bell is not None
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        if self._futures:
            for fd in self._session.queue.descriptors():
                poll.register(fd, select.POLLIN)
        poll.poll(_LOOK_MS if self._futures else None)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(bell)

    def _send(self) -> None:
        """Pickle waiting tasks and send them, as long as workers are free."""
        while self._tasks.has_room and (waiting := self._next_waiting()) is not None:
            future, fn = waiting
            if not future.set_running_or_notify_cancel():
                continue
            try:
                task = self._tasks.packed(fn, self._end)
            except Exception as error:
                future.set_exception(error)
                continue
            # Noted before it is sent: ``step`` may already take in the outcome, or fail and lose the task.
            self._futures[task] = future
            self._tasks.step(task)

    def _end(self, task: Task) -> None:
        """Give a future its outcome. Its callbacks run here, outside of any operation, so they may call functions."""
        future = self._futures.pop(task)
        try:
            result = self._tasks.outcome(task)
        except Exception as error:
            outline(error)
            future.set_exception(error)
        else:
            future.set_result(result)

    def _fail_all(self, error: BaseException) -> None:
        """Give all futures an error, in flight or waiting. Nobody may wait for a future that no thread will resolve."""
        lost, self._futures = self._futures, {}
        for future in lost.values():
            future.set_exception(error)
        while (waiting := self._next_waiting()) is not None:
            if waiting[0].set_running_or_notify_cancel():
                waiting[0].set_exception(error)
        with contextlib.suppress(ClosedError):  # then they end with the runtime
            self._tasks.cancel()
