"""Maps over nodes: what goes wrong with their items, with several ranks of a node at items at a time.

What maps give, and one rank for each node, is tested with those of one machine (tests/engine/test_map.py).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import pids, same_workers, wait_for, wait_until_dead
from support.nodes import agents, assert_maps, kill_and_hear, num_unread

import synk
from synk.errors import CallCancelled, WorkerDied


def stay(gate: Path, *, but: Callable[[int], bool] = lambda n: False) -> Callable[[int], int]:
    """Return a function that tells at which rank an item is, and stays until the gate opens; not for some items."""

    def step(n: int) -> int:
        (gate / f"{n} at {synk.comm.rank}").touch()
        while not but(n) and not (gate / "open").exists():
            time.sleep(0.005)
        return n

    return step


def are_at(gate: Path, num_items: int) -> Callable[[], bool]:
    return lambda: len(list(gate.glob("* at *"))) >= num_items


def rank_of(gate: Path, item: int) -> int:
    (path,) = gate.glob(f"{item} at *")
    return int(path.name.rsplit(" ", 1)[1])


def test_large_results_of_a_single_node() -> None:
    """No other rank is on another machine, but the program may be."""
    with synk.fork(2, cluster="here", nodes=1) as rt:
        found = [*rt.map(lambda n: np.full((1 << 17, 2), n + 0.5), range(3))]
        for n, each in enumerate(found):
            np.testing.assert_array_equal(each, np.full((1 << 17, 2), n + 0.5))
        assert_maps(rt)


# -- one rank ---------------------------------------------------------------------------------------------------------


def test_results_before_an_exception_on_another_node_are_given(nodes: synk.Runtime, tmp_path: Path) -> None:
    """The item that fails is answered first."""

    def step(n: int) -> int:
        if n == 3:
            (tmp_path / "failed").touch()
            return n // 0
        while not (tmp_path / "failed").exists():
            time.sleep(0.005)
        return n

    got = []
    with same_workers(nodes), pytest.raises(ZeroDivisionError):
        for n in nodes.map(step, range(8), batch_size=1):
            got.append(n)
    assert got == [0, 1, 2]


def test_a_worker_dies_idle_while_its_node_is_at_items(nodes: synk.Runtime, tmp_path: Path) -> None:
    """It is replaced when those have ended, and its item is lost to nobody."""
    step = stay(tmp_path, but=lambda n: n in (3, 4))

    def items() -> Iterator[int]:
        yield from range(4)
        assert wait_for(are_at(tmp_path, 4))
        os.kill(before[rank_of(tmp_path, 3)], signal.SIGKILL)
        assert wait_for(lambda: "ended with SIGKILL" in nodes.where())  # its agent has seen it
        (tmp_path / "open").touch()
        yield 4

    gc.collect()  # a replacement gets no item while it lacks a resident object, such as one that another test left
    before = pids(nodes)
    with pytest.warns(RuntimeWarning, match=r"rank \d .*was started again"):
        assert list(nodes.map(step, items(), batch_size=1)) == list(range(5))
        assert_maps(nodes)
    assert [mine == his for mine, his in zip(pids(nodes), before)].count(False) == 1


def test_a_replacement_dies_at_its_first_item(reused: Any) -> None:
    """The warning that it was started again comes with its death."""
    rt = reused("1+1")

    def step(n: int) -> int:
        if synk.comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    kill_and_hear(rt, pids(rt)[1])
    with pytest.warns(RuntimeWarning, match="rank 1 .*was started again"), pytest.raises(WorkerDied, match="rank 1 "):
        list(rt.map(step, itertools.count(), batch_size=1))
    assert_maps(rt)


# -- beside other things ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_worker_that_lacks_a_resident_object_gets_no_item(nodes: synk.Runtime, tmp_path: Path) -> None:
    """It was replaced in the middle of the map, while another node was at an item."""
    kept = nodes.resident({"k": 5})
    wait = stay(tmp_path, but=lambda n: n > 0)

    def step(n: int) -> int:
        time.sleep(0.02)  # no rank can take them all
        return wait(n) + int(kept.value["k"])

    def items() -> Iterator[int]:
        yield from range(4)
        assert wait_for(are_at(tmp_path, 4))
        rank = next(rank for rank in (3, 2, 1) if rank != rank_of(tmp_path, 0))
        os.kill(before[rank], signal.SIGKILL)
        assert wait_until_dead(before[rank])
        threading.Timer(1.0, (tmp_path / "open").touch).start()
        yield from range(4, 30)

    before = pids(nodes)
    got: list[int] = []
    with contextlib.suppress(WorkerDied):  # it was at an item
        got += nodes.map(step, items(), batch_size=1)
    assert got == [n + 5 for n in range(len(got))]
    assert list(nodes.map(lambda n: n + kept.value["k"], range(20), batch_size=1)) == [n + 5 for n in range(20)]


def test_messages_that_meet_on_their_way(reused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side can send before the other has read: the agent, which has many answers, reads first."""
    monkeypatch.setattr("synk._engine.pool.LONG_NS", 10**15)  # items wait behind others, whatever those take
    rt = reused("1+7")
    (_, agent), row = agents(rt), np.zeros(7500)

    def items() -> Iterator[tuple[int, np.ndarray]]:
        for n in range(60):
            if n == 30:  # those before it end, and the agent has more answers than the head has room for
                (tmp_path / "open").touch()
                assert wait_for(lambda: num_unread(rt, 1) >= 1)
                os.kill(agent, signal.SIGSTOP)
                threading.Timer(0.5, os.kill, (agent, signal.SIGCONT)).start()
            yield n, row

    def answered(item: tuple[int, np.ndarray]) -> tuple[int, np.ndarray]:
        while item[0] >= 18 and not (tmp_path / "open").exists():
            time.sleep(0.005)
        return item[0], item[1] + item[0]

    for n, (k, found) in enumerate(rt.map(answered, items(), batch_size=1)):
        assert n == k
        np.testing.assert_array_equal(found, row + n)


# -- at random --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_whatever_dies_results_are_right_as_far_as_they_come(
    reused: Any, tmp_path: Path, storm_count: Callable[[int], int], subtests: Any
) -> None:
    runtimes = reused("1+3"), reused("2+2")
    for seed in range(storm_count(8)):
        rng, rt = random.Random(seed), runtimes[seed % 2]
        length, size = rng.randrange(1, 60), rng.choice([None, 1, 2, 7])
        fatal, fault = rng.randrange(length), rng.choice(["in an item", *_FAULTS])
        with subtests.test(case=f"{seed}: {fault} at {fatal} of {length}"):
            got = results_until(rt, length, size, fatal, fault, tmp_path / str(seed))
            assert got == [(n, bytes(n) * 100) for n in range(len(got))]
            assert_maps(rt)


_FAULTS: dict[str, Callable[[synk.Runtime, random.Random], None]] = {
    "agent": lambda rt, rng: kill_and_hear(rt, rng.choice(agents(rt))),
    "worker": lambda rt, rng: kill_and_hear(rt, rng.choice(pids(rt))),
    "interrupt": lambda rt, rng: rt.interrupt(),
}


def results_until(rt: synk.Runtime, length: int, size: int | None, fatal: int, fault: str, flag: Path) -> list[Any]:
    """Return the results of a map up to a fault: at an item, or when its result has come."""

    def step(n: int) -> tuple[int, bytes]:
        if fault == "in an item" and n == fatal and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return n, bytes(n) * 100

    got: list[Any] = []
    try:
        for result in rt.map(step, range(length), batch_size=size):
            got.append(result)
            if fault in _FAULTS and len(got) - 1 == fatal:
                _FAULTS[fault](rt, random.Random(fatal))
    except (WorkerDied, CallCancelled):
        return got
    assert len(got) == length
    return got
