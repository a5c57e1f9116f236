"""Ranks that sleep at every chance, and do not look for themselves: no wake-up is lost; a slow rank is no deadlock."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.places import on_each


def hasty(body: Callable[[Any], Any], recheck_ms: int | None) -> Callable[[Any], Any]:
    """Return a body that never spins, and looks for a deadlock every ``recheck_ms`` (None: never).

    Ranks of several nodes then report to each other at each look that they sleep.
    """

    def run(comm: Any) -> Any:
        from synk.communicators import _rendezvous, _wired

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_rendezvous, "SPIN_YIELDS", 0)
            patch.setattr(_rendezvous, "RECHECK_MS", recheck_ms)
            patch.setattr(_wired, "RECHECK_MS", recheck_ms)
            patch.setattr(_wired, "REPORT_S", 0.0)
            return body(comm)

    return run


def meet_and_pass_on(comm: Any) -> int:
    """Meet often, and pass numbers around a ring of ranks; return how many came in order."""
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for _ in range(1000):
        comm.barrier()
    for number in range(200):
        comm.isend(np.full(50, number), after)
        assert (comm.recv(before) == number).all()
    return 200


def at_random_speed(comm: Any) -> int:
    rng = random.Random(comm.rank)
    for count in (5, 10_000, 400_000) * 6:
        if rng.random() < 0.3:
            time.sleep(0.03)  # the others sleep over what this one will bring
        for _ in range(rng.randrange(3000)):
            os.sched_yield()
        assert comm.all_reduce(np.ones(count), "sum")[-1] == comm.world_size
        comm.isend(np.full(count, comm.rank), (comm.rank + 1) % comm.world_size)
        assert comm.recv((comm.rank - 1) % comm.world_size)[-1] == (comm.rank - 1) % comm.world_size
    return 200


@pytest.mark.parametrize("place", [3, "1+2"])
@pytest.mark.parametrize("body", [meet_and_pass_on, at_random_speed])
def test_none_is_lost_and_nobody_is_taken_for_stuck(shared_runtimes: Any, place: Any, body: Any) -> None:
    runtime = shared_runtimes[place]
    recheck_ms = None if body is meet_and_pass_on and place != "1+2" else 1
    assert on_each(runtime, hasty(body, recheck_ms)) == [200] * runtime.world_size
