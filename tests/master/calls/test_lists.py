"""Lists as arguments: no element changes its value or its kind on the way, or the list is refused."""

from __future__ import annotations

import datetime
import decimal
import enum
import hashlib
import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.seeds import WHOLE_OR_SAMPLE, drawn

import synk

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
        runtime.function(lambda x: [each.tolist() for each in x], outputs="gather", name="f"),
        runtime.function(lambda x: [each.tolist() for each in x["rows"]], outputs="gather", name="f"),
    )


def called(take: Any, entry: Any, rows: list[Any], place: str) -> list[Any]:
    if place == "entry":
        return entry({"rows": rows, "more": [0.5] * len(rows)})
    if place == "keyword":
        return take(x=rows)
    batch = {"batch": slice(0, len(rows)), "picked": list(range(len(rows)))}.get(place)
    return take(rows, batch=batch)


@pytest.mark.parametrize("is_whole", WHOLE_OR_SAMPLE)
def test_a_list_arrives_exactly(shared_runtimes: Any, is_whole: bool) -> None:
    functions = functions_of(shared_runtimes[2])
    for name, shape, place in drawn(itertools.product(EXACT, SHAPES, PLACES), is_whole):
        if shape != "flat" and name.startswith("tuples"):
            continue
        for rows in (EXACT[name], EXACT[name][:1], EXACT[name] * 3):
            got = called(*functions, shaped(rows, shape), place)
            assert told_apart(plain(got)) == told_apart(plain(shaped(rows, shape))), (name, shape, place)


@pytest.mark.parametrize("is_whole", WHOLE_OR_SAMPLE)
def test_a_list_that_no_array_holds_is_refused_by_name(shared_runtimes: Any, is_whole: bool) -> None:
    functions = functions_of(shared_runtimes[2])
    for name, shape, place in drawn(itertools.product(REFUSED, SHAPES, PLACES), is_whole):
        if shape != "flat" and name.startswith(("tuples", "named")):
            continue
        label = r"x\['rows'\]" if place == "entry" else "x"
        with pytest.raises(TypeError, match=rf"cannot share {label} of 'f': got "):
            called(*functions, shaped(REFUSED[name], shape), place)
            pytest.fail(f"{name}, {shape}, {place}")


@pytest.mark.parametrize("name", ["text with integer", "bool with integer", "bytes that end in a NUL"])
def test_the_way_out_keeps_each_element(shared_runtimes: Any, name: str) -> None:
    series = pytest.importorskip("pandas").Series(REFUSED[name], dtype=object)
    f = shared_runtimes[2].function(lambda x: [(type(each).__name__, each) for each in x], outputs="gather")
    assert f(series) == [(type(each).__name__, each) for each in REFUSED[name]]


@pytest.mark.parametrize("name", ["text with integer", "bool with integer", "bytes that end in a NUL"])
def test_data_and_variables_have_the_same_rule(shared_runtimes: Any, name: str) -> None:
    runtime = shared_runtimes[2]
    with pytest.raises(TypeError, match="cannot share Data 'ids': got a list"):
        runtime.data(REFUSED[name], name="ids")
    with pytest.raises(TypeError, match="cannot share variable 'ids': got a str"):
        runtime.shared("a\0", name="ids")


def test_verify_hands_over_the_list(shared_runtimes: Any) -> None:
    runtime = shared_runtimes[2]
    total = runtime.function(lambda x: float(sum(x)), outputs="sum")
    report = total.verify([1.0, 2.0, 4.0])
    assert report and "The plain function got lists as they are." in report.notes
    doubled = runtime.function(lambda x: x * 2, outputs="gather").verify([1.0, 2.0, 4.0])
    assert not doubled  # a list times two is another thing
    array = runtime.function(lambda x: x.sum(), outputs="sum").verify([1.0, 2.0, 4.0])
    assert array and "because it raised AttributeError on the list itself" in " ".join(array.notes)


@pytest.mark.parametrize("batch", [None, 2, slice(1, 4), [3, 0]])
@pytest.mark.parametrize("rows", [[1.5, 2.5, 3.5, 4.5], (1.5, 2.5, 3.5, 4.5), range(4)])
def test_verify_picks_the_rows_of_a_list(shared_runtimes: Any, rows: Any, batch: Any) -> None:
    total = shared_runtimes[2].function(lambda x: float(sum(x)), outputs="sum")
    report = total.verify(rows, batch=batch)
    assert report and report.outputs[0].plain_verdict == "equal", report


def test_verify_tells_of_a_function_that_raises_on_both(shared_runtimes: Any) -> None:
    def only_on_workers(x: Any) -> float:
        if synk.comm is None or not isinstance(x, np.ndarray) or x.flags.writeable:
            raise LookupError("no worker")
        return float(x.sum())

    report = shared_runtimes[2].function(only_on_workers, outputs="sum").verify([1.0, 2.0])
    assert not report and "raised LookupError: no worker" in " ".join(report.notes)
