"""H: odd inputs and outputs, and what becomes of results and of ``Data`` afterwards.

The reference is NumPy on the whole array, written here. One table of inputs, each with every op, in two drawn of
{serial, inline, 1, 2, 3 workers}; then lengths, batches and arguments, row by row. What is refused for what it is sends
nothing to a worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import assert_right, nothing_sent, same_workers

from synk.errors import SerializationError, WorkerDied

RNG = np.random.default_rng(7)
PLAIN = RNG.integers(-9, 9, size=(7, 4)).astype(np.float64)
OPS = ("sum", "avg", "min", "max", "gather", None)
WHERE = ("serial", 0, 1, 2, 3)


@dataclass(frozen=True)
class Case:
    """One odd input.

    ``refused``: per op the error that the master raises, ``"*"`` for all ops. ``make`` returns the input.
    """

    row: str
    name: str
    make: Callable[[], Any]
    refused: dict[str | None, type[Exception]] = field(default_factory=dict)


EVERY = {"*": TypeError}
NO_AVERAGE = {"avg": TypeError}
NO_ORDER = {"min": TypeError, "max": TypeError}
NO_NUMBERS = dict.fromkeys(("sum", "avg", "min", "max"), TypeError)


def with_nan(row: int) -> np.ndarray:
    """Return floats with a NaN and infinities, in a given row."""
    array = PLAIN.copy()
    array[row, 1], array[row, 2], array[row, 3] = np.nan, np.inf, -0.0
    array[(row + 3) % 7, 2] = -np.inf
    return array


def records() -> np.ndarray:
    """Return a plain structured array."""
    array = np.zeros(7, dtype=[("a", "<i4"), ("b", "<f8", (2,))])
    array["a"], array["b"] = np.arange(7), PLAIN[:, :2] / 3
    return array


def memory_mapped() -> np.ndarray:
    """Return an array whose rows lie in a file."""
    with tempfile.TemporaryFile() as file:
        file.write(PLAIN.tobytes())
        file.flush()
        return np.memmap(file, PLAIN.dtype, "c", shape=PLAIN.shape)


class Described(np.ndarray):
    """An array with something besides, as libraries return of images, whose operators are NumPy's."""

    label = "seven rows"

    def __array_finalize__(self, source: Any) -> None:
        self.label = getattr(source, "label", "")


CASES = [
    Case("H2", "no rows", lambda: np.empty((0, 4)), dict.fromkeys(("avg", "min", "max", None), ValueError)),
    *(Case("H3", f"{n} rows", lambda n=n: PLAIN[:n]) for n in (1, 2, 3, 4, 5)),
    Case("H4", "0-d array", lambda: np.array(3.0), EVERY),
    Case("H4", "NumPy scalar", lambda: np.float32(3), EVERY),
    Case("H4", "Python number", lambda: 3, EVERY),
    Case("H5", "strided", lambda: np.repeat(PLAIN, 2, axis=0)[::2]),
    Case("H5", "backwards", lambda: PLAIN[::-1]),
    Case("H5", "Fortran order", lambda: np.asfortranarray(PLAIN)),
    Case("H5", "transposed", lambda: np.ascontiguousarray(PLAIN.T).T),
    Case("H5", "stride 0", lambda: np.broadcast_to(PLAIN[0], (7, 4))),
    Case("H5", "three axes", lambda: PLAIN.reshape(7, 2, 2)[:, ::-1]),
    Case("H5", "columns backwards", lambda: PLAIN[:, ::-1]),
    Case("H6", "objects", lambda: np.array([[1, None]] * 7, dtype=object), EVERY),
    Case("H6", "records of objects", lambda: np.zeros(7, dtype=[("a", "O")]), EVERY),
    Case("H7", "records", records, NO_NUMBERS),
    Case("H7", "dates", lambda: np.arange(7).astype("datetime64[D]"), NO_NUMBERS),
    Case("H7", "durations", lambda: np.arange(7).astype("timedelta64[s]"), NO_NUMBERS),
    Case("H7", "bytes", lambda: np.array([b"a", b"bc", b"", b"d", b"e", b"f", b"g"]), NO_NUMBERS),
    Case("H7", "text", lambda: np.array(["a", "bc", "", "ü", "e", "f", "g"]), NO_NUMBERS),
    Case("H8", "big-endian int32", lambda: np.arange(28).reshape(7, 4).astype(">i4"), NO_AVERAGE),
    Case("H8", "big-endian float64", lambda: PLAIN.astype(">f8")),
    Case("H8", "big-endian complex", lambda: (PLAIN + 1j).astype(">c16"), NO_ORDER),
    Case("H9", "read-only", lambda: np.frombuffer(PLAIN.tobytes()).reshape(7, 4)),
    Case("H9", "memory-mapped", memory_mapped),
    Case("H10", "masked", lambda: np.ma.masked_less(PLAIN, 0), EVERY),
    Case("H10", "matrix", lambda: np.array(PLAIN).view(np.matrix), EVERY),  # its * is another one
    Case("H10", "subclass with data of its own", lambda: PLAIN.view(Described), EVERY),
    Case("H10", "recarray", lambda: records().view(np.recarray), NO_NUMBERS),
    Case("H11", "list", lambda: PLAIN.tolist()),
    Case("H11", "list of arrays", lambda: list(PLAIN), EVERY),
    Case("H11", "tuple of numbers", lambda: tuple(PLAIN[:, 0].tolist())),
    Case("H11", "range", lambda: range(7), NO_AVERAGE),
    Case("H11", "ragged", lambda: [[1, 2], [3]], EVERY),
    Case("H11", "generator", lambda: (float(n) for n in range(3)), EVERY),
    Case("H11", "string", lambda: "seven", EVERY),
    Case("H11", "None", lambda: None, EVERY),
    Case("H11", "dict", lambda: {"a": 1}, EVERY),
    *(Case("H12", f"NaN in row {row}", lambda row=row: with_nan(row)) for row in (0, 3, 6)),
    *(
        Case("H13", f"average of {dtype}", lambda dtype=dtype: np.arange(7).astype(dtype), NO_AVERAGE)
        for dtype in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
    ),
    Case("H14", "int8 that wraps", lambda: np.full((7, 2), 100, np.int8), NO_AVERAGE),
    Case("H14", "uint64 that wraps", lambda: np.full(7, 2**63 + 3, np.uint64), NO_AVERAGE),
    Case("H14", "int64 that wraps", lambda: np.full(7, -(2**62) - 1), NO_AVERAGE),
    Case("H15", "bool", lambda: PLAIN > 0, dict.fromkeys(("sum", "avg"), TypeError)),
    Case("H16", "float16 that overflows", lambda: np.full((7, 2), 40_000, np.float16)),
    Case("H16", "float16", lambda: PLAIN.astype(np.float16)),
    Case("H17", "complex64", lambda: (PLAIN * 1j + 1).astype(np.complex64), NO_ORDER),
    Case("H17", "complex128", lambda: PLAIN * 1j + 1, NO_ORDER),
]

KERNELS: dict[str | None, Callable[[Any], Any]] = {
    **{op: partial(saboteurs.reduce_rows, op) for op in ("sum", "avg", "min", "max")},
    "gather": lambda x: x,
    None: lambda x: (len(x), x.tobytes()),
}


def expected(op: str | None, value: Any, where: Any) -> Any:
    """Return what NumPy says of the whole input; with op None what the kernel returns of each rank's rows."""
    x = np.asarray(value)
    x = x.astype(x.dtype.newbyteorder("="))
    if op is None:
        parts = [x, x[:0]] if where == "serial" else np.array_split(x, 1 if where == 0 else where)
        return [(len(part), part.tobytes()) if len(part) else None for part in parts]
    if op == "gather":
        return x
    with np.errstate(all="ignore"):
        wide = x.astype(np.float32) if x.dtype == np.float16 else x
        if op == "sum":
            return np.add.reduce(wide, axis=0, dtype=wide.dtype).astype(x.dtype)
        if op == "avg":
            return np.mean(wide, axis=0).astype(x.dtype)
        return (np.min if op == "min" else np.max)(x, axis=0)


def calls(runtimes: Any, where: Any) -> dict[str | None, Callable[..., Any]]:
    """Return the calls of the table, by op, on one runtime."""
    runtime = runtimes[2 if where == "serial" else where]
    functions = {op: runtime.function(KERNELS[op], outputs=op) for op in OPS}
    runtime.distribute()
    return {op: function.serial if where == "serial" else function for op, function in functions.items()}


def check(op: str | None, got: Any, want: Any) -> None:
    """Assert that a result is NumPy's: to rounding where floats are added up, else bit by bit."""
    if op is None:
        assert got == want
        return
    assert np.asarray(got).dtype == want.dtype
    if want.dtype.kind in "fc" and op in ("avg", "sum"):
        tolerance = {"e": 2e-3, "f": 1e-6, "F": 1e-6}.get(want.dtype.char, 1e-13)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(got, want)
        assert np.asarray(got).tobytes() == want.tobytes(), "signs of zeros, payloads of NaN, records"


def test_H_every_input_with_every_op(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    """Some inputs are refused for what they are, before anything is sent; others because their rows do not combine."""
    table = {where: calls(shared_runtimes, where) for where in WHERE}
    for case in CASES:
        with subtests.test(row=case.row, input=case.name):
            for op in OPS:
                for where in random.Random(f"{case.name} {op}").sample(WHERE, 2):
                    call, error = table[where][op], case.refused.get(op, case.refused.get("*"))
                    if error is None:
                        check(op, call(case.make()), expected(op, case.make(), where))
                        continue
                    is_silent = "*" in case.refused and where != "serial"
                    silence = nothing_sent(shared_runtimes[where]) if is_silent else contextlib.nullcontext()
                    with silence, pytest.raises(error, match="row" if case.row == "H2" else None):
                        call(case.make())
    for num_workers in (1, 2, 3):
        assert_right(shared_runtimes[num_workers])


# ----- rows: how many, and which


ODD_BATCHES: dict[str, Any] = {
    "duplicates and edges": [3, 3, 0, 6, -1, -7],
    "backwards": slice(5, None, -2),
    "beyond": slice(4, 100),
    "mask as list": [True, False] * 3 + [True],
    "uint8": np.array([6, 1], np.uint8),
    "big-endian": np.array([6, 1], ">i8"),
    "range": range(1, 6, 2),
    "tuple": (2, 1),
    "no rows": [],
    "no rows, slice": slice(3, 3),
    "no rows, mask": np.zeros(7, bool),
}


def test_H27_odd_batches_mean_what_numpy_means(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    for where in WHERE:
        call, data = calls(shared_runtimes, where), shared_runtimes[2 if where == "serial" else where].data(PLAIN)
        for kind, batch in ODD_BATCHES.items():
            picked = PLAIN[batch if isinstance(batch, slice) else np.asarray(batch, None if len(batch) else int)]
            with subtests.test(kind, where=where):
                for rows in (PLAIN, data):
                    np.testing.assert_array_equal(call["gather"](rows, batch=batch), picked)
                    np.testing.assert_array_equal(call["sum"](rows, batch=batch), picked.sum(axis=0))
                if not len(picked):
                    with pytest.raises(ValueError):
                        call["avg"](PLAIN, batch=batch)


@pytest.mark.high_memory
def test_H29_more_than_two_gib_of_rows(rt: Any) -> None:
    rows = (1 << 31) + 11
    data = rt.data(shape=(rows,), dtype="uint8")
    data.data[-1], data.data[1 << 31] = 7, 5
    total = rt.function(lambda x: np.array([x.sum(dtype=np.int64), len(x)]), outputs="sum")
    assert total(data).tolist() == [12, rows]
    assert total(data, batch=[rows - 1, 1 << 31, 0]).tolist() == [12, 3]
    tail = rt.function(lambda x: x, outputs="gather")(data, batch=slice(1 << 31, None))
    assert tail.tolist() == [5] + [0] * 9 + [7]
    data.free_memory()


def test_H29_offsets_beyond_two_gib(shared_runtimes: Any) -> None:
    """The arithmetic alone, on rows of no bytes: nothing is reserved."""
    rt = shared_runtimes[3]
    rows = (1 << 33) + 5
    data = rt.data(shape=(rows, 0), dtype="uint8")
    lengths = rt.function(lambda x: len(x), outputs=None)
    assert lengths(data) == [len(part) for part in np.array_split(np.broadcast_to(0, rows), 3)]
    picked = rt.function(lambda x: x.shape[0], outputs="sum")
    assert picked(data, batch=slice(1 << 32, None, 2)) == len(range(1 << 32, rows, 2))


# ----- whose data, which argument


BINDING: dict[str, Callable[..., Any]] = {
    "plain": lambda x, y=2.0: x * y,
    "keyword only": lambda x, *, y=3.0: x * y,
    "positional only": lambda x, y=4.0, /: x - y,
    "variadic": lambda x, *ys, **named: x + sum(ys) + sum(named.values()),
}
KEYWORDS = ((), ("x",), ("y",), ("y", "x"), ("z",), ("ys", "named"), ("self", "y"), ("fn", "args"))


def test_H30_any_call_binds_like_python(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    """A call is refused with TypeError where Python refuses it, and else means the same; all parameters are rows."""
    for name, fn in BINDING.items():
        f = shared_runtimes[0].function(fn, outputs="gather")
        for count, keywords in itertools.product(range(4), KEYWORDS):
            rows = [np.full(3, 1.0 + k) for k in range(count)]
            named = {keyword: np.full(3, 5.0 + k) for k, keyword in enumerate(keywords)}
            with subtests.test(name, count=count, keywords=keywords):
                try:
                    want = fn(*rows, **named)
                except TypeError:
                    with pytest.raises(TypeError):
                        f(*rows, **named)
                else:
                    np.testing.assert_array_equal(f(*rows, **named), want)


MATRIX = np.random.default_rng(7).integers(-9, 9, size=(7, 4)).astype(np.float64)


def test_H18_the_same_bits_every_time(shared_runtimes: Any) -> None:
    x = np.random.default_rng(18).normal(size=(1001, 7)).astype(np.float32)
    for num_workers in (2, 3):
        f = shared_runtimes[num_workers].function(
            lambda x: (x.mean(axis=0), np.tile(x.sum(axis=0), 20_000)), outputs=("avg", "sum")
        )
        seen = {tuple(part.tobytes() for part in f(x)) for _ in range(100 if num_workers == 2 else 20)}
        assert len(seen) == 1


def test_H20_dicts_match_by_key_in_the_order_of_rank_0(rt: Any) -> None:

    def either(row: np.ndarray) -> dict[str, Any]:
        pairs = [("b", row[0] + 1.0), ("a", row[0] + 10.0)]
        return dict(pairs if row[0] == 0 else pairs[::-1])

    result = rt.function(either, outputs={"a": "sum", "b": "max"})(np.arange(2))
    assert result == {"a": 21.0, "b": 2.0}
    assert list(result) == ["b", "a"]


def test_H21_outputs_that_are_no_arrays(rt: Any) -> None:
    ranks = np.arange(2)
    with same_workers(rt):
        assert rt.function(lambda row: None)(ranks) is None
        mixed = rt.function(lambda row: (None, 2.0, {"x": None}), outputs="sum")(ranks)
        assert mixed == (None, 4.0, {"x": None})
        assert rt.function(lambda row: 3, outputs="sum")(ranks) == 6
        assert rt.function(lambda row: True, outputs="max")(ranks)
        assert rt.function(lambda row: {"a", "b"}, outputs=None)(ranks) == [{"a", "b"}] * 2
        for bad in ("text", b"bytes", object(), {1, 2}, print, np.array(["text"]), np.array([object()], dtype=object)):
            with pytest.raises((TypeError, SerializationError)):
                rt.function(lambda row, bad=bad: bad, outputs="sum")(ranks)


def test_H23_the_same_data_twice_and_an_output_that_is_the_input(rt: Any) -> None:
    data = rt.data(MATRIX)
    np.testing.assert_array_equal(rt.function(lambda x, y: x + y, outputs="gather")(data, data), 2 * MATRIX)
    identity = rt.function(lambda x: x, outputs="gather")
    result = identity(data)
    data[:] = 0.0
    np.testing.assert_array_equal(result, MATRIX)
    result[0] = 99.0
    np.testing.assert_array_equal(data[:], 0.0)
    np.testing.assert_array_equal(identity(MATRIX), MATRIX)


def test_H24_a_function_that_writes_into_its_input(rt: Any) -> None:
    """Python code is told that it is read-only. C code dies: the rows are mapped so. The data does not change."""
    data = rt.data(MATRIX)
    fill = rt.function(lambda w, x: (w if len(w) else x).fill(1), bcast_inputs="w")
    for w, x, batch in ((MATRIX, data, None), ((), data, None), ((), MATRIX, None), ((), data, [5, 1, 0])):
        with pytest.raises(ValueError, match="read-only"):
            fill(w, x, batch=batch)
    with pytest.raises(WorkerDied) as died:
        rt.function(lambda x: ctypes.memset(x.ctypes.data, 1, x.nbytes), outputs=None)(data)
    assert set(died.value.exits) == {"SIGSEGV"}  # of one rank or both: a peer may be told before it writes
    np.testing.assert_array_equal(data[:], MATRIX)
    assert_right(rt)
