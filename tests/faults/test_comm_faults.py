"""The memory of large messages between ranks, and its limits. Faults while one is on its way: ``communicators``."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import synk
from synk.errors import CollectiveMismatch

COUNT = 600_000
"""More than a ring takes, in several chunks."""


def works(rt: synk.Runtime) -> bool:
    """Whether a large message from rank 0 to rank 1 arrives."""

    def pass_on(x: np.ndarray) -> float:
        if synk.comm.rank == 1:
            return float(synk.comm.recv(0).sum())
        synk.comm.isend(np.arange(float(COUNT)), 1)
        return 0.0

    return bool(rt.function(pass_on, outputs="sum")(np.zeros(2)) == COUNT * (COUNT - 1) / 2)


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
    exchange(np.zeros(2), 1)
    before = max(resident(np.zeros(2)))
    for _ in range(storm_count(1)):
        assert max(exchange(np.zeros(2), 6)) < before + 6 * nbytes  # three messages of each rank
        assert max(resident(np.zeros(2))) < before + (16 << 20)


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_without_an_outbox_messages_go_through_the_rings(limit: str) -> None:
    """Under a limit on addresses or on the size of files: slower, with the same results, and ``info`` says so."""
    number = getattr(resource, limit)
    usual = resource.getrlimit(number)
    resource.setrlimit(number, (1 << (30 if limit == "RLIMIT_FSIZE" else 44), usual[1]))
    try:
        with synk.Runtime(2, backend="numpy") as rt:
            assert works(rt)
            assert "through rings only" in str(rt.info())
            with pytest.raises(CollectiveMismatch, match="without receiving"):
                rt.function(lambda x: synk.comm.isend(np.zeros(COUNT), 0).wait(), outputs=None)(np.zeros(2))
            assert works(rt)
    finally:
        resource.setrlimit(number, usual)
