"""The log of what all workers must know: every rank learns what is, and nothing twice that does harm; no process."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from support.seeds import seeds

from synk._master.processes.log import Dropped, Known, Log, Packed
from synk._wire.messages import Body


class Model:
    """Things with values, ranks that read of them by messages, and what each rank holds therefore."""

    def __init__(self, num_ranks: int) -> None:
        self.log = Log()
        self.values: dict[int, int] = {}
        self.known = [Known(rank, self.log) for rank in range(num_ranks)]
        self.log.ranks.extend(self.known)
        self.held: list[dict[int, int]] = [{} for _ in range(num_ranks)]
        self.sequence = 0
        self.in_flight: list[tuple[int, int, Packed]] = []
        self.sources = {"thing": self._told}

    def _told(self, rank: int, number: int) -> tuple[int, list[Any]] | None:
        return (self.values[number], []) if number in self.values else None

    def set(self, number: int, value: int) -> None:
        self.values[number] = value
        self.log.tell("thing", number)

    def drop(self, number: int) -> None:
        if self.values.pop(number, None) is not None:
            self.log.drop("thing", number)

    def send(self, rank: int) -> None:
        self.log.fold()
        packed = self.known[rank].pack(None, [], self.sources)
        if packed.body is not None:
            self.sequence += 1
            self.known[rank].note_sent(self.sequence, packed.body, packed.read)
            self.in_flight.append((rank, self.sequence, packed))

    def answer(self, is_received: bool = True) -> None:
        rank, sequence, packed = self.in_flight.pop(0)
        assert packed.body is not None
        if is_received:
            self._take_in(rank, packed.body)
        self.known[rank].note_answered(sequence, is_received=is_received)

    def _take_in(self, rank: int, body: Body) -> None:
        for number in body.dropped.get("thing", ()):
            self.held[rank].pop(number, None)
        for _, number, value in body.news:
            self.held[rank][number] = value

    def start_again(self, rank: int) -> None:
        self.in_flight = [each for each in self.in_flight if each[0] != rank]
        self.known[rank].clear()
        self.held[rank] = {}


@pytest.mark.parametrize("seed", seeds(20, 200))
def test_every_rank_comes_to_hold_what_lives(seed: int) -> None:
    draw, model = random.Random(seed), Model(3)
    for _ in range(300):
        act = draw.random()
        rank, number = draw.randrange(3), draw.randrange(12)
        if act < 0.35:
            model.set(number, draw.randrange(1000))
        elif act < 0.55:
            model.drop(number)
        elif act < 0.85:
            model.send(rank)
        elif act < 0.97 and model.in_flight:
            model.answer(is_received=draw.random() < 0.8)
        elif act >= 0.97:
            model.start_again(rank)
    while model.in_flight:
        model.answer()
    for rank in range(3):
        model.send(rank)
    while model.in_flight:
        model.answer()
    assert model.held == [model.values] * 3


def test_a_rank_that_has_read_all_needs_no_body() -> None:
    model = Model(2)
    model.set(1, 10)
    model.send(0)
    model.send(0)
    assert len(model.in_flight) == 1
    state = model.log.state
    model.send(0)
    assert model.log.state == state


def test_the_log_is_as_long_as_what_lives() -> None:
    model = Model(2)
    for number in range(5000):
        model.set(number, number)
        if number >= 3:
            model.drop(number - 3)
        for rank in range(2):
            model.send(rank)
            while model.in_flight:
                model.answer()
    assert len(model.log.after(0)[0]) < 100
    assert len(model.log._entries) < 200
    assert model.held == [model.values] * 2


def test_a_message_that_is_not_answered_keeps_what_it_brought() -> None:
    """Until it is known whether the rank could take it in, nothing of it is folded away."""
    model = Model(1)
    model.set(1, 1)
    model.send(0)
    for number in range(2, 300):
        model.set(number, number)
        model.send(0)
    for _ in range(len(model.in_flight) - 1):
        model.in_flight.append(model.in_flight.pop(0))
        model.answer()
    model.drop(1)
    model.log.fold()
    model.answer(is_received=False)
    model.send(0)
    model.answer()
    assert model.held == [model.values]


def test_entries_of_several_threads_are_all_read() -> None:
    model = Model(1)

    def write(first: int) -> None:
        for number in range(first, first + 2000):
            model.set(number, number)

    threads = [threading.Thread(target=write, args=(10_000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or model.in_flight:
        model.send(0)
        while model.in_flight:
            model.answer()
    model.send(0)
    while model.in_flight:
        model.answer()
    assert model.held == [model.values]


def test_what_only_some_ranks_hold_is_told_of_where_one_holds_it() -> None:
    log = Log()
    known = [Known(rank, log) for rank in range(2)]
    log.ranks.extend(known)
    state = log.state
    log.drop_held("plan", 3)
    assert log.after(0) == ([], 0) and log.state != state
    known[1].held["plan"].add(3)
    log.drop_held("plan", 3)
    body = known[0].pack(None, [], {}).body
    assert body is not None and body.dropped == {"plan": {3: None}}
    assert not known[1].held["plan"]


def test_what_is_dropped_changes_the_state() -> None:
    log = Log()
    state, dropped = log.state, Dropped(log)
    dropped.append(1)
    assert log.state != state and list(dropped) == [1]
