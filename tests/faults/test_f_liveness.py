"""F: code that never ends, and output and input of workers."""

from __future__ import annotations

import ctypes
import itertools
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
from support.harness import assert_right, outcomes, pids, replaced_workers, same_workers, script

import synk
from synk.errors import CallTimeout, CollectiveMismatch

Fork = Callable[..., Any]
ROWS = np.arange(6.0)


def test_F1_F2_a_loop_ends_by_its_time_limit(reused: Fork, subtests: pytest.Subtests) -> None:
    """SIGINT is enough for Python's code; who does not hear it, or catches it, is killed. The ranks are named."""
    rt = reused(2)

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
    rt = runtime(2, timeout=1.0)
    endless = rt.function(lambda row: saboteurs.loop_for_ever(), outputs=None)
    with pytest.raises(CallTimeout):
        endless(np.arange(2))
    rt.timeout = 60.0
    with same_workers(rt):
        rt.timeout = 0.5
        with pytest.raises(CallTimeout):
            endless(np.arange(2))
        slow = rt.function(lambda row: time.sleep(0.6) or 1, outputs="sum")
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


# ----- what workers write and read

FLOODS = {"lines": b"x" * 99 + b"\n", "no newline": b"y" * 100, "binary": bytes(range(256))}


@pytest.mark.parametrize(("kind", "target"), [("lines", "stdout"), ("no newline", "stderr"), ("binary", "stdout")])
def test_F4_workers_flood_their_output(kind: str, target: str) -> None:
    """Neither side waits for the other; the lines of one rank are whole."""
    number, repeats = (1, 2)[target == "stderr"], 5000
    result = script(
        f"""
        chunk = {FLOODS[kind]!r}
        with synk.fork(2, backend="numpy") as rt:
            def flood(row):
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


class Unflushable:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        if not sys.is_finalizing():
            raise NotImplementedError


@pytest.mark.parametrize("how", ["close", "None", "other", "unflushable"])
def test_F5_a_function_takes_its_streams_away(runtime: Fork, how: str) -> None:
    rt = runtime(2)

    def take_away(row: np.ndarray) -> None:
        if how == "close":
            for fd in range(3):
                os.close(fd)
        elif how == "None":
            sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]
        elif how == "other":
            sys.stdout = sys.stderr = saboteurs.Recorder()  # type: ignore[assignment]
        else:
            sys.stdout = sys.__stdout__ = Unflushable()  # type: ignore[assignment,misc]

    with same_workers(rt):
        assert rt.function(take_away)(np.arange(2)) is None
        with pytest.raises(ValueError, match="still told"):
            rt.function(lambda row: saboteurs.raise_text("still told"))(np.arange(2))


STREAMS = {
    "no flush": "Stream.flush = property()",
    "write raises an exception": "Stream.write = fail(RuntimeError)",
    "write ends the program": "Stream.write = fail(SystemExit)",
    "flush raises what is no exception": "Stream.flush = fail(type('Odd', (BaseException,), {}))",
    "fileno raises": "Stream.fileno = fail(LookupError)",
    "an exception without words": "Stream.write = fail(type('Mute', (Exception,), {'__str__': fail(ValueError)}))",
    "no methods": "Stream = object",
    "closed": "Stream.write = lambda self, text: closed.write(text)",
    "None": "Stream = lambda: None",
}


def test_F4_a_stream_of_the_master_that_fails_does_not_fail_a_call(subtests: pytest.Subtests) -> None:
    """The text is dropped; the log says so once, unless there is no stream at all."""
    found = outcomes(
        f"""
        import contextlib, io, logging
        from support.harness import same_workers
        from synk._wire.cell import cell

        def fail(kind):
            def method(self, *args):
                raise kind(*args)
            return method

        closed = io.StringIO()
        closed.close()
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("synk").addHandler(handler)
        logging.getLogger("synk").propagate = False

        @contextlib.contextmanager
        def surroundings():
            global rt
            with synk.fork(2, backend="numpy") as rt:
                yield

        def case(fault, stream):
            class Stream:
                def write(self, text): pass
                def flush(self): pass

            names = dict(globals(), Stream=Stream)
            exec({STREAMS}[fault], names)
            said.clear()
            cell.broken_streams.clear()  # of which it was said in an earlier case

            def talk(x):
                print("some words", file=getattr(sys, stream))
                return x.sum()

            total = rt.function(talk, outputs="sum")
            with same_workers(rt):
                saved = getattr(sys, stream)
                setattr(sys, stream, names["Stream"]())
                try:
                    for _ in range(3):
                        assert total(np.arange(4.0)) == 6
                        assert total.submit(np.arange(4.0)).result() == 6
                finally:
                    setattr(sys, stream, saved)
            dropped = f"what workers print to {{stream}} is dropped: sys.{{stream}} raised "
            assert [text.startswith(dropped) for text in said] == [True] * (fault != "None"), said
        """,
        list(itertools.product(STREAMS, ("stdout", "stderr"))),
    )
    for case, outcome in found.items():
        with subtests.test(str(case)):
            assert outcome == ""


def test_F4_a_log_handler_that_raises_does_not_fail_a_call() -> None:
    """Neither of the report of a long call, nor of that of a stream that failed; and what they say is not lost."""
    result = script(
        """
        import logging
        from support.signs import hear, say, sign

        class Fails(logging.Handler):
            def emit(self, record):
                if "has run for" in record.getMessage():
                    say(go)
                raise SystemExit("no")

        class Stream:
            def write(self, text):
                raise ValueError

        go = sign(__file__ + ".go")
        logging.getLogger("synk").addHandler(Fails())
        with synk.fork(2, backend="numpy") as rt:
            rt.function(lambda x: x.sum(), outputs="sum")(np.arange(4.0))
            total = rt.function(lambda x: (print("words"), x[0] or hear(go), x.sum())[2], outputs="sum")
            saved, sys.stdout = sys.stdout, Stream()
            assert total(np.arange(4.0)) == 6
            sys.stdout = saved
        """,
        env={"SYNK_STUCK_AFTER": "0.5"},
    ).check("", stderr=None)
    assert "has run for more than 0.5 s" in result.stderr
    assert "what workers print to stdout is dropped: sys.stdout raised ValueError" in result.stderr
    assert result.stderr.count("(a handler of logging raised SystemExit)") >= 2


def test_F4_a_ctrl_c_while_a_stream_is_written_comes_out(reused: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = reused(2)

    class Stream:
        def write(self, text: str) -> None:
            if "rank 1" in text:
                signal.raise_signal(signal.SIGINT)

        def flush(self) -> None:
            pass

    total = rt.function(lambda x: (print("words"), x.sum())[1], outputs="sum")
    rt.distribute()
    with monkeypatch.context() as context:
        context.setattr("sys.stdout", Stream())
        with pytest.raises(KeyboardInterrupt):
            total(np.arange(4.0))
    assert_right(rt)


# ----- collectives that do not meet

MISMATCHES: dict[str, Callable[[np.ndarray], object]] = {
    "collective": lambda row: synk.comm.all_reduce(row) if row[0] else synk.comm.all_gather(row),
    "op": lambda row: synk.comm.all_reduce(row, "sum" if row[0] else "max"),
    "dtype": lambda row: synk.comm.all_reduce(row.astype("f4" if row[0] else "f8")),
    "shape": lambda row: synk.comm.all_reduce(np.ones(1 + int(row[0]))),
    "large shape": lambda row: synk.comm.all_reduce(np.ones(1_000_000 + int(row[0]))),
    "root": lambda row: synk.comm.broadcast(row, root=int(row[0])),
    "order": lambda row: [synk.comm.barrier, lambda: synk.comm.all_reduce(row)][:: 1 if row[0] else -1][0](),
}


def test_F6_F7_ranks_that_do_not_meet(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    """Each rank's request is told; nobody hangs; the next collective is right."""
    rows = np.arange(2.0)
    rt = shared_runtimes[2]
    agree = rt.function(lambda row: synk.comm.all_reduce(row, "sum"), outputs="first")
    for kind, disagree in MISMATCHES.items():
        f = rt.function(lambda row, disagree=disagree: disagree(row) is None, bcast_inputs="disagree", outputs=None)
        for _ in range(2):
            with subtests.test(kind), same_workers(rt):
                with pytest.raises(CollectiveMismatch) as caught:
                    f(rows, timeout=60)
                assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)
                assert agree(rows) == [1.0]
    rt = shared_runtimes[3]
    leave = rt.function(
        lambda row, leaver: row if row[0] == leaver else synk.comm.all_reduce(row), bcast_inputs="leaver", outputs=None
    )
    for leaver in range(3):
        mismatch = pytest.raises(CollectiveMismatch, match=rf"rank {leaver}")
        with subtests.test("a rank leaves without joining", leaver=leaver), same_workers(rt), mismatch:
            leave(np.arange(3.0), leaver, timeout=60)


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
