"""``synk.profile()``: calls, time and bytes by function."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import pytest


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
    "serial": (lambda x: x.sum(), lambda f: f.serial(np.ones(4)), "serial calls"),
    "an object": (
        lambda x, y: x.sum(),
        lambda f: f(np.ones(4), {1: {(2, 3)}}),
        "y is an object that may hold arrays",
    ),
    "records": (lambda x: x["b"].sum(), lambda f: f(RECORDS), "x is a record"),
}


@pytest.mark.parametrize("name", WHY)
def test_it_says_why_calls_are_bound_anew_each_time(shared_runtimes: Any, name: str) -> None:
    rt = shared_runtimes[2]
    fn, call, why = WHY[name]
    f = rt.function(fn, bcast_inputs="y" if name == "an object" else (), outputs="sum", name=f"why {name}")
    for _ in range(12):
        call(f)
    record = rt.profile.records[f"why {name}"]
    assert (record.num_calls, record.num_new) == (12, 12)
    assert record.note.startswith("12 of 12 calls were bound anew: ") and why in record.note
    assert f"why {name}: {record.note}" in str(rt.profile)
    assert html.escape(record.note) in rt.profile._repr_html_()


def test_calls_like_the_one_before_need_no_word(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.sum(), outputs="sum", name="plain total")
    for k in range(20):
        f(np.full(4, k))
    assert rt.profile.records["plain total"].note == ""
    assert "plain total:" not in str(rt.profile)


def test_what_looks_different_each_time_is_said_to(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.sum(), outputs="sum", name="growing total")
    for k in range(20):
        f(np.ones(4 + k))
    assert "20 of 20 calls were bound anew: what was passed" in rt.profile.records["growing total"].note
