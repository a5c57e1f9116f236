"""Finds out whether other threads of the program compute while it waits for CPU workers, which share the cores."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

NUM_SKIPPED, NUM_WATCHED = 3, 20
"""The number of calls at the beginning that do not count, because they do work that is done once; and of those that do.
"""

_SHARE = 0.5
"""The share of one core that the other threads may use before the user is warned."""


class BusyThreads:
    """A context around the first calls, which warns once if other threads of this process were busy during them.

    torch's threads spin for milliseconds while they wait for more work. In a program that computes a little between two
    steps, they spin while the workers need the cores.

    Parameters
    ----------
    num_threads : int
        The number of torch's threads in this process. With one there is nothing to watch.
    wall, of_process, of_thread : callable
        Clocks, in seconds: wall time, the processor time of all threads, and that of the calling thread.
    """

    def __init__(
        self,
        num_threads: int,
        wall: Callable[[], float] = time.perf_counter,
        of_process: Callable[[], float] = time.process_time,
        of_thread: Callable[[], float] = time.thread_time,
    ) -> None:
        self._num_threads = num_threads
        self._wall, self._of_process, self._of_thread = wall, of_process, of_thread
        self._num_left = NUM_SKIPPED + NUM_WATCHED if num_threads > 1 else 0
        self._waited = self._used = 0.0
        self._began = (0.0, 0.0)

    @property
    def is_watching(self) -> bool:
        return self._num_left > 0

    def _now(self) -> tuple[float, float]:
        return self._wall(), self._of_process() - self._of_thread()

    def __enter__(self) -> None:
        self._began = self._now()

    def __exit__(self, *exc_info: object) -> None:
        ended, began = self._now(), self._began
        self._num_left -= 1
        if self._num_left >= NUM_WATCHED:
            return
        self._waited += ended[0] - began[0]
        self._used += ended[1] - began[1]
        if self._num_left == 0 and self._used > _SHARE * self._waited:
            warnings.warn(
                f"other threads of this program used {self._used:.2g} s of processor time while it waited "
                f"{self._waited:.2g} s for steps on CPU workers, which need the same cores. torch computes with "
                f"{self._num_threads} threads here: call torch.set_num_threads(1) at the beginning of the program.",
                UserWarning,
                stacklevel=4,  # past the step and the decorator of verbs, to the line of the call
            )
