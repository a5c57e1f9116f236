"""Functions and classes travel with whatever this version of Python lets them have.

Each feature is a text that defines ``feature(x)``: what it returns is compared with plain Python. A name that ends with
a version of Python is of what came with that version.
"""

from __future__ import annotations

import re
import sys
import textwrap
from typing import Any

import numpy as np

FEATURES: dict[str, str] = {
    # -- annotations
    "deferred annotations that name nothing, 3.14": """
        import typing
        if typing.TYPE_CHECKING:
            from nowhere import Tensor
        def rate(x: Tensor) -> list[Tensor]: return [x]
        def strings(of):
            import annotationlib
            return annotationlib.get_annotations(of, format=annotationlib.Format.STRING)
        def feature(x): return rate(x), strings(rate)
        """,
    "annotations that name what comes later, 3.14": """
        def rate(x: Later) -> "Later": return Later(x)
        class Later:
            next: Later
            def __init__(self, x): self.x = x
        def feature(x):
            return rate(x).x, Later.__annotations__["next"] is Later, rate.__annotations__["x"] is Later
        """,
    "annotations of a class that name nothing, 3.14": """
        import dataclasses, typing
        if typing.TYPE_CHECKING:
            from nowhere import Tensor
        @dataclasses.dataclass
        class Model:
            rate: Tensor
            more: list[Tensor] = ()
            def scaled(self, other: Tensor) -> Tensor: return other
        class Plain:
            rate: Tensor
        def feature(x):
            import annotationlib
            texts = annotationlib.get_annotations(Plain, format=annotationlib.Format.STRING)
            return Model(x), Model(x).scaled(3), texts, [field.name for field in dataclasses.fields(Model)]
        """,
    "annotations that are changed": """
        class Base: steps: "list[int]"
        class Model(Base): rate: int = 1
        def scaled(x: int, *more: float, named: "str" = "a") -> list[int]: return x
        scaled.__annotations__["x"] = float
        scaled.__annotations__["more"] = "int"
        Model.__annotations__["rate"] = "float"
        def feature(x): return scaled.__annotations__, Model.__annotations__, Base.__annotations__
        """,
    "postponed annotations": """
        from __future__ import annotations
        import dataclasses, typing
        if typing.TYPE_CHECKING:
            from nowhere import Tensor
        @dataclasses.dataclass
        class Model:
            rate: Tensor
            total: typing.ClassVar[int] = 3
        def scaled(x: Tensor) -> Tensor: return x
        def feature(x): return Model(x), Model.__annotations__, scaled(x), scaled.__annotations__
        """,
    # -- generics
    "type parameters of a class, 3.12": """
        class Box[T, *Ts, **P]:
            held: T
            def __init__(self, held: T): self.held = held
            def get[S](self, other: S) -> T | S: return self.held or other
        class Ints(Box[int, str, [int]]): pass
        def feature(x):
            return (
                Ints(x).get(0), [str(each) for each in Box.__type_params__],
                Ints.__orig_bases__[0].__args__[0], len(Box.get.__type_params__),
            )
        """,
    "type parameters of a function, 3.12": """
        class Base: pass
        def first[T: (int, float), S: Base](items: list[T]) -> T | S: return items[0]
        def feature(x):
            one, two = first.__type_params__
            return first([x, 1]), str(one), one.__constraints__, two.__bound__ is Base
        """,
    "default of a type parameter, 3.13": """
        class Box[T = int]:
            held: T
        def feature(x): return Box.__type_params__[0].__default__, Box[str].__args__
        """,
    "type alias, 3.12": """
        type Pair[T] = tuple[T, T]
        type Nested = int | list[Nested]
        type Tree[T] = T | list[Tree[T]]
        type First = list[Second]
        type Second = First | None
        def swapped(pair: Pair[int]) -> Pair[int]: return pair[::-1]
        def feature(x):
            return (
                swapped((x, 1)), Pair.__name__, Pair[int].__args__, str(Nested), str(Nested.__value__),
                Tree[int].__args__, str(Second),
            )
        """,
    # -- functools
    "partialmethod": """
        import functools
        class Model:
            def scaled(self, factor, *more, named=1): return [factor, more, named]
            double = functools.partialmethod(scaled, 2, named=3)
            of_class = functools.partialmethod(classmethod(lambda cls, y: [cls.__name__, y]), 4)
            nested = functools.partialmethod(double, 5)
            whole = functools.partialmethod(print)
        def feature(x): return Model().double(x), Model.of_class(), Model().nested(), repr(vars(Model)["whole"])
        """,
    "partial": """
        import functools
        class Own(functools.partial):
            unit = "m"
        bound, own = functools.partial(pow, 2), Own(pow, 3)
        bound.unit = "s"
        def feature(x): return bound(x), own(x), own.unit, bound.unit
        """,
    "placeholder, 3.14": """
        from functools import Placeholder, partial, partialmethod
        take = partial(pow, Placeholder, 2)
        class Model:
            def scaled(self, a, b): return a, b
            last = partialmethod(scaled, Placeholder, 5)
        def feature(x): return take(x), Model().last(x), partial(take, 3)()
        """,
    # -- classes
    "abstract class": """
        import abc
        class Base(abc.ABC):
            @abc.abstractmethod
            def scale(self): ...
            @property
            @abc.abstractmethod
            def unit(self): ...
        class Model(Base):
            def scale(self): return 1
            unit = "m"
        Base.register(str)
        def feature(x): return Model().scale(), sorted(Base.__abstractmethods__), isinstance("", Base), Model().unit
        """,
    "enums": """
        import enum
        class Color(enum.Enum):
            RED, BLUE = 1, 2
            def shown(self): return self.name
        class Unit(str, enum.Enum):
            M = "m"
        class Access(enum.Flag):
            R, W = enum.auto(), enum.auto()
        class Level(enum.IntEnum):
            LOW = 1
        @enum.unique
        class Named(enum.Enum):
            def _generate_next_value_(name, *_): return name
            A = enum.auto()
        def feature(x):
            return (
                Color.RED.shown(), Color(2), Unit("m"), Access.R | Access.W, Level.LOW + x, Color["BLUE"],
                list(Access), Named.A,
            )
        """,
    # -- syntax of functions
    "template strings, 3.14": """
        from string.templatelib import Interpolation, Template
        name, rate = "a", 0.5
        held = t"held {name}"
        def feature(x):
            made = t"rate {rate:.2f} of {name!r}"
            return list(made), list(held), isinstance(held, Template), made.interpolations[0].format_spec
        """,
    "lazy imports, 3.15": """
        lazy import fractions
        def feature(x): return fractions.Fraction(1, 2)
        """,
    "frozen dicts, 3.15": """
        held = frozendict(a=[1])
        def feature(x): return held, held["a"]
        """,
}


def texts() -> dict[str, str]:
    """Return the texts of the features that this version of Python has: as globals, and in a function."""
    found = {}
    for name, text in FEATURES.items():
        since = re.search(r", 3\.(\d+)$", name)
        if since is not None and sys.version_info < (3, int(since[1])):
            continue
        lines = textwrap.dedent(text).strip("\n")
        found[f"{name}: globals"] = lines
        if "from __future__" not in lines and "lazy import" not in lines:
            found[f"{name}: locals"] = (
                f"def make():\n{textwrap.indent(lines, '    ')}\n    return feature\nfeature = make()\n"
            )
    return found


def test_of_functions_and_classes(subtests: Any, rt: Any) -> None:
    for name, text in texts().items():
        with subtests.test(feature=name):
            names: dict[str, Any] = {"__name__": "__main__"}
            exec(compile(text, f"<{name}>", "exec", dont_inherit=True), names)
            feature = names["feature"]
            expected = [repr(feature(3))] * 2
            of_rows = rt.function(lambda x, feature=feature: repr(feature(3)), outputs=None)
            assert of_rows(np.ones(2)) == of_rows(np.ones(2)) == expected
            assert [*map(repr, rt.map(feature, [3, 3]))] == expected
