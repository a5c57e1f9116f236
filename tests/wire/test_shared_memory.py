"""Memory of shared variables and of functions: given back when they are dropped, flat over a thousand steps.

Reading the memory of another process, and what it refuses.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.gates import beside
from support.harness import Child, descriptors, mapped_memfds, pids
from support.rank_arrays import assert_same

import synk
from synk._pure.arrays import address_of
from synk._wire import memory
from synk._wire.process_memory import let_siblings_read, read_memory
from synk.errors import SharedMemoryError


def test_a_value_that_is_equal_on_all_ranks_lies_in_memory_once(shared_runtimes: Any) -> None:
    """However many workers there are, and again when a collective has made it equal."""
    rt, nbytes = shared_runtimes[3], 1 << 24

    def allocated() -> int:
        """Return the bytes of the memory files that are open here."""
        gc.collect()
        files = [os.stat(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_memory(fd)]
        return sum({file.st_ino: 512 * file.st_blocks for file in files}.values())

    def is_memory(fd: str) -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:synk")
        except FileNotFoundError:  # the descriptor of the listing itself
            return False

    rt.function(lambda x: x, outputs=None)(np.ones(3))
    before = allocated()
    w = rt.shared(np.ones(nbytes // 8))
    assert nbytes <= allocated() - before < 1.5 * nbytes
    w[1] = np.full(nbytes // 8, 5.0)
    synk.all_reduce(w, "sum")
    assert rt.function(lambda x: float(w.value[-1]), outputs=None)(np.ones(3)) == [7.0] * 3

    def differ(x: np.ndarray) -> None:
        w.value = w.value + synk.comm.rank

    f = rt.function(differ, outputs=None)
    for count in range(1, 4):
        f(np.ones(3))
        assert_same([w[rank][0] for rank in range(3)], [7.0 + count * rank for rank in range(3)])


def test_variables_come_and_go_in_another_thread_while_calls_run(rt: Any) -> None:
    count = rt.shared(0)

    def add(x: np.ndarray) -> float:
        count.value = count.value + 1
        return x.sum()

    def make() -> None:
        kept = [rt.shared(np.full(3, k)) for k in range(3)]
        assert_same([each.value for each in kept], [np.full(3, k) for k in range(3)])

    f = rt.function(add, outputs="sum")
    with beside(make, switch_s=1e-5):
        assert [f(np.ones(4)) for _ in range(100)] == [4.0] * 100
    assert_same(synk.gather(count), np.full(2, 100))


@pytest.mark.parametrize("num_steps", [40, pytest.param(1000, marks=pytest.mark.storm)])
def test_many_steps_hold_no_more_than_ten(runtime: Callable[..., Any], num_steps: int) -> None:
    """Descriptors, mappings and private memory, in the master and in the workers; with variables and data that go."""
    rt = runtime(2)
    params = rt.shared({"w": np.zeros((64, 8)), "b": np.zeros(8)})
    total = rt.shared(0.0)
    x = rt.shared(np.ones((32, 64)), sharded=True)
    workers = pids(rt)

    def step(x: np.ndarray) -> Any:
        old = params.value
        total.value = total.value + 1
        grown = np.zeros((1 + int(total.value) % 3, 4))
        gradient = synk.comm.all_reduce(x.mean(axis=0)[:, None] * np.ones(8))
        params.value = {"w": old["w"] - gradient, "b": old["b"] + grown.sum()}
        return old["w"].sum(), x

    f, last = rt.function(step, outputs=("avg", "gather")), rt.function(lambda x: x[-1], outputs="max")

    def use_and_drop(size: int) -> None:
        w, rows = rt.shared(np.zeros(size)), rt.shared(np.zeros(size), sharded=True)

        def touch(x: np.ndarray) -> float:
            w.value = w.value + 1
            return x.sum() + rows.value.sum()

        rt.function(touch)(np.ones(4))
        w.value = rows.value = np.zeros(2 * size)
        assert last(rt.data(np.full(4 * size, 7.0))) == 7.0

    def run(count: int) -> tuple[Any, ...]:
        for k in range(count):
            if k % 10 == 0:
                use_and_drop(1 << 17)
            f(x, batch=slice(k % 7, None))
            synk.all_reduce(params)
            total.value = total.value
        gc.collect()
        memory = rt.function(saboteurs.anonymous_kb, outputs=None)()
        places = [(sum(descriptors(pid).values()), len(mapped_memfds(pid))) for pid in ("self", *workers)]
        return memory, saboteurs.anonymous_kb(), places

    run(20)
    before, mine_before, places_before = run(10)
    after, mine_after, places_after = run(num_steps)
    assert places_after == places_before
    assert max(np.subtract(after, before)) < 2048  # kilobytes: the allocator keeps one array for the next
    assert mine_after - mine_before < 2048
    assert_same(params.value["w"], np.full((64, 8), -30.0 - num_steps), is_rounded=True)


def test_a_variable_for_which_there_is_no_memory_is_refused(shared_runtimes: Any) -> None:
    rt, usual = shared_runtimes[1], resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, usual[1]))
    try:
        with pytest.raises(SharedMemoryError, match="cannot allocate a shared segment"):
            rt.shared(np.ones(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_memory_of_a_rank_that_cannot_be_mapped_here_is_let_go_of(
    runtime: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor has an owner from the message on."""
    rt, x = runtime(2), np.ones(2)
    f = rt.function(lambda x: np.full(200_000, x.sum()), outputs="sum")
    rt.function(lambda x: x.sum(), outputs="sum")(x)
    before, map_file = descriptors(), memory.MappedFile

    def refuse(fd: int, nbytes: int, *, is_writable: bool, is_private: bool) -> Any:
        if not is_writable:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return map_file(fd, nbytes, is_writable=is_writable, is_private=is_private)

    with monkeypatch.context() as patched:
        patched.setattr(memory, "MappedFile", refuse)
        with pytest.raises(SharedMemoryError, match="cannot map a shared segment"):
            f(x)
    gc.collect()
    assert descriptors() == before
    assert (f(x) == 2).all()


def test_the_memory_of_another_process() -> None:
    """Wherever the target lies in its page: a little ahead of the source it is filled piece by piece."""
    numbers = np.arange(3_000_000)
    address, expected = address_of(numbers) + 8, numbers[1:250_002].view(np.uint8)[:2_000_003].copy()
    with Child(lambda: None) as child:
        numbers[:] = 0  # in this process alone
        for ahead in (0, 1, 16, 63, 64, 2048, 4095):
            memory = np.zeros(len(expected) + 4096, np.uint8)
            start = (address + ahead - address_of(memory)) % 4096
            found = memory[start : start + len(expected)]
            assert read_memory(child.pid, address, found)
            np.testing.assert_array_equal(found, expected)
            assert not memory[:start].any() and not memory[start + len(found) :].any()
    assert not read_memory(child.pid, address, np.empty(8, np.uint8)), "it has ended"


def test_this_process_and_an_address_where_nothing_is() -> None:
    for _ in range(2):  # the second time changes nothing
        let_siblings_read()
    source, found = np.arange(100), np.zeros(100, np.int64)
    assert read_memory(os.getpid(), address_of(source), found.view(np.uint8))
    np.testing.assert_array_equal(found, source)
    assert read_memory(os.getpid(), 0, np.empty(0, np.uint8))
    assert not read_memory(os.getpid(), 4096, np.empty(8, np.uint8))
