"""Code of a module that is edited in place, as ``%autoreload 2`` does it, is what the next call runs.

The expected values come from the same function, called by plain Python in this process on the same objects.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

X = np.arange(4.0)

SOURCE = """
import functools

def decorated(f):
    @functools.wraps(f)
    def inner(*args): return f(*args)
    return inner

def helper(x): return x.sum() * 1

class Base:
    def of_base(self, x): return x.sum() * 1

class K(Base):
    w = 1
    def method(self, x): return x.sum() * 1
    def with_default(self, x, factor=1): return x.sum() * factor
    def with_keyword(self, x, *, factor=1): return x.sum() * factor
    @staticmethod
    def static(x): return x.sum() * 1
    @classmethod
    def of_class(cls, x): return x.sum() * cls.w * 1
    @property
    def prop(self): return 1
    @decorated
    @decorated
    def wrapped(self, x): return x.sum() * 1
    def __call__(self, x): return x.sum() * 1
    def calls_helper(self, x): return helper(x)
    class Inner:
        def method(self, x): return x.sum() * 1
"""

KINDS = {
    "method": "k.method(x)",
    "method of a base": "k.of_base(x)",
    "default": "k.with_default(x)",
    "default of a keyword": "k.with_keyword(x)",
    "static": "K.static(x)",
    "class method": "k.of_class(x)",
    "property": "k.prop * x.sum()",
    "wrapped": "k.wrapped(x)",
    "__call__": "k(x)",
    "helper": "k.calls_helper(x)",
    "of an inner class": "K.Inner().method(x)",
}
WHERES = ("the module's own class", "a subclass of the script", "an item of a map", "a new function")


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], types.ModuleType]]:
    """Return what makes a module of the user's, a new one each time."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = (f"edited_in_place_{number}" for number in itertools.count())
    made: list[str] = []

    def make() -> types.ModuleType:
        made.append(next(names))
        (tmp_path / f"{made[-1]}.py").write_text(SOURCE)
        return __import__(made[-1])

    yield make
    for name in made:
        sys.modules.pop(name, None)


def edit(module: types.ModuleType) -> None:
    """Give the functions and classes of a module the code of an edited source, as autoreload does."""
    new: dict[str, Any] = {"__name__": module.__name__}
    exec(SOURCE.replace("* 1", "* 10").replace("factor=1", "factor=10").replace("return 1", "return 10"), new)

    def update(old: Any, fresh: Any) -> None:
        if isinstance(old, types.FunctionType):
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                setattr(old, part, getattr(fresh, part))
            for mine, theirs in zip(old.__closure__ or (), fresh.__closure__ or ()):
                update(mine.cell_contents, theirs.cell_contents)
        elif isinstance(old, type):
            for name in list(vars(old)):
                if name in vars(fresh):
                    update(vars(old)[name], vars(fresh)[name])
        elif isinstance(old, (staticmethod, classmethod)):
            update(old.__func__, fresh.__func__)
        elif isinstance(old, property):
            update(old.fget, fresh.fget)

    for name in ("helper", "Base", "K"):
        update(getattr(module, name), new[name])


def check(rt: Any, module: types.ModuleType, kind: str, where: str) -> None:
    source = f"""
        class Sub(module.K): pass
        K = Sub if {where == WHERES[1]} else module.K
        k = K()
        def plain(x): return {KINDS[kind]}
        """
    names: dict[str, Any] = {"__name__": "__main__", "module": module}
    exec(textwrap.dedent(source), names)
    plain = names["plain"]
    ours = rt.function(plain, outputs="first")

    def value() -> Any:
        if where == "an item of a map":
            return next(rt.map(functools.partial(_of_item, plain), [X]))
        if where == "a new function":
            return rt.function(lambda x: plain(x), outputs="first")(X[:4].repeat(2)) / 2
        return ours(X.repeat(2)) / 2

    assert ours(X.repeat(2)) / 2 == plain(X) == value()
    edit(module)
    want = plain(X)
    assert want in (60, 6) and value() == want
    assert ours(X.repeat(2)) / 2 == want


def _of_item(function: Any, item: Any) -> Any:
    return function(item)


def test_a_method_that_is_edited_in_place(
    subtests: Any, shared_runtimes: Any, edited: Callable[[], types.ModuleType]
) -> None:
    rng = random.Random(6)
    for kind, where in rng.sample([*itertools.product(KINDS, WHERES)], 24):
        with subtests.test(kind=kind, where=where):
            check(shared_runtimes[1], edited(), kind, where)
