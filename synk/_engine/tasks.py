"""Tasks: calls without arguments, submitted one by one, each to one worker. What a process pool offers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from synk._engine.callee import Callee
from synk._engine.chunks import Chunk, Rules, waiting
from synk._engine.jobs import Job
from synk._pure.interrupts import raise_if_of_handler
from synk._pure.words import text_of
from synk._wire.messages import call
from synk.errors import CallCancelled, SerializationError


class Task:
    """Calls that were submitted together.

    Attributes
    ----------
    has_ended : bool
        Whether all calls have ended, or one has failed.
    """

    def __init__(self, count: int, callback: Callable[[Task], Any] | None) -> None:
        self.callback = callback
        self._missing = count
        self._values: dict[int, Any] = {}
        self._error: Exception | None = None

    @property
    def has_ended(self) -> bool:
        return not self._missing or self._error is not None

    def note(self, numbers: Sequence[int], values: Sequence[Any]) -> None:
        self._values.update(zip(numbers, values))
        self._missing -= len(numbers)

    def end(self, error: Exception) -> None:
        self._error = self._error or error

    def outcome(self) -> list[Any]:
        """Return the results of its calls in their order, or raise the error of one. Call it once."""
        error, self._error, values, self._values = self._error, None, self._values, {}
        if error is None:
            return [values[number] for number in sorted(values)]
        try:
            raise error
        finally:
            del error


class Tasks(Job):
    """Calls without arguments, submitted one by one by one user of a runtime: what a process pool offers.

    There is no thread. A caller that waits for one task drives the others, and runs the callbacks of those that end.
    """

    are_named = awaits_classes = False
    wants_more = True  # its user may submit another one at any time

    def __init__(self, session: Any, num_ranks: int, rules: Rules) -> None:
        function = session.functions.mapped.get(call, lambda: Callee(call, "a task", outputs=None, session=session))
        super().__init__(session, function, rules._replace(batch_size=1, is_ordered=False), num_ranks)
        self._count = 0
        self._todo: deque[Chunk] = deque()
        self._tasks: set[Task] = set()  # submitted, and not ended

    def fail(self, chunk: Chunk, error: Exception) -> None:
        chunk.finish(error)

    def _failed(self, number: int, error: Exception) -> Any:
        raise error

    def submit(self, calls: Sequence[Callable[[], Any]], callback: Callable[[Task], Any] | None = None) -> Task:
        """Submit calls, pickled. ``callback(task)`` is called once they have ended, from the ``result`` of any task.

        Raises
        ------
        SerializationError
            If they cannot be pickled.
        """
        task = self.add(calls, callback)
        self.send()
        return task

    def add(self, calls: Sequence[Callable[[], Any]], callback: Callable[[Task], Any] | None = None) -> Task:
        """Pickle calls. :meth:`send` sends them."""
        try:
            items = [self._packed(each) for each in calls]
        except BaseException as error:
            raise_if_of_handler(error)
            raise SerializationError(f"cannot send a task to a worker: {text_of(error).rstrip('.')}.") from error
        finally:
            self._pickler.current.clear()
        first, self._count = self._count, self._count + len(items)
        task = Task(len(items), callback)
        self._todo.append(Chunk(self, range(first, self._count), items, task))
        self._tasks.add(task)
        return task

    @property
    def has_room(self) -> bool:
        """Whether a worker is free for another task, or will be soon."""
        return not self._todo and waiting(self.chunks) is None and self.pool.room(self) >= 1

    def send(self, *, is_waiting: bool = False, until: float | None = None) -> None:
        """Send what waits as long as workers are free, and take in what has ended; ``is_waiting``: wait for that."""
        while self._todo and waiting(self.chunks) is None and self.pool.room(self) >= 1:
            self._call_back(self.pool.step(self, [self._todo.popleft()]))
        if self.chunks or self.pool.room(self) < 1:  # others have all workers, and may not want them any more
            self._call_back(self.pool.step(self, is_waiting=is_waiting, until=until))

    def result(self, task: Task, timeout: float | None = None) -> list[Any]:
        """Wait for a task to end and return the results of its calls. Call it once.

        Raises
        ------
        TimeoutError
        Exception
            What a call raised, or the error that ended it.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not task.has_ended:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"cannot wait for a task: it has not ended within {timeout:g} s. Raise timeout=.")
            self.send(is_waiting=True, until=until)
        return task.outcome()

    def _call_back(self, done: Sequence[Chunk]) -> None:
        ended = []
        for chunk in done:
            task: Task = chunk.tag
            try:
                for numbers, values in self.runs_of(chunk):
                    task.note(numbers, values)
            except Exception as error:
                task.end(error)
            if task.has_ended and task in self._tasks:
                self._tasks.discard(task)
                ended.append(task)
        for task in ended:
            if task.callback is not None:
                task.callback(task)

    def cancel(self) -> None:
        """End all tasks: their results are no longer wanted."""
        self._todo.clear()
        self._tasks.clear()
        if self.session.is_closed:
            return
        with self.session.entered(self.verb):
            for chunk in self.chunks:
                chunk.finish(CallCancelled("the task was ended together with another."))
            self.chunks = []
