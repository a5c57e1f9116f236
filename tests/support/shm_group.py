"""Worker processes around ``ShmCommunicator``, as the runtime makes them: for the tests of communicators only.

Run as a program it is such a worker: it takes pickled functions from its socket, runs each between ``begin`` and
``end``, and sends back the result or the exception.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import numpy as np

from support.seccomp import forbid_reading_memory
from synk._wire.memory import Segment
from synk.communicators import Buffer, Capabilities
from synk.communicators._buffers import as_array, as_buffer
from synk.communicators._layout import required_nbytes
from synk.communicators._rendezvous import reset, set_abort
from synk.communicators._shm import ShmCommunicator

# Long enough for a loaded machine; only a hang gets there.
PATIENCE_S = 60.0


@dataclass
class ShmEndpoint:
    """A rank's communicator and its memory: plain NumPy arrays."""

    comm: ShmCommunicator
    stream: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.comm.ranks

    def put(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def get(self, held: np.ndarray) -> np.ndarray:
        return held.copy()

    def buffer(self, held: np.ndarray, start: int, count: int, dtype: str) -> Buffer:
        whole = as_buffer(held)
        return Buffer(whole.ptr + start * held.itemsize, count, dtype)

    def pass_on(self, send: Buffer, recv: Buffer, after: int, before: int) -> None:
        self.comm.send_array(as_array(send), after, tag=3)
        self.comm.recv_array(as_array(recv), before, tag=3)


class Died:
    """The outcome of a rank that ended instead of answering."""


class ShmGroup:
    """Workers of one segment, and what the master does for them.

    Parameters
    ----------
    world_size : int
    rank_nbytes : int
        Small, so that few elements already make several pieces.
    blind : collection of int
        The ranks that may not read the memory of others.
    """

    def __init__(self, world_size: int, rank_nbytes: int, blind: Collection[int] = ()) -> None:
        self.world_size = world_size
        self.segment = Segment.create(required_nbytes(world_size, rank_nbytes))
        self.eventfds = [os.eventfd(0) for _ in range(world_size)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._connections: dict[int, Connection] = {}
        self._sequence = 0
        self._blind = blind
        for rank in range(world_size):
            self.start(rank)
        self.capabilities: Capabilities = self.run(lambda endpoint: endpoint.comm.capabilities())[0]

    def start(self, rank: int) -> None:
        """Start the worker of ``rank``."""
        here, there = socket.socketpair()
        with there:
            fds = (there.fileno(), self.segment.fd, *self.eventfds)
            command = [sys.executable, "-P", __file__, str(rank), str(int(rank in self._blind))]
            command += map(str, (self.segment.nbytes, *fds))
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._processes[rank] = subprocess.Popen(command, pass_fds=fds, env=environment)
        self._connections[rank] = Connection(here.detach())

    def pid(self, rank: int) -> int:
        """Return the process id of the worker of ``rank``."""
        return self._processes[rank].pid

    def outcomes(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Run ``function(endpoint, *args)`` on ``ranks`` (all) and return each result, exception or ``Died``.

        As the runtime does, set the abort word when a worker dies.
        """
        ranks = tuple(range(self.world_size)) if ranks is None else tuple(ranks)
        self._sequence += 1
        message = cloudpickle.dumps((function, args, ranks, self._sequence))
        for rank in ranks:
            self._connections[rank].send_bytes(message)
        found: dict[int, Any] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < len(ranks):
            waiting = {self._connections[rank]: rank for rank in ranks if rank not in found}
            ready = wait(list(waiting), deadline - time.monotonic())
            if not ready:
                self._dump(waiting.values())
                raise AssertionError(f"ranks {sorted(waiting.values())} hang")
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    found[rank] = cloudpickle.loads(self._connections[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    found[rank] = Died()
                    set_abort(self.segment, self.eventfds)
        return [found[rank] for rank in ranks]

    def run(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Like ``outcomes``; raise what the lowest failing rank raised."""
        outcomes = self.outcomes(function, *args, ranks=ranks)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def recover(self) -> None:
        """Reset the segment and start every worker that is gone."""
        dead = [rank for rank in self._processes if isinstance(self._ended(rank), int)]
        reset(self.segment, self.world_size, self.eventfds)
        for rank in dead:
            self._connections[rank].close()
            self.start(rank)

    def _ended(self, rank: int) -> int | None:
        """Return the exit status of a worker that closed its socket, None for one that runs."""
        if self._connections[rank].poll(0):
            return self._processes[rank].wait(PATIENCE_S)
        return self._processes[rank].poll()

    def _dump(self, ranks: Any) -> None:
        """Let the workers that hang print where, and end them."""
        for rank in list(ranks):
            self._processes[rank].send_signal(signal.SIGABRT)
            self._processes[rank].wait(PATIENCE_S)

    def close(self) -> None:
        """End all workers and give everything back."""
        for connection in self._connections.values():
            connection.close()
        for process in self._processes.values():
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for eventfd in self.eventfds:
            os.close(eventfd)
        self.segment.close()


@contextlib.contextmanager
def shm_group(world_size: int, rank_nbytes: int, blind: Collection[int] = ()) -> Iterator[ShmGroup]:
    """Make a group for a ``with`` block."""
    group = ShmGroup(world_size, rank_nbytes, blind)
    try:
        yield group
    finally:
        group.close()


def main(rank: int, is_blind: int, nbytes: int, socket_fd: int, segment_fd: int, *eventfds: int) -> None:
    """Serve as the worker of ``rank`` until the other end of the socket is closed."""
    faulthandler.enable()
    if is_blind:
        forbid_reading_memory()
    segment = Segment(segment_fd, nbytes, is_writable=True, segment_id=1)
    endpoint = ShmEndpoint(ShmCommunicator(segment, rank, len(eventfds), eventfds))
    connection = Connection(socket_fd)
    while True:
        try:
            function, args, ranks, sequence = cloudpickle.loads(connection.recv_bytes())
        except EOFError:
            break
        endpoint.comm.begin(ranks, sequence)
        try:
            outcome: Any = function(endpoint, *args)
        except BaseException as error:
            outcome = error
        endpoint.comm.end()
        connection.send_bytes(cloudpickle.dumps(outcome))
    endpoint.comm.close()
    endpoint.comm.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
