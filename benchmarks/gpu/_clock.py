"""Timing on a device: the host's clock around work that is waited for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_s(action: Callable[[], object], repetitions: int, warm_up: int = 3) -> float:
    """Return the median duration of ``action``, which must wait for the device itself."""
    for _ in range(warm_up):
        action()
    durations = []
    for _ in range(repetitions):
        start = time.perf_counter()
        action()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)
