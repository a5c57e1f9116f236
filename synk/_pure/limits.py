"""Time limits: which values are valid, and what the waits of the system accept."""

from __future__ import annotations

import math
import threading
from typing import Any

_MAX_POLL_MS = (1 << 31) - 1


def check_timeout(timeout: Any) -> float | None:
    """Return ``timeout`` in seconds, infinity included, if it is None or a positive number.

    Raises
    ------
    ValueError
    """
    if timeout is None:
        return None
    try:
        seconds = as_seconds(timeout)
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(timeout, (str, bytes, bool)) or not seconds > 0:
        raise ValueError(f"cannot set a timeout: got {timeout!r}, expected seconds above 0, or None.")
    return seconds


def as_seconds(number: Any) -> float:
    """Return a number as a float. An integer larger than every float becomes infinity.

    Examples
    --------
    >>> as_seconds(10**400), as_seconds(2)
    (inf, 2.0)
    """
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def poll_ms(seconds: float) -> int:
    """Return a wait in milliseconds, rounded up. A wait that is too long for ``poll`` ends early, and the caller
    repeats it.

    Examples
    --------
    >>> [poll_ms(seconds) for seconds in (-1.0, 0.0001, 1e10)]
    [0, 1, 2147483647]
    """
    return math.ceil(min(max(seconds * 1000, 0), _MAX_POLL_MS))


def lock_s(seconds: float) -> float:
    """Return the longest time, up to ``seconds``, for which Python can wait for a lock."""
    return min(max(seconds, 0.0), threading.TIMEOUT_MAX)
