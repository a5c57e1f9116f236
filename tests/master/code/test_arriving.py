"""Objects arrive as they are in the program, whatever brings them: captured, as an argument, an item or a result.

The expected values come from the same reading of the object in this process.
"""

from __future__ import annotations

import array
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

import synk

X = np.arange(4.0)


def read_view(view: memoryview) -> Any:
    return type(view).__name__, view.format, view.shape, view.readonly, np.asarray(view).tolist()


class Named(np.ndarray):
    """Has an attribute, and a default for it, as NumPy's guide to subclasses does it."""

    def __array_finalize__(self, obj: Any) -> None:
        self.unit = getattr(obj, "unit", "")


def named() -> Any:
    obj = np.arange(3.0).view(Named)
    obj.unit, obj.offsets = "m", [1.0]
    return obj


def read_named(obj: Any) -> Any:
    return obj.unit, obj.offsets, obj.tolist()


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "memoryview of numbers": (lambda: memoryview(np.arange(4.0)), read_view),
    "memoryview of two axes": (lambda: memoryview(np.arange(12, dtype="i2").reshape(3, 4))[::2], read_view),
    "memoryview without elements": (lambda: memoryview(np.zeros((0, 3))), read_view),
    "memoryview of another byte order": (lambda: memoryview(np.arange(4.0).astype(">f8")), read_view),
    "memoryview of records": (lambda: memoryview(np.ones(2, [("a", "i4"), ("b", "f8")])), read_view),
    "memoryview of an array.array": (lambda: memoryview(array.array("l", [1, 2])), read_view),
    "memoryview of bytes": (lambda: memoryview(b"abc"), read_view),
    "memoryview of single bytes": (lambda: memoryview(b"abc").cast("c"), lambda view: (view.format, view[0])),
    "array with attributes": (named, read_named),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_arrives_as_it_is(shared_runtimes: Any, name: str) -> None:
    make, read = OBJECTS[name]
    obj, rt = make(), shared_runtimes[2]
    want = read(obj)
    captured = rt.function(lambda x: read(obj), outputs="first")
    assert captured(X) == captured.serial(X) == want
    assert rt.function(lambda x, arg: read(arg), outputs="first", bcast_inputs="arg")(X, obj) == want
    assert [*rt.map(read, [obj])] == [want]
    assert captured.verify(X)
    if not isinstance(obj, np.ndarray):  # an output that is an array comes back as one, without its class
        assert read(rt.function(lambda x: obj, outputs="first")(X)) == want


class Key:
    """A key of a nesting that holds an object."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_in_a_table_arrives_as_it_is(shared_runtimes: Any, name: str) -> None:
    make, read = OBJECTS[name]
    f = shared_runtimes[2].function(lambda frame: [read(held[0]) for held in frame["held"]], outputs="gather")
    assert f(pd.DataFrame({"held": [[make()], [make()], [make()]]})) == 3 * [read(make())]


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_moves_as_it_is(shared_runtimes: Any, name: str) -> None:
    make, read = OBJECTS[name]
    rt, want = shared_runtimes[2], read(make())
    held, nested = rt.resident([make()]), rt.shared({Key(make()): X})
    own = rt.resident({"by": make()}, dump=dict, load=dict.update)
    program = synk.Program(
        held=rt.function(lambda x: read(held.value[0]), outputs="first"),
        own=rt.function(lambda x: read(own.value["by"]), outputs="first"),
        nested=rt.function(lambda x: [read(key.inner) for key in nested.value], outputs="first"),
    )
    q = pickle.loads(pickle.dumps(program)).on(shared_runtimes[1])
    assert (q.held(X), q.own(X), q.nested(X)) == (want, want, [want])


@pytest.mark.parametrize("name", OBJECTS)
def test_what_a_warning_class_in_a_filter_holds_arrives_as_it_is(shared_runtimes: Any, name: str) -> None:
    make, read = OBJECTS[name]

    class Own(Warning):
        held = make()

    def held(x: Any) -> Any:
        return [read(kind.held) for _, _, kind, *_ in warnings.filters if kind.__name__ == "Own"]

    with warnings.catch_warnings():
        warnings.simplefilter("error", Own)
        assert shared_runtimes[2].function(held, outputs="first")(X) == [read(make())]


def test_the_elements_of_a_memoryview_are_compared(shared_runtimes: Any) -> None:
    view = memoryview(np.arange(4.0))
    f = shared_runtimes[2].function(lambda x: sum(view), outputs="first")
    assert f(X) == 6.0
    view[0] = 5.0
    assert f(X) == 11.0


def test_a_memoryview_that_cannot_be_sent_is_refused(shared_runtimes: Any) -> None:
    pointers = memoryview(bytes(16)).cast("P")
    f = shared_runtimes[2].function(lambda x, arg: len(arg), outputs="first", bcast_inputs="arg")
    with pytest.raises(synk.errors.SerializationError, match=r"cannot send arg .*format 'P'.*Use its tobytes\(\)"):
        f(X, pointers)


def test_the_attributes_of_an_array_are_compared(shared_runtimes: Any) -> None:
    obj = named()
    f = shared_runtimes[2].function(lambda x: read_named(obj), outputs="first")
    assert f(X) == read_named(obj)
    obj.unit = "km"
    assert f(X) == read_named(obj)
    obj.offsets.append(2.0)
    assert f(X) == read_named(obj)
    obj[0] = 7.0
    assert f(X) == read_named(obj)
