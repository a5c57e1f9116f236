"""Functions that no longer exist: the workers forget them with the next call, all of them in one pass."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest

from synk._master.code import book as _book


def lines_run(act: Any) -> int:
    """Return how many lines of the book run in ``act``."""
    count = 0

    def look(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != _book.__file__:
            return None
        count += event == "line"
        return look

    sys.settrace(look)
    try:
        act()
    finally:
        sys.settrace(None)
    return count


def test_the_work_to_drop_functions_grows_with_their_number_and_not_with_its_square(runtime: Any) -> None:
    rt = runtime(2)
    x = np.ones(4)
    work = []
    for count in (20, 80):
        functions = [rt.function(lambda x, k=k: x.sum() * k, outputs="sum") for k in range(count)]
        rt.distribute()
        keep = rt.function(lambda x: x.sum(), outputs="sum")
        assert [keep(x) for _ in range(3)] == [4.0] * 3
        before = len(rt._session.functions.book.parcels)
        del functions
        gc.collect()
        work.append(lines_run(lambda keep=keep: keep(x)))
        assert len(rt._session.functions.book.parcels) < before
        assert lines_run(lambda keep=keep: keep(x)) < work[-1] / 4, "nothing is left to drop"
    assert work[1] < 6 * work[0]


@pytest.mark.parametrize("num_workers", [1, 2, "inline"])
def test_those_that_live_go_on_when_others_are_dropped(shared_runtimes: Any, num_workers: Any) -> None:
    rt = shared_runtimes[num_workers]
    x, shared = np.ones(4), {"scale": 3.0}
    living = [rt.function(lambda x, k=k: x.sum() * k * shared["scale"], outputs="sum") for k in range(12)]
    for step in (2, 3, 1):
        assert [f(x) for f in living] == [12.0 * k for k in range(12)[-len(living) :]]
        del living[:step]
        gc.collect()
        shared["scale"] = 3.0
    assert [f(x) for f in living] == [12.0 * k for k in range(6, 12)]
