"""``synk.profiler.live()``: the table of the profile, renewed while the program runs."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import synk
from synk.profiler import live


def test_the_table_is_renewed_by_calls_and_shown_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the body raises; it is text where rich is not installed."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with synk.fork(1, backend="numpy") as rt:
        f = rt.function(lambda x: x.sum(), outputs="sum", name="watched")
        for every, tables in ((0, 4), (1000, 1)):
            with pytest.raises(KeyError), live(every=every) as profile:
                assert profile is rt.profile
                for k in range(3):
                    assert f(np.full(8, float(k))) == 8.0 * k
                raise KeyError
            f(np.ones(8))
            assert capsys.readouterr().err.count("function     calls") == tables
    with pytest.raises(ValueError, match="got every=-1, expected seconds"):
        live(every=-1)
