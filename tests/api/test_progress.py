"""``progress=True``: what the bar shows, and the summary under it."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
from tqdm.auto import tqdm

import synk


def square(n: int) -> int:
    if n % 10 == 7:
        raise ValueError(n)
    return n * n


def last_line(text: str) -> str:
    """Return what stands in the last line of a terminal that was given a text."""
    return text.rstrip("\n").split("\n")[-1].split("\r")[-1]


def test_progress(shared_runtimes: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rt: synk.Runtime = shared_runtimes[2]
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread, which would outlive the test
    found = list(rt.map(square, range(30), progress=True, on_error="return"))
    assert [n for n, each in enumerate(found) if isinstance(each, synk.ItemError)] == [7, 17, 27]
    bar, summary = capsys.readouterr().err.rstrip("\n").split("\n")
    assert re.fullmatch(r"square: 100%\|█*\| 30/30 \[00:\d\d<00:00, .*it/s, failed=3\]", bar.split("\r")[-1])
    assert re.fullmatch(
        r"square: 27 done, 3 failed\. Workers: 0 died, 0 replaced\. Slowest items: (\d+ \(\S+ s\)(, |\.)){3}", summary
    )
    with pytest.raises(ValueError, match="7"):
        list(rt.map(square, iter(range(30)), progress=True))
    assert last_line(capsys.readouterr().err).startswith("square: 7 done, 0 failed")
    total = rt.function(lambda x: x.sum(), outputs="sum")
    assert list(total.stream([np.ones(4)] * 3, progress=True)) == [4.0] * 3
    assert " 3/3 [" in last_line(capsys.readouterr().err)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "synkhronos\[progress\]"'):
        rt.map(square, range(7), progress=True)
