"""Collectives of ``synk.comm`` into given arrays, by the short way and the long one; NumPy is the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers
from support.rank_arrays import assert_same, numbers, reduced
from support.seeds import seeds

import synk
from synk.errors import CollectiveMismatch

EVERYWHERE = (1, 2, 3, 4, "inline")
# Nothing; by the short way; longer than that on some numbers of ranks; several pieces.
LENGTHS = (0, 1, 40, 30_000, 200_001)
UNEVEN = ("gather", "all_gather", "all_to_all")


def on_each(rt: Any, body: Callable[[Any], Any]) -> list[Any]:
    """Return what ``body(comm)`` returns on every rank, with one row each."""
    return rt.function(lambda x: body(synk.comm), outputs=None, name="body")(np.zeros(rt.world_size))


# ----- a collective, and what it must give


class Case:
    """A collective of ``size`` ranks, drawn from a seed: the same on all of them."""

    def __init__(self, seed: int, size: int) -> None:
        rng = random.Random(seed)
        self.seed, self.size = seed, size
        self.kind = rng.choice(
            (
                *("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather"),
                *("all_gather 0", "all_gather 1", "gather", "scatter", "all_to_all"),
            )
        )
        self.op = rng.choice(("sum", "avg", "min", "max", "prod"))
        self.dtype = np.dtype(rng.choice(("f4", "f8", "c8") if self.op == "avg" else ("f4", "i8", "u1")))
        self.root = rng.randrange(size)
        self.rest = rng.choice(((), (3,), (2, 2)))
        if self.kind == "all_gather 1" and not self.rest:
            self.rest = (3,)
        length = rng.choice(LENGTHS)
        is_divided = self.kind in ("reduce_scatter", "scatter", "all_to_all")
        self.lengths = [length // size * size if is_divided else length] * size
        if self.kind in ("gather", "all_gather 0") and rng.random() < 0.5:
            self.lengths = [rng.choice(LENGTHS) for _ in range(size)]
        self.has_out = rng.random() < 0.5

    def array(self, rank: int) -> np.ndarray:
        return numbers(self.dtype, (self.lengths[rank], *self.rest), 1000 * self.seed + rank)

    def expected(self, rank: int) -> np.ndarray | None:
        arrays = [self.array(each) for each in range(self.size)]
        block = slice(*(len(arrays[0]) // self.size * each for each in (rank, rank + 1)))
        if self.kind in ("reduce", "gather") and rank != self.root:
            return None
        if "reduce" in self.kind:
            whole = reduced(self.op, arrays)
            return whole[block] if self.kind == "reduce_scatter" else whole
        if self.kind == "broadcast":
            return arrays[self.root]
        if self.kind == "all_gather":
            return np.stack(arrays)
        if self.kind == "scatter":
            return arrays[self.root][block]
        if self.kind == "all_to_all":
            return np.concatenate([each[block] for each in arrays])
        return np.concatenate(arrays, axis=int(self.kind[-1]) if self.kind[-1].isdigit() else 0)

    def run(self, comm: Any, array: Any, out: Any) -> Any:
        kind, _, axis = self.kind.partition(" ")
        if kind in ("all_reduce", "reduce_scatter"):
            return getattr(comm, kind)(array, self.op, out=out)
        if kind == "reduce":
            return comm.reduce(array, self.op, self.root, out=out)
        if kind == "all_gather":
            return comm.all_gather(array, *map(int, axis), out=out)
        if kind == "all_to_all":
            return comm.all_to_all(array, out=out)
        given = None if kind == "scatter" and comm.rank != self.root else array
        return getattr(comm, kind)(given, self.root, out=out)


def check(case: Case, comm: Any, rng: random.Random) -> np.ndarray | None:
    """Run a case on a rank that passes its array in some form, and compare; return the result."""
    array, expected = case.array(comm.rank), case.expected(comm.rank)
    form = rng.randrange(4)
    given: Any = array.copy()
    if form == 1:
        given = np.asfortranarray(given)
    elif form == 2:
        given = np.repeat(given, 2, axis=0)[::2]
    elif form == 3 and array.size < 100 and array.dtype.name in ("int64", "float64") and array.size:
        given = given.tolist()
    out = None if expected is None or not case.has_out else np.empty_like(expected)
    got = case.run(comm, given, out)
    assert (got is None) == (expected is None)
    if expected is not None:
        assert out is None or got is out
        assert_same(got, expected, is_rounded=case.op in ("avg", "prod") and "reduce" in case.kind)
        assert got.flags.writeable
        np.testing.assert_array_equal(np.asarray(given), array)
    return got


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("seed", seeds(1, 4))
@pytest.mark.sampled(90)
def test_random_collectives_give_what_numpy_gives(shared_runtimes: Any, where: Any, seed: int) -> None:
    """One after the other, in forms that take the short way on some ranks and the long one on others.

    All results are held to the end, and then are still what they were.
    """
    rt = shared_runtimes[where]

    def body(comm: Any) -> bool:
        rng = random.Random(f"{seed} {comm.rank}")
        held = []
        for number in range(40):
            case = Case(100 * seed + number, comm.world_size)
            got = check(case, comm, rng)
            if got is not None and rng.random() < 0.7:
                held.append((case, got if rng.random() < 0.5 or not got.ndim else got[len(got) // 2 :]))
        for case, got in held:
            expected = case.expected(comm.rank)
            assert expected is not None
            expected = expected[len(expected) - len(got) :] if expected.ndim else expected
            assert_same(got, expected, is_rounded=case.op in ("avg", "prod") and "reduce" in case.kind)
        return True

    assert all(on_each(rt, body))


def test_started_collectives_write_to_out(shared_runtimes: Any) -> None:
    def body(comm: Any) -> bool:
        size, rank = comm.world_size, comm.rank
        for length in (4, 60_000):
            mine = np.arange(length * size, dtype=float) + rank
            whole, block = np.empty_like(mine), np.empty(length)
            stack, filled = np.empty((size, *mine.shape)), mine.copy()
            requests = [
                comm.iall_reduce(mine, "sum", out=whole),
                comm.ireduce_scatter(mine, "max", out=block),
                comm.iall_gather(mine, out=stack),
                comm.ibroadcast(filled, size - 1, out=filled),
            ]
            got = comm.wait_all(requests)
            assert all(one is other for one, other in zip(got, (whole, block, stack, filled)))
            everybody = [np.arange(length * size, dtype=float) + each for each in range(size)]
            assert_same(whole, sum(everybody))
            assert_same(block, everybody[-1][rank * length : (rank + 1) * length])
            assert_same(stack, np.stack(everybody))
            assert_same(filled, everybody[-1])
        return True

    assert all(on_each(shared_runtimes[3], body))


def test_out_may_be_the_array_or_a_part_of_it(shared_runtimes: Any) -> None:
    def body(comm: Any) -> bool:
        size, rank = comm.world_size, comm.rank
        for length in (8, 300_000):
            everybody = [np.arange(length * size, dtype=float) * (each + 1) for each in range(size)]
            mine = everybody[rank].copy()
            assert comm.all_reduce(mine, "sum", out=mine) is mine
            assert_same(mine, sum(everybody))
            mine = everybody[rank].copy()
            assert comm.all_to_all(mine, out=mine) is mine
            assert_same(mine, np.concatenate([each[rank * length : (rank + 1) * length] for each in everybody]))
            mine = everybody[rank].copy()
            comm.reduce_scatter(mine, "sum", out=mine[1 : 1 + length])
            assert_same(mine[1 : 1 + length], sum(everybody)[rank * length : (rank + 1) * length])
            whole = np.zeros((size, length))
            whole[rank] = rank + 1
            comm.all_gather(whole[rank], out=whole)
            assert_same(whole, np.repeat(np.arange(1.0, size + 1), length).reshape(size, length))
            shifted = np.arange(length + 1.0)
            comm.all_reduce(shifted[:-1], "sum", out=shifted[1:])
            assert_same(shifted[1:], size * np.arange(float(length)))
            shifted = np.arange(length + 1.0) * (rank + 1)
            comm.broadcast(shifted[:-1], 1, out=shifted[1:])
            assert_same(shifted[1:], 2 * np.arange(float(length)))
        return True

    assert all(on_each(shared_runtimes[3], body))


def read_only(shape: tuple[int, ...]) -> np.ndarray:
    array = np.zeros(shape)
    array.flags.writeable = False
    return array


def with_gaps(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros((*shape, 2))[..., 0]


@pytest.mark.parametrize("length", (4, 100_000))
@pytest.mark.parametrize(
    "wrong",
    (
        *(lambda shape: np.zeros((*shape, 1)), lambda shape: np.zeros(shape, "f4"), read_only),
        *(with_gaps, lambda shape: [0.0], lambda shape: np.zeros((2, *shape))),
    ),
)
@pytest.mark.parametrize(
    "verb",
    (
        *("all_reduce", "broadcast", "all_gather", "all_gather 0"),
        *("reduce_scatter", "gather", "scatter", "all_to_all"),
    ),
)
@pytest.mark.sampled(90)
def test_an_out_that_does_not_fit_is_refused(shared_runtimes: Any, verb: str, wrong: Any, length: int) -> None:
    rt = shared_runtimes[2]
    name, _, axis = verb.partition(" ")
    shape = {
        "all_gather": (2 * length,) if axis else (2, length), "gather": (2 * length,),
        "reduce_scatter": (length // 2,), "scatter": (length // 2,),
    }.get(name, (length,))  # fmt: skip
    arguments = [int(axis)] if axis else []

    def body(comm: Any) -> Any:
        array = np.ones(length)
        return getattr(comm, name)(array, *arguments, out=wrong(shape))

    with same_workers(rt), pytest.raises(ValueError, match="cannot write to out"):
        on_each(rt, body)


def test_the_out_of_other_ranks_is_not_touched(shared_runtimes: Any) -> None:
    def body(comm: Any) -> bool:
        for length in (3, 200_000):
            out, other = np.full(length, -1.0), np.full(length * comm.world_size, -1.0)
            assert (comm.reduce(np.ones(length), "sum", 1, out=out) is out) == (comm.rank == 1)
            assert (comm.gather(np.ones(length), 1, out=other) is other) == (comm.rank == 1)
            expected = (comm.world_size, 1.0) if comm.rank == 1 else (-1.0, -1.0)
            assert (set(out.tolist()), set(other.tolist())) == ({expected[0]}, {expected[1]})
        return True

    assert all(on_each(shared_runtimes[3], body))


# ----- memory that is used again


def test_results_that_are_held_stay_and_others_make_room(shared_runtimes: Any) -> None:
    count = 100_000

    def first(comm: Any) -> Any:
        comm.kept = [comm.all_reduce(np.full(count, float(turn)), "sum") for turn in range(3)]
        view = memoryview(comm.all_reduce(np.full(count, 3.0), "sum"))
        address = comm.all_reduce(np.full(count, 4.0), "sum").ctypes.data  # dropped at once
        again = comm.all_reduce(np.full(count, 5.0), "sum")
        assert again.ctypes.data == address
        assert set(np.asarray(view).tolist()) == {3.0 * comm.world_size}
        return True

    def second(comm: Any) -> Any:
        new = [comm.all_reduce(np.full(count, -1.0), "sum") for _ in range(6)]
        for turn, array in enumerate(comm.kept):
            assert set(array.tolist()) == {float(turn) * comm.world_size}
            assert all(array.ctypes.data != each.ctypes.data for each in new)
        del comm.kept
        return True

    rt = shared_runtimes[2]
    assert all(on_each(rt, first)) and all(on_each(rt, second))


# ----- ranks that disagree


@pytest.mark.parametrize(
    "bodies",
    [
        (lambda comm: comm.all_reduce(np.ones(2), "sum"), lambda comm: comm.all_reduce(np.ones(3), "sum")),
        (lambda comm: comm.all_reduce(np.ones(2), "sum"), lambda comm: comm.all_reduce(np.ones(2), "max")),
        (lambda comm: comm.all_reduce(np.ones(2)), lambda comm: comm.all_reduce(np.ones(2, "f4"))),
        (lambda comm: comm.broadcast(np.ones(2), 0), lambda comm: comm.broadcast(np.ones(2), 1)),
        (lambda comm: comm.gather(np.ones(2)), lambda comm: comm.all_gather(np.ones(2), 0)),
        (lambda comm: comm.scatter(np.ones(2)), lambda comm: comm.scatter(np.ones(2), 1)),
        (lambda comm: comm.barrier(), lambda comm: comm.all_to_all(np.ones(2))),
        (lambda comm: comm.reduce(np.ones(2)), lambda comm: comm.reduce_scatter([1.0, 2.0])),
    ],
)
def test_ranks_that_disagree_by_the_short_way_are_told(shared_runtimes: Any, bodies: Any) -> None:
    rt = shared_runtimes[2]

    def body(comm: Any) -> Any:
        comm.barrier()  # so that both know that the other one is there
        with pytest.raises(CollectiveMismatch, match=r"asked for different ones: rank 0: .*; rank 1: "):
            bodies[comm.rank](comm)
        with pytest.raises(CollectiveMismatch, match="an earlier operation of this call failed"):
            comm.barrier()
        return 1

    with same_workers(rt):
        assert on_each(rt, body) == [1, 1]
    assert on_each(rt, lambda comm: float(comm.all_reduce(np.ones(1), "sum")[0])) == [2.0, 2.0]


@pytest.mark.parametrize("verb", ("barrier", "all_reduce", "gather", "scatter"))
def test_a_rank_that_leaves_by_the_short_way_is_named(shared_runtimes: Any, verb: str) -> None:
    rt = shared_runtimes[3]

    def body(comm: Any) -> Any:
        comm.barrier()
        if comm.rank == 1:
            return 0
        return getattr(comm, verb)(*[np.ones(3)] * (verb != "barrier"))

    with same_workers(rt), pytest.raises(CollectiveMismatch, match="rank 1 left the function"):
        on_each(rt, body)


def test_a_collective_takes_a_message_in_that_its_sender_waits_with(shared_runtimes: Any) -> None:
    """The message is larger than any ring, and its receiver is in a short collective that the sender joins later."""

    def body(comm: Any) -> bool:
        large = np.arange(2_000_000.0)
        if comm.rank == 0:
            comm.send(large, 1)
        total = comm.all_reduce(np.ones(1), "sum")
        if comm.rank == 1:
            assert_same(comm.recv(0), large)
        return bool(total[0] == comm.world_size)

    assert all(on_each(shared_runtimes[2], body))
