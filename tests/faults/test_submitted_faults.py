"""Faults while several calls are in flight: deaths, time limits, Ctrl-C, limits of the system."""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import linecache
import os
import random
import resource
import signal
import sys
import termios
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import (
    FAILPOINTS,
    assert_right,
    failpoint,
    kill_and_wait,
    kill_in,
    mapped_memfds,
    pids,
    replaced_workers,
    same_workers,
    script,
    wait_for,
    wait_until_dead,
)
from support.seeds import seeds

import synk
from synk._master.flight.queue import Queue
from synk._master.workers.recovery import Recovery
from synk._master.workers.requests import Requests
from synk.errors import CallCancelled, CallTimeout, ReentrancyError, SharedMemoryError, WorkerDied

Fork = Callable[..., Any]


def total_of(rt: Any, seconds: float = 0.0) -> Any:
    return rt.function(lambda x: (time.sleep(seconds), x.sum())[1], outputs="sum", name="total")


def num_waiting_bytes(rt: Any, rank: int) -> int:
    """Return how much of what a worker has answered lies in its pipe."""
    waiting = array.array("i", [0])
    fcntl.ioctl(rt._session.workers.by_rank[rank].process.channel.read_fd, termios.FIONREAD, waiting)
    return waiting[0]


def advance_the_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let so much time pass at once, for whoever asks the clock from now on."""
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + seconds)


def holder(rt: Any) -> Any:
    """Return ``hold(path)``, which submits a call that lasts until the file exists."""

    def hold(x: Any, path: str) -> float:
        while not os.path.exists(path):
            time.sleep(0.005)
        return float(x.sum())

    f = rt.function(hold, bcast_inputs="path", outputs="sum", name="held")
    f(np.ones(4), os.curdir)
    return lambda path: f.submit(np.ones(4), str(path))


def warm(f: Any) -> None:
    for call in [f.submit(np.ones(4)) for _ in range(4)]:
        call.result()


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_A_a_death_ends_all_calls_in_flight(reused: Fork, num_done: int) -> None:
    rt = reused(2)
    f = rt.function(lambda x, n: (time.sleep(60) if n == 1 else None, x.sum())[1], bcast_inputs="n", outputs="sum")
    for k in (0, 2, 3, 4):
        f(np.ones(4), np.int64(k))
    with replaced_workers(rt, [1]) as workers:
        done = [f.submit(np.ones(4), np.int64(0)) for _ in range(num_done)]
        pending = [f.submit(np.ones(4), np.int64(k)) for k in (1, 2, 3)[: 3 - num_done]]
        for call in done:
            assert wait_for(call.done)
        os.kill(workers[1], signal.SIGKILL)
        for call in reversed(pending):
            with pytest.raises(WorkerDied, match="SIGKILL") as caught:
                call.result()
            assert caught.value.ranks == (1,)
        assert [call.result() for call in done] == [4.0] * num_done


def test_A_a_death_between_calls_is_met_at_the_next(reused: Fork) -> None:
    rt = reused(2)
    f = total_of(rt)
    warm(f)
    workers = pids(rt)
    pending = [f.submit(np.ones(4)) for _ in range(2)]
    assert wait_for(lambda: num_waiting_bytes(rt, 0) == 16), "two doorbells"
    kill_and_wait(workers[0])
    assert [call.result() for call in pending] == [4.0, 4.0], "who answered and then died has answered"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a death while idle
        assert f.submit(np.ones(4)).result() == 4.0
    assert pids(rt)[1] == workers[1]


@pytest.mark.parametrize("name", [name for name in FAILPOINTS if name.startswith(("call.", "reduce."))])
@pytest.mark.parametrize("nth", [5])
def test_A_a_death_at_each_step(reused: Fork, name: str, nth: int) -> None:
    """What was answered is right, what was not is WorkerDied, and then all is well."""
    rt = reused(2, failpoint(name, 1, nth))
    large = rt.function(lambda x: (np.full(50_000, x.sum()), x.sum()), outputs="sum")
    pending = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(9):
            with contextlib.suppress(WorkerDied):
                pending.append((k, large.submit(np.full(4, float(k)))))
        outcomes = []
        for k, call in pending:
            try:
                summed, value = call.result()
                assert (summed == 4.0 * k).all() and value == 4.0 * k
                outcomes.append("right")
            except WorkerDied:
                outcomes.append("died")
        assert_right(rt)
    assert "right" in outcomes and len(pending) == 9
    assert outcomes.count("died") <= 3


def test_B_a_call_that_takes_too_long_takes_those_behind_it_along(reused: Fork) -> None:
    rt = reused(2)
    f = rt.function(lambda x, n: (time.sleep(float(n)), x.sum())[1], bcast_inputs="n", outputs="sum")
    for _ in range(4):
        f.submit(np.ones(4), np.float64(0)).result()
    with same_workers(rt):
        first = f.submit(np.ones(4), np.float64(0))
        slow = f.submit(np.ones(4), np.float64(30), timeout=0.2)
        last = f.submit(np.ones(4), np.float64(0))
        with pytest.raises(CallCancelled, match="did not end in time") as caught:
            last.result()
        assert isinstance(caught.value.__cause__, CallTimeout)
        with pytest.raises(CallTimeout):
            slow.result()
        assert first.result() == 4.0


def test_B_an_answer_that_came_in_time_counts_whenever_it_is_asked_for(
    reused: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt = reused(2)
    f = total_of(rt)
    warm(f)
    call = f.submit(np.ones(4), timeout=60.0)
    assert wait_for(lambda: num_waiting_bytes(rt, 0) and num_waiting_bytes(rt, 1))
    advance_the_clock(monkeypatch, 100.0)
    assert call.result() == 4.0


@pytest.mark.parametrize("where", ["result", "submit", "drain", "limited"])
def test_D_ctrl_c_ends_all_calls_in_flight(reused: Fork, where: str) -> None:
    rt = reused(2)
    f = total_of(rt, 100.0)
    quick = total_of(rt)
    warm(quick)
    with same_workers(rt):
        done = quick.submit(np.ones(4))
        assert done.result() == 4.0
        pending = [f.submit(np.ones(4)) for _ in range(3)]
        main = threading.get_ident()
        timer = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            if where == "result":
                pending[1].result()
            elif where == "submit":
                f.submit(np.ones(4))
            elif where == "drain":
                quick(np.ones(4))
            else:
                pending[1].result(timeout=100)
        timer.join()
        for call in pending:
            assert call.done()
            with pytest.raises(CallCancelled, match="interrupt"):
                call.result()


def test_D_storm_of_interrupts(storm_count: Callable[[int], int]) -> None:
    """Ctrl-C at any moment of submitting and waiting: each call has one outcome, and it is right or cancelled."""
    script(
        f"""
        import random
        from support.harness import assert_right, census, pids, settled_census
        from synk.errors import CallCancelled
        rng = random.Random(4)
        rt = synk.fork(2, backend="numpy")
        total = rt.function(lambda x: x.sum(), outputs="sum")
        large = rt.function(lambda x: np.full(40_000, x.sum()), outputs="sum")
        w = rt.shared(0.0)
        def add(x):
            w.value = w.value + 1.0
            return x.sum()
        adding = rt.function(add, outputs="sum")
        for f in (total, large, adding) * 4:
            f.submit(np.ones(4)).result()
        assert_right(rt)
        before, base = pids(rt), census()
        number_of = {{"right": 0, "cancelled": 0}}
        for _ in range({storm_count(80)}):
            held = []
            interrupt = threading.Timer(rng.uniform(0, 0.01), os.kill, (os.getpid(), signal.SIGINT))
            try:
                interrupt.start()
                while True:
                    f = rng.choice([total, total, large, adding])
                    value = rng.randrange(1000)
                    call = f.submit(np.full(4, float(value)))
                    held.append((call, 4.0 * value))
                    if len(held) > rng.randrange(6):
                        call, right = held.pop(rng.randrange(len(held)))
                        assert np.all(call.result() == right)
                        number_of["right"] += 1
            except KeyboardInterrupt:
                pass
            interrupt.join()
            for call, right in held:
                try:
                    assert np.all(call.result() == right)
                    number_of["right"] += 1
                except CallCancelled:
                    number_of["cancelled"] += 1
            assert total(np.full(4, 2.0)) == 8.0
        assert pids(rt) == before
        assert_right(rt)
        assert min(number_of.values()) > 5, number_of
        rt.close()
        """,
        timeout=120,
    ).check(stderr=None)


def test_D_interrupts_around_assignments_lose_none_and_repeat_none(storm_count: Callable[[int], int]) -> None:
    """The variable has counted exactly the calls that did not fail, or one that was cut off after its commit."""
    script(
        f"""
        import random
        from synk.errors import CallCancelled
        rng = random.Random(5)
        rt = synk.fork(2, backend="numpy")
        w = rt.shared(0.0)
        def add(x):
            w.value = w.value + 1.0
            return w.value
        adding = rt.function(add, outputs="first")
        adding(np.ones(2))
        for _ in range({storm_count(80)}):
            before = float(w.value)
            interrupt = threading.Timer(rng.uniform(0, 0.004), os.kill, (os.getpid(), signal.SIGINT))
            calls = []
            try:
                interrupt.start()
                while True:
                    calls.append(adding.submit(np.ones(2)))
            except KeyboardInterrupt:
                pass
            interrupt.join()
            right = cancelled = 0
            for call in calls:
                try:
                    right += 1
                    assert call.result() == before + right
                except CallCancelled:
                    right -= 1
                    cancelled += 1
            now = float(w.value)
            # An interrupt can hide the handle of the last call, or cut a call off whose assignments hold already.
            assert before + right <= now <= before + right + cancelled + 1, (before, right, cancelled, now)
        rt.close()
        """,
        timeout=120,
    ).check(stderr=None)


@pytest.mark.parametrize("question", ["result", "done", "where", "stacks"])
def test_E_a_forked_copy_cannot_ask(reused: Fork, question: str) -> None:
    """And what it tries does the original no harm, whose memory it shares."""
    rt = reused(2)
    f = total_of(rt, 0.3)
    meet = rt.function(lambda x: synk.comm.all_reduce(x.sum(), "sum"), outputs="first")
    pending = f.submit(np.ones(4))
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            try:
                getattr(rt if question in ("where", "stacks") else pending, question)()
            except ReentrancyError:
                status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pending.result() == 4.0
    assert meet(np.ones(4)) == 4.0


def test_B_an_answer_that_is_lost_near_the_limit_of_recursion(reused: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither taking the answer in nor making the workers idle works there. Nobody waits for it afterwards."""
    rt = reused(2)
    total = total_of(rt)
    total(np.ones(2))

    def too_deep(*args: Any, **kwargs: Any) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    with same_workers(rt):
        call = total.submit(np.ones(2))
        assert wait_for(lambda: num_waiting_bytes(rt, 0) and num_waiting_bytes(rt, 1))
        with monkeypatch.context() as patched:
            patched.setattr(Requests, "note", too_deep)
            patched.setattr(Recovery, "_settle", too_deep)
            call.done()
        with pytest.raises(RecursionError):
            call.result(30)
        assert list(total.stream(iter([np.ones(2)] * 4))) == [2.0] * 4


def test_E_the_program_may_end_with_calls_in_flight() -> None:
    script(
        """
        rt = synk.fork(2, backend="numpy")
        f = rt.function(lambda x: (time.sleep(30), x.sum())[1], outputs="sum")
        pending = [f.submit(np.ones(4)) for _ in range(3)]
        """
    ).check("")


def test_G_a_rank_that_cannot_take_in_what_is_new(reused: Fork) -> None:
    """The call that brought it fails, and those that rely on it; then all of it is sent again."""
    rt = reused(2)
    total = rt.function(lambda x: x.sum(), outputs="sum")
    warm(total)
    workers = pids(rt)
    limits = resource.prlimit(workers[1], resource.RLIMIT_NOFILE)
    # Too large for an arena, which the rank may hold since an earlier test: each comes with a descriptor of its own.
    data = [rt.data(np.full(1 << 17, float(k))) for k in range(3)]
    resource.prlimit(workers[1], resource.RLIMIT_NOFILE, (4, limits[1]))
    pending = [total.submit(data[k]) for k in (0, 0, 1)]
    for call in pending:
        with pytest.raises(SharedMemoryError):
            call.result()
    resource.prlimit(workers[1], resource.RLIMIT_NOFILE, limits)
    assert [call.result() for call in [total.submit(each) for each in data]] == [0.0, 2.0**17, 2.0**18]
    assert pids(rt) == workers


def test_G_calls_take_no_descriptors_and_no_memory(runtime: Fork) -> None:
    from support.harness import census, settled_census

    rt = runtime(2)
    total = rt.function(lambda x: (x.sum(), np.full(40_000, 1.0)), outputs=("sum", "first"))
    warm(total)
    before = census()
    for _ in range(200):
        pending = [total.submit(np.ones(4)) for _ in range(3)]
        del pending
    total(np.ones(4))
    assert len(settled_census(before).leftovers(before)) <= 3, "at most buffers of results that are used again"


@pytest.mark.parametrize("seed", seeds(1, 2))
def test_A_chaos(reused: Fork, seed: int, storm_count: Callable[[int], int]) -> None:
    """Kills at random moments: a call's result is right, or it is WorkerDied; and the runtime goes on."""
    rt = reused(3)
    rng = random.Random(seed)
    work = rt.function(lambda x: (time.sleep(0.0005), x.sum(), np.full(30_000, x.sum()))[1:], outputs="sum")
    warm_calls = [work.submit(np.ones(4)) for _ in range(4)]
    for call in warm_calls:
        call.result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(storm_count(12)):
            workers = [
                worker.process.pid for worker in rt._session.workers.by_rank
            ]  # not pids(rt), which might meet a death
            victim = rng.randrange(3)
            timer = kill_in(rng.uniform(0, 0.02), workers[victim])
            timer.start()
            pending = []
            for _ in range(8):
                value = float(rng.randrange(100))
                with contextlib.suppress(WorkerDied):
                    pending.append((value, work.submit(np.full(6, value))))
            for value, call in pending:
                try:
                    total, filled = call.result()
                    assert total == 6 * value and (filled == 6 * value).all()
                except WorkerDied as error:
                    assert error.ranks == (victim,)
            timer.join()
            assert wait_until_dead(workers[victim])  # or the next round would meet this death
        assert_right(rt)


# ----- what a call owes to its own time limit, and what to others


def sleeper(rt: Any) -> Any:
    f = rt.function(lambda x, n: (time.sleep(float(n)), x.sum())[1], bcast_inputs="n", outputs="sum", name="nap")
    f(np.ones(4), np.float64(0))
    return lambda seconds, **options: f.submit(np.ones(4), np.float64(seconds), **options)


def test_B_large_outputs_that_were_ready_in_time_count_too(
    reused: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bringing them into place is synk's own work, and may wait behind the calls that came after."""
    rt = reused(2)
    hold = holder(rt)
    large = rt.function(lambda x: np.full(100_000, x.sum()), outputs="sum")
    large(np.ones(4))
    for path in (tmp_path / "first", tmp_path / "second"):
        first, slow = large.submit(np.ones(4), timeout=60.0), hold(path)
        assert wait_for(lambda: num_waiting_bytes(rt, 0) and num_waiting_bytes(rt, 1))
        first.done()
        assert not path.exists(), "it did not wait for the call behind"
        with monkeypatch.context() as patch:
            advance_the_clock(patch, 100.0)
            path.touch()
            assert (first.result() == 4.0).all()
        assert slow.result() == 4.0


def test_B_each_time_limit_holds_behind_a_call_without(reused: Fork, tmp_path: Path) -> None:
    rt = reused(2)
    nap = sleeper(rt)
    plain = rt.function(lambda x: x.sum(), outputs="sum")
    plain(np.ones(4))
    with same_workers(rt):
        first, limited = nap(30.0), nap(0.0, timeout=0.2)
        with pytest.raises(CallTimeout):
            limited.result()
        with pytest.raises(CallCancelled, match="nap"):
            first.result()

        first, limited = nap(30.0), nap(0.0, timeout=0.2)
        assert wait_for(limited.done), "also where nobody waits for it"
        with pytest.raises(CallCancelled):
            first.result()

        first = holder(rt)(tmp_path / "go")
        with pytest.raises(CallTimeout, match="still in flight"):
            plain(np.ones(4), timeout=0.2)
        others = [nap(0.0), nap(0.0)]
        with pytest.raises(CallTimeout, match="still in flight"):
            nap(0.0, timeout=0.1)
        (tmp_path / "go").touch()
        assert [call.result() for call in (first, *others)] == [4.0] * 3, "they went on"


def test_B_no_time_at_all_is_enough_for_what_has_ended(reused: Fork, tmp_path: Path) -> None:
    rt = reused(2)
    nap = sleeper(rt)
    call = nap(0.0)
    assert wait_for(lambda: num_waiting_bytes(rt, 0) and num_waiting_bytes(rt, 1))
    assert call.result(timeout=0) == 4.0
    slow = holder(rt)(tmp_path / "go")
    with pytest.raises(TimeoutError):
        slow.result(timeout=0)
    (tmp_path / "go").touch()
    assert slow.result() == 4.0


def test_A_a_call_that_was_answered_survives_a_death_in_the_next(reused: Fork) -> None:
    rt = reused(2)
    f = rt.function(
        lambda x, n: (os.kill(os.getpid(), signal.SIGKILL) if n == 1 else None, x.sum())[1],
        bcast_inputs="n", outputs="sum",
    )  # fmt: skip
    f(np.ones(4), np.int64(0))
    for _ in range(2):
        answered, died = f.submit(np.ones(4), np.int64(0)), f.submit(np.ones(4), np.int64(1))
        for worker in rt._session.workers.by_rank:
            assert wait_until_dead(worker.process.pid)
        assert answered.result() == 4.0
        with pytest.raises(WorkerDied):
            died.result()
        assert f(np.ones(4), np.int64(0)) == 4.0


def test_A_large_outputs_that_a_death_has_lost(reused: Fork) -> None:
    """All had answered, but had not been asked to bring them into place."""
    rt = reused(2)
    large = rt.function(lambda x: np.full(100_000, x.sum()), outputs="sum")
    kill = rt.function(lambda x: os.kill(os.getpid(), signal.SIGKILL), outputs=None)
    rt.distribute()
    workers = [worker.process.pid for worker in rt._session.workers.by_rank]
    answered, died = large.submit(np.ones(4)), kill.submit(np.ones(1))
    assert wait_until_dead(workers[0])
    for call in (answered, died):
        with pytest.raises(WorkerDied):
            call.result()
    assert_right(rt)


# ----- threads, forks, drops


def test_E_other_threads_wait_for_what_concerns_them(reused: Fork, tmp_path: Path) -> None:
    rt = reused(2)
    nap = sleeper(rt)
    data = rt.data(np.ones(4))
    slow, behind = holder(rt)(tmp_path / "go"), nap(0.0)
    waiting = threading.Thread(target=slow.result)
    waiting.start()
    assert wait_for(lambda: not rt._session.if_free(lambda: None))
    assert data[0] == 1.0
    with pytest.raises(TimeoutError):
        behind.result(timeout=0.1)
    assert not behind.done()
    (tmp_path / "go").touch()
    waiting.join()
    assert behind.result() == 4.0


@pytest.mark.parametrize("num_earlier", [0, 1, 3])
def test_E_a_runtime_dropped_with_calls_in_flight_is_collected(num_earlier: int) -> None:
    def drop() -> tuple[Any, list[int]]:
        rt = synk.Runtime(2, backend="numpy")
        nap = sleeper(rt)
        for _ in range(num_earlier):  # so that a call is compiled
            nap(0.0).result()
        calls = [nap(30.0) for _ in range(3)]
        assert not calls[0].done()
        return weakref.ref(rt), [worker.process.pid for worker in rt._session.workers.by_rank]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        dropped, workers = drop()
        gc.collect()
        assert dropped() is None
    for pid in workers:
        assert wait_until_dead(pid)


def test_E_a_dropped_runtime_ends_its_workers_in_whatever_order_the_collector_comes_to_it() -> None:
    """What lies deeper is looked at later; here the processes come first, and the runtime they belong to last."""
    rt = synk.Runtime(2, backend="numpy")
    workers = [worker.process.pid for worker in rt._session.workers.by_rank]
    deep: Any = rt
    for _ in range(12):
        deep = [deep]
    held = [rt._session.workers.processes, deep]
    del rt, deep
    for _ in range(3):  # the collector keeps its objects in the order in which it last came to them
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        held.clear()
        gc.collect()
    for pid in workers:
        assert wait_until_dead(pid)


def test_G_workers_remember_nothing_of_calls_that_are_over(runtime: Fork) -> None:
    """Outputs of a call that another rank failed in, and plans over Data that is gone."""
    rt = runtime(2)

    def half(x: Any) -> Any:
        if x[0] != 0:
            raise ValueError("rank 1")
        return np.ones(2_000_000)

    failing = rt.function(half, outputs="sum")
    total = rt.function(lambda x: x.sum(), outputs="sum")
    warm(total)
    pid = rt._session.workers.by_rank[0].process.pid
    before = len(mapped_memfds(pid))
    for call in [failing.submit(np.array([0.0, 1.0])) for _ in range(3)]:
        with pytest.raises(ValueError, match="rank 1"):
            call.result()
    data = [rt.data(np.ones(100_000)) for _ in range(3)]
    for call in [total.submit(each) for each in data]:
        call.result()
    views = [each.data[:1] for each in data]
    for each in data:
        each.free_memory()
    total(np.ones(4))
    del views
    total(np.ones(4))

    def remembered(x: Any) -> Any:
        from synk._wire.cell import cell

        lanes: Any = cell.worker.lanes  # type: ignore[union-attr]
        return sum(len(lane.executor.outputs._values) + (lane.called is not None) for lane in lanes)

    assert rt.function(remembered, outputs=None)(np.ones(2)) == [1, 1], "the call itself"
    assert len(mapped_memfds(pid)) <= before


def test_G_a_lane_whose_first_message_brings_many_segments(reused: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small values get segments of their own, as large ones do.
    monkeypatch.setattr("synk._wire.arenas._PLACE_NBYTES", ())
    rt = reused(2)
    total = rt.function(lambda x: x.sum(), outputs="sum")
    meet = rt.function(lambda x: synk.comm.all_reduce(x.sum(), "sum"), outputs="first")
    assert (total(np.ones(4)), meet(np.ones(4))) == (4.0, 4.0)
    first = total.submit(np.ones(4))
    variables = [rt.shared(np.ones(2)) for _ in range(260)]
    second = total.submit(np.ones(4))
    assert (first.result(), second.result()) == (4.0, 4.0)
    for _ in range(3):
        assert [call.result() for call in [meet.submit(np.ones(4)) for _ in range(3)]] == [4.0] * 3
    del variables


# ----- Ctrl-C between two steps


def interrupted_at(code: Any, text: str) -> Any:
    """Return a trace function that raises SIGINT when a line of ``code`` that holds ``text`` is reached, once."""

    def on_line(frame: Any, event: str, arg: Any) -> Any:
        if event == "line" and text in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return on_line

    return lambda frame, event, arg: on_line if frame.f_code is code else None


def test_D_inline_ctrl_c_between_running_and_collecting(runtime: Fork) -> None:
    rt = runtime(None, inline=True)
    total = rt.function(lambda x: x.sum(), outputs="sum")
    total(np.ones(4))
    sys.settrace(interrupted_at(Queue._append.__code__, "if self._session.workers.is_inline"))
    try:
        with pytest.raises(KeyboardInterrupt):
            total.submit(np.ones(4))
    finally:
        sys.settrace(None)
    assert [total.submit(np.ones(length)).result() for length in (10, 20, 30)] == [10.0, 20.0, 30.0]


def test_D_the_lock_is_free_after_ctrl_c_in_done(storm_count: Callable[[int], int]) -> None:
    script(
        f"""
        import random
        rng = random.Random(6)
        rt = synk.fork(2, backend="numpy")
        nap = rt.function(lambda x: (time.sleep(0.003), x.sum())[1], outputs="sum")
        nap(np.ones(4))
        for _ in range({storm_count(150)}):
            interrupt = threading.Timer(rng.uniform(0, 0.003), os.kill, (os.getpid(), signal.SIGINT))
            try:
                interrupt.start()
                call = nap.submit(np.ones(4))
                while True:
                    call.done()
            except KeyboardInterrupt:
                pass
            interrupt.join()
            assert not rt._session.is_mine()
        assert nap(np.ones(4)) == 4.0
        rt.close()
        """,
        timeout=120,
    ).check(stderr=None)
