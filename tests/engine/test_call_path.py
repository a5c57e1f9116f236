"""What one call sends, copies and maps, each counted; which argument is broadcast; what was once wrong in calls.

``runtime.counters`` holds what the program sent and received since the start: ``messages_down``, ``messages_up``,
``bytes_down``, ``bytes_up`` and ``bytes_pickled``.
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import mapped_memfds, pids, wait_for
from support.saboteurs import AtLoad

import synk
from synk.errors import SerializationError, SynkError

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "two": lambda w, x: (len(w), len(x)),
    "any number": lambda w, *rest: [len(w), *map(len, rest)],
    "any keywords": lambda w, **more: [len(w), *map(len, more.values())],
    "everything": lambda w, x=(), *rest, k=(), **more: [*map(len, (w, x, *rest, k, *more.values()))],
}
BROADCAST: list[tuple[str, Any, int, tuple[str, ...], list[int]]] = [
    ("two", "w", 2, (), [6, 3]),
    ("two", ["w", "x"], 1, ("x",), [6, 6]),
    ("two", (), 2, (), [3, 3]),
    ("any number", "rest", 3, (), [3, 6, 6]),
    ("any keywords", "more", 1, ("a", "b"), [3, 6, 6]),
    ("any keywords", "a", 1, ("a", "b"), [3, 6, 3]),
    ("everything", ["k", "x"], 3, ("k", "z"), [3, 6, 3, 6, 3]),
]
"""Function, what is broadcast, how many arguments by position and by which names, and the rows that each has."""


def test_what_is_broadcast(subtests: Any, rt: Any) -> None:
    x = np.arange(6.0)
    for name, bcast, count, keywords, rows in BROADCAST:
        with subtests.test(name, bcast=bcast):
            f = rt.function(FUNCTIONS[name], bcast_inputs=bcast, outputs="first")
            assert [*f(*[x] * count, **dict.fromkeys(keywords, x))] == rows
    with pytest.raises(ValueError, match=r"got bcast_inputs \['y'\], expected names of its parameters \['w', 'x'\]"):
        rt.function(FUNCTIONS["two"], bcast_inputs=["w", "y"])
    assert rt.function(max, outputs="first")([3, 1, 4, 1]) == 3, "a built-in without a signature"
    whole = rt.function(lambda w: w.sum(), bcast_inputs="w", outputs="first")
    with pytest.raises(ValueError, match="batch was given, but no argument is scattered"):
        whole(x, batch=3)


BIG = np.random.default_rng(0).normal(size=(1 << 16, 16))
"""8 MB."""


@contextmanager
def counted(rt: Any) -> Iterator[dict[str, int]]:
    """Count the messages and bytes of the body."""
    before = dict(rt.counters)
    sent: dict[str, int] = {}
    yield sent
    sent.update({name: rt.counters[name] - before[name] for name in before})


# ----- messages

WAYS: dict[str, Callable[..., Any]] = {
    "call": lambda f, *xs: f(*xs),
    "submit": lambda f, *xs: f.submit(*xs).result(),
    "batch": lambda f, *xs: f(*xs, batch=[8, 0, 3]),
    "slices": lambda f, *xs: f(*xs, num_slices=2),
}


def test_one_message_each_way_per_rank(subtests: Any, shared_runtimes: Any) -> None:
    """Whatever the number of inputs and outputs, from the first call after ``distribute`` on. What the ranks hold, of
    shards and of a tree of parameters, is neither staged nor pickled."""
    cases = list(itertools.product((1, 2, 3, 0), (1, 5), (1, 7), ("array", "Data", "sharded"), WAYS))
    for where, num_inputs, num_outputs, kind, way in random.Random(0).sample(cases, 50):
        rt, x = shared_runtimes[where], np.arange(9.0)
        make = {"array": np.copy, "Data": rt.data, "sharded": lambda x, rt=rt: rt.shared(x, sharded=True)}[kind]
        with subtests.test(where=where, num_inputs=num_inputs, num_outputs=num_outputs, kind=kind, way=way):
            w, inputs = rt.shared({"a": np.ones(2), "b": [np.ones(2)]}), [make(x) for _ in range(num_inputs)]
            f = rt.function(
                lambda w, *xs, n=num_outputs: (sum(x.sum() for x in xs) * w["b"][0][0],) * n,
                bcast_inputs=("w", "n"),
                outputs="sum",
            )
            rt.distribute()
            for _ in range(3):
                with counted(rt) as sent:
                    assert WAYS[way](f, w, *inputs)[0] == (11.0 if way == "batch" else 36.0) * num_inputs
                assert (sent["messages_down"], sent["messages_up"]) == (rt.world_size, rt.world_size)
            assert kind == "array" or way == "batch" or (sent["bytes_staged"], sent["bytes_pickled"]) == (0, 0)


def test_a_repeated_call_is_a_few_bytes_and_pickles_nothing(rt: Any) -> None:
    f = rt.function(lambda w, x: (x @ w, (x @ w).sum()), bcast_inputs="w", outputs=("gather", "sum"))
    x, w = rt.data(BIG), np.ones(16)
    for _ in range(2):
        f(w, x)
    with counted(rt) as sent:
        for number in range(20):
            f(w * number, x)
    assert sent["bytes_pickled"] == 0
    assert max(sent["bytes_down"], sent["bytes_up"]) <= 64 * 2 * 20


def test_array_bytes_cross_through_segments_only(subtests: Any, rt: Any) -> None:
    """Not one byte of an 8 MB array is pickled or written to a pipe, even the first time."""
    data, small = rt.data(BIG), np.ones((4, 4))

    def total(w: Any, x: np.ndarray) -> Any:
        return x.sum() + w["a"][0].sum()

    few, many = {"a": [np.ones(2)]}, {"a": [BIG]}
    f = rt.function(total, bcast_inputs="w", outputs="sum")
    whole = rt.function(lambda w, x: w.sum(), bcast_inputs="w", outputs="sum")
    same = rt.function(lambda x: x, outputs="gather")
    rt.distribute()
    acts: dict[str, Callable[[], Any]] = {
        "data": lambda: f(few, data),
        "plain": lambda: f(few, BIG),
        "broadcast structure": lambda: f(many, small),
        "batch": lambda: f(few, data, batch=np.arange(0, 60_000, 2)),
        "broadcast": lambda: whole(BIG, small),
        "output": lambda: same(data),
    }
    for name, act in acts.items():
        with subtests.test(name):
            with counted(rt) as sent:
                act()
            assert max(sent[kind] for kind in ("bytes_pickled", "bytes_down", "bytes_up")) < 20_000


def test_batch_copies_only_the_rows_that_it_picks(subtests: Any, rt: Any) -> None:
    """Of large arrays, beside others that are not copied at all."""
    x = np.arange(600_000.0).reshape(-1, 2)
    data, shard = rt.data(x), rt.shared(x[:, 0], sharded=True)
    f = rt.function(lambda a, b, s: a[:, 0] - 2 * b["c"][:, 1] + s, outputs="gather")
    for rows in (slice(3), slice(7, 299_000, 99_999), slice(None, None, -70_000), [299_999, 4, 4, 0], x[:, 0] < 7):
        for a, c in ((x, x), (data, x), (x, data)):
            with subtests.test(rows=str(rows), a=type(a).__name__, c=type(c).__name__):
                before, expected = rt.counters["bytes_staged"], (x[:, 0] - 2 * x[:, 1] + x[:, 0])[rows]
                np.testing.assert_array_equal(f(a, {"c": c}, shard, batch=rows), expected)
                assert rt.counters["bytes_staged"] - before < 1000
                parts = rt.function(lambda a: a, outputs="gather")(a, batch=rows, num_slices=2)
                np.testing.assert_array_equal(parts, x[rows])


def test_what_sends_nothing(rt: Any) -> None:
    """To make, resize and drop data, to define functions, to distribute what is there; new functions go together."""
    total = rt.function(lambda x: x.sum(), outputs="sum")
    data = rt.data(np.ones(10))
    total(data)
    with counted(rt) as sent:
        data.set_value(np.ones(100_000))
        data.set_length(50)
        data[3] = 7.0
        rt.data(np.ones((3, 3))).free_memory()
        gc.collect()
        functions = [rt.function(lambda x, k=k: x.sum() * k, bcast_inputs="k", outputs="sum") for k in range(5)]
    assert set(sent.values()) == {0}
    for expected in (2, 0):
        with counted(rt) as sent:
            rt.distribute()
        assert sent["messages_down"] == expected
    assert [f(np.ones(3)) for f in functions] == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert total(data) == 56.0


# ----- memory


def place_of(x: np.ndarray) -> str:
    """Return the line of this process's memory map in which an array lies."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(word, 16) for word in line.split()[0].split("-"))
        if low <= x.ctypes.data < high:
            return line
    raise AssertionError("the rows lie nowhere")


def test_a_rank_sees_its_own_rows_and_holds_no_copy(subtests: Any, rt: Any) -> None:
    """A read-only view on a segment, of this rank's rows alone: its private memory does not grow with the input."""
    f = rt.function(lambda x: (place_of(x), x.flags.writeable, len(x), saboteurs.anonymous_kb()), outputs=None)
    f(rt.data(np.ones((1000, 16))))
    before = max(memory for *_, memory in f(np.ones((1000, 16))))
    data = rt.data(shape=(1 << 19, 16), dtype="float64")
    for name, rows, batch, count in (
        ("data", data, None, 1 << 18),
        ("a plain array", np.ones((1 << 19, 16)), None, 1 << 18),
        ("a batch in a row", data, slice(1, 101), 50),
    ):
        with subtests.test(name):
            for place, is_writeable, num_rows, memory in f(rows, batch=batch):
                assert "/memfd:synk" in place and " r--p " in place
                assert (is_writeable, num_rows) == (False, count)
                assert memory < before + 2048


def test_the_program_makes_no_copy_of_data_and_uses_its_segments_again(rt: Any) -> None:
    data = rt.data(shape=(1 << 19, 16), dtype="float64")
    total = rt.function(lambda x: x.sum(), outputs="sum")
    big = rt.function(lambda k, x: np.full(100_000, k), bcast_inputs="k", outputs="max")
    total(data)
    before, mapped = saboteurs.anonymous_kb(), mapped_memfds()
    for _ in range(5):
        total(data)
        total(data, batch=slice(10, None))
        total(data, batch=np.arange(1000))
    assert saboteurs.anonymous_kb() < before + 2048
    assert len(mapped_memfds() - mapped) <= 1, "at most a staging segment for the indices"
    total(BIG)
    for number in range(4):
        big(float(number), np.ones(4))
    mapped = mapped_memfds()
    for number in range(10):
        assert total(BIG[: len(BIG) - number]) == pytest.approx(BIG[: len(BIG) - number].sum())
        assert big(float(number), np.ones(4))[0] == number
    assert mapped_memfds() == mapped
    kept = [big(float(number), np.ones(4)) for number in range(5)]
    assert [result[-1] for result in kept] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_unwanted_outputs_are_neither_combined_nor_sent(rt: Any) -> None:
    """Even ones that could not be combined: they are not looked at."""
    f = rt.function(lambda x: (x.sum(), np.ones(1 + int(x[0])), np.ones(1 << 16)), outputs="sum")
    f(np.arange(4.0), output_subset=[0])
    mapped = mapped_memfds()
    with counted(rt) as sent:
        assert f(np.arange(4.0), output_subset=[0])[0] == 6.0
    assert sent["messages_up"] == 2
    assert mapped_memfds() == mapped


def test_an_idle_worker_sleeps(shared_runtimes: Any) -> None:
    """Between calls a worker waits in the kernel: it is asleep, in poll or read, not spinning."""
    for pid in pids(shared_runtimes[2]):
        stat = Path(f"/proc/{pid}/stat")
        assert wait_for(lambda stat=stat: stat.read_text().rpartition(")")[2].split()[0] == "S")


def test_a_shard_that_outgrew_its_place_in_a_call_that_failed_elsewhere(rt: Any) -> None:
    shard = rt.shared(np.zeros(2), sharded=True)

    def grow(n: int, fails: bool) -> Any:
        shard.value = np.full(n * 5000, float(n))
        if fails and synk.comm.rank:
            raise ValueError("no")
        return object() if fails else n  # rank 0 cannot publish its result when it fails

    f = rt.function(grow, bcast_inputs=("n", "fails"), outputs=None, per_rank=True)
    for n in (1, 2, 3, 2):
        with pytest.raises((ValueError, SynkError)):
            f(n, True)
        assert f(n, False) == [n, n]
        np.testing.assert_array_equal(shard.value, np.full(2 * n * 5000, float(n)))
    shard.value = np.arange(5.0)
    np.testing.assert_array_equal(shard.value, np.arange(5.0))
    total = rt.function(lambda: shard.value.sum(), outputs="sum")
    assert total() == 10.0


def test_values_that_the_program_sets_after_a_failed_call_have_their_own_shape(rt: Any) -> None:
    """A rank has written a longer value into the place in which the next one comes to lie."""
    w = rt.shared(np.zeros(3))

    def append(x: Any) -> float:
        w.value = np.concatenate([w.value, x])
        if synk.comm.rank == 1 and x[0] < 0:
            raise ValueError("refused")
        return 0.0

    f = rt.function(append, outputs="sum")
    with pytest.raises(ValueError, match="refused"):
        f(np.full(2, -7.0))
    w[0], w[1] = np.ones(3), np.ones(3)
    f(np.arange(2.0))
    assert [w[rank].tolist() for rank in range(2)] == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_a_function_that_one_rank_cannot_load_while_the_other_waits_for_it(rt: Any) -> None:
    def refuse() -> None:
        if getattr(sys, "is_picky", False):
            raise ValueError("not here")

    picky = AtLoad(refuse)

    def meet(x: Any) -> Any:
        synk.comm.barrier()
        return x.sum() + (picky is None)

    def mark(is_picky: bool) -> None:
        sys.is_picky = is_picky and synk.comm.rank == 1  # type: ignore[attr-defined]

    set_mark = rt.function(mark, bcast_inputs="is_picky", outputs=None, per_rank=True)
    set_mark(True)
    f = rt.function(meet, outputs="sum")
    for _ in range(2):
        with pytest.raises(SerializationError, match="not here"):
            f(np.ones(2), timeout=30.0)
    set_mark(False)
    assert f(np.ones(2)) == 4


def test_functions_and_results_that_are_dropped_are_freed(rt: Any) -> None:
    class Kept:
        pass

    kept = Kept()
    seen = weakref.ref(kept)
    f = rt.function(lambda x, kept=None: x.sum(), outputs="sum", bcast_inputs="kept")
    g = rt.function(lambda x: (x.sum(), np.ones(100_000)), outputs=("sum", "first"))
    f(np.ones(4), kept)
    pending = g.submit(np.ones(4))
    large = weakref.ref(pending.result()[1].base)
    del f, g, kept, pending
    rt.function(lambda x: x, outputs="gather")(np.ones(2))
    gc.collect()
    assert seen() is None
    assert large() is None


def test_shards_that_nobody_reads_in_between_keep_no_old_rows(rt: Any) -> None:
    """A place is used again for a value of another length, while views of the one before may be there."""
    w = rt.shared(np.arange(4.0), sharded=True)
    read = rt.function(lambda: w.value.copy(), outputs=None, per_rank=True)
    fill = rt.function(
        lambda n: setattr(w, "value", np.full(n, float(n))), outputs=None, per_rank=True, bcast_inputs="n"
    )
    read()
    for lengths in ((3, 5), (4, 2, 7), (1, 9)):
        for n in lengths:
            fill(n)
        np.testing.assert_array_equal(read(), [np.full(n, float(n))] * 2)
