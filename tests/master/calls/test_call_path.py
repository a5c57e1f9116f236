"""The invariants of one call, each counted: messages, bytes, copies, mappings.

``runtime.counters`` holds what the master sent and received since the start: ``messages_down``, ``messages_up``,
``bytes_down``, ``bytes_up`` and ``bytes_pickled``.
"""

from __future__ import annotations

import array
import ast
import fcntl
import gc
import itertools
import os
import re
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import PACKAGE_FOLDER, assert_right, mapped_memfds, same_workers, wait_for

import synk

COUNTERS = {"messages_down", "messages_up", "bytes_down", "bytes_up", "bytes_pickled"}
WORKERS = (1, 2, 3)
BIG = np.random.default_rng(0).normal(size=(1 << 16, 16))
"""8 MB."""


class Counted(dict[str, int]):
    """What one or more calls sent."""


@contextmanager
def counted(rt: Any) -> Iterator[Counted]:
    """Count the messages and bytes of the body."""
    before = dict(rt.counters)
    sent = Counted()
    yield sent
    sent.update({name: rt.counters[name] - before[name] for name in before})


def test_the_counters_are_those_promised(shared_runtimes: Any) -> None:
    assert set(shared_runtimes[2].counters) >= COUNTERS


@pytest.mark.sampled(20)
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("num_inputs", [1, 5])
@pytest.mark.parametrize("num_outputs", [1, 7])
def test_one_message_each_way_per_rank(
    shared_runtimes: Any, num_workers: int, num_inputs: int, num_outputs: int
) -> None:
    """Whatever the number of inputs and outputs, from the first call after ``distribute`` on."""
    rt = shared_runtimes[num_workers]
    f = rt.function(lambda *xs: (sum(x.sum() for x in xs),) * num_outputs, outputs="sum")
    rt.distribute()
    inputs = [rt.data(np.arange(9.0)) for _ in range(num_inputs)]
    for _ in range(3):
        with counted(rt) as sent:
            assert f(*inputs)[0] == 36.0 * num_inputs
        assert sent["messages_down"] == num_workers
        assert sent["messages_up"] == num_workers


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_repeated_call_is_a_few_bytes_and_pickles_nothing(shared_runtimes: Any, num_workers: int) -> None:
    rt = shared_runtimes[num_workers]
    f = rt.function(lambda w, x: (x @ w, (x @ w).sum()), bcast_inputs="w", outputs=("gather", "sum"))
    x, w = rt.data(BIG), np.ones(16)
    for _ in range(2):
        f(w, x)
    with counted(rt) as sent:
        for number in range(20):
            f(w * number, x)
    assert sent["bytes_pickled"] == 0
    assert sent["bytes_down"] <= 64 * num_workers * 20
    assert sent["bytes_up"] <= 64 * num_workers * 20


@pytest.mark.parametrize("kind", ["data", "plain", "broadcast", "broadcast structure", "batch", "output"])
def test_array_bytes_cross_through_segments_only(shared_runtimes: Any, kind: str) -> None:
    """Not one byte of an 8 MB array is pickled or written to a pipe, even the first time."""
    rt = shared_runtimes[2]
    total = rt.function(lambda w, x: x.sum() + w["a"][0].sum(), bcast_inputs="w", outputs="sum")
    same = rt.function(lambda x: x, outputs="gather")
    rt.distribute()
    small = np.ones((4, 4))
    data = rt.data(BIG)
    weights = {"a": [BIG if kind == "broadcast structure" else np.ones(2)]}
    act: dict[str, Callable[[], Any]] = {
        "data": lambda: total(weights, data),
        "plain": lambda: total(weights, BIG),
        "broadcast": lambda: rt.function(lambda w, x: w.sum(), bcast_inputs="w", outputs="sum")(BIG, small),
        "broadcast structure": lambda: total(weights, small),
        "batch": lambda: total(weights, data, batch=np.arange(0, 60_000, 2)),
        "output": lambda: same(data),
    }
    with counted(rt) as sent:
        act[kind]()
    assert sent["bytes_pickled"] < 20_000
    assert sent["bytes_down"] < 20_000
    assert sent["bytes_up"] < 20_000


def test_a_broadcast_object_is_pickled_once_for_all_ranks(shared_runtimes: Any) -> None:
    pickled = {}
    for num_workers in (1, 3):
        rt = shared_runtimes[num_workers]
        f = rt.function(lambda w, x: x.sum(), bcast_inputs="w", outputs="sum")
        f({"a": 1}, np.ones(4))
        with counted(rt) as sent:
            f({"a": "x" * 100_000}, np.ones(4))
        pickled[num_workers] = sent["bytes_pickled"]
        assert sent["messages_down"] == num_workers
    assert pickled[3] < 1.5 * pickled[1]


def test_making_and_resizing_data_sends_nothing(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    total = rt.function(lambda x: x.sum(), outputs="sum")
    data = rt.data(np.ones(10))
    total(data)
    with counted(rt) as sent:
        data.set_value(np.ones(100_000))
        data.set_length(200_000)
        data[3] = 7.0
        data.set_shape((50, 3)) if data.ndim == 2 else data.set_length(50)
        other = rt.data(np.ones((3, 3)))
        other.free_memory()
        del other
        gc.collect()
    assert set(sent.values()) == {0}
    assert total(data) == 56.0


def test_defining_a_function_sends_nothing_until_it_is_needed(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    with counted(rt) as sent:
        functions = [rt.function(lambda x, k=k: x.sum() * k, bcast_inputs="k", outputs="sum") for k in range(5)]
    assert sent["messages_down"] == 0
    with counted(rt) as sent:
        rt.distribute()
    assert sent["messages_down"] == 2, "all new functions go in one message to each rank"
    with counted(rt) as sent:
        rt.distribute()
    assert sent["messages_down"] == 0
    assert [f(np.ones(3)) for f in functions] == [0.0, 3.0, 6.0, 9.0, 12.0]


def test_a_worker_holds_no_copy_of_its_rows(shared_runtimes: Any) -> None:
    """The private memory of the workers does not grow with the input: 64 MB through, nothing here."""
    rt = shared_runtimes[2]
    measure = saboteurs.anonymous_kb
    f = rt.function(lambda x: (x.sum(), measure()), outputs=("sum", None))
    before = max(f(rt.data(np.ones((1000, 16))))[1])
    data = rt.data(shape=(1 << 19, 16), dtype="float64")
    total, after = f(data)
    assert total == 0.0
    assert max(after) < before + 2048
    total, after = f(np.ones((1 << 19, 16)))
    assert total == 1 << 23
    assert max(after) < before + 2048, "nor of a plain array"


def test_a_rank_sees_only_its_own_rows_without_a_copy(shared_runtimes: Any) -> None:
    """Inside the function: a read-only view on the segment, contiguous, of the rows of this rank."""
    rt = shared_runtimes[2]
    data = rt.data(BIG)

    def describe(x: np.ndarray) -> tuple[bool, bool, bool, int]:
        address = x.ctypes.data
        with open("/proc/self/maps", encoding="utf-8") as file:
            for line in file:
                low, high = (int(word, 16) for word in line.split()[0].split("-"))
                if low <= address < high:
                    return "/memfd:synk" in line, " r--p " in line, x.flags.writeable, len(x)
        raise AssertionError("the rows lie nowhere")

    f = rt.function(describe, outputs=None)
    for rows in (data, BIG):
        assert f(rows) == [(True, True, False, len(BIG) // 2)] * 2
    contiguous = f(data, batch=slice(1, 101))
    assert contiguous == [(True, True, False, 50)] * 2, "a contiguous batch is a view as well"


def test_the_master_makes_no_second_copy_of_data(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    data = rt.data(shape=(1 << 19, 16), dtype="float64")
    total = rt.function(lambda x: x.sum(), outputs="sum")
    total(data)
    before, mapped = saboteurs.anonymous_kb(), mapped_memfds()
    for _ in range(5):
        total(data)
        total(data, batch=slice(10, None))
        total(data, batch=np.arange(1000))
    assert saboteurs.anonymous_kb() < before + 2048
    assert len(mapped_memfds() - mapped) <= 1, "at most a staging segment for the indices"


def test_plain_arrays_are_staged_into_the_same_segment_again(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    total = rt.function(lambda x: x.sum(), outputs="sum")
    total(BIG)
    mapped = mapped_memfds()
    with counted(rt) as sent:
        for number in range(10):
            assert total(BIG[: len(BIG) - number]) == pytest.approx(BIG[: len(BIG) - number].sum())
    assert mapped_memfds() == mapped
    assert sent["bytes_pickled"] < 20_000


def test_large_results_lie_on_buffers_that_are_used_again(shared_runtimes: Any) -> None:
    """A loop that drops each result maps nothing new; one that keeps them gets a buffer for each."""
    rt = shared_runtimes[2]
    big = rt.function(lambda k, x: np.full(100_000, k), bcast_inputs="k", outputs="max")
    x = np.ones(4)
    for number in range(4):
        big(float(number), x)
    mapped = mapped_memfds()
    for number in range(20):
        assert big(float(number), x)[0] == number
    assert mapped_memfds() == mapped
    kept = [big(float(number), x) for number in range(5)]
    assert [result[-1] for result in kept] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_unwanted_outputs_are_neither_reduced_nor_sent(shared_runtimes: Any) -> None:
    """Even ones that could be neither: they are not looked at."""
    rt = shared_runtimes[2]

    def mixed(x: np.ndarray) -> tuple[float, Any, np.ndarray]:
        return x.sum(), np.ones(1 + int(x[0])), np.ones(1 << 16)

    f = rt.function(mixed, outputs=("sum", "avg", "sum"))
    x = np.arange(4.0)
    with same_workers(rt):
        with pytest.raises(ValueError):
            f(x)
        assert f(x, output_subset=[0])[0] == 6.0
        mapped = mapped_memfds()
        with counted(rt) as sent:
            f(x, output_subset=[0])
        assert sent["messages_up"] == 2
        assert mapped_memfds() == mapped


def test_ranks_agree_before_any_reduction(shared_runtimes: Any) -> None:
    """All of them are named, after all have finished; no buffer of the failed call is used."""
    rt = shared_runtimes[3]

    def odd(row: np.ndarray) -> tuple[float, np.ndarray]:
        return 1.0, np.ones(100_000 + int(row[0]))

    with same_workers(rt):
        with pytest.raises(ValueError) as caught:
            rt.function(odd, outputs="sum")(np.arange(3))
        for rank in range(3):
            assert f"{100_000 + rank}" in str(caught.value)
    assert_right(rt)


def test_inline_and_one_worker_run_the_same_path(shared_runtimes: Any) -> None:
    """The same results, types, errors, and the same messages."""
    outcomes = []
    for where in ("inline", 1):
        rt = shared_runtimes[where]
        seen: list[Any] = []
        with counted(rt) as sent:
            f = rt.function(
                lambda w, x: {"a": x @ w, "b": (x.sum(), len(x), None)},
                bcast_inputs="w",
                outputs={"a": "gather", "b": ("avg", "sum", "first")},
                name="f",
            )
            for batch in (None, 3, slice(1, 5), [4, 0]):
                for slices in (1, 2):
                    result = f(np.ones(3), np.arange(18.0).reshape(6, 3), batch=batch, num_slices=slices)
                    seen.append((result["a"].tolist(), float(result["b"][0]), int(result["b"][1]), result["b"][2]))
                    seen.append([type(part) for part in (result, result["a"], *result["b"])])
            for arguments in ((np.ones(2), np.ones((6, 3))), (np.ones(3), 3.0), (np.ones(3),)):
                with pytest.raises((ValueError, TypeError)) as caught:
                    f(*arguments)
                seen.append((caught.type, str(caught.value)))
        outcomes.append((seen, sent["messages_down"], sent["messages_up"]))
    assert outcomes[0] == outcomes[1]


def functions_of(act: Callable[[], Any], *, of_settings: bool = False) -> list[tuple[str, str]]:
    """Return the functions of the package, with their files, that a call goes through in this process.

    Those that read the settings of libraries depend on what is imported, and are counted apart. To wait for all ranks
    counts once: how often the master wakes until the last has answered is the machine's affair.
    """
    met: list[tuple[str, str]] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "/synk/_" in frame.f_code.co_filename:
            function = (frame.f_code.co_filename.rpartition("/synk/")[2], frame.f_code.co_name)
            is_setting = function[0] == "_wire/settings.py"
            if is_setting == of_settings and (function[1] not in ("wait", "waiting") or function not in met[-2:]):
                met.append(function)

    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(None)
    return met


class Apart(list[Any]):
    """A list that travels as one object."""


def tracer(rt: Any) -> Any:
    """Return a function that begins, or ends, to note what the ranks go through, with ``step`` for the user's own."""

    def look(is_begin: bool) -> list[tuple[str, str]]:
        import sys

        met: list[tuple[str, str]] = sys.__dict__.setdefault("_met", [])
        if is_begin:
            met.clear()

        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "call" and "/synk/_" in frame.f_code.co_filename:
                met.append((frame.f_code.co_filename.rpartition("/synk/")[2], frame.f_code.co_name))
            elif event == "call" and frame.f_code.co_name == "step":
                met.append(("", "step"))

        sys.setprofile(note if is_begin else None)
        return met

    return rt.function(lambda is_begin: Apart(look(is_begin)), bcast_inputs="is_begin", outputs=None)


def test_a_repeated_call_goes_through_few_functions(shared_runtimes: Any) -> None:
    """Nothing has changed since the last one; what a busy machine adds (a long wait) is in some calls only."""
    rt = shared_runtimes[2]

    def step(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
        residual = x @ w - y
        return residual @ residual / len(x), x.T @ residual / len(x)

    trace = tracer(rt)
    f = rt.function(step, bcast_inputs="w", outputs=("avg", "avg"))
    x, y = rt.data(np.ones((8, 5))), rt.data(np.ones(8))
    for number in range(5):
        f(np.full(5, float(number)), x, y)
    master = min((functions_of(lambda k=k: f(np.full(5, float(k)), x, y)) for k in range(12)), key=len)
    reads = functions_of(lambda: f(np.ones(5), x, y), of_settings=True)
    assert [name for _, name in reads].count("read") == 1
    assert len(reads) <= 17, reads
    assert len(master) <= 28, master
    assert len({file for file, _ in master}) <= 14, master
    assert len(set(master)) >= len(master) - 1, "a stage is entered twice; two ranks are rung"
    if sys.version_info < (3, 11):
        pytest.skip("the profiler of Python 3.10 holds on to the arguments, so the worker's calls are ordinary ones")
    trace(True)
    for number in range(12):
        f(np.full(5, float(number)), x, y)
    for met in trace(False):
        starts = [k for k, (_, name) in enumerate(met) if name == "step"]
        calls = [met[start + 1 : end] for start, end in itertools.pairwise(starts)]
        worker = min(calls, key=len)
        assert len(worker) <= 15, worker
        assert len({file for file, _ in worker}) <= 10, worker
        assert len(set(worker)) == len(worker), "a stage is entered twice"


def test_a_rank_knows_a_call_from_its_second_time_on(shared_runtimes: Any) -> None:
    """It takes the same way, whether the master has compiled the call or not: the first call of a plan is compiled."""
    rt = shared_runtimes[2]
    x = rt.data(np.ones((8, 5)))
    trace = tracer(rt)

    def make(number: int) -> Any:
        def step(x: np.ndarray) -> tuple[Any, Any]:
            return x.sum() + number, x.sum(axis=0)

        return rt.function(step, outputs=("sum", "sum"))

    functions = [make(number) for number in range(6)]
    trace(True)
    for f in functions:
        assert [f(x)[0] for _ in range(2)] == [f(x)[0]] * 2
    for met in trace(False):
        starts = [k for k, (_, name) in enumerate(met) if name == "wait"]
        messages = [met[start:end] for start, end in itertools.pairwise(starts)]
        calls = [met for met in messages if ("", "step") in met]
        assert len(calls) == 18
        second = min(calls[1::3], key=len)
        assert len(second) <= 28, second
        assert len({file for file, _ in second if file.startswith("_worker")}) <= 9, second
        assert set(second) == set(min(calls[2::3], key=len))


@pytest.mark.parametrize("batches", [[6], [6, 5, slice(1, 7), slice(6, None, -1)]])
def test_a_call_with_keywords_a_variable_and_a_batch_goes_through_few_functions(
    shared_runtimes: Any, batches: list[Any]
) -> None:
    """The variable is read and assigned, and what the user's code calls of it counts; no stage is entered twice."""
    rt = shared_runtimes[2]
    w = rt.shared(np.ones(5))
    rows, targets = rt.data(np.ones((8, 5))), rt.data(np.ones(8))

    def step(x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
        residual = x @ w.value - y
        w.value = w.value * 0.5
        return residual @ residual / len(x), x.T @ residual / len(x)

    trace = tracer(rt)
    f = rt.function(step, outputs=("avg", "avg"))
    following = itertools.cycle(batches)

    def call() -> None:
        f(rows, y=targets, batch=next(following))

    for _ in range(8):
        call()
    is_same = len(batches) == 1
    master = min((functions_of(call) for _ in range(16)), key=len)
    assert len(master) <= (33 if is_same else 55), master
    assert len({file for file, _ in master}) <= (16 if is_same else 19), master
    master = [step for step in master if step[0] != "_wire/channel.py"]
    stages = (
        "call_again",
        "fits",
        "values",
        "send",
        "stage",
        "ring",
        "complete",
        "hear",
        "conclude",
        "build",
        "commit",
    )
    assert [sum(name == stage for _, name in master) for stage in stages] == [1] * len(stages)
    trace(True)
    for _ in range(16):
        call()
    for met in trace(False):
        starts = [k for k, (_, name) in enumerate(met) if name == "step"]
        worker = min((met[start + 1 : end] for start, end in itertools.pairwise(starts)), key=len)
        assert len(worker) <= (37 if is_same else 45), worker
        assert len({file for file, _ in worker}) <= 13, worker
        stages = ("handle", "resolve", "run_call", "run", "arguments", "repeat", "fill", "leave_call", "are_touched")
        assert [sum(name == stage for _, name in worker) for stage in stages] == [1] * len(stages)


def test_a_call_with_tensors_and_a_number_goes_through_few_functions(shared_runtimes: Any) -> None:
    """What brings a step of training to the workers, without what it does there."""
    torch = pytest.importorskip("torch")
    rt = shared_runtimes[2]

    def step(lr: float, x: Any, y: Any) -> Any:
        return (x * lr * y).sum()

    trace = tracer(rt)
    f = rt.function(step, bcast_inputs="lr", framework="torch", outputs="avg")
    x, y = torch.ones(8, 5), torch.ones(8, 5)
    following = itertools.count(1)

    def call() -> None:
        number = next(following)
        assert float(f(float(number), x, y)) == 20 * number

    for _ in range(5):
        call()
    master = min((functions_of(call) for _ in range(12)), key=len)
    assert len(master) <= 44, master
    assert len({file for file, _ in master}) <= 18, master
    trace(True)
    for _ in range(12):
        call()
    for met in trace(False):
        starts = [k for k, (_, name) in enumerate(met) if name == "step"]
        worker = min((met[start + 1 : end] for start, end in itertools.pairwise(starts)), key=len)
        assert len(worker) <= 32, worker
        stages = ("handle", "run_call", "run", "load_objects", "arguments", "repeat", "fill", "are_touched")
        assert [sum(name == stage for _, name in worker) for stage in stages] == [1] * len(stages)


def test_a_replicated_step_goes_through_few_functions(shared_runtimes: Any) -> None:
    """In the master: a look at its own objects, and a quiet call."""
    torch = pytest.importorskip("torch")
    rt = shared_runtimes[2]
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rep = synk.torch.replicate(model, optimizer, runtime=rt)

    @rep.function
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(8, 3)
    for _ in range(5):
        step(x)
    waited = min((functions_of(lambda: step(x)) for _ in range(12)), key=len)
    submitted = min((functions_of(lambda: step.submit(x).result()) for _ in range(12)), key=len)
    for master, most in ((waited, 42), (submitted, 69)):
        assert not {"launch", "bind", "collecting"} & {name for _, name in master}
        assert len(master) <= most, master
    pending = [step.submit(x) for _ in range(12)]  # each begins when the one before has ended
    met = functions_of(lambda: pending.append(step.submit(x)))
    assert not {"launch", "bind", "collecting"} & {name for _, name in met}
    before = float(pending[0].result())
    assert all(float(each.result()) < before for each in pending[1:])
    assert rep.num_steps == 42


def test_a_call_with_slices_enters_each_stage_once(shared_runtimes: Any) -> None:
    """It is new each time. This way has to be plain, not short."""
    rt = shared_runtimes[2]
    w = rt.shared(np.ones(5))
    rows, targets = rt.data(np.ones((8, 5))), rt.data(np.ones(8))

    def step(x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
        residual = x @ w.value - y
        return residual @ residual / len(x), x.T @ residual / len(x)

    trace = tracer(rt)
    f = rt.function(step, outputs=("avg", "avg"))
    for _ in range(4):
        f(rows, y=targets, batch=6, num_slices=2)
    master = min((functions_of(lambda: f(rows, y=targets, batch=6, num_slices=2)) for _ in range(8)), key=len)
    stages = ("run_call", "launch", "_divide", "plan_call", "_send_new", "stage", "write_bounds", "complete", "build")
    assert [sum(name == stage for _, name in master) for stage in stages] == [1] * len(stages)
    trace(True)
    for _ in range(8):
        f(rows, y=targets, batch=6, num_slices=2)
    for met in trace(False):
        calls = [k for k, (_, name) in enumerate(met) if name == "handle"]
        worker = min((met[start:end] for start, end in itertools.pairwise(calls)), key=len)
        stages = ("handle", "guarded", "run_call", "run", "run_slices", "publish", "leave_call", "ring", "tidy")
        assert [sum(name == stage for _, name in worker) for stage in stages] == [1] * len(stages)


def num_arrived(fd: int) -> int:
    """Return how many bytes can be read from a pipe."""
    waiting = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, waiting)
    return waiting[0]


def test_a_submitted_call_goes_through_few_functions(shared_runtimes: Any) -> None:
    """From ``submit`` to the result, with two others in flight.

    All replies are there when the result is asked for. While the master waits for one rank, the other may answer the
    next call as well, and to take that costs three functions more: in every call, where one rank is always ahead.
    """
    rt = shared_runtimes[2]
    f = rt.function(lambda w, x: (x @ w).sum(), bcast_inputs="w", outputs="sum")
    x = rt.data(np.ones((8, 5)))
    met = []
    pending: list[Any] = []

    def have_replied() -> bool:
        # To start a call takes in the replies that are there; a call of which they were the last has no request left.
        requests = [each._request for each in pending if each._request is not None]
        owed = {worker.rank: sum(worker.rank in request.pending for request in requests) for worker in workers}
        return all(num_arrived(worker.process.channel.read_fd) == 8 * owed[worker.rank] for worker in workers)

    workers = rt._session.workers.by_rank
    for number in range(30):
        functions = functions_of(lambda n=number: pending.append(f.submit(np.full(5, float(n)), x)))
        if len(pending) == 3:
            assert wait_for(have_replied)
            oldest = pending.pop(0)
            functions += functions_of(oldest.result)
            assert oldest.result() == 40.0 * (number - 2)
        met.append(functions)
    fewest = min(met[15:], key=len)
    assert len(fewest) <= 48, fewest
    assert len({file for file, _ in fewest}) <= 20, fewest
    assert not {"launch", "bind", "collecting"} & {name for _, name in fewest}
    for each in pending:
        each.result()


def test_an_idle_worker_sleeps(shared_runtimes: Any) -> None:
    """Between calls a worker waits in the kernel: it is asleep, in poll or read, not spinning."""
    from support.harness import pids

    rt = shared_runtimes[2]
    for pid in pids(rt):
        stat = Path(f"/proc/{pid}/stat")
        assert wait_for(lambda stat=stat: stat.read_text().rpartition(")")[2].split()[0] == "S")


# ----- the path as the design page shows it


def shown_paths() -> list[list[tuple[str, str]]]:
    """Return the (file, function) of each line of the two paths of a call on the design page."""
    page = (PACKAGE_FOLDER / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.partition("## The path of one call")[2].partition("Five invariants")[0]
    blocks = section.split("```")[1::2]
    return [re.findall(r"(_\w+/[\w/]+\.py) +([\w.]+)", block) for block in blocks]


def test_the_design_page_shows_functions_that_exist() -> None:
    paths = shown_paths()
    assert [len(path) for path in paths] == [18, 19]
    for file, name in itertools.chain(*paths):
        tree: ast.AST = ast.parse((PACKAGE_FOLDER / "synk" / file).read_text(encoding="utf-8"))
        for part in name.split("."):
            found = [
                node for node in ast.iter_child_nodes(tree)
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == part
            ]  # fmt: skip
            assert found, f"{file}: {name}"
            tree = found[-1]


@pytest.mark.parametrize("is_quiet", [True, False])
def test_a_call_takes_the_path_that_the_design_page_shows(shared_runtimes: Any, is_quiet: bool) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.sum(), outputs="sum")
    x = np.arange(6.0)
    for _ in range(3 if is_quiet else 0):
        f(x)
    # A quiet one among several: what was dropped in earlier tests may be collected just now.
    called = min((functions_of(lambda: f(x)) for _ in range(8 if is_quiet else 1)), key=len)
    shown = [(file, name.rpartition(".")[2]) for file, name in shown_paths()[0 if is_quiet else 1]]
    shown = [step for step in shown if not step[0].startswith("_worker")]
    steps = iter(called)
    assert [step for step in shown if step not in steps] == [], "these did not come, or not in this order"


# ----- what is imported


def test_import_loads_no_array_library_but_numpy() -> None:
    code = """
import sys, numpy
before = set(sys.modules)
import synk
new = {name.partition(".")[0] for name in set(sys.modules) - before}
heavy = {"cupy", "torch", "jax", "mpi4py", "pynccl", "scipy", "pandas", "numba", "multiprocessing", "asyncio", "ctypes"}
print(sorted(new & heavy))
"""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_FOLDER)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_worker_imports_nothing_of_the_master_s_half() -> None:
    """It would double what a worker imports, and an import is held together against interrupts."""

    def communicate(x: np.ndarray) -> str:
        assert issubclass(synk.errors.CallTimeout, Exception) and synk.__version__
        synk.comm.all_reduce(x, "sum")
        synk.comm.barrier()
        return " ".join(name for name in sys.modules if name.startswith(("synk._master", "synk._api")))

    def look_up(x: np.ndarray) -> tuple[str, str, str, str]:
        before, names = set(synk.__all__) - set(vars(synk)), dir(synk)
        assert not hasattr(synk, "frok")
        everything: dict[str, Any] = {}
        exec("from synk import *", everything)
        try:
            everything["fork"]()
        except synk.errors.ReentrancyError as error:
            return " ".join(before), " ".join(names), " ".join(everything), str(error)
        raise AssertionError("a worker has forked")

    def differentiate(x: np.ndarray) -> str:
        import torch

        value = torch.ones(2, requires_grad=True)
        synk.torch.all_reduce(value, "sum").sum().backward()
        assert "DataParallel" in dir(synk.torch) and not hasattr(synk.torch, "frok")
        return communicate(x)

    with synk.fork(2, backend="numpy") as rt:
        imported = rt.function(communicate, outputs=None)(np.ones(2))
        with_torch = rt.function(differentiate, outputs=None)(np.ones(2))
        before, names, found, refusal = rt.function(look_up, outputs="first")(np.ones(2))
    assert imported == with_torch == ["", ""]
    assert {"Data", "fork", "function"} <= set(before.split()) and "comm" not in before
    assert set(synk.__all__) <= set(names.split())
    assert set(synk.__all__) <= set(found.split())
    assert "cannot fork inside worker rank 0" in refusal
