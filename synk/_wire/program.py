"""How a frozen program tells its workers from itself: they are copies of it, with an argument more."""

from __future__ import annotations

import sys

WORKER_ARGUMENT = "--synk-worker"


def is_frozen() -> bool:
    """Whether this is a frozen program, which has no interpreter to start."""
    return bool(getattr(sys, "frozen", False))
