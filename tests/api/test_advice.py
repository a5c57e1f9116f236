"""``synk.profile().advice()``: each change that it names is made here, and saves what the advice says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import synk

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


def test_each_change_saves_what_the_advice_says(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    rt: synk.Runtime = shared_runtimes[2]
    x, table, model = np.ones(10), rt.data(TABLE), rt.resident(MODEL)
    kinds: dict[str, tuple[Callable[[], Any], Callable[[str], Any], str]] = {
        "data": (
            lambda: called(rt, weighted, TABLE, x, bcast_inputs="table"),
            lambda _: called(rt, weighted, table, x, bcast_inputs="table"),
            r"weighted: pass 'table' as synk.data if it stays the same: saves (\S+) MB",
        ),
        "resident": (
            lambda: called(rt, looked_up, MODEL, x, bcast_inputs="model", times=100),
            lambda _: called(rt, looked_up, model, x, bcast_inputs="model", times=100),
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


def test_a_profile_without_calls_has_no_advice(shared_runtimes: Any) -> None:
    rt: synk.Runtime = shared_runtimes[1]
    rt.profile.reset()
    assert str(rt.profile.advice()) == "No change stands out in what was measured."
