"""Memory of shared variables and of functions: given back when they are dropped, flat over a thousand steps."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import descriptors, mapped_memfds, pids
from support.rank_arrays import assert_same

import synk


def test_dropping_a_variable_gives_its_memory_back_after_the_next_call(runtime: Callable[..., Any]) -> None:
    rt = runtime(2)
    workers = pids(rt)

    def held() -> tuple[int, int, list[int]]:
        return len(mapped_memfds()), sum(descriptors().values()), [len(mapped_memfds(pid)) for pid in workers]

    def use(nbytes: int) -> None:
        w = rt.shared(np.zeros(nbytes // 8))
        x = rt.shared(np.zeros(nbytes // 8), sharded=True)

        def touch(rows: np.ndarray) -> float:
            w.value = w.value + 1
            return rows.sum() + x.value.sum()

        f = rt.function(touch)
        f(np.ones(4))
        w.value = np.zeros(nbytes // 4)
        f(np.ones(4))
        x.value = np.zeros(nbytes // 4)

    ping = rt.function(lambda rows: rows.sum(), outputs="sum")
    use(1 << 20)
    gc.collect()
    ping(np.ones(2))
    before = held()
    use(1 << 20)
    gc.collect()
    ping(np.ones(2))
    assert held() == before


EQUALISING: dict[str, Callable[[Any, Any], Any]] = {
    "shared": lambda rt, w: None,
    "set_value": lambda rt, w: rt.set_value(w, np.ones(8)),
    "assignment": lambda rt, w: setattr(w, "value", np.ones(8)),
    "broadcast": lambda rt, w: rt.broadcast(w),
    "all_reduce": lambda rt, w: rt.all_reduce(w),
    "all_gather": lambda rt, w: rt.all_gather(w),
}


def test_a_value_that_is_equal_on_all_ranks_lies_in_memory_once(shared_runtimes: Any, subtests: Any) -> None:
    for verb in EQUALISING:
        with subtests.test(case=verb):
            check_equalising(shared_runtimes[3], verb)


def check_equalising(rt: Any, verb: str) -> None:
    w = rt.shared(np.zeros(8))
    if verb != "shared":
        rt.set_value(w, np.full(8, 5.0), rank=1)
        assert len(firsts_of(w)) == 2, "ranks 0 and 2 still hold what they were given together"
    EQUALISING[verb](rt, w)
    assert len(firsts_of(w)) == 1

    def differ(x: np.ndarray) -> float:
        w.value = w.value + synk.comm.rank
        return 0.0

    before = rt.get_value(w)
    f = rt.function(differ)
    for count in range(1, 4):
        f(np.ones(3))
        assert len(firsts_of(w)) == 3
        assert_same([rt.get_value(w, rank) for rank in range(3)], [before + count * rank for rank in range(3)])


def firsts_of(w: Any) -> set[int]:
    """Return the segments that hold the ranks' values."""
    return {pair[front].id for pair, front in zip(w._referent.buffers, w._referent.front, strict=True)}


def test_a_parameter_of_many_workers_costs_its_size_once(shared_runtimes: Any) -> None:
    rt = shared_runtimes[4]
    nbytes = 1 << 24
    w = rt.shared(np.ones(nbytes // 8))
    assert [segment.nbytes for segment in w._referent._all_segments()] == [nbytes]
    rt.all_reduce(w, "sum")
    assert [segment.nbytes for segment in w._referent._all_segments()] == [nbytes] * 2
    assert rt.function(lambda x: float(w.value[-1]), outputs="sum")(np.ones(4)) == 4 * 4


def test_variables_come_and_go_in_another_thread_while_calls_run(
    reused: Callable[..., Any],
) -> None:
    rt = reused(2)
    count = rt.shared(0)

    def add(x: np.ndarray) -> float:
        count.value = count.value + 1
        return x.sum()

    f = rt.function(add, outputs="sum")
    failures: list[BaseException] = []

    def make() -> None:
        try:
            for k in range(60):
                kept = [rt.shared(np.full(3, k)) for _ in range(3)]
                np.testing.assert_array_equal(kept[k % 3].value, np.full(3, k))
        except BaseException as error:
            failures.append(error)

    maker = threading.Thread(target=make)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        maker.start()
        calls = 0
        while maker.is_alive():
            assert f(np.ones(4)) == 4
            calls += 1
    finally:
        sys.setswitchinterval(interval)
        maker.join()
    assert not failures
    assert_same(rt.gather(count), np.full(2, calls))


@pytest.mark.parametrize("num_steps", [300, pytest.param(1000, marks=pytest.mark.storm)])
def test_many_steps_hold_no_more_than_ten(runtime: Callable[..., Any], num_steps: int) -> None:
    """Descriptors, mappings and private memory, in the master and in the workers."""
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

    f = rt.function(step, outputs=("avg", "gather"))

    def run(count: int) -> tuple[Any, ...]:
        for k in range(count):
            f(x, batch=slice(k % 7, None))
            rt.all_reduce(params)
            total.value = total.value
        memory = rt.function(saboteurs.anonymous_kb, outputs=None)()
        places = [(sum(descriptors(pid).values()), len(mapped_memfds(pid))) for pid in ("self", *workers)]
        return memory, saboteurs.anonymous_kb(), places

    run(20)
    before, mine_before, places_before = run(10)
    after, mine_after, places_after = run(num_steps)
    assert places_after == places_before
    assert max(np.subtract(after, before)) < 1024
    assert mine_after - mine_before < 2048
    assert_same(params.value["w"], np.full((64, 8), -30.0 - num_steps), is_rounded=True)
