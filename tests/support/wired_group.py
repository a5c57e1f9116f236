"""Worker processes around ``TwoLevel``, as the runtime makes them on several nodes: for the tests of communicators.

Run as a program it is such a worker; see ``shm_group``, whose groups these generalise. Each node has a segment, and the
inlets' addresses and keys travel through the workers' sockets.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from support.shm_group import PATIENCE_S, Died, ShmEndpoint
from synk._wire.memory import Segment
from synk.communicators import Capabilities
from synk.communicators._layout import required_nbytes
from synk.communicators._rendezvous import reset, set_abort
from synk.communicators._shm import ShmCommunicator
from synk.communicators._two_level import TwoLevel
from synk.communicators._wire_mail import WireMailbox
from synk.communicators._wired import WiredRendezvous
from synk.communicators._wires import Wires


class WiredGroup:
    """Workers of several nodes, and what the agents and the head do for them.

    Parameters
    ----------
    counts : sequence of int
        The ranks of each node.
    rank_nbytes : int
        Of the segments.
    """

    def __init__(self, counts: Sequence[int], rank_nbytes: int) -> None:
        self.world_size = sum(counts)
        ends = list(itertools.accumulate(counts, initial=0))
        self.nodes = [tuple(range(low, high)) for low, high in itertools.pairwise(ends)]
        nbytes = required_nbytes(self.world_size, rank_nbytes)
        self.segments = [Segment.create(nbytes) for _ in counts]
        self.eventfds = [os.eventfd(0) for _ in range(self.world_size)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._connections: dict[int, Connection] = {}
        self._number = 0
        for rank in range(self.world_size):
            self.start(rank)
        self.table: dict[int, tuple[str, bytes]] = {}
        self.join()
        self.capabilities: Capabilities = self.run(lambda endpoint: endpoint.comm.capabilities())[0]

    def node_of(self, rank: int) -> int:
        return next(node for node, ranks in enumerate(self.nodes) if rank in ranks)

    def start(self, rank: int) -> None:
        """Start the worker of ``rank``."""
        here, there = socket.socketpair()
        segment = self.segments[self.node_of(rank)]
        with there:
            fds = (there.fileno(), segment.fd, *self.eventfds)
            command = [sys.executable, "-P", __file__, *map(str, (rank, segment.nbytes, *fds))]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._processes[rank] = subprocess.Popen(command, pass_fds=fds, env=environment)
        self._connections[rank] = Connection(here.detach())

    def join(self) -> None:
        """Have all ranks open inlets, and tell them of each other's."""
        for connection in self._connections.values():
            connection.send_bytes(cloudpickle.dumps(("open",)))
        self.table = {rank: cloudpickle.loads(each.recv_bytes()) for rank, each in self._connections.items()}
        for connection in self._connections.values():
            connection.send_bytes(cloudpickle.dumps(("connect", self.table)))

    def pid(self, rank: int) -> int:
        """Return the process id of the worker of ``rank``."""
        return self._processes[rank].pid

    def abort(self) -> None:
        """Break off the waits of all ranks, as agents do when a call has failed."""
        for node, ranks in enumerate(self.nodes):
            set_abort(self.segments[node], [self.eventfds[rank] for rank in ranks])

    def outcomes(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Run ``function(endpoint, *args)`` on ``ranks`` (all) and return each result, exception or ``Died``.

        As the runtime does, break the waits off when a worker dies.
        """
        ranks = tuple(range(self.world_size)) if ranks is None else tuple(ranks)
        groups = [tuple(rank for rank in node if rank in ranks) for node in self.nodes]
        self._number += 1
        order = cloudpickle.dumps(("call", function, args, [group for group in groups if group], self._number))
        for rank in ranks:
            self._connections[rank].send_bytes(order)
        found: dict[int, Any] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < len(ranks):
            waiting = {self._connections[rank]: rank for rank in ranks if rank not in found}
            ready = wait(list(waiting), deadline - time.monotonic())
            if not ready:
                for rank in waiting.values():  # let the workers that hang print where
                    self._processes[rank].send_signal(signal.SIGABRT)
                    self._processes[rank].wait(PATIENCE_S)
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
        """Reset the segments, start every worker that is gone, and join anew."""
        for node, ranks in enumerate(self.nodes):
            reset(self.segments[node], self.world_size, [self.eventfds[rank] for rank in ranks])
        for rank, connection in self._connections.items():
            if connection.poll(0) or self._processes[rank].poll() is not None:
                self._processes[rank].wait(PATIENCE_S)
                connection.close()
                self.start(rank)
        self.join()

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


@contextlib.contextmanager
def wired_group(counts: Sequence[int], rank_nbytes: int) -> Iterator[WiredGroup]:
    """Make a group for a ``with`` block."""
    group = WiredGroup(counts, rank_nbytes)
    try:
        yield group
    finally:
        group.close()


def main(rank: int, nbytes: int, socket_fd: int, segment_fd: int, *eventfds: int) -> None:
    """Serve as the worker of ``rank`` until the other end of the socket is closed."""
    faulthandler.enable()
    segment = Segment(segment_fd, nbytes, is_writable=True, segment_id=1)
    local = ShmCommunicator(segment, rank, len(eventfds), eventfds, rendezvous_type=WiredRendezvous)
    connection = Connection(socket_fd)
    wires: Wires | None = None
    while True:
        try:
            kind, *content = cloudpickle.loads(connection.recv_bytes())
        except EOFError:
            break
        if kind == "open":
            if wires is not None:
                wires.close()
            wires = Wires()
            mail = WireMailbox(rank, len(eventfds), wires)
            connection.send_bytes(cloudpickle.dumps((wires.address, wires.key)))
        elif kind == "connect":
            assert wires is not None
            wires.connect(*content)
        else:
            function, args, groups, number = content
            comm = TwoLevel(local, mail, groups)
            comm.begin(number)
            try:
                outcome: Any = function(ShmEndpoint(comm), *args)  # type: ignore[arg-type]
            except BaseException as error:
                outcome = error
            comm.end()
            connection.send_bytes(cloudpickle.dumps(outcome))
    if wires is not None:
        wires.close()
    local.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
