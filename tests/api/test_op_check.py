"""The default op: what a function without ``outputs`` returns is that of the plain function, or an error says so.

The oracle is the plain function on all rows, and NumPy for what parts of the rows combine to.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.tables import named

import synk
from synk.errors import CollectiveMismatch, OpMismatch

Fn = Callable[[Any], Any]

REFUSALS = (OpMismatch, CollectiveMismatch, TypeError, ValueError)
"""How a call says that its op does not fit."""


def same(one: Any, other: Any) -> bool:
    """Whether a result equals that of the plain function, structure included."""
    if isinstance(other, dict):
        return isinstance(one, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in other)
    if isinstance(other, (list, tuple)):
        return isinstance(one, (list, tuple)) and len(one) == len(other) and all(map(same, one, other))
    return np.shape(one) == np.shape(other) and np.allclose(one, other, rtol=1e-6, atol=1e-12, equal_nan=True)


# ----- first toys

TOYS: dict[str, Fn] = {
    "sum": lambda x: x.sum(),
    "max": lambda x: x.max(),
    "mean": lambda x: x.mean(),
    "norm": lambda x: np.linalg.norm(x),
    "std": lambda x: x.std(),
    "cumsum": lambda x: np.cumsum(x),
    "median": lambda x: np.median(x),
    "list": lambda x: [float(v) for v in x],
    "dict": lambda x: {i: float(v) for i, v in enumerate(x)},
    "two": lambda x: (x.mean(), x.sum()),
    "twice": lambda x: x * 2,
    "len": lambda x: len(x),
}

ROWS: dict[str, Callable[[int], np.ndarray]] = {
    "any": lambda n: np.random.default_rng(n).normal(size=n),
    "sorted": lambda n: np.arange(float(n)),
    "grouped": lambda n: np.where(np.arange(n) < n // 2, 2.0, 9.0),
}


@pytest.mark.parametrize("count", [36, pytest.param(108, marks=pytest.mark.storm)])
def test_each_call_is_right_or_told(shared_runtimes: Any, subtests: pytest.Subtests, count: int) -> None:
    """What few rows cannot show, more rows do: calls of one function with any number of rows, and then with many."""
    draw = random.Random(7)
    combinations = [(toy, kind, num_workers) for toy in TOYS for kind in ROWS for num_workers in (1, 2, 3)]
    for toy, kind, num_workers in draw.sample(combinations, count):
        numbers = [*draw.choices(range(1, 14), k=4), 80]
        with subtests.test(toy=toy, kind=kind, num_workers=num_workers, rows=numbers):
            fn, is_told = TOYS[toy], False
            f = shared_runtimes[num_workers].function(fn)
            for x in map(ROWS[kind], numbers):
                try:
                    value = f(x)
                except REFUSALS:
                    is_told = True
                else:
                    assert same(value, fn(x)), len(x)
            assert not is_told or (toy != "mean" and (num_workers > 1 or toy == "len"))
            assert is_told or toy == "mean" or kind == "grouped" or num_workers == 1


def test_evenly_spaced_rows_do_not_hide_a_median(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    """The average of the medians of their parts is their median, by chance; that of other rows would be wrong."""
    for number, count in enumerate((4, 5, 6, 7, 10, 16, 33, 61)):
        with subtests.test(rows=count), pytest.raises(OpMismatch, match=rf"on \d+ of the {count} rows"):
            shared_runtimes[2 + number % 2].function(lambda x: np.median(x))(np.arange(float(count)))


# ----- what is right

W = np.array([0.5, -1.0, 2.0])


def gradient(x: Any) -> Any:
    return x.T @ (x @ W - 1) / len(x)


class Model:
    """Learns from the rows of each call, and caches by their number."""

    def __init__(self) -> None:
        self.mean, self.rows, self.rng = 0.0, 0, np.random.default_rng(3)
        self.cache: dict[int, float] = {}

    def counting(self, x: Any) -> Any:
        self.rows += 1
        return x.mean()

    def caching(self, x: Any) -> Any:
        return self.cache.setdefault(len(x), 1.0) * x.mean()

    def learning(self, x: Any) -> Any:
        self.mean = (self.rows * self.mean + x.sum()) / (self.rows + x.size)
        self.rows += x.size
        return ((x - self.mean) ** 2).mean()

    def drawing(self, x: Any) -> Any:
        return (x + self.rng.normal(size=x.shape)).mean()


RIGHT: dict[str, Fn] = {
    "squares": lambda x: ((x[:, 0] - x[:, 1]) ** 2).mean(),
    "huber": lambda x: np.where(np.abs(x) < 1, x**2 / 2, np.abs(x) - 0.5).mean(),
    "logistic": lambda x: np.log1p(np.exp(-x[:, 0] * x[:, 1])).mean(),
    "zero-one": lambda x: ((x[:, 0] > 0) != (x[:, 1] > 0)).mean(),
    "penalty": lambda x: (x**2).mean() + 0.1 * 3.0,
    "float": lambda x: float((x**2).mean()),
    "single": lambda x: float((x.astype("f4") ** 2).mean()),
    "mean in a dict": lambda x: {"a": x.mean(), "b": [x.mean(axis=0), None]},
    "gradient, float32": lambda x: gradient(x.astype("f4")),
    "loss and gradient": lambda x: (((x @ W) ** 2).mean(), gradient(x)),
    "covariance": lambda x: (x - W).T @ (x - W) / len(x),
    "histogram, share": lambda x: np.histogram(x, 4, (-3, 3))[0] / x.size,
    "share above": lambda x: (x > 0).mean(axis=0),
    "complex": lambda x: np.exp(1j * x).mean(),
    "float32 sum by rows": lambda x: x.astype("f4").sum() / len(x),
    "float16": lambda x: x.astype("f2").mean(axis=0),
    "mean that cancels": lambda x: (x - x.mean(axis=0)).mean(),
    "mean of large numbers": lambda x: (x * 1e9 + 1e12).mean(),
    "mean around zero": lambda x: (np.sign(x) * 1e8 + x * 1e-3).mean(),
    "comm.rng": lambda x: (x + synk.comm.rng.normal(size=x.shape)).mean(),
    "np.random": lambda x: np.random.normal(size=1000).mean(),
    "random": lambda x: sum(random.random() for _ in x) / len(x),
    "default_rng()": lambda x: np.random.default_rng().normal(size=x.shape).mean(),
    "clock": lambda x: x.mean() + time.perf_counter_ns() % 997,
    "process": lambda x: x.mean() + os.getpid() % 1001,
    "comm.rank": lambda x: x.mean() * (1 + synk.comm.rank),
    "all_reduce": lambda x: synk.comm.all_reduce(x.mean(axis=0)),
    "refuses few rows": lambda x: x.mean() if len(x) > 5 else 1 / 0,
    "NaN": lambda x: (x * np.nan).mean(),
    "too large for float32": lambda x: (np.abs(x) * 1e300).mean(),
}


def test_what_is_right_is_never_told(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    x = np.random.default_rng(1).normal(size=(40, 3))
    for number, name in enumerate([*RIGHT, "counting", "caching", "learning", "drawing"]):
        with subtests.test(name):
            f = shared_runtimes[2 + number % 2].function(RIGHT.get(name) or getattr(Model(), name))
            for rows in (x, x[:37], x[:12] if name != "refuses few rows" else x):
                f(rows)


def test_many_rows_and_slow_functions(rt: Any) -> None:
    x = np.random.default_rng(1).normal(size=(100_000, 3))
    with pytest.raises(OpMismatch, match="on 61 of the 100000 rows"):
        rt.function(lambda x: x.sum())(x)
    assert rt.function(lambda x: x.mean())(x) == pytest.approx(x.mean())

    def slow(x: Any) -> Any:
        time.sleep(2)  # on each rank, and so twice for all rows
        return x.sum()

    assert np.isfinite(rt.function(slow)(x[:10]))


UNCLEAR: list[tuple[np.ndarray, Fn]] = [
    *((rows, fn) for rows in (np.zeros(8), np.ones(1)) for fn in (np.sum, np.max, np.linalg.norm)),
    (np.full(8, 1.0), np.max),
]
"""Rows on which the average of the parts is what the function gives, though it is no mean."""


def test_a_check_that_cannot_tell_is_put_off(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    for rows, fn in UNCLEAR:
        with subtests.test(fn=fn.__name__, rows=rows.tolist()):
            f = shared_runtimes[2].function(lambda x, fn=fn: fn(x))
            for _ in range(3):
                assert f(rows) == fn(rows)
            with pytest.raises(OpMismatch):
                f(np.arange(8.0))


# ----- what is told

COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "gather": lambda a, b: np.concatenate([a, b]),
    "first": lambda a, b: a,
}

WRONG: dict[str, Fn] = {
    "sum": lambda x: x.sum(),
    "sum of columns": lambda x: x.sum(axis=0),
    "sum, float32": lambda x: x.astype("f4").sum(),
    "product of matrices": lambda x: x.T @ x,
    "number of rows": lambda x: float(len(x)),
    "histogram": lambda x: np.histogram(x, 4, (0, 6))[0] / 1.0,
    "prod": lambda x: x.prod(axis=0),
    "max": lambda x: x.max(),
    "min of columns": lambda x: x.min(axis=0),
    "first row": lambda x: x[0],
    "each row": lambda x: x * 2,
    "sorted": lambda x: np.sort(x[:, 0]),
    "median": lambda x: np.median(x),
    "norm": lambda x: np.linalg.norm(x),
    "std": lambda x: x.std(),
    "logsumexp": lambda x: np.log(np.exp(x).sum()),
    "weighted mean": lambda x: (x[:, 0] * x[:, 1]).sum() / x[:, 1].sum(),
    "last row": lambda x: x[-1],
    "a fixed seed": lambda x: np.random.default_rng(0).choice(x[:, 0], 4).mean(),
    "hidden from equal parts": lambda x: x.sum() / 2 ** np.ceil(np.log2(len(x))),
}


def fitting(fn: Fn, x: np.ndarray) -> set[str]:
    """Return the ops that combine the values of two parts to that of all rows, in both orders of the rows."""
    found = set()
    for op, combined in COMBINED.items():
        try:
            if all(same(combined(fn(y[:4]), fn(y[4:])), fn(y)) for y in (x, x[::-1])):
                found.add(op)
        except ValueError:  # shapes that this op cannot combine
            continue
    return found


def test_the_text_shows_both_values_and_names_the_op_that_fits(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    x = 1 + np.random.default_rng(5).random((13, 3))
    for number, (name, fn) in enumerate(WRONG.items()):
        kind = (2, 3, "1+1")[number % 3]
        with subtests.test(name, kind=kind):
            with pytest.raises(REFUSALS) as caught:
                shared_runtimes[kind].function(fn)(x)
            text = str(caught.value)
            if not isinstance(caught.value, OpMismatch):  # ranks have different numbers of rows
                assert 'outputs="gather"' in text
                continue
            ops, named = fitting(fn, x), re.findall(r'(?:Use outputs=| or )"(\w+)"', text)
            assert set(named) <= ops
            assert bool(named) == bool(ops) == ("No op fits" not in text)
            if np.ndim(fn(x)) == 0:
                assert f"one worker alone {float(fn(x))!r}"[:30] in text
    with pytest.raises(OpMismatch):
        shared_runtimes[2].function(lambda x: x.sum() / synk.comm.total_rows)(x)
    stamps = 1_600_000_000_000_000_000 + np.arange(13)
    with pytest.raises(OpMismatch, match='Use outputs="sum"'):
        shared_runtimes[2].function(lambda x, stamps: x.sum())(x, stamps)


def test_the_whole_text_and_each_output_by_its_place(shared_runtimes: Any) -> None:
    with pytest.raises(OpMismatch) as caught:
        shared_runtimes[2].function(named("total", lambda x: x.sum()))(np.arange(6.0))
    assert str(caught.value) == (
        "cannot average the outputs of 'total', which names no op: on 6 rows outputs=\"avg\", the default, gives 7.5, "
        'and one worker alone 15.0. Use outputs="sum". Naming an op in synk.function(..., outputs=...), also "avg", '
        "ends this check."
    )
    f = shared_runtimes[2].function(
        lambda x: {"mean": x.mean(), "parts": (x.sum(), x.max()), "std": x.std(), "three": [x.min()] * 3}
    )
    with pytest.raises(OpMismatch) as caught:
        f(1 + np.random.default_rng(5).random((13, 3)))
    text = str(caught.value)
    assert """Use op "sum" for output['parts'][0].""" in text
    assert """Use op "max" for output['parts'][1].""" in text
    assert "for output['std'], and one worker alone" in text and " 3 more outputs differ. Naming" in text
    assert "output['mean']" not in text
    f = shared_runtimes[2].function(lambda x: (time.perf_counter(), x.sum(), np.random.random(), [np.random.random()]))
    with pytest.raises(
        OpMismatch, match=r"on 4 rows .* 2\.5 for output\[1\].* 5\.0\. Use op \"sum\" or \"max\", which all fit"
    ):
        f(np.array([0.0, 0.0, 0.0, 5.0]))


# ----- however the call comes

WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "array": lambda rt, f, x: f(x),
    "keyword": lambda rt, f, x: f(x=x),
    "Data": lambda rt, f, x: f(rt.data(x)),
    "sharded": lambda rt, f, x: f(rt.shared(x, sharded=True)),
    "list": lambda rt, f, x: f(x.tolist()),
    "list of rows": lambda rt, f, x: f(x, batch=[11, 3, 1, 4, 0, 5, 2, 6, 7, 8, 9, 10]),
    "rows of shards": lambda rt, f, x: f(rt.shared(x, sharded=True), batch=np.arange(24) % 2 == 0),
    "slices": lambda rt, f, x: f(x, num_slices=2),
    "slices of one row": lambda rt, f, x: f(x, num_slices=100),
    "another output": lambda rt, f, x: f(x, output_subset=[0]),
    "time limit": lambda rt, f, x: f(x, timeout=60.0),
    "submitted": lambda rt, f, x: f.submit(x).result(),
    "exception of a submitted one": lambda rt, f, x: _raise(f.submit(x).exception()),
    "stream": lambda rt, f, x: list(f.stream([x, x, x, x])),
    "repeated": lambda rt, f, x: f.repeat(2, x),
}


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def test_however_the_rows_come(rt: Any, subtests: pytest.Subtests) -> None:
    x = 1 + np.random.default_rng(5).random((24, 2))
    for way, call in WAYS.items():
        with subtests.test(way):
            with pytest.raises(OpMismatch, match="Use op \"sum\" for output\\[1\\]\\['sum'\\]"):
                call(rt, rt.function(lambda x: (x.mean(axis=0), {"sum": x.sum()})), x)
            call(rt, rt.function(lambda x: (x.mean(axis=0), {"mean": x.mean()})), x)


def test_rows_of_a_variable_and_one_worker(shared_runtimes: Any) -> None:
    s = shared_runtimes[2].shared(np.arange(7.0), sharded=True)
    with pytest.raises(OpMismatch, match="sum"):
        shared_runtimes[2].function(lambda: s.value.sum())()
    assert shared_runtimes[2].function(lambda: s.value.mean())() == 3.0
    f = shared_runtimes[1].function(lambda x: x.sum())
    assert f(np.arange(6.0)) == 15.0
    with pytest.raises(OpMismatch, match='Use outputs="sum"'):  # one worker needs no op, but slices do
        f(np.arange(6.0), num_slices=2)


def test_slices_of_other_lengths_from_one_buffer(shared_runtimes: Any) -> None:
    x, mean, sums = np.arange(11.0), np.empty(1), np.empty(1)

    def in_one_buffer(x: np.ndarray) -> dict[str, Any]:
        mean[0], sums[0] = x.mean(), x.sum()
        return {"mean": [mean], "sum": sums}

    for fn, kind in ((lambda x: x.mean(), 1), (lambda x: in_one_buffer(x)["mean"], 1), (lambda x: x.mean(), 2)):
        assert shared_runtimes[kind].function(fn)(x, num_slices=2) == x.mean()
        assert shared_runtimes[kind].function(fn, reproducible=4)(x) == x.mean()
    outputs = {"mean": "sum", "sum": "max"}
    report = shared_runtimes[1].function(in_one_buffer, outputs=outputs).verify(x, num_slices=2)
    assert [output.matching for output in report.outputs] == [("avg",), ("sum",)]


# ----- what it does not do, and what it leaves


def test_an_op_that_was_named_is_the_users_word(rt: Any) -> None:
    for op in ("avg", "sum", "max", "gather", "first", None, np.add):
        f = rt.function(lambda x: x + x.sum(), outputs=op)
        f.serial(np.arange(4.0))  # brings it to the workers
        before = rt.counters["messages_down"]
        f(np.arange(4.0))
        assert rt.counters["messages_down"] - before == 2, op


def test_what_assigns_or_changes_is_not_held_back(rt: Any) -> None:
    """What such a call did could not be taken back; what a second run with few rows assigns takes no effect."""
    x = np.arange(8.0)
    w, few, box = rt.shared(np.zeros(()), name="w"), rt.shared(np.zeros(())), rt.resident([0.0])

    def assign(x: Any) -> Any:
        w.value = np.asarray(synk.comm.all_reduce(x.sum(), "sum"))
        return x.sum()

    def change(box: Any, x: Any) -> Any:
        box[0] += 1
        return x.sum()

    def assign_on_few(x: Any) -> Any:
        if synk.comm.total_rows < 100:
            few.value = np.ones(())
        return x.mean()

    assert rt.function(assign)(x) == 14.0
    assert float(w.value) == 28.0
    assert rt.function(change, bcast_inputs="box", updates=box)(box, x) == 14.0
    assert box.get() == [1.0]
    assert rt.function(lambda x: x.sum(), per_rank=True)(x) == 14.0
    rt.function(assign_on_few)(np.arange(200.0))
    assert float(few.value) == 0.0


class Scale:
    factor = 2.0

    def of(self, x: Any) -> Any:
        return self.factor * x.mean()


def test_state_and_streams_are_those_without_the_check(rt: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Of the ranks: the classes of the program are not touched."""
    method = Scale.of
    state: dict[str, Any] = {"calls": 0}

    def drawing(x: np.ndarray) -> Any:
        state["calls"] += 1
        state["lock"] = threading.Lock()  # which no pickle can copy
        print("here", flush=True)
        drawn = rng.random(), np.random.random(), synk.comm.rng.random(), random.random()
        return np.array([state["calls"], *drawn, Scale().of(x)])

    def seed(rank: Any) -> None:
        np.random.seed(1)
        random.seed(1)
        synk.comm.rng.bit_generator.state = np.random.PCG64(5).state

    results = []
    for options in ({}, {"outputs": "avg"}):
        state, rng = {"calls": 0}, np.random.default_rng(3)
        rt.function(seed, outputs=None)(np.zeros(2))
        f = rt.function(drawing, **options)
        results.append([f(np.arange(13.0)) for _ in range(3)])
    np.testing.assert_array_equal(results[0], results[1])
    assert [row[0] for row in results[0]] == [1, 2, 3]
    assert state == {"calls": 0}
    assert Scale.of is method
    assert capfd.readouterr().out.count("here") == 12
    assert [record.num_calls for name, record in rt.profile.records.items() if name.startswith("drawing")] == [6]


# ----- when it goes wrong


@pytest.mark.parametrize("kind", [2, "1+1"])
def test_a_worker_that_ends_in_the_check_is_told_of(reused: Any, kind: Any) -> None:
    """The call before is over, and has its result."""
    rt, x = reused(kind), np.arange(1.0, 201.0)

    def fragile(x: np.ndarray) -> Any:
        if len(x) < 90:
            os.kill(os.getpid(), signal.SIGKILL)
        return x.mean()

    for verb in (lambda f: f(x), lambda f: f.submit(x).result()):
        f = rt.function(fragile)
        with pytest.warns(RuntimeWarning, match=r"second run of 'fragile'.*SIGKILL.*Name its op"):
            result = verb(f)
        assert result == pytest.approx(x.mean())
        assert f(x) == result


def test_a_result_outlives_its_runtime() -> None:
    f = synk.function(lambda x: x.mean())
    with synk.fork(2, backend="numpy"):
        call = f.submit(np.arange(10.0))
        while not call.done():
            time.sleep(0.01)
    assert call.result() == 4.5


def test_a_run_that_never_ends_costs_its_limit(rt: Any) -> None:
    """As of functions whose ranks wait for each other by other means than ``synk.comm``."""
    x = np.arange(1.0, 201.0)

    def waits(x: np.ndarray) -> Any:
        if len(x) < 90:
            time.sleep(3600)
        return x.mean()

    f = rt.function(waits)
    with pytest.warns(RuntimeWarning, match="second run of 'waits'"):
        assert f(x, timeout=2.0) == pytest.approx(x.mean())
    assert f(x) == pytest.approx(x.mean())
