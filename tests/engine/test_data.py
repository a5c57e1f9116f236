"""``Data``: an array in NumPy's operators and functions, which grows, keeps its rows and is read by the workers.

The oracle is the same expression with an array. In one file because what changes while a call is prepared, waits or
runs, in other threads too, is seen by nobody: each call sees the rows that it was given.
"""

from __future__ import annotations

import operator
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.lib.mixins import NDArrayOperatorsMixin
from support.gates import Gate, beside
from support.rank_arrays import numbers, picked
from support.saboteurs import AtPickle
from support.tables import combinations

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
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def outcome(act: Callable[..., Any], *args: Any) -> Any:
    """Return what ``act`` gives, or the class of what it raises."""
    try:
        return act(*args)
    except Exception as error:
        return type(error)


def assert_alike(got: Any, expected: Any) -> None:
    """Assert equal types and dtypes as well as values."""
    assert type(got) is type(expected)
    if isinstance(expected, tuple):
        for one, other in zip(got, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    else:
        assert got == expected


def and_as_data(rt: Any, operand: Any) -> list[Any]:
    """Return an operand as it is and, where it is an array, as Data."""
    return [operand, rt.data(operand)] if isinstance(operand, np.ndarray) else [operand]


# ----- an array to NumPy


def test_operators_give_what_the_array_gives(subtests: pytest.Subtests, rt: Any) -> None:
    for name, other, kind in combinations(120, BINARY, OTHERS, VALUES):
        is_reflected = name not in dir(operator) and name != "__divmod__"
        symbol = divmod if "divmod" in name else getattr(operator, name.replace("__r", "__") if is_reflected else name)
        value = VALUES[kind]
        d, operand = rt.data(value), OTHERS[other](value)
        with subtests.test(operator=name, other=other, kind=kind):
            expected = outcome(symbol, *((operand, value) if is_reflected else (value, operand)))
            for each in and_as_data(rt, operand):
                assert_alike(outcome(symbol, *((each, d) if is_reflected else (d, each))), expected)
                assert_alike(outcome(getattr(d, name), each), expected)
            np.testing.assert_array_equal(d.data, value)
    for name, kind in combinations(24, UNARY, VALUES):
        with subtests.test(operator=name, kind=kind):
            d = rt.data(VALUES[kind])
            got = outcome(getattr(d, name))
            assert_alike(got, outcome(getattr(VALUES[kind], name)))
            assert not (isinstance(got, np.ndarray) and np.shares_memory(got, d.data))


def test_in_place_operators_write_to_where_the_workers_read(subtests: pytest.Subtests, rt: Any) -> None:
    """With NumPy's rules for the dtype; the name stays bound to the object, and an error leaves it as it was."""
    read = rt.function(lambda x: x, outputs="gather")
    for name, other, kind in combinations(60, IN_PLACE, OTHERS, ("float", "int", "bool", "complex")):
        value, symbol = VALUES[kind], getattr(operator, name)
        d, expected, operand = rt.data(value), value.copy(), OTHERS[other](value)
        with subtests.test(operator=name, other=other, kind=kind):
            error = outcome(symbol, expected, operand)
            for each in and_as_data(rt, operand):
                d[...] = value
                bound = outcome(symbol, d, each)
                assert bound is (d if isinstance(error, np.ndarray) else error)
                np.testing.assert_array_equal(d.data, expected)
            np.testing.assert_array_equal(read(d), expected)


FUNCTIONS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: np.add(a, b), lambda a, b: np.add(b, a, where=a > 2, out=np.zeros(a.shape)),
    lambda a, b: np.divmod(a, b), lambda a, b: np.frexp(a), lambda a, b: np.add.reduce(a, axis=1),
    lambda a, b: np.add.reduceat(a, [0, 2]), lambda a, b: np.multiply.accumulate(a),
    lambda a, b: np.subtract.outer(a[0], a)[0], lambda a, b: np.matmul(a, b),
    lambda a, b: np.sum(a), lambda a, b: np.mean(a, axis=0), lambda a, b: np.std(a),
    lambda a, b: np.max(a, axis=1), lambda a, b: np.min(a), lambda a, b: np.median(a),
    lambda a, b: np.concatenate([a, b, a]), lambda a, b: np.where(a > b, a, b),
    lambda a, b: np.clip(a, 1, 3), lambda a, b: np.dot(a, b), lambda a, b: np.linalg.norm(a),
    lambda a, b: np.einsum("ij,jk", a, b), lambda a, b: np.zeros_like(a), lambda a, b: np.sort(a),
    lambda a, b: np.unique(a), lambda a, b: np.isnan(a).any(), lambda a, b: np.array_equal(a, a),
    lambda a, b: np.reshape(a, (1, 9)), lambda a, b: np.transpose(a), lambda a, b: np.argmax(a),
    lambda a, b: a.T, lambda a, b: a.astype("f4"), lambda a, b: a.copy(), lambda a, b: a.mean(axis=0),
    lambda a, b: a.sum(keepdims=True), lambda a, b: a.min(axis=1), lambda a, b: a.max(),
    lambda a, b: a.std(axis=0, ddof=1), lambda a, b: a.var(), lambda a, b: list(map(tuple, a)),
    lambda a, b: a.reshape(9), lambda a, b: a.reshape(1, -1), lambda a, b: a.tolist(),
    lambda a, b: 4.0 in a, lambda a, b: 17 in a, lambda a, b: pow(a, 2), lambda a, b: divmod(7, a),
    lambda a, b: bool(a[:1, :1]), lambda a, b: bool(a), lambda a, b: b[a == 4.0], lambda a, b: len(a),
    lambda a, b: (a.shape, a.ndim, a.size, a.nbytes, a.dtype.str), lambda a, b: a[1, ::-1], lambda a, b: a[a > 2],
]  # fmt: skip


def test_functions_and_methods_give_what_the_array_gives(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    a, b = np.array([[1.0, 2, 3], [4, 5, 6], [7, 8, 10]]), np.array([[3.0, 1, 2], [1, 2, 4], [9, 7, 5]])
    data = shared_runtimes[2].data
    for number, act in enumerate(FUNCTIONS):
        with subtests.test(function=number):
            expected = outcome(act, a, b)
            for first, second in [(data(a), b), (data(a), data(b)), (a, data(b))]:
                assert_alike(outcome(act, first, second), expected)
    assert np.sum(data(a), where=data(a > 5)) == np.add(a, 0, where=data(a > 5), out=np.zeros((3, 3))).sum() == 31


def test_whatever_is_told_to_write_into_data_does(subtests: pytest.Subtests, rt: Any) -> None:
    writers: list[Callable[[Any, np.ndarray], Any]] = [
        lambda d, x: np.add(x, d, out=d),
        lambda d, x: np.divmod(x, 2, out=(np.empty_like(x), d))[1],
        lambda d, x: np.multiply(d, d, out=d, where=x > 2),
        lambda d, x: np.clip(x, 2, 4, out=d),
        lambda d, x: operator.setitem(d, x > 2, 9),
        lambda d, x: np.add.at(d, [0, 0, 2], 5),
        lambda d, x: np.add.accumulate(x, out=d),
        lambda d, x: np.mean(np.stack([x, x + 1]), axis=0, out=d),
        lambda d, x: np.stack([x, x + 1]).std(axis=0, out=d),
        lambda d, x: np.add.reduce(np.stack([x, x]), out=d),
        lambda d, x: np.nanmean(np.stack([x, x + 4]), axis=0, out=d),
    ]
    x, read = np.array([1.0, 2, 3, 4, 5]), rt.function(lambda x: x, outputs="gather")
    for number, act in enumerate(writers):
        with subtests.test(writer=number):
            d, expected = rt.data(x), x.copy()
            result, wanted = act(d, x), act(expected, x)
            np.testing.assert_array_equal(read(d), expected)
            assert (result is None) == (wanted is None)
            assert result is None or result is d or np.shares_memory(result, d.data)


def test_what_an_operand_does_better_is_left_to_it(shared_runtimes: Any) -> None:
    """Sparse matrices have no place in ufuncs. What would bind the name to a copy is refused."""

    class Stranger:
        __array_priority__ = 100.0

        def __radd__(self, other: Any) -> str:
            return "a copy"

    sparse = pytest.importorskip("scipy.sparse")
    a = np.arange(9.0).reshape(3, 3)
    d, eye = shared_runtimes[2].data(a), sparse.csr_array(np.eye(3) * 2)
    for act in (operator.matmul, operator.mul):
        for one, other in [(act(d, eye), act(a, eye)), (act(eye, d), act(eye, a))]:
            assert type(one) is type(other)
            np.testing.assert_array_equal(*(x.toarray() if sparse.issparse(x) else x for x in (one, other)))
    assert d + Stranger() == "a copy"
    with pytest.raises(TypeError, match="cannot apply __iadd__ to Data: got Stranger"):
        d += Stranger()


def test_data_is_hashed_by_identity_and_compared_by_elements(rt: Any) -> None:
    d, e = rt.data(np.ones(3)), rt.data(np.ones(3))
    assert {d: 1, e: 2}[d] == 1 and len({d, e, d}) == 2
    a = np.arange(3.0)
    np.testing.assert_array_equal(a[d == 1.0], a)
    assert type(d == e) is np.ndarray and (d == e).all()
    with pytest.raises(ValueError, match="ambiguous"):
        assert d
    assert not rt.data(np.zeros(1))
    with pytest.raises(AttributeError):
        _ = d.cumsum


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


def test_data_of_two_runtimes_meet_in_an_operator(runtime: Callable[..., Any]) -> None:
    one, other = runtime(1), runtime(1)
    a, b = one.data(np.ones(3)), other.data(np.arange(3.0))
    a += b
    np.testing.assert_array_equal(a + b, 1 + np.arange(3.0) * 2)
    with pytest.raises(ValueError, match="belongs to another runtime"):
        one.function(lambda x: x.sum(), outputs="sum")(b)
    other.close()
    for act in (lambda: a + b, lambda: b + 1, lambda: operator.iadd(a, b), lambda: np.add(a, 1, out=b), lambda: -b):
        with pytest.raises(synk.errors.ClosedError):
            act()


# ----- memory that the workers read, which grows


@pytest.mark.parametrize("rt", [1, 3, 0, "1+3"], indirect=True)
def test_any_sequence_of_changes_is_that_of_an_array(rt: Any) -> None:
    """The contents are replaced, grow, shrink, are freed and written in place, in any order, and calls read them."""
    rng = np.random.default_rng(rt.world_size)
    read = rt.function(lambda x: (x, len(x)), outputs=("gather", "sum"))
    d, model = rt.data(numbers("f4", (5, 2), 0), name="d"), numbers("f4", (5, 2), 0)
    for step in range(80):
        count, oversize = int(rng.integers(0, 40)) ** 2, float(rng.uniform(1, 2))
        columns = model.shape[1]
        match int(rng.integers(8)):
            case 0:
                model = numbers("f4", (count, columns), step)
                d.set_value(model, oversize=oversize)
            case 1:  # a safe cast, and one that is asked for
                model = numbers("i2", (count, columns), step).astype("f4")
                d.set_value(model.astype("i2"))
                d.set_value(model.astype("f8"), force_cast=True, oversize=oversize)
            case 2:
                count = count if step % 2 else d.alloc_size // columns + 1  # takes other memory
                d.set_length(count, oversize=oversize)
                kept = model[:count]
                np.testing.assert_array_equal(d[: len(kept)], kept)
                d[len(kept) :] = step  # until then zeros or old contents
                model = np.concatenate([kept, np.full((count - len(kept), columns), step, "f4")])
            case 3:  # the contents are undefined then
                d.set_shape((count, 1 + columns % 3))
                d[...] = model = numbers("f4", (count, 1 + columns % 3), step)
            case 4:
                view, held = d.data, model
                d.free_memory()
                model = model[:0]
                np.testing.assert_array_equal(view, held)
            case 5:
                model = model + np.float32(1)
                d += 1
            case 6:
                model = model.copy()
                model[::2] = d[::2] = step
            case _:
                batch = rng.integers(0, len(model), 5) if len(model) else slice(0)
                np.testing.assert_array_equal(read(d, batch=batch)[0], picked(batch, model))
        assert_alike(np.asarray(d), model)
        assert (len(d), d.shape, d.alloc_size >= d.size) == (len(model), model.shape, True)
        rows, num_rows = read.submit(d).result() if step % 2 else read(d)
        assert_alike(rows, model)
        assert num_rows == len(model)


def test_data_without_a_value_is_zeros_also_without_axes(shared_runtimes: Any) -> None:
    for options in ({"shape": ()}, {"ndim": 0}, {"ndim": 2}, {"shape": 3}, {"shape": (2, 0)}):
        found = shared_runtimes[2].data(dtype="f4", **options)
        assert_alike(found.data, np.zeros(options.get("shape", (0,) * options.get("ndim", 0)), "f4"))


def test_a_large_array_is_there_whole(shared_runtimes: Any) -> None:
    """Two threads copy what has 16 MB and more."""
    x, rt = np.arange(float((1 << 21) + 3)), shared_runtimes[2]
    data = rt.data(x)
    np.testing.assert_array_equal(data.data, x)
    data[:] = x[::-1]
    np.testing.assert_array_equal(rt.function(lambda x: x, outputs="gather")(data), x[::-1])
    np.testing.assert_array_equal(rt.shared(x)[1], x)


def test_what_does_not_fit_is_refused_and_changes_nothing(subtests: pytest.Subtests, rt: Any) -> None:
    d, single = rt.data(np.ones((3, 2), "f4"), name="d"), rt.data(np.float32(1), name="single")
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "'d': got dtype float64.*force_cast", lambda: d.set_value(np.ones((1, 2)))),
        (TypeError, "'d': got dtype float64.*force_cast", lambda: d.set_value([[1e300]])),
        (ValueError, "'d': got 1 axes, expected 2", lambda: d.set_value(np.ones(2, "f4"))),
        (ValueError, r"'d': got shape \(4,\), expected 2 axes", lambda: d.set_shape(4)),
        (ValueError, "expected lengths of zero or more", lambda: d.set_length(-1)),
        (ValueError, "got oversize=3, expected 1.0 to 2.0", lambda: d.set_length(9, oversize=3)),
        (ValueError, "oversize='a'", lambda: d.set_length(9, oversize="a")),
        (TypeError, "float", lambda: d.set_length(2.5)),
        (ValueError, "'single': it has no axes", lambda: single.set_length(2)),
        (ValueError, "'single': it has no axes", lambda: single.free_memory()),
        (ValueError, "without a copy", lambda: d.__array__("f8", copy=False)),
        (TypeError, "got no value, expected dtype", lambda: rt.data()),
        (TypeError, r"got a dict.*synk\.shared", lambda: rt.data({"a": np.ones(2)})),
        (ValueError, r"got a value of shape \(2,\) and shape=\(3,\)", lambda: rt.data([1, 2], shape=3)),
        (TypeError, "object", lambda: rt.data(np.array([None]))),
        *(
            (
                TypeError,
                f"got dtype .*{one}, expected .*{other}",
                lambda value=value, dtype=dtype: rt.data(value, dtype=dtype),
            )
            for value, dtype, one, other in (
                ([1.5], "i8", "float64", "int64"),
                ([1.5, 0], "?", "float64", "bool"),
                ([1e40], "f4", "float64", "float32"),
                (["four"], "U3", "U4", "U3"),
                ([1234], "U3", "int64", "U3"),
            )
        ),
        (TypeError, "cannot pickle Data 'd'", lambda: pickle.dumps(d)),
    ]
    for error, text, act in cases:
        with subtests.test(text):
            with pytest.raises(error, match=text):
                act()
            np.testing.assert_array_equal(d.data, np.ones((3, 2)))


OLD = np.arange(12.0).reshape(6, 2) + 1
CHANGES: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
    "same shape": (lambda d: d.set_value(OLD * 10), OLD * 10),
    "shorter": (lambda d: d.set_value(OLD[:2] * 10), OLD[:2] * 10),
    "longer": (lambda d: d.set_value(np.ones((2000, 2))), np.ones((2000, 2))),
    "shrink": (lambda d: d.set_length(3), OLD[:3]),
    "grow": (lambda d: d.set_length(6000), np.append(OLD, np.zeros((5994, 2)), axis=0)),
    "narrow": (lambda d: d.set_shape((4, 3)), np.zeros(0)),
    "free": (lambda d: d.free_memory(), np.zeros((0, 2))),
}
WRITERS: dict[str, Callable[[Any], Any]] = {
    "+=": lambda d: operator.iadd(d, 1),
    "[...] =": lambda d: operator.setitem(d, ..., 9),
    "out=": lambda d: np.add(d, 1, out=d),
    "at": lambda d: np.add.at(d, 0, 1),
    "reduce": lambda d: np.add.reduce(np.ones((2, 6, 2)), out=d),
}


def test_a_call_works_on_the_rows_that_it_was_given(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    verbs: dict[str, Callable[..., Any]] = {
        "call": lambda f, *args: f(*args),
        "serial": lambda f, *args: f.serial(*args),
        "submit": lambda f, *args: f.submit(*args).result(),
        "submit behind another": lambda f, *args: (f.submit(OLD, 0), f.submit(*args))[1].result(),
    }
    for where, change, verb in combinations(28, (1, 3, 0), CHANGES, verbs):
        rt, (act, new), run = shared_runtimes[where], CHANGES[change], verbs[verb]
        f = rt.function(lambda x, hook: x, outputs="gather", bcast_inputs="hook")
        with subtests.test(where=where, change=change, verb=verb):
            d = rt.data(OLD)
            for _ in range(
                2
            ):  # also where the function knows such rows: they are bound when the other input is pickled
                d.set_shape(OLD.shape)
                d.set_value(OLD)
                np.testing.assert_array_equal(run(f, d, AtPickle(lambda act=act, d=d: act(d))), OLD)
                if change != "narrow":  # its contents are undefined
                    np.testing.assert_array_equal(d.data, new)
                    np.testing.assert_array_equal(run(f, d, 0), new)


def test_submitted_calls_keep_their_rows_and_writers_wait_for_them(
    subtests: pytest.Subtests, rt: Any, gate: Gate
) -> None:
    """What gives ``Data`` other memory need not wait; what writes to the memory that is read must."""

    def read(x: np.ndarray) -> float:
        gate.wait()
        return float(x.sum())

    total = rt.function(read, outputs="sum")
    others = {"drop": lambda d: None, **{name: act for name, (act, _) in CHANGES.items()}}
    for name, act in [*others.items(), *WRITERS.items()]:
        with subtests.test(name):
            gate.close()
            d, unread = rt.data(OLD), rt.data(np.zeros(2))
            pending = [total.submit(d) for _ in range(3)]
            np.testing.assert_array_equal(d + 1, OLD + 1)  # readers do not wait
            unread[:] = 1
            assert not gate.is_open(), "nor does a writer of what no call reads"
            with gate.opened_meanwhile():
                act(d)
                assert gate.is_open() or name in others
                assert name not in WRITERS or (d.data != OLD).any()
                del d
                kept = [rt.data(np.full((6, 2), -2.0)) for _ in range(3)]  # takes memory that was given back
            assert [call.result() for call in pending] == [OLD.sum()] * 3
            assert [each.sum() for each in kept] == [-24.0] * 3


def test_no_call_sees_a_mixture_while_another_thread_replaces_the_rows(rt: Any) -> None:
    """Each value has as many rows as its elements say. The other thread makes them longer, shorter and as long."""
    rng = np.random.default_rng(0)
    f = rt.function(lambda x: (len(x), x.min(), x.max()), outputs=("sum", "min", "max"))
    d = rt.data(np.full(500, 500), oversize=2.0)

    def change() -> None:
        count = int(rng.integers(400, 1200))
        d.set_value(np.full(count, count))
        if rng.random() < 0.2:
            d.set_length(count)

    with beside(change):
        seen = [f.submit(d).result() if k % 2 else f(d) for k in range(60)]
    assert all(count == low == high for count, low, high in seen)
    with beside(lambda: d.set_length(len(d) * 7919 % 5000)):
        for count in rng.integers(1, 5000, 200):
            d.set_value(np.ones(count, int))
    d.set_value(np.full(7, 7))
    d.set_length(7)
    assert f(d) == (7, 7, 7), "neither thread is left with memory that was given back"


def test_memory_is_not_reclaimed_under_a_call_that_another_thread_submits(rt: Any) -> None:
    """Whether a call is in flight is asked when no other thread can submit one any more."""
    total = rt.function(lambda x: x.sum(), outputs="sum")

    def take() -> None:
        """Reclaim what was dropped and take it, and leave the runtime to the other thread for a moment."""
        rt.data(np.full(500, -1.0))
        time.sleep(0.001)

    with beside(take):
        for k in range(100):
            d = rt.data(np.full(500, float(k)))
            pending = total.submit(d)
            del d  # the call in flight reads it
            assert pending.result() == 500.0 * k


def test_functions_are_sent_while_another_thread_makes_some(shared_runtimes: Any) -> None:
    rt, other = shared_runtimes[1], shared_runtimes[0]
    with beside(lambda: [other.function(lambda x: x, outputs="gather") for _ in range(500)], switch_s=1e-6):
        for _ in range(20):
            kept = rt.function(lambda x: x, outputs="gather")
            rt.distribute()
            assert kept
