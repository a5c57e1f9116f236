"""Series, DataFrames and CSR matrices as arguments and outputs.

The oracle is pandas, polars or SciPy: rows of the whole table, and the plain function on all of them.
"""

from __future__ import annotations

import datetime
import decimal
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
from pandas.testing import assert_frame_equal, assert_series_equal
from polars.testing import assert_frame_equal as assert_polars_equal
from polars.testing import assert_series_equal as assert_polars_series_equal
from support.harness import script, start_polars
from support.tables import WHOLE_OR_SAMPLE, named

import synk
from synk.errors import CollectiveMismatch

start_polars()

N = 23
BATCHES = (None, 7, 1, slice(2, 19, 3), slice(None, None, -2), [4, 4, 1, 22], np.arange(N) % 3 == 0, slice(0, 0))


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


def matrix(kind: Any, seed: int = 0) -> Any:
    """Return a matrix of which some rows are empty."""
    rng = np.random.default_rng(seed)
    dense = rng.integers(0, 4, (N, 6)) * (rng.random((N, 6)) < 0.4)
    dense[4:7] = 0
    return kind(dense.astype(float))


def roomy() -> Any:
    """Return a matrix whose arrays hold more than its elements."""
    own = scipy.sparse.csr_array(np.eye(N))
    return scipy.sparse.csr_array((np.append(own.data, 9.0), np.append(own.indices, 0), own.indptr), (N, N))


def wide() -> Any:
    own = matrix(scipy.sparse.csr_array)
    own.indices, own.indptr = own.indices.astype(np.int64), own.indptr.astype(np.int64)
    return own


CSR: dict[str, Callable[[], Any]] = {
    "a matrix": lambda: matrix(scipy.sparse.csr_matrix),
    "an array": lambda: matrix(scipy.sparse.csr_array, 1),
    "no elements": lambda: scipy.sparse.csr_array((N, 1)),
    "room": roomy,
    "wide indices": wide,
}


def random_table(seed: int) -> Any:
    """Return random columns of all dtypes, in random order, with a random index, in random rows."""
    rng = np.random.default_rng(seed)
    if seed % 2:
        table = every_polars_dtype()
        return table.select(list(rng.choice(table.columns, rng.integers(1, 6), replace=False)))
    frame, own = every_dtype(), list(indexes().values())
    names = list(rng.choice(frame.columns, rng.integers(1, 6), replace=rng.random() < 0.3))
    chosen = frame[names].set_axis(own[rng.integers(len(own))], axis=0)
    return chosen.iloc[rng.integers(0, N, N)]


KINDS: dict[str, Callable[[], Any]] = {
    f"{library}, {name}": make
    for library, made in {
        "pandas": PANDAS,
        "polars": POLARS,
        "CSR": CSR,
        "random": {str(seed): lambda seed=seed: random_table(seed) for seed in range(12)},
    }.items()
    for name, make in made.items()
}


def assert_same(got: Any, expected: Any) -> None:
    """Compare two tables in all that they have. A counting index and the numbers that it counts are equal."""
    assert type(got) is type(expected)
    if isinstance(expected, pd.Series):
        assert_series_equal(got, expected, check_freq=False)
    elif isinstance(expected, pd.DataFrame):
        assert_frame_equal(got, expected, check_freq=False, check_flags=True)
    elif isinstance(expected, pl.Series):
        assert_polars_series_equal(got, expected)
    elif isinstance(expected, pl.DataFrame):
        assert_polars_equal(got, expected)
    else:
        np.testing.assert_array_equal(got.toarray(), expected.toarray())
        assert got.has_sorted_indices and got.dtype == expected.dtype
    if isinstance(expected, (pd.Series, pd.DataFrame)):
        assert got.attrs == expected.attrs


def rows_of(table: Any, batch: Any) -> Any:
    rows = slice(None) if batch is None else slice(0, batch) if isinstance(batch, int) else batch
    if isinstance(table, (pd.Series, pd.DataFrame)):
        return table.iloc[rows]
    is_mask = isinstance(rows, np.ndarray) and rows.dtype == bool
    if isinstance(table, (pl.Series, pl.DataFrame)) and is_mask:
        return table.filter(pl.Series(rows))
    return table[rows.tolist() if isinstance(rows, np.ndarray) and not is_mask else rows]


def same(table: Any) -> Any:
    return table


# -- as an argument ---------------------------------------------------------------------------------------------------

WHERE = (1, 2, 3, 0)
VERBS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "call": lambda f, table, batch: f(table, batch=batch),
    "submit": lambda f, table, batch: f.submit(table, batch=batch).result(),
    "keyword": lambda f, table, batch: f(table=table, batch=batch),
    "stream": lambda f, table, batch: next(iter(f.stream([rows_of(table, batch)]))),
    "serial": lambda f, table, batch: f.serial(table, batch=batch),
    "slices": lambda f, table, batch: [
        part for parts in f(table, batch=batch, num_slices=2) if parts is not None for part in parts
    ],
}


@pytest.mark.parametrize("is_whole", WHOLE_OR_SAMPLE)
def test_each_rank_gets_its_rows(shared_runtimes: Any, subtests: Any, is_whole: bool) -> None:
    """By every verb, of every batch. What ranks return is joined under "gather"; broadcast, a table comes whole."""
    apart, together, whole = (
        {where: shared_runtimes[where].function(same, **options) for where in WHERE}
        for options in ({"outputs": None}, {"outputs": "gather"}, {"bcast_inputs": "table", "outputs": "first"})
    )
    places = WHERE if is_whole else (2, 0)  # each worker of each runtime imports the libraries
    cases = list(itertools.product(range(len(BATCHES)), places, VERBS))
    for kind, make in KINDS.items():
        table = make()
        for number, where, verb in cases if is_whole else random.Random(kind).sample(cases, 1):
            batch, num_ranks = BATCHES[number], 1 if where == 0 or verb == "serial" else where
            chosen = np.arange(N)[slice(batch) if batch is None or isinstance(batch, int) else batch]
            shares = [part for part in np.array_split(chosen, num_ranks) if len(part)]
            if verb == "slices":
                shares = [cut for part in shares for cut in np.array_split(part, 2) if len(cut)]
            with subtests.test(kind=kind, batch=str(batch), where=where, verb=verb):
                if len(chosen):
                    got = [part for part in VERBS[verb](apart[where], table, batch) if part is not None]
                    for part, rows in zip(got, shares, strict=True):
                        assert_same(part, rows_of(table, rows))
                if "CSR" not in kind:
                    assert_same(together[where](table, batch=batch), rows_of(table, batch))
        with subtests.test(kind=kind):
            assert_same(whole[2](table), table)
            assert_same(next(iter(shared_runtimes[2].map(same, [table]))), table)
            if kind in ("pandas, every dtype", "pandas, a series", "polars, every dtype"):
                report = together[2].verify(table, batch=[5, 1, 1, 20])
                assert report and report.oracle == "plain"


def test_an_index_counts_where_its_rows_do(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x: x.index, outputs=None)
    series = pd.Series(np.arange(10.0), index=pd.RangeIndex(3, 33, 3))
    for batch in (None, slice(1, 9, 2), slice(None, None, -1)):
        got, expected = f(series, batch=batch), rows_of(series, batch).index
        assert all(isinstance(part, pd.RangeIndex) for part in got)
        assert got[0].append(got[1]).equals(expected)
    days = pd.Series(np.arange(10.0), index=pd.date_range("2020", periods=10, freq="D"))
    assert [part.freq for part in f(days)] == [days.index.freq] * 2
    picked = [days.iloc[rows].index.freq for rows in ([0, 5, 1], [2, 4])]
    assert [part.freq for part in f(days, batch=[0, 5, 1, 2, 4])] == picked


def test_long_columns_of_objects(shared_runtimes: Any) -> None:
    """A batch may be a series."""
    f = shared_runtimes[2].function(same, outputs="gather")
    text, objects = ["a", "bc"] * 10_000, [(k, str(k)) for k in range(20_000)]
    for table in (pd.DataFrame({"x": text}), pl.DataFrame({"x": text}), pd.DataFrame({"x": objects})):
        picked = np.random.default_rng(2).integers(0, 20_000, 500).tolist()
        for batch in (None, slice(8_000, 17_000), picked, slice(None, None, -7)):
            assert_same(f(table, batch=batch), rows_of(table, batch))
    frame, table = with_index(indexes()["text"]), every_polars_dtype()
    assert_same(f(frame, batch=frame["a"] > 9), frame[frame["a"] > 9])
    assert_same(f(table, batch=table["float"] > 0.5), table.filter(table["float"] > 0.5))


def test_in_a_nesting_and_beside_other_inputs(rt: Any, subtests: Any) -> None:
    frame, csr = with_index(indexes()["days"]), matrix(scipy.sparse.csr_matrix)
    other, weights, numbers = pl.DataFrame({"z": np.arange(N)}), pd.Series([1.0, 2.0], index=["p", "q"]), np.arange(N)
    sharded = rt.shared(numbers, sharded=True)

    def compute(t: Any, w: Any, n: Any) -> Any:
        return t["frame"]["a"] * w["q"] + t["pair"][0] + t["pair"][1]["z"].to_numpy() + t["csr"] @ np.ones(6) + n

    f = rt.function(compute, bcast_inputs="w", outputs="gather")
    for batch in (slice(4, 13), None, [22, 0, 11, 5]):
        rows = slice(None) if batch is None else batch
        expected = compute(
            {"frame": rows_of(frame, rows), "pair": (numbers[rows], other[rows]), "csr": csr[rows]},
            weights,
            numbers[rows],
        )
        tree = {"frame": frame, "pair": (rt.data(numbers), other), "csr": csr}
        with subtests.test(batch=str(batch)):
            assert_same(f(tree, weights, numbers, batch=batch), expected)
            found, order = rt.function(lambda t, s: (t, s), outputs="gather")(frame, sharded, batch=batch)
            assert_same(found, rows_of(frame, rows))
            assert order.tolist() == numbers[rows].tolist()


def test_repeated_calls_see_what_has_changed(shared_runtimes: Any, subtests: Any) -> None:
    """Values, categories, labels and dtypes of equal shape: none is taken for that of the call before."""

    def lengths(d: Any) -> Any:
        return d.assign(length=d.iloc[:, 0].astype(str).str.len())

    f = shared_runtimes[2].function(lengths, outputs="gather")
    category = pd.Series(["x", "yy", "x", "yy"], dtype="category")
    columns = (
        category,
        pd.Categorical(["x", "yy", "x", "yy"], categories=["yy", "x"]),
        category.cat.rename_categories({"x": "zzz"}),
        ["x", "yyy", "x", "yyy"],
        np.arange(4.0),
        np.arange(5.0, 9.0),
    )
    for name, column in itertools.product(("a", "b"), columns):
        with subtests.test(name=name, column=str(column)):
            frame = pd.DataFrame({name: column}, index=list("pqrs"))
            for _ in range(3):
                assert_same(f(frame), lengths(frame))


def test_what_travels_is_the_rows_of_the_call(rt: Any) -> None:
    """Through shared memory, and no others."""
    size = 100_000
    f = rt.function(lambda d: d.shape[0], outputs="sum")
    numbers, texts = np.arange(1.0 * size), [f"text {k}" for k in range(size)]
    tables = {"a": numbers, "b": texts}
    for table in (
        pd.DataFrame(tables),
        pl.DataFrame(tables),
        pl.Series(texts),
        scipy.sparse.csr_array(numbers[:, None]),
    ):
        for rows in (slice(0, 10), [7, 99_999, 3, 3], None):
            f(table, batch=rows)
            before = dict(rt.counters)
            assert f(table, batch=rows) == (size if rows is None else len(np.arange(size)[rows]))
            down, staged = (rt.counters[key] - before[key] for key in ("bytes_down", "bytes_staged"))
            assert down < 1000 and (rows is None or staged < 20_000)


def test_columns_and_classes_of_ones_own(shared_runtimes: Any) -> None:
    """New columns are the rank's own. Classes of the script, also such as only a column brings, may change."""

    def change(d: Any) -> Any:
        d["b"] = d["a"] * 2
        d.attrs["seen"] = True
        return d

    def write(d: Any) -> Any:
        d.iloc[0, 0] = 9.0

    numbers = pd.DataFrame({"a": np.arange(4.0)})
    for _ in range(2):
        got = shared_runtimes[2].function(change, outputs="gather")(numbers)
        assert got["b"].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert list(numbers.columns) == ["a"] and numbers.attrs == {}
    with pytest.raises(ValueError, match="read-only"):
        shared_runtimes[2].function(write, outputs=None)(numbers)

    class Labelled(pd.DataFrame):
        @property
        def _constructor(self) -> type:
            return Labelled

    class Price:
        factor = 1

        def value(self) -> int:
            return 2 * self.factor

    f = shared_runtimes[2].function(lambda d: (type(d).__name__, len(d)), outputs=("first", "sum"))
    assert f(Labelled({"a": np.arange(4.0)})) == ("Labelled", 4)
    frame = pd.DataFrame({"a": [Price(), Price(), Price()]})
    g = shared_runtimes[2].function(lambda d: sum(price.value() for price in d["a"]), outputs="sum")
    for Price.factor in (1, 2, 2, 3):
        assert g(frame) == 6 * Price.factor


# -- as an output -----------------------------------------------------------------------------------------------------

REDUCE: dict[str, Callable[[Any], Any]] = {"sum": np.sum, "avg": np.mean, "prod": np.prod, "min": np.min, "max": np.max}


def test_numbers_are_reduced_and_labels_kept(shared_runtimes: Any, subtests: Any) -> None:
    """Uneven rows: 5 on two ranks. Each rank returns tables of its own numbers, so NumPy can tell the result."""
    numbers = np.array([1.5, 2.0, -3.0, 4.0, 0.5])
    index = pd.MultiIndex.from_tuples([("p", 1), ("q", 2)], names=["x", "y"])

    def of_rows(x: Any, op: str) -> Any:
        own = float(REDUCE[op](x))
        frame = pd.DataFrame({1: [own, own], "f": np.array([own, own], np.float32)}, index=index)
        return frame, frame[1], pl.DataFrame({"a": [own, own]}), pl.Series("s", [own] * 9)

    for op, num_slices in zip(REDUCE, itertools.cycle((1, 3))):
        with subtests.test(op=op, num_slices=num_slices):
            f = shared_runtimes[2].function(of_rows, bcast_inputs="op", outputs=op)
            for got, expected in zip(f(numbers, op, num_slices=num_slices), of_rows(numbers, op)):
                assert_same(got, expected)
    assert f.verify(numbers, op, num_slices=num_slices)
    rng = np.random.default_rng(3)
    table = pd.DataFrame({"k": rng.choice(list("abcd"), 400), "v": rng.integers(0, 9, 400), "w": rng.random(400)})
    totals = shared_runtimes[2].function(lambda d: d.groupby("k").sum(), outputs="sum")
    for num_slices in (1, 4):
        assert_frame_equal(totals(table, num_slices=num_slices), table.groupby("k").sum())


def test_missing_values_stay_missing_and_dtypes_are_joined(rt: Any, subtests: Any) -> None:
    """As pandas and polars do it, where ranks return values of several dtypes."""
    series, table, big = pd.Series(np.arange(4)), pl.Series("a", [0, 1, 2, 3]), "Int64"
    for fn, op, argument, expected in (
        (lambda x: pd.Series([2, 3] if x[0] else [1, None], dtype=big), "sum", X, pd.Series([3, None], dtype=big)),
        (lambda x: pl.Series("p", [2, 3] if x[0] else [1, None]), "sum", X, pl.Series("p", [3, None])),
        (lambda x: pd.Series([2.0, 3] if x[0] else [np.nan, 1]), "sum", X, pd.Series([np.nan, 4.0])),
        (lambda x: pd.Series([1, 2] if x[0] else [0.5, 1.5]), "sum", X, pd.Series([1.5, 3.5])),
        (lambda x: pl.Series("a", [1, 2] if x[0] else [0.5, 1.5]), "sum", X, pl.Series("a", [1.5, 3.5])),
        (
            lambda x: x if x.iloc[0] else x.astype(float).where(x > 0),
            "gather", series, series.astype(float).where(series > 0),
        ),
        (lambda x: x if x[0] else x.cast(pl.Float64), "gather", table, table.cast(pl.Float64)),
    ):  # fmt: skip
        with subtests.test(op=op, expected=str(expected)):
            assert_same(rt.function(fn, outputs=op)(argument), expected)


X = np.arange(2)
MISMATCHED: list[tuple[Callable[[Any, bool], Any], str, str]] = [
    (
        lambda d, first: pd.Series([1.0, 2.0], index=["a", "b" if first else "c"]), "sum",
        r"cannot sum the output of 'f': got rank 0: index \['a', 'b'\] of 2; rank 1: index \['a', 'c'\] of 2, "
        r"expected equal labels on all ranks.*reindex",
    ),
    (
        lambda d, first: pd.DataFrame({"v": np.ones(3 if first else 2)}), "max",
        r"cannot take the max of the output.*rank 0: index \[0, 1, 2\] of 3; rank 1: index \[0, 1\] of 2",
    ),
    (lambda d, first: d["a"] * 2, "avg", r'cannot average the output.*rank 0: index .*outputs="gather"'),
    (
        lambda d, first: d.rename(columns={"a": "z"}) if first else d, "gather",
        r"cannot gather.*rank 0: columns \['z', 'b'\]; rank 1: columns \['a', 'b'\]",
    ),
    (
        lambda d, first: d if first else d["a"], "gather",
        r"rank 0: DataFrame of pandas; rank 1: Series of pandas, expected one kind",
    ),
    (lambda d, first: d["a"] if first else np.ones(3), "gather", r"rank 0: an object.*rank 1: float64"),
    (lambda d, first: pl.DataFrame({"v": [1.0] * (2 if first else 3)}), "sum", r"rank 0: 2 rows; rank 1: 3 rows"),
    (
        lambda d, first: pl.Series("v", [1.0] if first else ["x"]), "gather",
        r"rank 0: dtypes \['Float64'\]; rank 1: dtypes \['String'\]",
    ),
]  # fmt: skip
MEANINGLESS: list[tuple[Callable[[Any, bool], Any], str, str]] = [
    (lambda d, first: d, "sum", r"cannot reduce column 'b' of the output.*got dtype (str|object)"),
    (
        lambda d, first: pd.Series(pd.to_datetime(["2020-01-01"])), "max",
        r"cannot reduce the output of 'f' with op 'max': got dtype datetime64",
    ),
    (lambda d, first: pd.Series([1, 2]), "avg", r"cannot average the output.*int64"),
    (lambda d, first: scipy.sparse.csr_matrix(np.eye(2)), "gather", r"got csr_matrix, expected an array.*op None"),
]  # fmt: skip


def refused_by(make: Callable[[Any, bool], Any]) -> Callable[[Any], Any]:
    return lambda d: make(d, 0 in d.index)


def test_outputs_that_are_refused(rt: Any, subtests: Any) -> None:
    frame = with_index(pd.RangeIndex(N))
    for error, table in ((CollectiveMismatch, MISMATCHED), (TypeError, MEANINGLESS)):
        for make, op, words in table:
            with subtests.test(words=words), pytest.raises(error, match=words):
                rt.function(named("f", refused_by(make)), outputs=op)(frame)
    assert rt.function(len, outputs="sum")(np.ones(5)) == 5


# -- what refuses them ------------------------------------------------------------------------------------------------

FRAME = pd.DataFrame({"a": np.arange(6.0), "b": np.arange(6.0)})
EYE = scipy.sparse.csr_matrix(np.eye(6))


def called(*values: Any, **options: Any) -> Callable[[synk.Runtime], Any]:
    """Return how to call a function of as many arguments."""
    fn = (lambda x: x) if len(values) == 1 else (lambda x, y: x)
    return lambda rt: rt.function(fn, **options)(*values)


REFUSED: dict[str, tuple[Callable[[synk.Runtime], Any], str]] = {
    "Data": (lambda rt: rt.data(FRAME), r"DataFrame of pandas.*value\.to_numpy\(\)"),
    "Shared": (lambda rt: rt.shared(FRAME["a"]), r"Series of pandas.*to_numpy"),
    "a new value of Shared": (lambda rt: setattr(rt.shared(np.ones(6)), "value", FRAME["a"]), r"Series.*to_numpy"),
    "framework torch": (
        called(FRAME, framework="torch"),
        r"cannot scatter x of .*DataFrame of pandas, and its inputs are tensors of torch.*x\.to_numpy\(\)",
    ),
    "framework torch, a matrix": (
        called(EYE, framework="torch"),
        r"got a sparse matrix, and its inputs are tensors of torch.*x.toarray\(\)",
    ),
    "a collective": (
        lambda rt: rt.function(lambda x: synk.comm.all_reduce(x["a"]))(FRAME),
        r"Series of pandas.*to_numpy",
    ),
    "a table that is not computed yet": (
        called(pl.LazyFrame({"a": [1]})),
        r"to be computed \(from LazyFrame\).*collect",
    ),
    "what cannot be pickled": (
        called(pd.DataFrame({"g": [(k for k in "a")]})),
        r"cannot scatter x of .*its column 'g' cannot be pickled",
    ),
    "polars' own objects": (called(pl.Series([object()], dtype=pl.Object)), r"cannot scatter x of .*cannot be pickled"),
    "another format": (called(EYE.tocsc()), r"got a sparse matrix \(from csc_matrix\), expected.*tocsr\(\)"),
    "one axis": (
        called(scipy.sparse.csr_array(np.ones(3))),
        r"with one axis \(from csr_array\), expected.*reshape\(-1, 1\)\.tocsr\(\)",
    ),
    "rows that do not fit": (called(FRAME, FRAME[:5]), r"^[^;]*got x with 6 rows and y with 5, expected(?!.*6 rows)"),
    "rows of a matrix": (called(EYE, np.ones(4)), "got x with 6 rows and y with 4"),
}


def test_what_cannot_take_a_table_says_so(shared_runtimes: Any, subtests: Any) -> None:
    for name, (call, words) in REFUSED.items():
        error = ValueError if name.startswith("rows") else TypeError
        with subtests.test(name=name), pytest.raises(error, match=words):
            call(shared_runtimes[2])


def test_no_library_is_imported_without_need() -> None:
    """Neither by the program nor by its workers."""
    script(
        """
        import sys

        LIBRARIES = {"pandas", "polars", "scipy", "torch", "cupy", "jax", "mpi4py", "numba"}

        def total(x):
            return x.sum(), sorted(LIBRARIES & set(sys.modules))

        with synk.fork(1, backend="numpy") as rt:
            for f, x in ((total, np.arange(4.0)), (lambda b: total(b["x"]), {"x": np.arange(4.0)})):
                assert rt.function(f, outputs=("sum", "first"))(x) == (6.0, [])
            assert not LIBRARIES & set(sys.modules)
        """
    ).check()
