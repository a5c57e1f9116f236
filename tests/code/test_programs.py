"""Random programs that change what they capture: thirty at each run, the rest of ten thousand in the storm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import programs
import pytest

AT_EACH_RUN, IN_ALL = 30, 10_000
STORM_BLOCK = 450


def test_programs(reused: Callable[..., Any]) -> None:
    """The last one has an object whose recipe holds itself, which was looked through for ever."""
    run_block(reused, [*range(AT_EACH_RUN), 3715])


@pytest.mark.storm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(AT_EACH_RUN, IN_ALL, STORM_BLOCK))
def test_many_programs(reused: Callable[..., Any], first: int) -> None:
    run_block(reused, range(first, first + STORM_BLOCK))


def run_block(reused: Callable[..., Any], seeds: Iterable[int]) -> None:
    failures = programs.run_seeds(seeds, functools.cache(reused))
    assert not failures, "\n\n".join([f"{len(failures)} programs went wrong", *failures])


def test_a_program_is_the_same_each_time_and_its_lines_are_right() -> None:
    """Without workers each line runs: what is generated is a program."""
    for seed in range(20):
        lines = programs.generate(seed)
        assert lines == programs.generate(seed)
        with programs.Bench(None) as bench:
            for line in lines:
                bench.run(line)
