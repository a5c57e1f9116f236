"""Shared variables: replicas and shards that stay on the ranks, read and assigned by functions and by the program.

The oracle is NumPy on a list of one array per rank. What sequences of such operations give is in
``test_shared_sequences.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from support.names import named
from support.rank_arrays import assert_same, everywhere

import synk


@pytest.fixture(params=[3, 0, "1+3"])
def rt(request: pytest.FixtureRequest, shared_runtimes: Any) -> synk.Runtime:
    """A runtime with workers, one without and one over two nodes."""
    runtime: synk.Runtime = shared_runtimes[request.param]
    return runtime


# ----- values


def test_the_program_gives_copies_gets_copies_and_assigns(rt: Any) -> None:
    """An assignment broadcasts, or scatters rows. Any array-like will do."""
    for value in (1.5, np.float32(2), True, [[1, 2], [3, 4]], np.zeros((2, 0)), np.arange(10)[::-3], np.ones(3, ">i4")):
        expected = np.asarray(value)
        expected = expected.astype(expected.dtype.newbyteorder("="))
        assert_same(everywhere(rt, rt.shared(value)), [expected] * rt.world_size)
    value = np.arange(3.0)
    w, x = rt.shared(value), rt.shared(np.arange(4.0), sharded=True)
    value[:] = -1
    for read in (lambda: w.value.copy(), lambda: w[0].copy(), lambda: synk.gather(w)[0], lambda: +x.value[:3]):
        got = read()
        got[:] = -2
        np.testing.assert_array_equal(read(), np.arange(3.0))
    w.value, x.value = value, np.arange(7.0)
    value[:] = -3
    w.value += 2
    assert_same(everywhere(rt, w), [np.ones(3)] * rt.world_size)
    assert_same(everywhere(rt, x), np.array_split(np.arange(7.0), rt.world_size))


# ----- in functions


def test_variables_can_be_swapped_and_views_of_them_assigned(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    a, b = rt.shared(np.arange(4.0)), rt.shared(np.arange(4.0) * 10)

    def shuffle() -> float:
        a.value, b.value = b.value, a.value
        a.value = a.value[::-1]
        b.value = b.value.reshape(2, 2).T.reshape(-1)
        return 0.0

    f = rt.function(shuffle)
    left, right = np.arange(4.0), np.arange(4.0) * 10
    for _ in range(3):
        f()
        left, right = right[::-1], left.reshape(2, 2).T.reshape(-1)
        assert_same(everywhere(rt, a), [left] * 2)
        assert_same(everywhere(rt, b), [right] * 2)


# ----- which functions share a variable


def test_all_functions_share_the_one_replica_of_each_rank(rt: Any) -> None:
    """Built together or later, redefined, through closures, partials, methods and objects."""
    w = rt.shared(np.zeros(1), name="w")

    class Holder:
        def __init__(self) -> None:
            self.state = {"w": w}

        def add(self, x: np.ndarray) -> Any:
            self.state["w"].value = self.state["w"].value + 1
            return w.value

    def add(variable: Any, x: np.ndarray) -> Any:
        variable.value = variable.value + 1
        return variable.value

    first = rt.function(lambda x: add(w, x), outputs="max")
    second = rt.function(named("second", functools.partial(add, w)), outputs="max")
    x = np.ones(rt.world_size)
    rt.distribute()
    assert first(x) == 1
    assert second(x) == 2
    later = rt.function(Holder().add, outputs="max")
    assert later(x) == 3
    for count in (4, 5):  # a redefined function is sent again

        def again(x: np.ndarray) -> Any:
            return add(w, x)

        assert rt.function(again, outputs="max")(x) == count
    assert first(x) == 6
    assert_same(everywhere(rt, w), [np.array([6.0])] * rt.world_size)
