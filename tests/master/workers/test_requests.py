"""Messages to single ranks: several in flight, answered in any order, and what happens to them in trouble."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from support.harness import assert_right, replaced_workers, same_workers

import synk
from synk._wire.messages import Kind, Status
from synk.errors import CallTimeout, WorkerDied


def ping(rt: synk.Runtime, rank: int, deadline: float | None = None) -> Any:
    return rt._session.workers.send(Kind.PING, [rank], 0, {}, [], deadline, "call", f"the ping of rank {rank}")


def test_requests_to_single_ranks_are_answered_in_any_order(reused: Any) -> None:
    rt = reused(3)
    workers = rt._session.workers
    with same_workers(rt), rt._session.entered("ping"):
        rt._session.begin("ping")
        requests = [ping(rt, rank) for rank in (2, 0, 1, 0, 2)]
        for number in (4, 1, 0, 3, 2):
            replies = workers.wait(requests[number])
            assert [(rank, reply.status) for rank, reply in replies.items()] == [((2, 0, 1, 0, 2)[number], Status.PONG)]
        assert not workers.requests
    assert_right(rt)


def test_a_death_ends_the_requests_to_the_other_ranks_too(reused: Any) -> None:
    rt = reused(3)
    workers = rt._session.workers
    with replaced_workers(rt, [1]) as pids:
        with rt._session.entered("ping"):
            rt._session.begin("ping")
            for rank in range(3):
                os.kill(pids[rank], signal.SIGSTOP)
            requests = [ping(rt, rank) for rank in range(3)]
            os.kill(pids[1], signal.SIGKILL)
            for rank in (0, 2):
                os.kill(pids[rank], signal.SIGCONT)
            with pytest.raises(WorkerDied, match="rank 1 of 3"):
                workers.wait(requests[1])
            assert not workers.requests.debtors()
        assert_right(rt)


def test_a_time_limit_of_one_rank_holds_while_another_is_waited_for(
    reused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt = reused(2)
    workers = rt._session.workers
    end_calls, monotonic = workers.recovery.end_calls, time.monotonic

    def continue_and_end_calls(ranks: Any) -> None:
        os.kill(victim, signal.SIGCONT)
        end_calls(ranks)

    with rt._session.entered("ping"):
        rt._session.begin("ping")
        victim = workers.by_rank[1].process.pid
        os.kill(victim, signal.SIGSTOP)
        monkeypatch.setattr(workers.recovery, "end_calls", continue_and_end_calls)
        late = ping(rt, 1, monotonic() + 60.0)
        also_late = ping(rt, 1)
        workers.wait(ping(rt, 0))
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 100.0)
        with pytest.raises(CallTimeout, match="the ping of rank 1 did not end in time on rank 1"):
            workers.wait(also_late)
        assert late.is_lost and also_late.is_lost
    monkeypatch.undo()
    assert_right(rt)


def test_a_serial_call_is_a_request_to_one_rank(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    x = np.arange(7.0)
    f = rt.function(lambda x: (os.getpid(), x.sum()), outputs=(None, "sum"))
    f.serial(x)
    before = dict(rt.counters)
    own, total = f.serial(x)
    assert total == x.sum() and own == [rt._session.workers.by_rank[0].process.pid, None, None]
    assert rt.counters["messages_down"] - before["messages_down"] == 1
    assert rt.counters["messages_up"] - before["messages_up"] == 1
