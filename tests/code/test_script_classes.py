"""Classes of a script or a notebook, which travel with what they hold, by every way: none writes over the others' word.

The expected values come from the same classes in this process.
"""

from __future__ import annotations

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


def by_verify(rt: Any, s: SimpleNamespace) -> Any:
    assert s.passed.verify(X, s.Model())
    return s.passed(X, s.Model()).tolist()


WAYS: dict[str, Callable[[Any, SimpleNamespace], Any]] = {
    "argument": lambda rt, s: s.passed(X, s.Model()).tolist(),
    "map": lambda rt, s: [*rt.map(lambda model: model.rate(), [s.Model(), s.Model()])],
    "submit": lambda rt, s: s.passed.submit(X, s.Model()).result().tolist(),
    "verify": by_verify,
    "resident object": lambda rt, s: s.passed(X, s.resident).tolist(),
}
"""What brings the class once more, and returns the rate of an object of it."""


def test_what_brings_a_class_again_does_not_make_a_function_stale_that_captured_it(
    subtests: Any, shared_runtimes: Any
) -> None:
    for where, (way, bring) in itertools.product(WORKERS, WAYS.items()):
        with subtests.test(way=way, workers=where):
            s, rt = script(), shared_runtimes[where]
            model_class = s.Model
            captured = rt.function(lambda x: x * model_class().rate(), outputs="gather")  # noqa: B023
            s.passed = rt.function(lambda x, model: x * model.rate(), outputs="gather", bcast_inputs="model")
            s.resident = rt.resident(s.Model())
            for rate in range(1, 5):
                s.settings["rate"] = rate
                if rate == 3:
                    s.Model.factor = 7
                wanted = [s.Model().rate()] * 2
                assert captured(X).tolist() == wanted
                assert bring(rt, s) == wanted
                assert captured(X).tolist() == wanted
                assert s.passed(X, s.Model()).tolist() == wanted
            del s.Model.factor
            assert bring(rt, s) == captured(X).tolist() == [4, 4]
            s.Model.rate = lambda self: 7
            assert bring(rt, s) == captured(X).tolist() == [7, 7]
            del s.Model.rate
            s.Model.__bases__ = (type("Base", (), {"__module__": "__main__", "rate": lambda self: 8}),)
            assert bring(rt, s) == captured(X).tolist() == [8, 8]


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


def test_a_class_that_was_an_argument_before_many_others(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x, models: x * models[0].rate(), outputs="gather", bcast_inputs="models")
    s = script()
    assert f(X, [s.Model()]).tolist() == [1.0, 1.0]
    others = [type("Other", (), {"__module__": "__main__", "rate": lambda self: 5})() for _ in range(300)]
    assert f(X, others).tolist() == [5.0, 5.0]
    s.settings["rate"] = 2
    assert f(X, [s.Model()]).tolist() == [2.0, 2.0]
