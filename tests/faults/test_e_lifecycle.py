"""E: forks, threads, interpreter exit: where a runtime lives and how it ends."""

from __future__ import annotations

import gc
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import assert_right, kill_and_wait, pids, same_workers, script, wait_until_dead

import synk
from synk.errors import ClosedError, ReentrancyError, SynkError

Fork = Callable[..., Any]
Count = Callable[[int], int]


def test_E1_a_forked_copy_may_not_use_the_runtime() -> None:
    """It may have one of its own, and end as it likes: its exit handlers do not touch the parent's workers."""
    script("""
        import warnings
        from support.harness import assert_right, pids
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads, Python 3.12
        rt = synk.fork(2, backend="numpy")
        f = rt.function(lambda x: x.sum(), outputs="sum")
        data = rt.data(np.ones(4))
        assert f(data) == 4.0
        before = pids(rt)

        def fork_another():
            assert_right(synk.fork(1, backend="numpy"))
            synk.close()

        for act in (
            lambda: f(np.ones(4)), lambda: rt.data(np.ones(3)), rt.distribute, lambda: f.serial(np.ones(4)),
            rt.close, fork_another
        ):
            child = os.fork()
            if child == 0:
                try:
                    act()
                except synk.errors.ReentrancyError as error:
                    print("refused", "fork" in str(error), flush=True)
                sys.exit(7)  # runs the exit handlers
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert f(data) == 4.0
        assert pids(rt) == before
        assert_right(rt)
        rt.close()
    """).check("refused True\n" * 4)


@pytest.mark.own_start
def test_E2_multiprocessing_in_the_master_and_in_a_function() -> None:
    script("""
        import multiprocessing, warnings
        from support import saboteurs
        from support.harness import assert_right

        def main():
            with synk.fork(2, backend="numpy") as rt:
                assert_right(rt)
                for method in ("fork", "spawn"):
                    with multiprocessing.get_context(method).Pool(1) as pool:
                        print("held", pool.map(saboteurs.synk_descriptors, [0]))
                        assert_right(rt)

                    def nested(row):
                        with multiprocessing.get_context(method).Pool(1) as pool:
                            return set(pool.map(abs, [-int(row[0]) - 1]))

                    print(rt.function(nested, outputs=None)(np.arange(2)))
                    assert_right(rt)

        if __name__ == "__main__":
            warnings.simplefilter("ignore", DeprecationWarning)
            main()
    """).check("held [[]]\n[{1}, {2}]\n" * 2)


@pytest.mark.own_start
def test_E3_subprocesses_inherit_nothing(runtime: Fork) -> None:
    """Even with ``close_fds=False``: all descriptors of the runtime are close-on-exec, in the workers too."""
    rt = runtime(2)
    data = rt.data(np.ones(1000))
    assert rt.function(lambda x: x.sum(), outputs="sum")(data) == 1000

    def listed(row: object = None) -> str:
        return subprocess.check_output(["ls", "-l", "/proc/self/fd"], close_fds=False, text=True)

    in_program, *in_workers = listed(), *rt.function(listed, outputs=None)(np.arange(2))
    assert not [kind for kind in ("memfd", "socket", "pidfd") if kind in in_program]
    for lines in in_workers:
        lines = lines.replace("pipe:", "", 2)  # standard output and error are pipes of their own
        assert not [kind for kind in ("memfd", "socket", "pidfd", "pipe:") if kind in lines], lines


@pytest.mark.own_start
def test_E4_a_thread_that_ends_has_started_the_workers(runtime: Fork) -> None:
    """At first, or again after a death: they live on."""
    started: list[Any] = []

    def heal() -> None:
        with pytest.warns(RuntimeWarning):
            assert_right(started[0])

    for act in (lambda: started.append(runtime(2)), heal):
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
        with same_workers(started[0]) as before:
            pass
        kill_and_wait(before[0])


def test_E4_threads_of_a_program_that_is_the_rank_itself_wait_for_each_other(shared_runtimes: Any) -> None:
    """Only the thread that runs a function is inside it."""
    rt = shared_runtimes[0]
    total = rt.function(lambda x: synk.comm.all_reduce(x.sum()) if time.sleep(1e-3) is None else 0, outputs="first")

    def work(thread: int) -> None:
        for number in range(20):
            x = np.arange(4.0) + 100 * thread + number
            data, w = rt.data(x), rt.shared(x)
            w.value = w.value + 1
            assert total(x) == total.submit(x).result() == total(data) == total(w.value - 1) == x.sum()
            assert list(rt.map(abs, range(-3, 0))) == [3, 2, 1]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [None, None]
    refused = rt.function(lambda x: synk.data(x), outputs=None)
    with pytest.raises(ReentrancyError, match="inside worker rank 0"):
        refused(np.ones(2))


def test_E8_data_that_dies_in_a_garbage_collection_during_a_call(rt: Any) -> None:
    """Finalizers take no lock and send no message."""
    total = rt.function(lambda x: x.sum(), outputs="sum")
    threshold = gc.get_threshold()
    with same_workers(rt):
        gc.set_threshold(1)
        try:
            for number in range(200):
                cycle: list[Any] = [rt.data(np.full(100, float(number)))]
                cycle.append(cycle)
                assert total(cycle[0]) == 100.0 * number
                del cycle
        finally:
            gc.set_threshold(*threshold)


@pytest.mark.own_start
def test_E10_objects_that_outlive_the_interpreter() -> None:
    """A call from an exit handler works as long as the runtime lives, and says that it is closed afterwards."""
    script(
        """
        import atexit, sys

        def late():
            try:
                print(f(np.ones(2)))
            except synk.errors.ClosedError:
                print("closed")

        atexit.register(late)  # it is called after the handlers of synk
        import numpy as np
        import synk
        atexit.register(late)
        rt = synk.fork(2, backend="numpy")
        f = rt.function(lambda x: x.sum(), outputs="sum")
        data = rt.data(np.ones(100))
        cycle = [rt, f, data, rt.function(lambda x: x, outputs="gather")(data)]
        cycle.append(cycle)
        sys.keep_until_the_end = cycle

        class Late:
            def __del__(self, f=f, rows=np.ones(2), closed=synk.errors.ClosedError):
                try:
                    f(rows)
                except closed:
                    pass

        sys.late = Late()
        assert f(data) == 100
        """,
        flags=("-X", "dev", "-W", "error"),
        has_prelude=False,
    ).check("2.0\nclosed\n")


def test_E11_E14_runtimes_side_by_side(reused: Fork) -> None:
    """Also in two threads at once; only ``synk.fork`` is of one."""
    runtimes = [reused(2), reused(1)]

    def use(rt: Any) -> None:
        square = rt.function(lambda x: x * x, outputs="gather")
        for step in range(100):
            x = np.arange(20.0) + step
            np.testing.assert_array_equal(square(x), x * x)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(use, runtimes))
    data = runtimes[0].data(np.arange(4.0))
    with pytest.raises((ValueError, ClosedError)):
        runtimes[1].function(lambda x: x.sum(), outputs="sum")(data)
    with synk.fork(2, backend="numpy") as rt, same_workers(rt):
        with pytest.raises(SynkError, match=r"already running.*synk\.close\(\)"):
            synk.fork(1, backend="numpy")
        assert synk.current() is rt


def test_E12_close_twice_and_use_after_close(runtime: Fork) -> None:
    rt = runtime(2)
    f = rt.function(lambda x: x.sum(), outputs="sum")
    data = rt.data(np.arange(4.0))
    result = rt.function(lambda x: x, outputs="gather")(data)
    assert f(data) == 6.0
    rt.close()
    rt.close()
    uses: dict[str, Callable[[], Any]] = {
        "call": lambda: f(np.arange(4.0)),
        "call on data": lambda: f(data),
        "serial": lambda: f.serial(np.arange(4.0)),
        "function": lambda: rt.function(lambda x: x),
        "data": lambda: rt.data(np.ones(3)),
        "distribute": rt.distribute,
        "with": rt.__enter__,
    }
    for name, use in uses.items():
        with pytest.raises(ClosedError):
            use()
            raise AssertionError(f"{name} works on a closed runtime")
    for thing in (rt, f, data):
        assert repr(thing)
    np.testing.assert_array_equal(result, np.arange(4.0))


def test_E12_verbs_without_a_runtime_name_the_next_step() -> None:
    """Before the first one and after the last one; also where it has closed itself, and then there may be another."""
    script("""
        from support import saboteurs

        def refused():
            for verb in (synk.current, synk.distribute, lambda: synk.data(np.ones(2))):
                try:
                    verb()
                except (synk.errors.NotForkedError, synk.errors.ClosedError) as error:
                    assert "synk.fork()" in str(error), error
                else:
                    raise AssertionError(verb)

        refused()
        synk.close()
        synk.info()
        with synk.fork(1, backend="numpy"):
            pass
        refused()
        synk.fork(2, backend="numpy", max_restarts=0)
        f = synk.function(lambda x: saboteurs.kill_self() if x[0] < 0 else x.sum(), outputs="sum")
        for error in (synk.errors.WorkerDied, synk.errors.ClosedError):
            try:
                f(np.array([-1.0, -1.0]))
            except error:
                pass
        synk.fork(2, backend="numpy")
        assert f(np.ones(4)) == 4.0
        print("done")
    """).check("done\n")


def test_E15_a_runtime_that_is_dropped_without_close() -> None:
    """With calls in flight, which are in a cycle with it."""
    rt = synk.Runtime(2, backend="numpy")
    assert_right(rt)
    workers = pids(rt)
    endless = rt.function(lambda x: saboteurs.loop_for_ever(), outputs=None)
    cycle = [rt, [endless.submit(np.ones(2)) for _ in range(3)]]
    cycle.append(cycle)
    with pytest.warns(ResourceWarning) as caught:
        del rt, endless, cycle
        gc.collect()
    assert len(caught) == 1
    assert all(map(wait_until_dead, workers))
