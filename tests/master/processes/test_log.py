"""The log of what all workers must know: every rank learns what is, and nothing twice that does harm; no process.

This file is of a mechanism, and goes with it.
"""

from __future__ import annotations

import random
from typing import Any

from synk._master.processes.log import Known, Log, Packed
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

    def answer(self, is_received: bool = True, which: int = 0) -> None:
        rank, sequence, packed = self.in_flight.pop(which)
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

    def settle(self) -> None:
        """Have every rank read all of the log."""
        for _ in range(2):
            while self.in_flight:
                self.answer()
            for rank in range(len(self.known)):
                self.send(rank)


def test_every_rank_comes_to_hold_what_lives() -> None:
    for seed in range(40):
        draw, model = random.Random(seed), Model(3)
        for _ in range(300):
            act, rank, number = draw.random(), draw.randrange(3), draw.randrange(12)
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
        model.settle()
        assert model.held == [model.values] * 3, f"seed {seed}"
        assert not model.in_flight, "a rank that has read all needs no body"


def test_the_log_is_as_long_as_what_lives() -> None:
    model = Model(2)
    for number in range(2000):
        model.set(number, number)
        if number >= 3:
            model.drop(number - 3)
        for rank in range(2):
            model.send(rank)
            model.answer()
    assert len(model.log.after(0)[0]) < 100
    assert model.held == [model.values] * 2


def test_a_message_that_is_not_answered_keeps_what_it_brought() -> None:
    """Until it is known whether the rank could take it in, nothing of it is folded away."""
    model = Model(1)
    for number in range(1, 300):
        model.set(number, number)
        model.send(0)
    while len(model.in_flight) > 1:
        model.answer(which=1)
    model.drop(1)
    model.log.fold()
    model.answer(is_received=False)
    model.settle()
    assert model.held == [model.values]
