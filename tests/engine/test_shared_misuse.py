"""What a shared variable refuses, in the program and in functions, with a text that says what to do; nothing changes.

A change of what ``w.value`` gave is an error that says to assign: it would be lost without a word.
"""

from __future__ import annotations

import copy
import json
import operator
import pickle
import sys
import types
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import pids
from support.rank_arrays import assert_same, assigner, everywhere, from_all_ranks
from support.tables import combinations

import synk
from synk.errors import ClosedError, ReentrancyError, SerializationError

ASSIGN = r"w\.value = \.\.\."
Pair = namedtuple("Pair", "a b")


def params() -> dict[str, Any]:
    return {
        "b": np.zeros(2),
        "layers": [(np.ones((2, 2)), None), {"s": np.zeros(())}],
        "pair": Pair(np.ones(1), np.ones(2)),
    }


# ----- values that do not fit

ZEROS = np.zeros(2)
UNFIT: list[tuple[Any, Any, Any, str]] = [
    *(
        (np.ones((2, 2), "f4"), value, error, words)
        for value, error, words in (
            (np.zeros((3, 2)), TypeError, r"'w': got dtype float64, expected float32.*astype\('float32'\)"),
            (np.zeros((3, 2), "c8"), TypeError, "complex64"),
            ([["a", "b"]], TypeError, "<U1"),
            ([[1j, 0]], TypeError, "complex128"),
            (np.float32(1), ValueError, "0 axes"),
            (np.zeros(3, "f4"), ValueError, r"1 axes \(3,\), expected 2 \(2, 2\)"),
            (np.zeros((2, 3), "f4"), ValueError, r"shape \(2, 3\), expected \(rows, 2\): only axis 0"),
            (np.zeros((2, 2), object), TypeError, "object"),
            (None, (TypeError, ValueError), "'w'"),
            ([[1.0, 2.0], [3.0]], (TypeError, ValueError), "'w'"),
            (np.ma.array(np.zeros((1, 2), "f4"), mask=True), TypeError, "MaskedArray.*filled"),
        )
    ),
    *((np.zeros(2, "i4"), value, TypeError, "float64") for value in ([1.5, 2.0], [1.0, 2.0], [np.nan, 0])),
    *(
        (np.array(held, dtype), value, TypeError, f"got dtype .*, expected .*{dtype[1:]}, or a list of values .* holds")
        for held, dtype, value in (
            ([0, 0], "int8", [300, 1]),
            ([0, 0], "int64", [2**63, 0]),
            ([0, 0], "uint8", [-1, 0]),
            ([0, 0], "float32", [1e300, 1.0]),
            (["a", "b"], "<U1", ["abc", "de"]),
            (0, "int32", 2**40),
        )
    ),
    ({"a": np.zeros(2), "b": np.int32(0)}, {"a": ZEROS, "b": 2**40}, TypeError, r"'w' \(leaf 1\): got dtype int64"),
    ({"a": np.ones(2), "b": (np.ones(2, "f4"),)}, {"a": ZEROS, "b": (ZEROS,)}, TypeError, r"'w' \(leaf 1\)"),
    *(
        ({"a": np.ones(2), "b": (np.ones(2),)}, value, ValueError, "'w'.*structure")
        for value in (
            {"a": ZEROS},
            {"a": ZEROS, "b": (ZEROS,), "c": 1.0},
            {"a": ZEROS, "b": [ZEROS]},
            None,
        )
    ),
]


def test_a_value_that_does_not_fit_is_refused(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    """Python's numbers have no width: 0.1 fits a float32 variable, and 300 no int8 one."""
    for where, (held, value, error, words) in combinations(len(UNFIT), (2, 0, "1+3"), UNFIT):
        rt = shared_runtimes[where]
        w = rt.shared(held, name="w")
        ways: list[Callable[[], Any]] = [
            lambda: setattr(w, "value", value),  # noqa: B023
            lambda: operator.setitem(w, 0, value),  # noqa: B023
            lambda: assigner(rt, w, lambda old, x: value)(np.ones(2)),  # noqa: B023
        ]
        with subtests.test(where=where, value=str(value)):
            for assign in ways:
                with pytest.raises(error, match=words):
                    assign()
            assert_same(everywhere(rt, w), [held] * rt.world_size)
    w = shared_runtimes[2].shared(np.zeros((2, 2), "f4"))
    fitting = [np.ones((7, 2), dtype) for dtype in ("f4", "f2", "i2", ">f4")]
    for value in (*fitting, np.zeros((0, 2), "f4"), np.asfortranarray(np.ones((3, 2), "f4")), [[0.1, 2]]):
        w.value = value
        assert_same(w.value, np.asarray(value, "f4"))
    fitting_lists: list[tuple[str, list[Any]]] = [
        ("i1", [-128, 127]),
        ("u1", [0, 255]),
        ("i4", [True, False]),
        ("i4", []),
        ("f2", [0.1, 7]),
        ("c8", [1, 0.1, 2j]),
        ("f4", [float("inf"), float("nan")]),
        ("U2", ["ab", ""]),
    ]
    for dtype, value in fitting_lists:
        w = shared_runtimes[2].shared(np.zeros(2, dtype))
        w.value = value
        assert_same(w.value, np.array(value, dtype))
    pair = shared_runtimes[2].shared({"x": np.zeros((2, 3)), "y": np.zeros(2)}, sharded=True, name="w")
    with pytest.raises(ValueError, match=r"'w': got axis-0 lengths \[2, 4\]"):
        pair.value = {"x": np.zeros((2, 3)), "y": np.zeros(4)}


def test_what_cannot_be_shared(rt: Any) -> None:
    cases: list[tuple[Any, bool, type[Exception], str]] = [
        (None, False, ValueError, "without arrays"),
        ({}, False, ValueError, "without arrays"),
        (np.array([None]), False, TypeError, "object"),
        ([[1], [2, 3]], False, TypeError, "cannot share"),
        (np.ma.array([1.0], mask=[True]), False, TypeError, "MaskedArray.*filled"),
        (1.5, True, ValueError, r"got shapes \[\(\)\], expected rows on axis 0"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, True, ValueError, r"\(2,\).*\(3,\)"),
    ]
    for value, sharded, error, words in cases:
        with pytest.raises(error, match=words):
            rt.shared(value, sharded=sharded)
    assert_same(from_all_ranks(rt, rt.shared(1.0)), [np.asarray(1.0)] * 2)


def test_a_value_of_a_class_that_no_worker_can_import_ends_the_call_and_no_worker(rt: Any) -> None:
    """A named tuple of a module that is made while the program runs."""
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


# ----- uses in the wrong place


def test_a_variable_is_passed_or_closed_over_and_nothing_else(rt: Any) -> None:
    w = rt.shared(np.ones(2), name="w")
    for carry in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="'w'"):
            carry(w)
    with pytest.raises(SerializationError, match="'w'"):
        rt.function(lambda state, x: 0.0, bcast_inputs="state")({"w": w}, np.ones(2))
    for op in (None, "avg"):
        with pytest.raises((TypeError, SerializationError), match=r"Replica|[Ss]hared"):
            rt.function(lambda x: w, outputs=op)(np.ones(2))
    for verb in (lambda: synk.broadcast(w), lambda: synk.all_reduce(w), lambda: synk.shared(1.0)):
        with pytest.raises(ReentrancyError, match="inside worker rank 0"):
            rt.function(lambda x: verb(), outputs=None)(np.ones(2))  # noqa: B023
    assert_same(everywhere(rt, w), [np.ones(2)] * 2)


def test_a_variable_of_another_runtime_or_of_a_closed_one_is_named(rt: Any, runtime: Any) -> None:
    other = runtime(1)
    w, x = other.shared(np.ones(2), name="stranger"), other.shared(np.arange(3), sharded=True, name="x")
    f = rt.function(lambda x: w.value.sum() * x.sum())
    uses: list[Callable[[], Any]] = [
        lambda: rt.function(lambda a, x: 0.0, bcast_inputs="a")(w, np.ones(2)),
        lambda: f(np.ones(2)),
        lambda: rt.function(lambda x: (0.0, w.value), updates=w)(np.ones(2)),
        lambda: synk.all_reduce([rt.shared(np.ones(2)), w]),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="'stranger' belongs to another runtime"):
            use()
    own = other.function(lambda: w.value.sum(), outputs="first")
    assert own() == 2
    shown = "<synk.Shared 'stranger' replicated shape=(2,) dtype=float64>", "<synk.Shared 'x' sharded shape=(3,) dtype"
    assert (repr(w), repr(x)[: len(shown[1])]) == shown
    other.close()
    for use in uses:
        with pytest.raises(ClosedError, match=r"'stranger'.*was closed"):
            use()
    for use in (lambda: w.value, lambda: x[0], lambda: x.shapes, lambda: other.shared(1), lambda: synk.gather(x), own):
        with pytest.raises(ClosedError):
            use()
    assert "'stranger'" in repr(w) and "'x'" in repr(x)


# ----- changes of what was read

INTO_ARRAYS: list[Callable[[Any], Any]] = [
    lambda v: operator.setitem(v, 0, 5),
    lambda v: operator.setitem(v, v > 0, 5),
    lambda v: operator.setitem(v.reshape(3, 1)[0], 0, 5),
    lambda v: v.sort(),
    lambda v: np.add(v, 1, out=v),
    lambda v: np.random.default_rng(0).shuffle(v),
]
INTO_CONTAINERS: list[Callable[[Any], Any]] = [
    lambda v: operator.setitem(v, "b", np.ones(2)),
    lambda v: operator.delitem(v, "b"),
    lambda v: v.update(b=1),
    lambda v: v.setdefault("c", 1),
    lambda v: v["layers"].append(1),
    lambda v: v["layers"].reverse(),
    lambda v: operator.setitem(v["layers"][1], "s", 1),
    lambda v: operator.iadd(v["layers"], [1]).append(operator.setitem(v, "layers", 1)),
]


def test_what_the_program_read_is_read_only_and_says_to_assign(subtests: pytest.Subtests, rt: Any) -> None:
    values = np.arange(3.0)[::-1]
    w, x, nest = rt.shared(values), rt.shared(values, sharded=True), rt.shared(params())
    for number, change in enumerate(INTO_ARRAYS):
        for variable in (w, x):
            text = ASSIGN if number < 3 else r"read-only|w\.value"
            with subtests.test("array", number=number), pytest.raises(ValueError, match=text):
                change(variable.value)
    for number, change in enumerate(INTO_CONTAINERS):
        with subtests.test("container", number=number), pytest.raises(TypeError, match=ASSIGN):
            change(nest.value)
    with pytest.raises(ValueError, match=ASSIGN):
        nest.value["pair"].b[0] = 5
    for kind in (OrderedDict, lambda items: defaultdict(list, items)):
        value = kind([("w", np.zeros(2)), ("b", np.ones(1))])
        other = rt.shared(value)
        with pytest.raises(TypeError, match=ASSIGN):
            other.value["b"] = 1
        assert isinstance(other.value, type(value)) and list(other.value) == list(value)
        assert type(copy.deepcopy(other.value)) is type(value)
        other.value = copy.copy(other.value)
    assert_same([w.value, x.value, nest.value], [values, values, params()])


def test_augmented_assignment_assigns(subtests: pytest.Subtests, rt: Any) -> None:
    """With NumPy's rules for the dtype, on every rank. Oracle: the same statement with an array."""
    values = (np.float64(3), np.arange(4.0).reshape(2, 2), np.arange(4).reshape(2, 2))
    names = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul")
    for name, value in combinations(24, names, values):
        w, expected, other = rt.shared(value), np.array(value), np.ones((2, 2), int) if name == "imatmul" else 2
        with subtests.test(name=name, value=str(value)):
            try:
                getattr(operator, name)(expected, other)
            except Exception as error:
                with pytest.raises(type(error)):
                    w.value = getattr(operator, name)(w.value, other)
                expected = np.array(value)
            else:
                w.value = getattr(operator, name)(w.value, other)
            assert_same([w[rank] for rank in range(2)], [expected] * 2)
    nest = rt.shared({"a": np.zeros(2), "b": np.ones(1)})
    nest.value |= {"b": np.full(1, 7.0)}
    assert_same(nest[1], {"a": np.zeros(2), "b": np.full(1, 7.0)})


def test_what_was_read_works_as_an_array_and_copies_may_be_changed(rt: Any) -> None:
    value = np.arange(3.0)
    w, nest = rt.shared(value), rt.shared(params())
    copies: list[Callable[[Any], Any]] = [
        np.array, copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v)), lambda v: v.astype(float),
        lambda v: v[[0, 1, 2]], np.zeros_like, lambda v: v * 1, np.sort, lambda v: v.cumsum(), lambda v: v @ np.eye(3),
    ]  # fmt: skip
    for take in copies:
        got = take(w.value)
        np.testing.assert_array_equal(got, take(value))
        got[0] = 5
    assert repr(w.value) == "array([0., 1., 2.])" and f"{rt.shared(2.5).value:.1f}" == "2.5"
    assert type(w.value[1]) is type(w.value.sum()) is np.float64 and type(w.value == 1.0) is np.ndarray
    for own in (copy.deepcopy(nest.value), pickle.loads(pickle.dumps(nest.value))):
        assert type(own) is dict and type(own["layers"]) is list and type(own["layers"][1]) is dict
        own["layers"][0][0][0] = 7
        own["layers"].append(1)
    assert type(nest.value.copy()) is dict and repr(nest.value) == repr(params())
    assert json.dumps(rt.shared({"a": [1.5]}).value | {"a": 1}) == '{"a": 1}'
    nest.value = nest.value
    assert_same(nest[1], params())
    g = rt.function(lambda x, p: p["layers"][0][0].sum() + x.sum(), outputs="sum", bcast_inputs="p")
    assert g(np.ones(2), nest.value) == 10


def test_a_change_in_place_in_a_function_is_an_error(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    """Of a container it is found when the function ends, with any number of slices."""
    arrays: list[Callable[[Any], Any]] = [
        lambda w: operator.setitem(w.value["b"], 0, 1),
        lambda w: (setattr(w, "value", params()), operator.setitem(w.value["b"], 0, 9)),
    ]
    for where, num_slices, number in combinations(12, (2, 0, "1+3"), (1, 2), range(len(INTO_CONTAINERS))):
        rt, change = shared_runtimes[where], INTO_CONTAINERS[number]
        w = rt.shared(params(), name="model")
        f = rt.function(lambda x: (change(w.value), x.sum())[1], outputs="sum")  # noqa: B023
        with subtests.test(where=where, num_slices=num_slices, number=number):
            for _ in range(2):
                with pytest.raises(ValueError, match=rf"variable 'model' in place.*{ASSIGN}"):
                    f(np.ones(4), num_slices=num_slices)
            for into in arrays:
                with pytest.raises(ValueError, match="read-only") as caught:
                    rt.function(lambda x: into(w), outputs=None)(np.ones(4))  # noqa: B023
                assert any("shared variables are read-only" in note for note in caught.value.__notes__)
            assert_same(w.value, params())


def test_what_a_function_read_and_changed_it_may_assign(rt: Any) -> None:
    w = rt.shared({"a": np.zeros(2), "b": np.ones(1)})

    def step(x: np.ndarray) -> float:
        new = w.value
        for key in new:
            new[key] = new[key] - w.value["b"]
        w.value = new
        return x.sum()

    def update(x: np.ndarray) -> Any:
        new = w.value
        new["b"] = new["b"] + len(x)
        return x.sum(), [new]

    rt.function(step, outputs="sum")(np.ones(4))
    assert_same(w[1], {"a": np.full(2, -1.0), "b": np.zeros(1)})
    rt.function(update, outputs="sum", updates=[(w, "sum")])(np.ones(4), num_slices=2)
    assert_same(w[1]["b"], np.full(1, 2.0))
