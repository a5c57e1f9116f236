"""Classes of a script or a notebook, which travel with what they hold, by every way: none writes over the others' word.

The expected values come from the same classes in this process.
"""

from __future__ import annotations

import enum
import itertools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import synk

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


def test_what_a_function_has_changed_in_the_class_of_its_items_stays(subtests: Any, shared_runtimes: Any) -> None:
    for where, num_others in itertools.product((1, 0), (0, 3)):
        with subtests.test(workers=where, others=num_others):
            seen: Any = type("Seen", (), {"__module__": "__main__", "count": 0, "log": []})

            def note(item: Any) -> Any:
                cls = type(item)
                if item is not None:
                    cls.count += 1
                    cls.log.append(item)
                return item and (cls.count, len(cls.log))

            rt, items = shared_runtimes[where], [None] * num_others + [seen() for _ in range(3)]
            captured = rt.function(lambda x: seen.count, outputs="first")  # noqa: B023
            assert captured(X) == 0
            assert [*rt.map(note, items, batch_size=1)][num_others:] == [(1, 1), (2, 2), (3, 3)]
            assert captured(X) == 3
            with synk.Executor(runtime=rt) as executor:
                assert [executor.submit(note, seen()).result() for _ in range(2)] == [(4, 4), (5, 5)]
            seen.count = 10
            assert [*rt.map(note, items, batch_size=1)][num_others:] == [(11, 6), (12, 7), (13, 8)]
            assert captured(X) == 13


def test_an_enum_keeps_its_members(subtests: Any, shared_runtimes: Any) -> None:
    """A function has captured it, items name it, and the function is called again."""

    class Plain(enum.Enum):
        A = 1.5

    class Flags(enum.Flag):
        A, B = 1, 2

    class Number(float, enum.Enum):
        A = 1.5

    rt = shared_runtimes[2]
    for kind in (Plain, Flags, Number):
        with subtests.test(kind=kind.__name__), synk.Executor(runtime=rt) as executor:
            captured = rt.function(lambda x: kind.A.value, outputs="first")  # noqa: B023
            for _ in range(2):
                assert captured(X) == kind.A.value
                assert [*rt.map(lambda item: item.value, [kind.A] * 3, batch_size=1)] == [kind.A.value] * 3
                assert executor.submit(operator.attrgetter("value"), kind.A).result() == kind.A.value
