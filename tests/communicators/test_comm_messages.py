"""Messages of ``synk.comm``: whatever their shape, dtype and size, in order, and the sender may change its array.

Random programs of messages and started collectives, each rank its own, against what they must give. A program is made
from one global order of events: no rank ever waits for what is later in it, so nobody can be stuck. With one send left
out somebody must be: every rank then has an error, and none hangs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers
from support.places import PLACES, on_each
from support.rank_arrays import assert_same
from support.saboteurs import resident_nbytes

import synk
from synk.errors import CollectiveMismatch

ARRAYS = [
    np.arange(count).astype(dtype).reshape(shape)
    for dtype in ("f8", "f4", "i2", "u1", "c16", "?", "longdouble", ">f8")
    for count, shape in ((1, ()), (0, (0,)), (0, (3, 0)), (5, (5,)), (6, (2, 3)), (24, (2, 1, 3, 1, 2, 2)))
]
ARRAYS += [np.arange(90_000.0).reshape(300, 300), np.arange(12.0).reshape(3, 4).T, np.arange(9.0)[::2]]


@pytest.mark.parametrize("place", PLACES)
def test_a_message_brings_its_shape_and_dtype(at: Any, place: Any) -> None:
    runtime = at(place)
    size = runtime.world_size

    def body(comm: Any) -> bool:
        after, before = (comm.rank + 1) % size, (comm.rank - 1) % size
        for array in ARRAYS:
            for _ in range(3):
                comm.isend(array, after, 7) if size == 1 else comm.send(array, after, 7)
            got = comm.recv(before, 7)
            assert got.dtype == array.dtype.newbyteorder("=")
            assert got.flags.writeable
            assert got.shape == array.shape
            np.testing.assert_array_equal(got, array)
            like, out = np.zeros_like(array), np.zeros_like(got)
            np.testing.assert_array_equal(comm.recv(before, 7, like=like), array)
            assert comm.recv(before, 7, out=out) is out
            np.testing.assert_array_equal(out, array)
            assert not like.any()
        return True

    assert all(on_each(runtime, body))


@pytest.mark.parametrize("place", [2, "1+1"])
def test_messages_of_18_mb_in_both_directions_at_once(shared_runtimes: Any, place: Any) -> None:
    """More than the memory that is kept for them: one that waits for its receiver, and two that do not."""
    count = 18_000_000 // 8

    def body(comm: Any) -> bool:
        peer = 1 - comm.rank
        requests = [comm.irecv(peer, 1), comm.irecv(peer, 2, like=np.empty(count))]
        array = np.arange(float(count)) + 10 * comm.rank
        comm.send(array, peer)
        for tag in (1, 2):
            array += 1
            comm.isend(array, peer, tag)
        array[:] = -1
        last, first = requests[1].wait(), requests[0].wait()
        got = [comm.recv(peer, out=array), first, last]
        assert got[0] is array
        return all((each - np.arange(float(count)) == 10 * peer + number).all() for number, each in enumerate(got))

    assert all(on_each(shared_runtimes[place], body))


@pytest.mark.parametrize("place", [2, "blind", "1+2"])
def test_the_kth_request_gets_the_kth_message(at: Any, place: Any) -> None:
    """Also where a recv comes between them, and where the messages are there before they are asked for."""

    def body(comm: Any) -> str:
        if comm.rank == 0:
            for number in range(6):
                comm.isend(np.full(3, float(number)), 1)
            comm.isend(np.zeros(1), 1, 9)
        if comm.rank != 1:
            return ""
        first, second = comm.irecv(0), comm.irecv(0, like=np.empty(3))
        third = comm.recv(0)
        comm.recv(0, 9)  # with everything before it taken in
        place = np.empty(3)
        fourth, fifth = comm.irecv(0, out=place), comm.irecv(0)
        sixth = comm.recv(0)
        assert fourth.test() and fifth.test()
        found = [fifth.wait(), fourth.wait(), second.wait(), first.wait(), third, sixth]
        assert found[1] is place
        return repr([float(each[0]) for each in found])

    assert on_each(at(place), body)[1] == repr([4.0, 3.0, 1.0, 0.0, 2.0, 5.0])


def after_all_others(comm: Any) -> None:
    """Rank 1 looks for the large message only when it has got what rank 0 sends after it, by way of all others."""
    large = np.arange(2_000_000.0)
    if comm.rank == 0:
        comm.isend(large, 1, 1)
    comm.barrier()
    if comm.rank != 1:
        comm.isend(np.ones(1), 1, 2)
    for rank in range(comm.world_size):
        if comm.rank == 1 != rank:
            comm.recv(rank, 2)
    assert comm.all_reduce(np.ones(1), "sum")[0] == comm.world_size
    assert comm.rank != 1 or (comm.recv(0, 1) == large).all()


def in_a_collective(comm: Any) -> None:
    """The message is larger than any ring, and its receiver is in a collective that the sender joins later."""
    large = np.arange(2_000_000.0)
    if comm.rank == 0:
        comm.send(large, 1)
    assert comm.all_reduce(np.ones(1), "sum")[0] == comm.world_size
    assert comm.rank != 1 or (comm.recv(0) == large).all()


def as_the_last_thing(comm: Any) -> None:
    """What was sent before leaving arrives."""
    last = comm.world_size - 1
    if comm.rank == 0:
        comm.send(np.arange(100.0), last, 1)
        comm.isend(np.arange(300_000.0), last, 2)
    elif comm.rank == last:
        assert (comm.recv(0, 2) == np.arange(300_000.0)).all() and (comm.recv(0, 1) == np.arange(100.0)).all()


def far_more_than_is_looked_at(comm: Any) -> None:
    """The receiver first waits for another rank, to which the sender of it all has written later."""
    last = comm.world_size - 1
    if comm.rank == 0:
        comm.isend(np.ones(1 << 24, np.uint8), last, 1)
        comm.isend(np.ones(1), 1, 2)
    if comm.rank == 1:
        comm.recv(0, 2)
        comm.isend(np.ones(1), last, 3)
    if comm.rank == last:
        comm.recv(1, 3)
        assert comm.recv(0, 1).all()


LARGE_ONES: list[Callable[[Any], None]] = [
    after_all_others,
    in_a_collective,
    as_the_last_thing,
    far_more_than_is_looked_at,
]


@pytest.mark.parametrize("place", [2, "little memory", "1+2"])
def test_large_messages_arrive_whatever_their_receiver_does(at: Any, place: Any, subtests: Any) -> None:
    for body in LARGE_ONES:
        with subtests.test(case=body.__name__):
            on_each(at(place), body)


def test_exchanges_of_40_mb_do_not_grow(shared_runtimes: Any, storm_count: Callable[[int], int]) -> None:
    """Neither within a call, where a rank may be ahead of the other by a message, nor from call to call."""
    runtime, nbytes = shared_runtimes[2], 40 << 20

    def exchange(comm: Any) -> int:
        for number in range(6):
            request = comm.irecv(1 - comm.rank)
            comm.isend(np.full(nbytes, number, np.uint8), 1 - comm.rank)
            assert (request.wait() == number).all()
        comm.barrier()
        return resident_nbytes()

    def rest(comm: Any) -> int:
        comm.barrier()
        return resident_nbytes()

    on_each(runtime, exchange)  # from here on both keep the memory of two copies
    before = max(on_each(runtime, rest))
    for _ in range(storm_count(1)):
        assert max(on_each(runtime, exchange)) < before + 6 * nbytes  # three messages of each rank
        assert max(on_each(runtime, rest)) < before + (16 << 20)


RINGS = (1344, 349_440, 524_224)
"""The bytes that a sender may have under way to one of three receivers with little memory, of three and of two."""
COUNTS = (0, 1, 4, 5, 1000, *(ring // 8 + more for ring in RINGS for more in (-12, -4, 0, 1)), 140_000)
"""Nothing, a number, less than a line and more, about what fills a ring, more than any."""


@dataclass(frozen=True)
class Event:
    """What a rank does: start to send or receive message ``number``, or wait for it; likewise for a collective."""

    kind: str
    number: int
    peer: int = -1
    tag: int = 0
    count: int = 0


def program(seed: str, size: int) -> list[list[Event]]:
    """Return what each rank does."""
    rng = random.Random(seed)
    timed: list[tuple[float, int, Event]] = []
    for number in range(rng.randrange(4, 25)):
        sender, receiver, tag = rng.randrange(size), rng.randrange(size), rng.randrange(2)
        count = rng.choice(COUNTS)
        sent, waited = sorted((rng.random(), rng.random()))
        # One that waits for its receiver might wait for a rank that waits for all in a collective.
        kind = "isend" if count > 5 else rng.choice(("send", "isend"))
        timed.append((sent, sender, Event(kind, number, receiver, tag, count)))
        timed.append((waited, receiver, Event("wait", number, sender, tag, count)))
    for number in range(rng.randrange(len(COLLECTIVES) + 1)):  # started by all in one order, and waited for later
        begun, count = [(number + rng.random()) / 6 for _ in range(size)], rng.choice((0, 1, 700, 90_000))
        for rank in range(size):
            timed.append((begun[rank], rank, Event("start", number, count=count)))
            timed.append((rng.uniform(max(begun), 1.01), rank, Event("finish", number, count=count)))
    timed.sort(key=lambda each: each[0])
    ranks: list[list[Event]] = [[event for _, rank, event in timed if rank == each] for each in range(size)]
    return [_with_receives(rng, rank, ranks) for rank in range(size)]


def _with_receives(rng: random.Random, rank: int, ranks: list[list[Event]]) -> list[Event]:
    """Ask for each message at some place before it is waited for: in the order in which its sender sends."""
    events = list(ranks[rank])
    for peer in range(len(ranks)):
        for tag in range(2):
            sends = [each for each in ranks[peer] if "send" in each.kind and (each.peer, each.tag) == (rank, tag)]
            first = 0
            for send in sends:
                waits = {each.number: place for place, each in enumerate(events) if each.kind == "wait"}
                last = min(waits[each.number] for each in sends if each.number >= 0 and _is_later(sends, send, each))
                first = rng.randint(min(first, last), last)
                events.insert(first, Event("irecv", send.number, peer, tag, send.count))
                first += 1
    return events


def _is_later(sends: list[Event], send: Event, other: Event) -> bool:
    return sends.index(other) >= sends.index(send)


def values(number: int, count: int) -> np.ndarray:
    """Return a message: of some dtype, of one axis or two."""
    array = (np.arange(count) + 7 * number).astype(("f8", "i8", "f4", "u2", "c16")[number % 5])
    return array.reshape(-1, 2) if number % 3 == 0 and count % 2 == 0 else array


def brought(rank: int, event: Event) -> np.ndarray:
    """Return what a rank brings to a collective."""
    return np.arange(event.count) + float(rank + event.number)


COLLECTIVES: list[tuple[Callable[..., Any], Callable[[list[np.ndarray], int], Any]]] = [
    # how it is started with what a rank brings, and what it gives on a rank, of what all bring
    (lambda comm, x: comm.all_reduce(x, "sum", async_op=True), lambda every, rank: sum(every)),
    (lambda comm, x: comm.broadcast(x, comm.world_size - 1, async_op=True), lambda every, rank: every[-1]),
    (lambda comm, x: comm.all_gather(x, async_op=True), lambda every, rank: np.stack(every)),
    (
        lambda comm, x: comm.reduce_scatter(np.stack([x * k for k in range(comm.world_size)]), "sum", async_op=True),
        lambda every, rank: rank * sum(every)[None],
    ),
    (lambda comm, x: comm.barrier(async_op=True), lambda every, rank: None),
]


def run(events: list[Event], size: int, *, is_whole: bool) -> int:
    """Run a rank's program; check what comes, where nothing was left out."""
    comm = synk.comm
    requests: dict[tuple[str, int], Any] = {}
    for event in events:
        key, number = (event.kind, event.number), event.number
        if event.kind == "send":
            comm.send(values(number, event.count), event.peer, event.tag)
        elif event.kind == "isend":
            array = values(number, event.count)
            comm.isend(array, event.peer, event.tag)
            array[...] = 1
        elif event.kind == "irecv":
            place = {} if number % 4 < 2 or not is_whole else {("like", "out")[number % 2]: values(number, event.count)}
            requests[key] = comm.irecv(event.peer, event.tag, **place)
        elif event.kind == "wait":
            got = requests["irecv", number].wait()
            if is_whole:
                assert_same(got, values(number, event.count))
        elif event.kind == "start":
            requests[key] = COLLECTIVES[number][0](comm, brought(comm.rank, event))
        else:
            every = [brought(rank, event) for rank in range(size)]
            assert_same(requests["start", number].wait(), COLLECTIVES[number][1](every, comm.rank))
    return 1


@pytest.mark.parametrize("place", PLACES)
def test_random_programs_give_what_they_must(at: Any, place: Any, storm_count: Any, subtests: Any) -> None:
    runtime = at(place)
    size = runtime.world_size
    f = runtime.function(
        lambda x, programs: run(programs[synk.comm.rank], size, is_whole=True), bcast_inputs="programs", outputs="sum"
    )
    for number in range(storm_count(6)):
        with subtests.test(case=number):
            assert f(np.zeros(size), program(f"{place} {number}", size)) == size


@pytest.mark.parametrize("place", ["little memory", "1+2"])
def test_a_send_that_is_left_out_is_an_error_and_nobody_hangs(at: Any, place: Any, storm_count: Any) -> None:
    runtime = at(place)
    size = runtime.world_size
    f = runtime.function(
        lambda x, programs: run(programs[synk.comm.rank], size, is_whole=False), bcast_inputs="programs", outputs="sum"
    )
    for number in range(storm_count(3)):
        programs = program(f"{place} {number}", size)
        sends = [(rank, event) for rank in range(size) for event in programs[rank] if "send" in event.kind]
        rank, event = random.Random(number).choice(sends)
        programs[rank].remove(event)
        with same_workers(runtime), pytest.raises(CollectiveMismatch, match="cannot"):
            f(np.zeros(size), programs)
