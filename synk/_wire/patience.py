"""How to wait for another process: awake while that pays, asleep otherwise."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

_LATE_NS = 1_000_000
_MIN_PENALTY, _MAX_PENALTY = 32, 4096
_MAX_WINDOW_S = 3600.0


class Patience:
    """Waits for messages, awake at first if that pays: waking a sleeping process can take 50 us and more.

    It pays only if the next message is near, so the previous wait must have ended within ``window_s``. It
    must not cost others anything either. So the wait offers its core to other processes at every turn. If the core
    comes back late, another process wants it: this side then sleeps at once in the next waits, in more of them each
    time.

    Parameters
    ----------
    window_s : float
        The longest time to wait awake; 0 to sleep at once.

    Attributes
    ----------
    waited_ns : int
        How long waits for conditions in shared memory have taken. The reader may reset it to 0.
    """

    def __init__(self, window_s: float) -> None:
        self.waited_ns = 0
        self._window_ns = int(min(window_s, _MAX_WINDOW_S) * 1e9)
        self._was_short = self._window_ns > 0
        self._num_asleep = 0  # how many of the next waits sleep at once
        self._penalty = _MIN_PENALTY  # how many will do so the next time

    @property
    def pays(self) -> bool:
        """Whether the next wait starts awake."""
        return self._was_short and not self._num_asleep

    def wait(
        self, look: Callable[[int], Any], sleep: Callable[[int | None], Any], timeout_ms: int | None = None
    ) -> Any:
        """Return what has arrived: ``look(0)`` returns it, or ``sleep(timeout_ms)`` after sleeping."""
        began = now = time.monotonic_ns()
        if self._num_asleep:
            self._num_asleep -= 1
        elif self._was_short:
            while now - began < self._window_ns:
                events = look(0)
                if events:
                    self._penalty = max(self._penalty - 1, _MIN_PENALTY)
                    return events
                os.sched_yield()
                last, now = now, time.monotonic_ns()
                if now - last > _LATE_NS:
                    self._num_asleep, self._penalty = self._penalty, min(2 * self._penalty, _MAX_PENALTY)
                    break
        events = sleep(timeout_ms)
        self._was_short = time.monotonic_ns() - began < self._window_ns
        return events

    def wait_for(self, is_ready: Callable[[], bool], sleep: Callable[[], bool]) -> bool:
        """Wait for a condition in shared memory; return False if this process must not sleep.

        ``sleep`` sleeps until the condition holds and returns True, or returns False at once.
        """
        began = time.monotonic_ns()
        try:
            return bool(self.wait(lambda _: is_ready(), lambda _: sleep()))
        finally:
            self.waited_ns += time.monotonic_ns() - began
