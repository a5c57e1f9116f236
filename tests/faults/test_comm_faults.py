"""Faults at each step of a large message: one that is left in shared memory for its receiver, and one that it reads
where it lies. The limits on that memory.
"""

from __future__ import annotations

import resource
from typing import Any

import numpy as np
import pytest

import synk
from synk.errors import CollectiveMismatch

COUNT = 600_000
"""More than a ring takes, in several chunks."""


def works(rt: synk.Runtime) -> bool:
    total = rt.function(lambda x: exchange(STEPS[0], nothing), outputs="sum")
    return bool(total(np.zeros(2)) == COUNT * (COUNT - 1) / 2)


def outbox_nbytes() -> int:
    """On a rank: how much memory of the segment through which it communicates is there: its longest mapping."""
    found: dict[int, int] = {}
    with open("/proc/self/smaps", encoding="ascii") as file:
        length = 0
        for line in file:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(each, 16) for each in first.split("-"))
                length = end - begin if "memfd:synk" in line else 0
            elif first == "Rss:" and length:
                found[length] = int(line.split()[1]) << 10
    return found[max(found)]


def test_memory_of_large_messages_is_given_back(shared_runtimes: Any) -> None:
    rt, nbytes = shared_runtimes[2], 100 << 20
    size = rt.world_size

    def body(x: np.ndarray) -> int:
        comm = synk.comm
        for turn in range(3):
            request = comm.irecv(1 - comm.rank)
            comm.isend(np.full(nbytes, turn, np.uint8), 1 - comm.rank)
            assert (request.wait() == turn).all()
        comm.barrier()
        return outbox_nbytes()

    within = max(rt.function(body, outputs=None)(np.zeros(size)))
    after = max(rt.function(lambda x: (synk.comm.barrier(), outbox_nbytes())[1], outputs=None)(np.zeros(size)))
    assert within > 2 * nbytes
    assert after < size * (80 << 20)


def resident_nbytes() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_calls", "count"), [(1, 6), pytest.param(10, 100, marks=pytest.mark.storm)])
def test_exchanges_of_64_mb_do_not_grow(shared_runtimes: Any, num_calls: int, count: int) -> None:
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
    for _ in range(num_calls):
        assert max(exchange(np.zeros(2), count)) < before + 6 * nbytes  # three messages of each rank
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
