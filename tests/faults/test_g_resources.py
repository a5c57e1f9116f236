"""G: memory, descriptors, processes that the system refuses. A Python exception with numbers in it, never SIGBUS."""

from __future__ import annotations

import errno
import os
import resource
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import assert_right, descriptors, mapped_memfds, outcomes, pids, same_workers, script

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
            }[where]
            num_refused = 0
            for _ in range(3):
                try:
                    act()
                except SharedMemoryError as error:
                    assert any(word.isdigit() for word in str(error).split()), error
                    num_refused += 1
                assert total(keep) == 499500
            assert num_refused == 3
            assert pids(rt) == before
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            for pid in before:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            act()
            assert_right(rt)
            assert pids(rt) == before
            rt.close()
    """
    cases = [(where,) for where in ("data", "staging", "broadcast", "result", "large result", "growing")]
    found = outcomes(code, cases)
    assert not any(found.values()), found


def test_G2_no_worker_can_shrink_a_segment(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    data = rt.data(np.arange(1000.0))

    def sabotage(x: np.ndarray) -> list[int]:
        codes = []
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                if "memfd:synk" in os.readlink(f"/proc/self/fd/{fd}"):
                    os.ftruncate(fd, 0)
            except OSError as error:
                codes.append(error.errno)
        return codes

    with same_workers(rt):
        for codes in rt.function(sabotage, outputs=None)(data):
            assert set(codes) <= {errno.EPERM, errno.ENOENT, errno.EBADF}
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


@pytest.mark.parametrize("where", ["start", "data", "worker"])
@pytest.mark.own_start
def test_G3_few_descriptors(where: str) -> None:
    """The limit is named, everything works again below it, and nothing leaks on the way."""
    script(f"""
        import resource
        from support.harness import assert_right, census, settled_census, pids
        from synk.errors import SharedMemoryError, StartupError
        where = {where!r}
        limit = lambda n, pid=0: resource.prlimit(pid, resource.RLIMIT_NOFILE, (n, 4096))
        with synk.fork(2, backend="numpy") as rt:
            assert_right(rt)
        del rt
        baseline = census()
        if where == "start":
            for free in range(1, 24):
                limit(len(os.listdir("/proc/self/fd")) - 1 + free)
                try:
                    synk.fork(4, backend="numpy").distribute()
                    synk.close()
                except (StartupError, SharedMemoryError) as error:
                    assert "ulimit -n" in str(error), error
                limit(4096)
                left = settled_census(baseline).leftovers(baseline)
                assert not left, (free, left)
        rt = synk.fork(2, backend="numpy")
        assert_right(rt)
        before = pids(rt)
        total = rt.function(lambda *xs: sum(x.sum() for x in xs), outputs="sum")
        if where == "data":
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
        elif where == "worker":
            for pid in before:
                limit(len(os.listdir(f"/proc/{{pid}}/fd")) + 1, pid)
            many = [rt.data(np.ones((10, 5000))) for _ in range(8)]
            try:
                total(*many)
            except SharedMemoryError as error:
                assert "ulimit -n" in str(error)
            else:
                raise AssertionError("eight segments passed through one descriptor")
            for pid in before:
                limit(4096, pid)
            assert total(*many) == 400_000
            assert pids(rt) == before
        assert_right(rt)
        rt.close()
    """).check()


@pytest.mark.own_start
def test_G4_little_address_space() -> None:
    script("""
        import resource
        from support.harness import assert_right, pids
        from synk.errors import SharedMemoryError
        rt = synk.fork(2, backend="numpy")
        assert_right(rt)
        before = pids(rt)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        try:
            rt.data(shape=(1 << 27,), dtype="uint8")
        except SharedMemoryError as error:
            print("refused", "ulimit -v" in str(error))
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert_right(rt)
        data = rt.data(shape=(1 << 27,), dtype="uint8")
        for pid in before:
            with open(f"/proc/{pid}/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.prlimit(pid, resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
        total = rt.function(lambda x: int(x.sum(dtype=np.int64)), outputs="sum")
        try:
            total(data)
        except (SharedMemoryError, MemoryError):
            print("refused in the worker")
        assert pids(rt) == before
        for pid in before:
            resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        data[:5] = 1
        assert total(data) == 5
        assert_right(rt)
        rt.close()
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


def test_G6_a_thousand_data_made_and_freed(shared_runtimes: Any) -> None:
    """Descriptors and mappings are flat in the master and in the workers, which let go with the next call."""
    rt = shared_runtimes[2]
    total = rt.function(lambda x: x.sum(), outputs="sum")

    def use(number: int) -> None:
        data = rt.data(np.full(5000, float(number)))
        if number % 5 == 0:
            assert total(data) == 5000.0 * number
        if number % 3 == 0:
            data.free_memory()

    def held() -> list[int]:
        assert_right(rt)
        return [sum(descriptors(pid).values()) + len(mapped_memfds(pid)) for pid in (os.getpid(), *workers)]

    workers = pids(rt)
    with same_workers(rt):
        for number in range(50):
            use(number)
        before = held()
        for number in range(1000):
            use(number)
        after = held()
    assert all(later <= earlier + 2 for earlier, later in zip(before, after, strict=True)), (before, after)


@pytest.mark.parametrize("num_calls", [2000, pytest.param(10_000, marks=pytest.mark.storm)])
def test_G6_thousands_of_calls(shared_runtimes: Any, num_calls: int) -> None:
    """Of changing shapes and several functions: memory, descriptors and mappings stay flat."""
    rt = shared_runtimes[2]
    total = rt.function(lambda x: x.sum(), outputs="sum")
    double = rt.function(lambda w, x: x * w, bcast_inputs="w", outputs="gather")
    big = rt.function(lambda x: np.full(40_000, x.sum()), outputs="avg")

    def run(count: int) -> None:
        for number in range(count):
            x = np.full(number % 50 + 2, 2.0)
            assert total(x) == x.sum()
            if number % 10 == 0:
                assert double(3.0, x)[0] == 6.0
            if number % 100 == 0:
                assert big(x).size == 40_000

    def held() -> list[int]:
        return [sum(descriptors(pid).values()) + len(mapped_memfds(pid)) for pid in everyone]

    everyone = [os.getpid(), *pids(rt)]
    with same_workers(rt):
        run(num_calls // 5)
        fds, resident = held(), [rss_nbytes(pid) for pid in everyone]
        tracemalloc.start()
        first = tracemalloc.get_traced_memory()[0]
        run(500)
        grown = tracemalloc.get_traced_memory()[0] - first
        tracemalloc.stop()
        run(num_calls)
        assert held() == fds
        for pid, before in zip(everyone, resident, strict=True):
            assert rss_nbytes(pid) < before + (8 << 20)
        assert grown < 1 << 18


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM"])
def test_G7_without_memfd(error: str) -> None:
    """An unlinked file takes its place: the same results, and no name is left."""
    script(f"""
        import errno
        from support.harness import assert_right, pids, kill_and_wait
        import warnings

        def refused(*_, **__):
            raise OSError(errno.{error}, os.strerror(errno.{error}))

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
