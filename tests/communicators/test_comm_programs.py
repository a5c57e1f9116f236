"""Random programs of messages and started collectives, each rank its own, against what they must give.

A program is made from one global order of events: no rank ever waits for what is later in it, so nobody can be stuck.
With one send left out somebody must be: every rank then has an error, and none hangs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers
from support.places import PLACES
from support.rank_arrays import assert_same

import synk
from synk.errors import CollectiveMismatch

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
