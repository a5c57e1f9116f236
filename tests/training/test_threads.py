"""Threads of torch that take cores from CPU workers are told: in the description of the runtime, and once by calls."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from synk.torch._threads import BusyThreads  # noqa: E402


def told(others: Sequence[float], num_threads: int = 2) -> list[str]:
    """Return what is told in calls of a second, of which this thread computes a quarter, and others so many seconds."""
    wall = of_process = of_thread = 0.0
    watch = BusyThreads(num_threads, lambda: wall, lambda: of_process, lambda: of_thread)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for used in others:
            if watch.is_watching:
                with watch:
                    wall, of_thread, of_process = wall + 1.0, of_thread + 0.25, of_process + 0.25 + used
                of_process += 7.0  # between the calls anybody may compute
    return [str(each.message) for each in caught]


def test_busy_threads_are_told_once_and_where_it_matters(shared_runtimes: Any) -> None:
    (text,) = told([0.6] * 100)
    assert "torch computes with 2 threads here: call torch.set_num_threads(1)" in text
    assert told([0.6] * 100, num_threads=1) == told([0.4] * 100) == []
    before = torch.get_num_threads()
    try:
        for num_threads, count in ((3, 1), (1, 0)):
            torch.set_num_threads(num_threads)
            assert shared_runtimes[2].info().count(f"torch computes with {num_threads} threads in the master") == count
    finally:
        torch.set_num_threads(before)
