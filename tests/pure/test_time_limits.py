"""Time limits, and short texts of the user's objects. No process."""

from __future__ import annotations

import decimal
import fractions
import math
import threading
from typing import Any

import numpy as np
import pytest

from synk._pure.limits import as_seconds, check_timeout, lock_s, poll_ms
from synk._pure.words import short_repr


def test_what_is_a_time_limit_and_what_is_not(subtests: Any) -> None:
    numbers = (1, 0.001, math.inf, np.float32(2), np.int64(3), decimal.Decimal("0.5"), fractions.Fraction(1, 3))
    for number in numbers:
        with subtests.test(number=str(number)):
            assert check_timeout(number) == as_seconds(number) == float(number)
    assert check_timeout(10**400) == math.inf and check_timeout(None) is None
    for value in (0, -1, -math.inf, math.nan, "1", b"1", True, [1], object(), -(10**400), 1j):
        with (
            subtests.test(value=str(value)),
            pytest.raises(ValueError, match=r"cannot set a timeout: got .*, expected seconds above 0, or None"),
        ):
            check_timeout(value)


def test_waits_are_never_shorter_and_never_more_than_the_system_takes(subtests: Any) -> None:
    for seconds in (-math.inf, -1.0, 0.0, 1e-9, 0.0005, 0.001, 1.0, 12.3456, 1e10, math.inf):
        with subtests.test(seconds=seconds):
            waited = poll_ms(seconds)
            assert 0 <= waited < 1 << 31
            assert waited == (1 << 31) - 1 or waited / 1000 >= max(seconds, 0) > waited / 1000 - 0.001 - 1e-9
            assert lock_s(seconds) == min(max(seconds, 0.0), threading.TIMEOUT_MAX)


class Raises:
    def __repr__(self) -> str:
        raise KeyError("no")


def test_a_text_of_any_object_is_one_short_line(subtests: Any) -> None:
    for value in ("x" * 1000, list(range(1000)), {"a": "line\nline"}, Raises(), [Raises()], np.ones(10**4)):
        with subtests.test(kind=type(value).__name__):
            text = short_repr(value)
            assert 0 < len(text) <= 80
            assert "\n" not in text
    for value in (1, None, "text", [1, 2], {"a": (1, 2)}, 2.5, int):
        assert short_repr(value) == repr(value)
