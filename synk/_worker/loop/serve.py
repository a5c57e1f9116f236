"""A worker's process: tied to its master's life, it receives a message, has the worker act on it, and replies.

It ends when the master says so, or when the master itself ends.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
import threading
from typing import Any

import numpy as np

from synk._version import __version__
from synk._wire.channel import Channel, Patience
from synk._wire.control import Down, control_nbytes, is_interrupted
from synk._wire.descriptors import NONE, Descriptor
from synk._wire.lifeline import tie_to_master
from synk._wire.logs import send_records
from synk._wire.memory import Segment
from synk._wire.messages import HAS_BODY, IS_UNRECEIVED, LANE_SHIFT, Body, Kind, Status
from synk._worker import failpoints as _failpoints
from synk._worker import process
from synk._worker.failures import pack_failure
from synk._worker.loop.calls import DeviceLost, end_copy, guarded
from synk._worker.loop.dispatch import handle
from synk._worker.rank import Doorbell, Worker
from synk.errors import SharedMemoryError

# Members of an enumeration are slow to look up.
_CALL, _PREFETCH, _CLOSE = int(Kind.CALL), int(Kind.PREFETCH), int(Kind.CLOSE)
_BEFORE_REPLY = {_CALL: "call.before_reply", int(Kind.ITEMS): "call.before_reply", _CLOSE: "close.received"}


AGAIN_S = 0.05
"""An interrupt that comes while a module is imported comes again after this time."""


class WorkerLoop:
    """The life of a worker process around its :class:`Worker`: start, receive, reply, end."""

    def __init__(self, sock: socket.socket, setup: dict[str, Any]) -> None:
        self._setup = setup
        fds = setup["fds"]
        for fd in fds.values():
            os.set_inheritable(fd, False)  # programs that a function starts must not keep our pipes open
        self._channel = Channel(sock, Descriptor(fds["down"]), Descriptor(fds["up"]), bytes.fromhex(setup["token"]))
        self._worker: Worker | None = None
        self._master_fd: int = NONE
        self._pulse: Descriptor | None = None
        self._peeked: Doorbell | None = None  # taken from the pipe and not acted on yet
        self._arriving = select.poll()
        self._arriving.register(self._channel.read_fd, select.POLLIN)

    def start(self) -> None:
        """Tie this process to the master's life, set up signals, and say hello."""
        setup = self._setup
        # First: whatever happens below, and however long it takes, this process cannot outlive its master any more.
        self._master_fd, self._pulse = tie_to_master(setup)
        # The mask was inherited from the thread that started this process. The master sends SIGINT only after the
        # hello, so no interrupt finds this process without its handler.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.signal(signal.SIGINT, self._on_interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        process.prefer_for_oom()
        send_records(Descriptor(setup["fds"]["log"]))
        failpoint = _failpoints.arm(setup["failpoints"], setup["first_rank"] + setup["rank"])
        failpoint("start.import")
        control = Segment(setup["fds"]["control"], setup["control_nbytes"], is_writable=True, segment_id=0)
        assert control.nbytes >= control_nbytes(setup["world_size"])
        if setup["cpus"]:
            os.sched_setaffinity(0, setup["cpus"])  # before the array library starts its threads
        eventfds = [setup["fds"][f"event{rank}"] for rank in range(setup["world_size"])]
        who = setup["rank"], setup["world_size"], setup["backend"], setup["device"]
        worker = self._worker = Worker(*who, control, eventfds, setup["first_rank"], setup["total_ranks"])
        worker.device = setup["node"] + setup["device"]
        worker.failpoint, worker.seed, worker.peek = failpoint, setup["seed"], self._peek
        worker.peers.patience_s = setup["spin_s"]
        os.register_at_fork(after_in_child=worker.disown)
        control.close_fd()
        failpoint("start.ready")
        import platform

        versions = {"python": platform.python_version(), "numpy": np.__version__, "synk": __version__}
        hello = {"versions": versions, "device": worker.backend.describe()}
        self._reply(Status.HELLO, 0, 0, pickle.dumps(hello, protocol=5))

    def serve(self) -> None:
        """Answer messages until the master says goodbye or is gone."""
        worker = self._worker
        assert worker is not None
        channel = self._channel
        waiting = select.poll()
        waiting.register(channel.read_fd, select.POLLIN)
        waiting.register(self._master_fd, select.POLLIN)
        patience = Patience(self._setup["spin_s"])
        while True:
            message, self._peeked = self._peeked, None
            if message is None:
                events = patience.wait(waiting)
                if len(events) == 1 and events[0][0] != channel.read_fd:
                    # Only the master's pidfd is ready: it is dead, and no message of it is left in the pipe.
                    os.killpg(0, signal.SIGKILL)
                message = channel.answer()
            if message is None:
                os.killpg(0, signal.SIGKILL)
                return
            kind, flags, sequence, value = message
            if kind == _PREFETCH:
                worker.prefetch(flags >> LANE_SHIFT, value)
                continue
            body = None
            if flags & HAS_BODY:
                try:
                    body = self._receive_body(sequence)
                except SharedMemoryError as error:  # this process hit a limit: the master sends everything again
                    self._refuse(worker, kind, flags, sequence, error)
                    continue
            status, reply_flags, data = handle(worker, kind, flags, sequence, value, body)
            body = None
            # Before the doorbell, so that the master finds the lines and the reply in one poll and shows the lines
            # before the call returns.
            _flush_output(worker)
            if worker.is_armed and kind in _BEFORE_REPLY:
                worker.failpoint(_BEFORE_REPLY[kind])
            if data is None:
                channel.ring(status, reply_flags, sequence, 0)
            else:
                self._reply(status, reply_flags, sequence, data)
            if kind == _CLOSE:
                return
            if worker.is_armed and kind == _CALL:
                worker.failpoint("call.after_reply")
            worker.tidy(kind)

    def _refuse(self, worker: Worker, kind: int, flags: int, sequence: int, error: SharedMemoryError) -> None:
        """Reply with an error to a message that could not be received."""
        if kind == _CALL:
            # The other ranks may be in this call and wait for this one. It leaves the call without having begun it.
            worker.lane = worker.lanes[flags >> LANE_SHIFT]
            worker.lane.called = None
            worker.peers.leave_call(worker.lane)
        failure = pack_failure(error, worker.number, worker.device)
        self._reply(Status.ERROR, IS_UNRECEIVED, sequence, pickle.dumps(failure, protocol=5))
        worker.tidy(kind)

    def _peek(self) -> Doorbell | None:
        """Return the next doorbell if it has arrived, without consuming it."""
        if self._peeked is None and self._arriving.poll(0):
            self._peeked = self._channel.answer()
        return self._peeked

    def close(self) -> None:
        """Release the connection; the end of the process follows."""
        self._channel.close()
        self._master_fd = NONE

    def _receive_body(self, sequence: int) -> Body:
        assert self._worker is not None
        data, fds = self._channel.receive_body(sequence)
        body = pickle.loads(data)
        assert isinstance(body, Body)
        held = self._worker.held
        arriving = iter(list(zip(body.segments, fds)))
        arrived: list[Segment] = []
        for described, fd in arriving:
            if described[0] in held.segments:  # the master sends a segment twice if it was interrupted
                os.close(fd)
                continue
            try:
                segment = held.map_segment(fd, *described)
            except SharedMemoryError:  # take in nothing: the master counts all of the message as not received
                for _, later in arriving:
                    os.close(later)
                os.close(fd)
                for segment in arrived:
                    segment.close()
                raise
            arrived.append(segment)
        # Only now, because the message counts as received as a whole or not at all.
        for segment in arrived:
            held.add_segment(segment)
        return body

    def _reply(self, status: Status, flags: int, sequence: int, body: bytes) -> None:
        channel, worker = self._channel, self._worker
        assert worker is not None
        flags |= HAS_BODY
        # The body goes first, so that the master can read it without waiting once it sees the doorbell.
        try:
            channel.send_body(sequence, body)
        except SharedMemoryError as error:  # a large body needs a descriptor, this small error does not
            worker.executor.forget()
            failure = pack_failure(error, worker.number, worker.device)
            status, flags = Status.ERROR, HAS_BODY
            channel.send_body(sequence, pickle.dumps(failure, protocol=5))
        if status != Status.HELLO:
            worker.failpoint("call.after_header")
        channel.ring(status, flags, sequence, 0)

    def _on_interrupt(self, signum: int, frame: Any) -> None:
        worker = self._worker
        # The master has written the word before it sent the signal, so the word is here.
        # A signal that comes late, for a call that has ended, must not hit the next call.
        if worker is None or not is_interrupted(int(worker.down[worker.rank, Down.INTERRUPT]), worker.sequence):
            return
        if worker.is_interruptible and process.is_importing(frame, guarded.__code__):
            threading.Timer(AGAIN_S, signal.pthread_kill, (threading.get_ident(), signum)).start()
        elif worker.is_interruptible:
            worker.interrupt()
        else:
            worker.num_deferred += 1


def _flush_output(worker: Worker) -> None:
    """Flush what was printed, so that it reaches the master."""
    if worker.is_copy:
        end_copy(worker)
    process.flush_output()


def main(sock: socket.socket, setup: dict[str, Any]) -> None:
    """Run a worker. The bootstrap calls this once ``sys.path`` is set."""
    process.prepare(setup["fds"]["stacks"])
    loop = WorkerLoop(sock, setup)
    loop.start()
    process.take_over(setup)
    try:
        loop.serve()
    except DeviceLost as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)  # nothing of the array library may touch the device any more
    loop.close()
