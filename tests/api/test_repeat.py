"""``f.repeat``: many runs of a function for one message, equal to as many calls; the oracle is a loop of NumPy."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers
from support.tables import named

import synk
from synk.errors import CallTimeout, WorkerDied

KINDS = [1, 2, 3, 0]
X = np.arange(14.0).reshape(7, 2)


@pytest.mark.parametrize("rt", KINDS, indirect=True)
def test_updates_and_assignments_hold_from_run_to_run(rt: Any) -> None:
    """Also where the function assigns the same buffer each time, and writes into it while it reads the value."""
    w, count, ring = rt.shared(np.ones(2)), rt.shared(0.0), rt.shared(np.arange(4.0))
    buffer = np.empty(4)

    def shift(x: np.ndarray) -> float:
        buffer[0] = ring.value[-1]
        for k in range(1, 4):
            buffer[k] = ring.value[k - 1]
        ring.value = buffer
        return float(ring.value[0])

    f = rt.function(lambda x: (x * w.value, (w.value / 2 + 1, count.value + 1)), updates=[w, count], outputs="gather")
    g = rt.function(shift, outputs="first")
    expected, seen, runs = np.ones(2), None, 0
    for n in (1, 2, 9, 3):
        result = f.repeat(n, X)
        g.repeat(n, X)
        for _ in range(n):
            seen, expected, runs = X * expected, expected / 2 + 1, runs + 1
        np.testing.assert_allclose(result, seen, rtol=1e-14)
        for rank in range(rt.world_size):
            np.testing.assert_allclose(w[rank], expected, rtol=1e-14)
            np.testing.assert_array_equal(ring[rank], np.roll(np.arange(4.0), runs))
    assert int(count.value) == runs


def test_shards_change_and_keep_their_rows(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    rows = rt.shared(X, sharded=True)

    def double(mine: np.ndarray) -> float:
        rows.value = rows.value * 2
        return float(mine.sum())

    assert rt.function(double, outputs="sum").repeat(4, rows) == X.sum() * 8
    np.testing.assert_array_equal(rows.value, X * 16)

    def grow(mine: np.ndarray) -> float:
        rows.value = np.concatenate([rows.value, rows.value])
        return float(len(mine))

    g = rt.function(grow, outputs="sum")
    with pytest.raises(ValueError, match=r"cannot repeat a call: it has assigned 6 rows to the shard.*expected 3"):
        g.repeat(2, rows)
    np.testing.assert_array_equal(rows.value, X * 16)
    assert (g.repeat(1, rows), len(rows.value)) == (7, 14)


@pytest.mark.parametrize("rt", [2, 0], indirect=True)
def test_each_run_gets_its_arguments_anew(rt: Any) -> None:
    torch = pytest.importorskip("torch")

    def consume(x: Any, settings: dict[str, Any]) -> Any:
        settings["seen"].append(len(x))
        total = x.sum(0) * len(settings["seen"])
        x.zero_()
        return total

    x = torch.arange(14.0, dtype=torch.float64).reshape(7, 2)
    f = rt.function(consume, bcast_inputs="settings", outputs="sum", framework="torch")
    assert torch.equal(f.repeat(3, x, {"seen": []}), x.sum(0))


@pytest.mark.parametrize("rt", KINDS, indirect=True)
def test_the_ranks_talk_in_each_run(rt: Any) -> None:
    """The dominant eigenvector by power iteration, with the matrix divided by rows."""
    matrix = np.diag([3.0, 2, 1, 1, 0.5]) + 0.1
    v = rt.shared(np.ones(5))
    starts = [part[0] for part in np.array_split(np.arange(5), rt.world_size)]

    def iterate(rows: np.ndarray) -> float:
        product, start = np.zeros(5), starts[synk.comm.rank]
        product[start : start + len(rows)] = rows @ v.value
        product = synk.comm.all_reduce(product, "sum")
        v.value = product / np.linalg.norm(product)
        return float(np.linalg.norm(product))

    largest = rt.function(iterate, outputs="first").repeat(200, matrix)
    values, vectors = np.linalg.eigh(matrix)
    np.testing.assert_allclose(largest, values[-1], rtol=1e-12)
    np.testing.assert_allclose(abs(v.value), abs(vectors[:, -1]), rtol=1e-6)


def test_a_change_in_place_is_refused_in_each_run(rt: Any) -> None:
    """Also if a later run assigns the variable, from a value without the change."""
    w, runs = rt.shared({"a": np.zeros(2)}), rt.shared(0)

    def step(x: np.ndarray) -> float:
        if runs.value:
            w.value = {"a": w.value["a"] + 5}
        else:
            w.value["a"] = x[:2]
        runs.value = runs.value + 1
        return 0.0

    f = rt.function(step, outputs="max")
    for n in (1, 2):
        with pytest.raises(ValueError, match=r"cannot change the value of variable .* in place"):
            f.repeat(n, X)


def test_it_is_one_message(rt: Any) -> None:
    w = rt.shared(0)
    f = rt.function(lambda x: (x.sum(), w.value + 1), updates=[w], outputs="sum")
    f.repeat(3, X), f.repeat(3, X)
    before = rt.counters
    f.repeat(3, X)
    after = rt.counters
    sent = {name: after[name] - before[name] for name in ("messages_down", "messages_up", "calls")}
    assert sent == {"messages_down": 2, "messages_up": 2, "calls": 1}
    f(X)
    assert int(w.value) == 10


def test_ranks_without_rows_follow(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    w, log = rt.shared(0.0), rt.resident([])

    def step(x: np.ndarray) -> tuple[float, float]:
        log.value.append(float(x.sum()))
        return float(x.sum()), w.value + 1

    rt.function(step, updates=[w, log], outputs="sum").repeat(4, X[:1])
    assert [float(w[rank]) for rank in range(3)] == [4.0] * 3
    assert [log.get(rank) for rank in range(3)] == [[1.0] * 4] * 3


# -- faults


def failing(rt: synk.Runtime, fails: Callable[[int, int], Any]) -> tuple[Any, Any, Any]:
    """Return a step over a variable and a log that calls ``fails(rank, runs so far)`` in the middle, and both."""
    w, log = rt.shared(0.0), rt.resident([], name="log")

    def step(x: np.ndarray) -> tuple[float, float]:
        answer = fails(synk.comm.rank, len(log.value))
        log.value.append(len(log.value))
        synk.comm.barrier()
        return 0.0, w.value + 1 if answer is None else answer

    return rt.function(step, updates=[w, log]), w, log


def raises_on_one(rank: int, runs: int) -> None:
    if rank == 1 and runs == 5:
        raise KeyError("the fifth")


def raises_everywhere(rank: int, runs: int) -> None:
    if runs == 5:
        raise KeyError("everywhere")


def gives_another_shape(rank: int, runs: int) -> Any:
    return np.ones((3, 3)) if runs == 5 else None


@pytest.mark.parametrize(
    ("fails", "error", "words"),
    [
        (raises_on_one, KeyError, "the fifth"),
        (raises_everywhere, KeyError, "everywhere"),
        (gives_another_shape, ValueError, "2 axes"),
    ],
)
def test_an_error_undoes_the_variables_and_leaves_the_ranks_alike(
    shared_runtimes: Any, fails: Any, error: type[Exception], words: str
) -> None:
    rt = shared_runtimes[3]
    step, w, log = failing(rt, fails)
    step.repeat(2, X)
    with pytest.raises(error, match=words) as caught:
        step.repeat(20, X)
    assert caught.value.step_counted is False
    if fails is gives_another_shape and sys.version_info >= (3, 11):
        note = "'log' is as it was before the call"
        assert any(note in each for each in caught.value.__notes__)
    assert [float(w[rank]) for rank in range(3)] == [2.0] * 3
    logs = [log.get(rank) for rank in range(3)]
    assert logs[0] == logs[1] == logs[2]
    assert logs[0][:5] == [0, 1]
    log.set([])
    step.repeat(3, X)
    assert [float(w[rank]) for rank in range(3)] == [5.0] * 3
    assert [log.get(rank) for rank in range(3)] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("rt", [2, "1+1"], indirect=True)
def test_a_death_in_a_later_run(rt: Any) -> None:

    def fails(rank: int, runs: int) -> None:
        if rank == 1 and runs == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    step, w, log = failing(rt, fails)
    step(X)
    with pytest.raises(WorkerDied):
        step.repeat(9, X)
    assert [float(w[rank]) for rank in range(2)] == [1.0] * 2
    assert log.get(0) == log.get(1)
    assert log.get(0)[:3] == [0]


def test_a_time_limit_ends_it(rt: Any) -> None:
    w = rt.shared(0)
    f = rt.function(lambda x: (x.sum(), w.value + 1), updates=[w], outputs="sum")
    with same_workers(rt), pytest.raises(CallTimeout):
        f.repeat(10**9, X, timeout=0.5)
    assert int(w.value) == 0
    f.repeat(2, X)
    assert int(w.value) == 2


def test_what_is_no_number(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(named("total", lambda x: x.sum()), outputs="sum")
    for n in (0, -1, 2.0, True, "3", None, X):
        with pytest.raises(ValueError, match=r"(?s)cannot repeat 'total': got .*expected an integer of 1 or more"):
            f.repeat(n, X)


def test_what_cannot_be_repeated(rt: Any) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="cannot repeat 'total': got num_slices=2, expected 1"):
        rt.function(named("total", lambda x: x.sum()), outputs="sum").repeat(3, X, num_slices=2)
    model = torch.nn.Linear(2, 1)
    rep = synk.torch.replicate(model, torch.optim.Adam(model.parameters()), runtime=rt)
    with pytest.raises(ValueError, match="cannot repeat 'step': got a function over replicated objects"):
        rep.function(named("step", lambda model, optimizer, x: x.sum())).repeat(3, torch.ones(4, 2))


CALLS: dict[str, Callable[[Any], Any]] = {
    "keywords": lambda f: f.repeat(3, y=2.0, x=X),
    "batch": lambda f: f.repeat(3, X, 2.0, batch=[5, 1, 1]),
    "subset": lambda f: f.repeat(3, X, 2.0, output_subset=[1]),
    "time limit": lambda f: f.repeat(np.int64(3), X, 2.0, timeout=60),
}


def test_it_is_called_like_any_function(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    """With what the function has captured, too, which its repetitions share with other calls."""
    for kind in (2, 3):
        rt, log = shared_runtimes[kind], []
        f = rt.function(
            lambda x, y, log=log: (log.append(1), len(log), x.sum() * y)[1:],
            bcast_inputs=("y", "log"), outputs=("max", "sum"),
        )  # fmt: skip
        f(X, 1.0)
        for number, (name, call) in enumerate(CALLS.items()):
            with subtests.test(name, kind=kind):
                *runs, total = call(f)
                assert runs in ([4 + 3 * number], [])
                assert total == (X[[5, 1, 1]] if name == "batch" else X).sum() * 2
    assert shared_runtimes[2].function(max, outputs="max").repeat(2, np.arange(5)) == 4
