"""Threads of torch that take cores from CPU workers: told once, and in the description of the runtime."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from synk.torch._threads import NUM_SKIPPED, NUM_WATCHED, BusyThreads  # noqa: E402


class Clocks:
    """Clocks that a test sets."""

    def __init__(self) -> None:
        self.wall = self.of_process = self.of_thread = 0.0

    def call(self, watch: BusyThreads, others: float) -> None:
        """Wait a second for a call, of which this thread computes a quarter; others use ``others`` seconds."""
        with watch:
            self.wall += 1.0
            self.of_thread += 0.25
            self.of_process += 0.25 + others
        self.of_process += 7.0  # between the calls anybody may compute

    def watch(self, num_threads: int = 2) -> BusyThreads:
        return BusyThreads(num_threads, lambda: self.wall, lambda: self.of_process, lambda: self.of_thread)


def told(others: Sequence[float], num_threads: int = 2) -> list[str]:
    """Return what is told in calls in which other threads use so many seconds each."""
    clocks = Clocks()
    watch = clocks.watch(num_threads)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for used in others:
            if not watch.is_watching:
                break
            clocks.call(watch, used)
    return [str(each.message) for each in caught]


def test_busy_threads_are_told_once() -> None:
    (text,) = told([0.6] * 100)
    assert text.startswith("other threads of this program used 12 s of processor time while it waited 20 s for steps")
    assert "torch computes with 2 threads here: call torch.set_num_threads(1)" in text


def test_nothing_is_told_where_it_does_not_matter() -> None:
    assert told([0.6] * 100, num_threads=1) == []
    assert told([0.4] * 100) == []
    assert told([9.0] * NUM_SKIPPED + [0.0] * 100) == []  # at the beginning modules are imported
    assert told([9.0] * (NUM_SKIPPED + NUM_WATCHED - 1)) == []  # not before all are seen


def test_the_runtimes_description_says_it(shared_runtimes: Any) -> None:
    before = torch.get_num_threads()
    try:
        for num_threads, count in ((3, 1), (1, 0)):
            torch.set_num_threads(num_threads)
            assert shared_runtimes[2].info().count(f"torch computes with {num_threads} threads in the master") == count
            assert "torch computes" not in shared_runtimes["inline"].info()
    finally:
        torch.set_num_threads(before)
