"""The most likely wrong uses of a newcomer, and the words that must stand in what they read then."""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import synk
from synk.errors import CallTimeout, RemoteError, SerializationError, SynkError, WorkerDied

X = np.arange(12.0).reshape(6, 2)
W = np.ones(2)


class First(NamedTuple):
    x: Any
    y: Any


@dataclass
class Frame:
    """Has columns, and rows of no one dtype, as a table of pandas."""

    columns: list[str]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array([[1.0, "one"], [2.0, "two"]], dtype=object)


def total(x: Any) -> Any:
    return x.sum()


def scaled(x: Any, w: Any) -> Any:
    return (x @ w).sum()


async def later(x: Any) -> Any:
    return x.sum()


def pieces(x: Any) -> Any:
    yield x.sum()


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def step(self, x: Any) -> Any:
        return x.sum()


Mistake = tuple[Callable[[synk.Runtime], Any], type[BaseException], str]

MISTAKES: dict[str, Mistake] = {
    # -- how a function is built
    "an op that does not exist": (lambda rt: rt.function(total, outputs="mean"), ValueError, r"'mean'.*'avg'"),
    "an op with a typing error": (lambda rt: rt.function(total, outputs="gahter"), ValueError, r"'gather'"),
    "a broadcast input that is no parameter": (
        lambda rt: rt.function(scaled, bcast_inputs="weights"),
        ValueError,
        r"'weights'.*\bw\b",
    ),
    "no function at all": (lambda rt: rt.function(3), TypeError, r"int.*callable"),
    "a function that is async": (lambda rt: rt.function(later), TypeError, r"'later': got a coroutine function"),
    "a generator function": (lambda rt: rt.function(pieces), TypeError, r"'pieces': got a generator function"),
    "a function of NumPy's as an op": (lambda rt: rt.function(total, outputs=np.mean), TypeError, r"the op: 'avg'"),
    "the built-in sum as an op": (lambda rt: rt.function(total, outputs=sum), TypeError, r"the op: 'sum'"),
    "an op of all values": (lambda rt: rt.function(total, outputs=lambda parts: parts), TypeError, r"op\(a, b\)"),
    "the result of a call instead of the function": (lambda rt: rt.function(total(X)), TypeError, r"callable"),
    "a framework that does not exist": (
        lambda rt: rt.function(total, framework="pytorch"),
        ValueError,
        r"'pytorch'.*'torch'",
    ),
    "a lock in what a method is bound to": (
        lambda rt: rt.function(Locked().step)(X),
        SerializationError,
        r"lock.*cannot pickle",
    ),
    "a connection in a closure": (
        lambda rt: (lambda db: rt.function(lambda x: db.execute("select 1") and x.sum())(X))(
            sqlite3.connect(":memory:")
        ),
        SerializationError,
        r"'db' \(Connection\)",
    ),
    # -- how it is called
    "too many arguments": (lambda rt: rt.function(total)(X, 3), TypeError, r"total\(\).*too many positional"),
    "too few arguments": (lambda rt: rt.function(scaled, bcast_inputs="w")(X), TypeError, r"missing.*'w'"),
    "a keyword that does not exist": (lambda rt: rt.function(total)(X, size=3), TypeError, r"'size'"),
    "rows that do not fit": (lambda rt: rt.function(lambda x, y: x.sum())(X, X[:5]), ValueError, r"6.*5"),
    "weights that are not broadcast": (lambda rt: rt.function(scaled)(X, W), ValueError, r"bcast_inputs='w'"),
    "a number where rows are expected": (lambda rt: rt.function(total)(3.0), TypeError, r"bcast_inputs"),
    "a string where rows are expected": (lambda rt: rt.function(total)("abc"), TypeError, r"str"),
    "a generator": (lambda rt: rt.function(total)(x for x in X), TypeError, r"generator"),
    "lists of different lengths": (lambda rt: rt.function(total)([[1, 2], [3]]), (ValueError, TypeError), r"length"),
    "a tuple of arrays that has no rows in common": (
        lambda rt: rt.function(lambda t: t[0].sum())((X, X[:2])),
        ValueError,
        r"6.*2",
    ),
    "a table": (
        lambda rt: rt.function(total)(Frame(["price", "name"])),
        TypeError,
        r"Frame, which has a meaning of its own",
    ),
    "a matrix": (lambda rt: rt.function(total)(X.view(np.matrix).T), TypeError, r"matrix.*np\.asarray"),
    "text in an array of objects": (
        lambda rt: rt.function(total)(np.array(["a", "bc"], dtype=object)),
        TypeError,
        r"dtype=str",
    ),
    "None": (lambda rt: rt.function(total)(None), TypeError, r"None"),
    "a batch larger than the data": (lambda rt: rt.function(total)(X, batch=7), (ValueError, IndexError), r"7"),
    "an index that is out of range": (lambda rt: rt.function(total)(X, batch=[0, 6]), IndexError, r"6"),
    "a mask of another length": (
        lambda rt: rt.function(total)(X, batch=np.ones(5, bool)),
        (ValueError, IndexError),
        r"5",
    ),
    "a negative time limit": (lambda rt: rt.function(total)(X, timeout=-1), ValueError, r"timeout"),
    "no slices": (lambda rt: rt.function(total)(X, num_slices=0), ValueError, r"num_slices"),
    # -- what it returns
    "gather of a number": (lambda rt: rt.function(total, outputs="gather")(X), ValueError, r"gather"),
    "more ops than outputs": (
        lambda rt: rt.function(total, outputs=("sum", "avg"))(X),
        (ValueError, TypeError),
        r"outputs",
    ),
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
        r"no_such_module",
    ),
    "a call of another synk function": (
        lambda rt: (lambda inner: rt.function(lambda x: inner(x))(X))(rt.function(total)),
        (SynkError, TypeError),
        r"function on the workers|plain function",
    ),
    "a runtime inside a function": (lambda rt: rt.function(lambda x: synk.fork(2))(X), SynkError, r"inside worker"),
    "an array of NumPy where torch is meant": (
        lambda rt: rt.function(lambda x: torch.relu(x).sum())(X),
        TypeError,
        r"Tensor",
    ),
    "a function that takes too long": (
        lambda rt: rt.function(lambda x: time.sleep(30), outputs=None)(X, timeout=0.2),
        CallTimeout,
        r"did not end in time.*timeout=",
    ),
    "a worker that is killed": (
        lambda rt: rt.function(lambda x: __import__("os").kill(__import__("os").getpid(), 9), outputs=None)(X),
        WorkerDied,
        r"SIGKILL.*next call starts",
    ),
    "communication in the program": (lambda rt: synk.comm.all_reduce(X), SynkError, r"inside a function"),
    # -- data and variables
    "a slot of a variable that does not exist": (
        lambda rt: setattr(rt.shared(W), "vlaue", W),
        AttributeError,
        r"vlaue",
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
    "an item that raises": (lambda rt: list(rt.map(lambda n: 1 // n, [2, 1, 0])), ZeroDivisionError, r"."),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_words_of_a_mistake(shared_runtimes: Any, name: str) -> None:
    rt = shared_runtimes[2]
    mistake, kinds, words = MISTAKES[name]
    with pytest.raises(kinds) as caught:
        mistake(rt)
    told = [str(caught.value), *getattr(caught.value, "__notes__", ()), str(caught.value.__cause__ or "")]
    text = "\n".join(told)
    assert re.search(words, text, re.DOTALL), text
    assert "  " not in str(caught.value).split("\n")[0]
    assert rt.function(total, outputs="sum")(X) == X.sum()


def test_there_are_forty() -> None:
    assert len(MISTAKES) >= 40
