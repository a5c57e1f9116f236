"""What functions start by ``synk.comm`` and wait for later, through a real runtime; NumPy is the oracle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers
from support.rank_arrays import assert_same, everywhere

import synk
from synk.errors import CollectiveMismatch

EVERYWHERE = (1, 2, 3, "inline")
COUNTS = (0, 1, 1000, 700_001)
"""Nothing, a number, a half, and several pieces of an odd length."""


def on_each(rt: Any, body: Callable[[Any], Any]) -> list[Any]:
    """Return ``body(synk.comm)`` of every rank."""
    return rt.function(lambda x: body(synk.comm), outputs=None, name="body")(np.zeros(rt.world_size))


def values(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(-9, 10, count).astype("f8")


# ----- collectives that are started


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.sampled(90)
def test_started_collectives_give_what_those_that_wait_give(shared_runtimes: Any, where: Any, count: int) -> None:
    """All kinds in one row, waited for in reverse, with one that waits and messages in between."""
    rt = shared_runtimes[where]
    size = rt.world_size
    total = sum(values(rank, count) for rank in range(size))
    blocks = sum(values(rank, size * count) for rank in range(size)).reshape(size, count)

    def body(comm: Any) -> bool:
        mine, rank = values(comm.rank, count), comm.rank
        kept = mine.copy()
        place = np.empty(count)
        requests = [
            comm.iall_reduce(mine, "sum"),
            comm.iall_reduce(mine, "sum", out=place),
            comm.ibroadcast(mine, size - 1),
            comm.iall_gather(mine),
            comm.ireduce_scatter(values(rank, size * count), "sum"),
            comm.ibarrier(),
        ]
        np.testing.assert_array_equal(comm.all_reduce(np.ones(3), "sum"), np.full(3, size))
        results = [request.wait() for request in reversed(requests)][::-1]
        assert results[5] is None
        assert results[1] is place
        np.testing.assert_array_equal(results[0], total)
        np.testing.assert_array_equal(place, total)
        np.testing.assert_array_equal(results[2], values(size - 1, count))
        np.testing.assert_array_equal(results[3], np.stack([values(each, count) for each in range(size)]))
        np.testing.assert_array_equal(results[4], blocks[rank])
        np.testing.assert_array_equal(mine, kept)
        assert comm.wait_all(requests[:1])[0] is results[0]
        return all(request.test() for request in requests)

    assert all(on_each(rt, body))


def test_a_started_average_weighs_by_rows_or_as_told(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    x = np.random.default_rng(0).normal(size=(7, 3))

    def mean_of(x: np.ndarray) -> Any:
        comm = synk.comm
        by_rows, told = comm.iall_reduce(x.mean(axis=0)), comm.iall_reduce(x.mean(axis=0), weight=len(x) / 7)
        return told.wait(), by_rows.wait()

    for got in rt.function(mean_of, outputs=("first", "first"))(x):
        np.testing.assert_allclose(got, x.mean(axis=0), rtol=1e-13)


def test_a_rank_that_waits_for_a_message_goes_on_with_what_it_has_started(shared_runtimes: Any) -> None:
    """Rank 1 sends only when the collective is done, which takes several meetings that rank 0 must come to."""
    rt = shared_runtimes[2]

    def body(comm: Any) -> float:
        request = comm.iall_reduce(np.full(COUNTS[-1], comm.rank + 1.0), "sum")
        if comm.rank == 0:
            assert comm.recv(1).tolist() == [4.0, 5.0]
        else:
            assert request.wait()[-1] == 3.0
            comm.send(np.array([4.0, 5.0]), 0)
        return float(request.wait()[0])

    assert on_each(rt, body) == [3.0, 3.0]


def test_test_never_waits_and_goes_on(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def body(comm: Any) -> bool:
        if comm.rank == 0:
            request = comm.iall_reduce(np.ones(4), "sum")
            assert not request.test()
            comm.send(np.zeros(1), 1)
        else:
            comm.recv(0)
            request = comm.iall_reduce(np.ones(4), "sum")
        while not request.test():
            pass
        return request.wait().tolist() == [2.0] * 4

    assert all(on_each(rt, body))


def test_what_nobody_waited_for_is_brought_to_its_end(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    out = rt.shared(np.zeros(3))

    def body(x: np.ndarray) -> int:
        place = np.empty(3)
        request = synk.comm.iall_reduce(np.ones(3), "sum", out=place)
        if synk.comm.rank == 0:
            request.wait()
        out.value = out.value + 1
        return 1

    assert rt.function(body, outputs="sum")(np.zeros(2)) == 2
    assert_same(everywhere(rt, out), [np.ones(3)] * 2)


def test_a_request_belongs_to_its_call(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    held: list[Any] = []  # each rank's own, and kept between calls

    def body(x: np.ndarray, turn: int) -> Any:
        if turn == 0:
            held.append(synk.comm.ibarrier())
            return 0
        return held[0].wait() if turn == 1 else held[0].test()

    f = rt.function(body, bcast_inputs="turn", outputs="max")
    f(np.zeros(2), 0)
    for turn in (1, 2):
        with same_workers(rt), pytest.raises(CollectiveMismatch, match="which is over"):
            f(np.zeros(2), turn)


def test_ranks_that_start_different_ones_are_told(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def body(comm: Any) -> Any:
        first = comm.iall_reduce(np.ones(2), "sum") if comm.rank else comm.iall_gather(np.ones(2))
        return first.wait()

    with same_workers(rt), pytest.raises(CollectiveMismatch, match=r"rank 0: all_gather.*rank 1: all_reduce"):
        on_each(rt, body)
    assert on_each(rt, lambda comm: float(comm.iall_reduce(np.ones(1), "sum").wait()[0])) == [2.0, 2.0]


def test_what_is_refused_has_not_been_started(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def body(comm: Any) -> float:
        before = comm.iall_reduce(np.ones(2), "sum")
        for wrong in (
            lambda: comm.iall_reduce(np.ones(2, int)),
            lambda: comm.iall_reduce(np.ones(2), "mean"),
            lambda: comm.iall_reduce(np.ones(2), out=np.empty(3)),
            lambda: comm.ibroadcast(np.ones(2), 7),
            lambda: comm.ireduce_scatter(np.ones(3)),
        ):
            with pytest.raises((TypeError, ValueError), match="cannot"):
                wrong()
        return float(before.wait()[0] + comm.all_reduce(np.ones(1), "sum")[0])

    assert on_each(rt, body) == [4.0, 4.0]


def test_comm_in_another_thread(shared_runtimes: Any) -> None:
    """As autograd's on devices: one caller at a time, whichever thread it is."""
    rt = shared_runtimes[2]

    def body(comm: Any) -> float:
        found: list[Any] = []

        def run() -> None:
            found.append(comm.all_reduce(np.ones(1), "sum"))
            comm.send(np.ones(2), 1 - comm.rank)
            found.append(comm.recv(1 - comm.rank))
            found.append(request.wait())

        request = comm.iall_reduce(np.ones(2), "sum")
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return float(sum(each.sum() for each in found) + comm.all_reduce(np.ones(1), "sum")[0])

    assert on_each(rt, body) == [2.0 + 2.0 + 4.0 + 2.0] * 2


# ----- messages


@pytest.mark.parametrize("where", [2, "inline"])
def test_a_message_brings_its_shape_and_dtype(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    size = rt.world_size
    arrays = [
        np.arange(count).astype(dtype).reshape(shape)
        for dtype in ("f8", "f4", "i2", "u1", "c16", "?", "longdouble", ">f8")
        for count, shape in ((1, ()), (0, (0,)), (0, (3, 0)), (5, (5,)), (6, (2, 3)), (24, (2, 1, 3, 1, 2, 2)))
    ]
    arrays += [np.arange(90_000.0).reshape(300, 300), np.arange(12.0).reshape(3, 4).T, np.arange(9.0)[::2]]

    def body(comm: Any) -> bool:
        peer = (comm.rank + 1) % size
        for array in arrays:
            comm.send(array, peer, 7)
            got = comm.recv((comm.rank - 1) % size, 7)
            assert got.dtype == array.dtype.newbyteorder("=")
            assert got.flags.writeable
            assert got.shape == array.shape
            np.testing.assert_array_equal(got, array)
            comm.send(array, peer)
            like, out = np.zeros_like(got), np.zeros_like(got)
            got = comm.recv((comm.rank - 1) % size, like=like)
            np.testing.assert_array_equal(got, array)
            comm.send(array, peer)
            assert comm.recv((comm.rank - 1) % size, out=out) is out
            np.testing.assert_array_equal(out, array)
            assert not like.any()
        return True

    assert all(on_each(rt, body))


@pytest.mark.parametrize("count", [1, 5, 100_000])
def test_a_message_that_nobody_receives_is_an_error_at_any_size(shared_runtimes: Any, count: int) -> None:
    rt = shared_runtimes[2]
    w = rt.shared(np.zeros(2))

    def body(x: np.ndarray, how: int) -> float:
        comm, rank = synk.comm, synk.comm.rank
        w.value = w.value + 1
        if rank == 0:
            comm.send(np.ones(count), 1, 4)
        if how == 1 and rank == 1:  # takes it in, and does not ask for it
            comm.send(np.ones(1), 0)
        if how == 1 and rank == 0:
            comm.recv(1)
            comm.send(np.ones(1), 1, 5)
        if how == 1 and rank == 1:
            comm.recv(0, 5)
        if how == 2:
            comm.barrier()
        return 0.0

    f = rt.function(body, bcast_inputs="how")
    for how in range(3):
        text = rf"send\(float64, {count} elements, to rank 1, tag 4\)"
        with same_workers(rt), pytest.raises(CollectiveMismatch, match=text):
            f(np.zeros(2), how)
    assert_same(everywhere(rt, w), [np.zeros(2)] * 2)
    assert on_each(rt, lambda comm: comm.rank) == [0, 1]


@pytest.mark.parametrize("where", [1, "inline"])
def test_a_message_to_oneself(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]

    def body(comm: Any) -> float:
        comm.send(np.arange(4.0), 0, 1)
        comm.send(np.arange(3.0), 0, 2)
        return float(comm.recv(0, 2).sum() + comm.recv(0, 1).sum())

    assert on_each(rt, body) == [9.0]
    with pytest.raises(CollectiveMismatch, match="rank 0 left the function without receiving"):
        on_each(rt, lambda comm: comm.send(np.arange(4.0), 0, 1))


@pytest.mark.parametrize("num_calls", [2, pytest.param(10, marks=pytest.mark.storm)])
def test_ranks_that_all_receive_are_told_alike(shared_runtimes: Any, num_calls: int) -> None:
    """Whoever finds it first: the text names them all."""
    rt = shared_runtimes[3]
    for _ in range(num_calls):
        with same_workers(rt), pytest.raises(CollectiveMismatch) as caught:
            on_each(rt, lambda comm: comm.recv((comm.rank + 1) % 3, comm.rank))
        for rank in range(3):
            assert f"rank {rank}: recv(any array, from rank {(rank + 1) % 3}, tag {rank})" in str(caught.value)


@pytest.mark.parametrize("where", EVERYWHERE)
def test_an_array_may_be_changed_after_isend_and_its_messages_come_in_order(shared_runtimes: Any, where: Any) -> None:
    """Below, at and above the size of a ring, several of one tag, waited for in reverse."""
    rt = shared_runtimes[where]
    size = rt.world_size
    ring = (1 << 20) // size
    counts = [0, 1, 4, 5, 1000, ring - 32, ring - 31, ring, ring + 1, 3 * ring]

    def body(comm: Any) -> bool:
        after, before = (comm.rank + 1) % size, (comm.rank - 1) % size
        requests = [comm.irecv(before, 3) for _ in counts]
        for number, count in enumerate(counts):
            array = np.full(count, number, np.uint8)
            assert comm.isend(array, after, 3).wait() is None
            array += 100
        for number, count in reversed(list(enumerate(counts))):
            np.testing.assert_array_equal(requests[number].wait(), np.full(count, number, np.uint8))
        return True

    assert all(on_each(rt, body))


def test_messages_of_70_mb_in_both_directions_at_once(shared_runtimes: Any) -> None:
    """More than the memory that is kept for them: one that waits for its receiver, and two that do not."""
    rt, count = shared_runtimes[2], 70_000_000 // 8

    def body(comm: Any) -> bool:
        peer = 1 - comm.rank
        expected = [np.arange(float(count)) + 10 * peer + number for number in range(3)]
        requests = [comm.irecv(peer, 1), comm.irecv(peer, 2, like=np.empty(count))]
        array = np.arange(float(count)) + 10 * comm.rank
        comm.send(array, peer)
        for tag in (1, 2):
            array += 1
            comm.isend(array, peer, tag)
        array[:] = -1
        last, first = requests[1].wait(), requests[0].wait()
        got = [comm.recv(peer, out=array), first, last]
        assert got[0] is array
        return all(np.array_equal(*pair) for pair in zip(got, expected))

    assert all(on_each(rt, body))


def test_the_kth_irecv_gets_the_kth_message(shared_runtimes: Any) -> None:
    """Also where a recv comes between them, and where the messages are there before they are asked for."""
    rt = shared_runtimes[2]

    def body(comm: Any) -> str:
        if comm.rank == 0:
            for number in range(6):
                comm.isend(np.full(3, float(number)), 1)
            comm.isend(np.zeros(1), 1, 9)
            return ""
        first, second = comm.irecv(0), comm.irecv(0, like=np.empty(3))
        third = comm.recv(0)
        comm.recv(0, 9)  # with everything before it taken in
        place = np.empty(3)
        fourth, fifth = comm.irecv(0, out=place), comm.irecv(0)
        sixth = comm.recv(0)
        assert fourth.test() and fifth.test()
        found = [fifth.wait(), fourth.wait(), second.wait(), first.wait(), third, sixth]
        assert found[1] is place
        return repr([float(each[0]) for each in found])

    assert on_each(rt, body)[1] == repr([4.0, 3.0, 1.0, 0.0, 2.0, 5.0])


def test_isend_does_not_wait_for_its_receiver(shared_runtimes: Any) -> None:
    """Rank 1 looks for the large message only when it has got what rank 0 sends after it."""
    rt = shared_runtimes[2]
    count = 1_000_000

    def body(comm: Any) -> bool:
        if comm.rank == 0:
            comm.isend(np.arange(float(count)), 1, 1)
            comm.barrier()
            comm.isend(np.ones(1), 1, 2)
            return bool(comm.all_reduce(np.ones(1), "sum")[0] == 2)
        comm.barrier()
        assert comm.recv(0, 2)[0] == 1
        assert comm.all_reduce(np.ones(1), "sum")[0] == 2
        return bool((comm.recv(0, 1) == np.arange(float(count))).all())

    assert all(on_each(rt, body))


def test_what_was_asked_for_and_not_waited_for_is_brought_to_its_end(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def body(comm: Any, how: int) -> bool:
        request = comm.irecv(1 - comm.rank)
        if comm.rank or not how:
            comm.isend(np.ones(300_000), 1 - comm.rank)
        return request is not None

    assert all(on_each(rt, lambda comm: body(comm, 0)))
    with same_workers(rt), pytest.raises(CollectiveMismatch, match="left the function without sending"):
        on_each(rt, lambda comm: body(comm, 1))


def test_a_request_that_is_tested_again_and_again_fails_when_the_sender_leaves(shared_runtimes: Any) -> None:
    def poll(comm: Any) -> None:
        if not comm.rank:
            request = comm.irecv(1)
            while not request.test():
                pass

    rt = shared_runtimes[2]
    with same_workers(rt), pytest.raises(CollectiveMismatch, match="left the function without sending"):
        rt.function(lambda x: poll(synk.comm), outputs=None)(np.zeros(2), timeout=20)


# ----- blocks of rows


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("dtype", ["f4", "i8", "?"])
@pytest.mark.sampled(90)
def test_gather_scatter_and_all_to_all_move_blocks_of_rows(shared_runtimes: Any, where: Any, dtype: str) -> None:
    rt = shared_runtimes[where]
    size = rt.world_size

    def rows(rank: int, count: int) -> np.ndarray:
        return np.random.default_rng(rank).integers(0, 2, (count, 3)).astype(dtype)

    for length in (1, 40_000):
        uneven = [length * (rank % 3) for rank in range(size)]

        def body(comm: Any) -> bool:
            rank = comm.rank
            for sizes in ([length] * size, uneven):  # noqa: B023
                whole = np.concatenate([rows(each, sizes[each]) for each in range(size)])
                bounds = np.cumsum([0, *sizes])
                for root in range(size):
                    for given in (None, sizes):
                        gathered = comm.gather(rows(rank, sizes[rank]), root, sizes=given)
                        assert (gathered is None) == (rank != root)
                        if rank == root:
                            np.testing.assert_array_equal(gathered, whole)
                    given = None if sizes is not uneven else sizes  # noqa: B023
                    block = comm.scatter(whole if rank == root else None, root, sizes=given)
                    np.testing.assert_array_equal(block, whole[bounds[rank] : bounds[rank + 1]])
                    block += block  # new, and nobody else's
                for axis in (0, 1, -1):
                    joined = comm.all_gather(np.moveaxis(rows(rank, sizes[rank]), 0, axis), axis)
                    np.testing.assert_array_equal(joined, np.moveaxis(whole, 0, axis))
                    joined += joined
                got = comm.all_to_all(np.roll(rows(rank, sum(sizes)), 1), sizes=given)
                mine = [np.roll(rows(each, sum(sizes)), 1)[bounds[rank] : bounds[rank + 1]] for each in range(size)]
                np.testing.assert_array_equal(got, np.concatenate(mine))
            return True

        assert all(on_each(rt, body))


@pytest.mark.parametrize(
    ("bodies", "error", "words"),
    [
        ([lambda comm: comm.gather(np.ones(2)), lambda comm: comm.barrier()], CollectiveMismatch, "gather"),
        ([lambda comm: comm.gather(np.ones(2), comm.rank)], CollectiveMismatch, "root 0.*root 1"),
        ([lambda comm: comm.gather(np.ones((2, comm.rank + 1)))], CollectiveMismatch, "1 elements.*2 elements"),
        ([lambda comm: comm.gather(np.ones((2, *((2, 3) if comm.rank else (3, 2)))))], CollectiveMismatch, r"\(2, 3\)"),
        ([lambda comm: comm.gather(np.float64(1))], ValueError, "without axes"),
        ([lambda comm: comm.gather(np.ones(2), sizes=[1, 2])], ValueError, "the number of its rows"),
        ([lambda comm: comm.gather(np.ones(2), 5)], ValueError, "root=5"),
        ([lambda comm: comm.all_gather(np.ones(1), *[0] * comm.rank)], CollectiveMismatch, "along an axis"),
        ([lambda comm: comm.all_gather(np.ones((2, 3)), comm.rank)], CollectiveMismatch, "2 elements|3 elements"),
        ([lambda comm: comm.all_gather(np.ones(2), 1)], ValueError, "axis"),
        ([lambda comm: comm.all_gather(np.float64(1), 0)], ValueError, "without axes"),
        ([lambda comm: comm.scatter(np.ones(3))], ValueError, "multiple of 2"),
        ([lambda comm: comm.scatter(np.ones(3), sizes=[1, 1])], ValueError, "as many in all"),
        ([lambda comm: comm.all_to_all(np.ones(3), sizes=[4, -1])], ValueError, "each of the 2 ranks"),
        ([lambda comm: comm.all_to_all(np.ones(3), sizes=[3])], ValueError, "each of the 2 ranks"),
        ([lambda comm: comm.isend(np.ones(3), 1, -1)], ValueError, "tag=-1"),
        ([lambda comm: comm.recv(1, 0.5)], ValueError, "tag=0.5"),
        ([lambda comm: comm.irecv(1, like=np.ones(3), out=np.ones(4))], ValueError, "out"),
        ([lambda comm: comm.irecv(2)], ValueError, "peer=2"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(shared_runtimes: Any, bodies: Any, error: Any, words: str) -> None:
    rt = shared_runtimes[2]
    with same_workers(rt), pytest.raises(error, match=words):
        on_each(rt, lambda comm: bodies[comm.rank % len(bodies)](comm))
