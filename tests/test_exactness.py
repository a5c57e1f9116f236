"""Every call equals NumPy on the whole input, and the serial call: op x dtype x rows x workers x slices x batch.

Calls without rows: ``faults/test_h_inputs_and_outputs.py``.
The reference of each op is its kernel on the whole array; it knows nothing of shards, weights or slices.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.harness import same_workers
from support.rank_arrays import picked

from synk._pure.ops import OPS
from synk._wire.messages import LARGE_NBYTES
from synk.errors import CollectiveMismatch

WORKERS = (1, 2, 3, 4)
WHERE = [*WORKERS, 0]
FLOATS = ("float16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int16", "int32", "uint32", "int64", "uint64")
COMPLEX = ("complex64", "complex128")

DTYPES: dict[str, tuple[str, ...]] = {
    "avg": FLOATS + COMPLEX,
    "sum": FLOATS + INTEGERS + COMPLEX,
    "prod": ("float32", "float64", "int8", "int32", "int64", "uint64", "complex128"),
    "min": (*FLOATS, *INTEGERS, "bool"),
    "max": (*FLOATS, *INTEGERS, "bool"),
    "gather": (*FLOATS, *INTEGERS, *COMPLEX, "bool", "datetime64[s]", "S3", "U2", "i4,f8"),
}

KERNELS: dict[str, Callable[[Any], Any]] = {
    "avg": lambda x: x.mean(axis=0),
    "sum": lambda x: x.sum(axis=0, dtype=x.dtype),
    "prod": lambda x: x.prod(axis=0, dtype=x.dtype),
    "min": lambda x: x.min(axis=0),
    "max": lambda x: x.max(axis=0),
    "gather": lambda x: x[:, ::-1],
}


def reference(op: str, x: np.ndarray) -> np.ndarray:
    """Return the result over all rows at once, as NumPy has it; 16-bit floats in float32, rounded once."""
    wide = x.astype(np.float32) if x.dtype == np.float16 else x
    return KERNELS[op](wide).astype(x.dtype)


def test_each_op_is_compared() -> None:
    missing = set(OPS) - set(KERNELS) - {"first"}
    assert not missing, f"add to DTYPES and KERNELS: {missing}"


def rows_of(dtype: str, op: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Return an array of small exact numbers: sums are the same in every order, so that equality can be asked."""
    rng = np.random.default_rng(seed)
    shape = (rows, columns)
    if dtype == "i4,f8":
        array = np.zeros(shape, dtype)
        array["f0"], array["f1"] = rng.integers(-9, 9, shape), rng.normal(size=shape)
        return array
    if dtype.startswith(("S", "U", "datetime")):
        return rng.integers(0, 99, shape).astype(dtype)
    if op == "prod":
        low = 0 if dtype.startswith("u") else -2
        return rng.integers(low, 3, shape).astype(dtype)
    if dtype in ("float32", "float64") and op in ("min", "max", "gather"):
        array = rng.normal(size=shape).astype(dtype)
        array[rng.random(shape) < 0.05] = np.nan
        array[rng.random(shape) < 0.05] = -0.0
        return array
    if dtype == "bool":
        return rng.random(shape) < 0.5
    low = 0 if dtype.startswith("u") else -64
    return rng.integers(low, 64, shape).astype(dtype)


def pick(kind: str, rows: int, rng: np.random.Generator) -> Any:
    """Return a batch of a given kind that names at least one row."""
    low, high = sorted(rng.integers(0, rows, 2).tolist())
    return {
        "none": None,
        "count": int(rng.integers(1, rows + 1)),
        "slice": slice(low, high + 1),
        "step": slice(low, None, int(rng.integers(1, 4))),
        "backwards": slice(None, None, -int(rng.integers(1, 3))),
        "list": rng.integers(-rows, rows, int(rng.integers(1, 2 * rows + 1))).tolist(),
        "array": rng.permutation(rows)[: int(rng.integers(1, rows + 1))],
        "mask": (rng.random(rows) < 0.6) | (np.arange(rows) == low),
    }[kind]


def assert_equal(got: Any, want: np.ndarray, op: str) -> None:
    """Equal, and of the same dtype; averages to the rounding of each rank's own one, which is below 64 in size."""
    assert np.asarray(got).dtype == want.dtype
    if op == "avg":
        rounding = 64 * float(np.finfo(want.dtype).eps)
        np.testing.assert_allclose(got, want, rtol=0, atol=rounding)
    else:
        np.testing.assert_array_equal(got, want)


# ----- the matrix


BATCH_KINDS = ("none", "count", "slice", "step", "backwards", "list", "array", "mask")
WAYS = ("call", "keyword", "submit", "serial")
LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as it is": lambda x: x,
    "fortran": np.asfortranarray,
    "with gaps": lambda x: np.repeat(x, 3, axis=0)[1::3],
    "backwards": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "offset": lambda x: np.concatenate([x[:1], x])[1:],
}


class Case(NamedTuple):
    """One call. ``seed``: of its numbers and of its batch; ``batch``: its kind."""

    op: str
    dtype: str
    rows: int
    columns: int
    batch: str
    num_slices: int
    as_data: bool
    way: str
    layout: str
    seed: int


def drawn_calls(count: int, seed: str) -> Iterator[Case]:
    """Yield ``count`` random calls of each op and dtype."""
    pairs = [(op, dtype) for op, dtypes in DTYPES.items() for dtype in dtypes]
    rng = random.Random(seed)
    for number, (op, dtype) in enumerate(pairs * count):
        num_slices = rng.choice([1, 1, 2, 3, 7])
        is_large = rng.random() < 0.15 and np.dtype(dtype).kind in "iuf"  # the workers reduce
        rows = rng.randint(1, 5 if is_large or rng.random() < 0.3 else 50)  # also fewer than ranks and slices
        columns = LARGE_NBYTES // np.dtype(dtype).itemsize + 3 if is_large else rng.randint(1, 3)
        batch, as_data = rng.choice(BATCH_KINDS), rng.random() < 0.5
        way, layout = rng.choice(WAYS), rng.choice([*LAYOUTS])
        yield Case(op, dtype, rows, columns, batch, num_slices, as_data, way, layout, number)


def called(f: Any, rows: Any, batch: Any, case: Case) -> Any:
    if case.way == "serial":
        return f.serial(rows, batch=batch)
    options = {"batch": batch, "num_slices": case.num_slices}
    if case.way == "keyword":
        return f(x=rows, **options)
    return f.submit(rows, **options).result() if case.way == "submit" else f(rows, **options)


@pytest.mark.parametrize("where", [*WHERE, "1+3", "2+2"])
def test_every_call_equals_numpy(subtests: Any, shared_runtimes: Any, storm_count: Any, where: Any) -> None:
    """Over nodes it is what one machine with as many workers gives, bit for bit."""
    places = [where, 4] if "+" in str(where) else [where]
    functions = [
        {op: shared_runtimes[place].function(kernel, outputs=op) for op, kernel in KERNELS.items()} for place in places
    ]
    for case in drawn_calls(storm_count(3 - len(places)), seed=f"{where}"):
        with subtests.test(case=str(case)):
            x = LAYOUTS[case.layout](rows_of(case.dtype, case.op, case.rows, case.columns, case.seed))
            batch = pick(case.batch, case.rows, np.random.default_rng(case.seed))
            rows = shared_runtimes[where].data(x) if case.as_data else x
            got = called(functions[0][case.op], rows, batch, case)
            assert_equal(got, reference(case.op, picked(batch, x)), case.op)
            for others in functions[1:]:
                assert np.asarray(called(others[case.op], x, batch, case)).tobytes() == np.asarray(got).tobytes()


# ----- outputs


def several(w: np.ndarray, x: np.ndarray) -> Any:
    r = x @ w
    parts = {"gradient": r @ x, "residuals": r, "worst": r.max()}
    return (r @ r) / len(x), parts, r[0], "".join(f"{n} " for n in r), {"rows": len(x)}


SEVERAL = ("avg", {"gradient": "sum", "residuals": "gather", "worst": "max"}, "first", lambda a, b: a + b, None)


@pytest.mark.parametrize("where", (1, 3))
def test_each_output_has_its_op(subtests: Any, shared_runtimes: Any, where: int) -> None:
    """``first`` is rank 0's, a callable folds in rank order, None is one entry per rank; a subset is the same."""
    f = shared_runtimes[where].function(several, bcast_inputs="w", outputs=SEVERAL)
    w = np.arange(3.0)
    for rows in (1, 2, 3, 4, 9, 30):
        x = rows_of("float64", "sum", rows, 3, rows)
        counts = [len(part) for part in np.array_split(x, where)]
        each = [{"rows": count} if count else None for count in counts]
        expected = (*several(w, x)[:4], each)
        for options in ({}, {"num_slices": 5}, {"output_subset": np.array([1, 0])}):
            with subtests.test(rows=rows, options=options):
                got = f(w, x, **options)
                loss, parts = got[::-1] if "output_subset" in options else got[:2]
                np.testing.assert_allclose(loss, expected[0], rtol=1e-13)
                np.testing.assert_equal(parts, expected[1])
                if not options:
                    assert got[2:] == expected[2:]
        np.testing.assert_allclose(f.serial(w, x)[0], expected[0], rtol=1e-13)
    by_name = shared_runtimes[where].function(lambda x: {"a": x.sum(), "b": x}, outputs={"a": "sum", "b": "gather"})
    assert by_name(np.arange(4.0), output_subset=["a"])["a"] == 6.0


def test_outputs_are_in_the_byte_order_of_the_machine(subtests: Any, shared_runtimes: Any) -> None:
    """Whatever their size and however the rows divide."""
    kinds = [("avg", ">f8"), ("sum", ">c16"), ("max", ">f2"), ("gather", ">i4"), ("sum", ">f8")]
    for (op, dtype), size, num_slices in itertools.product(kinds, [3, 50_000], [1, 2]):
        with subtests.test(op=op, dtype=dtype, size=size, num_slices=num_slices):
            table = np.arange(float(size)).astype(dtype)
            f = shared_runtimes[2].function(lambda table, x: table["a"], bcast_inputs="table", outputs=op)
            for num_rows in (4, 5):
                got = f({"a": table}, np.ones(num_rows), num_slices=num_slices)
                assert got.dtype == table.dtype.newbyteorder("=")
                assert got.dtype.isnative
                if op in ("avg", "max"):
                    np.testing.assert_array_equal(got, table)


def test_records_keep_their_layout_and_their_class(subtests: Any, rt: Any) -> None:
    """``np.concatenate`` would pack their fields; rows of a recarray have attributes though the dtypes are equal."""
    dtype = np.dtype({"names": ["a", "b"], "formats": ["f8", "i1"], "offsets": [8, 24], "itemsize": 32})
    same = rt.function(lambda x: x, outputs="gather")
    for num_rows, num_slices in itertools.product([4, 60_000], [1, 3]):
        with subtests.test(num_rows=num_rows, num_slices=num_slices):
            x = np.zeros(num_rows, dtype)
            x["a"] = np.arange(num_rows)
            got = same(x, num_slices=num_slices)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got["a"], x["a"])
    assert rt.function(lambda x: len(x), outputs="sum")(rt.data(np.zeros(4, np.dtype([])))) == 4  # no bytes
    f = rt.function(lambda x: type(x[0]).__name__, outputs=None)
    plain = np.zeros(4, [("a", "f8")])
    for _ in range(2):
        assert f(plain) == ["void"] * 2
        assert f(plain.astype(np.dtype((np.record, plain.dtype)))) == ["record"] * 2


class Color(enum.IntEnum):
    RED = 1


def test_numbers_keep_their_class(subtests: Any, shared_runtimes: Any) -> None:
    """Four of seven rows are rank 0's; averages count by rows, so that slices change only the smallest values' one."""
    ops = (None, "first", "sum", "sum", "max", "avg")
    f = shared_runtimes[2].function(
        lambda x: (Color.RED, 2.5, x.sum(), len(x), np.float16(x.max()), x.min()), outputs=ops
    )
    for num_slices, average in ((1, (0 * 4 + 4 * 3) / 7), (2, (0 * 2 + 2 * 2 + 4 * 2 + 6) / 7)):
        with subtests.test(num_slices=num_slices):
            of_each, *rest = f(np.arange(7.0), num_slices=num_slices)
            each = of_each if num_slices == 1 else [value for slices in of_each for value in slices]
            assert [type(value) for value in each] == [Color] * 2 * num_slices
            assert rest == [2.5, 21.0, 7, 6.0, average]
            assert [type(value) for value in rest] == [float, np.float64, int, np.float16, np.float64]


def rank_of(x: np.ndarray) -> int:
    return int(x[0])


DISAGREEMENTS: dict[str, tuple[str, list[Any], str]] = {
    "shapes": ("sum", [np.zeros(2), np.zeros(3)], r'rank 0: float64 \(2,\); rank 1: float64 \(3,\).*outputs="gather"'),
    "large shapes": ("sum", [np.zeros(100_000), np.zeros(100_001)], r"\(100000,\); rank 1: float64 \(100001,\)"),
    "dtypes": ("max", [np.zeros(2), np.zeros(2, "f4")], r"float64 \(2,\); rank 1: float32 \(2,\)"),
    "trailing shapes": ("gather", [np.zeros((2, 2)), np.zeros((2, 3))], "the same dtype and trailing shape"),
    "texts": ("gather", [np.array(["a"]), np.array(["ab"])], r"one width, as in astype\('U20'\)"),
    "nestings": ("sum", [np.float64(1), (np.float64(1),)], r"rank 0: value; rank 1: \(value,\)"),
    "containers": ("sum", [[1.0, 2.0], {"a": 1.0, "b": 2.0}], r"rank 0: .*; rank 1: \{'a': value, 'b': value\}"),
    "keys": ("sum", [{"a": np.float64(1)}, {"b": np.float64(1)}], r"\{'a': value\}; rank 1: \{'b': value\}"),
    "None on one rank": ("sum", [None, np.float64(1)], "rank 0: None; rank 1: value"),
}


def test_ranks_that_disagree_are_told_before_any_reduction(subtests: Any, rt: Any) -> None:
    """All of them are named, the same workers live on, and no buffer of the failed call is used."""
    for name, (op, values, words) in DISAGREEMENTS.items():
        with subtests.test(name), same_workers(rt), pytest.raises(CollectiveMismatch, match=words):
            rt.function(lambda x, values=values: values[rank_of(x)], bcast_inputs="values", outputs=op)(np.arange(2))
    with pytest.raises(CollectiveMismatch, match="got 3 rows for 2 selected ones"):
        rt.function(lambda x: np.zeros(2 - rank_of(x)), outputs="gather")(
            rt.shared(np.arange(2), sharded=True), batch=[1, 0]
        )
