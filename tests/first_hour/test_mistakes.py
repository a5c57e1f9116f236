"""The most likely wrong uses of a newcomer, and the words that must stand in what they read then."""

from __future__ import annotations

import itertools
import re
import sqlite3
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import synk
from synk.errors import CallTimeout, CollectiveMismatch, SerializationError, SynkError

X = np.arange(12.0).reshape(6, 2)
W = np.ones(2)


def total(x: Any) -> Any:
    return x.sum()


def scaled(x: Any, w: Any) -> Any:
    return (x @ w).sum()


async def later(x: Any) -> Any:
    return x.sum()


def pieces(x: Any) -> Any:
    yield x.sum()


def reads(rt: synk.Runtime, db: Any) -> Any:
    return rt.function(lambda x: db.execute("select 1") and x.sum())(X)


def talks(x: Any) -> Any:
    return synk.comm.all_reduce(x.mean())


def sleeps(x: Any) -> None:
    time.sleep(30)


def sums(x: Any) -> Any:
    return namedtuple("Sums", "a b")(x.sum(), len(x))


class Calls:
    """Calls a function while it is pickled."""

    def __init__(self, f: Any) -> None:
        self.f = f

    def __reduce__(self) -> Any:
        return float, (self.f(X),)


class Outer:
    """Has a lock, which no pickle can hold, far inside."""

    def __init__(self) -> None:
        self.parts = {"first": [1, {"lock": threading.Lock()}]}

    def total(self, x: Any) -> Any:
        return x.sum()


def guarded() -> Any:
    """Return a method of an object whose class has one from a class of its own."""

    class Guarded:
        __slots__ = ("unused",)
        lock = threading.Lock()

        def total(self, x: Any) -> Any:
            return x.sum()

    return type("Locked", (Guarded,), {})().total


def waits() -> Any:
    """Return a function with one as a default."""
    default = threading.Lock()
    return lambda x, y=0, lock=default: x.sum()


LOCK = r"parts\['first'\]\[1\]\['lock'\]"


def uses(rt: synk.Runtime, obj: Any) -> Any:
    return rt.function(lambda x: obj.total(x))(X)


def calls(rt: synk.Runtime, inner: Any) -> Any:
    return rt.function(lambda x: inner(x))(X)


def updates(rt: synk.Runtime, *variables: Any) -> Any:
    return rt.function(lambda x: (0.0, [1.0]), updates=variables)(X)


Mistake = tuple[Callable[[Any], Any], type[BaseException] | tuple[type[BaseException], ...], str]

MISTAKES: list[Mistake] = [
    # -- how a function is built
    (lambda rt: rt.function(total, outputs="mean"), ValueError, r"'mean'.*'avg'"),
    (lambda rt: rt.function(scaled, bcast_inputs="weights"), ValueError, r"'weights'.*\bw\b"),
    (lambda rt: rt.function(later), TypeError, r"'later': got a coroutine function"),
    (lambda rt: rt.function(pieces), TypeError, r"'pieces': got a generator function"),
    (lambda rt: rt.function(total, outputs=np.mean), TypeError, r"the op: 'avg'"),
    (lambda rt: rt.function(total, outputs=lambda parts: parts), TypeError, r"op\(a, b\)"),
    (lambda rt: rt.function(total(X)), TypeError, r"callable"),
    (lambda rt: reads(rt, sqlite3.connect(":memory:")), SerializationError, r"'db' \(Connection\)"),
    (lambda rt: synk.Runtime(2, backend="numpy", max_restarts=-1), ValueError, "max_restarts"),
    # -- how it is called
    (lambda rt: rt.function(total)(X, bacth=3), TypeError, r"\['batch', 'num_slices', .*Did you mean 'batch'\?"),
    (lambda rt: rt.function(total)(z=X), TypeError, r"unexpected keyword argument 'z', expected one of \['x'\]"),
    (lambda rt: rt.function(lambda x: (1.0, 2.0))(X, output_subset=[2]), IndexError, "an integer from -2 to 1"),
    (lambda rt: rt.function(lambda x: x.mean())(X, output_subset=[0]), IndexError, "it returns one value"),
    (lambda rt: rt.function(talks)(X, num_slices=2), ValueError, r"num_slices above 1.*num_slices=1"),
    (lambda rt: rt.function(total)(X, 3), TypeError, r"total\(\).*too many positional"),
    (lambda rt: rt.function(scaled, bcast_inputs="w")(X), TypeError, r"missing.*'w'"),
    (lambda rt: rt.function(scaled)(X, W), ValueError, r"x with 6 rows and w with 2.*bcast_inputs='w'"),
    (lambda rt: rt.function(lambda x: 0.0)([X, X[:1]]), TypeError, r"arrays, which can mean rows or .*tuple\(x\)"),
    (lambda rt: rt.function(total)("abc"), TypeError, r"str"),
    (lambda rt: rt.function(total)(x for x in X), TypeError, r"generator"),
    (lambda rt: rt.function(total)([[1, 2], [3]]), (ValueError, TypeError), r"length"),
    (lambda rt: rt.function(total)(np.array(["a", "bc"], dtype=object)), TypeError, r"dtype=str"),
    (lambda rt: rt.function(total)(None), TypeError, r"None"),
    (lambda rt: rt.function(scaled)(X, None), TypeError, r"a single value \(NoneType\), .*bcast_inputs='w'"),
    (lambda rt: rt.function(total)(X[:0], batch=[6]), IndexError, "index 6 in .*no index, as the input has no rows"),
    (
        lambda rt: rt.function(scaled, bcast_inputs="w")(X, Calls(rt.function(total))),
        SerializationError,
        "from code that runs in the middle of it, such as .*__reduce__",
    ),
    (lambda rt: rt.function(total)(X, batch=7), (ValueError, IndexError), r"7"),
    # -- what it returns
    (lambda rt: rt.function(lambda x: "text")(X), (TypeError, ValueError), r"str|text"),
    (lambda rt: rt.function(lambda x: x * 2)(X[:5]), CollectiveMismatch, '"gather" if .* one value for each row'),
    (lambda rt: rt.function(total)(torch.ones(4, requires_grad=True)), (TypeError, ValueError), r"detach"),
    (lambda rt: rt.function(lambda x: threading.Lock(), outputs=None)(X), (SynkError, TypeError), r"lock"),
    (
        lambda rt: rt.function(lambda x: x.tolist(), outputs="sum")(X[:5]),
        CollectiveMismatch,
        "one structure .* Give op None to what differs",
    ),
    (lambda rt: rt.function(sums, outputs="sum")(X), CollectiveMismatch, r"Sums\(a=value.*different classes.*outside"),
    # -- what happens inside
    (lambda rt: rt.function(lambda x: breakpoint())(X), RuntimeError, r"cannot stop at breakpoint\(\).*fork\(0\)"),
    (lambda rt: rt.function(lambda x: torch.relu(x).sum())(X), TypeError, 'framework="torch"'),
    (lambda rt: rt.function(lambda x: x.relu().sum())(X), AttributeError, 'framework="torch"'),
    (lambda rt: rt.function(Outer().total)(X), SerializationError, rf"its variable .self\.{LOCK}. \(lock\) cannot be"),
    (
        lambda rt: list(rt.map(guarded(), [X])),
        SerializationError,
        r"its variable 'Guarded\.lock' \(lock\) cannot be",
    ),
    (lambda rt: list(rt.map(waits(), [X])), SerializationError, r"its variable 'lock' \(lock\) cannot be"),
    (lambda rt: calls(rt, waits()), SerializationError, r"its variable 'inner' \(lock\) cannot be"),
    (lambda rt: uses(rt, Outer()), SerializationError, rf"its variable .obj\.{LOCK}. \(lock\)"),
    (
        lambda rt: rt.function(scaled, bcast_inputs="w")(X, Outer()),
        SerializationError,
        rf"cannot send w\.{LOCK} of 'scaled' \(lock\)",
    ),
    (lambda rt: rt.function(lambda x: x.__iadd__(1).sum())(X), ValueError, "read-only"),
    (lambda rt: rt.function(lambda x: __import__("no_such_module"))(X), ModuleNotFoundError, "no_such_module"),
    (lambda rt: calls(rt, rt.function(total)), (SynkError, TypeError), r"function on the workers|plain function"),
    (lambda rt: rt.function(sleeps)(X, timeout=0.2), CallTimeout, r"did not end in time.*timeout="),
    # -- data and variables
    (lambda rt: setattr(rt.shared(W), "vlaue", W), AttributeError, "vlaue"),
    (lambda rt: setattr(rt.data(W), "value", W), AttributeError, "'Data' object has no attribute 'value'"),
    (lambda rt: setattr(rt.shared(W), "value", {"a": W}), ValueError, r"structure \{'a': \*\}, expected one array"),
    (
        lambda rt: updates(rt, rt.shared(0.0), rt.shared(0.0)),
        ValueError,
        "1 new values, expected one for each",
    ),
    (lambda rt: np.asarray(rt.shared({"a": W})), TypeError, "cannot make an array of variable"),
    (lambda rt: list(rt.map(str, [1, threading.Lock()])), SerializationError, r"item 1"),
]


def test_the_words_of_a_mistake(rt: Any, subtests: pytest.Subtests) -> None:
    for mistake, kinds, words in MISTAKES:
        with subtests.test(line=mistake.__code__.co_firstlineno, words=words):
            with pytest.raises(kinds) as caught:
                mistake(rt)
            told = [str(caught.value), *getattr(caught.value, "__notes__", ()), str(caught.value.__cause__ or "")]
            text = "\n".join(told)
            assert re.search(words, text, re.DOTALL), text
            assert "  " not in str(caught.value).split("\n")[0]
            assert rt.function(total, outputs="sum")(X) == X.sum()


OUTPUTS: list[tuple[Any, Any, Any, str]] = [
    (lambda x: {"a": {"b": (x.sum(), "t")}}, "sum", X, r"output\['a'\]\['b'\]\[1\] of"),
    (lambda x: {"a": x.sum(), "rows": x * 2}, "avg", X[:5], r"output\['rows'\] of"),
    (lambda x: {"a": x.sum(), "g": x.sum()}, {"a": "sum", "g": "gather"}, X, r"output\['g'\] of"),
    (lambda x: (x.sum(), "t"), "sum", X, "output 1 of"),
    (lambda x: "t", "sum", X, "the output of"),
]


def test_outputs_are_named_as_the_function_named_them(shared_runtimes: Any) -> None:
    for (fn, outputs, x, words), num_slices in itertools.product(OUTPUTS, (1, 2)):
        with pytest.raises((TypeError, ValueError, CollectiveMismatch), match=words):
            shared_runtimes[2].function(fn, outputs=outputs)(x, num_slices=num_slices)
