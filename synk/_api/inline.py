"""A rank inside the master's process: the same messages, handled by direct calls, for a debugger."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from synk._pure.interrupts import deferred
from synk._wire.memory import Segment
from synk._wire.messages import HAS_BODY, Body, Kind, Reply
from synk._worker import failpoints as _failpoints
from synk._worker.dispatch import handle
from synk._worker.rank import Worker
from synk.errors import SharedMemoryError


class InlineProcess:
    """Plays a :class:`synk._master.process.WorkerProcess` without a process."""

    exit_text = ""
    started = 0.0

    def __init__(
        self,
        rank: int,
        world_size: int,
        backend: str,
        device: str,
        control: Segment,
        eventfds: Sequence[int],
        failpoints: Sequence[Any],
    ) -> None:
        self.rank = rank
        self.pid = os.getpid()
        worker = Worker(rank, world_size, backend, device, control, eventfds)
        worker.failpoint = _failpoints.arm(failpoints, rank)
        self._worker: Worker | None = worker
        self.description = worker.backend.describe()
        self._reply: Reply | None = None

    def give(self, segment: Segment) -> None:
        """Share a segment: inline, the very same mapping where a worker writes, else one like a worker's."""
        assert self._worker is not None
        if segment.is_worker_writable:
            self._worker.held.add_segment(segment.shared_view())
            return
        if segment.arena is not None:  # the message says where in the arena
            return
        with deferred():  # until the mapping owns it, the descriptor has no owner
            fd = segment.duplicate_fd()
            try:
                twin = self._worker.held.map_segment(fd, segment.id, segment.nbytes, False, segment.is_staging)
            except SharedMemoryError:  # it was not mapped
                os.close(fd)
                raise
            twin.is_arena = segment.is_arena
            self._worker.held.add_segment(twin)

    def handle(self, kind: Kind, sequence: int, value: int, body: Body | None) -> None:
        """Act on a message at once; the reply waits for :meth:`reply`."""
        worker = self._worker
        assert worker is not None
        status, flags, data = handle(worker, kind, 0, sequence, value, body)
        if data is not None:
            flags |= HAS_BODY
        worker.tidy(kind, status)
        self._reply = Reply(status, flags, data or b"")

    def reply(self) -> Reply:
        assert self._reply is not None
        reply, self._reply = self._reply, None
        return reply

    def stacks(self, timeout_s: float) -> str:
        """The rank runs in the caller's own thread: its debugger sees the stack."""
        return "inline: see the master's own stack"

    def disown(self) -> None:
        """There is no process to disown."""

    def kill(self) -> None:
        """There is nothing to kill."""

    def reap(self) -> str:
        """Drop the worker's state."""
        self.close()
        return ""

    def close(self) -> None:
        """Let go of the worker; what functions' closures still hold of it maps no memory."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
