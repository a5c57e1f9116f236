"""Texts that helped a newcomer least, and what they say now. Four more are rows of ``test_mistakes``."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import replaced_workers

import synk
from synk.errors import ClosedError, CollectiveMismatch, SerializationError, WorkerDied

X = np.arange(12.0).reshape(6, 2)


class Locked:
    """Has a lock, which no pickle can hold."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Outer:
    """Has it further inside."""

    def __init__(self) -> None:
        self.parts = {"first": [1, Locked()]}

    def total(self, x: Any) -> Any:
        return x.sum()


def text_of(caught: Any) -> str:
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_1_a_list_is_gathered(shared_runtimes: Any) -> None:
    rows = shared_runtimes[2].function(lambda x: [float(row.sum()) for row in x], outputs="gather")
    assert rows(X) == [float(row.sum()) for row in X]
    with pytest.raises(ValueError, match=r"got a single number, expected an array with rows.*np.array\(list\)"):
        shared_runtimes[2].function(lambda x: x.sum(), outputs="gather")(X)


def test_3_a_table(shared_runtimes: Any) -> None:
    members = {
        "columns": ("price",),
        "__array__": lambda self, dtype=None, copy=None: np.array([[1.0], ["one"]], object),
    }
    frame = type("Frame", (dict,), members)(price=np.array([1.0, 2.0]))
    total = shared_runtimes[2].function(lambda t: t["price"].sum(), outputs="sum")
    with pytest.raises(TypeError, match=r"got Frame, which is more than its numbers"):
        total(frame)
    assert total(dict(frame.items())) == 3.0


def test_5_a_lock_in_what_a_method_is_bound_to(shared_runtimes: Any) -> None:
    rt, obj = shared_runtimes[2], Outer()
    place = r"parts\['first'\]\[1\]\.lock"
    with pytest.raises(SerializationError, match=rf"its variable [\"']self\.{place}[\"'] \(lock\) cannot be pickled"):
        rt.function(obj.total)(X)
    with pytest.raises(SerializationError, match=rf"its variable [\"']obj\.{place}[\"'] \(lock\)"):
        rt.function(lambda x: obj.total(x))(X)
    with pytest.raises(SerializationError, match=rf"cannot send w\.{place} of '<lambda>' \(lock\)"):
        rt.function(lambda x, w: x.sum(), bcast_inputs="w")(X, obj)


def test_7_two_classes_that_look_alike(shared_runtimes: Any) -> None:
    def sums(x: Any) -> Any:
        return namedtuple("Sums", "a b")(x.sum(), len(x))

    with pytest.raises(CollectiveMismatch, match=r"Sums\(a=value.*different classes of one name.*outside"):
        shared_runtimes[2].function(sums, outputs="sum")(X)
    sums_of = namedtuple("sums_of", "a b")
    assert shared_runtimes[2].function(lambda x: sums_of(x.sum(), len(x)), outputs="sum")(X) == sums_of(66.0, 6)


def test_8_and_9_after_a_death(runtime: Any, capfd: pytest.CaptureFixture[str]) -> None:
    rt = runtime(2)
    rt.function(lambda x: os.write(2, b"said before\n"), outputs=None)(X)
    with replaced_workers(rt, [0]), pytest.raises(WorkerDied, match="SIGKILL") as caught:
        rt.function(lambda x: synk.comm.rank or os.kill(os.getpid(), 9), outputs=None)(X)
    assert "said before" not in text_of(caught) and str(caught.value).count("Likely out of memory") == 1
    rt.close()
    with pytest.raises(ClosedError) as closed:
        rt.function(lambda x: x.sum(), outputs="sum")
    assert closed.value.__cause__ is None


def test_10_a_folder_that_came_later(runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def total(x: Any) -> Any:
        if x[0, 0] > 0:
            import came_later  # type: ignore[import-not-found]

            return came_later.total(x)
        return x.sum()

    rt = runtime(1)
    f = rt.function(total, outputs="sum")
    assert f(X) == X.sum()
    (tmp_path / "came_later.py").write_text("def total(x): return x.sum()\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ModuleNotFoundError) as caught:
        f(X + 1)
    text = text_of(caught)
    assert "the program itself finds 'came_later'" in text and str(tmp_path) in text and "restart()" in text
    rt.restart()
    assert f(X + 1) == (X + 1).sum()


def test_12_outputs_are_named_as_the_function_named_them(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    wrong: list[tuple[Any, Any, Any, str]] = [
        (lambda x: {"a": {"b": (x.sum(), "t")}}, "sum", X, r"output\['a'\]\['b'\]\[1\] of"),
        (lambda x: {"a": x.sum(), "rows": x * 2}, "avg", X[:5], r"output\['rows'\] of"),
        (lambda x: {"a": x.sum(), "g": x.sum()}, {"a": "sum", "g": "gather"}, X, r"output\['g'\] of"),
        (lambda x: (x.sum(), "t"), "sum", X, "output 1 of"),
        (lambda x: "t", "sum", X, "the output of"),
    ]
    for (fn, outputs, x, words), num_slices in itertools.product(wrong, (1, 2)):
        with pytest.raises((TypeError, ValueError, CollectiveMismatch), match=words):
            rt.function(fn, outputs=outputs)(x, num_slices=num_slices)
