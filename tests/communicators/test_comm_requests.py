"""What functions start by ``synk.comm`` and wait for later. At random: ``test_comm_programs.py``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers
from support.places import SEVERAL_RANKS, on_each

import synk
from synk.errors import CollectiveMismatch


def sent_when_it_is_done(comm: Any) -> None:
    """Rank 1 sends only when the collective is done, which takes several meetings that the others must come to."""
    request = comm.all_reduce(np.full(300_001, 1.0), "sum", async_op=True)
    if comm.rank == 1:
        assert request.wait()[-1] == comm.world_size
        for rank in range(comm.world_size):
            comm.isend(np.array([4.0, 5.0]), rank)
    assert comm.recv(1).tolist() == [4.0, 5.0]
    assert request.wait()[0] == comm.world_size


def asked_again_and_again(comm: Any) -> None:
    """``test`` never waits, and goes on."""
    if comm.rank == 0:
        request = comm.all_reduce(np.ones(4), "sum", async_op=True)
        assert not request.test()
        comm.send(np.zeros(1), 1)
    else:
        if comm.rank == 1:
            comm.recv(0)
        request = comm.all_reduce(np.ones(4), "sum", async_op=True)
    while not request.test():
        pass
    assert request.wait().tolist() == [comm.world_size] * 4


def in_another_thread(comm: Any) -> None:
    """As autograd's on devices: one caller at a time, whichever thread it is."""
    size, found, request = comm.world_size, [], comm.all_reduce(np.ones(2), "sum", async_op=True)

    def run() -> None:
        found.append(comm.all_reduce(np.ones(1), "sum"))
        comm.isend(np.ones(2), (comm.rank + 1) % size)
        found.append(comm.recv((comm.rank - 1) % size))
        found.append(request.wait())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [each.tolist() for each in found] == [[size], [1, 1], [size, size]]
    assert comm.all_reduce(np.ones(1), "sum")[0] == size


def waited_for_by_one(comm: Any) -> None:
    """What nobody waits for is brought to its end; a request that nothing was received by is no error."""
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    request, _ = comm.all_reduce(np.ones(3), "sum", out=np.empty(3), async_op=True), comm.irecv(before)
    comm.isend(np.ones(300_000), after)
    if comm.rank == 0:
        request.wait()


BODIES: list[Callable[[Any], None]] = [
    sent_when_it_is_done,
    asked_again_and_again,
    in_another_thread,
    waited_for_by_one,
]


def test_started_ones_go_on_whatever_a_rank_waits_for(at: Any, subtests: Any) -> None:
    for place in SEVERAL_RANKS:
        for body in BODIES:
            with subtests.test(case=body.__name__, place=place):
                on_each(at(place), body)


def test_a_request_belongs_to_its_call(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    held: list[Any] = []  # each rank's own, and kept between calls

    def body(x: np.ndarray, turn: int) -> Any:
        if turn == 0:
            held.append(synk.comm.barrier(async_op=True))
            return 0
        return held[0].wait() if turn == 1 else held[0].test()

    f = rt.function(body, bcast_inputs="turn", outputs="max")
    f(np.zeros(2), 0)
    for turn in (1, 2):
        with same_workers(rt), pytest.raises(CollectiveMismatch, match="which is over"):
            f(np.zeros(2), turn)
