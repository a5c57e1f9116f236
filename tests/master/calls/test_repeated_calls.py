"""A repeated call is right whatever changed since the one before: arguments, options, data, state, outputs, workers.

A function is called until its calls are alike, then something changes. The oracle is NumPy, or plain Python, on the
whole input; for errors it is the same call of a function that was never called before.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import kill_and_wait, pids, same_workers, script
from support.signs import hear, say, sign

import synk
from synk import errors

WHERE = [1, 2, 3, "inline"]
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


WRONG_BATCHES = (9, -1, [8], [-9, 0, 1], np.zeros(7, bool), "ab", [0.5, 1.0, 2.0], True, object())
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


def test_functions_runtimes_and_threads_in_turn(shared_runtimes: Any) -> None:
    rt, other = shared_runtimes[2], shared_runtimes[3]
    f, g, h, data = make(rt), make(rt), make(other), rt.data(X)

    def work(scale: float) -> None:
        for _ in range(30):
            check(f(W * scale, data), W * scale)
            check(g(W * 2, X[:2]), W * 2, X[:2])
            check(h(W * scale, X), W * scale)
            check(f.submit(W * 3, data).result(), W * 3)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [None] * 4


def test_submitted_calls_have_what_there_was_when_they_were_submitted(shared_runtimes: Any) -> None:
    """Globals, and arguments that the program changes in place afterwards, even in their dtype."""
    rt = shared_runtimes[2]
    scope: dict[str, Any] = {"SCALE": 1.0}
    exec("def scaled(x):\n    return x.sum() * SCALE", scope)
    f = rt.function(scope["scaled"], outputs="sum")
    for k in range(10):
        scope["SCALE"] = float(k // 3)
        arrays = [np.arange(8.0) for _ in range(3)]
        pending = [f.submit(array) for array in arrays]
        scope["SCALE"] = -1.0
        for array in arrays:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                array.dtype = np.int64
        assert [f(np.arange(8)), f(np.arange(8.0))] == [-28] * 2
        assert [each.result() for each in pending] == [28.0 * (k // 3)] * 3


@pytest.mark.parametrize("where", [1, 2, "inline"])
def test_assignments_beside_something_else(subtests: Any, shared_runtimes: Any, where: Any) -> None:
    """None is lost where a function communicates, or keeps an input: it has assigned when that is found out."""
    rt = shared_runtimes[where]
    kept: list[Any] = []
    w = rt.shared(np.zeros(2))

    def assign(how: str, x: np.ndarray) -> float:
        total = synk.comm.all_reduce(x.sum(), "sum") if "communicate" in how else x.sum()
        kept[:] = [x] if "keep" in how else []
        w.value = w.value + 1.0
        return float(total)

    for how in ("", "communicate", "keep", "communicate and keep"):
        f = rt.function(assign, bcast_inputs="how", outputs="max")
        with subtests.test(how):
            w.value = np.zeros(2)
            for number in range(1, 9):
                f(how, np.full(4, float(number)))
                for rank in range(rt.world_size):
                    np.testing.assert_array_equal(rt.get_value(w, rank), [number] * 2)


# ----- what the function does


def moody(step: int) -> Any:
    """Return two outputs whose shapes, dtypes and nesting differ from one step to the next."""
    return {
        1: (np.ones((2, 2)), 1.5),
        2: (np.ones(3, np.float32), 1.5),
        3: (np.ones(3), np.float32(1.5)),
        4: [np.ones(3), 1.5],
        5: np.ones(3),
        6: (np.ones(3), np.ones(1 << 16)),
        7: {"b": 1.5, "a": np.ones(3)},
        8: {"a": np.ones(3), "b": 1.5},
    }.get(step, (np.full(3, float(step)), 1.5 + step))


STEPS = [step for first in (0, *range(1, 10)) for step in (first, *[0] * 3, *[first] * 4, first % 8 + 1)]


@pytest.mark.parametrize("where", [2, "inline"])
def test_outputs_that_change(subtests: Any, shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    f = rt.function(lambda k, x: moody(int(k[0])), bcast_inputs="k", outputs="avg")
    first = rt.function(lambda k: "text" if k[0] == 2 else float(k[0]), bcast_inputs="k", outputs="first")
    for position, step in enumerate(STEPS):
        with subtests.test(position=position, step=step):
            k = np.array([step])
            got, expected = f(k, X), moody(step)
            np.testing.assert_equal(got, expected)
            assert type(got) is type(expected)
            if isinstance(expected, dict):
                assert list(got) == list(expected)
                got, expected = list(got.values()), list(expected.values())
            for one, other in zip(got, expected, strict=True):
                assert np.asarray(one).dtype == np.asarray(other).dtype
            assert first(k) == ("text" if step == 2 else step)


def test_a_layout_that_changes_does_not_mix_up_the_arguments(shared_runtimes: Any) -> None:
    """The call that fitted had forgotten its arguments, and was compiled without them: 768 for 256."""
    for submitted in (False, True):
        f = shared_runtimes[2].function(
            lambda x, n=1: np.zeros(3 if x[0] > 100 else 2) + x.sum() * n, bcast_inputs="n", outputs="sum"
        )
        call = (lambda *args, f=f: f.submit(*args).result()) if submitted else f
        np.testing.assert_array_equal(repeat(call, np.ones(256), 3), [768.0] * 2)
        np.testing.assert_array_equal(call(np.full(256, 101.0), 3), [101 * 768.0] * 3)
        np.testing.assert_array_equal(call(np.ones(256, np.uint8)), [256.0] * 2)
        np.testing.assert_array_equal(call(np.ones(256), 3), [768.0] * 2)


SAME_BITS = list(
    itertools.product(
        ("avg", "sum", "prod", "min", "max", "gather", "first", None), ("float16", "float32", "float64"), (6, 7, 1)
    )
)


def test_the_same_call_gives_the_same_bits_and_the_callers_own_arrays(subtests: Any, shared_runtimes: Any) -> None:
    for op, dtype, rows in random.Random(0).sample(SAME_BITS, 40):
        with subtests.test(op=op, dtype=dtype, rows=rows):
            x = (np.random.default_rng(rows).normal(size=(rows, 5)) * 10).astype(dtype)
            f = shared_runtimes[3].function(lambda x: x[:1] * x[:1] + x.mean(axis=0), outputs=op)
            seen = set()
            for _ in range(5):
                found = f(x) if op is None else [f(x)]
                arrays = [each for each in found if each is not None]  # which is of a rank without rows
                seen.add(tuple(each.tobytes() for each in arrays))
                for each in arrays:
                    assert (each.dtype, each.flags.writeable) == (dtype, True)
                    each[...] = -1
            assert len(seen) == 1


@pytest.mark.parametrize("as_data", [True, False])
def test_what_a_function_does_to_its_inputs(shared_runtimes: Any, as_data: bool) -> None:
    """They are read-only, and come in their own shape though the function gave them another one."""
    rt = shared_runtimes[2]

    def reshape(w: np.ndarray, x: np.ndarray) -> tuple[Any, Any]:
        shapes = w.shape, x.shape
        with pytest.raises(ValueError, match="read-only"):
            x[0] = 7.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            w.shape = (3, 1)
            x.shape = (-1,)
        return x.sum(), float(shapes == ((3,), (4, 3)))

    f = rt.function(reshape, bcast_inputs="w", outputs=("sum", "min"))
    w, x = (rt.data(W), rt.data(X)) if as_data else (W, X)
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
            synk.comm.iall_reduce(np.full(total.shape, x.sum()), "sum", out=total)
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


def test_what_is_printed_comes_before_the_result(shared_runtimes: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def act(k: float, x: np.ndarray) -> float:
        if k % 2:
            print("number", k)
        return k

    f = shared_runtimes[2].function(act, bcast_inputs="k", outputs="max")
    for k in range(6):
        assert f(k, X) == k
        expected = [f"[rank {rank}] number {k}" for rank in range(2)] if k % 2 else []
        assert sorted(capfd.readouterr().out.splitlines()) == expected


def test_the_objects_of_a_call_are_dropped_after_it(shared_runtimes: Any) -> None:
    log: list[Any] = []

    def track(x: np.ndarray) -> float:
        alive = sum(reference() is not None for reference in log)
        log.append(weakref.ref(array := x * 2.0))
        return alive + 0.0 * array[0]

    f = shared_runtimes[2].function(track, outputs="max")
    assert [f(np.ones(2)) for _ in range(5)] == [0.0] * 5


# ----- what happens to the program and its workers


def test_other_workers_limits_and_the_end(runtime: Any, tmp_path: Path) -> None:
    """A worker dies between calls; all are restarted; a call takes too long; the runtime is closed during one."""
    rt = runtime(2)
    begun = sign(tmp_path / "begun")

    def act(how: str, x: np.ndarray) -> tuple[Any, Any]:
        if how and x[0, 0]:
            if how == "say":
                say(begun)
            time.sleep(600)
        return scores(W, x)

    f = rt.function(act, bcast_inputs="how", outputs=("avg", "sum"), name="act")
    check(repeat(f, "", X))
    kill_and_wait(pids(rt)[1])
    with pytest.warns(RuntimeWarning, match="was started again") as warned:
        check(f("", X))
    assert [each.filename for each in warned] == [__file__]
    rt.restart()
    check(repeat(f, "", X))
    with same_workers(rt):
        rt.timeout = 0.3
        with pytest.raises(errors.CallTimeout, match="'act' did not end in time"):
            f("wait", X)
        rt.timeout = None
        check(repeat(f, "", X))
    closer = threading.Thread(target=lambda: (hear(begun), rt.close()))
    closer.start()
    with pytest.raises(errors.ClosedError):
        f("say", X)
    closer.join()
    with pytest.raises(errors.ClosedError):
        f("", X)


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
