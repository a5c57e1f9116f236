"""Traces: spans nest and do not overlap, add up to no more than the calls, and the file has the format's form."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.names import named

from synk._wire.cell import cell
from synk.errors import WorkerDied
from synk.profiler import span, trace

EPSILON_S = 1e-6


@pytest.fixture
def rt(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runtime with two workers, which is the current one."""
    return made_current(shared_runtimes[2], monkeypatch)


def made_current(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cell, "runtime", runtime)
    monkeypatch.setattr(cell, "session", runtime._session)
    return runtime


def by_place(path: Path, world_size: int = 2) -> dict[tuple[int, str], list[tuple[float, float, str]]]:
    """Return begin and end in seconds and name of the spans of each process and thread, of a file of right form."""
    data = json.loads(path.read_text(encoding="utf-8"))
    assert set(data) == {"displayTimeUnit", "traceEvents"} and data["displayTimeUnit"] in ("ms", "ns")
    spans = [each for each in data["traceEvents"] if each["ph"] == "X"]
    named = [each for each in data["traceEvents"] if each["ph"] == "M"]
    assert len(spans) + len(named) == len(data["traceEvents"])
    processes = {each["pid"]: each["args"]["name"] for each in named if each["name"] == "process_name"}
    assert processes == {0: "program", **{1 + rank: f"rank {rank}" for rank in range(world_size)}}
    threads = {(each["pid"], each["tid"]): each["args"]["name"] for each in named if each["name"] == "thread_name"}
    found: dict[tuple[int, str], list[tuple[float, float, str]]] = {}
    for each in spans:
        assert isinstance(each["tid"], int) and each["ts"] >= 0 and each["dur"] >= 0
        place = each["pid"], threads[each["pid"], each["tid"]]
        found.setdefault(place, []).append((each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6, each["name"]))
    assert len(found) == len(threads)
    return {place: sorted(times) for place, times in found.items()}


def check_apart(places: dict[tuple[int, str], list[tuple[float, float, str]]]) -> None:
    """Check that the spans of one place follow each other, or one lies in the other."""
    for spans in places.values():
        for (start, end, name), (later_start, later_end, later) in itertools.combinations(spans, 2):
            is_after = later_start >= end - EPSILON_S
            is_inside = later_start >= start - EPSILON_S and later_end <= end + EPSILON_S
            assert is_after or is_inside, (name, later)


def test_the_spans_of_plain_calls(rt: Any, tmp_path: Path) -> None:
    f = rt.function(named("summed", lambda x: time.sleep(0.002) or x.sum()), outputs="sum")
    began = time.monotonic()
    with trace(tmp_path / "run.json"):
        for k in range(5):
            assert f(np.full(8, float(k))) == 8 * k
    wall = time.monotonic() - began
    f(np.ones(8))  # is not traced any more
    places = by_place(tmp_path / "run.json")
    check_apart(places)
    assert set(places) == {(process, "lane 0") for process in range(3)}
    assert all(sum(end - start for start, end, _ in spans) <= wall for spans in places.values())
    assert [name for _, _, name in places[0, "lane 0"]] == ["stage summed", "wait summed", "assemble summed"] * 5
    stages, waits = (places[0, "lane 0"][first::3] for first in (0, 1))
    for rank in (1, 2):
        assert [name for _, _, name in places[rank, "lane 0"]] == ["receive", "summed", "publish"] * 5
        runs = [each for each in places[rank, "lane 0"] if each[2] == "summed"]
        assert all(end - start >= 0.002 for start, end, _ in runs)
        for (sent, _, _), (_, heard, _), (start, end, _) in zip(stages, waits, runs, strict=True):
            assert sent - EPSILON_S <= start <= end <= heard + EPSILON_S


def test_spans_of_ones_own_here_and_in_functions(rt: Any, tmp_path: Path) -> None:
    def with_spans(x: np.ndarray) -> float:
        with span("on a rank"):
            return float(x.sum())

    f = rt.function(with_spans, outputs="sum")
    with span("before the trace"):
        f(np.ones(2))
    with trace(tmp_path / "run.json"):
        for step in range(3):
            with span(f"step {step}"):
                f(np.ones(2))
        thread = threading.Thread(target=span("in a thread")(time.sleep), args=(0,), name="other")
        thread.start()
        thread.join()
    places = by_place(tmp_path / "run.json")
    assert [name for *_, name in places[0, "span MainThread"]] == ["step 0", "step 1", "step 2"]
    assert [name for *_, name in places[0, "span other"]] == ["in a thread"]
    for process in (1, 2):
        assert [name for *_, name in places[process, "span MainThread"]] == ["on a rank"] * 3
    names = {name for spans in places.values() for *_, name in spans}
    assert not [name for name in names | set(rt.profile.records) if "pickled_spans" in name]
    with pytest.raises(TypeError, match="cannot begin a span: got the name 3"), span(3):  # type: ignore[arg-type]
        pass


def test_the_file_has_the_form_of_the_format(reused: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of plain and submitted calls, maps, failed calls, deaths and restarts; also where the body raises."""
    rt = made_current(reused(2), monkeypatch)
    f = rt.function(named('a "name" \\ with\nall', lambda x: x * 2), outputs="gather")
    dies = rt.function(lambda x: os.kill(os.getpid(), signal.SIGKILL), outputs="sum")
    path = tmp_path / "run.json"
    with pytest.raises(KeyError), trace(path), span("äöü"):
        f(np.ones(100))
        for call in [f.submit(np.ones(100)) for _ in range(5)]:
            call.result()
        list(rt.map(abs, [1, 2]))
        with pytest.raises(WorkerDied):
            dies(np.ones(4))
        f(np.ones(100))
        raise KeyError
    places = by_place(path)
    check_apart(places)
    names = {name for spans in places.values() for *_, name in spans}
    assert {"äöü", 'a "name" \\ with\nall', "abs", "WorkerDied"} <= names
    assert os.listdir(tmp_path) == ["run.json"]


def test_one_trace_at_a_time_and_it_outlives_its_runtime(
    runtime: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rt = made_current(runtime(1), monkeypatch)
    path = tmp_path / "run.json"
    with trace(path):
        with pytest.raises(RuntimeError, match="being traced already"), trace(path):
            pass
        rt.function(lambda x: x.sum(), outputs="sum")(np.ones(2))
        rt.close()
    assert by_place(path, 1)[1, "lane 0"]
