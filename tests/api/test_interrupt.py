"""``Runtime.interrupt()``: what Ctrl-C does, from another thread. Elsewhere than on Linux; the package as a program."""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.gates import Gate
from support.harness import same_workers, wait_for, waits_in_synk

import synk
from synk.errors import CallCancelled, ClosedError, UnsupportedError

X = np.arange(6.0)


def staying(rt: synk.Runtime, gate: Gate) -> Any:
    """Return a function that stays until it is interrupted. ``gate.has(0, 1)`` while both ranks are in it."""
    return rt.function(lambda x: gate.wait(synk.comm.rank), outputs=None)


@pytest.fixture
def later() -> Iterator[Callable[..., None]]:
    """``later(condition, act)``: a thread does ``act()`` as soon as ``condition()`` holds."""
    threads: list[threading.Thread] = []

    def start(condition: Callable[[], object], act: Callable[[], object]) -> None:
        def run() -> None:
            assert wait_for(condition)
            act()

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


def test_a_call_that_is_interrupted_from_another_thread(rt: Any, gate: Gate, later: Any) -> None:
    """It has assigned nothing."""
    w = rt.shared(np.zeros(3))

    def assign(x: Any) -> Any:
        w.value = w.value + 1
        gate.wait(synk.comm.rank)
        return 0.0

    with same_workers(rt):
        later(lambda: gate.has(0, 1), rt.interrupt)
        with pytest.raises(CallCancelled, match=r"the call was ended by Runtime.interrupt\(\)"):
            rt.function(assign, outputs="sum")(X)
    assert all((w[rank] == 0).all() for rank in range(2))


def test_an_interrupt_that_comes_between_calls_or_as_one_ends_is_not_meant_for_the_next(rt: Any) -> None:
    total = rt.function(lambda x: x.sum(), outputs="sum")
    with same_workers(rt):
        kept = total.submit(X)
        assert wait_for(kept.done)
        for number in range(100):
            thread = threading.Thread(target=rt.interrupt)
            thread.start()
            with contextlib.suppress(CallCancelled):
                total(X)
            thread.join()
            assert total(X + number) == (X + number).sum()
        assert kept.result() == X.sum()


@pytest.mark.parametrize("waits_for", ["nothing", "the last", "the last, with a limit", "a call behind them"])
def test_submitted_calls_are_interrupted(rt: Any, gate: Gate, later: Any, waits_for: str) -> None:
    total = rt.function(lambda x: x.sum(), outputs="sum")
    stay = staying(rt, gate)
    with same_workers(rt):
        gc.collect()
        total(X)  # a call can be sent behind one in flight if the workers have its function, and none is to be dropped
        calls = [stay.submit(X), total.submit(X)]
        if waits_for == "nothing":
            assert wait_for(lambda: gate.has(0, 1))
            rt.interrupt()
            assert all(call.done() for call in calls)
        else:
            later(lambda: gate.has(0, 1) and waits_in_synk("submit"), rt.interrupt)
        if waits_for == "a call behind them":
            with pytest.raises(CallCancelled):
                total(X)
        for call in reversed(calls):
            with pytest.raises(CallCancelled, match=r"Runtime.interrupt\(\)"):
                call.result(timeout=60.0 if "limit" in waits_for else None)


def test_a_signal_handler_may_interrupt_the_call_that_it_came_into(rt: Any, gate: Gate, later: Any) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: rt.interrupt())
    try:
        with same_workers(rt):
            later(lambda: gate.has(0, 1), lambda: os.kill(os.getpid(), signal.SIGUSR1))
            with pytest.raises(CallCancelled):
                staying(rt, gate)(X)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_where_it_cannot_work_it_says_so(shared_runtimes: Any, runtime: Any) -> None:
    with pytest.raises(UnsupportedError, match="cannot interrupt a runtime with num_workers=0"):
        shared_runtimes[0].interrupt()
    rt = runtime(1)
    rt.close()
    with pytest.raises(ClosedError):
        rt.interrupt()


ELSEWHERE = """
import asyncio, multiprocessing, os, select, signal, socket, subprocess, sys
import numpy as np

for module, names in {
    os: "sched_getaffinity memfd_create pidfd_open eventfd eventfd_read eventfd_write posix_fallocate",
    select: "epoll",
    signal: "pidfd_send_signal",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "darwin"
"""
"""A stand-in for Python on macOS: what it lacks there."""


TRY_EACH = """
import synk
f = synk.function(np.sum, outputs="sum")
print(synk.info())
for fork in (synk.fork, lambda: synk.fork(0), lambda: synk.Runtime(2), synk.Executor):
    try:
        fork()
    except synk.errors.UnsupportedError as error:
        print(error)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_fork_says_what_is_missing_elsewhere() -> None:
    done = python("-c", ELSEWHERE + TRY_EACH)
    assert done.returncode == 0 and "cores usable" in done.stdout
    told = done.stdout.splitlines()[-4:]
    assert len(told) == 4 and len(set(told)) == 1
    assert told[0].startswith("cannot fork: got the platform 'darwin', expected Linux.")
    assert "(os.memfd_create, os.pidfd_open, os.eventfd, os.sched_getaffinity)" in told[0]


def test_the_import_on_windows_says_so_in_a_sentence() -> None:
    done = python("-c", "import sys; sys.platform = 'win32'\nimport synk")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: cannot import synk: got the platform 'win32', expected Linux")


@pytest.mark.parametrize(
    ("argument", "status", "text"), [("--version", 0, "synk "), ("nothing", 2, "unrecognized arguments: nothing")]
)
def test_the_module_as_a_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argument: str, status: int, text: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["synk", argument])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("synk", run_name="__main__")
    assert ended.value.code == status and text in "".join(capsys.readouterr())
