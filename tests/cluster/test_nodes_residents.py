"""Resident objects over nodes: alike on all ranks of all nodes, whatever happens to workers and agents.

What they are, and what calls do to them, is tested with those of one machine (tests/master/objects/test_residents.py).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import kill_and_wait, pids
from support.nodes import agents

import synk
from synk.errors import RemoteError, WorkerDied

Reused = Callable[..., synk.Runtime]


def make_step(rt: synk.Runtime, log: synk.Resident) -> Any:
    """Return a function by which every rank with rows adds the same amount to its list."""

    def step(x: np.ndarray, amount: float) -> float:
        log.value.append(amount)
        return float(x.sum())

    return rt.function(step, outputs="sum", bcast_inputs="amount", changes=[log], name="step")


def logs(rt: synk.Runtime, log: synk.Resident) -> list[list[float]]:
    return [log.get(rank) for rank in range(rt.world_size)]


X = np.ones(4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_where_no_rank_has_the_state_it_is_lost_and_said_so(reused: Reused) -> None:
    rt = reused("1+3")
    log, unchanged = rt.resident([], name="log"), rt.resident([1, 2], name="unchanged")
    step = make_step(rt, log)
    read = rt.function(lambda x: len(log.value), outputs="first")
    step(X, 1.0)
    step(np.ones(1), 2.0)  # rank 0 alone, which is a node of its own
    kill_and_wait(agents(rt)[0])
    for call in (lambda: step(X, 1.0), lambda: read(X), log.get):
        with pytest.raises(WorkerDied, match="the state of resident object 'log' is lost"):
            call()
    assert unchanged.get(3) == [1, 2]
    log.set([])
    step(X, 3.0)
    assert logs(rt, log) == [[3.0]] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("operation", ["call", "new function", "get", "join"])
def test_a_worker_dies_when_the_head_has_just_asked(
    reused: Reused, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replacement lacks the object. So its node refuses what needs it, or is asked again when nodes are joined."""
    rt = reused("1+3")
    log = rt.resident([], name="log")
    step = make_step(rt, log)
    step(X, 1.0)
    victims, ranks = [pids(rt)[3]], rt._session.ranks
    usual = ranks.prepare

    def prepare(deadline: float | None) -> bool:
        found = usual(deadline)
        while victims:
            kill_and_wait(victims.pop())
        return found

    monkeypatch.setattr(ranks, "prepare", prepare)
    expected = [1.0]
    if operation == "join":
        rt._session.group.break_up(rt._session.workers)
    else:
        with pytest.raises(WorkerDied, match="a worker of node 1 ended while idle and was replaced") as caught:
            if operation == "get":
                log.get(3)
            else:
                (step if operation == "call" else make_step(rt, log))(X, 2.0)
        expected += [2.0] * bool(getattr(caught.value, "step_counted", False))  # on the other node
    step(X, 3.0)
    assert logs(rt, log) == [[*expected, 3.0]] * 4


def load_in_the_program(pid: int) -> list[float]:
    if os.getpid() != pid:
        raise LookupError("not here")
    return []


class OfTheProgram(list[float]):
    def __reduce__(self) -> Any:
        return load_in_the_program, (os.getpid(),)


def test_an_object_that_cannot_be_loaded_names_the_device_and_its_node(reused: Reused) -> None:
    rt = reused("1+3")
    with pytest.raises(Exception, match="not here") as caught:
        rt.resident(OfTheProgram())
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteError)
    assert (cause.rank, cause.device) == (0, "node0:cpu:0")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_object_is_made_after_workers_were_replaced_while_there_was_none(reused: Reused) -> None:
    """What the head knew of the nodes then is out of date."""
    rt = reused("1+3")
    rt.function(len, outputs=None)(X)
    log = rt.resident([])
    make_step(rt, log)(X, 1.0)
    del log
    gc.collect()
    rt.function(len, outputs=None)(X)
    kill_and_wait(pids(rt)[3])
    rt.function(len, outputs=None)(X)
    assert logs(rt, rt.resident([])) == [[]] * 4
