"""Under op None each rank returns one object of any kind, or None; "gather" joins lists of one object per row.

The oracle is the plain function, called for the rows of each rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.rank_arrays import told
from support.tables import WHOLE_OR_SAMPLE, combinations, named

import synk
from synk.errors import CollectiveMismatch, SerializationError


class Pair(NamedTuple):
    """A named tuple."""

    a: Any
    b: Any


@dataclass
class Fit:
    """Something that only a pickler of classes can send."""

    slope: float


# -- one object for each rank -----------------------------------------------------------------------------------------

LONG = 200_000
"""More characters than there is a place for."""
BIG = 40_000
"""Rows of 8 bytes, more than goes through the slots."""

FORMS: dict[str, Callable[[Any], Any]] = {
    "list of floats": lambda x: [float(value) for value in x],
    "list of texts": lambda x: [str(value) for value in x],
    "list of arrays": lambda x: [x[:1], x],
    "list of long texts": lambda x: [f"{number} " * 20_000 for number in range(30)],
    "empty list": lambda x: [],
    "tuple": lambda x: (float(x[0]), len(x)),
    "tuple of arrays": lambda x: (x, x.sum(), x[:1] > 0),
    "named tuple": lambda x: Pair(len(x), {"rows": x.tolist()}),
    "dict by rows": lambda x: {int(value): float(value) for value in x},
    "dict of arrays": lambda x: {"b": x, "a": {"mean": x.mean(), "parts": [x, (x,)]}},
    "default dict": lambda x: defaultdict(list, {"rows": x.tolist()}),
    "deque": lambda x: deque(x.tolist()),
    "set": lambda x: set(x.tolist()),
    "text": lambda x: "rows" * len(x),
    "texts of all lengths": lambda x: "t" * [0, 10, LONG, 3, LONG + 1, 90_000, 130_000][int(x[0])],
    "bytes": lambda x: b"\x00.\xff" * len(x),
    "int": lambda x: 10 ** (30 * len(x)),
    "a number of NumPy": lambda x: x.astype(np.float32)[0],
    "array": lambda x: x * 2,
    "array of objects": lambda x: np.array(["a", [1, len(x)]], dtype=object),
    "array of a single object": lambda x: np.array({"rows": len(x)}, dtype=object),
    "record with an object": lambda x: np.array([(1, "a")], dtype=[("n", "i4"), ("s", object)]),
    "large array": lambda x: np.tile(x, BIG),
    "an object": lambda x: Fit(float(x[0])),
    "objects in a nest": lambda x: [Fit(1.0), {"fit": Fit(2.0), "set": {1, 2}}],
    "None": lambda x: None,
    "bool": lambda x: bool(x[0] > 2),
    "another kind for each": lambda x: [7, {"a": 1}, "text", None, (1, 2), Fit(1.0), [x]][int(x[0])],
    "another key for each": lambda x: {"abcdefg"[int(x[0])]: x, "z": None},
    "an equal key of another type for each": lambda x: {[1, True, 1.0][int(x[0]) % 3]: "text"},
    "another class for each": lambda x: [Pair(1, x), (1, x), [1, x]][int(x[0]) % 3],
    "deep for some": lambda x: (x, None if x[0] == 2 else {"k": [x[:1], "s"] if x[0] > 1 else 3}),
    "large for some": lambda x: [np.tile(x, BIG), (np.tile(x, BIG), 1), [3]][int(x[0]) % 3],
    "None for some": lambda x: None if x[0] > 1 else {"b": 1, "a": {2}},
}
PLACES: dict[str, tuple[Callable[[Any, Any], Any], Any, Callable[[Any], Any]]] = {
    "alone": (lambda value, x: value, None, lambda result: result),
    "in a tuple": (lambda value, x: (1.5, value), ("avg", None), lambda result: result[1]),
    "in a list": (lambda value, x: [value, len(x), value], [None, "sum", None], lambda result: result[2]),
    "in a dict": (lambda value, x: {"z": value, "a": 1}, {"a": "sum", "z": None}, lambda result: result["z"]),
    "in a named tuple": (lambda value, x: Pair(value, 1.0), (None, "sum"), lambda result: result.a),
    "beside large rows": (
        lambda value, x: (value, np.tile(x[:, None], BIG)), (None, "gather"), lambda result: result[0],
    ),
}  # fmt: skip


WHERE = (1, 2, 3, 0, "1+1")


@pytest.mark.parametrize("is_whole", WHOLE_OR_SAMPLE)
def test_each_rank_returns_what_it_likes_from_call_to_call(shared_runtimes: Any, subtests: Any, is_whole: bool) -> None:
    """One function for each place: what it returned before says nothing of what it returns now."""

    def run(x: Any, form: str, place: str) -> Any:
        return PLACES[place][0](FORMS[form](x), x)

    functions = {
        (place, workers): shared_runtimes[workers].function(run, bcast_inputs=("form", "place"), outputs=outputs)
        for place, (_, outputs, _) in PLACES.items()
        for workers in WHERE
    }
    kept = []
    for case in combinations(10**6 if is_whole else 56, FORMS, PLACES, WHERE, (1, 2, 5, 6), (1, 2)):
        form, place, workers, rows, num_slices = case
        make, (_, _, found), num_ranks = FORMS[form], PLACES[place], shared_runtimes[workers].world_size
        x = np.arange(1.0, rows + 1)
        shares = [part for part in np.array_split(x, num_ranks) if len(part)]
        values = [make(part) for part in shares]
        if num_slices > 1:
            values = [[make(cut) for cut in np.array_split(part, num_slices) if len(cut)] for part in shares]
        expected = told(values + [None] * (num_ranks - len(shares)))
        f = functions[place, workers]
        with subtests.test(case=str(case)):
            for call in (f, f, lambda *args, f=f, **options: f.submit(*args, **options).result()):
                result = call(x, form, place, num_slices=num_slices)
                assert told(found(result)) == expected
                if place == "beside large rows":
                    np.testing.assert_array_equal(result[1][:, 0], x)
            kept.append((found(result), expected))
    assert all(told(value) == expected for value, expected in kept), "a later call has changed a result"


def test_an_object_may_contain_itself(shared_runtimes: Any) -> None:
    def tree(x: Any) -> Any:
        root: Any = {"rows": x, "children": [{}]}
        root["children"][0]["parent"] = root
        return root

    f = shared_runtimes[2].function(tree, outputs=None)
    for found in (*f(np.ones(4)), *f(np.ones(4), num_slices=2)[1]):
        assert found["children"][0]["parent"] is found


def only(rank: int, value: Callable[[], Any]) -> Any:
    """Return a value on one rank, None on the others."""
    return value() if synk.comm.rank == rank else None


def test_who_returns_none_may_change_from_call_to_call(shared_runtimes: Any) -> None:
    f = shared_runtimes[3].function(
        lambda k, x: (only(k, lambda: x.sum()), x.sum()), bcast_inputs="k", outputs=(None, "sum")
    )
    for rank in (0, 1, 2, 5, 1, 0, 1, 2, 5, 1):
        parts, total = f(rank, np.arange(6.0))
        assert total == 15.0
        assert parts == [value if each == rank else None for each, value in enumerate([1.0, 5.0, 9.0])]
    g = shared_runtimes[3].function(
        lambda x: defaultdict(list, s=x.sum(), n=only(0, lambda: (1, {"k": [3]})), t="text"),
        outputs={"s": "sum", "n": None, "t": "first"},
    )
    expected = defaultdict(list, s=15.0, n=[(1, {"k": [3]}), None, None], t="text")
    result = g(np.arange(6.0))
    assert (type(result), result) == (defaultdict, expected), "a dict that ranks fill differently keeps its kind"
    report = f.verify(1, np.arange(6.0))
    assert [output.name for output in report.outputs] == ["[0]", "[1]"], "paired by their place"
    assert [output.matching for output in report.outputs] == [(), ()]


def test_a_subset_of_outputs_needs_an_op_for_each(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(named("f", lambda x: (1, [2] * synk.comm.rank)), outputs=None)
    with pytest.raises(TypeError, match=r"cannot select outputs of 'f': got output_subset and op None"):
        f(np.zeros(2), output_subset=[0])
    g = shared_runtimes[2].function(
        lambda x: {"a": "text", "b": x.sum(), "c": [1, synk.comm.rank]}, outputs=dict.fromkeys("abc")
    )
    full = {"a": ["text"] * 2, "b": [2.0, 2.0], "c": [[1, 0], [1, 1]]}
    for subset in (["a"], ["c", "a"], ["b"], ["a"], list("abc")):
        for _ in range(2):
            assert g(np.ones(4), output_subset=subset) == {key: full[key] for key in subset}


class Small(synk.Op):
    """Accepts one dtype."""

    def check(self, dtype: np.dtype, what: str) -> None:
        if dtype != np.int64:
            raise TypeError(f"{what} has dtype {dtype}")

    def combine(self, values: list[Any], rows: list[int]) -> Any:
        return values


def test_an_op_of_ones_own_checks_each_number_and_not_only_the_first(shared_runtimes: Any) -> None:
    for other in (2.5, True):
        f = shared_runtimes[2].function(
            lambda x, other=other: (1, 1, other)[int(x[0])], outputs=Small(), bcast_inputs="other"
        )
        assert f(np.full(2, 0)) == f(np.full(2, 1)) == [1, 1]
        with pytest.raises(TypeError, match=r"the output of .* has dtype"):
            f(np.full(2, 2))


# -- "gather" joins lists of one object per row -----------------------------------------------------------------------

X = np.arange(7.0)
LISTS: tuple[Callable[[Any], Any], ...] = (
    lambda x: [f"row {value}" * int(value) for value in x],
    lambda x: [np.full(int(value) % 3, value) for value in x],
    lambda x: [{"value": float(value)} for value in x],
    lambda x: [(int(value), None) for value in x],
    lambda x: [value for value in x.tolist() if value % 2],  # not one per row
    lambda x: [],
    lambda x: (["a" for _ in x], x * 2),
    lambda x: {"names": [str(value) for value in x], "values": x + 1},
    lambda x: defaultdict(list, names=[str(value) for value in x], twice=2 * x),
    lambda x: Pair([str(value) for value in x], x),
)


def test_lists_are_joined_in_the_order_of_the_rows(rt: Any, shared_runtimes: Any, subtests: Any) -> None:
    """The oracle is the serial list."""
    for where, fn in combinations(12, (1, 2, 3, 0), LISTS):
        f = shared_runtimes[where].function(fn, outputs="gather")
        with subtests.test(where=where, form=LISTS.index(fn)):
            for rows in (X, X, X[:3], np.tile(X, 4)):
                assert told(f(rows)) == told(fn(rows))
            assert told(f(X, num_slices=2)) == told(f.submit(X).result()) == told(fn(X))
            assert told(f(X, batch=[5, 0, 3])) == told(fn(X[[5, 0, 3]]))
            assert f.verify(X)
    beside = rt.function(
        lambda x: ([str(v) for v in x], x.sum(), [x * 2, x * 3]), outputs=("gather", "sum", ["gather"] * 2)
    )
    assert told(beside(X)) == told(([str(v) for v in X], X.sum(), [X * 2, X * 3]))
    only = rt.function(lambda x: {"a": [str(v) for v in x], "b": x}, outputs={"a": "gather", "b": "gather"})
    assert only(X, output_subset="a") == {"a": [str(v) for v in X]}


def test_rows_of_sharded_variables_are_joined_in_the_order_of_the_batch(rt: Any) -> None:
    w = rt.shared(X, sharded=True)
    f = rt.function(lambda x: [str(v) for v in x], outputs="gather")
    for batch in (None, [6, 1, 4, 0]):
        assert f(w, batch=batch) == [str(v) for v in (X if batch is None else X[batch])]
    with pytest.raises(CollectiveMismatch, match="expected one output row per input row"):
        rt.function(lambda x: ["one"], outputs="gather")(w, batch=[6, 1, 4, 0])


# -- what is refused -------------------------------------------------------------------------------------------------


class Loud(str):
    """A text that says itself how it is pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("not me")


BY_ARRAY = r"np.array\(list\)"
DIFFER = CollectiveMismatch, "expected one structure on all ranks"
REFUSED: list[tuple[Callable[[Any], Any], Any, tuple[type[Exception], str]]] = [
    (lambda x: only(0, lambda: x.sum()), "sum", DIFFER),
    (lambda x: (x, only(0, lambda: x)), "gather", DIFFER),
    (lambda x: (only(0, lambda: (1, x.sum())), 1.0), ((None, "sum"), "sum"), DIFFER),
    (lambda x: ([1] * synk.comm.rank, x.sum()), ("sum", None), DIFFER),
    (lambda x: ((1, 2) if synk.comm.rank else 3, x.sum()), ("first", "sum"), DIFFER),
    (
        lambda x: ("name", 3, (each for each in x)),
        (None, None, None),
        (SerializationError, r"\(output 2\): TypeError: cannot pickle 'generator'"),
    ),
    (lambda x: Loud("text"), None, (SerializationError, r"\(the output\): ValueError: not me")),
    (
        lambda x: tuple(x.tolist()),
        "gather",
        (ValueError, f"got a single number, .* Return {BY_ARRAY} or the list"),
    ),
    (
        lambda x: "text",
        "gather",
        (TypeError, f"got str, .* Return a list with an object for each row, or {BY_ARRAY}"),
    ),
    (
        lambda x: [*map(float, x)],
        "sum",
        (CollectiveMismatch, f'joined .* under outputs="gather"; of numbers {BY_ARRAY}'),
    ),
    (lambda x: [1] if x[0] == 0 else x, "gather", (CollectiveMismatch, "cannot gather the output")),
    *(
        (FORMS[form], op, (TypeError, f"cannot apply op '{op}'.*holds Python objects.*Use op None"))
        for form in ("array of objects", "record with an object")
        for op in ("gather", "sum")
    ),
]


def test_what_is_refused_is_named(rt: Any, subtests: Any) -> None:
    for fn, outputs, (error, words) in REFUSED:
        with subtests.test(outputs=str(outputs), words=words), pytest.raises(error, match=words):
            rt.function(fn, outputs=outputs)(X)
    call = rt.function(lambda x: Loud("text") if x[0] else "text", outputs=None)
    for _ in range(2):
        assert call(np.zeros(2)) == ["text"] * 2
        with pytest.raises(SerializationError, match="not me"):
            call(np.ones(2))
