"""Collectives and messages over several nodes: the conformance suite, then ranks that disagree, leave and die."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import zmq
from support import conformance, disagreement, offers, signs
from support.conformance import DTYPES, CommunicatorConformance, assert_all_raise, itemsize, reduce_array
from support.disagreement import Disagreement, Messages, assert_mismatch
from support.offers import offering
from support.shm_group import ShmEndpoint
from support.signs import hear, say, sign
from support.wired_group import WiredGroup, wired_group
from support.worker_group import Died

from synk._pure.ops import REDUCE_OPS
from synk.communicators._buffers import as_buffer
from synk.communicators._shm import Aborted
from synk.communicators._wire_mail import PIECE_NBYTES, WINDOW_NBYTES
from synk.communicators._wires import Wires
from synk.errors import CollectiveMismatch

# The workers take the functions themselves, so that they need neither pytest nor this file.
cloudpickle.register_pickle_by_value(conformance)
cloudpickle.register_pickle_by_value(disagreement)
cloudpickle.register_pickle_by_value(offers)
cloudpickle.register_pickle_by_value(signs)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.sampled(90, together=0)  # each test over one division of the ranks among nodes
RANK_NBYTES = 1 << 14
LARGE = ("bool", "int64", "float16", "float32", "bfloat16", "complex128")


def named(counts: tuple[int, ...]) -> str:
    return "+".join(map(str, counts))


@pytest.fixture(scope="module", params=((1, 1), (1, 3), (2, 2), (1, 2, 1)), ids=named)
def group(request: pytest.FixtureRequest) -> Iterator[WiredGroup]:
    with wired_group(request.param, RANK_NBYTES) as made:
        yield made


class TestConformance(CommunicatorConformance):
    def counts(self, dtype: str, size: int) -> tuple[int, ...]:
        # What travels with the requests, what is copied in pieces, and what is folded in several parts.
        large = ((3 << 20) // itemsize(dtype) // size + 5,) if dtype in LARGE else ()
        return (*super().counts(dtype, size), 3001, *large)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("op", REDUCE_OPS)
    @pytest.mark.sampled(600)
    def test_reductions(self, group: WiredGroup, op: str, dtype: str) -> None:
        super().test_reductions(group, op, dtype)


@pytest.fixture(scope="module", params=((1, 2), (2, 1), (1, 1, 1)), ids=named)
def trio(request: pytest.FixtureRequest) -> Iterator[WiredGroup]:
    """Three ranks for the tests of faults."""
    with wired_group(request.param, RANK_NBYTES) as made:
        yield made


class TestDisagreement(Disagreement):
    pass


class TestMessages(Messages):
    too_many = WINDOW_NBYTES // 4


def assert_works(group: WiredGroup) -> None:
    arrays = [np.full(300_000, rank + 1.0) for rank in range(group.world_size)]
    for result in group.run(reduce_array, arrays, "sum"):
        np.testing.assert_array_equal(result, sum(arrays))


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


def test_ranks_talk_while_strangers_shout(trio: WiredGroup) -> None:
    strangers = [shout(address, None) for address, _ in trio.table.values()]
    assert_works(trio)
    for socket in strangers:
        socket.context.destroy(0)


def overfill(endpoint: ShmEndpoint) -> int:
    """Return how much of a message rank 0 sends while its receiver does not look."""
    comm = endpoint.comm
    if comm.rank == 0:
        comm.isend_array(np.ones(8 * WINDOW_NBYTES, np.uint8), 2, 0)
        unread = comm._mail._sent[2]
        comm.isend_array(np.ones(1), 1, 0)
        comm.barrier()
        return int(unread)
    if comm.rank == 2:
        comm.recv_array(None, 1, 0)  # only then does it look for what rank 0 sends
        assert comm.recv_array(None, 0, 0).all()
    else:
        comm.recv_array(None, 0, 0)
        comm.send_array(np.ones(1), 2, 0)
    comm.barrier()
    return 0


def test_a_sender_keeps_what_is_too_much() -> None:
    with wired_group((1, 2), RANK_NBYTES) as group:
        assert 0 < group.run(overfill)[0] <= WINDOW_NBYTES + PIECE_NBYTES + 4096


def test_a_rank_leaves_in_the_middle_of_a_collective(trio: WiredGroup) -> None:
    """The root cannot send it the rest. It is told of the collective, not of a message, of which it knows nothing."""
    leaver = trio.nodes[1][0]

    def broadcast(endpoint: ShmEndpoint) -> None:
        comm, array = endpoint.comm, np.ones(2 * WINDOW_NBYTES)
        operation = comm.start(comm.broadcast_steps(as_buffer(array), 0))
        if comm.rank == leaver:
            raise LookupError("in the middle")
        comm.finish(operation)

    outcomes = trio.outcomes(broadcast)
    assert isinstance(outcomes[leaver], LookupError)
    assert_mismatch(outcomes[:1], f"cannot finish a collective: rank {leaver} left the function in the middle of it")
    assert_works(trio)


@pytest.mark.parametrize("victim", (0, 1, 2))
@pytest.mark.sampled(9)
def test_survivors_leave_and_the_rank_comes_back(victim: int) -> None:
    def die(endpoint: ShmEndpoint) -> None:
        if endpoint.comm.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        endpoint.comm.barrier()

    with wired_group((1, 2), RANK_NBYTES) as group:
        outcomes = group.outcomes(die)
        assert isinstance(outcomes.pop(victim), Died)
        assert_all_raise(outcomes, Aborted)
        group.recover()
        assert_works(group)


def test_what_follows_a_message_that_was_broken_off_cannot_bring_it_to_an_end(tmp_path: Path) -> None:
    """The array has been changed meanwhile, and its receiver may have read that."""
    is_changed, was_read = sign(tmp_path / "changed"), sign(tmp_path / "read")

    def run(endpoint: ShmEndpoint) -> list[float]:
        comm = endpoint.comm
        if comm.rank == 1:
            hear(is_changed)  # before it looks at anything
            received = float(comm.recv_array(None, 0, 1).sum())
            say(was_read)
            return [received]
        if comm.rank == 2:
            comm.send_array(np.ones(1), 0, 0)
            return []
        message, array = comm.irecv_array(None, 2, 0), np.ones(5000)
        mailbox = comm._mailbox
        put = mailbox._put

        def interrupted(each: object) -> object:
            put(each)
            raise LookupError("at a bad moment")

        with offering(), contextlib.suppress(LookupError):
            mailbox._put = interrupted
            try:
                comm.send_array(array, 1, 1)
            finally:
                del mailbox._put
        array[:] = 7
        say(is_changed)
        hear(was_read)
        with contextlib.suppress(CollectiveMismatch):
            comm.test_message(message)
        comm.complete()
        return []

    with wired_group((2, 1), RANK_NBYTES) as group:
        outcomes = group.outcomes(run)
        assert_mismatch(outcomes[:1], "cannot finish send(float64, 5000 elements, to rank 1, tag 1) on rank 0")
