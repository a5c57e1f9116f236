"""What is shown of objects, of a map as it goes on, and of the time in a function. And what the profile advises: each
change that it names is made here, and saves what it says.
"""

from __future__ import annotations

import pstats
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tqdm.auto import tqdm

import synk
from synk.profiler import cprofile


def test_results_say_what_they_are(rt: Any) -> None:
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
    for text in (synk.info(), rt.info(), rt.profile):
        assert repr(text) == str(text) and "\n" in str(text), "a prompt shows it as it is"
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


def test_progress(rt: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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


# ----- advice

TABLE = np.ones((500, 300))
MODEL = {number: str(number) for number in range(3000)}


def weighted(table: Any, x: Any) -> Any:
    return x.sum() * table[0, 0]


def looked_up(model: Any, x: Any) -> Any:
    return x.sum() * len(getattr(model, "value", model))


def total(x: Any) -> Any:
    return x.sum()


def same(n: int) -> int:
    return n


def sent(rt: synk.Runtime) -> tuple[int, int]:
    """Return how many messages and bytes of arguments the calls so far have cost."""
    records = rt.profile.records.values()
    chunks = sum(record.num_chunks for record in records)
    calls = sum(each.calls for each in rt.profile.ranks) if not chunks else 0
    return 2 * (chunks or calls), sum(record.nbytes_of("staged", "pickled") for record in records)


def called(rt: synk.Runtime, fn: Callable[..., Any], *args: Any, times: int = 20, **options: Any) -> None:
    f = rt.function(fn, outputs="sum", **options)
    for _ in range(times):
        f(*args)


def test_each_change_saves_what_the_advice_says(rt: Any, shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    x, table, model = np.ones(10), rt.data(TABLE), rt.resident(MODEL)
    kinds: dict[str, tuple[Callable[[], Any], Callable[[str], Any], str]] = {
        "data": (
            lambda: called(rt, weighted, TABLE, x, bcast_inputs="table"),
            lambda _: called(rt, weighted, table, x, bcast_inputs="table"),
            r"weighted: pass 'table' as synk.data if it stays the same: saves (\S+) MB",
        ),
        "resident": (
            lambda: called(rt, looked_up, MODEL, x, bcast_inputs="model", times=40),
            lambda _: called(rt, looked_up, model, x, bcast_inputs="model", times=40),
            r"looked_up: keep 'model' in synk.resident if it stays the same: saves (\S+) MB",
        ),
        "batch": (
            lambda: called(rt, total, x, times=50),
            lambda _: called(rt, total, np.tile(x, 10), times=5),
            r"total: give each call 10 times the rows, or use repeat: saves (\d+) of 200 messages",
        ),
        "workers": (
            lambda: called(rt, total, x),
            lambda _: called(shared_runtimes[1], total, x),
            r"all functions: fork\(1\): saves (\d+) of 80 messages",
        ),
        "chunks": (
            lambda: list(rt.map(same, range(60), batch_size=1)),
            lambda line: list(rt.map(same, range(60), batch_size=int(re.findall(r"batch_size=(\d+)", line)[0]))),
            r"same: leave batch_size= out, or pass batch_size=\d+: saves (\d+) of 120 messages",
        ),
    }
    for kind, (program, changed, text) in kinds.items():
        with subtests.test(kind=kind):
            for each in (rt, shared_runtimes[1]):
                each.profile.reset()
            program()
            before = sent(rt)
            lines = rt.profile.advice().splitlines()
            assert len(lines) <= 5
            (line,) = [line for line in lines if re.match(text, line)]
            saved = float(re.match(text, line).group(1))  # type: ignore[union-attr]
            rt.profile.reset()
            changed(line)
            after = sent(shared_runtimes[1] if kind == "workers" else rt)
            if "MB" in line:
                assert 0.9 * (before[1] - after[1]) < saved * 1e6 <= before[1] - after[1] + 1e5
            else:
                assert saved == before[0] - after[0]


def test_over_nodes_only_a_shared_variable_saves_copies(shared_runtimes: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The rows of a Data travel with each call."""
    rt: synk.Runtime = shared_runtimes["1+1"]
    for table, is_copied in ((rt.data(TABLE), True), (rt.shared(TABLE), False)):
        rt.profile.reset()
        called(rt, weighted, table, np.ones(10), bcast_inputs="table")
        assert ("weighted: pass 'table' as synk.shared if" in str(rt.profile.advice())) == is_copied
    assert "synk.shared(table) is copied once" in caplog.text


def test_a_profile_without_calls_has_no_advice(shared_runtimes: Any) -> None:
    rt: synk.Runtime = shared_runtimes[1]
    rt.profile.reset()
    assert str(rt.profile.advice()) == "No change stands out in what was measured."
