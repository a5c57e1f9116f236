"""A repeated call is right whatever changed since the one before: arguments, options, data, state, outputs.

A function is called until its calls are alike, then something changes, perhaps to what compares equal and can still be
told apart. The oracle is NumPy, or plain Python, on the whole input; for errors it is the same call of a function that
was never called before.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import script
from support.tables import combinations, named

NUMBERS = np.arange(4.0)
WHERE = [2, 0]


WRAPS: list[Callable[[Any], Any]] = [lambda d: d, lambda d: [d], lambda d: (d, {"z": d})]


@pytest.mark.parametrize("where", WHERE)
def test_dicts_that_are_returned_keep_their_keys_and_their_order(
    subtests: Any, shared_runtimes: Any, where: Any
) -> None:
    def total(wrap: Any, x: Any, names: Any) -> Any:
        return wrap({name: int(x.sum()) * k for k, name in enumerate(names)})

    for number, wrap in enumerate(WRAPS):
        f = shared_runtimes[where].function(
            lambda x, names, wrap=wrap: total(wrap, x, names), outputs="sum", bcast_inputs=("names", "wrap")
        )
        odd = (1, True, 1.0, (1,), (True,), (1, (0,)), (1, (False,)), (1,), "a", np.str_("a"))
        for names in ("ab", "ba", "ba", "ab", "ab", "cab", "abc", "ba", *([key] for key in odd * 2)):
            with subtests.test(number=number, names=str(names)):
                for call in (f, f.serial):
                    assert repr(call(NUMBERS, tuple(names))) == repr(total(wrap, NUMBERS, names))


@pytest.mark.parametrize("where", WHERE)
def test_an_object_after_a_float(shared_runtimes: Any, where: Any) -> None:
    """NumPy calls the dtype of a float equal to None, which is that of an object."""

    def body(kind: Any, other: Any) -> Any:
        return np.float64(7) if kind else other

    for other, op in itertools.product(({1}, "s" * 200_000), (None, "first")):
        call = shared_runtimes[where].function(body, outputs=op, bcast_inputs=("kind", "other"))
        for kind in (1, 0, 0, 1, 1, 0):
            want = body(kind, other)
            assert call(kind, other) == (want if op else [want] * shared_runtimes[where].world_size)


@pytest.mark.parametrize("where", WHERE)
def test_plain_records_after_a_recarray(shared_runtimes: Any, where: Any) -> None:
    records = np.rec.array([(1, 2.0)], names="a,b")
    plain = records.view([("a", "i8"), ("b", "f8")], np.ndarray)
    for op in ("gather", "first"):
        call = shared_runtimes[where].function(lambda x: records if x[0] else plain, outputs=op)
        for k in (0, 1, 0, 0, 1):
            assert type(call([k, k])) is type(records if k else plain)


def test_arguments_that_look_alike_but_are_given_in_another_form(rt: Any) -> None:
    """Calls find the plan of a call before: each of these must find its own."""
    x, y = np.arange(6.0), np.arange(6.0) + 10
    pair = rt.function(lambda a, b=1.0, **more: (a.sum(), type(b).__name__, sorted(more)), bcast_inputs=["b"],
                       outputs=("sum", "first", "first"))  # fmt: skip
    for _ in range(2):
        assert pair(x) == (15.0, "float", [])
        assert pair(x, 2) == pair(x, b=2) == pair(b=2, a=x) == (15.0, "int", [])
        assert pair(b=y, a=x) == pair(x, y) == (15.0, "ndarray", [])
        assert pair(x, {"lr": 0.1}) == pair(x, b={}) == (15.0, "dict", [])
        assert pair(x, {"w": y, "lr": 0.1}) == pair(x, {"w": y}) == (15.0, "dict", [])
        assert pair(x, c=y) == (15.0, "float", ["c"]) and pair(x, d=y) == (15.0, "float", ["d"])
        assert pair(x, c=y, d=y) == pair(x, d=y, c=y) == (15.0, "float", ["c", "d"])
    for wrong, error in ((lambda: pair(x, a=x), TypeError), (lambda: pair(b=2), TypeError)):
        for _ in range(2):
            with pytest.raises(error, match="a"):
                wrong()


X = np.arange(24.0).reshape(8, 3)
W = np.array([1.0, -2.0, 0.5])


def scores(w: np.ndarray, x: np.ndarray) -> tuple[Any, Any]:
    return (x * w).mean(axis=0), (x * w).sum()


def make(rt: Any) -> Any:
    return rt.function(scores, bcast_inputs="w", outputs=("avg", "sum"))


def check(result: Any, w: Any = W, x: Any = X) -> None:
    for got, expected in zip(result, scores(np.asarray(w), np.asarray(x)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12)


def repeat(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call until nothing is new any more; return the last result."""
    return [call(*args, **options) for _ in range(4)][-1]


# ----- arguments

WRONG_BATCHES = (
    *(9, -1, [8], [-9, 0, 1], np.ones(7, bool), np.array([2**63 + 1], np.uint64), [[0, 1], [2, 3]]),
    *("ab", [0.5, 1.0, 2.0], 2.0, slice(0.5, 3), slice(None, None, 0), True, np.array([0, None]), object()),
)
WRONG: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    *((args, {}) for args in ((), (W,), (W, X, X), (W, 3.0), (W, np.array([None, {}])))),
    *(((W, X), {"batch": batch}) for batch in WRONG_BATCHES),
    *(((W, X), {"batch": batch}) for batch in (0, [], slice(3, 3), np.zeros(8, bool))),
    *(((W, X), options) for options in ({"num_slices": 0}, {"timeout": "soon"}, {"v": 1})),
]


def test_wrong_arguments_raise_as_at_a_first_call_and_send_nothing(subtests: Any, rt: Any) -> None:
    f, known = make(rt), ({}, {"batch": 5}, {"batch": [1, 2, 3]}, {"batch": slice(1, 4)})
    for (args, wrong), options in combinations(len(WRONG), WRONG, known):
        with subtests.test(num_args=len(args), wrong=str(wrong), after=str(options)):
            repeat(f, W, X, **options)
            messages = []
            for function in (make(rt), f):
                sent = rt.counters["messages_down"]
                with pytest.raises((TypeError, ValueError, IndexError)) as caught:
                    function(*args, **wrong)
                messages.append((caught.type, str(caught.value)))
            assert messages[0] == messages[1]
            assert rt.counters["messages_down"] == sent
    total = rt.function(lambda x: x.sum(), outputs="sum")
    repeat(total, X)
    assert [total(X, batch=nothing) for nothing in (0, [], slice(3, 3), np.zeros(8, bool))] == [0.0] * 4


# ----- what the function does


def test_inputs_come_in_their_own_shape_though_the_function_gave_them_another_one(rt: Any) -> None:
    def reshape(w: np.ndarray, x: np.ndarray) -> tuple[Any, Any]:
        shapes = w.shape, x.shape
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            w.shape, x.shape = (3, 1), (-1,)
        return x.sum(), float(shapes == ((3,), (4, 3)))

    f = rt.function(reshape, bcast_inputs="w", outputs=("sum", "min"))
    for w, x in ((W, X), (rt.data(W), rt.data(X))):
        assert [f(w, x) for _ in range(5)] == [(X.sum(), 1.0)] * 5


def test_the_objects_of_a_call_are_dropped_after_it(shared_runtimes: Any) -> None:
    log: list[Any] = []

    def track(x: np.ndarray) -> float:
        alive = sum(reference() is not None for reference in log)
        log.append(weakref.ref(array := x * 2.0))
        return alive + 0.0 * array[0]

    f = shared_runtimes[2].function(track, outputs="max")
    assert [f(np.ones(2)) for _ in range(5)] == [0.0] * 5


def test_a_copy_of_the_program_made_by_a_library_in_c_cannot_call() -> None:
    """Python's hooks do not run there."""
    script("""
        import ctypes
        rt = synk.fork(2, backend="numpy")
        total = rt.function(lambda x: x.sum(), outputs="sum")
        assert [total(np.arange(6.0)) for _ in range(4)] == [15.0] * 4
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            try:
                total(np.ones(6))
            except synk.errors.ReentrancyError as error:
                print("refused" if "forked copy" in str(error) else error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        assert [total(np.arange(6.0) + k) for k in range(4)] == [15.0 + 6 * k for k in range(4)]
        rt.close()
    """).check("refused\n")


def test_the_fourth_call_with_the_same_large_array_is_told_once(
    shared_runtimes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """``Data``, smaller arrays, other arrays, and those that have changed pass."""
    rt = shared_runtimes[1]
    f = rt.function(named("double", lambda x: 2 * x[:1]), outputs="gather")
    large = np.ones(200_000)
    for number in range(6):
        f(np.ones(200_000))
        f(large[:1000])
        f(rt.data(large))
        large += number
        f(large)
    assert not caplog.records
    for _ in range(8):
        f(large)
    (told,) = caplog.records
    assert "x of 'double', 1.6 MB" in told.getMessage() and "synk.data(x)" in told.getMessage()
