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
from support.harness import assert_right, pids, same_workers, script

from synk.errors import CallTimeout, SerializationError, WorkerDied

ROWS = np.arange(4.0)
Fork = Callable[..., Any]
TOO_DEEP = (
    200_000 if sys.version_info >= (3, 14) else 5000
)  # what fits on the stack of C, not a number, is the limit then


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


@pytest.mark.parametrize("kind", ["lock", "socket", "file", "generator"])
def test_C1_function_that_cannot_be_pickled(shared_runtimes: Any, unpicklable: dict[str, Any], kind: str) -> None:
    rt = shared_runtimes[2]
    my_captive = unpicklable[kind]

    def captor(x: np.ndarray) -> float:
        return x.sum() if my_captive else 0.0

    with same_workers(rt):
        with pytest.raises(SerializationError, match=r"captor") as caught:
            rt.function(captor, outputs="sum")(ROWS)
        assert "my_captive" in str(caught.value)


def test_C1_one_bad_function_does_not_poison_the_others(shared_runtimes: Any, unpicklable: dict[str, Any]) -> None:
    rt = shared_runtimes[2]
    lock = unpicklable["lock"]
    good = rt.function(lambda x: x.sum(), outputs="sum")
    with pytest.raises(SerializationError):
        rt.function(lambda x: x.sum() if lock else 0, outputs="sum")(ROWS)
    also_good = rt.function(lambda x: 2 * x.sum(), outputs="sum")
    assert good(ROWS) == ROWS.sum()
    assert also_good(ROWS) == 2 * ROWS.sum()
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


def test_C2_function_that_workers_cannot_load(shared_runtimes: Any, master_only: Any) -> None:
    rt = shared_runtimes[2]
    pids(rt)
    with same_workers(rt):
        lost = None
        for _ in range(10):
            with pytest.raises(SerializationError, match="master_only") as caught:
                lost = lost or rt.function(master_only.total, outputs="sum", name="lost")
                lost(ROWS)
            assert "ModuleNotFoundError" in repr(caught.value.__cause__) + str(caught.value)


HOSTILE_LOADS = {
    "raises": (saboteurs.raise_value_error, SerializationError),
    "SystemExit": (saboteurs.system_exit, SerializationError),
    "os._exit": (saboteurs.DEATHS["exit 3"][0], WorkerDied),
    "segfault": (saboteurs.segfault, WorkerDied),
    "loop": (saboteurs.loop_for_ever, CallTimeout),
    "loop in C": (saboteurs.loop_in_c, CallTimeout),
}


@pytest.mark.parametrize("how", HOSTILE_LOADS)
def test_C3_argument_whose_loading_fails(reused: Fork, how: str) -> None:
    rt = reused(2)
    action, expected = HOSTILE_LOADS[how]
    take = rt.function(lambda thing, x: x.sum(), bcast_inputs="thing", outputs="sum")
    assert take(1, ROWS) == ROWS.sum()
    hostile = saboteurs.AtLoad(action, spared_pid=os.getpid())
    with pytest.raises(expected):
        take({"deep": [hostile]}, ROWS, timeout=0.5 if "loop" in how else None)
    assert take(1, ROWS) == ROWS.sum()
    assert_right(rt)


@pytest.mark.parametrize("how", ["raises", "SystemExit", "os._exit", "segfault"])
def test_C3_function_whose_loading_fails(runtime: Fork, how: str) -> None:
    rt = runtime(2)
    action, expected = HOSTILE_LOADS[how]
    hostile = saboteurs.AtLoad(action, spared_pid=os.getpid())
    with pytest.raises(expected):
        rt.function(lambda x: x.sum() if hostile else 0, outputs="sum", name="hostile")(ROWS)
    assert_right(rt)


def test_C3_function_that_loops_while_it_is_loaded() -> None:
    script("""
        from support import saboteurs
        from support.harness import assert_right
        from synk.errors import CallTimeout
        with synk.fork(2, backend="numpy") as rt:
            assert_right(rt)  # the workers are up: their start takes time, too
            hostile = saboteurs.AtLoad(saboteurs.loop_for_ever, spared_pid=os.getpid())
            try:
                rt.function(lambda x: x.sum() if hostile else 0, outputs="sum")(np.arange(4.0), timeout=0.5)
            except CallTimeout:
                print("timeout")
            assert_right(rt)
    """).check("timeout\n")


@pytest.mark.parametrize("position", [0, 1, 2])
def test_C4_argument_that_cannot_be_pickled(shared_runtimes: Any, unpicklable: dict[str, Any], position: int) -> None:
    """Everything is pickled, once, before the first message."""
    rt = shared_runtimes[3]
    take = rt.function(lambda x, a, b, c: x.sum(), bcast_inputs=("a", "b", "c"), outputs="sum")
    assert take(ROWS, 1, 2, c=3) == ROWS.sum()
    for bad in (unpicklable["lock"], saboteurs.AtPickle(saboteurs.raise_value_error)):
        arguments: list[Any] = [{"fine": 1}, [2], "three"]
        arguments[position] = {"deep": [bad]}
        with same_workers(rt):
            sent = dict(rt.counters)
            with pytest.raises(SerializationError, match=rf"^cannot send {'abc'[position]}\['deep'\]\[0\] "):
                take(ROWS, arguments[0], arguments[1], c=arguments[2])
            assert rt.counters["messages_down"] == sent["messages_down"]


@pytest.mark.parametrize("op", [None, "first"])
def test_C5_result_that_cannot_be_pickled(shared_runtimes: Any, op: str | None) -> None:
    rt = shared_runtimes[3]

    def locked(row: np.ndarray) -> dict[str, Any]:
        return {"fine": 1.0, "locked": threading.Lock() if op == "first" or row[0] == 1 else 2}

    with same_workers(rt):
        with pytest.raises((SerializationError, TypeError)) as caught:
            rt.function(locked, outputs=op)(np.arange(3))
        if op is None:
            assert caught.type is SerializationError
            assert "rank 1" in str(caught.value)
            assert "locked" in str(caught.value)


@pytest.mark.parametrize("how", ["raises", "SystemExit"])
def test_C5_result_that_the_master_cannot_load(shared_runtimes: Any, how: str) -> None:
    rt = shared_runtimes[2]
    action = HOSTILE_LOADS[how][0]

    def booby_trap(row: np.ndarray) -> Any:
        return saboteurs.AtLoad(action, spared_pid=os.getpid()) if row[0] == 1 else None

    with same_workers(rt), pytest.raises(SerializationError, match="rank 1"):
        rt.function(booby_trap, outputs=None)(np.arange(2))


def test_C6_very_deep_argument(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    take = rt.function(lambda nest, x: x.sum(), bcast_inputs="nest", outputs="sum")
    with same_workers(rt):
        with pytest.raises(SerializationError, match="nest"):
            take(saboteurs.deep(TOO_DEEP), ROWS)
        assert take(saboteurs.deep(20), ROWS) == ROWS.sum()


def test_C6_very_deep_result(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    with same_workers(rt), pytest.raises((SerializationError, RecursionError)):
        rt.function(lambda x: saboteurs.deep(TOO_DEEP), outputs=None)(ROWS)


def test_C6_very_deep_closure(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    nest = saboteurs.deep(TOO_DEEP)
    with same_workers(rt), pytest.raises(SerializationError):
        rt.function(lambda x: x.sum() if nest else 0, outputs="sum")(ROWS)


@pytest.mark.high_memory
def test_C7_payload_of_more_than_2_gib(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    blob = bytes((1 << 31) + 5)
    length = rt.function(lambda blob, x: len(blob), bcast_inputs="blob", outputs="max")
    with same_workers(rt):
        assert length({"blob": blob}["blob"], ROWS) == len(blob)


@pytest.mark.parametrize("library", ["numpy", "python", "synk"])
def test_C8_other_versions_in_the_worker(runtime: Fork, library: str, tmp_path: Path) -> None:
    """The versions travel with the first message; a worker that finds others refuses to start."""
    script(f"""
        import platform
        from synk.errors import StartupError
        if {library!r} == "numpy":
            np.__version__ = "0.0.1"
        elif {library!r} == "synk":
            import synk._master.workers.starting
            synk._master.workers.starting.__version__ = "0.0.1"
        else:
            sys.version_info = (3, 0, 0, "final", 0)
            platform.python_version = lambda: "3.0.0"
            sys.version = "3.0.0 (fake)"
        try:
            rt = synk.fork(2, backend="numpy")
            rt.distribute()
            rt.function(lambda x: x)(np.arange(2.0))
        except StartupError as error:
            print("0.0.1" in str(error) or "3.0" in str(error))
    """).check("True\n")
