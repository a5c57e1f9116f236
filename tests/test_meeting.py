"""Large outputs of a repeated call: the ranks meet in shared memory and bring them into place without being asked.

How long a rank waits awake for the others is ``SYNK_SPIN_US``: with minutes they always meet, with none a rank that
comes too early is asked by the master, and the result is the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import assert_right, failpoint, replaced_workers, same_workers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
        assert [value[0] for value in nested["one"]] == sums
        assert nested["two"] == weights
        assert first[-1] == sums[0]


def test_two_functions_in_turn_keep_their_places(runtime: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training loop calls more than one: each knows its own parts, and other calls come between."""
    monkeypatch.setenv("SYNK_SPIN_US", FOREVER)
    rt = runtime(2)
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


def test_a_result_that_is_held_is_not_written_again(runtime: Fork, patience: str) -> None:
    """The buffer of the next call is leased before it is sent."""
    rt = runtime(2)
    f = rt.function(lambda k, x: np.full(SIZE, k + 0 * x[0]), bcast_inputs="k", outputs="max")
    kept = [f(float(k), np.ones(2)) for k in range(8)]
    assert [(value[0], value[-1]) for value in kept] == [(float(k), float(k)) for k in range(8)]


def changing(sizes: np.ndarray, x: np.ndarray) -> Any:
    time.sleep(0.002 * (int(x[0]) % 2))  # one rank is late
    size = int(sizes[int(x[0])])
    if size < 0:
        raise RuntimeError("as told")
    return np.full(size, x[0] + 1.0), float(x[0])


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    calls=st.lists(
        st.tuples(st.sampled_from((SIZE, 2 * SIZE, 10)), st.sampled_from((None, None, None, -1, 3 * SIZE))),
        min_size=1,
        max_size=8,
    ),
    spin_us=st.sampled_from(("0", "300", "5000")),
)
def test_any_sequence_of_sizes_failures_and_delays(calls: list[tuple[int, int | None]], spin_us: str) -> None:
    """One rank may differ from the others, or raise, at any call: an error, and the next call is right."""
    import synk

    os.environ["SYNK_SPIN_US"] = spin_us
    try:
        rt = synk.Runtime(2, backend="numpy")
    finally:
        del os.environ["SYNK_SPIN_US"]
    with rt:
        f = rt.function(changing, bcast_inputs="sizes", outputs=("sum", "max"))
        x = np.arange(2.0)
        for size, other in calls:
            sizes = np.array([size, size if other is None else other])
            if other is None:
                total, largest = f(sizes, x)
                np.testing.assert_array_equal(total, np.full(size, 3.0))
                assert largest == 1.0
            else:
                with pytest.raises(RuntimeError if other < 0 else CollectiveMismatch):
                    f(sizes, x)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", ["call.published", "reduce.before", "reduce.after"])
def test_A3_a_death_where_the_ranks_meet(runtime: Fork, patience: str, step: str, rank: int) -> None:
    """The survivor answers, however long it may wait: the master ends its wait."""
    nth = 4 if step == "call.published" else 3  # the fixture below makes a call, too, of small outputs
    rt = runtime(2, failpoint(step, rank, nth=nth))
    f = rt.function(lambda x: np.full(SIZE, x.sum()), outputs="sum")
    x = np.arange(4.0)
    for _ in range(2):
        assert (f(x) == 6.0).all()
    started = time.monotonic()
    with replaced_workers(rt, [rank]), pytest.raises(WorkerDied) as died:
        f(x)
    assert died.value.ranks == (rank,)
    assert time.monotonic() - started < 10
    for _ in range(3):
        assert (f(x) == 6.0).all()


def test_D1_ctrl_c_while_a_rank_waits_for_the_others(runtime: Fork, patience: str) -> None:
    import signal
    import threading

    rt = runtime(2)
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


def test_large_outputs_and_assigned_variables_in_one_call(runtime: Fork, patience: str) -> None:
    """Both are announced by the same layout; what is assigned holds only when the whole call has ended well."""
    rt = runtime(2)
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
