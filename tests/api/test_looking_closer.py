"""cProfile on every rank, and the stacks of all ranks."""

from __future__ import annotations

import pstats
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from synk.errors import CallCancelled, ClosedError, UnsupportedError
from synk.profiler import cprofile

Fork = Callable[..., Any]


# -- cprofile --------------------------------------------------------------------------------------------------------


def work(x: np.ndarray, times: int) -> float:
    return float(sum(inner(x) for _ in range(times)))


def inner(x: np.ndarray) -> float:
    return float(np.sort(x).sum())


def test_every_rank_is_profiled(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    f = rt.function(work, bcast_inputs="times", outputs="sum")
    stats = cprofile(f, np.ones(9), 4)
    assert len(stats) == 3 and all(isinstance(each, pstats.Stats) for each in stats)
    for each in stats:
        counts = {name: count for (_, _, name), (count, *_) in each.stats.items()}  # type: ignore[attr-defined]
        assert (counts["work"], counts["inner"]) == (1, 4)
    assert len(cprofile(f, np.ones(2), times=1)) == 2  # one rank has no rows
    assert f(np.ones(9), 2) == 18.0


def test_what_the_function_raises_comes_through(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x: 1 / 0, outputs="sum")
    with pytest.raises(ZeroDivisionError):
        cprofile(f, np.ones(2))


def test_updates_cannot_be_profiled(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    total = rt.shared(np.zeros(1))
    f = rt.function(lambda x: (x.sum(), x[:1]), outputs="sum", updates=total)
    with pytest.raises(UnsupportedError, match="built with updates"):
        cprofile(f, np.ones(2))


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
        stats = cprofile(shared_runtimes[2].function(fn, outputs="sum"), np.ones(4))
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
