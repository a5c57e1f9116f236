"""H: odd outputs, and what becomes of results and of ``Data`` afterwards. The reference is NumPy, written here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import assert_right, same_workers

from synk.errors import SerializationError, WorkerDied

PLAIN = np.random.default_rng(7).integers(-9, 9, size=(7, 4)).astype(np.float64)


def test_H18_the_same_bits_every_time(shared_runtimes: Any) -> None:
    x = np.random.default_rng(18).normal(size=(1001, 7)).astype(np.float32)
    for num_workers in (2, 3):
        f = shared_runtimes[num_workers].function(
            lambda x: (x.mean(axis=0), np.tile(x.sum(axis=0), 20_000)), outputs=("avg", "sum")
        )
        seen = {tuple(part.tobytes() for part in f(x)) for _ in range(100 if num_workers == 2 else 20)}
        assert len(seen) == 1


def test_H20_dicts_match_by_key_in_the_order_of_rank_0(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def either(row: np.ndarray) -> dict[str, Any]:
        pairs = [("b", row[0] + 1.0), ("a", row[0] + 10.0)]
        return dict(pairs if row[0] == 0 else pairs[::-1])

    result = rt.function(either, outputs={"a": "sum", "b": "max"})(np.arange(2))
    assert result == {"a": 21.0, "b": 2.0}
    assert list(result) == ["b", "a"]


def test_H21_outputs_that_are_no_arrays(shared_runtimes: Any) -> None:
    rt, ranks = shared_runtimes[2], np.arange(2)
    with same_workers(rt):
        assert rt.function(lambda row: None)(ranks) is None
        mixed = rt.function(lambda row: (None, 2.0, {"x": None}), outputs="sum")(ranks)
        assert mixed == (None, 4.0, {"x": None})
        assert rt.function(lambda row: 3, outputs="sum")(ranks) == 6
        assert rt.function(lambda row: True, outputs="max")(ranks)
        assert rt.function(lambda row: {"a", "b"}, outputs=None)(ranks) == [{"a", "b"}] * 2
        for bad in ("text", b"bytes", object(), {1, 2}, print, np.array(["text"]), np.array([object()], dtype=object)):
            with pytest.raises((TypeError, SerializationError)):
                rt.function(lambda row, bad=bad: bad, outputs="sum")(ranks)


def test_H23_the_same_data_twice_and_an_output_that_is_the_input(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    data = rt.data(PLAIN)
    np.testing.assert_array_equal(rt.function(lambda x, y: x + y, outputs="gather")(data, data), 2 * PLAIN)
    identity = rt.function(lambda x: x, outputs="gather")
    result = identity(data)
    data[:] = 0.0
    np.testing.assert_array_equal(result, PLAIN)
    result[0] = 99.0
    np.testing.assert_array_equal(data[:], 0.0)
    np.testing.assert_array_equal(identity(PLAIN), PLAIN)


def test_H24_a_function_that_writes_into_its_input(reused: Callable[..., Any]) -> None:
    """Python code is told that it is read-only. C code dies: the rows are mapped so. The data does not change."""
    rt = reused(2)
    data = rt.data(PLAIN)
    fill = rt.function(lambda w, x: (w if len(w) else x).fill(1), bcast_inputs="w")
    for w, x, batch in ((PLAIN, data, None), ((), data, None), ((), PLAIN, None), ((), data, [5, 1, 0])):
        with pytest.raises(ValueError, match="read-only"):
            fill(w, x, batch=batch)
    with pytest.raises(WorkerDied) as died:
        rt.function(lambda x: ctypes.memset(x.ctypes.data, 1, x.nbytes), outputs=None)(data)
    assert set(died.value.exits) == {"SIGSEGV"}  # of one rank or both: a peer may be told before it writes
    np.testing.assert_array_equal(data[:], PLAIN)
    assert_right(rt)
