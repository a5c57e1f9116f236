"""cProfile on every rank, and the stacks of all ranks."""

from __future__ import annotations

import pstats
import threading
import time
from typing import Any

import numpy as np
import pytest
from support.harness import wait_for

from synk.errors import CallCancelled
from synk.profiler import cprofile


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


def test_the_stacks_of_all_ranks_during_a_call(reused: Any) -> None:
    rt = reused(2)

    def sleeps_for_long(x: np.ndarray) -> None:
        time.sleep(60)

    def call() -> None:
        with pytest.raises(CallCancelled):
            rt.function(sleeps_for_long, outputs=None)(np.ones(2))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert wait_for(lambda: [rank for rank, text in rt.stacks().items() if "sleeps_for_long" in text] == [0, 1])
    finally:
        rt.interrupt()
        thread.join()
