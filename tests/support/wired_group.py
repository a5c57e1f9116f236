"""Worker processes around ``TwoLevel``, on several nodes: for the tests of communicators.

Run as a program it is such a worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from support.shm_group import ShmEndpoint
from support.worker_group import WorkerGroup, serve
from synk._wire.memory import Segment
from synk.communicators._shm import ShmCommunicator
from synk.communicators._two_level import TwoLevel
from synk.communicators._wire_mail import WireMailbox
from synk.communicators._wired import WiredRendezvous
from synk.communicators._wires import Wires


class WiredGroup(WorkerGroup):
    """Workers of several nodes, and what the agents and the head do for them.

    Attributes
    ----------
    table : dict of int to (str, bytes)
        The address and the key of the inlet of each rank.
    """

    program = __file__
    table: dict[int, tuple[str, bytes]]

    def order(self, function: Callable[..., Any], args: tuple[Any, ...], ranks: tuple[int, ...], number: int) -> Any:
        groups = [tuple(rank for rank in node if rank in ranks) for node in self.nodes]
        return "call", function, args, [group for group in groups if group], number

    def join(self) -> None:
        """Have all ranks open inlets, and tell them of each other's."""
        self.table = dict(enumerate(self._answers("open")))
        self._answers("connect", self.table)

    def _answers(self, *order: Any) -> list[Any]:
        """Give all workers an order. Return what they answer, by rank."""
        for rank in range(self.world_size):
            self._connections[rank].send_bytes(cloudpickle.dumps(order))
        return [cloudpickle.loads(self._connections[rank].recv_bytes()) for rank in range(self.world_size)]


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
    wires: Wires | None = None
    mail: WireMailbox

    def act(order: Any) -> Any:
        nonlocal wires, mail
        kind, *content = order
        if kind == "open":
            if wires is not None:
                wires.close()
            wires = Wires()
            mail = WireMailbox(rank, len(eventfds), wires)
            return wires.address, wires.key
        if kind == "connect":
            return mail.wires.connect(*content)
        function, args, groups, number = content
        comm = TwoLevel(local, mail, groups)
        comm.begin(number)
        try:
            return function(ShmEndpoint(comm), *args)
        finally:
            comm.end()

    serve(Connection(socket_fd), act)
    if wires is not None:
        wires.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
