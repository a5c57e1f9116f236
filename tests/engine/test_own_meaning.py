"""Objects that are more than an array: refused by name where rows are divided or values combined, else as they are.

Recarrays are arrays, and arrive as recarrays.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import pytest
from support.tables import combinations

import synk

VALUES = [1.0, 5.0, 2.0, 4.0]


class Path:
    """Has a sum of its own."""

    def __init__(self, values: Any = VALUES) -> None:
        self.values = np.asarray(values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values

    def __len__(self) -> int:
        return len(self.values)

    def sum(self) -> float:
        return float(np.abs(np.diff(self.values)).sum())


class Described(np.ndarray):
    """Has a label, and ndarray's operators."""

    def __reduce__(self) -> Any:
        return described, (np.array(self), self.label)


def described(values: Any = VALUES, label: str = "metres") -> Any:
    array = np.array(values).view(Described)
    array.label = label
    return array


class Table(dict):  # type: ignore[type-arg]
    """A mapping that NumPy makes an array of."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(VALUES)


@dataclasses.dataclass
class Signal:
    """A dataclass that NumPy makes an array of."""

    values: Any
    rate: int = 44_100

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.values)


class Memory:
    """Speaks NumPy's older protocol."""

    def __init__(self) -> None:
        self.values = np.array(VALUES)

    @property
    def __array_interface__(self) -> Any:
        return self.values.__array_interface__


class Track(list):  # type: ignore[type-arg]
    """A list with a sum of its own."""

    def sum(self) -> float:
        return 0.0


class Frames:
    """A sequence, as data sets are."""

    def __len__(self) -> int:
        return len(VALUES)

    def __getitem__(self, place: int) -> float:
        return VALUES[place]


MAKERS: dict[str, Callable[[], Any]] = {
    "Path": Path,
    "Described": described,
    "Table": lambda: Table(a=1),
    "Signal": lambda: Signal(VALUES),
    "Memory": Memory,
    "Track": lambda: Track(VALUES),
    "Frames": Frames,
    "MaskedArray": lambda: np.ma.masked_greater(VALUES, 4),
    "matrix": lambda: np.array(VALUES).view(np.matrix).T,
    "chararray": lambda: np.char.array(["a ", "b", "c", "d"]),
}
MAKERS["Index"] = lambda: pandas.Index(VALUES)
MAKERS["IntegerArray"] = lambda: pandas.array([1, None, 3, 4])
MAKERS["Categorical"] = lambda: pandas.Categorical([1, 2, 1, 1])
if importlib.util.find_spec("xarray"):
    import xarray

    MAKERS["DataArray"] = lambda: xarray.DataArray(VALUES, dims="t", coords={"t": [0, 10, 20, 30]})
if importlib.util.find_spec("pint"):
    import pint

    MAKERS["Quantity"] = lambda: pint.get_application_registry().Quantity(np.array(VALUES), "metre")


def workers_for(name: str) -> int:
    """Return how many workers see objects of a library: each imports it, xarray for a second."""
    return 1 if name == "DataArray" else 2


def called(rt: synk.Runtime, value: Any, **options: Any) -> Any:
    return rt.function(lambda x: 1, outputs="sum")(value, **options)


def returned(rt: synk.Runtime, make: Callable[[], Any], outputs: Any, **options: Any) -> Any:
    return rt.function(lambda x: make(), outputs=outputs)(np.ones(4), **options)


DIVIDED: dict[str, Callable[[synk.Runtime, Callable[[], Any]], Any]] = {
    "argument": lambda rt, make: called(rt, make()),
    "entry": lambda rt, make: called(rt, {"x": make(), "y": VALUES}),
    "part of a tuple": lambda rt, make: called(rt, (make(), np.ones(4))),
    "with a batch": lambda rt, make: called(rt, make(), batch=2),
    "data": lambda rt, make: rt.data(make()),
    "verify": lambda rt, make: rt.function(len, outputs="sum").verify(make()),
    "output under sum": lambda rt, make: returned(rt, make, "sum"),
    "output under avg": lambda rt, make: returned(rt, make, "avg"),
    "output under max": lambda rt, make: returned(rt, make, "max"),
    "output under gather": lambda rt, make: returned(rt, make, "gather"),
    "output beside others": lambda rt, make: returned(rt, lambda: {"a": make()}, {"a": "prod"}),
    "output in slices": lambda rt, make: returned(rt, make, "sum", num_slices=2),
}


def test_it_is_refused_by_name_where_it_would_be_flattened(shared_runtimes: Any, subtests: Any) -> None:
    for name, place in combinations(30, MAKERS, DIVIDED):
        if name in ("Table", "Track") and "output" in place:
            continue  # dicts and lists are structure in results
        with subtests.test(name=name, place=place), pytest.raises(TypeError, match=rf"\b{name}\b"):
            DIVIDED[place](shared_runtimes[workers_for(name)], MAKERS[name])


KEPT: dict[str, Callable[[synk.Runtime, Callable[[], Any]], Any]] = {
    "broadcast": lambda rt, make: passed(rt, make())[0],
    "inside a broadcast argument": lambda rt, make: passed(rt, {"a": [make()], "w": np.ones(3)}),
    "output under None": lambda rt, make: told(returned(rt, make, None)[-1]),
    "output under first": lambda rt, make: told(returned(rt, make, "first")),
    "output under an op of its own": lambda rt, make: told(returned(rt, make, lambda a, b: b)),
    "output in slices": lambda rt, make: told(returned(rt, make, None, num_slices=2)[0][1]),
    "output in slices under an op of its own": lambda rt, make: told(returned(rt, make, lambda a, b: b, num_slices=2)),
}


def passed(rt: synk.Runtime, value: Any) -> Any:
    """Return what is told on a worker of a broadcast argument, or of what it holds."""
    is_nested = type(value) is dict
    f = rt.function(lambda x, y: told(y["a"][0]) if is_nested else [told(y)], bcast_inputs="y", outputs=None)
    return f(np.ones(2), value)[0]


def told(value: Any) -> tuple[str, str, str]:
    """Return the class of an object, what it prints, and its own sum where it has one."""
    total = repr(value.sum()) if hasattr(value, "sum") and not isinstance(value, np.char.chararray) else ""
    more = [str(getattr(value, name, "")) for name in ("label", "units", "coords", "mask")]
    return type(value).__name__, repr(np.asarray(getattr(value, "magnitude", value)).tolist()) + " ".join(more), total


def test_it_comes_as_it_is_where_nothing_is_divided(shared_runtimes: Any, subtests: Any) -> None:
    for name, place in combinations(31, MAKERS, KEPT):
        if name == "Track" and "output" in place:
            continue  # a list is structure in results
        with subtests.test(name=name, place=place):
            assert KEPT[place](shared_runtimes[workers_for(name)], MAKERS[name]) == told(MAKERS[name]())


def test_masks_count_in_each_slice(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x: np.ma.masked_greater(x, 5), outputs=np.ma.add)
    x = np.array([[1.0, 2.0], [9.0, 3.0], [4.0, 9.0], [1.0, 1.0]])
    for total in (f.serial(x, num_slices=4), f(x, num_slices=2)):
        assert total.tolist() == [[None, None]] and total.mask.tolist() == [[True, True]]


# -- recarrays --------------------------------------------------------------------------------------------------------

RECORDS = np.rec.array([(n, n / 2, f"r{n}") for n in range(7)], names="a,b,c")


def as_recarray(x: Any) -> tuple[str, list[int], Any]:
    return type(x).__name__, x.a.tolist(), x[x.b > 0].c.tolist()


def test_recarrays_arrive_and_come_back_as_recarrays(shared_runtimes: Any, subtests: Any) -> None:
    for workers in (1, 3):
        rt = shared_runtimes[workers]
        arguments: dict[str, tuple[Any, Any]] = {
            "argument": (RECORDS, None),
            "strided": (np.repeat(RECORDS, 2)[::2], None),
            "list of records": (list(RECORDS), None),
            "batch": (np.concatenate([RECORDS, RECORDS]).view(np.recarray), slice(0, 7)),
            "picked": (RECORDS[::-1], [6, 5, 4, 3, 2, 1, 0]),
            "data": (rt.data(RECORDS), None),
        }
        f = rt.function(lambda d: {"told": as_recarray(d["r"]), "r": d["r"]}, outputs={"told": None, "r": "gather"})
        g = rt.function(as_recarray, outputs=None)
        parts = [as_recarray(part) for part in np.array_split(RECORDS, workers)]
        for (name, (value, batch)), num_slices in itertools.product(arguments.items(), (1, 2)):
            with subtests.test(name=name, workers=workers, num_slices=num_slices):
                for _ in range(2):
                    assert g(value, batch=batch) == parts
                found = f({"r": value}, batch=batch, num_slices=num_slices)
                assert as_recarray(found["r"]) == as_recarray(RECORDS)
                assert num_slices > 1 or found["told"] == parts
        whole = rt.function(lambda r: (as_recarray(r), r, r), bcast_inputs="r", outputs=("first", "first", None))
        told_of, first, each = whole(RECORDS)
        assert told_of == as_recarray(first) == as_recarray(each[-1]) == as_recarray(RECORDS)
    plain = rt.function(lambda x: np.arange(3).view(np.recarray), outputs=None)(RECORDS)[0]
    assert type(plain) is np.recarray


@pytest.mark.parametrize("library", ["h5py", "zarr", "jax"])
def test_arrays_of_libraries_that_are_nothing_else_arrive(shared_runtimes: Any, library: str, tmp_path: Any) -> None:
    module = pytest.importorskip(library)
    makers: dict[str, Callable[[Any], Any]] = {
        "h5py": lambda values: module.File(tmp_path / "a.h5", "w").create_dataset("a", data=values),
        "zarr": lambda values: module.array(values),
        "jax": lambda values: module.numpy.array(values),
    }
    array = makers[library](np.array(VALUES))
    assert shared_runtimes[2].function(lambda x: x.sum(), outputs="sum")(array) == sum(VALUES)
