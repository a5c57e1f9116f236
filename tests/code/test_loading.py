"""Objects whose loading runs the user's code: whatever that code names is on the ranks before, as it is in the program.

The expected values come from the same function, called by plain Python in this process on the same objects.
"""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest
from contents import text
from support.tables import combinations

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
def test_what_a_hook_names_is_there_before_it_runs(subtests: Any, shared_runtimes: Any, count: int) -> None:
    """Captured, as a broadcast argument, and as an item of a map."""
    rt = shared_runtimes[2]
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
