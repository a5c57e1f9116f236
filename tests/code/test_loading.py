"""Objects whose loading runs the user's code, and classes of a script or a notebook, which travel with what they hold.

Whatever such code names is on the ranks before, as it is in the program; and no way by which a class comes writes over
what another has brought. The expected values come from the same function, called by plain Python in this process.
"""

from __future__ import annotations

import enum
import itertools
import operator
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from contents import text
from support.tables import combinations

import synk

X = np.arange(4.0)

GLOBALS = {
    "number": ("RATE = 2", "RATE"),
    "dict": ("TABLE = {'k': 2}", "TABLE['k']"),
    "list": ("ROWS = [2]", "ROWS[0]"),
    "pattern": ("PATTERN = re.compile('r')", "len(PATTERN.findall('rr'))"),
    "logger": ("log = logging.getLogger('load')", "(log.debug('loading'), 2)[1]"),
    "function": ("def helper(k): return k + ONE\nONE = 1", "helper(1)"),
    "lambda": ("twice = lambda k: 2 * k", "twice(1)"),
    "instance": ("class Conf:\n    k = 1\nCONF = Conf(); CONF.k = 2", "CONF.k"),
    "class": ("class Other:\n    rate = 2", "Other.rate"),
    "enum": ("class Colour(enum.Enum):\n    RED = 2", "Colour.RED.value"),
    "module": ("import math", "math.floor(2.5)"),
    "array": ("WEIGHTS = np.full(3, 2)", "int(WEIGHTS[0])"),
    "partial": ("from functools import partial\nadd = partial(max, 2)", "add(1)"),
}
"""What a hook may refer to, and an expression of it that is 2."""

HOOKS = {
    "__setstate__": """
        class Held:
            def __init__(self): self.k = 1
            def __setstate__(self, state): self.__dict__.update(state, k=state["k"] + {use} - 2)
        made = Held()
        """,
    "__reduce__": """
        def make(k):
            held = Held(); held.k = k * {use} // 2
            return held
        class Held:
            def __reduce__(self): return make, (self.k,)
        made = make(1)
        """,
    "__new__": """
        class Held:
            def __new__(cls, k):
                self = super().__new__(cls); self.k = k + {use} - 2
                return self
            def __getnewargs__(self): return self.k,
        made = Held(1)
        """,
    "__setitem__": """
        class Held(dict):
            def __setitem__(self, key, value): super().__setitem__(key, value + {use} - 2)
        made = Held(); made["a"] = 1
        """,
    "append": """
        class Held(list):
            def append(self, value): super().append(value + {use} - 2)
            def extend(self, values): super().extend([value + {use} - 2 for value in values])
        made = Held([1, 2])
        """,
    "__hash__": """
        class Held:
            k = 1
            def __hash__(self): return {use} + self.k
            def __eq__(self, other): return type(other) is Held
        made = Held(); of_set = {{made}}
        """,
    "__init_subclass__": """
        class Base:
            def __init_subclass__(cls): cls.k = {use}
        class Held(Base): pass
        made = Held()
        """,
    "metaclass": """
        class Meta(type):
            def __new__(meta, name, bases, table): return super().__new__(meta, name, bases, {{**table, "k": {use}}})
            def __call__(cls, *args):
                obj = super().__call__(*args); obj.j = {use}
                return obj
        class Held(metaclass=Meta): pass
        made = Held()
        """,
    "closure": """
        def classes(shift):
            class Held:
                def __init__(self): self.k = shift
                def __setstate__(self, state): self.k = state["k"] + {use} - shift
            return Held
        made = classes(2)()
        """,
    "__setattr__": """
        class Held:
            __slots__ = ("k",)
            def __setattr__(self, name, value): object.__setattr__(self, name, value + {use} - 2)
        made = Held(); made.k = 1
        """,
    "descriptor": """
        class Field:
            def __set_name__(self, owner, name): self.name = "_" + name
            def __get__(self, obj, owner): return self if obj is None else obj.__dict__[self.name]
            def __set__(self, obj, value): obj.__dict__[self.name] = value + {use} - 2
        class Held:
            k = Field()
        made = Held(); made.k = 1
        """,
}
"""A class one of whose hooks runs at loading, or at making the class, and an object of it."""

PLACES = {"alone": "made", "in a list": "[made, [made]]", "of an object": "Holder(made)", "key": "{made: 1}"}

PROGRAM = """
import enum, logging, re
import numpy as np
{given}
class Holder:
    def __init__(self, inner): self.inner = inner
{hook}
held = {place}
def show(obj): return text([obj, getattr(obj, "k", None), getattr(obj, "__dict__", None)])
def reads(x):
    inner = [*held] if type(held) in (list, dict) else [getattr(held, "inner", held)]
    return [show(each) for each in inner]
"""


def program(kind: str, hook: str, place: str) -> dict[str, Any]:
    given, use = GLOBALS[kind]
    body = textwrap.dedent(HOOKS[hook]).format(use=use)
    names: dict[str, Any] = {"__name__": "__main__", "text": text}
    exec(PROGRAM.format(given=given, hook=body, place=PLACES[place]), names)
    return names


@pytest.mark.parametrize("count", [26, pytest.param(10**6, marks=pytest.mark.storm)])
def test_what_a_hook_names_is_there_before_it_runs(subtests: Any, rt: Any, count: int) -> None:
    """Captured, as a broadcast argument, and as an item of a map."""
    for kind, hook, place in combinations(count, GLOBALS, HOOKS, PLACES):
        if place == "key" and hook in ("__setitem__", "append"):  # what has these is not hashed
            continue
        with subtests.test(names=kind, hook=hook, place=place):
            names = program(kind, hook, place)
            want = names["reads"](X)
            assert rt.function(names["reads"], outputs="first")(X) == want
            show, made = names["show"], names["made"]
            of_argument = rt.function(lambda x, obj, show=show: show(obj), bcast_inputs="obj", outputs="first")
            assert of_argument(X, made) == show(made)
            assert [*rt.map(show, [made])] == [show(made)]


NUMBERS = np.ones(2)
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
    assert f(NUMBERS).tolist() == [1.0, 1.0]
    s.Base.factor = 5
    assert f(NUMBERS).tolist() == [1.0, 1.0]
    del s.Model.factor
    assert f(NUMBERS).tolist() == [5.0, 5.0]


def by_verify(rt: Any, s: SimpleNamespace) -> Any:
    assert s.passed.verify(NUMBERS, s.Model())
    return s.passed(NUMBERS, s.Model()).tolist()


WAYS: dict[str, Callable[[Any, SimpleNamespace], Any]] = {
    "argument": lambda rt, s: s.passed(NUMBERS, s.Model()).tolist(),
    "map": lambda rt, s: [*rt.map(lambda model: model.rate(), [s.Model(), s.Model()])],
    "submit": lambda rt, s: s.passed.submit(NUMBERS, s.Model()).result().tolist(),
    "verify": by_verify,
    "resident object": lambda rt, s: s.passed(NUMBERS, s.resident).tolist(),
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
                assert captured(NUMBERS).tolist() == wanted
                assert bring(rt, s) == wanted
                assert captured(NUMBERS).tolist() == wanted
                assert s.passed(NUMBERS, s.Model()).tolist() == wanted
            del s.Model.factor
            assert bring(rt, s) == captured(NUMBERS).tolist() == [4, 4]
            s.Model.rate = lambda self: 7
            assert bring(rt, s) == captured(NUMBERS).tolist() == [7, 7]
            del s.Model.rate
            s.Model.__bases__ = (type("Base", (), {"__module__": "__main__", "rate": lambda self: 8}),)
            assert bring(rt, s) == captured(NUMBERS).tolist() == [8, 8]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_result_and_an_exception_leave_the_programs_class_as_it_is(shared_runtimes: Any, num_workers: Any) -> None:
    s, rt = script(), shared_runtimes[num_workers]
    own, own_of_failed = s.Model.rate, s.Failed.rate
    f = rt.function(lambda x: s.Model(), outputs=None)
    pending = f.submit(NUMBERS)
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
        g(NUMBERS)
    assert s.Failed.rate is own_of_failed
    s.settings["rate"] = 2
    assert g(NUMBERS).tolist() == [2.0, 2.0]


def test_a_class_that_was_an_argument_before_many_others(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x, models: x * models[0].rate(), outputs="gather", bcast_inputs="models")
    s = script()
    assert f(NUMBERS, [s.Model()]).tolist() == [1.0, 1.0]
    others = [type("Other", (), {"__module__": "__main__", "rate": lambda self: 5})() for _ in range(300)]
    assert f(NUMBERS, others).tolist() == [5.0, 5.0]
    s.settings["rate"] = 2
    assert f(NUMBERS, [s.Model()]).tolist() == [2.0, 2.0]


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
            assert captured(NUMBERS) == 0
            assert [*rt.map(note, items, batch_size=1)][num_others:] == [(1, 1), (2, 2), (3, 3)]
            assert captured(NUMBERS) == 3
            with synk.Executor(runtime=rt) as executor:
                assert [executor.submit(note, seen()).result() for _ in range(2)] == [(4, 4), (5, 5)]
            seen.count = 10
            assert [*rt.map(note, items, batch_size=1)][num_others:] == [(11, 6), (12, 7), (13, 8)]
            assert captured(NUMBERS) == 13


def test_an_enum_keeps_its_members(subtests: Any, rt: Any) -> None:
    """A function has captured it, items name it, and the function is called again."""

    class Plain(enum.Enum):
        A = 1.5

    class Flags(enum.Flag):
        A, B = 1, 2

    class Number(float, enum.Enum):
        A = 1.5

    for kind in (Plain, Flags, Number):
        with subtests.test(kind=kind.__name__), synk.Executor(runtime=rt) as executor:
            captured = rt.function(lambda x: kind.A.value, outputs="first")  # noqa: B023
            for _ in range(2):
                assert captured(NUMBERS) == kind.A.value
                assert [*rt.map(lambda item: item.value, [kind.A] * 3, batch_size=1)] == [kind.A.value] * 3
                assert executor.submit(operator.attrgetter("value"), kind.A).result() == kind.A.value
