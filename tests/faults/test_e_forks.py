"""E: children made by ``os.fork`` and what they see of the master's memory: results, ``Data``, everything else."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gates import beside
from support.harness import Child, assert_right, pids

import synk

Fork = Callable[..., Any]
Count = Callable[[int], int]
SIZE = (1 << 18) // 8
"""Elements of the smallest float64 output that is a view of shared memory."""


def many_results(rt: Any) -> dict[str, np.ndarray]:
    """Return arrays from every way by which the runtime hands them out, large and small."""
    w = rt.shared(np.arange(2.0 * SIZE))
    shards = rt.shared(np.arange(2.0 * SIZE), sharded=True)
    x = np.arange(4.0)
    outputs = ("sum", "gather", "first", "max", "sum")

    def body(x: np.ndarray) -> Any:
        rows = SIZE if x[0] == 0 else 5  # one rank's part is large, the others' are small
        return np.full(SIZE, x.sum()), np.full(rows, 2.0), np.full((2, SIZE), 3.0), np.full(7, 4.0), x.sum()

    total, gathered, first, small, scalar = rt.function(body, outputs=outputs)(x)
    each = rt.function(lambda x: np.full(SIZE, 5.0), outputs=None)(x)
    folded = rt.function(lambda x: np.full(SIZE, 6.0), outputs=lambda a, b: a)(x)
    named = rt.function(lambda x: {"a": np.full(SIZE, x.sum())}, outputs="sum")(x)
    return {
        "reduced": total,
        "gathered": gathered,
        "first": first,
        "small": small,
        "scalar": np.asarray(scalar),
        **{f"rank {rank}": value for rank, value in enumerate(each)},
        "folded": folded,
        "nested": named["a"],
        "view": total.reshape(2, -1)[:, ::3],
        "value": w.value,
        "shards": shards.value,
        "reduce": synk.reduce(w, "sum", in_place=False),
        "stacked": synk.gather(w),
    }


def test_E16_what_was_handed_out_is_each_process_s_own_after_a_fork(runtime: Fork) -> None:
    rt = runtime(2)
    results = many_results(rt)
    copies = {name: array.copy() for name, array in results.items()}

    def in_child() -> None:
        for name, array in results.items():
            np.testing.assert_array_equal(array, copies[name], name)
        writable = [array for array in results.values() if array.flags.writeable]  # not the value of a variable
        for array in writable:
            array[...] = -1
        assert all((array == -1).all() for array in writable)

    with Child(in_child):
        again = many_results(rt)
        for name, array in results.items():
            np.testing.assert_array_equal(array, copies[name], name)
            np.testing.assert_array_equal(again[name], copies[name], name)
    for name, array in results.items():
        np.testing.assert_array_equal(array, copies[name], name)
    results["gathered"][...] = -2
    with Child(lambda: None):
        many_results(rt)
    assert (results["gathered"] == -2).all()
    np.testing.assert_array_equal(results["nested"], copies["nested"])


def test_E16_forks_in_one_thread_and_calls_in_another(rt: Any, storm_count: Count) -> None:

    def body(k: np.ndarray, x: np.ndarray) -> Any:
        return np.full(SIZE, k), np.arange(k if x[0] else SIZE)

    f = rt.function(body, bcast_inputs="k", outputs=("max", "gather"))
    numbers, held = itertools.cycle(range(1, 51)), []

    def call() -> None:
        k = next(numbers)
        held[:-3] = []
        held.append((k, *f(np.array(k), np.arange(2.0))))
        for number, largest, rows in held:
            assert (largest == number).all()
            assert len(rows) == SIZE + number and (rows[SIZE:] == np.arange(number)).all()
        held[-1][1][:5] = k

    with beside(call):
        for _ in range(storm_count(5)):
            with Child(lambda: None):
                pass


def test_E16_what_threads_write_at_the_moment_of_a_fork_is_not_lost(reused: Fork, storm_count: Count) -> None:
    """NumPy works on arrays without the interpreter's lock: a copy of the pages would miss what it writes meanwhile."""
    rt = reused(1)
    f = rt.function(lambda x: np.zeros(16 * SIZE), outputs="first")
    for _ in range(storm_count(5)):
        result = f(np.ones(1))
        count, is_writing = 0, threading.Event()

        def write(result: np.ndarray = result, is_writing: Any = is_writing) -> None:
            nonlocal count
            is_writing.set()
            np.add(result, 1.0, out=result)
            count += 1

        with beside(write):
            is_writing.wait()
            with Child(lambda: None):
                pass
        np.testing.assert_array_equal(result, count)


# ----- Data


def test_E17_data_that_the_parent_drops_still_holds_its_values_in_a_child(rt: Any, subtests: pytest.Subtests) -> None:
    total = rt.function(lambda x: x.sum(), outputs="sum")
    drops: dict[str, Callable[[Any], object]] = {
        "del": lambda data: None,
        "free_memory": lambda data: data.free_memory(),
        "grow": lambda data: (data.set_length(3 * len(data) + 10_000), data.__setitem__(slice(None), -1)),
    }
    wanted = [np.arange(float(size)) for size in (10, 5000, 1 << 17)]
    for how, drop in drops.items():
        with subtests.test(how):
            held = [rt.data(values) for values in wanted]
            assert [total(data) for data in held] == [values.sum() for values in wanted]
            views = [data.data for data in held]
            with Child(lambda: [*map(np.testing.assert_array_equal, views, wanted)]):  # noqa: B023
                while held:
                    drop(held.pop())
                views.clear()
                gc.collect()
                for values in wanted:
                    new = [rt.data(np.full(len(values), -2.0)) for _ in range(6)]
                    assert [total(each) for each in new] == [-2.0 * len(values)] * 6


def test_E17_data_stays_shared_with_a_child(reused: Fork) -> None:
    rt = reused(1)
    data = rt.data(np.zeros(10))
    view = data.data
    data[:] = 1
    called = rt.function(lambda x: x.sum(), outputs="sum").submit(data)

    def in_child() -> None:
        assert (view == 1).all() and data[3] == 1 and (np.asarray(data) == 1).all() and (data + 1).sum() == 20
        data[:5] += 1
        view[5:] = 2
        with pytest.raises(synk.errors.ReentrancyError):
            data.set_length(20)

    with Child(in_child):
        pass
    assert called.result() in (10, 15, 20) and (data.data == 2).all()


# ----- children that a function forks


def test_E1_a_child_that_a_function_has_forked_does_not_answer(rt: Any) -> None:

    def fork(x: np.ndarray) -> int:
        return os.fork() and os.getpid()

    workers = pids(rt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            assert rt.function(fork, outputs=None)(np.ones(2)) == workers
            assert_right(rt)


def test_E1_a_child_that_a_function_has_forked_is_no_rank(rt: Any, tmp_path: Path) -> None:
    """Its part in a collective, or in a message that its parent has asked for, would be taken for the parent's."""

    def f(x: np.ndarray) -> Any:
        comm = synk.comm
        peer = 1 - comm.rank
        comm.barrier()
        request = comm.irecv(peer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if not pid:
            for act in (
                lambda: comm.all_reduce(np.full(4, 100.0), "sum"),
                lambda: comm.send(np.full(4, 100.0), peer),
                lambda: comm.recv(peer),
                request.wait,
            ):
                try:
                    act()
                except Exception as error:
                    with open(tmp_path / str(comm.rank), "a", encoding="utf-8") as file:
                        file.write(f"{type(error).__name__}\n")
            os._exit(0)
        os.waitpid(pid, 0)
        total = comm.all_reduce(np.ones(4), "sum")
        comm.send(np.full(4, 5.0 + comm.rank), peer)
        return total, request.wait()

    totals, received = rt.function(f, outputs=(None, None))(np.ones(2))
    np.testing.assert_array_equal(totals, np.full((2, 4), 2.0))
    np.testing.assert_array_equal(received, [[6.0] * 4, [5.0] * 4])
    refused = ["ReentrancyError"] * 3 + ["CollectiveMismatch"]
    assert [(tmp_path / str(rank)).read_text().split() for rank in range(2)] == [refused] * 2
    assert_right(rt)


def ends(error: BaseException | None) -> int:
    """Return the status of a child that returns, or raises an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if error is not None:
        raise error
    return 0


ENDS = {SystemExit(3): 3, SystemExit("a text"): 1, SystemExit(): 0, ValueError("in the child"): 1, None: 0}


@pytest.mark.parametrize("rt", [0, 2], indirect=True)
def test_E1_a_child_that_a_function_has_forked_ends_as_a_program_does(
    rt: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    called = rt.function(lambda x, error: ends(error), bcast_inputs="error", outputs=None)
    assert list(rt.map(ends, ENDS)) == list(ENDS.values())
    first = capfd.readouterr().err
    for (error, status), num_slices in itertools.product(ENDS.items(), (1, 2)):
        assert set(np.ravel(called(np.ones(4), error, num_slices=num_slices))) == {status}
    for told in (first, capfd.readouterr().err):
        assert "a text" in told and "Traceback" in told and "ValueError: in the child" in told
        assert "SystemExit" not in told and os.sep + "synk" + os.sep not in told
    assert_right(rt)


def test_E1_a_child_that_an_item_has_forked_runs_no_other(rt: Any, tmp_path: Path) -> None:

    def f(item: int) -> int:
        with open(tmp_path / "log", "a", encoding="utf-8") as file:
            file.write(f"{item}\n")
        if item == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                os.fork()
        return item

    assert list(rt.map(f, range(6), batch_size=6)) == [*range(6)]
    assert sorted((tmp_path / "log").read_text().split()) == [str(item) for item in range(6)]
