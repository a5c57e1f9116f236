"""Faults in the gaps between two steps: of sending, burying, copying, growing, loading, reporting."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
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
from support.harness import assert_right, mapped_memfds, pids, same_workers, script

import synk
from synk._pure import arrays as _arrays
from synk.errors import CallTimeout, ClosedError, RemoteError, SharedMemoryError, WorkerDied

Fork = Callable[..., Any]


def interrupt_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool = False) -> None:
    """Have Ctrl-C come when ``owner.name`` is called, once, before it does its work or after."""
    original = getattr(owner, name)
    pending = [True]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs) if after else None
        if pending:
            pending.clear()
            signal.raise_signal(signal.SIGINT)
        return result if after else original(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)


# ----- more segments than one message can carry


@pytest.fixture
def no_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small values get segments of their own, as large ones do."""
    monkeypatch.setattr("synk._wire.arenas._PLACE_NBYTES", ())


def many_variables(rt: Any) -> tuple[list[Any], Any]:
    variables = [rt.shared(float(k)) for k in range(300)]
    return variables, rt.function(lambda x: sum(w.value for w in variables) * len(x), outputs="sum")


@pytest.mark.usefixtures("no_arenas")
@pytest.mark.parametrize("sequence", [7, 0xFFFF, 0xFFFE])
def test_more_segments_than_one_message_can_carry(reused: Fork, sequence: int) -> None:
    """New to several ranks at once, also after all of them were started again."""
    rt = reused(2)
    rt._session.workers.requests.sequence = sequence
    variables, f = many_variables(rt)
    expected = 4 * sum(range(300))
    assert f(np.ones(4)) == expected
    for pid in pids(rt):
        os.kill(pid, signal.SIGKILL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a death that was seen while idle
        with contextlib.suppress(WorkerDied):
            f(np.ones(4))
        assert f(np.ones(4)) == expected
    rt.broadcast(variables[3], 1003.0)
    assert f(np.ones(4)) == expected + 4000


@pytest.mark.usefixtures("no_arenas")
def test_G3_a_worker_without_descriptors_for_many_segments(reused: Fork) -> None:
    rt = reused(2)
    workers = pids(rt)
    limits = resource.prlimit(workers[1], resource.RLIMIT_NOFILE)
    resource.prlimit(workers[1], resource.RLIMIT_NOFILE, (60, limits[1]))
    _, f = many_variables(rt)
    for _ in range(2):
        with pytest.raises(SharedMemoryError, match="ulimit -n"):
            f(np.ones(4))
    resource.prlimit(workers[1], resource.RLIMIT_NOFILE, limits)
    assert f(np.ones(4)) == 4 * sum(range(300))
    assert pids(rt) == workers


def test_G3_a_worker_without_descriptors_sends_a_large_result(reused: Fork) -> None:
    """What cannot be sent is an error of the call; a report on memory is left out."""
    rt = reused(2)
    f = rt.function(lambda k, x: "x" * k, bcast_inputs="k", outputs=None)
    assert len(f(10, np.ones(2))[0]) == 10
    workers = pids(rt)
    limits = resource.prlimit(workers[1], resource.RLIMIT_NOFILE)
    resource.prlimit(workers[1], resource.RLIMIT_NOFILE, (3, limits[1]))
    time.sleep(1.1)  # the next call reports
    assert len(f(10, np.ones(2))[1]) == 10
    with pytest.raises(SharedMemoryError):
        f(1 << 20, np.ones(2))
    resource.prlimit(workers[1], resource.RLIMIT_NOFILE, limits)
    assert len(f(1 << 20, np.ones(2))[1]) == 1 << 20
    assert pids(rt) == workers


# ----- Ctrl-C between two steps


def test_D4_ctrl_c_while_the_dead_are_buried(runtime: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each death is buried whole: no later call waits for it, and no descriptor is left."""
    rt = runtime(2, max_restarts=10)
    x = np.arange(4.0)
    f = rt.function(lambda x: x.sum(), outputs="sum")
    for name, after in (("unwatch_rank", False), ("unwatch_rank", True), ("unwatch", True)):
        victim = pids(rt)[0]
        with monkeypatch.context() as patch:
            interrupt_in(patch, rt._session.workers.processes.poll_set, name, after=after)
            os.kill(victim, signal.SIGKILL)
            time.sleep(0.3)  # the next call finds the death before it sends anything
            with pytest.raises((KeyboardInterrupt, WorkerDied)):
                for _ in range(100):
                    f(x)
                    time.sleep(0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert f(x) == 6.0
    assert_right(rt)


def test_D4_no_copy_outlives_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large arrays are copied by two threads; the other one must not write after the operation has ended."""
    source = np.arange(4.0 * _arrays.PARALLEL_NBYTES / 8)
    target = np.zeros_like(source)
    interrupt_in(monkeypatch, threading.Thread, "start")
    with pytest.raises(KeyboardInterrupt):
        _arrays.copy_into(target, source)
    assert threading.active_count() == 1
    np.testing.assert_array_equal(target, source)


def test_a_copy_needs_no_second_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    source = np.arange(2.0 * _arrays.PARALLEL_NBYTES / 8)
    target = np.zeros_like(source)
    _arrays.copy_into(target, source)
    np.testing.assert_array_equal(target, source)


def test_D5_data_that_grows_is_old_or_new(reused: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = reused(2)
    f = rt.function(lambda x: x.sum(), outputs="sum")
    data = rt.data(np.ones(1000))
    assert f(data) == 1000
    with monkeypatch.context() as patch:
        interrupt_in(patch, rt._session, "release")
        with pytest.raises(KeyboardInterrupt):
            data.set_length(50_000)
    data.data[:] = 2.0
    assert f(data) == 2 * len(data)
    assert rt.function(lambda x: x.max(), outputs="max")(data) == 2.0  # by a new plan


def test_D4_the_lock_is_free_after_ctrl_c(reused: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = reused(2)
    data = rt.data(np.ones(1000))
    with monkeypatch.context() as patch:
        interrupt_in(patch, rt._session.memory, "free_dropped")
        with pytest.raises(KeyboardInterrupt):
            data.free_memory()
    assert not rt._session.is_mine()
    with same_workers(rt):
        assert_right(rt)


def test_A16_a_replacement_that_is_killed_while_it_starts_is_one_more_death(
    runtime: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt = runtime(2, max_restarts=4)
    f = rt.function(lambda x: x.sum(), outputs="sum")
    victim = pids(rt)[1]
    start, num_left = rt._session.workers.processes.start_again, [2]

    def killed(worker: Any, *args: Any) -> None:
        start(worker, *args)
        if num_left[0]:
            num_left[0] -= 1
            worker.process.kill()

    monkeypatch.setattr(rt._session.workers.processes, "start_again", killed)
    os.kill(victim, signal.SIGKILL)
    num_errors = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(10):
            try:
                assert f(np.arange(4.0)) == 6.0
                break
            except WorkerDied as error:
                assert error.ranks == (1,)
                num_errors += 1
    assert num_errors in (2, 3)  # the death itself is one where the call comes first
    assert_right(rt)


# ----- time limits, ends


class LoadsForEver:
    def __setstate__(self, state: Any) -> None:
        while True:
            time.sleep(0.01)

    def __getstate__(self) -> Any:
        return {"some": "state"}


def test_C3_the_time_limit_counts_while_a_function_is_loaded(runtime: Fork) -> None:
    rt = runtime(2)
    assert_right(rt)
    endless = LoadsForEver()
    with pytest.raises(CallTimeout):
        rt.function(lambda x: (endless, x.sum())[1], outputs="sum")(np.ones(4), timeout=0.5)
    assert_right(rt)


def test_fork_after_the_runtime_has_closed_itself() -> None:
    script("""
        from support import saboteurs
        synk.fork(2, backend="numpy", max_restarts=0)
        f = synk.function(lambda x: saboteurs.kill_self() if x[0] < 0 else x.sum(), outputs="sum")
        for error in (synk.errors.WorkerDied, synk.errors.ClosedError):
            try:
                f(np.array([-1.0, -1.0]))
            except error:
                pass
        if os.fork() == 0:
            os._exit(0)
        os.wait()
        synk.fork(2, backend="numpy")
        assert f(np.ones(4)) == 4.0
        print("done")
    """).check("done\n")


closing: list[Any] = []


def close_below(a: Any, b: Any) -> Any:
    closing[0]._session.workers.processes.tear_down()
    closing[0]._release_memory()
    raise IndexError("something of the closed runtime")


def test_E6_close_while_a_result_is_combined(runtime: Fork) -> None:
    """A callable op runs in the master: it may be cut off from the memory that it reads."""
    closing[:] = [runtime(2)]
    with pytest.raises(ClosedError):
        closing[0].function(lambda x: x, outputs=close_below)(np.ones(4))
    closing.clear()


# ----- exceptions and streams of the user's own make


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int

    def __reduce__(self) -> Any:
        return Frozen, (self.code,)


class NotesThatExit(Exception):
    @property
    def __notes__(self) -> Any:
        raise SystemExit(3)


def test_B1_an_exception_whose_class_is_frozen(reused: Fork) -> None:
    rt = reused(2)

    def fail(x: np.ndarray) -> None:
        raise Frozen(7)

    with same_workers(rt):
        try:
            rt.function(fail)(np.ones(4))
        except Frozen as error:
            assert error.code == 7
            assert isinstance(error.__cause__, RemoteError)
            assert "likewise on 1 more" in str(error.__cause__)


def test_B8_notes_that_exit(reused: Fork) -> None:
    rt = reused(2)

    def fail(x: np.ndarray) -> None:
        raise NotesThatExit("no")

    with same_workers(rt), pytest.raises(RemoteError):
        rt.function(fail)(np.ones(4))


class Stream:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        if sys.is_finalizing():
            return
        raise NotImplementedError


def test_F5_a_stream_that_cannot_be_flushed(runtime: Fork) -> None:
    rt = runtime(2)

    def replace(x: np.ndarray) -> float:
        sys.stdout = sys.__stdout__ = Stream()  # type: ignore[assignment,misc]
        return x.sum()

    with same_workers(rt):
        assert rt.function(replace, outputs="sum")(np.ones(4)) == 4.0


def test_E1_a_child_that_a_function_has_forked_does_not_answer(reused: Fork) -> None:
    rt = reused(2)

    def fork(x: np.ndarray) -> int:
        return os.fork() and os.getpid()

    workers = pids(rt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            assert rt.function(fork, outputs=None)(np.ones(2)) == workers
            assert_right(rt)


@pytest.mark.parametrize("is_text", [False, True])
def test_E1_a_child_that_returns_late_writes_nothing(reused: Fork, is_text: bool) -> None:
    """Its outputs would lie where those of the next call do."""
    rt = reused(2)

    def value(number: int) -> Any:
        return str(number) if is_text else np.full(3, number)

    def fork(x: np.ndarray) -> Any:
        if not os.fork():
            time.sleep(0.3)
            return value(7)
        return value(1)

    def follow(x: np.ndarray) -> Any:
        time.sleep(0.8 * x[0])  # rank 0 has published long before
        return value(2)

    first, then = rt.function(fork, outputs=None), rt.function(follow, outputs=None)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert [str(each) for each in first(np.ones(2))] == [str(value(1))] * 2
        assert [str(each) for each in then(np.arange(2.0))] == [str(value(2))] * 2


@pytest.mark.parametrize("started", [False, True])
def test_E1_a_child_that_a_function_has_forked_is_no_rank(reused: Fork, tmp_path: Path, started: bool) -> None:
    """Its part in a collective, or in a message that its parent has asked for, would be taken for the parent's."""
    rt = reused(2)

    def f(x: np.ndarray) -> Any:
        comm = synk.comm
        peer = 1 - comm.rank
        comm.barrier()
        request = comm.irecv(peer) if started else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if not pid:
            for act in (
                lambda: comm.all_reduce(np.full(4, 100.0), "sum"),
                lambda: comm.send(np.full(4, 100.0), peer),
                lambda: comm.recv(peer),
                *([request.wait, request.test] if request else []),
            ):
                try:
                    act()
                except Exception as error:
                    with open(tmp_path / str(comm.rank), "a", encoding="utf-8") as file:
                        file.write(f"{type(error).__name__}\n")
            os._exit(0)
        os.waitpid(pid, 0)
        total = comm.all_reduce(np.ones(4), "sum")
        comm.send(np.full(4, 5.0 + comm.rank), peer)
        return total, request.wait() if request else comm.recv(peer)

    totals, received = rt.function(f, outputs=(None, None))(np.ones(2))
    np.testing.assert_array_equal(totals, np.full((2, 4), 2.0))
    np.testing.assert_array_equal(received, [[6.0] * 4, [5.0] * 4])
    refused = ["ReentrancyError"] * 3 + ["CollectiveMismatch"] * 2 * started
    assert [(tmp_path / str(rank)).read_text().split() for rank in range(2)] == [refused] * 2
    assert_right(rt)


def test_E1_a_child_that_an_item_has_forked_runs_no_other(reused: Fork, tmp_path: Path) -> None:
    rt = reused(2)

    def f(item: int) -> int:
        with open(tmp_path / "log", "a", encoding="utf-8") as file:
            file.write(f"{item}\n")
        if item == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                os.fork()
        return item

    assert list(rt.map(f, range(6), batch_size=6)) == [*range(6)]
    assert sorted((tmp_path / "log").read_text().split()) == [str(item) for item in range(6)]


# ----- memory


def test_slots_and_staging_that_grow_let_go_of_the_old_ones(runtime: Fork) -> None:
    """Plans hold views of them, and there may be 64 for each function."""
    before = mapped_memfds()
    rt = runtime(2)
    f = rt.function(lambda x: (np.tile(x, 300), x.sum()), outputs="sum")
    for length in range(200, 3000, 100):
        x = np.ones(length)
        _, count = f(np.stack([x, x]))
        assert count == 2 * length
    assert len(mapped_memfds() - before) < 20
    g = rt.function(lambda x: x.sum(), outputs="sum")
    for length in range(10_000, 400_000, 10_000):
        assert g(np.ones(length)) == length
    assert len(mapped_memfds() - before) < 20
