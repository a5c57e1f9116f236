"""What shared variables do over nodes beyond what they do on one machine, whose own tests run over nodes, too."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from support.harness import kill_and_wait, pids
from support.nodes import agents
from support.rank_arrays import assert_same, everywhere

import synk
from synk.errors import WorkerDied


def adder(rt: synk.Runtime, w: Any) -> Any:
    def add(x: np.ndarray) -> Any:
        w.value = w.value + x.sum() + synk.comm.rank
        return w.value.sum()

    return rt.function(add, outputs=None)


def test_values_travel_when_they_have_changed(nodes: synk.Runtime) -> None:
    w = nodes.shared(np.ones(1 << 17))
    f = nodes.function(lambda x: x.sum() + w.value[0], outputs=None)
    for value in (1.0, 2.0):
        w.value = np.full(1 << 17, value)
        before = nodes.counters["bytes_down"]
        assert f(np.zeros(4)) == [value] * 4
        assert nodes.counters["bytes_down"] - before > 1 << 20
        before = nodes.counters["bytes_down"]
        assert f(np.zeros(4)) == [value] * 4
        assert nodes.counters["bytes_down"] - before < 1 << 16


def test_a_value_that_was_set_after_a_call_wins_over_what_the_call_assigned(nodes: synk.Runtime) -> None:
    w = nodes.shared(np.zeros(3))
    add = adder(nodes, w)
    for k in range(3):
        add(np.ones(4))
        nodes.set_value(w, np.full(3, 10.0 * k), rank=3)
        assert_same(everywhere(nodes, w)[3], np.full(3, 10.0 * k))


def test_ranks_without_rows_get_the_value_of_the_lowest_that_has_some(nodes: synk.Runtime) -> None:
    """On both nodes, also on one that did not take part in the call."""
    w = nodes.shared(np.zeros(2))
    add = adder(nodes, w)
    for num_rows in (1, 2, 3):
        add(np.ones(num_rows))
        values = everywhere(nodes, w)
        assert_same(values[num_rows:], [values[0]] * (4 - num_rows))
        w.value = np.zeros(2)


def test_calls_on_submission_see_what_the_ones_before_them_have_assigned(nodes: synk.Runtime) -> None:
    w = nodes.shared(np.zeros(1))
    count = nodes.function(lambda x: _count(w), outputs=None)
    calls = [count.submit(np.ones(4)) for _ in range(5)]
    assert [call.result() for call in calls] == [[float(k)] * 4 for k in range(1, 6)]


def _count(w: Any) -> float:
    w.value = w.value + 1
    return float(w.value[0])


def test_items_of_a_map_see_the_last_value(nodes: synk.Runtime) -> None:
    w = nodes.shared(np.zeros(1))
    count = nodes.function(lambda x: _count(w), outputs=None)
    for k in range(1, 4):
        count(np.ones(4))
        assert set(nodes.map(lambda n: float(w.value[0]), range(12), batch_size=1)) == {float(k)}


def test_what_a_call_on_trial_assigns_is_not_kept(nodes: synk.Runtime) -> None:
    w, s = nodes.shared(np.zeros(1)), nodes.shared(np.arange(8.0), sharded=True)

    def step(x: np.ndarray) -> Any:
        w.value = w.value + 1
        s.value = s.value * 2
        return x.sum()

    f = nodes.function(step, outputs="sum")
    f.verify(np.ones(4))
    assert_same(everywhere(nodes, w), [np.zeros(1)] * 4)
    assert_same(s.value, np.arange(8.0))
    f(np.ones(4))
    assert_same(everywhere(nodes, w), [np.ones(1)] * 4)
    assert_same(s.value, 2 * np.arange(8.0))


@pytest.mark.parametrize("node", [0, 1])
def test_no_value_is_lost_with_a_node(nodes: synk.Runtime, node: int) -> None:
    """Neither one that ranks have assigned, nor a shard: the head has them all."""
    w, s = nodes.shared(np.zeros(3)), nodes.shared(np.arange(9.0), sharded=True)
    add = adder(nodes, w)
    double = nodes.function(lambda: setattr(s, "value", s.value * 2), outputs=None, per_rank=True)
    add(np.arange(4.0))
    double()
    values = everywhere(nodes, w)
    kill_and_wait(agents(nodes)[node])
    with pytest.warns(RuntimeWarning, match=f"node {node} .*was started again"):
        double()
    assert_same(s.value, 4 * np.arange(9.0))
    assert_same(everywhere(nodes, w), values)


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_dies_in_a_call_changes_nothing_on_the_other(nodes: synk.Runtime, node: int) -> None:
    w = nodes.shared(np.zeros(3))
    add, agent = adder(nodes, w), agents(nodes)[node]
    add(np.arange(4.0))
    values = everywhere(nodes, w)

    def assign_and_die(x: np.ndarray) -> float:
        w.value = w.value + 100
        if x[0] == 3 * node:
            kill_and_wait(agent)
        return 0.0

    with pytest.raises(WorkerDied) as caught:
        nodes.function(assign_and_die, outputs="sum")(np.arange(4.0))
    assert caught.value.nodes == (node,)
    assert_same(everywhere(nodes, w), values)
    add(np.arange(4.0))
    assert_same(everywhere(nodes, w), [value + 2.0 * rank for rank, value in enumerate(values)])


def test_a_worker_that_is_replaced_gets_the_values_from_its_node(nodes: synk.Runtime) -> None:
    w = nodes.shared(np.zeros(3))
    add = adder(nodes, w)
    add(np.arange(4.0))
    values = everywhere(nodes, w)
    kill_and_wait(pids(nodes)[3])
    with pytest.warns(RuntimeWarning, match="rank 3 .*was started again"):
        add(np.arange(4.0))
    assert_same(everywhere(nodes, w), [value + 2.0 * rank for rank, value in enumerate(values)])


class Point(NamedTuple):
    x: Any
    y: Any


def test_the_nesting_of_a_value_may_have_classes_of_the_program(nodes: synk.Runtime) -> None:
    """An agent has no need of them."""
    w = nodes.shared(Point(np.zeros(2), {"a": [np.ones(1)]}))

    def move(x: np.ndarray) -> str:
        w.value = w.value._replace(x=w.value.x + synk.comm.rank)
        return type(w.value).__name__

    assert nodes.function(move, outputs=None)(np.zeros(4)) == ["Point"] * 4
    assert_same(nodes.get_value(w, 3), Point(np.full(2, 3.0), {"a": [np.ones(1)]}))


def test_a_variable_that_nobody_has_any_more_is_forgotten_on_the_nodes(nodes: synk.Runtime) -> None:
    def num_known(x: np.ndarray) -> int:
        from synk._wire.cell import cell

        return len(cell.worker.variables._replicas)

    count = nodes.function(num_known, outputs=None)
    before = count(np.zeros(4))
    kept = [nodes.shared(np.zeros(3)) for _ in range(5)]
    assert count(np.zeros(4)) == [each + 5 for each in before]
    del kept
    assert count(np.zeros(4)) == before


def test_a_node_that_is_not_in_the_next_call_learns_that_the_one_before_it_was_committed(nodes: synk.Runtime) -> None:
    v, w = nodes.shared(np.zeros(1)), nodes.shared(np.zeros(1))
    count, other = nodes.function(lambda x: _count(v), outputs=None), nodes.function(lambda x: _count(w), outputs=None)
    for k in range(1, 4):
        assert count(np.ones(4)) == [float(k)] * 4
        other(np.ones(1))  # on rank 0 alone
    assert_same(everywhere(nodes, v), [np.full(1, 3.0)] * 4)
    assert_same(everywhere(nodes, w), [np.full(1, 3.0)] * 4)


def test_values_that_differ_behind_an_empty_array(nodes: synk.Runtime) -> None:
    w = nodes.shared({"a": np.zeros((0, 2)), "b": np.zeros(2)})
    for rank in range(4):
        nodes.set_value(w, {"a": np.zeros((0, 2)), "b": np.full(2, float(rank))}, rank=rank)
    assert [float(value["b"][0]) for value in everywhere(nodes, w)] == [0.0, 1.0, 2.0, 3.0]


def test_the_rows_of_a_sharded_variable_stay_on_the_nodes(nodes: synk.Runtime) -> None:
    rows = np.arange(float(1 << 21)).reshape(-1, 4)
    picked = np.random.default_rng(1).permutation(len(rows))[:100]
    total = nodes.function(lambda x: x.sum(axis=0), outputs="sum")
    x = nodes.shared(rows, sharded=True)
    for batch in (None, picked, slice(10, 1000, 7)):
        total(x, batch=batch)
        before = nodes.counters["bytes_down"]
        np.testing.assert_array_equal(total(x, batch=batch), rows[slice(None) if batch is None else batch].sum(axis=0))
        assert nodes.counters["bytes_down"] - before < 1 << 14
