"""Large outputs, which the workers combine: each brings its part into place. Calls without a scattered argument.

Rows are those of sharded variables that the function closes over, or there are none, and then an op that would count
the workers is refused.
"""

from __future__ import annotations

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
def test_any_sequence_of_calls_equals_numpy(reused: Fork, num_seeds: int) -> None:
    """Sizes that differ between ranks and change, failures, delays, serial and partial calls, results that are kept,
    dropped, written into and forked."""
    runtimes = {size: reused(size) for size in (2, 3)}
    for seed, (size, rt) in itertools.product(range(num_seeds), runtimes.items()):
        Fuzz(rt, random.Random(f"{size} {seed}")).run(40)


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


def test_workers_keep_no_outputs_of_a_call_that_failed(rt: Any) -> None:
    f = rt.function(lambda x: np.full((1 << 22) + int(x[0]), 1.0), outputs="sum")  # 32 MB, and one element more
    memory = rt.function(saboteurs.anonymous_kb, outputs=None)
    x = np.arange(2.0)
    for _ in range(2):
        before = memory()
        with pytest.raises(CollectiveMismatch):
            f(x)
    assert max(np.subtract(memory(), before)) < 1 << 14


WHERE = (2, 3, 0)
Y = np.arange(6.0)


def add(a: Any, b: Any) -> Any:
    return a + b


# ----- no rows at all


@pytest.mark.parametrize("rt", WHERE, indirect=True)
def test_without_rows_ops_that_would_count_the_workers_are_refused(subtests: Any, rt: Any) -> None:
    """Unless each rank is to contribute its own."""
    for op in ("sum", "prod", "gather", add):
        with subtests.test(op=op):
            f = rt.function(
                lambda y: {"total": y.sum(), "rows": (y, y)}, bcast_inputs="y", outputs={"total": op, "rows": "max"}
            )
            for call in (f, f.serial, f.submit, f.verify):
                with pytest.raises(
                    ValueError, match=r"cannot call '<lambda>': got op .* no rows.*'first'.*per_rank=True"
                ):
                    call(Y)
    for op in ("avg", "min", "max", "first"):
        with subtests.test(op=op):
            f = rt.function(lambda y: y.sum(), bcast_inputs="y", outputs=op)
            assert f(Y) == f.serial(Y) == f.submit(Y).result() == Y.sum()
    ops, num = ("sum", "gather", add, None), rt.world_size
    f = rt.function(lambda: (1, np.array([synk.comm.rank]), 1, synk.comm.rank), outputs=ops, per_rank=True)
    for count, ranks, folded, each in (f(), f(), f.submit().result()):
        assert (count, ranks.tolist(), folded, each) == (num, list(range(num)), num, list(range(num)))


# ----- rows of variables that the function closes over


@pytest.mark.parametrize("rt", WHERE, indirect=True)
def test_closed_over_shards_are_rows_to_divide(subtests: Any, rt: Any) -> None:
    s = rt.shared(np.zeros((1, 3)), sharded=True)

    def moments(w: np.ndarray) -> Any:
        x = s.value * w
        return x.mean(axis=0), x.sum(axis=0), x.min(axis=0), x, synk.comm.rows, synk.comm.all_reduce(x.mean(axis=0))

    f = rt.function(moments, bcast_inputs="w", outputs=("avg", "sum", "min", "gather", "sum", "first"))
    for rows in (1, 2, 5, 6, 7):
        s.value = value = np.random.default_rng(rows).normal(size=(rows, 3))
        x = value * 2
        expected = x.mean(axis=0), x.sum(axis=0), x.min(axis=0), x, rows, x.mean(axis=0)
        for number, got in enumerate((f(2.0), f(2.0), f.serial(2.0), f.submit(2.0).result())):
            with subtests.test(rows=rows, way=number):
                for a, b in zip(got, expected, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-12)
        assert [output.verdict for output in f.verify(2.0).outputs] == ["equal"] * 6


def test_the_weights_follow_the_lengths_from_call_to_call(rt: Any) -> None:
    s = rt.shared(np.arange(4.0), sharded=True)
    mean = rt.function(lambda: s.value.mean())
    halve = rt.function(lambda x: setattr(s, "value", x[: 1 + synk.comm.rank]))
    for rows in (4, 5, 5, 1, 7):
        s.value = np.arange(float(rows))
        assert mean() == mean() == np.arange(float(rows)).mean()
    halved, averaged = halve.submit(Y), mean.submit()  # the lengths change on the workers: 0; 3 and 4
    assert averaged.result() == mean() == pytest.approx((0 + 3 + 4) / 3, rel=1e-15)
    halved.result()


def test_serial_calls_have_whole_variables_and_cannot_assign_shards(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    value = {"x": np.arange(14.0).reshape(7, 2), "y": (np.arange(7.0),)}
    nested, s = rt.shared(value, sharded=True), rt.shared(np.arange(5.0), sharded=True, name="s")
    f = rt.function(lambda: nested.value["x"].T @ nested.value["y"][0], outputs="sum")
    for call in (f, f.serial, f):  # afterwards each rank sees its own shard again
        np.testing.assert_array_equal(call(), value["x"].T @ value["y"][0])

    def double() -> float:
        s.value = 2 * s.value
        return float(s.value.mean())

    g = rt.function(double)
    with pytest.raises(ValueError, match="cannot assign variable 's' in a serial call of 'double': it is sharded"):
        g.serial()
    assert g() == 4.0


@pytest.mark.parametrize("rt", [2, "1+1"], indirect=True)
def test_variables_that_are_divided_unlike_give_no_average(rt: Any) -> None:
    s, t = rt.shared(np.arange(5.0), sharded=True, name="s"), rt.shared(np.arange(7.0), sharded=True, name="t")
    double = rt.shared(np.arange(10.0), sharded=True, name="double")
    double[0] = np.arange(6.0)
    double[1] = np.arange(6.0, 10.0)
    f = rt.function(lambda: s.value.mean() + t.value.mean())
    with pytest.raises(ValueError, match=r"cannot average.*'s' with \[3, 2\] rows.*'t' with \[4, 3\].*as an argument"):
        f()
    assert f.serial() == 2.0 + 3.0
    assert rt.function(lambda: s.value.sum() + t.value.sum(), outputs="sum")() == 10 + 21
    # 3 : 2 as well as 6 : 4
    assert rt.function(lambda: s.value.mean() + double.value.mean())() == pytest.approx(2.0 + 4.5, rel=1e-15)
    # An argument decides, and so does returning nothing.
    assert rt.function(lambda x: x.mean() + 0 * t.value[0])(s) == 2.0
    assert rt.function(lambda: setattr(t, "value", 2 * s.value))() is None
    np.testing.assert_array_equal(t.value, 2 * np.arange(5.0))


def test_variables_without_rows_and_such_that_come_later(rt: Any) -> None:
    """Functions that are sent together are not mixed up; a global that becomes a variable later counts."""
    s = rt.shared(np.empty(0), sharded=True, name="s")

    def fill() -> None:
        s.value = np.full(2, float(synk.comm.rank))

    with pytest.raises(ValueError, match=r"with no rows.*per_rank=True if it fills sharded variables"):
        rt.function(fill)()
    rt.function(fill, per_rank=True)()
    np.testing.assert_array_equal(s.value, [0, 0, 1, 1])
    mean = rt.function(lambda: s.value.mean())
    total = rt.function(lambda y: y.sum(), bcast_inputs="y", outputs="sum")
    rt.distribute()
    assert mean() == 0.5
    with pytest.raises(ValueError, match="no rows to divide"):
        total(Y)
    scope: dict[str, Any] = {}
    exec("def total(): return later.value.sum()", scope)
    f = rt.function(scope["total"], outputs="sum")
    scope["later"] = rt.shared(np.arange(5.0), sharded=True)
    assert f() == 10.0
