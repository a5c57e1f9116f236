"""``Data`` over nodes: its rows travel with each call, and are those that it has at that moment."""

from __future__ import annotations

from typing import Any

import numpy as np

import synk

BATCHES = [None, 4, slice(8, 2, -2), [7, 1, 3], np.array([9, 9, 0, 4, 2]), np.arange(10) % 3 == 0, []]


def test_rows_are_those_of_the_array(nodes: synk.Runtime, subtests: Any) -> None:
    values = np.arange(30.0).reshape(10, 3)
    x = nodes.data(values)
    twice = nodes.function(lambda x: x * 2, outputs="gather")
    for turn, batch in enumerate([*BATCHES, *BATCHES]):
        with subtests.test(case=f"{turn}: {batch}"):
            picked = values[:batch] if isinstance(batch, int) else values if batch is None else values[batch]
            np.testing.assert_array_equal(twice(x, batch=batch), picked * 2)
        x[2] = values[2] = -turn


def test_rows_of_a_minibatch_go_with_those_that_the_batch_selects(nodes: synk.Runtime) -> None:
    values, own = np.arange(20.0).reshape(10, 2), np.arange(6.0).reshape(3, 2)
    chosen = nodes.data(own, minibatch=True)
    add = nodes.function(lambda x, y: x + 100 * y, outputs="gather")
    for batch in ([7, 1, 3], slice(9, 3, -2), 3):
        picked = values[:batch] if isinstance(batch, int) else values[batch]
        np.testing.assert_array_equal(add(nodes.data(values), chosen, batch=batch), picked + 100 * own)


def test_a_submitted_call_has_the_rows_of_its_moment(nodes: synk.Runtime) -> None:
    x = nodes.data(np.ones(10))
    total = nodes.function(lambda x: x.sum(), outputs="sum")
    calls = []
    for k in range(5):
        x[:] = k
        calls.append(total.submit(x))
    x.set_value(np.zeros(3))
    assert [call.result() for call in calls] == [10.0 * k for k in range(5)]
    assert total(x) == 0.0


def test_broadcast_and_built_inputs(nodes: synk.Runtime) -> None:
    values, weights = np.arange(20.0).reshape(10, 2), np.array([1.0, 2.0])
    f = nodes.function(lambda x, w: x @ w, outputs="gather", bcast_inputs="w")
    built = f.build_inputs(values, weights)
    np.testing.assert_array_equal(f(*built), values @ weights)
    np.testing.assert_array_equal(f(values, nodes.data(weights)), values @ weights)
