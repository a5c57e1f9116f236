"""``synk.profile()``: calls, time and bytes by function."""

from __future__ import annotations

from typing import Any

import numpy as np


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
