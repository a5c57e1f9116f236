"""Small values share segments: few descriptors, places that are used again, and nothing that shows through."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import Child, assert_right, descriptors, mapped_memfds, pids

import synk
from synk._wire import arenas as _arenas
from synk._wire import mapping as _mapping
from synk._wire.memory import PAGE_NBYTES

Fork = Callable[..., Any]


def test_thousands_of_small_values_share_a_few_descriptors(runtime: Fork) -> None:
    """1 000 ``Data``, and 200 variables that calls have assigned, in the master and in every worker."""
    rt = runtime(3)
    everyone = ["self", *pids(rt)]

    def count() -> list[int]:
        return [sum(descriptors(pid).values()) for pid in everyone]

    fewest = count()
    data = [rt.data(np.full((3, 1 + k % 300), float(k))) for k in range(1000)]
    total = rt.function(lambda *xs: sum(x.sum() for x in xs), outputs="sum")
    assert total(*data) == sum(3.0 * (1 + k % 300) * k for k in range(1000))
    variables = [rt.shared(np.full(1 + k, float(k))) for k in range(200)]

    def step(x: np.ndarray) -> float:
        for w in variables:
            w.value = w.value + synk.comm.rank
        return 0.0

    f = rt.function(step)
    for _ in range(3):
        f(np.ones(3))
    assert max(np.subtract(count(), fewest)) <= 40, (count(), fewest)
    for k, w in enumerate(variables):
        assert all((w[rank] == k + 3 * rank).all() for rank in range(3))
    for k in (0, 17, 999):
        assert (data[k].data == k).all()


def test_what_is_dropped_comes_back_and_new_values_begin_with_zeros(runtime: Fork) -> None:
    """Large ones have one descriptor each in the master and none in a worker; small ones share them."""
    rt = runtime(2)
    total = rt.function(lambda *xs: sum(x.sum() for x in xs), outputs="sum")
    total(np.ones(4))
    everyone = ["self", *pids(rt)]
    gc.collect()  # whatever earlier tests have left to it

    def held() -> list[int]:
        return [sum(descriptors(pid).values()) for pid in everyone]

    before = held()
    data = [rt.data(np.ones((2, 1 << 16))) for _ in range(20)]
    assert total(*data) == 20 << 17
    assert held() == [before[0] + 20, *before[1:]]
    data += [rt.data(np.full(5000, 3.0)) for _ in range(400)]
    assert total(data[-1]) == 15000
    del data
    gc.collect()
    total(np.ones(4))
    assert held() in (before, [before[0] + 1, *before[1:]])  # the last place of small ones is kept
    for _ in range(3):
        empty = rt.data(shape=(5000,), dtype="float64")
        assert not empty.data.any()
        empty[:] = 4
        assert total(empty) == 20000
        del empty


@pytest.mark.parametrize("refused", ["mmap", "fallocate"])
def test_where_the_system_refuses(runtime: Fork, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """No address space for an arena; a file system that cannot give parts of a file back."""
    rt = runtime(1)
    data = rt.data(np.arange(1000.0))
    with monkeypatch.context() as patch:
        if refused == "fallocate":
            patch.setattr(_mapping.libc, "fallocate", lambda *_: -1)
        else:
            real = _mapping.libc.mmap

            def small_only(*args: Any) -> Any:
                return _mapping.FAILED if args[1] >= _arenas.ARENA_NBYTES else real(*args)

            patch.setattr(_mapping.libc, "mmap", small_only)
        for k in range(5):
            others = [rt.data(np.full(100 * PAGE_NBYTES // 8 // 4**size, float(k))) for size in range(4)]
            del others
            empty = rt.data(shape=(10_000,), dtype="float64")
            assert not empty.data.any()
            del empty
    np.testing.assert_array_equal(data.data, np.arange(1000.0))
    assert_right(rt)


class Fuzz:
    """Small and large ``Data`` and variables come, grow, go; views are kept; children are made; all equals NumPy."""

    def __init__(self, rt: Any, rng: random.Random) -> None:
        self.rt = rt
        self.rng = rng
        self.data: list[tuple[Any, np.ndarray]] = []
        self.views: list[tuple[np.ndarray, np.ndarray]] = []
        self.variables: list[tuple[Any, np.ndarray]] = []
        self.calls: list[tuple[Any, float]] = []
        self.total = rt.function(lambda *xs: sum(x.sum() for x in xs), outputs="sum")

    def array(self) -> np.ndarray:
        size = self.rng.choice([2, 3, 100, 513, 3000, 30_000, 40_000])
        return np.full(size, float(self.rng.randrange(100)))

    def make(self) -> None:
        array = self.array()
        self.data.append((self.rt.data(array), array))

    def share(self) -> None:
        array = self.array()[:1000]
        self.variables.append((self.rt.shared(array), array))

    def drop(self) -> None:
        for values in (self.data, self.views, self.variables):
            while len(values) > self.rng.randrange(1, 20):
                values.pop(self.rng.randrange(len(values)))

    def keep_view(self) -> None:
        if self.data:
            data, array = self.data.pop(self.rng.randrange(len(self.data)))  # the view outlives it
            start = self.rng.randrange(len(array))
            self.views.append((data.data[start:], array[start:]))

    def change(self) -> None:
        if self.data:
            data, _ = self.data.pop(self.rng.randrange(len(self.data)))
            array = self.array()
            data.set_value(array)
            self.data.append((data, array))

    def call(self) -> None:
        picked = self.rng.sample(self.data, min(3, len(self.data)))
        lengths = [len(array) for _, array in picked]
        picked = [pair for pair in picked if len(pair[1]) == lengths[0]]
        if picked:
            self.calls.append((self.total.submit(*[d for d, _ in picked]), sum(a.sum() for _, a in picked)))
        while self.calls and self.rng.random() < 0.7:
            call, expected = self.calls.pop(0)
            assert call.result() == expected

    def assign(self) -> None:
        if self.variables:
            position = self.rng.randrange(len(self.variables))
            w, array = self.variables[position]

            def add(x: np.ndarray) -> float:
                w.value = w.value + 1
                return 0.0

            self.rt.function(add)(np.ones(self.rt.world_size))
            self.variables[position] = (w, array + 1)

    def fork(self) -> None:
        seen = [(data.data, array) for data, array in self.data] + list(self.views)
        with Child(lambda: self.check(seen)):
            seen.clear()  # in the parent: the views go with what they show
            for _ in range(3):  # nothing that lives on is written into: a child sees that
                self.keep_view()
                self.drop()
                self.make()
                self.share()

    def check(self, pairs: Any) -> None:
        for view, array in pairs:
            np.testing.assert_array_equal(view, array)

    def run(self, num_steps: int) -> None:
        steps = [self.make, self.make, self.share, self.drop, self.keep_view, self.change, self.call, self.assign]
        for _ in range(num_steps):
            self.fork() if self.rng.random() < 0.04 else self.rng.choice(steps)()
            self.check((data.data, array) for data, array in self.data)
            self.check(self.views)
            self.check((w.value, array) for w, array in self.variables)


@pytest.mark.parametrize("num_seeds", [1, pytest.param(50, marks=pytest.mark.storm)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_sequence_of_small_values_equals_numpy(runtime: Fork, num_workers: Any, num_seeds: int) -> None:
    num_steps = 45 if num_seeds == 1 else 150
    for seed in range(num_seeds):
        with runtime(num_workers) as rt:
            Fuzz(rt, random.Random(f"{num_workers} {seed}")).run(num_steps)


def test_arenas_of_which_a_child_holds_parts_go_when_the_parent_has_dropped_all(runtime: Fork) -> None:
    """A loader forks at each epoch, and each epoch makes values of its own: mappings and descriptors stay flat."""
    rt = runtime(1)
    total = rt.function(lambda *xs: sum(x.sum() for x in xs), outputs="sum")
    total(np.ones(2))

    def epoch() -> tuple[int, int]:
        data = [rt.data(np.full(100, 1.0)) for _ in range(20)]
        with Child(lambda: None):
            assert total(*data) == 2000
        del data
        gc.collect()
        total(np.ones(2))
        return len(mapped_memfds()), sum(descriptors().values())

    first = [epoch() for _ in range(2)][-1]
    assert epoch() == first
