"""The table of kinds of captured objects: a program that makes one, and a line that changes it again and again.

The program binds ``held``. After each ``change`` the object reads (``contents.text``) otherwise than before; ``n`` in
it is the number of the change, from 1 on. Classes are made by the programs, so that they travel by value; modules have
their own tests.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable
from typing import Any

from contents import text

PRELUDE = """
import array, collections, copy, ctypes, dataclasses, decimal, functools, io, itertools, random, types, typing, warnings
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from tempfile import TemporaryFile
from types import SimpleNamespace

import numpy as np
from contents import text

KB, MB = 1024, 1024 * 1024

def array_of(nbytes): return np.arange(nbytes // 8, dtype=np.float64) % 1000

def read_only(array):
    array = array.view()
    array.flags.writeable = False
    return array

def of_file(size):
    with TemporaryFile() as file:  # the mapping outlives it
        return np.memmap(file, "f8", "w+", 0, (size,))

def objects(*values):
    array = np.empty(len(values), object)
    for position, value in enumerate(values): array[position] = value
    return array

def reshape(array, rows):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy 2.5
        array.shape = (rows, -1)

def turn(array):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy 2.4
        array.strides = array.strides[::-1]

class Model:
    kept = 0
    def scaled(self): return self.kept
    def __getitem__(self, k): return k

def helper(a=1, *, b=2): return a, b, getattr(helper, "rate", 0)
"""

SIMPLE: dict[str, tuple[str, ...]] = {
    # -- arrays
    "array, item": ("np.zeros(4)", "held[1] += 1"),
    "array, item to NaN and back": ("np.zeros(4)", "held[0] = np.nan; held[1] += 1"),
    "array of 8 KB, last item": ("array_of(8 * KB)", "held[-1] += 1"),
    "array of 100 KB, dense": ("array_of(100 * KB)", "held += 1"),
    "array of 100 KB, sparse": ("array_of(100 * KB)", "held[701 * n] += 1"),
    "array of 10 MB, dense": ("array_of(10 * MB)", "held += 1"),
    "array of 10 MB, sparse": ("array_of(10 * MB)", "held[100_003 * n] += 1"),
    "array, 0-d": ("np.array(1.0)", "held[()] += 1"),
    "array, Fortran order": ("np.asfortranarray(np.zeros((3, 4)))", "held[1, 2] += 1"),
    "array, square, strides": ("np.arange(9.0).reshape(3, 3)", "turn(held)"),
    "array of 100 KB, square, strides": ("array_of(8 * 112 * 112).reshape(112, 112)", "turn(held)"),
    "array, strided view": ("np.zeros(20)[::3]", "held[2] += 1"),
    "array, strided view, in its base": ("np.zeros(20)[::3]", "held.base[3] += 1"),
    "array, read-only view, in its base": ("np.broadcast_to(np.zeros(1), 5)", "held.base[0] += 1"),
    "array, read-only, in its base": ("read_only(np.zeros(4))", "held.base[1] += 1"),
    "array of a file": ("of_file(4)", "held[1] += 1"),
    "array of a file, dense": ("of_file(9999)", "held.fill(n)"),
    "array, structured": ("np.zeros(3, [('a', 'i4'), ('b', 'f8')])", "held['b'][1] += 1"),
    "array, texts": ("np.array(['aaa', 'bbb'])", "held[0] = f'{n:03}'"),
    "array, dates": ("np.zeros(3, 'M8[D]')", "held[1] += np.timedelta64(1, 'D')", "text(held.astype('i8'))"),
    "array, masked: data": ("np.ma.masked_array([1.0, 2], [0, 1])", "held.data[0] += 1"),
    "array, masked: mask": ("np.ma.masked_array(np.zeros(9), np.zeros(9, bool))", "held[n % 9] = np.ma.masked"),
    "array, shape": ("np.zeros(64)", "reshape(held, 2**n)"),
    "array, structured: a row of it": ("np.zeros(3, [('a', 'i4'), ('b', 'f8')])[1]", "held['b'] += 1"),
    "array, structured: a row, in the array": ("np.zeros(3, [('a', 'f8')])[1]", "held.base['a'] += 1"),
    "recarray: a row of it": ("np.rec.array([(1.0,)], [('a', 'f8')])[0]", "held.a += 1"),
    "list of rows of a structured array": ("[*np.zeros(3, [('a', 'f8')])]", "held[2]['a'] += 1"),
    "array of objects, item": ("objects('a', None)", "held[1] = n"),
    "array of objects, in an element": ("objects({'k': 1}, 'a')", "held[0]['k'] += 1"),
    # -- collections
    "list, item": ("[1, 2, 3]", "held[1] += 1"),
    "list, pop": ("[*range(20)]", "held.pop()"),
    "list, order": ("['a', 'b', 'c', 'd', 'e']", "held.append(held.pop(0))"),
    "list, equal element of another type": ("[1, 2]", "held[0] = [1.0, True, 1, 1 + 0j][n % 4]"),
    "list, a long text": ("['a' * 1000]", "held[0] = 'a' * 999 + str(n)"),
    "list, nested": ("[[1, [2]], 3]", "held[0][1].append(n)"),
    "list, element replaced by an equal one": ("[[1], [1]]", "held[0] = [1]; held[0][0] += n"),
    "list, two names become one": ("[[1], [1]]", "held[0] = held[1]; held[1].append(n)"),
    "list, in itself": ("(lambda a: a.append(a) or a)([1])", "held[0] += 1"),
    "list of 5 500, append": ("[*range(5_500)]", "held.append(n)"),
    "list of 5 500, item": ("[*range(5_500)]", "held[117 * n] += 0.5"),
    "list of 5 500, pop": ("[*range(5_500)]", "held.pop(797 * n)"),
    "list of 1 600 tuples, item": ("[(i, str(i)) for i in range(1_600)]", "held[797 * n] = (n, 'new')"),
    "list of 1 600 tuples, pop": ("[(i, str(i)) for i in range(1_600)]", "held.pop(797 * n)"),
    "list of 1 600 dicts": ("[{'k': i} for i in range(1_600)]", "held[797 * n]['k'] -= 1"),
    "list of 1 600 instances": ("[SimpleNamespace(k=i) for i in range(1_600)]", "held[37 * n].k -= 1"),
    "list of 1 600 small arrays": ("[np.zeros(3) for _ in range(1_600)]", "held[1500][0] += 1"),
    "tuple holding a list": ("(1, [2])", "held[1].append(n)"),
    "dict, value": ("{'a': 1, 'b': 2}", "held['b'] += 1"),
    "dict, key added": ("{'a': 1}", "held[n] = n"),
    "dict, key removed": ("dict.fromkeys(range(20))", "held.popitem()"),
    "dict, key renamed": ("{'rate 0': 0.1, 'b': 2}", "held[f'rate {n}'] = held.pop(f'rate {n - 1}')"),
    "dict, last key renamed": ("{'b': 2, 'k0': object}", "held[f'k{n}'] = held.pop(f'k{n - 1}')", "repr([*held])"),
    "dict, order": ("{'a': 1, 'b': 2, 'c': 3, 'd': 4, 'e': 5}", "k = next(iter(held)); held[k] = held.pop(k)"),
    "dict, values swapped": ("{'a': 1, 'b': 2, 'c': 3}", "held.update(a=held['b'] + 3, b=held['a'])"),
    "dict, key True": ("{True: 1, None: 2}", "held[True] += 1", "repr(held[True])"),
    "dict, key None": ("{True: 1, None: 2}", "held[None] += 1", "repr(held[None])"),
    "dict, key 1 becomes True": ("{1: 0}", "held[[1, True, 1.0][n % 3]] = held.popitem()[1] + 1"),
    "dict, nested": ("{'a': {'b': {'c': 1}}}", "held['a']['b']['c'] += 1"),
    "dict of 5 500, value": ("dict.fromkeys(range(5_500), 0)", "held[4999 * n % 5_500] += 1"),
    "dict of 5 500, key added": ("dict.fromkeys(range(5_500), 0)", "held[f'new {n}'] = n"),
    "dict of 5 500, key removed": ("dict.fromkeys(range(5_500), 0)", "del held[797 * n]"),
    "dict of 1 600 lists": ("{i: [i] for i in range(1_600)}", "held[797 * n].append(n)"),
    "dict of 1 600 lists, item": ("{i: [i] for i in range(1_600)}", "held[797 * n][0] -= 1"),
    "dict of 1 600 lists, last key": (
        "{f'k{i}': [i] for i in range(1_600)}", "held[f'new {n}'] = held.pop([*held][-1])"
    ),
    "list of 1 600 lists, a number in the place of one": (
        "[[i, i + 0.5] for i in range(1_600)]", "del held[7][-1]; held[7].append(n * 1.5)"
    ),
    "dict of 1 600 dicts, a number in the place of one": (
        "{i: {'a': i + 0.5} for i in range(1_600)}", "held[7].clear(); held[7]['a'] = n * 1.5"
    ),
    "set of 5 500, one for another": ("{*range(5_500)}", "held.discard(797 * n); held.add(-n)"),
    "deque of 5 500, item": ("deque(range(5_500))", "held[797 * n] += 0.5"),
    "dict view": ("UserDict(a=1)", "held[n] = n", "repr([*held.items()])"),
    "set, add": ("{1}", "held.add(n + 1)"),
    "set, one for another": ("{'0', 'x'}", "held.discard(str(n - 1)); held.add(str(n))"),
    "frozenset in a list": ("[frozenset({1})]", "held[0] = held[0] | {n + 1}"),
    "deque, append": ("deque([1], maxlen=3)", "held.append(n)"),
    "deque, rotate": ("deque([1, 2, 3, 4, 5, 6])", "held.rotate(1)"),
    "deque, in an element": ("deque([[1]])", "held[0].append(n)"),
    "bytearray": ("bytearray(b'abc')", "held[1] += 1"),
    "bytearray of 100 KB": ("bytearray(100 * KB)", "held[5003 * n] += 1", "str(sum(held))"),
    "OrderedDict, move_to_end": ("OrderedDict(a=1, b=2, c=3, d=4)", "held.move_to_end(next(iter(held)))"),
    "defaultdict, value": ("defaultdict(int)", "held['a'] += 1"),
    "defaultdict of lists": ("defaultdict(list, a=[1])", "held['a'].append(n)"),
    "defaultdict, its factory": ("defaultdict(str)", "held.default_factory = [str, int][n % 2]", "str(held)"),
    "Counter": ("Counter('aab')", "held.update('b')"),
    "UserDict": ("UserDict(a=1)", "held['a'] += 1"),
    "ChainMap, last": ("ChainMap({'a': 1}, {'b': 2})", "held.maps[1]['b'] += 1"),
    "ChainMap, another map": ("ChainMap({'a': 1})", "held.maps.append({n: n})"),
    "array.array": ("array.array('d', [1, 2])", "held[0] += 1", "repr([*held])"),
    "memoryview": ("memoryview(np.arange(4.0))", "held[0] += 1", "repr([*held])"),
    "ctypes number": ("ctypes.c_double(1)", "held.value += n", "repr(held.value)"),
    "BytesIO": ("io.BytesIO()", "held.write(b'a')", "repr(held.getvalue())"),
    "decimal context": ("decimal.Context(prec=5)", "held.prec = 5 + n", "str(held.sqrt(2))"),
    # -- instances, functions, generators
    "SimpleNamespace": ("SimpleNamespace(a=1)", "held.a += 1"),
    "SimpleNamespace, attribute added": ("SimpleNamespace()", "setattr(held, f'a{n}', n)"),
    "SimpleNamespace, attribute removed": ("SimpleNamespace(**dict.fromkeys('abcdef'))", "delattr(held, ' abcdef'[n])"),
    "exception": ("ValueError('a', [1])", "held.args[1].append(n)", "repr(held.args)"),
    "instance, attribute": ("Model()", "held.kept += 1"),
    "class, attribute": ("Model", "held.kept += 1"),
    "class, attribute, behind an instance": ("Model()", "Model.kept += 1"),
    "class, method": ("Model()", "Model.scaled = eval(f'lambda self: {n}')"),
    "class, dunder": ("Model()", "Model.__getitem__ = eval(f'lambda self, k: {n + 1}')", "repr(held[0])"),
    "class, list in it": ("Model", "held.items = [*getattr(held, 'items', ())]; held.items.append(n)"),
    "function, attribute": ("helper", "held.rate = n"),
    "function, list in an attribute": ("helper", "held.rate = getattr(held, 'rate', []); held.rate.append(n)"),
    "function, defaults": ("helper", "held.__defaults__ = (n + 1,)"),
    "function, keyword defaults": ("helper", "held.__kwdefaults__['b'] += 1"),
    "function, mutable default": ("lambda seen=[1]: [*seen]", "held.__defaults__[0].append(n)"),
    "function, code": ("lambda: 0", "held.__code__ = eval(f'lambda: {n}').__code__"),
    "function, variable of its closure": ("(lambda k: lambda: k)(0)", "held.__closure__[0].cell_contents = n"),
    "function, list in its closure": ("(lambda k: lambda: [*k])([1])", "held.__closure__[0].cell_contents.append(n)"),
    "partial of lists": ("functools.partial(len, [1], b=[1])", "held.args[0].append(1); held.keywords['b'].append(n)"),
    "partial, keywords": ("functools.partial(lambda b: 0, b=1)", "held.keywords['b'] += 1"),
    "bound method": ("Model().scaled", "held.__self__.kept += 1"),
    "bound method of a built-in": ("[1].__getitem__", "held.__self__.append(n)", "repr(held(slice(None)))"),
    "module made by hand": ("types.ModuleType('made_by_hand')", "held.rate = n"),
    "numpy Generator": ("np.random.default_rng(1)", "held.random()"),
    "numpy RandomState": ("np.random.RandomState(1)", "held.random_sample()"),
    "numpy Generator, its bit generator set": (
        "np.random.default_rng(1)", "held.bit_generator.state = np.random.default_rng(n + 1).bit_generator.state",
    ),
    "random.Random": ("random.Random(1)", "held.random()"),
    "random.Random, seed": ("random.Random(0)", "held.seed(n)"),
    "iterator of a list": ("iter([*range(9)])", "next(held)", "repr(held.__reduce__())"),
}  # fmt: skip

PROGRAMS: dict[str, str] = {
    # -- classes of its own behind the objects
    "array subclass with an attribute": """
        class Named(np.ndarray):
            unit = "m"
            def __reduce__(self): return named, (type(self), np.asarray(self).copy(), self.unit)
        def named(cls, data, unit):
            held = data.view(cls)
            held.unit = unit
            return held
        held = named(Named, np.zeros(3), "m")
        change: held.unit += "m"
        """,
    "array subclass by NumPy's guide": """
        class Named(np.ndarray):
            def __array_finalize__(self, obj): self.unit = getattr(obj, "unit", "")
        held = np.arange(3.0).view(Named)
        held.offsets = [1.0]
        change: held.unit += "m"; held.offsets.append(n); held[0] += 1
        read: repr((held.unit, held.offsets, held.tolist()))
        """,
    "array.array with an attribute": """
        class Named(array.array): pass
        held = Named("d", [1.0])
        held.unit = "m"
        change: held[0] += 1; held.unit += "m"
        read: repr([*held, *vars(held).items()])
        """,
    "read-only view of a dict": """
        behind = {"a": 1}
        held = types.MappingProxyType(behind)
        change: behind["a"] += 1
        read: repr([*held.items()])
        """,
    "dict subclass": """
        class AttrDict(dict):
            __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__
        held = AttrDict(rate=1, name="a")
        change: held.rate += 1
        """,
    "dict subclass, by attributes": """
        class AttrDict(dict):
            def __getattr__(self, name):
                try: return self[name]
                except KeyError: raise AttributeError(name) from None
        held = AttrDict(inner=AttrDict(rate=1))
        change: held["inner"]["rate"] += 1
        read: repr(held.inner.rate)
        """,
    "dict subclass with attributes of its own": """
        class Config(dict): pass
        held = Config(a=1)
        held.version = 1
        change: held.version += 1
        """,
    "dict subclass whose state is a list of its own": """
        class Config(dict):
            def __reduce__(self): return Config, (), (self.log,), None, iter(self.items())
            def __setstate__(self, state): (self.log,) = state
        held = Config(a=1)
        held.log = [1]
        change: held.log.append(n)
        """,
    "containers that are never true": """
        class Table(dict):
            def __bool__(self): return False
        class Row(list):
            def __bool__(self): return False
        held = [Table(), Row()]
        change: held[0][n] = n; held[1].append(n)
        """,
    "list and set subclasses": """
        class Path(list): pass
        class Tags(set): pass
        held = Path([1, Tags({1})])
        held.log = []
        change: held.append(n); held[1].add(n + 1); held.log.append(n)
        """,
    "namedtuples": """
        class Point(typing.NamedTuple):
            x: typing.Any
        Pair = collections.namedtuple("Pair", "x y")
        held = Pair([1], Point(SimpleNamespace(k=[1])))
        change: held.x.append(n); held.y.x.k.append(n)
        """,
    "namedtuple with an attribute": """
        class Point(collections.namedtuple("Point", "x y")): pass
        held = Point([1], {})
        held.label = "a"
        change: held.x.append(n); held.y[n] = 0
        """,
    "dataclasses": """
        @dataclasses.dataclass
        class Layer:
            width: int = 1
        @dataclasses.dataclass(frozen=True)
        class Config:
            rates: list
        @dataclasses.dataclass(slots=True)
        class Small:
            rate: float = 1.0
        held = [Layer(), Config([1]), Small()]
        change: held[1].rates.append(n) if n % 3 == 1 else setattr(held[n % 3], ["width", "", "rate"][n % 3], n)
        """,
    "slots": """
        class Base:
            __slots__ = ("rate",)
        class Slots(Base):
            __slots__ = ("items", "a", "b", "c")
        held = Slots()
        held.rate, held.items = 1, [1]
        change: held.rate += 1; held.items.append(n); setattr(held, "abc"[n % 3], n)
        """,
    "slots, filled and emptied": """
        class Slots:
            __slots__ = ("a", "b", "c")
        held = Slots()
        change: hasattr(held, "a") and delattr(held, "a") or setattr(held, "abc"[n % 2 and n % 3], n)
        """,
    "instance in a circle": """
        held = Model()
        held.child = SimpleNamespace(parent=held, items=[1])
        change: held.child.items.append(n)
        """,
    "attribute of a base": """
        class Derived(Model): pass
        held = Derived()
        change: Model.kept += 1
        """,
    "attribute of a metaclass": """
        class Meta(type):
            factor = 1
        class Own(metaclass=Meta): pass
        held = Own
        change: Meta.factor += 1
        """,
    "class of an object": """
        def numbered(number): return type("Own", (), {"__module__": "__main__", "factor": number})
        held = numbered(0)()
        held.w = 1
        change: held.__class__ = numbered(n)
        """,
    "bases of a class": """
        def numbered(number): return type("Base", (), {"__module__": "__main__", "factor": number})
        class Own(numbered(0)): pass
        held = Own()
        change: Own.__bases__ = (numbered(n),)
        """,
    "descriptors": """
        rates = [1]
        def shown(): return [*rates]
        class Descriptor:
            rate = 0
            def __get__(self, obj, owner=None): return self.rate
        class Calling(Descriptor):
            def __get__(self, obj, owner=None): return lambda: self.rate
        of_class, of_call = Descriptor(), Calling()
        class Own:
            rate, scaled, held, __call__ = 0, property(lambda self: shown()), of_class, of_call
            bound = functools.partialmethod(lambda self, factor: [*factor], rates)
            made, counted = staticmethod(lambda: [*rates]), classmethod(lambda cls: cls.rate)
        held = Own()
        change: rates.append(n) if n % 2 else setattr([of_class, of_call, Own][n // 2 % 3], "rate", n)
        read: repr((held.scaled, held.held, held(), held.bound(), held.made(), held.counted()))
        """,
    "instance with __getattr__": """
        class Proxy:
            def __init__(self): self.__dict__["_held"] = {"rate": 1}
            def __getattr__(self, name):
                if name.startswith("_"): raise AttributeError(name)
                return self._held[name]
        held = Proxy()
        change: vars(held)["_held"]["rate"] += 1
        read: repr(held.rate)
        """,
    "instance, order of attributes": """
        held = Model()
        held.a, held.b, held.c = 1, 2, 3
        change: value = held.__dict__.pop("abc"[n % 3]); setattr(held, "abc"[n % 3], value)
        """,
    "namespace, order of attributes": """
        held = SimpleNamespace(a=1, b=2, c=3)
        change: value = held.__dict__.pop("abc"[n % 3]); setattr(held, "abc"[n % 3], value + 1)
        """,
    "instance with __getstate__": """
        class Own:
            w = ()
            def __getstate__(self): return {"w": [*self.w]}
            def __setstate__(self, state): self.w = state["w"]
        held = Own()
        held.w = [1]
        change: held.w.append(n)
        """,
    "frame of pandas, which copies its attrs": """
        import pandas as pd
        held = pd.DataFrame({"a": [1.0, 2.0]})
        change: held.attrs["n"] = n
        read: repr(held.attrs)
    """,
    "instance with __getstate__, a key that equals the one before": """
        class Own:
            def __init__(self): self.w = {1: 2}
            def __getstate__(self): return {"w": {**self.w}}
        held = Own()
        change: held.w = {(1, True, 1.0)[n % 3]: 2}
    """,
    "instance with __getstate__, a slice that equals the one before": """
        class Own:
            def __init__(self): self.start = 1
            def __getstate__(self): return {"rows": slice(self.start)}
            def __setstate__(self, state): self.start = state["rows"].stop
        held = Own()
        change: held.start = (1, True, 1.0)[n % 3]
    """,
    "instance with __reduce__": """
        class Own:
            def __init__(self, rate): self.rate = rate
            def __reduce__(self): return Own, (self.rate,)
        held = Own(1)
        change: held.rate += 1
        """,
    "instance with __reduce__ and its attributes": """
        class Own:
            def __init__(self, rates): self.rates = rates
            def __reduce__(self): return Own, (self.rates,), self.__dict__
        held = Own([1])
        change: held.rates.append(n)
        """,
    "instance with __getnewargs__ that returns its list": """
        class Own:
            def __new__(cls, rates):
                held = object.__new__(cls)
                held.rates = rates
                return held
            def __getnewargs__(self): return (self.rates,)
        held = Own([1])
        change: held.rates.append(n)
        """,
    # -- objects whose own code copies what they hold; more below
    "dict subclass whose __setstate__ copies its attributes": """
        class Config(dict):
            def __getstate__(self): return {"log": self.log}
            def __setstate__(self, state): self.log = [*state["log"]]
        held = Config(a=1)
        held.log = [1]
        change: held.log.append(n)
    """,
    "dict subclass whose __setstate__ copies its attributes, an item": """
        class Config(dict):
            def __getstate__(self): return {"log": self.log}
            def __setstate__(self, state): self.log = [*state["log"]]
        held = Config(a=1)
        held.log = [1]
        change: held["b"] = n
    """,
    "instances, one of which copies the other": """
        class Own:
            def __init__(self, held): self.held = held
            def __getstate__(self): return {"held": self.held}
            def __setstate__(self, state): self.held = copy.deepcopy(state["held"])
        shared = SimpleNamespace(log=array_of(100 * KB))
        held = [Own([Own(shared)]), shared]
        change: held[1].log[3] += 1; held.append(n)
        read: repr((held[0].held[0].held.log[3], held[1].log[3], held[2:]))
    """,
    "instance that copies itself through another one": """
        class Own:
            def __init__(self): self.log, self.other = [1], None
            def __getstate__(self): return {"log": self.log, "other": self.other}
            def __setstate__(self, state): self.log, self.other = [*state["log"]], state["other"]
        held = Own()
        held.other = Own()
        held.other.other = held
        change: held.other.log.append(n)
        read: repr((held.log, held.other.log))
    """,
    "named tuples of functions that name each other": """
        class Case(typing.NamedTuple):
            body: typing.Any
            log: typing.Any
        def first(n=1): return [*rates], len(held), second
        def second(): return [*rates], first
        rates = [1]
        held = {"first": Case(first, rates), "second": Case(second, [first, second])}
        change: rates.append(n)
    """,
    "new instance that copies an object that has changed": """
        class Own:
            def __init__(self, held): self.held = held
            def __getstate__(self): return {"held": self.held}
            def __setstate__(self, state): self.held = copy.deepcopy(state["held"])
        shared = SimpleNamespace(log=[1])
        held = [shared, None]
        change: shared.log.append(n); held[1] = Own(shared)
        read: repr((held[0].log, held[1] and held[1].held.log))
    """,
    # -- what functions name
    "global of a helper of a helper": """
        rate, rates = 1, [1]
        def inner(): return rate, [*rates], [*globals()["rates"]]
        def held(): return inner()
        change: rate += 1; rates.append(n)
        """,
    "helper wrapped by functools": """
        rate = 1
        def wrapped(f):
            @functools.wraps(f)
            def inner(): return f()
            return inner
        @wrapped
        def held(): return rate
        change: rate += 1
        """,
    "vectorize whose function reads a global": """
        rate = 1
        def scaled(x): return x * rate
        held = np.vectorize(scaled)
        change: rate += 1
        read: repr(held(np.arange(3)).tolist())
        """,
    # -- libraries'
    "scipy.sparse, data and structure": """
        import scipy.sparse
        held = [scipy.sparse.csr_array(np.eye(3)), scipy.sparse.lil_array((4, 4))]
        change: held[0].data += 1; held[1][n % 4, n // 4] = n
        """,
    "sklearn, fitted again and fitted on": """
        from sklearn.linear_model import LinearRegression, SGDRegressor
        from sklearn.tree import DecisionTreeRegressor
        x = np.eye(2)
        held = [LinearRegression(), DecisionTreeRegressor(random_state=0), SGDRegressor(random_state=0)]
        change: [getattr(model, way)(x, [n, 0.0]) for model, way in zip(held, ["fit", "fit", "partial_fit"])]
        read: text([model.predict(x) if hasattr(model, "n_features_in_") else None for model in held])
        """,
    "pandas, value and column": """
        import pandas
        held = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
        change: held.loc[0, "a"] += 1; held[f"b{n}"] = 1.0
        read: repr([*held.columns]) + text(held.to_numpy())
        """,
}

COPIED = {
    "a dict": ("{1: 2}", "held.held[n] = n"),
    "a list": ("[1]", "held.held.append(n)"),
    "a small array": ("np.zeros(4)", "held.held[1] += 1"),
    "an array of 100 KB": ("array_of(100 * KB)", "held.held[1] += 1"),
    "a list of arrays of 100 KB": ("[array_of(100 * KB), np.zeros(3)]", "held.held[0][1] += 1"),
    "an object": ("SimpleNamespace(deep=[[1]])", "held.held.deep[0].append(n)"),
    "such an object": ("Own({'deep': Own([1])})", "held.held.held['deep'].held.append(n)"),
}
BY_STATE = """
class Own:
    def __init__(self, held): self.held = held
    def __getstate__(self): return {"held": self.held, "n": 0}
    def __setstate__(self, state): self.held = copy.deepcopy(state["held"])
"""
BY_CONSTRUCTOR = """
class Own:
    def __init__(self, held): self.held = copy.deepcopy(held)
    def __reduce__(self): return Own, (self.held,)
"""
for _what, (_value, _change) in COPIED.items():
    for _who, _own in ("__setstate__", BY_STATE), ("constructor", BY_CONSTRUCTOR):
        PROGRAMS[f"instance whose {_who} copies {_what}"] = f"{_own}held = Own({_value})\nchange: {_change}\n"

TORCH: dict[str, tuple[str, ...]] = {
    "tensor, in place": ("torch.zeros(8)", "held.add_(1)"),
    "tensor, by .data": ("torch.zeros(8)", "held.data.add_(1)"),
    "tensor, by .numpy()": ("torch.zeros(8)", "held.numpy()[1] += 1"),
    "tensor of 256 KB, by .numpy()": ("torch.zeros(64 * KB)", "held.numpy()[5003 * n] += 1", "repr(held.sum().item())"),
    "tensor, every other element": ("torch.zeros(8)[::2]", "held.data.add_(1)", "repr(held.tolist())"),
    "tensor, conjugate": ("(torch.zeros(8) + 1j).conj()", "held.data.mul_(2)", "repr(held.tolist())"),
    "tensor, expanded": ("torch.zeros(1).expand(3)", "held.data[:1].add_(1)", "repr(held.tolist())"),
    "tensor, attribute": ("torch.zeros(8)", "held.scale = n", "repr(getattr(held, 'scale', 0))"),
    "torch generator, seed": ("torch.Generator()", "held.manual_seed(n + 1)", "repr(held.get_state().tolist())"),
    "torch generator, draws": ("torch.Generator()", "torch.rand(1, generator=held)", "repr(held.get_state().tolist())"),
    "torch module, parameter": ("model()", "held[0].weight.data.add_(n)", "state(held)"),
    "torch module, its state loaded": ("model()", "held.load_state_dict(model().state_dict())", "state(held)"),
    "torch module, buffer": ("model()", "held[1].running_mean.fill_(n)", "state(held)"),
    "torch module, training flags": ("model()", "held[n % 2].train(not held[n % 2].training)", "state(held)"),
    "torch module, attribute of a parameter": ("model()", "held[0].weight.k = n", "repr(vars(held[0].weight))"),
    "torch module, part": ("model()", "held.add_module(f'more{n}', model())", "state(held)"),
}  # fmt: skip

TORCH_PRELUDE = """
import torch

def model(): return torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))

def state(model):
    return repr([{k: v.tolist() for k, v in model.state_dict().items()}, [part.training for part in model.modules()]])
"""

KINDS = [*SIMPLE, *PROGRAMS]


class Made:
    """One object of a kind.

    Attributes
    ----------
    held : object
    read : callable
        ``read(held)`` returns its contents.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.names: dict[str, Any] = {"__name__": "__main__"}
        exec(PRELUDE + (TORCH_PRELUDE if name in TORCH else ""), self.names)
        program, self._change, read = _parts(name)
        exec(program, self.names)
        self.held = self.names["held"]
        self.read: Callable[[Any], str] = eval(f"lambda held: {read}", self.names) if read else text
        self._numbers = itertools.count(1)

    def change(self) -> None:
        """Change the object."""
        self.names["n"] = next(self._numbers)
        exec(self._change, self.names)


def _parts(name: str) -> tuple[str, str, str]:
    """Return the program of a kind, the line that changes the object and the expression that reads it, or ""."""
    if name in PROGRAMS:
        lines = textwrap.dedent(PROGRAMS[name]).splitlines()
        change, read = (
            " ".join(line.removeprefix(start) for line in lines if line.startswith(start))
            for start in ("change: ", "read: ")
        )
        return "\n".join(line for line in lines if not re.match("change: |read: ", line)), change, read
    expression, change, *read = {**SIMPLE, **TORCH}[name]
    return f"held = {expression}", change, "".join(read)
