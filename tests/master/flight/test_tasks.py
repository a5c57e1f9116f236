"""Tasks, each for one worker: what happens to those that could not be sent."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import pytest

from synk._master.flight.chunks import Chunk, Chunks
from synk.errors import StartupError


def test_a_task_that_could_not_be_sent_is_sent_by_the_next_wait(
    shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker could not be replaced: that fails the caller of the moment, and no task is forgotten."""
    send, errors = Chunks._send, [StartupError("no more processes")]

    def send_late(chunks: Chunks, chunk: Chunk) -> None:
        if errors:
            raise errors.pop()
        send(chunks, chunk)

    tasks = shared_runtimes[2]._tasks(2)
    for _ in range(2):  # both workers are busy
        tasks.submit(functools.partial(time.sleep, 0.2))
    room = [tasks.submit(functools.partial(pow, 2, number)) for number in range(20)]
    assert len(tasks._waiting) == 20
    monkeypatch.setattr(Chunks, "_send", send_late)
    with pytest.raises(StartupError, match="no more"):
        tasks.result(room[-1])
    assert [tasks.result(task) for task in room] == [2**number for number in range(20)]


def test_a_task_that_submit_has_refused_does_not_run(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = shared_runtimes[2]._tasks(2)
    seen: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(Chunks, "_begin", lambda chunks: fail())
        with pytest.raises(MemoryError):
            tasks.submit(functools.partial(pow, 2, 3), seen.append)
    task = tasks.submit(functools.partial(pow, 2, 5), seen.append)
    assert tasks.result(task) == 32
    assert seen == [task]


def test_a_task_whose_message_could_not_be_sent_has_its_error(
    shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = shared_runtimes[2]
    tasks = runtime._tasks(2)
    task = tasks.packed(os.getpid)
    with monkeypatch.context() as patch:
        patch.setattr(runtime._session.ranks, "send_items", fail)
        with pytest.raises(MemoryError, match="none left"):
            tasks.step(task)
    with pytest.raises(MemoryError, match="none left"):
        tasks.result(task)
    assert tasks.result(tasks.submit(os.getpid)) != os.getpid()


def fail(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("none left")
