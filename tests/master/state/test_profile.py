"""``synk.profile()``: calls, time and bytes by function."""

from __future__ import annotations

import html
import json
import sys
import time
from typing import Any

import numpy as np
import pytest

import synk
from synk._master.state.ledger import Record
from synk._master.state.sums import Transfer
from synk._wire.control import Up


def test_a_record_counts_calls_and_the_bytes_that_the_master_copied(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    total = rt.function(lambda x, y: (x + y).sum(), outputs="sum", name="counted total")
    x = rt.data(np.ones(1000))
    for _ in range(3):
        total(x, np.ones(1000, np.float32))
    record = rt.profile.records["counted total"]
    assert record.num_calls == 3
    assert record.staged_nbytes == 3 * 4000  # the Data costs nothing
    assert record.pickled_nbytes == 0
    assert record.output_nbytes == 3 * 2 * 8
    assert 0 < record.function_ns < record.wall_ns


def test_a_failed_call_is_not_recorded(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    failing = rt.function(lambda x: 1 / 0, outputs="sum", name="failing total")
    for _ in range(2):
        try:
            failing(np.ones(4))
        except ZeroDivisionError:
            continue
    assert rt.profile.records.get("failing total") is None


def test_the_table_has_a_line_for_each_function_the_dearest_first(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    rt.function(lambda x: x.sum(), outputs="sum", name="cheap total")(np.ones(4))
    rt.profile.records["cheap total"].wall_ns = 1
    rt.function(lambda x: x.sum(), outputs="sum", name="dear total")(np.ones(4))
    lines = str(rt.profile).splitlines()
    assert lines[0].split()[:2] == ["function", "calls"]
    names = [line.split("  ")[0] for line in lines[1:]]
    assert names.index("dear total") < names.index("cheap total")


RECORDS = np.array([(1, 2.0)] * 4, dtype=[("a", int), ("b", float)])

WHY = {
    "num_slices": (lambda x: x.sum(), lambda f: f(np.ones(4), num_slices=2), "num_slices"),
    "serial": (lambda x: x.sum(), lambda f: f.serial(np.ones(4)), "it is a serial call"),
    "an object": (
        lambda x, y: x.sum(),
        lambda f: f(np.ones(4), {1: {(2, 3)}}),
        "y is an object that may hold arrays",
    ),
    "timeout": (lambda x: x.sum(), lambda f: f(np.ones(4), timeout=60), "timeout= in the call"),
    "records": (lambda x: x["b"].sum(), lambda f: f(RECORDS), "x is a record"),
}


@pytest.mark.parametrize("name", WHY)
def test_it_says_why_calls_take_the_slow_path_each_time(shared_runtimes: Any, name: str) -> None:
    rt = shared_runtimes[2]
    fn, call, why = WHY[name]
    f = rt.function(fn, bcast_inputs="y" if name == "an object" else (), outputs="sum", name=f"why {name}")
    for _ in range(12):
        call(f)
    record = rt.profile.records[f"why {name}"]
    assert (record.num_calls, record.num_new) == (12, 12)
    assert record.note.startswith("12 of 12 calls took the slow path. The last one: ") and why in record.note
    assert f"why {name}: {record.note}" in str(rt.profile)
    assert html.escape(record.note) in rt.profile._repr_html_()


def test_calls_like_the_one_before_need_no_word(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.sum(), outputs="sum", name="plain total")
    for k in range(20):
        f(np.full(4, k))
    assert rt.profile.records["plain total"].note == ""
    assert "plain total:" not in str(rt.profile)


def test_the_argument_that_differs_each_time_is_named(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.sum(), outputs="sum", name="growing total")
    for k in range(20):
        f(np.ones((4 + k, 3)))
    note = rt.profile.records["growing total"].note
    assert note == "20 of 20 calls took the slow path. The last one: x has shape (23, 3), was (22, 3)"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (np.ones(6, np.float32), "y has dtype float64, was float32"),
        (np.ones((6, 2)), "y has shape (6,), was (6, 2)"),
        ({"a": np.ones(6)}, "nested"),
    ],
    ids=["dtype", "shape", "structure"],
)
def test_what_alternates_is_named(shared_runtimes: Any, other: Any, why: str) -> None:
    rt, name = shared_runtimes[2], f"alternating {why}"
    f = rt.function(lambda x, y: x.sum(), bcast_inputs="y", outputs="sum", name=name)
    x, y = np.ones(6), np.ones(6)
    for k in range(30):
        f(x, {"b": y} if isinstance(other, dict) and k % 2 else y if k % 2 else other)
    record = rt.profile.records[name]
    assert (record.num_calls, record.num_new) == (30, 30)
    assert record.note.startswith("30 of 30 calls took the slow path. The last one: ") and why in record.note
    assert record.note in str(rt.profile)


def totals(rt: Any, name: str) -> dict[tuple[str, str], Any]:
    return {(each.argument, each.kind): each for each in rt.profile.transfers if each.function == name}


def test_transfers_are_counted_by_argument_and_kind(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(
        lambda x, y, w, options: (x * y).sum() + w.sum() + len(options),
        bcast_inputs=("w", "options"),
        outputs="sum",
        name="by argument",
    )
    x, y = rt.data(np.ones(1000)), np.ones(1000, np.float32)
    for _ in range(5):
        f(x, y, np.ones(30), {"a": 1})
    found = totals(rt, "by argument")
    assert found["x", "data"][3:6] == ("none", 5, 5 * 8000)
    assert found["y", "staged"][3:6] == ("to workers", 5, 5 * 4000)
    assert found["w", "staged"][3:6] == ("to workers", 5, 5 * 240)
    assert found["outputs", "output"][3:6] == ("to master", 5, 5 * 2 * 8)
    assert found["options", "pickled"].nbytes > 0
    assert found["code and captured objects", "captured"].nbytes > 0


def test_the_sizes_of_calls_with_other_shapes_add_up(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x, outputs="gather", name="other shapes")
    sizes = [10, 20, 10, 30, 30, 20]
    for size in sizes:
        f(np.ones(size))
    found = totals(rt, "other shapes")
    assert found["x", "staged"][4:6] == (6, 8 * sum(sizes))
    assert found["outputs", "output"][4:6] == (6, 8 * sum(sizes))


def test_captured_arrays_and_their_changes_are_counted(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    table = np.ones(50_000)
    f = rt.function(lambda x: x + table[0], outputs="gather", name="with a table")
    f(np.ones(4))
    before = totals(rt, "with a table")["code and captured objects", "captured"]
    assert before.nbytes >= table.nbytes
    f(np.ones(4))
    assert totals(rt, "with a table")["code and captured objects", "captured"] == before
    table *= 2
    f(np.ones(4))
    assert totals(rt, "with a table")["code and captured objects", "captured"].nbytes > before.nbytes


def test_outputs_that_are_no_arrays_are_counted(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: "a" * 100_000, outputs=None, name="texts")
    for _ in range(3):
        f(np.ones(4))
    found = totals(rt, "texts")["outputs", "output"]
    assert found.calls == 3 and 3 * 2 * 100_000 < found.nbytes < 3 * 2 * 112_700  # with room for longer ones
    ranks = [each for each in rt.profile.ranks if each.function == "texts"]
    assert [each.out_nbytes for each in ranks] == [found.nbytes // 2] * 2


def test_the_columns_of_a_table_are_one_argument(shared_runtimes: Any) -> None:
    pandas = pytest.importorskip("pandas")
    rt = shared_runtimes[2]
    f = rt.function(lambda table: len(table), outputs="sum", name="of a table")
    table = pandas.DataFrame({"a": np.arange(9.0), "b": np.arange(9), "c": np.arange(9) % 2 == 0})
    for _ in range(3):
        f(table)
    found = totals(rt, "of a table")["table", "staged"]
    assert found.calls == 3 and found.nbytes >= 3 * 9 * (8 + 8 + 1)


def test_of_data_the_rows_of_the_batch_count(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    f = rt.function(lambda x: x, outputs="gather", name="of some rows")
    x = rt.data(np.ones((9, 100)))
    for batch in (np.array([0, 4, 8]), slice(0, 6), None):
        f(x, batch=batch)
    found = totals(rt, "of some rows")["x", "data"]
    assert found[4:6] == (3, (3 + 6 + 9) * 800)


class Reader:
    """Reads a record at the n-th step that the interpreter takes in ``Record.add``, as another thread may."""

    def __init__(self, record: Record, nth: int) -> None:
        self.record, self.nth, self.num_steps = record, nth, 0
        self.seen: list[tuple[int, int, int]] = []

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code is not Record.add.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.num_steps += 1
            if self.num_steps == self.nth:
                self.act()
        return self.trace

    def act(self) -> None:
        totals, ranks = self.record.totals("f"), self.record.rank_totals("f")
        self.seen += [(each.calls, each.nbytes, rank.in_nbytes) for each, rank in zip(totals, ranks)]


class Resetter(Reader):
    """Resets the record instead, as a signal handler may."""

    def act(self) -> None:
        self.record.reset()


def test_a_profile_that_is_read_at_any_moment_changes_no_number() -> None:
    words = np.zeros((2, len(Up)), np.int64)
    nth, num_steps = 1, 1
    while nth <= num_steps:
        record = Record("f")
        counts = [(0, 0, 0)]  # calls, bytes, bytes of a rank
        for number in range(8):
            num_rows, row_nbytes = 1 + number // 2 % 2, 40 * (1 + number // 4)
            transfers = record.known((Transfer("x", "staged", 4 * row_nbytes, row_nbytes),))
            reader, before = Reader(record, nth), sys.gettrace()
            sys.settrace(reader.trace)
            try:
                record.add(transfers, (0, 1), (num_rows, num_rows), words, 1)
            finally:
                sys.settrace(before)
            num_steps = max(num_steps, reader.num_steps)
            calls, nbytes, of_rank = counts[-1]
            counts.append((calls + 1, nbytes + 4 * row_nbytes, of_rank + num_rows * row_nbytes))
            assert set(reader.seen) <= {*counts[-2:]}  # without the call that is being added, or with it
        assert record.num_calls == 8
        assert (*record.totals("f")[0][4:6], record.rank_totals("f")[0].in_nbytes) == counts[-1]
        nth += 1
    assert num_steps > 50


def test_a_profile_that_is_reset_at_any_moment_fails_no_call() -> None:
    words, rows = np.zeros((2, len(Up)), np.int64), (3, 3)
    transfers = (Transfer("x", "staged", 40, 10),)
    nth, num_steps = 1, 1
    while nth <= num_steps:
        record = Record("f")
        record.add(transfers, (0, 1), rows, words, 1)
        resetter, before = Resetter(record, nth), sys.gettrace()
        sys.settrace(resetter.trace)
        try:
            record.add(transfers, (0, 1), rows, words, 1)
        finally:
            sys.settrace(before)
        record.add(transfers, (0, 1), rows, words, 1)
        record.reset()
        record.add_timed((0, 1), words, is_step=True, is_device=True)
        record.add(transfers, (0, 1), rows, words, 1)
        assert record.num_calls == 1
        num_steps = max(num_steps, resetter.num_steps)
        nth += 1
    assert num_steps > 20


def test_ranks_are_counted_by_their_rows(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]

    def slow_on_1(x: np.ndarray) -> float:
        if synk.comm.rank == 1:
            time.sleep(0.005)
        return float(x.sum())

    f = rt.function(slow_on_1, outputs="sum", name="one slow rank")
    for _ in range(6):
        f(np.ones(11))  # 4, 4 and 3 rows
    ranks = [each for each in rt.profile.ranks if each.function == "one slow rank"]
    assert [each.rank for each in ranks] == [0, 1, 2]
    assert [each.calls for each in ranks] == [6] * 3
    assert [each.in_nbytes for each in ranks] == [6 * 8 * rows for rows in (4, 4, 3)]
    assert [each.out_nbytes for each in ranks] == [6 * 8] * 3
    assert ranks[1].num_slowest == 6 and ranks[1].function_s >= 0.03


def test_two_lambdas_are_two_rows_and_one_in_a_loop_is_one(shared_runtimes: Any) -> None:
    rt = shared_runtimes[1]
    rt.profile.reset()
    rt.function(lambda x: x.sum(), outputs="sum")(np.ones(2))
    rt.function(lambda x: x.max(), outputs="max")(np.ones(2))
    for _ in range(3):
        rt.function(lambda x: x.min(), outputs="min")(np.ones(2))
    records = rt.profile.records
    assert len(records) == 3 and all(name.startswith("<lambda> (test_profile.py:") for name in records)
    assert sorted(record.num_calls for record in records.values()) == [1, 1, 3]


def test_items_of_a_map_are_counted(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def square_of_item(item: int) -> int:
        return item * item

    assert list(rt.map(square_of_item, range(40))) == [k * k for k in range(40)]
    record = rt.profile.records["square_of_item"]
    assert record.num_calls == 40
    found = totals(rt, "square_of_item")
    assert found["items", "items"].calls == found["results", "output"].calls == 40
    assert sum(each.calls for each in rt.profile.ranks if each.function == "square_of_item") == 40


def test_reset_begins_anew_and_to_dict_is_plain(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.sum(), outputs="sum", name="begun anew")
    f(np.ones(8))
    rt.profile.reset()
    assert rt.profile.records == {} and rt.profile.transfers == [] and rt.profile.ranks == []
    f(np.ones(8))
    plain = json.loads(json.dumps(rt.profile.to_dict()))
    assert [each["calls"] for each in plain["functions"]] == [1]
    assert {each["argument"] for each in plain["transfers"]} == {"x", "outputs"}
    assert [each["rank"] for each in plain["ranks"]] == [0, 1]


def test_counters_are_a_copy(shared_runtimes: Any) -> None:
    rt = shared_runtimes[1]
    before = rt.counters
    rt.function(lambda x: x.sum(), outputs="sum")(np.ones(2))
    assert rt.counters["calls"] == before["calls"] + 1


def test_the_largest_transfers_are_shown(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda big, small: big.sum() + small.sum(), outputs="sum", name="shown")
    for _ in range(3):
        f(np.ones(20_000), np.ones(20_000, np.int8))
    text = str(rt.profile)
    (line,) = (each for each in text.splitlines() if each.split()[:3] == ["shown", "big", "staged"])
    assert line.split()[3:5] == ["3", "0.48"]
    assert "<td style='text-align:left'>big</td>" in rt.profile._repr_html_()


def verdict_of(function_ms: list[float], wait_ms: list[float], wall_ms: float, **staged: float) -> str:
    """Return the verdict on twenty calls of that kind."""
    record = Record("f")
    words = np.zeros((len(function_ms), 16), np.int64)
    words[:, Up.FUNCTION_NS] = (np.array(function_ms) - np.array(wait_ms)) * 1e6
    words[:, Up.WAIT_NS] = np.array(wait_ms) * 1e6
    ranks = list(range(len(function_ms)))
    moves = tuple(Transfer(name, "staged", 1_000_000, 10) for name in staged)
    for _ in range(20):
        record.staged_ns += int(sum(staged.values()) * 1e6)
        record.add(moves, ranks, [10] * len(ranks), words, int(wall_ms * 1e6))
    return record.verdict()


@pytest.mark.parametrize(
    ("function_ms", "wait_ms", "wall_ms", "staged", "verdict"),
    [
        ([10, 10], [0, 0], 11, {}, ""),
        ([14, 10], [0, 0], 15, {}, "rank 0 computes 1.4 times longer than the others"),
        ([10, 10, 30], [0, 0, 0], 31, {}, "rank 2 computes 3.0 times longer than the others"),
        ([30, 30], [29, 0], 31, {}, "rank 1 computes 30.0 times longer than the others: they have waited for it"),
        ([30, 30], [15, 15], 31, {}, ""),
        ([2, 2], [0, 0], 10, {"x": 8}, "80% of its time is the copy of x: keep it in synk.data(x)"),
        ([0.01, 0.01], [0, 0], 30, {}, "its calls are shorter than what they cost to divide"),
    ],
)
def test_the_verdict_names_what_stands_out(
    function_ms: list[float], wait_ms: list[float], wall_ms: float, staged: dict[str, float], verdict: str
) -> None:
    found = verdict_of(function_ms, wait_ms, wall_ms, **staged)
    assert found.startswith(verdict) if verdict else found == ""


def test_a_new_call_pickles_its_columns_once(shared_runtimes: Any) -> None:
    """That the workers must be told of something is known before the arguments are looked at."""
    pandas = pytest.importorskip("pandas")
    rt = shared_runtimes[2]
    pickled = []

    class Price:
        def __reduce__(self) -> Any:
            pickled.append(1)
            return float, (1.5,)

    f = rt.function(lambda frame: float(len(frame)), outputs="sum", name="length of a table")
    frame = pandas.DataFrame({"price": [Price() for _ in range(6)]})
    for _ in range(3):
        f(frame)
    record = rt.profile.records["length of a table"]
    for _ in range(3):
        g = rt.function(lambda x: x.sum(), outputs="sum")
        g(np.ones(4))
        del g
        pickled.clear()
        before = record.num_new
        assert f(frame) == 6.0
        assert record.num_new == before + 1 and len(pickled) == 6
        assert "told of something" in record.why_new
