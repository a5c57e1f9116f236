"""Recovery: after every fault the variables of all ranks hold the values of before the call or of after it, no mix."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import assert_right, failpoint, kill_and_wait, pids, replaced_workers, script, wait_until_dead

from synk.errors import CallTimeout, WorkerDied

Fork = Callable[..., Any]
ROWS = np.arange(6.0)
STEPS = ("call.received", "call.before_function", "call.after_function", "call.published", "call.before_reply")


def counter(rt: Any, size: int = 3) -> tuple[Any, Any]:
    """Return a replicated variable and a function that adds 1 to it and returns the sum of its rows."""
    w = rt.shared(np.zeros(size), name="w")

    def step(x: np.ndarray) -> float:
        w.value = w.value + 1
        return x.sum()

    return w, rt.function(step, outputs="sum", name="step")


def replicas(rt: Any, w: Any) -> list[float]:
    """Return each rank's value of a variable whose elements are all alike."""
    values = [rt.get_value(w, rank=rank) for rank in range(rt.world_size)]
    assert all((value == value[0]).all() for value in values), "a torn value"
    return [float(value[0]) for value in values]


@pytest.mark.parametrize("size", [3, 1 << 17], ids=["small", "large"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.sampled(4)
def test_a_call_that_dies_changes_no_variable(reused: Fork, step: str, rank: int, size: int) -> None:
    rt = reused(2, failpoint(step, rank, nth=3))
    w, add = counter(rt, size)
    assert add(ROWS) == ROWS.sum()
    assert add(ROWS) == ROWS.sum()
    with pytest.raises(WorkerDied):
        add(ROWS)
    assert replicas(rt, w) == [2.0, 2.0]
    assert add(ROWS) == ROWS.sum()
    assert replicas(rt, w) == [3.0, 3.0]


def test_a_death_after_the_reply_keeps_the_new_values(reused: Fork) -> None:
    rt = reused(2, failpoint("call.after_reply", rank=1, nth=4))
    victim = pids(rt)[1]
    w, add = counter(rt)
    for _ in range(3):
        assert add(ROWS) == ROWS.sum()
    assert wait_until_dead(victim)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert add(ROWS) == ROWS.sum()
    assert replicas(rt, w) == [4.0, 4.0]


def test_replicas_and_shards_outlive_all_workers(reused: Fork) -> None:
    rt = reused(2)
    w, add = counter(rt)
    shards = rt.shared(np.arange(10.0), sharded=True)
    total = rt.function(lambda s: s.sum(), outputs="sum")
    for _ in range(3):
        add(ROWS)
    with replaced_workers(rt, [0, 1]) as before:
        kill_and_wait(*before)
        with pytest.warns(RuntimeWarning):
            assert replicas(rt, w) == [3.0, 3.0]
            assert total(shards) == 45.0
    add(ROWS)
    assert replicas(rt, w) == [4.0, 4.0]


def test_an_exception_or_a_timeout_changes_no_variable(reused: Fork) -> None:
    rt = reused(2)
    w, add = counter(rt)
    add(ROWS)

    def fail(row: np.ndarray, how: str) -> None:
        w.value = w.value + 100
        if row[0] == 1 and how == "raise":
            saboteurs.raise_value_error()
        if row[0] == 1 and how == "loop":
            saboteurs.loop_for_ever()

    failing = rt.function(fail, bcast_inputs="how")
    with pytest.raises(ValueError, match="saboteur"):
        failing(np.arange(2), "raise")
    assert replicas(rt, w) == [1.0, 1.0]
    with pytest.raises(CallTimeout):
        failing(np.arange(2), "loop", timeout=0.3)
    assert replicas(rt, w) == [1.0, 1.0]
    add(ROWS)
    assert replicas(rt, w) == [2.0, 2.0]


def test_chaos_never_mixes_old_and_new(reused: Fork, storm_count: Callable[[int], int]) -> None:
    """A random worker killed at a random time of a call, again and again: each call counts on all ranks or on none."""
    rt = reused(2)
    w, add = counter(rt, 1 << 10)
    add(ROWS)
    rng = random.Random(1)
    count = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(storm_count(6)):
            victim = rng.choice(pids(rt))
            timer = threading.Timer(rng.uniform(0, 0.002), kill_and_wait, (victim,))
            timer.start()
            with contextlib.suppress(WorkerDied):
                while timer.is_alive():
                    add(ROWS)
                    count += 1
            timer.join()
            assert replicas(rt, w) == [count, count]
    assert_right(rt)


def test_a_storm_of_interrupts_never_mixes_old_and_new() -> None:
    script(
        f"""
        import random
        from support.harness import assert_right, pids
        rng = random.Random(2)
        rt = synk.fork(2, backend="numpy")
        w = synk.shared(np.zeros(2000), name="w")

        @synk.function(outputs="sum")
        def add(x):
            w.value = w.value + 1
            return x.sum()

        rows = np.arange(6.0)
        add(rows)
        before = pids(rt)
        called = 1
        for number in range(40):
            timer = threading.Timer(rng.uniform(0.001, 0.006), os.kill, (os.getpid(), {int(signal.SIGINT)}))
            try:
                timer.start()
                while True:
                    called += 1
                    assert add(rows) == 15.0
            except KeyboardInterrupt:
                pass
            timer.join()
            values = [rt.get_value(w, rank=rank) for rank in range(2)]
            assert all((value == values[0][0]).all() for value in values), [value[0] for value in values]
            assert values[0][0] in (called - 1, called), (values[0][0], called)
            called = int(values[0][0])
        assert pids(rt) == before
        assert_right(rt)
        rt.close()
        """,
        timeout=60,
    ).check("")


def test_a_message_whose_reply_nobody_awaited_counts_as_answered(reused: Fork) -> None:
    """The log of what workers must know could not be shortened any more after a new call that was ended."""
    rt = reused(2)
    known = [worker.known for worker in rt._session.workers.by_rank]
    for _ in range(3):
        endless = rt.function(lambda x: saboteurs.loop_for_ever(), outputs=None)
        with pytest.raises(CallTimeout):
            endless(ROWS, timeout=0.3)
    assert [each.oldest for each in known] == [each.read for each in known]
