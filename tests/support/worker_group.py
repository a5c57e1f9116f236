"""Worker processes around a communicator of host memory, as the runtime makes them: for the tests of communicators.

A worker takes pickled orders from its socket, one after the other, and sends back the results or the exceptions.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from support.nursery import Nurseries
from synk._wire.memory import Segment
from synk.communicators import Capabilities
from synk.communicators._layout import required_nbytes
from synk.communicators._rendezvous import reset, set_abort

# Long enough for a loaded machine; only a hang gets there.
PATIENCE_S = 60.0


class Died:
    """The outcome of a rank that ended instead of answering."""


class WorkerGroup:
    """Workers of one node or several, and what the master does for them.

    Parameters
    ----------
    counts : sequence of int
        The ranks of each node.
    rank_nbytes : int
        Small, so that few elements already make several pieces.

    Attributes
    ----------
    nodes : list of tuple of int
        The ranks of each node.
    segments : list of Segment
        One for each node.
    eventfds : list of int
        One for each rank.
    """

    program: str
    """The file that a worker runs."""

    def __init__(self, counts: Sequence[int], rank_nbytes: int) -> None:
        self.world_size = sum(counts)
        ends = itertools.accumulate(counts, initial=0)
        self.nodes = [tuple(range(low, high)) for low, high in itertools.pairwise(ends)]
        nbytes = required_nbytes(self.world_size, rank_nbytes)
        self.segments = [Segment.create(nbytes) for _ in counts]
        self.eventfds = [os.eventfd(0) for _ in range(self.world_size)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._connections: dict[int, Connection] = {}
        self._number = 0
        for rank in range(self.world_size):
            self.start(rank)
        self.join()
        self.capabilities: Capabilities = self.run(lambda endpoint: endpoint.comm.capabilities())[0]

    def options(self, rank: int) -> Sequence[int]:
        """Return what the worker of ``rank`` is told before its descriptors."""
        return ()

    def order(self, function: Callable[..., Any], args: tuple[Any, ...], ranks: tuple[int, ...], number: int) -> Any:
        """Return the order to run a function in a call."""
        return function, args, ranks, number

    def join(self) -> None:
        """Have all workers reach each other."""

    def start(self, rank: int) -> None:
        """Start the worker of ``rank``."""
        here, there = socket.socketpair()
        segment = next(segment for segment, ranks in zip(self.segments, self.nodes) if rank in ranks)
        with there:
            fds = (there.fileno(), segment.fd, *self.eventfds)
            arguments = [str(each) for each in (rank, *self.options(rank), segment.nbytes, *fds)]
            self._processes[rank] = self._forked(arguments, fds) or self._started(arguments, fds)
        self._connections[rank] = Connection(here.detach())

    def _forked(self, arguments: list[str], fds: tuple[int, ...]) -> subprocess.Popen[bytes] | None:
        """Return a worker from the nursery, where there is one."""
        nurseries = Nurseries.current
        return nurseries and nurseries.fork(f"support.{Path(self.program).stem}", arguments, fds)

    def _started(self, arguments: list[str], fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen([sys.executable, "-P", self.program, *arguments], pass_fds=fds, env=environment)

    def pid(self, rank: int) -> int:
        """Return the process id of the worker of ``rank``."""
        return self._processes[rank].pid

    def abort(self) -> None:
        """Break off the waits of all ranks, as when a call has failed."""
        for segment, ranks in zip(self.segments, self.nodes):
            set_abort(segment, [self.eventfds[rank] for rank in ranks])

    def outcomes(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Run ``function(endpoint, *args)`` on ``ranks`` (all) and return each result, exception or ``Died``.

        As the runtime does, break the waits off when a worker dies.
        """
        ranks = tuple(range(self.world_size)) if ranks is None else tuple(ranks)
        self._number += 1
        order = cloudpickle.dumps(self.order(function, args, ranks, self._number))
        for rank in ranks:
            self._connections[rank].send_bytes(order)
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
                    self.abort()
        return [found[rank] for rank in ranks]

    def run(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Like ``outcomes``; raise what the lowest failing rank raised."""
        outcomes = self.outcomes(function, *args, ranks=ranks)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def recover(self) -> None:
        """Reset the segments, start every worker that is gone, and have all reach each other."""
        dead = [rank for rank in self._processes if isinstance(self._ended(rank), int)]
        for segment, ranks in zip(self.segments, self.nodes):
            reset(segment, self.world_size, [self.eventfds[rank] for rank in ranks])
        for rank in dead:
            self._connections[rank].close()
            self.start(rank)
        self.join()

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
        for segment in self.segments:
            segment.close()


def serve(connection: Connection, act: Callable[[Any], Any]) -> None:
    """Answer each order by what ``act`` returns for it or raises, until the other end of the socket is closed."""
    while True:
        try:
            order = cloudpickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            outcome = act(order)
        except BaseException as error:
            outcome = error
        connection.send_bytes(cloudpickle.dumps(outcome))
