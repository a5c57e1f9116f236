"""When a side waits awake for its next message; with a clock and a poll set of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from synk._wire import channel
from synk._wire.channel import Looked, Patience

US, MS = 1_000, 1_000_000


class World:
    """A clock, a poll set that reports at a given time, and a core that comes back ``yield_ns`` after a yield."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.ready_at = 0
        self.yield_ns = 5 * US
        self.timeouts: list[Any] = []
        monkeypatch.setattr(channel.time, "monotonic_ns", lambda: self.now)
        monkeypatch.setattr(channel.os, "sched_yield", self.sched_yield)

    def sched_yield(self) -> None:
        self.now += self.yield_ns

    def poll(self, timeout_ms: int | None) -> list[tuple[int, int]]:
        self.timeouts.append(timeout_ms)
        if timeout_ms is None:
            self.now = max(self.now, self.ready_at)
        return [(3, 1)] if self.now >= self.ready_at else []

    def wait(self, patience: Patience, after_ns: int, is_near: bool = False) -> bool:
        """Wait for a message that comes after that time; return whether it was found awake."""
        self.ready_at = self.now + after_ns
        self.timeouts = []
        assert patience.wait(self, None, is_near) == [(3, 1)]  # type: ignore[arg-type]
        return None not in self.timeouts

    def num_asleep(self, patience: Patience) -> int:
        """Return how many waits in a row are spent asleep from the first poll on, though messages come at once."""
        count = 0
        self.yield_ns = 5 * US
        while not self.wait(patience, 20 * US):
            assert self.timeouts == [None]
            count += 1
        return count


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_without_a_window_it_sleeps_at_once(world: World) -> None:
    patience = Patience(0.0)
    for after in (0, 10 * US, 0):
        assert not world.wait(patience, after)
        assert world.timeouts == [None]


def test_what_is_near_is_awaited_awake_even_after_a_long_wait(world: World) -> None:
    patience = Patience(500e-6)
    assert not world.wait(patience, 2 * MS)
    assert world.wait(patience, 100 * US, is_near=True)
    assert not world.wait(patience, 2 * MS, is_near=True)  # awake for the window only
    assert not world.wait(Patience(0.0), 100 * US, is_near=True)


def test_it_is_awake_as_long_as_messages_follow_each_other_closely(world: World) -> None:
    patience = Patience(500e-6)
    assert [world.wait(patience, after) for after in (0, 10 * US, 450 * US)] == [True] * 3
    assert not world.wait(patience, 2 * MS)  # awake for the window, then asleep
    assert not world.wait(patience, 10 * US)  # the wait before was long
    assert world.timeouts == [None]
    assert world.wait(patience, 10 * US)  # the wait before was short


def test_it_gives_up_where_others_want_the_core(world: World) -> None:
    patience = Patience(500e-6)
    for expected in (32, 62, 122):  # twice as many each time, one less after each good try (two of them here)
        assert world.wait(patience, 10 * US)
        world.yield_ns = 3 * MS
        world.wait(patience, 400 * US)
        assert world.num_asleep(patience) == expected
        assert world.timeouts != [None]


def test_there_is_an_end_to_giving_up(world: World) -> None:
    patience = Patience(500e-6)
    for _ in range(12):
        world.yield_ns = 3 * MS
        world.wait(patience, 400 * US)
        count = world.num_asleep(patience)
    assert 3000 < count <= 4096


def test_whether_the_next_wait_begins_awake(world: World) -> None:
    patience = Patience(500e-6)
    assert patience.pays
    assert not patience.wait(Looked(lambda: False, lambda: False))  # for the window, and nobody sleeps
    assert world.now >= 500 * US
    assert not patience.pays
    patience.wait(Looked(lambda: False, lambda: False))
    assert patience.pays  # the wait before was short
    world.yield_ns = 3 * MS
    patience.wait(Looked(lambda: False, lambda: False))
    assert not patience.pays
    assert not Patience(0.0).pays


def test_what_is_looked_for_is_seen_awake_or_after_the_sleep(world: World) -> None:
    patience = Patience(500e-6)
    looks: list[bool] = []
    slept: list[int] = []

    def look() -> bool:
        looks.append(len(looks) == 2)
        return looks[-1]

    def sleep() -> bool:
        slept.append(1)
        return True

    assert patience.wait(Looked(look, sleep))
    assert (looks, slept) == ([False, False, True], [])
    world.yield_ns = MS // 2
    assert patience.wait(Looked(look, sleep))
    assert slept == [1]
