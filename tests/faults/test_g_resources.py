"""G: memory, descriptors, processes that the system refuses. A Python exception with numbers in it, never SIGBUS."""

from __future__ import annotations

import contextlib
import os
import resource
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import (
    assert_right,
    descriptors,
    kill_and_wait,
    mapped_memfds,
    outcomes,
    pids,
    same_workers,
    script,
)

import synk
from synk.errors import SharedMemoryError

Fork = Callable[..., Any]


def test_G1_data_that_does_not_fit(shared_runtimes: Any) -> None:
    """The size is checked before the system's out-of-memory killer would."""
    rt = shared_runtimes[2]
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


def test_G1_the_system_refuses_the_memory() -> None:
    """A file size limit hits memory files as a full machine would; the workers have it too."""
    code = """
        import resource
        from support.harness import assert_right, pids
        from synk.errors import SharedMemoryError

        def case(where):
            rt = synk.fork(2, backend="numpy")
            keep = rt.data(np.arange(1000.0))
            total = rt.function(lambda x: x.sum(), outputs="sum")
            length = rt.function(lambda blob, x: len(blob["b"]), bcast_inputs="blob", outputs="max")
            grow = rt.function(lambda x: np.ones((int(x[0]), 1 << 16)), outputs={"large result": "sum"}.get(where))
            w = rt.shared(np.concatenate([np.full(600, 1.0), np.full(600, 2.0)]), sharded=True)

            def assign(x):
                w.value = np.full(1 << 18 if x[0] else 700, x.sum())
                return 0.0

            assigning = rt.function(assign)
            assert_right(rt)
            assert total(keep) == 499500
            before = pids(rt)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
            for pid in before:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
            big = np.ones(1 << 20)
            act = {
                "data": lambda: rt.data(big),
                "staging": lambda: total(big),
                "broadcast": lambda: length({"b": bytes(1 << 23)}, keep),
                "result": lambda: grow(np.full(4, 40)),
                "large result": lambda: grow(np.full(4, 40)),
                "growing": lambda: keep.set_length(1 << 20),
                "value": lambda: assigning(np.ones(4)),
                "value of rank 0": lambda: assigning(np.array([1.0, 1.0, 0.0, 0.0])),
                "value of rank 1": lambda: assigning(np.array([0.0, 0.0, 1.0, 1.0])),
            }[where]
            num_refused = 0
            for _ in range(3):
                try:
                    act()
                except SharedMemoryError as error:
                    assert any(word.isdigit() for word in str(error).split()), error
                    num_refused += 1
                assert total(keep) == 499500
                assert [(len(w[rank]), *{*w[rank].tolist()}) for rank in (0, 1)] == [(600, 1.0), (600, 2.0)]
            assert num_refused == 3
            assert pids(rt) == before
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            for pid in before:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            act()
            assert_right(rt)
            assert pids(rt) == before
            assert max(w.lengths) == (1 << 18 if "value" in where else 600)
            rt.close()
    """
    cases = [(where,) for where in ("data", "staging", "broadcast", "result", "large result", "growing")]
    cases += [("value",), ("value of rank 0",), ("value of rank 1",)]
    found = outcomes(code, cases)
    assert not any(found.values()), found


def test_G2_no_worker_can_shrink_a_segment(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    data = rt.data(np.arange(1000.0))

    def shrink(x: np.ndarray) -> None:
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if "memfd:synk" in os.readlink(f"/proc/self/fd/{fd}"):
                    os.ftruncate(fd, 0)

    with same_workers(rt):
        rt.function(shrink, outputs=None)(data)
    np.testing.assert_array_equal(data[:], np.arange(1000.0))


def test_G3_a_rank_that_cannot_take_in_its_message_keeps_nobody_waiting(reused: Fork) -> None:
    """The others are in a collective, in which it will never join: there is no time limit."""
    rt = reused(2)
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


def test_G3_more_segments_than_one_message_can_carry(reused: Fork) -> None:
    """New to several ranks at once, also after all of them were started again."""
    rt = reused(2)
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
        from synk.errors import SharedMemoryError, StartupError

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
def test_G4_little_address_space() -> None:
    script("""
        import resource
        from support.harness import assert_right, pids
        from synk.errors import SharedMemoryError

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
def test_G5_the_system_refuses_a_process() -> None:
    """Started workers are ended, the limit is named."""
    script("""
        import subprocess
        from support.harness import assert_right, census, settled_census
        from synk.errors import StartupError
        with synk.fork(1, backend="numpy") as rt:
            assert_right(rt)
        del rt
        baseline = census()
        real = subprocess.Popen
        started = []

        class Refusing(real):
            def __init__(self, *args, **kwargs):
                if len(started) == 2:
                    raise BlockingIOError(11, "Resource temporarily unavailable")
                super().__init__(*args, **kwargs)
                started.append(self.pid)

        subprocess.Popen = Refusing
        try:
            synk.fork(4, backend="numpy").distribute()
        except StartupError as error:
            print("refused", "Resource temporarily unavailable" in str(error))
        subprocess.Popen = real
        left = settled_census(baseline).leftovers(baseline)
        assert not left, left
        with synk.fork(2, backend="numpy") as rt:
            assert_right(rt)
    """).check("refused True\n")


def rss_nbytes(pid: int) -> int:
    """Return the resident bytes of a process."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_G6_thousands_of_calls_and_data(shared_runtimes: Any, storm_count: Callable[[int], int]) -> None:
    """Of changing shapes and several functions: memory, descriptors and mappings stay flat, in all processes."""
    rt = shared_runtimes[2]
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
        fds, resident = held(), [rss_nbytes(pid) for pid in everyone]
        tracemalloc.start()
        first = tracemalloc.get_traced_memory()[0]
        run(200)
        grown = tracemalloc.get_traced_memory()[0] - first
        tracemalloc.stop()
        run(storm_count(400))
        assert all(now <= before + 2 for before, now in zip(fds, held(), strict=True))
        for pid, before in zip(everyone, resident, strict=True):
            assert rss_nbytes(pid) < before + (8 << 20)
        assert grown < 1 << 18


def test_G7_without_memfd() -> None:
    """An unlinked file takes its place: the same results, and no name is left."""
    script("""
        import errno
        from support.harness import assert_right, pids, kill_and_wait
        import warnings

        def refused(*_, **__):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        os.memfd_create = refused
        with synk.fork(2, backend="numpy") as rt:
            before = pids(rt)
            data = rt.data(np.arange(1000.0))
            total = rt.function(lambda x: x.sum(), outputs="sum")
            assert total(data) == 499500
            data.set_length(500)
            assert total(data) == np.arange(500).sum()
            big = rt.function(lambda x: np.full(1 << 17, x.max()), outputs="max")
            assert (big(data) == 499).all()
            kill_and_wait(before[0])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert total(data) == np.arange(500).sum()
            assert_right(rt)
    """).check("")
