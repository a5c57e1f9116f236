"""Promises of a call: what was once wrong in the engine. Compared with NumPy and plain Python."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest
from support.saboteurs import AtLoad

import synk
from synk.errors import SerializationError, SynkError


@pytest.fixture
def rt(shared_runtimes: Any) -> Any:
    return shared_runtimes[2]


def test_a_shard_that_outgrew_its_place_in_a_call_that_failed_elsewhere(rt: Any) -> None:
    shard = rt.shared(np.zeros(2), sharded=True)

    def grow(n: int, fails: bool) -> Any:
        shard.value = np.full(n * 5000, float(n))
        if fails and synk.comm.rank:
            raise ValueError("no")
        return object() if fails else n  # rank 0 cannot publish its result when it fails

    f = rt.function(grow, bcast_inputs=("n", "fails"), outputs=None, per_rank=True)
    for n in (1, 2, 3, 2):
        with pytest.raises((ValueError, SynkError)):
            f(n, True)
        assert f(n, False) == [n, n]
        np.testing.assert_array_equal(shard.value, np.full(2 * n * 5000, float(n)))
    shard.value = np.arange(5.0)
    np.testing.assert_array_equal(shard.value, np.arange(5.0))
    total = rt.function(lambda: shard.value.sum(), outputs="sum")
    assert total() == 10.0


def test_values_that_the_program_sets_after_a_failed_call_have_their_own_shape(rt: Any) -> None:
    """A rank has written a longer value into the place in which the next one comes to lie."""
    w = rt.shared(np.zeros(3))

    def append(x: Any) -> float:
        w.value = np.concatenate([w.value, x])
        if synk.comm.rank == 1 and x[0] < 0:
            raise ValueError("refused")
        return 0.0

    f = rt.function(append, outputs="sum")
    with pytest.raises(ValueError, match="refused"):
        f(np.full(2, -7.0))
    w[0], w[1] = np.ones(3), np.ones(3)
    f(np.arange(2.0))
    assert [w[rank].tolist() for rank in range(2)] == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_a_function_that_one_rank_cannot_load_while_the_other_waits_for_it(rt: Any) -> None:
    def refuse() -> None:
        if getattr(sys, "is_picky", False):
            raise ValueError("not here")

    picky = AtLoad(refuse)

    def meet(x: Any) -> Any:
        synk.comm.barrier()
        return x.sum() + (picky is None)

    def mark(is_picky: bool) -> None:
        sys.is_picky = is_picky and synk.comm.rank == 1  # type: ignore[attr-defined]

    set_mark = rt.function(mark, bcast_inputs="is_picky", outputs=None, per_rank=True)
    set_mark(True)
    f = rt.function(meet, outputs="sum")
    for _ in range(2):
        with pytest.raises(SerializationError, match="not here"):
            f(np.ones(2), timeout=30.0)
    set_mark(False)
    assert f(np.ones(2)) == 4


def test_functions_and_results_that_are_dropped_are_freed(rt: Any) -> None:
    class Kept:
        pass

    kept = Kept()
    seen = weakref.ref(kept)
    f = rt.function(lambda x, kept=None: x.sum(), outputs="sum", bcast_inputs="kept")
    g = rt.function(lambda x: (x.sum(), np.ones(100_000)), outputs=("sum", "first"))
    f(np.ones(4), kept)
    pending = g.submit(np.ones(4))
    large = weakref.ref(pending.result()[1].base)
    del f, g, kept, pending
    rt.function(lambda x: x, outputs="gather")(np.ones(2))
    gc.collect()
    assert seen() is None
    assert large() is None


def test_shards_that_nobody_reads_in_between_keep_no_old_rows(rt: Any) -> None:
    """A place is used again for a value of another length, while views of the one before may be there."""
    w = rt.shared(np.arange(4.0), sharded=True)
    read = rt.function(lambda: w.value.copy(), outputs=None, per_rank=True)
    fill = rt.function(
        lambda n: setattr(w, "value", np.full(n, float(n))), outputs=None, per_rank=True, bcast_inputs="n"
    )
    read()
    for lengths in ((3, 5), (4, 2, 7), (1, 9)):
        for n in lengths:
            fill(n)
        np.testing.assert_array_equal(read(), [np.full(n, float(n))] * 2)
