"""What functions keep of their inputs, and what they write into them: neither changes in later calls, nor changes them.

The expected values are those that the master passed, which NumPy holds.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers
from support.seeds import WHOLE_OR_SAMPLE, drawn
from support.stateful import Box

SIZES = (6, 200_000)
"""Rows: within a page, and over many."""

VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "slice": lambda x: x[1:],
    "view of a view": lambda x: x[:, None][1:][:2],
    "other shape": lambda x: x.reshape(-1, 1),
}
BATCHES: tuple[Any, ...] = (None, None, 5, slice(1, 5), slice(None, None, 2), slice(None, None, -1), [3, 1, 1, 0])
KEPT = list(itertools.product([0, 1, 2], [None, "torch"], SIZES, VIEWS, BATCHES, [1, 1, 2]))


def ends(x: Any) -> tuple[float, float]:
    return float(x.reshape(-1)[0]), float(x.reshape(-1)[-1])


def keeper(view: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that keeps a view of each input and returns the first and the last element of all of them."""
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(view(x))
        return deque(map(ends, kept))  # one object

    return keep


@pytest.mark.parametrize("is_whole", WHOLE_OR_SAMPLE)
def test_kept_inputs_stay_as_they_were(subtests: Any, shared_runtimes: Any, is_whole: bool) -> None:
    pytest.importorskip("torch")
    for where, framework, size, view, batch, num_slices in drawn(KEPT, is_whole, 40):
        rt = shared_runtimes[where]
        index = slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch
        parts = np.array_split(np.arange(float(size))[index], rt.world_size)
        if min(map(len, parts)) < 2 * num_slices:  # a view of one row is empty
            continue
        case = {"where": where, "framework": framework, "size": size, "view": view, "batch": batch}
        with subtests.test(num_slices=num_slices, **case):
            f = rt.function(keeper(VIEWS[view]), outputs=None, framework=framework)
            seen: list[deque[Any]] = [deque() for _ in parts]
            for k in range(4):
                options = {"batch": batch, "num_slices": num_slices}
                x = np.arange(float(size)) + 10.0 * k
                got = f.submit(x, **options).result() if k == 2 else f(x, **options)
                for rank, part in enumerate(parts):
                    seen[rank] += [ends(VIEWS[view](piece + 10.0 * k)) for piece in np.array_split(part, num_slices)]
                    assert (got[rank] if num_slices == 1 else got[rank][-1]) == seen[rank]


def test_kept_broadcast_inputs(subtests: Any, shared_runtimes: Any) -> None:
    """Arrays, and arrays inside tuples and objects, which travel beside the pickle."""

    def make() -> Callable[..., Any]:
        kept: list[Any] = []

        def keep(w: Any, pair: Any, box: Any, x: Any) -> Any:
            kept.append((w, pair[0], pair[1]["a"], box.value))
            return [[float(array[-1]) for array in arrays] for arrays in kept]

        return keep

    for where, size in itertools.product((0, 2), SIZES):
        f = shared_runtimes[where].function(make(), outputs="first", bcast_inputs=("w", "pair", "box"))
        for k in range(4):
            with subtests.test(where=where, size=size, k=k):
                a = np.full(size, float(k))
                got = f(a, (a + 0.25, {"a": a + 0.5}), Box(a + 0.75), np.ones(4))
                assert got == [[j, j + 0.25, j + 0.5, j + 0.75] for j in range(k + 1)]


def test_what_a_failing_call_keeps_and_what_of_data(shared_runtimes: Any) -> None:
    """An array of a call that failed is still its own; a view of ``Data`` follows the data."""
    rt = shared_runtimes[2]
    kept: list[Any] = []

    def keep(x: Any, d: Any) -> Any:
        kept.append((x, d[:1]))
        if len(kept) % 2:
            raise KeyError("odd")
        return [(float(part[0]), float(view[0])) for part, view in kept]

    f, data = rt.function(keep, outputs="first"), rt.data(np.ones(5))
    with same_workers(rt):
        for k in range(6):
            data[:] = k
            if k % 2 == 0:
                with pytest.raises(KeyError, match="odd"):
                    f(np.full(5, float(k)), data)
            else:
                assert f(np.full(5, float(k)), data) == [(j, k) for j in range(k + 1)]


@pytest.mark.parametrize("num_views", range(1, 7))
def test_inputs_are_kept_while_the_plan_of_the_call_before_goes(shared_runtimes: Any, num_views: int) -> None:
    """A rank sees that a function keeps views, also if as many of a function that was dropped go in the same call."""
    rt = shared_runtimes[2]
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.extend(x[:1] for _ in range(num_views))
        return [float(each[0]) for each in kept]

    f = rt.function(keep, outputs="first")
    seen: list[float] = []
    for k in range(4):
        seen += [float(k)] * num_views
        assert f(np.full(4, float(k))) == seen
        rt.function(lambda x: x.sum(), outputs="sum")(np.full(4, -1.0))


# ----- tensors that are written into


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda x: x.add_(100.0),
    "through data": lambda x: x.data.mul_(0.0),
    "through numpy": lambda x: x.numpy().fill(-1.0),
    "an element": lambda x: x.__setitem__(-1, 7.0),
}


def spoiler(spoil: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function that returns sums of its inputs, and its inputs, into which it may have written."""

    def work(x: Any, d: Any, w: Any, v: Any, flag: Any) -> Any:
        sums = [each.sum().item() for each in (x, d, w, v)]
        if flag:
            for each in (x, d, w, v):
                spoil(each)
        return *sums, x, d

    return work


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_tensor_that_is_written_into_is_a_copy_of_this_call(subtests: Any, shared_runtimes: Any, where: Any) -> None:
    """Written in one call, read in the next one, other data, same shape; plain arrays and ``Data``, rows and whole."""
    torch = pytest.importorskip("torch")
    rt = shared_runtimes[where]
    ops, broadcast = ("sum", "sum", "max", "max", "gather", "gather"), ("w", "v", "flag")
    for write, size in itertools.product(WRITES, SIZES):
        f = rt.function(spoiler(WRITES[write]), outputs=ops, bcast_inputs=broadcast, framework="torch")
        d, v = rt.data(np.zeros(size)), rt.data(np.zeros(size))
        for k in range(4):
            with subtests.test(write=write, size=size, k=k):
                x, w, is_written = np.full(size, k + 0.25), np.full(size, k + 0.5), k % 2 == 0
                d[:], v[:] = k, k + 0.75
                call = f if k % 3 else lambda *args, f=f: f.submit(*args).result()
                *sums, own, of_data = call(x, d, w, v, is_written)
                assert sums == [size * value for value in (k + 0.25, k, k + 0.5, k + 0.75)]
                assert (x == k + 0.25).all() and (w == k + 0.5).all()
                assert (np.asarray(d) == k).all() and (np.asarray(v) == k + 0.75).all()
                for got, value in ((own, k + 0.25), (of_data, float(k))):
                    parts = list(torch.full((size,), value, dtype=torch.float64).tensor_split(rt.world_size))
                    for part in parts if is_written else ():
                        WRITES[write](part)
                    assert torch.equal(got, torch.cat(parts))


def test_tensors_that_are_kept_and_written_into_later(shared_runtimes: Any) -> None:
    """They are the function's own, those of ``Data`` too: no call sees what was written, not even the current one."""
    pytest.importorskip("torch")
    rt = shared_runtimes[2]
    kept: list[Any] = []

    def keep(x: Any, d: Any) -> Any:
        for tensor in kept:
            tensor.add_(1.0)
        kept.extend((x, d))
        return x.sum().item(), d.sum().item(), kept[0][0].item(), kept[1][0].item()

    reader = rt.function(lambda d: d.sum(), outputs="sum")
    for size in SIZES:
        kept.clear()
        f = rt.function(keep, outputs=("sum", "sum", "max", "max"), framework="torch")
        data = rt.data(np.zeros(size))
        for k in range(4):
            data[:] = k
            assert f(np.full(size, float(k)), data) == (size * k, size * k, k, k)
            assert reader(data) == size * k


def test_slices_do_not_see_what_an_earlier_one_wrote_nor_a_variable(shared_runtimes: Any) -> None:
    """The value of a variable changes only by assignment."""
    pytest.importorskip("torch")
    rt = shared_runtimes[2]
    w = rt.shared(np.zeros(3))

    def work(x: Any, v: Any, u: Any) -> Any:
        for each in (v, u, w.value):
            each.add_(1.0)
        return v[0].item() * len(x), u[0].item(), w.value[0].item()

    f = rt.function(work, outputs=("sum", "first", "first"), bcast_inputs=("v", "u"), framework="torch")
    for num_slices in (1, 2, 5) * 2:
        assert f(np.ones(20), np.zeros(3), w, num_slices=num_slices)[:2] == (20.0, 1.0)
    assert (w.value == 0.0).all()
