"""The table of kinds of captured objects: how each is made, and changed in place again and again.

A maker returns the object and ``change()``, after which the object's text (``contents.text``) is not what it was.
Classes and helpers are made inside the makers, so that they travel by value; modules have their own tests.
"""

from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import decimal
import functools
import io
import itertools
import random
import types
import typing
import warnings
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import numpy as np
from contents import text

Made = tuple[Any, Callable[[], Any]]

AT_ONCE, IN_TURN, BY_PICKLE = "at once", "in turn", "by pickle"
"""When a change is seen. ``IN_TURN``: within ``bound`` calls, else an error that tells of it. ``BY_PICKLE``: by
``serial`` and ``verify``, and by calls when there is time, with a warning."""

TURN_NBYTES = 64 * 1024
COLLECTION_BOUND = 300
"""Calls within which a change in a collection beyond 1000 nodes is seen or told."""


@dataclass(frozen=True)
class Kind:
    """A kind of captured object."""

    name: str
    make: Callable[[], Made]
    sees: str = AT_ONCE
    bound: int = 0
    needs: str = ""
    read: Callable[[Any], str] = text


KINDS: dict[str, Kind] = {}


def kind(sees: str = AT_ONCE, **options: Any) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Enter a maker under its own name."""

    def enter(make: Callable[[], Made]) -> Callable[[], Made]:
        name = make.__name__.strip("_").replace("_", " ")
        KINDS[name] = Kind(name, make, sees, **options)
        return make

    return enter


def simple(name: str, make: Callable[[], Any], change: Callable[[Any, int], Any], **options: Any) -> None:
    """Enter an object by an expression, and a change of it that gets the number of the change, from 1 on."""

    def make_both() -> Made:
        obj, numbers = make(), itertools.count(1)
        return obj, lambda: change(obj, next(numbers))

    KINDS[name] = Kind(name, make_both, **options)


def put(container: Any, key: Any, value: Any) -> None:
    container[key] = value


def add(container: Any, key: Any, value: Any = 1) -> None:
    container[key] += value


# ----- arrays

_DAY = np.timedelta64(1, "D")


def array_of(nbytes: int) -> np.ndarray:
    return np.arange(nbytes // 8, dtype=np.float64) % 1000


def reshape(array: np.ndarray, rows: int) -> None:
    """Change the shape in place, which NumPy 2.5 deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        array.shape = (rows, -1)


def in_turn(nbytes: int) -> dict[str, Any]:
    return {"sees": IN_TURN, "bound": -(-nbytes // TURN_NBYTES) + 1}


def read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def of_file(size: int) -> np.memmap:
    with TemporaryFile() as file:  # the mapping outlives it
        return np.memmap(file, "f8", "w+", 0, (size,))


KB, MB = 1024, 1024 * 1024
simple("array, item", lambda: np.zeros(4), lambda a, n: add(a, 1))
simple("array, item to NaN and back", lambda: np.zeros(4), lambda a, n: (put(a, 0, np.nan), add(a, 1)))
simple("array of 8 KB, last item", lambda: array_of(8 * KB), lambda a, n: add(a, -1))
simple("array of 64 KB, one item", lambda: array_of(64 * KB), lambda a, n: add(a, 1000 + 7 * n))
simple("array of 100 KB, dense", lambda: array_of(100 * KB), lambda a, n: np.add(a, 1, out=a))
simple("array of 100 KB, sparse", lambda: array_of(100 * KB), lambda a, n: add(a, 701 * n), **in_turn(100 * KB))
simple("array of 10 MB, dense", lambda: array_of(10 * MB), lambda a, n: np.add(a, 1, out=a))
simple("array of 10 MB, sparse", lambda: array_of(10 * MB), lambda a, n: add(a, 100_003 * n), **in_turn(10 * MB))
simple("array, 0-d", lambda: np.array(1.0), lambda a, n: add(a, ()))
simple("array, Fortran order", lambda: np.asfortranarray(np.zeros((3, 4))), lambda a, n: add(a, (1, 2)))
simple("array, strided view", lambda: np.zeros(20)[::3], lambda a, n: add(a, 2))
simple("array, strided view, in its base", lambda: np.zeros(20)[::3], lambda a, n: add(a.base, 3))
simple("array, read-only view, in its base", lambda: np.broadcast_to(np.zeros(1), 5), lambda a, n: add(a.base, 0))
simple("array, read-only, in its base", lambda: read_only(np.zeros(4)), lambda a, n: add(a.base, 1))
simple("array of a file", lambda: of_file(4), lambda a, n: add(a, 1))
simple("array of a file, dense", lambda: of_file(9999), lambda a, n: a.fill(n))
simple("array, structured", lambda: np.zeros(3, [("a", "i4"), ("b", "f8")]), lambda a, n: add(a["b"], 1))
simple("array, texts", lambda: np.array(["aaa", "bbb"]), lambda a, n: put(a, 0, f"{n:03}"))
simple("array, dates", lambda: np.zeros(3, "M8[D]"), lambda a, n: add(a, 1, _DAY), read=lambda a: text(a.astype("i8")))
simple("array, masked: data", lambda: np.ma.masked_array([1.0, 2], [0, 1]), lambda a, n: add(a.data, 0))
simple(
    "array, masked: mask",
    lambda: np.ma.masked_array(np.zeros(9), np.zeros(9, bool)),
    lambda a, n: put(a, n % 9, np.ma.masked),
)
simple("array, shape", lambda: np.zeros(64), lambda a, n: reshape(a, 2**n))


def object_array(*values: Any) -> np.ndarray:
    result = np.empty(len(values), object)
    for position, value in enumerate(values):  # asked as a whole, dicts with attributes pass for arrays
        result[position] = value
    return result


simple("array of objects, shape", lambda: object_array(*"abcdefgh" * 8), lambda a, n: reshape(a, 2**n))
simple("array of objects, item", lambda: object_array("a", None), lambda a, n: put(a, 1, n))
simple("array of objects, in an element", lambda: object_array({"k": 1}, "a"), lambda a, n: add(a[0], "k"))


@kind()
def array_subclass_with_attribute() -> Made:
    class Named(np.ndarray):
        unit = "m"

        def __reduce__(self) -> Any:
            return _named, (type(self), np.asarray(self).copy(), self.unit)

    obj = _named(Named, np.zeros(3), "m")
    return obj, lambda: setattr(obj, "unit", obj.unit + "m")


def _named(cls: Any, data: np.ndarray, unit: str) -> Any:
    obj = data.view(cls)
    obj.unit = unit
    return obj


# ----- collections

simple("list, item", lambda: [1, 2, 3], lambda a, n: add(a, 1))
simple("list, append", lambda: [1], lambda a, n: a.append(n))
simple("list, pop", lambda: [*range(20)], lambda a, n: a.pop())
simple("list, order", lambda: ["a", "b", "c", "d", "e"], lambda a, n: a.append(a.pop(0)))
simple("list, equal element of another type", lambda: [1, 2], lambda a, n: put(a, 0, [1.0, True, 1, 1 + 0j][n % 4]))
simple("list, a long text", lambda: ["a" * 1000], lambda a, n: put(a, 0, "a" * 999 + str(n)))
simple("list, nested", lambda: [[1, [2]], 3], lambda a, n: a[0][1].append(n))
simple("list, element replaced by an equal one", lambda: [[1], [1]], lambda a, n: (put(a, 0, [1]), add(a[0], 0, n)))
simple("list, two names become one", lambda: [[1], [1]], lambda a, n: (put(a, 0, a[1]), a[1].append(n)))
simple("list, in itself", lambda: (lambda a: a.append(a) or a)([1]), lambda a, n: add(a, 0))
simple("list of 12 000, append", lambda: [*range(12_000)], lambda a, n: a.append(n))
simple(
    "list of 12 000, item",
    lambda: [*range(12_000)],
    lambda a, n: add(a, 117 * n, 0.5),
    sees=IN_TURN,
    bound=COLLECTION_BOUND,
)
simple("tuple holding a list", lambda: (1, [2]), lambda a, n: a[1].append(n))
simple("dict, value", lambda: {"a": 1, "b": 2}, lambda a, n: add(a, "b"))
simple("dict, key added", lambda: {"a": 1}, lambda a, n: put(a, n, n))
simple("dict, key removed", lambda: dict.fromkeys(range(20)), lambda a, n: a.popitem())
simple("dict, key renamed", lambda: {"rate 0": 0.1, "b": 2}, lambda a, n: put(a, f"rate {n}", a.pop(f"rate {n - 1}")))
simple(
    "dict, last key renamed",
    lambda: {"b": 2, "k0": object},
    lambda a, n: put(a, f"k{n}", a.pop(f"k{n - 1}")),
    read=lambda a: repr([*a]),
)
simple(
    "dict, order",
    lambda: {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5},
    lambda a, n: (k := next(iter(a))) and put(a, k, a.pop(k)),
)
simple("dict, values swapped", lambda: {"a": 1, "b": 2, "c": 3}, lambda a, n: a.update(a=a["b"] + 3, b=a["a"]))
simple("dict, key True", lambda: {True: 1, None: 2}, lambda a, n: add(a, True), read=lambda a: repr(a[True]))
simple("dict, key None", lambda: {True: 1, None: 2}, lambda a, n: add(a, None), read=lambda a: repr(a[None]))
simple("dict, key 1 becomes True", lambda: {1: 0}, lambda a, n: put(a, [1, True, 1.0][n % 3], a.popitem()[1] + 1))
simple("dict, tuple key", lambda: {(1, "a"): 1}, lambda a, n: add(a, (1, "a")))
simple("dict, nested", lambda: {"a": {"b": {"c": 1}}}, lambda a, n: add(a["a"]["b"], "c"))
simple(
    "dict of 12 000, value",
    lambda: dict.fromkeys(range(12_000), 0),
    lambda a, n: add(a, 4999 * n % 12_000),
    sees=IN_TURN,
    bound=COLLECTION_BOUND,
)
simple(
    "dict of 12 000, constant key",
    lambda: dict.fromkeys(range(12_000), 0),
    lambda a, n: add(a, 7),
    read=lambda a: repr(a[7]),
    sees=IN_TURN,
    bound=COLLECTION_BOUND,
)
simple("dict of 12 000, key added", lambda: dict.fromkeys(range(12_000), 0), lambda a, n: put(a, f"new {n}", n))
simple("dict view", lambda: UserDict(a=1), lambda a, n: put(a, n, n), read=lambda a: repr([*a.items()]))


@kind(read=lambda obj: repr([*obj.items()]))
def read_only_view_of_a_dict() -> Made:
    behind = {"a": 1}
    return types.MappingProxyType(behind), lambda: add(behind, "a")


simple("set, add", lambda: {1}, lambda a, n: a.add(n + 1))
simple("set, one for another", lambda: {"0", "x"}, lambda a, n: (a.discard(str(n - 1)), a.add(str(n))))
simple("frozenset in a list", lambda: [frozenset({1})], lambda a, n: put(a, 0, a[0] | {n + 1}))
simple("deque, append", lambda: deque([1], maxlen=3), lambda a, n: a.append(n))
simple("deque, rotate", lambda: deque([1, 2, 3, 4, 5, 6]), lambda a, n: a.rotate(1))
simple("deque, in an element", lambda: deque([[1]]), lambda a, n: a[0].append(n))
simple("bytearray", lambda: bytearray(b"abc"), lambda a, n: add(a, 1))
simple(
    "bytearray of 100 KB",
    lambda: bytearray(100 * KB),
    lambda a, n: add(a, 5003 * n),
    read=lambda a: str(sum(a)),
    **in_turn(100 * KB),
)
simple("OrderedDict, move_to_end", lambda: OrderedDict(a=1, b=2, c=3, d=4), lambda a, n: a.move_to_end(next(iter(a))))
simple("OrderedDict, value", lambda: OrderedDict(a=1), lambda a, n: add(a, "a"))
simple("defaultdict, value", lambda: defaultdict(int), lambda a, n: add(a, "a"))
simple("defaultdict of lists", lambda: defaultdict(list, a=[1]), lambda a, n: a["a"].append(n))
simple(
    "defaultdict, its factory",
    lambda: defaultdict(int),
    lambda a, n: setattr(a, "default_factory", [float, str, bool, list, int][n % 5]),
    read=lambda a: repr(a.default_factory()),
)
simple("Counter", lambda: Counter("aab"), lambda a, n: a.update("b"))
simple("UserDict", lambda: UserDict(a=1), lambda a, n: add(a, "a"))
simple("UserDict, nested", lambda: UserDict(a={"b": [1]}), lambda a, n: a["a"]["b"].append(n))
simple("UserList", lambda: UserList([1]), lambda a, n: a.append(n))
simple("ChainMap, first", lambda: ChainMap({"a": 1}, {"b": 2}), lambda a, n: put(a, "a", a["a"] + 1))
simple("ChainMap, last", lambda: ChainMap({"a": 1}, {"b": 2}), lambda a, n: add(a.maps[1], "b"))
simple("ChainMap, another map", lambda: ChainMap({"a": 1}), lambda a, n: a.maps.append({n: n}))
simple(
    "array.array", lambda: array.array("d", [1, 2]), lambda a, n: add(a, 0), sees=BY_PICKLE, read=lambda a: repr([*a])
)
simple(
    "ctypes number",
    lambda: ctypes.c_double(1),
    lambda a, n: setattr(a, "value", n + 1),
    sees=BY_PICKLE,
    read=lambda a: repr(a.value),
)
simple("BytesIO", lambda: io.BytesIO(), lambda a, n: a.write(b"a"), sees=BY_PICKLE, read=lambda a: repr(a.getvalue()))


simple(
    "decimal context",
    lambda: decimal.Context(prec=5),
    lambda a, n: setattr(a, "prec", 5 + n),
    read=lambda a: str(a.divide(decimal.Decimal(1), decimal.Decimal(3))),
)


@kind()
def dict_subclass() -> Made:
    class AttrDict(dict):
        __getattr__ = dict.__getitem__
        __setattr__ = dict.__setitem__

    obj = AttrDict(rate=1, name="a")
    return obj, lambda: setattr(obj, "rate", obj.rate + 1)


@kind(read=lambda obj: repr(obj.inner.rate))
def dict_subclass_by_attributes() -> Made:
    class AttrDict(dict):
        def __getattr__(self, name: str) -> Any:
            try:
                return self[name]
            except KeyError:
                raise AttributeError(name) from None

    obj = AttrDict(inner=AttrDict(rate=1))
    return obj, lambda: add(obj["inner"], "rate")


@kind()
def dict_subclass_with_attributes_of_its_own() -> Made:
    class Config(dict):
        pass

    obj = Config(a=1)
    obj.version = 1
    return obj, lambda: setattr(obj, "version", obj.version + 1)


@kind()
def list_subclass() -> Made:
    class Path(list):
        pass

    obj = Path([1])
    obj.log = []
    return obj, lambda: (obj.append(1), obj.log.append(2))


@kind()
def set_subclass() -> Made:
    class Tags(set):
        pass

    obj = Tags({1})
    return obj, lambda: obj.add(len(obj) + 1)


@kind()
def namedtuple_holding_a_list() -> Made:
    point = collections.namedtuple("point", "x y")
    obj = point(1, [2])
    return obj, lambda: obj.y.append(3)


@kind(BY_PICKLE, read=lambda obj: repr([*obj, *vars(obj).items()]))
def array_array_with_an_attribute() -> Made:
    class Named(array.array):
        pass

    obj = Named("d", [1.0])
    obj.unit = "m"
    return obj, lambda: (add(obj, 0), setattr(obj, "unit", obj.unit + "m"))


@kind()
def namedtuple_holding_an_instance() -> Made:
    class Point(typing.NamedTuple):
        x: Any

    obj = Point(SimpleNamespace(k=[1]))
    return obj, lambda: obj.x.k.append(3)


# ----- instances and classes

simple("SimpleNamespace", lambda: SimpleNamespace(a=1), lambda a, n: setattr(a, "a", n + 1))
simple("SimpleNamespace, attribute added", lambda: SimpleNamespace(), lambda a, n: setattr(a, f"a{n}", n))
simple(
    "SimpleNamespace, attribute removed",
    lambda: SimpleNamespace(**{f"a{n}": n for n in range(1, 20)}),
    lambda a, n: delattr(a, f"a{n}"),
)
simple("SimpleNamespace, by vars()", lambda: SimpleNamespace(a=1), lambda a, n: add(vars(a), "a"))
simple("exception", lambda: ValueError("a", [1]), lambda a, n: a.args[1].append(n), read=lambda a: repr(a.args))


@kind()
def dataclass_field() -> Made:
    @dataclasses.dataclass
    class Config:
        rate: float = 1.0

    obj = Config()
    return obj, lambda: setattr(obj, "rate", obj.rate + 1)


@kind()
def dataclasses_in_a_list() -> Made:
    @dataclasses.dataclass
    class Layer:
        width: int

    obj = [Layer(1), Layer(2)]
    return obj, lambda: setattr(obj[1], "width", obj[1].width + 1)


@kind()
def frozen_dataclass_holding_a_list() -> Made:
    @dataclasses.dataclass(frozen=True)
    class Config:
        rates: list

    obj = Config([1])
    return obj, lambda: obj.rates.append(2)


@kind()
def dataclass_with_slots() -> Made:
    @dataclasses.dataclass(slots=True)
    class Config:
        rate: float = 1.0

    obj = Config()
    return obj, lambda: setattr(obj, "rate", obj.rate + 1)


@kind()
def class_with_slots() -> Made:
    class Base:
        __slots__ = ("rate",)

    class Slots(Base):
        __slots__ = ("items",)

    obj = Slots()
    obj.rate, obj.items = 1, [1]
    return obj, lambda: (setattr(obj, "rate", obj.rate + 1), obj.items.append(2))


@kind()
def slots_filled_later_and_emptied() -> Made:
    class Slots:
        __slots__ = ("a", "b", "c", "d", "e", "f", "g", "h")

    obj, names = Slots(), iter("abcdefgh")
    return obj, lambda: setattr(obj, next(names), 1)


def plain_class() -> Any:
    class Model:
        kept = 0

        def scaled(self) -> Any:
            return self.kept

    return Model


@kind()
def instance_attribute() -> Made:
    obj = plain_class()()
    return obj, lambda: setattr(obj, "kept", obj.kept + 1)


@kind()
def instance_in_a_circle() -> Made:
    obj = plain_class()()
    obj.child = SimpleNamespace(parent=obj, items=[1])
    return obj, lambda: obj.child.items.append(1)


@kind()
def class_attribute() -> Made:
    obj = plain_class()
    return obj, lambda: setattr(obj, "kept", obj.kept + 1)


@kind()
def class_attribute_behind_an_instance() -> Made:
    obj = plain_class()()
    return obj, lambda: setattr(type(obj), "kept", obj.kept + 1)


@kind()
def list_in_a_class() -> Made:
    obj = plain_class()
    obj.items = [1]
    return obj, lambda: obj.items.append(2)


@kind()
def class_attribute_of_a_base() -> Made:
    base = plain_class()

    class Derived(base):
        pass

    return Derived(), lambda: setattr(base, "kept", base.kept + 1)


@kind()
def method_replaced() -> Made:
    obj, numbers = plain_class()(), itertools.count(1)

    def change() -> None:
        number = next(numbers)
        type(obj).scaled = lambda self: number

    return obj, change


@kind(read=lambda obj: repr(obj()))
def dunder_replaced() -> Made:
    obj, numbers = plain_class()(), itertools.count(1)
    type(obj).__call__ = lambda self: 0

    def change() -> None:
        number = next(numbers)
        type(obj).__call__ = lambda self: number

    return obj, change


@kind()
def metaclass_attribute() -> Made:
    class Meta(type):
        factor = 1

    class Model(metaclass=Meta):
        pass

    return Model, lambda: setattr(Meta, "factor", Meta.factor + 1)


@kind()
def class_of_an_object() -> Made:
    def numbered(number: int) -> Any:
        class Model:
            factor = number

        return Model

    obj, numbers = numbered(0)(), itertools.count(1)
    obj.w = 1
    return obj, lambda: setattr(obj, "__class__", numbered(next(numbers)))


@kind()
def bases_of_a_class() -> Made:
    def base(number: int) -> Any:
        class Base:
            factor = number

        return Base

    class Model(base(0)):
        pass

    numbers = itertools.count(1)
    return Model(), lambda: setattr(Model, "__bases__", (base(next(numbers)),))


@kind(read=lambda obj: repr(obj.scaled))
def helper_of_a_property() -> Made:
    rates = [1]

    def helper() -> Any:
        return [*rates]

    class Model:
        scaled = property(lambda self: helper())

    return Model(), lambda: rates.append(2)


@kind(read=lambda obj: repr(obj.scaled))
def helper_of_a_descriptor() -> Made:
    class Descriptor:
        def __init__(self, rate: int) -> None:
            self.rate = rate

        def __get__(self, obj: Any, owner: Any = None) -> Any:
            return self.rate

    held = Descriptor(1)

    class Model:
        scaled = held

    return Model(), lambda: setattr(held, "rate", held.rate + 1)


@kind(read=lambda obj: repr(obj()))
def dunder_from_a_descriptor() -> Made:
    class Descriptor:
        rate = 1

        def __get__(self, obj: Any, owner: Any = None) -> Any:
            return lambda: self.rate

    held = Descriptor()

    class Model:
        __call__ = held

    return Model(), lambda: setattr(held, "rate", held.rate + 1)


@kind(read=lambda obj: repr(obj.bound()))
def partialmethod() -> Made:
    rates = [1]

    class Model:
        def scaled(self, factor: Any) -> Any:
            return [*factor]

        bound = functools.partialmethod(scaled, rates)

    return Model(), lambda: rates.append(2)


@kind(read=lambda obj: repr(obj.made()) + repr(obj.counted()))
def static_and_class_methods() -> Made:
    rates = [1]

    class Model:
        count = 1

        @staticmethod
        def made() -> Any:
            return [*rates]

        @classmethod
        def counted(cls) -> Any:
            return cls.count

    return Model(), lambda: (rates.append(2), setattr(Model, "count", Model.count + 1))


@kind(read=lambda obj: repr(obj.rate))
def instance_with_getattr() -> Made:
    class Proxy:
        def __init__(self) -> None:
            self.__dict__["_held"] = {"rate": 1}

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return self._held[name]

    obj = Proxy()
    return obj, lambda: add(vars(obj)["_held"], "rate")


@kind(BY_PICKLE)
def instance_with_getstate() -> Made:
    class Model:
        def __init__(self) -> None:
            self.w = [1]

        def __getstate__(self) -> Any:
            return {"w": [*self.w]}

        def __setstate__(self, state: Any) -> None:
            self.w = state["w"]

    obj = Model()
    return obj, lambda: obj.w.append(1)


@kind(BY_PICKLE)
def instance_with_reduce() -> Made:
    class Model:
        def __init__(self, rate: Any) -> None:
            self.rate = rate

        def __reduce__(self) -> Any:
            return Model, (self.rate,)

    obj = Model(1)
    return obj, lambda: setattr(obj, "rate", obj.rate + 1)


@kind()
def instance_with_reduce_and_its_attributes() -> Made:
    class Model:
        def __init__(self, rates: list) -> None:
            self.rates = rates

        def __reduce__(self) -> Any:
            return Model, (self.rates,), self.__dict__

    obj = Model([1])
    return obj, lambda: obj.rates.append(2)


@kind()
def instance_with_getnewargs_that_returns_its_list() -> Made:
    class Model:
        def __new__(cls, rates: list) -> Any:
            obj = object.__new__(cls)
            obj.rates = rates
            return obj

        def __getnewargs__(self) -> Any:
            return (self.rates,)

    obj = Model([1])
    return obj, lambda: obj.rates.append(2)


@kind()
def instance_whose_constructor_copies_a_list() -> Made:
    class Model:
        def __init__(self, rates: list) -> None:
            self.rates = [*rates]

        def __reduce__(self) -> Any:
            return Model, (self.rates,)

    obj = Model([1])
    return obj, lambda: obj.rates.append(2)


@kind()
def namedtuple_with_an_attribute() -> Made:
    class Point(collections.namedtuple("Point", "x y")):
        pass

    obj = Point([1], {})
    obj.label = "a"
    return obj, lambda: (obj.x.append(2), put(obj.y, len(obj.x), 0))


@kind()
def dict_subclass_whose_state_is_a_list_of_its_own() -> Made:
    class Config(dict):
        def __reduce__(self) -> Any:
            return Config, (), (self.log,), None, iter(self.items())

        def __setstate__(self, state: Any) -> None:
            (self.log,) = state

    obj = Config(a=1)
    obj.log = [1]
    return obj, lambda: obj.log.append(2)


# ----- functions


def helper_with_a_rate() -> Any:
    def helper(a: int = 1, *, b: int = 2) -> Any:
        return a, b, getattr(helper, "rate", 0)

    return helper


@kind()
def function_attribute() -> Made:
    obj, numbers = helper_with_a_rate(), itertools.count(3)
    return obj, lambda: setattr(obj, "rate", next(numbers))


@kind()
def function_attribute_holding_a_list() -> Made:
    obj = helper_with_a_rate()
    obj.rate = [1]
    return obj, lambda: obj.rate.append(2)


@kind()
def defaults_of_a_function() -> Made:
    obj, numbers = helper_with_a_rate(), itertools.count(3)
    return obj, lambda: setattr(obj, "__defaults__", (next(numbers),))


@kind()
def keyword_defaults_of_a_function() -> Made:
    obj = helper_with_a_rate()
    return obj, lambda: add(obj.__kwdefaults__, "b")


@kind()
def mutable_default_of_a_function() -> Made:
    def obj(seen: list = [1]) -> Any:  # noqa: B006
        return [*seen]

    return obj, lambda: obj.__defaults__[0].append(2)


@kind()
def code_of_a_function() -> Made:
    obj, numbers = (lambda: 0), itertools.count(1)
    return obj, lambda: setattr(obj, "__code__", eval(f"lambda: {next(numbers)}").__code__)


@kind()
def variable_of_a_closure() -> Made:
    rate = 1

    def obj() -> Any:
        return rate

    def change() -> None:
        nonlocal rate
        rate += 1

    return obj, change


@kind()
def list_in_a_closure() -> Made:
    rates = [1]
    return (lambda: [*rates]), lambda: rates.append(1)


def script(source: str) -> dict[str, Any]:
    """Run a program's text in globals of its own, as a script or a notebook does."""
    table: dict[str, Any] = {"__name__": "__main__", "np": np}
    exec(source, table)
    return table


@kind()
def global_of_a_helper_of_a_helper() -> Made:
    main = script("rate = 1\ndef inner(): return rate\ndef helper(): return inner()")
    return main["helper"], lambda: add(main, "rate")


@kind()
def list_that_is_a_global_of_a_helper() -> Made:
    main = script("rates = [1]\ndef helper(): return [*rates]")
    return main["helper"], lambda: main["rates"].append(1)


@kind()
def global_read_by_globals() -> Made:
    main = script("rates = [1]\ndef helper(): return [*globals()['rates']] if rates else 0")
    return main["helper"], lambda: main["rates"].append(1)


@kind(read=lambda obj: repr(obj(np.arange(3)).tolist()))
def vectorize_whose_function_reads_a_global() -> Made:
    main = script("rate = 1\ndef g(x): return x * rate\nobj = np.vectorize(g)")
    return main["obj"], lambda: add(main, "rate")


@kind()
def helper_wrapped_by_functools() -> Made:
    main = script(
        "import functools\nrate = 1\ndef wrapped(f):\n    @functools.wraps(f)\n    def inner(): return f()\n"
        "    return inner\n@wrapped\ndef helper(): return rate"
    )
    return main["helper"], lambda: add(main, "rate")


@kind()
def partial_of_a_list() -> Made:
    rates = [1]
    obj = functools.partial(lambda a, b: 0, rates, b={"k": rates})
    return obj, lambda: rates.append(1)


@kind()
def partial_keywords() -> Made:
    obj = functools.partial(lambda b: 0, b=1)
    return obj, lambda: add(obj.keywords, "b")


@kind()
def bound_method() -> Made:
    model = plain_class()()
    return model.scaled, lambda: setattr(model, "kept", model.kept + 1)


@kind(read=lambda obj: repr(obj(slice(None))))
def bound_method_of_a_built_in() -> Made:
    rates = [1]
    return rates.__getitem__, lambda: rates.append(1)


@kind()
def module_made_by_hand() -> Made:
    obj = types.ModuleType("made_by_hand")
    obj.rate = 1
    return obj, lambda: setattr(obj, "rate", obj.rate + 1)


@kind()
def list_in_a_module_made_by_hand() -> Made:
    obj = types.ModuleType("made_by_hand")
    obj.rates = [1]
    return obj, lambda: obj.rates.append(1)


# ----- generators, and libraries'

simple("numpy Generator", lambda: np.random.default_rng(1), lambda a, n: a.random())
simple("numpy RandomState", lambda: np.random.RandomState(1), lambda a, n: a.random_sample(), sees=BY_PICKLE)
simple(
    "numpy Generator, its bit generator set",
    lambda: np.random.default_rng(1),
    lambda a, n: setattr(a.bit_generator, "state", np.random.default_rng(n + 1).bit_generator.state),
)
simple("random.Random", lambda: random.Random(1), lambda a, n: a.random())
simple("random.Random, seed", lambda: random.Random(0), lambda a, n: a.seed(n))


@kind(needs="scipy.sparse")
def sparse_data() -> Made:
    import scipy.sparse

    obj = scipy.sparse.csr_array(np.eye(3))
    return obj, lambda: add(obj.data, 1)


@kind(needs="scipy.sparse")
def sparse_structure() -> Made:
    import scipy.sparse

    obj = scipy.sparse.lil_array((4, 4))
    places = itertools.product(range(4), range(4))
    return obj, lambda: put(obj, next(places), 1)


@kind(BY_PICKLE, needs="sklearn")
def estimator_fitted_again() -> Made:
    from sklearn.linear_model import LinearRegression

    x, numbers = np.arange(8.0).reshape(4, 2) ** 2, itertools.count(2)
    obj = LinearRegression().fit(x, x[:, 0])
    return obj, lambda: obj.fit(x, x[:, 0] * next(numbers))


@kind(BY_PICKLE, needs="sklearn", read=lambda obj: repr(obj.predict(np.eye(2)).tolist()))
def forest_fitted_again() -> Made:
    from sklearn.tree import DecisionTreeRegressor

    x, numbers = np.eye(2), itertools.count(2)
    obj = DecisionTreeRegressor(random_state=0).fit(x, x[:, 0])
    return obj, lambda: obj.fit(x, x[:, 0] * next(numbers))


@kind(BY_PICKLE, needs="sklearn")
def estimator_fitted_on() -> Made:
    from sklearn.linear_model import SGDRegressor

    x, numbers = np.eye(2), itertools.count(2)
    obj = SGDRegressor(random_state=0).fit(x, x[:, 0])
    return obj, lambda: obj.partial_fit(x, x[:, 0] * next(numbers))


@kind(needs="pandas", read=lambda obj: text(obj.to_numpy()))
def frame_value() -> Made:
    import pandas

    obj = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    return obj, lambda: add(obj.loc, (0, "a"))


@kind(needs="pandas", read=lambda obj: repr([*obj.columns]) + text(obj.to_numpy()))
def frame_column() -> Made:
    import pandas

    obj = pandas.DataFrame({"a": [1.0, 2.0]})
    return obj, lambda: put(obj, f"b{obj.shape[1]}", 1.0)


def torch_tensor(nbytes: int = 32) -> Any:
    import torch

    return torch.zeros(nbytes // 4)


simple("tensor, in place", torch_tensor, lambda a, n: a.add_(1), needs="torch")
simple("tensor, item", torch_tensor, lambda a, n: put(a, 1, n), needs="torch")
simple("tensor, by .data", torch_tensor, lambda a, n: a.data.add_(1), needs="torch", sees=IN_TURN, bound=2)
simple("tensor, by .numpy()", torch_tensor, lambda a, n: add(a.numpy(), 1), needs="torch", sees=IN_TURN, bound=2)
simple(
    "tensor of 256 KB, by .numpy()", lambda: torch_tensor(256 * KB), lambda a, n: add(a.numpy(), 5003 * n),
    needs="torch", read=lambda a: repr(a.sum().item()), **in_turn(256 * KB),
)  # fmt: skip
VIEW = {"needs": "torch", "sees": IN_TURN, "bound": 2, "read": lambda a: repr(a.tolist())}
simple("tensor, every other element, by .data", lambda: torch_tensor()[::2], lambda a, n: a.data.add_(1), **VIEW)
simple("tensor, every other element, by .numpy()", lambda: torch_tensor()[::2], lambda a, n: add(a.numpy(), 1), **VIEW)
simple("tensor, transposed", lambda: torch_tensor().reshape(2, 4).t(), lambda a, n: add(a.numpy(), (1, 1)), **VIEW)
simple("tensor, windows", lambda: torch_tensor().unfold(0, 3, 1), lambda a, n: a.data[0].add_(1), **VIEW)
simple("tensor, conjugate", lambda: (torch_tensor() + 1j).conj(), lambda a, n: a.data.mul_(2), **VIEW)
simple("tensor, negative", lambda: (torch_tensor() + 1j).conj().imag, lambda a, n: a.data.mul_(2), **VIEW)
simple("tensor, expanded", lambda: torch_tensor(4).expand(3), lambda a, n: a.data[:1].add_(1), **VIEW)
simple(
    "tensor of 128 KB, every other element", lambda: torch_tensor(256 * KB)[::2],
    lambda a, n: add(a.numpy(), 5003 * n), needs="torch", read=lambda a: repr(a.sum().item()), **in_turn(256 * KB),
)  # fmt: skip
simple(
    "tensor, attribute", torch_tensor, lambda a, n: setattr(a, "scale", n), needs="torch",
    read=lambda a: repr(getattr(a, "scale", 0)),
)  # fmt: skip


def _generator() -> Any:
    import torch

    return torch.Generator().manual_seed(1)


def _draw(generator: Any) -> Any:
    import torch

    return torch.rand(1, generator=generator)


GENERATOR = {"needs": "torch", "read": lambda a: repr(a.get_state().tolist())}
simple("torch generator, seed", _generator, lambda a, n: a.manual_seed(n + 1), **GENERATOR)
simple("torch generator, draws", _generator, lambda a, n: _draw(a), **GENERATOR)


def read_module(model: Any) -> str:
    state = {key: value.tolist() for key, value in model.state_dict().items()}
    return repr([state, [module.training for module in model.modules()]])


def torch_model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))


def _data(model: Any) -> Any:
    return model[0].weight.data


MODEL = {"needs": "torch", "read": read_module}
simple(
    "torch module, parameter",
    torch_model,
    lambda a, n: _data(a).copy_(_data(a) + n),
    **{**MODEL, "sees": IN_TURN, "bound": 2},
)
simple(
    "torch module, parameter without grad",
    torch_model,
    lambda a, n: a.load_state_dict({k: v + 1 for k, v in a.state_dict().items()}),
    **MODEL,
)
simple("torch module, buffer", torch_model, lambda a, n: a[1].running_mean.fill_(n), **MODEL)
simple(
    "torch module, training flag", torch_model, lambda a, n: (a.train(n % 2 == 0), a[1].running_var.fill_(n)), **MODEL
)
simple(
    "torch module, flag of a part",
    lambda: __import__("torch").nn.Sequential(*[__import__("torch").nn.Dropout() for _ in range(20)]),
    lambda a, n: a[n].eval(),
    **MODEL,
)
simple(
    "torch module, attribute of a parameter", torch_model, lambda a, n: setattr(a[0].weight, "scale", n),
    needs="torch", read=lambda a: repr(getattr(a[0].weight, "scale", 0)),
)  # fmt: skip
simple("torch module, part", torch_model, lambda a, n: a.add_module(f"more{n}", torch_model()), **MODEL)


# ----- nested in each other


def boxed(**attributes: Any) -> Any:
    box = plain_class()()
    vars(box).update(attributes)
    return box


WRAPS: dict[str, Callable[[Any], Any]] = {
    "list": lambda obj: [0, obj],
    "tuple": lambda obj: (0, obj),
    "dict": lambda obj: {"a": 0, "k": obj},
    "deque": lambda obj: deque([obj, 0]),
    "instance": lambda obj: boxed(k=obj),
    "namespace": lambda obj: SimpleNamespace(k=obj),
    "partial": lambda obj: functools.partial(len, obj),
    "closure": lambda obj: lambda: obj,
    "objects": lambda obj: object_array(obj, None),
    "class": lambda obj: type("Holder", (), {"__module__": "__main__", "k": staticmethod(lambda: obj)}),
    "OrderedDict": lambda obj: OrderedDict(k=obj),
    "defaultdict": lambda obj: defaultdict(list, k=obj),
    "UserDict": lambda obj: UserDict(k=obj),
}


NESTINGS = (
    ("list",),
    ("dict",),
    ("instance",),
    ("closure",),
    ("objects",),
    ("class",),
    ("tuple", "list"),
    ("namespace", "dict"),
    ("partial", "closure"),
    ("UserDict", "list"),
    ("instance", "dict", "list"),
    ("list", "tuple", "namespace"),
    ("defaultdict", "deque", "instance"),
    ("closure", "OrderedDict", "objects"),
    ("instance", "instance", "instance"),
)


def nested(obj: Any, wraps: tuple[str, ...]) -> Any:
    """Return ``obj`` in containers, named from outside in."""
    for each in reversed(wraps):
        obj = WRAPS[each](obj)
    return obj
