"""``Data`` in NumPy's operators and functions. Oracle: the same expression with the array."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.mixins import NDArrayOperatorsMixin

import synk

OPERATORS = [name for name, value in vars(NDArrayOperatorsMixin).items() if callable(value)]
UNARY = ["__neg__", "__pos__", "__abs__", "__invert__"]
IN_PLACE = [name for name in OPERATORS if name.startswith("__i") and name != "__invert__"]
BINARY = [name for name in OPERATORS if name not in (*UNARY, *IN_PLACE)]
VALUES = {
    "float": np.array([[1.5, -2.0, 0.5], [3.0, 2.0, -np.inf], [4.0, np.nan, 2.0]]),
    "int": np.array([[3, 2, 1], [5, 0, 2], [4, 1, 3]]),
    "bool": np.array([[True, False, True]] * 3),
    "complex": np.array([[1 + 2j, 0, 1], [2, 1j, 3], [1, 1, 2]]),
    "text": np.array([["a", "b", "c"]] * 3),
    "records": np.array([[(1, 2.0)] * 3] * 3, dtype=[("a", "i4"), ("b", "f8")]),
}
OTHERS: dict[str, Callable[[np.ndarray], Any]] = {
    "itself": lambda a: a,
    "array": lambda a: a[::-1].copy(),
    "row": lambda a: a[0],
    "column": lambda a: a[:, :1],
    "number": lambda a: 2,
    "half": lambda a: 0.5,
    "text": lambda a: "a",
    "none": lambda a: None,
    "list": lambda a: [1, 2, 3],
    "scalar": lambda a: a[0, 1],
    "misfit": lambda a: np.ones((2, 7)),
}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


def outcome(act: Callable[..., Any], *args: Any) -> Any:
    """Return what ``act`` gives, or the class of what it raises."""
    try:
        return act(*args)
    except Exception as error:
        return type(error)


def assert_alike(got: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        assert type(got) is tuple and len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_alike(one, other)
        return
    assert type(got) is type(expected)
    if isinstance(expected, (np.ndarray, np.generic)):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    else:
        assert got == expected


def test_the_operators_are_those_of_the_mixin() -> None:
    assert (len(BINARY), len(IN_PLACE), len(UNARY)) == (34, 13, 4)
    for name in (*BINARY, *IN_PLACE):
        assert getattr(synk.Data, name) is not getattr(NDArrayOperatorsMixin, name)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", BINARY)
def test_a_binary_operator_gives_what_the_array_gives(shared_runtimes: Any, name: str, other: str) -> None:
    rt = shared_runtimes[2]
    is_reflected = name not in dir(operator) and name != "__divmod__"
    symbol = divmod if "divmod" in name else getattr(operator, name.replace("__r", "__") if is_reflected else name)
    for value in VALUES.values():
        d, operand = rt.data(value), OTHERS[other](value)
        expected = outcome(symbol, operand, value) if is_reflected else outcome(symbol, value, operand)
        for each in [operand, rt.data(operand)] if isinstance(operand, np.ndarray) else [operand]:
            assert_alike(outcome(symbol, each, d) if is_reflected else outcome(symbol, d, each), expected)
            assert_alike(outcome(getattr(d, name), each), expected)
        np.testing.assert_array_equal(d.data, value)


@pytest.mark.parametrize("name", UNARY)
def test_a_unary_operator_gives_what_the_array_gives(shared_runtimes: Any, name: str) -> None:
    for value in VALUES.values():
        d = shared_runtimes[2].data(value)
        got = outcome(getattr(d, name))
        assert_alike(got, outcome(getattr(value, name)))
        assert not (isinstance(got, np.ndarray) and np.shares_memory(got, d.data))


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.sampled(60)
def test_in_place_operators_write_to_where_the_workers_read(shared_runtimes: Any, name: str, other: str) -> None:
    """With NumPy's rules for the dtype; the name stays bound to the object, and an error leaves it as it was."""
    rt = shared_runtimes[2]
    symbol = getattr(operator, name)
    read = rt.function(lambda x: x, outputs="gather")
    for kind in ("float", "int", "bool", "complex"):
        value = VALUES[kind]
        d, expected, operand = rt.data(value), value.copy(), OTHERS[other](value)
        error = outcome(symbol, expected, operand)
        for each in [operand, rt.data(operand)] if isinstance(operand, np.ndarray) else [operand]:
            d[...] = value
            bound = outcome(symbol, d, each)
            assert bound is (d if isinstance(error, np.ndarray) else error)
            np.testing.assert_array_equal(d.data, expected)
        np.testing.assert_array_equal(read(d), expected)


@pytest.mark.parametrize(
    "act",
    [
        lambda a, b: np.add(a, b),
        lambda a, b: np.add(b, a, where=a > 2, out=np.zeros(a.shape)),
        lambda a, b: np.divmod(a, b),
        lambda a, b: np.frexp(a),
        lambda a, b: np.add.reduce(a, axis=1),
        lambda a, b: np.add.reduceat(a, [0, 2]),
        lambda a, b: np.multiply.accumulate(a),
        lambda a, b: np.subtract.outer(a[0], a)[0],
        lambda a, b: np.matmul(a, b),
        lambda a, b: np.sum(a), lambda a, b: np.mean(a, axis=0), lambda a, b: np.std(a),
        lambda a, b: np.max(a, axis=1), lambda a, b: np.min(a), lambda a, b: np.median(a),
        lambda a, b: np.concatenate([a, b, a]), lambda a, b: np.where(a > b, a, b),
        lambda a, b: np.clip(a, 1, 3), lambda a, b: np.dot(a, b), lambda a, b: np.linalg.norm(a),
        lambda a, b: np.einsum("ij,jk", a, b), lambda a, b: np.zeros_like(a), lambda a, b: np.sort(a),
        lambda a, b: np.unique(a), lambda a, b: np.isnan(a).any(), lambda a, b: np.array_equal(a, a),
        lambda a, b: np.reshape(a, (1, 9)), lambda a, b: np.transpose(a), lambda a, b: np.argmax(a),
        lambda a, b: a.T, lambda a, b: a.astype("f4"), lambda a, b: a.copy(), lambda a, b: a.mean(axis=0),
        lambda a, b: a.sum(keepdims=True), lambda a, b: a.min(axis=1), lambda a, b: a.max(),
        lambda a, b: a.reshape(9), lambda a, b: a.reshape(1, -1), lambda a, b: a.tolist(),
        lambda a, b: 4.0 in a, lambda a, b: 17 in a, lambda a, b: pow(a, 2), lambda a, b: divmod(7, a),
        lambda a, b: bool(a[:1, :1]), lambda a, b: bool(a), lambda a, b: b[a == 4.0],
    ],
)  # fmt: skip
def test_functions_and_methods_give_what_the_array_gives(shared_runtimes: Any, act: Callable[..., Any]) -> None:
    a, b = np.array([[1.0, 2, 3], [4, 5, 6], [7, 8, 10]]), np.array([[3.0, 1, 2], [1, 2, 4], [9, 7, 5]])
    data = shared_runtimes[2].data
    expected = outcome(act, a, b)
    for first, second in [(data(a), b), (data(a), data(b)), (a, data(b))]:
        assert_alike(outcome(act, first, second), expected)


@pytest.mark.parametrize(
    "act",
    [
        lambda d, x: np.add(d, 1, out=d),
        lambda d, x: np.add(x, d, out=d),
        lambda d, x: np.divmod(x, 2, out=(d, None))[0],
        lambda d, x: np.divmod(x, 2, out=(np.empty_like(x), d))[1],
        lambda d, x: np.multiply(d, d, out=d, where=x > 2),
        lambda d, x: np.clip(x, 2, 4, out=d),
        lambda d, x: operator.setitem(d, ..., x * 3),
        lambda d, x: operator.setitem(d, x > 2, 9),
        lambda d, x: np.add.at(d, [0, 0, 2], 5),
        lambda d, x: np.add.accumulate(x, out=d),
        lambda d, x: np.mean(np.stack([x, x + 1]), axis=0, out=d),
        lambda d, x: np.stack([x, x + 1]).mean(axis=0, out=d),
        lambda d, x: np.var(np.stack([x, x + 1]), axis=0, out=d),
        lambda d, x: np.stack([x, x + 1]).std(axis=0, out=d),
        lambda d, x: np.add.reduce(np.stack([x, x]), out=d),
        lambda d, x: np.nanmean(np.stack([x, x + 4]), axis=0, out=d),
    ],
)
def test_whatever_is_told_to_write_into_data_does(shared_runtimes: Any, act: Callable[..., Any]) -> None:
    rt = shared_runtimes[2]
    x = np.array([1.0, 2, 3, 4, 5])
    d, expected = rt.data(x), x.copy()
    result, wanted = act(d, x), act(expected, x)
    np.testing.assert_array_equal(rt.function(lambda x: x, outputs="gather")(d), expected)
    assert (result is None) == (wanted is None)
    assert result is None or result is d or np.shares_memory(result, d.data)


def test_what_an_operand_does_better_is_left_to_it(shared_runtimes: Any) -> None:
    """Sparse matrices have no place in ufuncs; arrays leave them to their own operators, and so does Data."""
    sparse = pytest.importorskip("scipy.sparse")
    a = np.arange(9.0).reshape(3, 3)
    d, eye = shared_runtimes[2].data(a), sparse.csr_array(np.eye(3) * 2)
    for act in (operator.matmul, operator.mul):
        for one, other in [(act(d, eye), act(a, eye)), (act(eye, d), act(eye, a))]:
            assert type(one) is type(other)
            np.testing.assert_array_equal(*(x.toarray() if sparse.issparse(x) else x for x in (one, other)))


def test_what_would_bind_the_name_to_a_copy_is_refused(shared_runtimes: Any) -> None:
    class Stranger:
        __array_priority__ = 100.0

        def __radd__(self, other: Any) -> str:
            return "a copy"

    d = shared_runtimes[2].data(np.ones(3))
    with pytest.raises(TypeError, match="cannot apply __iadd__ to Data: got Stranger"):
        d += Stranger()
    assert d + Stranger() == "a copy"


def test_data_is_hashed_by_identity_and_compared_by_elements(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    d, e = rt.data(np.ones(3)), rt.data(np.ones(3))
    assert {d: 1, e: 2}[d] == 1 and len({d, e, d}) == 2
    a = np.arange(3.0)
    np.testing.assert_array_equal(a[d == 1.0], a)
    assert type(d == e) is np.ndarray and (d == e).all()
    with pytest.raises(ValueError, match="ambiguous"):
        assert d
    assert rt.data(np.zeros(1)).sum() == 0 and not rt.data(np.zeros(1))
    with pytest.raises(AttributeError):
        _ = d.cumsum


def test_an_argument_is_data_still_and_not_converted(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    d = rt.data(np.arange(5.0))
    f = rt.function(lambda x, w: x * w[0], outputs="gather", bcast_inputs="w")
    f(d, d)
    staged = rt.counters["bytes_staged"]
    np.testing.assert_array_equal(f(d, d), np.zeros(5))
    assert rt.counters["bytes_staged"] == staged


@pytest.mark.parametrize(
    "write",
    [
        lambda d: operator.iadd(d, 1),
        lambda d: operator.setitem(d, ..., 9),
        lambda d: np.add(d, 1, out=d),
        lambda d: np.add.at(d, 0, 1),
        lambda d: np.add.reduce(np.ones((2, 4)), out=d),
    ],
)
def test_writers_wait_for_submitted_calls_that_read(shared_runtimes: Any, tmp_path: Any, write: Any) -> None:
    """The call waits for a file that is made as soon as the writer waits for the call."""
    rt = shared_runtimes[2]
    gate = str(tmp_path / "gate")

    def read(x: np.ndarray, path: str) -> float:
        import os
        import time

        while not os.path.exists(path):
            time.sleep(0.001)
        return x.sum()

    d = rt.data(np.ones(4))
    release = rt._session.queue.release

    def opened(segment: Any) -> None:
        assert rt._session.queue.reads(segment)
        open(gate, "w").close()
        release(segment)
        assert not rt._session.queue.reads(segment)

    pending = rt.function(read, outputs="sum", bcast_inputs="path").submit(d, gate)
    np.testing.assert_array_equal(d + 1, np.full(4, 2.0))  # readers do not wait
    rt._session.queue.release = opened
    try:
        write(d)
    finally:
        del rt._session.queue.release
        open(gate, "w").close()
    assert pending.result() == 4
    assert d.sum() != 4


def test_data_of_two_runtimes_meet_in_an_operator(runtime: Callable[..., Any]) -> None:
    one, other = runtime(1), runtime(1)
    a, b = one.data(np.ones(3)), other.data(np.arange(3.0))
    a += b
    np.testing.assert_array_equal(a + b, 1 + np.arange(3.0) * 2)
    other.close()
    for act in (lambda: a + b, lambda: b + 1, lambda: operator.iadd(a, b), lambda: np.add(a, 1, out=b), lambda: -b):
        with pytest.raises(synk.errors.ClosedError):
            act()


def test_other_libraries_get_a_view(shared_runtimes: Any) -> None:
    """By DLPack; it lasts as long as they keep it."""
    torch = pytest.importorskip("torch")
    data = shared_runtimes[2].data(np.arange(6.0).reshape(2, 3))
    views = [torch.as_tensor(data), torch.from_dlpack(data), np.from_dlpack(data)]
    data[0, 0] = 7
    assert [float(view[0, 0]) for view in views] == [7.0] * 3
    assert float(torch.tensor(data)[0, 0]) == 7.0
    data.free_memory()
    del data
    assert [float(view[0, 0]) for view in views] == [7.0] * 3


def test_spread(shared_runtimes: Any) -> None:
    plain = np.arange(6.0).reshape(2, 3)
    data = shared_runtimes[2].data(plain)
    np.testing.assert_array_equal(data.std(axis=0, ddof=1), plain.std(axis=0, ddof=1))
    assert data.var() == plain.var()
