"""Classes of a script or a notebook, which travel with what they hold, by every way: none writes over the others' word.

The expected values come from the same classes in this process.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

X = np.ones(2)
WORKERS = (2, 0)


def script() -> SimpleNamespace:
    """Return a class whose method reads ``settings``, the class under it, and an exception of the same kind."""
    settings = {"rate": 1}

    class Base:
        factor = 1

    class Model(Base):
        def rate(self) -> int:
            return settings["rate"] * self.factor

    class Failed(Exception):
        def rate(self) -> int:
            return settings["rate"]

    return SimpleNamespace(settings=settings, Base=Base, Model=Model, Failed=Failed)


def test_an_attribute_that_equals_the_bases_is_the_class_own(shared_runtimes: Any) -> None:
    s = script()
    s.Model.factor = s.Base.factor
    f = shared_runtimes[2].function(lambda x: x * s.Model.factor, outputs="gather")
    assert f(X).tolist() == [1.0, 1.0]
    s.Base.factor = 5
    assert f(X).tolist() == [1.0, 1.0]
    del s.Model.factor
    assert f(X).tolist() == [5.0, 5.0]


def test_what_brings_a_class_again_does_not_make_a_function_stale_that_captured_it(
    subtests: Any, shared_runtimes: Any
) -> None:
    for where, way in itertools.product(WORKERS, ["argument", "map", "submit", "verify", "resident object"]):
        with subtests.test(way=way, workers=where):
            s, rt = script(), shared_runtimes[where]
            captured = rt.function(lambda x: x * s.Model().rate(), outputs="gather")  # noqa: B023
            passed = rt.function(lambda x, model: x * model.rate(), outputs="gather", bcast_inputs="model")
            bring = bringer(rt, s, way, passed)
            for rate in range(1, 5):
                s.settings["rate"] = rate
                if rate == 3:
                    s.Model.factor = 7
                wanted = [s.Model().rate()] * 2
                assert captured(X).tolist() == wanted
                assert bring() == wanted
                assert captured(X).tolist() == wanted
                assert passed(X, s.Model()).tolist() == wanted
            del s.Model.factor
            assert bring() == captured(X).tolist() == [4, 4]
            s.Model.rate = lambda self: 7
            assert bring() == captured(X).tolist() == [7, 7]


def bringer(rt: Any, s: SimpleNamespace, way: str, passed: Any) -> Callable[[], Any]:
    """Return what brings the class once more, and returns the rate of an object of it."""
    resident = rt.resident(s.Model())

    def verified() -> Any:
        assert passed.verify(X, s.Model())
        return passed(X, s.Model()).tolist()

    ways: dict[str, Callable[[], Any]] = {
        "argument": lambda: passed(X, s.Model()).tolist(),
        "map": lambda: [*rt.map(lambda model: model.rate(), [s.Model(), s.Model()])],
        "submit": lambda: passed.submit(X, s.Model()).result().tolist(),
        "verify": verified,
        "resident object": lambda: passed(X, resident).tolist(),
    }
    return ways[way]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_result_and_an_exception_leave_the_programs_class_as_it_is(shared_runtimes: Any, num_workers: Any) -> None:
    s, rt = script(), shared_runtimes[num_workers]
    own, own_of_failed = s.Model.rate, s.Failed.rate
    f = rt.function(lambda x: s.Model(), outputs=None)
    pending = f.submit(X)
    s.Model.factor = 2
    found = [*pending.result(), *rt.map(lambda item: s.Model(), range(2))]
    assert all(type(each) is s.Model for each in found)
    assert (s.Model.factor, s.Model.rate) == (2, own)
    s.settings["rate"] = 3
    assert [each.rate() for each in found] == [6] * len(found)

    def fail(x: np.ndarray) -> np.ndarray:
        if s.settings["rate"] == 3:
            raise s.Failed("no")
        return x * s.Failed().rate()

    g = rt.function(fail, outputs="gather")
    with pytest.raises(s.Failed):
        g(X)
    assert s.Failed.rate is own_of_failed
    s.settings["rate"] = 2
    assert g(X).tolist() == [2.0, 2.0]


def test_objects_with_slots_come_back(shared_runtimes: Any) -> None:
    class Slots:
        __slots__ = ("k",)

        def __init__(self, k: int) -> None:
            self.k = k

    class Empty(Slots):
        __slots__ = ()

    rt = shared_runtimes[2]
    assert [each.k for each in rt.function(lambda x: Slots(len(x)), outputs=None)(X)] == [1, 1]
    found = [*rt.map(lambda each: (type(each)(each.k + 1), hasattr(each, "__dict__")), [Slots(1), Empty(2)])]
    assert [(type(each), each.k, is_open) for each, is_open in found] == [(Slots, 2, False), (Empty, 3, False)]


def test_a_class_that_was_an_argument_before_many_others(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x, models: x * models[0].rate(), outputs="gather", bcast_inputs="models")
    s = script()
    assert f(X, [s.Model()]).tolist() == [1.0, 1.0]
    others = [type("Other", (), {"__module__": "__main__", "rate": lambda self: 5})() for _ in range(300)]
    assert f(X, others).tolist() == [5.0, 5.0]
    s.settings["rate"] = 2
    assert f(X, [s.Model()]).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_cached_property_travels_by_every_way(shared_runtimes: Any, num_workers: Any) -> None:
    """Its lock cannot be pickled before Python 3.12."""

    class Model:
        rate = 2.0

        @functools.cached_property
        def scale(self) -> float:
            return self.rate

    rt, model = shared_runtimes[num_workers], Model()
    f = rt.function(lambda x: x * model.scale, outputs="gather")
    fresh = rt.function(lambda x: x * Model().scale, outputs="gather")
    given = rt.function(lambda x, m: x * m.scale, outputs="gather", bcast_inputs="m")
    assert [f(X).tolist(), fresh(X).tolist(), given(X, model).tolist()] == [[2.0, 2.0]] * 3
    Model.rate = 5.0
    assert [fresh(X).tolist(), given(X, Model()).tolist()] == [[5.0, 5.0]] * 2
    assert [*rt.map(lambda m: m.scale, [Model(), Model()])] == [5.0, 5.0]
    got = rt.function(lambda x: Model(), outputs="first")(X)
    assert type(got) is Model and got.scale == 5.0
    cls: Any = Model
    cls.scale = functools.cached_property(lambda self: 7.0)
    cls.scale.__set_name__(Model, "scale")
    assert fresh(X).tolist() == [7.0, 7.0]
