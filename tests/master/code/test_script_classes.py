"""Classes of a script or a notebook, which travel with what they hold, by every way: none writes over the others' word.

The expected values come from the same classes in this process.
"""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from synk._master.calls.callee import _NUM_CLASSES

X = np.ones(2)
WORKERS = (2, "inline")


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


def test_an_attribute_that_is_removed_between_two_functions_is_gone(shared_runtimes: Any) -> None:
    s, rt = script(), shared_runtimes[2]
    s.Model.factor = 3
    f = rt.function(lambda x: x * s.Model.factor, outputs="gather")
    assert f(X).tolist() == [3.0, 3.0]
    s.Model.factor = 4
    s.Model.more = 1
    assert f(X).tolist() == [4.0, 4.0]
    del f
    gc.collect()
    del s.Model.factor, s.Model.more
    g = rt.function(lambda x: x * s.Model.factor + hasattr(s.Model, "more"), outputs="gather")
    assert g(X).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("way", ["argument", "map", "submit", "verify"])
def test_what_brings_a_class_again_does_not_make_a_function_stale_that_captured_it(
    shared_runtimes: Any, num_workers: Any, way: str
) -> None:
    s, rt = script(), shared_runtimes[num_workers]
    captured = rt.function(lambda x: x * s.Model().rate(), outputs="gather")
    passed = rt.function(lambda x, model: x * model.rate(), outputs="gather", bcast_inputs="model")
    both = rt.function(lambda x, model: x * model.rate() * s.Model().rate(), outputs="gather", bcast_inputs="model")

    def bring() -> Any:
        model = s.Model()
        if way == "map":
            return [*rt.map(lambda model: model.rate(), [model, model])]
        if way == "submit":
            return passed.submit(X, model).result().tolist()
        if way == "verify":
            assert passed.verify(X, model)
        return passed(X, model).tolist()

    for rate in range(1, 5):
        s.settings["rate"] = rate
        if rate == 3:
            s.Model.factor = 7
        wanted = [s.Model().rate()] * 2
        assert captured(X).tolist() == wanted
        assert bring() == wanted
        assert captured(X).tolist() == wanted
        assert both(X, s.Model()).tolist() == [wanted[0] ** 2] * 2
    del s.Model.factor
    assert bring() == captured(X).tolist() == [4, 4]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_result_leaves_the_programs_class_as_it_is(shared_runtimes: Any, num_workers: Any) -> None:
    s, rt = script(), shared_runtimes[num_workers]
    own = s.Model.rate
    f = rt.function(lambda x: s.Model(), outputs=None)
    pending = f.submit(X)
    s.Model.factor = 2
    found = [*pending.result(), *rt.map(lambda item: s.Model(), range(2))]
    assert all(type(each) is s.Model for each in found)
    assert (s.Model.factor, s.Model.rate) == (2, own)
    s.settings["rate"] = 3
    assert [each.rate() for each in found] == [6] * len(found)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_an_exception_leaves_the_programs_class_as_it_is(shared_runtimes: Any, num_workers: Any) -> None:
    s, rt = script(), shared_runtimes[num_workers]
    own = s.Failed.rate

    def fail(x: np.ndarray) -> np.ndarray:
        if s.settings["rate"] == 1:
            raise s.Failed("no")
        return x * s.Failed().rate()

    f = rt.function(fail, outputs="gather")
    with pytest.raises(s.Failed):
        f(X)
    assert s.Failed.rate is own
    s.settings["rate"] = 2
    assert f(X).tolist() == [2.0, 2.0]


def test_a_method_of_a_dataclass_among_the_arguments_sees_what_changes(shared_runtimes: Any) -> None:
    settings = {"rate": 1.0}

    @dataclass
    class Config:
        w: np.ndarray
        factor = 1.0

        def rate(self) -> float:
            return settings["rate"] * self.factor

    rt = shared_runtimes[2]
    f = rt.function(lambda x, config: x * config.rate() + config.w[0], outputs="gather", bcast_inputs="config")
    config = Config(np.zeros(2))
    for rate in (1.0, 2.0, 3.0):
        settings["rate"] = rate
        assert f(X, config).tolist() == [rate, rate]
    Config.factor = 10.0
    assert f(X, config).tolist() == [30.0, 30.0]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_resident_object_leaves_a_class_that_was_captured_as_it_is(shared_runtimes: Any, num_workers: Any) -> None:
    s, rt = script(), shared_runtimes[num_workers]
    rt.restart()  # what is known of the workers begins anew
    f = rt.function(lambda x: x * s.Model().rate(), outputs="gather")
    assert f(X).tolist() == [1.0, 1.0]
    model = rt.resident(s.Model())
    use = rt.function(lambda x, model: x * model.factor, outputs="gather", bcast_inputs="model")
    assert use(X, model).tolist() == [1.0, 1.0]
    s.settings["rate"] = 2
    assert f(X).tolist() == [2.0, 2.0]
    s.Model.factor = 3
    assert f(X).tolist() == [6.0, 6.0]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_resident_object_has_the_methods_of_now(shared_runtimes: Any, num_workers: Any) -> None:
    s, rt = script(), shared_runtimes[num_workers]
    model = rt.resident(s.Model())
    passed = rt.function(lambda x, model: x * model.rate(), outputs="gather", bcast_inputs="model")
    captured = rt.function(lambda x: x * model.value.rate(), outputs="gather")
    for rate in (1, 2):
        s.settings["rate"] = rate
        assert passed(X, model).tolist() == captured(X).tolist() == [rate, rate]
    s.Model.rate = lambda self: 7
    assert passed(X, model).tolist() == captured(X).tolist() == [7, 7]


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


def test_a_class_that_a_worker_has_made_comes_as_it_is_there(shared_runtimes: Any) -> None:
    made: dict[str, Any] = {}

    def make(x: np.ndarray) -> Any:
        if "class" not in made:
            made["class"] = type("Made", (), {"calls": 0})
        made["class"].calls += 1
        return made["class"]()

    f = shared_runtimes[2].function(make, outputs=None)
    for number in (1, 2, 3):
        assert f(X)[0].calls == number


def test_a_class_that_is_defined_again_and_again_is_forgotten(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x, model: x * model.rate(), outputs="gather", bcast_inputs="model")
    first = script()
    assert f(X, first.Model()).tolist() == [1.0, 1.0]
    for _ in range(_NUM_CLASSES):
        f._callee.meet_classes([type("Other", (), {})])
    assert len(f._callee.classes) <= _NUM_CLASSES
    first.settings["rate"] = 2
    assert f(X, first.Model()).tolist() == [2.0, 2.0]


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
    assert type(got) is Model
    assert got.scale == 5.0
    cls: Any = Model
    cls.scale = functools.cached_property(lambda self: 7.0)
    cls.scale.__set_name__(Model, "scale")
    assert fresh(X).tolist() == [7.0, 7.0]
