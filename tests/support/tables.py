"""Tables of cases: their combinations, how many of them a run takes, and the names of functions made from them."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

F = TypeVar("F", bound=Callable[..., object])


def named(name: str, fn: F) -> F:
    """Return ``fn``, which now has this name."""
    fn.__name__ = name
    return fn


def seeds(at_each_run: int, in_all: int) -> list[Any]:
    """Return the seeds below ``in_all`` as parameters; from ``at_each_run`` on they are of the storm."""
    return [*range(at_each_run), *(pytest.param(seed, marks=pytest.mark.storm) for seed in range(at_each_run, in_all))]


def examples(at_each_run: int) -> settings:
    """Return Hypothesis's settings for a test of which each run draws other examples, ``SYNK_STORM`` times as many."""
    count = max(1, round(at_each_run * float(os.environ.get("SYNK_STORM", "1"))))
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


WHOLE_OR_SAMPLE = [pytest.param(False, id="sample"), pytest.param(True, id="whole", marks=pytest.mark.storm)]
"""Parameters of a test of a table: each run takes a sample of its combinations, the storm takes all."""


def drawn(cases: Iterable[Any], is_whole: bool, count: int = 100) -> list[Any]:
    """Return all combinations of a table, or the sample that each run takes, in one order."""
    found = list(cases)
    return found if is_whole or len(found) <= count else random.Random(len(found)).sample(found, count)


def combinations(count: int, *dimensions: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return ``count`` combinations, the same in each run, in which the values of a dimension are equally frequent.

    All combinations are returned where there are no more than ``count``.
    """
    draw, choices = random.Random(count), [list(values) for values in dimensions]
    if math.prod(map(len, choices)) <= count:
        return list(itertools.product(*choices))
    columns = []
    for values in choices:
        rounds = math.ceil(count / len(values))
        columns.append([value for _ in range(rounds) for value in draw.sample(values, len(values))][:count])
    return list(zip(*columns))
