"""Faults while several calls are in flight: deaths, time limits, limits of the system, forks, threads.

Ctrl-C at any moment of submitting and waiting is in the storm of ``test_d_signals.py``.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.gates import hear, say, sign
from support.harness import (
    FAILPOINTS,
    Child,
    arm,
    assert_right,
    ctrl_c_when,
    failpoint,
    kill_in,
    pids,
    replaced_workers,
    same_workers,
    wait_for,
    wait_until_dead,
    waits_in_synk,
)
from support.tables import seeds

import synk
from synk.errors import CallCancelled, CallTimeout, ReentrancyError, WorkerDied

Fork = Callable[..., Any]
X = np.ones(4)


def doer(rt: Any) -> Callable[..., Any]:
    """Return ``do(act, **options)``: submits a call whose value is 4; on rank 1 it does ``act()`` before."""

    def do(x: Any, act: Callable[[], Any] | None) -> float:
        if act is not None and synk.comm.rank == 1:
            act()
        return float(x.sum())

    f = rt.function(do, bcast_inputs="act", outputs="sum")
    assert f(X, None) == 4.0
    return lambda act=None, **options: f.submit(X, act, **options)


def holder(do: Callable[..., Any], path: Path) -> tuple[Any, Callable[[], None]]:
    """Return a call that lasts until it is released, and what releases it."""
    name = sign(path)
    return do(lambda: hear(name)), lambda: say(name)


# ----- deaths


def test_A_a_death_ends_all_calls_in_flight(rt: Any, subtests: pytest.Subtests) -> None:
    """But those that were answered, whether they were asked for or not."""
    do = doer(rt)
    for num_done in range(3):
        with subtests.test(num_done=num_done), replaced_workers(rt, [1]) as workers:
            done = [do() for _ in range(num_done)]
            pending = [do(saboteurs.loop_for_ever), do(), do()][: 3 - num_done]
            for call in done[:1]:
                assert wait_for(call.done)
            os.kill(workers[1], signal.SIGKILL)
            for call in reversed(pending):
                assert wait_for(call.done)  # which is enough to learn of it
                with pytest.raises(WorkerDied, match="SIGKILL") as caught:
                    call.result()
                assert caught.value.ranks == (1,)
            for call in done[:1]:
                assert call.result() == 4.0
            for call in done[1:]:  # the death may have come before it
                with contextlib.suppress(WorkerDied):
                    assert call.result() == 4.0


def test_A_a_death_at_each_step(rt: Any, subtests: pytest.Subtests) -> None:
    """What was answered is right, what was not is WorkerDied, and then all is well."""
    large = rt.function(lambda x: (np.full(50_000, x.sum()), x.sum()), outputs="sum")
    large(X)
    for step in (name for name in FAILPOINTS if name.startswith(("call.", "reduce."))):
        with subtests.test(step), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arm(rt, failpoint(step, 1, 4))
            pending, outcomes = [], []
            for k in range(9):
                with contextlib.suppress(WorkerDied):
                    pending.append((k, large.submit(np.full(4, float(k)))))
            for k, call in pending:
                try:
                    summed, value = call.result()
                    assert (summed == 4.0 * k).all() and value == 4.0 * k
                    outcomes.append("right")
                except WorkerDied:
                    outcomes.append("died")
            assert_right(rt)
            assert "right" in outcomes and len(pending) == 9
            assert outcomes.count("died") <= 3


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_A_chaos(reused: Fork, seed: int, storm_count: Callable[[int], int]) -> None:
    """Kills at random moments: a call's result is right, or it is WorkerDied; and the runtime goes on."""
    rt = reused(3)
    rng = random.Random(seed)
    work = rt.function(lambda x: (time.sleep(0.0005), x.sum(), np.full(30_000, x.sum()))[1:], outputs="sum")
    work(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(storm_count(12)):
            workers, victim = pids(rt), rng.randrange(3)
            timer = kill_in(rng.uniform(0, 0.02), workers[victim])
            timer.start()
            pending = []
            for _ in range(8):
                value = float(rng.randrange(100))
                with contextlib.suppress(WorkerDied):
                    pending.append((value, work.submit(np.full(6, value))))
            for value, call in pending:
                try:
                    total, filled = call.result()
                    assert total == 6 * value and (filled == 6 * value).all()
                except WorkerDied as error:
                    assert error.ranks == (victim,)
            timer.join()
            assert wait_until_dead(workers[victim])
            assert_right(rt)  # or the next round would meet this death
    assert_right(rt)


# ----- time limits


def test_B_a_call_that_takes_too_long_takes_those_behind_it_along(rt: Any) -> None:
    do = doer(rt)
    with same_workers(rt):
        first, slow, last = do(), do(saboteurs.loop_for_ever, timeout=1.0), do()
        told = r"^the call of 'do' was ended together with another: 'do' did not end in time(?!.*it again. Submit)"
        with pytest.raises(CallCancelled, match=told) as caught:
            last.result()
        assert isinstance(caught.value.__cause__, CallTimeout)
        with pytest.raises(CallTimeout):
            slow.result()
        assert first.result() == 4.0


def test_B_an_answer_that_came_in_time_counts_whenever_it_is_asked_for(rt: Any, tmp_path: Path) -> None:
    """Without any time to wait: what is there is there, and what is not is no failure of the call."""
    do = doer(rt)
    call = do(timeout=60.0)
    assert wait_for(lambda: rt.where().count("): idle\n") == 2)  # what they answered may still lie in their pipes
    assert call.result(timeout=0) == 4.0
    slow, release = holder(do, tmp_path / "go")
    with pytest.raises(TimeoutError):
        slow.result(timeout=0)
    release()
    assert slow.result() == 4.0


def test_B_each_time_limit_holds_behind_a_call_without(rt: Any, tmp_path: Path) -> None:
    do = doer(rt)
    with same_workers(rt):
        for wait in (lambda call: call.result(), lambda call: wait_for(call.done) and call.result()):
            first, limited = do(saboteurs.loop_for_ever), do(timeout=0.5)
            with pytest.raises(CallTimeout):
                wait(limited)
            with pytest.raises(CallCancelled, match="do"):
                first.result()
        first, release = holder(do, tmp_path / "go")
        others = [do(), do()]
        with pytest.raises(CallTimeout, match="still in flight"):
            do(timeout=0.2)
        release()
        assert [call.result() for call in (first, *others)] == [4.0] * 3, "they went on"


# ----- Ctrl-C


def test_D_ctrl_c_ends_all_calls_in_flight(rt: Any, subtests: pytest.Subtests) -> None:
    do = doer(rt)
    waits: dict[str, Callable[[list[Any]], object]] = {
        "result": lambda pending: pending[1].result(),
        "result with a limit": lambda pending: pending[1].result(timeout=1000),
        "submit": lambda pending: do(),
        "call": lambda pending: assert_right(rt),
    }
    for where, wait in waits.items():
        with subtests.test(where), same_workers(rt):
            done = do()
            assert done.result() == 4.0
            pending = [do(saboteurs.loop_for_ever), do(), do()]
            with pytest.raises(KeyboardInterrupt), ctrl_c_when(waits_in_synk):
                wait(pending)
            assert done.result() == 4.0
            for call in pending:
                assert call.done()
                with pytest.raises(CallCancelled, match="interrupt"):
                    call.result()


# ----- forks, threads, drops


def test_E_a_forked_copy_cannot_ask(rt: Any, tmp_path: Path) -> None:
    """And what it tries does the original no harm, whose memory it shares."""
    pending, release = holder(doer(rt), tmp_path / "go")

    def ask() -> None:
        for question in (pending.result, pending.done, rt.where):
            with pytest.raises(ReentrancyError):
                question()

    with Child(ask):
        pass
    release()
    assert pending.result() == 4.0
    assert_right(rt)


def test_E_other_threads_wait_for_what_concerns_them(rt: Any, tmp_path: Path) -> None:
    do = doer(rt)
    data = rt.data(X)
    slow, release = holder(do, tmp_path / "go")
    behind = do()
    waiting = threading.Thread(target=slow.result)
    waiting.start()
    assert data[0] == 1.0
    with pytest.raises(TimeoutError):
        behind.result(timeout=0.1)
    assert not behind.done()
    release()
    waiting.join()
    assert behind.result() == 4.0
