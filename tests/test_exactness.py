"""Every call equals NumPy on the whole input, and the serial call: op x dtype x rows x workers x slices x batch.

The reference of each op is its kernel on the whole array; it knows nothing of shards, weights or slices.
"""

from __future__ import annotations

import enum
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.seeds import examples

from synk._pure.ops import OPS
from synk.errors import CollectiveMismatch

WORKERS = (1, 2, 3, 4)
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


def picked_by(batch: Any, x: np.ndarray) -> np.ndarray:
    """Return the rows that NumPy picks."""
    if batch is None:
        return x
    return x[:batch] if isinstance(batch, int) else x[batch]


class Functions:
    """One function per op on each shared runtime; ``inline`` is the runtime without processes."""

    def __init__(self, runtimes: Any) -> None:
        self.runtimes = runtimes
        self._made: dict[tuple[Any, str], Any] = {}

    def __call__(self, where: Any, op: str) -> Any:
        key = (where, op)
        if key not in self._made:
            self._made[key] = self.runtimes[where].function(KERNELS[op], outputs=op, name=op)
        return self._made[key]


@pytest.fixture(scope="module")
def functions(shared_runtimes: Any) -> Iterator[Functions]:
    yield Functions(shared_runtimes)


def assert_equal(got: Any, want: np.ndarray, op: str) -> None:
    """Equal, and of the same dtype; averages to the rounding of each rank's own one, which is below 64 in size."""
    assert np.asarray(got).dtype == want.dtype
    if op == "avg":
        rounding = 64 * float(np.finfo(want.dtype).eps)
        np.testing.assert_allclose(got, want, rtol=0, atol=rounding)
    else:
        np.testing.assert_array_equal(got, want)


calls = {
    "rows": st.integers(1, 50),
    "columns": st.integers(1, 3),
    "seed": st.integers(0, 2**20),
    "batch_kind": st.sampled_from(["none", "count", "slice", "step", "backwards", "list", "array", "mask"]),
    "num_slices": st.sampled_from([1, 1, 2, 3, 7]),
    "as_data": st.booleans(),
}
thorough = examples(6)


@pytest.mark.parametrize("where", [*WORKERS, "inline"])
@pytest.mark.parametrize("op", KERNELS)
@thorough
@given(data=st.data(), **calls)
@pytest.mark.sampled(20)
def test_a_call_equals_numpy_and_the_serial_call(
    functions: Functions,
    shared_runtimes: Any,
    where: Any,
    op: str,
    data: st.DataObject,
    rows: int,
    columns: int,
    seed: int,
    batch_kind: str,
    num_slices: int,
    as_data: bool,
) -> None:
    dtype = data.draw(st.sampled_from(DTYPES[op]))
    x = rows_of(dtype, op, rows, columns, seed)
    batch = pick(batch_kind, rows, np.random.default_rng(seed))
    f = functions(where, op)
    rows_in = functions.runtimes[where].data(x) if as_data else x
    want = reference(op, picked_by(batch, x))
    assert_equal(f(rows_in, batch=batch, num_slices=num_slices), want, op)
    assert_equal(f.serial(rows_in, batch=batch), want, op)


@pytest.mark.parametrize("where", [*WORKERS, "inline"])
def test_every_row_count_from_0_to_50(functions: Functions, shared_runtimes: Any, where: Any) -> None:
    for rows in range(51):
        x = rows_of("float64", "sum", rows, 2, rows)
        for op in ("sum", "gather"):
            np.testing.assert_array_equal(functions(where, op)(x), reference(op, x))
        for op in ("avg", "min", "max"):
            if rows == 0:
                with pytest.raises(ValueError, match="row"):
                    functions(where, op)(x)
            else:
                assert_equal(functions(where, op)(x), reference(op, x), op)


@pytest.mark.parametrize("num_workers", WORKERS)
@thorough
@given(rows=st.integers(1, 30), seed=st.integers(0, 2**20), num_slices=st.sampled_from([1, 2, 5]))
def test_nested_outputs_each_with_its_op(
    shared_runtimes: Any, num_workers: int, rows: int, seed: int, num_slices: int
) -> None:
    rt = shared_runtimes[num_workers]
    x = rows_of("float64", "sum", rows, 3, seed)
    w = np.arange(3.0)
    f = _nested(rt)
    loss, parts = f(w, x, num_slices=num_slices)
    r = x @ w
    np.testing.assert_allclose(loss, (r @ r) / rows, rtol=1e-13)
    np.testing.assert_array_equal(parts["gradient"], r @ x)
    np.testing.assert_array_equal(parts["residuals"], r)
    assert parts["worst"] == r.max()
    serial_loss, serial_parts = f.serial(w, x)
    np.testing.assert_allclose(loss, serial_loss, rtol=1e-13)
    np.testing.assert_array_equal(parts["gradient"], serial_parts["gradient"])


_nested_functions: dict[int, Any] = {}


def _nested(rt: Any) -> Any:
    def step(w: np.ndarray, x: np.ndarray) -> Any:
        r = x @ w
        return (r @ r) / len(x), {"gradient": r @ x, "residuals": r, "worst": r.max()}

    if id(rt) not in _nested_functions:
        outputs = ("avg", {"gradient": "sum", "residuals": "gather", "worst": "max"})
        _nested_functions[id(rt)] = rt.function(step, bcast_inputs="w", outputs=outputs)
    return _nested_functions[id(rt)]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_first_callable_and_none(shared_runtimes: Any, num_workers: int) -> None:
    """``first`` is rank 0's, a callable folds in rank order, None is one entry per rank."""
    rt = shared_runtimes[num_workers]
    f = rt.function(
        lambda x: (x[0], "".join(f"{n} " for n in x), x.sum(), {"rows": len(x)}),
        outputs=("first", lambda a, b: a + b, max, None),
    )
    for rows in (1, 2, 3, 4, 9):
        x = np.arange(rows) + 5.0
        first, folded, largest, each = f(x)
        parts = [part for part in np.array_split(x, num_workers) if len(part)]
        assert first == x[0]
        assert folded == "".join(f"{n} " for n in x)
        assert largest == max(part.sum() for part in parts)
        assert each == [{"rows": len(part)} for part in parts] + [None] * (num_workers - len(parts))


LARGE = [
    (op, dtype)
    for op in KERNELS
    for dtype in ("float32", "float64", "float16", "int64")
    if dtype != "int64" or dtype in DTYPES[op]
]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(("op", "dtype"), LARGE)
@pytest.mark.sampled(60)
def test_large_outputs_take_the_other_path_to_the_same_numbers(
    shared_runtimes: Any, num_workers: int, op: str, dtype: str
) -> None:
    """From 256 KB on the workers reduce, each a chunk: the same result, bit by bit where the numbers are exact."""
    rt = shared_runtimes[num_workers]
    columns = 200_003
    rng = np.random.default_rng(3)
    x = rng.integers(1, 3, (5, columns)).astype(dtype)
    x[rng.random(x.shape) < 0.5] = 1
    f = rt.function(KERNELS[op], outputs=op)
    assert_equal(f(rt.data(x)), reference(op, x), op)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_subset_of_the_outputs_is_the_same_numbers(shared_runtimes: Any, num_workers: int) -> None:
    rt = shared_runtimes[num_workers]
    x = rows_of("float64", "sum", 13, 2, 1)
    f = rt.function(lambda x: (x.sum(axis=0), x.mean(axis=0), x), outputs=("sum", "avg", "gather"))
    total, mean, same = f(x)
    np.testing.assert_array_equal(f(x, output_subset=[0])[0], total)
    got = f(x, output_subset=[2, 0])
    np.testing.assert_array_equal(got[0], same)
    np.testing.assert_array_equal(got[1], total)
    g = rt.function(lambda x: {"total": x.sum(axis=0), "mean": x.mean(axis=0)}, outputs={"total": "sum", "mean": "avg"})
    np.testing.assert_array_equal(g(x, output_subset=["mean"])["mean"], mean)


def test_float16_is_accumulated_in_float32_and_rounded_once(shared_runtimes: Any) -> None:
    """The average of two values that would overflow if they were added in float16."""
    rt = shared_runtimes[2]
    average, total = rt.function(lambda x: (np.float16(40_000) * np.ones(2, np.float16),) * 2, outputs=("avg", "sum"))(
        np.ones(2)
    )
    assert average.tolist() == [40_000.0] * 2
    assert average.dtype == np.float16
    assert np.isinf(total).all()


@pytest.mark.parametrize("where", [*WORKERS, "inline"])
def test_broadcast_arguments_arrive_whole(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    w = {"layers": [np.arange(6.0).reshape(2, 3), (np.float32(2), None)], "name": "model"}
    f = rt.function(
        lambda w, x: (x @ w["layers"][0] * w["layers"][1][0], w["name"]),
        bcast_inputs=["w"],
        outputs=("gather", "first"),
    )
    x = rows_of("float64", "sum", 7, 2, 0)
    result, name = f(w, x)
    np.testing.assert_array_equal(result, x @ w["layers"][0] * 2)
    assert name == "model"


# ----- what random programs have found


def test_a_broadcast_none_after_data_that_is_gone(shared_runtimes: Any) -> None:
    """The short way of a repeated call must not take None for the ``Data`` of before."""
    rt = shared_runtimes[2]
    f = rt.function(lambda scale, x: x.sum() * (1 if scale is None else scale[0]), bcast_inputs="scale", outputs="sum")
    data = rt.data(np.array([3.0]))
    x = np.arange(5.0)
    assert f(data, x) == 30.0
    del data
    gc.collect()
    assert f(None, x) == 10.0
    assert f(None, x) == 10.0
    with pytest.raises(TypeError, match="x"):
        f(None, None)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize("op", ["avg", "sum", "max", "gather"])
@pytest.mark.parametrize("dtype", [">f8", ">c16", ">f2", ">i4"])
@pytest.mark.parametrize("size", [3, 50_000])
def test_outputs_are_in_the_byte_order_of_the_machine(
    shared_runtimes: Any, num_slices: int, op: str, dtype: str, size: int
) -> None:
    """Whatever their size and however the rows divide."""
    if (op, dtype) in (("avg", ">i4"), ("max", ">c16")):
        return
    rt = shared_runtimes[2]
    table = np.arange(float(size)).astype(dtype)
    f = rt.function(lambda table, x: table["a"], bcast_inputs="table", outputs=op)
    for num_rows in (4, 5):
        got = f({"a": table}, np.ones(num_rows), num_slices=num_slices)
        assert got.dtype == table.dtype.newbyteorder("=")
        assert got.dtype.isnative
        if op in ("avg", "max"):
            np.testing.assert_array_equal(got, table)


@pytest.mark.parametrize("num_rows", [4, 60_000])
def test_records_keep_their_layout(shared_runtimes: Any, num_rows: int) -> None:
    """``np.concatenate`` would pack their fields."""
    rt = shared_runtimes[2]
    dtype = np.dtype({"names": ["a", "b"], "formats": ["f8", "i1"], "offsets": [8, 24], "itemsize": 32})
    x = np.zeros(num_rows, dtype)
    x["a"] = np.arange(num_rows)
    for num_slices in (1, 3):
        got = rt.function(lambda x: x, outputs="gather")(x, num_slices=num_slices)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got["a"], x["a"])


def test_records_and_plain_structures_are_told_apart(shared_runtimes: Any) -> None:
    """NumPy calls their dtypes equal, but the rows of the one have attributes."""
    rt = shared_runtimes[2]
    f = rt.function(lambda x: type(x[0]).__name__, outputs=None)
    plain = np.zeros(4, [("a", "f8")])
    for _ in range(2):
        assert f(plain) == ["void"] * 2
        assert f(plain.astype(np.dtype((np.record, plain.dtype)))) == ["record"] * 2


class Color(enum.IntEnum):
    RED = 1


def test_numbers_that_are_not_combined_keep_their_class(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: (Color.RED, x.sum(), 2.5), outputs=(None, None, "first"))
    colors, sums, number = f(np.arange(4.0))
    assert [type(color) for color in colors] == [Color] * 2
    assert [(type(value), float(value)) for value in sums] == [(np.float64, 1.0), (np.float64, 5.0)]
    assert type(number) is float
    sliced = rt.function(lambda x: x.sum(), outputs=None)(np.arange(4.0), num_slices=2)
    assert [[(type(value), float(value)) for value in values] for values in sliced] == [
        [(np.float64, 0.0), (np.float64, 1.0)],
        [(np.float64, 2.0), (np.float64, 3.0)],
    ]


def test_data_without_bytes(shared_runtimes: Any) -> None:
    """One number that is freed has no length to become 0; rows of no bytes have no segment."""
    rt = shared_runtimes[2]
    with pytest.raises(ValueError, match="no axes"):
        rt.data(np.array(3.0)).free_memory()
    empty = rt.data(np.zeros(4, np.dtype([])))
    assert rt.function(lambda x: len(x), outputs="sum")(empty) == 4


def test_texts_of_different_width_get_a_hint(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: np.array([f"row {i}" for i in x]), outputs="gather")
    with pytest.raises(CollectiveMismatch, match=r"one width, as in astype\('U20'\)"):
        f(np.array([1, 2, 10, 11]))


def test_outputs_may_look_different_in_every_call(shared_runtimes: Any) -> None:
    """Other shapes, dtypes and structures, again and again: views of slots of an earlier look are never used."""
    rt = shared_runtimes[2]

    def work(x: Any, n: Any) -> Any:
        if n % 3 == 0:
            return np.full(int(n), 1, np.int16)
        return {"a": np.full(int(n), x.sum()), "b": [str(n)] if n % 2 else None}

    f = rt.function(work, bcast_inputs="n", outputs=None)
    rng = np.random.default_rng(0)
    for n in rng.choice([1, 2, 3, 4, 5, 6, 100_000, 200_001, 300_000], 150):
        for result in f(np.ones(4), np.int64(n)):
            part = result if n % 3 == 0 else result["a"]
            assert part.shape == (n,) and (part == (1 if n % 3 == 0 else 2.0)).all()
