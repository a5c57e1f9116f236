"""Nested arguments: each rank gets the same nesting with its rows.

The oracle is the function itself, called by Python on the nesting with the rows that NumPy picks.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.seeds import examples

from synk.errors import SerializationError

EVERYWHERE = (pytest.param(1, marks=pytest.mark.storm), 2, 3, "inline")  # one worker is as one inline


class Pair(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


@dataclasses.dataclass
class Batch:
    """A dataclass that knows how many rows it has."""

    x: Any
    y: Any = None
    name: str = "train"
    num_rows: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.num_rows = len(self.x)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A dataclass with all that makes one hard to build."""

    x: Any
    scale: float = 2.0


class Records(dict):  # type: ignore[type-arg]
    """A dict of a class of its own."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Encoding(UserDict):  # type: ignore[type-arg]
    """As the batches of Hugging Face: a UserDict whose keys are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("num_rows", [7, 6, 2, 1])
def test_every_container_comes_as_itself(shared_runtimes: Any, where: Any, num_rows: int) -> None:
    rt = shared_runtimes[where]
    x, y = np.arange(num_rows * 2.0).reshape(num_rows, 2), np.arange(num_rows)
    containers = [
        {"x": x, "y": y},
        OrderedDict(y=y, x=x),
        defaultdict(list, x=x),
        Records(x=x, y=y),
        Encoding({"x": x}),
        Pair(x, y),
        Batch(x, y),
        Frozen(x=x),
        (x, y),
        (x,),
    ]
    kind = rt.function(lambda value: type(value), outputs="first")
    text = rt.function(lambda value: str(value), outputs=None)
    for container in containers:
        assert kind(container) is type(container)
        assert text.serial(container)[0] == str(container)
    edges = np.array_split(np.arange(num_rows), where if where != "inline" else 1)
    expected = [str(Batch(x[rows], y[rows])) if len(rows) else None for rows in edges]
    assert text(Batch(x, y)) == expected, "built by its constructor from the rank's rows: num_rows is theirs"


def test_attributes_and_methods_are_those_of_the_class(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    total = rt.function(lambda fields: fields.x.sum() + fields["y"].sum(), outputs="sum")
    for cls in (Records, Encoding):
        assert total(cls({"x": np.arange(5.0), "y": np.ones(5)})) == 15.0


def test_what_is_rows_and_what_is_structure(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    x = np.arange(4.0)
    f = rt.function(lambda value: value, outputs="gather")
    np.testing.assert_array_equal(f([[1, 2], [3, 4]]), [[1, 2], [3, 4]], "a list of numbers is rows")
    np.testing.assert_array_equal(f((1, 2.5, 3)), [1, 2.5, 3], "and so is a tuple of numbers")
    np.testing.assert_array_equal(f(("a", "bc")), ["a", "bc"])
    np.testing.assert_array_equal(f([(1, 2), (3, 4), (5, 6)]), [[1, 2], [3, 4], [5, 6]])
    for pair in ((x, x + 1), ([1, 2], [3, 4]), ((1, 2), (3, 4)), ([[1, 2], [3, 4]], (1, 2))):
        result = f(pair)
        assert type(result) is tuple
        for one, other in zip(result, pair, strict=True):
            np.testing.assert_array_equal(one, other)


def test_single_values_go_whole_to_every_rank(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda fields: {key: repr(value) for key, value in fields.items()}, outputs=None)
    values = {
        "none": None, "text": "abc", "bytes": b"abc", "int": 3, "flag": True, "number": 0.5, "numpy": np.float32(0.5),
        "zero-dim": np.array(4), "data": rt.data(np.array(2.5)), "empty": {}, "nothing": (None, {"a": None}),
    }  # fmt: skip
    expected = {key: repr(value) for key, value in values.items()} | {"data": repr(np.array(2.5))}
    result = f({"x": np.ones(2), **values})
    assert result == [{"x": repr(np.ones(1))} | expected] * 2


def test_texts_are_rows(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda fields: (fields["text"], len(fields["text"])), outputs=("gather", None))
    for texts in (["a", "bcd", "e"], ["longer than before"] * 3):
        result, lengths = f({"text": texts, "label": [0, 1, 2]})
        assert (result.tolist(), lengths) == (texts, [2, 1])


BATCHES = [None, 5, slice(1, 20, 3), slice(None, None, -1), [3, 3, -1, 0], np.arange(23) % 2 == 0]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("where", EVERYWHERE)
def test_leaves_of_every_kind_with_every_option(shared_runtimes: Any, where: Any, batch: Any) -> None:
    rt = shared_runtimes[where]
    x, y = np.random.default_rng(0).normal(size=(23, 3)), np.arange(23)
    picked = x if batch is None else x[:batch] if isinstance(batch, int) else x[batch]
    rows = y if batch is None else y[:batch] if isinstance(batch, int) else y[batch]
    mini = rt.data(picked.copy(), minibatch=True)

    def compute(scale: Any, fields: Any, *, extra: Any) -> Any:
        return {"rows": fields["x"] * scale + extra[1], "sum": (fields["pair"].x * extra[0][:, None]).sum(axis=0)}

    f = rt.function(compute, bcast_inputs="scale", outputs={"rows": "gather", "sum": "sum"})
    arguments = (2.0, {"x": rt.data(x), "pair": Pair(x.tolist(), None)})
    expected = compute(2.0, {"x": picked, "pair": Pair(picked, None)}, extra=(rows, picked))
    for call in (f, f.serial, lambda *args, **options: f.submit(*args, **options).result()):
        for slices in (1, 3):
            result = call(*arguments, extra=(y, mini), batch=batch, num_slices=slices)
            np.testing.assert_allclose(result["rows"], expected["rows"])
            np.testing.assert_allclose(result["sum"], expected["sum"])
    assert f.verify(*arguments, extra=(y, mini), batch=batch)


@pytest.mark.parametrize("where", EVERYWHERE)
def test_sharded_variables_among_the_leaves(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    x, y = np.random.default_rng(0).normal(size=(9, 2)), np.arange(9.0)
    shared = rt.shared(x, sharded=True)
    f = rt.function(lambda fields: fields["x"] * fields["y"][:, None], outputs="gather")
    for batch in (None, [8, 0, 3], slice(2, 7)):
        rows = slice(None) if batch is None else batch
        expected = x[rows] * y[rows][:, None]
        for call in (f, f.serial, lambda *args, **options: f.submit(*args, **options).result()):
            np.testing.assert_array_equal(call({"x": shared, "y": y}, batch=batch), expected)


def test_a_submitted_call_sees_what_the_one_before_assigned_to_a_leaf(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    state = rt.shared(np.arange(6.0), sharded=True)

    def double(fields: Any) -> Any:
        state.value = fields["x"] * 2
        return fields["x"].sum()

    f = rt.function(double, outputs="sum")
    read = rt.function(lambda fields: fields["x"].sum(), outputs="sum")
    calls = [f.submit({"x": state}), read.submit({"x": state}), f.submit({"x": state}), read.submit({"x": state})]
    assert [call.result() for call in calls] == [15.0, 30.0, 30.0, 60.0]


def test_no_rows_at_all(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda fields: (fields["x"], fields["x"].sum()), outputs=("gather", "sum"))
    rows, total = f({"x": np.zeros((0, 3)), "name": "none"})
    assert (rows.shape, total) == ((0, 3), 0.0)
    with pytest.raises(ValueError, match="with no rows"):
        rt.function(lambda fields: fields["x"].mean())({"x": np.zeros(0)})


def test_the_structure_may_change_from_call_to_call(shared_runtimes: Any) -> None:
    """Also the order of the keys, what is None, and the class: the function sees what was passed this time."""
    rt = shared_runtimes[2]
    f = rt.function(lambda fields: repr(fields), outputs=None)
    x = np.arange(4.0)
    kinds: list[Callable[[Any], Any]] = [
        lambda a: {"x": a, "y": a},
        lambda a: {"y": a, "x": a},
        lambda a: {"x": a, "y": None},
        lambda a: {"x": a, "y": 3},
        lambda a: {"x": a, "y": 4},
        lambda a: OrderedDict(x=a, y=a),
        lambda a: (a, a),
        lambda a: Pair(a, a),
        lambda a: a,
        lambda a: [a.tolist(), a.tolist()],
        lambda a: {"x": {"y": {"z": (a, {"w": [*a]})}}},
    ]
    for shift in range(3):
        for kind in (*kinds, *kinds[::-1]):
            whole = kind(x + shift)
            if isinstance(whole, list):
                whole = np.array(whole)
            halves = [kind(part) for part in np.split(x + shift, 2)] if not isinstance(whole, np.ndarray) else None
            if halves is None:
                halves = np.split(whole, 2)
            if shift % 2 and not isinstance(whole, np.ndarray):
                assert f.submit(whole).result()[0] == repr(_as_arrays(halves[0]))
            assert f(whole) == [repr(_as_arrays(half)) for half in halves]


def _as_arrays(value: Any) -> Any:
    """Return a nesting with its lists as the arrays that a function gets."""
    if isinstance(value, list):
        return np.array(value)
    if isinstance(value, Pair):
        return Pair(*map(_as_arrays, value))
    if isinstance(value, tuple):
        return tuple(map(_as_arrays, value))
    if isinstance(value, dict):
        return type(value)({key: _as_arrays(part) for key, part in value.items()})
    return value


def test_one_array_in_two_places_and_buffers_used_again(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda fields: (fields["x"] + fields["same"], fields["n"]), outputs=("gather", None))
    buffer = np.zeros(100)
    results, calls = [], []
    for number in range(9):
        buffer[:] = number
        results.append(f({"x": buffer, "same": buffer, "n": number}))
        calls.append(f.submit({"x": buffer, "same": buffer, "n": number}))
        buffer[:] = -1  # what was submitted has been copied
    for number, (result, call) in enumerate(zip(results, calls)):
        for rows, names in (result, call.result()):
            assert (rows == 2 * number).all()
            assert names == [number] * 2


@pytest.mark.parametrize("where", [2, "inline"])
def test_inputs_that_are_kept_stay_as_they_were(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    kept: list[Any] = []

    def keep(fields: Any) -> Any:
        kept.append(fields)
        return [float(each["x"][0]) for each in kept]

    f = rt.function(keep, outputs="first")
    for number in range(4):
        assert f({"x": np.full(6, float(number))}) == [float(k) for k in range(number + 1)]


def test_a_leaf_is_read_only(shared_runtimes: Any) -> None:
    def write(fields: Any) -> None:
        fields["x"] += 1

    with pytest.raises(ValueError, match="read-only"):
        shared_runtimes[2].function(write, outputs=None)({"x": np.ones(4)})


def test_row_shaped_outputs_are_told(shared_runtimes: Any) -> None:
    from synk.errors import OpMismatch

    f = shared_runtimes[2].function(lambda fields: fields["x"] * 2)
    with pytest.raises(OpMismatch, match="gather"):
        f({"x": np.arange(8.0), "name": "n"})


def test_a_class_of_the_script_is_the_same_class_on_the_workers(shared_runtimes: Any) -> None:
    """Classes without a module that workers could import."""
    rt = shared_runtimes[2]
    module = types.ModuleType("__main__")
    code = "import dataclasses\n@dataclasses.dataclass\nclass Local:\n    x: object\n    y: object = None\n"
    exec(code, vars(module))
    local: Any = vars(module)["Local"]
    f = rt.function(lambda fields: (type(fields) is local, fields.x.sum()), outputs=(None, "sum"))
    for number in range(3):
        assert f(local(np.arange(5.0) + number)) == ([True] * 2, 10.0 + 5 * number)


def test_mappings_that_cannot_be_built_come_as_dicts(shared_runtimes: Any, tmp_path: Any) -> None:
    rt = shared_runtimes[2]
    np.savez(tmp_path / "arrays.npz", x=np.arange(4), y=np.ones((4, 2)))
    f = rt.function(lambda fields: (type(fields), {key: fields[key] for key in fields}), outputs=("first", "gather"))
    with np.load(tmp_path / "arrays.npz") as arrays:
        kind, rows = f(arrays)
    assert kind is dict
    np.testing.assert_array_equal(rows["x"], np.arange(4))
    assert rows["y"].shape == (4, 2)


# -- refused in the master --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Initialised:
    """Cannot be built from its fields alone."""

    x: Any
    seed: dataclasses.InitVar[int]


class Endless(Mapping):  # type: ignore[type-arg]
    """A mapping that holds itself."""

    def __getitem__(self, key: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


X = np.arange(6.0)
REFUSED: list[tuple[Any, type[Exception], str]] = [
    ({"x": X, "mask": np.ones(5)}, ValueError, r"x\['x'\] with 6 rows and x\['mask'\] with 5"),
    ({"x": X, "t": (X, [1, 2])}, ValueError, r"x\['x'\] with 6 rows and x\['t'\]\[1\] with 2"),
    (Batch(X, X[:3]), ValueError, r"x\.x with 6 rows and x\.y with 3"),
    ({"x": X, "set": {1, 2}}, TypeError, r"cannot share x\['set'\] of 'f': got dtype object \(from set\)"),
    ({"x": X, "y": [[1, 2], [3]]}, TypeError, r"cannot share x\['y'\] of 'f': got a list whose entries differ"),
    ({"x": X, "y": [X, X[:2]]}, TypeError, r"cannot scatter x\['y'\] of 'f': got a list of arrays.*tuple\(x\['y'\]\)"),
    ([np.ones((6, 2)), X], TypeError, r"cannot scatter x of 'f': got a list of arrays"),
    ({"x": X, "y": object()}, TypeError, r"x\['y'\]"),
    (np.random.SeedSequence(1).spawn(6), TypeError, r"got seeds as Python objects \(from list\).*generate_state"),
    ({"x": X, "y": np.array(np.random.SeedSequence(1).spawn(6))}, TypeError, r"x\['y'\].*got seeds.*generate_state"),
    ({"x": X, "y": (k for k in range(6))}, TypeError, r"x\['y'\].*generator"),
    ({"x": X, "y": np.array([1, None])}, TypeError, r"x\['y'\]"),
    ({}, TypeError, r"cannot scatter x of 'f': got a dict in which nothing has rows.*bcast_inputs='x'"),
    ({"a": 1, "b": None, "c": "text"}, TypeError, "got a dict in which nothing has rows"),
    (Pair(1, 2), TypeError, "got a Pair in which nothing has rows"),
    (Initialised(X, 3), TypeError, r"cannot scatter x of 'f': the dataclass Initialised cannot be built.*seed"),
    (Endless(), ValueError, "holds itself"),
    ({"x": X, "m": np.ma.masked_array(X, X > 2)}, TypeError, r"x\['m'\].*MaskedArray.*filled"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_mistakes_are_named_by_their_place_before_anything_is_sent(shared_runtimes: Any, case: int) -> None:
    rt = shared_runtimes[2]
    value, error, text = REFUSED[case]
    f = rt.function(lambda x: 1.0, name="f")
    f(X)  # sends the function, and what earlier tests have dropped
    before = dict(rt.counters)
    for call in (f, f.submit, f.serial):
        with pytest.raises(error, match=text):
            call(value)
    assert rt.counters["messages_down"] == before["messages_down"]


def test_replicas_and_data_of_other_runtimes_are_refused_as_leaves(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: 1.0, name="f")
    with pytest.raises(ValueError, match=r"cannot pass x\['w'\] of 'f'.*replicated; pass it as an argument of its own"):
        f({"x": X, "w": rt.shared(X)})
    with pytest.raises(ValueError, match=r"x\['w'\] of 'f'.*another runtime"):
        f({"w": shared_runtimes[1].data(X)})


def test_a_class_that_cannot_be_sent_is_named(shared_runtimes: Any) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("stays here")

    class Key:
        __reduce_ex__ = refuse

    rt = shared_runtimes[2]
    with pytest.raises(SerializationError, match=r"structure of the arguments of 'f'.*stays here"):
        rt.function(lambda x: 1.0, name="f")({Key(): X})
    assert rt.function(lambda x: x["x"].sum(), outputs="sum")({"x": X}) == 15.0


# -- any nesting ------------------------------------------------------------------------------------------------------


def nestings(rows: int) -> st.SearchStrategy[Any]:
    """Return nestings whose leaves are recipes of arrays, or single values."""
    arrays = st.tuples(
        st.sampled_from(["f8", "i4", "?", "U3", "c8"]), st.sampled_from([(), (2,), (0,), (2, 3)]), st.integers(0, 99)
    ).map(lambda recipe: _numbers(rows, *recipe))
    leaves = arrays | arrays.map(lambda array: array.tolist() if array.ndim == 1 else array)
    values = leaves | st.none() | st.integers() | st.text(max_size=3)
    return st.recursive(
        values,
        lambda inner: st.one_of(
            st.dictionaries(st.text(max_size=2) | st.integers(0, 3), inner, max_size=3),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: (*parts, {})),
            st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
            st.tuples(inner, inner).map(lambda pair: Records(zip("ab", pair))),
        ),
        max_leaves=8,
    ).map(lambda value: {"rows": _numbers(rows, "f8", (), 7), "value": value})


def _numbers(rows: int, dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, (rows, *shape)).astype(dtype)


def _with_rows(value: Any, rows: Any) -> Any:
    """Return a nesting with the given rows of its leaves, as plain Python would take them."""
    if isinstance(value, list):
        return np.asarray(value)[rows]
    if isinstance(value, np.ndarray):
        return value[rows]
    if isinstance(value, Pair):
        return Pair(*[_with_rows(part, rows) for part in value])
    if isinstance(value, tuple):
        return tuple(_with_rows(part, rows) for part in value)
    if isinstance(value, dict):
        return type(value)({key: _with_rows(part, rows) for key, part in value.items()})
    return value


@examples(15)
@given(data=st.data())
def test_any_nesting(shared_runtimes: Any, data: st.DataObject) -> None:
    rt = shared_runtimes[data.draw(st.sampled_from([1, 2, 3]))]
    num_rows = data.draw(st.integers(1, 5))
    value = data.draw(nestings(num_rows))
    batch = data.draw(st.none() | st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=6))
    positions = np.arange(num_rows) if batch is None else np.array(batch)
    f = rt.function(repr, outputs=None)
    expected = [
        repr(_with_rows(value, rows)) if len(rows) else None for rows in np.array_split(positions, rt.world_size)
    ]
    assert f(value, batch=batch) == expected
    assert f(value, batch=batch) == expected, "again, by the plan of the first"
    assert collections.Counter(f.submit(value, batch=batch).result()) == collections.Counter(expected)
