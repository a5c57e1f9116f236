"""Ranks are counted within the call, whichever of the runtime's run it. NumPy is the oracle."""

from __future__ import annotations

import os
import pickle
import signal
from typing import Any

import numpy as np
import pytest
from support.rank_arrays import assert_same
from test_comm_collectives import Case, perform

import synk
from synk.errors import WorkerDied

CHOSEN = [(0, 2), (1, 2), (2,), (0, 1, 2)]


def rows_of(ranks: tuple[int, ...]) -> list[int]:
    """Return rows of a sharded variable with two rows for each of three ranks."""
    return [2 * rank for rank in ranks]


def everything(comm: Any, name: str) -> bool:
    """Check collectives and messages of this rank, of which there are ``comm.world_size``."""
    rank, size = comm.rank, comm.world_size
    assert 0 <= rank < size == len(comm.ranks)
    cases = [Case.drawn(name, number, size) for number in range(9)]
    assert [text for text, _ in perform(comm, cases) if text] == []
    comm.held = []
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (1, 50_000):  # through the ring, and more than that
        requests = [comm.irecv(before, tag) for tag in (1, 2, 3)]
        for tag in (3, 2, 1):
            comm.isend(np.full(count, rank + tag), after, tag)
        for tag, got in enumerate(comm.wait_all(requests), 1):
            assert_same(got, np.full(count, before + tag))
        comm.irecv(before, 9)  # a request that nobody waits for
        comm.isend(np.ones(count), after, 9)
    return True


@pytest.mark.parametrize("place", [3, "little memory", "1+2"])
def test_ranks_count_within_their_call(at: Any, place: Any, subtests: Any) -> None:
    runtime = at(place)
    x = runtime.shared(np.arange(6.0), sharded=True)

    def body(x: np.ndarray) -> Any:
        comm = synk.comm
        assert everything(comm, f"{place} {comm.ranks}")
        return repr((comm.rank, comm.world_size, comm.ranks, comm.ranks[comm.rank], float(x[0])))

    f = runtime.function(body, outputs=None)
    for ranks in CHOSEN:
        expected = [
            repr((ranks.index(rank), len(ranks), ranks, rank, 2.0 * rank)) if rank in ranks else None
            for rank in range(3)
        ]
        with subtests.test(case=f"ranks {ranks}"):
            assert f(x, batch=rows_of(ranks)) == expected
            assert f.submit(x, batch=rows_of(ranks)).result() == expected


@pytest.mark.parametrize("place", [0, 3, "1+2"])
def test_a_function_knows_its_rank_its_peers_and_their_rows(at: Any, place: Any) -> None:
    runtime = at(place)

    def who(x: np.ndarray) -> Any:
        comm = synk.comm
        assert comm is pickle.loads(pickle.dumps(comm)) is __import__("synk").comm
        return repr((comm.rank, comm.world_size, comm.ranks, comm.rows, comm.total_rows, len(x)))

    f, size = runtime.function(who, outputs=None), runtime.world_size
    for rows in (1, size, 2 * size + 1):
        lengths = [len(part) for part in np.array_split(np.zeros(rows), size)]
        ranks = tuple(rank for rank, length in enumerate(lengths) if length)
        expected = [repr((rank, len(ranks), ranks, lengths[rank], rows, lengths[rank])) for rank in ranks]
        assert f(np.zeros(rows)) == expected + [None] * (size - len(ranks))
    assert f.serial(np.zeros(9))[0] == repr((0, 1, (0,), 9, 9, 9))
    rowless = runtime.function(
        lambda: (synk.comm.ranks, synk.comm.total_rows, synk.comm.device), outputs=None, per_rank=True
    )
    device_names = [name.partition(":")[2] if "node" in name else name for name in runtime.devices]
    assert rowless() == [(tuple(range(size)), size, name) for name in device_names]


@pytest.mark.parametrize("place", [0, "1+2"])
def test_a_serial_call_and_one_row_have_one_rank(at: Any, place: Any) -> None:
    rt = at(place)
    f = rt.function(lambda x: everything(synk.comm, "alone") and synk.comm.world_size, outputs=None)
    for found in (f.serial(np.zeros(7)), f(np.zeros(1)), f.submit(np.zeros(1)).result()):
        assert found[0] == 1 and not any(found[1:])


def test_outside_of_a_call_a_rank_is_that_of_the_runtime() -> None:
    """In ``on_restart`` of a worker whose place was the first one in the call that ended it."""
    seen: list[Any] = []

    def prepare() -> None:
        for size in (3, 1 << 17):
            with pytest.raises(ValueError, match="cannot communicate outside of a call: got a collective"):
                synk.comm.all_reduce(np.ones(size), "sum")
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
