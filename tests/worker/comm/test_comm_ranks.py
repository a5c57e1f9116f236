"""Ranks are counted within the call, whichever of the runtime's run it; what receives refuse. NumPy is the oracle."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers

import synk
from synk.errors import CollectiveMismatch, UnsupportedError, WorkerDied

CHOSEN = [(0, 2), (1, 2), (2,), (0, 1), (0, 1, 2)]
COUNTS = (1, 140_000)
"""Through the ring, and through the outbox; collectives of three ranks in one piece, and in two."""


def rows_of(ranks: tuple[int, ...]) -> list[int]:
    """Return rows of a sharded variable with two rows for each of three ranks."""
    return [2 * rank for rank in ranks]


def everything(comm: Any, count: int) -> bool:
    """Check each collective and message of this rank, of which there are ``comm.world_size``."""
    rank, size = comm.rank, comm.world_size
    assert 0 <= rank < size == len(comm.ranks)

    def of(place: int) -> np.ndarray:
        return np.random.default_rng(place).integers(-9, 10, size * count).astype("f8")

    mine, everyone = of(rank), [of(place) for place in range(size)]
    total, blocks = sum(everyone), [each.reshape(size, count) for each in everyone]
    same = np.testing.assert_array_equal
    same(comm.all_reduce(mine, "sum"), total)
    same(comm.all_gather(mine), np.stack(everyone))
    same(comm.all_gather(mine, axis=0), np.concatenate(everyone))
    same(comm.reduce_scatter(mine, "sum"), total.reshape(size, count)[rank])
    same(comm.all_to_all(mine), np.concatenate([each[rank] for each in blocks]))
    for root in range(size):
        same(comm.broadcast(mine, root), everyone[root])
        same(comm.ibroadcast(mine, np.int64(root)).wait(), everyone[root])
        reduced, gathered = comm.reduce(mine, "max", root), comm.gather(mine, root)
        assert (reduced is None) == (gathered is None) == (rank != root)
        if rank == root:
            same(reduced, np.max(everyone, axis=0))
            same(gathered, np.concatenate(everyone))
        same(comm.scatter(mine if rank == root else None, root), blocks[root][rank])
    after, before, place = (rank + 1) % size, (rank - 1) % size, np.empty(size * count)
    requests = [comm.irecv(before, 1), comm.irecv(before, 2, out=place), comm.irecv(before, 3, like=place)]
    started = comm.iall_reduce(mine, "sum")
    for tag in (3, 2, 1):
        comm.isend(mine + tag, after, tag)
    for tag, got in reversed(list(enumerate(comm.wait_all(requests), 1))):
        same(got, everyone[before] + tag)
    same(started.wait(), total)
    comm.isend(mine, after)
    same(comm.recv(before), everyone[before])
    comm.barrier()
    comm.irecv(before, 9)  # a request that nobody waits for
    comm.isend(mine, after, 9)
    return True


@pytest.mark.parametrize("where", [3, "1+2"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("ranks", CHOSEN, ids=str)
@pytest.mark.sampled(90)
def test_ranks_count_within_their_call(where: Any, shared_runtimes: Any, ranks: tuple[int, ...], count: int) -> None:
    rt = shared_runtimes[where]
    x = rt.shared(np.arange(6.0), sharded=True)

    def body(x: np.ndarray) -> Any:
        comm = synk.comm
        assert everything(comm, count)
        return repr((comm.rank, comm.world_size, comm.ranks, comm.ranks[comm.rank], float(x[0])))

    f = rt.function(body, outputs=None)
    expected = [
        repr((ranks.index(rank), len(ranks), ranks, rank, 2.0 * rank)) if rank in ranks else None for rank in range(3)
    ]
    for _ in range(2):
        assert f(x, batch=rows_of(ranks)) == expected
        assert f.submit(x, batch=rows_of(ranks)).result() == expected


@pytest.mark.parametrize("where", [1, 2, 3, "inline"])
def test_a_serial_call_and_one_row_have_one_rank(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    f = rt.function(
        lambda x: (everything(synk.comm, 5), repr((synk.comm.rank, synk.comm.world_size))), outputs=(None, None)
    )
    for flags, facts in (f.serial(np.zeros(7)), f(np.zeros(1)), f.serial(np.zeros(1)), f.submit(np.zeros(1)).result()):
        assert (flags[0], facts[0]) == (True, "(0, 1)")
        assert {*flags[1:], *facts[1:]} <= {None}


@pytest.mark.parametrize("where", [1, 2, 3, "inline"])
def test_a_program_with_neighbours_is_its_own_oracle(shared_runtimes: Any, where: Any) -> None:
    """A heat equation in one dimension, by parallel calls of any number of rows, serially, and by NumPy."""
    rt = shared_runtimes[where]

    def heat(points: np.ndarray) -> np.ndarray:
        comm, now = synk.comm, np.pad(points, 1)
        for _ in range(5):
            if comm.rank > 0:
                comm.isend(now[1:2], comm.rank - 1)
            if comm.rank < comm.world_size - 1:
                comm.isend(now[-2:-1], comm.rank + 1)
                comm.recv(comm.rank + 1, out=now[-1:])
            if comm.rank > 0:
                comm.recv(comm.rank - 1, out=now[:1])
            now[1:-1] += 0.3 * (now[:-2] - 2 * now[1:-1] + now[2:])
        return now[1:-1]

    def plain(points: np.ndarray) -> np.ndarray:
        now = np.pad(points, 1)
        for _ in range(5):
            now[1:-1] += 0.3 * (now[:-2] - 2 * now[1:-1] + now[2:])
        return now[1:-1]

    f = rt.function(heat, outputs="gather")
    for rows in (1, 2, 3, 4, 17):
        points = np.random.default_rng(rows).random(rows)
        for found in (f(points), f.serial(points)):
            np.testing.assert_array_equal(found, plain(points))


@pytest.mark.parametrize("where", [3, "1+2"])
def test_errors_name_the_ranks_of_the_runtime(where: Any, shared_runtimes: Any) -> None:
    rt = shared_runtimes[where]
    x = rt.shared(np.arange(6.0), sharded=True)
    f = rt.function(lambda x: synk.comm.recv(1 - synk.comm.rank, 4), outputs=None)
    with same_workers(rt), pytest.raises(CollectiveMismatch) as caught:
        f(x, batch=rows_of((1, 2)))
    assert "rank 1: recv(any array, from rank 2, tag 4); rank 2: recv(any array, from rank 1" in str(caught.value)
    with same_workers(rt), pytest.raises(ValueError, match=r"got peer=1, expected .* an int from 0 to 0\."):
        f.serial(np.zeros(4))


def test_each_rank_draws_from_its_own_stream_whoever_takes_part() -> None:
    streams = [np.random.default_rng(each) for each in np.random.SeedSequence(7).spawn(3)]
    with synk.Runtime(3, backend="numpy", seed=7) as rt:
        x = rt.shared(np.arange(6.0), sharded=True)
        draw = rt.function(lambda x: float(synk.comm.rng.random()), outputs=None)
        for ranks in ((2,), (1, 2), (0, 1, 2), (0, 2)):
            expected = [streams[rank].random() if rank in ranks else None for rank in range(3)]
            assert draw(x, batch=rows_of(ranks)) == expected


def test_outside_of_a_call_a_rank_is_that_of_the_runtime() -> None:
    """In ``on_restart`` of a worker whose place was the first one in the call that ended it."""
    seen: list[Any] = []

    def prepare() -> None:
        seen.append((synk.comm.rank, synk.comm.world_size, synk.comm.ranks))

    def body(x: np.ndarray, is_last: bool) -> Any:
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return repr((synk.comm.rank, synk.comm.world_size, *seen))

    with synk.Runtime(3, backend="numpy", on_restart=prepare) as rt:
        x = rt.shared(np.arange(6.0), sharded=True)
        f = rt.function(body, bcast_inputs="is_last", outputs=None)
        assert f(x, False, batch=rows_of((2,))) == [None, None, "(0, 1)"]
        with pytest.raises(WorkerDied):
            f(x, True, batch=rows_of((2,)))
        assert f(x, False, batch=rows_of((1, 2))) == [None, "(0, 2)", "(1, 2, (2, 3, (0, 1, 2)))"]


# ----- what is refused


@pytest.mark.parametrize("verb", ["recv", "irecv"])
@pytest.mark.parametrize(
    ("peer", "error"),
    [
        (np.zeros(3), TypeError),
        (np.array(0), TypeError),
        ([0], TypeError),
        (None, TypeError),
        (0.0, TypeError),
        (False, TypeError),
        ("0", TypeError),
        (-1, ValueError),
        (2, ValueError),
        (np.int64(-2), ValueError),
    ],
    ids=str,
)
@pytest.mark.sampled(90)
def test_a_receive_takes_a_rank_first(shared_runtimes: Any, verb: str, peer: Any, error: type[Exception]) -> None:
    """The buffer of MPI's form is not taken for one: nothing would fill it."""
    rt = shared_runtimes[2]

    def body(x: np.ndarray, is_busy: bool) -> Any:
        if is_busy:  # the short path is open
            synk.comm.send(x, 1 - synk.comm.rank)
            synk.comm.recv(1 - synk.comm.rank)
        return getattr(synk.comm, verb)(peer, 1)

    f = rt.function(body, bcast_inputs="is_busy", outputs=None)
    for is_busy in (False, True):
        with same_workers(rt), pytest.raises(error, match=r"cannot recv: got peer=.*int from 0 to 1\. .*out=array"):
            f(np.zeros(2), is_busy)


def test_the_place_of_like_and_out_is_by_name(shared_runtimes: Any) -> None:
    for wrong in (lambda x: synk.comm.recv(x, 1, 5), lambda x: synk.comm.irecv(None, 1, 5)):
        with pytest.raises(TypeError, match="positional"):
            shared_runtimes[2].function(wrong, outputs=None)(np.zeros(2))


STRANGE = {
    "str32": np.array(["a"]),
    "datetime64[D]": np.array(["2020-01-01"], "M8[D]"),
    "timedelta64[s]": np.array([1], "m8[s]"),
    "bytes16": np.array([b"ab"]),
    "void64": np.zeros(1, "i4,f4"),
}
VERBS: dict[str, Any] = {
    "send": lambda comm, x: comm.send(x, 0),
    "isend": lambda comm, x: comm.isend(x, 0),
    "recv": lambda comm, x: comm.recv(0, like=x),
    "irecv": lambda comm, x: comm.irecv(0, out=x.copy()),
    "gather": lambda comm, x: comm.gather(x),
    "scatter": lambda comm, x: comm.scatter(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "broadcast": lambda comm, x: comm.broadcast(x),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_gather along an axis": lambda comm, x: comm.all_gather(x, 0),
    "all_reduce": lambda comm, x: comm.all_reduce(x, "max"),
    "reduce": lambda comm, x: comm.reduce(x, "max"),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x, "max"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_errors_of_dtypes_name_the_dtype(shared_runtimes: Any, verb: str) -> None:
    """And nothing has been started: the rank may go on."""
    rt = shared_runtimes["inline"]
    communicate = VERBS[verb]

    def body(x: np.ndarray) -> float:
        for name, array in STRANGE.items():
            with pytest.raises(UnsupportedError, match=f"dtype {name!r}".replace("[", r"\[")):
                communicate(synk.comm, array)
        synk.comm.send(x, 0)
        return float(synk.comm.all_reduce(synk.comm.recv(0), "sum").sum())

    assert rt.function(body, outputs="first")(np.arange(3.0)) == 3.0
