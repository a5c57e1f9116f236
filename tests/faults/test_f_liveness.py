"""F: code that never ends, and output and input of workers. A stuck worker is explained; and ``retry=``."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import harness, saboteurs
from support.gates import hear, say, sign
from support.harness import assert_right, pids, replaced_workers, same_workers, script

import synk
from synk.errors import CallCancelled, CallTimeout, WorkerDied

Fork = Callable[..., Any]


def test_F1_any_positive_number_is_a_time_limit(shared_runtimes: Any) -> None:
    """By each verb; which numbers there are: ``pure/test_environment.py``."""
    total, x = shared_runtimes[2].function(lambda x: x.sum(), outputs="sum"), np.arange(5.0)
    for limit in (10**400, float("inf"), 2**31, np.int64(5_000_000)):
        assert total(x, timeout=limit) == total.serial(x, timeout=limit) == 10
        assert total.submit(x, timeout=limit).result(limit) == 10
    for limit in (0, float("nan"), "5"):
        with pytest.raises(ValueError, match="cannot set a timeout: got"):
            total(x, timeout=limit)


def test_F1_F2_a_loop_ends_by_its_time_limit(rt: Any, subtests: pytest.Subtests) -> None:
    """SIGINT is enough for Python's code; who does not hear it, or catches it, is killed. The ranks are named."""

    def stubborn() -> None:
        while True:
            try:
                time.sleep(1)
            except BaseException:
                continue

    def endless(row: np.ndarray, loop: Callable[[], Any], ranks: tuple[int, ...]) -> float:
        if int(row[0]) in ranks:
            loop()
        return 1.0

    f = rt.function(endless, bcast_inputs=("loop", "ranks"), outputs="sum")
    assert f(np.arange(2), None, ()) == 2
    for loop, ranks in ((saboteurs.loop_for_ever, (1,)), (saboteurs.loop_for_ever, (0, 1)), (stubborn, (1,)),
                        (saboteurs.loop_in_c, (0,))):  # fmt: skip
        with subtests.test(loop.__name__, ranks=ranks):
            after = same_workers(rt) if loop is saboteurs.loop_for_ever else replaced_workers(rt, ranks)
            with after, pytest.raises(CallTimeout, match="endless") as caught:
                f(np.arange(2), loop, ranks, timeout=1.0)
            assert isinstance(caught.value, TimeoutError)
            named = re.search(r"ranks? ([\d, ]+) of 2", str(caught.value))
            assert named is not None
            assert {int(number) for number in named[1].split(",")} == set(ranks)


def test_F1_the_timeout_of_fork_holds_for_all_calls(runtime: Fork) -> None:
    rt = runtime(2, timeout=60.0)
    endless = rt.function(lambda row: saboteurs.loop_for_ever(), outputs=None)
    slow = rt.function(lambda row: time.sleep(0.6) or 1, outputs="sum")
    with same_workers(rt):
        rt.timeout = 0.5
        with pytest.raises(CallTimeout):
            endless(np.arange(2))
        assert slow(np.arange(2), timeout=60) == 2
        rt.timeout = 60.0


def test_F1_an_import_is_not_broken_off(runtime: Fork, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled libraries, such as torch, cannot be imported again in a process that has broken off an import."""
    text = """
        import sys, time
        if hasattr(sys, "_has_begun"):
            raise ImportError("this module was broken off while it was imported")
        sys._has_begun = True
        time.sleep(1.0)
    """
    (tmp_path / "not_twice.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    rt = runtime(2)

    def use(rows: np.ndarray) -> int:
        import not_twice  # type: ignore[import-not-found]

        while len(rows) == 2:
            pass
        return len(rows) + len(not_twice.__name__)

    f = rt.function(use, outputs="sum")
    with same_workers(rt):
        for _ in range(2):
            with pytest.raises(CallTimeout):
                f(np.arange(4), timeout=0.3)
        assert f(np.arange(2)) == 2 + 2 * len("not_twice")


def test_D1_a_finalizer_is_not_broken_off(runtime: Fork, tmp_path: Path) -> None:
    """What it raises is lost, and what it was to release stays."""
    begun, closed = sign(tmp_path / "begun"), tmp_path / "closed"

    class Closer:
        def __del__(self) -> None:
            say(begun)
            time.sleep(0.5)
            closed.touch()

    def use(row: np.ndarray) -> None:
        Closer()
        saboteurs.loop_for_ever()

    rt = runtime(2)
    with same_workers(rt):
        pending = rt.function(use, outputs=None).submit(np.arange(1))
        hear(begun)
        rt.interrupt()
        with pytest.raises(CallCancelled):
            pending.result()
    assert closed.exists()


# ----- what workers write and read


def test_F4_workers_flood_their_output() -> None:
    """Neither side waits for the other; the lines of one rank are whole, and bytes that are no text do no harm."""
    result = script("""
        with synk.fork(2, backend="numpy") as rt:
            def flood(row, number, chunk):
                for _ in range(50):
                    block = chunk * 100
                    while block:
                        block = block[os.write(number, block):]
                return 1.0
            f = rt.function(flood, bcast_inputs=("number", "chunk"), outputs="sum")
            for number, chunk in ((1, b"x" * 99 + b"\\n"), (2, b"y" * 100), (2, bytes(range(256)))):
                assert f(np.arange(2), number, chunk) == 2.0
            assert rt.function(lambda x: x.sum(), outputs="sum")(np.arange(4.0)) == 6.0
    """).check(stderr=None)
    assert sorted(result.stdout.splitlines()) == [f"[rank {rank}] {'x' * 99}" for rank in range(2) for _ in range(5000)]
    assert result.stderr.count("y") == 2 * 5000 * 101


def test_F4_a_reader_that_never_reads_stops_the_output_not_the_calls() -> None:
    script("""
        from support.harness import assert_right
        reader, writer = os.pipe()
        saved = os.dup(1)
        os.dup2(writer, 1)
        with synk.fork(2, backend="numpy") as rt:
            rt.function(lambda row: print("x" * 1000), outputs=None)(np.arange(2))
            flood = rt.function(lambda row: [print("x" * 1000) for _ in range(200)] and None, outputs=None)
            try:
                flood(np.arange(2), timeout=1.0)
            except synk.errors.CallTimeout:
                pass
            os.dup2(saved, 1)
            os.close(reader)
            os.close(writer)
            assert_right(rt)
    """).check(stderr=None)


def test_F5_standard_streams_in_a_worker_are_its_own(rt: Any) -> None:
    with same_workers(rt):
        assert rt.function(lambda row: sys.stdin.read(), outputs=None)(np.arange(2)) == ["", ""]


def test_F5_a_function_takes_its_streams_away(runtime: Fork, subtests: pytest.Subtests) -> None:
    def take_away(row: np.ndarray, how: str) -> None:
        if how == "close":
            for fd in range(3):
                os.close(fd)
        elif how == "None":
            sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]
        else:
            sys.stdout = sys.stderr = saboteurs.Recorder()  # type: ignore[assignment]

    for how in ("close", "None", "other"):
        rt = runtime(2)
        with subtests.test(how), same_workers(rt):
            assert rt.function(take_away, bcast_inputs="how")(np.arange(2), how) is None
            with pytest.raises(ValueError, match="still told"):
                rt.function(lambda row: saboteurs.raise_text("still told"))(np.arange(2))
        rt.close()


class FailingStream(io.StringIO):
    """A stream of the program's own, of which each method raises."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error


def test_F4_a_stream_of_the_master_that_fails_does_not_fail_a_call(
    rt: Any, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """The text is dropped; what the log says then: ``test_i_environment.py``."""
    total = rt.function(lambda x: (print("some words"), x.sum())[1], outputs="sum")
    closed = io.StringIO()
    closed.close()
    for stream in (FailingStream(SystemExit), FailingStream(saboteurs.Quit), closed, object(), None):
        with subtests.test(str(stream)), same_workers(rt), monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            assert total(np.arange(4.0)) == total.submit(np.arange(4.0)).result() == 6


def test_F8_a_slow_rank_is_no_dead_rank(rt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are monotonic: a clock that is set back or forward changes nothing."""
    jumps = iter([0.0, 1e9, -1e9] * 1000)
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    slow = rt.function(lambda row: ctypes.CDLL(None).usleep(300_000 if row[0] else 3_000), outputs=None)
    with same_workers(rt):
        assert slow(np.arange(2), timeout=20) == [0, 0]
    assert_right(rt)
    assert len(pids(rt)) == 2


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


def test_where_shows_phase_and_stack_of_each_rank(rt: Any, tmp_path: Path) -> None:
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


def test_retry_runs_a_call_again_after_a_death_and_never_after_an_exception(rt: Any, tmp_path: Path) -> None:
    """As often as it says: the function notes its runs on the one rank that has a row."""
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
