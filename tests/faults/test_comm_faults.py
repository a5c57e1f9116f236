"""The memory of large messages between ranks. Faults while one is on its way: ``communicators``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import synk


def resident_nbytes() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))


def test_exchanges_of_64_mb_do_not_grow(shared_runtimes: Any, storm_count: Callable[[int], int]) -> None:
    """Neither within a call, where a rank may be ahead of the other by a message, nor from call to call."""
    rt, nbytes = shared_runtimes[2], 64 << 20

    def body(x: np.ndarray, count: int) -> int:
        comm, peer = synk.comm, 1 - synk.comm.rank
        for number in range(count):
            request = comm.irecv(peer)
            comm.isend(np.full(nbytes, number % 256, np.uint8), peer)
            assert (request.wait() == number % 256).all()
        comm.barrier()
        return resident_nbytes()

    exchange = rt.function(body, bcast_inputs="count", outputs=None)
    resident = rt.function(lambda x: (synk.comm.barrier(), resident_nbytes())[1], outputs=None)
    exchange(np.zeros(2), 6)  # from here on both keep the memory of two copies
    before = max(resident(np.zeros(2)))
    for _ in range(storm_count(1)):
        assert max(exchange(np.zeros(2), 6)) < before + 6 * nbytes  # three messages of each rank
        assert max(resident(np.zeros(2))) < before + (16 << 20)
