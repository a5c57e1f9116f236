"""A rank inside the master's process, for a debugger: the same messages and answers, handled by direct calls.

It stands behind the protocol of :class:`synk._master.processes.process.Process`. A message is handled at once, as it is
sent, in the thread that sends it; the answer lies in a pipe, and is waited for like that of any rank.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from synk._master.workers.starting import own_versions
from synk._pure.interrupts import waiting
from synk._wire.cell import cell
from synk._wire.channel import Channel
from synk._wire.descriptors import NONE, Descriptor, pipe
from synk._wire.memory import Segment
from synk._wire.messages import DOORBELL, HAS_BODY, Body, Kind, Status
from synk._worker import failpoints as _failpoints
from synk._worker.loop.dispatch import handle
from synk._worker.loop.quiet import REPLIED, prepare
from synk._worker.rank import Worker
from synk.errors import SharedMemoryError


class InlineChannel:
    """The connection with a rank in this process: a message is handled as it is rung, the answer waits to be read.

    Parameters
    ----------
    worker : Worker
    """

    def __init__(self, worker: Worker) -> None:
        self._worker: Worker | None = worker
        self._bodies: dict[int, bytes] = {}  # of answers, by sequence number, until they are received
        self.read_fd: int
        self.write_fd: int
        self.read_fd, self.write_fd = pipe()
        self.ended_fd: int = Descriptor(os.eventfd(0, os.EFD_CLOEXEC))  # can be read once the rank has said goodbye

    def ring(self, kind: int, flags: int, sequence: int, value: int, body: Body | None = None) -> None:
        """Act on a message. A body comes with it, as the object that it is."""
        if kind != Kind.PREFETCH:  # else the call has its inputs at once, and this message gets no answer
            waiting(self._act, kind, flags, sequence, value, body)

    def _act(self, kind: int, flags: int, sequence: int, value: int, body: Body | None) -> None:
        worker = self._worker
        assert worker is not None
        quiet = worker.held.quiet.get(value) if kind == Kind.CALL and body is None else None
        answer = None
        if quiet is not None:
            try:
                answer = quiet.run(worker, sequence, self)
            finally:
                cell.worker = None  # Ctrl-C may come at any line
            if answer is REPLIED:
                return
        status, reply_flags, data = answer or handle(worker, kind, flags, sequence, value, body)
        self.reply(sequence, status, reply_flags, data)
        worker.tidy(kind, status)
        prepare(worker, kind, status, value, body)
        if kind == Kind.CLOSE:
            os.eventfd_write(self.ended_fd, 1)

    def reply(self, sequence: int, status: int, flags: int, body: bytes | None) -> None:
        """Have an answer wait to be read."""
        if body is not None:
            flags |= HAS_BODY
            self._bodies = {sequence: body}  # one message at a time: what was not received has no reader any more
        os.write(self.write_fd, DOORBELL.pack(status, flags, sequence, 0))

    def answer(self) -> tuple[int, int, int, int] | None:
        """Read one answer's doorbell."""
        return Channel.understood(os.read(self.read_fd, DOORBELL.size))

    def receive_body(self, sequence: int) -> tuple[bytes, list[int]]:
        """Return the body of an answer."""
        return self._bodies.pop(sequence), []

    def close(self) -> None:
        """Close all descriptors and let go of the rank; safe to repeat."""
        self._worker = None
        self.read_fd = self.write_fd = self.ended_fd = NONE


class InlineProcess:
    """Plays a rank without a process of its own.

    Parameters
    ----------
    rank : int
    """

    is_inline: ClassVar[bool] = True
    exit_text = ""
    started = 0.0
    channel: InlineChannel

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = os.getpid()
        self._worker: Worker | None = None

    def start(
        self,
        setup: dict[str, Any],
        environment: dict[str, str],
        control_fd: int,
        token: bytes,
        extra_fds: dict[str, int],
    ) -> None:
        """Make the rank, which says hello at once; the environment and the import path are those of this process."""
        control = Segment(os.dup(control_fd), setup["control_nbytes"], is_writable=True, segment_id=0)
        eventfds = [extra_fds[f"event{rank}"] for rank in range(setup["world_size"])]
        worker = Worker(setup["rank"], setup["world_size"], setup["backend"], setup["device"], control, eventfds)
        control.close_fd()
        worker.failpoint = _failpoints.arm(setup["failpoints"], self.rank)
        worker.seed = setup["seed"]
        worker.is_inline = True
        self._worker = worker
        self.channel = InlineChannel(worker)
        hello = {"versions": own_versions(), "device": worker.backend.describe()}
        self.channel.reply(0, Status.HELLO, 0, pickle.dumps(hello, protocol=5))

    def watched(self) -> list[tuple[int, str]]:
        return [(self.channel.read_fd, "up"), (self.channel.ended_fd, "death")]

    def deliver(
        self,
        kind: int,
        flags: int,
        sequence: int,
        value: int,
        body: Body,
        segments: Sequence[Segment],
        note: Callable[[], None],
    ) -> int:
        """Act on a message with a body, which is not pickled."""
        for segment in segments:
            self._give(segment)
        note()
        self.channel.ring(kind, flags, sequence, value, body)
        return 0

    def _give(self, segment: Segment) -> None:
        """Share a segment: the very same mapping where a worker writes, else one like a worker's."""
        assert self._worker is not None
        if segment.is_worker_writable:
            self._worker.held.add_segment(segment.shared_view())
            return
        if segment.arena is not None:  # the message says where in the arena
            return
        fd = segment.duplicate_fd()
        try:
            twin = self._worker.held.map_segment(fd, segment.id, segment.nbytes, False, segment.is_staging)
        except SharedMemoryError:  # it was not mapped
            os.close(fd)
            raise
        twin.is_arena, twin.is_file = segment.is_arena, segment.is_file
        self._worker.held.add_segment(twin)

    def interrupt(self) -> None:
        """The call is over: it runs in the thread that is here now."""

    def forward_output(self, fd: int) -> bool:
        """What the rank prints is shown as it is printed."""
        return True

    def note_backlog(self) -> None:
        """There is none."""

    def stderr_since(self, began: float) -> list[str]:
        return []

    def stacks(self, timeout_s: float) -> str:
        """The rank runs in the caller's own thread: its debugger sees the stack."""
        return "inline: see the master's own stack"

    def kill(self) -> None:
        """There is nothing to kill."""

    def reap(self) -> str:
        """Drop the rank's state."""
        self.close()
        return ""

    def disown(self) -> None:
        """The rank of a forked child, whose function may go on there, is part of the child."""
        if self._worker is not None:
            self._worker.pid = os.getpid()

    def close(self) -> None:
        """Let go of the rank; what functions' closures still hold of it maps no memory. Safe to repeat."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            self.channel.close()
