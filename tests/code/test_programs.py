"""Random programs that change what they capture: thirty at each run, the rest of ten thousand in the storm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import programs
import pytest

AT_EACH_RUN, IN_ALL = 30, 10_000
STORM_BLOCK = 450


def test_programs(runtime: Callable[..., Any]) -> None:
    run_block(runtime, range(AT_EACH_RUN))


@pytest.mark.storm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(AT_EACH_RUN, IN_ALL, STORM_BLOCK))
def test_many_programs(runtime: Callable[..., Any], first: int) -> None:
    run_block(runtime, range(first, first + STORM_BLOCK))


def run_block(runtime: Callable[..., Any], seeds: range) -> None:
    runtimes = {num_workers: runtime(num_workers, max_restarts=10**9) for num_workers in (1, 2, 3)}
    failures = programs.run_seeds(seeds, runtimes.__getitem__)
    assert not failures, "\n\n".join([f"{len(failures)} programs went wrong", *failures])


def test_a_program_is_the_same_each_time_and_its_lines_are_right() -> None:
    """Without workers each line runs: what is generated is a program."""
    for seed in range(20):
        lines = programs.generate(seed)
        assert lines == programs.generate(seed)
        with programs.Bench(None) as bench:
            for line in lines:
                bench.run(line)
