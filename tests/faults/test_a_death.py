"""A: worker processes that die, at every step of their life."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
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
    arm,
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
from support.rank_arrays import assert_same, everywhere
from support.tables import named, seeds

import synk
from synk.errors import CallTimeout, ClosedError, StartupError, WorkerDied

Fork = Callable[..., Any]
ROWS = np.arange(6.0)


def total(runtime: Any) -> Any:
    return runtime.function(named("total", lambda x: x.sum()), outputs="sum")


def assert_says(died: pytest.ExceptionInfo[WorkerDied], ranks: tuple[int, ...], exits: tuple[str, ...]) -> None:
    """Assert that the error names who died and how, in its fields and in its words."""
    error = died.value
    assert (error.ranks, error.exits, len(error.pids)) == (ranks, exits, len(ranks))
    for rank, pid, how in zip(error.ranks, error.pids, error.exits, strict=True):
        assert re.search(rf"\brank {rank}\b", str(error)) or f"ranks {', '.join(map(str, ranks))}" in str(error)
        assert str(pid) in str(error)
        assert how in str(error)


def is_gone(pid: int) -> bool:
    """Whether a process ended (a zombie whose new parent has not looked yet counts)."""
    stat = process_stat(pid)
    return stat is None or stat[1] == "Z"


def worker_pids() -> list[int]:
    """Return the pids of the living children as /proc has them: asking the workers would be one more call."""
    return [pid for pid in children(os.getpid()) if not is_gone(pid)]


# ----- at each step of a call

BIG = 1 << 18
BLOB = b"x" * (24 << 20)
STEPS: dict[str, tuple[str, int, str | None, Any, Any]] = {
    # row: the step, at which of its visits (the pids are asked for first), the op, the function, its result
    "A2 as the message comes": ("call.received", 2, "sum", np.sum, 15.0),
    "A2 before the function": ("call.before_function", 2, "sum", np.sum, 15.0),
    "A2 after the function": ("call.after_function", 2, "sum", np.sum, 15.0),
    "A2 when its outputs are there": ("call.published", 2, "sum", np.sum, 15.0),
    "A2 before it replies": ("call.before_reply", 2, "sum", np.sum, 15.0),
    "A3 before an average": ("reduce.before", 1, "avg", lambda x: np.full(BIG, x.mean()), 2.5),
    "A3 after a sum": ("reduce.after", 1, "sum", lambda x: np.full(BIG, x.sum()), 15.0),
    "A5 while half a reply is written": ("call.after_header", 2, None, lambda x: BLOB, [BLOB, BLOB]),
}


def test_A2_A3_A5_sigkill_at_each_step_of_a_call(rt: Any, subtests: pytest.Subtests) -> None:
    for number, (row, (step, nth, op, fn, expected)) in enumerate(STEPS.items()):
        rank = number % 2
        f = rt.function(fn, outputs=op)
        f(ROWS)
        arm(rt, failpoint(step, rank, nth))
        with subtests.test(row):
            with replaced_workers(rt, [rank]) as before, pytest.raises(WorkerDied) as died:
                f(ROWS)
            assert_says(died, (rank,), ("SIGKILL",))
            assert died.value.pids == (before[rank],)
            assert died.value.phase in (("call", "reduce") if row.startswith("A3") else ("call",))
            assert f(ROWS) == expected if op is None else (f(ROWS) == expected).all()


def test_A7_death_while_a_big_argument_or_function_is_sent(reused: Fork) -> None:
    blob = b"x" * (1 << 24)
    rt = reused(2, failpoint("call.received", rank=1, nth=2))
    length = rt.function(lambda blob, x: len(blob["blob"]) * len(x), bcast_inputs="blob", outputs="sum")
    with replaced_workers(rt, [1]), pytest.raises(WorkerDied):
        length({"blob": blob}, ROWS)
    assert length({"blob": blob}, ROWS) == len(blob) * len(ROWS)
    arm(rt, failpoint("distribute.loading", rank=0, nth=2))
    with replaced_workers(rt, [0]):
        big = rt.function(lambda x: len(blob) + 0 * x.sum(), outputs="max")
        with pytest.raises(WorkerDied):
            rt.distribute()
        assert big(ROWS) == len(blob)


# ----- by what the function does


def hold_a_lock_and_die() -> None:
    """Such a lock is never released by the system; the runtime has none of its own that could be lost so."""
    multiprocessing.get_context("fork").Lock().acquire()
    saboteurs.kill_self()


def test_A2_A4_A8_A9_the_function_ends_its_worker(rt: Any, subtests: pytest.Subtests) -> None:
    for number, (way, (end, how)) in enumerate({**saboteurs.DEATHS, "lock": (hold_a_lock_and_die, "SIGKILL")}.items()):

        def leave(x: np.ndarray, rank: int = number % 2, end: Callable[[], object] = end) -> float:
            if synk.comm.rank == rank:
                end()
            return x.sum()

        with subtests.test(way):
            f = rt.function(leave, bcast_inputs=("rank", "end"), outputs="sum")
            with replaced_workers(rt, [number % 2]), pytest.raises(WorkerDied, match="'leave'") as died:
                f(ROWS)
            assert_says(died, (number % 2,), (how,))
            if way == "segv":  # the stack that faulthandler wrote belongs in the error
                assert "Segmentation fault" in str(died.value) and "in segfault" in str(died.value)
            if way == "kill":  # A10: nobody else says what a kill without a cause may be
                assert str(died.value).count("Likely out of memory") == 1


def die_together(rt: Any, victims: list[int]) -> None:
    """Have rank 0 kill ``victims`` in the middle of a call of all ranks: one signal after the other, no race."""

    def massacre(row: np.ndarray) -> None:
        if row[0] == 0:
            saboteurs.kill_all(victims)
        saboteurs.loop_for_ever()

    rt.function(massacre)(np.arange(rt.world_size))


AGAIN = r"rank {} \(pid \d+\) ended with SIGKILL while idle and was started again"


def test_A1_A13_some_or_all_die_in_a_call_or_while_idle(reused: Fork, subtests: pytest.Subtests) -> None:
    """Functions are sent again and ``Data`` is passed again, the ones of before the deaths included."""
    rt = reused(3)
    values = np.random.default_rng(0).normal(size=(1000, 5))
    data, weights = rt.data(values), rt.data(values[0])
    product = rt.function(lambda w, x: x @ w, bcast_inputs="w", outputs="gather")
    for ranks in ((0, 1), (1, 2), (0, 1, 2)):
        with subtests.test("in a call", ranks=ranks), replaced_workers(rt, ranks) as before:
            with pytest.raises(WorkerDied) as died:
                die_together(rt, [before[rank] for rank in ranks])
            assert_says(died, ranks, ("SIGKILL",) * len(ranks))
            np.testing.assert_allclose(product(weights, data), values @ values[0])
    for ranks in ((1,), (0, 2), (0, 1, 2)):
        with subtests.test("while idle", ranks=ranks), replaced_workers(rt, ranks) as before:
            kill_and_wait(*(before[rank] for rank in ranks))
            with pytest.warns(RuntimeWarning, match="; ".join(map(AGAIN.format, ranks))) as caught:
                np.testing.assert_allclose(product(weights, data), values @ values[0])
            assert len(caught) == 1
    data[3] = 7.0
    np.testing.assert_allclose(product(weights, data)[3], 7.0 * values[0].sum())


def test_A10_the_out_of_memory_killer_takes_a_worker_before_the_master(shared_runtimes: Any) -> None:
    def oom_score() -> int:
        return int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii"))

    scores = shared_runtimes[2].function(lambda row: oom_score(), outputs=None)(np.arange(2))
    assert min(scores) > oom_score()


def test_A11_frozen_worker_ends_by_timeout(rt: Any) -> None:

    def freeze(x: np.ndarray) -> None:
        if synk.comm.rank:
            os.kill(os.getpid(), signal.SIGSTOP)

    with replaced_workers(rt, [1]), pytest.raises(CallTimeout, match=r"rank 1"):
        rt.function(freeze)(ROWS, timeout=0.3)


def test_A15_grandchildren_go_with_their_worker(runtime: Fork) -> None:
    rt = runtime(2)
    sleepers = rt.function(lambda row: saboteurs.start_sleeper(), outputs=None)(np.arange(2))
    with replaced_workers(rt, [0]) as before:
        kill_and_wait(before[0])
        with pytest.warns(RuntimeWarning):
            assert_right(rt)
        assert wait_for(lambda: is_gone(sleepers[0]))
    assert process_stat(sleepers[1]) is not None
    rt.close()
    assert wait_for(lambda: is_gone(sleepers[1]))


def test_A20_a_worker_that_holds_the_interpreter_is_not_dead(rt: Any) -> None:
    with same_workers(rt):
        assert rt.function(lambda row: saboteurs.hold_the_gil(1) or 1, outputs="sum")(np.arange(2)) == 2


# ----- as a worker starts, again and again, or as it ends


def test_A12_crash_during_start(runtime: Fork, subtests: pytest.Subtests) -> None:
    """Whether it is over when the program first asks for the workers, or not."""
    for is_over, step, action in ((False, "start.import", "kill"), (True, "start.ready", "segv")):
        with subtests.test(step, action=action, is_over=is_over):
            before = set(children(os.getpid()))
            rt = runtime(2, failpoint(step, rank=1, action=action))
            if is_over:
                assert wait_for(lambda before=before: any(map(is_gone, set(children(os.getpid())) - before)))
            with pytest.raises(StartupError, match=r"rank 1 of 2"):
                rt.distribute()
                total(rt)(ROWS)
            with pytest.raises(ClosedError) as closed:
                total(rt)(ROWS)
            assert isinstance(closed.value.__cause__, StartupError)


def test_A12_a_worker_that_is_stuck_as_it_starts(runtime: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced, though calls have shorter limits; if no replacement comes up either, the runtime is closed."""
    monkeypatch.setattr("synk._engine.workers.START_TIMEOUT_S", 2.0)
    rt = runtime(2, failpoint("start.ready", 1, 1, "stop"), max_restarts=10)
    with pytest.raises(CallTimeout, match="still starting"):
        total(rt)(ROWS, timeout=0.05)
    with pytest.warns(RuntimeWarning, match=r"rank 1 .*was not up 2 s after its last sign of life, was killed"):
        assert total(rt)(ROWS) == 15
    rt = runtime(2, failpoint("start.ready", 1, EVERY_TIME, "stop"), max_restarts=1)
    with pytest.raises(StartupError, match=r"rank 1 of 2 was not up 2 s after its last sign of life"):
        total(rt)(ROWS)
    with pytest.raises(ClosedError):
        total(rt)(ROWS)


def test_A16_dies_again_on_every_respawn(runtime: Fork) -> None:
    rt = runtime(2, failpoint("call.before_function", rank=1, nth=EVERY_TIME), max_restarts=2)
    for _ in range(3):
        with pytest.raises(WorkerDied):
            total(rt)(ROWS)
    with pytest.raises(ClosedError, match="max_restarts") as closed:
        total(rt)(ROWS)
    assert isinstance(closed.value.__cause__, WorkerDied)


def test_A16_a_replacement_that_is_killed_while_it_starts_is_one_more_death(rt: Any) -> None:
    f = total(rt)
    before = pids(rt)

    def kill_the_next(known: set[int]) -> None:
        new: set[int] = set()
        wait_for(lambda: new.update(set(worker_pids()) - known) or new)
        for pid in new:
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_the_next, args=[set(worker_pids())])
    kill_and_wait(before[1])
    killer.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while killer.is_alive():
            try:
                assert f(ROWS) == 15
            except WorkerDied as error:
                assert error.ranks == (1,)
        with contextlib.suppress(WorkerDied):
            f(ROWS)
        assert f(ROWS) == 15
    assert pids(rt)[0] == before[0]


def test_A17_killed_while_closing(runtime: Fork) -> None:
    for action in ("kill", "stop", "raise", "sleep"):
        rt = runtime(2, failpoint("close.received", rank=1, action=action))
        assert_right(rt)
        rt.close()
        rt.close()


def test_A18_nobody_signals_by_number() -> None:
    """A pid may be a stranger's by then: signals go through pidfds; a worker may signal itself."""
    package = Path(synk.__file__).parent
    found = {path.name for path in package.rglob("*.py") if re.search(r"^[^#`\n]*\bos\.kill\(", path.read_text(), re.M)}
    assert found <= {"rank.py", "failpoints.py"}


def test_A19_children_of_the_master_are_reaped_by_others() -> None:
    script("""
        from support.harness import assert_right, kill_and_wait, pids
        import warnings
        from synk.errors import WorkerDied
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        rt = synk.fork(2, backend="numpy")
        kill_and_wait(pids(rt)[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_right(rt)
        assert len(caught) == 1, caught
        try:
            rt.function(lambda row: os._exit(7), outputs=None)(np.arange(2))
        except WorkerDied as error:
            print(set(error.exits))
        assert_right(rt)
        synk.close()
    """).check("{'exit code unknown'}\n")


def test_only_what_was_written_in_a_call_is_quoted(
    rt: Any, subtests: pytest.Subtests, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of what the dead have said: not what they said in earlier calls, nor the beginning of a line that is older."""

    def speak(text: str, is_end: bool) -> None:
        if synk.comm.rank == 0:
            print(text, end="", file=sys.stderr, flush=True)
            if is_end:
                saboteurs.kill_self()

    f = rt.function(speak, bcast_inputs=("text", "is_end"), per_rank=True, outputs=None)
    for way, call in (("call", f), ("submit", lambda *args: f.submit(*args).result())):
        for before in ("an earlier line\n", "begun before"):
            with subtests.test(way, before=before):
                call(before, False)
                with pytest.raises(WorkerDied, match=", last words") as died:
                    call(", last words\n", True)
                assert before.strip() not in str(died.value)
    assert "[rank 0] begun before, last words\n" in capfd.readouterr().err


# ----- chaos

SEEDS_PER_CALL = 3
CALL_S = 0.004


class Chaos:
    """A call that sums the rows, and counts itself in variables of all ranks."""

    def __init__(self, rt: Any) -> None:
        self.rt = rt
        self.count, self.large = count, large = rt.shared(0), rt.shared(np.zeros(70_000))
        self.num_succeeded = 0

        def slow_sum(x: np.ndarray) -> np.ndarray:
            time.sleep(CALL_S)
            count.value, large.value = count.value + 1, large.value + 1
            return x.sum(axis=0)

        self.slow_sum = rt.function(slow_sum, outputs="sum")
        self.call(np.ones((rt.world_size, 4)))

    def call(self, x: np.ndarray) -> None:
        np.testing.assert_allclose(self.slow_sum(x), x.sum(axis=0), rtol=1e-9, atol=1e-12)
        self.num_succeeded += 1

    def kill(self, seeds: range) -> None:
        """Kill a random worker for each seed, at random times of one call, up to twice its length.

        The answer is right or ``WorkerDied`` names victims only; the next answer is right, and all ranks have counted
        the calls that succeeded, and no other.
        """
        rng = random.Random(seeds[0])
        x = np.random.default_rng(seeds[0]).normal(size=(rng.randrange(self.rt.world_size, 40), 4))
        victims = rng.sample(pids(self.rt), len(seeds))
        timers = [kill_in(rng.uniform(0, 2 * CALL_S), victim) for victim in victims]
        for timer in timers:
            timer.start()
        try:
            self.call(x)
        except WorkerDied as error:
            assert set(error.pids) <= set(victims)
        for timer in timers:
            timer.join()
        assert all(wait_until_dead(victim) for victim in victims)
        assert_same(everywhere(self.rt, self.count), [np.asarray(self.num_succeeded)] * self.rt.world_size)
        assert_same(everywhere(self.rt, self.large), [np.full(70_000, float(self.num_succeeded))] * self.rt.world_size)
        self.call(x)


@pytest.mark.parametrize("part", seeds(1, 11))
def test_A2_chaos(reused: Fork, part: int) -> None:
    """A few seeds on one runtime of four workers, of which one survives each call at least; 5000 in the storm."""
    rt = reused(SEEDS_PER_CALL + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        chaos = Chaos(rt)
        for start in range(500 * part, 500 * part + (500 if part else 9), SEEDS_PER_CALL):
            chaos.kill(range(start, start + SEEDS_PER_CALL))
    assert_right(rt)
