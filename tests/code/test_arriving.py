"""Objects arrive as they are in the program, whatever brings them: captured, as an argument, an item or a result.

The expected values come from the same reading of the object in this process.
"""

from __future__ import annotations

import abc
import array
import collections.abc
import enum
import functools
import pickle
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pandas as pd
import pytest

import synk

X = np.arange(3.0)


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
}

SCRIPTS = {
    "attrs, frozen": """
        @attrs.frozen(slots=False)
        class Config:
            rate: float
        made = Config(2.0)
        """,
    "attrs, with a validator": """
        def positive(obj, attribute, value): assert value > 0
        @attrs.define
        class Config:
            rate: float = attrs.field(converter=float, validator=positive)
        made = Config(2.0)
        """,
    "slots, and none": """
        class Slots:
            __slots__ = ("rate",)
        class Empty(Slots):
            __slots__ = ()
        made = Empty()
        made.rate = 2
        """,
    "a cached property": """
        class Model:
            rate = functools.cached_property(lambda self: 2.0)  # whose lock cannot be pickled before Python 3.12
        made = Model()
        """,
    "enum, __init__": """
        class Planet(enum.Enum):
            EARTH = (6.0, 2.0)
            def __init__(self, mass, radius): self.mass, self.radius = mass, radius
        made = Planet.EARTH
        """,
    "enum, __new__": """
        class Planet(enum.Enum):
            EARTH = 1, "blue"
            def __new__(cls, value, colour):
                self = object.__new__(cls)
                self._value_, self.colour = value, colour
                return self
        made = Planet.EARTH
        """,
    "IntEnum, __new__": """
        class Planet(enum.IntEnum):
            EARTH = 3, "third"
            def __new__(cls, value, doc):
                self = int.__new__(cls, value)
                self._value_, self.doc = value, doc
                return self
        made = Planet.EARTH
        """,
    "enum, set later": """
        class Planet(enum.Enum):
            EARTH = 1
        made = Planet.EARTH
        made.moons = ["moon"]
        """,
    "a base that registers classes": """
        class Base:
            found, names, count = {}, [], 0
            def __init_subclass__(cls, key, **options):
                super().__init_subclass__(**options)
                Base.found[key] = cls
                cls.names.append(key)
                Base.count += 1
        class Model(Base, key="model"):
            rate = property(lambda self: (type(self) is self.found["model"], len(self.found), self.names, Base.count))
        class Other(Model, key="other"): pass
        made = Model()
        """,
    "a base that registers classes by a helper": """
        found, names, num = {}, [], 0
        def note(cls):
            global num
            num += 1
            found[cls.__name__] = cls
            names.append(cls.__name__)
        class Base:
            def __init_subclass__(cls): note(cls)
        class Model(Base):
            rate = property(lambda self: (type(self) is found["Model"], [*found], names, num))
        made = Model()
        """,
    "a base that registers classes in a closure": """
        def base():
            found, names = {}, []
            class Base:
                def __init_subclass__(cls): found[cls.__name__] = cls; names.append(cls.__name__)
                rate = property(lambda self: (type(self) is found["Model"], [*found], names))
            return Base
        class Model(base()): pass
        made = Model()
        """,
    "a base that checks classes": """
        class Base:
            def __init_subclass__(cls):
                if not hasattr(cls, "rate"): raise TypeError("no rate")
        class Model(Base):
            rate = 2.0
        made = Model()
        """,
    "a base that registers classes in a library": """
        def register(cls): collections.abc.Sequence.register(cls)
        class Base:
            def __init_subclass__(cls): register(cls)
            rate = property(lambda self: isinstance(self, collections.abc.Sequence))
        class Model(Base): pass
        made = Model()
        """,
    "a metaclass that registers classes": """
        found, names = {}, []
        class Meta(abc.ABCMeta):
            def __new__(meta, name, bases, table, **options):
                return found.setdefault(name, super().__new__(meta, name, (*bases, Mixin) if bases else (), table))
            def __init__(cls, name, bases, table, key):
                super().__init__(name, bases, table)
                names.append(key)
        class Mixin: kept = 3
        class Base(metaclass=Meta, key=1):
            rate = property(lambda self: (type(self) is found["Model"], [*found], names, self.kept))
        class Model(Base, key=2): pass
        made = Model()
        """,
    "a metaclass that refuses changes": """
        class Meta(type):
            def __setattr__(cls, name, value): raise AttributeError(name)
        class Model(metaclass=Meta):
            rate = 2.0
        made = Model()
        """,
    "descriptors that register their names": """
        found = []
        class Field:
            def __set_name__(self, owner, name): self.name = name; found.append((owner, name))
            def __get__(self, obj, owner): return self if obj is None else (self.name, len(found), found[0][0] is owner)
        class Model:
            rate = Field()
        made = Model()
        """,
    "a single object, in its class": """
        class Model:
            made = None
            rate = property(lambda self: (type(self.made) is type(self), type(self)() is self.made))
            def __new__(cls):
                if cls.made is None: cls.made = super().__new__(cls)
                return cls.made
        made = Model()
        """,
    "a single object, in a global": """
        objects = {}
        class Model:
            rate = property(lambda self: (len(objects), type(self)() is objects[type(self)]))
            def __new__(cls):
                if cls not in objects: objects[cls] = super().__new__(cls)
                return objects[cls]
        made = Model()
        """,
}
"""Classes of a script, and an object of them."""


def made_by(source: str) -> Any:
    modules = {"abc": abc, "attrs": attrs, "collections": collections, "enum": enum, "functools": functools}
    names: dict[str, Any] = {"__name__": "__main__", **modules}
    exec(textwrap.dedent(source), names)
    return names["made"]


def read_member(member: Any) -> Any:
    own = {key: value for key, value in vars(member).items() if not key.startswith("_")}
    return member.name, member.value, own, type(member).EARTH is member


for _name, _source in SCRIPTS.items():
    _read = read_member if "Planet" in _source else lambda made: (made.rate, hasattr(made, "__dict__"))
    OBJECTS[_name] = functools.partial(made_by, _source), _read
OBJECTS["array with attributes"] = named, read_named


class Key:
    """A key of a nesting that holds an object."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


READERS = [read for _, read in OBJECTS.values()]


def made() -> list[Any]:
    return [make() for make, _ in OBJECTS.values()]


def read_all(objects: list[Any]) -> list[Any]:
    return [read(obj) for read, obj in zip(READERS, objects)]


def arrivals(rt: synk.Runtime) -> dict[str, list[Any]]:
    """Return what is read of the objects on the workers, by the way that brought them."""

    class Own(Warning):
        held = made()

    def of_filters(x: Any) -> Any:
        return next(read_all(kind.held) for _, _, kind, *_ in warnings.filters if kind.__name__ == "Own")

    objects = made()
    captured = rt.function(lambda x: read_all(objects), outputs="first")
    of_table = rt.function(lambda frame: [read_all(held) for held in frame["held"]], outputs="gather")
    of_argument = rt.function(lambda x, arg: read_all(arg), outputs="first", bcast_inputs="arg")
    assert captured.verify(X)
    ways = {
        "captured": captured(X),
        "captured, serial": captured.serial(X),
        "argument": of_argument(X, objects),
        "item of a map": next(iter(rt.map(read_all, [objects]))),
        "table": of_table(pd.DataFrame({"held": [made(), made(), made()]}))[-1],
        "result": read_all(rt.function(lambda x: objects[:-1], outputs="first")(X)),  # an array would lose its class
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", Own)
        ways["class of a warning in a filter"] = rt.function(of_filters, outputs="first")(X)
    return ways


@pytest.mark.parametrize("num_workers", [2, 0])
def test_an_object_arrives_as_it_is(subtests: Any, shared_runtimes: Any, num_workers: int) -> None:
    expected = read_all(made())
    for way, found in arrivals(shared_runtimes[num_workers]).items():
        with subtests.test(way=way):
            wrong = {name: (got, want) for name, got, want in zip(OBJECTS, found, expected) if got != want}
            assert not wrong


def test_an_object_moves_with_a_program(rt: Any, shared_runtimes: Any) -> None:
    """In a resident object, with rules of its own, and in a key of a nesting."""
    held = made()
    resident, nested = rt.resident(held), rt.shared({Key(held): X})
    own = rt.resident({"by": held}, dump=dict, load=dict.update)
    program = synk.Program(
        resident=rt.function(lambda x: read_all(resident.value), outputs="first"),
        own=rt.function(lambda x: read_all(own.value["by"]), outputs="first"),
        nested=rt.function(lambda x: [read_all(key.inner) for key in nested.value], outputs="first"),
        state={"resident": resident, "nested": nested, "own": own},
    )
    q = pickle.loads(pickle.dumps(program)).on(shared_runtimes[1])
    assert q.resident(X) == q.own(X) == q.nested(X)[0] == read_all(held)


def test_a_memoryview_that_cannot_be_sent_is_refused(shared_runtimes: Any) -> None:
    pointers = memoryview(bytes(16)).cast("P")
    f = shared_runtimes[2].function(lambda x, arg: len(arg), outputs="first", bcast_inputs="arg")
    with pytest.raises(synk.errors.SerializationError, match=r"cannot send arg .*format 'P'.*Use its tobytes\(\)"):
        f(X, pointers)
