"""Ranks of a call, what they start and wait for later, how they sleep and wake each other, and wires between nodes.

Ranks are counted within the call, whichever of the runtime's run it. NumPy is the oracle. Requests at random are in
``test_comm_messages.py``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq
from support.harness import same_workers
from support.places import SEVERAL_RANKS, on_each
from support.rank_arrays import assert_same
from test_comm_collectives import Case, perform

import synk
from synk.communicators._layout import ControlLayout, SegmentLayout, required_nbytes
from synk.communicators._wires import Wires
from synk.errors import CollectiveMismatch, WorkerDied

CHOSEN = [(0, 2), (1, 2), (2,), (0, 1, 2)]


def rows_of(ranks: tuple[int, ...]) -> list[int]:
    """Return rows of a sharded variable with two rows for each of three ranks."""
    return [2 * rank for rank in ranks]


def everything(comm: Any, name: str) -> bool:
    """Check collectives and messages of this rank, of which there are ``comm.world_size``."""
    rank, size = comm.rank, comm.world_size
    assert 0 <= rank < size == len(comm.ranks)
    cases = [Case.drawn(name, number, size) for number in range(9)]
    assert [text for text, _ in perform(comm, cases) if text] == []
    comm.held = []
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (1, 50_000):  # through the ring, and more than that
        requests = [comm.irecv(before, tag) for tag in (1, 2, 3)]
        for tag in (3, 2, 1):
            comm.isend(np.full(count, rank + tag), after, tag)
        for tag, got in enumerate(comm.wait_all(requests), 1):
            assert_same(got, np.full(count, before + tag))
        comm.irecv(before, 9)  # a request that nobody waits for
        comm.isend(np.ones(count), after, 9)
    return True


@pytest.mark.parametrize("place", [3, "little memory", "1+2"])
def test_ranks_count_within_their_call(at: Any, place: Any, subtests: Any) -> None:
    runtime = at(place)
    x = runtime.shared(np.arange(6.0), sharded=True)

    def body(x: np.ndarray) -> Any:
        comm = synk.comm
        assert everything(comm, f"{place} {comm.ranks}")
        return repr((comm.rank, comm.world_size, comm.ranks, comm.ranks[comm.rank], float(x[0])))

    f = runtime.function(body, outputs=None)
    for ranks in CHOSEN:
        expected = [
            repr((ranks.index(rank), len(ranks), ranks, rank, 2.0 * rank)) if rank in ranks else None
            for rank in range(3)
        ]
        with subtests.test(case=f"ranks {ranks}"):
            assert f(x, batch=rows_of(ranks)) == expected
            assert f.submit(x, batch=rows_of(ranks)).result() == expected


@pytest.mark.parametrize("place", [0, 3, "1+2"])
def test_a_function_knows_its_rank_its_peers_and_their_rows(at: Any, place: Any) -> None:
    runtime = at(place)

    def who(x: np.ndarray) -> Any:
        comm = synk.comm
        assert comm is pickle.loads(pickle.dumps(comm)) is __import__("synk").comm
        return repr((comm.rank, comm.world_size, comm.ranks, comm.rows, comm.total_rows, len(x)))

    f, size = runtime.function(who, outputs=None), runtime.world_size
    for rows in (1, size, 2 * size + 1):
        lengths = [len(part) for part in np.array_split(np.zeros(rows), size)]
        ranks = tuple(rank for rank, length in enumerate(lengths) if length)
        expected = [repr((rank, len(ranks), ranks, lengths[rank], rows, lengths[rank])) for rank in ranks]
        assert f(np.zeros(rows)) == expected + [None] * (size - len(ranks))
    assert f.serial(np.zeros(9))[0] == repr((0, 1, (0,), 9, 9, 9))
    rowless = runtime.function(
        lambda: (synk.comm.ranks, synk.comm.total_rows, synk.comm.device), outputs=None, per_rank=True
    )
    device_names = [name.partition(":")[2] if "node" in name else name for name in runtime.devices]
    assert rowless() == [(tuple(range(size)), size, name) for name in device_names]


@pytest.mark.parametrize("place", [0, "1+2"])
def test_a_serial_call_and_one_row_have_one_rank(at: Any, place: Any) -> None:
    rt = at(place)
    f = rt.function(lambda x: everything(synk.comm, "alone") and synk.comm.world_size, outputs=None)
    for found in (f.serial(np.zeros(7)), f(np.zeros(1)), f.submit(np.zeros(1)).result()):
        assert found[0] == 1 and not any(found[1:])


def test_outside_of_a_call_a_rank_is_that_of_the_runtime() -> None:
    """In ``on_restart`` of a worker whose place was the first one in the call that ended it."""
    seen: list[Any] = []

    def prepare() -> None:
        for size in (3, 1 << 17):
            with pytest.raises(ValueError, match="cannot communicate outside of a call: got a collective"):
                synk.comm.all_reduce(np.ones(size), "sum")
        seen.append((synk.comm.rank, synk.comm.world_size, synk.comm.ranks))

    def body(x: np.ndarray, is_last: bool) -> Any:
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return repr((synk.comm.rank, synk.comm.world_size, *seen))

    with synk.Runtime(3, backend="numpy", on_restart=prepare) as rt:
        x = rt.shared(np.arange(6.0), sharded=True)
        f = rt.function(body, bcast_inputs="is_last", outputs=None)
        assert f(x, False, batch=rows_of((2,))) == [None, None, "(0, 1)"]
        with pytest.raises(WorkerDied):
            f(x, True, batch=rows_of((2,)))
        assert f(x, False, batch=rows_of((1, 2))) == [None, "(0, 2)", "(1, 2, (2, 3, (0, 1, 2)))"]


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


def test_a_request_belongs_to_its_call(rt: Any) -> None:
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


@pytest.mark.parametrize("world_size", (1, 2, 5, 64, 300))
def test_what_belongs_to_different_ranks_does_not_overlap(world_size: int) -> None:
    nbytes = required_nbytes(world_size)
    layout = SegmentLayout(nbytes, world_size)
    assert layout.half_nbytes % 64 == layout.ring_nbytes % 64 == 0
    assert layout.halves >= ControlLayout(world_size).nbytes
    assert layout.rings >= layout.halves + world_size * 2 * layout.half_nbytes
    assert layout.rings + world_size**2 * layout.ring_nbytes <= nbytes
    assert layout.half_nbytes >= (world_size + 1) * 64
    assert layout.ring_nbytes >= 64


def hasty(body: Callable[[Any], Any], recheck_ms: int | None) -> Callable[[Any], Any]:
    """Return a body that never spins, and looks for a deadlock every ``recheck_ms`` (None: never).

    Ranks of several nodes then report to each other at each look that they sleep.
    """

    def run(comm: Any) -> Any:
        from synk.communicators import _rendezvous, _wired

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_rendezvous, "SPIN_YIELDS", 0)
            patch.setattr(_rendezvous, "RECHECK_MS", recheck_ms)
            patch.setattr(_wired, "RECHECK_MS", recheck_ms)
            patch.setattr(_wired, "REPORT_S", 0.0)
            return body(comm)

    return run


def meet_and_pass_on(comm: Any) -> int:
    """Meet often, and pass numbers around a ring of ranks; return how many came in order."""
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for _ in range(1000):
        comm.barrier()
    for number in range(200):
        comm.isend(np.full(50, number), after)
        assert (comm.recv(before) == number).all()
    return 200


def at_random_speed(comm: Any) -> int:
    rng = random.Random(comm.rank)
    for count in (5, 10_000, 400_000) * 6:
        if rng.random() < 0.3:
            time.sleep(0.03)  # the others sleep over what this one will bring
        for _ in range(rng.randrange(3000)):
            os.sched_yield()
        assert comm.all_reduce(np.ones(count), "sum")[-1] == comm.world_size
        comm.isend(np.full(count, comm.rank), (comm.rank + 1) % comm.world_size)
        assert comm.recv((comm.rank - 1) % comm.world_size)[-1] == (comm.rank - 1) % comm.world_size
    return 200


@pytest.mark.parametrize("place", [3, "1+2"])
@pytest.mark.parametrize("body", [meet_and_pass_on, at_random_speed])
def test_none_is_lost_and_nobody_is_taken_for_stuck(shared_runtimes: Any, place: Any, body: Any) -> None:
    runtime = shared_runtimes[place]
    recheck_ms = None if body is meet_and_pass_on and place != "1+2" else 1
    assert on_each(runtime, hasty(body, recheck_ms)) == [200] * runtime.world_size


def shout(address: str, key: bytes | None, head: bytes = b"stranger") -> zmq.Socket[bytes]:
    """Return a socket that has sent to an inlet, in the clear or with a key."""
    socket = zmq.Context().socket(zmq.PUSH)
    if key is not None:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = key
    socket.sndtimeo = 2000  # the inlet may close a stranger's connection before all is sent
    socket.connect(address)
    with contextlib.suppress(zmq.Again):
        for _ in range(100):
            socket.send_multipart([head, b"y" * 100])
    return socket


def test_what_an_uninvited_client_sends_gets_nowhere() -> None:
    """It knows the address, which anybody on the machine can read, and has no key or another one."""
    wires = Wires()
    strangers = [shout(wires.address, None), shout(wires.address, zmq.curve_keypair()[0])]
    guests = [shout(wires.address, wires.key, b"guest") for _ in range(2)]
    poll = zmq.Poller()
    poll.register(wires.fd, zmq.POLLIN)
    found: list[bytes] = []
    while len(found) < 200:  # all that the guests send; the strangers have begun before them
        poll.poll(100)
        while (head := wires.receive()) is not None:
            found.append(head)
            wires.drop()
    assert set(found) == {b"guest"}
    for socket in (*strangers, *guests):
        socket.context.destroy(0)
    wires.close()
