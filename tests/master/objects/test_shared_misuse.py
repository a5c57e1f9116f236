"""What a shared variable refuses, in the master and in functions, and that nothing changes then."""

from __future__ import annotations

import copy
import pickle
import sys
import types
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import pids
from support.rank_arrays import assert_same, assigner, everywhere, from_all_ranks

import synk
from synk.errors import ClosedError, NotForkedError, ReentrancyError, SerializationError


@pytest.mark.parametrize(
    "wrong",
    [
        {"a": np.zeros(2)},
        {"a": np.zeros(2), "b": (np.zeros(2),), "c": 1.0},
        {"a": np.zeros(2), "b": [np.zeros(2)]},
        {"a": np.zeros(2), "b": np.zeros(2)},
        (np.zeros(2), (np.zeros(2),)),
        np.zeros(2),
        None,
    ],
)
def test_a_value_of_another_structure_is_an_error(shared_runtimes: Any, wrong: Any) -> None:
    rt = shared_runtimes[2]
    value = {"a": np.ones(2), "b": (np.ones(2),)}
    w = rt.shared(value, name="tree")
    with pytest.raises(ValueError, match=r"'tree'.*structure"):
        w.value = wrong
    with pytest.raises(ValueError, match=r"'tree'.*structure"):
        assigner(rt, w, lambda value, x: wrong)(np.ones(2))
    assert_same(everywhere(rt, w), [value] * 2)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("where", [2, "inline", "1+3"])
@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (np.zeros((3, 2)), TypeError, r"got dtype float64, expected float32.*astype\('float32'\)"),
        (np.zeros((3, 2), "c8"), TypeError, "complex64"),
        ([["a", "b"]], TypeError, "<U1"),
        ([[1j, 0]], TypeError, "complex128"),
        (np.zeros(3, "f4"), ValueError, "1 axes"),
        (np.zeros((2, 3), "f4"), ValueError, "only axis 0"),
        (np.zeros((2, 2), object), TypeError, "object"),
        (None, (TypeError, ValueError), "'w'"),
        ([[1.0, 2.0], [3.0]], (TypeError, ValueError), "'w'"),
        (np.ma.array(np.zeros((1, 2), "f4"), mask=True), TypeError, "MaskedArray.*filled"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_in_the_master_and_in_functions(
    shared_runtimes: Any, where: Any, value: Any, error: type[Exception], words: str
) -> None:
    rt = shared_runtimes[where]
    w = rt.shared(np.ones((2, 2), "f4"), name="w")

    def body(value: Any, x: np.ndarray) -> float:
        w.value = value
        return 0.0

    for assign in (
        lambda: rt.set_value(w, value),
        lambda: setattr(w, "value", value),
        lambda: rt.set_value(w, value, rank=0),
        lambda: rt.function(body, bcast_inputs="value")(value, np.ones(2)),
    ):
        with pytest.raises(error, match=words):
            assign()
    assert_same(everywhere(rt, w), [np.ones((2, 2), "f4")] * rt.world_size)


@pytest.mark.parametrize("where", [2, "inline", "1+3"])
def test_python_numbers_fit_by_kind(shared_runtimes: Any, where: Any) -> None:
    """They have no width: 0.1 fits a float32 variable; but no number loses its fraction."""
    rt = shared_runtimes[where]
    w, n = rt.shared(np.zeros(2, "f4")), rt.shared(np.zeros(2, "i4"))
    w.value = [0.1, 2]
    assert_same(everywhere(rt, w), [np.array([0.1, 2], "f4")] * rt.world_size)
    n.value = [1, 2]
    assigner(rt, n, lambda value, x: [3, 4])(np.ones(rt.world_size))
    assert_same(everywhere(rt, n), [np.array([3, 4], "i4")] * rt.world_size)
    for value in ([1.5, 2.0], [1.0, 2.0]):
        with pytest.raises(TypeError, match="float64"):
            n.value = value
        with pytest.raises(TypeError, match="float64"):
            assigner(rt, n, lambda old, x: value)(np.ones(rt.world_size))  # noqa: B023


@pytest.mark.parametrize(
    ("value", "sharded", "error", "words"),
    [
        (None, False, ValueError, "without arrays"),
        ({}, False, ValueError, "without arrays"),
        (np.array([None]), False, TypeError, "object"),
        ([[1], [2, 3]], False, TypeError, "cannot share"),
        (np.ma.array([1.0], mask=[True]), False, TypeError, "MaskedArray.*filled"),
        (1.5, True, ValueError, "single value, expected rows"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, True, ValueError, r"\(2,\).*\(3,\)"),
    ],
)
def test_what_cannot_be_shared(
    shared_runtimes: Any, value: Any, sharded: bool, error: type[Exception], words: str
) -> None:
    rt = shared_runtimes[2]
    with pytest.raises(error, match=words):
        rt.shared(value, sharded=sharded)
    assert_same(from_all_ranks(rt, rt.shared(1.0)), [np.asarray(1.0)] * 2)


def test_a_variable_is_passed_or_closed_over_and_never_pickled(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w = rt.shared(np.ones(2), name="w")
    for carry in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="'w'"):
            carry(w)
    with pytest.raises(SerializationError, match="'w'"):
        rt.function(lambda state, x: 0.0, bcast_inputs="state")({"w": w}, np.ones(2))
    with pytest.raises((SerializationError, TypeError)):
        rt.function(lambda x: w, outputs=None)(np.ones(2))
    with pytest.raises(TypeError, match=r"Replica|Shared"):
        rt.function(lambda x: w, outputs="avg")(np.ones(2))


def test_the_verbs_have_no_meaning_inside_a_function(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w = rt.shared(np.ones(2))
    for verb in (
        lambda: synk.broadcast(w),
        lambda: synk.all_reduce(w),
        lambda: synk.set_value(w, np.zeros(2)),
        lambda: synk.shared(1.0),
    ):
        with pytest.raises(ReentrancyError, match="inside worker rank 0"):
            rt.function(lambda x: verb(), outputs=None)(np.ones(2))  # noqa: B023
    assert_same(everywhere(rt, w), [np.ones(2)] * 2)


def test_a_variable_of_another_runtime_is_named(shared_runtimes: Any, runtime: Callable[..., Any]) -> None:
    rt, other = shared_runtimes[2], runtime(1)
    w = other.shared(np.ones(2), name="stranger")
    f = rt.function(lambda x: w.value.sum() * x.sum())
    uses: dict[str, Callable[[], Any]] = {
        "argument": lambda: rt.function(lambda a, x: 0.0, bcast_inputs="a")(w, np.ones(2)),
        "closure": lambda: f(np.ones(2)),
        "updates": lambda: rt.function(lambda x: (0.0, w.value), updates=w)(np.ones(2)),
        "broadcast": lambda: rt.broadcast(w),
        "all_reduce": lambda: rt.all_reduce([rt.shared(np.ones(2)), w]),
        "set_value": lambda: rt.set_value(w, np.ones(2)),
        "get_value": lambda: rt.get_value(w),
    }
    for use in uses.values():
        with pytest.raises(ValueError, match="'stranger' belongs to another runtime"):
            use()
    other.close()
    for use in uses.values():
        with pytest.raises(ClosedError, match=r"'stranger'.*was closed"):
            use()


def test_a_closed_runtime_says_so_and_repr_never_fails(runtime: Callable[..., Any]) -> None:
    rt = runtime(2)
    w, x = rt.shared(np.ones(2), name="w"), rt.shared(np.arange(3), sharded=True, name="x")
    f = rt.function(lambda: w.value.sum(), outputs="first")
    assert f() == 2
    assert repr(w) == "<synk.Shared 'w' replicated shape=(2,) dtype=float64>"
    assert repr(x) == "<synk.Shared 'x' sharded shape=(3,) dtype=int64>"
    rt.close()
    uses: list[Callable[[], Any]] = [
        lambda: w.value,
        lambda: setattr(w, "value", np.zeros(2)),
        lambda: x.value,
        lambda: rt.shared(1.0),
        lambda: rt.broadcast(w),
        lambda: rt.gather(x),
        lambda: rt.get_lengths(x),
        f,
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()
    assert "'w'" in repr(w)
    assert "'x'" in repr(x)


def test_the_module_level_verbs_use_the_current_runtime() -> None:
    with pytest.raises((NotForkedError, ClosedError)):
        synk.shared(1.0)
    synk.fork(2, backend="numpy")
    try:
        w, x = synk.shared(np.zeros(2)), synk.shared(np.arange(5.0), sharded=True)
        synk.broadcast(w, [1.0, 2.0])
        synk.scatter(x, np.arange(4.0))
        assert synk.get_lengths([w, x]) == [[2, 2], [2, 2]]
        assert synk.get_shapes(x) == [(2,), (2,)]
        synk.all_reduce(x, "sum")
        np.testing.assert_array_equal(synk.gather(x), [[2, 4], [2, 4]])
        np.testing.assert_array_equal(synk.reduce(w, "sum", in_place=False), [2, 4])
        synk.set_value(w, [5.0], rank=1)
        np.testing.assert_array_equal(synk.get_value(w, 1), [5])
        synk.all_gather(x)
        np.testing.assert_array_equal(synk.get_value(x), [2, 4, 2, 4])
    finally:
        synk.close()


def test_a_value_of_a_class_that_no_worker_can_import_ends_the_call_and_no_worker(shared_runtimes: Any) -> None:
    """A named tuple of a module that is made while the program runs."""
    rt = shared_runtimes[2]
    module = types.ModuleType("made_while_the_program_runs")
    module.Point = namedtuple("Point", "a b", module=module.__name__)  # type: ignore[attr-defined, misc]
    sys.modules[module.__name__] = module
    try:
        before = pids(rt)
        w = rt.shared(module.Point(np.ones(2), np.zeros(2)), name="w")
        with pytest.raises(ModuleNotFoundError, match=module.__name__):
            rt.function(lambda x: w.value.a.sum(), outputs="sum")(np.ones(2))
        assert rt.function(lambda x: x.sum(), outputs="sum")(np.ones(2)) == 2.0
        assert pids(rt) == before
    finally:
        del sys.modules[module.__name__]
