"""``synk.Executor`` against what the standard library's pools do; its own tests of executors are the model of these."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import gc
import operator
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION
from typing import Any

import numpy as np
import pytest
from support import harness
from support.gates import Gate, beside
from support.saboteurs import AtPickle

import synk
from synk.errors import (
    CallCancelled,
    CallTimeout,
    ClosedError,
    RemoteError,
    SerializationError,
    UnsupportedError,
    WorkerDied,
)


@pytest.fixture(params=[2, "1+1"])
def executor(request: pytest.FixtureRequest, shared_runtimes: Any) -> Iterator[synk.Executor]:
    """On the two workers of one machine, and on two nodes."""
    with synk.Executor(runtime=shared_runtimes[request.param]) as made:
        yield made


def fail(text: str) -> None:
    raise ValueError(text)


def pause_at_1(n: int) -> None:
    if n == 1:
        signal.pause()


# -- as in CPython's test_concurrent_futures/executor.py ---------------------------------------------------------------


def test_submit_and_what_it_raises(executor: synk.Executor) -> None:
    assert executor.submit(pow, 2, 8).result() == 256
    both = executor.submit(lambda *args, **kwargs: (args, kwargs), 1, self=3, fn=4).result()
    assert both == ((1,), {"self": 3, "fn": 4})
    with pytest.raises(ValueError, match="text") as caught:
        executor.submit(fail, "text").result()
    assert isinstance(caught.value.__cause__, RemoteError)
    for unpicklable in (threading.Lock(), (n for n in range(3)), *map(AtPickle, ENDS)):
        with pytest.raises(SerializationError):
            executor.submit(id, unpicklable).result(60)
        with pytest.raises(SerializationError):
            list(executor.map(id, [1, unpicklable], timeout=60))
    with pytest.raises(SerializationError):
        executor.submit(lambda: threading.Lock()).result()
    assert executor.submit(abs, -1).result() == 1


class Thing:
    pass


def end(error: type[BaseException]) -> Any:
    raise error("in the user's code")


ENDS = [functools.partial(end, error) for error in (SystemExit, GeneratorExit, KeyboardInterrupt)]


def test_map_is_the_built_in_one(executor: synk.Executor, gate: Gate) -> None:
    expected = list(map(pow, range(10), range(10)))
    for options in ({}, {"chunksize": 3}, {"chunksize": 40}):
        assert list(executor.map(pow, range(10), range(10), **options)) == expected
    assert list(executor.map(pow, [], [])) == []
    for chunksize in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match="chunksize"):
            executor.map(str, range(3), chunksize=chunksize)
    results = executor.map(divmod, [1, 1, 1, 1], [2, 3, 0, 5])
    assert [next(results), next(results)] == [(0, 1), (0, 1)]
    with pytest.raises(ZeroDivisionError):
        next(results)
    results = executor.map(gate.wait, range(2), timeout=0.05)
    with pytest.raises(TimeoutError):
        next(results)
    gate.open()


def test_the_iterator_of_map_keeps_no_result_that_it_has_given(shared_runtimes: Any) -> None:
    with synk.Executor(runtime=shared_runtimes[2]) as executor:
        for chunksize in (1, 4):
            for thing in executor.map(lambda _: Thing(), range(2 * chunksize), chunksize=chunksize):
                reference = weakref.ref(thing)
                del thing
                # the thread that gave it may be on its way out of set_result, as in the standard library's executors
                assert harness.wait_for(lambda reference=reference: reference() is None)


def test_shutdown(shared_runtimes: Any, gate: Gate) -> None:
    for options in ({}, {"wait": False}, {"wait": False, "cancel_futures": True}):
        executor = synk.Executor(runtime=shared_runtimes[2])
        futures = [executor.submit(gate.wait, number) for number in range(8)]
        if options:
            executor.shutdown(**options)  # it returns though the gate is closed
            gate.open()
        else:
            with gate.opened_meanwhile():
                executor.shutdown()
            assert all(future.done() for future in futures)
        executor.shutdown()
        with pytest.raises(RuntimeError, match="shut down"):
            executor.submit(pow, 2, 5)
        assert all(future.cancelled() or future.result(60) is None for future in futures)
        assert any(future.cancelled() for future in futures) == ("cancel_futures" in options)
        gate.close()


def test_waiting_and_cancelling(executor: synk.Executor, gate: Gate) -> None:
    slow, quick = executor.submit(gate.wait), executor.submit(pow, 2, 3)
    done, pending = concurrent.futures.wait([slow, quick], return_when=FIRST_COMPLETED)
    assert (done, pending) == ({quick}, {slow})
    failing = executor.submit(fail, "now")
    done, _ = concurrent.futures.wait([slow, failing], return_when=FIRST_EXCEPTION)
    assert done == {failing}
    busy = [executor.submit(gate.wait, number) for number in range(3)]
    waiting = executor.submit(pow, 2, 2)
    assert waiting.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result()
    assert harness.wait_for(slow.running)
    assert not slow.cancel()
    gate.open()
    assert set(concurrent.futures.as_completed([slow, *busy])) == {slow, *busy}


def test_nothing_in_a_forked_child_waits_for_ever(executor: synk.Executor, gate: Gate) -> None:
    results, future, called = executor.map(gate.wait, range(3)), executor.submit(gate.wait), []
    future.add_done_callback(called.append)

    def in_child() -> None:
        for wait in (future.result, lambda: next(results), lambda: executor.submit(pow, 2, 3)):
            with pytest.raises(synk.errors.ReentrancyError):
                wait()
        assert concurrent.futures.wait([future]).done == {future} and not called

    with harness.Child(in_child):
        pass
    gate.open()
    assert list(results) == [None] * 3 and future.result(60) is None


def test_callbacks(executor: synk.Executor, caplog: pytest.LogCaptureFixture) -> None:
    """They run where no operation is running: one may submit and call."""
    total = executor._runtime.function(lambda x: x.sum(), outputs="sum")
    found: list[Any] = []
    is_over = threading.Event()

    def go_on(done: Any) -> None:
        found.append((done.result(), total(np.ones(4))))
        executor.submit(pow, 3, 2).add_done_callback(lambda more: (found.append(more.result()), is_over.set()))

    future = executor.submit(pow, 2, 2)
    future.add_done_callback(lambda done: fail("in a callback"))
    future.add_done_callback(go_on)
    assert is_over.wait(60)
    assert found == [(4, 4.0), 9]
    for each in ENDS:
        future = executor.submit(abs, -2)
        future.add_done_callback(lambda done, each=each: each())
        assert future.result(60) == 2
    assert executor.submit(abs, -3).result(60) == 3


def test_a_callback_may_shut_down_and_submit_while_tasks_are_cancelled(shared_runtimes: Any, gate: Gate) -> None:
    """Callbacks run under no lock: neither those of a task that ends, nor those of one that is cancelled."""
    executor = synk.Executor(runtime=shared_runtimes[2])
    refused: list[str] = []

    def again(done: Any) -> None:
        executor.shutdown(wait=False, cancel_futures=True)
        try:
            executor.submit(pow, 2, 2)
        except RuntimeError as error:
            refused.append(str(error))

    futures = [executor.submit(gate.wait, number) for number in range(8)]
    for future in futures:
        future.add_done_callback(again)
    shutter = threading.Thread(target=executor.shutdown, kwargs={"cancel_futures": True}, daemon=True)
    shutter.start()
    gate.open()
    shutter.join(60)
    assert not shutter.is_alive()
    assert all(future.done() for future in futures)
    assert len(refused) == 8


def test_numbers_of_workers(shared_runtimes: Any, gate: Gate) -> None:
    for number in (0, -3, True, 2.5, "2"):
        with pytest.raises(ValueError, match="max_workers"):
            synk.Executor(number, runtime=shared_runtimes[2])  # type: ignore[arg-type]
    with synk.Executor(1, runtime=shared_runtimes[2]) as executor:
        assert len({executor.submit(os.getpid).result() for _ in range(6)}) == 1

    def meet(number: int) -> int:
        gate.arrive(number)
        gate.wait_for(1 - number)
        return os.getpid()

    with synk.Executor(7, runtime=shared_runtimes[2]) as executor:
        assert len(set(executor.map(meet, range(2)))) == 2


# -- what is synk's own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [2, "1+1"])
def test_a_worker_that_dies_takes_its_task_along_and_no_other(reused: Callable[..., Any], kind: Any) -> None:
    with synk.Executor(runtime=reused(kind)) as executor:
        with pytest.raises(WorkerDied):
            executor.submit(os._exit, 3).result()
        assert list(executor.map(operator.neg, range(10))) == [-k for k in range(10)]


def test_limits_of_tasks(shared_runtimes: Any, reused: Callable[..., Any]) -> None:
    """They are those of a map. Where none can be kept, an executor is refused as a map is."""
    with synk.Executor(runtime=reused(2), item_timeout=0.2, max_worker_memory=1 << 40) as executor:
        late, quick = executor.submit(signal.pause), executor.submit(abs, -1)
        assert isinstance(late.exception(60), CallTimeout) and quick.result() == 1
        with pytest.raises(CallTimeout, match="item 1 of 'pause_at_1'"):
            list(executor.map(pause_at_1, range(3)))
    with pytest.raises(ValueError, match="num_workers=0"):
        synk.Executor(runtime=shared_runtimes[0], item_timeout=1)
    limits: list[dict[str, Any]] = [{"item_timeout": 1}, {"max_tasks_per_worker": 1}, {"max_worker_memory": 1}]
    for each in limits:
        with pytest.raises(UnsupportedError, match="limits of items or workers over nodes"):
            synk.Executor(runtime=shared_runtimes["1+1"], **each)


def test_a_worker_that_dies_while_it_has_no_task_ends_no_other(rt: Any, gate: Gate) -> None:
    idle = harness.pids(rt)[1]
    with synk.Executor(runtime=rt) as executor, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        running = executor.submit(gate.wait)
        assert harness.wait_for(lambda: gate.has(""))
        harness.kill_and_wait(idle)
        with contextlib.suppress(TimeoutError):
            running.exception(0.3)  # the executor's thread has looked by then
        gate.open()
        assert running.result() is None
        assert executor.submit(abs, -1).result() == 1


def test_a_runtime_that_is_closed_meanwhile(runtime: Callable[..., Any], gate: Gate) -> None:
    rt = runtime(2)
    executor = synk.Executor(runtime=rt)
    futures = [executor.submit(gate.wait, number) for number in range(5)]
    assert harness.wait_for(lambda: gate.has(0))
    rt.close()
    for future in futures:
        assert isinstance(future.exception(60), (ClosedError, CallCancelled))
    with pytest.raises(ClosedError):
        executor.submit(abs, 1)
    executor.shutdown()


def test_calls_threads_and_executors_between_one_another(executor: synk.Executor) -> None:
    rt = executor._runtime
    total = rt.function(lambda x: x.sum(), outputs="sum")
    found: dict[int, list[int]] = {}

    def use(number: int) -> None:
        with synk.Executor(runtime=rt) as other:
            found[number] = list(other.map(operator.mul, range(20), [number] * 20))

    with beside(*(functools.partial(use, number) for number in range(4))):
        futures = [executor.submit(operator.neg, k) for k in range(20)]
        assert [total(np.full(4, k)) for k in range(5)] == [0, 4, 8, 12, 16]
        assert [future.result() for future in futures] == [-k for k in range(20)]
    assert found == {number: [number * k for k in range(20)] for number in range(4)}


def test_numbers_of_tasks() -> None:
    """They come from the seed, the executor's number and the task's, whoever runs it."""
    expected = [np.random.default_rng(np.random.SeedSequence(7, spawn_key=(0, n))).random() for n in range(9)]
    for num_workers in (0, 1, 3):
        with synk.fork(num_workers, seed=7) as rt, synk.Executor(runtime=rt) as executor:
            drawn = [executor.submit(lambda: synk.comm.rng.random()) for _ in range(9)]
            assert [future.result() for future in drawn] == expected


def test_what_is_dropped_is_let_go_of(shared_runtimes: Any) -> None:
    """A large array with the task that had it, and the executor, which ends what it has."""
    executor, table = synk.Executor(runtime=shared_runtimes[2]), np.ones(300_000)
    assert executor.submit(np.sum, table).result() == table.size
    gone = weakref.ref(table)
    del table
    gc.collect()
    # the thread that ran it may be on its way out of set_result, as in the standard library's executors
    assert harness.wait_for(lambda: gone() is None)
    future, dropped = executor.submit(operator.neg, 3), weakref.ref(executor)
    del executor
    gc.collect()
    assert dropped() is None
    assert future.result(60) == -3


def test_a_program_that_ends_waits_for_its_tasks() -> None:
    result = harness.script(
        """
        executor = synk.Executor()  # forks where there is no runtime
        def slow(k):
            time.sleep(0.1)
            print("ended", k, flush=True)
        for k in range(3):
            executor.submit(slow, k)
        """
    ).check(stderr=None)
    assert result.stdout.count("ended") + result.stderr.count("ended") == 3


def test_a_program_that_ctrl_c_has_ended_waits_for_no_task() -> None:
    result = harness.script(
        """
        synk.fork(2, backend="numpy")
        future = synk.Executor().submit(time.sleep, 1000)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        future.result()
        """
    )
    result.check(returncode=-2, stderr=None)
    assert result.stderr.splitlines()[-1].strip() == "KeyboardInterrupt"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_thread_that_starts_badly_breaks_nothing(
    shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Ctrl-C ends the submission, but the thread of the executor runs; or the machine has no more threads."""
    start = threading.Thread.start

    def starts_badly(thread: threading.Thread) -> None:
        if error is ValueError:
            fail("no more threads")
        signal.raise_signal(signal.SIGINT)
        start(thread)

    with synk.Executor(runtime=shared_runtimes[2]) as executor:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", starts_badly)
            with pytest.raises(error):
                executor.submit(pow, 2, 3)
        assert executor.submit(pow, 2, 4).result(60) == 16


def test_a_task_that_comes_while_a_function_runs_in_the_programs_own_rank() -> None:
    """It waits for the function."""
    with synk.fork(0) as rt, synk.Executor(runtime=rt) as executor:
        for _ in range(8):
            futures: list[Any] = []
            timer = threading.Timer(0.02, lambda: futures.append(executor.submit(pow, 2, 5)))  # noqa: B023
            timer.start()
            assert list(rt.map(time.sleep, [0.08])) == [None]
            timer.join()
            assert futures[0].result(timeout=20) == 32
            assert executor.submit(pow, 2, 5).result(timeout=20) == 32
