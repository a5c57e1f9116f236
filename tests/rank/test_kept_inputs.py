"""What functions keep of their inputs and write into them; what they return and use again; news not taken in.

Neither changes in later calls, nor changes them. The expected values are those that the program passed, which NumPy
holds, or come from the same Python code run serially, with a copy of each result.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers
from support.rank_arrays import picked
from support.stateful import ARRAYS, KINDS, LARGE, SMALL, Box, stepper
from support.tables import WHOLE_OR_SAMPLE, drawn, named, seeds

import synk

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


def test_what_a_failing_call_keeps_and_what_of_data(rt: Any) -> None:
    """An array of a call that failed is still its own; a view of ``Data`` follows the data."""
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
def test_inputs_are_kept_while_the_plan_of_the_call_before_goes(rt: Any, num_views: int) -> None:
    """A rank sees that a function keeps views, also if as many of a function that was dropped go in the same call."""
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


@pytest.mark.parametrize("rt", [0, 1, 2], indirect=True)
def test_a_tensor_that_is_written_into_is_a_copy_of_this_call(subtests: Any, rt: Any) -> None:
    """Written in one call, read in the next one, other data, same shape; plain arrays and ``Data``, rows and whole."""
    torch = pytest.importorskip("torch")
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


def test_tensors_that_are_kept_and_written_into_later(rt: Any) -> None:
    """They are the function's own, those of ``Data`` too: no call sees what was written, not even the current one."""
    pytest.importorskip("torch")
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


def test_slices_do_not_see_what_an_earlier_one_wrote_nor_a_variable(rt: Any) -> None:
    """The value of a variable changes only by assignment."""
    pytest.importorskip("torch")
    w = rt.shared(np.zeros(3))

    def work(x: Any, v: Any, u: Any) -> Any:
        for each in (v, u, w.value):
            each.add_(1.0)
        return v[0].item() * len(x), u[0].item(), w.value[0].item()

    f = rt.function(work, outputs=("sum", "first", "first"), bcast_inputs=("v", "u"), framework="torch")
    for num_slices in (1, 2, 5) * 2:
        assert f(np.ones(20), np.zeros(3), w, num_slices=num_slices)[:2] == (20.0, 1.0)
    assert (w.value == 0.0).all()


def news(heard: int, parcels: list[tuple[int, bytes, bool]]) -> tuple[object, ...]:
    return [], parcels, [], None, None, heard


def test_what_comes_after_news_that_were_broken_off_is_not_read_until_the_program_knows() -> None:
    """It may need what they would have brought: a function, or the value of an object."""
    with synk.fork(0) as rt:
        rank = rt._session.by_rank[0].process._rank
        rank._learn(5, news(4, []), [])
        with pytest.raises(Exception, match="load key"):
            rank._learn(6, news(5, [(10**6, b"no pickle", False)]), [])
        for number in (7, 8):  # which were sent when the answer to the fifth had come
            with pytest.raises(RuntimeError, match="broken off"):
                rank._learn(number, news(5, []), [])
        with pytest.raises(RuntimeError, match="broken off"):
            rank._learn(9, None, [])
        rank._learn(9, news(9, []), [])
        rank._learn(10, news(9, []), [])


def test_each_rank_has_its_own_step(subtests: Any, rt: Any) -> None:
    """Each rank's values, of arrays and of tensors, and not those of a rank that is ahead by a call or two."""
    torch = pytest.importorskip("torch")
    for framework, state in ((None, np.zeros(LARGE)), ("torch", torch.zeros(LARGE))):

        def step(x: Any, state: Any = state) -> Any:
            state[:] = x[0]
            return state, state

        with subtests.test(framework=framework):
            f = rt.function(functools.partial(step, state=state), outputs=("gather", None), framework=framework)
            pending = [f.submit(np.array([k, 10.0 + k])) for k in range(9)]
            for k, call in enumerate(pending):
                rows, each = call.result()
                np.testing.assert_array_equal(rows, np.repeat([k, 10.0 + k], LARGE))
                assert [(part[0], part[-1]) for part in each] == [(k, k), (10.0 + k, 10.0 + k)]


# ----- any sequence

CHOICES: list[Any] = [None, None, 3, slice(None, None, -1), [2, 0, 2]]
OPS = ("avg", "sum", "max", "first", "gather")


def expected(steps: list[Any], op: str | None, rows: np.ndarray, num_slices: int) -> Any:
    """Return what a call gives whose ranks run ``steps``, in plain Python."""
    parts = [np.array_split(part, min(num_slices, len(part))) for part in np.array_split(rows, len(steps))]
    values = [[copy.deepcopy(step(piece)) for piece in pieces] for step, pieces in zip(steps, parts, strict=True)]
    if op is None:
        return values if num_slices > 1 else [value for (value,) in values]
    return combined(op, [*itertools.chain(*values)], [len(piece) for piece in itertools.chain(*parts)])


def combined(op: str, values: list[Any], rows: list[int]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(combined(op, list(outputs), rows) for outputs in zip(*values))
    if op == "gather":
        return np.concatenate(values)
    if op == "avg":
        return np.average(values, axis=0, weights=rows)
    return values[0] if op == "first" else getattr(np, op)(values, axis=0)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("seed", seeds(2, 20))
def test_any_sequence_of_calls_equals_plain_python(
    subtests: Any, shared_runtimes: Any, num_ranks: int, seed: int
) -> None:
    """Of functions that return their buffers, views, inputs and objects in all ways; results are kept to the end."""
    rt, rng = shared_runtimes[num_ranks], random.Random(f"{num_ranks} {seed}")
    size, results = rng.choice([SMALL, LARGE // 2, LARGE]), list[Any]()
    cases = [*((kind, None) for kind in KINDS), *((kind, op) for kind in ARRAYS for op in rng.sample(OPS, 2))]
    functions = [rt.function(named(kind, stepper(size, kind)), outputs=op) for kind, op in cases]
    on_ranks = [[stepper(size, kind) for _ in range(num_ranks)] for kind, _ in cases]
    for _ in range(60):
        number, batch, num_slices = rng.randrange(len(cases)), rng.choice(CHOICES), rng.choice([1, 1, 2, 3])
        x = np.array([float(rng.randrange(9)) for _ in range(4)])
        rows, source = picked(batch, x), rt.data(x) if rng.random() < 0.5 else x
        is_submitted = rng.random() < 0.6
        call = functions[number].submit if is_submitted else functions[number]
        got = call(source, batch=batch, num_slices=num_slices)
        results.append((cases[number], got, expected(on_ranks[number], cases[number][1], rows, num_slices)))
    for number, (case, got, right) in enumerate(results):
        with subtests.test(case=case, number=number):
            np.testing.assert_equal(got.result() if hasattr(got, "result") else got, right)
