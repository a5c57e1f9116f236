"""A rank inside the master's process, for a debugger: the same messages and answers, handled by direct calls.

It implements the protocol :class:`synk._master.processes.process.Process`. A message is handled at once, in the thread
that sends it. The answer lies in a pipe, and the master waits for it as for any rank's.
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
from synk._worker.rank import Worker
from synk.errors import SharedMemoryError

_PREFETCH, _BYE = int(Kind.PREFETCH), int(Status.BYE)  # members of an enumeration are slow to look up


class InlineChannel:
    """The connection with a rank in this process: a message is handled when it is sent, and the answer waits to be
    read.

    Parameters
    ----------
    worker : Worker
    """

    def __init__(self, worker: Worker) -> None:
        self._worker: Worker | None = worker
        self._bodies: dict[int, bytes] = {}  # of answers that were not received yet, by sequence number
        self.read_fd: int
        self.write_fd: int
        self.read_fd, self.write_fd = pipe()
        # becomes readable once the rank has said goodbye
        self.ended_fd: int = Descriptor(os.eventfd(0, os.EFD_CLOEXEC))

    def ring(self, kind: int, flags: int, sequence: int, value: int, body: Body | None = None) -> None:
        """Handle a message. Its body comes along as an object, not pickled."""
        if kind != _PREFETCH:  # for PREFETCH, an inline call has its inputs already, and the message gets no answer
            waiting(self._act, kind, flags, sequence, value, body)

    def _act(self, kind: int, flags: int, sequence: int, value: int, body: Body | None) -> None:
        worker = self._worker
        assert worker is not None
        try:
            status, reply_flags, data = handle(worker, kind, flags, sequence, value, body)
        finally:  # Ctrl-C may come at any line
            cell.worker = None
            if worker.peers.is_communicating:
                worker.peers.leave_call(worker.lane)
        self.reply(sequence, status, reply_flags, data)
        worker.tidy(kind, status)
        if status == _BYE:
            os.eventfd_write(self.ended_fd, 1)

    def reply(self, sequence: int, status: int, flags: int, body: bytes | None) -> None:
        """Put an answer into the pipe."""
        if body is not None:
            flags |= HAS_BODY
            # one message at a time: a body that was not received has no reader any more
            self._bodies = {sequence: body}
        os.write(self.write_fd, DOORBELL.pack(status, flags, sequence, 0))

    def answer(self) -> tuple[int, int, int, int] | None:
        """Read one answer's doorbell."""
        return Channel.understood(os.read(self.read_fd, DOORBELL.size))

    def receive_body(self, sequence: int) -> tuple[bytes, list[int]]:
        """Return the body of an answer."""
        return self._bodies.pop(sequence), []

    def close(self) -> None:
        """Close all descriptors and let go of the rank. It may be called again."""
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
        """Make the rank, which says hello at once. It uses the environment and the import path of this process."""
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
        """Handle a message with a body, which is not pickled."""
        for segment in segments:
            self._give(segment)
        note()
        self.channel.ring(kind, flags, sequence, value, body)
        return 0

    def _give(self, segment: Segment) -> None:
        """Share a segment: the very same mapping if workers may write to it, else a mapping like a worker's."""
        assert self._worker is not None
        if segment.is_worker_writable:
            self._worker.held.add_segment(segment.shared_view())
            return
        if segment.arena is not None:  # the message says where in the arena it lies
            return
        fd = segment.duplicate_fd()
        described = segment.id, segment.nbytes, False, segment.is_staging, segment.is_arena, segment.is_file
        try:
            twin = self._worker.held.map_segment(fd, *described)
        except SharedMemoryError:  # it was not mapped
            os.close(fd)
            raise
        self._worker.held.add_segment(twin)

    def interrupt(self) -> None:
        """Do nothing: the call runs in this very thread, so it is over."""

    def forward_output(self, fd: int) -> bool:
        """Do nothing: what the rank prints is shown at once."""
        return True

    def note_backlog(self) -> None:
        """Do nothing: there is no backlog."""

    def stderr_since(self, began: float) -> list[str]:
        return []

    def stacks(self, timeout_s: float) -> str:
        """Say where the stack is: in the caller's own thread, where a debugger sees it."""
        return "inline: see the master's own stack"

    def kill(self) -> None:
        """Do nothing: there is no process to kill."""

    def reap(self) -> str:
        """Drop the rank's state."""
        self.close()
        return ""

    def disown(self) -> None:
        """In a forked child, make the rank part of the child: its function may go on there."""
        if self._worker is not None:
            self._worker.pid = os.getpid()

    def close(self) -> None:
        """Let go of the rank. What closures still hold of it maps no memory. It may be called again."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            self.channel.close()
