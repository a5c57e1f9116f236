"""What somebody tries in the first hour with the library, mistakes included."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import ctrl_c_when, failpoint, process_stat, wait_for

import synk

X = np.arange(11.0)


# ----- outputs that are objects


def as_object(value: Any) -> np.ndarray:
    array = np.empty((), object)
    array[()] = value
    return array


OBJECTS: dict[str, Callable[[np.ndarray], Any]] = {
    "array of objects": lambda x: np.array(["a", [1, len(x)]], dtype=object),
    "a single object": lambda x: as_object({"rows": len(x)}),
    "record with an object": lambda x: np.array([(1, "a")], dtype=[("n", "i4"), ("s", object)]),
}


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("op", [None, "first"])
def test_arrays_of_objects_travel_as_objects(shared_runtimes: Any, kind: str, op: str | None) -> None:
    """Their bytes are pointers, which mean nothing in another process."""
    rt = shared_runtimes[2]
    got = rt.function(OBJECTS[kind], outputs=op)(X)
    for value, rows in zip([got] if op else got, (6, 5), strict=False):
        expected = OBJECTS[kind](np.zeros(rows))
        assert value.dtype == expected.dtype
        assert value.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("op", ["gather", "sum"])
def test_arrays_of_objects_cannot_be_combined(shared_runtimes: Any, kind: str, op: str) -> None:
    f = shared_runtimes[2].function(OBJECTS[kind], outputs=op)
    with pytest.raises(TypeError, match=f"cannot apply op '{op}'.*holds Python objects.*Use op None"):
        f(X)


def test_ranks_that_return_different_structures_are_told_what_to_do(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    with pytest.raises(synk.errors.CollectiveMismatch, match=r"one structure .* Give op None to what differs"):
        rt.function(lambda x: x.tolist(), outputs="sum")(X)
    got = rt.function(lambda x: x.tolist(), outputs=None)(X)
    assert got == [part.tolist() for part in np.array_split(X, 2)]
    got = rt.function(lambda x: deque(x.tolist()), outputs=None)(X)
    assert got == [deque(part.tolist()) for part in np.array_split(X, 2)]


# ----- Ctrl-C and limits while the workers come up


def slow_start(runtime: Callable[..., Any]) -> tuple[Any, Callable[[], None]]:
    """Return a runtime of which one worker stops before it is up, and what lets it go on."""
    rt = runtime(2, failpoint("start.ready", 1, action="stop"))
    pid = rt._session.workers.by_rank[1].process.pid

    def go_on() -> None:
        assert wait_for(lambda: process_stat(pid)[1] == "T")
        os.kill(pid, signal.SIGCONT)

    return rt, go_on


def test_ctrl_c_while_the_workers_start_loses_none_of_them(runtime: Callable[..., Any]) -> None:
    rt, go_on = slow_start(runtime)
    f = rt.function(lambda x: x.sum(), outputs="sum")
    caller = threading.get_ident()

    def waits_for_one() -> bool:
        """Whether the call has begun, and the other worker is up."""
        stack = traceback.extract_stack(sys._current_frames()[caller])
        is_called = any(frame.name == "__call__" and "synk" in frame.filename for frame in stack)
        return is_called and any(worker.hello for worker in rt._session.workers.by_rank)

    with pytest.raises(KeyboardInterrupt), ctrl_c_when(waits_for_one):
        f(X)
    go_on()
    assert f(X) == 55


def test_a_time_limit_counts_while_the_workers_start(runtime: Callable[..., Any]) -> None:
    rt, go_on = slow_start(runtime)
    f = rt.function(lambda x: x.sum(), outputs="sum")
    with pytest.raises(synk.errors.CallTimeout, match="still starting"):
        f(X, timeout=0.1)
    go_on()
    assert f(X) == 55


# ----- inside a worker


@pytest.mark.parametrize("verb", ["data(x)", "shared(x)", "function(len)", "fork(2)", "distribute()", "close()"])
def test_verbs_are_refused_inside_a_worker(runtime: Callable[..., Any], verb: str) -> None:
    """In workers that have run nothing of the package yet."""
    if verb == "function(len)":  # making one is harmless; calling it is not
        verb += "(x)"
    f = runtime(2).function(lambda x, verb: eval(f"synk.{verb}", {"synk": synk, "x": x}), bcast_inputs="verb")
    with pytest.raises(synk.errors.ReentrancyError):
        f(X, verb)


def test_collectives_are_refused_in_slices(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x: x - synk.comm.all_reduce(x.mean()), outputs="gather")
    with pytest.raises(ValueError, match=r"num_slices above 1.*num_slices=1"):
        f(X, num_slices=2)
    np.testing.assert_allclose(f(X[:10]), X[:10] - X[:10].mean())


# ----- arguments


def test_a_misspelt_keyword_is_named(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x, y=0: x.mean())
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'z', expected one of \['x', 'y'\]"):
        f(z=X)


def test_numpy_integers_select_outputs(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x: (x.sum(), x.max()), outputs="max")
    assert f(X, output_subset=np.array([1])) == f(X, output_subset=np.int64(1)) == (10.0,)
    with pytest.raises(IndexError, match="expected an integer from -2 to 1"):
        f(X, output_subset=[2])
    with pytest.raises(TypeError, match=r"output_subset=1\.5, expected positions or keys"):
        f(X, output_subset=1.5)
    with pytest.raises(IndexError, match="it returns one value"):
        shared_runtimes[2].function(lambda x: x.mean())(X, output_subset=[0])


@pytest.mark.parametrize("max_restarts", ["a", -1, 1.5, True, None])
def test_max_restarts_is_checked_before_anything_starts(max_restarts: Any) -> None:
    with pytest.raises(ValueError, match="max_restarts"):
        synk.Runtime(2, backend="numpy", max_restarts=max_restarts)


@pytest.mark.parametrize("names", [0, None, 1.5])
def test_bcast_inputs_are_names(shared_runtimes: Any, names: Any) -> None:
    with pytest.raises(TypeError, match="expected the name of a parameter"):
        shared_runtimes[2].function(lambda x: x, bcast_inputs=names)


def test_a_named_dtype_converts_as_numpy_does(shared_runtimes: Any) -> None:
    rt = shared_runtimes[1]
    for value, dtype in (([-1, 300], "u1"), ([np.nan, 1.5], "i4"), ([1, "a"], "f8")):
        with pytest.raises((OverflowError, ValueError)) as numpys:
            np.array(value, dtype=dtype)
        with pytest.raises(numpys.type):
            rt.data(value, dtype=dtype)
    assert rt.data([1, 2], dtype="f4").data.tolist() == [1.0, 2.0]
    with pytest.raises(TypeError):
        rt.data(X).set_length(2.5)
    with pytest.raises(ValueError, match="oversize='a'"):
        rt.data(X, oversize="a")


# ----- shared variables


def test_a_misspelt_attribute_of_a_variable_is_an_error(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w = rt.shared(np.zeros(3))
    with pytest.raises(AttributeError, match="vlaue"):
        w.vlaue = np.ones(3)

    def misspelt(x: np.ndarray) -> float:
        w.vlaue = x
        return 0.0

    with pytest.raises(AttributeError, match="vlaue"):
        rt.function(misspelt)(X)


def test_a_variable_is_an_array_to_numpy(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w, nested = rt.shared(np.arange(3.0)), rt.shared({"a": np.zeros(2)})
    np.testing.assert_array_equal(np.asarray(w), [0, 1, 2])
    assert np.array(w, dtype="f4").dtype == np.float32
    assert rt.function(lambda x: np.dot(w, [1, 2, 3]), outputs="first")(X) == 8
    with pytest.raises(TypeError, match="cannot make an array of variable"):
        np.asarray(nested)


def test_a_wrong_structure_is_described(shared_runtimes: Any) -> None:
    w = shared_runtimes[2].shared(np.zeros(2))
    with pytest.raises(ValueError, match=r"structure \{'a': \*\}, expected one array"):
        w.value = {"a": np.zeros(2)}


def test_two_new_values_for_one_update_are_counted(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    p, q = rt.shared(0.0), rt.shared(0.0)
    with pytest.raises(ValueError, match="got 1 new values, expected one for each of the 2 updates"):
        rt.function(lambda x: (0.0, [1.0]), updates=[p, q])(X)


def test_a_bfloat16_variable_needs_ml_dtypes(shared_runtimes: Any) -> None:
    """What the master reads of a variable is an array, and NumPy alone has no such dtype."""
    pytest.importorskip("torch")
    rt = shared_runtimes[1]
    w = rt.shared(np.zeros(2, np.float32))

    def assign(x: Any) -> None:
        import sys

        import torch

        sys.modules["ml_dtypes"] = None  # type: ignore[assignment]
        try:
            w.value = x.to(torch.bfloat16)
        finally:
            del sys.modules["ml_dtypes"]

    with pytest.raises(TypeError, match="Install ml_dtypes"):
        rt.function(assign, framework="torch", outputs=None)(np.ones(2))


def test_what_a_runtime_numbers_it_numbers_itself(runtime: Any) -> None:
    """Functions, variables, segments and plans of one runtime have the same numbers whatever others there are."""

    def numbers() -> tuple[Any, ...]:
        rt = runtime(1)
        w, data = rt.shared(np.ones(3)), rt.data(np.arange(3.0))
        first, second = rt.function(lambda x: (x * w.value).sum()), rt.function(lambda x: x.sum())
        assert second(data) == first(data) == 3.0
        assert (first._callee.id, second._callee.id) == (2, 1), "in the order in which they are sent"
        plans = rt._session.workers.by_rank[0].known.held["plan"]
        return w._referent.id, data._contents.segment.id, rt._session.lanes.first.slots.id, sorted(plans)

    assert numbers() == numbers()
