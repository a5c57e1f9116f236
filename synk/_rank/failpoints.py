"""Deliberate faults at named steps of a worker, for the tests of this package.

They are armed only through a private argument of ``fork`` that travels in the first message, never by the environment.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence


def nothing(step: str) -> None:
    """Do nothing: a failpoint that is not armed."""


def arm(points: Sequence[Sequence[object]], rank: int) -> Callable[[str], None]:
    """Return the function to call at each step.

    Parameters
    ----------
    points : sequence of (step, rank, nth, action)
        What happens the ``nth`` time (from 1; 0: every time) that ``rank`` reaches ``step``: ``"kill"``, ``"segv"``,
        ``"stop"`` (signals to itself), ``"exit"`` (``os._exit(3)``), ``"sleep"`` (a minute) or ``"raise"``
        (RuntimeError).
    """
    mine = {(step, nth): str(action) for step, where, nth, action in points if where == rank}
    if not mine:
        return nothing
    counts: Counter[str] = Counter()

    def reach(step: str) -> None:
        counts[step] += 1
        action = mine.get((step, counts[step])) or mine.get((step, 0))
        if action in ("kill", "segv", "stop"):
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}[action])
        elif action == "exit":
            os._exit(3)
        elif action == "sleep":
            time.sleep(60)
        elif action == "raise":
            raise RuntimeError(f"failpoint {step}")

    return reach
