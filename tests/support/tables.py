"""A table of combinations of which each run of the suite takes a sample."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from typing import Any


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
