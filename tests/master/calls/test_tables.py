"""Series and DataFrames as arguments and outputs. The oracle is pandas or polars: the plain function, on all rows."""

from __future__ import annotations

import datetime
import decimal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from pandas.testing import assert_frame_equal, assert_series_equal
from polars.testing import assert_frame_equal as assert_polars_equal
from polars.testing import assert_series_equal as assert_polars_series_equal
from support.harness import start_polars
from support.seeds import seeds

import synk
from synk.errors import CollectiveMismatch, OpMismatch

start_polars()

N = 23
BATCHES = (None, 7, 2, slice(2, 19, 3), slice(None, None, -2), [4, 4, 1, 22], np.arange(N) % 3 == 0, slice(0, 0))


def missing(values: list[Any]) -> list[Any]:
    """Return ``N`` values, of which every third is missing."""
    return [None if k % 3 == 2 else values[k % len(values)] for k in range(N)]


def every_dtype() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    days = pd.date_range("2020-01-30", periods=N, freq="D")
    return pd.DataFrame(
        {
            "float": rng.random(N),
            "half": rng.random(N).astype(np.float16),
            "int": np.arange(N),
            "byte": np.arange(N, dtype=np.uint8),
            "bool": rng.random(N) > 0.5,
            "complex": rng.random(N) + 1j,
            "time": days,
            "no time": np.array(["NaT", "2020-01-01"] * 11 + ["NaT"], "M8[s]"),
            "zone": days.tz_localize("Europe/Berlin"),
            "span": pd.to_timedelta(np.arange(N), unit="s"),
            "period": days.to_period("M"),
            "category": pd.Categorical(rng.choice(list("abc"), N), categories=list("cba")),
            "ordered": pd.Categorical([None, 2, 1] * 7 + [1, 2], ordered=True),
            "Int": pd.array(missing([1, 2]), dtype="Int16"),
            "Float": pd.array(missing([1.5]), dtype="Float32"),
            "Bool": pd.array(missing([True, False]), dtype="boolean"),
            "text": [f"name {k % 5}" for k in range(N)],
            "string": pd.array(missing(["a", "b"]), dtype="string"),
            "object": pd.Series(missing([(1, 2), "x", {3}]), dtype=object),
            "text as objects": pd.Series(["x"] * N, dtype=object),
            "interval": pd.arrays.IntervalArray.from_breaks(np.arange(N + 1)),
            "sparse": pd.arrays.SparseArray([0, 0, 1] + [0] * (N - 3)),
        }
    )


def indexes() -> dict[str, Any]:
    days = pd.date_range("2020-01-30", periods=N, freq="D", name="day")
    return {
        "counting in twos": pd.RangeIndex(5, 5 + 2 * N, 2, name="r"),
        "days": days,
        "hours of a zone": pd.date_range("2020-03-28", periods=N, freq="h", tz="Europe/Berlin"),
        "spans": pd.timedelta_range("1s", periods=N, freq="s"),
        "periods": days.to_period("D"),
        "text": pd.Index([f"k{k}" for k in range(N)]),
        "text as objects": pd.Index([f"k{k}" for k in range(N)], dtype=object),
        "duplicates": pd.Index([1, 1, 2] * 7 + [1, 3]),
        "numbers": pd.Index(np.random.default_rng(1).random(N), name=("a", 1)),
        "categories": pd.CategoricalIndex(list("ab") * 11 + ["a"]),
        "intervals": pd.interval_range(0, N),
        "missing": pd.Index(pd.array(missing([1, 2]), dtype="Int64")),
        "several levels": pd.MultiIndex.from_arrays(
            [np.arange(N) % 3, [f"z{k % 4}" for k in range(N)]], names=["p", None]
        ),
    }


def with_index(index: Any) -> pd.DataFrame:
    return pd.DataFrame({"a": np.arange(N) * 1.5, "b": ["x", "y"] * 11 + ["z"]}, index=index)


def labelled() -> pd.DataFrame:
    """Has labels that are no text, and not unique, in a class of attributes."""
    frame = pd.DataFrame(np.arange(3.0 * N).reshape(N, 3), columns=[1, 1, ("x", 2.5)])
    frame.attrs["units"] = {"a": "m"}
    return frame


PANDAS: dict[str, Callable[[], Any]] = {
    "every dtype": every_dtype,
    "a series": lambda: pd.Series(np.arange(N) * 0.5, name="half"),
    "a series of text": lambda: pd.Series(["a", "b"] * 11 + ["c"]),
    "a series without a name": lambda: pd.Series(np.arange(N)),
    "labels": labelled,
    "columns of two levels": lambda: pd.DataFrame(
        np.arange(4 * N).reshape(N, 4), columns=pd.MultiIndex.from_product([["a", "b"], [1, 2]], names=["u", "v"])
    ),
    "no columns": lambda: pd.DataFrame(index=pd.RangeIndex(N)),
    **{f"an index of {name}": lambda index=index: with_index(index) for name, index in indexes().items()},
}


def every_polars_dtype() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    noon = datetime.datetime(2020, 1, 1, 12)
    return pl.DataFrame(
        {
            "float": rng.random(N),
            "byte": np.arange(N, dtype=np.uint8),
            "nan and null": missing([1.5, float("nan")]),
            "int": missing([1, 2]),
            "bool": missing([True, False]),
            "text": missing(["x", "yy"]),
            "category": pl.Series(missing(["x", "yy"]), dtype=pl.Categorical),
            "enum": pl.Series(missing(["x", "y"]), dtype=pl.Enum(["y", "x"])),
            "list": missing([[1], [2, 3]]),
            "struct": missing([{"p": 1, "q": "a"}]),
            "date": missing([datetime.date(2020, 1, 1)]),
            "time": [datetime.time(1)] * N,
            "datetime": [noon] * N,
            "zone": pl.Series(missing([noon]), dtype=pl.Datetime("ms", "Europe/Berlin")),
            "span": missing([datetime.timedelta(1)]),
            "decimal": missing([decimal.Decimal("1.5")]),
            "binary": missing([b"x"]),
            "null": [None] * N,
            "array": pl.Series(rng.random((N, 3))),
        }
    )


POLARS: dict[str, Callable[[], Any]] = {
    "every dtype": every_polars_dtype,
    "a series": lambda: pl.Series("half", np.arange(N) * 0.5),
    "a series of text": lambda: pl.Series(["a", "b"] * 11 + ["c"]),
    "a series in chunks": lambda: pl.concat([pl.Series("q", [1, 2]), pl.Series("q", range(N - 2))], rechunk=False),
    "an empty label": lambda: pl.DataFrame({"": [1] * N}),
}


def assert_same(got: Any, expected: Any) -> None:
    """Compare two tables in all that they have. A counting index and the numbers that it counts are equal."""
    if isinstance(expected, pd.Series):
        assert_series_equal(got, expected, check_freq=False)
    elif isinstance(expected, pd.DataFrame):
        assert_frame_equal(got, expected, check_freq=False, check_flags=True)
    elif isinstance(expected, pl.Series):
        assert_polars_series_equal(got, expected)
    else:
        assert_polars_equal(got, expected)
    if isinstance(expected, (pd.Series, pd.DataFrame)):
        assert got.attrs == expected.attrs


def rows_of(table: Any, batch: Any) -> Any:
    rows = slice(None) if batch is None else slice(0, batch) if isinstance(batch, int) else batch
    if isinstance(table, (pd.Series, pd.DataFrame)):
        return table.iloc[rows]
    return table.filter(pl.Series(rows)) if isinstance(rows, np.ndarray) else table[rows]


def same(table: Any) -> Any:
    return table


# -- as an argument ---------------------------------------------------------------------------------------------------


def kinds() -> list[Any]:
    return [
        pytest.param(make, id=f"{library}, {name}")
        for library, made in (("pandas", PANDAS), ("polars", POLARS))
        for name, make in made.items()
    ]


@pytest.mark.parametrize("make", kinds())
def test_each_rank_gets_its_rows_by_every_verb(shared_runtimes: Any, make: Callable[[], Any]) -> None:
    """What each rank got is what pandas or polars cuts out of the whole table; together it is the table."""
    rt, table = shared_runtimes[3], make()
    apart, together = rt.function(same, outputs=None), rt.function(same, outputs="gather")
    for got, rows in zip(apart(table), np.array_split(np.arange(N), 3)):
        assert_same(got, rows_of(table, slice(rows[0], rows[-1] + 1)))
    assert_same(together(table), table)
    assert_same(together.serial(table), table)
    assert_same(together(table, num_slices=3), table)
    assert_same(together(table=table), table)
    assert_same(together.submit(table).result(), table)
    report = together.verify(table, batch=[5, 1, 1, 20])
    assert report and report.outputs[0].plain_verdict == "equal"
    for part, first in zip(together.rows(table, batch_size=9), range(0, N, 9)):
        assert_same(part, rows_of(table, slice(first, min(first + 9, N))))
    for part in together.stream([table, table]):
        assert_same(part, table)
    assert_same(next(iter(rt.map(same, [table]))), table)
    assert_same(rt.function(lambda x: x, bcast_inputs="x", outputs="first")(table), table)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("make", kinds())
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_each_rank_gets_the_rows_of_a_batch(shared_runtimes: Any, make: Callable[[], Any], batch: Any) -> None:
    table, together = make(), shared_runtimes[3].function(same, outputs="gather")
    for call in (together, together.serial):
        assert_same(call(table, batch=batch), rows_of(table, batch))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("where", [1, 2, "inline"])
@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_on_other_numbers_of_ranks(shared_runtimes: Any, where: Any, library: str) -> None:
    rt, table = shared_runtimes[where], (every_dtype if library == "pandas" else every_polars_dtype)()
    f = rt.function(same, outputs="gather")
    for batch in BATCHES:
        assert_same(f(table, batch=batch), rows_of(table, batch))


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4])
def test_few_rows(shared_runtimes: Any, num_rows: int) -> None:
    """A rank without rows does not run; where there are none at all, one rank gets a table without rows."""
    rt = shared_runtimes[3]
    for table in (every_dtype(), with_index(indexes()["several levels"]), every_polars_dtype()):
        few = rows_of(table, slice(0, num_rows))
        assert_same(rt.function(same, outputs="gather")(few), few)
        assert rt.function(len, outputs="sum")(few) == num_rows


def test_an_index_counts_where_its_rows_do(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x: x.index, outputs=None)
    series = pd.Series(np.arange(10.0), index=pd.RangeIndex(3, 33, 3))
    for batch in (None, slice(1, 9, 2), slice(None, None, -1)):
        got, expected = f(series, batch=batch), rows_of(series, batch).index
        assert all(isinstance(part, pd.RangeIndex) for part in got)
        assert got[0].append(got[1]).equals(expected)
    days = pd.Series(np.arange(10.0), index=pd.date_range("2020", periods=10, freq="D"))
    assert [part.freq for part in f(days)] == [days.index.freq] * 2
    assert [part.freq for part in f(days, batch=[0, 5, 1, 2, 4])] == [None, None]


@pytest.mark.parametrize("column", [["a", "bc"] * 10_000, [(k, str(k)) for k in range(20_000)]], ids=["text", "object"])
def test_columns_that_are_pickled_by_blocks(shared_runtimes: Any, column: list[Any]) -> None:
    f = shared_runtimes[3].function(same, outputs="gather")
    rng = np.random.default_rng(2)
    tables: list[Any] = [pd.DataFrame({"x": column})]
    if isinstance(column[0], str):
        tables.append(pl.DataFrame({"x": column}))
    for table in tables:
        for batch in (None, slice(8_000, 17_000), rng.integers(0, 20_000, 500).tolist(), slice(None, None, -7)):
            assert_same(f(table, batch=batch), rows_of(table, batch))


def test_what_pandas_computes_is_computed(shared_runtimes: Any) -> None:
    rt, series = shared_runtimes[2], pd.Series([1.0, np.nan, 7.0, 3.0])
    assert rt.function(lambda x: x.sum(), outputs="sum")(series) == 11.0
    assert rt.function(lambda x: x.std(), outputs=None)(series, batch=[0, 2, 3, 2]) == [
        series[[0, 2]].std(),
        series[[3, 2]].std(),
    ]
    frame = pl.DataFrame({"k": ["a", "b"] * 3, "v": [1, None, 3, 4, 5, 6]})
    assert rt.function(lambda d: d["v"].sum(), outputs="sum")(frame) == 19


def test_in_a_nesting_and_beside_other_inputs(shared_runtimes: Any) -> None:
    rt, frame = shared_runtimes[2], with_index(indexes()["days"])
    minibatch, weights = rt.data(np.arange(9.0), minibatch=True), pd.Series([1.0, 2.0], index=["p", "q"])
    sharded = rt.shared(np.arange(float(N)), sharded=True)
    other = pl.DataFrame({"z": np.arange(N)})

    def f(t: Any, m: Any, w: Any) -> Any:
        return t["frame"]["a"] * w["q"] + t["pair"][0] + t["pair"][1]["z"].to_numpy() + m

    got = rt.function(f, bcast_inputs="w", outputs="gather")(
        {"frame": frame, "pair": (np.arange(N), other)}, minibatch, weights, batch=slice(4, 13)
    )
    rows = slice(4, 13)
    expected = f({"frame": frame.iloc[rows], "pair": (np.arange(N)[rows], other[rows])}, np.arange(9.0), weights)
    assert_same(got, expected)
    for table in (frame, other):
        pick = [22, 0, 11, 5]
        g = rt.function(lambda t, s: (t, s), outputs="gather")
        got, numbers = g(table, sharded, batch=pick)
        assert_same(got, rows_of(table, pick))
        assert numbers.tolist() == pick


def test_batches_that_are_series(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(same, outputs="gather")
    frame, table = with_index(indexes()["text"]), every_polars_dtype()
    assert_same(f(frame, batch=frame["a"] > 9), frame[frame["a"] > 9])
    assert_same(f(table, batch=table["float"] > 0.5), table.filter(table["float"] > 0.5))


def random_tables(seed: int) -> Iterator[Any]:
    """Yield tables of random columns, in random order, with random indexes."""
    rng = np.random.default_rng(seed)
    frame, table, own = every_dtype(), every_polars_dtype(), list(indexes().values())
    for _ in range(6):
        names = rng.choice(frame.columns, rng.integers(1, 6), replace=rng.random() < 0.3)
        chosen = frame[list(names)].set_axis(own[rng.integers(len(own))], axis=0)
        yield rows_of(chosen, rng.integers(0, N, rng.integers(1, 40)).tolist())
        names = rng.choice(table.columns, rng.integers(1, 6), replace=False)
        yield table.select(list(names))[rng.integers(0, N, rng.integers(1, 40)).tolist()]


@pytest.mark.parametrize("seed", seeds(3, 8))
def test_random_tables(shared_runtimes: Any, seed: int) -> None:
    """One function is given tables of all kinds, one after the other, some of them twice."""
    rng = np.random.default_rng(seed)
    f = shared_runtimes[2].function(same, outputs="gather")
    for table in random_tables(seed):
        batch = [None, slice(1, None, 2), rng.integers(0, len(table), 5).tolist()][rng.integers(3)]
        for _ in range(2):
            assert_same(f(table, batch=batch), rows_of(table, batch))


def test_repeated_calls_see_what_has_changed(shared_runtimes: Any) -> None:
    """Values, categories, labels and dtypes of equal shape: none is taken for that of the call before."""
    f = shared_runtimes[2].function(lambda d: d.assign(length=d.iloc[:, 0].astype(str).str.len()), outputs="gather")
    frame = pd.DataFrame({"a": pd.Categorical(["x", "yy", "x", "yy"])})
    for column in (
        frame["a"],
        pd.Categorical(["x", "yy", "x", "yy"], categories=["yy", "x"]),
        frame["a"].cat.rename_categories({"x": "zzz"}),
        ["x", "yyy", "x", "yyy"],
        np.arange(4),
        np.arange(4.0),
        np.arange(5.0, 9.0),
    ):
        for name in ("a", "b"):
            frame = pd.DataFrame({name: column}, index=list("pqrs"))
            for _ in range(3):
                expected = frame.assign(length=frame.iloc[:, 0].astype(str).str.len())
                assert_same(f(frame), expected)


def test_columns_are_never_pickled_if_they_are_numbers(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda d: float(d["a"].sum()), outputs="sum")
    for table in (pd.DataFrame({"a": np.arange(1e5)}), pl.DataFrame({"a": np.arange(1e5)})):
        f(table)
        before = rt.counters["bytes_pickled"], rt.counters["bytes_staged"], rt.counters["bytes_down"]
        assert f(table) == np.arange(1e5).sum()
        after = rt.counters["bytes_pickled"], rt.counters["bytes_staged"], rt.counters["bytes_down"]
        assert after[0] == before[0] and after[1] - before[1] >= 800_000 and after[2] - before[2] < 1000


def test_what_a_rank_keeps_and_changes(shared_runtimes: Any) -> None:
    """A table that was kept holds what it held, new columns are the rank's own, values in place are read-only."""
    rt, kept = shared_runtimes[2], []

    def keep(d: Any) -> Any:
        kept.append(d)
        return [float(each["a"].sum()) for each in kept]

    for make in (pd.DataFrame, pl.DataFrame):
        f = rt.function(keep, outputs="first")
        assert f(make({"a": np.ones(4)})) == [2.0]
        assert f(make({"a": np.full(4, 5.0)})) == [2.0, 10.0]

    def change(d: Any) -> Any:
        d["b"] = d["a"] * 2
        d.attrs["seen"] = True
        return d

    frame = pd.DataFrame({"a": np.arange(4.0)})
    for _ in range(2):
        got = rt.function(change, outputs="gather")(frame)
        assert got["b"].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert list(frame.columns) == ["a"] and frame.attrs == {}

    def write(d: Any) -> Any:
        d.iloc[0, 0] = 9.0

    with pytest.raises(ValueError, match="read-only"):
        rt.function(write, outputs=None)(frame)
    assert frame["a"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_classes_of_the_script(shared_runtimes: Any) -> None:
    class Labelled(pd.DataFrame):
        @property
        def _constructor(self) -> type:
            return Labelled

    frame = Labelled({"a": np.arange(4.0)})
    f = shared_runtimes[2].function(lambda d: (type(d).__name__, len(d)), outputs=("first", "sum"))
    assert f(frame) == ("Labelled", 4)


def test_classes_of_the_script_that_change(shared_runtimes: Any) -> None:
    """No function captures a class that only a column brings."""

    class Price:
        factor = 1

        def value(self) -> int:
            return 2 * self.factor

    frame = pd.DataFrame({"a": [Price(), Price(), Price()]})
    f = shared_runtimes[2].function(lambda d: sum(price.value() for price in d["a"]), outputs="sum")
    for Price.factor in (1, 2, 2, 3):
        assert f(frame) == 6 * Price.factor


# -- as an output -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(20)
@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
def test_numbers_are_reduced_and_labels_kept(shared_runtimes: Any, op: str, num_slices: int) -> None:
    """Uneven rows: 5 on three ranks. Each rank returns a table of its own numbers, so NumPy can tell the result."""
    rt, numbers = shared_runtimes[3], np.array([1.5, 2.0, -3.0, 4.0, 0.5])
    index = pd.MultiIndex.from_tuples([("p", 1), ("q", 2)], names=["x", "y"])
    expected = {
        "sum": numbers.sum(), "avg": numbers.mean(), "prod": numbers.prod(), "min": numbers.min(), "max": numbers.max(),
    }[op]  # fmt: skip

    def of_rows(x: Any) -> Any:
        own = {"sum": x.sum, "avg": x.mean, "prod": x.prod, "min": x.min, "max": x.max}[op]()
        frame = pd.DataFrame({1: [own, 2 * own], "f": np.array([own, own], np.float32)}, index=index)
        return frame, frame[1], pl.DataFrame({"a": [own, own]}), pl.Series("s", [own] * 9)

    f = rt.function(of_rows, outputs=op)
    frame, series, table, own = f(numbers, num_slices=num_slices)
    second = 2 * expected if op != "prod" else 2 ** (3 if num_slices == 1 else 5) * expected
    assert_frame_equal(
        frame, pd.DataFrame({1: [expected, second], "f": np.array([expected] * 2, np.float32)}, index=index)
    )
    assert_series_equal(series, frame[1])
    assert_polars_equal(table, pl.DataFrame({"a": [expected] * 2}))
    assert_polars_series_equal(own, pl.Series("s", [expected] * 9))
    assert f.verify(numbers, num_slices=num_slices) or op == "prod"


def test_a_group_by_is_summed(shared_runtimes: Any) -> None:
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"k": rng.choice(list("abcd"), 400), "v": rng.integers(0, 9, 400), "w": rng.random(400)})

    def totals(d: Any) -> Any:
        return d.groupby("k").sum()

    f = shared_runtimes[3].function(totals, outputs="sum")
    assert_frame_equal(f(frame), totals(frame))
    assert_frame_equal(f(frame, num_slices=4), totals(frame))
    assert f.verify(frame)
    mean = shared_runtimes[3].function(lambda d: d[["w"]].mean())
    assert_series_equal(mean(frame, batch=301), frame[:301][["w"]].mean())


def test_missing_values_stay_missing(shared_runtimes: Any) -> None:
    def of_rows(x: Any) -> Any:
        first = x[0] == 0
        values = [1, None] if first else [2, 3]
        return pd.Series(values, dtype="Int64"), pl.Series("p", values), pd.Series([np.nan, 1.0] if first else [2.0, 3])

    nullable, own, floats = shared_runtimes[2].function(of_rows, outputs="sum")(np.arange(2))
    assert_series_equal(nullable, pd.Series([3, None], dtype="Int64"))
    assert_polars_series_equal(own, pl.Series("p", [3, None]))
    assert_series_equal(floats, pd.Series([np.nan, 4.0]))


def test_dtypes_that_differ_are_joined_as_pandas_joins_them(shared_runtimes: Any) -> None:
    def of_rows(x: Any) -> Any:
        return x if x.iloc[0] else x.astype(float).where(x > 0)

    rt, series = shared_runtimes[2], pd.Series(np.arange(4))
    assert_series_equal(rt.function(of_rows, outputs="gather")(series), series.astype(float).where(series > 0))

    def polars_rows(x: Any) -> Any:
        return x if x[0] else x.cast(pl.Float64)

    table = pl.Series("a", [0, 1, 2, 3])
    assert_polars_series_equal(rt.function(polars_rows, outputs="gather")(table), table.cast(pl.Float64))

    def numbers(x: Any) -> Any:
        values = [1, 2, 3] if x[0] else [0.5, 1.5, 2.5]
        return pd.Series(values), pl.Series("a", values)

    got, own = rt.function(numbers, outputs="sum")(np.arange(4))
    assert_series_equal(got, pd.Series([1.5, 3.5, 5.5]))
    assert_polars_series_equal(own, pl.Series("a", [1.5, 3.5, 5.5]))


def test_other_ops_take_tables_as_objects(shared_runtimes: Any) -> None:
    rt, frame = shared_runtimes[2], with_index(indexes()["days"])
    for options in ({}, {"num_slices": 2}):
        assert_same(
            rt.function(lambda d: d[["a"]].sum(), outputs=lambda a, b: a + b)(frame, **options), frame[["a"]].sum()
        )
    assert_same(rt.function(same, outputs="first")(frame), frame[:12])
    f = rt.function(lambda d: {"all": d, "sum": d["a"].sum()}, outputs={"all": "gather", "sum": "sum"})
    assert_same(f(frame, output_subset=["all"])["all"], frame)
    assert f(frame, output_subset=["sum"]) == {"sum": frame["a"].sum()}


REFUSED_OUTPUTS: dict[str, tuple[Callable[[Any, bool], Any], str, type[Exception], str]] = {
    "labels that differ": (
        lambda d, first: pd.Series([1.0, 2.0], index=["a", "b" if first else "c"]),
        "sum",
        CollectiveMismatch,
        r"cannot sum the output of 'f': got rank 0: index \['a', 'b'\] of 2; rank 1: index \['a', 'c'\] of 2, "
        r"expected equal labels on all ranks.*reindex",
    ),
    "numbers of labels": (
        lambda d, first: pd.DataFrame({"v": np.ones(3 if first else 2)}),
        "max",
        CollectiveMismatch,
        r"cannot max the output.*rank 0: index \[0, 1, 2\] of 3; rank 1: index \[0, 1\] of 2",
    ),
    "rows under the default op": (
        lambda d, first: d["a"] * 2,
        "avg",
        CollectiveMismatch,
        r'cannot average the output.*rank 0: index .*outputs="gather"',
    ),
    "columns that differ": (
        lambda d, first: d.rename(columns={"a": "z"}) if first else d,
        "gather",
        CollectiveMismatch,
        r"cannot gather.*rank 0: columns \['z', 'b'\]; rank 1: columns \['a', 'b'\]",
    ),
    "names that differ": (
        lambda d, first: d["a"].rename("z") if first else d["a"],
        "gather",
        CollectiveMismatch,
        r"rank 0: 'z'; rank 1: 'a', expected equal names",
    ),
    "kinds that differ": (
        lambda d, first: d if first else d["a"],
        "gather",
        CollectiveMismatch,
        r"rank 0: DataFrame of pandas; rank 1: Series of pandas, expected one kind",
    ),
    "libraries that differ": (
        lambda d, first: d["a"] if first else pl.Series([1.0]),
        "gather",
        CollectiveMismatch,
        r"rank 0: Series of pandas; rank 1: Series of polars",
    ),
    "a table and an array": (
        lambda d, first: d["a"] if first else np.ones(3),
        "gather",
        CollectiveMismatch,
        r"rank 0: an object.*rank 1: float64",
    ),
    "a column of text": (
        lambda d, first: d,
        "sum",
        TypeError,
        r"cannot reduce column 'b' of the output.*got dtype (str|object)",
    ),
    "a column of times": (
        lambda d, first: pd.Series(pd.to_datetime(["2020-01-01"])),
        "max",
        TypeError,
        r"cannot reduce the output of 'f' with op 'max': got dtype datetime64",
    ),
    "an average of integers": (
        lambda d, first: pd.Series([1, 2]),
        "avg",
        TypeError,
        r"cannot average the output.*int64",
    ),
    "heights of polars": (
        lambda d, first: pl.DataFrame({"v": [1.0] * (2 if first else 3)}),
        "sum",
        CollectiveMismatch,
        r"rank 0: 2 rows; rank 1: 3 rows",
    ),
    "text and numbers of polars": (
        lambda d, first: pl.Series("v", [1.0] if first else ["x"]),
        "gather",
        CollectiveMismatch,
        r"rank 0: dtypes \['Float64'\]; rank 1: dtypes \['String'\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED_OUTPUTS)
def test_outputs_that_are_refused(shared_runtimes: Any, case: str) -> None:
    make, op, error, words = REFUSED_OUTPUTS[case]
    rt = shared_runtimes[2]
    f = rt.function(lambda d: make(d, 0 in d.index), outputs=op, name="f")
    with pytest.raises(error, match=words):
        f(with_index(pd.RangeIndex(N)))
    assert rt.function(len, outputs="sum")(np.ones(5)) == 5


def test_slices_that_differ_are_refused(shared_runtimes: Any) -> None:
    rt, frame = shared_runtimes[2], pd.DataFrame({"a": np.arange(8.0)})
    f = rt.function(lambda d: pd.Series([1.0], index=[d.index[0] // 2]), outputs="sum")
    with pytest.raises(CollectiveMismatch, match=r"rank 0: index \[0\] of 1; rank 0: index \[1\] of 1; rank 1: "):
        f(frame, num_slices=2)
    f = rt.function(lambda d: np.ones(2) if d.index[0] % 4 else d["a"], outputs="gather")
    with pytest.raises(ValueError, match="got ndarray, and a table in the first slice"):
        f(frame, num_slices=2)
    f = rt.function(lambda d: d["a"] if d.index[0] % 4 else np.ones(2), outputs="gather")
    with pytest.raises(ValueError, match="got Series, and no table in the first slice"):
        f(frame, num_slices=2)


def test_rows_without_labels_under_the_default_op_are_told(shared_runtimes: Any) -> None:
    with pytest.raises(OpMismatch, match="gather"):
        shared_runtimes[2].function(lambda x: x * 2)(pl.Series("a", np.arange(8.0)))


def test_verify_names_the_op_that_fits(shared_runtimes: Any) -> None:
    series = pd.Series(np.arange(8.0), index=list("abcdefgh"))
    report = shared_runtimes[2].function(lambda x: x.agg(["sum"]), outputs="avg").verify(series)
    assert not report and report.outputs[0].matching == ("sum",)
    assert report.outputs[0].plain_verdict == "equal" and report.outputs[0].difference == 14.0
    report = shared_runtimes[2].function(lambda x: x * 2, outputs="sum").verify(series)
    assert not report and report.outputs[0].matching == ("gather",)


# -- what refuses them ------------------------------------------------------------------------------------------------

FRAME = pd.DataFrame({"a": np.arange(6.0), "b": np.arange(6.0)})
REFUSED: dict[str, tuple[Callable[[synk.Runtime], Any], str]] = {
    "Data": (lambda rt: rt.data(FRAME), r"DataFrame of pandas.*value\.to_numpy\(\)"),
    "a new value of Data": (lambda rt: rt.data(np.ones(6)).set_value(pl.Series([1.0])), r"Series of polars.*to_numpy"),
    "Shared": (lambda rt: rt.shared(FRAME["a"]), r"Series of pandas.*to_numpy"),
    "a new value of Shared": (lambda rt: setattr(rt.shared(np.ones(6)), "value", FRAME["a"]), r"Series.*to_numpy"),
    "framework torch": (
        lambda rt: rt.function(lambda x: x.sum(), framework="torch")(FRAME),
        r"cannot scatter x of .*DataFrame of pandas, and its inputs are tensors of torch.*x\.to_numpy\(\)",
    ),
    "framework torch, in a dict": (
        lambda rt: rt.function(lambda x: x, framework="torch")({"t": pl.DataFrame({"a": [1]})}),
        r"cannot scatter x\['t'\] of .*DataFrame of polars.*x\['t'\]\.to_numpy\(\)",
    ),
    "a collective": (
        lambda rt: rt.function(lambda x: synk.comm.all_reduce(x["a"]))(FRAME),
        r"Series of pandas.*to_numpy",
    ),
    "a table that is not computed yet": (
        lambda rt: rt.function(lambda x: x)(pl.LazyFrame({"a": [1]})),
        r"still to be computed \(from LazyFrame\).*collect\(\)",
    ),
    "what cannot be pickled": (
        lambda rt: rt.function(lambda x: x)(pd.DataFrame({"g": [(k for k in "a")]})),
        r"cannot scatter x of .*its column 'g' cannot be pickled",
    ),
    "polars' own objects": (
        lambda rt: rt.function(lambda x: x)(pl.Series([object()], dtype=pl.Object)),
        r"cannot scatter x of .*cannot be pickled",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_take_a_table_says_so(shared_runtimes: Any, case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(TypeError, match=words):
        call(shared_runtimes[2])


@pytest.mark.parametrize(
    "value",
    [pd.array([1, None, 3], dtype="Int64"), pd.Index([1.0, np.nan, 3.0]), pd.Categorical([1, 2, 1])],
    ids=["array", "index", "categories"],
)
def test_an_array_of_pandas_is_refused_and_its_series_is_not(shared_runtimes: Any, value: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda v: int(v.notna().sum()), outputs="sum", name="f")
    text = rf"got {type(value).__name__}, which has a meaning of its own.*np.asarray\(value\)"
    for given in (value, {"v": value}):
        with pytest.raises(TypeError, match=f"cannot share v.* of 'f': {text}"):
            f(given)
    with pytest.raises(TypeError, match=text):
        rt.data(value)
    assert f(pd.Series(value)) == pd.Series(value).notna().sum()
    kept = rt.function(lambda x, v: type(v).__name__, bcast_inputs="v", outputs="first")
    assert kept(np.ones(2), value) == type(value).__name__


def test_rows_that_do_not_fit_are_named_once(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x, y: x)
    with pytest.raises(ValueError, match=r"got x with 6 rows and y with 5, expected") as raised:
        f(FRAME, FRAME[:5])
    assert str(raised.value).count("6 rows") == 1


def test_neither_library_is_imported_without_need() -> None:
    script = (
        "import sys, numpy as np, synk\n"
        "synk.fork(1)\n"
        "f = synk.function(lambda x: [m for m in ('pandas', 'polars') if m in sys.modules], outputs='first')\n"
        "assert f(np.ones(3)) == [], f(np.ones(3))\n"
        "assert not {'pandas', 'polars'} & set(sys.modules)\n"
        "synk.close()\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
