"""A change of what ``w.value`` gave is an error that says to assign: it would be lost without a word."""

from __future__ import annotations

import copy
import json
import operator
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.rank_arrays import assert_same

ASSIGN = r"w\.value = \.\.\."
Pair = namedtuple("Pair", "a b")


def params() -> dict[str, Any]:
    return {
        "b": np.zeros(2),
        "layers": [(np.ones((2, 2)), None), {"s": np.zeros(())}],
        "pair": Pair(np.ones(1), np.ones(2)),
    }


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    "change",
    [
        lambda v: operator.setitem(v, 0, 5),
        lambda v: operator.setitem(v, ..., 5),
        lambda v: operator.setitem(v, v > 0, 5),
        lambda v: operator.setitem(v[1:], 0, 5),
        lambda v: operator.setitem(v.reshape(3, 1)[0], 0, 5),
        lambda v: operator.setitem(v.T, 0, 5),
    ],
)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_assigning_into_an_array_says_what_to_do(
    shared_runtimes: Any, is_sharded: bool, change: Callable[[Any], Any]
) -> None:
    w = shared_runtimes[2].shared(np.arange(3.0), sharded=is_sharded)
    with pytest.raises(ValueError, match=ASSIGN):
        change(w.value)
    assert_same(w.value, np.arange(3.0))


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.fill(1),
        lambda v: v.sort(),
        lambda v: np.add(v, 1, out=v),
        lambda v: np.copyto(v, 1.0),
        lambda v: operator.setitem(v.flat, 0, 1),
        lambda v: operator.setitem(np.asarray(v), 0, 1),
        lambda v: np.random.default_rng(0).shuffle(v),
    ],
)
def test_other_ways_into_an_array_are_closed_too(shared_runtimes: Any, change: Callable[[Any], Any]) -> None:
    w = shared_runtimes[2].shared(np.arange(3.0)[::-1])
    with pytest.raises(ValueError, match=r"read-only|w\.value"):
        change(w.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: operator.setitem(v, "b", np.ones(2)),
        lambda v: operator.delitem(v, "b"),
        lambda v: v.update(b=1),
        lambda v: v.pop("b"),
        lambda v: v.setdefault("c", 1),
        lambda v: v.clear(),
        lambda v: operator.setitem(v["layers"], 0, 1),
        lambda v: v["layers"].append(1),
        lambda v: v["layers"].reverse(),
        lambda v: operator.setitem(v["layers"][1], "s", 1),
        lambda v: operator.iadd(v["layers"], [1]).append(operator.setitem(v, "layers", 1)),
    ],
)
def test_assigning_into_a_container_says_what_to_do(shared_runtimes: Any, change: Callable[[Any], Any]) -> None:
    w = shared_runtimes[2].shared(params())
    with pytest.raises(TypeError, match=ASSIGN):
        change(w.value)
    with pytest.raises(ValueError, match=ASSIGN):
        w.value["pair"].b[0] = 5
    assert_same(w.value, params())


@pytest.mark.parametrize("kind", [OrderedDict, lambda items: defaultdict(list, items)])
def test_other_dicts_refuse_as_well(shared_runtimes: Any, kind: Any) -> None:
    value = kind([("w", np.zeros(2)), ("b", np.ones(1))])
    w = shared_runtimes[2].shared(value)
    with pytest.raises(TypeError, match=ASSIGN):
        w.value["b"] = 1
    assert isinstance(w.value, type(value)) and list(w.value) == list(value)
    assert type(copy.deepcopy(w.value)) is type(value)
    w.value = copy.copy(w.value)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", ["iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"])
@pytest.mark.parametrize("value", [np.float64(3), np.arange(4.0).reshape(2, 2), np.arange(4).reshape(2, 2)])
def test_augmented_assignment_assigns(shared_runtimes: Any, name: str, value: Any) -> None:
    """With NumPy's rules for the dtype, on every rank. Oracle: the same statement with an array."""
    rt = shared_runtimes[2]
    w, expected = rt.shared(value), np.array(value)
    other = np.ones((2, 2), int) if name == "imatmul" else 2
    try:
        getattr(operator, name)(expected, other)
    except Exception as error:
        with pytest.raises(type(error)):
            w.value = getattr(operator, name)(w.value, other)
        expected = np.array(value)
    else:
        w.value = getattr(operator, name)(w.value, other)
    assert_same([rt.get_value(w, rank) for rank in range(2)], [expected] * 2)


def test_statements_as_they_are_written(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w, nest = rt.shared(np.arange(3)), rt.shared({"a": np.zeros(2), "b": np.ones(1)})
    w.value += 1
    w.value |= 8
    assert_same(rt.get_value(w, 1), (np.arange(3) + 1) | 8)
    with pytest.raises(ValueError, match=ASSIGN):
        w.value[0] = 5
    with pytest.raises(TypeError, match=ASSIGN):
        nest.value["b"] = np.zeros(1)
    nest.value |= {"b": np.full(1, 7.0)}
    assert_same(rt.get_value(nest, 1), {"a": np.zeros(2), "b": np.full(1, 7.0)})
    nest.value = {**nest.value, "a": np.ones(2)}
    assert_same(rt.get_value(nest, 1), {"a": np.ones(2), "b": np.full(1, 7.0)})


@pytest.mark.parametrize(
    "take",
    [
        lambda v: v.copy(), lambda v: np.array(v), lambda v: copy.copy(v), lambda v: copy.deepcopy(v), lambda v: v * 1,
        lambda v: pickle.loads(pickle.dumps(v)), lambda v: v.astype(float), lambda v: v[[0, 1, 2]], lambda v: v[v > -1],
        lambda v: np.copy(v), lambda v: np.zeros_like(v), lambda v: v.flatten(), lambda v: np.concatenate([v]),
        lambda v: np.where(v > 0, v, 0), lambda v: np.sqrt(v), lambda v: -v, lambda v: 1 + v, lambda v: np.sort(v),
        lambda v: v.cumsum(), lambda v: np.add.accumulate(v), lambda v: v @ np.eye(3),
    ],
)  # fmt: skip
def test_a_copy_is_an_ordinary_array_and_may_be_changed(shared_runtimes: Any, take: Callable[[Any], Any]) -> None:
    value = np.arange(3.0)
    w = shared_runtimes[2].shared(value)
    got = take(w.value)
    np.testing.assert_array_equal(got, take(value))
    got[0] = 5
    assert got[0] == 5
    assert isinstance(w.value, np.ndarray) and not isinstance(w.value.sum(), np.ndarray)


def test_what_was_read_works_as_before(shared_runtimes: Any) -> None:
    torch = pytest.importorskip("torch")
    rt = shared_runtimes[2]
    w, scalar, nest = rt.shared(np.arange(3.0)), rt.shared(2.5), rt.shared(params())
    assert repr(w.value) == "array([0., 1., 2.])" and f"{scalar.value:.1f}" == "2.5" and float(scalar.value) == 2.5
    assert type(w.value[1]) is np.float64 and type(w.value == 1.0) is np.ndarray
    assert torch.tensor(w.value).tolist() == [0, 1, 2]
    f = rt.function(lambda x, v: x * v[1], outputs="gather", bcast_inputs="v")
    for _ in range(2):  # also by the short way of the repeated call
        assert_same(f(w.value, w.value), np.arange(3.0))
    for own in (copy.deepcopy(nest.value), pickle.loads(pickle.dumps(nest.value)), rt.get_value(nest)):
        assert type(own) is dict and type(own["layers"]) is list and type(own["layers"][1]) is dict
        own["layers"][0][0][0] = 7
        own["layers"].append(1)
    assert type(nest.value.copy()) is dict and repr(nest.value) == repr(params())
    assert json.dumps(rt.shared({"a": [1.5]}).value | {"a": 1}) == '{"a": 1}'
    nest.value = nest.value
    assert_same(rt.get_value(nest, 1), params())
    assert rt.shared(nest.value).shape == nest.shape
    g = rt.function(lambda x, p: p["layers"][0][0].sum() + x.sum(), outputs="sum", bcast_inputs="p")
    assert g(np.ones(2), nest.value) == 10


# ----- in functions


@pytest.mark.sampled(20)
@pytest.mark.parametrize("where", [2, "inline", "1+3"])
@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda w: operator.setitem(w.value, "b", np.ones(2)),
        lambda w: operator.setitem(w.value["layers"], 0, 1),
        lambda w: w.value["layers"].append(1),
        lambda w: w.value.pop("b"),
        lambda w: (operator.setitem(w.value, "b", np.ones(2)), w.value),
    ],
)
def test_a_change_of_a_container_in_a_function_is_an_error(
    shared_runtimes: Any, where: Any, num_slices: int, change: Callable[[Any], Any]
) -> None:
    rt = shared_runtimes[where]
    w = rt.shared(params(), name="model")

    def body(x: np.ndarray) -> float:
        change(w)
        return x.sum()

    f = rt.function(body, outputs="sum")
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"variable 'model' in place.*{ASSIGN}"):
            f(np.ones(4), num_slices=num_slices)
    assert_same(rt.get_value(w), params())


def test_what_a_function_read_and_changed_it_may_assign(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
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
    assert_same(rt.get_value(w, 1), {"a": np.full(2, -1.0), "b": np.zeros(1)})
    rt.function(update, outputs="sum", updates=[(w, "sum")])(np.ones(4), num_slices=2)
    assert_same(rt.get_value(w, 1)["b"], np.full(1, 2.0))
    kinds = rt.function(lambda x: repr(type(w.value)), outputs=None)
    assert kinds(np.ones(2)) == ["<class 'dict'>"] * 2
