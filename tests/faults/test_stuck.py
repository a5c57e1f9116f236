"""A stuck worker is explained: ``Runtime.where()``, the log after ``SYNK_STUCK_AFTER`` seconds; and ``retry=``."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import harness
from support.signs import hear, say, sign

import synk
from synk.errors import WorkerDied

Fork = Callable[..., Any]


def long_call(x: Any, path: str) -> float:
    """Wait on each rank until the test says go."""
    hear(f"{path}.{synk.comm.rank}")
    return float(x.sum())


def long_wait(x: Any, path: str) -> float:
    """Wait on rank 1 until the test says go, and on rank 0 for rank 1."""
    if synk.comm.rank == 1:
        hear(f"{path}.1")
    synk.comm.barrier()
    return float(x.sum())


@contextlib.contextmanager
def stuck_call(rt: Any, target: Callable[..., Any], path: Path, ranks: tuple[int, ...]) -> Iterator[None]:
    """Make a call in a thread that lasts as long as the body; ``ranks`` wait to be told."""
    function = rt.function(target, bcast_inputs="path", outputs="sum")
    rt.distribute()
    names = [sign(Path(f"{path}.{rank}")) for rank in ranks]
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(function(np.ones(2), str(path))))
    thread.start()
    try:
        yield
    finally:
        for name in names:
            say(name)
        thread.join()
    assert results == [2.0]


def test_where_shows_phase_and_stack_of_each_rank(reused: Fork, tmp_path: Path) -> None:
    rt = reused(2)
    pids = harness.pids(rt)
    with stuck_call(rt, long_call, tmp_path / "go", (0, 1)):
        assert harness.wait_for(lambda: rt.where().count("in long_call") == 2)
        text = rt.where()
        assert text.count("): function\n") == 2
        assert all(f"rank {rank} (pid {pid}" in text for rank, pid in enumerate(pids))
        assert {rank for rank, stack in rt.stacks().items() if "in hear" in stack} == {0, 1}
    assert rt.where().count("): idle\n") == 2
    assert rt.function(lambda x: x.sum(), outputs="sum")(np.ones(1)) == 1
    assert rt.where().count("): idle\n") == 2, "a rank that has loaded a function and gets no rows"


def test_a_long_call_is_explained_once(
    runtime: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SYNK_STUCK_AFTER", "0.5")
    rt = runtime(2)
    harness.assert_right(rt)

    def messages() -> list[str]:
        told = "'long_wait' has run for more than 0.5 s"
        return [record.getMessage() for record in caplog.records if told in record.getMessage()]

    with caplog.at_level(logging.WARNING, "synk"), stuck_call(rt, long_wait, tmp_path / "go", (1,)):
        assert harness.wait_for(messages)
    (text,) = messages()
    assert all(word in text for word in ("in long_wait", "in barrier", "rank 0 (pid", "rank 1 (pid"))


def test_a_bad_number_in_the_environment_is_named_by_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SYNK_STUCK_AFTER", "SYNK_SPIN_US"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "soon")
            with pytest.raises(ValueError, match=rf"{name}.*'soon'"):
                synk.Runtime(1, backend="numpy")


# ----- calls that are repeated


def test_retry_runs_a_call_again_after_a_death_and_never_after_an_exception(reused: Fork, tmp_path: Path) -> None:
    """As often as it says: the function notes its runs on the one rank that has a row."""
    rt = reused(2)
    path = tmp_path / "runs"

    def run(x: Any, path: str, num_deaths: int, fails: bool) -> float:
        with open(path, "a", encoding="utf-8") as file:
            file.write(".")
        if fails:
            raise KeyError("no")
        if os.stat(path).st_size <= num_deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(x.sum())

    def runs(num_deaths: int, fails: bool, retry: int) -> tuple[Any, int]:
        path.unlink(missing_ok=True)
        f = rt.function(run, bcast_inputs=("path", "num_deaths", "fails"), outputs="sum", retry=retry)
        try:
            found: Any = f(np.ones(1), str(path), num_deaths, fails)
        except (WorkerDied, KeyError) as error:
            found = type(error)
        return found, path.stat().st_size

    assert runs(1, False, retry=1) == (1.0, 2)
    assert runs(2, False, retry=1) == (WorkerDied, 2)
    assert runs(0, True, retry=3) == (KeyError, 1)
