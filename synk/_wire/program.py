"""How a worker's program is recognised: by its first argument."""

from __future__ import annotations

import sys

WORKER_ARGUMENT = "--synk-worker"


def is_frozen() -> bool:
    """Whether this is a frozen program, which has no interpreter of its own."""
    return bool(getattr(sys, "frozen", False))


def is_worker() -> bool:
    """Whether this process was started as a worker. Ask early: later the arguments are the master's."""
    arguments = getattr(sys, "argv", [])
    return arguments[1:2] == [WORKER_ARGUMENT] and (is_frozen() or arguments[0] == "-c")
