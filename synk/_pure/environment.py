"""Settings that are read from the environment."""

from __future__ import annotations

import math
import os


def _number(name: str, default: str, expected: str) -> float:
    text = os.environ.get(name, default)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"cannot read {name}: got {text!r}, expected {expected}.")
    return number


def stuck_after_s() -> float:
    """Seconds after which a running call is explained in the log: ``SYNK_STUCK_AFTER``, 60 by default.

    Raises
    ------
    ValueError
        If it is no number.
    """
    seconds = _number("SYNK_STUCK_AFTER", "60", "seconds, or 0 for never")
    return seconds if seconds > 0 else math.inf


def spin_s() -> float:
    """Seconds for which a worker waits awake for its next message, as long as that pays, and for the other ranks at the
    end of a call with large outputs: ``SYNK_SPIN_US`` microseconds, 500 by default.

    Raises
    ------
    ValueError
        If it is no number.
    """
    return max(_number("SYNK_SPIN_US", "500", "microseconds, or 0 to sleep at once"), 0.0) / 1e6
