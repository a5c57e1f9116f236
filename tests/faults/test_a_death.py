"""A: worker processes that die, at every step of their life."""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
import os
import random
import re
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import (
    EVERY_TIME,
    assert_right,
    children,
    failpoint,
    kill_and_wait,
    kill_in,
    pids,
    process_stat,
    replaced_workers,
    same_workers,
    script,
    wait_for,
    wait_until_dead,
)
from support.seeds import seeds

import synk
from synk._master.processes.output import Output
from synk._wire.descriptors import Descriptor
from synk.errors import CallTimeout, ClosedError, StartupError, WorkerDied

Fork = Callable[..., Any]
ROWS = np.arange(6.0)
LARGE = 100_000
CALL_STEPS = (
    "call.received",
    "call.before_function",
    "call.after_function",
    "call.published",
    "call.before_reply",
)


def total(runtime: Any, output: int = 1, **options: Any) -> Any:
    """Return a function whose output is the sum of its rows, repeated to ``output`` elements."""
    return runtime.function(lambda x: np.full(output, x.sum()), outputs="sum", name="total", **options)


def assert_says(died: pytest.ExceptionInfo[WorkerDied], ranks: tuple[int, ...], exits: tuple[str, ...]) -> None:
    """Assert that the error names who died and how, in its fields and in its words."""
    error = died.value
    assert error.ranks == ranks
    assert error.exits == exits
    assert len(error.pids) == len(ranks)
    for rank, pid, how in zip(error.ranks, error.pids, error.exits, strict=True):
        assert re.search(rf"\brank {rank}\b", str(error)) or f"ranks {', '.join(map(str, ranks))}" in str(error)
        assert str(pid) in str(error)
        assert how in str(error)


def test_A1_sigkill_while_idle(reused: Fork) -> None:
    rt = reused(2)
    with replaced_workers(rt, [1]) as before:
        kill_and_wait(before[1])
        with pytest.warns(RuntimeWarning, match=r"rank 1.*SIGKILL") as caught:
            assert total(rt)(ROWS) == ROWS.sum()
        assert len(caught) == 1


@pytest.mark.parametrize("step", CALL_STEPS)
def test_A2_sigkill_inside_the_call(reused: Fork, step: str) -> None:
    rt = reused(2, failpoint(step, rank=1, nth=3))  # the pids are asked for first, then one good call
    with replaced_workers(rt, [1]) as before:
        assert total(rt)(ROWS) == ROWS.sum()
        with pytest.raises(WorkerDied) as died:
            total(rt)(ROWS)
        assert_says(died, (1,), ("SIGKILL",))
        assert died.value.pids == (before[1],)
        assert died.value.phase == "call"


def test_A2_sigkill_inside_the_function(reused: Fork) -> None:
    rt = reused(3)

    def suicide(x: np.ndarray) -> float:
        if x[0] == 0:
            saboteurs.kill_self()
        return x.sum()

    with replaced_workers(rt, [0]), pytest.raises(WorkerDied, match="'suicide'") as died:
        rt.function(suicide, outputs="sum")(ROWS)
    assert_says(died, (0,), ("SIGKILL",))


def test_A2_another_function_before_and_after_a_death_keeps_its_data(reused: Fork) -> None:
    """Functions are sent again and ``Data`` is passed again, the ones of before the death included."""
    rt = reused(2)
    values = np.random.default_rng(0).normal(size=(1000, 5))
    data, weights = rt.data(values), rt.data(values[0])
    product = rt.function(lambda w, x: x @ w, bcast_inputs="w", outputs="gather")
    expected = values @ values[0]
    np.testing.assert_allclose(product(weights, data), expected)
    with replaced_workers(rt, [0, 1]) as before:
        with pytest.raises(WorkerDied):
            die_together(rt, before)
        np.testing.assert_allclose(product(weights, data), expected)
        data[3] = 7.0
        np.testing.assert_allclose(product(weights, data)[3], 7.0 * values[0].sum())


@pytest.mark.parametrize("op", ["avg", "sum", "prod", "min", "max"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.sampled(4)
def test_A3_sigkill_inside_a_reduction(reused: Fork, op: str, rank: int) -> None:
    rt = reused(2, failpoint("reduce.before" if op in ("avg", "min") else "reduce.after", rank))
    big = rt.function(lambda x: np.full(1 << 18, x.max()), outputs=op)
    with replaced_workers(rt, [rank]), pytest.raises(WorkerDied) as died:
        big(ROWS)
    assert_says(died, (rank,), ("SIGKILL",))
    expected = {"avg": 3.5, "sum": 7.0, "prod": 10.0, "min": 2.0, "max": 5.0}[op]
    np.testing.assert_allclose(big(ROWS), np.full(1 << 18, expected))


COLLECTIVES: dict[str, Callable[[np.ndarray], object]] = {
    "all_reduce": lambda x: synk.comm.all_reduce(x, "sum"),
    "large all_reduce": lambda x: synk.comm.all_reduce(np.ones(1 << 20), "sum"),
    "broadcast": lambda x: synk.comm.broadcast(x, root=1),
    "all_gather": lambda x: synk.comm.all_gather(x),
    "barrier": lambda x: synk.comm.barrier(),
    "recv": lambda x: synk.comm.recv(peer=1, like=x),
}


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_A3_sigkill_while_the_others_wait_in_a_collective(reused: Fork, kind: str) -> None:
    """They leave through the abort word: the death is the error, in no time, and the next collective is right."""
    rt = reused(3)
    meet = COLLECTIVES[kind]

    def die_or_meet(x: np.ndarray) -> None:
        if x[0] == 1:
            saboteurs.kill_self()
        meet(x)

    with replaced_workers(rt, [1]), pytest.raises(WorkerDied) as died:
        rt.function(die_or_meet)(np.arange(3.0), timeout=20)
    assert_says(died, (1,), ("SIGKILL",))
    assert rt.function(lambda x: synk.comm.all_reduce(x, "sum"), outputs="first")(np.arange(3.0)) == [3.0]


def test_A4_sigkill_holding_a_lock_of_the_user(reused: Fork) -> None:
    """Such a lock is never released by the system; the runtime has none of its own that could be lost so."""
    rt = reused(2)

    def die_holding(x: np.ndarray) -> float:
        lock = multiprocessing.get_context("fork").Lock()
        lock.acquire()
        if x[0] == 0:
            saboteurs.kill_self()
        return x.sum()

    with replaced_workers(rt, [0]), pytest.raises(WorkerDied):
        rt.function(die_holding, outputs="sum")(ROWS)


@pytest.mark.parametrize("outputs", ["gather", None])
def test_A5_sigkill_while_half_a_reply_is_written(reused: Fork, outputs: str | None) -> None:
    rt = reused(2, failpoint("call.after_header", rank=1))
    big = rt.function(lambda x: np.ones((3, 1 << 20)) if outputs else b"x" * (24 << 20), outputs=outputs)
    with pytest.raises(WorkerDied) as died:
        big(ROWS)
    assert_says(died, (1,), ("SIGKILL",))
    assert_right(rt)


def test_A6_death_after_the_reply_is_complete(reused: Fork) -> None:
    rt = reused(2, failpoint("call.after_reply", rank=1, nth=2))
    with replaced_workers(rt, [1]) as before:
        assert total(rt)(ROWS) == ROWS.sum()
        assert wait_until_dead(before[1])
        with pytest.warns(RuntimeWarning, match=r"rank 1.*SIGKILL") as caught:
            assert total(rt)(ROWS) == ROWS.sum()
        assert len(caught) == 1


@pytest.mark.parametrize("nbytes", [1 << 24, pytest.param(200 << 20, marks=pytest.mark.storm)])
def test_A7_death_while_a_big_argument_is_sent(reused: Fork, nbytes: int) -> None:
    rt = reused(2, failpoint("call.received", rank=1, nth=2))
    length = rt.function(lambda blob, x: len(blob["blob"]) * len(x), bcast_inputs="blob", outputs="sum")
    blob = {"blob": b"x" * nbytes}
    with replaced_workers(rt, [1]), pytest.raises(WorkerDied) as died:
        length(blob, ROWS)
    assert_says(died, (1,), ("SIGKILL",))
    assert length(blob, ROWS) == nbytes * len(ROWS)


def test_A7_death_while_a_big_function_is_loaded(reused: Fork) -> None:
    rt = reused(2, failpoint("distribute.loading", rank=0, nth=2))
    blob = b"x" * (1 << 24)
    with replaced_workers(rt, [0]):
        big = rt.function(lambda x: len(blob) + 0 * x.sum(), outputs="max")
        with pytest.raises(WorkerDied) as died:
            rt.distribute()
        assert_says(died, (0,), ("SIGKILL",))
        assert big(ROWS) == len(blob)


def test_A8_segfault(reused: Fork) -> None:
    rt = reused(2)

    def crash(x: np.ndarray) -> float:
        if x[0] > 0:
            saboteurs.segfault()
        return x.sum()

    with replaced_workers(rt, [1]), pytest.raises(WorkerDied) as died:
        rt.function(crash, outputs="sum")(ROWS)
    assert_says(died, (1,), ("SIGSEGV",))
    assert "Segmentation fault" in str(died.value), "the stack that faulthandler wrote belongs in the error"
    assert "segfault" in str(died.value)


@pytest.mark.parametrize("way", ["exit 0", "exit 3", "libc exit", "abort"])
def test_A9_worker_ends_itself(reused: Fork, way: str) -> None:
    rt = reused(2)

    def leave(x: np.ndarray) -> float:
        if x[0] > 0:
            saboteurs.DEATHS[way][0]()
        return x.sum()

    with replaced_workers(rt, [1]), pytest.raises(WorkerDied) as died:
        rt.function(leave, outputs="sum")(ROWS)
    assert_says(died, (1,), (saboteurs.DEATHS[way][1],))


def test_A10_a_kill_without_a_cause_suggests_the_memory_limit(reused: Fork) -> None:
    rt = reused(2)
    with replaced_workers(rt, [0, 1]) as before, pytest.raises(WorkerDied, match=r"(?i)memory"):
        die_together(rt, before)


def test_A10_the_system_takes_a_worker_before_the_master(reused: Fork) -> None:
    def oom_score() -> int:
        with open("/proc/self/oom_score_adj", encoding="ascii") as file:
            return int(file.read())

    scores = reused(2).function(lambda row: oom_score(), outputs=None)(np.arange(2))
    assert min(scores) > oom_score()


def test_A11_frozen_worker_ends_by_timeout(reused: Fork) -> None:
    rt = reused(2)

    def freeze(x: np.ndarray) -> float:
        if x[0] > 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return x.sum()

    with replaced_workers(rt, [1]), pytest.raises(CallTimeout, match=r"rank 1"):
        rt.function(freeze, outputs="sum")(ROWS, timeout=0.3)


@pytest.mark.parametrize("action", ["kill", "segv", "exit", "raise"])
@pytest.mark.parametrize("step", ["start.import", "start.ready"])
def test_A12_crash_during_start(runtime: Fork, step: str, action: str) -> None:
    for is_over in (False, True):  # the crash, when the program first asks for the workers
        rt = runtime(2, failpoint(step, rank=1, action=action))
        if is_over:
            pidfd = int(rt._session.workers.by_rank[1].process.pidfd)
            assert select.select([pidfd], [], [], 20)[0]
        with pytest.raises(StartupError, match=r"rank 1 of 2"):
            rt.distribute()
            total(rt)(ROWS)
        with pytest.raises(ClosedError) as closed:
            total(rt)(ROWS)
        assert isinstance(closed.value.__cause__, StartupError)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 2), (0, 1, 2)], ids=str)
def test_A13_several_die_at_once(reused: Fork, ranks: tuple[int, ...]) -> None:
    rt = reused(3)
    with replaced_workers(rt, ranks) as before:
        with pytest.raises(WorkerDied) as died:
            die_together(rt, [before[rank] for rank in ranks])
        assert_says(died, ranks, ("SIGKILL",) * len(ranks))


def die_together(rt: Any, victims: list[int]) -> None:
    """Have rank 0 kill ``victims`` in the middle of a call of all ranks: one signal after the other, no race."""

    def massacre(row: np.ndarray) -> None:
        if row[0] == 0:
            saboteurs.kill_all(victims)
        saboteurs.loop_for_ever()

    rt.function(massacre)(np.arange(rt.world_size))


def test_A13_several_die_while_idle(reused: Fork) -> None:
    rt = reused(3)
    with replaced_workers(rt, [0, 2]) as before:
        kill_and_wait(before[0], before[2])
        with pytest.warns(RuntimeWarning) as caught:
            assert total(rt)(ROWS) == ROWS.sum()
        assert len(caught) == 1


def test_A14_crash_after_the_reply(reused: Fork) -> None:
    rt = reused(2, failpoint("call.after_reply", rank=0, nth=2, action="segv"))
    with replaced_workers(rt, [0]) as before:
        assert total(rt)(ROWS) == ROWS.sum()
        assert wait_until_dead(before[0])
        with pytest.warns(RuntimeWarning, match=r"rank 0.*SIGSEGV"):
            assert total(rt)(ROWS) == ROWS.sum()


def test_A14_crash_in_a_finalizer(reused: Fork) -> None:
    """Whether the finalizer runs before or after the reply is Python's choice: the answer is right or named."""
    rt = reused(2)
    before = pids(rt)
    bomb = rt.function(lambda row: saboteurs.SegfaultAtDel(), outputs=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            assert bomb(np.arange(2)) == ["harmless", "harmless"]
            assert all(wait_until_dead(pid) for pid in before)
        except WorkerDied as died:
            assert set(died.exits) == {"SIGSEGV"}
        assert_right(rt)


def test_A15_grandchildren_go_with_their_worker(runtime: Fork) -> None:
    rt = runtime(2)
    spawn = rt.function(lambda row: saboteurs.start_sleeper(), outputs=None)
    sleepers = spawn(np.arange(2))
    with replaced_workers(rt, [0]) as before:
        kill_and_wait(before[0])
        with pytest.warns(RuntimeWarning):
            assert_right(rt)
        assert wait_for(lambda: is_gone(sleepers[0]))
    assert process_stat(sleepers[1]) is not None
    rt.close()
    assert wait_for(lambda: is_gone(sleepers[1]))


def is_gone(pid: int) -> bool:
    """Whether a process ended (a zombie whose new parent has not looked yet counts)."""
    stat = process_stat(pid)
    return stat is None or stat[1] == "Z"


def test_A16_dies_again_on_every_respawn(runtime: Fork) -> None:
    rt = runtime(2, failpoint("call.before_function", rank=1, nth=EVERY_TIME), max_restarts=2)
    for _ in range(3):
        with pytest.raises(WorkerDied):
            total(rt)(ROWS)
    with pytest.raises(ClosedError, match="max_restarts") as closed:
        total(rt)(ROWS)
    assert isinstance(closed.value.__cause__, WorkerDied)


def test_a_death_that_was_recovered_did_not_close_the_runtime(runtime: Fork) -> None:
    rt = runtime(2, failpoint("call.before_function", rank=1))
    with pytest.raises(WorkerDied):
        total(rt)(ROWS)
    assert_right(rt)
    rt.close()
    with pytest.raises(ClosedError) as closed:
        total(rt)(ROWS)
    assert closed.value.__cause__ is None
    with pytest.raises(ClosedError) as closed:
        rt.where()
    assert closed.value.__cause__ is None


def test_deaths_in_idleness_do_not_blame_a_call(runtime: Fork) -> None:
    rt = runtime(2, failpoint("call.before_function", rank=1), max_restarts=1)
    with pytest.raises(WorkerDied):
        total(rt)(ROWS)
    assert_right(rt)
    kill_and_wait(pids(rt)[0])
    with pytest.raises(ClosedError, match="max_restarts") as closed:
        total(rt)(ROWS)
    assert closed.value.__cause__ is None
    with pytest.raises(ClosedError) as again:
        total(rt)(ROWS)
    assert again.value.__cause__ is closed.value


def complain(row: Any, text: str, is_last: bool) -> None:
    """Write to stderr on rank 0, which ends there if these are its last words."""
    if row[0] == 0:
        print(text, file=sys.stderr)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)


def test_only_the_stderr_of_its_own_call_is_quoted(reused: Fork) -> None:
    rt = reused(2)
    f = rt.function(complain, outputs=None, bcast_inputs=("text", "is_last"))
    f(ROWS, "an earlier call", False)
    with pytest.raises(WorkerDied) as died:
        f(ROWS, "last words", True)
    assert "last words" in str(died.value)
    assert "an earlier call" not in str(died.value)


def complain_later(row: Any, fifo: str) -> None:
    """Have a thread write to stderr on rank 0 when somebody opens the fifo."""

    def wait_and_complain() -> None:
        with open(fifo, "rb"):
            print("an earlier call", file=sys.stderr)

    if row[0] == 0:
        threading.Thread(target=wait_and_complain).start()


def test_what_was_written_between_calls_is_not_quoted(reused: Fork, tmp_path: Path) -> None:
    """The line lies in the pipe when the call begins."""
    rt = reused(2)
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    rt.function(complain_later, outputs=None, bcast_inputs="fifo")(ROWS, fifo)
    stderr = rt._session.workers.by_rank[0].process.watched()[-2][0]
    with open(fifo, "wb"):
        assert select.select([stderr], [], [], 30.0)[0]
    with pytest.raises(WorkerDied) as died:
        rt.function(complain, outputs=None, bcast_inputs=("text", "is_last"))(ROWS, "last words", True)
    assert "last words" in str(died.value)
    assert "an earlier call" not in str(died.value)


def test_submitted_calls_quote_what_came_after_they_were_sent(reused: Fork) -> None:
    rt = reused(2)
    f = rt.function(complain, outputs=None, bcast_inputs=("text", "is_last"))
    f.submit(ROWS, "an earlier call", False).result()
    pending = f.submit(ROWS, "the call before", False)
    last = f.submit(ROWS, "last words", True)
    pending.result()
    with pytest.raises(WorkerDied) as died:
        last.result()
    assert "last words" in str(died.value)
    assert "an earlier call" not in str(died.value)


def test_a_death_after_the_function_quotes_what_the_function_wrote(reused: Fork) -> None:
    rt = reused(2, failpoint("reduce.before", rank=0))

    def warn(x: Any) -> Any:
        print("words of this call", file=sys.stderr)
        return np.full(LARGE, x.sum())

    with pytest.raises(WorkerDied, match="words of this call"):
        rt.function(warn, outputs="sum")(ROWS)


@pytest.mark.parametrize(("is_read", "is_noted"), [(True, True), (True, False), (False, True)])
def test_of_a_line_begun_before_the_call_only_its_rest_is_quoted(
    is_read: bool, is_noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether its beginning was read in the call before, or when this one began."""
    source, worker = os.pipe()
    output = Output(Descriptor(source), 0, "stderr")
    os.write(worker, b"earlier\nbegun before")
    if is_read:
        output.forward()
    if is_noted:
        output.note_backlog()
    began = time.monotonic()
    os.write(worker, b", ended now\n\nnext\nbegun")
    output.forward()
    os.write(worker, b" again")
    output.forward()
    assert output.since(began) == [", ended now", "", "next"]
    began = time.monotonic()
    os.write(worker, b"\nlast\n")
    output.forward()
    assert output.since(began) == ["last"]
    lines = ["earlier", "begun before, ended now", "", "next", "begun again", "last"]
    assert capsys.readouterr().err == "".join(f"[rank 0] {line}\n" for line in lines)
    output.close()
    os.close(worker)


def test_lines_that_wait_for_the_masters_stream_are_of_earlier_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    source, worker = os.pipe()
    terminal, mine = os.pipe()
    os.set_blocking(mine, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(mine, bytes(1 << 16))
    output = Output(Descriptor(source), 0, "stderr")
    with open(mine, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        os.write(worker, b"read, not shown\n")
        output.forward()
        os.write(worker, b"not even read\n")
        output.forward()
        output.note_backlog()
        began = time.monotonic()
        os.write(worker, b"of this call\n")
        os.set_blocking(terminal, False)
        with contextlib.suppress(BlockingIOError):
            while os.read(terminal, 1 << 20):
                pass
        output.forward()
        assert output.since(0.0) == ["read, not shown", "not even read", "of this call"]
        assert output.since(began) == ["of this call"]
        monkeypatch.undo()
    output.close()
    os.close(worker)
    os.close(terminal)


def test_A17_killed_while_closing(runtime: Fork) -> None:
    for step in ("kill", "stop", "raise", "sleep"):
        rt = runtime(2, failpoint("close.received", rank=1, action=step))
        assert_right(rt)
        rt.close()
        rt.close()


def test_A17_killed_at_a_random_time_of_close(runtime: Fork, storm_count: Callable[[int], int]) -> None:
    rng = random.Random(17)
    for _ in range(storm_count(2)):
        rt = runtime(2)
        victim = rng.choice(pids(rt))
        timer = kill_in(rng.uniform(0, 0.005), victim)
        timer.start()
        rt.close()
        timer.join()


def test_A17_killed_at_a_random_time_of_fork(runtime: Fork, storm_count: Callable[[int], int]) -> None:
    rng = random.Random(18)
    for _ in range(storm_count(2)):
        before = set(worker_pids())
        rt = runtime(2)
        victim = rng.choice(sorted(set(worker_pids()) - before))
        timer = kill_in(rng.uniform(0, 0.3), victim)
        timer.start()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with contextlib.suppress(StartupError, WorkerDied):
                assert_right(rt)
        timer.join()
        rt.close()


def worker_pids() -> list[int]:
    """Return the pids of the living children as /proc has them: asking the workers would be one more call."""
    return [pid for pid in children(os.getpid()) if not is_gone(pid)]


def test_A18_a_reaped_pid_is_never_signalled(reused: Fork) -> None:
    """Signals go through pidfds: nobody in the package may signal by number."""
    rt = reused(2)
    with replaced_workers(rt, [0]) as before:
        kill_and_wait(before[0])
        with pytest.warns(RuntimeWarning):
            assert_right(rt)
    for path in sorted(Path(synk.__file__).parent.rglob("*.py")):
        if path.name in ("rank.py", "failpoints.py"):  # a worker may signal itself
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_by_number = isinstance(node, ast.Attribute) and ast.unparse(node) == "os.kill"
            assert not is_by_number, f"{path.name}:{node.lineno}"


def test_A19_children_of_the_master_are_reaped_by_others() -> None:
    script("""
        from support.harness import assert_right, kill_and_wait, pids
        import warnings
        from synk.errors import WorkerDied
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        rt = synk.fork(2, backend="numpy")
        before = pids(rt)
        kill_and_wait(before[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_right(rt)
        assert len(caught) == 1, caught
        try:
            rt.function(lambda row: os._exit(7), outputs=None)(np.arange(2))
        except WorkerDied as error:
            assert set(error.exits) == {"exit code unknown"}, error.exits
        else:
            raise AssertionError("nobody died")
        assert_right(rt)
        synk.close()
    """).check()


def test_A20_a_worker_that_holds_the_interpreter_is_not_dead(reused: Fork) -> None:
    rt = reused(2)
    with same_workers(rt):
        assert rt.function(lambda row: saboteurs.hold_the_gil(1) or 1, outputs="sum")(np.arange(2)) == 2


# ----- chaos

SEEDS_PER_CALL = 3
CALL_S = 0.004


def chaos(rt: Any, call: Callable[[np.ndarray], np.ndarray], seeds: range) -> None:
    """Kill a random worker for each seed, at random times of one call, up to twice its length.

    The answer is right or ``WorkerDied`` names victims only; the next answer is right.
    """
    rng = random.Random(seeds[0])
    x = np.random.default_rng(seeds[0]).normal(size=(rng.randrange(2, 40), 4))
    victims = rng.sample([worker.process.pid for worker in rt._session.workers.by_rank], len(seeds))
    timers = [kill_in(rng.uniform(0, 2 * CALL_S), victim) for victim in victims]
    for timer in timers:
        timer.start()
    try:
        np.testing.assert_allclose(call(x), x.sum(axis=0), rtol=1e-9, atol=1e-12)
    except WorkerDied as error:
        assert set(error.pids) <= set(victims)
    for timer in timers:
        timer.join()
    assert all(wait_until_dead(victim) for victim in victims)
    np.testing.assert_allclose(call(x), x.sum(axis=0), rtol=1e-9, atol=1e-12)


def run_chaos(reused: Fork, seeds: range) -> None:
    """Run ``chaos`` for all seeds on one runtime of four workers, of which one survives each call at least."""
    rt = reused(SEEDS_PER_CALL + 1)

    def slow_sum(x: np.ndarray) -> np.ndarray:
        time.sleep(CALL_S)
        return x.sum(axis=0)

    call = rt.function(slow_sum, outputs="sum")
    call(np.ones((4, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for start in range(seeds.start, seeds.stop, SEEDS_PER_CALL):
            chaos(rt, call, range(start, start + SEEDS_PER_CALL))
    assert_right(rt)


@pytest.mark.parametrize("part", seeds(1, 4))
def test_A2_chaos(reused: Fork, part: int) -> None:
    """36 seeds, or as many as ``SYNK_CHAOS_SEEDS`` says, most of them in the storm, which takes 5000 others, too."""
    count = int(os.environ.get("SYNK_CHAOS_SEEDS", "36")) // 4
    run_chaos(reused, range(part * count, (part + 1) * count))


@pytest.mark.storm
@pytest.mark.parametrize("part", range(10))
def test_A2_chaos_storm(reused: Fork, part: int) -> None:
    run_chaos(reused, range(10_000 + part * 500, 10_500 + part * 500))
