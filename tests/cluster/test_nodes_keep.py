"""What nodes keep and what travels to them: variables, resident objects, functions, ``on_restart``, prints and logs.

What they are, and what calls do to them, is tested with those of one machine.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import pids
from support.nodes import agents, kill_and_hear
from support.rank_arrays import assert_same, everywhere

import synk
from synk.errors import StartupError, WorkerDied

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
X = np.ones(4)

# ----- shared variables


def test_values_and_rows_travel_when_they_have_changed(nodes: synk.Runtime) -> None:
    w, rows = nodes.shared(np.ones(1 << 17)), np.arange(float(1 << 18)).reshape(-1, 4)
    x, picked = nodes.shared(rows, sharded=True), np.random.default_rng(1).permutation(len(rows))[:100]
    f = nodes.function(lambda x: x.sum() + w.value[0], outputs=None)
    total = nodes.function(lambda x: x.sum(axis=0), outputs="sum")

    def sent(call: Callable[[], Any]) -> int:
        before = nodes.counters["bytes_down"]
        call()
        return int(nodes.counters["bytes_down"] - before)

    for value in (1.0, 2.0):
        w.value = np.full(1 << 17, value)
        assert f(np.zeros(4)) == [value] * 4
        assert sent(lambda: f(np.zeros(4))) < 1 << 16
        w.value = np.full(1 << 17, value)
        assert sent(lambda: f(np.zeros(4))) > 1 << 20
    for batch in (None, picked, slice(10, 1000, 7)):
        total(x, batch=batch)
        assert sent(lambda batch=batch: total(x, batch=batch)) < 1 << 14  # type: ignore[misc]


def test_no_value_is_lost_with_a_worker_or_a_node_and_none_is_half_assigned(nodes: synk.Runtime, subtests: Any) -> None:
    """Neither one that ranks have assigned, nor a shard; a call that a node dies in changes nothing on the other."""
    w, s = nodes.shared(np.zeros(3)), nodes.shared(np.arange(9.0), sharded=True)

    def add(x: np.ndarray, victim: int) -> float:
        w.value = w.value + x.sum() + synk.comm.rank
        if synk.comm.rank == victim:
            os.kill(os.getppid(), 9)
        return 0.0

    f = nodes.function(add, outputs="sum", bcast_inputs="victim")
    double = nodes.function(lambda: setattr(s, "value", s.value * 2), outputs=None, per_rank=True)
    f(np.arange(4.0), -1)
    for number, victim in enumerate(("node 0", "node 1", "worker 3")):
        with subtests.test(case=victim):
            values = everywhere(nodes, w)
            if victim != "worker 3":
                with pytest.raises(WorkerDied):
                    f(np.ones(4), 3 * number)
                assert_same(everywhere(nodes, w), values)
            kill_and_hear(nodes, pids(nodes)[3] if victim == "worker 3" else agents(nodes)[number])
            double()
            assert_same(s.value, 2.0 ** (number + 1) * np.arange(9.0))
            assert_same(everywhere(nodes, w), values)
            f(np.arange(4.0), -1)
            assert_same(everywhere(nodes, w), [value + 2.0 * rank for rank, value in enumerate(values)])


def test_a_node_that_is_not_in_the_next_call_learns_that_the_one_before_it_was_committed(nodes: synk.Runtime) -> None:
    v, w = nodes.shared(np.zeros(1)), nodes.shared(np.zeros(1))

    def counter(variable: Any) -> Any:
        return nodes.function(lambda x: setattr(variable, "value", variable.value + 1), outputs=None)

    count, other = counter(v), counter(w)
    for _ in range(3):
        count(np.ones(4))
        other(np.ones(1))  # on rank 0 alone
    assert_same(everywhere(nodes, v), [np.full(1, 3.0)] * 4)
    assert_same(everywhere(nodes, w), [np.full(1, 3.0)] * 4)


# ----- resident objects


def test_where_no_rank_has_the_state_it_is_lost_and_said_so(reused: Any) -> None:
    rt = reused("1+3")
    log, unchanged = rt.resident([], name="log"), rt.resident([1, 2], name="unchanged")
    step = rt.function(lambda x, amount: log.value.append(amount), outputs=None, bcast_inputs="amount", updates=[log])
    read = rt.function(lambda x: len(log.value), outputs="first")
    step(X, 1.0)
    step(np.ones(1), 2.0)  # rank 0 alone, which is a node of its own
    kill_and_hear(rt, agents(rt)[0])
    for call in (lambda: step(X, 1.0), lambda: read(X), log.get):
        with pytest.raises(WorkerDied, match="the state of resident object 'log' is lost"):
            call()
    assert unchanged.get(3) == [1, 2]
    log.set([])
    step(X, 3.0)
    assert [log.get(rank) for rank in range(4)] == [[3.0]] * 4


# ----- on_restart

ran: list[Any] = []
"""On a worker: what on_restart has noted there."""
label: list[Any] = ["first"]


def prepare() -> None:
    if label[0] == "none":
        raise FileNotFoundError("no checkpoint")
    ran.append((synk.comm.rank, label[0], label[1].value.tolist()))


@pytest.mark.parametrize("is_node", [False, True])
def test_each_replacement_runs_on_restart_first_as_it_is_in_the_program_then(runtime: Any, is_node: bool) -> None:
    rt = runtime((1, 2), cluster="here", nodes=2, on_restart=prepare, max_restarts=10**9, backend="auto")
    notes = rt.function(lambda: list(ran), outputs=None, per_rank=True)
    assert notes() == [[]] * 3  # workers of the start do not run it
    label[:] = "second", rt.shared(np.ones(2))
    kill_and_hear(rt, agents(rt)[1] if is_node else pids(rt)[2])
    assert notes() == [[], [(1, "second", [1.0, 1.0])] if is_node else [], [(2, "second", [1.0, 1.0])]]
    label[0] = "none"
    kill_and_hear(rt, pids(rt)[2])
    with pytest.raises(StartupError, match=r"rank 2 of 3: on_restart ended with FileNotFoundError: no checkpoint"):
        notes()


# ----- functions, prints, logs, counts


def test_what_ranks_print_and_log(nodes: synk.Runtime, capfd: Any, caplog: pytest.LogCaptureFixture) -> None:
    def talk(x: np.ndarray) -> None:
        print("rank", synk.comm.rank)
        print("trouble", file=sys.stderr)
        logging.getLogger("mine").warning("row %d", x[0])

    with caplog.at_level(logging.INFO):
        nodes.function(talk, outputs=None)(np.arange(4))
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == [f"[rank {rank}] rank {rank}" for rank in range(4)]
    assert sorted(printed.err.splitlines()) == [f"[rank {rank}] trouble" for rank in range(4)]
    mine = sorted(caplog.records, key=lambda record: record.rank)  # type: ignore[attr-defined]
    assert [record.getMessage() for record in mine] == [f"[rank {rank}] row {rank}" for rank in range(4)]
    assert [record.processName for record in mine] == [f"rank {rank}" for rank in range(4)]
