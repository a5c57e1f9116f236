"""``synk.profile()``: calls, time and bytes by function. Traces.

Spans nest and do not overlap, add up to no more than the calls, and the file has the format's form.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gates import beside
from support.tables import named

import synk
from synk._wire.cell import cell
from synk.errors import WorkerDied
from synk.profiler import span, trace


def totals(rt: Any, name: str) -> dict[tuple[str, str], tuple[str, int, int]]:
    """Return the direction, number and bytes of the transfers of a function, by argument and kind."""
    return {
        (each.argument, each.kind): (each.direction, each.calls, each.nbytes)
        for each in rt.profile.transfers
        if each.function == name
    }


def test_transfers_are_counted_by_argument_and_kind(rt: Any) -> None:
    f = rt.function(
        named("by argument", lambda x, y, w, options: (x * y).sum() + w.sum() + len(options)),
        bcast_inputs=("w", "options"),
        outputs="sum",
    )
    x, y = rt.data(np.ones(1000)), np.ones(1000, np.float32)
    for _ in range(5):
        f(x, y, np.ones(30), {"a": 1})
    found = totals(rt, "by argument")
    assert found["x", "data"] == ("none", 5, 5 * 8000)
    assert found["y", "staged"] == ("to workers", 5, 5 * 4000)
    assert found["w", "staged"] == ("to workers", 5, 5 * 240)
    assert found["outputs", "output"] == ("to program", 5, 5 * 2 * 8)
    assert found["options", "pickled"][2] > 0
    assert found["code and captured objects", "captured"][2] > 0
    record = rt.profile.records["by argument"]
    assert (record.num_calls, record.nbytes_of("staged"), record.nbytes_of("output")) == (5, 5 * 4240, 5 * 16)
    assert 0 < record.function_ns < record.wall_ns
    for call in [f.submit(x, y, np.ones(30), {"a": 1}) for _ in range(7)]:
        call.result()
    assert (record.num_calls, record.nbytes_of("staged")) == (12, 12 * 4240)


def test_calls_of_other_sizes_add_up(shared_runtimes: Any) -> None:
    """Of arrays, of the rows of a batch of Data, of captured arrays that change, of objects and of tables."""
    rt, sizes = shared_runtimes[3], [10, 20, 10, 30, 30, 20]
    f = rt.function(named("other shapes", lambda x: x), outputs="gather")
    for width, size in itertools.product((1, 3), sizes):
        f(np.ones((size, width)))
    found = totals(rt, "other shapes")
    assert found["x", "staged"][1:] == found["outputs", "output"][1:] == (12, 4 * 8 * sum(sizes))
    some, x = rt.function(named("some rows", lambda x: x), outputs="gather"), rt.data(np.ones((9, 100)))
    for batch in (np.array([0, 4, 8]), slice(0, 6), None):
        some(x, batch=batch)
    assert totals(rt, "some rows")["x", "data"][1:] == (3, (3 + 6 + 9) * 800)
    table, sent = np.ones(50_000), []
    captured = rt.function(named("with a table", lambda x: x + table[0]), outputs="gather")
    for factor in (1, 1, 2):
        table *= factor
        captured(np.ones(4))
        sent.append(totals(rt, "with a table")["code and captured objects", "captured"][2])
    assert table.nbytes <= sent[0] == sent[1] < sent[2]
    rt.function(named("texts", lambda x: "a" * 100_000), outputs=None)(np.ones(4))
    _, calls, nbytes = totals(rt, "texts")["outputs", "output"]
    assert calls == 1 and 3 * 100_000 < nbytes < 3 * 112_700  # with room for longer ones
    frame = pytest.importorskip("pandas").DataFrame({"a": np.arange(9.0), "b": np.arange(9)})
    rt.function(named("of a table", lambda table: len(table)), outputs="sum")(frame)
    _, calls, nbytes = totals(rt, "of a table")["table", "staged"]
    assert calls == 1 and nbytes >= 9 * (8 + 8)  # its columns are one argument


def test_what_counts_as_one_function(rt: Any) -> None:
    """Two lambdas are two rows, and one in a loop is one. Failed calls do not count; the items of a map do."""
    rt.profile.reset()
    assert rt.profile.records == {} and rt.profile.transfers == [] and rt.profile.ranks == []
    rt.function(lambda x: x.sum(), outputs="sum")(np.ones(2))
    rt.function(lambda x: x.max(), outputs="max")(np.ones(2))
    for _ in range(3):
        rt.function(lambda x: x.min(), outputs="min")(np.ones(2))
    with pytest.raises(ZeroDivisionError):
        rt.function(named("failing", lambda x: 1 / 0), outputs="sum")(np.ones(2))
    repeated = rt.function(named("repeated", lambda x: x.sum()), outputs="sum")
    repeated(np.ones(2)), repeated.repeat(2, np.ones(2))
    assert ("_num_repeats", "staged") in totals(rt, "repeated (repeat)")
    records = {name: each for name, each in rt.profile.records.items() if "repeated" not in name}
    assert len(records) == 3 and all(name.startswith("<lambda> (test_profile.py:") for name in records)
    assert sorted(record.num_calls for record in records.values()) == [1, 1, 3]

    def square_of_item(item: int) -> int:
        return item * item

    assert list(rt.map(square_of_item, range(40))) == [k * k for k in range(40)]
    found = totals(rt, "square_of_item")
    assert rt.profile.records["square_of_item"].num_calls == 40
    assert found["items", "items"][1] == found["results", "output"][1] == 40
    assert sum(each.calls for each in rt.profile.ranks if each.function == "square_of_item") == 40


def test_what_each_rank_has_done(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]

    def slow_on_1(x: np.ndarray) -> float:
        if synk.comm.rank == 1:
            time.sleep(0.005)
        return float(x.sum())

    f = rt.function(slow_on_1, outputs="sum")
    for _ in range(6):
        f(np.ones(11))
    f(np.ones(2))  # rank 2 has no rows
    ranks = [each for each in rt.profile.ranks if each.function == "slow_on_1"]
    assert [each.rank for each in ranks] == [0, 1, 2]
    assert [each.calls for each in ranks] == [7, 7, 6]
    assert ranks[1].function_s >= 0.03
    for each in ranks:
        wall_s = rt.profile.records["slow_on_1"].wall_ns / 1e9
        assert each.wait_s == 0 and np.isclose(each.share, each.function_s / wall_s) and 0 < each.share < 1

    def meets(x: np.ndarray) -> Any:
        return synk.comm.all_reduce(x, "sum")

    f, waits_s = rt.function(meets, outputs="first"), 0.0
    while not waits_s:  # all may arrive at once, by chance
        f(np.ones(3))
        ranks = [each for each in rt.profile.ranks if each.function == "meets"]
        waits_s = sum(each.wait_s for each in ranks)
    assert waits_s < sum(each.function_s for each in ranks)


def test_what_the_program_does_meanwhile_is_not_the_time_of_calls(rt: Any) -> None:
    """Nor is their turn behind others, or the sum over ranks that run items at the same time."""
    streamed = named("streamed", lambda x: time.sleep(0.005))
    ways = {
        "streamed": rt.function(streamed, outputs=None).stream(np.ones((12, 4))),
        "mapped": rt.map(named("mapped", lambda item: time.sleep(0.005)), range(12), batch_size=1),
    }
    for name, results in ways.items():
        began_ns = time.monotonic_ns()
        for _ in results:
            time.sleep(0.02)
        assert 12 * 5_000_000 / 2 <= rt.profile.records[name].wall_ns < time.monotonic_ns() - began_ns


def test_it_is_shown_as_a_table(rt: Any) -> None:
    rt.profile.reset()
    for name in ("cheap", "dear"):
        rt.function(named(name, lambda x: x.sum()), outputs="sum")(np.ones(4))
    rt.profile.records["cheap"].wall_ns = 1
    shown = rt.function(named("shown", lambda big, small: big.sum() + small.sum()), outputs="sum")
    for _ in range(3):
        shown(np.ones(20_000), np.ones(20_000, np.int8))
    text = str(rt.profile)
    lines = text.splitlines()
    assert lines[0].split()[:2] == ["function", "calls"]
    names = [line.split("  ")[0] for line in lines[1:]]
    assert names.index("dear") < names.index("cheap"), "the dearest stand first"
    (line,) = (each for each in lines if each.split()[:3] == ["shown", "big", "staged"])
    assert line.split()[3:5] == ["3", "0.48"]
    assert line.split()[-1].endswith("%")
    in_place = rt.function(named("in place", lambda x, y: x.sum() + y.sum()), outputs="sum", bcast_inputs="y")
    in_place(rt.data(np.ones(20_000)), rt.shared(np.ones(9)))
    lines = [each.split() for each in str(rt.profile).splitlines() if each.startswith("in place")]
    assert [each[3:] for each in lines[1:3]] == [["data", "1", "0.16"], ["shared", "1", "0.00"]]


def test_other_threads_may_read_and_reset_it_at_any_moment(rt: Any) -> None:
    """Who reads sees a call whole or not at all, reading changes no number, and a reset fails no call."""
    f = rt.function(named("read meanwhile", lambda x: x.sum()), outputs="sum")
    f(np.ones(4))
    rt.profile.reset()

    def read() -> None:
        _, calls, nbytes = totals(rt, "read meanwhile").get(("x", "staged"), ("", 0, 0))
        assert nbytes == 32 * calls

    with beside(read):
        for _ in range(60):
            f(np.ones(4))
    assert totals(rt, "read meanwhile")["x", "staged"] == ("to workers", 60, 60 * 32)
    with beside(rt.profile.reset):
        for _ in range(60):
            f(np.ones(4))
    rt.profile.reset()
    f(np.ones(4))
    assert totals(rt, "read meanwhile")["x", "staged"] == ("to workers", 1, 32)


def test_one_line_says_what_dominates(rt: Any, subtests: Any) -> None:
    """Of 10 s, which are set here: copies, work and the rank that has most of it, waits, or what it costs to divide."""
    f = rt.function(named("uneven", lambda x, y: time.sleep(0.005 * synk.comm.rank)), outputs=None)
    cases = {
        (6, 2, 1): r"60% .* went to the copy of y for 'uneven': keep it in synk\.data\.",
        (2, 7, 1): r"70% .* went to the work of 'uneven', most of it on rank 1\.",
        (0, 1, 8): r"80% .* went to waits of 'uneven' in synk\.comm\.",
        (0, 1, 0): r"90% .* went to the way of 'uneven' to the workers and back: give each call more to do\.",
        (1, 0, 0): r"90% .* went to the way of 'uneven' .*: it includes the workers' start, so look after more calls\.",
    }
    for (staged, worked, waited), expected in cases.items():
        with subtests.test(expected):
            rt.profile.reset()
            count = 1 if "start" in expected else 10
            for _ in range(count):
                f(np.ones(2), np.ones((2, 200_000)))
            record = rt.profile.records["uneven"]
            record.wall_ns, record.staged_ns = 10 * 10**9, staged * 10**9
            record.function_ns, record.wait_ns = worked * 10**9, waited * 10**9
            *lines, last = str(rt.profile).splitlines()
            assert re.fullmatch(expected, last), last
            heads = ["function", "rank", "calls", "work", "s", "wait", "s", "share"]
            (place,) = (k for k, each in enumerate(lines) if each.split() == heads)
            assert [each.split()[:3] for each in lines[place + 1 :]] == [["uneven", rank, str(count)] for rank in "01"]


EPSILON_S = 1e-6


@pytest.fixture
def current(rt: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The runtime of most tests, which is the current one."""
    return made_current(rt, monkeypatch)


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


def test_the_spans_of_plain_calls(current: Any, tmp_path: Path) -> None:
    f = current.function(named("summed", lambda x: time.sleep(0.002) or x.sum()), outputs="sum")
    current.function(named("before", lambda x: x.sum()), outputs="sum").submit(np.ones(8))
    time.sleep(0.01)  # it is over on the ranks, but nobody has asked
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


def test_spans_of_ones_own_here_and_in_functions(current: Any, tmp_path: Path) -> None:
    def with_spans(x: np.ndarray) -> float:
        with span("on a rank"):
            return float(x.sum())

    f = current.function(with_spans, outputs="sum")
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
    assert not [name for name in names | set(current.profile.records) if "pickled_spans" in name]
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


def test_what_is_in_flight_at_the_end_belongs_to_it(current: Any, tmp_path: Path) -> None:
    f = current.function(named("in flight", lambda x: x.sum()), outputs="sum")
    with trace(tmp_path / "calls.json"):
        calls = [f.submit(np.ones(8)) for _ in range(3)]
    assert [call.result() for call in calls] == [8] * 3
    with trace(tmp_path / "map.json"):
        results = iter(current.map(abs, range(2), batch_size=1))
        next(results)
    assert list(results) == [1]
    places = [by_place(tmp_path / f"{each}.json") for each in ("calls", "map")]
    names = [name for each in places for spans in each.values() for *_, name in spans]
    assert (names.count("in flight"), names.count("abs")) == (6, 2)


def test_one_trace_at_a_time_and_it_outlives_its_runtime(
    runtime: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rt = made_current(runtime(1), monkeypatch)
    path = tmp_path / "run.json"
    with pytest.raises(FileNotFoundError), trace(tmp_path / "nowhere" / "run.json"):
        pytest.fail("the body has begun")
    with trace(path):
        with pytest.raises(RuntimeError, match="being traced already"), trace(path):
            pass
        rt.function(lambda x: x.sum(), outputs="sum")(np.ones(2))
        rt.close()
    assert by_place(path, 1)[1, "lane 0"]
