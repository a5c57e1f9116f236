"""A stuck worker is explained: ``Runtime.where()``, the log after ``SYNK_STUCK_AFTER`` seconds, and ``retry=``."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import harness

import synk
from synk._master.processes import reports as _reports
from synk._pure import environment as _environment
from synk.errors import ClosedError, WorkerDied

Fork = Callable[..., Any]


def wait_for_file(path: str) -> None:
    """Block until somebody writes the file: a function that is stuck as long as the test wants."""
    while not os.path.exists(path):
        time.sleep(0.01)


def build(rt: Any, target: Callable[..., Any]) -> Any:
    return rt.function(target, bcast_inputs="path", outputs="sum")


def stuck_call(function: Any, path: Path) -> threading.Thread:
    """Start a call in a thread; it ends when ``path`` exists."""
    thread = threading.Thread(target=function, args=(np.ones(2), str(path)))
    thread.start()
    return thread


def explained(rt: Any, word: str) -> str:
    """Ask until every rank's answer holds ``word``."""
    deadline = time.monotonic() + 30
    while True:
        text = rt.where()
        if text.count(word) == rt.world_size:
            return str(text)
        assert time.monotonic() < deadline, text
        time.sleep(0.01)


def test_where_shows_phase_and_stack_of_each_rank(reused: Fork, tmp_path: Path) -> None:
    rt = reused(2)
    path = tmp_path / "go"

    def stuck_here(x: Any, path: str) -> float:
        wait_for_file(path)
        return float(x.sum())

    thread = stuck_call(build(rt, stuck_here), path)
    text = explained(rt, "in stuck_here")
    assert text.count("): function\n") == 2
    for worker in rt._session.workers.by_rank:
        assert f"rank {worker.rank} (pid {worker.process.pid}" in text
    path.touch()
    thread.join()
    assert rt.where().count("): idle\n") == 2


def test_a_rank_that_has_loaded_a_function_and_gets_no_rows_is_idle(reused: Fork) -> None:
    rt = reused(2)
    assert rt.function(lambda x: x.sum(), outputs="sum")(np.ones(1)) == 1
    assert rt.where().count("): idle\n") == 2


def test_where_answers_while_c_code_holds_the_interpreter(reused: Fork, tmp_path: Path) -> None:
    rt = reused(1)

    def held_here(x: Any, path: str) -> float:
        ctypes.PyDLL(None).usleep(1_500_000)  # PyDLL keeps the interpreter's lock
        return float(x.sum())

    thread = stuck_call(build(rt, held_here), tmp_path / "unused")
    explained(rt, "in held_here")
    thread.join()


def test_where_tells_of_stopped_and_dead_workers(runtime: Fork) -> None:
    rt = runtime(2)
    pids = harness.pids(rt)
    os.kill(pids[0], signal.SIGSTOP)
    harness.wait_for(lambda: "stopped (SIGSTOP)" in rt.where())
    os.kill(pids[0], signal.SIGCONT)
    rt.close()
    with pytest.raises(ClosedError):
        rt.where()


def reported(
    runtime: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, target: Any
) -> str:
    """Return the one report on a call of ``target``, which runs for longer than is expected."""
    monkeypatch.setenv("SYNK_STUCK_AFTER", "0.5")
    rt = runtime(2)
    path = tmp_path / "go"
    function = build(rt, target)
    with caplog.at_level(logging.WARNING, "synk"):
        path.touch()
        function(np.ones(2), str(path))  # starting and loading may take that long, too
        path.unlink()
        caplog.clear()
        thread = stuck_call(function, path)
        assert harness.wait_for(lambda: any("more than 0.5 s" in record.getMessage() for record in caplog.records))
        path.touch()
        thread.join()
    messages = [record.getMessage() for record in caplog.records if target.__name__ in record.getMessage()]
    assert len(messages) == 1
    return str(messages[0])


def test_a_long_call_in_which_all_ranks_compute_gets_a_line(
    runtime: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def long_call(x: Any, path: str) -> float:
        wait_for_file(path)
        return float(x.sum())

    text = reported(runtime, tmp_path, monkeypatch, caplog, long_call)
    assert text == (
        "'long_call' has run for more than 0.5 s: 2 ranks are at work in it. Runtime.where() shows what they do."
    )


def test_a_long_call_in_which_a_rank_waits_for_another_is_explained(
    runtime: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def long_wait(x: Any, path: str) -> float:
        if synk.comm.rank == 1:
            wait_for_file(path)
        synk.comm.barrier()
        return float(x.sum())

    text = reported(runtime, tmp_path, monkeypatch, caplog, long_wait)
    assert "in long_wait" in text and "in barrier" in text and "rank 0 (pid" in text and "rank 1 (pid" in text


def test_a_long_call_that_one_rank_has_finished_is_explained(
    runtime: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def long_half(x: Any, path: str) -> float:
        if synk.comm.rank == 1:
            wait_for_file(path)
        return float(x.sum())

    text = reported(runtime, tmp_path, monkeypatch, caplog, long_half)
    assert "rank 0 (pid" in text and "in long_half" in text


@pytest.mark.parametrize("text, seconds", [("2.5", 2.5), ("0", float("inf"))])
def test_the_environment_says_when(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("SYNK_STUCK_AFTER", text)
    assert _environment.stuck_after_s() == seconds


@pytest.mark.parametrize("name", ["SYNK_STUCK_AFTER", "SYNK_SPIN_US"])
@pytest.mark.parametrize("text", ["soon", "nan", ""])
def test_a_bad_number_in_the_environment_is_named_by_fork(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=rf"{name}.*'{text}'"):
        synk.Runtime(1, backend="numpy")


@pytest.mark.parametrize("spin_us", ["0", "500", "-1"])
def test_an_idle_worker_sleeps(runtime: Fork, monkeypatch: pytest.MonkeyPatch, spin_us: str) -> None:
    monkeypatch.setenv("SYNK_SPIN_US", spin_us)
    rt = runtime(1)
    process_time = rt.function(lambda row: time.process_time(), outputs="max")
    before = process_time(np.ones(1))
    time.sleep(0.5)
    assert process_time(np.ones(1)) - before < 0.1  # a worker that never sleeps would have used all of it


def die_once(x: Any, path: str) -> float:
    """End this worker if it is the first to come here."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return float(x.sum())
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def test_retry_runs_a_call_again_after_a_death(reused: Fork, tmp_path: Path) -> None:
    rt = reused(2)
    again = rt.function(die_once, bcast_inputs="path", outputs="sum", retry=1)
    assert again(np.arange(6.0), str(tmp_path / "died")) == 15.0


def test_retries_are_counted(runtime: Fork, tmp_path: Path) -> None:
    rt = runtime(2)

    def die(x: Any, path: str) -> float:
        with open(path, "a") as file:
            file.write(".")
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    path = tmp_path / "deaths"
    with pytest.raises(WorkerDied):
        rt.function(die, bcast_inputs="path", outputs="sum", retry=1)(np.ones(1), str(path))
    assert path.read_text() == ".."


def test_an_exception_is_not_retried(reused: Fork, tmp_path: Path) -> None:
    rt = reused(1)

    def fail(x: Any, path: str) -> float:
        with open(path, "a") as file:
            file.write(".")
        raise KeyError("no")

    path = tmp_path / "calls"
    with pytest.raises(KeyError):
        rt.function(fail, bcast_inputs="path", outputs="sum", retry=3)(np.ones(1), str(path))
    assert path.read_text() == "."


def test_retry_is_refused_where_it_has_no_meaning(shared_runtimes: Any) -> None:
    rt = shared_runtimes[1]
    w = rt.shared(np.zeros(2))
    with pytest.raises(ValueError, match="retry=1 with updates="):
        rt.function(lambda x: (x.sum(), w.value), updates=w, retry=1)
    with pytest.raises(ValueError, match="got retry=-1"):
        synk.function(lambda x: x, retry=-1)
    total = rt.function(lambda x: x.sum(), outputs="sum", retry=1)
    ahead: dict[str, Callable[[], Any]] = {
        "submit": lambda: total.submit(np.ones(4)),
        "stream": lambda: next(total.stream([np.ones(4)])),
        "rows": lambda: next(total.rows(np.ones(4), batch_size=2)),
    }
    for verb, act in ahead.items():
        with pytest.raises(ValueError, match=rf"cannot {verb.replace('rows', 'stream')} .* retry=1"):
            act()


def test_A10_an_out_of_memory_kill_is_named(runtime: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = runtime(2)
    kills = iter(range(1, 100))
    monkeypatch.setattr(_reports, "oom_kills", lambda: next(kills))

    def killed(x: Any) -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    rt.function(lambda x: x.sum(), outputs="sum")(np.ones(4))  # its reply reports the resident memory
    with pytest.raises(WorkerDied, match=r"out-of-memory killer was at work \(rank \d held \d+ MiB"):
        rt.function(killed, outputs="sum")(np.ones(2))
