"""Digests of functions and items: what changes them, and that nothing else does."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from synk._api.digest import ItemDigests, digests_of

PROGRAM = """
import abc, collections, collections.abc, dataclasses, enum, functools, typing
import numpy as np
import helpers_of_digests as helpers
import attribute_of_digests, captured_of_digests, default_of_digests, dict_of_digests, partial_of_digests
import passed_of_digests, set_of_digests

IMPL = {"dict": dict_of_digests}
set_of_digests.OFFSET = 4

RATE = 0.5
NAMES = {"a", "b", "c"}
TABLE = {"one": 1, "two": [2, 3]}
ARRAY = np.arange(5.0)
COUNTS = collections.Counter("aab")
KEYED = functools.partial(dict, one=1, two=2)
CYCLE = [1]
CYCLE.append(CYCLE)
UNUSED = 1

class Kind(enum.Enum):
    A = 1

@dataclasses.dataclass
class Point:
    x: int = 3
    y: int = dataclasses.field(default=0, metadata={"unit": "m"})

class Sized(type):
    @property
    def size(cls):
        return 7

class Model(metaclass=Sized):
    depth = 2
    __slots__ = ("__dict__", "weights")

    def __init__(self):
        self.weights = np.ones(3)
        self.seen = {"x", "y", "z"}
        self.kept = attribute_of_digests

    @property
    def scale(self):
        return 2 * RATE

    @functools.lru_cache
    def cached(self, x):
        return x + 1

    def apply(self, x):
        return self.depth * x

    tripled = functools.partialmethod(apply, 3)
    __call__ = functools.partial(pow, 11)

class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self):
        return 0

class Square(Shape, collections.abc.Sized):
    area = __len__ = lambda self: 9

Shape.register(Point)
isinstance(1, Square)

@typing.runtime_checkable
class Measured(typing.Protocol):
    def area(self):
        return 0

T = typing.TypeVar("T")

class Box(typing.Generic[T]):
    pass

model = Model()

def make(offset):
    def inner(x):
        return x + offset
    return inner

shifted = make(10)

def with_captured(kept):
    return lambda x: getattr(kept, "scale")(x)

captured = with_captured(captured_of_digests)

def passed(kept, x, default=default_of_digests):
    return kept.scale(default.scale(x))

def other(x):
    return f(x - 1) if x > 1000 else x  # they call each other

def f(x, power=2, *, kind=Kind.A, kept=None):
    import set_of_digests
    from late_of_digests import late
    from package_of_digests import inner
    x = inner.inner(captured(passed(passed_of_digests, IMPL["dict"].scale(x)))) + set_of_digests.offset()
    kinds = [helpers.Kept, Square(), Measured, *COUNTS, *KEYED()]
    names = [name for name in NAMES if name in {"a", "q", "r"}]
    lam = lambda y: y * TABLE["one"]
    return helpers.twice(model.apply(x) ** power + RATE) + lam(other(x)) + shifted(x) + Point().x + late(len(CYCLE))

f = functools.partial(f, power=3, kept=partial_of_digests)
"""

KEPT = [f"{how}_of_digests" for how in ("attribute", "captured", "default", "dict", "partial", "passed")]
FILES = {
    **{f"{name}.py": "STEP = 2\ndef scale(x):\n    return STEP * x\n" for name in KEPT},
    "set_of_digests.py": "OFFSET = 1\ndef offset():\n    return OFFSET\n",
    "package_of_digests/__init__.py": "",
    "package_of_digests/inner.py": "def inner(x):\n    from . import deep\n    return deep.deep(x)\n",
    "package_of_digests/deep.py": "def deep(x):\n    return x + 6\n",
    "helpers_of_digests.py": "STEP = 2\ndef twice(x):\n    return STEP * x\ndef unused(x):\n    return 1\n"
    "class Named(property):\n    pass\nclass Kept:\n    size = Named(twice)\n    size.unit = 'kg'\n",
    "late_of_digests.py": "def late(x):\n    return x + 4\n",
}

KINDS = {  # file (the program's where it is empty), what, by what, the part that changes, if any
    "a comment": ("", "def f(", "# a comment\n\ndef f(", None),
    "a blank line inside": ("", "    names =", "\n    names =", None),
    "the order of a set": ("", '{"a", "b", "c"}', '{"c", "b", "a"}', None),
    "a global that nothing names": ("", "UNUSED = 1", "UNUSED = 2", None),
    "a function of a module that nothing names": ("helpers_of_digests.py", "return 1", "return 2", None),
    "the code": ("", "lam(other(x)) + ", "lam(other(x)) - ", "the code of 'f'"),
    "a constant": ("", '"q", "r"', '"q", "s"', "the code of 'f'"),
    "a name": ("", "NAMES if name in", "TABLE if name in", "the code of 'f'"),
    "an inner function": ("", 'y * TABLE["one"]', 'y + TABLE["one"]', "the code of 'f'"),
    "a default": ("", "power=2, *", "power=4, *", "the defaults of 'f'"),
    "a partial's argument": ("", "f, power=3", "f, power=5", "the function"),
    **{name: (f"{name}.py", "STEP = 2", "STEP = 3", f"'STEP' of the module {name!r}") for name in KEPT},
    "a module's number that the program sets": ("", "OFFSET = 4", "OFFSET = 5", "the global 'OFFSET' of 'offset'"),
    "a module of a package": (
        "package_of_digests/deep.py", "x + 6", "x + 7", "the code of the module 'package_of_digests.deep'"
    ),
    "a captured value": ("", "make(10)", "make(11)", "'offset' that 'make.<locals>.inner' captures"),
    "a number": ("", "RATE = 0.5", "RATE = 0.25", "the global 'RATE' of 'f'"),
    "an int for a float": ("", "RATE = 0.5", "RATE = 1", "the global 'RATE' of 'f'"),
    "an element of a set": ("", '"a", "b", "c"', '"a", "b", "d"', "the global 'NAMES' of 'f'"),
    "an entry of a dict": ("", "[2, 3]", "[2, 4]", "the global 'TABLE' of 'f'"),
    "the order of a dict": (
        "", '{"one": 1, "two": [2, 3]}', '{"two": [2, 3], "one": 1}', "the global 'TABLE' of 'f'"
    ),
    "the order of a counter": ("", 'Counter("aab")', 'Counter("baa")', "the global 'COUNTS' of 'f'"),
    "the order of a partial's arguments": ("", "one=1, two=2", "two=2, one=1", "the global 'KEYED' of 'f'"),
    "an object's array": ("", "np.ones(3)", "np.zeros(3)", "the global 'model' of 'f'"),
    "a class's number": ("", "depth = 2", "depth = 3", "'depth' of 'Model'"),
    "a method": ("", "self.depth * x", "self.depth + x", "the code of 'Model.apply'"),
    "a property": ("", "2 * RATE", "3 * RATE", "the code of 'Model.scale'"),
    "a cached method": ("", "return x + 1", "return x + 2", "the code of 'Model.cached'"),
    "a partial method's argument": ("", "apply, 3)", "apply, 4)", "'tripled' of 'Model'"),
    "a partial that is a method": ("", "pow, 11", "pow, 12", "'__call__' of 'Model'"),
    "an attribute of a kind of property": ("helpers_of_digests.py", "'kg'", "'lb'", "'size' of 'Kept'"),
    "a class of what has an abstract one": ("", "self: 9", "self: 8", "the code of 'Square.<lambda>'"),
    "what an abstract class has seen": ("", "isinstance(1, Square)", "isinstance(1.5, Square)", None),
    "a registered class": ("", "register(Point)", "register(Kind)", "what is registered with 'Shape'"),
    "a metaclass": ("", "return 7", "return 8", "the code of 'Sized.size'"),
    "a field's metadata": ("", '"unit": "m"', '"unit": "cm"', "'__dataclass_fields__' of 'Point'"),
    "a field's default": ("", "x: int = 3", "x: int = 4", "the defaults of 'Point.__init__'"),
    "a member": ("", "A = 1", "A = 2", "'A' of 'Kind'"),
    "a function that calls it": ("", "else x  #", "else -x  #", "the code of 'other'"),
    "a module's function": ("helpers_of_digests.py", "STEP * x", "STEP + x", "the code of 'twice'"),
    "a module's number": ("helpers_of_digests.py", "STEP = 2", "STEP = 3", "the global 'STEP' of 'twice'"),
    "a module that is imported late": (
        "late_of_digests.py", "x + 4", "x + 5", "the code of the module 'late_of_digests'"
    ),
}  # fmt: skip

PRINT = """
import json, sys
from synk._api.digest import ItemDigests, digests_of
items = [
    1, 2**70, -0.0, "text", b"bytes", None, {"a", "b", "c"}, {"x": {1: 2.5}, "y": ()}, ("a", frozenset("xyz")),
    np.float32(2), np.array(["u", "vw"]), np.array([1, None, "t"], object), np.zeros(0), Point(4), Kind.A, model, f,
    Model.apply, shifted, collections.OrderedDict(b=1, a=2), functools.partial(shifted, 1), np.random.default_rng(3),
    helpers, set_of_digests, np, Box, Square, {Shape, Square, Point},
]
print(json.dumps([digests_of(f), [ItemDigests()(item).hex() for item in items]]))
"""


def written(folder: Path, **changed: str) -> Path:
    for file, text in {"program.py": PROGRAM, **FILES, **changed}.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder


def digests(folder: Path) -> dict[str, str]:
    """Return the digests of the program in a folder."""
    program = types.ModuleType("a_program")
    for file in FILES:
        sys.modules.pop(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        path = folder / "program.py"
        with pytest.MonkeyPatch.context() as executing:  # dataclasses look for the module of their class
            executing.setitem(sys.modules, program.__name__, program)
            exec(compile(path.read_text(), path, "exec", dont_inherit=True), vars(program))
        return digests_of(program.f)


def test_only_what_counts_changes_a_digest(tmp_path: Path, subtests: pytest.Subtests) -> None:
    before = digests(written(tmp_path / "before"))
    for number, (kind, (file, old, new, part)) in enumerate(KINDS.items()):
        with subtests.test(kind=kind):
            text = FILES.get(file, PROGRAM)
            assert old in text
            after = digests(written(tmp_path / str(number), **{file or "program.py": text.replace(old, new, 1)}))
            differ = {each for each in {*before, *after} if before.get(each) != after.get(each)}
            assert part in differ if part else not differ, differ


def printed(path: Path, seed: int) -> Any:
    """Return what a program prints under a hash seed."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    made = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, timeout=60)
    assert not made.stderr
    return json.loads(made.stdout)


def test_a_digest_depends_neither_on_the_hash_seed_nor_on_the_place(tmp_path: Path) -> None:
    files = [("one", "program.py"), ("two", "of_another_name.py")]
    paths = [written(tmp_path / folder, **{name: PROGRAM + PRINT}) / name for folder, name in files]
    one, two = (printed(path, seed) for seed, path in enumerate(paths, start=1))
    assert one == two
    assert len(set(one[1])) == len(one[1])


def test_equal_items_have_equal_digests_wherever_they_lie() -> None:
    text = "".join(["a", "b"])
    pairs = [([text, text], ["ab", "a" + "b"]), (np.arange(6)[::2], np.array([0, 2, 4])), ({1, 2}, {2, 1})]
    for one, other in pairs:
        assert ItemDigests()(one) == ItemDigests()(other)
    assert ItemDigests()([1, [2]]) != ItemDigests()([[1], 2])
    assert ItemDigests()({1: 2, 3: 4}) != ItemDigests()({3: 4, 1: 2})


def test_looking_at_objects_changes_no_digest() -> None:
    class Held:
        value = 1

    fn = functools.partial(lambda held: held, Held())
    before = digests_of(fn)
    assert vars(fn) == {}  # it is made now
    Held().__reduce_ex__(2)  # it keeps the names of the slots in the class
    assert digests_of(fn) == before
