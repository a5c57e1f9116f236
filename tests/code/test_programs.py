"""Random programs that change what they capture: eighteen at each run, all of ten thousand in the storm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import programs
import pytest

AT_EACH_RUN = [*range(10), 82, 161, 239, 314, 334, 393, 497, 3715]
"""From 82 on seeds of programs that together have each kind of line that there is."""
IN_ALL, STORM_BLOCK = 10_000, 450


def test_programs(reused: Callable[..., Any]) -> None:
    """The last one has an object whose recipe holds itself, which was looked through for ever."""
    run_block(reused, AT_EACH_RUN)


@pytest.mark.storm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, IN_ALL, STORM_BLOCK))
def test_many_programs(reused: Callable[..., Any], first: int) -> None:
    run_block(reused, range(first, first + STORM_BLOCK))


def run_block(reused: Callable[..., Any], seeds: Iterable[int]) -> None:
    failures = programs.run_seeds(seeds, functools.cache(reused))
    assert not failures, "\n\n".join([f"{len(failures)} programs went wrong", *failures])


def test_a_program_is_the_same_each_time_and_its_lines_are_right() -> None:
    """Without workers each line runs: what is generated is a program."""
    for seed in range(5):
        lines = programs.generate(seed)
        assert lines == programs.generate(seed)
        with programs.Bench(None) as bench:
            for line in lines:
                bench.run(line)
