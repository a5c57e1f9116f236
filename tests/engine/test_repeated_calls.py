"""A repeated call is right whatever changed since the one before: arguments, options, data, state, outputs.

A function is called until its calls are alike, then something changes. The oracle is NumPy, or plain Python, on the
whole input; for errors it is the same call of a function that was never called before.
"""

from __future__ import annotations

import gc
import itertools
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers, script
from support.told import told

import synk
from synk import errors

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


def test_wrong_arguments_raise_as_at_a_first_call_and_send_nothing(subtests: Any, shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f, known = make(rt), ({}, {"batch": 5}, {"batch": [1, 2, 3]}, {"batch": slice(1, 4)})
    for (args, wrong), options in itertools.product(WRONG, known):
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


# ----- data, variables, captured state


def test_data_in_place_of_other_data(shared_runtimes: Any) -> None:
    """Of the same look, perhaps at the same address; of nothing; of another runtime."""
    rt = shared_runtimes[2]
    f = make(rt)
    two, theirs = rt.data(X * 2), shared_runtimes[3].data(X)
    for k in range(6):
        one = rt.data(X + k)
        check(repeat(f, W, one), W, X + k)
        check(f(W, two), W, X * 2)
        with pytest.raises(ValueError, match="another runtime"):
            f(W, theirs)
        del one  # the next one perhaps lies there
    g = rt.function(lambda scale, x: x.sum() * (1 if scale is None else scale[0]), bcast_inputs="scale", outputs="sum")
    data = rt.data(np.array([3.0]))
    assert g(data, X) == 3 * X.sum()
    del data
    gc.collect()
    assert [g(None, X), g(None, X)] == [X.sum()] * 2
    with pytest.raises(TypeError, match="x"):
        g(None, None)


# ----- what the function does


def moody(step: int) -> Any:
    """Return outputs whose shapes, dtypes and nesting differ from one step to the next."""
    number = np.float64(1.5)
    return {
        1: (np.ones((2, 2)), number),
        2: (np.ones(3, np.float32), number),
        3: (np.ones(3), np.float32(number)),
        4: [np.ones(3), number],
        5: np.ones(3),
        6: (np.ones(3), np.ones(1 << 16)),
        7: {"b": number, "a": np.ones(3)},
        8: {"a": np.ones(3), "b": number},
    }.get(step, (np.full(3, float(step)), number + step))


STEPS = [
    *(0, 0, 0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0, 8, 7, 0),
    *(0, 0, 1, 1, 1, 1, 2, 2, 2, 6, 6, 6, 6, 9, 8, 8, 8, 7, 7, 7, 9, 9, 9, 10),
]


@pytest.mark.parametrize("where", [2, 0])
def test_outputs_that_change(subtests: Any, shared_runtimes: Any, where: Any) -> None:
    f = shared_runtimes[where].function(lambda k, x: moody(int(k[0])), bcast_inputs="k", outputs="avg")
    for position, step in enumerate(STEPS):
        with subtests.test(position=position, step=step):
            got, expected = f(np.array([step]), X), moody(step)
            np.testing.assert_equal(got, expected)
            assert told(got) == told(expected)


def test_inputs_come_in_their_own_shape_though_the_function_gave_them_another_one(shared_runtimes: Any) -> None:
    def reshape(w: np.ndarray, x: np.ndarray) -> tuple[Any, Any]:
        shapes = w.shape, x.shape
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            w.shape, x.shape = (3, 1), (-1,)
        return x.sum(), float(shapes == ((3,), (4, 3)))

    rt = shared_runtimes[2]
    f = rt.function(reshape, bcast_inputs="w", outputs=("sum", "min"))
    for w, x in ((W, X), (rt.data(W), rt.data(X))):
        assert [f(w, x) for _ in range(5)] == [(X.sum(), 1.0)] * 5


def test_errors_and_collectives_in_some_calls(shared_runtimes: Any) -> None:
    """A rank raises, communicates, leaves a collective out, or leaves it to be finished after it has returned."""
    rt = shared_runtimes[2]

    def act(how: str, x: np.ndarray) -> Any:
        total = np.full(1, x.sum())
        if how == "raise" and x[0]:
            raise LookupError("as told")
        if how == "all" or (how == "lonely" and x[0]):
            total = synk.comm.all_reduce(total, "sum")
        if how in ("later", "two later"):
            total = np.empty(2 if how == "two later" else 1)
            synk.comm.all_reduce(np.full(total.shape, x.sum()), "sum", out=total, async_op=True)
        if how == "unheard" and x[0]:
            synk.comm.send(x, 1 - synk.comm.rank)
        return total

    f = rt.function(act, bcast_inputs="how", outputs="max")
    x = np.arange(4.0)
    refused: dict[str, tuple[Any, str]] = {
        "raise": (LookupError, "as told"),
        "lonely": (errors.CollectiveMismatch, "left the function without joining it"),
        "unheard": (errors.CollectiveMismatch, "without receiving it"),
    }
    rng = random.Random(0)
    order = [how for how in ("", "raise", "all", "lonely", "later", "two later", "unheard") for _ in range(4)]
    with same_workers(rt):
        for how in [*order, *rng.sample(order, len(order))]:
            if how in refused:
                with pytest.raises(refused[how][0], match=refused[how][1]) as caught:
                    f(how, x)
                assert how != "raise" or isinstance(caught.value.__cause__, errors.RemoteError)
            else:
                assert f(how, x).tolist() == ([6.0] * (2 if "two" in how else 1) if how else [5.0])


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
