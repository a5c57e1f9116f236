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
import pytest
from support.seeds import drawn

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
if importlib.util.find_spec("pandas"):
    import pandas

    MAKERS["Index"] = lambda: pandas.Index(VALUES)
    MAKERS["IntegerArray"] = lambda: pandas.array([1, None, 3, 4])
if importlib.util.find_spec("xarray"):
    import xarray

    MAKERS["DataArray"] = lambda: xarray.DataArray(VALUES, dims="t", coords={"t": [0, 10, 20, 30]})
if importlib.util.find_spec("pint"):
    import pint

    MAKERS["Quantity"] = lambda: pint.get_application_registry().Quantity(np.array(VALUES), "metre")

DIVIDED: dict[str, Callable[[synk.Runtime, Callable[[], Any]], Any]] = {
    "argument": lambda rt, make: rt.function(len, outputs="sum")(make()),
    "entry": lambda rt, make: rt.function(lambda x: len(x["x"]), outputs="sum")({"x": make(), "y": VALUES}),
    "part of a tuple": lambda rt, make: rt.function(lambda x: len(x[0]), outputs="sum")((make(), np.ones(4))),
    "with a batch": lambda rt, make: rt.function(len, outputs="sum")(make(), batch=2),
    "data": lambda rt, make: rt.data(make()),
    "verify": lambda rt, make: rt.function(len, outputs="sum").verify(make()),
    **{
        f"output under {op}": lambda rt, make, op=op: rt.function(lambda x: make(), outputs=op)(np.ones(2))
        for op in ("sum", "avg", "max", "gather")
    },
    "an output beside others": lambda rt, make: rt.function(lambda x: {"a": make()}, outputs={"a": "prod"})(np.ones(2)),
    "an output in slices": lambda rt, make: rt.function(lambda x: make(), outputs="sum")(np.ones(4), num_slices=2),
}


def test_it_is_refused_by_name_where_it_would_be_flattened(shared_runtimes: Any, subtests: Any) -> None:
    for name, place in drawn(itertools.product(MAKERS, DIVIDED), False):
        if name in ("Table", "Track") and "output" in place:
            continue  # dicts and lists are structure in results
        with subtests.test(name=name, place=place), pytest.raises(TypeError, match=rf"\b{name}\b"):
            DIVIDED[place](shared_runtimes[2], MAKERS[name])


KEPT: dict[str, Callable[[synk.Runtime, Callable[[], Any]], Any]] = {
    "broadcast": lambda rt, make: rt.function(lambda x, y: told(y), bcast_inputs="y", outputs="first")(
        np.ones(2), make()
    ),
    "inside a broadcast argument": lambda rt, make: rt.function(
        lambda x, y: told(y["a"][0]), bcast_inputs="y", outputs="first"
    )(np.ones(2), {"a": [make()], "w": np.ones(3)}),
    "output under None": lambda rt, make: told(rt.function(lambda x: make(), outputs=None)(np.ones(2))[1]),
    "output under first": lambda rt, make: told(rt.function(lambda x: make(), outputs="first")(np.ones(2))),
    "output under an op of its own": lambda rt, make: told(
        rt.function(lambda x: make(), outputs=lambda a, b: b)(np.ones(2))
    ),
    "output in slices": lambda rt, make: told(
        rt.function(lambda x: make(), outputs=None)(np.ones(4), num_slices=2)[0][1]
    ),
}


def told(value: Any) -> tuple[str, str, str]:
    """Return the class of an object, what it prints, and its own sum where it has one."""
    total = repr(value.sum()) if hasattr(value, "sum") and not isinstance(value, np.char.chararray) else ""
    more = [str(getattr(value, name, "")) for name in ("label", "units", "coords", "mask")]
    return type(value).__name__, repr(np.asarray(getattr(value, "magnitude", value)).tolist()) + " ".join(more), total


def test_it_comes_as_it_is_where_nothing_is_divided(shared_runtimes: Any, subtests: Any) -> None:
    for name, place in drawn(itertools.product(MAKERS, KEPT), False):
        if name == "Track" and "output" in place:
            continue  # a list is structure in results
        with subtests.test(name=name, place=place):
            assert KEPT[place](shared_runtimes[2], MAKERS[name]) == told(MAKERS[name]())


# -- recarrays --------------------------------------------------------------------------------------------------------

RECORDS = np.rec.array([(n, n / 2, f"r{n}") for n in range(7)], names="a,b,c")


def as_recarray(x: Any) -> tuple[str, list[int], Any]:
    return type(x).__name__, x.a.tolist(), x[x.b > 0].c.tolist()


def test_recarrays_arrive_as_recarrays(shared_runtimes: Any, subtests: Any) -> None:
    for workers in (1, 2, 3):
        rt = shared_runtimes[workers]
        f = rt.function(as_recarray, outputs=None, name="f")
        expected = [as_recarray(part) for part in np.array_split(RECORDS, workers)]
        for name, call in {
            "argument": lambda: f(RECORDS),
            "strided": lambda: f(np.repeat(RECORDS, 2)[::2]),
            "list of records": lambda: f(list(RECORDS)),
            "batch": lambda: f(np.concatenate([RECORDS, RECORDS]).view(np.recarray), batch=slice(0, 7)),
            "picked": lambda: f(RECORDS[::-1], batch=[6, 5, 4, 3, 2, 1, 0]),
            "data": lambda: f(rt.data(RECORDS)),
            "entry": lambda: rt.function(lambda x: as_recarray(x["r"]), outputs=None)({"r": RECORDS, "n": np.ones(7)}),
        }.items():
            with subtests.test(name=name, workers=workers):
                for _ in range(3):
                    assert call() == expected
        whole = rt.function(lambda r: as_recarray(r), bcast_inputs="r", outputs="first")
        assert whole(RECORDS) == as_recarray(RECORDS)


def test_recarrays_come_back_as_recarrays(shared_runtimes: Any, subtests: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x, outputs="gather")
    results = {
        "gather": f(RECORDS),
        "gather in slices": f(RECORDS, num_slices=2),
        "gather of a batch": f(RECORDS, batch=list(range(7))),
        "first": rt.function(lambda r: r, bcast_inputs="r", outputs="first")(RECORDS),
        "None": rt.function(lambda r: r, bcast_inputs="r", outputs=None)(RECORDS)[-1],
    }
    for name, got in results.items():
        with subtests.test(name=name):
            assert as_recarray(got) == as_recarray(RECORDS)
    plain = rt.function(lambda x: np.arange(3).view(np.recarray), outputs=None)(RECORDS)[0]
    assert type(plain) is np.recarray


@pytest.mark.parametrize("library", ["h5py", "zarr", "jax"])
def test_arrays_of_libraries_that_are_nothing_else_arrive(shared_runtimes: Any, library: str, tmp_path: Any) -> None:
    module = pytest.importorskip(library)
    f = shared_runtimes[2].function(lambda x: x.sum(), outputs="sum")
    if library == "h5py":
        with module.File(tmp_path / "a.h5", "w") as file:
            file["a"] = VALUES
            assert f(file["a"]) == sum(VALUES)
    else:
        array = module.array if library == "zarr" else module.numpy.array
        assert f(array(np.array(VALUES))) == sum(VALUES)
