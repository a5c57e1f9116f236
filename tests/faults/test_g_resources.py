"""G: memory, descriptors, processes that the system refuses. A Python exception with numbers in it, never SIGBUS."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.harness import (
    assert_right,
    descriptors,
    kill_and_wait,
    mapped_memfds,
    pids,
    same_workers,
    script,
    wait_until_dead,
)
from support.rank_arrays import assert_same, everywhere
from support.saboteurs import resident_nbytes

import synk
from synk.errors import SharedMemoryError, StartupError

Fork = Callable[..., Any]


def test_G1_data_that_does_not_fit(rt: Any) -> None:
    """The size is checked before the system's out-of-memory killer would."""
    old = rt.data(np.arange(1000.0))
    total = rt.function(lambda x: x.sum(), outputs="sum")
    with same_workers(rt):
        with pytest.raises(SharedMemoryError, match=r"\d+ bytes") as caught:
            rt.data(shape=(1 << 46,), dtype="float64")
        assert isinstance(caught.value, MemoryError)
        assert total(old) == 499500
        with pytest.raises(SharedMemoryError):
            old.set_length(1 << 46)
        assert total(old) == 499500
        np.testing.assert_array_equal(old.data[:1000], np.arange(1000.0))


@contextlib.contextmanager
def no_large_memory(workers: list[int]) -> Iterator[None]:
    """Have the system refuse this process and the workers memory files of more than 1 MB, as a full machine would."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for pid in (0, *workers):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, usual[1]))
        yield
    finally:
        for pid in (0, *workers):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, usual)


BLOB = bytes(1 << 23)
REFUSED: dict[str, Callable[[Any, Any, Any], object]] = {
    # what is done with a runtime, data of 1000 rows and a sharded variable of 600 rows on each of two ranks
    "data": lambda rt, keep, w: rt.data(np.ones(1 << 20)),
    "staging": lambda rt, keep, w: rt.function(np.sum, outputs="sum")(np.ones(1 << 20)),
    "broadcast": lambda rt, keep, w: rt.function(lambda b, x: len(b), bcast_inputs="b", outputs="max")(
        bytes(1 << 23), keep
    ),
    "result": lambda rt, keep, w: rt.function(lambda x: np.ones((40, 1 << 16)), outputs=None)(keep),
    "large result": lambda rt, keep, w: rt.function(lambda x: np.ones((40, 1 << 16)), outputs="sum")(keep),
    "growing": lambda rt, keep, w: keep.set_length(1 << 20),
    "value": lambda rt, keep, w: assign_to(rt, w, 0, 1),
    "value of rank 0": lambda rt, keep, w: assign_to(rt, w, 0),
    "value of rank 1": lambda rt, keep, w: assign_to(rt, w, 1),
}


def assign_to(rt: Any, w: Any, *large: int) -> None:
    def assign(x: np.ndarray) -> float:
        w.value = np.full(1 << 18 if synk.comm.rank in large else 700, x.sum())
        return 0.0

    rt.function(assign)(np.ones(4))


def test_G1_the_system_refuses_the_memory(runtime: Fork, subtests: pytest.Subtests) -> None:
    """No value of any rank has changed then."""
    for where, act in REFUSED.items():
        rt = runtime(2)
        keep, values = rt.data(np.arange(1000.0)), [np.full(600, 1.0), np.full(600, 2.0)]
        w = rt.shared(np.concatenate(values), sharded=True)
        total = rt.function(lambda x: x.sum(), outputs="sum")
        assert total(keep) == 499500
        with subtests.test(where), same_workers(rt) as workers:
            for _ in range(3):
                with no_large_memory(workers), pytest.raises(SharedMemoryError, match=r"\b\d+\b"):
                    act(rt, keep, w)
                assert total(keep) == 499500
                assert_same(everywhere(rt, w), values)
            act(rt, keep, w)
        rt.close()


def test_G2_no_worker_can_shrink_a_segment(rt: Any) -> None:
    data = rt.data(np.arange(1000.0))

    def shrink(x: np.ndarray) -> None:
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if "memfd:synk" in os.readlink(f"/proc/self/fd/{fd}"):
                    os.ftruncate(fd, 0)

    with same_workers(rt):
        rt.function(shrink, outputs=None)(data)
    np.testing.assert_array_equal(data[:], np.arange(1000.0))


def test_G3_a_rank_that_cannot_take_in_its_message_keeps_nobody_waiting(rt: Any) -> None:
    """The others are in a collective, in which it will never join: there is no time limit."""
    f = rt.function(lambda x: synk.comm.all_reduce(x.sum(), "sum"), outputs="first")
    assert f(np.ones(4)) == 4.0
    workers = pids(rt)
    limits = resource.prlimit(workers[1], resource.RLIMIT_NOFILE)
    resource.prlimit(workers[1], resource.RLIMIT_NOFILE, (3, limits[1]))
    data = rt.data(np.ones(1 << 17))  # too large for an arena, which the rank may have already
    with pytest.raises(SharedMemoryError, match="ulimit -n"):
        f(data)
    resource.prlimit(workers[1], resource.RLIMIT_NOFILE, limits)
    assert f(data) == 1 << 17
    assert pids(rt) == workers


def test_G3_more_segments_than_one_message_can_carry(rt: Any) -> None:
    """New to several ranks at once, also after all of them were started again."""
    size = 33_000  # too large for an arena: each has a descriptor of its own
    variables = [rt.shared(np.full(size, float(k))) for k in range(260)]
    f = rt.function(lambda x: sum(w.value[-1] for w in variables) * len(x), outputs="sum")
    expected = 4 * sum(range(260))
    assert f(np.ones(4)) == expected
    kill_and_wait(*pids(rt))
    with pytest.warns(RuntimeWarning):
        assert f(np.ones(4)) == expected
    synk.broadcast(variables[3], np.full(size, 1003.0))
    assert f(np.ones(4)) == expected + 4000


@pytest.mark.own_start
def test_G3_few_descriptors() -> None:
    """The limit is named, everything works again below it, and nothing leaks on the way."""
    script("""
        import resource
        from support.harness import assert_right, census, settled_census
        from synk.errors import SharedMemoryError, StartupError, StartupError

        def limit(n):
            resource.setrlimit(resource.RLIMIT_NOFILE, (n, 4096))

        with synk.fork(2, backend="numpy") as rt:
            assert_right(rt)
        del rt
        baseline = census()
        for free in range(1, 24, 2):
            limit(len(os.listdir("/proc/self/fd")) - 1 + free)
            try:
                synk.fork(4, backend="numpy").distribute()
                synk.close()
            except (StartupError, SharedMemoryError) as error:
                assert "ulimit -n" in str(error), error
            limit(4096)
            left = settled_census(baseline).leftovers(baseline)
            assert not left, (free, left)
        with synk.fork(2, backend="numpy") as rt:
            assert_right(rt)
            limit(len(os.listdir("/proc/self/fd")) + 5)
            kept = []
            try:
                while True:
                    kept.append(rt.data(np.ones(1 << 16)))
            except SharedMemoryError as error:
                assert "ulimit -n" in str(error)
            assert 0 < len(kept) < 40
            kept.clear()
            limit(4096)
            assert_right(rt)
    """).check()


@pytest.mark.own_start
def test_G3_numbers_above_those_that_select_takes() -> None:
    script("""
        import resource, signal, warnings
        from support.harness import assert_right
        from synk.errors import WorkerDied

        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1024)]
        warnings.simplefilter("ignore", RuntimeWarning)  # of the restart
        for placed in ({"num_workers": 2}, {"num_workers": [1, 1], "cluster": "here", "nodes": 2}):
            with synk.Runtime(backend="numpy", **placed) as rt:
                assert_right(rt)
                rt.map(lambda n: n + 1, [1]).close()
                os.kill(rt._session.by_rank[0].process.pid, signal.SIGKILL)  # of nodes, an agent
                try:
                    assert_right(rt)
                except WorkerDied:
                    pass
                assert_right(rt)
    """).check()


@pytest.mark.own_start
def test_G4_little_address_space() -> None:
    script("""
        import resource
        from support.harness import assert_right, pids
        from synk.errors import SharedMemoryError, StartupError

        def limit(pid, nbytes):
            with open(f"/proc/{pid}/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.prlimit(pid, resource.RLIMIT_AS, (used + nbytes if nbytes else -1, -1))

        with synk.fork(2, backend="numpy") as rt:
            before = pids(rt)
            limit(os.getpid(), 64 << 20)
            try:
                rt.data(shape=(1 << 27,), dtype="uint8")
            except SharedMemoryError as error:
                print("refused", "ulimit -v" in str(error))
            limit(os.getpid(), None)
            data = rt.data(shape=(1 << 27,), dtype="uint8")
            data[:5] = 1
            total = rt.function(lambda x: int(x.sum(dtype=np.int64)), outputs="sum")
            for pid in before:
                limit(pid, 32 << 20)
            try:
                total(data)
            except (SharedMemoryError, MemoryError):
                print("refused in the worker")
            for pid in before:
                limit(pid, None)
            assert total(data) == 5
            assert pids(rt) == before
    """).check("refused True\nrefused in the worker\n")


@pytest.mark.own_start
def test_G5_the_system_refuses_a_process(runtime: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started workers are ended, the limit is named."""
    real, started = subprocess.Popen, []

    def start(*args: Any, **options: Any) -> Any:
        if len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(real(*args, **options))
        return started[-1]

    with monkeypatch.context() as patch, pytest.raises(StartupError, match="Resource temporarily unavailable"):
        patch.setattr(subprocess, "Popen", start)
        runtime(4).distribute()
    assert len(started) == 2 and all(wait_until_dead(each.pid) for each in started)
    assert_right(runtime(2))


def test_G6_thousands_of_calls_and_data(rt: Any, storm_count: Callable[[int], int]) -> None:
    """Of changing shapes and several functions: memory, descriptors and mappings stay flat, in all processes."""
    total = rt.function(lambda x: x.sum(), outputs="sum")
    double = rt.function(lambda w, x: x * w, bcast_inputs="w", outputs="gather")
    big = rt.function(lambda x: np.full(40_000, x.sum()), outputs="avg")

    def run(count: int) -> None:
        for number in range(count):
            x = np.full(number % 50 + 2, 2.0)
            assert total(x) == x.sum()
            data = rt.data(np.full(5000, float(number)))
            if number % 5 == 0:
                assert total(data) == 5000.0 * number
                assert total.submit(x).result() == x.sum()
            if number % 3 == 0:
                data.free_memory()
            if number % 10 == 0:
                assert double(3.0, x)[0] == 6.0
            if number % 100 == 0:
                assert big(x).size == 40_000
                assert total(np.ones(number * 100 + 1)) == number * 100 + 1

    def held() -> list[int]:
        assert_right(rt)
        return [sum(descriptors(pid).values()) + len(mapped_memfds(pid)) for pid in everyone]

    everyone = [os.getpid(), *pids(rt)]
    with same_workers(rt):
        run(400)
        fds, resident = held(), [resident_nbytes(pid) for pid in everyone]
        tracemalloc.start()
        first = tracemalloc.get_traced_memory()[0]
        run(200)
        grown = tracemalloc.get_traced_memory()[0] - first
        tracemalloc.stop()
        run(storm_count(400))
        assert all(now <= before + 2 for before, now in zip(fds, held(), strict=True))
        for pid, before in zip(everyone, resident, strict=True):
            assert resident_nbytes(pid) < before + (8 << 20)
        assert grown < 1 << 18


def test_G7_without_memfd(runtime: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unlinked file takes its place: the same results, and no name is left."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "memfd_create", refused)
    rt = runtime(2)
    workers, data = pids(rt), rt.data(np.arange(1000.0))
    total = rt.function(lambda x: x.sum(), outputs="sum")
    assert total(data) == 499500
    data.set_length(500)
    assert total(data) == np.arange(500).sum()
    big = rt.function(lambda x: np.full(1 << 17, x.max()), outputs="max")
    assert (big(data) == 499).all()
    kill_and_wait(workers[0])
    with pytest.warns(RuntimeWarning):
        assert total(data) == np.arange(500).sum()
    assert_right(rt)
