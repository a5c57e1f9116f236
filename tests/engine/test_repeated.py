"""The hint about arrays that are passed again and again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.names import named


def test_the_fourth_call_with_the_same_large_array_is_told_once(
    shared_runtimes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """``Data``, smaller arrays, other arrays, and those that have changed pass."""
    rt = shared_runtimes[1]
    f = rt.function(named("double", lambda x: 2 * x[:1]), outputs="gather")
    large = np.ones(200_000)
    for number in range(6):
        f(np.ones(200_000))
        f(large[:1000])
        f(rt.data(large))
        large += number
        f(large)
    assert not caplog.records
    for _ in range(8):
        f(large)
    (told,) = caplog.records
    assert "x of 'double', 1.6 MB" in told.getMessage() and "synk.data(x)" in told.getMessage()
