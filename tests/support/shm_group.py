"""Worker processes around ``ShmCommunicator``: for the tests of communicators. Run as a program it is such a worker."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from support.seccomp import forbid_reading_memory
from support.worker_group import WorkerGroup, serve
from synk._wire.memory import Segment
from synk.communicators import Buffer
from synk.communicators._buffers import as_array, as_buffer
from synk.communicators._host import HostCommunicator
from synk.communicators._shm import ShmCommunicator


@dataclass
class ShmEndpoint:
    """A rank's communicator and its memory: plain NumPy arrays."""

    comm: HostCommunicator
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


class ShmGroup(WorkerGroup):
    """Workers of one segment.

    Parameters
    ----------
    world_size : int
    rank_nbytes : int
        Small, so that few elements already make several pieces.
    blind : collection of int
        The ranks that may not read the memory of others.
    """

    program = __file__

    def __init__(self, world_size: int, rank_nbytes: int, blind: Collection[int] = ()) -> None:
        self._blind = blind
        super().__init__([world_size], rank_nbytes)

    def options(self, rank: int) -> Sequence[int]:
        return [int(rank in self._blind)]


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

    def act(order: Any) -> Any:
        function, args, ranks, number = order
        endpoint.comm.begin(ranks, number)
        try:
            return function(endpoint, *args)
        finally:
            endpoint.comm.end()

    serve(Connection(socket_fd), act)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
