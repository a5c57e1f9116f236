"""Calls without arguments that are handed over one by one, each for one worker: what a pool of processes offers.

There is no thread: who waits for a task drives the others, and calls back for those that have ended.
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
from synk._master.state.item_pickles import ItemPickler
from synk._pure.interrupts import as_operation
from synk._pure.tracebacks import outline
from synk._wire.items import call
from synk.errors import CallCancelled, SerializationError

_NAME = "a task"


class Task:
    """A call that was handed over.

    Parameters
    ----------
    chunk : Chunk
        It is the one item of it.
    callback : callable or None
    """

    def __init__(self, chunk: Chunk, callback: Callable[[Task], Any] | None) -> None:
        self.chunk = chunk
        self.callback = callback


class Tasks:
    """The tasks of one user of a runtime, who is one thread.

    Parameters
    ----------
    session : Session
    num_ranks : int
        How many workers they use.
    """

    def __init__(self, session: Session, num_ranks: int) -> None:
        function = session.functions.mapped.get(call, lambda: Callee(call, _NAME, outputs=None, session=session))
        self._chunks = Chunks(session, function, num_ranks, are_named=False)
        self._pickler = ItemPickler(session.memory.copies)
        self._waiting: deque[Task] = deque()
        self._sent: list[Task] = []
        self._numbers = itertools.count()

    @as_operation
    def submit(self, task: Callable[[], Any], callback: Callable[[Task], Any] | None = None) -> Task:
        """Hand a task over, pickled; ``callback(task)`` is called when it has ended, in a ``result`` of any task.

        Raises
        ------
        SerializationError
            If it cannot be pickled.
        """
        made = self.packed(task, callback)
        self._waiting.append(made)
        self._send()
        return made

    def packed(self, task: Callable[[], Any], callback: Callable[[Task], Any] | None = None) -> Task:
        """Return a task, pickled, that is not handed over yet; for any thread."""
        try:
            data, copies = self._pickler.dumps(task)
        except Exception as error:
            raise SerializationError(
                f"cannot send a task to a worker: {type(error).__name__}: {str(error).rstrip('.')}."
            ) from error
        chunk = Chunk(next(self._numbers))
        chunk.add(data, copies)
        return Task(chunk, callback)

    @property
    def has_room(self) -> bool:
        """Whether a worker is free for one more, or will be soon."""
        return self._chunks.has_room

    @property
    def are_under_way(self) -> bool:
        return bool(self._sent)

    def look(self, task: Task | None) -> None:
        """Hand ``task`` over, if there is one, and take in what has ended, without waiting."""
        if task is not None:
            self._sent.append(task)
        self._chunks.step(None if task is None else task.chunk, is_waiting=False)
        self._call_back()

    def _send(self) -> None:
        while self._waiting and self._chunks.has_room:
            task = self._waiting.popleft()
            self._sent.append(task)
            self._chunks.step(task.chunk, is_waiting=False)

    def result(self, task: Task, timeout: float | None = None) -> Any:
        """Wait for a task to end and return its result, once.

        Raises
        ------
        TimeoutError
        Exception
            What the task raised, or what has ended it.
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
        """Return the result of a task that has ended, once, or raise what has ended it."""
        if task.chunk.error is not None:
            error = task.chunk.error
            outline(error)
            raise error
        return task.chunk.value(_NAME)

    def _call_back(self) -> None:
        for task in [task for task in self._sent if task.chunk.is_done]:
            self._sent.remove(task)
            if task.callback is not None:
                task.callback(task)

    def cancel(self) -> None:
        """End all tasks: nobody will ask for their results."""
        self._waiting.clear()
        self._sent.clear()
        self._chunks.end(CallCancelled("the task was ended together with another."))
