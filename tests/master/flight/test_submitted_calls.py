"""Calls that are submitted: their results, their order, what may be in flight together, and what waits."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers, wait_for
from support.seeds import seeds

import synk
from synk.errors import ClosedError, ReentrancyError

LARGE = 40_000
"""Elements of a large output of float64."""


def gate(path: Path) -> Any:
    """Return a function that waits, on all ranks, until ``path`` exists, and returns the sum of its rows."""

    def wait(x: Any) -> Any:
        while not path.exists():
            time.sleep(0.001)
        return x.sum()

    return wait


@pytest.mark.parametrize("num_workers", [1, 2, 3, "inline"])
def test_results_equal_those_of_plain_calls(shared_runtimes: Any, num_workers: int | str) -> None:
    """More calls than can be in flight, with results asked for in any order."""
    rt = shared_runtimes[num_workers]
    rng = np.random.default_rng(1)
    f = rt.function(lambda x, w: (x.sum() * w, x * w, len(x)), bcast_inputs="w", outputs=("sum", "gather", "sum"))
    data = rt.data(rng.standard_normal((200, 3)))
    cases: list[tuple[Any, Any, Any]] = []
    for k in range(30):
        batch = [None, 8, slice(3, 90, 7), [5, 3, 3, 9], slice(None, None, -1)][k % 5]
        rows = data if k % 2 else rng.standard_normal((10 + 90 * (k % 3), 3))
        cases.append((rows, np.float64(k), batch))
    pending = [f.submit(rows, w, batch=batch, num_slices=1 + k % 3) for k, (rows, w, batch) in enumerate(cases)]
    for k in rng.permutation(len(cases)):
        rows, w, batch = cases[k]
        array = np.asarray(rows)
        part = array[slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch]
        total, scaled, count = pending[k].result()
        np.testing.assert_allclose(total, part.sum() * w, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(scaled, part * w)
        assert count == len(part)
        assert pending[k].done() and pending[k].result()[2] == count, "a result can be asked for again"


def test_plain_arrays_are_copied_and_data_is_not_changed_under_a_call(reused: Any, tmp_path: Path) -> None:
    rt = reused(2)
    path = tmp_path / "open"
    total = rt.function(gate(path), outputs="sum")
    path.touch()
    array, data = np.ones(8), rt.data(np.full(8, 2.0))
    other = rt.data(np.zeros(8))
    assert (total(array), total(data)) == (8.0, 16.0)
    path.unlink()
    pending = [total.submit(array), total.submit(data)]
    array[:] = 100.0
    other[:] = 1.0
    assert not any(call.done() for call in pending), "Data that no call reads is not waited for"
    threading.Timer(0.1, path.touch).start()
    data[:] = 100.0
    assert path.exists(), "the change waited for the call that reads it"
    assert [call.result() for call in pending] == [8.0, 16.0]
    assert (total(array), total(data)) == (800.0, 800.0)


@pytest.mark.parametrize("change", ["set_value", "set_length", "grow", "free_memory", "drop"])
def test_data_can_be_changed_freed_and_dropped_while_calls_read_it(reused: Any, change: str) -> None:
    rt = reused(2)
    slow = rt.function(lambda x: (time.sleep(0.05), x.sum())[1], outputs="sum")
    slow(np.ones(2))
    for k in range(4):
        data = rt.data(np.full(100_000, float(k)))
        pending = [slow.submit(data) for _ in range(3)]
        if change == "set_value":
            data.set_value(np.full(100_000, -1.0))
        elif change == "set_length":
            data.set_length(10)
        elif change == "grow":
            data.set_value(np.full(300_000, -1.0))
        elif change == "free_memory":
            data.free_memory()
        del data
        keep = [rt.data(np.full(100_000, -2.0)) for _ in range(3)]
        assert [call.result() for call in pending] == [100_000.0 * k] * 3
        del keep


def test_submit_does_not_wait_until_three_are_in_flight(reused: Any, tmp_path: Path) -> None:
    rt = reused(2)
    path = tmp_path / "open"
    total = rt.function(gate(path), outputs="sum")
    path.touch()
    for call in [total.submit(np.ones(4)) for _ in range(4)]:
        call.result()
    path.unlink()
    pending = [total.submit(np.full(4, float(k))) for k in range(3)]
    assert [call.done() for call in pending] == [False] * 3
    timer = threading.Timer(0.1, path.touch)
    timer.start()
    pending.append(total.submit(np.full(4, 3.0)))
    assert path.exists(), "the fourth waits for the first"
    assert [call.result() for call in pending] == [0.0, 4.0, 8.0, 12.0]
    timer.join()


def test_a_rank_goes_on_while_another_is_behind(reused: Any, tmp_path: Path) -> None:
    rt = reused(2)
    path, seen = tmp_path / "open", tmp_path / "seen"

    def work(x: Any, number: Any) -> Any:
        if synk.comm.rank == 0:
            (seen / str(int(number))).touch()
        while synk.comm.rank == 1 and not path.exists():
            time.sleep(0.001)
        return x.sum() + number

    f = rt.function(work, bcast_inputs="number", outputs="sum")
    seen.mkdir()
    path.touch()
    for call in [f.submit(np.ones(4), np.int64(9)) for _ in range(3)]:
        call.result()
    path.unlink()
    pending = [f.submit(np.ones(4), np.int64(k)) for k in range(3)]
    assert wait_for(lambda: len(os.listdir(seen)) == 4)
    path.touch()
    assert [call.result() for call in pending] == [4.0, 6.0, 8.0]


def test_a_repeated_call_is_one_doorbell_each_way(runtime: Any) -> None:
    rt = runtime(2)
    total = rt.function(lambda x: x.sum(), outputs="sum")
    for call in [total.submit(np.ones(4)) for _ in range(6)]:
        call.result()
    before = dict(rt.counters)
    for call in [total.submit(np.ones(4)) for _ in range(30)]:
        assert call.result() == 4.0
    spent = {key: rt.counters[key] - before[key] for key in before}
    assert spent == {
        "messages_down": 60, "messages_up": 60, "bytes_down": 480, "bytes_up": 480, "bytes_pickled": 0,
        "bytes_staged": 30 * 32, "calls": 30, "restarts": 0,
    }  # fmt: skip


def test_a_failing_call_does_not_stop_those_behind_it(reused: Any) -> None:
    rt = reused(2)

    def work(x: Any) -> Any:
        if 2.0 in x:
            raise KeyError("two")
        return x.sum()

    f = rt.function(work, outputs="sum")
    f(np.zeros(4))
    with same_workers(rt):
        for _ in range(2):
            pending = [f.submit(np.full(4, float(k))) for k in range(5)]
            for k, call in enumerate(pending):
                if k != 2:
                    assert call.result() == 4.0 * k
                    continue
                for _ in range(2):
                    with pytest.raises(KeyError, match="two"):
                        call.result()
                assert "failed" in repr(call)


def test_wrong_input_is_refused_at_once_and_disturbs_nobody(reused: Any) -> None:
    rt = reused(2)
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
            (total.submit(np.full(4, float(k + 1))), 4.0 * k + 4),
            (h.submit(np.ones(2)), 2.0),
        ]
    for call, value in pending:
        assert call.result() == value
    np.testing.assert_array_equal(w.value, expected)


def test_functions_communicate_while_calls_overlap(reused: Any) -> None:
    """Ranks that drift apart by whole calls meet in the right one."""
    rt = reused(3)

    def work(x: Any, number: Any) -> Any:
        time.sleep(0.002 * ((synk.comm.rank + int(number)) % 3))
        total = synk.comm.all_reduce(np.full(50, float(number)), "sum")
        time.sleep(0.002 * ((synk.comm.rank * 2 + int(number)) % 3))
        gathered = synk.comm.all_gather(np.full(1, synk.comm.rank + 10.0 * number))
        return total[0], gathered

    f = rt.function(work, bcast_inputs="number", outputs="first")
    for _ in range(2):
        pending = [f.submit(np.ones(6), np.int64(k)) for k in range(20)]
        for k, call in enumerate(pending):
            total, gathered = call.result()
            assert total == 3.0 * k
            np.testing.assert_array_equal(gathered[:, 0], np.arange(3) + 10.0 * k)


@pytest.mark.parametrize("where", [2, "1+1"])
def test_ranks_that_do_not_communicate_release_those_that_do(where: Any, reused: Any) -> None:
    rt = reused(where)

    def work(x: Any, number: Any) -> Any:
        if number == 3 and synk.comm.rank == 1:
            return 0.0
        return synk.comm.all_reduce(np.ones(1), "sum")[0]

    f = rt.function(work, bcast_inputs="number", outputs="first")
    with same_workers(rt):
        pending = [f.submit(np.ones(6), np.int64(k)) for k in range(8)]
        for k, call in enumerate(pending):
            if k == 3:
                with pytest.raises(synk.errors.CollectiveMismatch):
                    call.result()
            else:
                assert call.result() == 2.0


def test_large_outputs_are_right_and_stay_so(reused: Any) -> None:
    rt = reused(2)
    scale = rt.function(lambda x, w: (x * w, x.sum(axis=0) * w), bcast_inputs="w", outputs=("gather", "sum"))
    data = rt.data(np.ones((7, LARGE)))
    pending = [scale.submit(data, np.float64(k)) for k in range(12)]
    results = [call.result() for call in pending]
    for k, (gathered, summed) in enumerate(results):
        assert gathered.shape == (7, LARGE) and (gathered == k).all() and (summed == 7 * k).all()
    del results, pending
    sizes = [3, LARGE, 5, 2 * LARGE, LARGE, 10, 3 * LARGE]
    pending = [scale.submit(np.ones((2, size)), np.float64(k)) for k, size in enumerate(sizes)]
    for k, (size, call) in enumerate(zip(sizes, pending)):
        gathered, summed = call.result()
        assert gathered.shape == (2, size) and (gathered == k).all() and (summed == 2 * k).all()


def test_outputs_that_change_their_look(reused: Any) -> None:
    """Large after small, objects, other structures: what makes the ranks publish again while others wait."""
    rt = reused(2)

    def work(x: Any, n: Any) -> Any:
        return {"a": np.full(int(n), x.sum()), "b": [str(n)] if n % 2 else None} if n % 3 else np.full(int(n), 1.0)

    f = rt.function(work, bcast_inputs="n", outputs=None)
    sizes = [1, 2, 3, 100_000, 4, 200_001, 5, 300_000, 6, 100_000, 1]
    for _ in range(2):
        pending = [f.submit(np.ones(4), np.int64(n)) for n in sizes]
        for n, call in zip(sizes, pending):
            for result in call.result():
                array = result["a"] if n % 3 else result
                assert array.shape == (n,) and (array == (2.0 if n % 3 else 1.0)).all()
                if n % 3:
                    assert result["b"] == ([str(n)] if n % 2 else None)


def test_waiting_has_a_limit_and_the_call_goes_on(reused: Any, tmp_path: Path) -> None:
    rt = reused(2)
    path = tmp_path / "open"
    total = rt.function(gate(path), outputs="sum")
    pending = [total.submit(np.full(4, float(k))) for k in range(2)]
    for call in pending:
        with pytest.raises(TimeoutError, match="goes on"):
            call.result(timeout=0.02)
        assert "in flight" in repr(call)
    path.touch()
    assert [call.result(timeout=10.0) for call in pending] == [0.0, 4.0]
    assert wait_for(pending[1].done)
    later = total.submit(np.ones(4))
    assert wait_for(later.done), "done() alone brings a call to its end"


def test_a_failure_that_nobody_asks_for_is_logged(reused: Any, caplog: pytest.LogCaptureFixture) -> None:
    rt = reused(2)
    f = rt.function(lambda x: 1 / 0, name="divide")
    with caplog.at_level(logging.ERROR, logger="synk"):
        call = f.submit(np.ones(2))
        with pytest.raises(ZeroDivisionError):
            call.result()
        del call
        gc.collect()
        assert not caplog.records
        f.submit(np.ones(2))
        rt.function(lambda x: x.sum(), outputs="sum")(np.ones(2))
        gc.collect()
    assert ["divide" in record.getMessage() for record in caplog.records] == [True]


def test_what_a_call_raised_without_raising_it(reused: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Asked for, so it is not logged; as often as one likes, and before the result or after it."""
    rt = reused(2)
    good, bad = rt.function(lambda x: x.sum(), outputs="sum"), rt.function(lambda x: 1 / 0, outputs="sum")
    calls = [good.submit(np.ones(4)), bad.submit(np.ones(4)), good.submit(np.ones(6))]
    errors = [call.exception() for call in calls]
    assert errors[0] is None and errors[2] is None and isinstance(errors[1], ZeroDivisionError)
    assert calls[1].exception() is errors[1] and calls[2].result() == 6.0
    with pytest.raises(ZeroDivisionError):
        calls[1].result()
    slow = rt.function(lambda x: time.sleep(0.5), outputs=None).submit(np.ones(2))
    with pytest.raises(TimeoutError):
        slow.exception(timeout=0.05)
    assert slow.exception() is None
    del calls, errors
    gc.collect()
    assert not caplog.records


def test_everything_else_begins_when_no_call_is_in_flight(reused: Any, tmp_path: Path) -> None:
    rt = reused(2)
    path = tmp_path / "open"
    total = rt.function(gate(path), outputs="sum")
    w = rt.shared(np.ones(2))
    x = np.ones(4)
    operations = [
        lambda: total(x),
        lambda: rt.all_reduce(w, "sum"),
        lambda: w.value,
        lambda: rt.info(),
        rt.distribute,
        lambda: rt.function(lambda x: x.sum(), outputs="sum")(x),
    ]
    for operation in operations:
        path.unlink(missing_ok=True)
        pending = total.submit(x)
        timer = threading.Timer(0.03, path.touch)
        timer.start()
        operation()
        assert path.exists() and pending.done() and pending.result() == 4.0
        timer.join()


def test_calls_end_with_the_runtime(runtime: Any, tmp_path: Path) -> None:
    rt = runtime(2)
    total = rt.function(gate(tmp_path / "open"), outputs="sum")
    pending = [total.submit(np.ones(4)) for _ in range(3)]
    rt.close()
    for call in pending:
        assert call.done()
        with pytest.raises(ClosedError, match="wait"):
            call.result()
    with pytest.raises(ClosedError):
        total.submit(np.ones(4))


def test_close_from_another_thread_ends_a_wait(runtime: Any, tmp_path: Path) -> None:
    rt = runtime(2)
    total = rt.function(gate(tmp_path / "open"), outputs="sum")
    pending = [total.submit(np.ones(4)) for _ in range(3)]
    timer = threading.Timer(0.1, rt.close)
    timer.start()
    with pytest.raises(ClosedError):
        pending[2].result()
    timer.join()
    for call in pending:
        with pytest.raises(ClosedError):
            call.result()


def test_what_a_close_breaks_inside_is_told_as_the_close(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread closes the runtime in the middle of a step: ClosedError, however often the result is asked for."""
    rt = runtime(2)
    total = rt.function(lambda x: x.sum(), outputs="sum")
    total(np.ones(4))
    call = total.submit(np.ones(4))

    def broken(request: Any) -> Any:
        rt._session.workers.processes.tear_down()
        raise TypeError("an inner error")

    monkeypatch.setattr(rt._session.workers, "wait", broken)
    for _ in range(2):
        with pytest.raises(ClosedError, match="closed by another thread"):
            call.result()


def test_submit_inside_a_function_is_refused(runtime: Any) -> None:
    rt = runtime(None, inline=True)
    functions = {"inner": rt.function(lambda x: x.sum(), outputs="sum")}

    class Handle:
        """Travels by name, so that the function below finds the master's own object."""

        def __reduce__(self) -> Any:
            return _handle, ()

    _handles[:] = [functions]
    handle = Handle()

    def outer(x: Any) -> Any:
        return handle["inner"].submit(x)

    with pytest.raises(ReentrancyError, match="submit"):
        rt.function(outer)(np.ones(2))


_handles: list[Any] = []


def _handle() -> Any:
    return _handles[0]


def test_threads_submit_and_wait_for_their_own(reused: Any) -> None:
    rt = reused(2)
    total = rt.function(lambda x: x.sum(), outputs="sum")
    wrong: list[Any] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        held: list[tuple[Any, float]] = []
        for _ in range(60):
            value = float(rng.integers(1000))
            held.append((total.submit(np.full(4, value)), 4 * value))
            if len(held) > rng.integers(5):
                call, expected = held.pop(int(rng.integers(len(held))))
                if call.result() != expected:
                    wrong.append(expected)
        wrong.extend(expected for call, expected in held if call.result() != expected)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_the_profile_counts_submitted_calls(runtime: Any) -> None:
    rt = runtime(2)
    total = rt.function(lambda x: x.sum(), outputs="sum", name="total")
    for call in [total.submit(np.ones(8)) for _ in range(7)]:
        call.result()
    record = rt.profile.records["total"]
    assert (record.num_calls, record.staged_nbytes, record.output_nbytes) == (7, 7 * 64, 7 * 16)


def test_what_functions_print_is_shown_in_the_order_of_the_calls(reused: Any, capfd: pytest.CaptureFixture) -> None:
    rt = reused(1)
    f = rt.function(lambda x: print(f"call {int(x[0])}"), outputs=None)
    for call in [f.submit(np.full(1, k)) for k in range(6)]:
        call.result()
    lines = [line for line in capfd.readouterr().out.splitlines() if "call" in line]
    assert [line.split()[-1] for line in lines] == [str(k) for k in range(6)]


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("seed", seeds(2, 4))
def test_random_sequences_equal_numpy(shared_runtimes: Any, num_workers: int, seed: int) -> None:  # noqa: C901
    """Submitted and plain calls of all kinds, changes of Data and variables, dropped calls, in any order."""
    rt = shared_runtimes[num_workers]
    rng = np.random.default_rng([seed, num_workers])
    w = rt.shared(np.zeros(3))
    data = [rt.data(rng.standard_normal((40, 3))) for _ in range(3)]
    arrays = [np.array(each) for each in data]
    value = np.zeros(3)

    def assigning(x: Any) -> Any:
        w.value = w.value + 1.0
        return x.sum(axis=0)

    functions = {
        "sum": rt.function(lambda x: x.sum(axis=0), outputs="sum"),
        "gather": rt.function(lambda x: x * 2, outputs="gather"),
        "large": rt.function(lambda x: np.full((LARGE, 3), x.sum()), outputs="sum"),
        "reading": rt.function(lambda x: x @ w.value, outputs="gather"),
        "assigning": rt.function(assigning, outputs="sum"),
        "meeting": rt.function(lambda x: synk.comm.all_reduce(x.sum(axis=0), "sum"), outputs="first"),
        "failing": rt.function(lambda x: {}[len(x)], outputs="sum"),
    }

    def expected(kind: str, x: Any) -> Any:
        if kind == "gather":
            return x * 2
        if kind == "reading":
            return x @ value
        return np.full((LARGE, 3), x.sum()) if kind == "large" else x.sum(axis=0)

    held: list[tuple[str, Any, Any]] = []

    def check(kind: str, call: Any, right: Any) -> None:
        if kind == "failing":
            with pytest.raises(KeyError):
                call.result()
        else:
            np.testing.assert_allclose(call.result(), right, rtol=1e-9, atol=1e-9)

    for _ in range(120):
        action = rng.choice(["submit"] * 10 + ["call", "result", "result", "data", "variable", "drop", "done"])
        position = int(rng.integers(3))
        kind = str(rng.choice(list(functions)))
        batch = rng.choice(40, rng.integers(num_workers, 40)) if rng.random() < 0.3 else None
        rows = arrays[position] if batch is None else arrays[position][batch]
        source = data[position] if rng.random() < 0.5 else arrays[position].copy()
        if action == "submit":
            call = functions[kind].submit(source, batch=batch)
            held.append((kind, call, expected(kind, rows)))
            if type(source) is np.ndarray:
                source[:] = np.nan
            value = value + 1.0 if kind == "assigning" else value
        elif action == "call" and kind not in ("assigning", "failing"):
            np.testing.assert_allclose(functions[kind](source, batch=batch), expected(kind, rows), rtol=1e-9, atol=1e-9)
        elif action == "result" and held:
            check(*held.pop(int(rng.integers(len(held)))))
        elif action == "data":
            arrays[position] = rng.standard_normal((40, 3))
            data[position][:] = arrays[position]
        elif action == "variable":
            value = rng.standard_normal(3)
            rt.broadcast(w, value)
        elif action == "drop" and held and held[-1][0] != "failing":
            held.pop()
        elif action == "done":
            for _, call, _ in held:
                call.done()
    for each in held:
        check(*each)
    np.testing.assert_allclose(w.value, value, rtol=1e-12)
