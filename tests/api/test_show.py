"""What is shown of objects, of a map as it goes on, and of the time in a function."""

from __future__ import annotations

import pstats
import re
import sys
from typing import Any

import numpy as np
import pytest
from tqdm.auto import tqdm

import synk
from synk.profiler import cprofile


def test_results_say_what_they_are(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    for text in (synk.info(), rt.info(), rt.profile):
        assert repr(text) == str(text) and "\n" in str(text), "a prompt shows it as it is"

    def square(n: Any) -> Any:
        return n**2

    mapped = rt.map(square, range(3))
    assert repr(mapped) == "<synk.map of 'square', 0 results so far>"
    assert next(mapped) == 0 and repr(mapped) == "<synk.map of 'square', 1 result so far>"
    assert list(mapped) == [1, 4] and repr(mapped) == "<synk.map of 'square', 3 results so far>"
    assert next(mapped, "no more") == "no more"
    failing = rt.map(lambda n: 1 // n, [1, 0, 1])
    with pytest.raises(ZeroDivisionError):
        list(failing)
    assert repr(failing) == "<synk.map of '<lambda>', 1 result so far>" and not list(failing)
    streamed = rt.function(square, outputs="gather").stream([np.arange(2)] * 2)
    assert iter(streamed) is streamed
    next(streamed)
    assert repr(streamed) == "<synk.Function.stream of 'square', 1 result so far>"
    streamed.close()
    assert not list(streamed)
    with synk.Executor(runtime=rt) as executor:
        assert repr(executor.map(square, range(3))) == "<synk.Executor.map of 'square', 0 results so far>"


def test_threads_of_torch_in_the_program_are_told(shared_runtimes: Any) -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    try:
        for num_threads, count in ((3, 1), (1, 0)):
            torch.set_num_threads(num_threads)
            assert shared_runtimes[2].info().count(f"torch computes with {num_threads} threads in the program") == count
    finally:
        torch.set_num_threads(before)


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
        r"square: 27 done, 3 failed\. Workers: 0 died, 0 replaced\. Slowest items: (\d+ \(\S+ s\)(, |\.)){3}",
        summary,
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


def work(x: np.ndarray, times: int) -> float:
    return float(sum(inner(x) for _ in range(times)))


def inner(x: np.ndarray) -> float:
    return float(np.sort(x).sum())


def test_every_rank_is_profiled(shared_runtimes: Any) -> None:
    f = shared_runtimes[3].function(work, bcast_inputs="times", outputs="sum")
    stats = cprofile(f, np.ones(9), 4)
    assert len(stats) == 3 and all(isinstance(each, pstats.Stats) for each in stats)
    for each in stats:
        counts = {name: count for (_, _, name), (count, *_) in each.stats.items()}  # type: ignore[attr-defined]
        assert (counts["work"], counts["inner"]) == (1, 4)
    with pytest.raises(TypeError):
        cprofile(f, np.ones(9), "often")
