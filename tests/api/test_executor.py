"""``synk.Executor`` against what the standard library's pools do; its own tests of executors are the model of these."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import operator
import os
import pathlib
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

import synk


@pytest.fixture(params=[2, "1+1"])
def executor(request: pytest.FixtureRequest, shared_runtimes: Any) -> Iterator[synk.Executor]:
    """On the two workers of one machine, and on two nodes."""
    with synk.Executor(runtime=shared_runtimes[request.param]) as made:
        yield made


def fail(text: str) -> None:
    raise ValueError(text)


# -- as in CPython's test_concurrent_futures/executor.py ---------------------------------------------------------------


def test_submit(executor: synk.Executor) -> None:
    assert executor.submit(pow, 2, 8).result() == 256
    assert executor.submit(lambda *args, **kwargs: (args, kwargs), 1, self=3, fn=4).result() == (
        (1,),
        {"self": 3, "fn": 4},
    )


def test_map_is_the_built_in_one(executor: synk.Executor) -> None:
    for chunksize in (1, 3, 40):
        assert list(executor.map(pow, range(10), range(10), chunksize=chunksize)) == list(
            map(pow, range(10), range(10))
        )
    assert list(executor.map(pow, [], [])) == []
    results = executor.map(divmod, [1, 1, 1, 1], [2, 3, 0, 5])
    assert [next(results), next(results)] == [(0, 1), (0, 1)]
    with pytest.raises(ZeroDivisionError):
        next(results)
    with pytest.raises(TimeoutError):
        list(executor.map(time.sleep, [0, 0, 0.5], timeout=0.02))


class Thing:
    pass


def test_the_iterator_of_map_keeps_no_result_that_it_has_given(executor: synk.Executor) -> None:
    for chunksize in (1, 4):
        for thing in executor.map(lambda _: Thing(), range(4), chunksize=chunksize):
            reference = weakref.ref(thing)
            del thing
            gc.collect()
            # the thread that gave it may be on its way out of set_result, as in the standard library's executors
            assert harness.wait_for(lambda reference=reference: reference() is None, timeout_s=10)


def test_what_makes_no_sense_is_refused(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    for number in (0, -3, True, 2.5, "2"):
        with subtests.test(max_workers=number), pytest.raises(ValueError, match="max_workers"):
            synk.Executor(number, runtime=shared_runtimes[2])
    with synk.Executor(runtime=shared_runtimes[2]) as executor:
        for chunksize in (0, -1, 1.5, None):
            with subtests.test(chunksize=chunksize), pytest.raises(ValueError, match="chunksize"):
                executor.map(str, range(3), chunksize=chunksize)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(pow, 2, 5)


def test_the_ways_to_shut_down(shared_runtimes: Any) -> None:
    waits, goes_on, cancels = (synk.Executor(runtime=shared_runtimes[2]) for _ in range(3))
    futures = [waits.submit(time.sleep, 0.05) for _ in range(6)]
    waits.shutdown(wait=True)
    assert all(future.done() for future in futures)
    results = [goes_on.submit(operator.neg, k) for k in range(6)]
    goes_on.shutdown(wait=False)
    assert [future.result(60) for future in results] == [-k for k in range(6)]
    futures = [cancels.submit(time.sleep, 0.1) for _ in range(50)]
    cancels.shutdown(cancel_futures=True)
    assert any(future.cancelled() for future in futures)
    assert all(future.done() and (future.cancelled() or future.result() is None) for future in futures)


def test_an_executor_that_is_dropped_ends_what_it_has(shared_runtimes: Any) -> None:
    executor = synk.Executor(runtime=shared_runtimes[2])
    future, gone = executor.submit(operator.neg, 3), weakref.ref(executor)
    del executor
    gc.collect()
    assert gone() is None and future.result(60) == -3


def until(path: pathlib.Path) -> None:
    """Wait for a file."""
    while not path.exists():
        time.sleep(0.005)


def test_cancel_wait_and_as_completed(executor: synk.Executor, tmp_path: pathlib.Path) -> None:
    slow = executor.submit(until, tmp_path / "go on")
    assert harness.wait_for(slow.running)
    quick, failing = executor.submit(pow, 2, 3), executor.submit(fail, "now")
    assert concurrent.futures.wait([slow, quick], 60, FIRST_COMPLETED) == ({quick}, {slow})
    assert failing in concurrent.futures.wait([slow, failing], 60, FIRST_EXCEPTION)[0]
    busy = [slow, *(executor.submit(until, tmp_path / "go on") for _ in range(4))]
    waiting = executor.submit(pow, 2, 2)
    assert waiting.cancel() and waiting.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result()
    assert not slow.cancel()
    (tmp_path / "go on").touch()
    assert set(concurrent.futures.as_completed(busy, 60)) == {*busy}


def test_callbacks_may_raise_submit_and_call(executor: synk.Executor, caplog: pytest.LogCaptureFixture) -> None:
    """They run where no operation is running."""
    total = executor._runtime.function(lambda x: x.sum(), outputs="sum")
    found: list[Any] = []
    is_over = threading.Event()

    def go_on(done: Any) -> None:
        found.append(total(np.ones(4)))
        executor.submit(pow, 3, 2).add_done_callback(lambda more: (found.append(more.result()), is_over.set()))

    future = executor.submit(pow, 2, 2)
    future.add_done_callback(lambda done: fail("in a callback"))
    future.add_done_callback(go_on)
    assert is_over.wait(60) and found == [4.0, 9]


def test_a_callback_may_shut_down_and_submit_while_tasks_are_cancelled(shared_runtimes: Any) -> None:
    """Callbacks run under no lock: neither those of a task that ends, nor those of one that is cancelled."""
    executor = synk.Executor(runtime=shared_runtimes[2])
    refused: list[str] = []

    def again(done: Any) -> None:
        executor.shutdown(wait=False, cancel_futures=True)
        try:
            executor.submit(pow, 2, 2)
        except RuntimeError as error:
            refused.append(str(error))

    futures = [executor.submit(time.sleep, 0.1) for _ in range(8)]
    for future in futures:
        future.add_done_callback(again)
    shutter = threading.Thread(target=executor.shutdown, kwargs={"cancel_futures": True}, daemon=True)
    shutter.start()
    shutter.join(60)
    assert not shutter.is_alive() and all(future.done() for future in futures)
    assert len(refused) == 8


def test_no_more_workers_than_were_asked_for(shared_runtimes: Any) -> None:
    with synk.Executor(1, runtime=shared_runtimes[2]) as executor:
        assert len({executor.submit(os.getpid).result() for _ in range(6)}) == 1
    with synk.Executor(7, runtime=shared_runtimes[2]) as executor:
        assert set(executor.map(lambda _: os.getpid(), range(8))) <= set(harness.pids(shared_runtimes[2]))


# -- what is synk's own -----------------------------------------------------------------------------------------------


def test_errors_are_the_functions_own(executor: synk.Executor) -> None:
    with pytest.raises(ValueError, match="text") as caught:
        executor.submit(fail, "text").result()
    assert isinstance(caught.value.__cause__, synk.errors.RemoteError)
    for value in (threading.Lock(), (n for n in range(3))):
        with pytest.raises(synk.errors.SerializationError):
            executor.submit(id, value).result()
    with pytest.raises(synk.errors.SerializationError):
        executor.submit(lambda: threading.Lock()).result()
    assert executor.submit(abs, -1).result() == 1


@pytest.mark.parametrize("kind", [2, "1+1"])
def test_a_worker_that_dies_without_a_task_ends_no_other_and_one_with_a_task_ends_it(
    reused: Callable[..., Any], tmp_path: pathlib.Path, kind: Any
) -> None:
    rt, begun, go_on = reused(kind), tmp_path / "begun", tmp_path / "go_on"

    def task() -> str:
        begun.touch()
        until(go_on)
        return "done"

    with synk.Executor(runtime=rt) as executor, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        pids = harness.pids(rt)
        running = executor.submit(task)
        assert harness.wait_for(begun.exists)
        harness.kill_and_wait(pids[1])
        with pytest.raises(TimeoutError):
            running.exception(0.3)  # the executor's thread has looked by then
        go_on.touch()
        assert running.result() == "done"
        with pytest.raises(synk.errors.WorkerDied):
            executor.submit(os._exit, 3).result()
        assert list(executor.map(operator.neg, range(10))) == [-k for k in range(10)]


def test_a_runtime_that_is_closed_meanwhile(runtime: Callable[..., Any]) -> None:
    rt = runtime(2)
    executor = synk.Executor(runtime=rt)
    futures = [executor.submit(time.sleep, 3600) for _ in range(5)]
    assert harness.wait_for(futures[0].running)
    rt.close()
    for future in futures:
        assert isinstance(future.exception(60), (synk.errors.ClosedError, synk.errors.CallCancelled))
    with pytest.raises(synk.errors.ClosedError):
        executor.submit(abs, 1)
    executor.shutdown()


def test_calls_of_functions_in_between(executor: synk.Executor) -> None:
    total = executor._runtime.function(lambda x: x.sum(), outputs="sum")
    futures = [executor.submit(lambda k=k: (time.sleep(0.01), k)[1]) for k in range(20)]
    assert [total(np.full(4, k)) for k in range(5)] == [0, 4, 8, 12, 16]
    assert [future.result() for future in futures] == list(range(20))


def test_several_threads_and_executors(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    found: dict[int, list[int]] = {}

    def use(number: int) -> None:
        with synk.Executor(runtime=rt) as executor:
            found[number] = list(executor.map(operator.mul, range(20), [number] * 20))

    threads = [threading.Thread(target=use, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {k: [k * i for i in range(20)] for k in range(4)}


def test_large_arrays_cross_once(shared_runtimes: Any) -> None:
    """On one machine."""
    rt, table = shared_runtimes[2], np.arange(300_000.0)
    before = rt.counters["bytes_pickled"]
    with synk.Executor(runtime=rt) as executor:
        assert list(executor.map(lambda a, k: a[k], [table] * 8, range(8))) == list(range(8))
    assert rt.counters["bytes_pickled"] - before < table.nbytes


def test_asyncio(executor: synk.Executor) -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(executor, pow, k, 2) for k in range(5)))

    assert asyncio.run(main()) == [0, 1, 4, 9, 16]


def test_a_program_that_ends_waits_for_its_tasks_but_not_after_ctrl_c() -> None:
    """The executor forks workers where there is no runtime."""
    result = harness.script(
        """
        executor = synk.Executor()
        def slow(k):
            time.sleep(0.1)
            print("ended", k, flush=True)
        for k in range(3):
            executor.submit(slow, k)
        """
    ).check(stderr=None)
    assert result.stdout.count("ended") + result.stderr.count("ended") == 3
    result = harness.script(
        """
        synk.fork(2, backend="numpy")
        future = synk.Executor().submit(time.sleep, 3600)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        future.result()
        """
    ).check(returncode=-2, stderr=None)
    assert result.stderr.splitlines()[-1].strip() == "KeyboardInterrupt"


def test_a_signal_that_comes_while_the_thread_starts_breaks_nothing(
    shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the submission, but the thread of the executor runs."""
    executor, start = synk.Executor(runtime=shared_runtimes[2]), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        signal.raise_signal(signal.SIGINT)
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.submit(pow, 2, 3)
    assert executor.submit(pow, 2, 4).result(60) == 16
    executor.shutdown()


# -- libraries that take an executor, or its map -----------------------------------------------------------------------


def test_dask_computes_its_tasks_on_the_workers(executor: synk.Executor) -> None:
    dask = pytest.importorskip("dask", reason="needs dask: pip install dask")
    with dask.config.set(scheduler=executor):
        found = dask.compute(*(dask.delayed(lambda k: (k * k, os.getpid()))(k) for k in range(8)))
    assert [square for square, _ in found] == [k * k for k in range(8)]
    assert os.getpid() not in {pid for _, pid in found}


def test_scipy_and_emcee_give_what_they_give_in_one_process(shared_runtimes: Any) -> None:
    executor = synk.Executor(runtime=shared_runtimes[2])
    emcee = pytest.importorskip("emcee")
    optimize = pytest.importorskip("scipy.optimize")
    options = {"updating": "deferred", "rng": 1, "maxiter": 5, "polish": False}
    bounds = [(-2.0, 2.0)] * 2
    expected = optimize.differential_evolution(optimize.rosen, bounds, **options)
    for workers in (executor.map, functools.partial(synk.Runtime.map, executor._runtime)):
        found = optimize.differential_evolution(optimize.rosen, bounds, workers=workers, **options)
        assert np.array_equal(found.x, expected.x)

    def chain(pool: Any) -> np.ndarray:
        sampler = emcee.EnsembleSampler(8, 2, lambda position: -float(position @ position), pool=pool)
        sampler.random_state = np.random.RandomState(0).get_state()
        sampler.run_mcmc(np.random.default_rng(0).standard_normal((8, 2)), 5)
        return np.asarray(sampler.get_chain())

    assert np.array_equal(chain(executor), chain(None))
    assert np.array_equal(chain(executor._runtime), chain(None))
