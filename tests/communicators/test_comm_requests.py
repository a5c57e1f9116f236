"""What functions start by ``synk.comm`` and wait for later. NumPy is the oracle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers
from support.places import SEVERAL_RANKS, on_each
from support.rank_arrays import assert_same

import synk
from synk.errors import CollectiveMismatch

COUNTS = (0, 1, 1000, 300_001)
"""Elements: none, one, one piece, and several of an odd length."""


def values(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(-9, 10, count).astype("f8")


@pytest.mark.parametrize("place", [0, "little memory", "1+2"])
def test_started_collectives_give_what_those_that_wait_give(at: Any, place: Any) -> None:
    """All kinds in one row, waited for in reverse, with one that waits and messages in between."""
    runtime = at(place)
    size = runtime.world_size

    def body(comm: Any) -> bool:
        for count in COUNTS:
            total = sum(values(rank, count) for rank in range(size))
            blocks = sum(values(rank, size * count) for rank in range(size)).reshape(size, count)
            mine, rank, out, filled = values(comm.rank, count), comm.rank, np.empty(count), values(comm.rank, count)
            requests = [
                comm.all_reduce(mine, "sum", async_op=True),
                comm.all_reduce(mine, "sum", out=out, async_op=True),
                comm.broadcast(mine, size - 1, async_op=True),
                comm.broadcast(filled, size - 1, out=filled, async_op=True),
                comm.all_gather(mine, async_op=True),
                comm.reduce_scatter(values(rank, size * count), "sum", async_op=True),
                comm.barrier(async_op=True),
                comm.irecv((rank - 1) % size),
            ]
            comm.isend(mine, (rank + 1) % size)
            assert_same(comm.all_reduce(np.ones(3), "sum"), np.full(3, float(size)))
            found = [request.wait() for request in reversed(requests)][::-1]
            last = values(size - 1, count)
            stack = np.stack([values(each, count) for each in range(size)])
            assert found[1] is out and found[3] is filled
            assert_same(found[:6], [total, total, last, last, stack, blocks[rank]])
            assert found[6] is None
            assert_same(found[7], values((rank - 1) % size, count))
            assert_same(mine, values(rank, count))
            assert comm.wait_all(requests[:1])[0] is found[0]
            assert all(request.test() for request in requests)
        return True

    assert all(on_each(runtime, body))


def sent_when_it_is_done(comm: Any) -> None:
    """Rank 1 sends only when the collective is done, which takes several meetings that the others must come to."""
    request = comm.all_reduce(np.full(COUNTS[-1], 1.0), "sum", async_op=True)
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
