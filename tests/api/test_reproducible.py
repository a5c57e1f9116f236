"""``reproducible=``: the same bits for any number of workers. Random numbers of ranks: independent and repeatable."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import harness
from support.harness import start_polars
from support.rank_arrays import Median
from support.tables import named

import synk
from synk.errors import UnsupportedError

RNG = np.random.default_rng(5)
X = RNG.normal(size=(5003, 7)) * 10.0 ** RNG.integers(-8, 8, size=(5003, 1))
"""Rows of very different sizes: their sum depends on the order in almost every bit."""


def moments(x: np.ndarray) -> dict[str, Any]:
    return {
        "mean": x.mean(axis=0),
        "total": x.sum(),
        "product": np.prod(1 + x[:, 0] * 1e-9),
        "least": x.min(axis=0),
        "most": float(x.max()),
        "count": len(x),
        "half": np.tanh(x.mean(axis=0)).astype(np.float16),
        "complex": x.sum() + 1j * x[:, 1].sum(),
    }


OPS = {
    "mean": "avg", "total": "sum", "product": "prod", "least": "min", "most": "max", "count": "sum", "half": "avg",
    "complex": "sum",
}  # fmt: skip


@pytest.mark.parametrize("block_rows", [1024, 100, 1, 5003, 10_000])
def test_any_number_of_workers_gives_the_same_bits(shared_runtimes: Any, block_rows: int) -> None:
    x, found = X[:300] if block_rows == 1 else X, []
    for num_workers in (1, 2, 3):
        f = shared_runtimes[num_workers].function(moments, outputs=OPS, reproducible=block_rows)
        found += [f(x), f.serial(x)]
    assert all(bits(each) == bits(found[0]) for each in found)
    want = moments(x)
    for key, value in found[0].items():
        if key != "half":  # no sum over rows
            np.testing.assert_allclose(np.asarray(value, complex), np.asarray(want[key], complex), rtol=1e-9, atol=1e-3)


def test_without_it_the_bits_depend_on_the_workers(shared_runtimes: Any) -> None:
    """Or the test above would prove nothing."""
    found = [shared_runtimes[n].function(lambda x: x.sum(), outputs="sum")(X) for n in (1, 2, 3)]
    assert len({value.tobytes() for value in found}) > 1


BATCHES = (None, 700, slice(10, 4000, 3), [5, 3, 900, 7] * 50, X[:, 0] > 0)


def test_batches_data_and_tensors_are_cut_into_blocks(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    """What is gathered is as without blocks."""
    torch = pytest.importorskip("torch")
    w = np.linspace(0, 1, 7)
    options: dict[str, Any] = {"bcast_inputs": "w", "outputs": ("sum", "gather"), "reproducible": 64}
    for number, batch in enumerate(BATCHES):
        for kind in ("array", "data", "tensor"):
            with subtests.test(batch=number, kind=kind):
                totals = set()
                for num_workers in (1, 3):
                    rt = shared_runtimes[num_workers]
                    x = {"array": X, "data": rt.data(X), "tensor": torch.tensor(X)}[kind]
                    framework = "torch" if kind == "tensor" else None
                    f = rt.function(lambda x, w: ((x * w).sum(), x[:, 0]), framework=framework, **options)
                    total, column = f(x, torch.tensor(w) if framework else w, batch=batch)
                    chosen = X if batch is None else X[:batch] if isinstance(batch, int) else X[batch]
                    np.testing.assert_array_equal(column, chosen[:, 0])
                    np.testing.assert_allclose(total, (chosen * w).sum(), rtol=1e-9)
                    totals.add(np.asarray(total).tobytes())
                assert len(totals) == 1


@pytest.mark.parametrize("rt", [2, 1], indirect=True)
def test_what_ranks_hold_for_themselves_is_refused(rt: Any, subtests: pytest.Subtests) -> None:
    shard, log, w = rt.shared(np.ones(10), sharded=True, name="rows"), rt.resident([1.0], name="log"), rt.shared(0.0)
    calls: dict[str, Callable[..., Any]] = {
        "shard": lambda f: f(lambda x: x.sum())(shard),
        "closed over": lambda f: f(lambda x: x.sum() + shard.value.sum())(np.ones(10)),
        "resident": lambda f: f(lambda x, y: x.sum() + y[0], bcast_inputs="y")(np.ones(10), log),
        "captured resident": lambda f: f(lambda x: x.sum() + log.value[0])(np.ones(10)),
    }
    build = functools.partial(rt.function, outputs="sum", reproducible=4)
    for name, call in calls.items():
        with subtests.test(name), pytest.raises(ValueError, match=r"got '(rows|log)', which each rank holds"):
            call(build)

    def assigns(x: np.ndarray) -> float:
        w.value = x.sum()
        return x.sum()

    for rows in (3, 10, 100):
        with subtests.test("assignment", rows=rows), pytest.raises(ValueError, match="cannot assign variable"):
            build(assigns)(np.ones(rows))
        assert w.value == 0.0


@pytest.mark.parametrize("rt", [2, 0], indirect=True)
def test_what_the_ranks_say_is_refused(rt: Any, subtests: pytest.Subtests) -> None:
    """And is there again in the next call of another function."""
    uses = {
        "rank": lambda x: x.sum() + synk.comm.rank,
        "rows": lambda x: x.sum() / synk.comm.total_rows,
        "rng": lambda x: x.sum() + synk.comm.rng.random(),
        "all_reduce": lambda x: synk.comm.all_reduce(x.sum(), "sum"),
        "send": lambda x: synk.comm.send(x, 0),
    }
    for name, use in uses.items():
        f = rt.function(use, outputs="sum", reproducible=4)
        for call in (f, f.serial):
            for rows in (3, 10, 100):
                with subtests.test(name, rows=rows), pytest.raises(UnsupportedError, match=r"cannot use synk\.comm\."):
                    call(np.ones(rows))
    assert rt.function(lambda x: synk.comm.total_rows, outputs="first")(np.ones(5)) == 5
    alone = rt.function(lambda w: w + synk.comm.rank, bcast_inputs="w", outputs="first", reproducible=4)
    with pytest.raises(UnsupportedError, match=r"cannot use synk\.comm\.rank"):
        alone(1.0)


class Mean(synk.Op):
    """Of a user's own: by the rows of each value."""

    def check(self, dtype: np.dtype, what: str) -> None:
        if dtype.kind != "f":
            raise TypeError(f"{what} is no float")

    def combine(self, values: list[Any], rows: list[int]) -> Any:
        return sum(value * count for value, count in zip(values, rows)) / sum(rows)


class Broken(Mean):
    def combine(self, values: list[Any], rows: list[int]) -> Any:
        raise ZeroDivisionError(len(values))


start_polars()
N, ROWS = 22, 4
SMALL = np.arange(2.0 * N).reshape(N, 2)
FIRST = [float(block[0, 0]) for block in np.array_split(SMALL, 6)]
"""The first number of each of the 6 blocks: of 4, 4, 4, 4, 3 and 3 rows."""


def is_at(x: Any, number: int) -> bool:
    return float(x[0, 0]) == FIRST[number]


def table_of(library: str, x: np.ndarray) -> Any:
    frame = pytest.importorskip(library)
    return frame.DataFrame({"a": x[:, 0], "b": x[:, 1] * 2})


def summed(library: str, x: np.ndarray) -> Any:
    frame = pytest.importorskip(library)
    return frame.DataFrame({"a": [x[:, 0].sum(), 1.0]})


VALUES: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "tuple under one op": (lambda x: (x.sum(), x.sum(0)), "sum", (SMALL.sum(), SMALL.sum(0))),
    "dict under one op": (lambda x: {"a": x.max(), "b": [x.max(0)]}, "max", {"a": 43.0, "b": [SMALL.max(0)]}),
    "nest of ops": (
        lambda x: [x.sum(), {"rows": x[:, 0], "list": [str(each) for each in x[:, 0]], "few": (len(x), x.min())}],
        ["sum", {"rows": "gather", "list": "gather", "few": ("sum", "min")}],
        [SMALL.sum(), {"rows": SMALL[:, 0], "list": [str(each) for each in SMALL[:, 0]], "few": (N, 0.0)}],
    ),
    "average": (lambda x: (x.mean(0), float(x.mean())), "avg", (SMALL.mean(0), SMALL.mean())),
    "first": (lambda x: {"rows": len(x), "name": "f"}, "first", {"rows": 4, "name": "f"}),
    "callable": (lambda x: f"{len(x)}", lambda a, b: f"({a}{b})", "(((((44)4)4)3)3)"),
    "large ints": (lambda x: 2**70 * len(x), "sum", 2**70 * N),
    "ints beside NumPy's": (lambda x: len(x) if is_at(x, 1) else np.int64(len(x)), "sum", np.int64(N)),
    "bools": (lambda x: (bool(is_at(x, 3)), x[0] == FIRST[3]), "max", (True, np.array([True, False]))),
    "NaN": (lambda x: np.where(x[0] == FIRST[4], np.nan, x[0]), "min", np.array([np.nan, 1.0])),
    "float16": (lambda x: x[0].astype(np.float16), "max", SMALL[19].astype(np.float16)),
    "complex": (lambda x: x.sum() * 1j, "sum", SMALL.sum() * 1j),
    "dates": (lambda x: x[:, 0].astype("M8[s]"), "gather", SMALL[:, 0].astype("M8[s]")),
    "own op": (lambda x: (x.mean(), x.mean(0)), Mean(), (SMALL.mean(), SMALL.mean(0))),
    "own op of rows": (lambda x: x[:, 1], Median(), np.median(SMALL[:, 1])),
    "no rows to give": (lambda x: x[x[:, 0] < 0], "gather", SMALL[:0]),
    "None everywhere": (lambda x: (None, x.sum()), "sum", (None, SMALL.sum())),
    "pandas": (lambda x: table_of("pandas", x).a, "gather", None),
    "polars": (lambda x: table_of("polars", x), "gather", None),
    "pandas summed": (lambda x: summed("pandas", x), "sum", None),
    "polars, the least": (lambda x: summed("polars", x), "min", None),
}


def bits(value: Any) -> Any:
    """Return all that can be told of a value."""
    if isinstance(value, (tuple, list)):
        return type(value), [bits(each) for each in value]
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if hasattr(value, "to_dict"):  # of a table
        return type(value), bits(dict(value.to_dict())), list(getattr(value, "index", []))
    array = np.asarray(value)
    return type(value), array.dtype, array.shape, array.tolist() if array.dtype.hasobject else array.tobytes()


def test_values_are_those_of_a_serial_call_in_slices(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    for number, (name, (fn, ops, expected)) in enumerate(VALUES.items()):
        with subtests.test(name):
            plain = shared_runtimes[2].function(fn, outputs=ops).serial(SMALL, num_slices=6)
            if expected is not None:
                np.testing.assert_equal(plain, expected)
            for num_workers in (1, 2, 3) if number < 6 else (2 if expected is None else 2 + number % 2,):
                f = shared_runtimes[num_workers].function(fn, outputs=ops, reproducible=ROWS)
                assert bits(f(SMALL)) == bits(f.serial(SMALL)) == bits(plain)


def test_tensors_come_back_as_tensors(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    torch = pytest.importorskip("torch")
    nests: dict[str, tuple[Callable[..., Any], Any]] = {
        "sum": (lambda x: x.sum(0), "sum"),
        "bfloat16": (lambda x: x.mean(0).bfloat16(), "max"),
        "gather": (lambda x: {"rows": x[:, 0], "array": x[:, 0].numpy()}, "gather"),
        "own": (lambda x: (x.mean(), x.numpy().mean()), Mean()),
        "callable": (lambda x: x.sum(0), lambda a, b: a - b),
    }
    for name, (fn, ops) in nests.items():
        options = {"outputs": ops, "framework": "torch"}
        plain = shared_runtimes[3].function(fn, **options).serial(torch.tensor(SMALL), num_slices=6)
        for num_workers in (1, 3):
            f = shared_runtimes[num_workers].function(fn, **options, reproducible=ROWS)
            with subtests.test(name, num_workers=num_workers):
                for found in (f(torch.tensor(SMALL)), f.serial(torch.tensor(SMALL))):
                    assert repr(found) == repr(plain)


MISTAKES: dict[str, tuple[Callable[..., Any], Any, type[Exception]]] = {
    "ints averaged": (lambda x: len(x), "avg", TypeError),
    "ints beside floats": (lambda x: len(x) if is_at(x, 0) else x.sum(), "sum", ValueError),
    "ints beside floats later": (lambda x: len(x) if is_at(x, 5) else x.sum(), "sum", ValueError),
    "ints in an average": (lambda x: 1 if is_at(x, 2) else x.mean(), "avg", TypeError),
    "bools summed": (lambda x: is_at(x, 2), "sum", TypeError),
    "masked": (lambda x: np.ma.masked_array(x[0], [True, False]), "sum", TypeError),
    "masked rows": (lambda x: np.ma.masked_array(x, x > 4), "gather", TypeError),
    "text": (lambda x: "a", "sum", TypeError),
    "None first": (lambda x: None if is_at(x, 0) else x.sum(), "sum", ValueError),
    "None last": (lambda x: None if is_at(x, 5) else x.sum(), "sum", ValueError),
    "another structure": (lambda x: (x.sum(),) if is_at(x, 4) else x.sum(), "sum", ValueError),
    "other keys": (lambda x: {"a" if is_at(x, 4) else "b": x.sum()}, "sum", ValueError),
    "other ops": (lambda x: (x.sum(), 1.0), ("sum", "sum", "sum"), ValueError),
    "other shapes": (lambda x: x[:, 0], "sum", ValueError),
    "other dtypes": (lambda x: x[0].astype("f4" if is_at(x, 3) else "f8"), "sum", ValueError),
    "a number gathered": (lambda x: x.sum(), "gather", ValueError),
    "own check": (lambda x: len(x), Mean(), TypeError),
    "own op raises": (lambda x: x.sum(), Broken(), ZeroDivisionError),
    "it raises": (lambda x: 1 / (is_at(x, 3) - 1), "sum", ZeroDivisionError),
}


def test_mistakes_are_told_as_by_a_serial_call_in_slices(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    for number, (name, (fn, ops, kind)) in enumerate(MISTAKES.items()):
        plain = shared_runtimes[2].function(fn, outputs=ops)
        with pytest.raises(kind) as expected:
            plain.serial(SMALL, num_slices=6)
        for num_workers in (1, 2 + number % 2):
            f = shared_runtimes[num_workers].function(fn, outputs=ops, reproducible=ROWS)
            with subtests.test(name, num_workers=num_workers), pytest.raises(kind) as caught:
                f(SMALL)
            assert str(caught.value) == str(expected.value)
            assert getattr(caught.value, "__notes__", None) == getattr(expected.value, "__notes__", None)


def test_options_are_those_of_a_call(shared_runtimes: Any) -> None:
    for num_workers in (1, 2, 3):
        rt = shared_runtimes[num_workers]
        ops = {"a": "sum", "b": "gather"}
        f = rt.function(named("f", lambda x: {"a": x.sum(), "b": x[:, 0]}), outputs=ops, reproducible=ROWS)
        g = rt.function(named("g", lambda x: [x.sum(), x.max()]), outputs=["sum", "max"], reproducible=ROWS)
        assert bits(f(SMALL, output_subset="b")) == bits({"b": SMALL[:, 0]})
        assert g(SMALL, output_subset=[1]) == [43.0]
        with pytest.raises(KeyError, match="cannot select output 'c' of 'f'"):
            f(SMALL, output_subset="c")
        with pytest.raises(IndexError, match="cannot select output 2 of 'g'"):
            g(SMALL, output_subset=2)
        with pytest.raises(IndexError, match="cannot select rows of 'g': got batch=23"):
            g(SMALL, batch=23)
        for call in (g, g.serial):
            with pytest.raises(ValueError, match="got num_slices=0, expected"):
                call(SMALL, num_slices=0)
            with pytest.raises(ValueError, match="cannot set a timeout: got -1"):
                call(SMALL, timeout=-1)
        assert g(SMALL, num_slices=3) == [SMALL.sum(), 43.0]
        assert rt.function(lambda x: x.sum(), outputs="sum", reproducible=ROWS)(SMALL[:0]) == 0.0
        assert rt.function(lambda x: x * 3, bcast_inputs="x", outputs="avg", reproducible=ROWS)(0.1) == 0.1 * 3


def test_a_timeout_is_for_the_whole_call(reused: Callable[..., synk.Runtime]) -> None:
    """Two ranks compute a block each, then one of them the third: no part takes as long as the limit."""
    f = reused(2).function(lambda x: (time.sleep(0.6), x.sum())[1], outputs="sum", reproducible=1)
    with pytest.raises(synk.errors.CallTimeout):
        f(np.ones(3), timeout=1)
    assert f(np.ones(3), timeout=60) == 3.0


def test_the_default_op_is_checked(shared_runtimes: Any) -> None:
    for num_workers in (1, 2):
        rt = shared_runtimes[num_workers]
        assert rt.function(lambda x: x.mean(), reproducible=4)(np.arange(6.0)) == 2.5
        with pytest.raises(synk.errors.OpMismatch):
            rt.function(lambda x: x.sum(), reproducible=4)(np.arange(6.0))
        assert rt.function(lambda x: (x.mean(), 1.0), reproducible=4)(np.arange(6.0), output_subset=[0]) == (2.5,)
    f = rt.function(np.sum, outputs="sum", reproducible=4)
    with pytest.raises(ValueError, match=r"cannot submit .* reproducible=4"):
        f.submit(np.zeros(3))
    with pytest.raises(ValueError, match=r"cannot repeat .* reproducible="):
        f.repeat(2, np.zeros(3))


def draws(x: Any) -> Any:
    return synk.comm.rng.random(len(x))


def streams(seed: int, count: int) -> list[np.random.Generator]:
    return [np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(count)]


@pytest.mark.parametrize("kind", [{}, {"cluster": "here", "nodes": 2}])
def test_ranks_draw_from_spawned_streams_which_go_on(runtime: Any, kind: dict[str, Any]) -> None:
    """Whoever takes part, on nodes too, and after a trial, which puts the generators back."""
    rt = runtime((1, 2) if kind else 3, seed=11, backend="numpy", **kind)
    function = rt.function(draws, outputs="gather")
    ways = (function, lambda x: function.submit(x).result(), function)
    expected = streams(11, 3)
    for way in ways:
        np.testing.assert_array_equal(way(np.zeros(6)), np.concatenate([each.random(2) for each in expected]))
        report = function.verify(np.zeros(6))
        assert not report and "random" in str(report)
    shards, each_draws = rt.shared(np.arange(3.0), sharded=True), rt.function(draws, outputs=None)
    for ranks in ([2], [1, 2], [0, 1, 2], [0, 2]):
        drawn = each_draws(shards, batch=ranks)
        assert drawn == [expected[rank].random(1) if rank in ranks else None for rank in range(3)]


@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
def test_a_worker_that_takes_the_place_of_another_draws_numbers_of_its_own(runtime: Any) -> None:
    """And so does another runtime without a seed, and an inline rank is rank 0."""
    rt = runtime(2, seed=3)
    function = rt.function(draws, outputs="gather")
    before = function(np.zeros(4))
    harness.kill_and_wait(harness.pids(rt)[1])
    after = function(np.zeros(4))
    assert not np.intersect1d(before[2:], after[2:]).size
    inline = runtime(0).function(draws, outputs="gather")(np.zeros(8))
    assert not np.intersect1d(before, inline).size
    seeded = runtime(0, seed=2).function(draws, outputs="gather")(np.zeros(5))
    np.testing.assert_array_equal(seeded, streams(2, 1)[0].random(5))


def test_what_is_no_seed_is_refused() -> None:
    for seed in (-1, 1.5, "a", True):
        with pytest.raises(ValueError, match="cannot fork: got seed="):
            synk.Runtime(1, backend="numpy", seed=seed)
