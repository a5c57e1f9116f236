"""Plans of calls, cProfile on every rank, and the stacks of all ranks."""

from __future__ import annotations

import gc
import pstats
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from synk.errors import CallCancelled, ClosedError, UnsupportedError

Fork = Callable[..., Any]


# -- f.plan ------------------------------------------------------------------------------------------------------------


def test_a_plan_tells_rows_and_bytes_and_calls_nothing(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]

    def never(x: np.ndarray, y: np.ndarray, w: np.ndarray, options: Any) -> None:
        raise AssertionError("it was called")

    f = rt.function(never, bcast_inputs=("w", "options"))
    data = rt.data(np.ones((10, 2), np.float32))
    calls = rt.counters["calls"]
    plan = f.plan(np.ones((10, 3)), data, np.ones(5), {"a": 1})
    assert rt.counters["calls"] == calls
    assert [(each.rank, each.rows, each.low, each.high) for each in plan.ranks] == [
        (0, 4, 0, 4),
        (1, 3, 4, 7),
        (2, 3, 7, 10),
    ]
    by_name = {each.argument: each for each in plan.transfers}
    assert (by_name["x"].kind, by_name["x"].nbytes, by_name["x"].row_nbytes) == ("staged", 240, 24)
    assert (by_name["y"].kind, by_name["y"].nbytes, by_name["y"].row_nbytes) == ("data", 80, 8)
    assert (by_name["w"].kind, by_name["w"].nbytes, by_name["w"].row_nbytes) == ("staged", 40, 0)
    assert by_name["options"].kind == "pickled"
    whole = 40 + by_name["options"].nbytes
    assert [each.in_nbytes for each in plan.ranks] == [rows * 32 + whole for rows in (4, 3, 3)]
    assert not plan.is_compiled and plan.outputs == ()


def test_after_a_call_a_plan_tells_the_way_of_the_outputs(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(
        lambda x: {"loss": x.mean(), "big": np.ones(200_000), "rows": x, "text": "a"},
        outputs={"loss": "avg", "big": "sum", "rows": "gather", "text": None},
    )
    x = np.ones((6, 2))
    gc.collect()  # functions of earlier tests: a call that has some dropped is compiled only by the one behind it
    for _ in range(4):
        f(x)
    plan = f.plan(x)
    assert plan.is_compiled and not f.plan(np.ones((7, 2))).is_compiled
    ways = {each.name: (each.op, each.nbytes, each.way.partition(",")[0]) for each in plan.outputs}
    assert ways["output['loss']"][0::2] == ("avg", "written to shared memory")
    assert ways["output['big']"] == ("sum", 2 * 1_600_000, "each rank reduces its part in shared memory")
    assert ways["output['rows']"] == ("gather", 96, "written to shared memory")
    assert ways["output['text']"][2] == "pickled by each rank"
    assert "output['big']" in repr(plan) and "<pre>" in plan._repr_html_()


def test_a_plan_raises_what_the_call_would(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x, y: (x * y).sum(), outputs="sum", name="pair")
    with pytest.raises(ValueError, match="cannot scatter inputs of 'pair'"):
        f.plan(np.ones(3), np.ones(4))
    with pytest.raises(TypeError):
        f.plan(np.ones(3))
    assert [each.rows for each in f.plan(np.ones(9), np.ones(9), batch=slice(2, 5)).ranks] == [2, 1]


def test_calls_after_a_plan_are_as_before(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.sum(), outputs="sum")
    x = np.arange(5.0)
    for k in range(6):
        f.plan(x + k)
        assert f(x + k) == (x + k).sum()
    assert f._callee.record.num_new <= 2  # not one for each


# -- f.cprofile --------------------------------------------------------------------------------------------------------


def work(x: np.ndarray, times: int) -> float:
    return float(sum(inner(x) for _ in range(times)))


def inner(x: np.ndarray) -> float:
    return float(np.sort(x).sum())


def test_every_rank_is_profiled(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    f = rt.function(work, bcast_inputs="times", outputs="sum")
    stats = f.cprofile(np.ones(9), 4)
    assert len(stats) == 3 and all(isinstance(each, pstats.Stats) for each in stats)
    for each in stats:
        counts = {name: count for (_, _, name), (count, *_) in each.stats.items()}  # type: ignore[attr-defined]
        assert (counts["work"], counts["inner"]) == (1, 4)
    assert len(f.cprofile(np.ones(2), times=1)) == 2  # one rank has no rows
    assert f(np.ones(9), 2) == 18.0


def test_what_the_function_raises_comes_through(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x: 1 / 0, outputs="sum")
    with pytest.raises(ZeroDivisionError):
        f.cprofile(np.ones(2))


def test_updates_cannot_be_profiled(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    total = rt.shared(np.zeros(1))
    f = rt.function(lambda x: (x.sum(), x[:1]), outputs="sum", updates=total)
    with pytest.raises(UnsupportedError, match="built with updates"):
        f.cprofile(np.ones(2))


def test_methods_and_objects_that_are_called_can_be_profiled(shared_runtimes: Any) -> None:
    class Model:
        def __init__(self) -> None:
            self.rate = 2.0

        def __call__(self, x: np.ndarray) -> float:
            return inner(x) * self.rate

        def step(self, x: np.ndarray) -> float:
            return self(x)

    model = Model()
    for fn in (model, model.step):
        stats = shared_runtimes[2].function(fn, outputs="sum").cprofile(np.ones(4))
        assert all(any(name == "__call__" for _, _, name in each.stats) for each in stats)  # type: ignore[attr-defined]


# -- rt.stacks ---------------------------------------------------------------------------------------------------------


def test_the_stacks_of_all_ranks_during_a_call(runtime: Fork) -> None:
    rt = runtime(2)

    def sleeps_for_long(x: np.ndarray) -> float:
        time.sleep(60)
        return float(x.sum())

    f = rt.function(sleeps_for_long, outputs="sum")

    def call() -> None:
        with pytest.raises(CallCancelled):
            f(np.ones(2))

    thread = threading.Thread(target=call)
    thread.start()
    found: dict[int, str] = {}
    deadline = time.monotonic() + 50
    while time.monotonic() < deadline and not (len(found) == 2 and all("sleeps_for_long" in s for s in found.values())):
        found = rt.stacks()
    rt.interrupt()
    thread.join()
    assert sorted(found) == [0, 1] and all("sleeps_for_long" in stack for stack in found.values())


def test_a_closed_runtime_has_no_stacks(runtime: Fork) -> None:
    rt = runtime(1)
    rt.close()
    with pytest.raises(ClosedError, match="cannot look at the workers"):
        rt.stacks()
