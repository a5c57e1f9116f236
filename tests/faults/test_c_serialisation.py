"""C: what cannot be pickled or loaded is named, on either side, and nothing hangs."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import assert_right, nothing_sent, pids, same_workers
from support.tables import named

from synk.errors import CallTimeout, SerializationError, StartupError, WorkerDied

ROWS = np.arange(4.0)
Fork = Callable[..., Any]
# From 3.14 on the limit is what fits on the stack of C, not a number.
TOO_DEEP = 200_000 if sys.version_info >= (3, 14) else 5000


@pytest.fixture
def unpicklable(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Objects that no process can send to another."""
    left, right = socket.socketpair()
    with left, right, open(tmp_path / "written", "w", encoding="utf-8") as file:
        yield {
            "lock": threading.Lock(),
            "socket": left,
            "file": file,
            "generator": (number for number in range(3)),
        }


def test_C1_function_that_cannot_be_pickled(rt: Any, unpicklable: dict[str, Any], subtests: pytest.Subtests) -> None:
    """What it holds is named; it does not poison the functions before and after it."""
    good = rt.function(lambda x: x.sum(), outputs="sum")
    for kind, my_captive in {**unpicklable, "nest": saboteurs.deep(TOO_DEEP)}.items():

        def captor(x: np.ndarray, *, my_captive: Any = None) -> float:
            return x.sum() if my_captive else 0.0

        def make(my_captive: Any = my_captive) -> Callable[[np.ndarray], float]:
            return lambda x: captor(x, my_captive=my_captive)

        with subtests.test(kind), same_workers(rt):
            with pytest.raises(SerializationError) as caught:
                rt.function(named("captor", make()), outputs="sum")(ROWS)
            assert "captor" in str(caught.value)
            assert "my_captive" in str(caught.value) or kind == "nest"
            assert good(ROWS) == ROWS.sum()
            assert rt.function(lambda x: 2 * x.sum(), outputs="sum")(ROWS) == 2 * ROWS.sum()
            rt.distribute()


@pytest.fixture
def master_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that only the master can import."""
    (tmp_path / "master_only.py").write_text(
        "class Thing:\n    pass\n\n\ndef total(x):\n    return x.sum()\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    module = importlib.import_module("master_only")
    sys.path.remove(str(tmp_path))  # workers get the path as it is when a function is sent
    yield module
    del sys.modules["master_only"]


def test_C2_function_that_workers_cannot_load(rt: Any, master_only: Any) -> None:
    pids(rt)
    with same_workers(rt):
        lost = None
        for _ in range(10):
            with pytest.raises(SerializationError, match="master_only") as caught:
                lost = lost or rt.function(master_only.total, outputs="sum")
                lost(ROWS)
            assert "ModuleNotFoundError" in repr(caught.value.__cause__) + str(caught.value)


HOSTILE_LOADS = {
    "raises": (saboteurs.raise_value_error, SerializationError),
    "SystemExit": (saboteurs.system_exit, SerializationError),
    "segfault": (saboteurs.segfault, WorkerDied),
    "loop": (saboteurs.loop_for_ever, CallTimeout),
    "loop in C": (saboteurs.loop_in_c, CallTimeout),
}


def test_C3_argument_or_function_whose_loading_fails(rt: Any, subtests: pytest.Subtests) -> None:
    take = rt.function(lambda thing, x: x.sum(), bcast_inputs="thing", outputs="sum")
    for how, (action, expected) in HOSTILE_LOADS.items():
        hostile = saboteurs.AtLoad(action, spared_pid=os.getpid())
        limit = 0.5 if "loop" in how else None
        with subtests.test("argument", how=how):
            with pytest.raises(expected):
                take({"deep": [hostile]}, ROWS, timeout=limit)
            assert take(1, ROWS) == ROWS.sum()
        with subtests.test("function", how=how):
            with pytest.raises(expected):
                rt.function(lambda x, hostile=hostile: (hostile, x.sum())[1], outputs="sum")(ROWS, timeout=limit)
            assert_right(rt)


def test_C4_C6_argument_that_cannot_be_pickled(
    shared_runtimes: Any, unpicklable: dict[str, Any], subtests: pytest.Subtests
) -> None:
    """Everything is pickled, once, before the first message."""
    rt = shared_runtimes[3]
    take = rt.function(lambda x, a, b, c: x.sum(), bcast_inputs=("a", "b", "c"), outputs="sum")
    assert take(ROWS, 1, 2, c=3) == ROWS.sum()
    bad_ones = (unpicklable["lock"], saboteurs.AtPickle(saboteurs.raise_value_error), unpicklable["generator"])
    for name, bad in zip("abc", bad_ones, strict=True):
        arguments = {"a": {"fine": 1}, "b": [2], "c": "three", name: {"deep": [bad]}}
        refused = pytest.raises(SerializationError, match=rf"^cannot send {name}\['deep'\]\[0\] ")
        with subtests.test(name, bad=type(bad).__name__), nothing_sent(rt), refused:
            take(ROWS, **arguments)
    with subtests.test("very deep"), nothing_sent(rt), pytest.raises(SerializationError, match="cannot send b"):
        take(ROWS, 1, saboteurs.deep(TOO_DEEP), c=3)


def booby_trap(row: np.ndarray, how: str) -> Any:
    """Return on rank 1 what cannot be sent, or what the master cannot load."""
    if row[0] != 1:
        return {"fine": 1.0, "bad": 2}
    if how == "lock":
        return {"fine": 1.0, "bad": threading.Lock()}
    if how == "deep":
        return saboteurs.deep(TOO_DEEP)
    return saboteurs.AtLoad(HOSTILE_LOADS[how][0], spared_pid=os.getpid())


def test_C5_C6_result_that_cannot_be_sent_or_loaded(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    rt = shared_runtimes[3]
    f = rt.function(booby_trap, bcast_inputs="how", outputs=None)
    for how in ("lock", "raises", "SystemExit", "deep"):
        with subtests.test(how), same_workers(rt):
            with pytest.raises((SerializationError, RecursionError) if how == "deep" else SerializationError) as caught:
                f(np.arange(3), how)
            assert "rank 1" in str(caught.value) or how == "deep"
    with subtests.test("reduced"), same_workers(rt), pytest.raises((SerializationError, TypeError)):
        rt.function(lambda row: {"locked": threading.Lock()}, outputs="first")(np.arange(3))


@pytest.mark.high_memory
def test_C7_payload_of_more_than_2_gib(rt: Any) -> None:
    blob = bytes((1 << 31) + 5)
    length = rt.function(lambda blob, x: len(blob), bcast_inputs="blob", outputs="max")
    with same_workers(rt):
        assert length({"blob": blob}["blob"], ROWS) == len(blob)


def test_C8_another_version_in_the_worker(monkeypatch: pytest.MonkeyPatch, runtime: Fork) -> None:
    """The versions travel with the first message; a worker that finds others refuses to start."""
    monkeypatch.setattr(np, "__version__", "0.0.1")
    with pytest.raises(StartupError, match=r"0\.0\.1"):
        runtime(1).distribute()
