"""A rank inside the master's process, for a debugger: the same messages and replies, handled by direct calls.

It implements the protocol :class:`synk._master.processes.process.Process`. A message is handled at once, in the thread
that sends it. The reply lies in a pipe, and the master waits for it as for any rank's. No other process is there: the
rank cannot die, and an exception of a signal handler goes through the user's function to the master's own code.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from synk._master.processes.no_process import NoProcess
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
    """The connection to a rank in this process. A message is handled when it is sent, and the reply waits to be read.

    Parameters
    ----------
    worker : Worker
    """

    def __init__(self, worker: Worker) -> None:
        self._worker: Worker | None = worker
        self._bodies: dict[int, bytes] = {}  # the bodies of replies that were not received yet, by sequence number
        self.read_fd: int
        self.write_fd: int
        self.read_fd, self.write_fd = pipe()
        # Becomes readable when the rank has said goodbye: the master takes it for the end of a process.
        self.ended_fd: int = Descriptor(os.eventfd(0, os.EFD_CLOEXEC))

    def ring(self, kind: int, flags: int, sequence: int, value: int, body: Body | None = None) -> None:
        """Handle a message. Its body is passed as an object, without a pickle."""
        if kind != _PREFETCH:  # an inline call has its inputs already, and this message gets no reply
            waiting(self._act, kind, flags, sequence, value, body)

    def _act(self, kind: int, flags: int, sequence: int, value: int, body: Body | None) -> None:
        worker = self._worker
        assert worker is not None
        try:
            status, reply_flags, data = handle(worker, kind, flags, sequence, value, body)
        finally:
            # Ctrl-C may come at any line of ``handle``. This process is the master again before anything else runs, and
            # the call's group is left, so that the next call can enter one.
            cell.worker = None
            if worker.peers.is_communicating:
                worker.peers.leave_call(worker.lane)
        self.reply(sequence, status, reply_flags, data)
        worker.tidy(kind)
        if status == _BYE:
            os.eventfd_write(self.ended_fd, 1)

    def reply(self, sequence: int, status: int, flags: int, body: bytes | None) -> None:
        """Put a reply into the pipe. There is always room, because messages are handled one at a time."""
        if body is not None:
            flags |= HAS_BODY
            # An older body that was not received has no reader any more: its request was settled.
            self._bodies = {sequence: body}
        os.write(self.write_fd, DOORBELL.pack(status, flags, sequence, 0))

    def answer(self) -> tuple[int, int, int, int] | None:
        """Read the doorbell of one reply."""
        return Channel.understood(os.read(self.read_fd, DOORBELL.size))

    def receive_body(self, sequence: int) -> tuple[bytes, list[int]]:
        """Return the body of a reply."""
        return self._bodies.pop(sequence), []

    def close(self) -> None:
        """Close all descriptors and drop the rank. A second call does nothing."""
        self._worker = None
        self.read_fd = self.write_fd = self.ended_fd = NONE


class InlineProcess(NoProcess):
    """Plays a rank without a process of its own.

    Parameters
    ----------
    rank : int
    """

    channel: InlineChannel

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
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
        # A mapping of its own, as in a worker: the rank closes it, and the master goes on using the other one.
        control = Segment(os.dup(control_fd), setup["control_nbytes"], is_writable=True, segment_id=0)
        eventfds = [extra_fds[f"event{rank}"] for rank in range(setup["world_size"])]
        worker = Worker(setup["rank"], setup["world_size"], setup["backend"], setup["device"], control, eventfds)
        control.close_fd()
        worker.failpoint = _failpoints.arm(setup["failpoints"], self.rank)
        worker.seed = setup["seed"]
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
        note()  # the rank has the segments now, even if the message is broken off in the user's function
        self.channel.ring(kind, flags, sequence, value, body)
        return 0

    def _give(self, segment: Segment) -> None:
        """Share a segment: the very same mapping if workers may write to it, else a mapping like a worker's."""
        assert self._worker is not None
        if segment.is_worker_writable:
            self._worker.held.add_segment(segment.shared_view())
            return
        if segment.arena is not None:  # the rank has the arena, and the message has the place in it
            return
        fd = segment.duplicate_fd()
        described = segment.id, segment.nbytes, False, segment.is_staging, segment.is_arena
        try:
            twin = self._worker.held.map_segment(fd, *described)
        except SharedMemoryError:  # not mapped, so nobody else will close the descriptor
            os.close(fd)
            raise
        self._worker.held.add_segment(twin)

    def note_backlog(self) -> None:
        """Do nothing: there is no backlog."""

    def close(self) -> None:
        """Drop the rank, and unmap its memory even if closures still refer to it. A second call does nothing."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            self.channel.close()
