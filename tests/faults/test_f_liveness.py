"""F: code that never ends, and output and input of workers."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import Scenario, assert_right, pids, replaced_workers, same_workers, script

import synk
from synk.errors import CallTimeout, CollectiveMismatch

Fork = Callable[..., Any]
ROWS = np.arange(6.0)


@pytest.mark.parametrize("ranks", [pytest.param((0,), marks=pytest.mark.storm), (1,), (0, 1)], ids=str)
def test_F1_a_loop_in_python_ends_by_timeout(reused: Fork, ranks: tuple[int, ...]) -> None:
    """SIGINT is enough: the same workers, and nothing of the old call in the next answers."""
    rt = reused(2)

    def loop(row: np.ndarray) -> float:
        if int(row[0]) in ranks:
            saboteurs.loop_for_ever()
        return 1.0

    endless = rt.function(loop, outputs="sum", name="endless")
    with same_workers(rt):
        for _ in range(2):
            with pytest.raises(CallTimeout, match="endless") as caught:
                endless(np.arange(2), timeout=1.0)
            assert isinstance(caught.value, TimeoutError)
            named = re.search(r"ranks? ([\d, ]+) of 2", str(caught.value))
            assert named is not None
            assert {int(number) for number in named[1].split(",")} == set(ranks)


def test_F1_the_timeout_of_fork_holds_for_all_calls(runtime: Fork) -> None:
    rt = runtime(2, timeout=1.0)
    with pytest.raises(CallTimeout):
        rt.function(lambda row: saboteurs.loop_for_ever(), outputs=None)(np.arange(2))
    rt.timeout = 30.0
    with same_workers(rt):
        rt.timeout = 1.0
        with pytest.raises(CallTimeout):
            rt.function(lambda row: saboteurs.loop_for_ever(), outputs=None)(np.arange(2))
        slow = rt.function(lambda row: time.sleep(1.2) or 1, outputs="sum")
        assert slow(np.arange(2), timeout=20) == 2
        rt.timeout = 30.0


def test_F1_a_function_that_catches_the_interrupt_is_killed(reused: Fork) -> None:
    rt = reused(2)

    def stubborn(row: np.ndarray) -> None:
        while row[0] == 1:
            try:
                time.sleep(1)
            except BaseException:
                continue

    with replaced_workers(rt, [1]), pytest.raises(CallTimeout):
        rt.function(stubborn, outputs=None)(np.arange(2), timeout=0.2)


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


def test_F2_a_loop_in_c_ends_by_sigkill(reused: Fork) -> None:
    rt = reused(2)
    with replaced_workers(rt, [1]), pytest.raises(CallTimeout):
        rt.function(lambda row: saboteurs.loop_in_c() if row[0] else None, outputs=None)(np.arange(2), timeout=0.2)


def test_F3_a_loop_without_timeout_can_be_interrupted() -> None:
    with Scenario("""
        from support import saboteurs
        from support.harness import assert_right, pids
        with synk.fork(2, backend="numpy") as rt:
            before = pids(rt)
            def loop(row):
                print("looping", flush=True)
                saboteurs.loop_for_ever()
            try:
                rt.function(loop)(np.arange(2))
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            assert pids(rt) == before
            assert_right(rt)
    """) as scenario:
        lines = {scenario.wait_for_line(f"[rank {rank}] looping") for rank in range(2)}
        scenario.send_signal(signal.SIGINT)
        stdout = scenario.finish().check().stdout
    assert len(lines) == 2
    assert stdout.endswith("interrupted\n")


FLOODS = {
    "lines": b"x" * 99 + b"\n",
    "no newline": b"y" * 100,
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("target", ["stdout", "stderr"])
@pytest.mark.parametrize("kind", FLOODS)
@pytest.mark.sampled(90)
def test_F4_workers_flood_their_output(kind: str, target: str) -> None:
    """Neither side waits for the other; the lines of one rank are whole."""
    number, repeats = (1, 2)[target == "stderr"], 5000
    result = script(
        f"""
        chunk = {FLOODS[kind]!r}
        with synk.fork(2, backend="numpy") as rt:
            def flood(row):
                sent = 0
                for _ in range({repeats} // 100):
                    block = chunk * 100
                    while block:
                        block = block[os.write({number}, block):]
                return 1.0
            assert rt.function(flood, outputs="sum")(np.arange(2)) == 2.0
            assert rt.function(lambda x: x.sum(), outputs="sum")(np.arange(4.0)) == 6.0
        """
    ).check(stderr=None)
    text = getattr(result, target)
    assert getattr(result, "stdout" if target == "stderr" else "stderr") == ""
    if kind == "lines":
        lines = text.splitlines()
        assert len(lines) == 2 * repeats
        assert {line.split("] ")[0] for line in lines} == {"[rank 0", "[rank 1"}
        assert {line.split("] ")[1] for line in lines} == {"x" * 99}
    elif kind == "no newline":
        assert text.count("y") == 2 * repeats * 100


def test_F4_a_stream_that_is_full_holds_whole_lines() -> None:
    """What does not fit is written later, and the lines of another rank may come before it."""
    from synk._master.processes.output import _write_some

    text = f"[rank 0] {'x' * 99}\n" * 2000
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as reader, open(write_fd, "w", encoding="ascii") as stream:
        rest = _write_some(stream, text)
        written = os.read(reader.fileno(), len(text)).decode("ascii")
    assert rest and written + rest == text
    assert written.endswith("\n")


def test_F4_the_masters_output_is_closed_or_full() -> None:
    script("""
        from support.harness import assert_right
        sys.stdout.close()
        os.close(1)
        with synk.fork(2, backend="numpy") as rt:
            rt.function(lambda row: print("lost"), outputs=None)(np.arange(2))
            assert_right(rt)
        os.open("/dev/null", os.O_WRONLY)
    """).check("", stderr=None)


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


def test_F5_standard_streams_in_a_worker_are_its_own(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    with same_workers(rt):
        assert rt.function(lambda row: sys.stdin.read(), outputs=None)(np.arange(2)) == ["", ""]


@pytest.mark.parametrize("how", ["close", "None", "other"])
def test_F5_a_function_takes_its_streams_away(runtime: Fork, how: str) -> None:
    rt = runtime(2)

    def take_away(row: np.ndarray) -> None:
        if how == "close":
            for fd in range(3):
                os.close(fd)
        elif how == "None":
            sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]
        else:
            sys.stdout = sys.stderr = saboteurs.Recorder()  # type: ignore[assignment]

    with same_workers(rt):
        assert rt.function(take_away)(np.arange(2)) is None
        with pytest.raises(ValueError, match="still told"):
            rt.function(lambda row: saboteurs.raise_text("still told"))(np.arange(2))


MISMATCHES: dict[str, Callable[[np.ndarray], object]] = {
    "collective": lambda row: synk.comm.all_reduce(row) if row[0] else synk.comm.all_gather(row),
    "op": lambda row: synk.comm.all_reduce(row, "sum" if row[0] else "max"),
    "dtype": lambda row: synk.comm.all_reduce(row.astype("f4" if row[0] else "f8")),
    "shape": lambda row: synk.comm.all_reduce(np.ones(1 + int(row[0]))),
    "large shape": lambda row: synk.comm.all_reduce(np.ones(1_000_000 + int(row[0]))),
    "root": lambda row: synk.comm.broadcast(row, root=int(row[0])),
    "order": lambda row: [synk.comm.barrier, lambda: synk.comm.all_reduce(row)][:: 1 if row[0] else -1][0](),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_F6_ranks_call_different_collectives(shared_runtimes: Any, kind: str) -> None:
    """Each rank's request is told; nobody hangs; the next collective is right."""
    rt = shared_runtimes[2]
    disagree = MISMATCHES[kind]
    rows = np.arange(2.0)
    agree = rt.function(lambda row: synk.comm.all_reduce(row, "sum"), outputs="first")
    with same_workers(rt):
        for _ in range(3):
            with pytest.raises(CollectiveMismatch) as caught:
                rt.function(lambda row: disagree(row) is None, outputs=None)(rows, timeout=20)
            for rank in range(2):
                assert f"rank {rank}" in str(caught.value)
            assert agree(rows) == [1.0]


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_F7_a_rank_leaves_without_joining(shared_runtimes: Any, leaver: int) -> None:
    rt = shared_runtimes[3]

    def leave(row: np.ndarray) -> np.ndarray:
        return row if row[0] == leaver else synk.comm.all_reduce(row)

    with same_workers(rt), pytest.raises(CollectiveMismatch, match=rf"rank {leaver}"):
        rt.function(leave, outputs=None)(np.arange(3.0), timeout=20)


def test_F8_a_slow_rank_is_no_dead_rank(reused: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are monotonic: a clock that is set back or forward changes nothing."""
    rt = reused(2)
    jumps = iter([0.0, 1e9, -1e9] * 1000)
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    slow = rt.function(lambda row: ctypes.CDLL(None).usleep(300_000 if row[0] else 3_000), outputs=None)
    with same_workers(rt):
        assert slow(np.arange(2), timeout=20) == [0, 0]
    assert_right(rt)
    assert len(pids(rt)) == 2
