"""Large outputs: each worker brings its part into place, asked by the master or, in a repeated call, after a meeting.

How long a rank waits awake for the others is ``SYNK_SPIN_US``: with minutes they always meet, with none a rank that
comes too early is asked by the master, and the result is the same.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import (
    Child,
    assert_right,
    failpoint,
    kill_and_wait,
    mapped_memfds,
    pids,
    replaced_workers,
    same_workers,
)

import synk
from synk._master.calls.plans import PlanCache
from synk.errors import CollectiveMismatch, WorkerDied

Fork = Callable[..., Any]
SIZE = (1 << 18) // 8
"""Elements of the smallest float64 output that the workers reduce."""
FOREVER = "60000000"


@pytest.fixture(params=[FOREVER, "0"], ids=["meets", "is asked"])
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SYNK_SPIN_US", request.param)
    return str(request.param)


def several(k: float, x: np.ndarray) -> tuple[Any, ...]:
    big = np.full(SIZE, k + x.sum())
    return big, big[None] * 2, float(x.sum()), np.repeat(x, SIZE), {"one": big, "two": len(x)}, big


OPS = ("avg", "sum", "sum", "gather", None, "first")


def messages_of(rt: Any, call: Callable[[], Any]) -> int:
    before = rt.counters["messages_down"]
    call()
    return int(rt.counters["messages_down"] - before)


@pytest.mark.parametrize("num_workers", ["inline", 1, 2, 3])
@pytest.mark.sampled(4)
def test_a_repeated_call_is_one_message_where_the_ranks_meet(runtime: Fork, patience: str, num_workers: Any) -> None:
    rt = runtime(1, inline=True) if num_workers == "inline" else runtime(num_workers)
    num_workers = rt.world_size
    f = rt.function(several, bcast_inputs="k", outputs=OPS)
    x = np.arange(7.0)
    parts = np.array_split(x, num_workers)
    weights = [len(part) for part in parts]
    for k in range(5):
        before = rt.counters["messages_down"]
        average, double, total, rows, nested, first = f(float(k), x)
        sent = rt.counters["messages_down"] - before
        if k > 1:
            assert sent == num_workers if patience == FOREVER else num_workers <= sent <= 2 * num_workers
        sums = [k + part.sum() for part in parts]
        np.testing.assert_array_equal(average, np.full(SIZE, np.average(sums, weights=weights)))
        np.testing.assert_array_equal(double, np.full((1, SIZE), 2 * sum(sums)))
        assert total == x.sum()
        np.testing.assert_array_equal(rows, np.repeat(x, SIZE))
        assert [each["one"][0] for each in nested] == sums
        assert [each["two"] for each in nested] == weights
        assert first[-1] == sums[0]


def test_two_functions_in_turn_keep_their_places(reused: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training loop calls more than one: each knows its own parts, and other calls come between."""
    monkeypatch.setenv("SYNK_SPIN_US", FOREVER)
    rt = reused(2)
    total = rt.function(lambda x: np.full(SIZE, x.sum()), outputs="sum")
    largest = rt.function(lambda x: (np.full(2 * SIZE, x.max()), x.min()), outputs="max")
    small = rt.function(lambda x: x.sum(), outputs="sum")
    x = np.arange(4.0)
    for k in range(6):
        results: list[Any] = []

        def call(function: Any) -> Callable[[], None]:
            return lambda: results.append(function(x + k))  # noqa: B023 - called at once

        counts = [messages_of(rt, call(function)) for function in (total, small, largest)]
        assert counts == [2, 2, 2] or k < 2
        assert (results[0] == (x + k).sum()).all()
        assert (results[2][0] == 3 + k).all() and results[2][0].shape == (2 * SIZE,)
        assert results[2][1] == 2 + k


def test_a_result_that_is_held_is_not_written_again(reused: Fork, patience: str) -> None:
    """The buffer of the next call is leased before it is sent."""
    rt = reused(2)
    f = rt.function(lambda k, x: np.full(SIZE, k + 0 * x[0]), bcast_inputs="k", outputs="max")
    kept = [f(float(k), np.ones(2)) for k in range(8)]
    assert [(value[0], value[-1]) for value in kept] == [(float(k), float(k)) for k in range(8)]


# ----- ranks whose outputs differ


@pytest.mark.sampled(20)
@pytest.mark.parametrize("num_rows", [16, 17, 33, 1001])
@pytest.mark.parametrize("where", [2, 3])
def test_a_large_sum_beside_outputs_whose_size_differs_between_ranks(
    shared_runtimes: Any, where: int, num_rows: int
) -> None:
    """Each rank reads the others' values in their slots, wherever the rest of their outputs lies."""
    rt = shared_runtimes[where]

    def body(x: np.ndarray) -> Any:
        return x * 1.0, np.full(2 * SIZE, x.sum()), "text" if x[0] else np.ones(9), np.full(3 * SIZE, len(x))

    f = rt.function(body, outputs=("gather", "sum", None, "sum"))
    x = np.arange(float(num_rows))
    for _ in range(3):
        rows, total, _, count = f(x)
        np.testing.assert_array_equal(rows, x)
        np.testing.assert_array_equal(total, np.full(2 * SIZE, x.sum()))
        np.testing.assert_array_equal(count, np.full(3 * SIZE, num_rows))


@pytest.mark.parametrize("length", [2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1])
def test_gather_where_only_some_parts_are_large(shared_runtimes: Any, length: int) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x, outputs="gather")
    x = np.arange(float(length))
    for _ in range(3):
        np.testing.assert_array_equal(f(x), x)


def test_one_rank_gives_a_large_array_and_another_a_small_one_or_none(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    f = rt.function(lambda x: (np.full(SIZE, 7.0), np.ones(3), "text")[int(x[0])], outputs=None)
    for order in ([0, 1, 2], [2, 1, 0], [1, 1, 1], [0, 1, 2]):
        for _ in range(2):
            got = f(np.array(order))
            for kind, value in zip(order, got, strict=True):
                if kind == 2:
                    assert value == "text"
                else:
                    np.testing.assert_array_equal(value, np.full(SIZE, 7.0) if kind == 0 else np.ones(3))


FUZZ_OPS = ("sum", "gather", None, "first", "max", "avg")
SIZES = (SIZE, SIZE, SIZE + 13)


def fuzzed(sizes: np.ndarray, plan: dict[str, Any], x: np.ndarray) -> tuple[Any, ...]:
    rank = synk.comm.rank
    if plan["failing"] == rank:
        raise RuntimeError("as told")
    if plan["late"] == rank:
        time.sleep(0.001)
    outputs: list[Any] = [np.full(size, 10.0 * leaf + rank + plan["k"]) for leaf, size in enumerate(sizes[:, rank])]
    if plan["has_text"]:
        outputs[2] = f"text of {rank}"
    return tuple(outputs)


class Fuzz:
    """One runtime, two functions, and calls of all kinds whose results are compared with NumPy."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.size = rng.choice([1, 2, 3])
        self.num_rows = rng.choice([1, self.size, 5, 9])
        self.held: list[tuple[Any, list[Any]]] = []

    def new_sizes(self) -> np.ndarray:
        """Return the length of each output on each rank; those that are reduced are of one length."""
        pick, n = self.rng.choice, self.size
        return np.array(
            [
                [pick([7, *SIZES])] * n,
                [pick([0, 7, 9, 30, *SIZES]) for _ in range(n)],
                [pick([7, *SIZES]) for _ in range(n)],
                [pick([7, SIZE]) for _ in range(n)],
                [pick([7, *SIZES])] * n,
                [pick([7, SIZE])] * n,
            ]
        )

    def run(self, rt: Any, num_calls: int) -> None:
        functions = [rt.function(fuzzed, bcast_inputs=("sizes", "plan"), outputs=FUZZ_OPS) for _ in range(2)]
        sizes = self.new_sizes()
        for _ in range(num_calls):
            if self.rng.random() < 0.3:
                sizes = self.new_sizes()
            if self.rng.random() < 0.05:
                with Child(self.write_into_held):
                    for _ in range(3):
                        self.call(self.rng.choice(functions), sizes)
            self.call(self.rng.choice(functions), sizes)
            if self.rng.random() < 0.1:
                self.write_into_held()

    def check_held(self) -> None:
        for arrays, copies in self.held:
            for now, then in zip(arrays, copies, strict=True):
                np.testing.assert_array_equal(now, then)

    def write_into_held(self) -> None:
        """In this process, or in a child: the other must not see it."""
        self.check_held()
        for pair in self.held:
            for array in (array for arrays in pair for array in arrays if array.size):
                array[...] = -array[-1]
        self.check_held()

    def call(self, function: Any, sizes: np.ndarray) -> None:
        pick, n = self.rng.choice, self.size
        ranks = range(n)
        mode = pick(["plain"] * 6 + ["serial", "batch", "subset"])
        plan = {
            "k": float(self.rng.randrange(100)),
            "failing": pick([None] * 8 + [self.rng.randrange(n)]),
            "late": pick([None, None, self.rng.randrange(n)]),
            "has_text": pick([False, False, False, True]),
        }
        num_rows = self.rng.randint(1, self.num_rows) if mode == "batch" else self.num_rows
        weights = [len(part) for part in np.array_split(np.arange(num_rows), n)]
        voters = [0] if mode == "serial" else [rank for rank in ranks if weights[rank]]
        wanted = tuple(sorted(self.rng.sample(range(6), 3))) if mode == "subset" else tuple(range(6))
        options: dict[str, Any] = {"batch": {"batch": num_rows}, "subset": {"output_subset": wanted}}.get(mode, {})
        call = function.serial if mode == "serial" else function
        x = np.arange(float(self.num_rows))
        if plan["failing"] in voters:
            with pytest.raises(RuntimeError, match="as told"):
                call(sizes, plan, x, **options)
            return
        got = call(sizes, plan, x, **options)

        def value(leaf: int, rank: int) -> float:
            return 10.0 * leaf + rank + plan["k"]

        rows = [num_rows if mode == "serial" else weights[rank] for rank in voters]
        average = sum(count * value(5, rank) for count, rank in zip(rows, voters, strict=True)) / sum(rows)
        each = [
            None if rank not in voters
            else f"text of {rank}" if plan["has_text"]
            else np.full(sizes[2, rank], value(2, rank))
            for rank in ranks
        ]  # fmt: skip
        expected: tuple[Any, ...] = (
            np.full(sizes[0, 0], sum(value(0, rank) for rank in voters)),
            np.concatenate([np.full(sizes[1, rank], value(1, rank)) for rank in voters]),
            each,
            np.full(sizes[3, voters[0]], value(3, voters[0])),
            np.full(sizes[4, 0], max(value(4, rank) for rank in voters)),
            np.full(sizes[5, 0], average),
        )
        for result, leaf in zip(got, wanted, strict=True):
            if leaf == 2:
                for mine, theirs in zip(result, each, strict=True):
                    np.testing.assert_array_equal(mine, theirs)
            else:
                np.testing.assert_allclose(result, expected[leaf], rtol=1e-13)
        self.check_held()
        if self.rng.random() < 0.2:
            arrays = [item for item in got if isinstance(item, np.ndarray)]
            self.held = [*self.held[-2:], (arrays, [array.copy() for array in arrays])]


@pytest.mark.parametrize("num_seeds", [1, pytest.param(100, marks=pytest.mark.storm)])
@pytest.mark.parametrize("spin_us", ["0", "20", "500", FOREVER])
def test_any_sequence_of_calls_equals_numpy(
    runtime: Fork, monkeypatch: pytest.MonkeyPatch, spin_us: str, num_seeds: int
) -> None:
    """Sizes that differ between ranks and change, failures, delays, serial and partial calls, results that are kept,
    dropped, written into and forked."""
    monkeypatch.setenv("SYNK_SPIN_US", spin_us)
    for seed in range(num_seeds):
        fuzz = Fuzz(random.Random(f"{spin_us} {seed}"))
        with runtime(fuzz.size) as rt:
            fuzz.run(rt, 40)


def test_a_plan_that_a_worker_has_changed_is_not_used_again(
    shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank comes with a new layout while another fails, and Ctrl-C keeps the master from dropping the plan."""
    rt = shared_runtimes[2]

    def body(k: np.ndarray, x: np.ndarray) -> np.ndarray:
        if k == 1 and x[0] == 1:
            raise RuntimeError("as told")
        return np.full((2 if k and x[0] == 0 else 1) * SIZE, x[0] + 1.0)

    f = rt.function(body, bcast_inputs="k", outputs="gather")
    x = np.arange(2.0)
    for _ in range(3):
        assert len(f(np.array(0), x)) == 2 * SIZE

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PlanCache, "discard", interrupted)
        f(np.array(1), x)
    for _ in range(3):
        np.testing.assert_array_equal(f(np.array(2), x), np.repeat([1.0, 1.0, 2.0], SIZE))


# ----- buffers


def test_a_buffer_that_is_not_needed_may_be_refused(reused: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is full, and a function whose outputs were large returns small ones."""
    rt = reused(2)
    f = rt.function(lambda k, x: np.full(256 * SIZE if k < 2 else 10, 1.0), bcast_inputs="k", outputs="sum")
    x = np.arange(2.0)
    held = [f(np.array(k), x) for k in range(2)]
    monkeypatch.setattr("synk._wire.memory.available_nbytes", lambda: 1 << 20)
    np.testing.assert_array_equal(f(np.array(2), x), np.full(10, 2.0))
    with pytest.raises(synk.errors.SharedMemoryError):
        f(np.array(0), x)
    del held
    np.testing.assert_array_equal(f(np.array(0), x), np.full(256 * SIZE, 2.0))


def test_exceptions_that_are_kept_hold_no_buffers(runtime: Fork) -> None:
    """A notebook keeps the last one, with the frames of its traceback."""
    rt = runtime(2)
    f = rt.function(lambda k, x: np.full(SIZE, 1.0 / (7 - k)), bcast_inputs="k", outputs="sum")
    x = np.arange(2.0)
    kept = []
    for _ in range(3):
        f(0, x)
        f(0, x)
        with pytest.raises(ZeroDivisionError) as caught:
            f(7, x)
        kept.append(caught)
    gc.collect()
    mapped = mapped_memfds()
    for _ in range(3):
        f(0, x)
    assert mapped_memfds() <= mapped
    assert len(kept) == 3


def test_a_result_may_end_while_ctrl_c_comes(reused: Fork) -> None:
    """What brings its buffer back is no Python code that an interrupt could break off."""
    rt = reused(2)
    f = rt.function(lambda x: np.full(SIZE, x.sum()), outputs="sum")
    x = np.ones(2)
    held = [f(x)]
    entered = []

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        held.clear()
    finally:
        sys.setprofile(None)
    assert entered == []


def test_workers_keep_no_outputs_of_a_call_that_failed(runtime: Fork) -> None:
    rt = runtime(2)
    f = rt.function(lambda x: np.full((1 << 22) + int(x[0]), 1.0), outputs="sum")  # 32 MB, and one element more
    memory = rt.function(saboteurs.anonymous_kb, outputs=None)
    x = np.arange(2.0)
    for _ in range(2):
        before = memory()
        with pytest.raises(CollectiveMismatch):
            f(x)
    assert max(np.subtract(memory(), before)) < 1 << 14


# ----- faults


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", ["call.published", "reduce.before", "reduce.after"])
@pytest.mark.sampled(4)
def test_A3_a_death_where_the_ranks_meet(reused: Fork, patience: str, step: str, rank: int) -> None:
    """The survivor answers, however long it may wait: the master ends its wait."""
    nth = 4 if step == "call.published" else 3  # the fixture below makes a call, too, of small outputs
    rt = reused(2, failpoint(step, rank, nth=nth))
    f = rt.function(lambda x: np.full(SIZE, x.sum()), outputs="sum")
    x = np.arange(4.0)
    for _ in range(2):
        assert (f(x) == 6.0).all()
    with replaced_workers(rt, [rank]), pytest.raises(WorkerDied) as died:
        f(x)
    assert died.value.ranks == (rank,)
    for _ in range(3):
        assert (f(x) == 6.0).all()


@pytest.mark.parametrize("is_submitted", [False, True], ids=["called", "submitted"])
@pytest.mark.parametrize("victims", [(0,), (1,), None], ids=["0 dies", "1 dies", "restart"])
def test_new_workers_are_told_their_parts(
    reused: Fork,
    patience: str,
    monkeypatch: pytest.MonkeyPatch,
    victims: tuple[int, ...] | None,
    is_submitted: bool,
) -> None:
    """A rank keeps its part of the outputs with the plan, and a new process has neither."""
    rt = reused(2)
    memory, leased = rt._session.memory, list[int]()
    lease = memory.lease_result
    monkeypatch.setattr(memory, "lease_result", lambda nbytes: leased.append(nbytes) or lease(nbytes))
    f = rt.function(several, bcast_inputs="k", outputs=OPS)
    x = np.arange(7.0)

    def messages_of_right_call(k: float) -> int:
        before = rt.counters["messages_down"]
        average, double, total, rows, nested, first = f.submit(k, x).result() if is_submitted else f(k, x)
        np.testing.assert_array_equal(average, np.full(SIZE, np.average([k + 6, k + 15], weights=[4, 3])))
        np.testing.assert_array_equal(double, np.full((1, SIZE), 2 * (2 * k + 21)))
        np.testing.assert_array_equal(rows, np.repeat(x, SIZE))
        assert [each["one"][0] for each in nested] == [k + 6, k + 15]
        assert (total, [each["two"] for each in nested], first[-1]) == (21, [4, 3], k + 6)
        return int(rt.counters["messages_down"] - before)

    for k in range(3):
        messages_of_right_call(float(k))
    leased.clear()
    if victims is None:
        rt.restart()
        assert messages_of_right_call(3.0) > 2
    else:
        kill_and_wait(*[pids(rt)[rank] for rank in victims])
        with pytest.warns(RuntimeWarning, match="was started again"):
            assert messages_of_right_call(3.0) > 2
    assert len(leased) == 1, "a buffer was leased before all ranks knew their parts"
    messages_of_right_call(4.0)
    sent = messages_of_right_call(5.0)
    assert sent == 2 if patience == FOREVER else sent <= 4


def test_D1_ctrl_c_while_a_rank_waits_for_the_others(reused: Fork, patience: str) -> None:
    import signal
    import threading

    rt = reused(2)
    f = rt.function(lambda s, x: time.sleep(s * x[0]) or np.full(SIZE, x.sum()), bcast_inputs="s", outputs="sum")
    x = np.arange(2.0)
    for _ in range(3):
        f(0.0, x)
    with same_workers(rt):
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            f(30.0, x)
        timer.join()
        assert (f(0.0, x) == 1.0).all()
    assert_right(rt)


def test_large_outputs_and_assigned_variables_in_one_call(reused: Fork, patience: str) -> None:
    """Both are announced by the same layout; what is assigned holds only when the whole call has ended well."""
    rt = reused(2)
    w = rt.shared(np.zeros(SIZE))

    def step(x: np.ndarray) -> np.ndarray:
        w.value = w.value + 1.0
        if x[0] < 0:
            raise RuntimeError("as told")
        return w.value * x.sum()

    f = rt.function(step, outputs="sum")
    x = np.ones(4)
    for k in range(1, 6):
        np.testing.assert_array_equal(f(x), np.full(SIZE, 4.0 * k))
    with pytest.raises(RuntimeError):
        f(np.array([1.0, 1.0, -1.0, -1.0]))
    for rank in range(2):
        np.testing.assert_array_equal(rt.get_value(w, rank=rank), np.full(SIZE, 5.0))
    np.testing.assert_array_equal(f(x), np.full(SIZE, 24.0))
