"""Large outputs: each worker brings its part into place, asked by the master or, in a repeated call, after a meeting.

How long a rank waits awake for the others is ``SYNK_SPIN_US``: with minutes they always meet, with none a rank that
comes too early is asked by the master, and the result is the same.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import harness, saboteurs

import synk
from synk.errors import CollectiveMismatch

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


def check_several(got: Any, k: float, x: np.ndarray, num_workers: int) -> None:
    parts = np.array_split(x, num_workers)
    sums, weights = [k + part.sum() for part in parts], [len(part) for part in parts]
    average, double, total, rows, nested, first = got
    np.testing.assert_array_equal(average, np.full(SIZE, np.average(sums, weights=weights)))
    np.testing.assert_array_equal(double, np.full((1, SIZE), 2 * sum(sums)))
    np.testing.assert_array_equal(rows, np.repeat(x, SIZE))
    assert [(each["one"][0], each["two"]) for each in nested] == list(zip(sums, weights))
    assert (total, first[-1]) == (x.sum(), sums[0])


def messages_of(rt: Any, call: Callable[[], Any]) -> int:
    before = rt.counters["messages_down"]
    call()
    return int(rt.counters["messages_down"] - before)


def test_a_repeated_call_is_one_message_where_the_ranks_meet(subtests: Any, reused: Fork, patience: str) -> None:
    """Of two functions in turn, as in a loop of training, with others between; results that are kept stay theirs."""
    x, most = np.arange(7.0), 1 if patience == FOREVER else 2
    for num_workers in (1, 3):
        rt = reused(num_workers)
        f = rt.function(several, bcast_inputs="k", outputs=OPS)
        g = rt.function(lambda k, x: (np.full(2 * SIZE, k), x.min()), bcast_inputs="k", outputs="max")
        small = rt.function(lambda k, x: x.sum(), bcast_inputs="k", outputs="sum")
        kept: list[Any] = []
        for k, (name, each) in itertools.product(range(4), {"f": f, "small": small, "g": g}.items()):
            with subtests.test(num_workers=num_workers, k=k, function=name):
                sent = messages_of(rt, lambda k=k, each=each, kept=kept: kept.append(each(float(k), x)))
                assert k < 2 or num_workers <= sent <= most * num_workers
        for k in range(4):
            check_several(kept[3 * k], k, x, num_workers)
            np.testing.assert_array_equal(kept[3 * k + 2][0], np.full(2 * SIZE, float(k)))


# ----- any sequence

FUZZ_OPS = ("sum", "gather", None, "first", "max", "avg")
SIZES = (7, SIZE, SIZE, SIZE + 13)


def fuzzed(sizes: np.ndarray, plan: dict[str, Any], x: np.ndarray) -> tuple[Any, ...]:
    rank = synk.comm.rank
    if plan["failing"] == rank:
        raise RuntimeError("as told")
    if plan["late"] == rank:
        time.sleep(0.001)
    outputs: list[Any] = [np.full(size, value_of(leaf, rank, plan)) for leaf, size in enumerate(sizes[:, rank])]
    if plan["has_text"]:
        outputs[2] = f"text of {rank}"
    return tuple(outputs)


def value_of(leaf: int, rank: int, plan: dict[str, Any]) -> float:
    return 10.0 * leaf + rank + plan["k"]


class Fuzz:
    """Calls of all kinds of two functions of one runtime, whose results are compared with NumPy."""

    def __init__(self, rt: Any, rng: random.Random) -> None:
        self.rng, self.size = rng, rt.world_size
        self.num_rows = rng.choice([1, self.size, 5, 9])
        self.held: list[tuple[list[Any], list[Any]]] = []
        self.functions = [rt.function(fuzzed, bcast_inputs=("sizes", "plan"), outputs=FUZZ_OPS) for _ in range(2)]

    def new_sizes(self) -> np.ndarray:
        """Return the length of each output on each rank; those that are reduced are of one length."""
        sizes = np.array([[self.rng.choice(SIZES) for _ in range(self.size)] for _ in FUZZ_OPS])
        sizes[1] = [self.rng.choice([0, 9, 30, *SIZES]) for _ in range(self.size)]
        for leaf in (0, 4, 5):
            sizes[leaf] = sizes[leaf, 0]
        return sizes

    def run(self, num_calls: int) -> None:
        sizes = self.new_sizes()
        for _ in range(num_calls):
            if self.rng.random() < 0.3:
                sizes = self.new_sizes()
            if self.rng.random() < 0.05:
                with harness.Child(self.write_into_held):
                    self.call(sizes)
            self.call(sizes)
            if self.rng.random() < 0.1:
                self.write_into_held()

    def check_held(self) -> None:
        for arrays, copies in self.held:
            np.testing.assert_equal(arrays, copies)

    def write_into_held(self) -> None:
        """In this process, or in a child: the other must not see it."""
        self.check_held()
        for pair in self.held:
            for array in (array for arrays in pair for array in arrays if array.size):
                array[...] = -array[-1]
        self.check_held()

    def call(self, sizes: np.ndarray) -> None:
        pick = self.rng.choice
        mode = pick(["plain"] * 6 + ["serial", "batch", "subset"])
        plan = {
            "k": float(self.rng.randrange(100)),
            "failing": pick([None] * 8 + [self.rng.randrange(self.size)]),
            "late": pick([None, None, self.rng.randrange(self.size)]),
            "has_text": pick([False, False, False, True]),
        }
        num_rows = self.rng.randint(1, self.num_rows) if mode == "batch" else self.num_rows
        rows = [len(part) for part in np.array_split(np.arange(num_rows), 1 if mode == "serial" else self.size)]
        voters = [rank for rank, count in enumerate(rows) if count]
        wanted = sorted(self.rng.sample(range(6), 3)) if mode == "subset" else list(range(6))
        options: dict[str, Any] = {"batch": {"batch": num_rows}, "subset": {"output_subset": wanted}}.get(mode, {})
        function = pick(self.functions)
        call = function.serial if mode == "serial" else function
        x = np.arange(float(self.num_rows))
        if plan["failing"] in voters:
            with pytest.raises(RuntimeError, match="as told"):
                call(sizes, plan, x, **options)
            return
        got = call(sizes, plan, x, **options)
        for result, leaf in zip(got, wanted, strict=True):
            np.testing.assert_equal(result, self.expected(leaf, sizes, plan, voters, rows))
        self.check_held()
        if self.rng.random() < 0.2:
            arrays = [item for item in got if isinstance(item, np.ndarray)]
            self.held = [*self.held[-2:], (arrays, [array.copy() for array in arrays])]

    def expected(self, leaf: int, sizes: np.ndarray, plan: dict[str, Any], voters: list[int], rows: list[int]) -> Any:
        each = {rank: np.full(sizes[leaf, rank], value_of(leaf, rank, plan)) for rank in voters}
        texts = {rank: f"text of {rank}" for rank in voters} if plan["has_text"] else each
        parts = list(each.values())
        return {
            "sum": lambda: sum(parts[1:], parts[0]),
            "gather": lambda: np.concatenate(parts),
            None: lambda: [texts.get(rank) for rank in range(self.size)],
            "first": lambda: parts[0],
            "max": lambda: parts[-1],
            "avg": lambda: sum(part * rows[rank] for rank, part in each.items()) / sum(rows),
        }[FUZZ_OPS[leaf]]()


@pytest.mark.parametrize("num_seeds", [1, pytest.param(100, marks=pytest.mark.storm)])
@pytest.mark.parametrize("spin_us", ["0", "20", FOREVER])
def test_any_sequence_of_calls_equals_numpy(
    reused: Fork, monkeypatch: pytest.MonkeyPatch, spin_us: str, num_seeds: int
) -> None:
    """Sizes that differ between ranks and change, failures, delays, serial and partial calls, results that are kept,
    dropped, written into and forked."""
    monkeypatch.setenv("SYNK_SPIN_US", spin_us)
    runtimes = {size: reused(size) for size in (1, 2, 3)}
    for seed in range(num_seeds):
        rng = random.Random(f"{spin_us} {seed}")
        Fuzz(runtimes[rng.choice([1, 2, 3])], rng).run(40)


# ----- buffers


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
    mapped = harness.mapped_memfds()
    for _ in range(3):
        f(0, x)
    assert harness.mapped_memfds() <= mapped
    assert len(kept) == 3


def test_workers_keep_no_outputs_of_a_call_that_failed(reused: Fork) -> None:
    rt = reused(2)
    f = rt.function(lambda x: np.full((1 << 22) + int(x[0]), 1.0), outputs="sum")  # 32 MB, and one element more
    memory = rt.function(saboteurs.anonymous_kb, outputs=None)
    x = np.arange(2.0)
    for _ in range(2):
        before = memory()
        with pytest.raises(CollectiveMismatch):
            f(x)
    assert max(np.subtract(memory(), before)) < 1 << 14


# ----- workers and variables


def test_new_workers_are_told_their_parts(subtests: Any, reused: Fork) -> None:
    """A rank keeps its part of the outputs with the plan, and a new process has neither."""
    rt, x = reused(2), np.arange(7.0)
    f = rt.function(several, bcast_inputs="k", outputs=OPS)
    for is_submitted, victim in ((False, 0), (True, 1), (False, None)):
        with subtests.test(is_submitted=is_submitted, victim=victim):
            call = (lambda *args: f.submit(*args).result()) if is_submitted else f
            for k in range(3):
                check_several(call(float(k), x), k, x, 2)
            warned: Any = contextlib.nullcontext()
            if victim is None:
                rt.restart()
            else:
                harness.kill_and_wait(harness.pids(rt)[victim])
                warned = pytest.warns(RuntimeWarning, match="was started again")
            with warned:
                check_several(call(3.0, x), 3.0, x, 2)
            check_several(call(4.0, x), 4.0, x, 2)


def test_large_outputs_and_assigned_variables_in_one_call(reused: Fork) -> None:
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
