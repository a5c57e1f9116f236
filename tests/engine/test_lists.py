"""Lists as arguments: no element changes its value or its kind on the way, or the list is refused.

Ints of Python have any size, also where the values of ranks and slices are combined. NumPy's integers wrap.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.tables import WHOLE_OR_SAMPLE, combinations, named

import synk
import synk.torch

torch = pytest.importorskip("torch")

DAY = datetime.date(2024, 2, 29)
MOMENT = datetime.datetime(2024, 2, 29, 23, 59, 59, 999999)


class Colour(enum.IntEnum):
    RED = 1


class Pair(NamedTuple):
    first: int
    second: int


EXACT: dict[str, list[Any]] = {
    "bools": [True, False],
    "bools, also NumPy's": [True, np.False_],
    "integers": [1, -(2**63), 2**63 - 1],
    "large ids": [2**63, 2**64 - 1, 0],
    "integers, also NumPy's": [np.int8(-3), 300, np.uint16(7)],
    "floats": [0.1, float("inf"), -0.0],
    "floats and integers": [0.5, 2**53, -(2**53)],
    "floats of single precision": [np.float32(0.1), np.float32(2)],
    "floats of several precisions": [np.float32(0.1), 0.1, np.float16(3)],
    "complex": [1j, 2 - 1j],
    "complex and others": [1j, 0.5, 3],
    "texts": ["a", "", "grün", "a\0b"],
    "bytes": [b"a", b"", b"\0b"],
    "days": [DAY, datetime.date(1, 1, 1)],
    "moments": [MOMENT, datetime.datetime(1, 1, 1)],
    "durations": [datetime.timedelta(microseconds=-1), datetime.timedelta(days=9)],
    "dates of NumPy": [np.datetime64("2024-02-29T12:00"), np.datetime64("1970-01-01T00:00:01")],
    "numbers without axes": [np.array(1.5), np.float64(2), 3],
    "tensors without axes": [torch.tensor(1.0), torch.tensor(2.5)],
    "tuples": [("a", 1, True), ("", 2**63 - 1, False)],
    "tuples with dates": [(DAY, 0.5), (DAY, 1)],
}
REFUSED: dict[str, list[Any]] = {
    "bool with integer": [True, 5],
    "bool of NumPy with integer": [np.True_, 5],
    "bool with float": [0.5, False],
    "text with integer": [1, "a"],
    "text with float": ["a", 0.5],
    "text with bytes": ["a", b"a"],
    "text with None": ["a", None],
    "float with None": [0.5, None],
    "integers beyond 64 bits": [2**64, 1],
    "integers below 64 bits": [-(2**63) - 1, 1],
    "integers of no common type": [2**63, -1],
    "integers of no common type of NumPy": [np.uint64(2**63), np.int64(-1)],
    "integers beyond the precision of floats": [2**53 + 1, 0.5],
    "integers of NumPy beyond it": [np.int64(2**60 + 1), np.float32(0.5)],
    "integers beside complex": [2**53 + 1, 1j],
    "texts that end in a NUL": ["a\0", "bc"],
    "bytes that end in a NUL": [b"a\0", b"bc"],
    "digests": [hashlib.sha256(str(n).encode()).digest() for n in range(2000)],
    "decimals": [decimal.Decimal("0.1"), decimal.Decimal("0.2")],
    "members of an enumeration": [Colour.RED, Colour.RED],
    "named tuples": [Pair(1, 2), Pair(3, 4)],
    "moments with a zone": [MOMENT.replace(tzinfo=datetime.timezone.utc)],
    "days and moments": [DAY, MOMENT],
    "dates of NumPy that are too far apart": [np.datetime64("9999", "Y"), np.datetime64(1, "ns")],
    "durations with integers": [np.timedelta64(1, "s"), 3],
    "masked values": [np.ma.masked, 0.5],
    "tuples with None": [("a", 1), ("b", None)],
    "tuples with texts that end in a NUL": [("a\0", 1), ("b", 2)],
}
SHAPES = ("flat", "rows of two", "tuples of two")
PLACES = ("argument", "keyword", "entry", "batch", "picked")


def shaped(elements: list[Any], shape: str) -> list[Any]:
    if shape == "flat":
        return elements
    kind = list if shape == "rows of two" else tuple
    return [kind((element, element)) for element in elements]


def plain(value: Any) -> Any:
    """Return an element, or a row of them, with Python's types."""
    return list(map(plain, value)) if isinstance(value, (list, tuple)) else getattr(value, "tolist", lambda: value)()


def told_apart(value: Any) -> Any:
    """Return what a comparison needs to see the kind of an element as well: ``True == 1``."""
    if isinstance(value, (list, tuple)):
        return [told_apart(each) for each in value]
    return "number" if type(value) in (int, float, complex) else type(value).__name__, value


def functions_of(runtime: synk.Runtime) -> tuple[Any, Any]:
    return (
        runtime.function(named("f", lambda x: [each.tolist() for each in x]), outputs="gather"),
        runtime.function(named("f", lambda x: [each.tolist() for each in x["rows"]]), outputs="gather"),
    )


def called(take: Any, entry: Any, rows: list[Any], place: str) -> list[Any]:
    if place == "entry":
        return entry({"rows": rows, "more": [0.5] * len(rows)})
    if place == "keyword":
        return take(x=rows)
    batch = {"batch": slice(0, len(rows)), "picked": list(range(len(rows)))}.get(place)
    return take(rows, batch=batch)


def test_a_list_arrives_exactly(shared_runtimes: Any, subtests: Any) -> None:
    functions = functions_of(shared_runtimes[2])
    for name, shape, place in combinations(60, EXACT, SHAPES, PLACES):
        if shape != "flat" and name.startswith("tuples"):
            continue
        with subtests.test(name=name, shape=shape, place=place):
            for rows in (EXACT[name], EXACT[name][:1], EXACT[name] * 3):
                got = called(*functions, shaped(rows, shape), place)
                assert told_apart(plain(got)) == told_apart(plain(shaped(rows, shape)))


def test_a_list_that_no_array_holds_is_refused_by_name(shared_runtimes: Any, subtests: Any) -> None:
    functions = functions_of(shared_runtimes[2])
    for name, shape, place in combinations(60, REFUSED, SHAPES, PLACES):
        if shape != "flat" and name.startswith(("tuples", "named")):
            continue
        label = r"x\['rows'\]" if place == "entry" else "x"
        with (
            subtests.test(name=name, shape=shape, place=place),
            pytest.raises(TypeError, match=rf"cannot share {label} of 'f': got "),
        ):
            called(*functions, shaped(REFUSED[name], shape), place)


def test_data_and_variables_have_the_same_rule_and_a_series_is_the_way_out(shared_runtimes: Any) -> None:
    series, rt = pytest.importorskip("pandas").Series, shared_runtimes[2]
    f = rt.function(lambda x: [(type(each).__name__, each) for each in x], outputs="gather")
    for name in ("text with integer", "bool with integer", "bytes that end in a NUL"):
        with pytest.raises(TypeError, match="cannot share Data 'ids': got a list"):
            rt.data(REFUSED[name], name="ids")
        assert f(series(REFUSED[name], dtype=object)) == [(type(each).__name__, each) for each in REFUSED[name]]
    with pytest.raises(TypeError, match="cannot share variable 'ids': got a str"):
        rt.shared("a\0", name="ids")
    for name, rows in EXACT.items():
        if "without axes" not in name:  # those are a nesting
            assert told_apart(plain(rt.shared(rows).value.tolist())) == told_apart(plain(rows)), name
    pair = rt.shared([np.array(1.0), np.array(2.0)])
    pair.value = [3.0, np.float64(4.0)]
    assert pair.value == [3.0, 4.0]


def test_verify_hands_over_the_list(shared_runtimes: Any, subtests: Any) -> None:
    """With the rows of the batch; the array where the function raises on the list."""
    total = shared_runtimes[2].function(lambda x: float(sum(x)), outputs="sum")
    for rows, batch in (([1.5, 2.5, 3.5, 4.5], [2, 0]), ((1.5, 2.5, 4.0), None), (range(4), slice(1, 3))):
        with subtests.test(rows=str(rows), batch=str(batch)):
            report = total.verify(rows, batch=batch)
            assert report and report.oracle == "plain", report
            assert "The plain function got lists as they are." in report.notes
    doubled = shared_runtimes[2].function(lambda x: x * 2, outputs="gather")
    assert not doubled.verify([1.0, 2.0]), "a list times two is another thing"
    array = shared_runtimes[2].function(lambda x: x.sum(), outputs="sum").verify([1.0, 2.0, 4.0])
    assert array and "because it raised AttributeError on the list itself" in " ".join(array.notes)


# -- a list of arrays can mean rows or structure ----------------------------------------------------------------------

X = np.arange(12.0).reshape(6, 2)
T = torch.arange(12.0).reshape(6, 2)
OF_ARRAYS: dict[str, Any] = {
    "arrays": [X, X + 1],
    "one array": [X],
    "arrays of other lengths": [X, X[:2]],
    "tensors": [T, T + 1],
    "tuples of arrays": [(X, X), (X, X)],
    "lists of arrays": [[X, X], [X, X]],
    "dicts of tensors": [{"x": T}, {"x": T}],
    "an array beside numbers": [1.0, X],
    "deque of arrays": collections.deque([X, X]),
}
VERBS: dict[str, Callable[[Any, Any], Any]] = {
    "call": lambda f, value: f(value),
    "submit": lambda f, value: f.submit(value).result(),
    "serial": lambda f, value: f.serial(value),
    "stream": lambda f, value: list(f.stream([(value,)])),
}


def total(x: Any) -> Any:
    return np.asarray(x).sum()


def test_a_list_of_arrays_is_refused_where_rows_are_divided(rt: Any, subtests: Any) -> None:
    """By each verb, at its place, with what to write instead. Data has no structure at all."""
    f = rt.function(total, outputs="sum")
    for (kind, value), verb, place in combinations(40, OF_ARRAYS.items(), (*VERBS, "Data"), ("x", "x['a']")):
        of, library = ("tensors", "torch") if "tensors" in kind else ("arrays", "np")
        text = f"got a {type(value).__name__} of {of}"
        with subtests.test(kind=kind, verb=verb, place=place):
            if verb == "Data":
                with pytest.raises(TypeError, match=rf"{text}.*\.stack\(\.\.\.\) if each of them is one row"):
                    rt.data(value)
                continue
            with pytest.raises(TypeError, match=text) as caught:
                VERBS[verb](f, value if place == "x" else {"a": value, "b": X})
            for words in (f"{place} of 'total'", f"{library}.stack({place}) if", f"tuple({place}) to divide"):
                assert words in str(caught.value)
            assert ("total(*x) if" in str(caught.value)) == (place == "x")
    model = synk.torch.DataParallel(torch.nn.Linear(2, 1), runtime=rt)
    with pytest.raises(TypeError, match=r"cannot scatter input of 'Linear': got a list of ten.*model\(\*input\)"):
        model([T, T])


def test_lists_that_are_not_divided_stay_what_they_are(rt: Any) -> None:
    pair = [X, X + 1]

    def spread(parts: list[Any]) -> Any:
        assert type(parts) is list
        return parts[0].mean() - parts[-1].mean()

    assert list(rt.map(spread, [pair, pair])) == [spread(pair)] * 2, "the items of a map"
    assert list(rt.map(np.mean, pair)) == [X.mean(), X.mean() + 1], "the iterable of a map"
    whole = rt.function(lambda parts, x: spread(parts) + 0 * x.mean(), bcast_inputs="parts")
    assert whole(pair, X) == spread(pair)
    assert rt.function(lambda x: spread(pair) + 0 * x.mean())(X) == spread(pair), "captured"
    assert [len(rank) for rank in rt.function(lambda x: [x, x + 1], outputs=None)(X)] == [2, 2], "returned"
    f = rt.function(lambda x, y: (x * y).sum(), outputs="sum")
    assert list(f.stream([[X, X + 1], [X, X]])) == [(X * (X + 1)).sum(), (X * X).sum()], "a batch of a loader"
    assert rt.function(lambda x: x[0].mean() - x[-1].mean())(tuple(pair)) == spread(pair), "what the error names"
    assert rt.function(lambda x: x.mean())(np.stack(pair)) == np.mean(pair)
    assert rt.function(lambda x, y: x.mean() - y.mean())(*pair) == spread(pair)


class Total(synk.Op):
    """Adds up."""

    def combine(self, values: list[Any], rows: list[int]) -> Any:
        return sum(values)


X, LARGE = np.ones(2), np.ones(60_000)
OPS: dict[str, tuple[Any, Callable[[Sequence[int]], int]]] = {
    "sum": ("sum", sum),
    "prod": ("prod", math.prod),
    "min": ("min", min),
    "max": ("max", max),
    "a callable": (operator.add, sum),
    "a synk.Op": (Total(), sum),
}
VALUES: dict[str, list[int]] = {
    "small": [3, -1, 4, 1, -5, 9, 2],
    "squares of 2**31": [2**62] * 4,
    "beyond 64 bits": [2**64 + 1, -(2**70), 3, 2**64],
    "unsigned": [2**63, 2**63 - 1, 5],
    "long": [10**400, 1, -(10**300)],
    "one row": [2**80],
}
FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "alone": (lambda value: value, lambda op: op, lambda got: got),
    "in a tuple": (lambda value: (0.5, value), lambda op: ("avg", op), lambda got: got[1]),
    "in a dict": (lambda value: {"b": value, "a": X}, lambda op: {"a": "sum", "b": op}, lambda got: got["b"]),
    "beside a large array": (lambda value: [value, LARGE], lambda op: [op, "sum"], lambda got: got[0]),
}
"""What a function returns, its ops, and where the value is in the result."""
WAYS: dict[str, Callable[..., Any]] = {
    "call": lambda f, *args, **options: f(*args, **options),
    "submit": lambda f, *args, **options: f.submit(*args, **options).result(),
    "repeated": lambda f, *args, **options: [f(*args, **options) for _ in range(4)][-1],
}
WHERE = (1, 2, 3, 0, "1+3")


def combine(rows: Any, of_values: Callable[[Sequence[int]], int], table: list[int]) -> int:
    return of_values([table[row] for row in rows])


@pytest.mark.parametrize("is_whole", WHOLE_OR_SAMPLE)
def test_they_are_combined_exactly(shared_runtimes: Any, subtests: Any, is_whole: bool) -> None:
    def run(rows: Any, name: str, values: str, form: str) -> Any:
        return FORMS[form][0](combine(rows, OPS[name][1], VALUES[values]))

    cases = combinations(10**6 if is_whole else 50, WHERE, OPS, VALUES, FORMS, WAYS, (1, 3))
    functions = {
        (where, name, form): shared_runtimes[where].function(
            run, bcast_inputs=("name", "values", "form"), outputs=FORMS[form][1](OPS[name][0])
        )
        for where, name, _, form, *_ in cases
    }
    for case in cases:
        where, name, values, form, way, num_slices = case
        with subtests.test(case=str(case)):
            rows = np.arange(len(VALUES[values]))
            got = WAYS[way](functions[where, name, form], rows, name, values, form, num_slices=num_slices)
            found = FORMS[form][2](got)
            assert (type(found), found) == (int, OPS[name][1](VALUES[values]))


def test_a_reproducible_sum_is_exact(shared_runtimes: Any) -> None:
    values, rows = VALUES["beyond 64 bits"], np.arange(3000) % 4
    for op in ("sum", "prod", "max"):
        of_values = OPS[op][1]
        f = shared_runtimes[2].function(
            lambda rows, of=of_values: combine(rows, of, values), bcast_inputs="of", outputs=op, reproducible=True
        )
        assert f(rows) == combine(rows, of_values, values)


def test_subclasses_count_as_ints_and_numpys_integers_wrap(shared_runtimes: Any) -> None:
    class Count(int):
        pass

    found = shared_runtimes[2].function(lambda rows: Count(2**63), outputs="sum")(np.arange(2))
    assert (type(found), found) == (int, 2**64)
    values = np.array([2**62, 2**62, 2**62, 2**62, 5])
    found = shared_runtimes[2].function(lambda x: x.sum(), outputs="sum")(values, num_slices=2)
    assert (type(found), found) == (np.int64, values.sum())


def test_ints_beside_integers_of_numpy(shared_runtimes: Any, subtests: Any) -> None:
    """As ``sum([])`` is beside ``sum(array)``: they count as NumPy's where they fit, else the error says so."""
    rows = np.array([0, 0, 1, 1])
    for first, dtype, num_slices in itertools.product((True, False), ("int8", "int64", "uint64"), (1, 2)):
        f = shared_runtimes[2].function(
            lambda x, large, first=first, dtype=dtype: large if bool(x[0] == 0) == first else x.sum(dtype=dtype),
            bcast_inputs=("large", "first", "dtype"), outputs="sum",
        )  # fmt: skip
        with subtests.test(first=first, dtype=dtype, num_slices=num_slices):
            found = f(rows, 3, num_slices=num_slices)
            assert (found.dtype, found) == (np.dtype(dtype), num_slices * 3 + (2 if first else 0))
            with pytest.raises(
                OverflowError, match=rf"the output of '<lambda>': got an int of 71 bits beside .* {dtype}"
            ):
                f(rows, 2**70 // num_slices, num_slices=num_slices)


def test_other_mixtures_are_told_and_verify_compares_exactly(rt: Any) -> None:
    f = rt.function(named("f", lambda x: 1 if x[0] == 0 else 0.5), outputs="sum")
    with pytest.raises(synk.errors.CollectiveMismatch, match=r"rank 0: int \(\); rank 1: float64 \(\)"):
        f(np.arange(2.0))
    assert rt.function(lambda rows: sum(2**63 + int(r) for r in rows), outputs="sum").verify(np.arange(5))
    assert not rt.function(lambda rows: sum(2**60 for _ in rows) + 1, outputs="sum").verify(np.arange(4))
