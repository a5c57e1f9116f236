"""Promises of a call: what was once wrong in the engine, and storms. Compared with NumPy and plain Python."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.testing
import pytest
from support.names import named

import synk
from synk.errors import CallCancelled, CallTimeout, SerializationError, SynkError, WorkerDied


@pytest.fixture
def rt(shared_runtimes: Any) -> Any:
    return shared_runtimes[2]


@pytest.fixture
def own() -> Iterator[synk.Runtime]:
    """A runtime whose workers may die."""
    with synk.Runtime(2, max_restarts=10_000) as runtime:
        yield runtime


def test_calls_equal_numpy_for_any_rows_and_any_batch(rt: Any) -> None:
    rng = np.random.default_rng(0)
    f = rt.function(lambda x, y, k: (x.sum(0), x * k, y.mean(0)), outputs=("sum", "gather", "avg"), bcast_inputs="k")
    whole = rt.data(rng.normal(size=(40, 3)))
    for _ in range(60):
        rows = int(rng.integers(1, 40))
        x, k = rng.normal(size=(rows, 3)), float(rng.integers(5))
        batch = [None, rows // 2 + 1, slice(None, None, -1), rng.integers(0, rows, 5)][rng.integers(4)]
        part = x if batch is None else x[:batch] if isinstance(batch, int) else x[batch]
        for second in (x, rt.data(x)):
            total, scaled, mean = f(x, second, k, batch=batch, num_slices=int(rng.integers(1, 4)))
            np.testing.assert_allclose(total, part.sum(0), rtol=1e-12, atol=1e-12)
            np.testing.assert_array_equal(scaled, part * k)
            np.testing.assert_allclose(mean, part.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(f(whole, whole, 1.0)[1], whole.data)


def test_a_failed_change_is_not_kept_by_the_commit_of_a_later_call(rt: Any) -> None:
    counts = rt.resident([0, 0])

    def step(x: Any, fails: bool) -> list[int]:
        counts.value[0] += 1
        if fails and synk.comm.rank == 1:
            raise ValueError("no")
        return list(counts.value)

    f = rt.function(step, updates=[counts], outputs=None, bcast_inputs="fails")
    assert f(np.ones(2), False) == [[1, 0]] * 2
    with pytest.raises(ValueError, match="no") as told:
        f(np.ones(2), True)
    assert told.value.step_counted is False
    assert f(np.ones(1), False) == [[2, 0], None]  # rank 1 has no rows, and gets the state before its next call
    assert f(np.ones(2), False) == [[3, 0]] * 2
    assert counts.get(0) == counts.get(1) == [3, 0]


def test_a_rank_that_gets_a_function_late_does_not_get_an_old_state_for_the_current_one(rt: Any) -> None:
    counts = rt.resident([0])

    def step(x: Any) -> list[int]:
        counts.value[0] += 1
        return list(counts.value)

    f = rt.function(step, updates=[counts], outputs=None)
    assert f(np.ones(1)) == [[1], None]
    assert rt.function(lambda x: x.sum(), outputs="sum")(np.ones(2)) == 2  # brings ``step`` to rank 1, too
    assert f(np.ones(2)) == [[2], [2]]
    assert counts.get(0) == counts.get(1) == [2]


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


class Picky:
    """Cannot be loaded on rank 1."""

    def __init__(self) -> None:
        self.value = 1

    def __setstate__(self, state: Any) -> None:
        if getattr(sys, "is_picky", False):
            raise ValueError("not here")
        self.__dict__.update(state)


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
    picky = Picky()

    def meet(x: Any) -> Any:
        synk.comm.barrier()
        return x.sum() + picky.value

    def mark(is_picky: bool) -> None:
        sys.is_picky = is_picky and synk.comm.rank == 1  # type: ignore[attr-defined]

    rt.function(mark, bcast_inputs="is_picky", outputs=None, per_rank=True)(True)
    f = rt.function(meet, outputs="sum")
    for _ in range(2):
        with pytest.raises(SerializationError, match="not here"):
            f(np.ones(2), timeout=30.0)
    rt.function(mark, bcast_inputs="is_picky", outputs=None, per_rank=True)(False)
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


def test_kept_records_and_arrays_stay_as_they_were(rt: Any) -> None:
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append((x, x[:1]))
        return [[part.tolist() for part in each] for each in kept]

    f = rt.function(keep, outputs=None)
    records = np.array([(k, k / 2) for k in range(4)], [("a", int), ("b", float)]).view(np.recarray)
    expected: list[Any] = []
    for shift in range(3):
        now = records.copy()
        now["a"] += shift
        expected.append([now[:2].tolist(), now[:1].tolist()])
        assert f(now)[0] == expected


def test_slots_that_another_plan_has_replaced(rt: Any) -> None:
    small = rt.function(lambda x: x + 1, outputs="gather")
    for size in (10, 4000, 20, 9000):
        f = rt.function(lambda x: np.tile(x, (1, 40)), outputs="gather")
        np.testing.assert_array_equal(small(np.arange(10.0)), np.arange(10.0) + 1)
        np.testing.assert_array_equal(f(np.ones((size // 10, 1))), np.ones((size // 10, 40)))


def test_arguments_that_are_refused_leave_nothing_behind(rt: Any) -> None:
    f = rt.function(lambda x, y: x.sum() + y.sum(), outputs="sum")
    with pytest.raises(ValueError, match="expected equal axis-0 lengths"):
        f(np.ones(3), np.ones(4))
    with pytest.raises(SerializationError):
        rt.function(lambda x, lock: x, bcast_inputs="lock")(np.ones(3), threading.Lock())
    calls = [f.submit(np.full(4, k), np.ones(4)) for k in range(5)]
    assert [call.result() for call in calls] == [4.0 * k + 4 for k in range(5)]


def test_a_rank_that_dies_or_stays_silent(own: Any) -> None:
    weights = own.shared(np.arange(3.0))

    def step(x: Any, how: str) -> Any:
        weights.value = weights.value + x.sum()
        if synk.comm.rank == 1 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if synk.comm.rank == 1 and how == "sleep":
            time.sleep(60)
        return weights.value.sum()

    f = own.function(step, bcast_inputs="how", outputs=None)
    for how, error in (("kill", WorkerDied), ("sleep", CallTimeout), ("kill", WorkerDied)):
        before = weights.value
        with pytest.raises(error):
            f(np.ones(2), how, timeout=0.5)
        np.testing.assert_array_equal(weights.value, before)
        f(np.ones(2), "")
        np.testing.assert_array_equal(weights.value, before + 1)


@pytest.mark.parametrize("how", ["a death", "its time limit", "an interrupt"])
def test_a_call_that_is_only_looked_at_ends(own: Any, how: str) -> None:
    stay = own.function(lambda x: time.sleep(60), outputs=None)
    pids = own.function(os.getpid, outputs=None, per_rank=True)()
    pending = stay.submit(np.ones(2), timeout=0.3 if how == "its time limit" else None)
    interrupting: list[threading.Thread] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == "settle" and own._session.is_mine():
            sys.setprofile(None)
            interrupting.append(threading.Thread(target=own.interrupt))
            interrupting[0].start()
            interrupting[0].join()

    assert not pending.done()
    if how == "a death":
        os.kill(pids[1], signal.SIGKILL)
    if how == "an interrupt":
        sys.setprofile(look)
    end = time.monotonic() + 30
    while not pending.done():
        assert time.monotonic() < end
        time.sleep(0.01)
    expected = {"a death": WorkerDied, "its time limit": CallTimeout, "an interrupt": CallCancelled}
    assert type(pending.exception()) is expected[how]


def test_a_time_limit_ends_its_own_call_and_the_others_say_so(own: Any) -> None:
    functions = [own.function(named(name, lambda x: time.sleep(x.max())), outputs=None) for name in ("late", "b", "c")]
    for function in functions:
        function(np.zeros(2))  # what brings a function is not followed by another that does
    first, asked, third = [
        f.submit(np.full(2, s), timeout=t) for f, s, t in zip(functions, (60, 0, 0), (0.3, None, None))
    ]
    errors = {call.name: call.exception() for call in (asked, third, first)}
    assert type(errors["late"]) is CallTimeout
    for name in ("b", "c"):
        assert type(errors[name]) is CallCancelled
        assert str(errors[name]).startswith(f"the call of '{name}' was ended together with another: 'late' did not end")
        assert errors[name].__cause__ is not None and "Submit it again. Submit" not in str(errors[name])


# One that strikes in a finalizer is reported by the interpreter, and lost.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_storm_of_ctrl_c_leaves_the_same_state_on_all_ranks(own: Any) -> None:
    weights, counts = own.shared(np.zeros(2)), own.resident([0])

    def step(x: Any) -> Any:
        weights.value = weights.value + 1
        counts.value[0] += 1
        return x.sum()

    f = own.function(step, updates=[counts], outputs="sum")
    plain = own.function(lambda x: x * 2, outputs="gather")
    pids = own.function(os.getpid, outputs=None, per_rank=True)()
    rng, done = random.Random(1), 0
    for k in range(150):
        timer = threading.Timer(rng.uniform(0, 0.004), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            for _ in range(20):
                f(np.ones(1 + k % 3))
                np.testing.assert_array_equal(plain(np.arange(k % 7 + 1)), 2 * np.arange(k % 7 + 1))
            timer.join()
            time.sleep(0.005)
        except KeyboardInterrupt:
            pass
        finally:
            timer.join()
        done = int(weights.value[0])
        assert weights[0].tolist() == weights[1].tolist() == [done, done]
        assert counts.get(0) == counts.get(1) == [done]
    assert done > 0
    assert own.function(os.getpid, outputs=None, per_rank=True)() == pids


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of a worker that died while idle
def test_a_storm_of_deaths(own: Any) -> None:
    total = own.function(lambda x: (x.sum(0), x), outputs=("sum", "gather"))
    getpid = own.function(os.getpid, outputs=None, per_rank=True)
    x = np.random.default_rng(2).normal(size=(200, 40))
    rng = random.Random(3)
    for _ in range(12):
        pid = rng.choice(getpid())
        timer = threading.Timer(rng.uniform(0, 0.003), os.kill, (pid, signal.SIGKILL))
        timer.start()
        try:
            for _ in range(20):
                np.testing.assert_array_equal(total(x)[1], x)
        except WorkerDied:
            pass
        timer.join()
        np.testing.assert_allclose(total(x)[0], x.sum(0))


def test_shards_that_nobody_reads_in_between_keep_no_old_rows() -> None:
    """A place is used again for a value of another length, while views of the one before may be there."""
    with synk.Runtime(2, backend="numpy") as rt:
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
