"""Calls without arguments, submitted one by one, each to one worker: what a process pool offers.

There is no thread. A caller that waits for one task drives the others, and runs the callbacks of those that end.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from synk._master.calls.callee import Callee
from synk._master.flight.chunks import Chunk, Chunks
from synk._master.session import Session
from synk._wire.items import call
from synk.errors import CallCancelled, SerializationError

_NAME = "a task"


class Task:
    """A call that was submitted.

    Parameters
    ----------
    chunk : Chunk
        A chunk with this call as its only item.
    callback : callable or None
    """

    def __init__(self, chunk: Chunk, callback: Callable[[Task], Any] | None) -> None:
        self.chunk = chunk
        self.callback = callback


class Tasks:
    """The tasks that one user of a runtime submits, all in the same thread.

    Parameters
    ----------
    session : Session
    num_ranks : int
        How many workers to use.
    """

    def __init__(self, session: Session, num_ranks: int) -> None:
        function = session.functions.mapped.get(call, lambda: Callee(call, _NAME, outputs=None, session=session))
        self._chunks = Chunks(session, function, num_ranks, are_named=False)
        self._waiting: deque[Task] = deque()
        self._sent: list[Task] = []
        self._numbers = itertools.count()

    def submit(self, task: Callable[[], Any], callback: Callable[[Task], Any] | None = None) -> Task:
        """Submit a task, pickled. ``callback(task)`` is called once it has ended, from the ``result`` of any task.

        Raises
        ------
        SerializationError
            If it cannot be pickled.
        """
        made = self.packed(task, callback)
        self._waiting.append(made)
        try:
            self._send()
        except BaseException:
            if made in self._waiting:  # the caller gets no task: it must not run either
                self._waiting.remove(made)
            raise
        return made

    def packed(self, task: Callable[[], Any], callback: Callable[[Task], Any] | None = None) -> Task:
        """Return a pickled task that is not submitted yet. Any thread may call it."""
        try:
            pickled = self._chunks.pickler.dumps(task)
        except Exception as error:
            raise SerializationError(
                f"cannot send a task to a worker: {type(error).__name__}: {str(error).rstrip('.')}."
            ) from error
        chunk = Chunk(next(self._numbers))
        chunk.add(*pickled)
        return Task(chunk, callback)

    @property
    def has_room(self) -> bool:
        """Whether a worker is free for another task, or will be soon."""
        return self._chunks.has_room

    def step(self, task: Task | None) -> None:
        """Submit ``task``, if there is one, and take in what has ended, without waiting."""
        if task is not None:
            self._sent.append(task)
        self._chunks.step(None if task is None else task.chunk, is_waiting=False)
        self._call_back()

    def _send(self) -> None:
        while self._waiting and self._chunks.has_room:
            task = self._waiting.popleft()
            self._sent.append(task)
            try:
                self._chunks.step(task.chunk, is_waiting=False)
            except BaseException:
                if not task.chunk.began_ns:  # something before it failed: whoever waits for it tries again
                    self._sent.remove(task)
                    self._waiting.appendleft(task)
                raise

    def result(self, task: Task, timeout: float | None = None) -> Any:
        """Wait for a task to end and return its result. Call it once.

        Raises
        ------
        TimeoutError
        Exception
            What the task raised, or the error that ended it.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not task.chunk.is_done:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"cannot wait for a task: it has not ended within {timeout:g} s. Raise timeout=.")
            self._chunks.step(None, is_waiting=True, until=until)
            self._call_back()
            self._send()
        self._call_back()
        return self.outcome(task)

    @staticmethod
    def outcome(task: Task) -> Any:
        """Return the result of a task that has ended, or raise its error. Call it once."""
        if task.chunk.error is not None:
            raise task.chunk.error
        return task.chunk.take(_NAME)[0]

    def _call_back(self) -> None:
        for task in [task for task in self._sent if task.chunk.is_done]:
            self._sent.remove(task)
            if task.callback is not None:
                task.callback(task)

    def cancel(self) -> None:
        """End all tasks: their results are no longer wanted."""
        self._waiting.clear()
        self._sent.clear()
        self._chunks.end(CallCancelled("the task was ended together with another."))
