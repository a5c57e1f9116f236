"""Calls that are submitted: their results, their order, what may be in flight together, and what waits."""

from __future__ import annotations

import gc
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.gates import Gate
from support.harness import same_workers, wait_for

import synk
from synk.errors import ClosedError, CollectiveMismatch, ReentrancyError


def waiting(rt: Any, gate: Gate) -> Any:
    """Return a function that waits, on all ranks, until the gate is open, and returns the sum of its rows."""

    def wait(x: Any) -> Any:
        gate.wait(synk.comm.rank)
        return x.sum()

    return rt.function(wait, outputs="sum")


# ----- results and their order; in random sequences: ``test_any_sequence.py``


def test_shared_variables_make_calls_wait_for_one_another(shared_runtimes: Any) -> None:
    """Assigned by closure, by argument and by ``updates``, in between calls that know of no variable."""
    rt = shared_runtimes[3]
    total = rt.function(lambda x: x.sum(), outputs="sum")
    w, counter = rt.shared(np.zeros(2)), rt.shared(0)

    def step(x: Any) -> Any:
        w.value = w.value * 2 + 1
        return w.value[0] + 0 * x.sum()

    f = rt.function(step, outputs="first")
    g = rt.function(lambda v, x: v.sum() + 0 * x.sum(), bcast_inputs="v", outputs="first")
    h = rt.function(lambda x: (x.sum(), counter.value + len(x)), updates=[(counter, "sum")], outputs="sum")
    expected, pending = np.zeros(2), []
    for k in range(12):
        expected = expected * 2 + 1
        pending += [
            (f.submit(np.ones(5)), expected[0]),
            (total.submit(np.full(4, float(k))), 4.0 * k),
            (g.submit(w, np.ones(4)), expected.sum()),
            (h.submit(np.ones(2)), 2.0),
        ]
    for call, value in pending:
        assert call.result() == value
    np.testing.assert_array_equal(w.value, expected)


@pytest.mark.parametrize("rt", [3, "1+1"], indirect=True)
def test_functions_communicate_while_calls_overlap(rt: Any) -> None:
    """Ranks that drift apart by whole calls meet in the right one, also where one of them does not communicate."""

    def work(x: Any, number: Any) -> Any:
        time.sleep(0.002 * ((synk.comm.rank + int(number)) % 3))
        if number == 7 and synk.comm.rank == 1:
            return 0.0, np.zeros(1)
        total = synk.comm.all_reduce(np.full(50, float(number)), "sum")
        time.sleep(0.002 * ((synk.comm.rank * 2 + int(number)) % 3))
        return total[0], synk.comm.all_gather(np.full(1, synk.comm.rank + 10.0 * number))

    f = rt.function(work, bcast_inputs="number", outputs="first")
    with same_workers(rt):
        pending = [f.submit(np.ones(6), np.int64(k)) for k in range(20)]
        for k, call in enumerate(pending):
            if k == 7:
                with pytest.raises(CollectiveMismatch):
                    call.result()
                continue
            total, gathered = call.result()
            assert total == rt.world_size * k
            np.testing.assert_array_equal(gathered[:, 0], np.arange(rt.world_size) + 10.0 * k)


def test_threads_call_submit_and_wait_for_their_own(shared_runtimes: Any) -> None:
    total = shared_runtimes[2].function(lambda x: x.sum(), outputs="sum")

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        held: list[tuple[Any, float]] = []
        for _ in range(60):
            x = np.full(rng.integers(1, 8), float(rng.integers(1000)))
            held.append((total.submit(x), x.sum()))
            assert total(x) == x.sum()
            if len(held) > rng.integers(5):
                call, expected = held.pop(int(rng.integers(len(held))))
                assert call.result() == expected
        assert all(call.result() == expected for call, expected in held)

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(work, range(4))] == [None] * 4


# ----- what may be in flight, and what waits


def test_submit_does_not_wait_until_three_are_in_flight(rt: Any, gate: Gate) -> None:
    """Arrays are copied, and a rank goes on while another is behind."""
    array = np.ones(4)

    def work(x: Any, number: Any) -> Any:
        if synk.comm.rank == 0:
            gate.arrive(int(number))
        else:
            gate.wait()
        return x.sum() * number

    f = rt.function(work, bcast_inputs="number", outputs="sum")
    pending = [f.submit(array, np.int64(k)) for k in range(3)]
    array[:] = 100.0
    assert wait_for(lambda: gate.has(0, 1, 2)), "rank 0 has been through all of them"
    assert [call.done() for call in pending] == [False] * 3
    with gate.opened_meanwhile():
        pending.append(f.submit(np.ones(4), np.int64(3)))
        assert gate.is_open(), "the fourth waits for the first"
    assert [call.result() for call in pending] == [0.0, 4.0, 8.0, 12.0]


def test_everything_else_begins_when_no_call_is_in_flight(subtests: pytest.Subtests, rt: Any, gate: Gate) -> None:
    total, w, x = waiting(rt, gate), rt.shared(np.ones(2)), np.ones(4)
    operations = {
        "a call": lambda: total(x),
        "a collective": lambda: synk.all_reduce(w, "sum"),
        "a variable": lambda: w.value,
        "info": rt.info,
        "distribute": rt.distribute,
        "a new function": lambda: rt.function(lambda x: x.sum(), outputs="sum")(x),
    }
    for name, operation in operations.items():
        gate.close()
        with subtests.test(name), gate.opened_meanwhile():
            pending = total.submit(x)
            operation()
            assert gate.is_open() and pending.done() and pending.result() == 4.0


def test_waiting_has_a_limit_and_the_call_goes_on(reused: Any, gate: Gate) -> None:
    total = waiting(reused(2), gate)
    pending = [total.submit(np.full(4, float(k))) for k in range(2)]
    for call in pending:
        for wait in (call.result, call.exception):
            with pytest.raises(TimeoutError, match="goes on"):
                wait(timeout=0.02)
        assert "in flight" in repr(call)
    gate.open()
    assert [call.result() for call in pending] == [0.0, 4.0] and pending[1].exception() is None
    later = total.submit(np.ones(4))
    assert wait_for(later.done), "done() alone brings a call to its end"


# ----- what goes wrong


def test_a_failing_call_does_not_stop_those_behind_it(rt: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What it raised is told as often as one likes, and logged where nobody asks for it."""

    def work(x: Any) -> Any:
        if 2.0 in x:
            raise KeyError("two")
        return x.sum()

    f = rt.function(work, outputs="sum")
    with same_workers(rt):
        pending = [f.submit(np.full(4, float(k))) for k in range(5)]
        errors = [call.exception() for call in pending]
        assert [type(error) for error in errors] == [type(None)] * 2 + [KeyError] + [type(None)] * 2
        for k, call in enumerate(pending):
            for _ in range(2):
                if k != 2:
                    assert call.result() == 4.0 * k
                    continue
                with pytest.raises(KeyError, match="two"):
                    call.result()
                assert "failed" in repr(call) and call.exception() is errors[2]
    with caplog.at_level(logging.ERROR, logger="synk"):
        del pending, errors, call
        gc.collect()
        assert not caplog.records
        f.submit(np.full(2, 2.0))
        assert f(np.ones(2)) == 2.0
        gc.collect()
    assert ["work" in record.getMessage() for record in caplog.records] == [True]


def test_wrong_input_is_refused_at_once_and_disturbs_nobody(rt: Any) -> None:
    f = rt.function(lambda x, y: (x * y).sum(), outputs="sum")
    pending = [f.submit(np.ones(4), np.ones(4)) for _ in range(2)]
    with pytest.raises(ValueError, match="5"):
        f.submit(np.ones(4), np.ones(5))
    with pytest.raises(TypeError, match="y"):
        f.submit(np.ones(4))
    with pytest.raises(ValueError, match="num_slices"):
        f.submit(np.ones(4), np.ones(4), num_slices=0)
    assert [call.result() for call in pending] == [4.0, 4.0]
    again = rt.function(lambda x: x, outputs="gather", retry=1)
    with pytest.raises(ValueError, match=r"submit.*retry=1"):
        again.submit(np.ones(3))


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_calls_end_with_the_runtime(runtime: Any, gate: Gate, is_waited_for: bool) -> None:
    """Another thread may wait for a result meanwhile: it is told as often as it asks."""
    rt = runtime(2)
    total = waiting(rt, gate)
    pending = [total.submit(np.ones(4)) for _ in range(3)]
    assert wait_for(lambda: gate.has(0, 1))
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(lambda: [pending[2].exception() for _ in range(2 * is_waited_for)])
        rt.close()
    assert [type(error) for error in told.result()] == [ClosedError] * 2 * is_waited_for
    for call in pending:
        assert call.done()
        with pytest.raises(ClosedError):
            call.result()
    with pytest.raises(ClosedError):
        total.submit(np.ones(4))


def test_submit_inside_a_function_is_refused(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a function runs in the program it can find the program's own functions."""
    rt = shared_runtimes[0]
    monkeypatch.setattr(sys, "programs_own", rt.function(lambda x: x.sum(), outputs="sum"), raising=False)
    with pytest.raises(ReentrancyError, match="submit"):
        rt.function(lambda x: sys.programs_own.submit(x))(np.ones(2))  # type: ignore[attr-defined]
