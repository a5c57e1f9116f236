"""Functions of many forms that fail at a line of their own, and whether workers name the frames that Python names.

``SOURCE`` is run wherever functions are written: in a script, a prompt, a notebook, a module. So each of its statements
ends with an empty line and has none inside, as a prompt wants it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import synk

SOURCE = """
import dataclasses, functools

def fails(x):
    rate = 1
    raise LookupError("here")

def nested(x):
    def inner(y):
        return fails(y)
    return inner(x)

def made(rate):
    def closure(x):
        return rate and fails(x)
    return closure

def decorated(fn):
    @functools.wraps(fn)
    def wrapper(x):
        return fn(x)
    return wrapper

def yields(x):
    yield 1
    yield fails(x)

class Base:
    def __init__(self, rate=0):
        self._rate = rate
    def inherited(self, x):
        return self.method(x)
    def method(self, x):
        return 0

class Model(Base):
    def __call__(self, x):
        return self.rate
    def method(self, x):
        super().method(x)
        return fails(x)
    @property
    def rate(self):
        return fails(self._rate)
    @classmethod
    def of_class(cls, x):
        return fails(x)
    @staticmethod
    def static(x):
        return fails(x)
    partly = functools.partialmethod(method)
    class Inner:
        def method(self, x):
            return fails(x)

@dataclasses.dataclass
class Checked:
    rate: float
    def __post_init__(self):
        fails(self.rate)

FORMS = {
    "function": fails,
    "nested function": nested,
    "closure": made(1),
    "lambda": lambda x: fails(x),
    "default of a lambda": lambda x, f=lambda y: fails(y): f(x),
    "comprehension": lambda x: [fails(y) for y in (1, 2)],
    "generator": lambda x: list(yields(x)),
    "decorated": decorated(fails),
    "cached": lambda x, f=functools.lru_cache(fails): f(1),
    "partial": functools.partial(fails),
    "method": Model().method,
    "inherited method": Model().inherited,
    "partial method": Model().partly,
    "class method": Model.of_class,
    "static method": Model.static,
    "property, of a callable": Model(),
    "method of a nested class": Model.Inner().method,
    "dataclass": lambda x: Checked(1.0),
    "text": lambda x: exec("1\\n2\\n3\\nfails(x)", {"fails": fails, "x": x}),
}

"""

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$(?:\n    (.+))?', re.MULTILINE)
_X = np.ones(4)


def frames_in(text: str) -> list[tuple[str, ...]]:
    """Return the file, the line, the name and the source of each frame of a formatted traceback.

    The source of what is typed at a prompt is left out: some versions of Python know it, in the process of the prompt.
    """
    return [frame[:3] if frame[0] == "<stdin>" else frame for frame in _FRAME.findall(text)]


def of_plain_python(fn: Callable[..., Any]) -> list[tuple[str, ...]]:
    try:
        fn(_X)
    except LookupError as error:
        return frames_in("".join(traceback.format_tb(error.__traceback__)[1:]))
    raise AssertionError("it fails")


def of_a_worker(call: Callable[[], Any]) -> list[tuple[str, ...]]:
    try:
        call()
    except LookupError as error:
        return frames_in(str(error.__cause__))
    raise AssertionError("it fails")


def differences(forms: dict[str, Callable[..., Any]]) -> Iterator[str]:
    """Yield what the workers of the open runtime name otherwise than plain Python: nothing, if all is well."""
    for form, fn in forms.items():
        ways = {
            "call": lambda fn=fn: synk.function(fn, outputs=None)(_X),
            "submit": lambda fn=fn: synk.function(fn, outputs=None).submit(_X).result(),
            "map": lambda fn=fn: list(synk.map(fn, [_X])),
        }
        for way, call in ways.items():
            expected, got = of_plain_python(fn), of_a_worker(call)
            if got != expected:
                yield f"{form}, {way}: {got}, not {expected}"
