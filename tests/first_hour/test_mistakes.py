"""The most likely wrong uses of a newcomer, and the words that must stand in what they read then."""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import synk
from synk.errors import CallTimeout, RemoteError, SerializationError, SynkError

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


Mistake = tuple[Callable[[synk.Runtime], Any], type[BaseException], str]

MISTAKES: dict[str, Mistake] = {
    # -- how a function is built
    "an op that does not exist": (lambda rt: rt.function(total, outputs="mean"), ValueError, r"'mean'.*'avg'"),
    "a broadcast input that is no parameter": (
        lambda rt: rt.function(scaled, bcast_inputs="weights"),
        ValueError,
        r"'weights'.*\bw\b",
    ),
    "a function that is async": (lambda rt: rt.function(later), TypeError, r"'later': got a coroutine function"),
    "a generator function": (lambda rt: rt.function(pieces), TypeError, r"'pieces': got a generator function"),
    "a function of NumPy's as an op": (lambda rt: rt.function(total, outputs=np.mean), TypeError, r"the op: 'avg'"),
    "an op of all values": (lambda rt: rt.function(total, outputs=lambda parts: parts), TypeError, r"op\(a, b\)"),
    "the result of a call instead of the function": (lambda rt: rt.function(total(X)), TypeError, r"callable"),
    "a framework that does not exist": (
        lambda rt: rt.function(total, framework="pytorch"),
        ValueError,
        r"'pytorch'.*'torch'",
    ),
    "a connection in a closure": (
        lambda rt: (lambda db: rt.function(lambda x: db.execute("select 1") and x.sum())(X))(
            sqlite3.connect(":memory:")
        ),
        SerializationError,
        r"'db' \(Connection\)",
    ),
    "a position where names of parameters are expected": (
        lambda rt: rt.function(scaled, bcast_inputs=1),
        TypeError,
        "expected the name of a parameter",
    ),
    "restarts that are no number": (
        lambda rt: synk.Runtime(2, backend="numpy", max_restarts=-1),
        ValueError,
        "max_restarts",
    ),
    # -- how it is called
    "a keyword that does not exist": (
        lambda rt: rt.function(total)(z=X),
        TypeError,
        r"unexpected keyword argument 'z', expected one of \['x'\]",
    ),
    "an output that does not exist": (
        lambda rt: rt.function(lambda x: (x.sum(), x.max()), outputs="max")(X, output_subset=[2]),
        IndexError,
        "expected an integer from -2 to 1",
    ),
    "an output of one value": (
        lambda rt: rt.function(lambda x: x.mean())(X, output_subset=[0]),
        IndexError,
        "it returns one value",
    ),
    "communication in slices": (
        lambda rt: rt.function(lambda x: synk.comm.all_reduce(x.mean()))(X, num_slices=2),
        ValueError,
        r"num_slices above 1.*num_slices=1",
    ),
    "too many arguments": (lambda rt: rt.function(total)(X, 3), TypeError, r"total\(\).*too many positional"),
    "too few arguments": (lambda rt: rt.function(scaled, bcast_inputs="w")(X), TypeError, r"missing.*'w'"),
    "rows that do not fit": (lambda rt: rt.function(lambda x, y: x.sum())(X, X[:5]), ValueError, r"6.*5"),
    "a string where rows are expected": (lambda rt: rt.function(total)("abc"), TypeError, r"str"),
    "a generator": (lambda rt: rt.function(total)(x for x in X), TypeError, r"generator"),
    "lists of different lengths": (lambda rt: rt.function(total)([[1, 2], [3]]), (ValueError, TypeError), r"length"),
    "text in an array of objects": (
        lambda rt: rt.function(total)(np.array(["a", "bc"], dtype=object)),
        TypeError,
        r"dtype=str",
    ),
    "None": (lambda rt: rt.function(total)(None), TypeError, r"None"),
    "a batch larger than the data": (lambda rt: rt.function(total)(X, batch=7), (ValueError, IndexError), r"7"),
    "an index that is out of range": (lambda rt: rt.function(total)(X, batch=[0, 6]), IndexError, r"6"),
    "a negative time limit": (lambda rt: rt.function(total)(X, timeout=-1), ValueError, r"timeout"),
    "no slices": (lambda rt: rt.function(total)(X, num_slices=0), ValueError, r"num_slices"),
    # -- what it returns
    "text under avg": (lambda rt: rt.function(lambda x: "text")(X), (TypeError, ValueError), r"str|text"),
    "a tensor that requires grad, as an input": (
        lambda rt: rt.function(total, framework="torch")(torch.ones(4, requires_grad=True)),
        (TypeError, ValueError),
        r"detach",
    ),
    "something that cannot travel": (
        lambda rt: rt.function(lambda x: threading.Lock(), outputs=None)(X),
        (SerializationError, TypeError, RemoteError),
        r"lock",
    ),
    # -- what happens inside
    "a name that is not defined": (
        lambda rt: rt.function(lambda x: no_such_name(x))(X),  # type: ignore[name-defined]  # noqa: F821
        NameError,
        r"no_such_name",
    ),
    "an input that is written to": (lambda rt: rt.function(lambda x: x.__iadd__(1).sum())(X), ValueError, "read-only"),
    "a module that is not installed": (
        lambda rt: rt.function(lambda x: __import__("no_such_module"))(X),
        ModuleNotFoundError,
        "no_such_module",
    ),
    "a call of another synk function": (
        lambda rt: (lambda inner: rt.function(lambda x: inner(x))(X))(rt.function(total)),
        (SynkError, TypeError),
        r"function on the workers|plain function",
    ),
    "a runtime inside a function": (lambda rt: rt.function(lambda x: synk.fork(2))(X), SynkError, r"inside worker"),
    "a function that takes too long": (
        lambda rt: rt.function(lambda x: time.sleep(30), outputs=None)(X, timeout=0.2),
        CallTimeout,
        r"did not end in time.*timeout=",
    ),
    "communication in the program": (lambda rt: synk.comm.all_reduce(X), SynkError, r"inside a function"),
    # -- data and variables
    "a name that a variable does not have": (
        lambda rt: setattr(rt.shared(W), "vlaue", W),
        AttributeError,
        "vlaue",
    ),
    "a value of another structure": (
        lambda rt: setattr(rt.shared(W), "value", {"a": W}),
        ValueError,
        r"structure \{'a': \*\}, expected one array",
    ),
    "one new value for two variables": (
        lambda rt: rt.function(lambda x: (0.0, [1.0]), updates=[rt.shared(0.0), rt.shared(0.0)])(X),
        ValueError,
        "got 1 new values, expected one for each of the 2 updates",
    ),
    "an array of variables": (
        lambda rt: np.asarray(rt.shared({"a": W})),
        TypeError,
        "cannot make an array of variable",
    ),
    "a variable that is changed in place": (
        lambda rt: rt.shared(W).value.__setitem__(0, 5.0),
        (ValueError, TypeError),
        r"w\.value = |value =",
    ),
    "data that is pickled": (lambda rt: __import__("pickle").dumps(rt.data(X)), TypeError, r"shared memory"),
    "an item that cannot be sent": (
        lambda rt: list(rt.map(str, [1, threading.Lock()])),
        SerializationError,
        r"item 1",
    ),
}


def test_the_words_of_a_mistake(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    rt = shared_runtimes[2]
    for name, (mistake, kinds, words) in MISTAKES.items():
        with subtests.test(name):
            with pytest.raises(kinds) as caught:
                mistake(rt)
            told = [str(caught.value), *getattr(caught.value, "__notes__", ()), str(caught.value.__cause__ or "")]
            text = "\n".join(told)
            assert re.search(words, text, re.DOTALL), text
            assert "  " not in str(caught.value).split("\n")[0]
            assert rt.function(total, outputs="sum")(X) == X.sum()
